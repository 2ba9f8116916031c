"""Limits by prices that equal times share: a bound and choices for networks whose layers repeat.

What is used at a time costs a price (Lagrangian duality: Geoffrion 1974); times at which the same is alive have one price,
and then equal nodes stay equal, so that the cheapest choice at given prices is found exactly in little time
(`plan.solver.elimination`). Prices sum exactly, in multiples of a power of two. At the best prices two choices cost the
same and lie on both sides of the limit; taking one for the first nodes and the other for the rest gives what lies between.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.dominance import PairTable, undominated
from tapestry.plan.solver.elimination import minimise
from tapestry.plan.solver.lagrange import Prices
from tapestry.plan.solver.pairs import Solution, proved

LARGEST = 10_000_000  # cells of one table
ROUNDS = 60  # of better prices, and of growing ones
PRICES_CLOSE = 1e-6  # of the bound: what the model promises at least where another round is worth it
WARM = 0.02  # of the bound: how far the first prices may move that an earlier search left
STEP, PRICES_GROWTH = 0.002, 1.15  # of the bound, and of a price: how prices grow until a choice keeps to the limits
SPREADS = (0.1, 0.02)  # of the best prices: between those of a choice that uses much and of one that uses little
WORTH = 2e-3  # of the cost: how near a choice is sought between two others
PRICES_ROUNDING = 1e-12  # of the sums: taken from bounds


@dataclass(frozen=True, slots=True)
class Demand:
    """What a node uses at times ``lo <= t < hi``: ``amounts[choice]``, never negative."""

    node: int
    lo: int
    hi: int
    amounts: np.ndarray


@dataclass(frozen=True, slots=True)
class Ticks:
    """Prices over time in whole numbers of ``tick``, added up from the first time."""

    total: np.ndarray
    tick: float

    @staticmethod
    def of(price: np.ndarray) -> Ticks:
        """Rounded to 50 bits of their sum, so that sums and products by them are the same wherever they stand."""
        tick = 2.0 ** (int(np.frexp(max(float(price.sum()), 1e-300))[1]) - 50)
        return Ticks(np.concatenate([[0], np.cumsum(np.rint(price / tick).astype(np.int64))]), tick)


@dataclass(slots=True)
class Limits:
    """What the choices of nodes use over time, the most that they may, and prices of it that equal times share.

    Attributes:
        row: of every time, the number of the times that share its price.
        of: what each node uses, equal amounts being one array.
    """

    nodes: int
    uses: Sequence[Demand]
    most: np.ndarray
    row: np.ndarray = field(init=False)
    of: list[list[tuple[np.ndarray, int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        known: dict[bytes, np.ndarray] = {}
        self.of = [[] for _ in range(self.nodes)]
        code = np.zeros(len(self.most) + 1, np.int64)
        for d in self.uses:
            amounts = known.setdefault(d.amounts.tobytes(), d.amounts)
            self.of[d.node].append((amounts, d.lo, d.hi))
            mark = zlib.crc32(
                amounts.tobytes()
            )  # (where different uses add up to the same, times share a price: no bound minds)
            code[d.lo] += mark
            code[d.hi] -= mark
        alike: dict[tuple[int, float], int] = {}
        self.row = np.array(
            [alike.setdefault(k, len(alike)) for k in zip(np.cumsum(code)[:-1].tolist(), self.most.tolist())], int
        )

    @property
    def rows(self) -> int:
        """Prices that may differ."""
        return int(self.row.max(initial=-1)) + 1

    def excess(self, choice: Sequence[int]) -> np.ndarray:
        """Over time, usage above the limit as a part of the limit."""
        change = np.zeros(len(self.most) + 1)
        for d in self.uses:
            change[d.lo] += d.amounts[choice[d.node]]
            change[d.hi] -= d.amounts[choice[d.node]]
        return (np.cumsum(change)[:-1] - self.most) / np.maximum(self.most, 1.0)

    def mean(self, over: np.ndarray) -> np.ndarray:
        """By row, the mean of what is given over time."""
        return np.bincount(self.row, over) / np.bincount(self.row)

    def over_time(self, price: np.ndarray) -> np.ndarray:
        """The price of every time, from those of rows per limit."""
        return (price / np.bincount(self.row, minlength=len(price)))[self.row] / np.maximum(self.most, 1.0)

    def by_row(self, price: np.ndarray | None) -> np.ndarray:
        """Prices of rows per limit, from those of every time; none where there are none."""
        out = np.zeros(self.rows)
        if price is not None and len(price) == len(self.row):
            np.add.at(out, self.row, price * np.maximum(self.most, 1.0))
        return out

    def parts(self, node: int, at: Ticks) -> list[tuple[np.ndarray, float]]:
        """What a node uses, and the price of it."""
        return [(a, k * at.tick) for a, lo, hi in self.of[node] if (k := int(at.total[hi] - at.total[lo]))]

    def worth(self, at: Ticks) -> float:
        """Of the limits at prices."""
        return float((np.diff(at.total) * at.tick * self.most).sum())


@dataclass(slots=True)
class SharedPrices:
    """A network of nodes and tables, what its choices use, and the limits over time.

    Attributes:
        shared: the same limits, with prices that equal times share.
        cost, choice, bound: the best so far.
        price: the best one over time.
        unary, pairs: costs of single nodes, equal ones being one array, and of groups.
        reduce: whether choices that others beat go before each elimination: without that tables are too large.
        once: whether it is given up where tables are too large.
        near: part of the cost up to which a choice within the limits is near enough.
        spent: units of work not yet counted.
    """

    sizes: Sequence[int]
    tables: Sequence[PairTable]
    uses: Sequence[Demand]
    limits: np.ndarray
    shared: Limits = field(init=False)
    cost: float = np.inf
    choice: list[int] = field(default_factory=list[int])
    bound: float = -np.inf
    price: np.ndarray = field(default_factory=lambda: np.zeros(0))
    unary: list[np.ndarray] = field(init=False)
    pairs: list[PairTable] = field(init=False)
    reduce: bool = False
    once: bool = False
    near: float = WORTH
    spent: float = 0.0

    def __post_init__(self) -> None:
        known: dict[bytes, np.ndarray] = {}
        self.unary = [np.zeros(n) for n in self.sizes]
        self.pairs = [t for t in self.tables if len(t[0]) > 1]
        for (n,), table in (t for t in self.tables if len(t[0]) == 1):
            self.unary[n] = self.unary[n] + table
        self.unary = [known.setdefault(u.tobytes(), u) for u in self.unary]
        self.shared = Limits(len(self.sizes), self.uses, self.limits)

    def least(self, prices: Sequence[np.ndarray], change: int = 0) -> tuple[float, list[int]] | None:
        """The cheapest choice at prices over time, of the first ones before node ``change`` and of the last ones from there on.

        Returns:
            Its cost with what it uses, and the choice; None where that takes too long.
        """
        made: dict[tuple[object, ...], np.ndarray] = {}
        ticks = [Ticks.of(p) for p in prices]
        tables = list(self.pairs)
        for n in range(len(self.sizes)):
            parts = self.shared.parts(n, ticks[0 if n < change else -1])
            key = (id(self.unary[n]), *((id(a), price) for a, price in parts))
            if key not in made:
                made[key] = self.unary[n] + sum(a * price for a, price in parts)
            tables.append(((n,), made[key]))
        self.spent += 30_000.0 * len(tables)
        found = None if self.reduce else minimise(self.sizes, tables, LARGEST)
        if found:
            self.spent += 6.0 * found[2]
            return found[0], found[1]
        if self.once:
            return None
        self.reduce = True
        fewer = undominated(self.sizes, tables)
        if fewer is None:
            return None
        known: dict[bytes, np.ndarray] = {}
        tables = [(n, known.setdefault(t.tobytes(), t) if len(n) == 1 else t) for n, t in fewer.restrict(tables)]
        found = minimise(fewer.sizes, tables, LARGEST)
        self.spent += 20.0 * sum(t.size for _, t in tables)
        return (found[0], fewer.restore(found[1])) if found else None

    def search(self, price: np.ndarray | None, gap: float, budget: Budget) -> Solution | None:
        """The best choice and bound, exact without limits; None where elimination takes too long.

        Args:
            price: over time, to begin with.
        """
        begin = self.shared.by_row(price)
        state = self.climb(begin, gap, budget)
        if state is None:
            return None
        self.price = self.shared.over_time(state.best_price)
        if self.bound < np.inf and not proved(self.cost, self.bound, max(gap, self.near)) and len(begin):
            self.keep(state, gap, budget)
        return Solution(self.choice, self.cost, min(self.bound, self.cost), self.price)

    def evaluate(self, choice: Sequence[int]) -> float:
        """Cost of a choice."""
        return float(sum(t[tuple(choice[n] for n in nodes)] for nodes, t in self.tables))

    def offer(self, choice: list[int]) -> tuple[float, np.ndarray]:
        """Keep a choice within the limits if it is the best one; its cost and its excess over time."""
        cost, over = self.evaluate(choice), self.shared.excess(choice)
        if over.max(initial=0.0) <= 0 and cost < self.cost:
            self.cost, self.choice = cost, choice
        return cost, over

    def climb(self, price: np.ndarray, gap: float, budget: Budget) -> Prices | None:
        """Better prices until none is much better, a choice is near enough, or the budget is over; None: it takes too long."""
        state, shared = Prices(price), self.shared
        state.best_price = price
        warm = bool(price.any())
        for _ in range(ROUNDS):
            now = shared.over_time(state.price)
            found = self.least([now])
            budget.spend(self.spent)
            self.spent = 0.0
            if found is None:
                return None
            if found[0] == np.inf:
                self.bound = np.inf  # no choice is allowed at all
                break
            worth = shared.worth(Ticks.of(now))
            bound = found[0] - worth - (PRICES_ROUNDING * (abs(found[0]) + worth) if self.uses else 0.0)
            cost, over = self.offer(found[1])
            state.judge(bound, cost)
            state.box = min(state.box, WARM * abs(bound)) if warm else state.box
            warm = False
            self.bound = max(self.bound, bound)
            mean = shared.mean(over)
            state.cut(cost, mean)
            state.watch(np.maximum(mean, _most(over, shared.row, len(mean))))
            if budget.over() or proved(self.cost, self.bound, gap) or not state.active:
                break
            state.step(mean, self.cost)
            if state.promise() <= PRICES_CLOSE * abs(state.best):
                break
        return state

    def keep(self, state: Prices, gap: float, budget: Budget) -> None:
        """Choices within the limits: prices grow until one is, then between the last two prices, and between their choices."""
        for spread in SPREADS:
            high, step = state.best_price * (1 + spread), STEP * max(abs(state.best), 1e-300)
            for _ in range(ROUNDS):
                found = self.least([self.shared.over_time(high)])
                over = self.offer(found[1])[1] if found else np.zeros(0)
                if found is None or over.max(initial=0.0) <= 0:
                    break
                if budget.over():
                    return
                high = np.where(_most(over, self.shared.row, len(high)) > 0, high * PRICES_GROWTH + step, high)
                step *= PRICES_GROWTH
            low = self.shared.over_time(state.best_price * (1 - spread))
            self._between(low, self.shared.over_time(high), max(gap, self.near), budget)
            if proved(self.cost, self.bound, max(gap, self.near)):
                return

    def _between(self, low: np.ndarray, high: np.ndarray, gap: float, budget: Budget) -> None:
        """As many nodes as can be at the low prices, and the rest at the high ones; from either end."""
        for pair, fits_at in (((low, high), 0), ((high, low), len(self.sizes))):
            fits, not_fits = fits_at, len(self.sizes) - fits_at
            while abs(fits - not_fits) > 1 and not budget.over() and not proved(self.cost, self.bound, gap):
                middle = (fits + not_fits) // 2
                found = self.least(pair, middle)
                inside = found is not None and self.offer(found[1])[1].max(initial=0.0) <= 0
                fits, not_fits = (middle, not_fits) if inside else (fits, middle)


def _most(values: np.ndarray, row: np.ndarray, count: int) -> np.ndarray:
    out = np.full(count, -np.inf)
    np.maximum.at(out, row, values)
    return out
