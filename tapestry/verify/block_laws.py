"""Blocks of an operation's index space over devices: law 4 (parts are disjoint and cover) and what a block writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tapestry.ir.graph import Block, Op
from tapestry.ir.kernel import Box, whole
from tapestry.ir.laws import where
from tapestry.ir.plan import Stage, coordinates, interval
from tapestry.ir.recognition.state import varies
from tapestry.ir.types import Array
from tapestry.verify.box_lists import Boxes, Breach, Lists, Parts, Spans, along, everywhere


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
