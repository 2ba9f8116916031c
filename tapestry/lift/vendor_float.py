"""onnxruntime's fused operators on floats: norms, activations, products, attention. See `lift.vendor`."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from tapestry.lift.vendor import MICROSOFT, Body, Undefined, defines


def _norm(b: Body, x: str, scale: str, bias: str, epsilon: float, *, centred: bool) -> list[str]:
    """Over the last axis, in float32: the result, the mean, one over the deviation."""
    f = b.real(x)
    mean = b.mean(f, -1) if centred else ""
    gap = b("Sub", f, mean) if centred else f
    deviation = b("Sqrt", b("Add", b.mean(b("Mul", gap, gap), -1), b.const(b.get("epsilon", epsilon))))
    y = b("Mul", b.like(b("Div", gap, deviation), x), scale)
    return [b("Add", y, bias) if bias else y, mean, b("Reciprocal", deviation)]


def _last(b: Body) -> None:
    axis = b.get("axis", -1)
    b.need(axis == -1 or axis + 1 == b.ranks.get("i0"))


@defines("LayerNormalization", domains=("", MICROSOFT))
def layer_norm(b: Body) -> list[str]:
    """onnxruntime's own, before opset 17: x, scale, bias."""
    _last(b)
    return _norm(b, b.ins[0], b.ins[1], b.ins[2] if b.has(2) else "", 1e-5, centred=True)


@defines("SimplifiedLayerNormalization", domains=("", MICROSOFT))
def rms_norm(b: Body) -> list[str]:
    """x divided by the root of the mean of its squares, times a scale."""
    _last(b)
    y, _, spread = _norm(b, b.ins[0], b.ins[1], "", 1e-5, centred=False)
    return [y, spread]


@defines("SkipLayerNormalization")
def skip_layer_norm(b: Body) -> list[str]:
    """The norm of input + skip (+ bias); the fourth output is that sum."""
    total = b.add(b("Add", b.ins[0], b.ins[1]), 4)
    return [*_norm(b, total, b.ins[2], b.ins[3] if b.has(3) else "", 1e-12, centred=True), total]


@defines("SkipSimplifiedLayerNormalization")
def skip_rms_norm(b: Body) -> list[str]:
    """The same without mean and beta: input, skip, gamma, bias."""
    total = b.add(b("Add", b.ins[0], b.ins[1]), 3)
    y, _, spread = _norm(b, total, b.ins[2], "", 1e-12, centred=False)
    return [y, "", spread, total]


@defines("EmbedLayerNormalization")
def embed_layer_norm(b: Body) -> list[str]:
    """Words, places and segments of tokens, added and normalised; the second output counts the tokens of a mask."""
    b.need(b.version >= 13)
    ids, positions = b.ins[0], b.ins[8] if b.has(8) else ""
    if not positions:
        length = b("Gather", b("Shape", ids), b.const(1, np.int64))
        positions = b("Range", b.const(0, np.int64), length, b.const(1, np.int64))
    total = b("Add", b("Gather", b.ins[2], ids), b("Gather", b.ins[3], positions))
    if b.has(1):
        total = b("Add", total, b("Gather", b.ins[4], b.ins[1]))
    y = _norm(b, total, b.ins[5], b.ins[6], 1e-12, centred=True)[0]
    mask = b("Cast", b.ins[7] if b.has(7) else b("Sub", ids, ids), to=TensorProto.INT32)
    counts = "" if b.get("mask_index_type", 0) else b("ReduceSum", mask, b.const([1], np.int64), keepdims=0)
    return [y, counts, total]


# activations


def _gelu(b: Body, x: str) -> str:
    half = b("Add", b("Erf", b("Div", x, b.scalar(2**0.5, x))), b.scalar(1, x))
    return b("Mul", b("Mul", x, half), b.scalar(0.5, x))


@defines("Gelu", "BiasGelu")
def gelu(b: Body) -> list[str]:
    """x (+ bias) times the normal distribution."""
    return [_gelu(b, b.add(b.ins[0], 1))]


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


# attention


def _heads(b: Body, x: str, heads: int) -> str:
    return b("Transpose", b("Reshape", x, b.const([0, 0, heads, -1], np.int64)), perm=[0, 2, 1, 3])


def _attend(b: Body, q: str, k: str, v: str, masks: list[str]) -> str:
    """Heads of queries (B, N, S, d) with keys and values; back to (B, S, N d)."""
    scale = b.get("scale", 0.0)
    if not scale:
        width = b("Cast", b("Gather", b("Shape", q), b.const(3, np.int64)), to=TensorProto.FLOAT)
        factor = b.like(b("Reciprocal", b("Sqrt", width)), q)
    scores = b("Mul", b("MatMul", q, b("Transpose", k, perm=[0, 1, 3, 2])), b.scalar(scale, q) if scale else factor)
    for mask in masks:
        scores = b("Add", scores, mask)
    if b.get("unidirectional", 0):
        scores = b("Add", scores, _causal(b, q, k))
    mixed = b("MatMul", b("Softmax", scores, axis=-1), v)
    return b("Reshape", b("Transpose", mixed, perm=[0, 2, 1, 3]), b.const([0, 0, -1], np.int64))


def _causal(b: Body, q: str, k: str) -> str:
    """0 where a query may look, the filter value at keys after its own place; the last query is at the last key."""
    one, zero = b.const(1, np.int64), b.const(0, np.int64)
    rows, columns = (b("Gather", b("Shape", x), b.const(2, np.int64)) for x in (q, k))
    query = b("Add", b("Range", zero, rows, one), b("Sub", columns, rows))
    later = b("Less", b.unsqueeze(query, 1), b.unsqueeze(b("Range", zero, columns, one), 0))
    filtered = b.scalar(b.get("mask_filter_value", -10000.0), q)
    return b("Where", later, filtered, b.scalar(0, q))


def _padding(b: Body, k: int, like: str) -> str:
    """A mask of (batch, keys), 1 where there is a token, as what to add to scores."""
    b.need(b.ranks.get(f"i{k}") == 2)
    there = b("Cast", b.unsqueeze(b.unsqueeze(b.ins[k], 1), 1), to=TensorProto.BOOL)
    return b("Where", there, b.scalar(0, like), b.scalar(b.get("mask_filter_value", -10000.0), like))


def _parts(b: Body, q: str, v: str) -> list[str]:
    """The bias of queries, keys and values, apart: the first two are as wide as q, the last as v."""
    wide, last = (b("Gather", b("Shape", x), b.const([2], np.int64)) for x in (q, v))
    first = b("Split", b.ins[3], b("Concat", wide, wide, last, axis=0), axis=0, outs=3)
    return [first, f"{first}.1", f"{first}.2"]


@defines("MultiHeadAttention")
def multi_head_attention(b: Body) -> list[str]:
    """query, key, value (batch, length, heads * width; key and value perhaps with heads already), bias of all three,
    padding mask, bias of the scores, past key and value."""
    b.need(all(b.has(k) for k in range(3)) and not any(b.has(k) for k in range(8, len(b.ins))) and b.version >= 13)
    b.need(b.ranks.get("i0") == 3 and b.ranks.get("i1") == b.ranks.get("i2") and b.ranks.get("i1") in (3, 4))
    heads, apart = b.get("num_heads", 0), b.ranks["i1"] == 4
    b.need(heads > 0 and not (apart and (b.has(6) or b.has(3))))
    q, k, v = b.ins[:3]
    if b.has(3):
        q, k, v = (b("Add", x, part) for x, part in zip((q, k, v), _parts(b, q, v), strict=True))
    q = _heads(b, q, heads)
    k, v = (x if apart else _heads(b, x, heads) for x in (k, v))
    if b.has(6) and b.has(7):
        k, v = b("Concat", b.ins[6], k, axis=2), b("Concat", b.ins[7], v, axis=2)
    masks = [_padding(b, 4, q)] if b.has(4) else []
    return [_attend(b, q, k, v, masks + ([b.ins[5]] if b.has(5) else [])), k, v]


@defines("Attention")
def attention(b: Body) -> list[str]:
    """The same with one product for queries, keys and values: input, weights, bias, mask, past, bias of the scores."""
    b.need(not b.has(4) and not any(b.has(k) for k in range(6, len(b.ins))) and not b.get("do_rotary", 0) and b.version >= 13)
    heads, sizes = b.get("num_heads", 0), [int(v) for v in b.attributes.get("qkv_hidden_sizes", [])]
    b.need(heads > 0 and len(sizes) in (0, 3))
    joined = b.add(b("MatMul", b.ins[0], b.ins[1]), 2)
    if sizes:
        first = b("Split", joined, b.const(sizes, np.int64), axis=-1, outs=3)
    else:
        first = b("Split", joined, axis=-1, outs=3, **({"num_outputs": 3} if b.version >= 18 else {}))
    q, k, v = (_heads(b, x, heads) for x in (first, f"{first}.1", f"{first}.2"))
    masks = [_padding(b, 3, q)] if b.has(3) else []
    return [_attend(b, q, k, v, masks + ([b.ins[5]] if b.has(5) else []))]
