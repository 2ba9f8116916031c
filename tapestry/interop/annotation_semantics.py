"""What annotations mean for an operation, from its index projections alone: no rule per operator.

Every point of an operation's index space (map and reduced dimensions) reads one cell of each tensor. A device can compute
the point when it holds all these cells. The specs of the inputs make sense together exactly when every point has such a
device: for element-wise operations that is agreement, for broadcasts the intersection of device sets of the proposal's
"Sharding Formalism", for MatMul agreement along the contracted axis, and for convolution, pooling and normalisation, which
the formalism leaves out, the same sentence says what to ask. Points of one reduction may be on different devices: then the
reduction has to be completed, which is not an error, nor is an output somewhere else than where it was computed.

Points are not enumerated: dimensions that appear in one index expression form a component, whose points fall into few
classes (same part of every cut axis); only combinations of classes are looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod

import numpy as np

from tapestry.interop.placement import Axis, Placement
from tapestry.ir.graph import Block, Graph, Op, Opaque
from tapestry.ir.index import Aff, dims_of, evaluate

MAX_POINTS = 1 << 22  # of one component
MAX_COMBINATIONS = 1 << 18
OUTSIDE = -1


@dataclass(frozen=True, slots=True)
class Clash:
    """A point that no device can compute, and which cells it reads: (tensor, cell, devices that hold it)."""

    point: dict[str, int]
    cells: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


@dataclass(slots=True)
class _Use:
    """One constraint on points: an axis of a read (with its table), or a guard."""

    read: int
    aff: Aff
    axis: Axis | None = None
    guard: str = ""


@dataclass(slots=True)
class _Component:
    dims: list[str]
    uses: list[_Use] = field(default_factory=list[_Use])
    classes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    samples: list[dict[str, int]] = field(default_factory=list[dict[str, int]])


def clash(op: Op, placed: Mapping[str, Placement]) -> Clash | None:
    """A point that no device can compute from what it holds; ``None`` when there is none (or too many classes to tell).

    Args:
        placed: placements of tensors; the others are taken to be wherever they are needed.
    """
    if isinstance(op, Opaque):
        return _opaque_clash(op, placed)
    reads = [k for k, r in enumerate(op.reads) if r.tensor in placed]
    body = op.body_reads()
    if op.monoid and any(_reduces(op, k, placed) for k in reads):  # what is read after the merge may be elsewhere
        groups = [[k for k in reads if k in body], [k for k in reads if k not in body]]
    else:
        groups = [reads]
    return next((c for g in groups if g and (c := _joint(op, g, placed)) is not None), None)


def _reduces(op: Block, read: int, placed: Mapping[str, Placement]) -> bool:
    """Whether a read's placement spreads points of one reduction over devices."""
    reduced = {d.name for d in op.reduce}
    r = op.reads[read]
    return any(dims_of(e) & reduced and len(placed[r.tensor].axis(a).devices) > 1 for a, e in enumerate(r.index))


def _joint(op: Block, reads: list[int], placed: Mapping[str, Placement]) -> Clash | None:
    """A point for which no device holds what all these reads touch."""
    components = _components(op, reads, placed)
    if components is None or prod(len(c.classes) for c in components) > MAX_COMBINATIONS:
        return None
    flat = [u for c in components for u in c.uses]
    everyone = _everyone(placed)
    for combination in itertools.product(*(range(len(c.classes)) for c in components)):
        values = [v for c, k in zip(components, combination, strict=True) for v in c.classes[k]]
        mask = everyone
        for r in reads:
            mask &= _mask(op, r, flat, values, placed, everyone)
        if mask == 0:
            point = {n: v for c, k in zip(components, combination, strict=True) for n, v in c.samples[k].items()}
            return _clash(op, reads, point, placed)
    return None


def _everyone(placed: Mapping[str, Placement]) -> int:
    return reduce(lambda a, b: a | b, (p.holders for p in placed.values()), 0)


def _mask(op: Block, read: int, uses: list[_Use], values: list[int], placed: Mapping[str, Placement], everyone: int) -> int:
    """Devices that hold the cell that a read touches; all of them where it touches none."""
    mask = placed[op.reads[read].tensor].holders
    for u, v in zip(uses, values, strict=True):
        if u.read != read:
            continue
        if v == OUTSIDE:
            return everyone
        if u.axis is not None:
            mask &= u.axis.devices[v]
    return mask


def _components(op: Block, reads: list[int], placed: Mapping[str, Placement]) -> list[_Component] | None:
    """Dimensions grouped by the index expressions that tie them together, with the classes of their points."""
    uses: list[_Use] = []
    for k in reads:
        r = op.reads[k]
        for a, e in enumerate(r.index):
            uses.append(_Use(k, e, placed[r.tensor].axis(a)))
        uses += [_Use(k, g.aff, guard=g.op) for g in r.when]
    sizes = op.ranges
    leader = {n: n for n in sizes}

    def find(n: str) -> str:
        while leader[n] != n:
            n = leader[n]
        return n

    uses = [u for u in uses if u.axis is None or len(u.axis.devices) > 1 or op.reads[u.read].other is not None]
    for u in uses:
        names = sorted(dims_of(u.aff))
        for n in names[1:]:
            leader[find(n)] = find(names[0])
    groups: dict[str, _Component] = {}
    for n in sizes:
        groups.setdefault(find(n), _Component([])).dims.append(n)
    constant = _Component([])
    for u in uses:
        names = sorted(dims_of(u.aff))
        (groups[find(names[0])] if names else constant).uses.append(u)
    out = [c for c in (*groups.values(), constant) if c.uses]
    if any(prod(sizes[n] for n in c.dims) > MAX_POINTS for c in out):
        return None
    for c in out:
        _classify(c, sizes)
    idle = [n for g in groups.values() if not g.uses for n in g.dims]
    return [*out, _Component(idle, [], [()], [dict.fromkeys(idle, 0)])]


def _classify(c: _Component, sizes: Mapping[str, int]) -> None:
    """The distinct tuples of labels over a component's points, with a point of each."""
    extents = [sizes[n] for n in c.dims]
    grid: Sequence[np.ndarray] = np.indices(extents, sparse=True) if extents else ()
    env = dict(zip(c.dims, grid, strict=True))
    columns = [np.broadcast_to(_labels(u, np.asarray(evaluate(u.aff, env))), extents).reshape(-1) for u in c.uses]
    rows, first = np.unique(np.stack(columns), axis=1, return_index=True)
    c.classes = [tuple(int(v) for v in row) for row in rows.T]
    points = np.unravel_index(first, extents) if extents else ()
    c.samples = [{n: int(p[k]) for n, p in zip(c.dims, points, strict=True)} for k in range(len(first))]


def _labels(u: _Use, at: np.ndarray) -> np.ndarray:
    if u.axis is None:
        holds = at >= 0 if u.guard == "ge" else at == 0
        return np.where(holds, 0, OUTSIDE)
    n = len(u.axis.label)
    if n == 0:
        return np.full(at.shape, OUTSIDE)
    return np.where((at >= 0) & (at < n), u.axis.label[np.clip(at, 0, n - 1)], OUTSIDE)


def _clash(op: Block, reads: list[int], point: dict[str, int], placed: Mapping[str, Placement]) -> Clash:
    cells: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for r in (op.reads[k] for k in reads):
        cell = tuple(int(evaluate(e, point)) for e in r.index)
        inside = all(0 <= x < n for x, n in zip(cell, placed[r.tensor].shape, strict=True))
        if inside:
            cells[(r.tensor, cell)] = _holders(placed[r.tensor], cell)
    names = [d.name for d in op.space]
    return Clash({n: point.get(n, 0) for n in names}, tuple((t, c, h) for (t, c), h in cells.items()))


def _holders(p: Placement, cell: tuple[int, ...]) -> tuple[int, ...]:
    def holds(piece: tuple[tuple[tuple[int, int], ...], ...]) -> bool:
        return all(any(lo <= x < hi for lo, hi in iv) for x, iv in zip(cell, piece, strict=True))

    return tuple(sorted(d for d, piece in p.pieces.items() if holds(piece)))


def _opaque_clash(op: Opaque, placed: Mapping[str, Placement]) -> Clash | None:
    """For an opaque operation every axis that it does not commute with is read whole, in one place."""
    given = [(k, t) for k, t in enumerate(op.ins) if t in placed]
    cuts = [sorted({e for _, t in given for e in _edges(op, d, t, placed)} | {0}) for d in range(len(op.dims))]
    for point in itertools.product(*cuts):
        mask, cells = _everyone(placed), list[tuple[str, tuple[int, ...], tuple[int, ...]]]()
        for k, t in given:
            p = placed[t]
            at = {a: x for a, x in zip(op.in_axes[k], point, strict=True) if a is not None}
            fits = tuple(
                sorted(
                    d
                    for d, piece in p.pieces.items()
                    if all(
                        any(lo <= at[a] < hi for lo, hi in iv) if a in at else iv == ((0, n),)
                        for a, (iv, n) in enumerate(zip(piece, p.shape, strict=True))
                    )
                )
            )
            cells.append((t, tuple(at.get(a, 0) for a in range(len(p.shape))), fits))
            mask &= sum(1 << d for d in fits)
        if given and mask == 0:
            return Clash({d.name: x for d, x in zip(op.dims, point, strict=True)}, tuple(cells))
    return None


def _edges(op: Opaque, dim: int, tensor: str, placed: Mapping[str, Placement]) -> Iterator[int]:
    for k, t in enumerate(op.ins):
        axis = op.in_axes[k][dim] if t == tensor else None
        if axis is not None:
            label = placed[t].axis(axis).label
            yield from (int(x) + 1 for x in np.flatnonzero(np.diff(label)))


# what an output's spec implies


@dataclass(frozen=True, slots=True)
class Missing:
    """Cells of an input that a device needs for its part of the output, and does not hold.

    Attributes:
        how: ``reduction`` where only reduced dimensions walk the cut axis, ``halo`` where reduced and map dimensions do,
            else ``reshard``.
    """

    tensor: str
    device: int
    cells: int
    how: str


def missing(op: Op, graph: Graph, outs: Mapping[str, Placement], placed: Mapping[str, Placement]) -> list[Missing]:
    """For each input, the worst device: what it lacks of the footprint of its part of the outputs."""
    worst: dict[str, Missing] = {}
    for k, tensor in enumerate(r.tensor for r in op.reads) if isinstance(op, Block) else enumerate(op.ins):
        if tensor not in placed:
            continue
        for t in (t for t in op.outs if t in outs):
            for d in outs[t].pieces:
                need = _need(op, k, outs[t], op.outs.index(t), d, graph.tensors[tensor].shape)
                if need is None:
                    continue
                lack = prod(len(c) for c in need) - prod(_held(c, placed[tensor], d, a) for a, c in enumerate(need))
                if lack > (worst[tensor].cells if tensor in worst else 0):
                    worst[tensor] = Missing(tensor, d, lack, _how(op, k, placed[tensor]))
    return list(worst.values())


def _held(cells: np.ndarray, p: Placement, device: int, axis: int) -> int:
    piece = p.pieces.get(device)
    if piece is None:
        return 0
    return sum(int(((cells >= lo) & (cells < hi)).sum()) for lo, hi in piece[axis])


def _need(op: Op, k: int, out: Placement, position: int, device: int, shape: tuple[int, ...]) -> list[np.ndarray] | None:
    """Cells of each axis of input k that a device's part of an output reads (their product is the footprint's hull)."""
    box = out.box(device)
    if box is None:
        return None
    if isinstance(op, Opaque):
        cells = [np.arange(n) for n in shape]
        for i, axis in enumerate(op.in_axes[k]):
            at = op.out_axes[position][i]
            if axis is not None and at is not None:
                cells[axis] = np.arange(*box[at])
        return cells
    ranges = {d.name: (0, d.size) for d in op.space} | {d.name: b for d, b in zip(op.dims, box, strict=True)}
    found: list[np.ndarray] = []
    for e, n in zip(op.reads[k].index, shape, strict=True):
        names = sorted(dims_of(e))
        if prod(ranges[x][1] - ranges[x][0] for x in names) > MAX_POINTS:
            return None
        ends = (np.arange(*ranges[x]) for x in names)
        grid: Sequence[np.ndarray] = np.meshgrid(*ends, indexing="ij", sparse=True) if names else ()
        at = np.unique(np.asarray(evaluate(e, dict(zip(names, grid, strict=True)))))
        found.append(at[(at >= 0) & (at < n)])
    return found


def _how(op: Op, k: int, p: Placement) -> str:
    if not isinstance(op, Block):
        return "reshard"
    reduced = {d.name for d in op.reduce}
    walks = [dims_of(e) for a, e in enumerate(op.reads[k].index) if len(p.axis(a).devices) > 1]
    kinds = {"reduction" if w <= reduced else "halo" if w & reduced else "reshard" for w in walks}
    return "reshard" if not kinds or "reshard" in kinds else "halo" if "halo" in kinds else "reduction"
