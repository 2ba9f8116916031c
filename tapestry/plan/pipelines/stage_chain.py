"""The outer dynamic program of pipeline plans: where a sequence of operations is cut, and which devices each piece gets.

As in Alpa (Zheng et al. 2022), with M micro-batches the latency of stages of t_1 … t_S seconds per micro-batch is
``Σ t_s + (M - 1) max t_s``. Alpa enumerates the maximum; here every state keeps all pairs (sum, maximum) of which no other is
smaller in both, which is as exact and needs one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf

from tapestry.ir.plan import Mesh, MeshAxis, device_count


@dataclass(frozen=True, slots=True)
class Submesh:
    """Consecutive devices as a mesh: ``count`` devices, which may start at any of ``starts``."""

    mesh: Mesh
    count: int
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stage: positions [lo, hi) of the sequence, on submesh number ``shape``, from device ``first`` on."""

    lo: int
    hi: int
    shape: int
    first: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Pieces in order, the sum of their seconds and the largest."""

    pieces: tuple[Piece, ...]
    total: float
    slowest: float

    def latency(self, micro: int) -> float:
        """Seconds for all micro-batches."""
        return self.total + (micro - 1) * self.slowest


Cost = Callable[[Piece], float]
"""Seconds of a piece per micro-batch; infinite when it does not fit."""

Ends = Callable[[int], Iterable[int]]
"""Positions at which a piece that begins at one may end."""


def submeshes(mesh: Mesh) -> list[Submesh]:
    """Ranges of devices that are meshes: some of one axis with all of the faster ones, of a size that divides the axis or
    is a power of two. One device, and less than all."""
    total = device_count(mesh)
    out = {1: Submesh((MeshAxis(mesh[-1].name, 1),), 1, tuple(range(total)))} if total > 1 else {}
    faster = 1
    for k in range(len(mesh) - 1, -1, -1):
        axis = mesh[k]
        for q in range(2, axis.size + 1):
            n = q * faster
            if n >= total or n in out or (axis.size % q and q & (q - 1)):
                continue
            starts = [p for p in range(0, total, faster) if (p // faster) % axis.size + q <= axis.size]
            out[n] = Submesh((MeshAxis(axis.name, q), *mesh[k + 1 :]), n, tuple(starts))
        faster *= axis.size
    return list(out.values())


@dataclass(frozen=True, slots=True)
class _Label:
    """A way to a state: pieces so far, newest first, and their costs."""

    total: float
    slowest: float
    piece: Piece | None = None
    before: _Label | None = None

    def latency(self, micro: float) -> float:
        """Seconds for all micro-batches; of the slowest stage alone where there is no end of them."""
        return self.slowest if micro == inf else self.total + (micro - 1) * self.slowest

    def beats(self, other: _Label, micro: float) -> bool:
        """Whether it is as good in all that counts."""
        return (micro == inf or self.total <= other.total) and (micro == 1 or self.slowest <= other.slowest)


def best_chain(
    length: int,
    devices: int,
    shapes: list[Submesh],
    cost: Cost,
    *,
    micro: float = 1,
    stages: int | None = None,
    upper: float = inf,
    alike: bool = True,
    ends: Ends | None = None,
    fits: Callable[[Piece], bool] | None = None,
) -> Chain | None:
    """The chain of least latency over positions [0, length) on devices in order; ``None`` when none fits below ``upper``.

    Args:
        micro: how many micro-batches; infinite: only the slowest stage counts.
        stages: exactly that many; by default any number from two on.
        alike: whether it is all the same which devices a piece has: then it has the first free ones.
        ends: by default a piece may end at any later position; positions may be those of a partial order, in any of its orders.
        fits: asked only of pieces that would make a better chain.
    """
    ends = ends or (lambda lo: range(lo + 1, length + 1))
    most = stages if stages is not None else 2  # more than two are counted as two
    states: list[dict[tuple[int, int], list[_Label]]] = [{} for _ in range(length + 1)]
    states[0][0, 0] = [_Label(0, 0)]  # whole numbers stay whole
    for lo in range(length):
        for (used, count), labels in states[lo].items():
            for piece, size in _next(lo, used, ends, devices, shapes, alike):
                if stages is not None and (count + 1 == stages) != (piece.hi == length):
                    continue
                seconds = cost(piece)
                if seconds == inf:
                    continue
                there = states[piece.hi].setdefault((piece.first + size, min(count + 1, most)), [])
                for label in labels:
                    new = _Label(label.total + seconds, max(label.slowest, seconds), piece, label)
                    late = new.latency(micro) >= upper or any(o.beats(new, micro) for o in there)
                    if not late and (fits is None or fits(piece)):
                        there[:] = [*(o for o in there if not new.beats(o, micro)), new]
    whole = [label for (_, count), labels in states[length].items() if count == most for label in labels]
    if not whole:
        return None
    best = min(whole, key=lambda e: e.latency(micro))
    return Chain(tuple(_pieces(best))[::-1], best.total, best.slowest)


def _next(lo: int, used: int, ends: Ends, devices: int, shapes: list[Submesh], alike: bool) -> Iterator[tuple[Piece, int]]:
    """Every piece that can come next, with its number of devices: on free devices where its submesh may start."""
    for k, shape in enumerate(shapes):
        free = [p for p in shape.starts if p >= used and p + shape.count <= devices]
        for first in free[:1] if alike else free:
            for hi in ends(lo):
                yield Piece(lo, hi, k, first), shape.count


def _pieces(label: _Label) -> Iterator[Piece]:
    at: _Label | None = label
    while at is not None and at.piece is not None:
        yield at.piece
        at = at.before
