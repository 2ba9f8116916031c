"""The one question of fusion: is what a reader's tile needs inside what the same tile of the producer computes?

A tile is what one program of a kernel computes: some points of the map dimensions, with all of the reduced ones. Over all
tiles together the reader asks for every cell so many times; one time means that nothing is computed twice, however the
projection looks (a transpose, a slice, a group of heads). More is the recomputation that fusing costs. The cells that a tile
needs come from isl, factor by factor (`space.independent`), since a footprint is the product of those.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import prod

from tapestry.ir import space
from tapestry.ir.expr import Expr
from tapestry.ir.graph import Block, Dim, Guard, Read, names_of, points, ranges_of, shape_of
from tapestry.ir.kernel import Box
from tapestry.ir.recognition.contraction import dims_read, folded_roles, kept, products

ROWS = COLUMNS = 128  # of the tile of a contraction, and the queries that a program of attention holds
POINTS = 1024  # of the tile of a map
MOST_TILES = 16  # along the dimensions of one factor: of more, the largest of some is taken for all

Tile = Mapping[str, int]


def tile_of(op: Block) -> dict[str, int]:
    """Points of one program's tile along each dimension; reduced dimensions are whole, programs walk along them.

    Contractions have rows (dimensions of the first factor alone) and columns (of the second), attention the rows of its
    scores and all columns of its values, rows of a norm or softmax are whole, maps are cut in row-major order. A product that
    is reduced has the tiles of the product, and goes through all of the reduced dimensions.
    """
    tile = ranges_of((*op.reduce, *op.inner_dims))
    rows, columns = _roles(op)
    bounded = products(op) or folded_roles(op)
    for group, most in ((rows, ROWS), (columns, COLUMNS if bounded else points(columns))):
        for d in reversed(group):
            tile[d.name] = max(1, min(d.size, most))
            most //= tile[d.name]
    if (row := kept(op.monoid, op.dims, op.reduce, op.body)) is not None:
        tile[row.column.name] = row.column.size
    rest = [d for d in op.dims if d.name not in tile]
    most = 1 if op.monoid else POINTS
    for d in reversed(rest):
        tile[d.name] = max(1, min(d.size, most))
        most //= tile[d.name]
    return tile


def _roles(op: Block) -> tuple[Sequence[Dim], Sequence[Dim]]:
    """(rows, columns) of a reduction's map dimensions; both empty for a map."""
    if (found := folded_roles(op)) is not None:
        return found.rows, () if found.folds else found.columns
    if pairs := products(op):
        left, right = (dims_read(op, e) for e in pairs[0])
        return [d for d in op.dims if d.name in left - right], [d for d in op.dims if d.name in right - left]
    if not op.monoid:
        return (), ()
    first = dims_read(op, op.body[0])
    keyed = frozenset[str]().union(*(dims_read(op, e) for e in op.body[1:])) if op.inner else frozenset[str]()
    rows = [d for d in op.dims if d.name in first - keyed] if op.inner else ()
    return rows[-1:], [d for d in op.dims if d.name not in first]


def tiles(op: Block, tile: Tile) -> int:
    """Number of programs."""
    return prod(-(-d.size // max(1, tile[d.name])) for d in op.space)


def loaded(op: Block, read: Read, shape: tuple[int, ...], tile: Tile) -> int:
    """Cells that a read touches, counted once for every tile that touches them."""
    total, seen = 1, set[str]()
    for f in space.independent(op, read, shape):
        dims = [op.space[i] for i in f.dims]
        seen |= names_of(dims)
        total *= _cells_over_tiles(f, shape_of(dims), tuple(tile[d.name] for d in dims))
    return total * prod(-(-d.size // max(1, tile[d.name])) for d in op.space if d.name not in seen)


@lru_cache(maxsize=1 << 14)
def _cells_over_tiles(factor: space.Factor, sizes: tuple[int, ...], each: tuple[int, ...]) -> int:
    """Cells along the factor's axes over all tiles of its dimensions."""
    counts = [-(-n // max(1, t)) for n, t in zip(sizes, each, strict=True)]
    some = [range(c) if prod(counts) <= MOST_TILES else sorted({0, c // 2, c - 1}) for c in counts]
    found: list[int] = []
    for ids in itertools.product(*some):
        box: Box = tuple((k * t, min(n, (k + 1) * t)) for k, t, n in zip(ids, each, sizes, strict=True))
        image = factor.image(box)
        found.append(0 if image is None else prod(hi - lo for lo, hi in image))
    return sum(found) if len(found) == prod(counts) else max(found) * prod(counts)


def recomputed(op: Block, reads: Sequence[Read], shape: tuple[int, ...], tile: Tile | None = None) -> Fraction:
    """How often a cell is asked for, over all tiles and projections of the reader; 1 where fusing computes nothing twice."""
    tile = tile or tile_of(op)
    return Fraction(sum(loaded(op, r, shape, tile) for r in reads), max(1, prod(shape)))


def implied(op: Block, known: Sequence[Guard], wanted: Guard) -> bool:
    """Whether a condition holds wherever others do, at all points of the index space (asked of isl)."""
    if wanted.op == "ge":
        fails = [Guard(wanted.aff * -1 - 1, "ge")]
    else:
        fails = [Guard(wanted.aff - 1, "ge"), Guard(wanted.aff * -1 - 1, "ge")]
    box: Box = tuple((0, d.size) for d in op.space)
    return all(space.access(op, Read(tensor="", index=(), when=(*known, f), other=0), ()).image(box) is None for f in fails)


def evaluated(op: Block, e: Expr, tile: Tile) -> int:
    """Points at which the programs together compute an expression: once per tile along what it does not vary along."""
    inside = dims_read(op, e)
    return tiles(op, tile) * prod(tile[d.name] for d in op.space if d.name in inside)
