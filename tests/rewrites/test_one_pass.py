"""Reductions joined into one pass: products, and semidirect products found from what exporters took apart."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tapestry.errors import TapestryError
from tapestry.ir.expr import call
from tapestry.ir.graph import Block, Graph
from tapestry.ir.monoid import MONOIDS, product, prove_moments, register
from tapestry.ir.plan import MeshAxis, Plan
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.lift import read_weight
from tapestry.onnx_eval.ort_session import ort_session
from tapestry.plan.lower import lower
from tapestry.plan.strategy import strategies
from tapestry.rewrites import RULES
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule import Refusal
from tapestry.rewrites.core.rule_check import random_feeds, same, same_dependences
from tapestry.verify import certificate, interp
from tests.support.attention.attention_runs import close
from tests.support.lifting import build, lift_model, node
from tests.support.small_models import Case, execute, peak
from tests.support.triton_kernels import check

RNG = np.random.default_rng(11)
X = {"x": RNG.standard_normal((5, 13)).astype(np.float32)}
T = {**X, "t": np.array([3, 0, 12, 7, 3])}
T1 = {**X, "t": np.array([[3], [0], [12], [-1], [3]])}
LAST = {"ax": np.array([-1])}
W = {"w": RNG.standard_normal(13).astype(np.float32), "b": RNG.standard_normal(13).astype(np.float32)}
HALF = {"x": X["x"].astype(np.float16)}
IMAGE = {"x": RNG.standard_normal((2, 6, 5, 3)).astype(np.float32)}


def exponentials() -> list:
    return [node("ReduceMax", "x ax", "m"), node("Sub", "x m", "d"), node("Exp", "d", "e"), node("ReduceSum", "e ax", "s")]


def moments(square: str = "Pow", eps: str = "eps") -> list:
    power = node("Pow", "d two", "p") if square == "Pow" else node("Mul", "d d", "p")
    tail = [node("Add", f"v {eps}", "ve"), node("Sqrt", "ve", "s"), node("Div", "d s", "n"), node("Mul", "n w", "nw")]
    return [
        node("ReduceMean", "x ax", "m"), node("Sub", "x m", "d"), power, node("ReduceMean", "p ax", "v"), *tail,
        node("Add", "nw b", "y"),
    ]  # fmt: skip


GROUPS = {
    "by group": np.array([0, 3, -1]), "by channel": np.array([2, 6, 5, 3]), "ax": np.array([-1]),
    "w": RNG.standard_normal((6, 1, 1)).astype(np.float32), "b": RNG.standard_normal((6, 1, 1)).astype(np.float32),
    "one": np.ones(3, np.float32), "zero": np.zeros(3, np.float32), "two": np.float32(2), "eps": np.float32(1e-5),
}  # fmt: skip


def groups(*norm: onnx.NodeProto) -> list:
    """A norm of groups of channels: reshaped to groups as ``x``, normalised to ``n`` and shaped back, with scale and bias."""
    shaped = helper.make_node("Reshape", ["image", "by group"], ["x"])
    back = helper.make_node("Reshape", ["n", "by channel"], ["c"])
    return [shaped, *norm, back, node("Mul", "c w", "cw"), node("Add", "cw b", "y")]


SILU = [node("Sigmoid", "y", "sig"), node("Mul", "y sig", "z")]
PHOTO = {"image": IMAGE["x"]}
NORM = {**LAST, **W, "two": np.float32(2), "eps": np.float32(1e-5)}
# name -> (nodes, inputs, outputs, constants, monoids of all operations that are left)
CASES = {
    "log-sum-exp": ([*exponentials(), node("Log", "s", "l"), node("Add", "l m")], X, "y", LAST, ["logsumexp"]),
    "softmax": ([*exponentials(), node("Div", "e s")], X, "y", LAST, ["logsumexp"]),
    "log-softmax": ([*exponentials(), node("Log", "s", "l"), node("Sub", "d l")], X, "y", LAST, ["logsumexp"]),
    "softmax by a reciprocal": (
        [*exponentials(), node("Reciprocal", "s", "r"), node("Mul", "e r")], X, "y", LAST, ["logsumexp"]
    ),
    "normalised after the product": (
        [*exponentials(), node("MatMul", "e v", "o"), node("Div", "o s")], X, "y",
        {**LAST, "v": RNG.standard_normal((13, 4)).astype(np.float32)}, ["softsum"],
    ),
    "layer norm": (moments(), X, "y", NORM, ["moments"]),
    "layer norm, squared by itself": (moments("Mul"), X, "y", NORM, ["moments"]),
    "mean and variance": (moments()[:4], X, "m v", NORM, ["moments"]),
    "instance norm": (moments(), IMAGE, "y", {**NORM, "ax": np.array([2, 3]), "w": np.float32(2), "b": np.float32(1)}, ["moments"]),
    "group norm": (
        [node("GroupNormalization", "image s t", "y", num_groups=3), *SILU], PHOTO, "z",
        {"s": GROUPS["w"].reshape(6), "t": GROUPS["b"].reshape(6)}, ["moments"],
    ),
    "group norm by instances": (groups(node("InstanceNormalization", "x one zero", "n")), PHOTO, "y", GROUPS, ["moments"]),
    "group norm by instances, then silu": (
        [*groups(node("InstanceNormalization", "x one zero", "n")), *SILU], PHOTO, "z", GROUPS, ["moments"]
    ),
    "group norm by hand": (groups(*moments()[:7]), PHOTO, "y", GROUPS, ["moments"]),
    "group norm by hand, over two axes": (
        groups(*moments("Mul")[:7]), PHOTO, "y", {**GROUPS, "by group": np.array([2, 3, 2, 15]), "ax": np.array([2, 3])}, ["moments"],
    ),
    "maximum, minimum, position, norm": (
        [node("ReduceMax", "x ax", "a"), node("ReduceMin", "x ax", "b"), node("ArgMax", "x", "c", axis=1), node("ReduceL2", "x ax", "d")],
        X, "a b c d", LAST, ["max.min.argmax.sum"],
    ),
    "several norms": (
        [node("ReduceL1", "x ax", "a"), node("ReduceL2", "x ax", "b"), node("Div", "x a", "c"), node("Div", "c b")], X, "y", LAST,
        ["sum.sum"],
    ),
    "scaled between its ends": (
        [node("ReduceMin", "x ax", "lo"), node("ReduceMax", "x ax", "hi"), node("Sub", "x lo", "a"), node("Sub", "hi lo", "r"), node("Div", "a r")],
        X, "y", LAST, ["min.max"],
    ),
    "cross-entropy by hand": (
        [node("LogSoftmax", "x", "l"), node("GatherElements", "l t", "g", axis=1), node("Neg", "g")], T1, "y", {}, ["logsumexp.sum"]
    ),
    "cross-entropy from its parts": (
        [*exponentials(), node("Log", "s", "ls"), node("Sub", "d ls", "l"), node("GatherElements", "l t", "g", axis=1), node("Neg", "g")],
        T1, "y", LAST, ["logsumexp.sum"],
    ),
}  # fmt: skip


def lifted(name: str, folder: Path) -> tuple[Graph, Graph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The graph as it is lifted, as it is simplified, its data, and what onnxruntime makes of it."""
    nodes, feeds, outs, consts, _ = CASES[name]
    model = build(nodes, feeds, outs.split(), consts, opset=21)
    found = lift_model(model, folder)
    data = {
        n: read_weight(found.model, w, found.graph.tensors[n], constants=found.constants)
        for n, w in found.graph.weights.items()
    }
    session = ort_session(model.SerializeToString())
    want = {t: np.asarray(a) for t, a in zip(outs.split(), session.run(outs.split(), feeds), strict=True)}
    return found.graph, simplify(found.graph), {**{k: v for k, v in feeds.items() if k in found.graph.inputs}, **data}, want


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CASES)
def test_one_pass_that_says_the_same(name: str, tmp_path: Path) -> None:
    before, after, feeds, want = lifted(name, tmp_path)
    assert [op.monoid for op in after.ops if isinstance(op, Block)] == CASES[name][4], to_text(after)
    assert all(isinstance(op, Block) for op in after.ops)
    same(before, after, feeds, name)
    got = interp.run(after, feeds, wide=True)
    for t, a in want.items():
        np.testing.assert_allclose(got[t], a, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "devices"), [(n, 2) for n in CASES] + [(n, 3) for n in CASES if "group norm" in n])
def test_every_strategy_on_the_cpu(name: str, devices: int, tmp_path: Path) -> None:
    _, after, feeds, _ = lifted(name, tmp_path)
    want = interp.run(after, feeds, wide=True)
    mesh = (MeshAxis("d0", devices),)
    menus = [strategies(op, mesh) for op in after.ops]
    for k in range(max(map(len, menus))):
        plan = Plan(graph=after, mesh=mesh, strategies=tuple(m[k % len(m)] for m in menus))
        program = lower(plan)
        certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=mesh)
        weights = {t: a for t, a in feeds.items() if t in after.weights}
        inputs = {t: a for t, a in feeds.items() if t in after.inputs}
        outs, _ = execute(after, program, Case(None, after, inputs, weights, want))  # type: ignore[arg-type]
        for t, a in want.items():
            close(outs[t], a)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_triton(name: str, tmp_path: Path) -> None:
    _, after, feeds, _ = lifted(name, tmp_path)
    values = {**feeds, **interp.run(after, feeds)}
    for op in after.ops:
        assert isinstance(op, Block)
        tensors = {t: after.tensors[t] for t in (*op.inputs, *op.outs)}
        lines = [f"input {t}: {tensors[t].dtype}[{', '.join(map(str, tensors[t].shape))}]" for t in op.inputs]
        if all(t in values for t in op.inputs):
            text = to_text(Graph(name="one", tensors=tensors, ops=(op,), inputs=op.inputs, outputs=op.outs))
            assert all(line in text for line in lines)
            check(text, {t: values[t] for t in op.inputs})


EXTREME = {"minus infinity": -np.inf, "infinity": np.inf, "1e30": 1e30, "-1e30": -1e30, "not a number": np.nan}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("bad", EXTREME)
@pytest.mark.parametrize("name", [n for n in CASES if "cross" not in n and CASES[n][4] != ["moments"]])
def test_extreme_values(name: str, bad: str, tmp_path: Path) -> None:
    """A value in one row, and a row full of it: NaN where the parts gave NaN, and the rest as it was."""
    before, after, feeds, _ = lifted(name, tmp_path)
    x = feeds["x"].copy()
    x[1, 2], x[3] = EXTREME[bad], EXTREME[bad]
    feeds = {**feeds, "x": x}
    with np.errstate(all="ignore"):
        want, got = interp.run(before, feeds, wide=True), interp.run(after, feeds, wide=True)
    for t, a in want.items():
        np.testing.assert_array_equal(np.isnan(got[t].astype(float)), np.isnan(a.astype(float)), err_msg=t)
        np.testing.assert_allclose(got[t], a, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n in CASES if CASES[n][4] == ["moments"]])
def test_extreme_values_of_moments(name: str, tmp_path: Path) -> None:
    """Values of 1e30 lose nothing; a row with an infinite value has a variance that is none, and the other rows do not see it.

    Which of infinity and NaN its mean is depends on the order of merging: that is the policy.
    """
    before, after, feeds, _ = lifted(name, tmp_path)
    given = next(iter(CASES[name][1]))
    x = feeds[given].copy()
    x[0] = x[0] * 1e30
    with np.errstate(all="ignore"):
        want, got = interp.run(before, {**feeds, given: x}, wide=True), interp.run(after, {**feeds, given: x}, wide=True)
    for t, a in want.items():
        np.testing.assert_allclose(got[t], a, rtol=1e-9)
    for bad in (np.inf, -np.inf, np.nan):
        x[1].flat[2] = bad
        with np.errstate(all="ignore"):
            want, got = interp.run(before, {**feeds, given: x}, wide=True), interp.run(after, {**feeds, given: x}, wide=True)
        for t, a in want.items():
            np.testing.assert_array_equal(np.isfinite(got[t]), np.isfinite(a))
            np.testing.assert_allclose(np.where(np.isfinite(a), got[t], 0), np.where(np.isfinite(a), a, 0), rtol=1e-9)


def test_halves_are_summed_in_f32(tmp_path: Path) -> None:
    model = build([*moments()[:4]], HALF, ["m", "v"], {**LAST, "two": np.float16(2)})
    graph = lift_model(model, tmp_path).graph
    after = simplify(graph)
    assert [(op.monoid, op.body[1].dtype) for op in after.ops if isinstance(op, Block)] == [("moments", "f32")]
    want, got = interp.run(graph, HALF), interp.run(after, HALF)
    for t in want:
        np.testing.assert_allclose(got[t].astype(float), want[t].astype(float), rtol=4e-3)


# refusals

LSE = """graph g
input x: f32[4, 6]
input z: f32[4, 6]
top: f32[4] = op [i: 4 | n: 6 max]
  reads x[i, n]
  body x
y: f32[4] = op [i: 4 | n: 6 sum]
  reads x[i, n], top[i]
  body exp((x - top))
output y
"""
SQUARES = """graph g
input x: f32[4, 6]
input z: f32[4, 6]
c: f32[4] = op [i: 4 | n: 6 sum]
  reads x[i, n]
  body x
  then acc0 / 6.0
y: f32[4] = op [i: 4 | n: 6 sum]
  reads x[i, n], c[i]
  body (x - c) * (x - c)
output y
"""
TWO = """graph g
input x: f32[4, 6]
input z: f32[4, 6]
top: f32[4] = op [i: 4 | n: 6 max]
  reads x[i, n]
  body x
y: f32[4] = op [i: 4 | n: 6 sum]
  reads x[i, n]
  body x
output top, y
"""


def why(rule: str, text: str) -> str:
    graph = parse(text)
    found = [f for f in RULES[rule].find(graph) if isinstance(f, Refusal)]
    assert len(found) == 1, found
    assert not [op for op in simplify(graph).ops if getattr(op, "monoid", "") in ("logsumexp", "moments")], to_text(
        simplify(graph)
    )
    same(graph, simplify(graph), random_feeds(graph, np.random.default_rng(0)), rule)
    return found[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("body exp((x - top))", "body exp((x + top))"), "its terms are not exponentials of scores less their maximum"),
        (("body exp((x - top))", "body exp((x - (top * 2.0)))"), "its terms are not exponentials of scores less their maximum"),
        (("body exp((x - top))", "body exp(((x * 2.0) - top))"), "the maximum is that of other scores"),
        (("reads x[i, n], top[i]", "reads z[i, n], top[i]\n"), "the maximum is that of other scores"),
        (("  body x\ny", "  body x\n  then min(acc0, 100.0)\ny"), "what is subtracted is not the maximum"),
        (("  body x\ny", "  body x\n  then where(eq(acc0, f32(-inf)), 3.0, acc0)\ny"), ""),
    ],
)
def test_what_is_no_log_sum_exp(change: tuple[str, str], reason: str) -> None:
    text = LSE.replace(*change).replace(
        "reads z[i, n], top[i]\n\n  body exp((x - top))", "reads z[i, n], top[i]\n  body exp((z - top))"
    )
    if not reason:  # a guard of rows that are wholly masked is understood
        assert [op.monoid for op in simplify(parse(text)).ops if isinstance(op, Block)] == ["logsumexp"]
        return
    assert why("fuse_nested", text) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("acc0 / 6.0", "acc0 / 5.0"), "what it subtracts is not the mean"),
        (("(x - c) * (x - c)", "(x - c) * (x + c)"), "its terms are not squares of distances from a mean"),
        (("(x - c) * (x - c)", "((x * 2.0) - c) * ((x * 2.0) - c)"), "the mean is that of other numbers"),
        (("c[i]\n", "c[3 - i]\n"), "it reads the other's result of another row"),
    ],
)
def test_what_are_no_moments(change: tuple[str, str], reason: str) -> None:
    assert why("fuse_nested", SQUARES.replace(*change)) == reason


def test_squares_about_the_mean_of_one_number_keep_a_nan() -> None:
    """A number less itself is NaN where it is not finite; the moments of one number are 0 about it."""
    assert why("fuse_nested", SQUARES.replace("6", "1")) == "the mean is of one number alone"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("reads x[i, n]\n  body x\noutput", "reads x[i, n], z[i, n]\n  body x * z\noutput"), "one of them is a contraction"),
        (("reads x[i, n]\n  body x\noutput", "reads x[i, 5 - n]\n  body x\noutput"), "they go over different inputs"),
        (("y: f32[4] = op [i: 4 | n: 6 sum]\n  reads x[i, n]", "y: f32[6] = op [i: 6 | n: 4 sum]\n  reads x[n, i]"), "they reduce or keep dimensions of different sizes"),
    ],
)  # fmt: skip
def test_what_is_no_product(change: tuple[str, str], reason: str) -> None:
    assert why("fuse_product", TWO.replace(*change)) == reason


def test_a_chain_between_two_reductions_keeps_them_apart() -> None:
    text = TWO.replace("y: f32", "z1: f32[4, 6] = op [i: 4, n: 6]\n  reads x[i, n], top[i]\n  body tanh((x - top))\ny: f32")
    graph = parse(text.replace("reads x[i, n]\n  body x\noutput", "reads x[i, n], z1[i, n]\n  body x + z1\noutput"))
    after = simplify(graph)
    assert [op.monoid for op in after.ops if isinstance(op, Block)] == ["max", "sum"]
    same_dependences(graph, after, "chain")


def test_pairs_that_need_each_other_crosswise_are_not_both_joined() -> None:
    """Two rows' maxima and sums, each sum finished by the other's maximum: one pair may be joined, and then the other."""
    text = """graph g
input x: f32[4, 6]
input z: f32[4, 6]
a: f32[4] = op [i: 4 | n: 6 max] reads x[i, n] body x
b: f32[4] = op [i: 4 | n: 6 max] reads z[i, n] body z
s: f32[4] = op [i: 4 | n: 6 sum] reads x[i, n], b[i] body x then acc0 * b
t: f32[4] = op [i: 4 | n: 6 sum] reads z[i, n], a[i] body z then acc0 * a
output a, b, s, t
"""
    graph = parse(text)
    after = simplify(graph)
    same(graph, after, random_feeds(graph, np.random.default_rng(0)), "crosswise")
    assert sorted(op.monoid or "" for op in after.ops if isinstance(op, Block)) == ["max", "max.sum", "sum"]


# laws


def test_the_merge_of_moments_is_proved() -> None:
    MONOIDS["moments"].proof()

    def plain(a, b):
        n = call("add", a[0], b[0])
        return n, call("div", call("add", a[1], b[1]), n), call("add", a[2], b[2])

    def lossy(a, b):
        right = MONOIDS["moments"].combine(a, b)
        return right[0], right[1], call("add", a[2], b[2])

    for wrong, field in ((plain, "mean"), (lossy, "M2")):
        with pytest.raises(TapestryError, match=f"not the moments of two sets: {field} is another"):
            prove_moments(wrong)


def test_products_need_no_registration() -> None:
    made = MONOIDS["max.argmax.moments"]
    assert made.fields == ("value0", "value1", "index", "n", "mean", "m2") and made.commutative
    assert not MONOIDS["sum.affine"].commutative
    for name in ("max.", ".max", "max.what", "what"):
        assert name not in MONOIDS
        with pytest.raises(KeyError):
            MONOIDS[name]
    assert "max.argmax.moments" not in set(MONOIDS)
    with pytest.raises(AssertionError):
        register(product("two.parts", MONOIDS["max"]))
