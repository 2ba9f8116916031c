"""Tile patterns of the other multi-device proposal for ONNX ("Multi-Device ONNX", M. Villmow): which instance has which tile.

A pattern says into how many tiles each axis is cut, an assignment on which instance each tile is (-1: nowhere). The text
form is ``{3,2,1: 5,4,3,2,1,0}``. Tiles are counted row-major, and cuts are balanced (`ir.kernel.cut`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.kernel import Box, cut

SUPPRESSED = -1
MOST_TILES = 1 << 16


@dataclass(frozen=True, slots=True)
class Tiling:
    """A pattern and an assignment.

    Attributes:
        pattern: tiles per axis; ``(1,)`` means the whole tensor on every instance of the assignment. Leading ones may be
            left out.
        assignment: for each tile its instance or -1; ``None`` means tile j on instance j.
    """

    pattern: tuple[int, ...]
    assignment: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.pattern or any(p < 1 for p in self.pattern) or self.count > MOST_TILES:
            hint = f"positive numbers, one per axis, or {{1}}; at most {MOST_TILES:,} tiles"
            raise TapestryError(f"a tile pattern of {list(self.pattern)}", hint=hint)
        given = self.instances
        if self.count != 1 and len(given) != self.count:
            what = f"{self.count} tiles and {len(given)} assignments"
            raise TapestryError(what, where=str(self), hint="one per tile, -1 for none")
        used = [i for i in given if i != SUPPRESSED]
        if max(used, default=0) >= MOST_TILES:
            raise TapestryError(f"instance {max(used)}", where=str(self)[:60], hint=f"at most {MOST_TILES:,} instances")
        if not used or any(i < SUPPRESSED for i in given) or len(set(used)) < len(used):
            raise TapestryError("no instance, a negative one, or one with two tiles", where=str(self), hint="one tile each")

    @property
    def count(self) -> int:
        """Number of tiles: the volume of the pattern."""
        return prod(self.pattern)

    @property
    def instances(self) -> tuple[int, ...]:
        """The assignment, with its default."""
        return tuple(range(self.count)) if self.assignment is None else self.assignment

    @property
    def entries(self) -> list[tuple[int, int]]:
        """(tile, instance) in the order of the assignment; a whole tensor is tile 0 of all its instances."""
        return [(0 if self.count == 1 else j, i) for j, i in enumerate(self.instances)]

    def __str__(self) -> str:
        head = ",".join(map(str, self.pattern))
        return f"{{{head}}}" if self.assignment is None else f"{{{head}: {','.join(map(str, self.assignment))}}}"

    def over(self, rank: int) -> tuple[int, ...]:
        """Tiles per axis of a tensor of some rank.

        Raises:
            TapestryError: the pattern has more axes than the tensor.
        """
        if self.count == 1:
            return (1,) * rank
        if len(self.pattern) > rank:
            raise TapestryError(f"a pattern of {len(self.pattern)} axes for a tensor of rank {rank}", where=str(self))
        return (1,) * (rank - len(self.pattern)) + self.pattern

    def tile(self, j: int, shape: tuple[int, ...]) -> Box:
        """Tile number j, row-major."""
        parts = self.over(len(shape))
        digits = np.unravel_index(j, parts) if shape else ()
        return tuple(cut(n, p, int(k)) for n, p, k in zip(shape, parts, digits, strict=True))

    def tiles(self, shape: tuple[int, ...]) -> dict[int, Box]:
        """The tile of every instance that has one."""
        return {i: self.tile(j, shape) for j, i in self.entries if i != SUPPRESSED}


def parse(text: str) -> Tiling:
    """``{3,2,1: 5,4,3,2,1,0}``, or without an assignment ``{1,4}``; the braces may be left out.

    Raises:
        TapestryError: it is neither.
    """
    m = re.fullmatch(r"\s*(\{)?\s*([\d\s,]+?)\s*(?::\s*([-\d\s,]+?)\s*)?(?(1)\}|)\s*", text)
    try:
        if m is None:
            raise ValueError
        pattern = tuple(int(x) for x in m.group(2).split(","))
        assignment = None if m.group(3) is None else tuple(int(x) for x in m.group(3).split(","))
    except ValueError:
        hint = "{2,1: 0,1}: tiles per axis, then the instance of each tile"
        raise TapestryError(f"'{text[:60]}' is not a tile pattern", hint=hint) from None
    return Tiling(pattern, assignment)


# the slides' own formulas


Ends = tuple[tuple[Fraction, Fraction], ...]


def slide_tile(tiling: Tiling, j: int, shape: tuple[int, ...]) -> Ends:
    """Start and stop of entry j by the formulas of the slides, to the letter.

    ``floor(j % p) * n / p`` rounds before it divides, the coordinate of tile j is ``j % p`` on every axis, and a
    pattern that is shorter than the shape is repeated (``pattern[i % rank(pattern)]``).
    """
    p = tiling.pattern
    j = j if tiling.count != 1 else 0
    parts = [p[i % len(p)] for i in range(len(shape))]
    return tuple(
        (Fraction(j % k * n, k), min(Fraction(n), Fraction((j % k + 1) * n, k))) for n, k in zip(shape, parts, strict=True)
    )


def slide_slips(tiling: Tiling, shape: tuple[int, ...]) -> list[str]:
    """Where the slides' formulas do not give the tiles that their text and their examples ask for."""
    ends = {j: slide_tile(tiling, j, shape) for j in dict.fromkeys(j for j, _ in tiling.entries)}
    out: list[str] = []
    broken = next(((j, x) for j, e in ends.items() for pair in e for x in pair if x.denominator > 1), None)
    if broken is not None:
        j, x = broken
        out.append(f"tile {j} ends or begins at {float(x):.4g}: 'floor' stands before the division, not around it")
    whole: dict[Box, int] = {}
    for j, e in ends.items():
        box = tuple((a.__floor__(), b.__floor__()) for a, b in e)
        if whole.setdefault(box, j) != j:
            out.append(
                f"tiles {whole[box]} and {j} are the same cells: 'j % pattern[i]' is no coordinate where axes share factors"
            )
            break
    moved = next((j for j in ends if tuple((a.__floor__(), b.__floor__()) for a, b in ends[j]) != tiling.tile(j, shape)), None)
    if moved is not None:
        why = (
            "omitted leading ones are not ones there"
            if len(tiling.pattern) < len(shape)
            else "tiles are not in row-major order"
        )
        out.append(f"tile {moved} is elsewhere: {why}")
    return out
