"""The least cost of a large network at given prices, exactly, where it is nearly a forest; and what each choice adds to it.

Nodes are eliminated in rounds (Bertelè and Brioschi 1972): in each one those that take few cells and have no pair among them,
so that long chains halve as in parallel tree contraction (Miller and Reif 1985). Nodes of one round whose tables have equal
shapes are worked out together. On the way back every table gets the least cost of all that went after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tapestry.plan.solver.pairs import ROUNDING, Certificate, Pairs

MOST = 300_000_000  # cells of all nodes together
KEPT = 6  # so many times fewer of them are kept, at most: tables that are left when a node is gone
CHUNK = 250_000  # cells worked out together, about
ALIKE, FEW = 4, 1_000  # nodes of one round take at most so many times the fewest cells, or so many cells
CELL, GROUP = 2.5, 60_000.0  # units

Member = tuple[int, tuple[int, ...]]  # a node and its neighbours when it goes
Source = tuple[int, int]  # a group and a row in it; (-1, pair) for the network's own
Form = tuple[tuple[int, ...], tuple[tuple[tuple[int, ...], bool], ...]]  # sizes of a scope; axes of its tables, made or given
Held = dict[int, list[tuple[tuple[int, ...], Source]]]  # by node, its tables over several nodes


@dataclass(slots=True)
class _Part:
    """One table of every node of a group, which spreads over ``axes`` of its scope."""

    axes: tuple[int, ...]
    order: tuple[int, ...]  # in which the table's own axes have to be put
    shape: list[int]  # with 1 for the other axes
    source: list[Source]
    table: np.ndarray

    def fit(self, tables: np.ndarray) -> np.ndarray:
        """Tables as they were made, to be added up."""
        return tables.transpose(0, *(1 + k for k in self.order)).reshape(-1, *self.shape)

    def back(self, least: np.ndarray) -> np.ndarray:
        """Tables over the part's axes, in the order of scope, as they were made."""
        return least.transpose(0, *(1 + int(k) for k in np.argsort(self.order)))


@dataclass(slots=True)
class _Group:
    """Nodes that are eliminated together: scopes of the same ``sizes``, the node first and its neighbours after it.

    ``low`` is the least over the node's labels, ``outside`` the least of all that is not below it.
    """

    nodes: np.ndarray
    others: np.ndarray
    sizes: tuple[int, ...]
    labels: np.ndarray
    target: np.ndarray  # labels of the first neighbour
    parts: list[_Part]
    low: np.ndarray = field(default_factory=lambda: np.zeros(0))
    outside: np.ndarray = field(default_factory=lambda: np.zeros(0))


class Contraction:
    """An order of elimination of a network and its tables; `Contraction.of` gives none where that takes too much."""

    def __init__(self, net: Pairs, rounds: list[list[Member]], cells: int) -> None:
        self.net, nodes = net, net.nodes()
        self.label = np.flatnonzero(net.alive())
        self.count = net.counts()
        self.first = np.zeros(len(net.gone), np.int64)
        self.first[nodes] = np.cumsum(self.count[nodes]) - self.count[nodes]
        rank = np.zeros(len(net.unary), np.int64)
        rank[self.label] = np.arange(len(self.label))
        a = rank[net.a] - self.first[net.tail[net.edge]]
        b = rank[net.b] - self.first[net.head[net.edge]]
        width = self.count[net.tail] * self.count[net.head]
        self.begin = np.cumsum(width) - width
        self.cell = self.begin[net.edge] + a * self.count[net.head][net.edge] + b  # of every joint choice
        self.flat = np.full(int(width.sum()), np.inf)
        self.flat[self.cell] = net.cost
        self.groups: list[_Group] = []
        self._arrange(rounds)
        self.work = CELL * cells + GROUP * len(self.groups)

    @staticmethod
    def of(net: Pairs, most: int = MOST) -> Contraction | None:
        """None where more than so many cells would be worked out."""
        found = _rounds(net, most)
        return Contraction(net, *found) if found else None

    def _arrange(self, rounds: list[list[Member]]) -> None:
        """Find out which tables every node has when it goes, and group nodes by their shapes."""
        net, size = self.net, self.count.tolist()
        held: Held = {v: [] for v in net.nodes().tolist()}
        for e, pair in enumerate(zip(net.tail.tolist(), net.head.tolist())):
            for v in pair:
                held[v].append((pair, (-1, e)))
        for members in rounds:
            alike: dict[Form, list[tuple[Member, list[Source]]]] = {}
            for v, others in members:
                place = {x: k for k, x in enumerate((v, *others))}
                parts = sorted((tuple(place[x] for x in scope), source) for scope, source in held[v])
                forms = tuple((axes, source[0] < 0) for axes, source in parts)
                sizes = (size[v], *(size[w] for w in others))
                alike.setdefault((sizes, forms), []).append(((v, others), [source for _, source in parts]))
            for (sizes, forms), found in alike.items():
                step = max(1, CHUNK // prod(sizes))
                for k in range(0, len(found), step):
                    self._group(sizes, [axes for axes, _ in forms], found[k : k + step], held)

    def _group(
        self, sizes: tuple[int, ...], axes: list[tuple[int, ...]], found: list[tuple[Member, list[Source]]], held: Held
    ) -> None:
        nodes = np.array([v for (v, _), _ in found])
        others = np.array([o for (_, o), _ in found], np.int64).reshape(len(found), -1)
        parts: list[_Part] = []
        for k, of in enumerate(axes):
            order = tuple(int(x) for x in np.argsort(of))
            part = _Part(of, order, [n if x in of else 1 for x, n in enumerate(sizes)], [s[k] for _, s in found], np.zeros(0))
            if part.source[0][0] < 0:
                shape = [sizes[x] for x in of]
                at = self.begin[[e for _, e in part.source]][:, None] + np.arange(prod(shape))
                part.table = np.ascontiguousarray(part.fit(self.flat[at].reshape(-1, *shape)))
            parts.append(part)
        labels = self.first[nodes][:, None] + np.arange(sizes[0])
        target = self.first[others[:, 0]][:, None] + np.arange(sizes[1]) if len(sizes) > 1 else labels
        number = len(self.groups)
        self.groups.append(_Group(nodes, others, sizes, labels, target, parts))
        for row, ((v, near), sources) in enumerate(found):
            del held[v]
            for w in near:
                held[w] = [x for x in held[w] if x[1] not in sources]
                if len(near) > 1:
                    held[w].append((near, (number, row)))

    def _total(self, group: _Group, unary: np.ndarray) -> np.ndarray:
        """The sum of all tables of the nodes of a group."""
        total = unary[group.labels].reshape(len(group.nodes), group.sizes[0], *[1] * (len(group.sizes) - 1))
        for part in group.parts:
            if part.source[0][0] >= 0:
                part.table = part.fit(np.stack([self.groups[g].low[row] for g, row in part.source]))
            total = total + part.table
        return total

    def least(self, unary: np.ndarray) -> tuple[float, np.ndarray]:
        """(least cost at costs of labels by the network's numbers, less its constant; the label of every node that is left).

        The cost is below the true one by what rounding may take.
        """
        unary = unary[self.label]
        value = size = 0.0
        for group in self.groups:
            group.low = self._total(group, unary).min(axis=1)
            if len(group.sizes) == 1:
                value, size = value + float(group.low.sum()), size + float(np.abs(group.low).sum())
            elif len(group.sizes) == 2:
                np.add.at(unary, group.target, group.low)
        self.unary, self.value = unary, value
        choice = np.zeros(len(self.count), np.int64)
        for group in reversed(self.groups):
            rows = np.arange(len(group.nodes))
            total = unary[group.labels]
            for part in group.parts:
                at = [choice[group.others[:, k - 1]] if k in part.axes else 0 for k in range(1, len(group.sizes))]
                total = total + part.table[(rows, slice(None), *at)]
            choice[group.nodes] = total.argmin(axis=1)
        nodes = self.net.nodes()
        return value - 100 * ROUNDING * size, self.label[self.first[nodes] + choice[nodes]]

    def certificate(self, bound: float) -> Certificate:
        """How much every label and joint choice adds at least to the last answer of `least`, which is worth a bound."""
        label, joint = np.full(len(self.label), np.inf), np.full(len(self.flat), np.inf)
        for group in self.groups:
            group.outside = np.empty((len(group.nodes), *group.sizes[1:]))
        for group in reversed(self.groups):
            if len(group.sizes) == 1:
                group.outside = -group.low
            elif len(group.sizes) == 2:
                group.outside = _less(label[group.target], group.low)
            here = self._total(group, self.unary) + group.outside[:, None]
            label[group.labels] = here.min(axis=tuple(range(2, here.ndim)))
            for part in group.parts:
                away = tuple(k + 1 for k in range(len(group.sizes)) if k not in part.axes)
                least = here.min(axis=away)
                if part.source[0][0] < 0:
                    at = self.begin[[e for _, e in part.source]][:, None] + np.arange(prod(least.shape[1:]))
                    joint[at] = part.back(least).reshape(at.shape)
                    continue
                beyond = part.back(_less(least, part.table.reshape(least.shape)))
                for (g, row), table in zip(part.source, beyond):
                    self.groups[g].outside[row] = table
        whole = np.full(len(self.net.unary), np.inf)
        whole[self.label] = label
        return Certificate(bound, whole, joint[self.cell])


def forest(net: Pairs) -> Pairs:
    """The network without the pairs that close cycles, those that matter least: no choice costs more, where pairs cost nothing
    or more."""
    width = net.counts()[net.tail] * net.counts()[net.head]
    allowed = np.bincount(net.edge, minlength=len(width)) / np.maximum(width, 1)
    weight = np.bincount(net.edge, net.cost, len(width)) / np.maximum(width, 1)
    root, spare = list(range(len(net.gone))), np.zeros(len(width), bool)

    def top(v: int) -> int:
        while root[v] != v:
            root[v] = v = root[root[v]]
        return v

    for e in np.lexsort((-weight, allowed)).tolist():
        a, b = top(int(net.tail[e])), top(int(net.head[e]))
        spare[e], root[a] = a == b, b
    out = net.copy()
    out.drop(spare & (np.bincount(net.edge, net.cost < 0, len(width)) == 0))
    return out


def _less(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a - b``; infinite where b is, since nothing is allowed there."""
    return np.where(np.isfinite(b), a - np.where(np.isfinite(b), b, 0.0), np.inf)


def _rounds(net: Pairs, most: int) -> tuple[list[list[Member]], int] | None:
    """Which nodes go in each round, and how many cells that takes."""
    size = net.counts().tolist()
    near: dict[int, set[int]] = {v: set() for v in net.nodes().tolist()}
    for a, b in zip(net.tail.tolist(), net.head.tolist()):
        near[a].add(b)
        near[b].add(a)
    cells = {v: size[v] * prod(size[w] for w in others) for v, others in near.items()}
    out, spent, kept = list[list[Member]](), 0, 0
    while near:
        now = list(_independent(cells, near))
        spent += sum(cells[v] for v, _ in now)
        kept += sum(cells[v] // size[v] for v, _ in now)
        if spent > most or kept > most // KEPT:
            return None
        out.append(now)
        for v, others in now:
            del near[v], cells[v]
            for w in others:
                near[w].update(others)
                near[w] -= {v, w}
        for w in {w for _, others in now for w in others}:
            cells[w] = size[w] * prod(size[x] for x in near[w])
    return out, spent


def _independent(cells: dict[int, int], near: dict[int, set[int]]) -> Iterator[Member]:
    """Nodes with few cells, none beside another; those with the fewest first."""
    limit = max(ALIKE * min(cells.values()), FEW)
    blocked = set[int]()
    for _, v in sorted((c, v) for v, c in cells.items() if c <= limit):
        if v not in blocked:
            blocked |= near[v]
            yield v, tuple(sorted(near[v]))
