"""Problems in the contest's form with hardly more edges than nodes: long chains, small trees, tight memory.

A training step: a chain of operations forwards and one backwards, each operation with its weight and some temporaries; what the
forward pass computes lives until the backward pass has used it. Beside it small trees of weights, gradients and the optimizer's
state, and single nodes. The strategies of a tensor put each axis of the mesh on one of its dimensions or on none (4, 9, 16, …
of them, as in the contest's files); an operation may also put it on what it sums over, which costs an all-reduce. Edges cost
what resharding takes, and forbid much of it; usages are bytes per device, in half-open intervals. As in the contest the limit
is 1.1 times the least that nodes need together at one time, which leaves little (more only where edges do not allow that).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

INFINITE = 10**18
MARGIN = 1.1  # of the limit over the peak of the least usages: 1 / 0.909 in all seven files at hand
SLACK = 1.02  # of the limit over the peak of a choice that edges allow: so that there is one


@dataclass(frozen=True, slots=True)
class Shape:
    """What to make.

    Attributes:
        nodes, edges: so many.
        mesh: sizes of the axes.
        extra: edges that close a cycle; the others make a forest.
        single: the part of the trees that is one node.
        seed: of the random numbers; equal shapes give equal problems.
        seconds: the time that a solver gets.
    """

    nodes: int
    edges: int
    mesh: tuple[int, ...]
    extra: int
    single: float
    seed: int
    seconds: float


SHAPES = {
    "chains": Shape(40_958, 41_606, (4, 8), 2_400, 0.1, 1, 60.0),
    "forest": Shape(62_185, 54_990, (8, 8), 1_200, 0.4, 2, 120.0),
    "pieces": Shape(60_206, 41_764, (2, 16), 600, 0.6, 3, 180.0),
}  # fmt: skip


@dataclass(slots=True)
class _Maker:
    """The problem so far; ``kind[n]`` is (bytes, rank, whether the node sums over something)."""

    mesh: tuple[int, ...]
    rng: np.random.Generator
    kind: list[tuple[int, int, bool]] = field(default_factory=list[tuple[int, int, bool]])
    intervals: list[list[int]] = field(default_factory=list[list[int]])
    pairs: list[list[int]] = field(default_factory=list[list[int]])
    tables: list[list[int]] = field(default_factory=list[list[int]])
    cache: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict[tuple[int, ...], np.ndarray])

    def node(self, size: int, rank: int, lo: int, hi: int, sums: bool = False) -> int:
        """Its number."""
        self.kind.append((size, rank, sums))
        self.intervals.append([lo, hi])
        return len(self.kind) - 1

    def strategies(self, n: int) -> list[tuple[int, ...]]:
        """For each axis of the mesh the dimension that it cuts; -1 none, ``rank`` what the node sums over."""
        _, rank, sums = self.kind[n]
        return list(itertools.product(range(-1, rank + sums), repeat=len(self.mesh)))

    def tie(self, i: int, j: int, follow: float = 0.35) -> None:
        """An edge: one to one, or the bytes that resharding moves, with what moves too many axes forbidden."""
        follows = self.rng.random() < follow and self.kind[i][1:] == self.kind[j][1:]
        most = 0 if follows else int(self.rng.choice([1, 1, 2]))
        size = max(self.kind[i][0], self.kind[j][0]) if self.rng.random() < 0.5 else self.kind[i][0]
        key = (self.kind[i][1], self.kind[i][2], self.kind[j][1], self.kind[j][2], most)
        if key not in self.cache:
            self.cache[key] = np.array(
                [[self._moved(s, t, i, j, most) for t in self.strategies(j)] for s in self.strategies(i)]
            )
        rate = self.cache[key]
        cost = np.where(np.isfinite(rate), np.where(rate > 0, size * np.where(np.isfinite(rate), rate, 0) + 256, 0), INFINITE)
        self.pairs.append([i, j])
        self.tables.append([int(c) for c in cost.ravel()])

    def _moved(self, s: tuple[int, ...], t: tuple[int, ...], i: int, j: int, most: int) -> float:
        """Part of the tensor that every device receives; infinite when more axes change than may."""
        s, t = self._visible(s, i), self._visible(t, j)
        held, total, changes = 1.0, 0.0, 0
        for n, a in zip(self.mesh, s, strict=True):
            held /= n if a >= 0 else 1
        for n, a, b in zip(self.mesh, s, t, strict=True):
            if a != b:
                changes += 1
                if a >= 0:
                    total += held * (n - 1) if b < 0 else held * (n - 1) / n
                    held *= n if b < 0 else 1
                else:
                    held /= n
        return total if changes <= most else np.inf

    def _visible(self, s: tuple[int, ...], n: int) -> tuple[int, ...]:
        return tuple(-1 if d == self.kind[n][1] else d for d in s)

    def costs(self, n: int) -> list[int]:
        """Of the strategies: all-reduces of what is summed in parts, and now and then one that is forbidden."""
        size, rank, sums = self.kind[n]
        out: list[int] = []
        for s in self.strategies(n):
            parts = int(np.prod([m for m, d in zip(self.mesh, s) if sums and d == rank], initial=1))
            local = size / np.prod([m for m, d in zip(self.mesh, s) if 0 <= d < rank], initial=1)
            out.append(int(2 * local * (parts - 1) / parts) + 64 * (parts > 1))
        bad = self.rng.random(len(out)) < 0.03
        bad[-1] = bad[0] = False
        return [INFINITE if b else c for b, c in zip(bad, out)]

    def usages(self, n: int) -> list[int]:
        """Bytes on a device."""
        size, rank, _ = self.kind[n]
        held = [np.prod([m for m, d in zip(self.mesh, s) if 0 <= d < rank], initial=1) for s in self.strategies(n)]
        return [-int(-size // int(h)) for h in held]


def problem(shape: Shape) -> dict[str, Any]:
    """The problem of a shape, in the contest's form."""
    rng = np.random.default_rng(shape.seed)
    make = _Maker(shape.mesh, rng)
    trees = shape.nodes - shape.edges + shape.extra
    single = int(shape.single * trees)
    end = int(0.9 * shape.nodes)
    small = max(trees - single - 1, 0)
    inside = [int(s) for s in rng.integers(2, 9, small)]  # nodes of the small trees
    chain = _chain(make, shape.nodes - single - sum(inside), end)
    for size in inside:
        _small_tree(make, size, end)
    for _ in range(single):
        at, long = int(rng.integers(0, end - 12)), rng.random() < 0.1
        make.node(
            _bytes(rng), int(rng.choice([1, 2, 2])), 0 if long else at, end if long else at + int(rng.integers(1, 12)), True
        )
    for _ in range(shape.extra):
        k = int(rng.integers(0, len(chain) - 12))
        far = len(chain) - 1 - k if rng.random() < 0.5 else k + int(rng.integers(2, 12))
        make.tie(chain[k], chain[far if abs(far - k) > 1 else k + 2])
    count = range(len(make.kind))
    nodes = {"intervals": make.intervals, "costs": [make.costs(n) for n in count], "usages": [make.usages(n) for n in count]}
    frugal = _frugal(make, nodes["costs"], nodes["usages"])
    least = _peak(make.intervals, [min(u) for u in nodes["usages"]], end)
    known = _peak(make.intervals, [u[c] for u, c in zip(nodes["usages"], frugal)], end)
    return {
        "name": f"shape{shape.seed}", "nodes": nodes, "edges": {"nodes": make.pairs, "costs": make.tables},
        "usage_limit": int(max(MARGIN * least, SLACK * known)),
    }  # fmt: skip


def _frugal(make: _Maker, costs: list[list[int]], usages: list[list[int]]) -> list[int]:
    """A choice that uses little, node after node; edges that close a cycle allow it (their entries are changed if need be)."""
    before: list[list[int]] = [[] for _ in costs]
    for e, pair in enumerate(make.pairs):
        before[max(pair)].append(e)
    choice: list[int] = []
    for n, edges in enumerate(before):
        size = np.array(usages[n], float)
        size[np.array(costs[n], float) >= INFINITE] = np.inf
        best = size
        for e in edges:
            i, j = make.pairs[e]
            table = np.array(make.tables[e], float).reshape(len(costs[i]), len(costs[j]))
            column = table[choice[i]] if j == n else table[:, choice[j]]
            both = np.where(column < INFINITE, best, np.inf)
            best = both if np.isfinite(both).any() else best
        choice.append(int(best.argmin()))
        for e in edges:
            i, j = make.pairs[e]
            at = choice[i] * len(costs[j]) + choice[j]
            if make.tables[e][at] >= INFINITE:
                make.tables[e][at] = make.kind[i][0]
    return choice


def _bytes(rng: np.random.Generator) -> int:
    return 1 << int(rng.choice(np.arange(8, 23), p=np.linspace(3, 0.5, 15) / np.linspace(3, 0.5, 15).sum()))


def _chain(make: _Maker, count: int, end: int) -> list[int]:
    """Operations forwards and backwards in one chain, with weights and temporaries as leaves; the operations."""
    rng, operations, last = make.rng, list[int](), -1
    steps = count // 5
    leaves = np.full(2 * (steps // 2), 0)
    np.add.at(leaves, rng.integers(0, len(leaves), count - len(leaves)), 1)
    half, layer = len(leaves) // 2, max(len(leaves) // 96, 4)
    sizes = [(_bytes(rng), int(rng.choice([1, 2, 2, 3]))) for _ in range(layer)]  # layers repeat
    for k in range(len(leaves)):
        t = int(k * (end - 4) / len(leaves))
        size, rank = sizes[min(k, len(leaves) - 1 - k) % layer]
        kept = k < half and (k % layer) % 3 == 0
        n = make.node(size, rank, t, end - t if kept else t + 2 + int(rng.integers(0, 8)), k % 4 == 1)
        operations.append(n)
        if last >= 0:
            make.tie(last, n)
        last = n
        for leaf in range(int(leaves[k])):
            weight = leaf == 0 and k % 4 == 1
            w = make.node(_bytes(rng) if weight else size, 2 if weight else rank, 0 if weight else t, end if weight else t + 2)
            make.tie(w, n, 0.7)
    return operations


def _small_tree(make: _Maker, count: int, end: int) -> None:
    """A weight, its gradient and the optimizer's state: alive from the start or for a moment."""
    rng, size, rank, first = make.rng, _bytes(make.rng), int(make.rng.choice([1, 2, 2])), len(make.kind)
    at = int(rng.integers(0, end - 12))
    for k in range(count):
        long = rng.random() < 0.2
        n = make.node(size, rank, 0 if long else at, end if long else at + int(rng.integers(2, 12)), k % 3 == 1)
        if k:
            make.tie(n - 1 if rng.random() < 0.5 else int(rng.integers(first, n)), n, 0.7)


def _peak(intervals: list[list[int]], amounts: list[int], end: int) -> float:
    """The largest sum of what is alive at one time."""
    change = np.zeros(end + 1)
    for (lo, hi), use in zip(intervals, amounts, strict=True):
        change[lo] += use
        change[min(hi, end)] -= use
    return float(np.cumsum(change).max())
