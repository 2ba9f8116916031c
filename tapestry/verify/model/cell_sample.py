"""Which cells of an operation are looked at: corners, both sides of every place where a read or a guard changes, and others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tapestry.ir.expr import Call, Const, Index, distinct
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import Aff, Floor, Mod, dims_of
from tapestry.ir.types import Array

CORNERS = 64
EDGES = 48  # places along one dimension at which something changes


def cells(op: Block, graph: Graph, rng: np.random.Generator, count: int, work: int) -> Array:
    """Cells of an operation's outputs, a row each: all of them where they are no more than ``count``.

    Args:
        count: how many cells besides corners and edges.
        work: index points that all cells together may take; fewer cells where one takes many.
    """
    extents = [d.size for d in op.dims]
    size = math.prod(extents)
    if size == 0:
        return np.zeros((0, len(extents)), int)
    each = max(1, op.merged_cells)
    most = max(2, work // each)
    if size <= min(count, most):
        return np.stack(np.unravel_index(np.arange(size), extents), axis=1) if extents else np.zeros((1, 0), int)
    corners = np.array(list(itertools.islice(itertools.product(*((0, n - 1) for n in extents)), CORNERS)), int)
    edges = [row for k, d in enumerate(op.dims) for row in _edge_cells(k, edges_of(op, graph, d.name, d.size), extents, rng)]
    named = [_compared(op, d.name, d.size)[:8] or [0] for d in op.dims]
    corners = np.concatenate([corners, np.array(list(itertools.islice(itertools.product(*named), CORNERS)), int)])
    others = np.stack([rng.integers(0, n, count) for n in extents], axis=1)
    special = np.unique(np.concatenate([corners, *([np.array(edges, int)] if edges else [])]), axis=0)
    chosen = np.concatenate([special[rng.permutation(len(special))[: max(1, most // 2)]], others])
    return np.unique(chosen[:most], axis=0)


def _edge_cells(axis: int, places: list[int], extents: list[int], rng: np.random.Generator) -> Iterator[list[int]]:
    for place in places:
        row = [int(rng.integers(0, n)) for n in extents]
        row[axis] = place
        yield row


def edges_of(op: Block, graph: Graph, name: str, size: int) -> list[int]:
    """Places along a dimension where a read leaves its tensor, a guard or a comparison turns, or a floor or mod steps."""
    found = {0, 1, size - 2, size - 1}
    ranges = op.ranges
    for r in op.reads:
        for e, extent in zip(r.index, graph.tensors[r.tensor].shape, strict=True):
            found.update(_turns(e, name, ranges, (0, extent)))
        for g in r.when:
            found.update(_turns(g.aff, name, ranges, (0,)))
    found.update(_numbers(op))
    near = sorted({p for f in found for p in (f - 1, f) if 0 <= p < size})
    return near if len(near) <= EDGES else near[: EDGES // 2] + near[-EDGES // 2 :]


def _numbers(op: Block) -> list[int]:
    """Whole numbers in the bodies, with which places may be compared."""
    consts = (x.value for x in distinct((*op.point, *op.then)) if isinstance(x, Const) and not isinstance(x.value, bool))
    return sorted({int(v) for v in consts if math.isfinite(v) and v == int(v)})


def _compared(op: Block, name: str, size: int) -> list[int]:
    """Places along a dimension with which a body compares it alone."""
    found: set[int] = set()
    for x in distinct((*op.point, *op.then)):
        if isinstance(x, Call) and len(x.args) == 2 and x.dtype == "bool":
            place, number = sorted(x.args, key=lambda a: isinstance(a, Const))
            if (
                isinstance(place, Index)
                and isinstance(number, Const)
                and dims_of(place.aff) == frozenset({name})
                and place.aff.coef(name)
            ):
                at = (int(number.value) - place.aff.const) // place.aff.coef(name)
                found.update((at, at - 1, at + 1))
    return sorted(v for v in found if 0 <= v < size)


def _turns(e: Aff, name: str, ranges: Any, levels: tuple[int, ...]) -> Iterator[int]:
    """Where an index expression passes some levels as a dimension goes on, the others at either end of theirs."""
    c = e.coef(name)
    plain = [(str(a), k) for a, k in e.terms if isinstance(a, str) and a != name]
    for ends in (0, 1):
        rest = e.const + sum(k * (ranges[a] - 1) * ends for a, k in plain)
        for level in levels if c else ():
            place = -((rest - level) // c) if c > 0 else (rest - level) // -c + 1
            yield from (place, place + 1)
    for atom, _ in e.terms:
        if isinstance(atom, Floor | Mod) and name in dims_of(atom.arg):
            k = atom.arg.coef(name)
            step = max(1, atom.div // abs(k)) if k else 1
            yield from (step, 2 * step, (ranges[name] - 1) // step * step)
