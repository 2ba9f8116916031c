"""Lists of boxes, one box per device, as the plan checker handles them: numbered by value, and as arrays.

A program of a thousand devices repeats few lists many times. A fact about lists is proved once (for every device, by the
arrays) and then holds wherever the same lists occur; a fact that does not hold ends the check, so only truths are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from tapestry.errors import LawError
from tapestry.ir import space
from tapestry.ir.footprint import hull
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import Box, whole
from tapestry.ir.types import Array
from tapestry.verify.boxes import Coverage, Point, coverage

Boxes = tuple[Box | None, ...]
Parts = tuple[tuple[Box, ...] | None, ...]
"""Per device, the boxes of the reduced dimensions that its states have merged."""


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken law, in words, with what shows it."""

    law: str
    what: str
    why: object = ""


@dataclass(frozen=True, slots=True)
class Spans:
    """Boxes as arrays [devices, rank] (of objects where ends follow from sizes); ``there`` says which devices have one (the
    others' bounds are 0)."""

    lo: Array
    hi: Array
    there: Array

    @property
    def empty(self) -> Array:
        """Devices whose box holds no point, or that have none."""
        return ~self.there | np.any(self.hi <= self.lo, axis=1)

    def equals(self, other: Spans) -> Array:
        """Per device, whether both boxes are the same."""
        return np.all((self.lo == other.lo) & (self.hi == other.hi), axis=1) & (self.there == other.there)

    def box(self, device: int) -> Box | None:
        """One device's box."""
        if not self.there[device]:
            return None
        return tuple(zip(self.lo[device].tolist(), self.hi[device].tolist(), strict=True))

    def keep(self, dims: slice) -> Spans:
        """Some axes of the boxes."""
        return Spans(self.lo[:, dims], self.hi[:, dims], self.there)


@dataclass(slots=True)
class Lists:
    """Numbers and arrays of lists, the facts proved so far, and how often each law was checked.

    Laws ask their questions about boxes here: this class answers by arrays; `sized_laws.Proofs`, of the same questions, by isl,
    for every size of a region.
    """

    sized: ClassVar[bool] = False
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
            self._spans[key] = spans_of(boxes, rank, law, step, self.sized)
        return self._spans[key]

    def broken(self, breach: Breach, step: str) -> LawError:
        """The error of a law that the last question showed to be broken."""
        return LawError(breach.law, breach.what, where=step, why=str(breach.why))

    # questions about boxes: each answers with what shows the contrary, and -1 or None where there is nothing

    def outside(self, inner: Spans, outer: Spans, points: bool = False) -> int:
        """A device whose box does not lie in its other box; of ``points``, a box that has none lies anywhere."""
        fits = np.all((outer.lo <= inner.lo) & (inner.lo <= inner.hi) & (inner.hi <= outer.hi), axis=1) & outer.there
        return first((fits | inner.empty if points else fits) | ~inner.there)

    def differ(self, one: Spans, other: Spans) -> int:
        """A device whose box is not its other box."""
        return first(one.equals(other) | ~one.there)

    def hollow(self, points: Spans, space: Spans) -> int:
        """A device whose block is empty along a dimension that is not."""
        return first(np.all((points.lo < points.hi) | (space.hi == 0), axis=1) | ~points.there)

    def coverage(self, boxes: Sequence[Box], target: Box, *, gap: bool = True, twice: bool = True) -> Coverage:
        """A point of ``target`` that is in no box, and one that is in two, where they are asked for."""
        missing, double = coverage(boxes, target)
        return missing if gap else None, double if twice else None

    def fixed(self, parts: Parts) -> bool:
        """Whether boxes are the same at all sizes."""
        return True

    def pieces(self, src: Spans, dst: Spans, boxes: Spans, receiver: Array) -> Iterator[tuple[int, list[Box], Box, Point]]:
        """For each device what it has, and is sent, of its box: from the corner of that, so that devices in like places are
        one (device, boxes, box, corner)."""
        lo, hi = np.maximum(src.lo, dst.lo), np.minimum(src.hi, dst.hi)
        local = Spans(lo, hi, src.there & dst.there)
        order = np.argsort(receiver, kind="stable")
        ends = np.searchsorted(receiver[order], np.arange(len(dst.there) + 1))
        seen: set[bytes] = set()
        for d in np.flatnonzero(dst.there).tolist():
            mine = order[ends[d] : ends[d + 1]]
            lo, hi = boxes.lo[mine], boxes.hi[mine]
            if not local.empty[d]:
                lo, hi = np.concatenate([lo, local.lo[d : d + 1]]), np.concatenate([hi, local.hi[d : d + 1]])
            some = np.concatenate([lo, hi], axis=1) - np.tile(dst.lo[d], 2)
            some = some[np.lexsort(some.T)] if some.shape[1] else some
            extent = dst.hi[d] - dst.lo[d]
            key = extent.tobytes() + some.tobytes() + len(some).to_bytes(8, "big")
            if key not in seen:
                seen.add(key)
                rank = len(extent)
                held: list[Box] = [tuple((p[a], p[rank + a]) for a in range(rank)) for p in some.tolist()]
                yield d, held, whole(tuple(extent.tolist())), tuple(dst.lo[d].tolist())

    def reads_outside(
        self, op: Op, graph: Graph, k: int, points: Spans, held: Spans, key: tuple[object, ...]
    ) -> tuple[int, object]:
        """A device that reads of read ``k`` what is not in its box, and what it is; the footprints depend on the key alone."""
        hull: Spans = self.made(key, lambda: self.footprint(op, graph, k, points))
        bad = self.outside(hull, held, points=True)
        if bad < 0:
            return bad, ""
        needs, has = hull.box(bad) or (), held.box(bad) or ()
        outside = tuple(lo if lo < p else hi - 1 for (lo, hi), (p, q) in zip(needs, has, strict=True) if lo < p or hi > q)
        return bad, f"it needs {needs}, holds {has}; coordinate {outside}"

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
            raise self.broken(breach, step)
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
        return along(op.in_axes[k], points, graph.tensors[op.ins[k]].shape)

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


class Hulls(Lists):
    """The same questions, with footprints by interval arithmetic: in milliseconds, and a hull that is too large is refused."""

    def footprint(self, op: Op, graph: Graph, k: int, points: Spans) -> Spans:
        """Hulls of what each device reads of read ``k``, clipped to the tensor."""
        if not isinstance(op, Block):
            return super().footprint(op, graph, k, points)
        read, n = op.reads[k], len(points.there)
        box = {d.name: (points.lo[:, i], points.hi[:, i] - 1) for i, d in enumerate(op.space)}
        found = hull(read, box, graph.tensors[read.tensor].shape, n)
        return Spans(found[..., 0], found[..., 1], ~points.empty)


def spans_of(boxes: Sequence[Box | None], rank: int, law: str, step: str, sized: bool = False) -> Spans:
    """Boxes of a rank as arrays, of objects where they are ``sized``.

    Raises:
        LawError: one of them is no box of that rank.
    """
    odd = next((b for b in boxes if b is not None and len(b) != rank), None)
    if odd is not None:
        raise LawError(law, f"a box does not have {rank} axes", where=step, why=str(odd))
    nothing = ((0, 0),) * rank
    try:
        both = np.array([nothing if b is None else b for b in boxes], object if sized else np.int64).reshape(
            len(boxes), rank, 2
        )
    except (OverflowError, ValueError):
        raise LawError(law, "a box is not one of 64-bit integers", where=step) from None
    return Spans(both[..., 0], both[..., 1], np.array([b is not None for b in boxes], bool))


def everywhere(extents: Sequence[int], like: Spans) -> Spans:
    """All of some extents, on the devices that have a box."""
    n = len(like.there)
    hi = np.array([extents] * n, like.lo.dtype).reshape(n, len(extents))
    return Spans(np.zeros_like(hi), hi, like.there)


def along(axes: Sequence[int | None], points: Spans, shape: Sequence[int]) -> Spans:
    """All of a shape, but for the axes that the blocks' dimensions index."""
    out = everywhere(shape, points)
    for i, axis in enumerate(axes):
        if axis is not None:
            out.lo[:, axis], out.hi[:, axis] = points.lo[:, i], points.hi[:, i]
    return out


def first(holds: Array) -> int:
    """The first position where something does not hold; -1 if it holds everywhere."""
    return -1 if bool(holds.all()) else int(np.argmin(holds))
