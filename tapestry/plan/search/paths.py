"""Sums of costs that no plan's simulated time is under: what has to happen one after another on the clock of one device.

Kernels keep the order of the graph, so on each device the kernels of one operation wait for those of the one before. A path
goes from operation to operation that way, or along a tensor from its maker to a reader, with the transfer in between; merging
counts where the next step waits for it. All merges and transfers of one device make a sum of their own, for it has one transfer
stream; where transfers and kernels share a stream, all that it does is one sum. No part of a sum is above what the clock takes
for it there, whatever is chosen. So any average of sums, too, is at most the simulated time: a flow of one unit through the
graph of arcs below, and shares of the sums of streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tapestry.ir.graph import Block, Op
from tapestry.plan.search.problem import Problem
from tapestry.plan.solver.network import Factor

LARGE = 2_000_000  # joint choices of all flows
REPEATS = 4  # operations of a kind, on average, where layers repeat


class Arc(NamedTuple):
    """A step of a path: from operation ``tail`` (-1: the start) to ``head`` (their number: the end).

    Attributes:
        flows: positions of the transfers in between, of different tensors: they follow each other on the one transfer stream.
            Those of tensors that are made later are among them: they, too, begin after the first operation's kernels.
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
        into = dict[int, list[int]]()
        for k in sorted(range(len(flows)), key=lambda k: -flows[k].maker):
            head = flows[k].reader if flows[k].reader >= 0 else count
            into.setdefault(head, []).append(k)
            through[flows[k].maker, head] = tuple(into[head])
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
