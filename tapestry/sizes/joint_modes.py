"""Modes of one model (prefill and decode) planned on one placement: what both read lies where neither has to move it.

Weights and caches are shared variables of both searches. Each mode's own plan says where it would have them; a placement takes
each kind of tensor (one layer's like another's) from one of these plans, and the modes are searched again with every shared
tensor kept there: reading it otherwise costs a transfer at every step. Kinds change sides while the modes take much longer
together than is proven of them apart. No placement can be better than that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from tapestry import pipeline
from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box
from tapestry.ir.plan import Layout, Mesh
from tapestry.ir.program import Load, Program
from tapestry.ir.types import itemsize
from tapestry.pass_runner import Runner
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.strategy import tensor_boxes

ENOUGH = 1.03  # of the bound: no kind is moved for less
Placement = dict[str, Layout]
Sides = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointModes:
    """Plans of several modes on one placement.

    Attributes:
        compiled: a build for each mode.
        alone: what the search finds for each where the others do not matter.
        placement: of everything that is shared.
        tried: the seconds of each mode's step, for every placement that was looked at.
    """

    compiled: tuple[pipeline.Compiled, ...]
    alone: tuple[PricedPlan, ...]
    placement: Placement
    tried: tuple[tuple[float, ...], ...]


class _Search:
    """Placements that were looked at, by the mode from whose own plan each kind of tensor has its place."""

    def __init__(self, modes: Sequence[pipeline.Options], times: Sequence[float], caches: Mapping[str, str]) -> None:
        self.modes, self.times, self.caches = modes, times, caches
        self.runners = [_searched(o) for o in modes]
        self.alone = [_plan(r) for r in self.runners]
        wishes = [placement_of(p) for p in self.alone]
        shapes = [{t: p.plan.graph.tensors[t].shape for t in w} for p, w in zip(self.alone, wishes, strict=True)]
        self.shared = [t for t in wishes[0] if all(s.get(t) == shapes[0][t] for s in shapes)]
        self.wishes = wishes
        self.kinds = list(dict.fromkeys(_kind(t) for t in self.shared if len({w[t] for w in wishes}) > 1))
        self.found: dict[Sides, list[Runner]] = {}

    def placement(self, sides: Sides) -> Placement:
        """Where everything shared is."""
        side = dict(zip(self.kinds, sides, strict=True))
        return {t: self.wishes[side.get(_kind(t), 0)][t] for t in self.shared}

    def at(self, sides: Sides) -> list[Runner]:
        """The modes, searched with that placement; one whose own it is has its plan."""
        if sides not in self.found:
            kept, mesh = self.placement(sides), self.alone[0].plan.mesh
            self.found[sides] = []
            for m, (o, own) in enumerate(zip(self.modes, self.runners, strict=True)):
                if all(self.wishes[m][t] == layout for t, layout in kept.items()):
                    self.found[sides].append(own)
                    continue
                both = {**kept, **_behind(self.alone[m].plan.graph, kept, self.caches)}
                texts = [_text(t, layout, mesh) for t, layout in both.items()]
                self.found[sides].append(_searched(replace(o, layouts=(*o.layouts, *texts))))
        return self.found[sides]

    def seconds(self, sides: Sides) -> float:
        """What all modes take with that placement."""
        return sum(n * _plan(r).objective for n, r in zip(self.times, self.at(sides), strict=True))

    @property
    def bound(self) -> float:
        """What they take at least, with any."""
        return sum(n * p.bound for n, p in zip(self.times, self.alone, strict=True))


def compile_modes(
    modes: Sequence[pipeline.Options], times: Sequence[float], caches: Mapping[str, str] | None = None
) -> JointModes:
    """Plans of several modes of one model.

    Args:
        times: how often each mode runs, for the sum that is to be small.
        caches: inputs that are caches, with the output that is each of them with new cells behind it.

    Raises:
        TapestryError: they share nothing, or a mode has no plan.
    """
    if len({o.model for o in modes}) > 1 or len(modes) != len(times):
        raise TapestryError("modes are of one model, with a number for each", where="modes")
    search = _Search(modes, times, caches or {})
    if not search.shared:
        raise TapestryError("the modes share no tensor", where="modes")
    sides = min(((m,) * len(search.kinds) for m in range(len(modes))), key=search.seconds)
    for k in range(len(search.kinds)):
        if search.seconds(sides) <= ENOUGH * search.bound:
            break
        sides = min(((*sides[:k], m, *sides[k + 1 :]) for m in range(len(modes))), key=search.seconds)
    return JointModes(
        compiled=tuple(pipeline.finished(r) for r in search.at(sides)), alone=tuple(search.alone),
        placement=search.placement(sides), tried=tuple(tuple(_plan(r).objective for r in rs) for rs in search.found.values()),
    )  # fmt: skip


def placement_of(p: PricedPlan) -> Placement:
    """The layouts of the inputs and weights that a plan holds in one way."""
    graph, held = p.plan.graph, _held(p.program)
    found = {t: _layout(graph.tensors[t].shape, next(iter(some)), p.plan.mesh) for t, some in held.items() if len(some) == 1}
    return {t: layout for t, layout in found.items() if layout is not None}


def moved_bytes(graph: Graph, modes: Sequence[Program]) -> int:
    """Bytes of all inputs and weights of one size that modes hold in different ways: a switch from one mode to another would
    bring them, or both ways are kept."""
    held = [_held(p) for p in modes]
    other = [t for t in held[0] if any(t in h and h[t] != held[0][t] and _whole(h[t]) == _whole(held[0][t]) for h in held)]
    return sum(graph.tensors[t].size * itemsize(graph.tensors[t].dtype) for t in other)


def _held(program: Program) -> dict[str, set[tuple[Box | None, ...]]]:
    """In which parts devices hold each input and weight."""
    out: dict[str, set[tuple[Box | None, ...]]] = {}
    for step in program.steps:
        if isinstance(step, Load):
            buffer = program.buffers[step.buffer]
            out.setdefault(buffer.tensor, set()).add(buffer.boxes)
    return out


def _whole(held: set[tuple[Box | None, ...]]) -> list[int]:
    """How far what is held goes along each axis."""
    boxes = [b for some in held for b in some if b is not None]
    return [max(hi for _, hi in along) for along in zip(*boxes, strict=True)]


@lru_cache(maxsize=1 << 10)
def _layout(shape: tuple[int, ...], boxes: tuple[Box | None, ...], mesh: Mesh) -> Layout | None:
    """The layout in which devices have these parts of a tensor, if one has."""
    for layout in product((None, *range(len(shape))), repeat=len(mesh)):
        found = tensor_boxes(shape, layout, mesh)
        if all(b == tuple((int(lo), int(hi)) for lo, hi in f) for b, f in zip(boxes, found, strict=True)):
            return layout
    return None


def _behind(graph: Graph, kept: Placement, caches: Mapping[str, str]) -> Placement:
    """Results that are caches with new cells behind them, which lie as these do where the axis that grows is whole."""
    out: Placement = {}
    for past, present in caches.items():
        sizes = zip(graph.tensors[past].shape, graph.tensors[present].shape, strict=True)
        grows = {k for k, (n, m) in enumerate(sizes) if n != m}
        if past in kept and not grows & {*kept[past]}:
            out[present] = kept[past]
    return out


def _text(tensor: str, layout: Layout, mesh: Mesh) -> str:
    """A layout as ``--layout`` has it."""
    axes = {k: "+".join(a.name for a, n in zip(mesh, layout, strict=True) if n == k) for k in layout if k is not None}
    return f"{tensor}:{','.join(f'{k}={names}' for k, names in axes.items()) or 'replicated'}"


def _kind(tensor: str) -> str:
    return re.sub(r"\d+", "#", tensor)


def _searched(options: pipeline.Options) -> Runner:
    runner = pipeline.begun(options, lambda phase, name: None)
    pipeline.searched(runner, options)
    return runner


def _plan(runner: Runner) -> PricedPlan:
    return runner.get("plan", PricedPlan)
