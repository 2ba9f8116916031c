"""Strategies of an operation, generated from the moves of the ``split`` rule; nothing is listed by hand per operator.

Also the boxes that a strategy gives each device: of the index space, of what is read, of what is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from tapestry.ir.footprint import Boxes, hull, opaque_boxes
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.plan import Layout, Mesh, Strategy, coordinates, shares
from tapestry.ir.recognition.state import varies
from tapestry.rewrites.splitting.split import splittable

MAX_STRATEGIES = 1024  # of one operation: what three mesh axes offer, and part of what four do
WINDOW = 16  # points; a reduced dimension under that, beside a larger one, is taken for a window: cut only when pinned
SCATTERS = 3  # output axes, the longest ones, along which a reduction that is cut may be scattered


@dataclass(frozen=True, slots=True)
class Pin:
    """What the user insists on: dimension ``dim`` cut by mesh axis number ``axis``; none ("") cut by it."""

    dim: str
    axis: int


def strategies(op: Op, mesh: Mesh, pins: tuple[Pin, ...] = ()) -> list[Strategy]:
    """Ways to spread an operation over a mesh, the replicated one first: all of them, or `MAX_STRATEGIES`."""
    return every_strategy(op, mesh, pins)[:MAX_STRATEGIES]


def every_strategy(op: Op, mesh: Mesh, pins: tuple[Pin, ...] = ()) -> list[Strategy]:
    """All ways to spread an operation over a mesh; where they are too many, those with the fewest reduce-scatters first.

    Each mesh axis cuts one dimension or none; a cut reduced dimension ends in an all-reduce or in a reduce-scatter along
    an output axis. `WINDOW` and `SCATTERS` leave some out, which `left_out` counts.
    """
    pinned = {p.axis: p.dim for p in pins}
    choices = [_axis_choices(op, mesh[a].size, pinned.get(a)) for a in range(len(mesh))]
    out: list[Strategy] = []
    for combo in itertools.product(*choices):
        if _no_part_is_empty(op, mesh, combo):
            out.append(Strategy(tuple(d for d, _ in combo), _layout(op, combo)))
    if len(out) > MAX_STRATEGIES:
        reduced = _reduced_names(op)
        out.sort(key=lambda s: sum(o is not None and d in reduced for d, o in zip(s.dims, s.out, strict=True)))
    return out


def left_out(op: Op, mesh: Mesh, pins: tuple[Pin, ...] = ()) -> int:
    """How many combinations of cuts `every_strategy` does not look at, those that leave a part empty included."""
    pinned = {p.axis: p.dim for p in pins}
    sizes = [(a.size, pinned.get(k)) for k, a in enumerate(mesh)]
    every = prod(len(_axis_choices(op, n, pin, every=True)) for n, pin in sizes)
    return every - prod(len(_axis_choices(op, n, pin)) for n, pin in sizes)


def scatters(op: Op, s: Strategy, axis: int) -> bool:
    """Whether states that a mesh axis cuts are reduce-scattered: some field varies along the output axis where it ends.

    States of rows are all-reduced even where the results that are made of them end in parts along the row.
    """
    out = s.out[axis]
    return out is not None and isinstance(op, Block) and any(v[out] for v in varies(op))


def _reduced_names(op: Op) -> set[str]:
    return {d.name for d in op.reduce} if isinstance(op, Block) else set()


def merges(op: Op, s: Strategy) -> list[tuple[int, bool]]:
    """Mesh axes along which partial states are merged, and whether each merge is a reduce-scatter."""
    reduced = _reduced_names(op)
    return [(a, scatters(op, s, a)) for a, d in enumerate(s.dims) if d in reduced]


def _axis_choices(op: Op, size: int, pinned: str | None, *, every: bool = False) -> list[tuple[str | None, int | None]]:
    """(dimension, scatter axis) for one mesh axis; ``every``: also those that are left out."""
    out: list[tuple[str | None, int | None]] = [] if pinned else [(None, None)]
    if pinned == "":
        return out
    reduced = _reduced_names(op)
    largest = max((d.size for d in op.reduce), default=0) if isinstance(op, Block) else 0
    for d in splittable(op):
        if (pinned and d.name != pinned) or d.size < size or size == 1:
            continue
        if d.name not in reduced:
            out.append((d.name, None))
            continue
        if not (pinned or every) and d.size < min(largest, WINDOW):
            continue
        out.append((d.name, None))
        extents = [(i, m.size) for i, m in enumerate(op.dims) if m.size >= size]
        out += [(d.name, i) for i, _ in sorted(extents, key=lambda e: -e[1])[: None if every else SCATTERS]]
    return out or [(None, None)]


def _no_part_is_empty(op: Op, mesh: Mesh, combo: tuple[tuple[str | None, int | None], ...]) -> bool:
    """Whether no part is empty, counting all mesh axes that cut one dimension or scatter one output axis, and whether
    every scattered part lies inside the block that its device reduced (a faster axis may not cut the same dimension)."""
    parts: dict[str, tuple[int, ...]] = {}
    for a, (_, scatter) in enumerate(combo):
        if scatter is not None and any(d == op.dims[scatter].name for d, _ in combo[a + 1 :]):
            return False
    if not _in_order(op, [c for c in combo if c[0] in _reduced_names(op)]):
        return False
    for a, (d, scatter) in enumerate(combo):
        for name in {d, op.dims[scatter].name if scatter is not None else None} - {None}:
            parts[str(name)] = (*parts.get(str(name), ()), a)
    return all(_nowhere_empty(mesh, axes, op.ranges[n]) for n, axes in parts.items())


def _in_order(op: Op, cuts: Sequence[tuple[str | None, int | None]]) -> bool:
    """Whether states that merge in order are merged so: one dimension, the slowest, cut by axes that are merged at once."""
    if not isinstance(op, Block) or op.monoid is None or MONOIDS[op.monoid].commutative or not cuts:
        return True
    slowest = next((d.name for d in op.reduce if d.size > 1), None)
    at_once = {scatter is not None and any(v[scatter] for v in varies(op)) for _, scatter in cuts}
    return {d for d, _ in cuts} == {slowest} and len(at_once) == 1


@lru_cache(maxsize=1 << 14)
def _nowhere_empty(mesh: Mesh, axes: tuple[int, ...], extent: int) -> bool:
    before = shares(mesh, axes)
    return len(before) <= extent + 1 and all(
        a * extent // before[-1] < b * extent // before[-1] for a, b in itertools.pairwise(before)
    )


def _layout(op: Op, combo: tuple[tuple[str | None, int | None], ...]) -> Layout:
    axes = {d.name: i for i, d in enumerate(op.dims)}
    reduced = _reduced_names(op)
    return tuple(scatter if d is None or d in reduced else axes[d] for d, scatter in combo)


# boxes


def tensor_boxes(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Boxes:
    """What each device holds of a tensor in a layout."""
    return _cut_boxes(shape, tuple(tuple(a for a, t in enumerate(layout) if t == i) for i in range(len(shape))), mesh)


def op_boxes(op: Op, dims: tuple[str | None, ...], mesh: Mesh) -> Boxes:
    """Each device's block of the index space."""
    axes = tuple(tuple(a for a, n in enumerate(dims) if n == d.name) for d in op.space)
    return _cut_boxes(tuple(d.size for d in op.space), axes, mesh)


def result_boxes(op: Op, s: Strategy, mesh: Mesh) -> Boxes:
    """Each device's block of what an operation makes, once it is merged."""
    return tensor_boxes(tuple(d.size for d in op.dims), s.out, mesh) if isinstance(op, Block) else op_boxes(op, s.dims, mesh)


def out_layout(op: Op, layout: Layout, output: int) -> Layout:
    """Layout of one output tensor: for an opaque operation, dimensions are mapped to that output's axes."""
    if isinstance(op, Block):
        return layout
    return tuple(None if i is None else op.out_axes[output][i] for i in layout)


@lru_cache(maxsize=1 << 16)
def _cut_boxes(extents: tuple[int, ...], axes: tuple[tuple[int, ...], ...], mesh: Mesh) -> Boxes:
    """Boxes of all devices; callers share them and must not write to them."""
    coords = np.array(coordinates(mesh), np.int64).reshape(-1, len(mesh))
    out = np.zeros((len(coords), len(extents), 2), np.int64)
    for i, (n, cut_by) in enumerate(zip(extents, axes, strict=True)):
        k = np.zeros(len(coords), np.int64)
        for a in cut_by:  # the first mesh axis is the slowest
            k = k * mesh[a].size + coords[:, a]
        before = np.array(shares(mesh, cut_by), np.int64)
        ends = before * n // before[-1]
        out[:, i, 0], out[:, i, 1] = ends[k], ends[k + 1]
    out.setflags(write=False)
    return out


def covers(outer: Boxes, inner: Boxes) -> bool:
    """Whether every device's inner box is empty or inside its outer one."""
    return bool(which_cover(outer[None], inner)[0])


def which_cover(outers: np.ndarray, inner: Boxes) -> np.ndarray:
    """For each of several footprints ``[k, device, axis, 2]``, whether it covers another one."""
    empty: np.ndarray = np.any(inner[..., 1] <= inner[..., 0], axis=-1)
    inside: np.ndarray = np.all((outers[..., 0] <= inner[..., 0]) & (inner[..., 1] <= outers[..., 1]), axis=-1)
    out: np.ndarray = np.all(empty | inside, axis=-1)
    return out


def footprints(op: Op, graph: Graph, s: Strategy, mesh: Mesh) -> Iterator[tuple[int, str, Boxes]]:
    """(read position, tensor, boxes) of everything that each device must have, clipped to the tensor."""
    for k, found in footprints_of_all(op, graph, (s,), mesh).items():
        yield k, op.operands[k], found[0]


def reads_once(op: Op, graph: Graph, s: Strategy, mesh: Mesh) -> dict[tuple[str, bytes], Boxes]:
    """The footprints of an operation, equal ones of a tensor once."""
    return {(t, b.tobytes()): b for _, t, b in footprints(op, graph, s, mesh)}


def footprints_of_all(op: Op, graph: Graph, some: Sequence[Strategy], mesh: Mesh) -> dict[int, np.ndarray]:
    """By read position ``[strategy, device, axis, 2]``: what each device must have with each of several strategies.

    Reads of the body cover the block of the whole index space; reads of ``then`` the part of the output that the device
    ends with, which after a reduce-scatter is smaller.
    """
    block = np.concatenate([op_boxes(op, s.dims, mesh) for s in some])
    many = (len(some), len(block) // len(some))
    if not isinstance(op, Block):
        return {k: boxes.reshape(*many, *boxes.shape[1:]) for k, _, boxes in opaque_boxes(op, graph, block)}
    final = np.concatenate([result_boxes(op, s, mesh) for s in some])
    reduced = _reduced_names(op) if op.monoid is not None else set[str]()
    cut = np.repeat([any(d in reduced for d in s.dims) for s in some], many[1])
    body, then = op.body_reads(), op.then_reads()
    lo_hi = {d.name: (block[:, i, 0], block[:, i, 1] - 1) for i, d in enumerate(op.space)}
    end = {d.name: (final[:, i, 0], final[:, i, 1] - 1) for i, d in enumerate(op.dims)}
    end = lo_hi | {n: (np.where(cut, a, lo_hi[n][0]), np.where(cut, b, lo_hi[n][1])) for n, (a, b) in end.items()}
    out: dict[int, np.ndarray] = {}
    for k, r in enumerate(op.reads):
        shape = graph.tensors[r.tensor].shape
        found = hull(r, lo_hi if k in body else end, shape, len(block))
        if k in body and k in then and cut.any():
            other = hull(r, end, shape, len(block))  # (the same again where nothing is cut)
            found = np.stack([np.minimum(found[..., 0], other[..., 0]), np.maximum(found[..., 1], other[..., 1])], -1)
        out[k] = found.reshape(*many, *found.shape[1:])
    return out
