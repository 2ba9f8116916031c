"""Sums of costs that no plan's simulated time is under: what has to happen one after another on the clock of one device.

Kernels keep the order of the graph, so on each device the kernels of one operation wait for those of the one before. A path
goes from operation to operation that way, or along a tensor from its maker to a reader, with the transfer in between; merging
counts where the next step waits for it. All merges and transfers of one device make a sum of their own, for it has one transfer
stream; where transfers and kernels share a stream, all that it does is one sum. Each sum counts an operation's kernels, a merge
and a tensor's transfer at most once, whatever is chosen, and each part of it is never above what the clock takes for it there.
So any average of sums, too, is at most the simulated time: Lagrangian duality with the sums as the relaxed rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tapestry.ir.graph import Block
from tapestry.plan.search.problem import Flow, Problem
from tapestry.plan.solver.network import Factor


@dataclass(frozen=True, slots=True)
class Sum:
    """One sum on one lane: positions of operations whose kernels count, of those whose merges count, and of flows."""

    lane: int
    kernels: frozenset[int]
    merges: frozenset[int]
    flows: frozenset[int]


@dataclass(slots=True)
class Paths:
    """All sums of a problem, to find the largest one for a choice, and to weigh several."""

    problem: Problem
    into: list[list[tuple[int, int]]] = field(init=False)
    leaving: list[list[int]] = field(init=False)
    waits: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        graph, flows = self.problem.graph, self.problem.flows
        makers, count = graph.producers(), len(graph.ops)
        self.into = [[(makers[t], -1) for t in dict.fromkeys(op.inputs) if t in makers] for op in graph.ops]
        self.leaving = [[] for _ in range(count)]
        self.waits = [isinstance(op, Block) and op.lowers for op in graph.ops]
        for k, f in enumerate(flows):
            if f.reader < 0:
                self.leaving[f.maker].append(k)
            else:
                self.into[f.reader].append((f.maker, k))

    def largest(self, choice: Sequence[int]) -> tuple[float, Sum]:
        """The largest sum for a choice."""
        lanes = range(len(self.problem.menus[0].own)) if self.problem.menus else ()
        found = [s for lane in lanes for s in self._sums(choice, lane)]
        return max(found, key=lambda s: s[0], default=(0.0, Sum(0, frozenset(), frozenset(), frozenset())))

    def _sums(self, choice: Sequence[int], lane: int) -> Iterator[tuple[float, Sum]]:
        every = frozenset(range(len(choice)))
        flows = frozenset(self._dearest(choice, lane))
        if self.problem.topo.overlap:
            yield self._path(choice, lane)
            all_there = Sum(lane, frozenset(), every, flows)
        else:
            all_there = Sum(lane, every, every, flows)
        yield self.cost(all_there, choice), all_there

    def _dearest(self, choice: Sequence[int], lane: int) -> Iterator[int]:
        """For each tensor the flow that takes longest: others may share its transfer."""
        best: dict[tuple[int, str], tuple[float, int]] = {}
        for k, f in enumerate(self.problem.flows):
            key, seconds = (f.maker, f.tensor), _seconds(f, choice, lane)
            if seconds > best.get(key, (0.0, 0))[0]:
                best[key] = seconds, k
        return (k for _, k in best.values())

    def _path(self, choice: Sequence[int], lane: int) -> tuple[float, Sum]:
        """The longest path, with the operations that it takes and what they wait for."""
        problem, count = self.problem, len(choice)
        stop, done = np.zeros(count), np.zeros(count)
        came = [(-1, -1, False)] * count  # (operation before, flow, whether along a tensor)
        end, last = 0.0, (-1, -1)
        for i, c in enumerate(choice):
            start, how = (stop[i - 1], (i - 1, -1, False)) if i else (0.0, (-1, -1, False))
            for m, k in self.into[i]:
                at = (done[m] if m >= 0 else 0.0) + (_seconds(problem.flows[k], choice, lane) if k >= 0 else 0.0)
                if at > start:
                    start, how = at, (m, k, True)
            menu, came[i] = problem.menus[i], how
            merging = float(menu.merging[c])
            done[i] = start + float(menu.own[lane, c]) + merging
            stop[i] = done[i] if self.waits[i] else done[i] - merging
            for k in (-1, *self.leaving[i]):
                at = done[i] + (_seconds(problem.flows[k], choice, lane) if k >= 0 else 0.0)
                if at > end:
                    end, last = at, (i, k)
        kernels, merges, flows = set[int](), set[int](), {last[1]}
        i, along = last[0], True
        while i >= 0:
            kernels.add(i)
            if along or self.waits[i]:
                merges.add(i)
            i, k, along = came[i]
            flows.add(k)
        return end, Sum(lane, frozenset(kernels), frozenset(merges), frozenset(flows - {-1}))

    def cost(self, s: Sum, choice: Sequence[int]) -> float:
        """Seconds of a sum for a choice."""
        menus = self.problem.menus
        kernels = sum(float(menus[i].own[s.lane, choice[i]]) for i in s.kernels)
        merges = sum(float(menus[i].merging[choice[i]]) for i in s.merges)
        return kernels + merges + sum(_seconds(self.problem.flows[k], choice, s.lane) for k in s.flows)

    def factors(self, sums: Sequence[Sum], weights: Sequence[float]) -> list[Factor]:
        """The weighted sums as costs of single choices and of pairs."""
        menus = self.problem.menus
        unary = [np.zeros(len(m.strategies)) for m in menus]
        pairs: dict[int, list[tuple[int, float]]] = {}
        made: dict[tuple[object, ...], np.ndarray] = {}  # (equal flows share a table: the solver works it out once)
        for s, w in zip(sums, weights, strict=True):
            for i in s.kernels:
                unary[i] += w * menus[i].own[s.lane]
            for i in s.merges:
                unary[i] += w * menus[i].merging
            for k in s.flows:
                f = self.problem.flows[k]
                if f.maker < 0:
                    unary[f.reader] += w * f.seconds[s.lane, 0]
                elif f.reader < 0:
                    unary[f.maker] += w * f.seconds[s.lane][:, 0]
                else:
                    pairs.setdefault(k, []).append((s.lane, float(w)))
        flows = self.problem.flows
        for k, parts in pairs.items():
            key = (id(flows[k].seconds), *parts)
            if key not in made:
                made[key] = sum((w * flows[k].seconds[lane] for lane, w in parts), np.zeros(flows[k].seconds.shape[1:]))
        return [
            *(Factor((i,), u) for i, u in enumerate(unary)),
            *(Factor((flows[k].maker, flows[k].reader), made[id(flows[k].seconds), *pairs[k]]) for k in sorted(pairs)),
        ]


def _seconds(f: Flow, choice: Sequence[int], lane: int) -> float:
    a, b = (choice[i] if i >= 0 else 0 for i in (f.maker, f.reader))
    return float(f.seconds[lane, a, b])
