"""The Plan: a Graph, a device mesh, and for every operation which of its dimensions each mesh axis cuts.

A Plan is replayable as Moves: ``split@y{dim=n,parts=8,to=mesh.d0}`` for every pair of operation and mesh axis, and
``place@y{stage=1}`` for every operation of a plan with pipeline stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tapestry.ir.graph import Graph, Split

Layout = tuple[int | None, ...]
"""For each mesh axis, the tensor axis that it cuts, or ``None`` where the tensor is replicated along it."""


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """A named axis of the device mesh. Devices are numbered row-major: the last axis varies fastest.

    Attributes:
        weights: the share of each coordinate in what the axis cuts; none: equal shares.
        order: which of the devices along the axis, by number, has each coordinate; none: they count alike.
    """

    name: str
    size: int
    weights: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


Mesh = tuple[MeshAxis, ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one operation is spread over the mesh.

    Attributes:
        dims: for each mesh axis, the dimension of the index space that it cuts (``None``: every device does the same).
        out: layout of the outputs. Where a mesh axis cuts a reduced dimension, ``None`` means that the states are
            all-reduced and an axis that they are reduce-scattered along it.
        ring: for each mesh axis, the reduced dimension whose blocks travel round it, a block to each device in each of as many
            steps as the axis has devices; such an axis cuts a map dimension in ``dims``. Empty: none do.
    """

    dims: tuple[str | None, ...]
    out: Layout
    ring: tuple[str | None, ...] = ()


def still(s: Strategy) -> Strategy:
    """The strategy with what travels gathered instead: what the search's tables have."""
    return Strategy(s.dims, s.out)


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: consecutive devices from number ``first`` on, arranged as a mesh of their own (row-major)."""

    first: int
    mesh: Mesh

    @property
    def devices(self) -> range:
        """The devices of the stage."""
        return range(self.first, self.first + device_count(self.mesh))


@dataclass(frozen=True, slots=True)
class Arrival:
    """The layout, on a stage's mesh, in which a tensor that another stage computes is received there."""

    tensor: str
    stage: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run where.

    Attributes:
        strategies: one per operation of the graph, on the mesh of its stage.
        stages: disjoint ranges of devices; empty for one stage, the whole mesh.
        stage_of: for each operation the number of its stage (empty without stages). An operation reads from its own stage
            and from those before it.
        arrivals: how each stage receives what earlier ones compute.
        inputs: layouts in which some graph inputs (or weights) start, as the user fixed them.
        outputs: layouts in which some graph outputs must end.
        streamed: weights that are loaded from the host for every use and freed after it, instead of staying loaded.
        native_sums: whether partial sums are rounded to the results' dtype before they travel (`ir.recognition.state.native`).
    """

    graph: Graph
    mesh: Mesh
    strategies: tuple[Strategy, ...]
    inputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    outputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    streamed: frozenset[str] = frozenset()
    stages: tuple[Stage, ...] = ()
    stage_of: tuple[int, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    native_sums: bool = False

    def stage(self, op: int) -> Stage:
        """The stage of an operation."""
        return self.stages[self.stage_of[op]] if self.stages else Stage(0, self.mesh)

    @property
    def places(self) -> tuple[Stage, ...]:
        """The stage of each operation: all that a checker needs to know of them."""
        return tuple(self.stage(i) for i in range(len(self.graph.ops)))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return device_count(self.mesh)

    def annotated(self) -> Graph:
        """The graph with every operation's splits bound to mesh axes."""
        ops = tuple(
            replace(
                op,
                splits=(
                    *(Split(d, a.size, f"mesh.{a.name}") for d, a in zip(s.dims, at.mesh, strict=True) if d is not None),
                    *(Split(d, a.size, f"ring.{a.name}") for d, a in zip(s.ring, at.mesh, strict=False) if d is not None),
                ),
            )
            for op, s, at in zip(self.graph.ops, self.strategies, self.places, strict=True)
        )
        return replace(self.graph, ops=ops)


def device_count(mesh: Mesh) -> int:
    """Number of devices of a mesh."""
    n = 1
    for a in mesh:
        n *= a.size
    return n


@lru_cache(maxsize=1 << 8)
def coordinates(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Mesh coordinates of each device."""
    return tuple(
        itertools.product(*(sorted(range(a.size), key=a.order.__getitem__) if a.order else range(a.size) for a in mesh))
    )


def stages_refused(plan: Plan) -> str:
    """Why the stages of a plan are none ("" when they are): ranges that overlap or leave the mesh, operations in no stage,
    reads from a later stage, strategies for another mesh."""
    if not plan.stages:
        return "placements without stages" if plan.stage_of or plan.arrivals else ""
    if len(plan.stage_of) != len(plan.graph.ops) or any(not 0 <= k < len(plan.stages) for k in plan.stage_of):
        return "an operation is in no stage"
    taken = [d for s in plan.stages for d in s.devices]
    if len(set(taken)) < len(taken) or any(not 0 <= d < plan.devices for d in taken):
        return "stages overlap or leave the mesh"
    makers = plan.graph.producers()
    homes = {
        k: {t for op, at in zip(plan.graph.ops, plan.stage_of, strict=True) if at == k for t in (*op.inputs, *op.outs)}
        for k in range(len(plan.stages))
    }
    for t, layout in (*plan.inputs.items(), *plan.outputs.items()):
        if any(t in homes[k] and on_stage(layout, plan.mesh, s.mesh) is None for k, s in enumerate(plan.stages)):
            return f"the layout of '{t}' cuts along a mesh axis that a stage does not have as a whole"
    for op, k in zip(plan.graph.ops, plan.stage_of, strict=True):
        if any(t in makers and plan.stage_of[makers[t]] > k for t in op.inputs):
            return f"'{op.outs[0]}' reads from a later stage"
        host = next(
            (t for t in op.inputs if t in makers and plan.graph.tensors[t].on_host and plan.stage_of[makers[t]] != k), None
        )
        if host is not None:
            return f"'{op.outs[0]}' reads '{host}', a value of the host, from another stage"
    for a in plan.arrivals:
        if not 0 <= a.stage < len(plan.stages) or len(a.layout) != len(plan.stages[a.stage].mesh) or a.tensor not in makers:
            return f"'{a.tensor}' arrives nowhere"
    return ""


def on_stage(layout: Layout, mesh: Mesh, stage: Mesh) -> Layout | None:
    """A layout of the whole mesh on the mesh of a stage, by the names of axes; ``None`` where an axis that cuts is not there,
    or is shorter there."""
    cuts = {a: k for a, k in zip(mesh, layout, strict=True) if k is not None and a.size > 1}
    return None if any(a not in stage for a in cuts) else tuple(cuts.get(a) for a in stage)


def part(mesh: Mesh, axes: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[int, int]:
    """(number of parts, which one) for a dimension cut by some mesh axes together, the first one the slowest."""
    parts = index = 0
    for k, a in enumerate(axes):
        parts = (parts if k else 1) * mesh[a].size
        index = index * mesh[a].size + coordinate[a]
    return (parts or 1), index


@lru_cache(maxsize=1 << 12)
def shares(mesh: Mesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Sums of the shares of the parts before each part (and of all of them) of a dimension cut by some mesh axes together:
    the share of a part is the product of its coordinates' weights; 0, 1, 2, … where all are equal."""
    found = [1]
    for a in axes:
        weights = mesh[a].weights or (1,) * mesh[a].size
        found = [f * w for f in found for w in weights]
    out = [0]
    for share in found:
        out.append(out[-1] + share)
    return tuple(out)


def interval(extent: int, mesh: Mesh, axes: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[int, int]:
    """The part of [0, extent) that a device has of a dimension cut by some mesh axes together: with shares s before it and t
    after it of T in all, ``[⌊s·extent/T⌋, ⌊t·extent/T⌋)``. Fewer axes (the slowest of them) give a part that contains it."""
    before, (_, k) = shares(mesh, axes), part(mesh, axes, coordinate)
    return before[k] * extent // before[-1], before[k + 1] * extent // before[-1]
