"""The search around the search: structural rewrites, kept when the best plan of the rewritten graph is better.

Rules that users add are tried first, and while there is any budget; the built-in ones for some of it. One move per
kind of operation is tried (equal signatures give equal answers), and one that pays is repeated for all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tapestry.ir.graph import Graph
from tapestry.ir.plan import Mesh, device_count
from tapestry.ir.syntax.printer import signature
from tapestry.plan.algebra import Derivation
from tapestry.plan.search.fewest_bytes import preferred
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.pairs import PROVED, proved
from tapestry.rewrites.core.driver import SIMPLIFIED, apply_legal, rules_of, simplify
from tapestry.rewrites.core.rule import Move, Refusal, Rule, Sized

WORTH = 1 - PROVED  # a rewrite must bring the objective under this share of what it was
SIMPLIFYING = 5e5  # units of work for simplifying an operation
MOST_NEW_OPS = 12  # a move that adds more operations than this to one is not worth planning
_NONE = frozenset[str]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A derivation by the book that was planned: its equations, regions, seconds of those on one device before and after, the
    objective of the best plan (infinite where it is above the best one's), and whether it was taken."""

    equations: str
    places: int
    before: float
    after: float
    objective: float
    taken: bool

    def data(self) -> dict[str, object]:
        """For the JSON document."""
        objective = self.objective if math.isfinite(self.objective) else None
        return {
            "equations": self.equations,
            "regions": self.places,
            "before_s": self.before,
            "after_s": self.after,
            "objective_s": objective,
            "taken": self.taken,
        }


@dataclass(slots=True, kw_only=True)
class Improvement:
    """A search for better graphs.

    Attributes:
        plan: finds the best plan of a graph within a budget, if it can be below some seconds.
        budget: of the whole; ``units`` of it are for the built-in rules.
        least: units of the budget with which a rewrite is still tried: about as long as a graph takes.
        disabled: simplifications that are left out.
        tried: kinds of moves that were looked at.
        bounds: of all graphs that were planned, but for the one that is the best.
        unfinished: others, whose plans may be better: there was no work left to find out.
        met: whether there was any move.
        book_units: of the budget, for planning what the book derives.
        book: what the book of equations makes of a graph's regions, if it is tried; ``refuse`` fuses by price what it made.
        derived: what came of it.
        keeps: whether a graph may take the place of another one.
    """

    plan: Callable[[Graph, Budget, float], PricedPlan]
    budget: Budget
    units: float
    least: float = 0.0
    disabled: frozenset[str] = _NONE
    tried: set[str] = field(default_factory=set[str])
    bounds: list[float] = field(default_factory=list[float])
    unfinished: int = 0
    met: bool = False
    book_units: float = 0.0
    book: Callable[[Graph], list[Derivation]] | None = None
    refuse: Callable[[Graph], tuple[Graph, list[Move]]] = lambda graph: (graph, [])
    derived: list[Tried] = field(default_factory=list[Tried])
    keeps: Callable[[Graph], bool] = lambda graph: True

    def run(self, graph: Graph, found: PricedPlan, unfused: Graph | None = None) -> tuple[Graph, PricedPlan, list[Move], bool]:
        """The graph, its best plan and the moves that led to it, from a graph and its plan; or from what it was before it was
        fused by price, where the book makes a better one of that (the last result says whether)."""
        accepted: list[Move] = []
        first = self._derived(unfused, found) if unfused else None
        if first:
            graph, found, accepted = first
        while (step := self._derived(graph, found) or self._better(graph, found)) is not None:
            graph, found, moves = step
            accepted += moves
        if accepted:
            self.bounds.remove(found.bound)
        return graph, found, accepted, first is not None

    def _derived(self, graph: Graph, found: PricedPlan) -> tuple[Graph, PricedPlan, list[Move]] | None:
        """The first graph with a better plan that the book makes: of all kinds of regions at once, else of one."""
        if self.book is None:
            return None
        every = self.book(graph)
        ours = self.budget.part(self.book_units)
        begin = ours.left()
        for some in [every, *([d] for d in every if len(every) > 1)]:
            moves = [m for d in some for m in (Move(SIMPLIFIED, "graph"), *d.moves)][1:]
            kind = " ".join(map(str, moves))
            if not moves or kind in self.tried or ours.over() or self.budget.left() < self.least:
                continue
            self.met = True
            self.tried.add(kind)
            new, done = self._made(graph, moves, ours)
            new, fusions = self.refuse(new)
            candidate = self._planned(new, ours, found) if done else found
            better = candidate.objective < found.objective * WORTH
            self.derived.append(_tried(some, candidate.objective, better))
            if better:
                self.book_units = max(0.0, self.book_units - (begin - ours.left()))
                return new, candidate, [*done, *fusions]
        return None

    def _better(self, graph: Graph, found: PricedPlan) -> tuple[Graph, PricedPlan, list[Move]] | None:
        """The first graph with a better plan, and the moves to it; takes the work of the built-in rules off ``units``."""
        ours = self.budget.part(self.units)
        begin = ours.left()
        for rule, kind, moves in _kinds(graph, found.plan.mesh, self.disabled):
            budget, self.met = ours if rule.built_in else self.budget, True
            if kind in self.tried or budget.over() or self.budget.left() < self.least:
                continue
            self.tried.add(kind)
            one, done = self._made(graph, moves[:1], budget)
            if not done or len(one.ops) > len(graph.ops) + MOST_NEW_OPS:
                continue
            candidate = self._planned(one, budget, found)
            if candidate.objective >= found.objective * WORTH:
                continue
            new, done = self._made(graph, moves, budget)
            candidate = candidate if new.ops == one.ops else self._planned(new, budget, found)
            if candidate.objective < found.objective * WORTH and preferred(candidate, found, candidate.objective):
                self.units = max(0.0, self.units - (begin - ours.left()))
                return new, candidate, done
        return None

    def _made(self, graph: Graph, moves: list[Move], budget: Budget) -> tuple[Graph, list[Move]]:
        budget.spend(SIMPLIFYING * len(graph.ops))
        new, done = rewritten(graph, moves, self.disabled)
        return (new, done) if self.keeps(new) else (graph, [])

    def _planned(self, graph: Graph, budget: Budget, best: PricedPlan) -> PricedPlan:
        other = self.plan(graph, budget, best.objective)
        if other.objective < best.objective or proved(best.objective, other.bound):
            self.bounds.append(other.bound)
        else:
            self.unfinished += 1
        return other


def _tried(some: list[Derivation], objective: float, taken: bool) -> Tried:
    before, after = sum(d.before * d.places for d in some), sum(d.after * d.places for d in some)
    names = "; ".join(dict.fromkeys(d.name for d in some))
    return Tried(
        equations=names, places=sum(d.places for d in some), before=before, after=after, objective=objective, taken=taken
    )


def _moves(rule: Rule, graph: Graph, mesh: Mesh) -> Iterator[Move | Refusal]:
    """What a rule finds; one that cuts into parts is asked for as many as the mesh, or one of its axes, has devices."""
    if not isinstance(rule, Sized):
        return rule.find(graph)
    sizes = {a.size for a in mesh} | {device_count(mesh)}
    return itertools.chain.from_iterable(rule.sized(graph, n) for n in sorted(sizes, reverse=True) if n > 1)


def _kinds(graph: Graph, mesh: Mesh, disabled: frozenset[str]) -> Iterator[tuple[Rule, str, list[Move]]]:
    """By rule, users' first: moves that differ only in which of several equal operations they rewrite, and their kind."""
    makers = graph.producers()
    for rule in sorted((r for r in rules_of("search") if r.name not in disabled), key=lambda r: r.built_in):
        kinds: dict[str, list[Move]] = {}
        for m in _moves(rule, graph, mesh):
            if isinstance(m, Move):
                at = makers[m.at] if m.at in makers else graph.find(m.at)
                kind = f"{rule.name} {m.params} {signature(graph.ops[at], graph) if at >= 0 else m.at}"
                kinds.setdefault(kind, []).append(m)
        yield from ((rule, kind, moves) for kind, moves in kinds.items())


def rewritten(graph: Graph, moves: list[Move], disabled: frozenset[str]) -> tuple[Graph, list[Move]]:
    """The simplified graph after those of some moves that are legal, and these."""
    graph, done = apply_legal(graph, moves, disabled)
    return simplify(graph, disabled=disabled), done
