"""The graph of a plan is held to its model file: right ones pass, edits that keep every law of the plan are refused."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import tapestry
import tapestry.api
from tapestry.compiler.model_evidence import arrays, compare
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import BuildError, LawError
from tapestry.ir.expr import Call, Const, Index, call
from tapestry.ir.graph import map_exprs
from tapestry.ir.index import dim
from tapestry.lift import lift, read_weight
from tapestry.lift.file.structure import load
from tapestry.plan.fusion import fused
from tapestry.rewrites.core.driver import simplify
from tapestry.runtime.feeds import random_feeds
from tapestry.verify.model import model_laws
from tapestry.verify.model.bodies import near
from tapestry.verify.model.cell_tolerance import same
from tapestry.verify.model.model_values import ModelFile, ReferenceValues
from tapestry.verify.model.rounded_inputs import within_rounding
from tests.support.command_line import run
from tests.support.faults import edited_build, graph_edits
from tests.support.faults.edited_model import mixed
from tests.support.faults.graph_edits_awkward import ALL_EDITS
from tests.support.halo_nets import GPU, network
from tests.support.small_models import MODELS, N, net

NO_PLACE = {"guard_dropped", "weight_at_another_place", "literal_scaled", "literal_negated"}
NO_PLACE |= {"zero_times_infinity_made_zero", "quotient_by_zero_made_zero", "root_of_a_negative_number_made_zero"}
NO_PLACE |= {"exponential_capped", "terms_that_are_nan_left_out_of_a_sum"}


def compared(path, feeds=None, **options):
    """The comparison of a model's simplified graph with its file."""
    lifted = lift(path)
    graph = simplify(lifted.graph)

    def read(name):
        return read_weight(path, graph.weights[name], graph.tensors[name], constants=lifted.constants)

    file = ModelFile(load(path), path.parent)
    return model_laws.check(graph, file, feeds or random_feeds(graph, 0), read, **options).counts


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_all_kinds_are_their_models(name, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(MODELS[name]().SerializeToString())
    counts = compared(path)
    assert counts["operations"] and counts["cells"] + counts["opaque nodes"] + counts["random operations"]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A build of a model with opaque nodes, bodies, guards and constants, on two devices, with a layout."""
    folder = tmp_path_factory.mktemp("edits")
    (folder / "mixed.onnx").write_bytes(mixed().SerializeToString())
    plan = tapestry.compile(folder / "mixed.onnx", devices=2, layouts=["y:0=2@d0"], topology="cpu", sharding=False)
    plan.save(folder / "good")
    verify_build(folder / "good")
    return folder / "good"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ALL_EDITS)
def test_edits_that_keep_every_law_of_the_plan_are_refused(kind, good, tmp_path):
    for seed in (kind, *(f"{kind} {n}" for n in range(5))):  # the first place may be one where nothing comes of it
        e = edited_build.load(good, random.Random(seed))
        before = e.graph
        if ALL_EDITS[kind](e) and edited_build.alters(before, e.graph):
            break
    else:
        assert kind in NO_PLACE or not e.build.report["transfers"], "the model has a place for every kind but these"
        return
    edited_build.save(e, tmp_path / "b")
    with pytest.raises((LawError, BuildError)) as refused:
        verify_build(tmp_path / "b")
    assert refused.value.where or "'" in refused.value.what


def test_a_build_without_its_model_says_that_nothing_was_compared(good, tmp_path):
    shutil.copytree(good, tmp_path / "b")
    e = edited_build.load(tmp_path / "b", random.Random(0))
    e.build = edited_build.replace(e.build, model="/nowhere/m.onnx")
    edited_build.save(e, tmp_path / "c")
    status, out, _ = run("verify", tmp_path / "c", "--json")
    row = json.loads(out)["evidence"][0]
    assert status == 0 and row["kind"] == "none" and "graph not compared" in row["why"]


@pytest.mark.slow
def test_verify_says_what_was_compared_with_what(good):
    status, out, _ = run("verify", good, "--json")
    row = json.loads(out)["evidence"][0]
    assert status == 0 and row["kind"] == "sampled cells" and "onnxruntime" in row["against"]
    assert row["counts"]["operations"] and row["counts"]["cells"] and row["power"]
    status, out, _ = run("verify", good)
    assert status == 0 and "Graph matches the model file (onnxruntime): " in out and "awkward" not in out
    assert "distinct" in run("verify", good, "-v")[1]


def test_constants_are_held_to_their_hashes_at_every_load(good, tmp_path):
    e = edited_build.load(good, random.Random(0))
    assert graph_edits.constants_zeroed(e)
    edited_build.save(e, tmp_path / "b")
    with pytest.raises(BuildError, match="constant"):
        tapestry.load(tmp_path / "b")


def test_weights_that_are_not_there_are_drawn(tmp_path):
    """A plan made without weights is compared on random ones."""
    info = helper.make_tensor_value_info
    weight = numpy_helper.from_array(np.ones((6, 6), np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = T.EXTERNAL
    weight.external_data.add(key="location", value="gone.bin")
    graph = helper.make_graph(
        [N("MatMul", ["x", "w"], ["y"])], "g", [info("x", T.FLOAT, [4, 6])], [info("y", T.FLOAT, None)], [weight]
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    plan = tapestry.compile(tmp_path / "m.onnx", weights=False)
    row = plan.evidence[0]
    assert row["kind"] == "sampled cells" and row["weights"].startswith("1 without data")


def test_sizes_that_depend_on_values_are_no_contradiction(tmp_path):
    """A Pad by amounts that come at run time: the file's own sizes hold for the user's amounts, not for any."""
    info, node = helper.make_tensor_value_info, N("Pad", ["x", "by"], ["y"])
    for declared in ([40, 6], [5, 60]):
        graph = helper.make_graph(
            [node], "g", [info("x", T.FLOAT, [3, 4]), info("by", T.INT64, [4])], [info("y", T.FLOAT, declared)]
        )
        path = tmp_path / f"m{declared[0]}.onnx"
        path.write_bytes(
            helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()
        )
        row = tapestry.compile(path).evidence[0]
        assert row["kind"] == "none" and "depend on values" in row["why"]


def test_a_rounding_at_its_edge_is_evidence_and_no_difference(tmp_path):
    """Whole numbers times and over 0.7: a float32 may end just below one, and its floor is another; float64 says otherwise."""
    nodes = [N("Mul", ["x", "c"], ["a"]), N("Div", ["a", "c"], ["b"]), N("Floor", ["b"], ["y"])]
    path = tmp_path / "m.onnx"
    path.write_bytes(net(nodes, {"x": (T.FLOAT, [4096])}, {"y": T.FLOAT}, {"c": np.array(0.7, np.float32)}).SerializeToString())
    feeds = {"x": np.arange(4096, dtype=np.float32)}
    off = np.count_nonzero(file_value(ModelFile(load(path), path.parent), feeds) != feeds["x"])
    assert off > 100 and compared(path, feeds=feeds, special=False)["by rounding"] > 0


def file_value(file, feeds):
    return ReferenceValues(file, feeds, {"y"}).values["y"]


def test_the_report_is_held_to_the_plan(good, tmp_path):
    for key, value in {"host_load_bytes": 1, "moves": ["none"], "gap": 0.5}.items():
        e = edited_build.load(good, random.Random(0))
        e.again = False
        e.report(**{key: value})
        edited_build.save(e, tmp_path / key)
        with pytest.raises(LawError, match="law 'report'"):
            verify_build(tmp_path / key)


def test_a_model_too_large_to_run_is_compared_in_names_and_attributes(good):
    build = tapestry.load(good)
    graph, constants = build.build.plan.graph, arrays(build.build.plan.graph, build.constants)
    _, row = compare(graph, Path(build.build.model), build.build.model_sha256, constants, points=1)
    assert row["kind"] == "none" and "not compared by value" in row["why"] and row["counts"]["weights"]


def test_check_asks_another_library_of_nodes_that_both_sides_gave_to_one(good):
    build = tapestry.load(good)
    _, document = tapestry.api.run_checked(build, build.random_feeds(0), check=True)
    assert document["passed"] and document["opaque"]["asked"] and not document["opaque"]["differ"]


def test_an_edit_that_agrees_on_zero_and_one_is_refused(tmp_path):
    """A rounding to half precision changes neither 0 nor 1: only where references differ too are those numbers asked."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph([N("Relu", ["x"], ["y"])], "g", [info("x", T.FLOAT, [4, 6])], [info("y", T.FLOAT, [4, 6])])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    plan = tapestry.compile(tmp_path / "m.onnx").build.plan.graph
    (op,) = plan.ops
    (body,) = op.point
    rounded = replace(
        plan, ops=(map_exprs(op, lambda x: Call("cast", (Call("cast", (x,), "f16"),), "f32") if x is body else x),)
    )
    sha = hashlib.sha256((tmp_path / "m.onnx").read_bytes()).hexdigest()
    assert compare(plan, tmp_path / "m.onnx", sha, {})[1]["inputs"] == "random"
    with pytest.raises(LawError, match="'y' is not the model's"):
        compare(rounded, tmp_path / "m.onnx", sha, {})


def test_what_two_references_dispute_is_asked_again(monkeypatch, tmp_path):
    """Three values where an operator has no meaning; then the graph must agree on numbers of 0 and 1."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph([N("Relu", ["x"], ["y"])], "g", [info("x", T.FLOAT, [4, 6])], [info("y", T.FLOAT, [4, 6])])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    plan, sha = tapestry.compile(tmp_path / "m.onnx").build.plan.graph, hashlib.sha256((tmp_path / "m.onnx").read_bytes())
    monkeypatch.setattr(
        ReferenceValues, "again", lambda self, name, double=False: self.values[name] + (np.abs(self.values["x"]) % 1 > 0)
    )
    (op,) = plan.ops
    (body,) = op.point
    other = replace(plan, ops=(map_exprs(op, lambda x: Call("mul", (x, x), "f32") if x is body else x),))  # itself at 0 and 1
    row = compare(other, tmp_path / "m.onnx", sha.hexdigest(), {}, special=False)[1]
    assert row["inputs"] == "all 0 or 1" and "'y' is not the model's" in row["disputed"]
    with pytest.raises(
        LawError, match="evaluations, where x"
    ):  # but on huge numbers, where evaluators agree, it is another one
        compare(other, tmp_path / "m.onnx", sha.hexdigest(), {})


@pytest.mark.slow
def test_a_recurrence_that_grows_its_roundings_is_its_model(tmp_path):
    """Parts along the batch round otherwise than the whole, and each step makes more of it."""
    rng, steps, batch, width = np.random.default_rng(0), 12, 8, 64
    weights = {k: rng.normal(size=(1, 4 * width, width)).astype(np.float32) for k in ("w", "r")}
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], "recurrent", hidden_size=width)
    path = tmp_path / "m.onnx"
    onnx.save(net([node], {"x": (T.FLOAT, [steps, batch, width])}, {"y": T.FLOAT}, weights), path)
    compared(path)


def test_an_einsum_of_nothing_does_not_end_the_process(tmp_path):
    """onnxruntime divides by the extent of 0."""
    node, path = N("Einsum", ["a", "b"], ["y"], equation="ij,ji->i"), tmp_path / "m.onnx"
    onnx.save(net([node], {"a": (T.FLOAT, [5, 0]), "b": (T.FLOAT, [0, 5])}, {"y": T.FLOAT}, {}), path)
    build = tapestry.compile(path)
    assert build.evidence[0]["kind"] == "sampled cells"
    _, document = tapestry.api.run_checked(build, build.random_feeds(0), check=True)
    assert document["passed"]


@pytest.mark.slow
def test_an_einsum_of_what_slices_leave_nothing_of(tmp_path):
    cuts = [N("Slice", ["a", "at", "at", "rows"], ["c"]), N("Slice", ["b", "at", "at", "columns"], ["d"])]
    path, data = tmp_path / "m.onnx", {"at": np.array([0]), "rows": np.array([0]), "columns": np.array([1])}
    nodes = [*cuts, N("Einsum", ["c", "d"], ["y"], equation="ij,ji->i")]
    onnx.save(net(nodes, {"a": (T.FLOAT, [3, 5]), "b": (T.FLOAT, [5, 3])}, {"y": T.FLOAT}, data), path)
    build = tapestry.compile(path)
    assert tapestry.api.run_checked(build, build.random_feeds(0), check=True)[1]["passed"]


def test_what_rounding_does_is_told_from_another_number():
    """A recurrence that multiplies an error at every step: its sums in another order, and one of its weights changed."""
    rng = np.random.default_rng(0)
    r, x = rng.normal(size=(32, 32)).astype(np.float32), rng.normal(size=(8, 32)).astype(np.float32)

    def steps(weights, start, order=slice(None)):
        out = [start]
        for _ in range(9):
            out.append(np.tanh(sum(np.outer(out[-1][:, k], weights[k]) for k in range(32)[order])))
        return np.stack(out)

    made, turned, changed = steps(r, x), steps(r, x, slice(None, None, -1)), r.copy()
    changed[3, 5] += 1e-4
    assert not near(made, turned).all()
    assert within_rounding(lambda given: steps(*given), [r, x], made, turned)
    assert not within_rounding(lambda given: steps(*given), [r, x], made, steps(changed, x))


def test_no_finite_number_is_near_an_infinite_one() -> None:
    """Nor an infinity near the other one; slack that is infinite excuses nothing."""
    values, reference = np.array([3e38, np.inf, np.inf, 5.0, np.nan]), np.array([np.inf, -np.inf, np.inf, 0.0, np.nan])
    assert same(values, np.array([0, 0, 0, np.inf, 0]), reference, "f32", 0.0).tolist() == [False, False, True, False, True]


def laid_out(tmp_path: Path):
    """A network in float16 as a plan for a GPU has it, channels last, and its comparison with the file."""
    path = tmp_path / "m.onnx"
    onnx.save(network(), path)
    found = lift(path)
    graph, _ = fused(simplify(found.graph), GPU)
    assert any(t.endswith(".laid") for t in graph.tensors)

    def compared_with(g):
        read = partial(_weight, path, g, found.constants)
        return model_laws.check(g, ModelFile(load(path), path.parent), random_feeds(g, 0), read, special=False).counts

    return graph, compared_with


def _weight(path, graph, constants, name):
    return read_weight(path, graph.weights[name], graph.tensors[name], constants=constants)


def test_tensors_with_channels_last_are_the_models(tmp_path):
    graph, compared_with = laid_out(tmp_path)
    counts = compared_with(graph)
    laid = sum(t.endswith(".laid") for t in graph.tensors)
    assert counts["slices"] == laid and not counts["followed back"]


@pytest.mark.slow
def test_faults_in_tensors_with_channels_last_are_found(tmp_path):
    """In an operation that makes one, few of its cells are other than the model's; in one that reads it, axes are exchanged."""
    graph, compared_with = laid_out(tmp_path)
    at = next(i for i, op in enumerate(graph.ops) if op.outs[0].endswith(".laid"))
    op = graph.ops[at]
    (e,) = op.then or op.body
    far = Index(dim(op.dims[-1].name), "i64")
    wrong = call("where", call("eq", far, Const(2, "i64")), call("add", e, Const(0.5, "f16")), e)
    edited = replace(op, **({"then": (wrong,)} if op.then else {"body": (wrong,)}))
    with pytest.raises(LawError, match="is not the model's"):
        compared_with(replace(graph, ops=(*graph.ops[:at], edited, *graph.ops[at + 1 :])))
    reader = next(i for i, o in enumerate(graph.ops) if any(r.tensor == op.outs[0] for r in o.reads))
    swapped = tuple(
        replace(r, index=(r.index[0], r.index[2], r.index[1], r.index[3])) if r.tensor == op.outs[0] else r
        for r in graph.ops[reader].reads
    )
    ops = (*graph.ops[:reader], replace(graph.ops[reader], reads=swapped), *graph.ops[reader + 1 :])
    with pytest.raises(LawError, match="is not the model's"):
        compared_with(replace(graph, ops=ops))
