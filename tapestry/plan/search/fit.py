"""When no plan fits in space: the same splits in time, recomputation and streamed weights, searched around the planner.

A state is a rewritten graph. Its trial plans it with as few streamed weights as fit (with all of them where even that is too
much). States are rewritten where their plan needs most; the cheapest plan that fits is kept until the time is over or
nothing gets better.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Layout, MeshAxis
from tapestry.ir.program import alive_at, peak_bytes
from tapestry.plan.lower import lower
from tapestry.plan.search.peaks import moves, streamable
from tapestry.plan.search.planner import Found, peak, spatial, too_big
from tapestry.plan.search.problem import build
from tapestry.plan.topology import Link, Topology
from tapestry.rewrites.rule import RULES, Move

BEAM = 2  # states rewritten in one round
CHOICES = 5  # splits tried per state
ROUNDS = 8
PATIENCE = 2  # rounds without a better plan before the search stops
TRIAL_SECONDS = 4.0  # for planning one state
REFINE = 24  # streamed weights that are tried without


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A plan that fits, the moves that led to its graph, and what a person should know of why."""

    found: Found
    moves: tuple[Move, ...]
    report: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _State:
    """A rewritten graph with its plan: one that fits, or the one with the least memory that was found."""

    graph: Graph
    moves: tuple[Move, ...]
    found: Found

    def rank(self, limit: int) -> tuple[bool, float]:
        """Smaller is better: what fits by cost, the rest by memory."""
        most = peak(self.found)
        return (False, self.found.objective) if most <= limit else (True, float(most))


def fit(
    graph: Graph, topo: Topology, first: Found, *, inputs: Mapping[str, Layout], outputs: Mapping[str, Layout], time_limit: float
) -> Fitted:
    """The cheapest plan that was found to fit, by splits in time, recomputation and streamed weights.

    Args:
        first: the plan without them, which does not fit.
        time_limit: seconds.

    Raises:
        PlanError: nothing fits; says by how many bytes, on which device, for which tensors, and what was tried.
    """
    search = _Search(topo, inputs, outputs, time.monotonic() + time_limit)
    root = search.plan(graph, ())
    seen = [root, _State(graph, (), first)]
    best = search.explore(seen)
    if peak(best.found) > topo.device.memory:
        raise too_big(min(best.found, first, key=peak), topo.device.memory, search.tried())
    bound = _bound(graph, topo, first)
    found = replace(best.found, bound=min(bound, best.found.objective))
    return Fitted(found=found, moves=best.moves, report=_report(first, found, topo, search.trials))


@dataclass(slots=True)
class _Search:
    """What is fixed during the search, and what it has looked at."""

    topo: Topology
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    deadline: float
    trials: int = 0
    kinds: dict[str, int] = field(default_factory=dict[str, int])
    met: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])

    @property
    def limit(self) -> int:
        """Bytes of a device."""
        return self.topo.device.memory

    def explore(self, states: list[_State]) -> _State:
        """Rewrite the best states round by round; returns the best one."""
        best, idle = min(states, key=lambda s: s.rank(self.limit)), 0
        beam = states
        for _ in range(ROUNDS):
            children = [c for s in beam for c in self.children(s)]
            if not children or time.monotonic() > self.deadline:
                children and (best := min([best, *children], key=lambda s: s.rank(self.limit)))
                break
            beam = sorted(children, key=lambda s: s.rank(self.limit))[:BEAM]
            better = beam[0].rank(self.limit) < best.rank(self.limit)
            best, idle = (beam[0], 0) if better else (best, idle + 1)
            if idle >= PATIENCE:
                break
        return best

    def children(self, state: _State) -> list[_State]:
        """The states that one list of moves leads to."""
        out: list[_State] = []
        for group in moves(state.graph, state.found, self.limit, CHOICES):
            if time.monotonic() > self.deadline:
                break
            key = tuple(map(str, (*state.moves, *group)))
            if key in self.met:
                continue
            self.met.add(key)
            graph, done = _applied(state.graph, group)
            if done:
                self.kinds[done[0].rule] = self.kinds.get(done[0].rule, 0) + 1
                out.append(self.plan(graph, (*state.moves, *done)))
        return out

    def plan(self, graph: Graph, done: tuple[Move, ...]) -> _State:
        """The best plan of a graph with as few streamed weights as fit, or with all where none fits."""
        plain = self.spatial(graph, frozenset())
        order = streamable(graph, tuple(self.inputs), self.limit)
        if peak(plain) <= self.limit or not order:
            return _State(graph, done, plain)
        every = self.spatial(graph, frozenset(order))
        if peak(every) > self.limit:
            return _State(graph, done, every)
        chosen = self.fewest(every, order)
        found = self.spatial(graph, chosen) if len(self.topo.mesh) and chosen != frozenset(order) else every
        return _State(graph, done, found if peak(found) <= self.limit else every)

    def spatial(self, graph: Graph, streamed: frozenset[str]) -> Found:
        """The planner's own search, for a while."""
        self.trials += 1
        left = min(TRIAL_SECONDS, max(0.5, self.deadline - time.monotonic()))
        problem = build(graph, self.topo, {}, self.inputs, self.outputs, streamed=streamed)
        return spatial(problem, left, squeeze=False)

    def fewest(self, found: Found, order: list[str]) -> frozenset[str]:
        """With the strategies of a plan that streams all, the weights that must be streamed for it to fit."""

        def fits(streamed: frozenset[str]) -> bool:
            return max(peak_bytes(lower(replace(found.plan, streamed=streamed)))[0]) <= self.limit

        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(frozenset(order[:middle])) else (middle + 1, high)
        chosen = frozenset(order[:high])
        for t in order[:high][::-1][:REFINE]:
            if time.monotonic() > self.deadline:
                break
            if fits(chosen - {t}):
                chosen -= {t}
        return chosen

    def tried(self) -> str:
        """For the error: what was tried."""
        kinds = ", ".join(f"{n} × {k}" for k, n in sorted(self.kinds.items())) or "no rewrite applies"
        return f"; tried {self.trials} plans with all weights streamed and these moves: {kinds}"


def _applied(graph: Graph, group: tuple[Move, ...]) -> tuple[Graph, tuple[Move, ...]]:
    """All moves of a group that are still legal after the ones before. (Nothing is simplified: that would undo them.)"""
    done: list[Move] = []
    for m in group:
        try:
            graph = RULES[m.rule].apply(graph, m)
        except TapestryError:
            continue
        done.append(m)
    return graph, tuple(done)


def _bound(graph: Graph, topo: Topology, first: Found) -> float:
    """A lower bound of every plan of every rewritten graph, in seconds.

    The rewrites compute each point of the graph at least once, and read and write at least its cells; the cost of an
    operation is additive in both, with a launch for each part. So on one device no rewritten graph costs less than the
    graph itself. On several, parts may be spread more evenly than the whole could be: what remains true is that some device
    does at least its share of each operation. Loads from the host and transfers only add.
    """
    n = int(np.prod([a.size for a in topo.mesh]))
    if n == 1:
        return first.bound
    one = replace(topo, mesh=(MeshAxis("d0", 1),), links=(Link(0.0, 0.0),))
    launch = topo.device.launch
    return float(sum(launch + (m.seconds.min() - launch) / n for m in build(graph, one, {}, {}, {}).menus))


def _report(first: Found, found: Found, topo: Topology, trials: int) -> dict[str, object]:
    """Why the plan is not only spatial: by how much the best of those did not fit, and what this one does instead."""
    most, at = peak_bytes(first.program)
    device = int(np.argmax(most))
    buffers = first.program.buffers
    alive = sorted(alive_at(first.program, at[device]), key=lambda b: -buffers[b].nbytes(device))[:4]
    streamed = found.plan.streamed
    return {
        "spatial_peak_bytes": most[device], "device": device, "short_bytes": most[device] - topo.device.memory,
        "largest": [{"buffer": b, "bytes": buffers[b].nbytes(device)} for b in alive], "trials": trials,
        "streamed": sorted(streamed), "streamed_bytes": sum(found.plan.graph.tensors[t].nbytes for t in streamed),
    }  # fmt: skip
