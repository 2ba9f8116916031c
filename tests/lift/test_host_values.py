"""Values that no device holds: text, sequences, optionals, and shapes that depend on data; and types that are only stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tapestry
from tapestry import api
from tapestry.errors import LawError, TapestryError
from tapestry.ir.graph import Block, Opaque
from tapestry.ir.program import Message, Transfer
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.lift import read_weight
from tapestry.runtime import outputs
from tapestry.runtime.processes import host_values
from tapestry.verify import certificate, model_outputs
from tapestry.verify.interp import run
from tests.support.command_line import document
from tests.support.command_line import run as command

T = TensorProto
info = helper.make_tensor_value_info


def save(folder: Path, nodes, ins, outs, consts=None, opset: int = 18) -> Path:
    inits = [numpy_helper.from_array(np.asarray(a), n) for n, a in (consts or {}).items()]
    graph = helper.make_graph(nodes, "g", ins, outs, inits)
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)]), path)
    return path


@pytest.fixture
def nonzero(tmp_path) -> Path:
    """Static work around positions that depend on the data, in the middle and at the end."""
    N = helper.make_node
    return save(
        tmp_path,
        [
            N("Relu", ["x"], ["r"]), N("NonZero", ["r"], ["at"]), N("Transpose", ["at"], ["rows"]), N("GatherND", ["r", "rows"], ["kept"]),
            N("ReduceSum", ["kept", "axes"], ["total"], keepdims=0), N("Mul", ["r", "total"], ["y"]),
        ],
        [info("x", T.FLOAT, [4, 6])], [info("y", T.FLOAT, [4, 6]), info("kept", T.FLOAT, [None]), info("at", T.INT64, [2, None])],
        {"axes": np.array([0], np.int64)},
    )  # fmt: skip


def test_shapes_that_depend_on_data_run_and_the_rest_is_still_split(nonzero):
    build = tapestry.compile(nonzero, devices=2, pins=["y:x0=2@d0"])
    graph = build.build.plan.graph
    assert parse(to_text(graph)) == graph
    assert build.report["host_values"] == {"at": "int64[2, ?]", "rows": "int64[?, 2]", "kept": "float[?]"}
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    for scale in (1, -1, 0):  # another number of positions each time, none in the last
        found = build.run({"x": scale * x})
        r = np.maximum(scale * x, 0)
        assert np.array_equal(found["at"], np.stack(np.nonzero(r))) and np.array_equal(found["kept"], r[r != 0])
        np.testing.assert_allclose(found["y"], r * r.sum(), rtol=1e-5)
    blocks = [op for op in graph.ops if isinstance(op, Block)]
    assert blocks and all(not op.dims for op in graph.ops if isinstance(op, Opaque))


def test_the_interpreter_agrees(nonzero):
    build = tapestry.compile(nonzero, devices=1)
    graph = build.build.plan.graph
    x = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
    constants = {t: read_weight(nonzero, w, graph.tensors[t]) for t, w in graph.weights.items()}
    assert np.array_equal(run(graph, {"x": x, **constants})["kept"], build.run({"x": x})["kept"])


def test_the_command_line_takes_text_and_checks_it(tmp_path):
    path = save(
        tmp_path, [helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="UPPER", stopwords=["b"])],
        [info("x", T.STRING, [3])], [info("y", T.STRING, [None])],
    )  # fmt: skip
    assert command("compile", path, "-o", tmp_path / "b", "--devices", "2", "-q")[0] == 0
    np.save(tmp_path / "x.npy", np.array(["a", "b", "ccc"]))
    found = document("run", tmp_path / "b", "--input", f"x={tmp_path}/x.npy", "--check", "--output", tmp_path / "o")
    assert found["passed"] and found["outputs"]["y"]["shape"] == [2] and found["outputs"]["y"]["dtype"] == "string"
    assert np.load(tmp_path / "o" / "y.npy").tolist() == ["A", "CCC"]
    assert command("run", tmp_path / "b", "-q")[0] == 0  # random words
    assert command("verify", tmp_path / "b")[0] == 0


def test_sequences_come_and_go_as_lists(tmp_path):
    seq = helper.make_tensor_sequence_value_info
    N = helper.make_node
    path = save(
        tmp_path, [N("SequenceInsert", ["s", "x"], ["t"]), N("SequenceLength", ["t"], ["n"]), N("Identity", ["t"], ["u"])],
        [seq("s", T.FLOAT, None), info("x", T.FLOAT, [2])], [seq("u", T.FLOAT, None), info("n", T.INT64, [])],
    )  # fmt: skip
    build = tapestry.compile(path, devices=3)
    x = np.ones(2, np.float32)
    found = build.run({"s": [x * 2], "x": x})
    assert found["n"] == 2 and [a.tolist() for a in found["u"]] == [[2, 2], [1, 1]]
    with pytest.raises(TapestryError, match="input 's' is ndarray, not seq"):
        build.run({"s": x, "x": x})
    with pytest.raises(TapestryError, match="no random value for input 's'"):
        build.random_feeds()


@pytest.mark.parametrize("at, want", [(0, [9, 5, 7]), (2, [5, 7, 9]), (-1, [5, 9, 7]), (-2, [9, 5, 7])])
def test_a_tensor_is_inserted_where_it_says(tmp_path, at, want):
    """At the end, at the front, and into a sequence of nothing: the ONNX reference takes places modulo the length."""
    N = helper.make_node
    nodes = [
        N("SequenceEmpty", [], ["e"]), N("SequenceInsert", ["e", "a", "zero"], ["s"]), N("SequenceInsert", ["s", "b"], ["t"]),
        N("SequenceInsert", ["t", "c", "at"], ["u"]), N("ConcatFromSequence", ["u"], ["y"], axis=0),
    ]  # fmt: skip
    ins, places = [info(n, T.FLOAT, [1]) for n in "abc"], {"at": np.array(at), "zero": np.array(0)}
    path = save(tmp_path, nodes, ins, [info("y", T.FLOAT, [3])], places)
    found = tapestry.compile(path, devices=2).run({n: np.array([v], np.float32) for n, v in zip("abc", (5, 7, 9), strict=True)})
    assert found["y"].tolist() == want


@pytest.mark.parametrize("go", [None, True, False])
def test_a_loop_that_carries_a_sequence(tmp_path, go):
    """onnxruntime's Python interface takes none; the reference takes no steps without a condition, and stacks nothing."""
    N = helper.make_node
    whole, seq = [info("i", T.INT64, []), info("c", T.BOOL, [])], helper.make_tensor_sequence_value_info
    nodes = [
        N("Identity", ["c"], ["d"]), N("Cast", ["i"], ["f"], to=T.FLOAT), N("Add", ["x", "f"], ["a"]),
        N("SequenceInsert", ["s", "a", "i"], ["t"]), N("Mul", ["a", "a"], ["b"]),
    ]  # fmt: skip
    outs = [info("d", T.BOOL, []), seq("t", T.FLOAT, None), info("b", T.FLOAT, [2, 1])]
    body = helper.make_graph(nodes, "body", [*whole, seq("s", T.FLOAT, None)], outs)
    nodes = [N("Loop", ["n", "go" if go is not None else "", "s0"], ["s1", "y"], body=body)]
    nodes += [N("ConcatFromSequence", ["s1"], ["z"], axis=1)]
    ins = [info("x", T.FLOAT, [2, 1]), info("n", T.INT64, []), info("go", T.BOOL, []), seq("s0", T.FLOAT, None)]
    path = save(tmp_path, nodes, ins, [info("y", T.FLOAT, [None, 2, 1]), info("z", T.FLOAT, [2, None])])
    x, first = np.array([[5], [7]], np.float32), np.array([[1], [2]], np.float32)
    feeds = {"x": x, "n": np.array(3), "go": np.array(True if go is None else go), "s0": [first]}
    if go is False:
        with pytest.raises(TapestryError, match="no evaluator runs Loop"):
            tapestry.compile(path, devices=2).run(feeds)
        return
    found = tapestry.compile(path, devices=2).run(feeds)
    assert np.array_equal(found["y"], np.stack([(x + k) ** 2 for k in range(3)]))
    assert np.array_equal(found["z"], np.concatenate([x, x + 1, x + 2, first], 1))


def test_a_declared_shape_that_the_data_contradicts_is_refused(tmp_path):
    path = save(
        tmp_path, [helper.make_node("Reshape", ["x", "s"], ["y"])], [info("x", T.FLOAT, [6]), info("s", T.INT64, [2])],
        [info("y", T.FLOAT, [2, 3])],
    )  # fmt: skip
    build = tapestry.compile(path, devices=1)
    x = np.arange(6, dtype=np.float32)
    assert np.array_equal(build.run({"x": x, "s": np.array([2, -1])})["y"], x.reshape(2, 3))
    with pytest.raises(TapestryError, match="not what the model declares"):
        build.run({"x": x, "s": np.array([3, 2])})


@pytest.mark.parametrize(
    "onnx_type, dtype", [(T.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn), (T.INT4, ml_dtypes.int4), (T.BFLOAT16, ml_dtypes.bfloat16)]
)
def test_stored_types_are_weights_moved_and_cast_split(tmp_path, onnx_type, dtype):
    """A weight kept in few bits (packed, where it has four), transposed and cast, on three devices."""
    w = (np.arange(300 * 500) % 15 - 8).reshape(300, 500).astype(dtype)
    N = helper.make_node
    path = save(
        tmp_path, [N("Transpose", ["w"], ["t"]), N("Cast", ["t"], ["c"], to=T.FLOAT), N("MatMul", ["x", "c"], ["y"])],
        [info("x", T.FLOAT, [4, 500])], [info("y", T.FLOAT, [4, 300])], {"w": w}, 21,
    )  # fmt: skip
    build = tapestry.compile(path, devices=3)
    x = np.random.default_rng(0).standard_normal((4, 500)).astype(np.float32)
    np.testing.assert_allclose(build.run({"x": x})["y"], x @ w.astype(np.float32).T, rtol=1e-4, atol=1e-3)
    build.save(tmp_path / "b")
    assert np.array_equal(tapestry.load(tmp_path / "b").run({"x": x})["y"], build.run({"x": x})["y"])
    opaque = [[d.size for d in op.dims] for op in build.build.plan.graph.ops if isinstance(op, Opaque)]
    assert opaque == ([[500, 300]] if onnx_type == T.INT4 else [])  # floats of 8 bits are widened by blocks


def test_a_program_that_sends_a_value_of_the_host_is_refused(nonzero):
    build = tapestry.compile(nonzero, devices=2).build
    program = build.program
    at = next(i for i, s in enumerate(program.steps) if "at" in getattr(s, "outs", ()))
    copy = replace(program.buffers["at"], name="copy")
    step = Transfer(kind="send_recv", src="at", dst="copy", messages=(Message(0, 1, ()),))
    steps = (*program.steps[: at + 1], step, *program.steps[at + 1 :])
    faulty = replace(program, buffers={**program.buffers, "copy": copy}, steps=steps)
    certificate.check(build.plan.annotated(), program, mesh=build.plan.mesh)
    with pytest.raises(LawError, match="never sent"):
        certificate.check(build.plan.annotated(), faulty, mesh=build.plan.mesh)


def test_random_nodes_inside_branches_draw_the_same_on_every_device(tmp_path):
    """A node without a seed, in a branch that no lifter reaches: every device runs it, and all must agree with each other."""
    N = helper.make_node
    branch = helper.make_graph([N("RandomNormalLike", ["x"], ["r"])], "then", [], [info("r", T.FLOAT, [64])])
    other = helper.make_graph([N("Identity", ["x"], ["i"])], "else", [], [info("i", T.FLOAT, [64])])
    path = save(
        tmp_path, [N("If", ["c"], ["y"], then_branch=branch, else_branch=other), N("Neg", ["y"], ["z"])],
        [info("c", T.BOOL, []), info("x", T.FLOAT, [64])], [info("y", T.FLOAT, [64]), info("z", T.FLOAT, [64])],
    )  # fmt: skip
    build = tapestry.compile(path, devices=2, pins=["z:x0=2@d0"])
    feeds = {"c": np.array(True), "x": np.zeros(64, np.float32)}
    first, second = build.run(feeds), build.run(feeds)
    assert np.array_equal(first["z"], -first["y"]) and np.array_equal(first["y"], second["y"]) and np.ptp(first["y"]) > 1


def test_packed_external_weights(tmp_path):
    """Two elements to a byte in the data file, one on the devices; an odd number of them."""
    w = (np.arange(3 * 50001) % 15 - 8).reshape(3, 50001).astype(ml_dtypes.int4)
    N = helper.make_node
    path = save(
        tmp_path,
        [N("Cast", ["w"], ["c"], to=T.FLOAT), N("Add", ["x", "c"], ["y"])],
        [info("x", T.FLOAT, [1])],
        [info("y", T.FLOAT, [3, 50001])],
        {"w": w},
        21,
    )
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert (tmp_path / "w.bin").stat().st_size == (3 * 50001 + 1) // 2
    build = tapestry.compile(path, devices=2)
    assert np.array_equal(build.run({"x": np.zeros(1, np.float32)})["y"], w.astype(np.float32))


def classifier(folder: Path, **keys) -> Path:
    """What exporters of classifiers write: scores, and a map from classes to scores for every sample."""
    zipmap = helper.make_node("ZipMap", ["p"], ["maps"], "zip", domain="ai.onnx.ml", **keys)
    value = helper.make_tensor_type_proto(T.FLOAT, [])
    key = T.STRING if "classlabels_strings" in keys else T.INT64
    maps = helper.make_value_info("maps", helper.make_sequence_type_proto(helper.make_map_type_proto(key, value)))
    ins, nodes = (
        [info("x", T.FLOAT, [4, 5])],
        [helper.make_node("MatMul", ["x", "w"], ["s"]), helper.make_node("Softmax", ["s"], ["p"])],
    )
    w = numpy_helper.from_array(np.random.default_rng(3).standard_normal((5, 3)).astype(np.float32), "w")
    graph = helper.make_graph([*nodes, zipmap], "g", ins, [maps, info("p", T.FLOAT, [4, 3])], [w])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=opsets), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("keys", [{"classlabels_int64s": [7, 3, 5]}, {"classlabels_strings": ["a", "b", "c"]}])
def test_sequences_of_maps_are_outputs_like_others(tmp_path, keys):
    path = classifier(tmp_path, **keys)
    build = tapestry.compile(path, mesh="2")
    assert build.report["host_values"]["maps"] == f"seq(map({'string' if 'classlabels_strings' in keys else 'int64'}, float[]))"
    feeds = build.random_feeds()
    _, report = api.run_checked(build, feeds, check=True)
    assert report["passed"] and report["outputs"]["maps"]["shape"] == [4]
    found = build.run(feeds)
    names = list(*keys.values())
    assert [set(m) for m in found["maps"]] == [set(names)] * 4
    assert np.allclose([[float(m[k]) for k in names] for m in found["maps"]], found["p"])
    again = host_values.decode(host_values.encode(found["maps"]))
    assert [list(m) for m in again] == [list(m) for m in found["maps"]] and model_outputs.compare_outputs(
        again, found["maps"]
    ).passed
    wrong = [dict(zip(m, reversed(m.values()), strict=True)) for m in found["maps"]]
    assert (
        not model_outputs.compare_outputs(wrong, found["maps"]).passed
        and not model_outputs.compare_outputs([{}] * 4, found["maps"]).passed
    )
    written = outputs.write_outputs(tmp_path / "out", {"maps": found["maps"]})
    assert [p.name for p in written[:2]] == ["maps.0.keys.npy", "maps.0.values.npy"] and len(written) == 8
    assert dict(zip(np.load(written[0]).tolist(), np.load(written[1]).tolist(), strict=True)) == dict(
        zip(names, found["p"][0].tolist(), strict=True)
    )


def test_doctor_knows_the_type_of_what_is_on_the_host(tmp_path):
    path = classifier(tmp_path, classlabels_int64s=[1, 2, 3])
    model = onnx.load(path)
    model.graph.node.insert(2, helper.make_node("Compress", ["p", "extra"], ["kept"], axis=0))
    model.graph.node[3].input[0] = "kept"
    model.graph.input.append(info("extra", T.BOOL, [4]))
    onnx.save(model, path)
    found = document("doctor", path)
    assert found["unsupported"] == [] and found["host_values"]["kept"] == "float[?, 3]"
