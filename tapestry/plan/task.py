"""What one command asks the planner for, and the plan that answers it: in space, in time, or in pipeline stages.

Everything but the graph, which rewrites change while they are searched, is the `Task`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Layout, Plan, device_count
from tapestry.plan.fusion import Machine, fused
from tapestry.plan.layout_constraints import Fixed
from tapestry.plan.memory.fit import Fitted, fit
from tapestry.plan.memory.refit import refitted
from tapestry.plan.pipelines.stage_choice import Choice, Request, choose
from tapestry.plan.requests import parse_pins
from tapestry.plan.search.candidate import Candidate, TooBig
from tapestry.plan.search.planner import cheapest, search
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.search.resume import Start
from tapestry.plan.solver.budget import Budget
from tapestry.plan.strategy import Pin
from tapestry.plan.structural_search import improve, variants
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.fixpoint import OPTIONAL, left_out, without
from tapestry.rewrites.core.rule import Move

STRUCTURE_SECONDS = 1.5  # for the built-in structural rules
FIRST = 0.7  # of the time, for the model as it is
QUICK = 2.0  # seconds in which a graph is planned for which the one without fusions is planned as well
BRIEF = 0.5  # seconds in all, for those without some simplifications
_NONE = frozenset[str]()
WORTH = 0.999  # of the objective: what leaving out a simplification must bring


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Devices, pins, layouts, annotations, and what an earlier search found.

    Attributes:
        ways: the topology, once for each way to share dimensions among devices that differ.
        folded: names of nodes that pins may name although they are no operations any more.
        rewritten: whether structural rewrites may be tried: a pin names an operation of the graph as it is.
        request: what is asked of pipeline stages.
        again: an earlier plan that fits in time only, with the moves to its graph.
        machine: for which fusions are chosen before the search; none: the graph stays as it is.
        leave: simplifications that the graph was made without.
        simplified: makes it without some; none: that is not asked for.
    """

    topo: Topology
    ways: Sequence[Topology]
    pins: Sequence[str]
    folded: Sequence[str]
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    fixed: Fixed
    start: Start
    rewritten: bool
    request: Request
    again: tuple[Plan, Sequence[Move]] | None = None
    machine: Machine | None = None
    leave: frozenset[str] = _NONE
    simplified: Callable[[frozenset[str]], Graph] | None = None

    def plan(self, graph: Graph, budget: Budget) -> Candidate:
        """The best plan of a graph in space; raises `TooBig` where none fits."""
        pins = self._pins(graph)
        return cheapest(
            lambda t: search(
                graph, t, pins=pins, inputs=self.inputs, outputs=self.outputs, fixed=self.fixed, time_limit=budget,
                start=self.start,
            ),
            self.ways,
        )  # fmt: skip

    def attempt(self, graph: Graph, budget: Budget) -> Candidate:
        """`plan`, for comparing: a plan that does not fit costs infinitely much."""
        try:
            return self.plan(graph, budget)
        except TooBig as e:
            return replace(e.closest, objective=math.inf)

    def problems(self, graph: Graph, moves: Sequence[Move]) -> Iterator[tuple[Problem, tuple[str, ...]]]:
        """The problem of a graph and of each graph that rewrites make of it, with the moves that led there."""
        others = variants(graph, self.topo.mesh, left_out(moves)) if self.rewritten else iter(())
        for g, more in itertools.chain([(graph, list[Move]())], others):
            found = build(g, self.topo, self._pins(g), self.inputs, self.outputs, self.fixed)
            yield found, tuple(map(str, [*moves, *more]))

    def _pins(self, graph: Graph) -> dict[int, tuple[Pin, ...]]:
        return parse_pins(self.pins, graph, self.topo.mesh, self.folded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The answer to a task.

    Attributes:
        graph: the graph planned, before the rewrites of a fitted or staged plan.
        moves: that led from the task's graph to the plan's.
        base: those of them that led to ``graph``.
        choice: the plan, without stages or with them.
        fitted: how it was made to fit, if no plan in space does.
    """

    graph: Graph
    moves: tuple[Move, ...]
    base: tuple[Move, ...]
    choice: Choice
    fitted: Fitted | None

    @property
    def found(self) -> Candidate:
        """The plan with its program and bound."""
        return self.choice.found


def solve(task: Task, graph: Graph, budget: Budget) -> Planned:
    """The best plan of a task: in space, else in time; with pipeline stages where they are asked for, or pay.

    Raises:
        TapestryError: nothing fits, or there is no plan as asked for.
    """
    began = time.monotonic()
    fitted: Fitted | None = None
    graph, moves, spatial = _first(task, graph, budget)
    if isinstance(spatial, TooBig):
        if not task.rewritten:
            raise spatial
        attempt = _fitted(task, graph, spatial, budget)
        fitted = attempt if isinstance(attempt, Fitted) else None
        spatial = attempt.found if isinstance(attempt, Fitted) else attempt
    if isinstance(spatial, Candidate) and task.rewritten and not fitted:  # (simplifying would undo recomputation)
        spent, leave = time.monotonic() - began, task.leave | left_out(moves)
        graph, spatial, better = improve(graph, spatial, task.attempt, budget, STRUCTURE_SECONDS, spent, leave)
        moves = [*moves, *better]
    choice = choose(graph, task.topo, spatial, task.request, budget, tight=fitted is not None, spent=time.monotonic() - began)
    if choice.staged:
        fitted = None
    more = fitted.moves if fitted else choice.moves
    return Planned(graph=graph, moves=(*moves, *more), base=tuple(moves), choice=choice, fitted=fitted)


Planning = tuple[Graph, list[Move], Candidate | TooBig]


def _first(task: Task, graph: Graph, budget: Budget) -> Planning:
    """The best plan in space, over the forms of the graph: simplifications that cost one device nothing tie operations to one
    cut on several. Where planning is brief, each is left out in turn, and stays out where that is better."""
    began, leave = time.monotonic(), task.leave
    best = _fused(task, graph, budget, leave)
    for rule in OPTIONAL if task.simplified and device_count(task.topo.mesh) > 1 else ():
        if not isinstance(best[2], Candidate) or time.monotonic() - began > BRIEF or budget.over():
            break
        assert task.simplified
        other = task.simplified(leave | {rule})
        if other.ops == graph.ops:
            continue
        new = _fused(task, other, budget, leave | {rule})
        if isinstance(new[2], Candidate) and new[2].objective < best[2].objective * WORTH:
            best, graph, leave = new, other, leave | {rule}
    return best[0], [*map(without, sorted(leave - task.leave)), *best[1]], best[2]


def _fused(task: Task, graph: Graph, budget: Budget, leave: frozenset[str]) -> Planning:
    """The best plan in space of the fused graph, and of the graph as it is where that is worth a look: where fused nothing
    fits (two weights at once take more room), or, on several devices, where planning is quick (fused operations are cut alike).
    """
    began = time.monotonic()
    other, moves = fused(graph, task.machine, leave) if task.machine else (graph, list[Move]())
    found = _plan(task, other, budget.share(FIRST))
    quick = device_count(task.topo.mesh) > 1 and time.monotonic() - began < QUICK and not budget.over()
    if not moves or (isinstance(found, Candidate) and not quick):
        return other, moves, found
    plain = _plan(task, graph, budget.share(FIRST))
    if isinstance(plain, Candidate) and (isinstance(found, TooBig) or plain.objective < found.objective):
        return graph, [], plain
    return (other, moves, found) if isinstance(found, Candidate) else (graph, [], plain)


def _plan(task: Task, graph: Graph, budget: Budget) -> Candidate | TooBig:
    try:
        return task.plan(graph, budget)
    except TooBig as e:
        return e


def _fitted(task: Task, graph: Graph, first: TooBig, budget: Budget) -> Fitted | TooBig:
    """A plan that fits in time where none fits in space; why there is none, where pipeline stages may still fit."""
    if task.request.explicit:
        return first
    staged = task.request.stages != 1 and device_count(task.topo.mesh) > 1
    part = budget.share(FIRST) if staged else budget
    known = None
    if task.again:
        plan, moves = task.again
        found = refitted(graph, task.topo, plan, moves, inputs=task.inputs, outputs=task.outputs)
        known = (found, moves) if found else None
    try:
        return fit(graph, task.topo, first.closest, inputs=task.inputs, outputs=task.outputs, budget=part, known=known)
    except TooBig as e:
        return e


def staging(request: Request, *, bound: bool) -> Request:
    """What is asked of stages, where pins, layouts or annotations of the whole mesh are given (``bound``).

    Raises:
        TapestryError: both are asked for.
    """
    if not bound:
        return request
    if request.explicit:
        raise TapestryError(
            "pipeline stages do not go with pins, fixed layouts or the model's own annotations", where="--stages",
            why="those are of the whole mesh", hint="leave them out; --ignore-sharding for annotations",
        )  # fmt: skip
    return Request(stages=1)
