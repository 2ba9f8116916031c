"""Integers and floats of 8 bits: what the operators on them lift to, and what is made of them, against numpy and onnxruntime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T
from onnx import helper

import tapestry
from tapestry.codegen.torch_cpu.torch_ops import integers
from tapestry.ir.graph import Block
from tapestry.onnx_eval.ort_session import ort_session
from tests.support.lifting import build, data, evaluate, lift_model, node

RNG = np.random.default_rng(5)


# products of integers


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kinds", ["uint8 uint8", "uint8 int8", "int8 int8"])
@pytest.mark.parametrize("zeros", ["none", "scalars", "rows", "read"])
def test_integer_products(tmp_path, kinds, zeros):
    """Bit for bit what ONNX's reference gives, as block operations."""
    a, b = kinds.split()
    whole = lambda kind, *s: RNG.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, s).astype(kind)  # noqa: E731
    x, w = whole(a, 2, 5, 9), whole(b, 9, 4)
    p, q = (whole(a, 5) if zeros == "rows" else whole(a)), (whole(b, 4) if zeros == "rows" else whole(b))
    x = x[0] if zeros == "rows" else x
    feeds = {"x": x, "w": w} | ({"p": p, "q": q} if zeros == "read" else {})
    made = node("MatMulInteger", "x w" if zeros == "none" else "x w p q")
    model = build([made], feeds, ["y"], {} if zeros in ("none", "read") else {"p": p, "q": q})
    lifted = lift_model(model, tmp_path)
    assert [op.monoid for op in lifted.graph.ops] == ["sum"]
    left = x.astype(np.int32) - (p.astype(np.int32)[..., None] if zeros != "none" else 0)
    want = left @ (w.astype(np.int32) - (q.astype(np.int32) if zeros != "none" else 0))
    assert np.array_equal(evaluate(lifted, feeds)["y"], want)
    found = tapestry.compile(tmp_path / "model.onnx", devices=2).run(feeds)["y"]
    assert found.dtype == np.int32 and np.array_equal(found, want)


def test_sums_beyond_i32_wrap_in_batches():
    """As the integer product's do, so that taking off zero points gives what is within again."""
    x, y = torch.full((17, 1, 40000), 255.0), torch.full((17, 40000, 1), 255.0)
    want = (x.long() @ y.long()).to(torch.int32)
    assert torch.equal(integers._in_floats(x, y), want) and torch.equal(integers._in_floats(x[:1], y[:1]), want[:1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("zero", [0, 9, None])
def test_integer_convolutions(tmp_path, groups, zero):
    """Padding is x's zero point; one that is read while a window leaves x stays with ONNX."""
    x, w = RNG.integers(0, 256, (2, 4, 6, 5)).astype(np.uint8), RNG.integers(-128, 128, (6, 4 // groups, 3, 3)).astype(np.int8)
    feeds, z = {"x": x}, np.array(7 if zero is None else zero, np.uint8)
    consts = {"w": w} | ({} if zero is None else {"z": z})
    feeds |= {"z": z} if zero is None else {}
    model = build([node("ConvInteger", "x w z", pads=[1, 1, 1, 1], group=groups)], feeds, ["y"], consts)
    lifted = lift_model(model, tmp_path)
    assert isinstance(lifted.graph.ops[0], Block) == (zero is not None)
    session = ort_session(model.SerializeToString())
    (want,) = session.run(["y"], feeds)
    assert np.array_equal(evaluate(lifted, feeds)["y"], want)
    assert np.array_equal(tapestry.compile(tmp_path / "model.onnx", devices=2).run(feeds)["y"], want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("out", ["uint8", "int8"])
@pytest.mark.parametrize("columns", [False, True])
def test_products_scaled_and_rounded(tmp_path, out, columns):
    a, b = RNG.integers(0, 256, (3, 7, 33)).astype(np.uint8), RNG.integers(-128, 128, (33, 6)).astype(np.int8)
    scale = (RNG.random(6).astype(np.float32) + 0.5) / 50 if columns else np.float32(0.013)
    consts = {
        "as": np.float32(0.05), "az": np.uint8(100), "b": b, "bs": scale, "bz": np.zeros(np.shape(scale), np.int8),
        "ys": np.float32(0.3), "yz": np.array(5, out),
    }  # fmt: skip
    if out == "int8":
        a, consts["az"] = (a.astype(np.int32) - 128).astype(np.int8), np.int8(-3)
    model = build([node("QLinearMatMul", "a as az b bs bz ys yz")], {"a": a}, ["y"], consts, opset=21, ir=10)
    lifted = lift_model(model, tmp_path)
    assert [op.monoid for op in lifted.graph.ops] == ["sum"]
    total = (a.astype(np.int32) - int(consts["az"])) @ b.astype(np.int32)
    scaled = np.rint(total.astype(np.float32) * (consts["as"] * scale / consts["ys"]))
    want = np.clip(scaled + 5, np.iinfo(out).min, np.iinfo(out).max).astype(out)
    got = evaluate(lifted, {"a": a})["y"]
    assert np.array_equal(got, want) and np.array_equal(tapestry.compile(tmp_path / "model.onnx").run({"a": a})["y"], want)


# floats of 8 bits


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [T.FLOAT8E4M3FN, T.FLOAT8E4M3FNUZ, T.FLOAT8E5M2, T.FLOAT8E5M2FNUZ])
@pytest.mark.parametrize("to", [T.FLOAT, T.FLOAT16, T.BFLOAT16])
def test_widening_a_float_of_8_bits(tmp_path, kind, to):
    """All 256 values; casts that narrow stay with ONNX."""
    bits = np.arange(256, dtype=np.uint8).view(helper.tensor_dtype_to_np_dtype(kind))
    model = build(
        [node("Cast", "x", "n", to=kind), node("Cast", "n", to=to)], {"x": bits.astype(np.float32)}, ["y"], opset=21, ir=10
    )
    lifted = lift_model(model, tmp_path)
    assert [type(op).__name__ for op in lifted.graph.ops] == ["Opaque", "Block"]
    want = bits.astype(np.float32)
    for got in (evaluate(lifted, {"x": want})["y"], tapestry.compile(tmp_path / "model.onnx").run({"x": want})["y"]):
        finite = np.isfinite(want)
        np.testing.assert_array_equal(got.astype(np.float32)[finite], want[finite])


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_dequantising_floats_of_8_bits(tmp_path, axis):
    q = (data(5, 4) * 100).astype(ml_dtypes.float8_e4m3fn)
    scale = np.float32(0.3) if axis is None else RNG.random(q.shape[axis]).astype(np.float32)
    made = node("DequantizeLinear", "q s z", **({} if axis is None else {"axis": axis}))
    consts = {"q": q, "s": scale, "z": np.zeros(np.shape(scale), q.dtype)}
    graph = lift_model(build([made, node("Add", "y x", "t")], {"x": data(5, 4)}, ["t"], consts, opset=21, ir=10), tmp_path)
    x = data(5, 4)
    by = scale if axis is None else np.expand_dims(scale, 1 - axis)
    np.testing.assert_allclose(evaluate(graph, {"x": x})["t"], q.astype(np.float32) * by + x, rtol=1e-6)
    assert all(isinstance(op, Block) for op in graph.graph.ops)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size, block", [((5,), 3), ((4, 5), 2), ((5, 5), 4)])
def test_blocks_of_4_bits_stay_with_the_axis_that_they_divide(tmp_path, size, block):
    """Scales by blocks along the last axis, also of a vector: cut along the others, on three devices."""
    x, w = RNG.integers(-9, 10, size).astype(np.float32), RNG.integers(-8, 8, size).astype(ml_dtypes.int4)
    scale = 2.0 ** RNG.integers(-2, 2, (*size[:-1], -(-size[-1] // block))).astype(np.float32)
    zero = RNG.integers(-3, 3, scale.shape).astype(ml_dtypes.int4)
    nodes = [
        node(k, f"{n} s z", n + "y", axis=-1, block_size=block) for k, n in (("QuantizeLinear", "x"), ("DequantizeLinear", "w"))
    ]
    back = node("DequantizeLinear", "xy s z", "y", axis=-1, block_size=block)
    stored = {"s": scale, "z": zero, "w": w}
    onnx.save(build([*nodes, back], {"x": x}, ["y", "wy"], stored, opset=21, ir=10), tmp_path / "m.onnx")
    found = tapestry.compile(tmp_path / "m.onnx", devices=3).run({"x": x})
    wide = [np.repeat(a.astype(np.float32), block, -1)[..., : size[-1]] for a in (scale, zero)]
    kept = np.clip(np.round(x / wide[0]) + wide[1], -8, 7)
    assert np.array_equal(found["y"], (kept - wide[1]) * wide[0])
    assert np.array_equal(found["wy"], (w.astype(np.float32) - wide[1]) * wide[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["both signs", "positive", "negative", "zeros", "one"])
def test_dynamic_quantisation(tmp_path, what):
    """Scale, zero point and bytes, bit for bit."""
    x = data(5, 33)
    x = {"positive": abs(x) + 3, "negative": -abs(x), "zeros": x * 0, "one": x[:1, :1]}.get(what, x)
    model = build([node("DynamicQuantizeLinear", "x", "y s z")], {"x": x}, ["y", "s", "z"])
    lifted = lift_model(model, tmp_path)
    assert all(isinstance(op, Block) for op in lifted.graph.ops)
    session = ort_session(model.SerializeToString())
    want = dict(zip("ysz", session.run(list("ysz"), {"x": x}), strict=True))
    for got in (evaluate(lifted, {"x": x}), tapestry.compile(tmp_path / "model.onnx", devices=2).run({"x": x})):
        for name, array in want.items():
            assert got[name].dtype == array.dtype and np.array_equal(got[name], array), name
