"""What has to hold of data that moves between devices, as verdicts over whole lists: messages, and merges of states."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tapestry.ir.kernel import Box, whole
from tapestry.ir.program import Message
from tapestry.verify.box_lists import Breach, Lists, Parts, Spans, first, spans_of
from tapestry.verify.boxes import Point

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
    kind: str,
    groups: Sequence[Sequence[int]],
    src: Spans,
    dst: Spans,
    parts: Parts,
    extents: tuple[int, ...],
    ends: bool,
    facts: Lists = ARRAYS,
) -> Breach | None:
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
