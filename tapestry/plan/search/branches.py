"""Branch and bound over choices of strategies, on the simulated clock: closes what is left between a plan and its bound.

A branch keeps some choices of every operation. Its bound is that of the game of `time_bound` among them, in which averages are
answered by elimination: that gives the least average with every single choice as well, and what cannot be below the best time
known goes (reduced-cost fixing: Dantzig, Fulkerson and Johnson 1954). Where the game's choices differ most in an operation, the
branch is parted. A branch of few plans has them put on the clock. Work decides when it ends; the least bound of the
branches that are left is one of every plan.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tapestry.plan.search.marginals import Marginals, marginals
from tapestry.plan.search.path_weights import Master
from tapestry.plan.search.paths import Paths
from tapestry.plan.search.problem import Flow, Menu, Problem
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.pairs import PROVED
from tapestry.plan.solver.shared_prices import Demand

CELLS = 4_000_000  # of one elimination
UNITS = 20.0  # of work for a cell, there and back
LEAVES = 4  # plans of a branch that are all put on the clock
ROUNDS, STALL = 24, 4  # of the game in a branch; of those without a better bound
LEAST = 1 / 16  # of the way to the next average
KNOWN = 64  # choices that a branch takes over from the one before
BEGIN, TURN, CLOCK = 250_000.0, 100_000.0, 2_000_000.0  # of work for an operation: a round's tables, a turn of it, a clock
TRIAL, HOPE = 1 / 4, 1 / 4  # of the work: after this much, how much of its gap a bound must have closed for each share of work

Kept = tuple[np.ndarray, ...]
Clock = Callable[[Sequence[int]], tuple[float, float]]
"""(seconds of the best plan of a choice that fits, infinite where none does; seconds that none of its plans is under)."""


@dataclass(order=True, slots=True)
class _Branch:
    bound: float
    number: int
    kept: Kept = field(compare=False)
    known: list[tuple[int, ...]] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Usages:
    """What choices use over time, the most that there may be at each time, and what using it costs there."""

    demands: Sequence[Demand] = ()
    limits: Sequence[float] = ()
    price: np.ndarray | None = None


@dataclass(slots=True)
class Branching:
    """A search through the branches of a problem.

    Attributes:
        clock: puts a choice on the clock.
        best: seconds of the best plan that is known, or from which on plans are of no use.
        done: the least bound of plans that were put on the clock.
    """

    problem: Problem
    clock: Clock
    best: float
    budget: Budget
    usages: Usages = Usages()
    done: float = np.inf
    met: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])
    priced: list[np.ndarray] = field(init=False)
    room: float = 0.0

    def __post_init__(self) -> None:
        limits, price = self.usages.limits, self.usages.price
        self.priced = [np.zeros(n) for n in self.problem.sizes]
        if price is not None and len(price) == len(limits):
            total = np.concatenate([[0.0], np.cumsum(price)])
            for d in self.usages.demands:
                self.priced[d.node] = self.priced[d.node] + d.amounts * (total[d.hi] - total[d.lo])
            self.room = float(price @ np.array(limits, float))

    def search(self, known: Sequence[Sequence[int]], bound: float) -> float:
        """A bound of all plans, at least the one given; ``known``: choices to begin with."""
        whole = tuple(np.arange(n) for n in self.problem.sizes)
        heap, numbers = [_Branch(bound, 0, whole, [tuple(c) for c in known])], itertools.count(1)
        begun, work = self.budget.meter.spent, self.budget.left()
        while heap and not self.budget.over():
            branch, spent = heap[0], (self.budget.meter.spent - begun) / work
            if branch.bound >= self.enough or branch.bound > self.done:
                break
            if spent > TRIAL and branch.bound - bound < HOPE * spent * (self.enough - bound):
                break
            parts = self.parts(branch)
            if parts is None:
                break
            heapq.heappop(heap)
            for part in parts:
                part.number = next(numbers)
                heapq.heappush(heap, part)
        return min([self.best, self.done, *(b.bound for b in heap)])

    @property
    def enough(self) -> float:
        """A bound from which on a branch is of no use."""
        return self.best * (1 - PROVED)

    def offer(self, choice: tuple[int, ...]) -> float:
        """Put a choice on the clock, once; the seconds that none of its plans is under."""
        if choice not in self.met:
            self.budget.spend(CLOCK * len(self.problem.graph.ops))
            seconds, least = self.clock(choice)
            self.best, self.met[choice] = min(self.best, seconds), least
        return self.met[choice]

    def parts(self, branch: _Branch) -> list[_Branch] | None:
        """What is left of a branch; None where it is too large to work with."""
        if not self.fits(branch.kept):
            return []
        self.budget.spend(BEGIN * len(branch.kept))
        round_ = _Round(self.problem, branch.kept, branch.known)
        if not round_.few and not self.play(round_):
            return None
        if round_.bound >= self.enough:
            return []
        if round_.few:
            for choice in itertools.product(*(k.tolist() for k in round_.kept)):
                least = self.offer(choice)
                self.done = min(self.done, least) if least < self.enough else self.done
            return []
        return [_Branch(max(round_.bound, branch.bound), 0, kept, round_.inside(kept)) for kept in round_.parted()]

    def fits(self, kept: Kept) -> bool:
        """Whether what choices use at least is within the limits."""
        limits = self.usages.limits
        used = np.zeros(len(limits))
        for d in self.usages.demands:
            used[d.lo : d.hi] += d.amounts[kept[d.node]].min()
        return bool((used <= np.array(limits, float)).all())

    def play(self, game: _Round) -> bool:
        """The game among some choices, fewer and fewer; whether elimination could answer."""
        now, part, stall = game.master.weights()[0], 1.0, 0
        game.weights = now
        for _ in range(ROUNDS):
            self.budget.spend(TURN * len(game.kept))
            found = self.answer(game, now)
            if found is None:
                return False
            stall = 0 if found.least > game.bound * (1 + PROVED) else stall + 1
            if found.least > game.bound:
                game.bound, game.weights, part = found.least, now, min(1.0, 2 * part)
            else:
                part = max(part / 2, LEAST)
            if game.bound >= self.enough:
                break
            if game.paths.largest(found.choice) < self.enough:
                self.offer(game.whole(found.choice))
            fewer = [of < self.enough for of in found.of]
            if not all(f.any() for f in fewer):
                game.bound = self.best
                break
            if game.narrow(fewer, found.choice):
                stall = 0
                self.budget.spend(BEGIN * len(game.kept))
            if game.few or stall == STALL or self.budget.over():
                break
            now = game.weights + part * (game.master.weights()[0] - game.weights)
        return True

    def answer(self, game: _Round, weights: np.ndarray) -> Marginals | None:
        """The least average with every choice, prices of usages included."""
        tables = [(f.nodes, f.table) for f in game.paths.factors(weights)]
        tables += [((i,), self.priced[i][k]) for i, k in enumerate(game.kept)] if self.room else []
        found = marginals(list(map(len, game.kept)), tables, CELLS)
        if found is None:
            return None
        self.budget.spend(UNITS * found.cells + 50_000.0 * len(tables))
        return replace(found, least=found.least - self.room, of=[of - self.room for of in found.of])


@dataclass(slots=True)
class _Round:
    """The game among some choices of every operation.

    Attributes:
        known: choices of the whole problem, among those kept.
        weights: the average of the bound.
    """

    problem: Problem
    kept: Kept
    known: list[tuple[int, ...]]
    bound: float = -np.inf
    weights: np.ndarray = field(default_factory=lambda: np.zeros(()))
    paths: Paths = field(init=False)
    master: Master = field(init=False)
    place: list[dict[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.known = self.known[-KNOWN:] or [tuple(int(k[0]) for k in self.kept)]
        self.paths = Paths(_restricted(self.problem, self.kept))
        self.master = Master(self.paths)
        self.place = [{c: i for i, c in enumerate(k.tolist())} for k in self.kept]
        for choice in self.known:
            self.master.against([of[c] for of, c in zip(self.place, choice, strict=True)])

    @property
    def few(self) -> bool:
        """Whether so few plans are left that all may be put on the clock."""
        return prod(map(len, self.kept)) <= LEAVES

    def whole(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A choice of those kept as one of the whole problem."""
        return tuple(int(k[c]) for k, c in zip(self.kept, choice, strict=True))

    def inside(self, kept: Kept) -> list[tuple[int, ...]]:
        """The known choices among some."""
        among = [frozenset(k.tolist()) for k in kept]
        return [c for c in self.known if all(i in k for i, k in zip(c, among, strict=True))]

    def narrow(self, fewer: Sequence[np.ndarray], choice: Sequence[int]) -> bool:
        """Take in a choice, and keep only some; whether any went."""
        if (met := self.whole(choice)) not in self.known:
            self.known.append(met)
            self.master.against(choice)
        if all(f.all() for f in fewer):
            return False
        self.kept = tuple(k[f] for k, f in zip(self.kept, fewer, strict=True))
        self.known = self.inside(self.kept)
        bound, self.bound = self.bound, -np.inf
        self.__post_init__()
        self.bound = bound
        return True

    def parted(self) -> list[Kept]:
        """Two parts: one with the choice of an operation that counts most in the game's end, one with the others; of the
        operation where the choices differ most."""
        share = self.master.mixture()
        counts = [np.bincount(np.searchsorted(k, [c[i] for c in self.known]), share, len(k)) for i, k in enumerate(self.kept)]
        alike = [float(c.max()) if len(c) > 1 else 2.0 for c in counts]
        i = int(np.argmin(alike))
        one = np.arange(len(counts[i])) == counts[i].argmax()
        return [(*self.kept[:i], self.kept[i][f], *self.kept[i + 1 :]) for f in (one, ~one)]


def _restricted(problem: Problem, kept: Kept) -> Problem:
    """The problem with some choices of every operation, as far as the game needs it."""
    menus: dict[tuple[int, bytes], Menu] = {}
    tables: dict[tuple[int, bytes, bytes], np.ndarray] = {}
    for m, k in zip(problem.menus, kept, strict=True):
        key = id(m), k.tobytes()
        if key not in menus:
            menus[key] = replace(m, strategies=[m.strategies[c] for c in k], own=m.own[:, k], merging=m.merging[k])
    one, flows = np.zeros(1, np.int64), list[Flow]()
    for f in problem.flows:
        a, b = (kept[i] if i >= 0 else one for i in (f.maker, f.reader))
        key = id(f.seconds), a.tobytes(), b.tobytes()
        if key not in tables:
            tables[key] = f.seconds[:, a[:, None], b[None]]
        flows.append(replace(f, seconds=tables[key]))
    small = [menus[id(m), k.tobytes()] for m, k in zip(problem.menus, kept, strict=True)]
    return replace(problem, menus=small, flows=flows, factors=[])
