"""Families that multiply: products, Einsum, convolutions, resampling."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzz.families.window_families import window
from tests.fuzz.generate.draw import Draw, Value
from tests.fuzz.generate.evaluate import Unfit, need

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
    need(k, "onnxruntime forgets beta over nothing")
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


def conv(d: Draw) -> None:
    """Convolutions of one to three dimensions: groups, strides, dilations, uneven padding, auto_pad."""
    x = d.pick(rank=range(3, 6), dtypes=("float32", "float32", "float32", "float64"))
    c = x.shape[1]
    need(0 not in x.shape, "an empty image")
    groups = d.rng.choice([g for g in range(1, c + 1) if c % g == 0])
    out = groups * d.rng.choice([1, 2, 3])
    kernel, strides, dilations, pads = window(d, x.shape[2:])
    w = d.fresh((out, c // groups, *kernel), x.dtype)
    bias = [d.weight(d.data((out,), x.dtype))] if d.chance(0.5) else []
    attrs: dict[str, Any] = {"strides": strides, "group": groups}
    if d.chance(0.15):
        d.add("Conv", [x, w, *bias], auto_pad=d.rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]), **attrs)
    else:
        d.add("Conv", [x, w, *bias], pads=pads, dilations=dilations, **attrs)


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


FAMILIES = {f.__name__: f for f in (matmul, gemm, einsum, conv, resize)}
