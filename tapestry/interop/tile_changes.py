"""From one tiling of a tensor to another: as the slides evaluate it (whole tensors travel), and by what each instance lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tapestry.errors import TapestryError
from tapestry.interop.tile_patterns import Tiling
from tapestry.ir.kernel import Box, inside, intersect, size, slices, slices_within, whole


@dataclass(frozen=True, slots=True)
class Send:
    """A box of the tensor from one instance to another."""

    src: int
    dst: int
    box: Box


@dataclass(frozen=True, slots=True)
class Change:
    """How a tensor gets from one tiling to another: what it is called, and every message."""

    kind: str
    sends: tuple[Send, ...]

    def cells(self) -> int:
        """Elements on the wire, summed over senders."""
        return sum(size(s.box) for s in self.sends)


def naive(before: Tiling, after: Tiling, shape: tuple[int, ...]) -> Change:
    """The slides' evaluation: a broadcast, an all-gather, or an all-gather and then tiling; whole tensors arrive.

    Raises:
        TapestryError: a tile that is needed is suppressed.
    """
    if before == after or before.tiles(shape) == after.tiles(shape):
        return Change("none", ())
    kind = "broadcast" if before.count == 1 else "all-gather"
    kind += " + tile" if after.count != 1 else ""
    wanted = dict.fromkeys(after.tiles(shape), whole(shape))
    return Change(kind, tuple(_sends(before.tiles(shape), wanted)))


def exact(before: Tiling, after: Tiling, shape: tuple[int, ...]) -> Change:
    """Each instance receives its tile of the new tiling less what it holds, each cell from one holder."""
    held, wanted = before.tiles(shape), after.tiles(shape)
    sends = tuple(_sends(held, {i: b for i, b in wanted.items() if i not in held or not inside(b, held[i])}))
    return Change("exact" if sends else "none", sends)


def _sends(held: Mapping[int, Box], wanted: Mapping[int, Box]) -> Iterator[Send]:
    for dst, box in wanted.items():
        own = intersect(box, held[dst]) if dst in held else None
        missing = subtract(box, own) if own else [box]
        sources = list(dict.fromkeys(held.values()))  # tiles are disjoint, or copies of the whole
        got = 0
        for src_box in sources:
            holders = [i for i, b in held.items() if b == src_box]
            for piece in missing:
                part = intersect(piece, src_box)
                if part is not None and dst not in holders:
                    got += size(part)
                    yield Send(holders[dst % len(holders)], dst, part)
        if got < sum(size(m) for m in missing):
            raise TapestryError(f"instance {dst} needs cells that no instance holds", hint="a tile is suppressed")


def subtract(box: Box, hole: Box) -> list[Box]:
    """Boxes that partition ``box`` without ``hole``, which lies inside it."""
    out: list[Box] = []
    rest = list(box)
    for k, ((lo, hi), (a, b)) in enumerate(zip(box, hole, strict=True)):
        for lo2, hi2 in ((lo, a), (b, hi)):
            if lo2 < hi2:
                out.append((*rest[:k], (lo2, hi2), *rest[k + 1 :]))
        rest[k] = (a, b)
    return out


def received(
    tiles: Mapping[int, np.ndarray], before: Tiling, after: Tiling, change: Change, shape: tuple[int, ...]
) -> dict[int, np.ndarray]:
    """Carry out a change: what each instance of the new tiling holds, from its own tile and what it was sent."""
    held = before.tiles(shape)
    out: dict[int, np.ndarray] = {}
    for i, box in after.tiles(shape).items():
        tensor = np.empty(shape, next(iter(tiles.values())).dtype)
        written = np.zeros(shape, bool)
        pieces = [(i, held[i])] if i in held else []
        for src, part in [*pieces, *((s.src, s.box) for s in change.sends if s.dst == i)]:
            tensor[slices(part)] = tiles[src][slices_within(part, held[src])]
            written[slices(part)] = True
        assert written[slices(box)].all(), f"instance {i} was not sent all of its tile"
        out[i] = np.array(tensor[slices(box)])
    return out
