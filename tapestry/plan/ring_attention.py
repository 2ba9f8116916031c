"""A reduced dimension whose blocks travel round a mesh axis: ring attention (Liu, Zaharia and Abbeel 2023).

The axis cuts a map dimension (queries) in space and a reduced one (keys) in time. In step k, device c of n has block
``(c + k) mod n`` of what is read along the reduced dimension; it merges that block's states into its own, and the blocks move
on by one device. All bytes that a gather would have brought pass by, but no device ever holds more than two blocks of them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

import numpy as np

from tapestry.ir.footprint import Boxes, hull
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.index import dims_of
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.plan import Mesh, Strategy, coordinates, shares
from tapestry.ir.program import Message, Shared
from tapestry.plan.strategy import op_boxes


def axis_of(s: Strategy) -> int | None:
    """The mesh axis round which blocks travel; ``None`` when none do."""
    return next((a for a, d in enumerate(s.ring) if d is not None), None)


def travelling(op: Op, s: Strategy) -> frozenset[int]:
    """Reads whose blocks travel: those along the reduced dimension that do not see where the axis cuts."""
    a = axis_of(s)
    if a is None or not isinstance(op, Block):
        return frozenset()
    return _round(op, s.dims[a], s.ring[a])


def _round(op: Block, cut: str | None, along: str | None) -> frozenset[int]:
    out: list[int] = []
    for k in op.body_reads() - op.then_reads():
        index = {n for e in op.reads[k].index for n in dims_of(e)}
        if along in index and cut not in index:
            out.append(k)
    return frozenset(out)


def rings(op: Op, s: Strategy, mesh: Mesh) -> list[Strategy]:
    """The strategy with blocks of a reduced dimension travelling, in every way that there is.

    Only where an inner reduction makes what is reduced, as in attention: elsewhere what would travel is a weight.
    """
    if not isinstance(op, Block) or not op.inner or op.monoid is None or not MONOIDS[op.monoid].commutative:
        return []
    reduced = {d.name: d.size for d in op.reduce}
    if any(d in reduced for d in s.dims) or any(s.ring):
        return []
    out: list[Strategy] = []
    for a, d in enumerate(s.dims):
        for name, size in reduced.items() if d is not None else ():
            before = shares(mesh, (a,))
            ends = [n * size // before[-1] for n in before]
            if all(lo < hi for lo, hi in itertools.pairwise(ends)) and _round(op, d, name):
                out.append(replace(s, ring=tuple(name if b == a else None for b in range(len(mesh)))))
    return out


def blocks(op: Op, s: Strategy, mesh: Mesh, step: int) -> Boxes:
    """Each device's block of the index space in one step."""
    a = axis_of(s)
    assert a is not None
    out = op_boxes(op, s.dims, mesh).copy()
    at = next(i for i, d in enumerate(op.space) if d.name == s.ring[a])
    before = np.array(shares(mesh, (a,)), np.int64)
    ends = before * op.space[at].size // before[-1]
    part = (np.array(coordinates(mesh), np.int64).reshape(-1, len(mesh))[:, a] + step) % mesh[a].size
    out[:, at, 0], out[:, at, 1] = ends[part], ends[part + 1]
    return out


def held(op: Op, graph: Graph, s: Strategy, mesh: Mesh, read: int, step: int) -> Boxes:
    """What each device has of a travelling read in one step, guards aside: all of the block travels on."""
    assert isinstance(op, Block)
    points = blocks(op, s, mesh, step)
    spans = {d.name: (points[:, i, 0], points[:, i, 1] - 1) for i, d in enumerate(op.space)}
    r = op.reads[read]
    return hull(replace(r, when=()), spans, graph.tensors[r.tensor].shape, len(points))


def passed_on(wanted: Boxes, mesh: Mesh, axis: int) -> tuple[Message, ...]:
    """Every device takes its next block from its neighbour along the axis."""
    return _passed_on(wanted.tobytes(), wanted.shape, mesh, axis)


@lru_cache(maxsize=1 << 10)
def _passed_on(raw: bytes, shape: tuple[int, ...], mesh: Mesh, axis: int) -> tuple[Message, ...]:
    boxes = [tuple((lo, hi) for lo, hi in box) for box in np.frombuffer(raw, np.int64).reshape(shape).tolist()]
    pairs = enumerate(zip(neighbours(mesh, axis), boxes, strict=True))
    return Shared(Message(src, dst, box) for dst, (src, box) in pairs if all(lo < hi for lo, hi in box))


@lru_cache(maxsize=1 << 8)
def neighbours(mesh: Mesh, axis: int) -> list[int]:
    """The device from which each takes its next block: the next one along the axis."""
    places = coordinates(mesh)
    number = {c: d for d, c in enumerate(places)}
    return [number[(*c[:axis], (c[axis] + 1) % mesh[axis].size, *c[axis + 1 :])] for c in places]
