"""A certified lower bound of the simulated time, and choices that make it tight.

For any average of the sums of `paths`, the cheapest choice by it bounds the time of every plan. The average is the mixed
strategy of a game against the choice: in each round the network solver answers the average, and the best average against all
answers so far is that of the next round (Kelley's cutting planes), less of the way from the best one where that has not raised
the bound. An answer whose time on the clock is the bound is optimal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tapestry.plan.schedule.path_weights import Master
from tapestry.plan.schedule.paths import Paths
from tapestry.plan.search.problem import Problem
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.network import Demand, Network, solve
from tapestry.plan.solver.pairs import PROVED

STALL = 8  # rounds without a better bound
LEAST, MOST = 1 / 16, 1 / 2  # of the way to the next average
SOLVE = 2.0 * SECOND  # for one answer
FEW = 6  # rounds where each takes seconds
NEW = 1e-6  # of the best average against all answers: less is no new answer
BETTER = 1e-4  # of the bound: less does not count


@dataclass(slots=True)
class Game:
    """Averages of sums against choices.

    Attributes:
        demands, limits: usages that every choice keeps to.
        bound: the best so far, in seconds.
        price: of usages over time, at the best bound.
    """

    problem: Problem
    demands: Sequence[Demand] = ()
    limits: Sequence[float] = ()
    bound: float = 0.0
    price: np.ndarray | None = None
    paths: Paths = field(init=False)

    def __post_init__(self) -> None:
        self.paths = Paths(self.problem)

    def play(self, choice: Sequence[int], rounds: int, budget: Budget) -> Iterator[tuple[list[int], float]]:
        """Raise the bound round by round from a choice, while that helps; gives each answer, and the largest sum for it."""
        if not self.problem.menus:
            return
        master, known, stall, part = Master(self.paths, self.paths.repeats), [list(choice)], 0, 1.0
        best, price = np.zeros(()), None
        rounds = min(rounds, FEW) if self.paths.large else rounds
        for n in range(rounds):
            if n and budget.over():
                return
            if stall == STALL:
                if not master.even or self.paths.large or self.demands:
                    return
                master, stall, part = self._uneven(known[:-1]), 0, 1.0  # (layers alike were a way to begin)
            before = master.value
            master.against(known[-1])
            wanted = master.weights()
            part = (
                min(1.0, 4 * part) if n and master.value >= before * (1 - NEW) else part
            )  # nothing new so near to the best average
            now = best + part * (wanted - best) if n else wanted
            net = Network(self.problem.sizes, self.paths.factors(now), self.demands, self.limits)
            found = solve(net, budget.part(SOLVE), known[-1], quick=True, plain=True, price=price)
            price = found.price
            stall = 0 if found.bound > self.bound * (1 + BETTER) or not n else stall + 1
            if found.bound > self.bound or not n:
                self.bound, best, part = max(self.bound, found.bound), now, min(MOST, 2 * part)
                self.price = price
            else:
                part = max(part / 2, LEAST)
            if not np.isfinite(found.objective):
                return
            last = found.choice
            known.append(last)
            value = self.paths.largest(last)
            yield last, value
            if value <= self.bound * (1 + PROVED):
                return

    def _uneven(self, known: Sequence[Sequence[int]]) -> Master:
        """Any averages against choices that are known."""
        master = Master(self.paths)
        for choice in known:
            master.against(choice)
        return master
