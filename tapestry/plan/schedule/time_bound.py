"""A certified lower bound of the simulated time, and choices that make it tight.

For any weights, the cheapest choice by the weighted sums of `paths` bounds the time of every plan. The weights are the mixed
strategy of a game against the choice: in each round the network solver answers the weights, the largest sum of its answer joins
the pool, and a linear program over all sums and answers gives new weights (Kelley's cutting planes, halfway to the best weights
so far). An answer whose time on the clock is its bound is optimal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tapestry.plan.schedule.paths import Paths, Sum
from tapestry.plan.search.problem import Problem
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.network import Demand, Network, solve
from tapestry.plan.solver.pairs import PROVED


@dataclass(slots=True)
class Game:
    """Sums with weights against choices.

    Attributes:
        demands, limits: usages that every choice keeps to.
        bound: the best so far, in seconds.
    """

    problem: Problem
    demands: Sequence[Demand] = ()
    limits: Sequence[float] = ()
    bound: float = 0.0
    paths: Paths = field(init=False)
    sums: list[Sum] = field(default_factory=list[Sum])
    seen: list[list[int]] = field(default_factory=list[list[int]])
    best: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        self.paths = Paths(self.problem)

    def play(self, choice: Sequence[int], rounds: int, budget: Budget) -> Iterator[list[int]]:
        """Raise the bound round by round from a choice, while that helps; gives each round's choice."""
        start = list(choice)
        value = self.met(start)
        for n in range(rounds):
            if n and budget.over():
                return
            weights = self.weights()
            net = Network(self.problem.sizes, self.paths.factors(self.sums, weights), self.demands, self.limits)
            found = solve(net, budget, start, quick=True)
            if found.bound > self.bound or not n:
                self.bound, self.best = max(self.bound, found.bound), weights
            if not np.isfinite(found.objective):
                return
            yield found.choice
            value = self.met(found.choice)
            if value <= self.bound * (1 + PROVED) or len(self.sums) == len(weights):
                return

    def met(self, choice: list[int]) -> float:
        """Remember a choice, and the largest sum for it."""
        value, largest = self.paths.largest(choice)
        self.seen += [] if choice in self.seen else [choice]
        self.sums += [] if largest in self.sums else [largest]
        return value

    def weights(self) -> np.ndarray:
        """Weights of the sums for the next round; they add up to 1."""
        if len(self.sums) == 1:
            return np.ones(1)
        rows = np.array([[self.paths.cost(s, c) for s in self.sums] for c in self.seen])
        new, old = _mixed(rows), np.zeros(len(self.sums))
        old[: len(self.best)] = self.best
        return (new + old) / 2 if len(self.best) else new


def _mixed(rows: np.ndarray) -> np.ndarray:
    """The weights ``w >= 0`` of sum 1 that maximise the least of ``rows @ w``."""
    import highspy

    count, n = rows.shape
    scale = max(float(np.abs(rows).max()), 1e-300)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = n + 1, count + 1
    lp.col_cost_ = np.append(np.zeros(n), -1.0)
    lp.col_lower_, lp.col_upper_ = np.zeros(n + 1), np.full(n + 1, highspy.kHighsInf)
    lp.row_lower_, lp.row_upper_ = np.append(np.zeros(count), 1.0), np.append(np.full(count, highspy.kHighsInf), 1.0)
    matrix = lp.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.arange(count + 2) * (n + 1)
    matrix.index_ = np.concatenate([np.arange(n + 1)] * (count + 1))
    matrix.value_ = np.vstack([np.hstack([rows / scale, -np.ones((count, 1))]), np.append(np.ones(n), 0.0)]).ravel()
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.passModel(lp)
    highs.run()
    found: np.ndarray = np.maximum(np.array(highs.getSolution().col_value)[:n], 0.0)
    total = float(found.sum())
    return found / total if total > 0 else np.full(n, 1 / n)
