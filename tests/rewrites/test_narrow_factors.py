"""Contractions on 8 bits: what `narrow_factors` makes of dequantised factors, and what it refuses."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tapestry
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.syntax.parser import parse
from tapestry.plan.fusion import Machine, fused
from tapestry.plan.topology.presets import SOURCES
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule import Refusal, parse_move
from tapestry.rewrites.core.rule_check import RuleCase, check_rule, random_feeds, same
from tests.support.lifting import build, data, lift_model, node
from tests.support.triton_kernels import kernel_of

RULE = RULES["narrow_factors"]
GPU = Machine(device=SOURCES["h100"].device, eager=False)
CPU = Machine(device=SOURCES["cpu"].device, eager=True)
RNG = np.random.default_rng(11)


def linear(
    scale: str = "s[]", zero: str = "", *, shape: str = "f32[]", kind: str = "i8", then: str = "acc0", more: str = ""
) -> str:
    """x of 8 bits, scaled, times w."""
    value = f"cast((cast(q, i32) - {zero}), f32)" if zero else "cast(q, f32)"
    z = "z[]" if "i32(" not in zero else "w[m, n]"
    reads = f"q[x0, x1], {scale}" + (f", {z}" if "z" in zero else "")
    return f"""graph g input q: {kind}[5, 7] input s: {shape} input z: {kind}[] input w: f32[7, 3]
        x: f32[5, 7] = op [x0: 5, x1: 7] reads {reads} body {value} * s
        y: f32[5, 3] = op [i: 5, n: 3 | m: 7 sum] reads x[i, m], w[m, n] body x * w then {then}
        {more} output y{", v" if more else ""}"""


@pytest.mark.parametrize(("scale", "shape"), [("s[]", "f32[]"), ("s[x0]", "f32[5]")])
@pytest.mark.parametrize("zero", ["", "i32(-3)", "cast(z, i32)"])
@pytest.mark.parametrize("then", ["acc0", "max((acc0 + 1.5), 0.0)"])
def test_scales_and_zero_points(scale: str, shape: str, zero: str, then: str) -> None:
    text = linear(scale, zero, shape=shape, then=then)
    report = check_rule(RULE, RuleCase(before=text), np.random.default_rng(0))
    assert [str(m) for m in report.moves] == ["narrow_factors@y{tensor=x}"]
    assert len(RULE.apply(parse(text), report.moves[0]).ops) == 1


def test_scales_along_one_cell_that_is_summed() -> None:
    """Behind the sum its dimension is gone, of size 1 or not."""
    text = linear("s[x0, x1]", shape="f32[5, 1]").replace("7", "1")
    check_rule(RULE, RuleCase(before=text), np.random.default_rng(0))
    (op,) = RULE.apply(parse(text), parse_move("narrow_factors@y{tensor=x}")).ops
    assert isinstance(op, Block) and [str(e) for r in op.reads if r.tensor == "s" for e in r.index] == ["i", "0"]


def refusal(text: str) -> str:
    graph = parse(text)
    found = [f for f in RULE.find(graph) if isinstance(f, Refusal)]
    assert len(found) == 1
    with pytest.raises(TapestryError) as raised:
        RULE.apply(graph, parse_move("narrow_factors@y{tensor=x}"))
    assert found[0].reason in str(raised.value)
    return found[0].reason


PADDED = """graph g input q: i8[2, 3, 6] input s: f32[{n}] input z: i8[] input k: f32[4, 3, 3]
    x: f32[2, 3, 6] = op [x0: 2, x1: 3, x2: 6] reads q[x0, x1, x2], s[{at}], z[] body cast((cast(q, i32) - {zero}), f32) * s
    y: f32[2, 4, 6] = op [b: 2, o: 4, w: 6 | c: 3 sum, r: 3 sum] reads x[b, c, w + r - 1] else {other}, k[o, c, r] body x * k
      then acc0
    output y"""


def test_refusals() -> None:
    assert refusal(linear("s[x1]", shape="f32[7]")) == "scales or zero points of 'x' vary along m, which is summed"
    square = linear().replace("w[m, n]", "t = x[n, m]").replace("x * w", "x * t")
    assert refusal(square) == "'x' is read through 2 projections"
    assert refusal(linear().replace("body x * w", "body exp(x) * w")) == "'x' is not a factor of its own"
    assert refusal(linear().replace("body x * w", "body x * x")) == "'x' is not a factor of its own"
    assert refusal(
        linear().replace("m: 7 sum] reads x[i, m], w[m, n] body x * w", "m: 7 max] reads x[i, m], w[m, n] body x * w")
    ) == ("'x' is not read by a sum of products")
    padded = PADDED.format(n=2, at="x0", zero="cast(z, i32)", other="0.0")
    assert refusal(padded) == "'x' is read as 0 outside its cells, and its zero point is known only when it runs"
    assert refusal(PADDED.format(n=2, at="x0", zero="i32(4)", other="1.0")) == "'x' is read as 1.0 outside its cells"
    with pytest.raises(TapestryError, match="no scaled tensor of 8 bits"):
        RULE.apply(parse(linear()), parse_move("narrow_factors@y{tensor=w}"))
    with pytest.raises(TapestryError, match="no scaled tensor of 8 bits"):
        RULE.apply(parse(linear()), parse_move("narrow_factors@x{tensor=q}"))


def test_padding_reads_the_zero_point() -> None:
    text = PADDED.format(n=2, at="x0", zero="i32(4)", other="0.0")
    check_rule(RULE, RuleCase(before=text), np.random.default_rng(0))
    (op,) = RULE.apply(parse(text), parse_move("narrow_factors@y{tensor=x}")).ops
    assert isinstance(op, Block) and {r.other for r in op.reads if r.tensor == "q"} == {4}


def test_a_padded_part_of_a_larger_tensor() -> None:
    """Where the tensor ends is not where what it is made of ends."""
    text = (
        PADDED.format(n=2, at="x0", zero="i32(4)", other="0.0")
        .replace("q: i8[2, 3, 6]", "q: i8[2, 3, 9]")
        .replace("q[x0, x1, x2]", "q[x0, x1, x2 + 2]")
    )
    check_rule(RULE, RuleCase(before=text), np.random.default_rng(0))


def test_what_is_quantised_by_another_operation_is_stored_in_8_bits() -> None:
    """Behind a map, and behind a contraction; another reader still gets the scaled values."""
    rounded = "cast(cast(min(max(round({} / s), f32(-128.0)), f32(127.0)), i32), i8)"
    for maker in (
        f"x: f32[5, 7] = op [x0: 5, x1: 7] reads a[x0, x1], s[] body cast({rounded.format('a')}, f32) * s",
        f"x: f32[5, 7] = op [x0: 5, x1: 7 | k: 4 sum] reads b[x0, k], c[k, x1], s[] body b * c then cast({rounded.format('acc0')}, f32) * s",
    ):
        for more in ("", "v: f32[5, 7] = op [x0: 5, x1: 7] reads x[x0, x1] body neg(x)"):
            text = f"""graph g input a: f32[5, 7] input b: f32[5, 4] input c: f32[4, 7] input s: f32[] input w: f32[7, 3]
                {maker}
                y: f32[5, 3] = op [i: 5, n: 3 | m: 7 sum] reads x[i, m], w[m, n] body x * w then acc0
                {more} output y{", v" if more else ""}"""
            graph = parse(text)
            feeds = random_feeds(graph, np.random.default_rng(0)) | {"s": np.float32(0.05)}
            after = RULE.apply(graph, parse_move("narrow_factors@y{tensor=x}"))
            same(graph, after, feeds, maker)
            assert after.tensors["x.q"].dtype == "i8" and ("x" in after.tensors) == bool(more)
            chosen, moves = fused(graph, GPU)
            assert "narrow_factors@y{tensor=x}" in map(str, moves)
            same(graph, chosen, feeds, "chosen")
            same(graph, apply_moves(graph, moves), feeds, "replayed")


def test_two_sums_and_both_factors() -> None:
    text = """graph g input q: i8[5, 7] input p: u8[7, 3] input s: f32[] input t: f32[3] input v: f32[7, 3]
        x: f32[5, 7] = op [x0: 5, x1: 7] reads q[x0, x1], s[] body cast(q, f32) * s
        w: f32[7, 3] = op [x0: 7, x1: 3] reads p[x0, x1], t[x1] body cast((cast(p, i32) - i32(128)), f32) * t
        y: f32[5, 3] = op [i: 5, n: 3 | m: 7 sums2] reads x[i, m], w[m, n], v[m, n] body x * w, x * v then acc0 * sigmoid(acc1)
        output y"""
    graph = parse(text)
    check_rule(RULE, RuleCase(before=text), np.random.default_rng(0))
    after, moves = fused(graph, GPU)
    assert len(after.ops) == 1 and len(moves) == 2
    same(graph, after, random_feeds(graph, np.random.default_rng(1)), "both")
    assert not fused(graph, CPU)[1], "torch's operators multiply what is dequantised"


# models


def eight_bits(folder: Path, kind: str, columns: bool) -> tuple[dict[str, np.ndarray], Graph]:
    """DequantizeLinear of both factors, then a MatMul with a bias."""
    a, b = RNG.standard_normal((6, 9, 40)) * 40, RNG.standard_normal((40, 21)) * 40
    dtype = {"f8": ml_dtypes.float8_e4m3fn, "i8": np.int8, "u8": np.uint8}[kind]
    a, b = ((x + (100 if kind == "u8" else 0)).clip(0 if kind == "u8" else -127, 127).astype(dtype) for x in (a, b))
    scale = (RNG.random(21) + 0.5).astype(np.float32) if columns else np.float32(0.7)
    consts = {"as": np.float32(0.02), "bs": scale, "bias": data(21)}
    zeros = {"az": np.array(90, dtype), "bz": np.full(np.shape(scale), 110, dtype)} if kind == "u8" else {}
    nodes = [
        node("DequantizeLinear", "a as az" if zeros else "a as", "ad"),
        node("DequantizeLinear", "b bs bz" if zeros else "b bs", "bd", **({"axis": 1} if columns else {})),
        node("MatMul", "ad bd", "m"), node("Add", "m bias"),
    ]  # fmt: skip
    feeds = {"a": a, "b": b}
    model = build(nodes, feeds, ["y"], consts | zeros, opset=21, ir=10)
    lifted = lift_model(model, folder)
    x, w = ((v.astype(np.float64) - float(zeros[z].reshape(-1)[0] if zeros else 0)) for v, z in ((a, "az"), (b, "bz")))
    want = (x * 0.02) @ (w * scale.astype(np.float64)) + consts["bias"]
    return {**feeds, "y": want}, lifted.graph


@pytest.mark.sampled(1)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("kind", ["f8", "i8", "u8"])
def test_a_dequantised_product_is_one_kernel(tmp_path: Path, kind: str, columns: bool) -> None:
    feeds, lifted = eight_bits(tmp_path, kind, columns)
    want = feeds.pop("y")
    graph, moves = fused(simplify(lifted), GPU)
    assert len(graph.ops) == 1 and [m.rule for m in moves].count("narrow_factors") == 2
    found = kernel_form(graph, kernel_of(graph)).product
    assert found is not None and found.operand == ("f8" if kind == "f8" else "i8")
    for target, devices in (("torch-cpu", 1), ("torch-cpu", 2), ("triton:sm90", 1), ("triton:sm80", 2)):
        got = tapestry.compile(tmp_path / "model.onnx", target=target, devices=devices).run(feeds)["y"]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5 * np.abs(want).max(), err_msg=target)


def test_dynamic_quantisation_multiplies_integers(tmp_path: Path) -> None:
    w = RNG.integers(-100, 100, (40, 21)).astype(np.int8)
    nodes = [
        node("DynamicQuantizeLinear", "x", "q s z"), node("MatMulInteger", "q w z", "p"), node("Cast", "p", "f", to=1),
        node("Mul", "s ws", "scale"), node("Mul", "f scale"),
    ]  # fmt: skip
    x = data(17, 40)
    model = build(nodes, {"x": x}, ["y"], {"w": w, "ws": np.float32(0.01)})
    lifted = lift_model(model, tmp_path)
    graph, _ = fused(simplify(lifted.graph), GPU)
    kinds = [kernel_form(graph, kernel_of(graph, k)) for k in range(len(graph.ops))]
    assert [k.product.operand for k in kinds if k.product] == ["i8"]
    want = tapestry.compile(tmp_path / "model.onnx").run({"x": x})["y"]
    got = tapestry.compile(tmp_path / "model.onnx", target="triton:sm90").run({"x": x})["y"]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(got, x @ (w * np.float32(0.01)), rtol=0.1, atol=0.1)


@pytest.mark.slow
def test_a_net_of_quantised_convolutions(tmp_path: Path) -> None:
    """What quantisers write: activations, weights by filter and biases in integers, each dequantised around a convolution."""
    q = lambda *s: RNG.integers(-100, 100, s)  # noqa: E731
    consts = {
        "w": q(20, 18, 3, 3).astype(np.int8), "b": q(20).astype(np.int32), "s": np.float32(0.05), "z": np.uint8(100),
        "ws": (RNG.random(20) / 500 + 0.001).astype(np.float32), "bs": np.full(20, 0.001, np.float32), "wz": np.zeros(20, np.int8),
        "v": q(24, 20, 3, 3).astype(np.int8), "vs": np.float32(0.002),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x s z", "xq"), node("DequantizeLinear", "xq s z", "xd"),
        node("DequantizeLinear", "w ws wz", "wd", axis=0), node("DequantizeLinear", "b bs", "bd", axis=0),
        node("Conv", "xd wd bd", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "r"),
        node("QuantizeLinear", "r s z", "rq"), node("DequantizeLinear", "rq s z", "rd"), node("DequantizeLinear", "v vs", "vd"),
        node("Conv", "rd vd", strides=[2, 2], pads=[1, 1, 1, 1]),
    ]  # fmt: skip
    x = data(2, 18, 9, 8)
    lifted = lift_model(build(nodes, {"x": x}, ["y"], consts, opset=13), tmp_path)
    graph, moves = fused(simplify(lifted.graph), GPU)
    before = simplify(lifted.graph)
    feeds = {n: v for n, v in {**random_feeds(before, RNG), **consts, "x": x}.items() if n in before.tensors}
    same(before, apply_moves(before, moves), feeds, "moves")
    found = [p for k in range(len(graph.ops)) if (p := kernel_form(graph, kernel_of(graph, k)).product)]
    assert [p.operand for p in found] == ["i8", "i8"], "both, activations stored in bytes between them"
    want = tapestry.compile(tmp_path / "model.onnx").run({"x": x})["y"]
    got = tapestry.compile(tmp_path / "model.onnx", target="triton:sm90").run({"x": x})["y"]
    off = np.abs(got - want) / np.abs(want).max()
    assert (off > 1e-5).mean() < 0.02 and off.max() < 0.05  # one step of 8 bits, at a tie
