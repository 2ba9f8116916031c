"""Exact transfers: a device receives ``footprint − what it holds``, each cell from the nearest device that holds it.

Exact: who sends how many cells to whom, hence the bytes, the number of senders of every receiver, and which mesh axes lie
between them. Modelled (alpha-beta): a receiver takes its bytes one after another, each at the slowest mesh axis that it
crosses, after ``⌈log2(senders + 1)⌉`` latencies of the slowest axis that any of them crosses; it then fills a new buffer with
the whole footprint. All receivers work at once: a transfer takes as long as its slowest one. Sending costs nothing more.

Nothing is worked out per pair of devices. A box is a product over tensor axes, and the cut of a tensor axis depends only on the
coordinates along the mesh axes that cut it; a receiver's senders are all choices of those coordinates. So what a receiver takes
from all senders that agree with it on some mesh axes is a product over tensor axes of sums over one axis' parts, and such
sums are differences of prefix sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, log2, prod

import numpy as np

from tapestry.ir.plan import Layout, Mesh, coordinates
from tapestry.plan.strategy import Boxes
from tapestry.plan.topology import Topology

CHUNK = 1 << 18  # numbers in an array
Axes = tuple[int, ...]  # mesh axes, the slowest first


@dataclass(frozen=True, slots=True)
class Costs:
    """Per (layout, footprint): seconds, and bytes on the wire in all.

    A transfer also fills a new buffer with the whole footprint, which costs memory bandwidth and a launch.
    """

    seconds: np.ndarray
    bytes: np.ndarray


def owners(layout: Layout, mesh: Mesh) -> np.ndarray:
    """Which sender each receiver takes a block from: [receiver, sender] is True for the sender that differs from the
    receiver only along mesh axes that the layout cuts, so that every block has exactly one sender."""
    coords = np.array(coordinates(mesh))
    same = coords[:, None, :] == coords[None, :, :]
    replicated = np.array([t is None for t in layout], bool)
    return np.all(same | ~replicated, axis=-1)


def costs(held: list[tuple[Layout, Boxes]], wanted: list[Boxes], width: int, topo: Topology) -> Costs:
    """Cost of turning every held layout into every wanted footprint.

    Args:
        held: layouts with the boxes that they give to the devices.
        width: bytes per element.
    """
    want = np.stack(wanted)
    size = np.prod(np.maximum(want[..., 1] - want[..., 0], 0), axis=-1)
    along = [_Along(want[:, :, i], i, topo.mesh) for i in range(want.shape[2])]
    total = np.zeros((len(held), len(wanted)), np.int64)
    seconds = np.zeros(total.shape)
    step = max(1, CHUNK // max(1, size.size))
    for k in range(0, len(held), step):
        found = _Senders(size, along, held[k : k + step])
        own = found.cells(found.everywhere)
        total[k : k + step] = (size - own).sum(axis=2) * width
        seconds[k : k + step] = _seconds(found, own, width, topo)
    return Costs(np.where(total > 0, seconds, 0.0), total)


def _seconds(found: _Senders, own: np.ndarray, width: int, topo: Topology) -> np.ndarray:
    """Of the slowest receiver, per (layout, footprint)."""
    senders = found.number(())
    taken, alpha = np.zeros((2, *own.shape))
    for rate, axes in _levels([k.beta for k in topo.links]):
        taken += (found.size - found.cells(axes)) * rate
    for rate, axes in _levels([k.alpha for k in topo.links]):
        alpha += np.where(senders > found.number(axes), rate, 0.0)
    latency = alpha * np.ceil(np.log2(senders - (own > 0) + 1))
    filled = found.size * (width / topo.device.bandwidth)
    return np.max(taken * width + latency + filled, axis=2) + topo.device.launch


def _levels(rates: list[float]) -> Iterator[tuple[float, Axes]]:
    """(step, axes) such that the largest rate among some axes is the sum of the steps of which they contain an axis."""
    found = sorted({*rates} - {0.0})
    for below, rate in zip([0.0, *found], found, strict=False):
        yield rate - below, tuple(a for a, r in enumerate(rates) if r >= rate)


@dataclass(slots=True)
class _Senders:
    """What each receiver takes from each of some layouts, by whom it takes it from."""

    size: np.ndarray  # [footprints, devices] of cells
    axes: list[_Along]
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
class _Along:
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
                digits = np.unravel_index(np.arange(len(lo)), [self.mesh[a].size for a in cut])
                group = self._number(same, [digits[cut.index(a)] for a in same], len(lo))
                mine = self._number(same, [self.coords[a] for a in same], len(part))
                self.known[cut, same] = _within(self.want, lo, hi, group, mine)
        return self.known[cut, same]

    def _parts(self, cut: Axes, boxes: Boxes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each device's part of the tensor axis, and the parts' bounds; devices that hold nothing say nothing of them."""
        part = self._number(cut, [self.coords[a] for a in cut], len(boxes))
        lo, hi = np.zeros((2, prod(self.mesh[a].size for a in cut)), np.int64)
        there = np.all(boxes[..., 1] > boxes[..., 0], axis=-1)
        lo[part[there]], hi[part[there]] = boxes[there, self.axis, 0], boxes[there, self.axis, 1]
        return part, lo, hi

    def _number(self, axes: Axes, digits: list[np.ndarray], length: int) -> np.ndarray:
        out = np.zeros(length, np.int64)
        for a, d in zip(axes, digits, strict=True):
            out = out * self.mesh[a].size + d
        return out


def _within(
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


def reduce_seconds(nbytes: int, axes: list[tuple[int, bool]], topo: Topology) -> float:
    """Time to merge states of ``nbytes`` per device along mesh axes, one after another.

    Args:
        axes: (mesh axis, whether it is a reduce-scatter). The cheaper of recursive halving (and doubling back, for an
            all-reduce), ``⌈log2 n⌉ α + (n-1)/n B β`` per phase, and recursive doubling of whole states,
            ``⌈log2 n⌉ (α + B β)``; after Thakur, Rabenseifner and Gropp 2005.
    """
    total = 0.0
    for axis, scatter in axes:
        n, link = topo.mesh[axis].size, topo.links[axis]
        if n == 1:
            continue
        steps = ceil(log2(n))
        halving = (1 if scatter else 2) * (steps * link.alpha + (n - 1) / n * nbytes * link.beta)
        total += min(halving, steps * (link.alpha + nbytes * link.beta))
        nbytes = nbytes // n if scatter else nbytes
    return total
