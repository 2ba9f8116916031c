"""What an annotation means: for each axis of a tensor, which devices hold which cells; and layouts as specs and back.

A device holds the product, over the axes, of some intervals. So the devices that hold a cell are the intersection, over
the axes, of the devices that hold its coordinate, and a table per axis says everything. Cuts are balanced (part k of P of
N cells is ``[floor(k N / P), floor((k+1) N / P))``), which is the equal cut of the proposal wherever that is defined.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from tapestry.errors import PlanError
from tapestry.interop.sharding_specs import ShardedDim, ShardingSpec, SimpleShard
from tapestry.interop.tile_patterns import Tiling
from tapestry.ir.kernel import Box, cut
from tapestry.ir.plan import Layout, Mesh, coordinates, device_count, interval, part

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a placed tensor: cells with one label are on the same devices.

    Attributes:
        label: for each cell, the position of its set of devices in ``devices``.
        devices: sets of devices, as bit masks.
    """

    label: np.ndarray
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which cells of a tensor each device holds: ``pieces`` gives intervals per axis, ``holders`` all devices with any."""

    shape: tuple[int, ...]
    pieces: dict[int, tuple[Intervals, ...]]

    @property
    def holders(self) -> int:
        """Devices that hold anything, as a bit mask."""
        return sum(1 << d for d in self.pieces)

    def box(self, device: int) -> Box | None:
        """What a device holds, when that is one box."""
        piece = self.pieces.get(device)
        return None if piece is None or any(len(p) != 1 for p in piece) else tuple(p[0] for p in piece)

    def axis(self, k: int) -> Axis:
        """The table of one axis."""
        by_piece: dict[Intervals, int] = {}
        for d, piece in self.pieces.items():
            by_piece[piece[k]] = by_piece.get(piece[k], 0) | 1 << d
        ends = sorted({e for p in by_piece for lo, hi in p for e in (lo, hi)} | {0, self.shape[k]})
        numbers: dict[int, int] = {}
        label = np.zeros(self.shape[k], np.int64)
        for lo, hi in itertools.pairwise(ends):
            mask = 0
            for p, devices in by_piece.items():
                if any(a <= lo and hi <= b for a, b in p):
                    mask |= devices
            label[lo:hi] = numbers.setdefault(mask, len(numbers))
        return Axis(label, tuple(numbers))


def placement(spec: ShardingSpec, shape: tuple[int, ...]) -> Placement:
    """The placement of a tensor; the spec is structurally right (`interop.annotation_rules`)."""
    axes, radix, owner = _fused_parts(spec, shape)
    stated = {(d.axis or 0) % max(len(shape), 1): d.parts for d in spec.dims if d.parts}
    groups = dict(spec.groups)
    pieces: dict[int, tuple[Intervals, ...]] = {}
    for k, entry in enumerate(spec.devices):
        digits = _in_radix(k, radix)
        piece: list[Intervals] = [((0, n),) for n in shape]
        for axis, shards in axes.items():
            mine = [digits[i] for i, a in enumerate(owner) if a == axis]
            piece[axis] = (stated[axis][mine[0]],) if axis in stated else _intervals(shape[axis], shards, mine)
        for d in groups.get(entry, (entry,)):
            pieces[d] = tuple(piece)
    return Placement(shape, pieces)


def _fused_parts(spec: ShardingSpec, shape: tuple[int, ...]) -> tuple[dict[int, list[tuple[int, int]]], list[int], list[int]]:
    """(axis → (size, parts) of what was fused into it; numbers of parts, slowest first; the axis that each belongs to)."""
    axes: dict[int, list[tuple[int, int]]] = {}
    radix: list[int] = []
    owner: list[int] = []
    for d in spec.dims:
        assert d.axis is not None
        axis = d.axis % max(len(shape), 1)
        sizes = fused_sizes(d, shape[axis])
        axes[axis] = [(n, s.num_shards or 1) for n, s in zip(sizes, d.shards, strict=True)]
        radix += [s.num_shards or 1 for s in d.shards]
        owner += [axis] * len(d.shards)
    return axes, radix, owner


def fused_sizes(d: ShardedDim, size: int) -> list[int]:
    """Sizes of the axes that were fused into one of a size; one that is not given (a symbol) is what the others leave.

    Raises:
        PlanError: they do not make up the axis.
    """
    if len(d.shards) == 1:
        return [size]
    known = [s.dim if isinstance(s.dim, int) else None for s in d.shards]
    rest = prod(n for n in known if n is not None)
    if known.count(None) > 1 or rest < 1 or size % rest or (None not in known and rest != size):
        text = " × ".join(str(s.dim) for s in d.shards)
        hint = "dim_value of each, or of all but one"
        raise PlanError(f"axes {text} do not make up axis {d.axis} of {size} cells", hint=hint)
    return [size // rest if n is None else n for n in known]


def _in_radix(k: int, radix: list[int]) -> list[int]:
    out: list[int] = []
    for r in reversed(radix):
        out.append(k % r)
        k //= r
    return out[::-1]


def _intervals(size: int, shards: list[tuple[int, int]], digits: list[int]) -> Intervals:
    """The part of an axis: the product of parts of the axes that were fused into it, merged where they touch."""
    out: list[tuple[int, int]] = [(0, 1)]
    for (n, parts), k in zip(shards, digits, strict=True):
        lo, hi = cut(n, parts, k)
        whole = (lo, hi) == (0, n)
        spread = [
            (a * n + lo, (b - 1) * n + hi) if whole else (c * n + lo, c * n + hi)
            for a, b in out
            for c in ((a,) if whole else range(a, b))
        ]
        out = []
        for a, b in spread:
            if out and out[-1][1] == a:
                out[-1] = (out[-1][0], b)
            else:
                out.append((a, b))
    assert prod(n for n, _ in shards) == size or len(shards) == 1
    return tuple(out)


# layouts


def _cutters(layout: Layout, axis: int) -> tuple[int, ...]:
    """The mesh axes that cut an axis of a tensor."""
    return tuple(a for a, t in enumerate(layout) if t == axis)


def held(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[Box, ...]:
    """What each device holds of a tensor in a layout."""
    cutters = [_cutters(layout, k) for k in range(len(shape))]
    return tuple(tuple(interval(n, mesh, by, c) for n, by in zip(shape, cutters, strict=True)) for c in coordinates(mesh))


def spec_of(tensor: str, layout: Layout, rank: int, mesh: Mesh) -> ShardingSpec:
    """A layout as a spec: one part per combination of parts, on one device or (where replicated) on a group."""
    dims: list[ShardedDim] = []
    axes: list[tuple[int, ...]] = []
    for k in range(rank):
        by = _cutters(layout, k)
        parts = prod(mesh[a].size for a in by)
        if parts > 1:
            axes.append(by)
            dims.append(ShardedDim(k, (SimpleShard(parts),)))
    return replace(spec_for(tensor, axes, mesh), dims=tuple(dims))


def spec_for(tensor: str, cutters: Sequence[tuple[int, ...]], mesh: Mesh) -> ShardingSpec:
    """A spec, still without dims, of parts that are cut by some mesh axes each: which device, or group, has which part."""
    where: dict[tuple[int, ...], list[int]] = {}
    for d, c in enumerate(coordinates(mesh)):
        where.setdefault(tuple(part(mesh, by, c)[1] for by in cutters), []).append(d)
    devices: list[int] = []
    groups: list[tuple[int, tuple[int, ...]]] = []
    for key in sorted(where):
        on = where[key]
        if len(on) == 1:
            devices.append(on[0])
        else:
            groups.append((-1 - len(groups), tuple(on)))
            devices.append(groups[-1][0])
    return ShardingSpec(tensor, tuple(devices), tuple(groups), ())


def stating(
    spec: ShardingSpec, declared: Sequence[int | str | None], shape: tuple[int, ...], mesh: Mesh, layout: Layout
) -> ShardingSpec:
    """A layout's spec with the size or symbol of every cut axis, and with its parts where they are not equal."""
    dims: list[ShardedDim] = []
    for d in spec.dims:
        assert d.axis is not None
        symbol = declared[d.axis] if d.axis < len(declared) else None
        by = _cutters(layout, d.axis)
        count = d.shards[0].num_shards or 1
        where = {part(mesh, by, c)[1]: interval(shape[d.axis], mesh, by, c) for c in coordinates(mesh)}
        unequal = shape[d.axis] % count or any(mesh[a].weights for a in by)
        size = symbol if isinstance(symbol, str) else shape[d.axis]
        parts = tuple(where[k] for k in range(count)) if unequal else ()
        dims.append(ShardedDim(d.axis, (SimpleShard(count, size),), parts))
    return replace(spec, dims=tuple(dims))


def tiling_of_layout(layout: Layout, shape: tuple[int, ...], mesh: Mesh, first: int = 0) -> Tiling | None:
    """A layout as a tile pattern; ``None`` where a tile would be on several instances but not on all, or parts have shares."""
    by = [_cutters(layout, k) for k in range(len(shape))]
    counts = [prod(mesh[a].size for a in axes) for axes in by]
    n = device_count(mesh)
    if prod(counts) == 1:
        return Tiling((1,), tuple(range(first, first + n)))
    if prod(counts) != n or any(mesh[a].weights for axes in by for a in axes):
        return None
    where = {tuple(part(mesh, axes, c)[1] for axes in by): d for d, c in enumerate(coordinates(mesh))}
    return Tiling(tuple(counts), tuple(first + where[key] for key in sorted(where)))


def on_devices(spec: ShardingSpec, first: int) -> ShardingSpec:
    """A spec of devices 0, 1, … moved to as many from number ``first`` on. (Keys of groups are negative and stay.)"""
    if not first:
        return spec
    groups = tuple((key, tuple(d + first for d in devices)) for key, devices in spec.groups)
    return replace(spec, devices=tuple(d + first if d >= 0 else d for d in spec.devices), groups=groups)


def grown(tensor: str, boxes: tuple[Box, ...], shape: tuple[int, ...], mesh: Mesh) -> ShardingSpec | None:
    """A read whose parts overlap (a halo) as a spec that states the interval of each part; ``None`` when it is none.

    Each cut axis has to be the same interval on all devices that have one part of it.
    """
    cut_axes = [k for k in range(len(shape)) if len({b[k] for b in boxes}) > 1]
    coords = coordinates(mesh)
    for layout in itertools.product([None, *cut_axes], repeat=len(mesh)):
        dims: list[ShardedDim] = []
        for k in cut_axes:
            by = _cutters(layout, k)
            seen: dict[int, set[tuple[int, int]]] = {}
            for c, b in zip(coords, boxes, strict=True):
                seen.setdefault(part(mesh, by, c)[1], set()).add(b[k])
            if not by or any(len(v) > 1 for v in seen.values()):
                break
            ends = tuple(next(iter(seen[n])) for n in range(len(seen)))
            dims.append(ShardedDim(k, (SimpleShard(len(ends), shape[k]),), ends))
        else:
            if dims:
                return replace(spec_of(tensor, layout, len(shape), mesh), dims=tuple(dims))
    return None


@lru_cache(maxsize=100_000)
def layout_of_boxes(boxes: tuple[Box, ...], shape: tuple[int, ...], mesh: Mesh) -> Layout | None:
    """The layout in which each device holds exactly its box; ``None`` when there is none (a halo, an odd order)."""
    if len(boxes) != device_count(mesh):
        return None
    candidates = [k for k in range(len(shape)) if len({b[k] for b in boxes}) > 1]
    for choice in itertools.product([None, *candidates], repeat=len(mesh)):
        if all(k in choice for k in candidates) and held(choice, shape, mesh) == boxes:
            return choice
    return None


def layout_of(spec: ShardingSpec, shape: tuple[int, ...], mesh: Mesh) -> Layout | None:
    """A structurally right spec as a layout of a mesh, if the mesh's axes can say it."""
    place = placement(spec, shape)
    boxes = [place.box(d) for d in range(device_count(mesh))]
    if any(b is None for b in boxes) or len(place.pieces) != len(boxes):
        return None
    return layout_of_boxes(tuple(b for b in boxes if b is not None), shape, mesh)


def describe(place: Placement, device: int) -> str:
    """``[0:4, 2:8]``, or ``nothing``."""
    piece = place.pieces.get(device)
    if piece is None:
        return "nothing"
    return "[" + ", ".join(" and ".join(f"{lo}:{hi}" for lo, hi in p) for p in piece) + "]"
