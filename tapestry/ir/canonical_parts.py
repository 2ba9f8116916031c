"""Exact plans: the same bits on any number of devices that divides `PARTS`.

Rounding depends on the order of sums and on how a library's kernels treat the shape that they are given. So every operation
that rounds in ways that are not fixed by IEEE 754 is computed in canonical blocks: its **canonical dimension** (chosen by
the operation alone) is cut into `PARTS` balanced blocks, whatever the mesh, and each block is one call on contiguous copies
of exactly its footprint. A device gets whole blocks, because cuts into P parts are among the cuts into `PARTS` when P divides
it. Reduced dimensions are never cut, unless merging is exact (integers and booleans). Operations made of correctly rounded
primitives alone, cell by cell, may be cut anywhere.
"""

from __future__ import annotations

import itertools

from tapestry.ir.expr import PRIMITIVES, Call, walk
from tapestry.ir.graph import Block, Dim, Op
from tapestry.ir.types import FLOATS

PARTS = 24  # 1, 2, 3, 4, 6, 8, 12 and 24 devices


def free(op: Op) -> bool:
    """Whether any split of the operation gives the same bits."""
    if not isinstance(op, Block):
        return False
    if op.monoid is not None and any(e.dtype in FLOATS for e in op.body):
        return False
    calls = [x for e in (*op.body, *op.then) for x in walk(e) if isinstance(x, Call)]
    return all(PRIMITIVES[c.fn].exact or not ({c.dtype, *(a.dtype for a in c.args)} & FLOATS) for c in calls)


def canonical(op: Op) -> Dim | None:
    """The one dimension that an operation may be cut along: the first of at least `PARTS` points, else the longest."""
    large = [d for d in op.dims if d.size >= PARTS]
    if large:
        return large[0]
    return max((d for d in op.dims if d.size > 1), key=lambda d: d.size, default=None)


def may_cut(op: Op, dim: str, parts: int) -> bool:
    """Whether a cut of a dimension into so many parts leaves every bit as it is."""
    if free(op):
        return True
    found = canonical(op)
    return found is not None and found.name == dim and PARTS % parts == 0


def blocks(size: int, lo: int, hi: int) -> list[tuple[int, int]]:
    """The canonical blocks of ``[0, size)`` inside ``[lo, hi)``, which are the cuts of some number of parts."""
    edges = [k * size // PARTS for k in range(PARTS + 1)]
    inside = sorted({e for e in edges if lo <= e <= hi} | {lo, hi})
    return list(itertools.pairwise(inside))
