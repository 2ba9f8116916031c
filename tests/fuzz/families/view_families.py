"""Families that move data: shapes, slices, pads, joins; lookups by constant and by data."""

from __future__ import annotations

import math

import numpy as np

from tests.fuzz.generate.draw import Draw, Value
from tests.fuzz.generate.evaluate import need


def _any(d: Draw, rank: int | range | None = None) -> Value:
    return d.pick(rank=rank, floating=d.chance(0.85))


def transpose(d: Draw) -> None:
    """Any permutation."""
    x = _any(d, range(1, 6))
    d.add("Transpose", [x], exact=True, perm=d.rng.sample(range(x.rank), x.rank))


def reshape(d: Draw) -> None:
    """Merging and splitting axes, with 0 and -1, or over other borders altogether; Squeeze, Unsqueeze, Flatten."""
    x = _any(d)
    kind = d.rng.randrange(5)
    if kind == 0:
        d.add("Flatten", [x], exact=True, axis=d.rng.randint(-x.rank, x.rank))
    elif kind == 1:
        d.add("Unsqueeze", [x, d.ints(d.rng.randint(-x.rank - 1, x.rank))], exact=True)
    elif kind == 2 and 1 in x.shape:
        ones = [k for k, s in enumerate(x.shape) if s == 1]
        d.add("Squeeze", [x, d.ints(d.rng.choice(ones))], exact=True)
    else:
        d.add("Reshape", [x, d.ints(*_target(d, x))], exact=True)


def _target(d: Draw, x: Value) -> list[int]:
    n = math.prod(x.shape)
    if x.rank >= 2 and d.chance(0.4):  # merge two neighbours
        k = d.rng.randrange(x.rank - 1)
        return [*(0 if d.chance(0.5) else s for s in x.shape[:k]), -1 if n else x.shape[k] * x.shape[k + 1], *x.shape[k + 2 :]]
    out: list[int] = []
    rest = n
    while rest > 1 and len(out) < 4:
        part = d.rng.choice([f for f in range(1, rest + 1) if rest % f == 0])
        out.append(part)
        rest //= part
    if n == 0:
        return [0, *x.shape[1:]] if x.rank else [1]
    out.append(rest)
    d.rng.shuffle(out)
    if d.chance(0.4):
        out[d.rng.randrange(len(out))] = -1
    return out


def expand(d: Draw) -> None:
    """Expand and Tile."""
    x = _any(d, range(4))
    if d.chance(0.5) and x.rank:
        d.add("Tile", [x, d.ints(*(d.rng.choice([1, 2, 3]) for _ in x.shape))], exact=True)
        return
    grown = [s if s != 1 else d.rng.choice([1, 2, 3]) for s in x.shape]
    d.add("Expand", [x, d.ints(*([2] if d.chance(0.4) else []), *grown)], exact=True)


def cut(d: Draw) -> None:
    """Slice with steps of either sign and bounds far outside, Split in equal and unequal parts."""
    x = _any(d, range(1, 5))
    if d.chance(0.3):
        at = d.axis(x)
        n = x.shape[at]
        need(n >= 2, "nothing to split")
        first = d.rng.randrange(1, n)
        if d.chance(0.5) and n >= 3:
            d.add("Split", [x], 3, exact=True, axis=at, num_outputs=3)
        else:
            d.add("Split", [x, d.ints(first, n - first)], 2, exact=True, axis=at)
        return
    axes = d.rng.sample(range(x.rank), d.rng.randint(1, x.rank))
    steps = [d.rng.choice([1, 1, 1, 2, 3, -1, -2]) for _ in axes]
    starts: list[int] = []
    ends: list[int] = []
    for a, s in zip(axes, steps, strict=True):
        n = x.shape[a]
        lo, hi = sorted((d.rng.randint(0, n), d.rng.randint(0, n)))
        lo, hi = (lo, hi) if d.chance(0.8) else (lo - n, hi + 99)
        starts.append(lo if s > 0 else hi - 1 if hi > n or d.chance(0.5) else hi)
        ends.append(hi if s > 0 else lo - 1 if lo > 0 else -99)
    d.add("Slice", [x, d.ints(*starts), d.ints(*ends), d.ints(*axes), d.ints(*steps)], exact=True)


def pad(d: Draw) -> None:
    """Pad in every mode, with negative amounts (constant mode); Trilu."""
    x = d.pick(rank=range(1, 5))
    if x.rank >= 2 and d.chance(0.3):
        d.add("Trilu", [x, d.weight(np.int64(d.rng.randint(-2, 2)))], exact=True, upper=d.rng.randrange(2))
        return
    mode = d.rng.choice(["constant", "constant", "reflect", "edge", "wrap"])
    low = -1 if mode == "constant" and d.chance(0.3) else 0
    pads = [d.rng.randint(low, 2) for _ in range(2 * x.rank)]
    fill = [d.weight(np.asarray(d.rng.choice([0.25, -1.0]), x.dtype))] if mode == "constant" and d.chance(0.6) else []
    d.add("Pad", [x, d.ints(*pads), *fill], exact=True, mode=mode)


def join(d: Draw) -> None:
    """Concat of two to four tensors along any axis."""
    x = _any(d, range(1, 5))
    at = d.axis(x)
    parts = [x]
    for _ in range(d.rng.randint(1, 3)):
        shape = list(x.shape)
        shape[at] = d.size(5)
        parts.append(d.mate(x, shape))
    d.rng.shuffle(parts)
    d.add("Concat", parts, exact=True, axis=at)


def depth(d: Draw) -> None:
    """DepthToSpace (both modes) and SpaceToDepth."""
    b = d.rng.choice([2, 3]) if d.chance(0.3) else 2
    n, c, h, w = d.rng.choice([1, 2]), d.rng.choice([1, 2, 3]), d.rng.choice([1, 2, 3]), d.rng.choice([1, 2])
    if d.chance(0.5):
        x = d.mate(d.fresh((1,)), (n, c * b * b, h, w))
        d.add("DepthToSpace", [x], exact=True, blocksize=b, mode=d.rng.choice(["DCR", "CRD"]))
    else:
        d.add("SpaceToDepth", [d.mate(d.fresh((1,)), (n, c, h * b, w * b))], exact=True, blocksize=b)


def gather(d: Draw) -> None:
    """Gather along any axis, by constant or data, with negative indices; GatherElements; GatherND."""
    x = _any(d, range(1, 4))
    at = d.axis(x)
    n = x.shape[at]
    need(n != 0, "nothing to gather")
    kind = d.rng.randrange(6)
    if kind == 0:
        index = d.fresh(x.shape, "int64", lo=-n, hi=n - 1)
        d.add("GatherElements", [x, index], exact=True, axis=at)
    elif kind == 1:
        last = d.rng.randint(1, x.rank)
        rows = d.shape(d.rng.randint(0, 2))
        index = np.stack([d.data(rows, "int64", lo=-s, hi=s - 1) for s in x.shape[:last]], -1)
        d.add("GatherND", [x, d.weight(index) if d.chance(0.5) else d.input(index)], exact=True)
    else:
        index = d.fresh(d.shape(d.rng.choice([0, 1, 1, 2])), d.rng.choice(["int64", "int64", "int32"]), lo=-n, hi=n - 1)
        d.add("Gather", [x, index], exact=True, axis=at)


def scatter(d: Draw) -> None:
    """ScatterElements and ScatterND to distinct places, or with a reduction; OneHot."""
    x = d.pick(rank=range(1, 4), dtypes=("float32",))
    at = d.axis(x)
    need(x.array.size, "nothing to scatter into")
    kind = d.rng.randrange(3)
    if kind == 0:
        index = np.argsort(d.data(x.shape), axis=at).astype(np.int64)  # distinct along the axis
        d.add("ScatterElements", [x, d.weight(index), d.mate(x, x.shape)], exact=True, axis=at)
    elif kind == 1:
        rows = d.rng.sample(range(x.shape[0]), d.rng.randint(1, x.shape[0]))
        update = d.mate(x, (len(rows), *x.shape[1:]))
        d.add("ScatterND", [x, d.weight(np.array(rows, np.int64)[:, None]), update], exact=True)
    else:
        depth = d.rng.randint(1, 6)
        index = d.fresh(d.shape(d.rng.choice([1, 2])), "int64", lo=-depth, hi=depth - 1)
        values = d.weight(np.array([0.5, 2.0], np.float32))
        d.add("OneHot", [index, d.weight(np.int64(depth)), values], exact=True, axis=d.rng.choice([-1, 0, 1]))


FAMILIES = {f.__name__: f for f in (transpose, reshape, expand, cut, pad, join, depth, gather, scatter)}
