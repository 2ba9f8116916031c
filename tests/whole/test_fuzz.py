"""The fuzzer: the same for the same seed, its shrinker shrinks, seeded bugs are found; and what it once found."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from bench.correctness.seeded_kernel_bugs import BUGS, seeded
from tapestry.ir.plan import MeshAxis, Strategy
from tapestry.ir.syntax.parser import parse
from tapestry.verify import interp
from tests.fuzz import awkward
from tests.fuzz.campaign import PLANS, fuzz
from tests.fuzz.families.control_flow import SequenceNodes
from tests.fuzz.generate.draw import Draw
from tests.fuzz.generate.evaluate import replay
from tests.fuzz.generate.random_blocks import blocks
from tests.fuzz.generate.random_model import BLOCKS, FAMILIES, RUNNING, Model, random_model
from tests.fuzz.generate.running_blocks import running
from tests.fuzz.recipe import VIAS, Recipe, from_document, random_recipe, rewritten
from tests.fuzz.series import Series, summary
from tests.fuzz.series import run as run_series
from tests.fuzz.shrink import outcome, shrink
from tests.fuzz.trial import Failure, Prepared, attempt, draw_recipe, judge, prepare
from tests.support.command_line import document, run
from tests.support.paths import ROOT


def test_a_campaign_finds_nothing():
    tally = fuzz(11, 20)
    assert not tally.failures, json.dumps(tally.failures, indent=1)
    assert tally.cases == 20 and tally.models == 20 // PLANS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 105))
def test_long_campaigns_find_nothing(seed):
    tally = fuzz(seed, 2000, shrinking=10)
    assert not tally.failures, json.dumps(tally.failures, indent=1)
    assert set(tally.families) == {*FAMILIES, BLOCKS, RUNNING}
    assert len(tally.operators) >= 110 and len(tally.rules) >= 7 and set(tally.via) == set(VIAS)


def test_models_are_valid_and_the_same_for_the_same_seed():
    for seed in range(25):
        one, two = random_model(seed), random_model(seed)
        assert [n.SerializeToString() for n in one.nodes] == [n.SerializeToString() for n in two.nodes]
        values = interp.run(parse(one.text), one.given) if one.text else replay(one.nodes, one.given, one.opset)
        for name, a in one.outputs.items():
            same = np.allclose if one.text and name not in one.exact else np.array_equal  # (rounded in another order)
            assert same(values[name], a, equal_nan=True) and np.array_equal(two.outputs[name], a)


def test_models_pass_the_checker(tmp_path):
    for seed in range(25):
        model = random_model(seed)
        if not model.text:
            onnx.checker.check_model(str(model.save(tmp_path / "m.onnx")), full_check=False)


@pytest.mark.slow
def test_random_blocks_are_what_the_interpreter_makes_of_them():
    """Two evaluators that share nothing, on projections of every kind."""
    kinds: set[str] = set()
    for k in range(250):
        text, inputs, outputs, exact = blocks(random.Random(f"blocks {k}"))
        found = interp.run(parse(text), inputs)
        for name, want in outputs.items():
            np.testing.assert_allclose(found[name], want, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5, err_msg=text)
        kinds |= {w for w in ("mod", "floor", "when", "then", "cast", "max,", "softsum", "moments") if w in text}
    assert len(kinds) >= 7, kinds


def test_recipes_read_back_and_replay(tmp_path):
    for seed in range(12):
        model = random_model(seed)
        p = prepare(model, tmp_path / "m.onnx")
        assert isinstance(p, Prepared)
        recipe, graph = random_recipe(p.lifted.graph, random.Random(seed))
        assert recipe == draw_recipe(p, seed) or draw_recipe(p, seed) == draw_recipe(p, seed)
        assert from_document(json.loads(json.dumps(recipe.document()))) == recipe
        assert recipe.via in ("build", "processes") or repr(rewritten(p.lifted.graph, recipe).ops) == repr(graph.ops)


# the shrinker, and what it writes


def long_model() -> Model:
    """A chain in which one Sub matters, with other things before, behind and beside it."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((6, 5)).astype(np.float32) for _ in range(2))
    N = helper.make_node
    nodes = [
        N("Relu", ["x"], ["a"]), N("MatMul", ["a", "v"], ["b"]), N("Sub", ["b", "w"], ["c"]), N("Softmax", ["c"], ["d"]),
        N("Transpose", ["d"], ["y"]), N("Exp", ["w"], ["z"]),
    ]  # fmt: skip
    given = {"x": x, "w": w, "v": rng.standard_normal((5, 5)).astype(np.float32)}
    values = replay(nodes, given, 18)
    outs = {t: values[t] for t in ("y", "z")}
    return Model(
        nodes=tuple(nodes), inputs={"x": x, "w": w}, weights={"v": given["v"]}, outputs=outs, exact=frozenset(), opset=18
    )


def test_a_failure_is_made_small(tmp_path):
    model = long_model()
    mesh = (MeshAxis("d0", 2), MeshAxis("d1", 3))
    recipe = Recipe(
        mesh=mesh, simplified=(False, False), strategies={"b": Strategy(("i", "n"), (0, 1))}, moves=("recompute@a{keep=1}",)
    )
    with seeded("operands_swapped"):
        failure = outcome((model, recipe), tmp_path)
        assert isinstance(failure, Failure) and failure.kind == "wrong"
        small, plan = shrink((model, recipe), failure, tmp_path)
        assert [n.op_type for n in small.nodes] == ["Sub"]
        assert len(plan.mesh) == 1 and not plan.moves and not plan.strategies
        assert max(a.size for a in small.given.values()) <= 4
        found = outcome((small, plan), tmp_path)
        assert found and (found.kind, found.what) == (failure.kind, failure.what)
    assert outcome((small, plan), tmp_path) is None


@pytest.mark.slow
def test_a_campaign_writes_what_failed(tmp_path):
    with seeded("transposed_the_wrong_way"):
        tally = fuzz(1, 60, output=tmp_path, stop=1, shrinking=5)
    (row,) = tally.failures
    folder = Path(row["files"])
    assert {p.name for p in folder.iterdir()} == {"model.onnx", "inputs.npz", "outputs.npz", "case.json"}
    onnx.checker.check_model(str(folder / "model.onnx"))
    assert json.loads((folder / "case.json").read_text())["recipe"] == row["recipe"]
    assert fuzz(1, 1, first=row["case"]).failures == []  # healthy again, the case passes


@pytest.mark.slow
def test_the_command(tmp_path):
    d = document("fuzz", "--seed", "3", "--count", "8", "--output", tmp_path / "out")
    assert d["passed"] and d["cases"] == 8 and d["models"] == 2 and not (tmp_path / "out").exists()
    assert document("fuzz", "--seed", "3", "--count", "1000000", "--time", "0")["cases"] == 0
    status, out, _ = run("fuzz", "--count", "4")
    assert status == 0 and "no wrong answer" in out
    assert run("fuzz", "--count", "0")[0] == 2
    with seeded("operands_swapped"):
        status, out, _ = run("fuzz", "--seed", "1", "--count", "60", "--stop", "1", "--output", tmp_path / "bad")
    assert status == 1 and "FAILED case" in out and list((tmp_path / "bad").iterdir())


def test_running_states_agree_with_the_interpreter(tmp_path):
    """Models that are text: by element in the fuzzer, by the interpreter, and on devices; backwards merging is noticed."""
    noticed = 0
    for k in range(12):
        text, inputs, outs = running(random.Random(k))
        found = interp.run(parse(text), inputs)
        assert all(np.array_equal(found[t], a) for t, a in outs.items())
        model = Model(nodes=(), inputs=inputs, weights={}, outputs=outs, exact=frozenset(outs), opset=18, text=text)
        recipe = draw_recipe(prepare(model, tmp_path / "m.onnx"), k)
        assert outcome((model, recipe), tmp_path) is None
        with seeded("scan_merged_backwards"):
            noticed += outcome((model, recipe), tmp_path) is not None
    assert noticed >= 3


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("via", ["stages", "triton", "search", "strategies"])
def test_every_way_of_running_is_drawn_and_right(via, tmp_path):
    tried = 0
    for seed in range(400):
        model = random_model(f"ways {seed % 6}", 3)
        p = prepare(model, tmp_path / "m.onnx")
        assert isinstance(p, Prepared)
        recipe = draw_recipe(p, f"{via} {seed}")
        assert isinstance(recipe, Recipe)
        if recipe.via == via:
            assert attempt(p, recipe) is None
            tried += 1
            if tried == 3:
                return
    raise AssertionError(f"{via} was drawn {tried} times")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [31, 187, 191, 192])
def test_what_two_libraries_make_of_it_differently_is_no_wrong_answer(case):
    """RoiAlign and Col2Im of the reference evaluator differ from onnxruntime's; means of rows with infinities depend on the order."""
    assert not fuzz(990011, 1, first=case).failures


def test_the_float64_referee_keeps_float64_within_operators():
    """ONNX's body of a group norm rounds its mean and variance to float32 unless told otherwise."""
    x = np.random.default_rng(0).normal(size=(2, 4, 6)) + 50
    node = helper.make_node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=2)
    given = {"x": x, "s": np.ones(4), "b": np.zeros(4)}
    rows = x.reshape(2, 2, 12)
    want = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(replay([node], given, 21, plain=given)["y"], want.reshape(x.shape), rtol=0, atol=1e-9)


def test_the_referee_of_float64_is_one_that_computes_in_float64():
    """onnxruntime rounds a Shrink of float64 to float32."""
    x = np.random.default_rng(5).standard_normal(50)
    found = replay([N("Shrink", ["x"], ["y"], bias=0.25, lambd=0.5)], {"x": x}, 18)["y"]
    np.testing.assert_array_equal(found, np.where(x > 0.5, x - 0.25, np.where(x < -0.5, x + 0.25, 0)))


def test_the_referee_of_a_reduction_over_nothing_is_one_that_reduces():
    """onnxruntime keeps the axes of an empty tensor as they are."""
    x, axes = np.empty((2, 0, 3)), np.array([-3])
    assert replay([N("ReduceProd", ["x", "a"], ["y"], keepdims=1)], {"x": x, "a": axes}, 18)["y"].shape == (1, 0, 3)


def test_the_float64_referee_goes_on_behind_a_node_that_has_no_float64():
    nodes = [N("DequantizeLinear", ["q", "s"], ["x"]), N("Div", ["x", "d"], ["y"])]
    given = {"q": np.array([3, 7], np.uint8), "s": np.float32(0.125), "d": np.float32(3)}
    plain = replay(nodes, given, 18)
    found = replay(nodes, given, 18, plain=plain)["y"]
    assert plain["y"].dtype == np.float32 and found.dtype == np.float64
    np.testing.assert_allclose(found, np.array([0.375, 0.875]) / 3, rtol=1e-15)


def test_empty_tensors_of_other_shapes_are_not_joined():
    """onnxruntime joins them, against the definition; all others it looks at itself."""
    s = SequenceNodes(Draw(random.Random(1), 20))
    s.shapes = {(6, 1, 0), (1, 1, 0)}
    assert s.fits(-3, 0) and not s.fits(1, 0) and not s.fits(1, 1)
    s.shapes = {(6, 1), (1, 1)}
    assert s.fits(1, 1)


def test_infinities_in_another_order():
    """A NaN may be infinite where a rewrite reordered a sum, and never finite."""
    inf, nan, steady = np.inf, np.nan, np.array([True])
    for got, want, wrong in (
        (inf, nan, False),
        (nan, inf, False),
        (inf, -inf, True),
        (1.0, nan, True),
        (nan, 1.0, True),
        (inf, 1.0, True),
    ):
        given = {"y": np.array([got], np.float32)}, {"y": (np.array([want], np.float32), steady)}
        assert awkward.differs(*given, unseen=False)
        assert bool(awkward.differs(*given, unseen=False, reordered=True)) == wrong


def test_only_what_noise_leads_to_is_a_rounding(tmp_path):
    x, three = np.array([1 / 3, 2.5], np.float32), np.array([3, 3], np.float32)
    nodes = (helper.make_node("Mul", ["x", "w"], ["m"]), helper.make_node("Cast", ["m"], ["y"], to=onnx.TensorProto.INT64))
    model = Model(
        nodes=nodes, inputs={"x": x}, weights={"w": three}, outputs={"y": np.array([1, 7])}, exact=frozenset(), opset=18
    )
    prepared = prepare(model, tmp_path / "m.onnx")
    assert isinstance(prepared, Prepared)
    assert judge(prepared, {"y": np.array([1, 7])}) is None and not prepared.turned
    assert judge(prepared, {"y": np.array([0, 7])}) is None and prepared.turned == ["y"]  # 0.99999997 is cut off to 0
    for wrong in ([2, 7], [1, 6], [1, 8], [0, 6], [-1, 7]):
        assert judge(prepared, {"y": np.array(wrong)}), wrong


def test_only_cells_that_noise_makes_finite_or_not_are_free(tmp_path):
    """The first cell is a logarithm of a rounding error of any sign; what the others are, every replay says."""
    x = np.array([1 / 3, 0, -1, 2, 5], np.float32)
    given, weights = {"x": x, "z": np.array([1 / 3, 0, 0, 0, 0], np.float32)}, {"one": np.float32(1)}
    nodes = [N("Mul", ["x", "one"], ["a"]), N("Sub", ["a", "z"], ["d"]), N("Log", ["d"], ["y"])]
    model, _ = case(nodes, given, weights)
    prepared = prepare(model, tmp_path / "m.onnx")
    inf, nan, (two, five) = np.inf, np.nan, np.log(x[3:])
    for first in (-17.3, nan, -inf):
        right = np.array([first, -inf, nan, two, five], np.float32)
        assert judge(prepared, {"y": right}) is None
        for at, wrong in ((1, nan), (1, inf), (1, -88.0), (2, inf), (2, -inf), (2, 0.0), (3, nan), (4, inf), (4, five + 1)):
            y = right.copy()
            y[at] = wrong
            assert judge(prepared, {"y": y}), (first, at, wrong)
    assert set(prepared.free) == {"Log"}


@pytest.mark.slow
def test_a_series_goes_on_where_it_was_ended(tmp_path):
    s = Series(seed=3, first=0, count=12, jobs=2, log=tmp_path / "log", chunk=4, limit=0.0)
    assert run_series(s)["cases"] == 0
    first = run_series(replace(s, count=8, limit=float("inf")))
    assert first["passed"] and first["cases"] == first["of"] == 8 and first["models"] == 2
    lines = s.log.read_text().splitlines()
    again = run_series(replace(s, limit=float("inf")))
    assert again["cases"] == 12 and s.log.read_text().splitlines()[: len(lines)] == lines and len(lines) == 2
    assert json.loads(summary(again))["passed"] and "\n" not in summary(again)


# its power


def hunt(*names: str, most: int) -> str:
    """Run the benchmark on some bugs: each in a process of its own, so that no cache is filled before or poisoned behind."""
    argv = [sys.executable, "-m", "bench", "fuzz_power", "--most", str(most), "--only", *names]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=580, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_seeded_bugs_are_found():
    names = (
        "wrong_identity_of_sum",
        "operands_swapped",
        "halo_row_dropped",
        "freed_early",
        "guards_lost",
        "stale_key_of_footprints",
    )
    assert f"{len(names)} of {len(names)} bugs found; without a bug: nothing found" in hunt(*names, most=300)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_seeded_bug_is_found(part):
    names = list(BUGS)[part::4]
    assert f"{len(names)} of {len(names)} bugs found; without a bug: nothing found" in hunt(*names, most=3000)


def test_there_are_thirty_bugs():
    assert len(BUGS) >= 30
    assert all((f.__doc__ or "").strip() for f in BUGS.values())
    for name in BUGS:
        with seeded(name):  # what it swaps is still there
            pass


# what it found


def case(nodes, inputs, weights, opset=18, outputs_too=(), **recipe) -> tuple[Model, Recipe]:
    """A case of nodes and arrays; every result of the last node is an output."""
    values = replay(nodes, {**inputs, **weights}, opset)
    outs = {t: values[t] for t in (*outputs_too, *nodes[-1].output)}
    model = Model(nodes=tuple(nodes), inputs=inputs, weights=weights, outputs=outs, exact=frozenset(), opset=opset)
    return model, Recipe(**{"mesh": (MeshAxis("d0", 2),), "simplified": (False, False), **recipe})


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def body(*nodes, inputs, outputs):
    """A body over floats, of declared shapes."""
    ends = [
        [helper.make_tensor_value_info(t, onnx.TensorProto.FLOAT, shape) for t, shape in of.items()] for of in (inputs, outputs)
    ]
    return helper.make_graph(nodes, "body", *ends)


N = helper.make_node
FOUND = {
    "HardSwish in float64": lambda: case([N("HardSwish", ["x"], ["y"])], {"x": normal(5, 3).astype(np.float64)}, {}),
    "a norm of one element": lambda: case(
        [N("LayerNormalization", ["x", "s", "b"], ["z"]), N("Squeeze", ["z", "a"], ["y"])],
        {"x": normal(1)}, {"s": normal(1), "b": normal(1), "a": i64(0)}, simplified=(True, False),
    ),
    "a norm of one number whose square overflows": lambda: case(
        [N("LayerNormalization", ["x", "s", "b"], ["y"])], {"x": normal(1, 1)}, {"s": normal(1), "b": normal(1)}, simplified=(True, False), cells=(("x", 0, 1e30),),
    ),
    "products that are rounded to a half before they are clamped": lambda: case(
        [N("MatMul", ["x", "w"], ["p"]), N("Cast", ["p"], ["h"], to=10), N("Relu", ["h"], ["r"]), N("Cast", ["r"], ["y"], to=1)],
        {"x": normal(4, 4, 7), "w": normal(7, 6)}, {}, simplified=(True, False),
    ),
    "a tile of nothing": lambda: case([N("Tile", ["x", "n"], ["y"])], {"x": normal(0, 2)}, {"n": i64(2, 3)}),
    "a backward slice of nothing": lambda: case(
        [N("Slice", ["x", "s", "e", "a", "p"], ["y"])], {"x": normal(0, 2)}, {"s": i64(-1, -1), "e": i64(-9, -9), "a": i64(0, 1), "p": i64(-1, -1)}
    ),
    "a reflection of one cell": lambda: case([N("Pad", ["x", "p"], ["y"], mode="reflect")], {"x": normal(1, 3)}, {"p": i64(2, 1, 1, 2)}),
    "a device whose windows lie in the padding": lambda: case(
        [N("Conv", ["x", "v"], ["z"], auto_pad="SAME_LOWER", group=3, strides=[1, 2, 3]),
         N("Conv", ["x", "w"], ["y"], dilations=[2, 1, 1], group=6, pads=[0, 2, 0, 0, 4, 0], strides=[1, 3, 1])],
        {"x": normal(6, 6, 5, 1, 1)}, {"v": normal(3, 2, 3, 1, 1), "w": normal(6, 1, 1, 5, 1)},
        strategies={"z": Strategy(("q",), (1,)), "y": Strategy(("r",), (1,))},
    ),
    "equal bodies over other dimensions": lambda: case(
        [N("ReduceSumSquare", ["x", "one"], ["a"], keepdims=0), N("ReduceSumSquare", ["x", "all"], ["b"], keepdims=0), N("Sub", ["a", "b"], ["y"])],
        {"x": normal(3, 4)}, {"one": i64(1), "all": i64(0, 1)}, simplified=(True, False),
    ),
    "a softmax sum of nothing": lambda: case([N("ReduceLogSumExp", ["x", "a"], ["y"])], {"x": normal(2, 0)}, {"a": i64(1)}),
    "nothing joined with nothing": lambda: case([N("Concat", ["x", "x"], ["y"], axis=1)], {"x": normal(0, 2)}, {}),
    "a variance far from zero": lambda: case([N("MeanVarianceNormalization", ["x"], ["y"], axes=[1])], {"x": normal(3, 4) + 30}, {}),
    "a folded output that is read as well": lambda: case([N("Exp", ["w"], ["c"]), N("Add", ["c", "x"], ["y"])], {"x": normal(2, 3)}, {"w": normal(2, 3)}, outputs_too=["c"]),
    "an output pooled with a window in the padding": lambda: case(
        [N("Relu", ["x"], ["a"]), N("MaxPool", ["a"], ["y"], ceil_mode=1, kernel_shape=[3, 1], pads=[1, 0, 2, 0], strides=[2, 3])],
        {"x": normal(1, 1, 5, 1)}, {}, outputs_too=["a"],
    ),
    "a mean weighted by a softmax of masked constants": lambda: case(
        [N("Where", ["m", "x", "low"], ["s"]), N("Softmax", ["s"], ["p"]), N("Einsum", ["p", "v"], ["y"], equation="ij,j->i")],
        {"x": normal(7, 4), "v": normal(4)}, {"m": np.arange(28).reshape(7, 4) % 3 > 0, "low": np.float32(-1e4)}, simplified=(True, False),
    ),
    "a log of a sum of exponentials that is averaged": lambda: case(
        [N("ReduceLogSumExp", ["x", "last"], ["l"]), N("ReduceMean", ["l", "first"], ["y"])], {"x": normal(4, 5)}, {"last": i64(1), "first": i64(0)}, simplified=(True, False),
    ),
    "attention in parts, and in phases": lambda: case(
        [N("MatMul", ["q", "k"], ["s"]), N("Softmax", ["s"], ["p"], axis=-1), N("MatMul", ["p", "v"], ["y"])],
        {"q": normal(2, 5, 3), "k": normal(2, 3, 6), "v": normal(2, 6, 4)}, {}, simplified=(True, False),
        moves=("split_reduce@y{dim=m,parts=2,fanin=2}", "slice_strided@y.p.m{dim=k}"),
    ),
    "moments over no points in several dimensions": lambda: case([N("MeanVarianceNormalization", ["x"], ["y"], axes=[0, 2])], {"x": np.zeros((0, 0, 2), np.float32)}, {}, opset=22),
    "a gather of wide unsigned integers": lambda: case([N("Gather", ["x", "i"], ["y"], axis=-1)], {"x": np.arange(8, dtype=np.uint32) + 2**31}, {"i": np.arange(-8, 8).reshape(4, 4)}, opset=22),
    "rows of wide unsigned integers": lambda: case([N("Tile", ["x", "n"], ["y"])], {"x": np.arange(5, dtype=np.uint16) + 40000}, {"n": i64(3)}, opset=22),
    "elements of wide unsigned integers": lambda: case([N("GatherElements", ["x", "i"], ["y"], axis=1)], {"x": np.arange(6, dtype=np.uint64).reshape(2, 3) + 2**63}, {"i": np.array([[2, -1], [0, 1]])}, opset=22),
    "a pool of constants, of no rows": lambda: case(
        [N("MaxPool", ["w"], ["p"], ceil_mode=1, kernel_shape=[3, 2], pads=[1, 0, 0, 1]), N("Concat", ["x", "p"], ["y"], axis=2)], {"x": normal(1, 4, 2, 1)}, {"w": normal(1, 4, 1, 1)}, opset=22,
    ),
    "a convolution that fits nowhere": lambda: case(
        [N("Conv", ["x", "w"], ["y"], auto_pad="VALID", group=5)], {"x": np.ones((3, 5, 3, 3, 2))}, {"w": np.ones((5, 1, 3, 3, 3))}, opset=22,
    ),
    "a convolution of groups over channels that a pad adds": lambda: case(
        [N("Pad", ["x", "p"], ["t"]), N("Conv", ["t", "w"], ["y"], group=2, pads=[2, 0, 2, 1], strides=[3, 3])],
        {"x": normal(1, 6, 1, 1)}, {"p": i64(0, 0, 0, 1, 0, 2, 1, 1), "w": normal(4, 4, 1, 1)}, simplified=(True, False),
    ),
    "a convolution over channels and images that a pad adds": lambda: case(
        [N("Pad", ["x", "p"], ["t"]), N("Conv", ["t", "w"], ["y"])],
        {"x": normal(1, 3, 4, 5)}, {"p": i64(1, 1, 1, 0, 0, 2, 0, 1), "w": normal(4, 6, 2, 3)}, simplified=(True, False),
    ),
    "the variance of nothing": lambda: case([N("LayerNormalization", ["x", "g"], ["y"], axis=0)], {"x": normal(6, 0)}, {"g": normal(6, 0)}, simplified=(True, False)),
    "a convolution of channels from the last one on, every other one": lambda: case(
        [N("Slice", ["x", "s", "e", "a", "p"], ["y"]), N("Conv", ["y", "w"], ["z"])], {"x": normal(1, 4, 2, 2)},
        {"s": i64(3), "e": i64(-9), "a": i64(1), "p": i64(-2), "w": normal(2, 2, 1, 1)}, simplified=(True, False),
    ),
    "states over time whose end reads what the region made": lambda: case(
        [N("Relu", ["x"], ["r"]), N("MeanVarianceNormalization", ["r"], ["y"], axes=[1]), N("Neg", ["y"], ["z"])], {"x": normal(3, 6)}, {},
        simplified=(True, False), moves=("split_time@y{dim=x1_,parts=2,back=1}",),
    ),
    "an opaque operation on nothing, beside a part of it": lambda: case(
        [N("Hardmax", ["x"], ["h"], axis=2), N("QuantizeLinear", ["x", "s", "z"], ["q"]), N("MatMulInteger", ["q", "w", "z"], ["y"])],
        {"x": normal(2, 0, 2)}, {"s": np.float32(0.5), "z": np.uint8(3), "w": np.ones((2, 2), np.uint8)},
        strategies={"h": Strategy(("x0",), (0,))},
    ),
    "infinite weights of a device whose windows lie in the padding": lambda: case(
        [N("Conv", ["x", "w"], ["y"], pads=[2, 1, 2, 0])], {"x": normal(1, 1, 6, 4), "w": normal(2, 1, 3, 3)}, {},
        mesh=(MeshAxis("d0", 2), MeshAxis("d1", 3)), strategies={"y": Strategy(("r", "h"), (3, 2))}, cells=(("w", 0, float("-inf")),),
    ),
    "a weight that a Scan begins with and its body reads": lambda: case(
        [N("Scan", ["w", "x"], ["y", "z"], num_scan_inputs=1, body=body(
            N("Identity", ["w"], ["s"]), N("Mul", ["h", "u"], ["v"]), inputs={"h": [3], "u": [3]}, outputs={"s": [3], "v": [3]}))],
        {"x": normal(4, 3)}, {"w": normal(3)}, via="build",
    ),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_mended(what, tmp_path):
    model, recipe = FOUND[what]()
    p = prepare(model, tmp_path / "m.onnx")
    assert isinstance(p, Prepared), p
    assert attempt(p, recipe) is None
