"""The plan that takes least on the simulated clock where each device does everything in turns: exactly, operation by operation.

Then all that the future needs to know of a prefix is when each device is free, and the choices of the operations whose tensors
are still read. Of two prefixes with the same choices there, one that is nowhere later is enough (dominance); so ties between
equal parts of a graph are counted once. A prefix goes, too, when what it took, the waiting so far, and the least average of the
rest are not below the best time known. What an operation takes is read off the clock itself, from a plan that has
the choices it hangs on: of the makers and the earlier readers of what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tapestry.ir.plan import coordinates
from tapestry.plan.schedule.marginals import over
from tapestry.plan.schedule.paths import Paths
from tapestry.plan.search.problem import Problem, lanes
from tapestry.plan.simulate import Schedule
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.elimination import AXES
from tapestry.plan.solver.pairs import PROVED

CELLS = 2_000_000  # of the tables of what is left
UNITS = 40_000.0  # of work for one prefix

Step = tuple[np.ndarray, np.ndarray]
"""Seconds by device, 0 where it takes no part, and the devices that begin together, -1 there."""
Table = tuple[tuple[int, ...], np.ndarray]


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Choices so far, when each device is free, what it worked, and the average of that."""

    choice: tuple[int, ...]
    free: np.ndarray
    busy: np.ndarray
    average: float


@dataclass(slots=True)
class Prefixes:
    """A search over prefixes of choices.

    Attributes:
        kept: choices of each operation that are looked at; no other is in a plan below ``best``.
        weights: an average of sums, by [lane, part].
        clock: the schedule of a choice.
        hangs: by operation, those before it whose choices decide what it takes; last of all what brings outputs to their end.
        alive: by operation, those before it whose choices still count.
    """

    problem: Problem
    kept: Sequence[np.ndarray]
    weights: np.ndarray
    clock: Callable[[Sequence[int]], Schedule]
    best: float
    budget: Budget
    hangs: list[tuple[int, ...]] = field(init=False)
    alive: list[tuple[int, ...]] = field(init=False)
    took: dict[tuple[int, tuple[int, ...]], list[Step]] = field(default_factory=dict[tuple[int, tuple[int, ...]], list[Step]])

    def __post_init__(self) -> None:
        graph, count = self.problem.graph, len(self.problem.graph.ops)
        makers, readers = graph.producers(), graph.consumers()
        self.hangs = []
        for i in range(count + 1):
            names = graph.ops[i].inputs if i < count else graph.outputs
            near = {j for t in names for j in (makers.get(t, -1), *readers.get(t, ())) if 0 <= j < i}
            self.hangs.append(tuple(sorted(near)))
        self.alive = [tuple(sorted({j for h in self.hangs[i:] for j in h if j < i})) for i in range(count + 1)]

    def search(self, begin: Sequence[int]) -> tuple[float, tuple[int, ...] | None]:
        """(least seconds of all plans among the kept choices, or ``best``; the choice, if it is below that). Where the work
        ends first: a bound, and none.

        Args:
            begin: any choice of those kept.
        """
        tables = [(f.nodes, f.table) for f in Paths(self.problem).factors(self.weights)]
        rest = self.rest(tables)
        if rest is None:
            return -np.inf, None
        devices = len(coordinates(self.problem.topo.mesh))
        states, least = [_Prefix((), np.zeros(devices), np.zeros(devices), 0.0)], -np.inf
        for i in range(len(self.problem.menus)):
            own = [t for t in tables if max(t[0]) == i]
            new: dict[tuple[int, ...], list[_Prefix]] = {}
            found = [(self.least(p, rest[i + 1]), p) for s in states for p in self.longer(s, i, own, begin)]
            for f, p in sorted(found, key=lambda x: (x[0], x[1].choice)):
                if f < self.best * (1 - PROVED):
                    _keep(new.setdefault(tuple(p.choice[j] for j in self.alive[i + 1]), []), p)
            states = [p for same in new.values() for p in same]
            least = max(least, min((self.least(p, rest[i + 1]) for p in states), default=self.best))
            if self.budget.over():
                return least, None
        ends = [(float(self.after(s, len(self.problem.menus), begin)[0].max()), s.choice) for s in states]
        seconds, choice = min(ends, default=(self.best, ()))
        return (seconds, choice) if seconds < self.best * (1 - PROVED) else (self.best, None)

    def least(self, p: _Prefix, rest: Sequence[Table]) -> float:
        """Seconds that no plan with a prefix is under."""
        at = lanes(self.problem.topo)
        waited = float(self.weights[:, 0] @ (p.free - p.busy)[at])  # (a lane's sum has one weight)
        left = sum(float(t[tuple(p.choice[n] for n in nodes)]) for nodes, t in rest)
        return max(p.average + waited + left, float(p.free.max()))

    def longer(self, p: _Prefix, i: int, own: Sequence[Table], begin: Sequence[int]) -> list[_Prefix]:
        """A prefix with every choice of the next operation."""
        out: list[_Prefix] = []
        for c in self.kept[i].tolist():
            choice = (*p.choice, c)
            self.budget.spend(UNITS)
            free, busy = self.after(p, i, begin, choice)
            average = p.average + sum(float(t[tuple(choice[n] for n in nodes)]) for nodes, t in own)
            out.append(_Prefix(choice, free, busy, average))
        return out

    def after(self, p: _Prefix, i: int, begin: Sequence[int], choice: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
        """When each device is free once an operation is done (with the outputs where they must end, after the last)."""
        choice, free, busy = choice or p.choice, p.free, p.busy
        key = i, tuple(choice[j] for j in (*self.hangs[i], *([i] if i < len(self.problem.menus) else [])))
        if key not in self.took:
            self.look(choice + tuple(begin[len(choice) :]))
        for seconds, groups in self.took[key]:
            takes = groups >= 0
            start = np.zeros(len(free))
            np.maximum.at(start, groups[takes], free[takes])
            free, busy = np.where(takes, start[groups] + seconds, free), busy + seconds
        return free, busy

    def look(self, choice: Sequence[int]) -> None:
        """Read off the clock what each operation takes where these are the choices."""
        timed, count = self.clock(choice), len(self.problem.menus)
        self.budget.spend(self.problem.lowering)
        steps: list[list[Step]] = [[] for _ in range(count + 1)]
        for t in timed.timed:
            groups = np.where(np.isnan(t.took), -1, t.groups)
            steps[count if t.op is None else t.op].append((np.nan_to_num(t.took), groups))
        for i, mine in enumerate(steps):
            self.took[i, tuple(choice[j] for j in (*self.hangs[i], *([i] if i < count else [])))] = mine

    def rest(self, tables: Sequence[Table]) -> list[list[Table]] | None:
        """By operation, tables whose sum is the least average of it and all after it; None where they are too large."""
        sizes, left, out = self.problem.sizes, list[Table](), [list[Table]()]
        for i in range(len(sizes) - 1, -1, -1):
            mine = [t for t in (*tables, *left) if max(t[0], default=-1) == i]
            scope = tuple(sorted({n for t in mine for n in t[0]}))
            if prod(sizes[n] for n in scope) > CELLS or len(scope) > AXES:
                return None
            total = sum((over(t, s, scope, sizes) for s, t in mine), np.zeros([sizes[n] for n in scope]))
            left = [t for t in left if i not in t[0]] + [(scope[:-1], total[..., self.kept[i]].min(axis=-1))]
            out.append(left)
        return out[::-1]


def _keep(same: list[_Prefix], p: _Prefix) -> None:
    """Take in a prefix unless another one is nowhere later; those that it makes needless go."""
    if not any((q.free <= p.free).all() for q in same):
        same[:] = [q for q in same if not (p.free <= q.free).all()] + [p]
