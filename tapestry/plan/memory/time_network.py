"""One network in which every operation, whole or in parts one after another, chooses its cuts in space.

A `Way` rewrites some operations by a split in time. Operations that it replaces, and those that it makes, are nodes of one
network, each with a choice more: *off*. For every stretch of the graph a node chooses the way that is taken there, or none, and
so which nodes are off: the others are free in what they cut, part by part. Wide ways, of more than one stretch, leave no other.
A node that is off costs, moves and holds nothing, the others what the planner's tables of the rewritten graphs say; what moves
between the parts of two stretches is not counted. So a choice is a plan in space and time at once, and its memory is counted
while operations run: those of the graph, and those of each way behind what it replaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph, Op, Opaque
from tapestry.ir.plan import Strategy
from tapestry.plan.schedule.paths import Paths
from tapestry.plan.search.memory_limit import demands
from tapestry.plan.search.problem import Flow, Menu, Problem
from tapestry.plan.solver.network import Demand, Factor
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.rule import Move

NOWHERE = Strategy((), ())


@dataclass(frozen=True, slots=True)
class Way:
    """A move, the graph that it makes, the operations that it replaces, and those of its graph that are new."""

    move: Move
    graph: Graph
    gone: frozenset[int]
    new: tuple[int, ...]


def way_of(graph: Graph, move: Move) -> Way | None:
    """The way of a move; none where it is not legal, or where other operations would run in another order."""
    try:
        made = apply_moves(graph, [move])
    except TapestryError:
        return None
    at = {op.outs[0]: i for i, op in enumerate(graph.ops)}
    same = [at.get(op.outs[0], -1) for op in made.ops]
    same = [i if i >= 0 and graph.ops[i] == op else -1 for i, op in zip(same, made.ops, strict=True)]
    gone = frozenset(range(len(graph.ops))) - set(same)
    new = tuple(k for k, i in enumerate(same) if i < 0)
    kept = [i for i in same if i >= 0]
    if not gone or kept != sorted(kept) or new != tuple(range(new[0], new[-1] + 1)):
        return None
    clean = all(i < max(gone) for i in same[: new[0]]) and all(i > max(gone) for i in same[new[-1] + 1 :])
    return Way(move, made, gone, new) if clean else None


def stretches(ways: Sequence[Way]) -> list[list[Way]]:
    """Ways by the stretch of the graph that they are in; those of two stretches have nothing to do with each other."""
    out: list[list[Way]] = []
    end = -1
    for w in sorted(ways, key=lambda w: (min(w.gone), max(w.gone))):
        if min(w.gone) > end:
            out.append([])
        out[-1].append(w)
        end = max(end, *w.gone)
    return out


@dataclass(frozen=True, slots=True)
class _Node:
    """A node: operation ``at`` of a problem; ``stretch`` (-1: none) decides whether it is on, by ``ways`` (0 is none)."""

    problem: Problem
    at: int
    stretch: int = -1
    ways: frozenset[int] = frozenset()


@dataclass(slots=True)
class TimeNetwork:
    """The network of a graph's problem, and of the problems of the ways of each stretch.

    Attributes:
        plain: the problem of the graph; ``ways`` and their ``problems``, by stretch, and last the wide ones.
        nodes: all but the first, which choose ways; in the order in which they run.
        place: number in the network of every operation of the graph; ``made`` of the new ones by stretch and way.
        problem: costs of the whole network in time, as `schedule.paths` takes them.
        firm: factors that tie nodes to the choice of their stretch.
    """

    plain: Problem
    ways: list[list[Way]]
    problems: list[list[Problem]]
    nodes: list[_Node] = field(init=False)
    place: list[int] = field(init=False)
    made: dict[tuple[int, int], dict[int, int]] = field(init=False)
    problem: Problem = field(init=False)
    firm: list[Factor] = field(init=False)
    padded: dict[tuple[object, ...], Any] = field(default_factory=dict[tuple[object, ...], Any])

    def __post_init__(self) -> None:
        self._order()
        ops: list[Op] = [_chooser(s) for s in range(len(self.ways))] + [self._op(k, n) for k, n in self.numbered()]
        menus = [_sorts(self._count(s), len(self.plain.menus[0].own)) for s in range(len(self.ways))]
        menus += [self._menu(n) for n in self.nodes]
        self.firm = [Factor((n.stretch, k), self._tie(n)) for k, n in self.numbered() if n.stretch >= 0]
        self.firm += [Factor((s, self.wide), self._wide_or_not(s)) for s in range(self.wide)]
        graph = replace(self.plain.graph, ops=tuple(ops))
        self.problem = Problem(graph, self.plain.topo, self.plain.inputs, self.plain.outputs, self.plain.streamed)
        self.problem.menus, self.problem.distinct = menus, self.plain.distinct
        self.problem.factors = [*self._factors(), *self.firm]
        self.problem.flows = list(self._flows())

    def _order(self) -> None:
        """Number the nodes."""
        self.nodes, self.place, self.made = [], [], {}
        first, of = len(self.ways), dict[int, int]()
        for s, ways in reversed([*enumerate(self.ways)]):
            of |= {i: s for w in ways for i in w.gone}
        for i in range(len(self.plain.graph.ops)):
            s = of.get(i, -1)
            known = [*self.ways[s], *(self.ways[self.wide] if s < self.wide else [])] if s >= 0 else []
            self.place.append(first + len(self.nodes))
            self.nodes.append(_Node(self.plain, i, s, frozenset([0, *(k + 1 for k, w in enumerate(known) if i not in w.gone)])))
            for t, k, w in ((t, k, w) for t, ways in enumerate(self.ways) for k, w in enumerate(ways) if max(w.gone) == i):
                self.made[t, k] = {at: first + len(self.nodes) + n for n, at in enumerate(w.new)}
                self.nodes += [_Node(self.problems[t][k], at, t, frozenset([k + 1])) for at in w.new]

    @property
    def wide(self) -> int:
        """The node that chooses among wide ways."""
        return len(self.ways) - 1

    def _count(self, s: int) -> int:
        """Choices of a stretch: none, its own ways, any wide one."""
        return 1 + len(self.ways[s]) + (len(self.ways[self.wide]) if s < self.wide else 0)

    def _wide_or_not(self, s: int) -> np.ndarray:
        """Nothing where a stretch and the wide ways say the same, else no choice."""
        own, wide = np.indices((self._count(s), len(self.ways[self.wide]) + 1))
        return np.where(np.maximum(own - len(self.ways[s]), 0) == wide, 0.0, np.inf)

    def numbered(self) -> Iterator[tuple[int, _Node]]:
        """Nodes with their numbers in the network."""
        return ((k + len(self.ways), n) for k, n in enumerate(self.nodes))

    def node(self, number: int) -> _Node | None:
        """A node by its number; none for one that chooses a way."""
        return self.nodes[number - len(self.ways)] if number >= len(self.ways) else None

    def number(self, s: int, k: int, at: int) -> int:
        """Number in the network of an operation of a way's graph."""
        new = self.made[s, k]
        if at in new:
            return new[at]
        w = self.ways[s][k]
        before = at < w.new[0]
        kept = [i for i in range(len(self.plain.graph.ops)) if i not in w.gone]
        return self.place[kept[at if before else at - len(w.new)]]

    def _op(self, number: int, n: _Node) -> Op:
        """The operation of a node; what ways make has names of its own."""
        op = n.problem.graph.ops[n.at]
        return op if n.problem is self.plain else replace(op, outs=tuple(f"{t} of {number}" for t in op.outs))

    def _optional(self, number: int) -> bool:
        node = self.node(number)
        return node is not None and node.stretch >= 0

    def _pad(self, table: np.ndarray, numbers: Sequence[int], lead: int = 0) -> np.ndarray:
        """A table with zeros more for nodes that may be off; the first ``lead`` axes stay. Of one table it is one array."""
        more = tuple(self._optional(n) for n in numbers)
        key = (id(table), more, lead)
        if key not in self.padded:
            self.padded[key] = table, np.pad(table, [(0, 0)] * lead + [(0, int(m)) for m in more]) if any(more) else table
        return self.padded[key][1]

    def _menu(self, n: _Node) -> Menu:
        menu = n.problem.menus[n.at]
        if n.stretch < 0:
            return menu
        if ("menu", id(menu)) not in self.padded:
            own, off = np.pad(menu.own, ((0, 0), (0, 1))), [*menu.strategies, NOWHERE]
            seconds, merging = np.append(menu.seconds, 0.0), np.append(menu.merging, 0.0)
            more = replace(menu, strategies=off, seconds=seconds, own=own, merging=merging)
            self.padded["menu", id(menu)] = menu, more
        return self.padded["menu", id(menu)][1]

    def _tie(self, n: _Node) -> np.ndarray:
        """Nothing where a node is on or off as its stretch says, else no choice."""
        size = len(n.problem.menus[n.at].strategies) + 1
        out = np.full((self._count(n.stretch), size), np.inf)
        for k in range(len(out)):
            out[k, slice(0, size - 1) if k in n.ways else size - 1] = 0.0
        return out

    def _factors(self) -> Iterator[Factor]:
        for f in self.plain.factors:
            numbers = tuple(self.place[i] for i in f.nodes)
            yield Factor(numbers, self._pad(f.table, numbers))
        for s, k, new in self._new():
            for f in self.problems[s][k].factors:
                if any(i in new for i in f.nodes):
                    numbers = tuple(self.number(s, k, i) for i in f.nodes)
                    yield Factor(numbers, self._pad(f.table, numbers))

    def _flows(self) -> Iterator[Flow]:
        def flow(f: Flow, ends: tuple[int, int]) -> Flow:
            return Flow(*ends, f.tensor, self._pad(f.seconds, ends, 1))

        for f in self.plain.flows:
            yield flow(f, (self.place[f.maker] if f.maker >= 0 else -1, self.place[f.reader] if f.reader >= 0 else -1))
        for s, k, new in self._new():
            for f in self.problems[s][k].flows:
                if f.maker in new or f.reader in new:
                    yield flow(
                        f,
                        (
                            self.number(s, k, f.maker) if f.maker >= 0 else -1,
                            self.number(s, k, f.reader) if f.reader >= 0 else -1,
                        ),
                    )

    def _new(self) -> Iterator[tuple[int, int, dict[int, int]]]:
        for (s, k), new in self.made.items():
            yield s, k, new

    # memory

    def usages(self, limit: float, *, surely: bool) -> tuple[list[Demand], np.ndarray]:
        """What nodes hold while each other one runs, and the most that there may be then.

        At the operations of the graph its own demands count, at those of a way the way's. Where a way is not taken, nothing is
        said of the time at which it would run: what it leaves free is taken off the limit by the node that takes it.
        """
        count = len(self.nodes) + len(self.ways)
        out, limits = list[Demand](), np.full(count, float(limit))
        for d in demands(self.plain, surely=surely):
            node = self.place[d.node]
            times = np.zeros(count, bool)
            times[[self.place[i] for i in range(d.lo, d.hi)]] = True
            out += self._runs(node, times, d.amounts)
        for s, k, new in self._new():
            mine, others = sorted(new.values()), np.zeros(count)
            for d in demands(self.problems[s][k], surely=surely):
                node, times = self.number(s, k, d.node), np.zeros(count, bool)
                times[[self.number(s, k, i) for i in range(d.lo, d.hi)]] = True
                if d.node in new:
                    times = self._meanwhile(times, s)
                else:
                    times[np.setdiff1d(np.arange(count), mine)] = False
                    others += times * d.amounts.max()
                out += self._runs(node, times, d.amounts)
            for t in mine:
                spare = max(0.0, float(others[t]) - limit)
                if spare:
                    limits[t] += spare
                    out.append(Demand(s, t, t + 1, np.where(np.arange(self._count(s)) == k + 1, spare, 0.0)))
        return [d for d in out if d.amounts.any()], limits

    def _meanwhile(self, times: np.ndarray, mine: int) -> np.ndarray:
        """Times that lie between given ones, of ways of other stretches."""
        out, count = times.copy(), len(self.place)
        for (s, k), new in self.made.items():
            end = max(self.ways[s][k].gone)
            if (
                s != mine
                and self.wide not in (s, mine)
                and times[self.place[end]]
                and (end + 1 < count and times[self.place[end + 1]])
            ):
                out[list(new.values())] = True
        return out

    def _runs(self, node: int, times: np.ndarray, amounts: np.ndarray) -> Iterator[Demand]:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], times.astype(np.int8), [0]])))
        padded = self._pad(amounts, (node,))
        for lo, hi in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            yield Demand(node, lo, hi, padded)

    # a choice

    def spare(self, choice: Sequence[int], uses: Sequence[Demand]) -> np.ndarray:
        """Over time, what stretches take off the limit where one of their ways is taken."""
        out = np.zeros(len(self.nodes) + len(self.ways))
        for d in uses:
            out[d.lo : d.hi] += d.amounts[choice[d.node]] if d.node < len(self.ways) else 0.0
        return out

    def moves(self, choice: Sequence[int]) -> list[Move]:
        """Of the ways that are taken."""
        return [ways[choice[s] - 1].move for s, ways in enumerate(self.ways) if 0 < choice[s] <= len(ways)]

    def taken(self, choice: Sequence[int]) -> list[int]:
        """Numbers of the nodes that are on, in the order in which they run."""
        return [k for k, n in self.numbered() if n.stretch < 0 or choice[n.stretch] in n.ways]


class TimePaths(Paths):
    """Sums of the network that no plan's time is under; a node that is off takes none, and nobody waits for it."""

    def __init__(self, network: TimeNetwork) -> None:
        self.network = network
        super().__init__(network.problem)
        off = {k for k, n in network.numbered() if n.stretch >= 0}
        self.arcs = [a._replace(along=a.along and a.head not in off) for a in self.arcs]

    def factors(self, weights: np.ndarray) -> list[Factor]:
        """The weighted parts, and what ties nodes to the choice of their stretch."""
        return [*super().factors(weights), *self.network.firm]


def _chooser(stretch: int) -> Opaque:
    return Opaque(outs=(f"stretch {stretch}",), ins=(), kind="Stretch", node=b"", opsets=())


def _sorts(size: int, lanes: int) -> Menu:
    """Of a node that chooses a way: nothing on the clock."""
    none = np.zeros(size)
    return Menu([NOWHERE] * size, none, none, none, np.zeros((size, 0)), [{}] * size, np.zeros((lanes, size)), none)
