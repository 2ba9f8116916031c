"""Index expressions against Python's own integers, brute force over boxes, and isl."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry.ir import space
from tapestry.ir.graph import Block, Dim, Read
from tapestry.ir.index import Aff, Floor, Mod, bounds, const, dim, dims_of, evaluate, floordiv, modulo, span, substitute
from tapestry.ir.kernel import cut

NAMES = ("h", "w", "r")
RANGES = {"h": 4, "w": 3, "r": 5}
BOX = [dict(zip(NAMES, p, strict=True)) for p in itertools.product(*(range(RANGES[n]) for n in NAMES))]

coefs = st.integers(-4, 4)
affine = st.builds(
    lambda cs, k: sum((dim(n) * c for n, c in zip(NAMES, cs, strict=True)), const(k)),
    st.tuples(coefs, coefs, coefs),
    st.integers(-9, 9),
)
with_ranges = st.sampled_from([None, RANGES])
quasi = st.recursive(
    affine,
    lambda inner: (
        st.builds(floordiv, inner, st.integers(1, 6), with_ranges)
        | st.builds(modulo, inner, st.integers(1, 6), with_ranges)
        | st.builds(lambda a, b, k: a + b * k, inner, inner, coefs)
    ),
    max_leaves=4,
)


@given(quasi, st.integers(1, 7), with_ranges)
def test_simplifications_are_pythons_integers(e: Aff, k: int, ranges: dict[str, int] | None) -> None:
    quotient, rest = floordiv(e, k, ranges), modulo(e, k, ranges)
    for point in BOX:
        v = evaluate(e, point)
        assert evaluate(quotient, point) == v // k
        assert evaluate(rest, point) == v % k


@given(quasi, quasi, coefs)
def test_arithmetic(a: Aff, b: Aff, k: int) -> None:
    for point in BOX[::7]:
        x, y = evaluate(a, point), evaluate(b, point)
        assert evaluate(a + b, point) == x + y
        assert evaluate(a - b, point) == x - y
        assert evaluate(a * k, point) == x * k
    assert a + b == b + a
    assert a - a == const(0)


@given(quasi, st.tuples(affine, affine, affine), st.booleans())
def test_substitution(e: Aff, new: tuple[Aff, Aff, Aff], ranged: bool) -> None:
    env = dict(zip(NAMES, new, strict=True))
    replaced = substitute(e, env, RANGES if ranged else None)
    for point in BOX[::7]:
        assert evaluate(replaced, point) == evaluate(e, {n: evaluate(x, point) for n, x in env.items()})
    assert substitute(e, {}, RANGES if ranged else None) is not None
    assert dims_of(replaced) <= set(NAMES)


boxes = st.tuples(*(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).map(sorted) for n in RANGES.values()))


@given(quasi, boxes)
def test_bounds_hold_every_point(e: Aff, box: tuple[list[int], ...]) -> None:
    lo, hi = bounds(e, {n: (a, b) for n, (a, b) in zip(NAMES, box, strict=True)})
    points = itertools.product(*(range(a, b + 1) for a, b in box))
    found = [evaluate(e, dict(zip(NAMES, p, strict=True))) for p in points]
    assert lo <= min(found) and max(found) <= hi
    if e.is_affine:
        assert (lo, hi) == (min(found), max(found))


@given(affine, st.integers(1, 5))
def test_bounds_of_a_floor_are_exact(e: Aff, k: int) -> None:
    found = [evaluate(e, p) // k for p in BOX]
    assert span(Aff(((Floor(e, k), 1),)), RANGES) == (min(found), max(found))
    lo, hi = span(Aff(((Mod(e, k), 1),)), RANGES)
    rests = [evaluate(e, p) % k for p in BOX]
    assert lo <= min(rests) and max(rests) <= hi < k


@given(quasi, boxes)
def test_isl_agrees(e: Aff, box: tuple[list[int], ...]) -> None:
    op = Block(outs=("y",), dims=tuple(Dim(n, s) for n, s in RANGES.items()))
    relation = space.access(op, Read(tensor="x", index=(e,)), (1,)).image(tuple((a, b + 1) for a, b in box))
    assert relation is not None
    points = itertools.product(*(range(a, b + 1) for a, b in box))
    found = [evaluate(e, dict(zip(NAMES, p, strict=True))) for p in points]
    assert relation.hull() == ((min(found), max(found) + 1),)


def test_bounds_take_arrays_of_boxes() -> None:
    starts = np.arange(4)
    e = dim("h") * 2 - floordiv(dim("h") + 1, 2) + modulo(dim("h"), 3)
    lo, hi = bounds(e, {"h": (starts, starts + 1)})
    for k in starts:
        assert (lo[k], hi[k]) == bounds(e, {"h": (int(k), int(k) + 1)})


def test_mixed_signs_take_all_corners() -> None:
    assert span(dim("h") - dim("w"), {"h": 3, "w": 3}) == (-2, 2)  # two corners alone would say [0, 0]


@given(st.integers(1, 60), st.data())
def test_cuts_partition(extent: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, extent))
    blocks = [cut(extent, parts, k) for k in range(parts)]
    assert [i for lo, hi in blocks for i in range(lo, hi)] == list(range(extent))
    sizes = {hi - lo for lo, hi in blocks}
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_isl_blocks_are_the_same_partition(a: int, b: int, data: st.DataObject) -> None:
    dims = (Dim("p", a), Dim("q", b))
    cuts = {"p": data.draw(st.integers(1, a)), "q": data.draw(st.integers(1, b))}
    relation = space.blocks(dims, cuts)
    assert space.covers(relation, dims) is None and relation.injective()
    ids = [n for n, k in cuts.items() if k > 1]
    for point in itertools.product(*(range(cuts[n]) for n in ids)):
        found = relation.image(tuple((k, k + 1) for k in point))
        assert found is not None
        at = dict(zip(ids, point, strict=True))
        assert found.hull() == tuple(cut(d.size, cuts[d.name], at.get(d.name, 0)) for d in dims)


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (floordiv(dim("h") * 4 + dim("w"), 4, {"h": 9, "w": 4}), "h"),
        (modulo(dim("h") * 4 + dim("w"), 4, {"h": 9, "w": 4}), "w"),
        (floordiv(floordiv(dim("h"), 2), 3), "floor((h)/6)"),
        (modulo(dim("h") * 2 + 1, 4), "2*((h) mod 2) + 1"),
        (modulo(dim("h") * 4 + dim("w"), 8, {"h": 9, "w": 4}), "w + 4*((h) mod 2)"),
        (modulo(dim("h") * 4 + dim("w"), 8, {"h": 9, "w": 5}), "((4*h + w) mod 8)"),
        (dim("h") * -1 + 3, "-h + 3"),
        (const(-2), "-2"),
    ],
)
def test_simplest_forms(e: Aff, text: str) -> None:
    assert str(e) == text
