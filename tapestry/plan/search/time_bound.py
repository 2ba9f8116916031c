"""A certified lower bound of the simulated time, and choices that make it tight.

For any average of the sums of `paths`, the cheapest choice by it bounds the time of every plan. Where memory is limited,
what a choice uses at any prices is added, and what the limits are worth taken off (Lagrangian duality: Geoffrion 1974):
then the bound is of all plans within them. The average, with the prices, is the mixed strategy of a game against the
choice: in each round the network solver answers the average, and the best average against all answers so far is that of the
next round (Kelley's cutting planes), less of the way from the best one where that has not raised the bound. An answer whose
time on the clock is the bound is optimal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry.plan.search.path_weights import Master
from tapestry.plan.search.paths import Paths
from tapestry.plan.search.problem import Problem
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.network import Factor, Network, solve
from tapestry.plan.solver.pairs import PROVED, Solution
from tapestry.plan.solver.shared_prices import PRICES_ROUNDING, Demand, Limits, Ticks

STALL = 8  # rounds without a better bound
LEAST, MOST = 1 / 16, 1 / 2  # of the way to the next average
SOLVE = 2.0 * SECOND  # for one answer
LIMITED = 24  # rounds where each takes seconds, as prices are to be found
NEW = 1e-6  # of the best average against all answers: less is no new answer
BETTER = 1e-4  # of the bound: less does not count
ENOUGH = 3e-4  # of the bound, where each round takes long


@dataclass(slots=True)
class Game:
    """Averages of sums, with prices of memory, against choices.

    Attributes:
        demands, limits: usages over time, and the most that there may be at each.
        bound: the best so far, in seconds: of every choice that keeps to the limits.
        price: of usages over time, at the best bound.
        known: the choices of the last linear program.
    """

    problem: Problem
    demands: Sequence[Demand] = ()
    limits: Sequence[float] = ()
    bound: float = 0.0
    price: np.ndarray | None = None
    known: list[list[int]] = field(default_factory=list[list[int]])
    paths: Paths = field(init=False)
    memory: Limits = field(init=False)

    def __post_init__(self) -> None:
        self.paths = Paths(self.problem)
        self.memory = Limits(len(self.problem.menus), self.demands, np.array(self.limits, float))

    def play(
        self, choice: Sequence[int], rounds: int, budget: Budget, price: np.ndarray | None = None
    ) -> Iterator[tuple[list[int], float]]:
        """Raise the bound round by round from a choice, while that helps; gives each answer, and the largest sum for it:
        infinite where it does not keep to the limits.

        Args:
            price: of usages over time, to begin with.
        """
        if not self.problem.menus:
            return
        master, stall, part = Master(self.paths, self.paths.repeats, self.memory.rows), 0, 1.0
        self.known, best, dear = [list(choice)], np.zeros(()), self.memory.by_row(price)
        rounds = LIMITED if self.paths.large and self.demands else rounds
        for n in range(rounds):
            if n and budget.over():
                return
            if stall == STALL:
                if not master.even or self.paths.large or self.demands:
                    return
                master = self._uneven(self.known[:-1])  # (layers alike were a way to begin)
                stall, part = 0, 1.0
            before = master.value
            master.against(self.known[-1], self.memory.mean(self.memory.excess(self.known[-1])))
            wanted, wished = master.weights()
            if n and master.value >= before * (1 - NEW):  # nothing new so near to the best average
                part = min(1.0, 4 * part)
            now, paid = (best + part * (wanted - best), dear + part * (wished - dear)) if n else (wanted, dear)
            found, over_time = self._answer(now, paid, budget)
            stall = 0 if found.bound > self.bound * (1 + BETTER) or not n else stall + 1
            if found.bound > self.bound or not n:
                self.bound, best, dear, part = max(self.bound, found.bound), now, paid, min(MOST, 2 * part)
                self.price = over_time
            else:
                part = max(part / 2, LEAST)
            if not np.isfinite(found.objective):
                return
            self.known.append(found.choice)
            value = self.paths.largest(found.choice) if self.fits(found.choice) else np.inf
            yield found.choice, value
            if value <= self.bound * (1 + PROVED) or master.value <= self.bound * (
                1 + (ENOUGH if self.paths.large else BETTER)
            ):
                return

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether what a choice uses at least keeps to the limits."""
        return self.memory.excess(choice).max(initial=-1.0) <= 0

    def _answer(self, average: np.ndarray, price: np.ndarray, budget: Budget) -> tuple[Solution, np.ndarray]:
        """The cheapest choice by an average and prices, with a bound of all that keep to the limits; and the prices over
        time."""
        over_time = self.memory.over_time(price)
        at = Ticks.of(over_time)
        paid = [
            Factor((n,), sum((a * p for a, p in parts), np.zeros(size)))
            for n, size in enumerate(self.problem.sizes)
            if (parts := self.memory.parts(n, at))
        ]
        net = Network(self.problem.sizes, [*self.paths.factors(average), *paid])
        found = solve(net, budget.part(SOLVE), self.known[-1], quick=True, plain=True)
        worth = self.memory.worth(at)
        rounding = PRICES_ROUNDING * (abs(found.bound) + worth) if worth else 0.0
        return replace(found, bound=found.bound - worth - rounding), over_time

    def _uneven(self, known: Sequence[Sequence[int]]) -> Master:
        """Any averages against choices that are known."""
        master = Master(self.paths)
        for choice in known:
            master.against(choice)
        return master
