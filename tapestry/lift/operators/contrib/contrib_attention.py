"""onnxruntime's fused attention (one product, several heads, grouped heads, caches), rotary embeddings. See `contrib`."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tapestry.lift.operators.contrib.microsoft import Body, defines


def _swapped(b: Body, x: str) -> str:
    """Heads in front of positions, or behind them again."""
    return b("Transpose", x, perm=[0, 2, 1, 3])


def _heads(b: Body, x: str, heads: int) -> str:
    return _swapped(b, b.shaped(x, 0, 0, heads, -1))


def _attend(b: Body, q: str, k: str, v: str, masks: list[str]) -> str:
    """Heads of queries (B, N, S, d) with keys and values; back to (B, S, N d)."""
    scores = b("Mul", b("MatMul", q, b("Transpose", k, perm=[0, 1, 3, 2])), _scale(b, q))
    for mask in masks:
        scores = b("Add", scores, mask)
    if b.get("unidirectional", 0):
        scores = b("Add", scores, _causal(b, q, k))
    mixed = b("MatMul", b("Softmax", scores, axis=-1), v)
    return b.shaped(_swapped(b, mixed), 0, 0, -1)


def _scale(b: Body, q: str) -> str:
    """The factor of scores: as given, or one over the root of the width of the heads of q."""
    scale = b.get("scale", 0.0)
    if scale:
        return b.scalar(scale, q)
    width = b.real(b("Gather", b("Shape", q), b.ints(3)))
    return b.like(b("Reciprocal", b("Sqrt", width)), q)


def _causal(b: Body, q: str, k: str) -> str:
    """0 where a query may look, the filter value at keys after its own place; the last query is at the last key."""
    one, zero = b.ints(1), b.ints(0)
    rows, columns = (b("Gather", b("Shape", x), b.ints(2)) for x in (q, k))
    query = b("Add", b("Range", zero, rows, one), b("Sub", columns, rows))
    later = b("Less", b.unsqueeze(query, 1), b.unsqueeze(b("Range", zero, columns, one), 0))
    filtered = b.scalar(b.get("mask_filter_value", -10000.0), q)
    return b("Where", later, filtered, b.scalar(0, q))


def _padding(b: Body, k: int, like: str) -> str:
    """A mask of (batch, keys) or (batch, queries, keys), 1 where there is a token, as what to add to scores."""
    rank = b.ranks.get(f"i{k}")
    b.need(rank in (2, 3))
    mask = b.ins[k] if rank == 3 else b.unsqueeze(b.ins[k], 1)
    there = b("Cast", b.unsqueeze(mask, 1), to=TensorProto.BOOL)
    return b("Where", there, b.scalar(0, like), b.scalar(b.get("mask_filter_value", -10000.0), like))


def _bias_parts(b: Body, q: str, v: str) -> list[str]:
    """The bias of queries, keys and values, apart: the first two are as wide as q, the last as v."""
    wide, last = (b("Gather", b("Shape", x), b.ints([2])) for x in (q, v))
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
        q, k, v = (b("Add", x, part) for x, part in zip((q, k, v), _bias_parts(b, q, v), strict=True))
    q = _heads(b, q, heads)
    k, v = (x if apart else _heads(b, x, heads) for x in (k, v))
    if b.has(6) and b.has(7):
        k, v = b("Concat", b.ins[6], k, axis=2), b("Concat", b.ins[7], v, axis=2)
    masks = [_padding(b, 4, q)] if b.has(4) else []
    return [_attend(b, q, k, v, masks + ([b.ins[5]] if b.has(5) else [])), k, v]


@defines("Attention")
def attention(b: Body) -> list[str]:
    """The same with one product for queries, keys and values: input, weights, bias, mask, past, bias of the scores.
    The past, and the second output, are (2, batch, heads, length, width): keys and values."""
    b.need(not any(b.has(k) for k in range(6, len(b.ins))) and not b.get("past_present_share_buffer", 0))
    b.need(not b.get("do_rotary", 0) and b.version >= 13)
    heads, sizes = b.get("num_heads", 0), [int(v) for v in b.attributes.get("qkv_hidden_sizes", [])]
    b.need(heads > 0 and len(sizes) in (0, 3))
    joined = b.add(b("MatMul", b.ins[0], b.ins[1]), 2)
    if sizes:
        first = b("Split", joined, b.ints(sizes), axis=-1, outs=3)
    else:
        first = b("Split", joined, axis=-1, outs=3, **({"num_outputs": 3} if b.version >= 18 else {}))
    q, k, v = (_heads(b, x, heads) for x in (first, f"{first}.1", f"{first}.2"))
    if b.has(4):
        k, v = (b("Concat", b("Gather", b.ins[4], b.ints(n), axis=0), x, axis=2) for n, x in enumerate((k, v)))
    present = b("Concat", b.unsqueeze(k, 0), b.unsqueeze(v, 0), axis=0) if len(b.wanted) > 1 and not sizes else ""
    masks = [_padding(b, 3, q)] if b.has(3) else []
    return [_attend(b, q, k, v, masks + ([b.ins[5]] if b.has(5) else [])), present]


# rotary embeddings


def _sized(b: Body, x: str, axis: int) -> str:
    """One size, as a tensor of one number."""
    return b("Gather", b("Shape", x), b.ints([axis]))


def _slice_of(b: Body, x: str, start: str, end: str, axis: int) -> str:
    return b("Slice", x, start, end, b.ints([axis]))


def _turned(b: Body, x: str, places: str, cos: str, sin: str, *, interleaved: bool) -> str:
    """x (batch, length, heads, width) with its first columns turned by the angles of its places (batch or 1, length)."""
    cos, sin = (b.unsqueeze(b("Gather", table, places, axis=0), 2) for table in (cos, sin))
    zero, half, end = b.ints([0]), _sized(b, cos, 3), b.ints([2**31 - 1])
    whole = b("Add", half, half)
    head, rest = _slice_of(b, x, zero, whole, 3), _slice_of(b, x, whole, end, 3)
    if interleaved:
        pairs = b.shaped(head, 0, 0, 0, -1, 2)
        first, last = (b("Gather", pairs, b.ints(k), axis=4) for k in range(2))
    else:
        first, last = _slice_of(b, head, zero, half, 3), _slice_of(b, head, half, end, 3)
    turned = [
        b("Sub", b("Mul", first, cos), b("Mul", last, sin)),
        b("Add", b("Mul", first, sin), b("Mul", last, cos)),
    ]
    if interleaved:
        joined = b("Reshape", b("Concat", *(b.unsqueeze(t, 4) for t in turned), axis=4), b.ints([0, 0, 0, -1]))
        return b("Concat", joined, rest, axis=3)
    return b("Concat", *turned, rest, axis=3)


@defines("RotaryEmbedding")
def rotary_embedding(b: Body) -> list[str]:
    """x (batch, length, heads * width) or (batch, heads, length, width), places (batch, length) or one to start from, tables of
    cosines and sines (place, half of what is turned)."""
    rank, places = b.ranks.get("i0"), b.ins[1]
    b.need(rank in (3, 4) and b.ranks.get("i1") in (1, 2) and b.version >= 13)
    b.need(b.get("scale", 1.0) == 1.0 and not b.get("is_packed_batching", 0))
    heads = b.get("num_heads", 0)
    b.need(heads > 0 or not b.get("rotary_embedding_dim", 0))
    if rank == 4:
        x = _swapped(b, b.ins[0])
    elif heads:
        x = b.shaped(b.ins[0], 0, 0, heads, -1)
    else:
        half = _sized(b, b.ins[2], 1)
        x = b("Reshape", b.ins[0], b("Concat", b.ints([0, 0, -1]), b("Add", half, half), axis=0))
    if b.ranks["i1"] == 1:
        places = b.unsqueeze(b("Add", places, _count(b, _sized(b, x, 1))), 0)
    y = _turned(b, x, places, b.ins[2], b.ins[3], interleaved=bool(b.get("interleaved", 0)))
    return [_swapped(b, y) if rank == 4 else b.shaped(y, 0, 0, -1)]


def _count(b: Body, size: str) -> str:
    """0, 1, ... below a size that is a tensor of one number."""
    last = b("Squeeze", size, b.ints([0]))
    return b("Range", b.ints(0), last, b.ints(1))


# grouped heads and caches


@defines("GroupQueryAttention")
def group_query_attention(b: Body) -> list[str]:
    """query (batch, length, heads * width), key and value (or all three in the first), past key and value (batch, groups,
    length, width), the last place of every row, their greatest number, tables of cosines and sines, places, bias of the
    scores, a sink per head. The new keys of a row come behind its own past ones, also where the cache is longer.
    """
    heads, groups = b.get("num_heads", 0), b.get("kv_num_heads", 0)
    b.need(heads > 0 and groups > 0 and heads % groups == 0 and b.version >= 13)
    b.need(not any(b.has(k) for k in range(12, len(b.ins))) and all(b.has(k) for k in (3, 4, 5, 6)) and b.has(1) == b.has(2))
    b.need(not b.get("sliding_window_cache", 0) and not b.get("qk_output", 0))
    b.need(all(b.get(f"{x}_quant_type", "NONE") == "NONE" for x in "kv"))
    if b.has(1):
        q, k, v = (b.shaped(x, 0, 0, n, -1) for x, n in zip(b.ins[:3], (heads, groups, groups), strict=True))
    else:
        parts = b.ints([heads, groups, groups])
        q = b("Split", b.shaped(b.ins[0], 0, 0, heads + 2 * groups, -1), parts, axis=2, outs=3)
        k, v = f"{q}.1", f"{q}.2"
    length, last = _sized(b, q, 1), b("Cast", b.ins[5], to=TensorProto.INT64)
    total = b.shaped(b("Cast", b.ins[6], to=TensorProto.INT64), 1)
    behind = b("Sub", b("Add", last, b.ints([1])), length)
    past = b("Where", b("Equal", total, length), b("Sub", last, last), behind)  # (batch); a prompt is padded at its end
    rows = b("Add", b.unsqueeze(past, 1), b.unsqueeze(_count(b, length), 0))  # (batch, length): the places of the queries
    if b.get("do_rotary", 0):
        b.need(b.has(7) and b.has(8))
        places, turn = b.ins[9] if b.has(9) else rows, bool(b.get("rotary_interleaved", 0))
        q, k = (_turned(b, x, places, b.ins[7], b.ins[8], interleaved=turn) for x in (q, k))
    size = b("Max", total, _sized(b, b.ins[3], 2))
    columns = _count(b, size)
    k, v = (_present(b, b.ins[n], x, past, columns, size) for n, x in ((3, k), (4, v)))
    seen = _seen(b, rows, columns, last)
    q = _swapped(b, q)
    mixed = b("MatMul", _weights(b, q, _repeated(b, k, heads, groups), seen), _repeated(b, v, heads, groups))
    return [b.shaped(_swapped(b, mixed), 0, 0, -1), k, v]


def _present(b: Body, cache: str, new: str, past: str, columns: str, size: str) -> str:
    """The cache (batch, groups, size, width): past rows, behind them new ones (batch, length, groups, width), then zeros."""
    three, zero = b.ints([0, 0, 0]), b.ints([0])
    more = b("Sub", size, _sized(b, cache, 2))
    old = b("Pad", cache, b("Concat", three, three, more, zero, axis=0))
    new = _swapped(b, new)
    at = b("Sub", b.unsqueeze(columns, 0), b.unsqueeze(past, 1))  # (batch, size): which new row, or one before or behind them
    last = b("Sub", _sized(b, new, 2), b.ints([1]))
    inside = b("Max", b("Min", at, last), zero)
    wide = b("Shape", old)
    rows = b("GatherElements", new, b("Expand", b.unsqueeze(inside, 1, 3), wide), axis=2)
    fresh, before = (b.unsqueeze(m, 1, 3) for m in (b("LessOrEqual", at, last), b("Less", at, zero)))
    return b("Where", before, old, b("Where", fresh, rows, b.scalar(0, new)))


def _seen(b: Body, rows: str, columns: str, last: str) -> str:
    """Which keys a query looks at, (batch, 1, length, size): up to its own place and the last one, within the window."""
    rows, columns = b.unsqueeze(rows, 1, 3), b.unsqueeze(columns, 0, 0, 0)
    seen = b("LessOrEqual", columns, b.unsqueeze(last, 1, 2, 3))
    window = b.get("local_window_size", -1)
    if not b.get("causal", 1):
        b.need(window < 0)
        return seen
    seen = b("And", seen, b("LessOrEqual", columns, rows))
    if window < 0:
        return seen
    return b("And", seen, b("Greater", columns, b("Sub", rows, b.ints(window))))


def _repeated(b: Body, x: str, heads: int, groups: int) -> str:
    """(batch, groups, size, width) with every group once per head."""
    if heads == groups:
        return x
    sizes = [_sized(b, x, k) for k in range(4)]
    many = b("Expand", b.unsqueeze(x, 2), b("Concat", *sizes[:2], b.ints([heads // groups]), *sizes[2:], axis=0))
    return b("Reshape", many, b("Concat", b.ints([0, heads]), *sizes[2:], axis=0))


def _weights(b: Body, q: str, k: str, seen: str) -> str:
    """The softmax of the scores (batch, heads, length, size), with a sink in its sum where there is one."""
    scores = b("Mul", b("MatMul", q, b("Transpose", k, perm=[0, 1, 3, 2])), _scale(b, q))
    cap = b.get("softcap", 0.0)
    if cap:
        scores = b("Mul", b("Tanh", b("Div", scores, b.scalar(cap, q))), b.scalar(cap, q))
    scores = b("Where", seen, b.add(scores, 10), b.scalar(-np.inf, q))
    if not b.has(11) and not b.get("smooth_softmax", 0):
        return b("Softmax", scores, axis=-1)
    sink = b.shaped(b.ins[11], 1, -1, 1, 1) if b.has(11) else b.scalar(0, q)
    shape = b("Concat", *(_sized(b, scores, n) for n in range(3)), b.ints([1]), axis=0)
    weights = b("Softmax", b("Concat", scores, b("Expand", sink, shape), axis=-1), axis=-1)
    return _slice_of(b, weights, b.ints([0]), b.ints([-1]), 3)
