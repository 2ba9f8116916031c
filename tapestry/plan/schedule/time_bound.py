"""A certified lower bound of the simulated time, and choices that make it tight.

For any average of the sums of `paths`, the cheapest choice by it bounds the time of every plan. Where memory is limited, what
a choice uses at any prices is added, and what the limits are worth taken off (Lagrangian duality: Geoffrion 1974): then the
bound is of all plans within them. The average, with the prices, is the mixed
strategy of a game against the choice: in each round the network solver answers the average, and the best average against all
answers so far is that of the next round (Kelley's cutting planes), less of the way from the best one where that has not raised
the bound. An answer whose time on the clock is the bound is optimal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry.plan.schedule.path_weights import Master
from tapestry.plan.schedule.paths import Paths
from tapestry.plan.search.problem import Problem
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.network import Demand, Factor, Network, solve
from tapestry.plan.solver.pairs import PROVED, Solution
from tapestry.plan.solver.shared_prices import ROUNDING, Limits, Ticks

STALL = 8  # rounds without a better bound
LEAST, MOST = 1 / 16, 1 / 2  # of the way to the next average
SOLVE = 2.0 * SECOND  # for one answer
FEW = 6  # rounds where each takes seconds
NEW = 1e-6  # of the best average against all answers: less is no new answer
BETTER = 1e-4  # of the bound: less does not count


@dataclass(slots=True)
class Game:
    """Averages of sums, with prices of memory, against choices.

    Attributes:
        demands, limits: usages over time, and the most that there may be at each.
        bound: the best so far, in seconds: of every choice that keeps to the limits.
        factors: the average at the best bound, as costs of single choices and of pairs.
        price: of usages over time, at the best bound.
    """

    problem: Problem
    demands: Sequence[Demand] = ()
    limits: Sequence[float] = ()
    bound: float = 0.0
    factors: list[Factor] = field(default_factory=list[Factor])
    price: np.ndarray | None = None
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
        master, known, stall, part = Master(self.paths, self.paths.repeats, self.memory.rows), [list(choice)], 0, 1.0
        best, dear = np.zeros(()), self.memory.by_row(price)
        rounds = min(rounds, FEW) if self.paths.large else rounds
        for n in range(rounds):
            if n and budget.over():
                return
            if stall == STALL:
                if not master.even or self.paths.large or self.demands:
                    return
                master, stall, part = self._uneven(known[:-1]), 0, 1.0  # (layers alike were a way to begin)
            before = master.value
            master.against(known[-1], self.memory.mean(self.memory.excess(known[-1])))
            wanted, wished = master.weights()
            part = (
                min(1.0, 4 * part) if n and master.value >= before * (1 - NEW) else part
            )  # nothing new so near to the best average
            now, paid = (best + part * (wanted - best), dear + part * (wished - dear)) if n else (wanted, dear)
            found, factors, over_time = self._answer(now, paid, known[-1], budget)
            stall = 0 if found.bound > self.bound * (1 + BETTER) or not n else stall + 1
            if found.bound > self.bound or not n:
                self.bound, best, dear, part = max(self.bound, found.bound), now, paid, min(MOST, 2 * part)
                self.factors, self.price = factors, over_time
            else:
                part = max(part / 2, LEAST)
            if not np.isfinite(found.objective):
                return
            last = found.choice
            known.append(last)
            fits = self.memory.excess(last).max(initial=0.0) <= 0
            value = self.paths.largest(last) if fits else np.inf
            yield last, value
            if value <= self.bound * (1 + PROVED):
                return

    def _answer(
        self, average: np.ndarray, price: np.ndarray, start: Sequence[int], budget: Budget
    ) -> tuple[Solution, list[Factor], np.ndarray]:
        """The cheapest choice by an average and prices, with a bound of all that keep to the limits; the average's costs; and
        the prices over time."""
        factors, over_time = self.paths.factors(average), self.memory.over_time(price)
        at = Ticks.of(over_time)
        paid = [
            Factor((n,), sum((a * p for a, p in parts), np.zeros(size)))
            for n, size in enumerate(self.problem.sizes)
            if (parts := self.memory.parts(n, at))
        ]
        net = Network(self.problem.sizes, [*factors, *paid])
        found = solve(net, budget.part(SOLVE), start, quick=True, plain=True)
        worth = self.memory.worth(at)
        rounding = ROUNDING * (abs(found.bound) + worth) if worth else 0.0
        return replace(found, bound=found.bound - worth - rounding), factors, over_time

    def _uneven(self, known: Sequence[Sequence[int]]) -> Master:
        """Any averages against choices that are known."""
        master = Master(self.paths)
        for choice in known:
            master.against(choice)
        return master
