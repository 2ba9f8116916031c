"""Overlaps of footprints with layouts, without anything per pair of devices.

A box is a product over tensor axes, and the cut of a tensor axis depends only on the coordinates along the mesh axes that cut
it; a receiver's senders are all choices of those coordinates. So what a receiver takes from all senders that agree with it on
some mesh axes is a product over tensor axes of sums over one axis' parts, and such sums are differences of prefix sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

from tapestry.ir.footprint import Boxes
from tapestry.ir.plan import Layout, Mesh, coordinates

Axes = tuple[int, ...]  # mesh axes, the slowest first


@dataclass(slots=True)
class Senders:
    """What each receiver takes from each of some layouts, by whom it takes it from."""

    size: np.ndarray  # [footprints, devices] of cells
    axes: list[Along]
    held: list[tuple[Layout, Boxes]]
    known: dict[Axes, np.ndarray] = field(default_factory=dict[Axes, np.ndarray])

    @property
    def everywhere(self) -> Axes:
        """All mesh axes: only the device itself agrees on them."""
        return tuple(range(len(self.held[0][0])))

    def cells(self, same: Axes) -> np.ndarray:
        """[layouts, footprints, devices] of cells from senders, the device itself included, whose coordinates along some mesh
        axes are the device's."""
        if same not in self.known:
            self.known[same] = self._product(same, 0)
        return self.known[same]

    def number(self, same: Axes) -> np.ndarray:
        """[layouts, footprints, devices] of these senders."""
        return self.cells(same) > 0 if same == self.everywhere else self._product(same, 1)

    def _product(self, same: Axes, which: int) -> np.ndarray:
        out = np.ones((len(self.held), *self.size.shape), np.int64)
        for along in self.axes:
            out *= along.of(self.held, same, which)
        return out


@dataclass(slots=True)
class Along:
    """Footprints along one tensor axis."""

    want: np.ndarray  # [footprints, devices, 2]
    axis: int
    mesh: Mesh
    which: np.ndarray = field(init=False)
    coords: np.ndarray = field(init=False)
    parts: dict[Axes, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(init=False)
    known: dict[tuple[Axes, Axes], tuple[np.ndarray, np.ndarray]] = field(init=False)

    def __post_init__(self) -> None:
        rows: dict[bytes, int] = {}
        self.which = np.array([rows.setdefault(row.tobytes(), len(rows)) for row in self.want])
        self.want = self.want[np.unique(self.which, return_index=True)[1]]
        self.coords = np.array(coordinates(self.mesh), np.int64).reshape(-1, len(self.mesh)).T
        self.parts, self.known = {}, {}

    def of(self, held: list[tuple[Layout, Boxes]], same: Axes, which: int) -> np.ndarray:
        """[layouts, footprints, devices]: cells in (0), or number of (1), the parts that a footprint meets among those whose
        coordinates along some mesh axes are the device's."""
        cuts: dict[Axes, int] = {}
        tables: list[np.ndarray] = []
        rows: list[int] = []
        for layout, boxes in held:
            cut = tuple(a for a, t in enumerate(layout) if t == self.axis)
            if cut not in cuts:
                cuts[cut] = len(tables)
                tables.append(self._met(cut, tuple(a for a in cut if a in same), boxes)[which])
            rows.append(cuts[cut])
        at = np.array(rows)[:, None] * len(self.want) + self.which
        return np.concatenate(tables).take(at, axis=0)

    def _met(self, cut: Axes, same: Axes, boxes: Boxes) -> tuple[np.ndarray, np.ndarray]:
        if (cut, same) not in self.known:
            if cut not in self.parts:
                self.parts[cut] = self._parts(cut, boxes)
            part, lo, hi = self.parts[cut]
            if cut == same:
                cells = np.minimum(self.want[..., 1], hi[part]) - np.maximum(self.want[..., 0], lo[part])
                self.known[cut, same] = np.maximum(cells, 0), (cells > 0).astype(np.int64)
            else:
                group = self._groups(cut, same)
                mine = self._number(same, [self.coords[a] for a in same], len(part))
                self.known[cut, same] = _parts_met(self.want, lo, hi, group, mine)
        return self.known[cut, same]

    def _parts(self, cut: Axes, boxes: Boxes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each device's part of the tensor axis, and the parts' bounds; devices that hold nothing say nothing of them."""
        part = self._number(cut, [self.coords[a] for a in cut], len(boxes))
        lo, hi = np.zeros((2, prod(self.mesh[a].size for a in cut)), np.int64)
        there = np.all(boxes[..., 1] > boxes[..., 0], axis=-1)
        lo[part[there]], hi[part[there]] = boxes[there, self.axis, 0], boxes[there, self.axis, 1]
        return part, lo, hi

    def by_sender(self, cut: Axes, axes: Axes) -> np.ndarray:
        """[distinct footprints, devices, coordinates] of cells in the parts at each coordinate along some axes of a cut."""
        part, lo, hi = self.parts[cut]
        group = self._groups(cut, axes)
        count = prod(self.mesh[a].size for a in axes)
        if axes == cut:
            met = np.minimum(self.want[..., None, 1], hi) - np.maximum(self.want[..., None, 0], lo)
            return np.maximum(met, 0)
        return np.stack([_parts_met(self.want, lo, hi, group, np.full(len(part), g))[0] for g in range(count)], axis=-1)

    def _groups(self, cut: Axes, axes: Axes) -> np.ndarray:
        """The number of each part along some of the axes that cut."""
        sizes = [self.mesh[a].size for a in cut]
        digits = np.unravel_index(np.arange(prod(sizes)), sizes)
        return self._number(axes, [digits[cut.index(a)] for a in axes], prod(sizes))

    def _number(self, axes: Axes, digits: list[np.ndarray], length: int) -> np.ndarray:
        out = np.zeros(length, np.int64)
        for a, d in zip(axes, digits, strict=True):
            out = out * self.mesh[a].size + d
        return out


def _parts_met(
    want: np.ndarray, lo: np.ndarray, hi: np.ndarray, group: np.ndarray, mine: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(cells in, number of) the disjoint parts ``[lo, hi)`` that each interval meets, among those of the device's group."""
    some = np.flatnonzero(hi > lo)
    some = some[np.lexsort((lo[some], group[some]))]
    lo, hi, group = lo[some], hi[some], group[some]
    span = int(max(hi.max(initial=0), want.max(initial=0))) + 1  # so that groups do not mix in one sorted list
    starts, ends = group * span + lo, group * span + hi
    upto = np.concatenate([[0], np.cumsum(hi - lo)])
    first = np.searchsorted(group, mine)
    offset = mine * span

    def below(x: np.ndarray) -> np.ndarray:
        n = np.searchsorted(starts, offset + x, "right")
        last = np.where(n > first, hi[n - 1] - x, 0) if len(hi) else np.zeros_like(x)
        return upto[n] - np.maximum(last, 0)

    number = np.searchsorted(starts, offset + want[..., 1], "left") - np.searchsorted(ends, offset + want[..., 0], "right")
    empty = want[..., 1] <= want[..., 0]
    cells = below(want[..., 1]) - below(want[..., 0])
    return np.where(empty, 0, cells), np.where(empty, 0, number)
