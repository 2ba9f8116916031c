"""The best average of sums against choices that are known: a linear program over flows through the arcs.

``max v`` such that every known choice costs at least v by the average, with what it uses of limited memory at prices. Its
columns are the arcs' flows on each lane, how much each lane's streams count, which flow of a tensor counts there, and prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tapestry.plan.search.paths import Paths

if TYPE_CHECKING:
    import highspy


GRAIN = 2.0**-40  # weights of large problems are multiples of it
DEAREST = 100.0  # a price of all memory, in times of the first choice: so that the program is bounded


@dataclass(slots=True)
class Master:
    """The linear program; rows are added choice by choice.

    Attributes:
        arcs: number of arcs of a lane; none where streams are shared, for then the sum of all counts most.
        width: number of columns of a lane: arcs, the streams' sum, one for each flow.
        even: whether layers that repeat get equal weights: fewer variables, and solves that take less.
        rows: number of prices of memory.
        variable: of each column, lane after lane, and last the prices.
    """

    paths: Paths
    even: bool = False
    rows: int = 0
    arcs: int = field(init=False)
    width: int = field(init=False)
    column: np.ndarray = field(init=False)
    part: np.ndarray = field(init=False)
    variable: np.ndarray = field(init=False)
    nodes: list[tuple[np.ndarray, np.ndarray]] = field(init=False)
    solver: highspy.Highs = field(init=False)
    scale: float = 0.0
    count: int = 0  # choices
    value: float = np.inf  # of the best average against them, in seconds

    def __post_init__(self) -> None:
        overlap = self.paths.problem.topo.overlap
        self.arcs = len(self.paths.arcs) if overlap else 0
        self.width = self.arcs + 1 + len(self.paths.problem.flows)
        pairs = np.array(list(self._parts(overlap)), np.int64).reshape(-1, 2)
        self.column, self.part, self.nodes = pairs[:, 0], pairs[:, 1], self._nodes()
        own = self._alike() if self.even else np.arange(self.paths.lanes * self.width)
        self.variable = np.append(own, np.arange(self.rows) + own.max(initial=-1) + 1)
        self.solver = self._program()

    def _parts(self, overlap: bool) -> Any:
        """(column, part) of a lane: what each column counts."""
        n, count = self.paths.count, 2 * self.paths.count
        for a, (tail, head, flows, along) in enumerate(self.paths.arcs[: self.arcs]):
            if head < n:
                yield a, head
            if tail >= 0 and (along or self.paths.waits[tail]):
                yield a, n + tail
            for k in flows:
                yield a, count + k
        for i in range(n):
            yield self.arcs, n + i
            if not overlap:
                yield self.arcs, i
        for k in range(len(self.paths.problem.flows)):
            yield self.arcs + 1 + k, count + k

    def _program(self) -> highspy.Highs:
        """Columns, and the rows that make weights averages."""
        import highspy

        from tapestry.plan.solver.mip import Solver

        lanes, solver = self.paths.lanes, Solver()
        inf, total = highspy.kHighsInf, int(self.variable.max(initial=-1)) + 1
        solver.addVars(total + 1, np.zeros(total + 1), np.full(total + 1, inf))
        solver.changeColCost(total, -1.0)
        whole = [lane * self.width + a for lane in range(lanes) for a in (*self._starts(), self.arcs)]
        self._row(solver, 1.0, 1.0, whole, np.ones(len(whole)))
        for lane in range(lanes):
            first = lane * self.width
            for into, out in self.nodes:
                columns, signs = np.append(into, out) + first, np.repeat([1.0, -1.0], [len(into), len(out)])
                self._row(solver, 0.0, 0.0, columns, signs)
            for flows in self.paths.shares:
                columns = [first + self.arcs, *(first + self.arcs + 1 + k for k in flows)]
                self._row(solver, -inf, 0.0, columns, np.append(-1.0, np.ones(len(flows))))
        return solver

    def _starts(self) -> list[int]:
        return [a for a, arc in enumerate(self.paths.arcs[: self.arcs]) if arc.tail < 0]

    def _nodes(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Arcs into and out of each operation."""
        out = [(list[int](), list[int]()) for _ in range(self.paths.count if self.arcs else 0)]
        for a, arc in enumerate(self.paths.arcs[: self.arcs]):
            if arc.head < self.paths.count:
                out[arc.head][0].append(a)
            if arc.tail >= 0:
                out[arc.tail][1].append(a)
        return [(np.array(into, int), np.array(leaving, int)) for into, leaving in out]

    def against(self, choice: Sequence[int], excess: np.ndarray | None = None) -> None:
        """Add a choice; ``excess``: by price what it uses above the limit, as a part of the limit."""
        costs = self.paths.costs(choice)
        if not self.scale:
            self.scale = max(float(costs.max(initial=0.0)), 1e-300)
            most, total = DEAREST * self.paths.largest(choice) / self.scale, int(self.variable.max(initial=-1)) + 1
            for k in range(total - self.rows, total):
                self.solver.changeColBounds(k, 0.0, most)
        rows = np.stack([np.bincount(self.column, lane[self.part], self.width) for lane in costs]).ravel() / self.scale
        rows = np.append(rows, np.zeros(self.rows) if excess is None else excess)
        used = np.flatnonzero(rows)
        self.count += 1
        self._row(self.solver, 0.0, np.inf, [*used.tolist(), rows.size], np.append(rows[used], -1.0))

    def _row(
        self, solver: highspy.Highs, low: float, high: float, columns: Sequence[int] | np.ndarray, values: np.ndarray
    ) -> None:
        """A row of the program; columns are those of `width`, lane after lane, and last what is maximised."""
        if not self.even:  # each is a variable of its own
            order = np.argsort(columns, kind="stable")
            solver.addRow(low, high, len(order), np.array(columns, np.int32)[order], values[order].astype(float))
            return
        found, at = np.unique(np.append(self.variable, self.variable.max(initial=-1) + 1)[columns], return_inverse=True)
        solver.addRow(low, high, len(found), found.astype(np.int32), np.bincount(at, values, len(found)).astype(float))

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """The best average against all choices that were added, by [lane, part]: one of the sums, to the last bit; and the
        prices, in seconds for all that there is."""
        self.solver.run()
        self.value = -self.solver.getInfo().objective_function_value * self.scale
        every = np.maximum(np.array(self.solver.getSolution().col_value)[self.variable], 0.0)
        found = every[: len(every) - self.rows].reshape(self.paths.lanes, self.width)
        parts = 2 * self.paths.count + len(self.paths.problem.flows)
        average = np.stack([np.bincount(self.part, lane[self.column], parts) for lane in self._exact(found)])
        return average, every[len(every) - self.rows :] * self.scale

    def mixture(self) -> np.ndarray:
        """How much each choice counts in the best answer to all averages: the shares of a mixed strategy."""
        self.solver.run()
        dual = np.abs(np.array(self.solver.getSolution().row_dual))[-self.count :]
        return dual / max(float(dual.sum()), 1e-300)

    def _exact(self, found: np.ndarray) -> np.ndarray:
        """The same without what the program leaves of rounding: all that goes into an operation goes on from it."""
        out = np.zeros_like(found)
        starts = [*self._starts(), self.arcs]
        out[:, starts] = found[:, starts] / max(float(found[:, starts].sum()), 1e-300)
        for into, leaving in self.nodes:
            here, share = out[:, into].sum(axis=1), found[:, leaving]
            total = share.sum(axis=1, keepdims=True)
            share = np.where(total > 0, share / np.maximum(total, 1e-300), 1.0 / len(leaving))
            out[:, leaving] = here[:, None] * share
        for flows in self.paths.shares:
            at = [self.arcs + 1 + k for k in flows]
            total = found[:, at].sum(axis=1, keepdims=True)
            out[:, at] = found[:, at] * np.minimum(1.0, out[:, [self.arcs]] / np.maximum(total, 1e-300))
        if not self.even:
            return out
        return np.maximum(np.floor(out / GRAIN + 0.4) - 1.0, 0.0) * GRAIN  # (equal to the last bit, and never more)

    def _alike(self) -> np.ndarray:
        """The variable of each column, lane after lane: one for all flows that leave equal operations or move equal tensors,
        so that layers that repeat have equal weights, and the solver works them out once."""
        seconds, menus = [id(f.seconds) for f in self.paths.problem.flows], self.paths.problem.menus
        first, groups = np.arange(self.width), dict[tuple[object, ...], list[int]]()
        for i, (_, out) in enumerate(self.nodes):
            leaving: list[int] = out.tolist()
            arcs = [self.paths.arcs[a] for a in leaving]
            steps = [(a.head - i if a.head < self.paths.count else 0, a.along, *(seconds[k] for k in a.flows)) for a in arcs]
            first[leaving] = first[groups.setdefault((id(menus[i]), *steps), leaving)]
        for flows in self.paths.shares:
            columns = [self.arcs + 1 + k for k in flows]
            first[columns] = first[groups.setdefault(tuple(seconds[k] for k in flows), columns)]
        kinds, variable = np.unique(first, return_inverse=True)
        return np.concatenate([variable + lane * len(kinds) for lane in range(self.paths.lanes)])
