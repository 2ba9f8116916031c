"""The local polytope of a network in HiGHS, with usage rows only for the times that turn out to matter.

A variable for each label and for each allowed joint choice, tied by marginalisation rows (Schlesinger 1976; Werner 2007);
a row for the usage at a time is added when a solution breaks it (cutting planes: Dantzig, Fulkerson and Johnson 1954).
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.pairs import PROVED, Multipliers, Pairs, largest

PEAKS = 5  # usage rows added at a time
TIGHT = 1e-7  # how much HiGHS may pass a limit, as a part of it
ITERATION = 50_000  # units of a simplex iteration, and more by nonzeros: in a linear program, and in an integer one
LINEAR, INTEGER = 0.5, 6.0
ROUND = 1500  # units for each nonzero from one of HiGHS's questions whether to end an integer program to the next


class Solver(highspy.Highs):
    """HiGHS on one thread. It is silent before `highspy.Highs` asks anything of it: 1.16 then greets on standard output."""

    def enableCallbacks(self) -> None:
        """As ever, but without a word."""
        self.setOptionValue("output_flag", False)
        self.setOptionValue("threads", 1)
        super().enableCallbacks()


def run_highs(highs: highspy.Highs, budget: Budget, *, integer: bool) -> None:
    """Run HiGHS until the budget is over; callbacks let Python handle signals meanwhile, and end it in milliseconds.

    They come at the same points of the same program, and only they look at the budget: HiGHS itself is told of no time.
    """
    asked, size = 0, highs.getNumNz()

    def ask(event: highspy.highs.HighsCallbackEvent) -> None:
        nonlocal asked
        asked += 1
        count = max(0, event.data_out.simplex_iteration_count)
        if budget.over(ROUND * size * asked if integer else count * (ITERATION + LINEAR * size)):
            event.interrupt()

    callbacks = (highs.cbSimplexInterrupt, highs.cbIpmInterrupt, highs.cbMipInterrupt)
    for callback in callbacks:
        callback.subscribe(ask)
    try:
        highs.run()
    finally:
        for callback in callbacks:
            callback.unsubscribe(ask)
        done = max(0, highs.getInfo().simplex_iteration_count)
        budget.spend(ROUND * size + done * (ITERATION + (INTEGER if integer else LINEAR) * size))


@dataclass(frozen=True, slots=True)
class Point:
    """A solution of the relaxation or of the integer program.

    Attributes:
        weight: of every label.
        bound: that HiGHS claims.
        proved: whether it ended by itself.
        multipliers: of the relaxation.
    """

    weight: np.ndarray
    bound: float
    proved: bool
    multipliers: Multipliers | None = None


class Program:
    """Rows and columns of a network."""

    def __init__(self, net: Pairs) -> None:
        self.net = net
        self.times: list[int] = []
        self.labels = np.flatnonzero(net.alive())
        sa, of_a, sb, of_b = net.slots()
        alive = net.alive()
        self.slots = np.flatnonzero(np.concatenate([alive[of_a], alive[of_b]]))
        self.split, self.total = len(of_a), len(of_a) + len(of_b)
        column = np.full(len(net.unary), -1)
        column[self.labels] = np.arange(len(self.labels))
        nodes = net.nodes()
        row = np.zeros(len(net.gone), np.int64)
        row[nodes] = np.arange(len(nodes))
        slot_row = np.zeros(self.total, np.int64)
        slot_row[self.slots] = len(nodes) + np.arange(len(self.slots))
        pair = len(self.labels) + np.arange(len(net.a))
        rows = [row[net.node[self.labels]], slot_row[self.slots], slot_row[sa], slot_row[self.split + sb]]
        columns = [np.arange(len(self.labels)), column[np.concatenate([of_a, of_b])[self.slots]], pair, pair]
        values = [np.ones(len(self.labels)), -np.ones(len(self.slots)), np.ones(len(pair)), np.ones(len(pair))]
        self.nodes, self.column = len(nodes), column
        self.cost = np.concatenate([net.unary[self.labels], net.cost])
        self.scale = max(largest(self.cost) / 1e6, 1e-12)
        self.highs = Solver()
        self._pass(np.concatenate(rows), np.concatenate(columns), np.concatenate(values))

    def _pass(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        order = np.lexsort((rows, columns))
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), self.nodes + len(self.slots)
        lp.col_cost_ = self.cost / self.scale
        lp.col_lower_, lp.col_upper_ = np.zeros(len(self.cost)), np.ones(len(self.cost))
        right = np.concatenate([np.ones(self.nodes), np.zeros(len(self.slots))])
        lp.row_lower_, lp.row_upper_ = right, right
        matrix = lp.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kColwise
        matrix.start_ = np.searchsorted(columns[order], np.arange(len(self.cost) + 1))
        matrix.index_, matrix.value_ = rows[order], values[order]
        self.highs.passModel(lp)

    def _limit(self, t: int, most: float = 100.0) -> None:
        """A row for the usage at a time, in percent of the limit."""
        use = self.net.usage
        now = (use.lo <= t) & (t < use.hi)
        amount = np.bincount(use.label[now], use.amount[now], len(self.net.unary))
        at = np.flatnonzero((amount > 0) & self.net.alive())
        unit = max(float(use.limit[t]), 1e-12) / 100.0
        self.highs.addRow(-np.inf, most, len(at), self.column[at].astype(np.int32), amount[at] / unit)

    def add_rows(self, weight: np.ndarray) -> int:
        """Add usage rows at the highest peaks above the limit; how many."""
        use = self.net.usage
        if not len(use.limit):
            return 0
        over = use.of(weight) / np.maximum(use.limit, 1e-12) - 1.0
        near = max(10, len(over) // 50)
        added = 0
        for _ in range(PEAKS):
            t = int(over.argmax())
            if over[t] <= TIGHT or t in self.times:
                break
            self.times.append(t)
            self._limit(t)
            over[max(0, t - near) : t + near] = -np.inf
            added += 1
        return added

    def sharpen(self, weight: np.ndarray) -> bool:
        """Lower a limit that a choice passes by less than HiGHS can see; from then on its bounds hold for less than all."""
        use = self.net.usage
        over = use.of(weight) - use.limit
        if not len(over) or over.max() <= 0:
            return False
        self._limit(int(over.argmax()), 100.0 * (1 - 2 * TIGHT))
        return True

    def relax(self, budget: Budget) -> Point | None:
        """Solve the linear relaxation, with usage rows added until it keeps to the limits."""
        while True:
            run_highs(self.highs, budget, integer=False)
            if self.highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                return None
            point = self._point()
            if not self.add_rows(point.weight):
                return point

    def infeasible(self) -> bool:
        """Whether the last run proved that the rows contradict each other."""
        return self.highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible

    def _point(self) -> Point:
        solution = self.highs.getSolution()
        weight = np.zeros(len(self.net.unary))
        weight[self.labels] = np.array(solution.col_value)[: len(self.labels)]
        dual = np.array(solution.row_dual) * self.scale
        slots = np.zeros(self.total)
        slots[self.slots] = -dual[self.nodes : self.nodes + len(self.slots)]
        price = np.zeros(len(self.net.usage.limit))
        for k, t in enumerate(self.times):
            unit = max(float(self.net.usage.limit[t]), 1e-12) / 100.0
            price[t] += max(0.0, -float(dual[self.nodes + len(self.slots) + k])) / unit
        value = self.highs.getInfo().objective_function_value * self.scale + self.net.constant
        return Point(weight, value, True, Multipliers(price, slots[: self.split], slots[self.split :]))

    def integer(self, budget: Budget, start: np.ndarray | None = None, nodes: int | None = None) -> Point | None:
        """Solve the integer program; None when it found nothing within the budget.

        The usage rows present are kept to; add more (`add_rows`) and solve again when others are broken.
        """
        highs = self.highs
        count = len(self.labels)
        kinds = np.full(count, int(highspy.HighsVarType.kInteger), np.uint8)
        highs.changeColsIntegrality(count, np.arange(count, dtype=np.int32), kinds)
        highs.setOptionValue("mip_rel_gap", PROVED)
        if nodes is not None:
            highs.setOptionValue("mip_max_nodes", nodes)
        if start is not None:
            given = highspy.HighsSolution()
            given.col_value = self._values(start)
            highs.setSolution(given)
        run_highs(highs, budget, integer=True)
        info = highs.getInfo()
        proved = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
        bound = info.mip_dual_bound * self.scale + self.net.constant
        weight = np.zeros(len(self.net.unary))
        if info.primal_solution_status == 2:
            weight[self.labels] = np.round(np.array(highs.getSolution().col_value)[:count])
            return Point(weight, bound, proved)
        return None

    def _values(self, label: np.ndarray) -> np.ndarray:
        """Columns of a choice (a label for every node that is left)."""
        chosen = np.zeros(len(self.net.unary), bool)
        chosen[label] = True
        return np.concatenate([chosen[self.labels], chosen[self.net.a] & chosen[self.net.b]]).astype(float)
