"""What one command asks the planner for: devices, layouts, pins, and what an earlier search left.

Everything but the graph, which rewrites change while plans are searched, is the `Task`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tapestry.errors import PlanError
from tapestry.ir.graph import Graph, Op
from tapestry.ir.plan import Layout, Mesh, Plan, Strategy, device_count
from tapestry.plan.fusion import Machine, fused
from tapestry.plan.layout_constraints import LayoutConstraints
from tapestry.plan.pipelines.stage_choice import Request
from tapestry.plan.requests import held
from tapestry.plan.search.planner import TINY, cheapest
from tapestry.plan.search.priced_plan import PricedPlan, TooBig
from tapestry.plan.search.problem import Problem, Tables, build
from tapestry.plan.search.resume import Start
from tapestry.plan.solver.budget import Budget, Meter
from tapestry.plan.strategy import Pin
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.rule import Move

STEPS = "steps"  # what ``without@steps`` leaves out: writing recurrences out step by step
_NONE = frozenset[str]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Devices, pins, layouts, annotations, and what an earlier search left.

    Attributes:
        topologies: the topology, once for each way to share dimensions among devices that differ.
        pins: by the first result of an operation, which every form of the graph has.
        rewritable: whether structural rewrites may be tried.
        request: what is asked of pipeline stages; what they keep to is there, and not of the whole mesh.
        previous_plan: an earlier plan that fits in time only, with the moves to its graph.
        machine: for which fusions are chosen before the search; none: the graph stays as it is.
        disabled_rules: simplifications that the graph was made without.
        book: whether the book of equations is tried.
        whole: the same with recurrences as one operation each, where it has any.
        lifted: the graph before simplification, to make it again without some of them; none: that is not asked for.
        meter: of the work that planning takes.
        tables: what is known for each way to share dimensions.
    """

    topology: Topology
    topologies: Sequence[Topology]
    pins: Mapping[str, tuple[Pin, ...]]
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    fixed: LayoutConstraints
    start: Start
    rewritable: bool
    request: Request
    previous_plan: tuple[Plan, Sequence[Move]] | None = None
    machine: Machine | None = None
    disabled_rules: frozenset[str] = _NONE
    book: bool = False
    lifted: Graph | None = None
    whole: Graph | None = None
    meter: Meter = field(default_factory=Meter)
    tables: dict[Mesh, Tables] = field(default_factory=dict[Mesh, Tables])

    @property
    def several_devices(self) -> bool:
        """Whether there is anything to share out."""
        return device_count(self.topology.mesh) > 1

    def problems(self, graph: Graph) -> list[Problem]:
        """The strategies of a graph with their costs, once for each topology.

        Raises:
            PlanError: what is asked for leaves some operation without a strategy.
        """
        pins = held(self.pins, graph.ops, self.topology.mesh)
        assert pins is not None, "a form without an operation that is pinned"
        out: list[Problem] = []
        failed: list[PlanError] = []
        for topology in self.topologies:
            try:
                known = self.tables.setdefault(topology.mesh, Tables())
                out.append(build(graph, topology, pins, self.inputs, self.outputs, self.fixed, known=known))
            except PlanError as e:
                failed.append(e)
        if not out:
            raise failed[0]
        self.meter.spent += sum(p.work for p in out)
        return out

    def attempt(self, graph: Graph, budget: Budget, upper: float) -> PricedPlan:
        """The best plan of a graph in space, for comparing with one that costs ``upper``; one that does not fit costs
        infinitely much."""
        try:
            return cheapest(self.problems(graph), budget, self.start, upper, small=TINY)
        except TooBig as e:
            return replace(e.closest, objective=math.inf)

    def problem(self, graph: Graph, topology: Topology, only: Mapping[int, Strategy]) -> Problem | None:
        """The strategies of a graph on one topology, ``only`` one of some operations; ``None`` where it lacks an operation that
        is pinned."""
        pins, known = held(self.pins, graph.ops, topology.mesh), self.tables.setdefault(topology.mesh, Tables())
        if pins is None:
            return None
        return build(graph, topology, pins, self.inputs, self.outputs, self.fixed, known=known, only=only)

    def keeps(self, graph: Graph) -> bool:
        """Whether a graph has all operations that are pinned."""
        return held(self.pins, graph.ops, self.topology.mesh) is not None

    def fused(self, graph: Graph, disabled: frozenset[str]) -> tuple[Graph, list[Move]]:
        """A graph with every fusion that pays on one device and leaves pinned operations, and the moves to it."""

        def keeps(old: Sequence[Op], new: Sequence[Op]) -> bool:
            mine = {t: self.pins[t] for op in old for t in op.outs if t in self.pins}
            return not mine or held(mine, new, self.topology.mesh) is not None

        new, moves = (
            fused(graph, self.machine, disabled, keeps if self.pins else None) if self.machine else (graph, list[Move]())
        )
        return (new, moves) if self.keeps(new) else (graph, [])


def staging(request: Request, *, bound: bool) -> Request:
    """What is asked of stages, where pins, layouts or annotations are given (``bound``): stages only if they are asked for."""
    return request if request.explicit or not bound else Request(stages=1)
