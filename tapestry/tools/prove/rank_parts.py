"""Which cells of a model's tensor a rank's tensor is: said, told by the data, or by the order of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from math import prod
from typing import cast

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.index import Aff, const, dim

MOST_STARTS = 4096  # places where a slice is looked for by its data
MOST_RUNS = 256  # that an axis is made of


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring cells of a rank's axis that are neighbours in the model: where they begin in each, and how many."""

    here: int
    there: int
    size: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A rank's tensor as a box of a model's: where it begins, and how that is known.

    Attributes:
        axis, runs: where one axis is no single range (a fused weight, cut within each of its sections): what it is made of.
    """

    tensor: str
    start: tuple[int, ...]
    source: str
    axis: int = 0
    runs: tuple[Run, ...] = ()

    def places(self, shape: Sequence[int]) -> tuple[Aff, ...]:
        """Index expressions over ``y0, …`` for a box of a shape."""
        return tuple((dim(f"y{k}") if n != 1 else const(0)) + s for k, (n, s) in enumerate(zip(shape, self.start, strict=True)))

    def of(self, whole: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The cells, out of the model's tensor."""
        box = [slice(s, s + n) for s, n in zip(self.start, shape, strict=True)]
        runs = self.runs or (Run(0, self.start[self.axis], shape[self.axis]),) if shape else ()
        parts = [
            whole[tuple(slice(r.there, r.there + r.size) if k == self.axis else b for k, b in enumerate(box))] for r in runs
        ]
        return np.concatenate(parts, self.axis) if parts else whole


def said(spec: object, name: str, rank: int, mesh: Mapping[str, int], whole: Sequence[int]) -> tuple[int, ...]:
    """Where a box begins by a line of ``program.json``: per axis null, a mesh axis or a list of them (the major one first).

    Raises:
        TapestryError: the line does not fit the tensor.
    """
    where = f"placement of '{name}'"
    entries = cast("list[object]", spec) if isinstance(spec, list) else []
    if len(entries) != len(whole):
        raise TapestryError("one entry per axis is needed", where=where, why=f"it has {len(whole)} axes, and says {spec}")
    place = dict(zip(mesh, np.unravel_index(rank, tuple(mesh.values())), strict=True))
    start: list[int] = []
    for entry, n in zip(entries, whole, strict=True):
        some = cast("list[object]", entry) if isinstance(entry, list) else [] if entry is None else [entry]
        axes = [str(a) for a in some]
        if not all(a in mesh for a in axes):
            raise TapestryError("no such mesh axis", where=where, why=f"it says {entry}, the mesh has {list(mesh)}")
        number = 0
        for a in axes:
            number = number * mesh[a] + int(place[a])
        parts = prod(mesh[a] for a in axes)
        if n % parts:
            raise TapestryError("an axis does not divide into equal parts", where=where, why=f"{n} cells in {parts} parts")
        start.append(number * (n // parts))
    return tuple(start)


def starts_in_order(rank: int, world: int, shape: Sequence[int], whole: Sequence[int]) -> list[tuple[int, ...]]:
    """Where a box begins if parts are in the order of the ranks: neighbours hold neighbouring parts, or equal ones."""
    if len(shape) != len(whole) or any(n == 0 or w % n for n, w in zip(shape, whole, strict=True)):
        return []
    parts = [w // n for n, w in zip(shape, whole, strict=True)]
    count = prod(parts)
    if count > world or world % count:
        return []
    numbers = dict.fromkeys((rank % count, rank // (world // count)))
    return [tuple(int(i) * n for i, n in zip(np.unravel_index(k, parts), shape, strict=True)) for k in numbers]


def by_data(mine: np.ndarray, whole: np.ndarray, first: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Where an array is a box of another one, bit for bit: at one of some places, else at any multiple of its sizes, or any."""
    if mine.ndim != whole.ndim or mine.dtype != whole.dtype or any(a > b for a, b in zip(mine.shape, whole.shape, strict=True)):
        return None
    aligned = [range(0, w - n + 1, n or 1) for n, w in zip(mine.shape, whole.shape, strict=True)]
    every = [range(w - n + 1) for n, w in zip(mine.shape, whole.shape, strict=True)]
    for starts in (first, product(*aligned), product(*every)):
        for start in islice(starts, MOST_STARTS):
            if np.array_equal(mine, whole[tuple(slice(s, s + n) for s, n in zip(start, mine.shape, strict=True))]):
                return tuple(start)
    return None


def runs_by_data(mine: np.ndarray, whole: np.ndarray) -> tuple[int, tuple[Run, ...]] | None:
    """The axis along which an array holds some of another one's slices, bit for bit, and which; None where there is none."""
    if mine.ndim != whole.ndim or mine.dtype != whole.dtype:
        return None
    shorter = [k for k, (a, b) in enumerate(zip(mine.shape, whole.shape, strict=True)) if a != b]
    if len(shorter) != 1 or mine.shape[shorter[0]] > whole.shape[shorter[0]]:
        return None
    rows, all_of = ([r.tobytes() for r in np.moveaxis(a, shorter[0], 0)] for a in (mine, whole))
    number = {r: k for k, r in enumerate(all_of)}
    if not rows or len(number) < len(all_of) or not all(r in number for r in rows):
        return None  # slices that are equal say nothing of where they come from
    there = [number[r] for r in rows]
    begins = [0, *(np.flatnonzero(np.diff(there) != 1) + 1).tolist()]
    runs = tuple(Run(a, there[a], b - a) for a, b in pairwise([*begins, len(rows)]))
    return (shorter[0], runs) if len(runs) <= MOST_RUNS else None


def apart(mine: np.ndarray, whole: np.ndarray, start: Sequence[int]) -> str:
    """The first cell where an array is not the box of another one that begins at a place."""
    box = whole[tuple(slice(s, s + n) for s, n in zip(start, mine.shape, strict=True))]
    if box.shape != mine.shape:
        return f"its shape is {list(mine.shape)}, of {list(whole.shape)}"
    at = tuple(int(i) for i in np.argwhere(mine != box)[0])
    there = [a + b for a, b in zip(at, start, strict=True)]
    return f"cell {list(at)} is {mine[at]!r}, the model's cell {there} {box[at]!r}"
