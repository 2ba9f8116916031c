"""Families that multiply: products, Einsum, convolutions, pools, attention, recurrences, resampling."""

from __future__ import annotations

from typing import Any

import numpy as np

from tapestry.fuzz.draw import Draw, Value
from tapestry.fuzz.evaluate import Unfit

EQUATIONS = (
    "ij,jk->ik", "ij,kj->ik", "bij,bjk->bik", "bij,bjk->kib", "ij,j->i", "ij,ij->ij", "ij,ij->",
    "ij,ik->ijk", "ij->ji", "ij->j", "bhid,bhjd->bhij", "ij,jk,kl->il",
)  # fmt: skip


def matmul(d: Draw) -> None:
    """MatMul: vectors, matrices, batches that broadcast."""
    x = d.pick(rank=range(1, 5))
    k, n = x.shape[-1], d.size()
    kind = d.rng.randrange(5)
    shape: tuple[int, ...] = (k, n)
    if kind == 0:
        shape = (k,)
    elif kind == 1:
        shape = (*(1 if d.chance(0.3) else s for s in x.shape[:-2]), k, n)
    elif kind == 2 and x.rank <= 2:
        shape = (d.rng.choice([1, 2, 3]), k, n)
    y = d.mate(x, shape)
    if kind == 4 and x.rank >= 2:  # the same tensor from both sides
        perm = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
        (y,) = d.add("Transpose", [x], exact=True, perm=perm)
    d.add("MatMul", [x, y])


def gemm(d: Draw) -> None:
    """Gemm with either side transposed, factors, and a third operand that broadcasts."""
    x = d.pick(rank=2)
    ta, tb, n = d.rng.randrange(2), d.rng.randrange(2), d.size()
    m, k = x.shape[::-1] if ta else x.shape
    if not k:
        raise Unfit("onnxruntime forgets beta over nothing")
    w = d.mate(x, (n, k) if tb else (k, n))
    c = [d.fresh(d.rng.choice([(n,), (m, n), (m, 1), (1, n), (1,), ()]), x.dtype)] if d.chance(0.7) else []
    d.add("Gemm", [x, w, *c], transA=ta, transB=tb, alpha=d.rng.choice([None, 0.5]), beta=d.rng.choice([None, 2.0]))


def einsum(d: Draw) -> None:
    """A few contractions, outer products, diagonals and transpositions."""
    equation = d.rng.choice(EQUATIONS)
    terms = equation.split("->")[0].split(",")
    x = d.pick(rank=len(terms[0]))
    sizes = dict(zip(terms[0], x.shape, strict=True))
    ins = [x]
    for term in terms[1:]:
        ins.append(d.mate(x, tuple(sizes.setdefault(c, d.size(5)) for c in term)))
    d.add("Einsum", ins, equation=equation)


def _window(d: Draw, extents: tuple[int, ...], *, dilate: bool = True) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, strides, dilations, pads: each output has at least one row."""
    kernel, strides, dilations, begin, end = [], [], [], [], []
    for n in extents:
        k = d.rng.choice([1, 2, 3, 3, 5])
        s = d.rng.choice([1, 1, 2, 3])
        r = d.rng.choice([1, 1, 2]) if dilate else 1
        lo, hi = (d.rng.randrange(k) if d.chance(0.7) else 0 for _ in range(2))
        if n + lo + hi < (k - 1) * r + 1:
            k, r, lo, hi = 1, 1, 0, 0
        kernel.append(k)
        strides.append(s)
        dilations.append(r)
        begin.append(lo)
        end.append(hi)
    return kernel, strides, dilations, begin + end


def conv(d: Draw) -> None:
    """Convolutions of one to three dimensions: groups, strides, dilations, uneven padding, auto_pad."""
    x = d.pick(rank=range(3, 6), dtypes=("float32", "float32", "float32", "float64"))
    c = x.shape[1]
    if 0 in x.shape:
        raise Unfit("an empty image")
    groups = d.rng.choice([g for g in range(1, c + 1) if c % g == 0])
    out = groups * d.rng.choice([1, 2, 3])
    kernel, strides, dilations, pads = _window(d, x.shape[2:])
    w = d.fresh((out, c // groups, *kernel), x.dtype)
    bias = [d.weight(d.data((out,), x.dtype))] if d.chance(0.5) else []
    attrs = {"strides": strides, "group": groups}
    if d.chance(0.15):
        d.add("Conv", [x, w, *bias], auto_pad=d.rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]), **attrs)
    else:
        d.add("Conv", [x, w, *bias], pads=pads, dilations=dilations, **attrs)


def conv_transpose(d: Draw) -> None:
    """Transposed convolutions: strides, output padding, groups."""
    x = d.pick(rank=range(3, 5), dtypes=("float32",))
    c = x.shape[1]
    if 0 in x.shape:
        raise Unfit("an empty image")
    groups = d.rng.choice([g for g in (1, 2) if c % g == 0])
    rank = x.rank - 2
    kernel = [d.rng.choice([1, 2, 3]) for _ in range(rank)]
    strides = [d.rng.choice([1, 2, 3]) for _ in range(rank)]
    pads = [d.rng.randrange(k) for k in kernel] * 2
    extra = [d.rng.randrange(s) for s in strides]
    w = d.weight(d.data((c, d.rng.choice([1, 2, 3]), *kernel)))
    d.add("ConvTranspose", [x, w], strides=strides, pads=pads, output_padding=extra, group=groups)


def pool(d: Draw) -> None:
    """Max, average and Lp pools with padding, ceil mode and dilation; global ones."""
    x = d.pick(rank=range(3, 5), dtypes=("float32",))
    if 0 in x.shape:
        raise Unfit("an empty image")
    op = d.rng.choice(
        ["MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"]
    )
    if op.startswith("Global"):
        d.add(op, [x], exact=op == "GlobalMaxPool")
        return
    kernel, strides, dilations, pads = _window(d, x.shape[2:], dilate=op == "MaxPool")
    pads = [min(p, k - 1) for p, k in zip(pads, kernel * 2, strict=True)]
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": int(d.chance(0.25))}
    if op == "AveragePool":
        attrs["count_include_pad"] = d.rng.randrange(2)
    if op == "MaxPool":
        attrs["dilations"] = dilations
    if op == "LpPool":
        attrs["p"] = d.rng.choice([1, 2])
    d.add(op, [x], exact=op == "MaxPool", **attrs)


def attention(d: Draw) -> None:
    """Heads split off and merged again around a masked softmax; or the Attention operator itself (GQA, causal)."""
    b, s, heads, e = d.rng.choice([1, 2]), d.size(5), d.rng.choice([1, 2, 3, 4]), d.rng.choice([2, 3, 4])
    if d.opset >= 23 and d.chance(0.5):
        _attention_node(d, b, s, heads, e)
        return
    x = d.mate(d.fresh((1,)), (b, s, heads * e))
    sides: list[Value] = []
    for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
        (p,) = d.add("MatMul", [x, d.weight(d.data((heads * e, heads * e)) / np.float32(4))])
        (p,) = d.add("Reshape", [p, d.ints(0, 0, heads, e)], exact=True)
        sides += d.add("Transpose", [p], exact=True, perm=perm)
    (scores,) = d.add("MatMul", sides[:2])
    (scores,) = d.add("Mul", [scores, d.weight(np.float32(0.5))])
    if d.chance(0.6):
        (scores,) = d.add("Add", [scores, d.fresh((s, s))])
    (p,) = d.add("Softmax", [scores], axis=-1)
    (o,) = d.add("MatMul", [p, sides[2]])
    (o,) = d.add("Transpose", [o], exact=True, perm=[0, 2, 1, 3])
    (o,) = d.add("Reshape", [o, d.ints(0, 0, heads * e)], exact=True)
    d.add("Add", [o, x])


def _attention_node(d: Draw, b: int, s: int, heads: int, e: int) -> None:
    kv = d.rng.choice([h for h in range(1, heads + 1) if heads % h == 0])
    t = d.size(5)
    q, k, v = (d.fresh(shape) for shape in ((b, heads, s, e), (b, kv, t, e), (b, kv, t, e)))
    mask = [d.fresh((s, t), "float32")] if d.chance(0.4) else []
    d.add("Attention", [q, k, v, *mask], is_causal=int(not mask and d.chance(0.5)))


def recurrent(d: Draw) -> None:
    """LSTM, GRU, RNN, one or two directions."""
    s, b, n, h = d.rng.randint(1, 4), d.rng.randint(1, 4), d.rng.randint(1, 3), d.rng.randint(1, 3)
    op, gates = d.rng.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    two = d.chance(0.4)
    dirs = 2 if two else 1
    w, r = d.weight(d.data((dirs, gates * h, n))), d.weight(d.data((dirs, gates * h, h)))
    bias = [d.weight(d.data((dirs, 2 * gates * h)))] if d.chance(0.5) else []
    x = d.mate(d.fresh((1,)), (s, b, n))
    d.add(op, [x, w, r, *bias], 2, hidden_size=h, direction="bidirectional" if two else d.rng.choice(["forward", "reverse"]))


def resize(d: Draw) -> None:
    """Resize by scales, nearest or linear; TopK of distinct exact values."""
    if d.chance(0.5):
        x = d.pick(rank=range(1, 4), exact=True, dtypes=("float32",))
        at = d.axis(x)
        if len(np.unique(x.array)) < x.array.size or not x.array.size:  # equal values: which comes first is nobody's promise
            raise Unfit("ties")
        k = d.rng.randint(1, x.shape[at])
        d.add("TopK", [x, d.ints(k)], 2, exact=True, axis=at, largest=d.rng.randrange(2))
        return
    _resampled(d)


def _resampled(d: Draw) -> None:
    """Scales that binary fractions hold, so that no place lies on the other side of a border by rounding."""
    mode = d.rng.choice(["nearest", "nearest", "linear", "cubic"])
    x = d.pick(rank=4 if mode == "cubic" else range(2, 5), dtypes=("float32",))
    scales = [d.rng.choice([0.25, 0.5, 1.5, 2, 2.5, 3]) for _ in x.shape]
    scales = [f if n * f >= 1 and k >= x.rank - 2 else 1.0 for k, (n, f) in enumerate(zip(x.shape, scales, strict=True))]
    how = d.rng.choice(["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"])
    if how == "align_corners" and any(n * f % 1 for n, f in zip(x.shape, scales, strict=True)):
        raise Unfit("onnxruntime rounds the length before it divides by it")
    rounding = d.rng.choice(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]) if mode == "nearest" else None
    empty = d.weight(np.zeros(0, np.float32))
    place: list[Value | None] = [empty, d.weight(np.array(scales, np.float32))]
    if d.chance(0.3):
        sizes = d.ints(*(int(n * f) for n, f in zip(x.shape, scales, strict=True)))
        place = [empty, empty if d.opset < 13 else None, sizes]
    more: dict[str, Any] = {"cubic_coeff_a": d.rng.choice([-0.5, -0.75])} if mode == "cubic" else {}
    if mode != "nearest" and d.chance(0.15):
        more["antialias"] = 1
    if mode == "cubic" and d.chance(0.2):
        more["exclude_outside"] = 1
    d.add("Resize", [x, *place], mode=mode, coordinate_transformation_mode=how, nearest_mode=rounding, **more)


FAMILIES = {f.__name__: f for f in (matmul, gemm, einsum, conv, conv_transpose, pool, attention, recurrent, resize)}
