"""onnxruntime's fused operators on floats: norms, activations, products. See `lift.operators.contrib.microsoft`."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto

from tapestry.lift.file.protos import MICROSOFT
from tapestry.lift.operators.contrib.microsoft import CASTS, Body, Undefined, defines


def _norm(b: Body, x: str, scale: str, bias: str, epsilon: float, *, centred: bool) -> list[str]:
    """Over the last axis, in float32: the result, the mean, one over the deviation."""
    f = b.real(x)
    mean = b.mean(f, -1) if centred else ""
    gap = b("Sub", f, mean) if centred else f
    deviation = b("Sqrt", b("Add", b.mean(b("Mul", gap, gap), -1), b.const(b.get("epsilon", epsilon))))
    y = b("Mul", b.like(b("Div", gap, deviation), x), scale)
    return [b("Add", y, bias) if bias else y, mean, b("Reciprocal", deviation)]


@defines("LayerNormalization", "SimplifiedLayerNormalization", domains=("", MICROSOFT))
def layer_norm(b: Body) -> list[str]:
    """Before opset 17: x, scale, bias. The simplified one divides by the root of the mean of squares and has no bias."""
    axis, centred = b.get("axis", -1), b.node_kind == "LayerNormalization"
    b.need(axis == -1 or axis + 1 == b.ranks.get("i0"))
    y, mean, spread = _norm(b, b.ins[0], b.ins[1], b.ins[2] if centred and b.has(2) else "", 1e-5, centred=centred)
    return [y, mean, spread] if centred else [y, spread]


@defines("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def skip_layer_norm(b: Body) -> list[str]:
    """The norm of input + skip (+ bias), and that sum as fourth output: input, skip, gamma, beta, bias.

    The simplified one has neither beta nor mean.
    """
    centred = b.node_kind == "SkipLayerNormalization"
    total = b.add(b("Add", b.ins[0], b.ins[1]), 4 if centred else 3)
    return [*_norm(b, total, b.ins[2], b.ins[3] if centred and b.has(3) else "", 1e-12, centred=centred), total]


@defines("EmbedLayerNormalization")
def embed_layer_norm(b: Body) -> list[str]:
    """Words, places and segments of tokens, added and normalised; the second output counts the tokens of a mask."""
    b.need(b.version >= 13)
    ids, positions = b.ins[0], b.ins[8] if b.has(8) else ""
    if not positions:
        length = b("Gather", b("Shape", ids), b.ints(1))
        positions = b("Range", b.ints(0), length, b.ints(1))
    total = b("Add", b("Gather", b.ins[2], ids), b("Gather", b.ins[3], positions))
    if b.has(1):
        total = b("Add", total, b("Gather", b.ins[4], b.ins[1]))
    y = _norm(b, total, b.ins[5], b.ins[6], 1e-12, centred=True)[0]
    mask = b("Cast", b.ins[7] if b.has(7) else b("Sub", ids, ids), to=TensorProto.INT32)
    counts = "" if b.get("mask_index_type", 0) else b("ReduceSum", mask, b.ints([1]), keepdims=0)
    return [y, counts, total]


# activations


@defines("Gelu", "BiasGelu")
def gelu(b: Body) -> list[str]:
    """x (+ bias) times the normal distribution."""
    x = b.add(b.ins[0], 1)
    half = b("Add", b("Erf", b("Div", x, b.scalar(2**0.5, x))), b.scalar(1, x))
    return [b("Mul", b("Mul", x, half), b.scalar(0.5, x))]


@defines("FastGelu")
def fast_gelu(b: Body) -> list[str]:
    """The same by tanh."""
    x = b.add(b.ins[0], 1)
    inner = b("Mul", x, b("Add", b("Mul", b("Mul", x, x), b.scalar(0.035677408136300125, x)), b.scalar(0.7978845608028654, x)))
    return [b("Mul", b("Mul", x, b.scalar(0.5, x)), b("Add", b("Tanh", inner), b.scalar(1, x)))]


@defines("QuickGelu")
def quick_gelu(b: Body) -> list[str]:
    """x times the logistic function of alpha x."""
    x = b.ins[0]
    return [b("Mul", x, b("Sigmoid", b("Mul", x, b.scalar(b.get("alpha", 1.702), x))))]


def _activated(b: Body, y: str, kind: str, given: list[float]) -> str:
    if not kind:
        return y
    names = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Relu": (), "Tanh": (), "Sigmoid": (), "Clip": ("", "")}
    b.need(kind in names and (not given or len(given) == len(names[kind])))
    if kind == "Clip":
        b.need(len(given) == 2)
        return b("Min", b("Max", y, b.scalar(given[0], y)), b.scalar(given[1], y))
    attributes: dict[str, Any] = dict(zip(names[kind], given, strict=False))
    return b(kind, y, **attributes)


@defines("FusedConv")
def fused_conv(b: Body) -> list[str]:
    """A convolution, a sum (the fourth input) and an activation."""
    own = ("activation", "activation_params")
    conv = b("Conv", *b.ins[:3], **{k: v for k, v in b.attributes.items() if k not in own})
    return [_activated(b, b.add(conv, 3), b.get("activation", ""), [float(v) for v in b.attributes.get(own[1], [])])]


@defines("FusedGemm")
def fused_gemm(b: Body) -> list[str]:
    """A Gemm and an activation."""
    gemm = b("Gemm", *b.ins, **{k: v for k, v in b.attributes.items() if not k.startswith("activation")})
    b.need(not {"activation_gamma"} & set(b.attributes))
    given = [float(b.attributes[k]) for k in ("activation_alpha", "activation_beta") if k in b.attributes]
    return [_activated(b, gemm, b.get("activation", ""), given)]


@defines("FusedMatMul", "TransposeMatMul")
def fused_matmul(b: Body) -> list[str]:
    """alpha A B, either of them with its last two axes swapped."""
    b.need(not b.get("transBatchA", 0) and not b.get("transBatchB", 0))
    factors = [_swapped(b, k) if b.get(f"trans{x}", 0) else b.ins[k] for k, x in enumerate("AB")]
    y = b("MatMul", *factors)
    alpha = b.get("alpha", 1.0)
    return [y if alpha == 1.0 else b("Mul", y, b.scalar(alpha, y))]


def _swapped(b: Body, k: int) -> str:
    rank = b.ranks.get(f"i{k}", 0)
    if not rank:
        raise Undefined
    return b("Transpose", b.ins[k], perm=[*range(rank - 2), rank - 1, rank - 2]) if rank > 1 else b.ins[k]


CONTRIB_STANDARD = {"Range": 11, "Trilu": 14, "GatherND": 11, "GridSample": 16}
NEW_NAMES = {"bilinear": "linear", "bicubic": "cubic"}  # of GridSample's modes from opset 20


@defines(*CONTRIB_STANDARD)
def standard(b: Body) -> list[str]:
    """What has become an operator of ONNX, from the opset that has it; tf2onnx and older exporters of torch write these."""
    b.need(b.version >= CONTRIB_STANDARD[b.node_kind])
    if b.node_kind == "Range":
        return [b("Range", *_bounds(b))]
    attributes = dict(b.attributes)
    if b.node_kind == "GridSample" and b.version >= 20:
        mode = b.get("mode", "bilinear")
        attributes["mode"] = NEW_NAMES.get(mode, mode)
    return [b(b.node_kind, *b.ins, **attributes)]


def _bounds(b: Body) -> list[str]:
    """Start, limit and step as scalars: a list of one will do, and the step is 1 where it is not given."""
    start, limit, *step = (b("Squeeze", i) for i in b.ins)
    if not step:
        code = b.codes.get(b.ins[0], 0)
        b.need(code != 0 or b.version >= CASTS)
        step = [b("Cast", b.const(1.0), to=code) if code else b.scalar(1.0, start)]
    return [start, limit, *step]
