"""onnxruntime's quantised operators: integers to floats, the operator, and back. See `lift.operators.contrib.microsoft`."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tapestry.lift.file.protos import MICROSOFT
from tapestry.lift.operators.contrib.microsoft import Body, defines

RANGE: dict[int, tuple[int, int]] = {TensorProto.UINT16: (0, 65535), TensorProto.INT16: (-32768, 32767)}
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def _real(b: Body, k: int, *, axis: int | None = None) -> str:
    """Input k as floats, its scale and zero point behind it."""
    ins = [i for i in b.ins[k : k + 3] if i]
    return b("DequantizeLinear", *ins, **({} if axis is None else {"axis": axis}))


def _quantised(b: Body, y: str, k: int) -> str:
    """Floats as integers by the scale and zero point from input k on."""
    return b("QuantizeLinear", y, *[i for i in b.ins[k : k + 2] if i])


@defines("QuantizeLinear", "DequantizeLinear")
def quantize(b: Body) -> list[str]:
    """ONNX's own, in onnxruntime's domain, which had 16 bits before ONNX."""
    ins = [i for i in b.ins if i]
    code = b.codes.get(f"i{len(ins) - 1}", 0)
    b.need(bool(code))
    if code not in RANGE or b.version >= 21:
        return [b(b.node_kind, *ins, **b.attributes)]
    b.need(b.has(2) and b.ranks.get("i1") == 0 == b.ranks.get("i2"))
    x, zero = b.real(b.ins[0]), b.real(b.ins[2])
    if b.node_kind == "DequantizeLinear":
        return [b("Mul", b("Sub", x, zero), b.ins[1])]
    low, high = (b.const(v) for v in RANGE[code])
    whole = b("Add", b("Round", b("Div", x, b.ins[1])), zero)
    return [b("Cast", b("Min", b("Max", whole, low), high), to=code)]


@defines("QLinearAdd", "QLinearMul")
def arithmetic(b: Body) -> list[str]:
    """Of two quantised tensors."""
    return [_quantised(b, b(b.node_kind.removeprefix("QLinear"), _real(b, 0), _real(b, 3)), 6)]


@defines("QLinearSigmoid", "QLinearLeakyRelu", "QLinearGlobalAveragePool", "QLinearAveragePool", "QLinearSoftmax")
def of_one(b: Body) -> list[str]:
    """Of one quantised tensor."""
    kind, attributes = b.node_kind.removeprefix("QLinear"), dict(b.attributes)
    b.need(not attributes.pop("channels_last", 0))
    b.need(kind != "Softmax" or (attributes.pop("opset", 13) >= 13 and b.version >= 13))
    return [_quantised(b, b(kind, _real(b, 0), **attributes), 3)]


@defines("QLinearConcat")
def concat(b: Body) -> list[str]:
    """The result's scale and zero point, then three inputs for each part."""
    b.need(len(b.ins) % 3 == 2)
    return [_quantised(b, b("Concat", *(_real(b, k) for k in range(2, len(b.ins), 3)), axis=b.get("axis", 0)), 0)]


@defines("QLinearWhere")
def where(b: Body) -> list[str]:
    """A condition, and two quantised tensors."""
    return [_quantised(b, b("Where", b.ins[0], _real(b, 1), _real(b, 4)), 7)]


@defines("QGemm")
def gemm(b: Body) -> list[str]:
    """alpha A B + C, where C counts in units of alpha times both scales; floats where the result has no scale."""
    alpha, swapped = b.get("alpha", 1.0), b.get("transB", 0)
    factors = [_real(b, 0), _real(b, 3, axis=0 if swapped else 1)]
    y = b("Gemm", *factors, alpha=alpha, transA=b.get("transA", 0), transB=swapped)
    if b.has(6):
        unit = b("Mul", b("Mul", b.ins[1], b.ins[4]), b.const(alpha))
        y = b("Add", y, b("Mul", b.real(b.ins[6]), unit))
    return [_quantised(b, y, 7) if b.has(7) else y]


@defines("MatMulIntegerToFloat")
def integer_product(b: Body) -> list[str]:
    """A, B, their scales, their zero points, a bias: an exact product of integers, then floats."""
    whole = b("MatMulInteger", *b.ins[:2], *(b.ins[4:6] if b.has(4) or b.has(5) else []))
    y = b("Mul", b.real(whole), b("Mul", b.ins[2], b.ins[3]))
    return [b.add(y, 6)]


@defines("DynamicQuantizeMatMul")
def dynamic_product(b: Body) -> list[str]:
    """A in floats, B with its scale and zero point, a bias."""
    a = b("DynamicQuantizeLinear", b.ins[0], outs=3)
    whole = b("MatMulInteger", a, b.ins[1], f"{a}.2", *([b.ins[3]] if b.has(3) else []))
    return [b.add(b("Mul", b.real(whole), b("Mul", f"{a}.1", b.ins[2])), 4)]


def _unpacked(b: Body, x: str, bits: int) -> str:
    """Numbers of some bits out of bytes, the lowest bits first, along a new last axis."""
    x = b("Cast", x, to=TensorProto.INT32)
    parts: list[str] = []
    for k in range(8 // bits):
        shifted = b("Div", x, b.const(1 << bits * k, np.int32)) if k else x
        parts.append(b.unsqueeze(b("Mod", shifted, b.const(1 << bits, np.int32)), -1))
    return b("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]


@defines("MatMulNBits", domains=(MICROSOFT,))
def nbits(b: Body) -> list[str]:
    """A times a weight of 2, 4 or 8 bits: B (N, blocks, bytes), a scale and perhaps a zero point per block, a bias."""
    bits, size, columns, rows = (b.get(k, d) for k, d in (("bits", 4), ("block_size", 0), ("N", 0), ("K", 0)))
    b.need(bits in (2, 4, 8) and min(size, columns, rows) > 0 and not b.has(4) and b.version >= 13)
    blocks = -(-rows // size)
    q = b.real(b.shaped(_unpacked(b, b.ins[1], bits), columns, blocks, size))
    zero = b.const(1 << bits - 1)
    if b.has(3):
        code = b.codes.get("i3")
        b.need(code == TensorProto.UINT8 or code in FLOATS)
        if code == TensorProto.UINT8:
            flat = b.shaped(_unpacked(b, b.shaped(b.ins[3], columns, -1), bits), columns, -1)
            whole = b("Slice", flat, *(b.ints([v]) for v in (0, blocks, 1)))
            zero = b.real(b.shaped(whole, columns, blocks, 1))
        else:
            zero = b.shaped(b.real(b.ins[3]), columns, blocks, 1)
    scaled = b("Mul", b("Sub", q, zero), b.shaped(b.real(b.ins[2]), columns, blocks, 1))
    weight = b("Slice", b.shaped(scaled, columns, -1), *(b.ints([v]) for v in (0, rows, 1)))
    return [b.add(b("MatMul", b.ins[0], b("Transpose", b.like(weight, b.ins[0]), perm=[1, 0])), 5)]
