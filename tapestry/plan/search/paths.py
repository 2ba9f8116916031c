"""Sums of costs that no plan's simulated time is under: what has to happen one after another on the clock of one device.

Kernels keep the order of the graph, so on each device the kernels of one operation wait for those of the one before. A path
goes from operation to operation that way, or along a tensor from its maker to a reader, with the transfer in between; merging
counts where the next step waits for it. All merges and transfers of one device make a sum of their own, for it has one transfer
stream; where transfers and kernels share a stream, all that it does is one sum. No part of a sum is above what the clock takes
for it there, whatever is chosen. So any average of sums, too, is at most the simulated time: a flow of one unit through the
graph of arcs below, and shares of the sums of streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tapestry.ir.graph import Block, Op
from tapestry.plan.search.problem import Problem
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.elimination import AXES, PairTable
from tapestry.plan.solver.lagrange import PRICES_ROUNDING, Demand, Limits, Ticks
from tapestry.plan.solver.network import Factor, Network, solve
from tapestry.plan.solver.pairs import PROVED, Solution

if TYPE_CHECKING:
    import highspy


LARGE = 2_000_000  # joint choices of all flows
REPEATS = 4  # operations of a kind, on average, where layers repeat


class Arc(NamedTuple):
    """A step of a path: from operation ``tail`` (-1: the start) to ``head`` (their number: the end).

    Attributes:
        flows: positions of the transfers in between, of different tensors: they follow each other on the one transfer stream.
        along: whether it waits for all of the first operation, merging included: for what the second one's first kernel reads.
    """

    tail: int
    head: int
    flows: tuple[int, ...]
    along: bool


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of several tables side by side, those that are one once: ``flat[:, begin[k] + column]`` is of table k."""

    flat: np.ndarray
    begin: np.ndarray

    @staticmethod
    def of(tables: Sequence[np.ndarray], rows: int) -> Lookup:
        """Of tables of so many rows; equal ones should be one array."""
        places: dict[int, int] = {}
        kept, begin, end = list[np.ndarray](), list[int](), 0
        for t in tables:
            if id(t) not in places:
                places[id(t)], end = end, end + t.size // rows
                kept.append(t.reshape(rows, -1))
            begin.append(places[id(t)])
        return Lookup(np.concatenate([np.zeros((rows, 0)), *kept], axis=1), np.array(begin, int))

    def at(self, columns: np.ndarray) -> np.ndarray:
        """[row, table]: one column of each."""
        return self.flat[:, self.begin + columns]


@dataclass(slots=True)
class Paths:
    """The arcs of a problem, and costs by part: for each lane all kernels, all merges, all flows.

    Attributes:
        arcs: sorted by where they go.
        shares: of each tensor that moves its flows, of which a stream's sum counts one.
    """

    problem: Problem
    arcs: list[Arc] = field(init=False)
    shares: list[list[int]] = field(init=False)
    waits: np.ndarray = field(init=False)
    own: Lookup = field(init=False)
    merging: Lookup = field(init=False)
    moved: Lookup = field(init=False)
    ends: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        graph, flows, count = self.problem.graph, self.problem.flows, self.count
        makers = graph.producers()
        through: dict[tuple[int, int], tuple[int, ...]] = {(i, count): () for i in range(count)}
        first = {(makers[t], i) for i, op in enumerate(graph.ops) for t in _first_read(op) if t in makers}
        through |= dict.fromkeys(sorted(first), ())
        for k, f in enumerate(flows):
            ends = f.maker, f.reader if f.reader >= 0 else count
            through[ends] = (*through.get(ends, ()), k)
        arcs = [Arc(i - 1, i, (), False) for i in range(count)]
        arcs += [Arc(*ends, ks, ends in first or ends[1] == count) for ends, ks in through.items()]
        self.arcs = sorted(arcs, key=lambda a: (a.head, a.tail, a.along))
        self.waits = np.array([isinstance(op, Block) and op.lowers for op in graph.ops], bool)
        tensors: dict[tuple[int, str], list[int]] = {}
        for k, f in enumerate(flows):
            tensors.setdefault((f.maker, f.tensor), []).append(k)
        self.shares = list(tensors.values())
        menus = self.problem.menus
        self.own, self.merging = Lookup.of([m.own for m in menus], self.lanes), Lookup.of([m.merging for m in menus], 1)
        self.moved = Lookup.of([f.seconds for f in flows], self.lanes)
        self.ends = np.array([(f.maker, f.reader, f.seconds.shape[2]) for f in flows], int).reshape(-1, 3).T

    @property
    def count(self) -> int:
        """Operations."""
        return len(self.problem.graph.ops)

    @property
    def large(self) -> bool:
        """Whether a solve takes too long unless layers that repeat have equal weights."""
        return sum(f.seconds[0].size for f in self.problem.flows) > LARGE

    @property
    def repeats(self) -> bool:
        """Whether most operations are like others, as in layers."""
        return self.large or REPEATS * self.problem.distinct <= self.count

    @property
    def lanes(self) -> int:
        """Devices whose clocks are looked at."""
        return len(self.problem.menus[0].own) if self.problem.menus else 1

    def costs(self, choice: Sequence[int]) -> np.ndarray:
        """[lane, part] seconds: kernels of each operation, its merges, each flow."""
        at = np.append(np.array(choice, int), 0)  # (the last one for ends without an operation)
        maker, reader, width = self.ends
        found = np.repeat(self.merging.at(at[:-1]), self.lanes, axis=0)
        return np.concatenate([self.own.at(at[:-1]), found, self.moved.at(at[maker] * width + at[reader])], axis=1)

    def largest(self, choice: Sequence[int]) -> float:
        """The largest sum for a choice."""
        return max((max(self._stream(c), self._path(c)) for c in self.costs(choice)), default=0.0)

    def _stream(self, costs: np.ndarray) -> float:
        """All that a lane's transfer stream does; where streams are shared, all that it does."""
        n = self.count
        moved = sum(max(costs[2 * n + k] for k in flows) for flows in self.shares)
        kernels = 0.0 if self.problem.topo.overlap else costs[:n].sum()
        return float(kernels + costs[n : 2 * n].sum() + moved)

    def _path(self, costs: np.ndarray) -> float:
        """The longest path."""
        n = self.count
        start, merging = np.zeros(n + 1), costs[n : 2 * n]
        done = costs[:n] + merging  # from an operation's start; what follows on the stream may not wait for merging
        free = np.where(self.waits, done, costs[:n])
        for tail, head, flows, along in self.arcs:
            before = start[tail] + (done if along else free)[tail] if tail >= 0 else 0.0
            start[head] = max(start[head], before + sum(costs[2 * n + k] for k in flows))
        return float(start[n])

    def factors(self, weights: np.ndarray) -> list[Factor]:
        """The weighted parts as costs of single choices and of pairs; ``weights`` are by [lane, part]."""
        menus, flows, n = self.problem.menus, self.problem.flows, self.count
        kernels, merges, moved = weights[:, :n], weights[:, n : 2 * n].sum(axis=0), weights[:, 2 * n :]
        unary = [kernels[:, i] @ m.own + merges[i] * m.merging for i, m in enumerate(menus)]
        pairs: list[Factor] = []
        made: dict[tuple[int, bytes], np.ndarray] = {}  # equal flows with equal weights share a table
        for k in np.flatnonzero(moved.any(axis=0)).tolist():
            f = flows[k]
            key = (id(f.seconds), moved[:, k].tobytes())
            if key not in made:
                made[key] = np.tensordot(moved[:, k], f.seconds, 1)
            table = made[key]
            if f.maker < 0:
                unary[f.reader] = unary[f.reader] + table[0]
            elif f.reader < 0:
                unary[f.maker] = unary[f.maker] + table[:, 0]
            else:
                pairs.append(Factor((f.maker, f.reader), table))
        return [*(Factor((i,), u) for i, u in enumerate(unary)), *pairs]


def _first_read(op: Op) -> set[str]:
    """Tensors that an operation's first kernel reads: not those that only finish what was merged."""
    if isinstance(op, Block) and op.monoid:
        return {op.reads[k].tensor for k in op.body_reads()}
    return set(op.inputs)


# The best average of sums against choices that are known: a linear program over flows through the arcs.
#
# ``max v`` such that every known choice costs at least v by the average, with what it uses of limited memory at prices. Its
# columns are the arcs' flows on each lane, how much each lane's streams count, which flow of a tensor counts there, and prices.


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


# The least cost of a network for every choice of every node, exactly: by elimination, there and back.
#
# On the way there each node goes with the sum of its tables (Bertelè and Brioschi 1972); on the way back that sum gets the
# least cost of all that went after it. What is left of it is the least cost of all choices that agree on the nodes in it.


Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Marginals:
    """A choice of the least cost, and by node and choice the least cost with it; ``cells`` that were worked out."""

    least: float
    choice: list[int]
    of: list[np.ndarray]
    cells: int


@dataclass(slots=True)
class _Bucket:
    """A node that is gone: the sum of its tables over it and its neighbours, and the buckets that some of them came from."""

    node: int
    scope: Scope
    total: np.ndarray
    parts: list[tuple[int, Scope, np.ndarray]]
    outside: np.ndarray = field(default_factory=lambda: np.zeros(()))


def marginals(sizes: Sequence[int], tables: Sequence[PairTable], most: int) -> Marginals | None:
    """The least costs; None where they would take more than ``most`` cells."""
    buckets, rest, cells = list[_Bucket](), list[tuple[int, float]](), 0
    held: dict[int, list[tuple[int, Scope, np.ndarray]]] = {n: [] for n in range(len(sizes))}
    for scope, table in tables:
        for n in scope:
            held[n].append((-1, scope, table))
    around = {n: {n}.union(*(s for _, s, _ in mine)) for n, mine in held.items()}
    takes = {n: (prod([sizes[m] for m in near]), n) for n, near in around.items()}
    while held:
        work, node = min(takes.values())
        scope = tuple(sorted(around[node]))
        cells += work
        if cells > most or len(scope) > AXES:
            return None
        parts = held.pop(node)
        del takes[node]
        total = sum((over(t, s, scope, sizes) for _, s, t in parts), np.zeros([sizes[m] for m in scope]))
        buckets.append(_Bucket(node, scope, total, [p for p in parts if p[0] >= 0]))
        others, least = tuple(m for m in scope if m != node), total.min(axis=scope.index(node))
        if not others:
            rest.append((len(buckets) - 1, float(least)))
        for m in others:
            held[m] = [p for p in held[m] if node not in p[1]] + [(len(buckets) - 1, others, least)]
            around[m] = {m}.union(*(s for _, s, _ in held[m]))
            takes[m] = prod([sizes[k] for k in around[m]]), m
    return _back(sizes, buckets, rest, cells)


def _back(sizes: Sequence[int], buckets: list[_Bucket], rest: list[tuple[int, float]], cells: int) -> Marginals:
    """The way back."""
    whole = sum(least for _, least in rest)
    choice, of = [0] * len(sizes), [np.zeros(0)] * len(sizes)
    for b, _ in rest:
        buckets[b].outside = np.array(sum(least for other, least in rest if other != b))
    for b in reversed(buckets):
        axis, others = b.scope.index(b.node), tuple(m for m in b.scope if m != b.node)
        at = tuple(slice(None) if m == b.node else choice[m] for m in b.scope)
        choice[b.node] = int(b.total[at].argmin())
        here = b.total + over(b.outside, others, b.scope, sizes)
        of[b.node] = here.min(axis=tuple(k for k in range(here.ndim) if k != axis))
        for source, scope, least in b.parts:
            away = tuple(k for k, m in enumerate(b.scope) if m not in scope)
            with np.errstate(invalid="ignore"):
                beyond: np.ndarray = np.min(here, axis=away) - least
            buckets[source].outside = np.where(np.isnan(beyond), np.inf, beyond)
    return Marginals(float(whole), choice, of, cells)


def over(table: np.ndarray, nodes: Scope, scope: Scope, sizes: Sequence[int]) -> np.ndarray:
    """A table as one that spreads over a larger scope, whose nodes are in order."""
    return table.transpose(np.argsort(nodes)).reshape([sizes[m] if m in nodes else 1 for m in scope])


# A certified lower bound of the simulated time, and choices that make it tight.
#
# For any average of the sums of `paths`, the cheapest choice by it bounds the time of every plan. Where memory is limited,
# what a choice uses at any prices is added, and what the limits are worth taken off (Lagrangian duality: Geoffrion 1974):
# then the bound is of all plans within them. The average, with the prices, is the mixed strategy of a game against the
# choice: in each round the network solver answers the average, and the best average against all answers so far is that of the
# next round (Kelley's cutting planes), less of the way from the best one where that has not raised the bound. An answer whose
# time on the clock is the bound is optimal.


STALL = 8  # rounds without a better bound
LEAST, MOST = 1 / 16, 1 / 2  # of the way to the next average
SOLVE = 2.0 * SECOND  # for one answer
FEW, LIMITED = 6, 24  # rounds where each takes seconds, without limits and with prices to be found
HALVINGS = 8  # for the part of a mixture that has to leave room
NEW = 1e-6  # of the best average against all answers: less is no new answer
BETTER = 1e-4  # of the bound: less does not count


@dataclass(slots=True)
class Game:
    """Averages of sums, with prices of memory, against choices.

    Attributes:
        demands, limits: usages over time, and the most that there may be at each.
        bound: the best so far, in seconds: of every choice that keeps to the limits.
        price: of usages over time, at the best bound.
        known: the choices of the last linear program, ``master``.
    """

    problem: Problem
    demands: Sequence[Demand] = ()
    limits: Sequence[float] = ()
    bound: float = 0.0
    price: np.ndarray | None = None
    known: list[list[int]] = field(default_factory=list[list[int]])
    master: Master | None = None
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
        self.master, self.known, best, dear = master, [list(choice)], np.zeros(()), self.memory.by_row(price)
        rounds = rounds if not self.paths.large else LIMITED if self.demands else FEW
        for n in range(rounds):
            if n and budget.over():
                return
            if stall == STALL:
                if not master.even or self.paths.large or self.demands:
                    return
                self.master = master = self._uneven(self.known[:-1])  # (layers alike were a way to begin)
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
            if value <= self.bound * (1 + PROVED):
                return

    def fits(self, choice: Sequence[int], spare: float = 0.0) -> bool:
        """Whether what a choice uses at least leaves a part of the limits."""
        return self.memory.excess(choice).max(initial=-1.0) <= -spare

    def mixed(self, spare: float) -> list[int] | None:
        """The choices of the best mixed answer side by side, each for as many operations, one after another, as it counts: in
        layers that repeat that takes about the bound. The first choice, which keeps to the limits, is taken for as many as
        it takes to leave ``spare`` of them; None where there is no such mixture."""
        if self.master is None or len(self.known) < 2:
            return None
        share = self.master.mixture()
        low, high = 0.0, 1.0
        for n in range(HALVINGS):
            middle = (low + high) / 2 if n else 0.0
            if self.fits(self._side_by_side(share, middle), spare):
                high = middle
                if not n:
                    break
            else:
                low = middle
        return self._side_by_side(share, high) if high < 1 else None

    def _side_by_side(self, share: np.ndarray, first: float) -> list[int]:
        """For each operation its choice in a mixture of which a part, besides its share, is the first choice."""
        assert self.master
        parts = (1 - first) * share
        parts[0] += first
        ends, count = np.cumsum(parts), self.paths.count
        of = np.minimum(np.searchsorted(ends, (np.arange(count) + 0.5) / count), len(ends) - 1)
        return [self.known[k][i] for i, k in enumerate(of.tolist())]

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
