"""Splits in time as choices of the exact search: with the cuts in space of every operation and every part, within memory.

Splits of regions where plans need most are offered, one or none to be taken in each stretch of the graph. One network has
them all (`memory.time_network`). It is solved as the planner solves the one of a graph: the cheapest choice within an estimate
of what is held, with less room where lowering was seen to add to that. Answers to the game of `schedule.time_bound`, which
also bounds the time of every plan that the offered splits make, are put on the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry.ir.graph import Graph
from tapestry.ir.plan import Layout
from tapestry.plan.memory.peaks import moves
from tapestry.plan.memory.time_network import TimeNetwork, TimePaths, Way, stretches, way_of
from tapestry.plan.schedule.time_bound import Game
from tapestry.plan.search.memory_limit import ATTEMPTS, SOLVE, needed_bytes
from tapestry.plan.search.planner import ROUNDS, with_rings
from tapestry.plan.search.priced_plan import NEAR, PricedPlan, peak, priced_plan
from tapestry.plan.search.problem import Problem, Tables, build
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.network import Demand, Network, solve
from tapestry.plan.solver.pairs import PROVED, proved
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.rule import Move

OFFERED = 6  # splits that are looked for around each plan
WIDE = 4  # of those that leave no other one
MOST_NEW = 160  # operations that offered splits make, and as many for wide ones
SPLITS = ("split_time", "micro_batch")
AROUND = 2  # rounds: splits around the plans without any, then around what those gave


@dataclass(frozen=True, slots=True)
class Chosen:
    """The best plan that was found, the moves that it takes, and a bound of every plan of the splits that were offered."""

    found: PricedPlan
    moves: tuple[Move, ...]
    offered: tuple[Move, ...]
    bound: float


@dataclass(slots=True)
class TimeChoice:
    """A search among the cuts of a graph in space and time.

    Attributes:
        graph, topo, inputs, outputs, streamed: of every plan.
        ways: splits on offer, and ``wide`` ones, of more than one stretch.
    """

    graph: Graph
    topo: Topology
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    streamed: frozenset[str]
    budget: Budget
    tables: Tables = field(default_factory=Tables)
    ways: list[Way] = field(default_factory=list[Way])
    wide: list[Way] = field(default_factory=list[Way])
    best: PricedPlan | None = None
    taken: tuple[Move, ...] = ()
    priced: dict[tuple[object, ...], PricedPlan] = field(default_factory=dict[tuple[object, ...], PricedPlan])

    def search(self, begun: Sequence[PricedPlan], known: Sequence[Move]) -> Chosen | None:
        """The best plan that fits, or None: splits around the plans that are begun with, and known ones, are on offer."""
        around, known_of = list(begun), [(0.0, tuple[Move, ...]())]
        self._offer(known)
        for _ in range(AROUND):
            if self.budget.over():
                break
            before = len(self.ways), len(self.wide)
            for plan in around:
                groups = moves(plan.plan.graph, plan, self.topo, OFFERED, self.budget)
                self._offer([m for group in groups for m in group])
                self._offer([_in_two(m) for group in groups for m in group])
            if (len(self.ways), len(self.wide)) == before:
                break
            closest, bound = self._choose()
            known_of.append((bound, tuple(w.move for w in (*self.ways, *self.wide))))
            around = [closest] if closest else []
        if self.best is None:
            return None
        bounded = [(b, offered) for b, offered in known_of if b > 0 and {*self.taken} <= {*offered}]
        bound, offered = bounded[-1] if bounded else (0.0, ())
        return Chosen(self.best, self.taken, offered, min(bound, self.best.objective))

    def _offer(self, found: Sequence[Move]) -> None:
        met = {w.graph.ops for w in (*self.ways, *self.wide)}
        for move in found:
            way = way_of(self.graph, move) if move.rule in SPLITS else None
            if way is None or way.graph.ops in met:
                continue
            mine = self.ways if move.rule == "split_time" and self._apart(way) else self.wide
            if len(way.new) <= MOST_NEW - sum(len(w.new) for w in mine) and (mine is self.ways or len(mine) < WIDE):
                mine.append(way)
                met.add(way.graph.ops)

    def _apart(self, way: Way) -> bool:
        """Whether a way lies in one stretch at most: where it joined two, only one split would be left in both."""
        ends = [(min(min(w.gone) for w in some), max(max(w.gone) for w in some)) for some in stretches(self.ways)]
        return sum(min(way.gone) <= last and first <= max(way.gone) for first, last in ends) <= 1

    def _network(self) -> TimeNetwork:
        plain, ways = self._problem(self.graph), [*stretches(self.ways), self.wide]
        return TimeNetwork(plain, ways, [[self._problem(w.graph) for w in some] for some in ways])

    def _problem(self, graph: Graph) -> Problem:
        problem = build(graph, self.topo, {}, self.inputs, self.outputs, streamed=self.streamed, known=self.tables)
        self.budget.spend(problem.work)
        return problem

    def _choose(self) -> tuple[PricedPlan | None, float]:
        """The best choice that fits, or the one that is nearest to it; and a bound of all that fit."""
        net, limit = self._network(), self.topo.device.memory
        uses, most = net.usages(limit, surely=False)
        less, closest, bound, choice = np.zeros(len(most)), None, 0.0, list[int]()
        for _ in range(ATTEMPTS):
            network = Network(net.problem.sizes, net.problem.factors, uses, np.maximum(most - less, 0.0).tolist())
            found = solve(network, self.budget.part(SOLVE), gap=PROVED, quick=True)
            if not np.isfinite(found.objective):
                break
            plan, choice = self._plan(net, found.choice), found.choice
            if plan is None:
                break
            closest = plan if closest is None else min(closest, plan, key=lambda p: (peak(p) > limit, peak(p)))
            if peak(plan) <= limit:
                break
            less = self._learnt(net, found.choice, plan, uses, less)
            if self.budget.over():
                break
        if self.best is not None and choice and not self.budget.over():
            bound = self._on_the_clock(net, choice)
        return (self.best if self.best is not None else closest), bound

    def _learnt(
        self, net: TimeNetwork, choice: Sequence[int], plan: PricedPlan, uses: Sequence[Demand], less: np.ndarray
    ) -> np.ndarray:
        """Room that is taken where a program passes the limit, so that its choice does not fit any more."""
        used, running = np.zeros(len(less)), net.taken(choice)
        for d in uses:
            used[d.lo : d.hi] += d.amounts[choice[d.node]]
        need, out = needed_bytes(plan.program, self.topo, len(running)), less.copy()
        spare = net.spare(choice, uses)
        for k, n in zip(running, need.tolist(), strict=True):
            if n > self.topo.device.memory:
                out[k] = max(out[k], n - used[k] + spare[k])
        return out

    def _plan(self, net: TimeNetwork, choice: Sequence[int]) -> PricedPlan | None:
        """The plan of a choice; the best one so far is kept."""
        done = net.moves(choice)
        graph = apply_moves(self.graph, done[::-1])  # (later stretches first: positions before them stay)
        problem, running = self._problem(graph), net.taken(choice)
        nodes = [net.problem.graph.ops[k] for k in running]
        if len(nodes) != len(graph.ops) or any(a.space != b.space for a, b in zip(nodes, graph.ops, strict=True)):
            return None
        picked = [choice[k] for k in running]
        if any(c >= len(m.strategies) for c, m in zip(picked, problem.menus, strict=True)):
            return None
        key = (*done, *picked)
        if key in self.priced:
            return self.priced[key]
        self.priced[key] = plan = with_rings(priced_plan(problem, picked, 0.0))
        self.budget.spend(problem.lowering)
        if peak(plan) <= self.topo.device.memory and (self.best is None or plan.objective < self.best.objective * (1 - PROVED)):
            self.best, self.taken = plan, tuple(done[::-1])
        return plan

    def _on_the_clock(self, net: TimeNetwork, choice: Sequence[int]) -> float:
        """Put answers of the game on the clock; a bound of every plan of the network that fits."""
        uses, most = net.usages(self.topo.device.memory, surely=True)
        game = Game(net.problem, uses, most.tolist())
        game.paths = TimePaths(net)
        for answer, least in game.play(choice, ROUNDS, self.budget):
            if self.best is None or least < self.best.objective * (1 - PROVED):
                self._plan(net, answer)
            if self.best is not None and proved(self.best.objective, game.bound, NEAR):
                break
        return game.bound


def _in_two(move: Move) -> Move:
    """The same split in fewer parts: of less memory saved, and of fewer launches."""
    return replace(move, params=tuple((k, 2 if k == "parts" else v) for k, v in move.params))
