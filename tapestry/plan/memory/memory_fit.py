"""Where memory is short: splits in time, recomputation and streamed weights, by a search around the planner.

A state is a rewritten graph. Its trial plans it with as few streamed weights as fit (with all of them where even that is too
much). States are rewritten where their plan needs most; the cheapest plan that fits is kept until the budget is over or nothing
gets better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tapestry.ir.graph import Graph
from tapestry.ir.plan import Layout
from tapestry.ir.program import alive_at, peak_bytes
from tapestry.plan.cost.floor import least_seconds
from tapestry.plan.memory.peaks import ALONE, BEAM, MORE, NEAR, PATIENCE, TRIAL, excess, moves
from tapestry.plan.search.pareto import Point
from tapestry.plan.search.planner import spatial
from tapestry.plan.search.priced_plan import PricedPlan, peak, too_big
from tapestry.plan.search.problem import Tables, build
from tapestry.plan.search.streamed_weights import fewest, streamable
from tapestry.plan.solver.budget import Budget
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.driver import apply_legal
from tapestry.rewrites.core.rule import Move


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A plan that fits, the moves that led to its graph, what a person should know of why, and all plans met that fit."""

    found: PricedPlan
    moves: tuple[Move, ...]
    report: Mapping[str, object]
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """A rewritten graph with its plan: one that fits, or the one with the least memory that was found."""

    graph: Graph
    moves: tuple[Move, ...]
    found: PricedPlan


def fit(
    graph: Graph,
    topo: Topology,
    first: PricedPlan,
    *,
    inputs: Mapping[str, Layout] | None = None,
    outputs: Mapping[str, Layout] | None = None,
    budget: Budget,
    previous: tuple[PricedPlan, Sequence[Move]] | None = None,
) -> Fitted:
    """The cheapest plan that was found to fit, by splits in time, recomputation and streamed weights.

    Args:
        first: the plan without them, which does not fit.
        inputs, outputs: layouts fixed for graph inputs (or weights) and outputs.
        previous: a plan that fits, with the moves to its graph, to go on from; what is found is never worse.

    Raises:
        TooBig: nothing fits; says by how many bytes, on which device, for which tensors, and what was tried.
    """
    bound = least_seconds(graph, topo)
    search = _Search(topo, inputs or {}, outputs or {}, bound, budget.share(ALONE))
    states = [search.plan(graph, ()), _State(graph, (), first)]
    if previous:
        states.append(_State(previous[0].plan.graph, tuple(previous[1]), previous[0]))
    best = search.explore(states)
    if peak(best.found) > topo.device.memory:
        raise too_big(min(best.found, first, key=peak), topo.device.memory, budget, search.tried())
    found = replace(best.found, bound=min(bound, best.found.objective))
    return Fitted(found=found, moves=best.moves, report=_report(first, found, topo, search.trials), points=tuple(search.points))


@dataclass(slots=True)
class _Search:
    """What is fixed during the search, and what it has looked at."""

    topo: Topology
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    bound: float
    budget: Budget
    trials: int = 0
    points: list[Point] = field(default_factory=list[Point])
    kinds: dict[str, int] = field(default_factory=dict[str, int])
    met: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])
    tables: Tables = field(default_factory=Tables)

    @property
    def limit(self) -> int:
        """Bytes of a device."""
        return self.topo.device.memory

    def explore(self, states: list[_State]) -> _State:
        """Rewrite the best states round by round; returns the best one."""
        best, idle = min(states, key=self.rank), 0
        beam = states
        while beam and idle < PATIENCE and not self.budget.over():
            if self.rank(best) <= (False, self.bound * NEAR):
                break
            beam = sorted((c for s in beam for c in self.children(s)), key=self.rank)[:BEAM]
            better = bool(beam) and self.rank(beam[0]) < self.rank(best)
            best, idle = (beam[0], 0) if better else (best, idle + 1)
        return best

    def rank(self, state: _State) -> tuple[bool, float, int]:
        """Smaller is better: what fits by cost, the rest by its peak and then by all that is above the limit over time."""
        most = peak(state.found)
        if most <= self.limit:
            return False, state.found.objective, 0
        return True, float(most), excess(state.found.program, self.topo)

    def children(self, state: _State) -> list[_State]:
        """The states that ladders of moves lead to: each is climbed until a plan fits, or a rung is no better than the last."""
        out: list[_State] = []
        for ladder in moves(state.graph, state.found, self.topo, self.budget):
            last = None
            for group in ladder:
                if self.budget.over():
                    return out
                key = tuple(map(str, (*state.moves, *group)))
                if key in self.met:
                    continue
                self.met.add(key)
                graph, done = apply_legal(state.graph, group)  # (nothing is simplified: that would undo them)
                if not done:
                    continue
                self.kinds[done[0].rule] = self.kinds.get(done[0].rule, 0) + 1
                new = self.plan(graph, (*state.moves, *done))
                out.append(new)
                if peak(new.found) <= self.limit or (last and self.rank(new) >= self.rank(last)):
                    break
                last = new
        return out

    def plan(self, graph: Graph, done: tuple[Move, ...]) -> _State:
        """The best plan of a graph with as few streamed weights as fit, or with all where none fits."""
        every = self.spatial(graph, streamable(graph, tuple(self.inputs), self.limit))
        if peak(every) > self.limit or not every.plan.streamed:
            return _State(graph, done, every)
        plain = self.spatial(graph, frozenset())
        found = plain if peak(plain) <= self.limit else self.spatial(graph, fewest(every, self.topo))
        best = min((f for f in (every, found) if peak(f) <= self.limit), key=lambda f: f.objective)
        self.points.append(Point(best.objective, peak(best), tuple(map(str, done))))
        self.budget = self.budget.part(MORE)
        return _State(graph, done, best)

    def spatial(self, graph: Graph, streamed: frozenset[str]) -> PricedPlan:
        """The planner's own search, for a while."""
        self.trials += 1
        problem = build(graph, self.topo, {}, self.inputs, self.outputs, streamed=streamed, known=self.tables)
        self.budget.spend(problem.work)
        return spatial(problem, self.budget.part(TRIAL), squeeze=False)

    def tried(self) -> str:
        """For the error: what was tried."""
        kinds = ", ".join(f"{n} × {k}" for k, n in sorted(self.kinds.items())) or "no rewrite applies"
        return f"; tried {self.trials} plans with all weights streamed and these moves: {kinds}"


def _report(first: PricedPlan, found: PricedPlan, topo: Topology, trials: int) -> dict[str, object]:
    """Why the plan is not only spatial: by how much the best of those did not fit, and what this one does instead."""
    most, at = peak_bytes(first.program)
    device = topo.tightest(most)
    buffers = first.program.buffers
    alive = sorted(alive_at(first.program, at[device]), key=lambda b: -buffers[b].nbytes(device))[:4]
    streamed = found.plan.streamed
    return {
        "spatial_peak_bytes": most[device],
        "device": device,
        "short_bytes": most[device] - topo.memories()[device],
        "largest": [{"buffer": b, "bytes": buffers[b].nbytes(device)} for b in alive],
        "trials": trials,
        "streamed": sorted(streamed),
        "streamed_bytes": sum(found.plan.graph.tensors[t].nbytes for t in streamed),
    }
