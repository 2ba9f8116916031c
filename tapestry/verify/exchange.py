"""What has to hold of data that moves between devices, as verdicts over whole lists: messages, and merges of states."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from tapestry.errors import LawError
from tapestry.ir import space
from tapestry.ir.footprint import hull
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import Box, size, whole
from tapestry.ir.laws import where
from tapestry.ir.plan import Stage, coordinates, interval
from tapestry.ir.program import Message, Program, Reduce, Transfer
from tapestry.ir.states import varies
from tapestry.ir.types import Array, itemsize

# Lists of boxes, one box per device, as the plan checker handles them: numbered by value, and as arrays.
#
# A program of a thousand devices repeats few lists many times. A fact about lists is proved once (for every device, by the
# arrays) and then holds wherever the same lists occur; a fact that does not hold ends the check, so only truths are kept.


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
    ) -> tuple[int, object]:  # fmt: skip
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


# Exact cover and disjointness of boxes by a coordinate sweep: another algorithm than the planner's, on purpose.


Point = tuple[int, ...]
Coverage = tuple[Point | None, Point | None]


def coverage(boxes: Sequence[Box], target: Box) -> Coverage:
    """(a point of ``target`` in no box, a point of ``target`` in two boxes), ``None`` where there is none.

    Space is cut at every box edge into cells on which membership is constant; each box counts its cells.
    """
    if any(lo >= hi for lo, hi in target):
        return None, None
    cuts = [sorted({lo, hi, *(min(max(c, lo), hi) for b in boxes for c in b[axis])}) for axis, (lo, hi) in enumerate(target)]
    places = [{c: i for i, c in enumerate(axis)} for axis in cuts]
    count = np.zeros([len(c) - 1 for c in cuts], np.int32)
    for b in boxes:
        place: list[slice] = []
        for axis, (lo, hi) in enumerate(target):
            p, q = max(b[axis][0], lo), min(b[axis][1], hi)
            if p >= q:
                break
            place.append(slice(places[axis][p], places[axis][q]))
        else:
            count[tuple(place)] += 1
    return _corner(count == 0, cuts), _corner(count > 1, cuts)


def _corner(where: np.ndarray, cuts: list[list[int]]) -> Point | None:
    cells = np.argwhere(where)
    return tuple(cuts[a][int(i)] for a, i in enumerate(cells[0])) if len(cells) else None


ARRAYS = Lists()


def messages(src: Spans, dst: Spans, sent: Sequence[Message], step: str, facts: Lists = ARRAYS) -> Breach | None:
    """Senders hold what they send, and every receiver gets each cell that it lacks exactly once, and no other."""
    n, rank = src.lo.shape
    odd = next((m for m in sent if not (0 <= m.src < n and 0 <= m.dst < n and m.src != m.dst)), None)
    if odd is not None:
        return Breach("agreement", f"message from {odd.src} to {odd.dst}")
    boxes = spans_of([m.box for m in sent], rank, "read_after_write", step, facts.sized)
    sender, receiver = (np.array(ends, np.int64) for ends in ([m.src for m in sent], [m.dst for m in sent]))
    bad = facts.outside(boxes, _of(src, sender))
    if bad >= 0:
        return Breach("read_after_write", "a device sends what it lacks", sent[bad])
    bad = facts.outside(boxes, _of(dst, receiver))
    if bad >= 0:
        return Breach("read_after_write", f"device {receiver[bad]} receives what it has no place for", sent[bad].box)
    for d, held, box, corner in facts.pieces(src, dst, boxes, receiver):
        gap, twice = facts.coverage(held, box)
        if gap is not None:
            return Breach("read_after_write", f"device {d} lacks cells after the transfer", _moved(gap, corner))
        if twice is not None:
            return Breach("written_once", f"device {d} receives a cell twice", _moved(twice, corner))
    return None


def check_merge(
    kind: str, groups: Sequence[Sequence[int]], src: Spans, dst: Spans, parts: Parts, extents: tuple[int, ...], ends: bool,
    facts: Lists = ARRAYS,
) -> Breach | None:  # fmt: skip
    """Groups are disjoint and whole; what they merge are different parts of the reduction; results lie where all have states.

    Args:
        extents: sizes of the reduced dimensions.
        ends: whether the merged states are the result, so that no part may be missing.
    """
    members = Counter(d for g in groups for d in g)
    if set(members) != set(np.flatnonzero(src.there).tolist()) or max(members.values(), default=0) != 1:
        return Breach("written_once", "groups overlap, or leave out a device that has states")
    proved: set[tuple[Box, ...]] = set()
    for g in map(list, groups):
        mine, theirs = _of(dst, np.array(g)), _of(src, np.array(g))
        bad, boxes = first(mine.there), dict.fromkeys(map(theirs.box, range(len(g))))
        for held in boxes if bad < 0 else ():
            bad = max(bad, facts.outside(mine, spans_of([held] * len(g), mine.lo.shape[1], "", "", facts.sized), points=True))
        if bad >= 0:
            return Breach("read_after_write", "a device has no states for another's part", dst.box(g[bad]))
        if kind == "all_reduce" and facts.differ(mine, theirs) >= 0:
            return Breach("agreement", "an all-reduce changes a box")
        merged = merged_parts(g, parts)
        if merged in proved:
            continue
        gap, twice = facts.coverage(merged, whole(extents), gap=ends)
        if twice is not None:
            return Breach("written_once", "a state is merged twice", twice)
        if gap is not None:
            return Breach("written_once", "part of a reduction is missing", gap)
        proved.add(merged)
    return None


def disjoint(one: Parts, other: Parts, extents: tuple[int, ...], facts: Lists = ARRAYS) -> Breach | None:
    """No device merges a part of the reduction that its states hold already, or has no states to merge with."""
    for d, (mine, more) in enumerate(zip(one, other, strict=True)):
        if more is not None and mine is None:
            return Breach("read_after_write", f"device {d} has no states of other parts")
        _, twice = (
            facts.coverage(sorted((*(mine or ()), *more)), whole(extents), gap=False) if more is not None else (None, None)
        )
        if twice is not None:
            return Breach("written_once", "part of a reduction is merged twice", twice)
    return None


def with_part(one: Parts, other: Parts) -> Parts:
    """What each device's states hold once another part is merged in."""
    return tuple(None if b is None else tuple(sorted((*(a or ()), *b))) for a, b in zip(one, other, strict=True))


def merged_parts(group: Sequence[int], parts: Parts) -> tuple[Box, ...]:
    """Everything that the states of a group have merged."""
    return tuple(sorted(b for d in group for b in parts[d] or ()))


def in_order(groups: Sequence[Sequence[int]], parts: Parts) -> Breach | None:
    """Every member of a group has merged points that all come before the next one's: for monoids that do not commute."""
    for g in groups:
        boxes = [(d, [b for b in parts[d] or () if all(lo < hi for lo, hi in b)]) for d in g]
        held = [(d, p) for d, p in boxes if p]
        for (one, before), (other, later) in itertools.pairwise(held):
            wrong = next((b for a in before for b in later if not _precedes(a, b)), None)
            if wrong is not None:
                what = f"states that merge in order are merged out of it: device {one} before device {other}"
                return Breach("written_once", what, wrong)
    return None


def _precedes(one: Box, other: Box) -> bool:
    """Whether every point of a box comes before every point of another, the last dimension being the fastest."""
    return tuple(hi - 1 for _, hi in one) < tuple(lo for lo, _ in other)


def after(groups: Sequence[Sequence[int]], parts: Parts, devices: int) -> Parts:
    """What each device's states have merged once its group's are merged."""
    out: list[tuple[Box, ...] | None] = [None] * devices
    for g in groups:
        merged = merged_parts(g, parts)
        for d in g:
            out[d] = merged
    return tuple(out)


def _of(spans: Spans, devices: np.ndarray) -> Spans:
    return Spans(spans.lo[devices], spans.hi[devices], spans.there[devices])


def _moved(point: Point, corner: Point) -> Point:
    return tuple(x + c for x, c in zip(point, corner, strict=False))


# Blocks of an operation's index space over devices: law 4 (parts are disjoint and cover) and what a block writes.


def in_space(points: Spans, extents: tuple[int, ...], uncut: tuple[int, ...], facts: Lists) -> Breach | None:
    """Every block lies in the index space, none is empty where that is not, and the last dimensions (``uncut``) are whole."""
    space = everywhere(extents, points)
    bad = facts.outside(points, space)
    bad = facts.hollow(points, space) if bad < 0 else bad
    if bad >= 0:
        return Breach("split_partition", f"a device's block is not in the index space {extents}", points.box(bad))
    bad = facts.differ(points.keep(slice(len(extents) - len(uncut), None)), everywhere(uncut, points))
    return None if bad < 0 else Breach("split_partition", "a reduction over a part is not merged", points.box(bad))


def with_whole(points: Spans, extents: tuple[int, ...]) -> Spans:
    """Blocks with further dimensions, whole."""
    more = everywhere(extents, points)
    return Spans(np.hstack([points.lo, more.lo]), np.hstack([points.hi, more.hi]), points.there)


def written(op: Op, k: int, points: Spans, shape: tuple[int, ...]) -> Spans:
    """What each device writes of output ``k``: its block of the map dimensions."""
    return points.keep(slice(0, len(op.dims))) if isinstance(op, Block) else along(op.out_axes[k], points, shape)


def state(op: Block, field: int, points: Spans) -> Spans:
    """What each device holds of a field for blocks of the map dimensions: one cell where it does not vary along one."""
    once = np.array([not v for v in varies(op)[field]], bool)
    width = np.where(points.hi > points.lo, 1, 0)
    return Spans(np.where(once, 0, points.lo), np.where(once, width, points.hi), points.there)


def complete(there: Array, parts: Parts, extents: tuple[int, ...], facts: Lists) -> Breach | None:
    """Law 3 for monoids: on every device, every point of the reduced dimensions is merged exactly once."""
    for mine in dict.fromkeys(parts[d] or () for d in np.flatnonzero(there)):
        gap, twice = facts.coverage(mine, whole(extents))
        if gap is not None:
            return Breach("written_once", "part of a reduction is missing", gap)
        if twice is not None:
            return Breach("written_once", "part of a reduction is merged twice", twice)
    return None


def cover(lists: Lists, op: Op, launched: Mapping[str, list[Boxes]], stage: Stage | None) -> None:
    """Law 4 over devices: blocks of one operation are equal (replicas) or disjoint, and cover its index space; with a
    stage, those of each of its devices are what the operation's splits give it, and no other device takes part.

    Args:
        launched: the lists of blocks that were launched, by mode ("merged": states were merged into results).
    """
    mine, step = launched.get("full") or launched.get("partial") or [], where(op)
    extents = tuple(d.size for d in op.space)
    numbers = tuple(map(lists.number, mine))
    lists.prove(("cover", numbers, extents), step, {"split_partition": 3}, lambda: _covered(lists, mine, extents))
    if "partial" in launched:
        ends, n = launched.get("finish", []), extents[: len(op.dims)]
        fact = ("ends", tuple(map(lists.number, ends)), n, "merged" in launched)
        lists.prove(fact, step, {"written_once": 2}, lambda: _finished(lists, ends, n, "merged" in launched))
    if stage is not None:
        names = [f"mesh.{a.name}" for a in stage.mesh]
        axes = tuple(tuple(names.index(s.to) for s in op.splits if s.dim == d.name and s.to in names) for d in op.space)
        spans = [lists.spans(b, len(extents)) for b in mine]
        ending = [lists.spans(b, len(op.dims)) for b in launched.get("finish", [])]
        counts = {"split_partition": len(coordinates(stage.mesh))}
        for s in (s for s in op.splits if s.to.startswith("ring.")):
            right = s.to.removeprefix("ring.") in [a.name for a in stage.mesh] and len(mine) == s.parts
            count = f"{len(mine)} steps of a ring of {s.parts}"
            lists.prove(("ring", s, len(mine)), step, {"split_partition": 1}, lambda c=count, r=right: _ring(r, c))
        sizes = tuple(a.size for a in stage.mesh)
        fact = ("planned", numbers, tuple(map(lists.number, launched.get("finish", []))), extents, axes, stage.first, sizes)
        lists.prove(fact, step, counts, lambda: _elsewhere(spans + ending, stage) or _as_planned(spans, extents, axes, stage))


def _ring(right: bool, what: str) -> Breach | None:
    return None if right else Breach("split_partition", "blocks do not travel as the plan says", what)


def distinct(lists: Sequence[Boxes]) -> list[Box]:
    """The boxes of some lists, each once."""
    return list(dict.fromkeys(b for boxes in lists for b in boxes if b is not None))


def _covered(facts: Lists, mine: list[Boxes], extents: tuple[int, ...]) -> Breach | None:
    blocks = distinct(mine)
    if not blocks:
        return Breach("split_partition", "the operation is never run")
    gap, twice = facts.coverage(blocks, whole(extents))
    if gap is not None:
        return Breach("split_partition", "a point is computed by no device", gap)
    return None if twice is None else Breach("split_partition", "a point is in two different blocks", twice)


def _finished(facts: Lists, ends: list[Boxes], extents: tuple[int, ...], merged: bool) -> Breach | None:
    if not ends:
        return None if merged else Breach("written_once", "partial states are never merged")
    gap, _ = facts.coverage(distinct(ends), whole(extents), twice=False)
    return None if gap is None else Breach("written_once", "an output cell is never finished", gap)


def _elsewhere(launches: list[Spans], stage: Stage) -> Breach | None:
    """No device outside the stage computes any of it."""
    for s in launches:
        there = s.there.copy()
        there[list(stage.devices)] = False
        bad = np.flatnonzero(there)
        if len(bad):
            return Breach("split_partition", f"device {bad[0]} computes it outside its stage", stage)
    return None


def _as_planned(mine: list[Spans], extents: tuple[int, ...], axes: tuple[tuple[int, ...], ...], stage: Stage) -> Breach | None:
    """What each device computes (the hull over its launches) is the block that the splits give it."""
    big = np.iinfo(np.int64).max
    lo = np.min([np.where(s.there[:, None], s.lo, big) for s in mine], axis=0)
    hi = np.max([np.where(s.there[:, None], s.hi, -1) for s in mine], axis=0)
    for d, coordinate in enumerate(coordinates(stage.mesh), stage.first):
        planned = tuple(interval(e, stage.mesh, by, coordinate) for e, by in zip(extents, axes, strict=True))
        hull = tuple(zip(lo[d].tolist(), hi[d].tolist(), strict=True))
        if hull != planned or not any(s.there[d] for s in mine):
            return Breach("split_partition", "a device does not compute what the plan gives it", (hull, planned))
    return None


# Whether the messages of a program can block: every rank's script of exchanges, and a simulation that is harsher than any
# network.
#
# In an exchange a rank posts all its sends and receives for one step and does not go on before its partners have posted
# theirs: no message is buffered (MPI calls such programs *safe*), and messages between two ranks match in the order in which
# they are posted, tags or no tags. A collective of the backend stands here as the exchange that it replaces: both meet all of a
# group, in one order on all ranks. What gets through here gets through gloo and NCCL. The scripts are worked out from the
# program alone, by rules of their own; `tests/verify/test_deadlock.py` puts them in the order in which the runtime posts, and
# holds what it really posts against them.


LAW = "no_deadlock"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank posts at once: bytes to and from each partner, at a step and a part of it."""

    tag: tuple[int, int]
    sends: dict[int, int]
    receives: dict[int, int]

    @property
    def partners(self) -> set[int]:
        """Ranks that it takes."""
        return self.sends.keys() | self.receives.keys()


Script = Sequence[Exchange]
Flow = dict[tuple[int, int], int]  # (sender, receiver) -> bytes


def simulate(scripts: Sequence[Script]) -> int:
    """Run the scripts against each other; returns how many pairs of partners met, and one
    for each device that comes to the end of its steps.

    Raises:
        LawError: ranks wait for each other, or two ranks mean different messages.
    """
    at, left = [0] * len(scripts), [0] * len(scripts)
    waiting: dict[tuple[int, int], Exchange] = {}
    enter = list(range(len(scripts)))
    met = 0
    while enter:
        r = enter.pop()
        if at[r] == len(scripts[r]):
            continue
        mine = scripts[r][at[r]]
        for p in mine.partners:
            if not 0 <= p < len(scripts) or p == r:
                raise LawError(LAW, f"rank {r} exchanges with rank {p}", where=f"step {mine.tag[0]}")
            theirs = waiting.pop((p, r), None)
            if theirs is None:
                waiting[r, p] = mine
                left[r] += 1
                continue
            _agree(r, mine, p, theirs)
            met += 1
            left[p] -= 1
            if left[p] == 0:
                at[p] += 1
                enter.append(p)
        if left[r] == 0:
            at[r] += 1
            enter.append(r)
    stuck = next((r for r, n in enumerate(at) if n < len(scripts[r])), None)
    if stuck is not None:
        raise LawError(LAW, "ranks wait for each other", why=_chain(stuck, scripts, at, waiting))
    return met


def _agree(r: int, mine: Exchange, p: int, theirs: Exchange) -> None:
    sent = (mine.sends.get(p, 0), theirs.sends.get(r, 0))
    expected = (theirs.receives.get(r, 0), mine.receives.get(p, 0))
    if mine.tag != theirs.tag or sent != expected:
        raise LawError(
            LAW, f"ranks {min(r, p)} and {max(r, p)} mean different messages", where=f"steps {mine.tag} and {theirs.tag}",
            why=f"sent {sent} bytes, expected {expected}",
        )  # fmt: skip


def _chain(stuck: int, scripts: Sequence[Script], at: list[int], waiting: dict[tuple[int, int], Exchange]) -> str:
    """Who waits for whom, until a rank comes again or has ended."""
    told: list[str] = []
    seen: set[int] = set()
    r: int | None = stuck
    while r is not None and r not in seen:
        seen.add(r)
        p = min((q for a, q in waiting if a == r), default=None)
        told.append(f"rank {r} ended" if p is None else f"rank {r} at step {scripts[r][at[r]].tag[0]} waits for rank {p}")
        r = p
    return "; ".join(told)


def post(out: list[list[Exchange]], tag: tuple[int, int], flow: Flow, owner: list[int]) -> None:
    pairs: Flow = defaultdict(int)
    for (src, dst), nbytes in flow.items():
        if owner[src] != owner[dst]:
            pairs[owner[src], owner[dst]] += nbytes
    sends: dict[int, dict[int, int]] = defaultdict(dict)
    receives: dict[int, dict[int, int]] = defaultdict(dict)
    for (src, dst), nbytes in pairs.items():
        sends[src][dst], receives[dst][src] = nbytes, nbytes
    for r in sorted(sends.keys() | receives.keys()):
        out[r].append(Exchange(tag, sends.get(r, {}), receives.get(r, {})))


def flows(step: Transfer | Reduce, program: Program) -> Iterator[Flow]:
    """Bytes between devices in each part of a step."""
    if isinstance(step, Transfer):
        width, flow = itemsize(program.buffers[step.dst].dtype), defaultdict[tuple[int, int], int](int)
        for m in step.messages:
            flow[m.src, m.dst] += size(m.box) * width
        yield flow
        return
    yield dict(merged_flow(step, program, there=True))
    if step.kind == "all_reduce":
        yield dict(merged_flow(step, program, there=False))


def merged_flow(step: Reduce, program: Program, there: bool) -> Iterator[tuple[tuple[int, int], int]]:
    """States on their way to who merges them, or merged ones on their way back.

    In an all-reduce of three and more, the k-th of n devices merges rows k·N/n to (k+1)·N/n of the N that all fields have
    in common.
    """
    sent = set(step.sent)
    for g in step.groups:
        fields = [(program.buffers[s], program.buffers[d]) for s, d in zip(step.srcs, step.dsts, strict=True)]
        boxes = [_there(d.boxes[g[0]]) for _, d in fields]
        shared = _common(boxes)
        rows = size(boxes[0][:shared])
        whole = step.kind != "all_reduce" or len(g) <= 2
        for k, r in enumerate(g) if there or not whole else ():
            nbytes = 0
            for s, d in fields:
                box = _there(d.boxes[r])
                if s.name in sent:
                    part = size(box) if whole else ((k + 1) * rows // len(g) - k * rows // len(g)) * size(box[shared:])
                    nbytes += part * itemsize(s.dtype)
            for e in g:
                if e != r:
                    yield ((e, r) if there else (r, e)), nbytes


def _common(boxes: list[Box]) -> int:
    """Leading axes on which all boxes agree."""
    n = 0
    while all(len(b) > n and b[n] == boxes[0][n] for b in boxes):
        n += 1
    return n


def _there(box: Box | None) -> Box:
    assert box is not None
    return box


def check(program: Program) -> int:
    """Simulate every distinct exchange of a program on all its devices; returns how many pairs of partners met.

    All ranks post the exchanges of one list (`exchanges`) in its order, each those that concern it, and wait only for what they
    have posted. So when all exchanges before are through, the first one left can begin on all its ranks, and it is enough that
    each kind of exchange, alone, gets through.

    Raises:
        LawError: one does not.
    """
    seen: set[object] = set()
    met = program.devices
    for i, step in enumerate(program.steps):
        if isinstance(step, Transfer):
            key: object = (step.messages, program.buffers[step.dst].dtype)
        elif isinstance(step, Reduce):
            boxes = tuple(program.buffers[d].boxes for d in step.dsts)
            key = (step.kind, step.groups, boxes, tuple(program.buffers[s].dtype for s in step.srcs), len(step.sent))
        else:
            continue
        if key in seen:
            continue
        seen.add(key)
        out: list[list[Exchange]] = [[] for _ in range(program.devices)]
        for part, flow in enumerate(flows(step, program)):
            odd = next((ends for ends in flow if ends[0] == ends[1]), None)
            if odd is not None:
                raise LawError(LAW, f"device {odd[0]} sends to itself", where=f"step {i}")
            post(out, (i, part), flow, list(range(program.devices)))
        met += simulate(out)
    return met
