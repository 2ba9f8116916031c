"""Lists of boxes, one box per device, as the plan checker handles them: numbered by value, and as arrays.

A program of a thousand devices repeats few lists many times. A fact about lists is proved once (for every device, by the
arrays) and then holds wherever the same lists occur; a fact that does not hold ends the check, so only truths are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapestry.errors import LawError
from tapestry.ir import space
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import Box, whole

Boxes = tuple[Box | None, ...]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken law, in words, with what shows it."""

    law: str
    what: str
    why: object = ""


@dataclass(frozen=True, slots=True)
class Spans:
    """Boxes as arrays [devices, rank]; ``there`` says which devices have one (the others' bounds are 0)."""

    lo: Array
    hi: Array
    there: Array

    @property
    def empty(self) -> Array:
        """Devices whose box holds no point, or that have none."""
        return ~self.there | np.any(self.hi <= self.lo, axis=1)

    def inside(self, other: Spans) -> Array:
        """Per device, whether every point of its box is in its other box."""
        return np.all((other.lo <= self.lo) & (self.hi <= other.hi), axis=1) & other.there | self.empty

    def equals(self, other: Spans) -> Array:
        """Per device, whether both boxes are the same."""
        return np.all((self.lo == other.lo) & (self.hi == other.hi), axis=1) & (self.there == other.there)

    def box(self, device: int) -> Box | None:
        """One device's box."""
        if not self.there[device]:
            return None
        return tuple((int(lo), int(hi)) for lo, hi in zip(self.lo[device], self.hi[device], strict=True))

    def keep(self, dims: slice) -> Spans:
        """Some axes of the boxes."""
        return Spans(self.lo[:, dims], self.hi[:, dims], self.there)


@dataclass(slots=True)
class Lists:
    """Numbers and arrays of lists, the facts proved so far, and how often each law was checked."""

    laws: Counter[str] = field(default_factory=Counter[str])
    _numbers: dict[object, int] = field(default_factory=dict[object, int])
    _seen: dict[int, tuple[object, int]] = field(default_factory=dict[int, tuple[object, int]])
    _spans: dict[tuple[int, int], Spans] = field(default_factory=dict[tuple[int, int], Spans])
    _proved: set[tuple[object, ...]] = field(default_factory=set[tuple[object, ...]])
    _made: dict[tuple[object, ...], Any] = field(default_factory=dict[tuple[object, ...], Any])
    _images: dict[tuple[str, Box], Box | None] = field(default_factory=dict[tuple[str, Box], Box | None])

    def number(self, items: tuple[Any, ...]) -> int:
        """Equal tuples have one number. (An object seen before is known by its identity: it is kept, so that stays its own.)"""
        entry = self._seen.get(id(items))
        if entry is None:
            entry = items, self._numbers.setdefault(items, len(self._numbers))
            self._seen[id(items)] = entry
        return entry[1]

    def spans(self, boxes: Boxes, rank: int, law: str = "agreement", step: str = "") -> Spans:
        """The arrays of a list of boxes of a rank.

        Raises:
            LawError: they are not boxes of that rank.
        """
        key = (self.number(boxes), rank)
        if key not in self._spans:
            self._spans[key] = spans_of(boxes, rank, law, step)
        return self._spans[key]

    def prove(
        self, fact: tuple[object, ...], step: str, counts: Mapping[str, int], verdict: Callable[[], Breach | None]
    ) -> None:
        """Count the checks that a fact stands for, and make them unless the same fact was proved before.

        Args:
            fact: everything that the verdict depends on.

        Raises:
            LawError: it does not hold.
        """
        self.laws.update(counts)
        if fact in self._proved:
            return
        breach = verdict()
        if breach is not None:
            raise LawError(breach.law, breach.what, where=step, why=str(breach.why))
        self._proved.add(fact)

    def made(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """Something that depends on the key alone, made once."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def footprint(self, op: Op, graph: Graph, k: int, points: Spans) -> Spans:
        """Hulls of what each device reads of read ``k`` over its points of the index space; no box where that is nothing."""
        if isinstance(op, Block):
            r = op.reads[k]
            return self._image(space.independent(op, r, graph.tensors[r.tensor].shape), len(r.index), points)
        extents = whole(graph.tensors[op.ins[k]].shape)
        n = len(points.there)
        lo, hi = (np.array([[e[side] for e in extents]] * n, np.int64).reshape(n, -1) for side in (0, 1))
        for i, axis in enumerate(op.in_axes[k]):
            if axis is not None:
                lo[:, axis], hi[:, axis] = points.lo[:, i], points.hi[:, i]
        return Spans(lo, hi, points.there)

    def _image(self, factors: tuple[space.Factor, ...], rank: int, points: Spans) -> Spans:
        """The product of the factors' images, each worked out by isl for its distinct boxes."""
        n = len(points.there)
        lo, hi = np.zeros((n, rank), np.int64), np.zeros((n, rank), np.int64)
        there = ~points.empty
        for f in factors:
            dims, axes, at = list(f.dims), np.array(f.axes, np.int64), np.flatnonzero(there)
            both = np.stack([points.lo[at][:, dims], points.hi[at][:, dims]], -1).reshape(len(at), 2 * len(dims))
            rows, which = np.unique(both, axis=0, return_inverse=True) if dims else (both[:1], np.zeros(len(at), np.int64))
            boxes = [self._part(f, row) for row in rows.reshape(len(rows), len(dims), 2).tolist()]
            ends = np.array([b or [(0, 0)] * len(axes) for b in boxes], np.int64).reshape(len(boxes), len(axes), 2)
            ends = ends[which.reshape(-1)]
            lo[np.ix_(at, axes)], hi[np.ix_(at, axes)] = ends[..., 0], ends[..., 1]
            there[at] = np.array([b is not None for b in boxes], bool)[which.reshape(-1)]
        return Spans(lo, hi, there)

    def _part(self, factor: space.Factor, row: list[list[int]]) -> Box | None:
        box = tuple((lo, hi) for lo, hi in row)
        key = (factor.text, box)
        if key not in self._images:
            self._images[key] = factor.image(box)
        return self._images[key]


def spans_of(boxes: Sequence[Box | None], rank: int, law: str, step: str) -> Spans:
    """Boxes of a rank as arrays.

    Raises:
        LawError: one of them is no box of that rank.
    """
    odd = next((b for b in boxes if b is not None and len(b) != rank), None)
    if odd is not None:
        raise LawError(law, f"a box does not have {rank} axes", where=step, why=str(odd))
    nothing = ((0, 0),) * rank
    try:
        both = np.array([nothing if b is None else b for b in boxes], np.int64).reshape(len(boxes), rank, 2)
    except (OverflowError, ValueError):
        raise LawError(law, "a box is not one of 64-bit integers", where=step) from None
    return Spans(both[..., 0], both[..., 1], np.array([b is not None for b in boxes], bool))


def first(holds: Array) -> int:
    """The first position where something does not hold; -1 if it holds everywhere."""
    return -1 if bool(holds.all()) else int(np.argmin(holds))
