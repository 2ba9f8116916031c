"""The least cost of a network without limits, exactly: nodes are eliminated one after another, equal ones together.

Eliminating a node replaces its tables by one over its neighbours, of its best choice for each of theirs (Bertelè and
Brioschi 1972). Nodes with the same tables in the same roles, as in layers that repeat, give the same new table: it is worked
out once, so that the time grows with what is distinct, and with the logarithm of the length of a chain of equal layers.

In which order nodes go hangs on the nodes of the tables and on which tables are one, not on what is in them: networks that
differ in costs alone, as those of one game do, go the same way, which is looked for once (`Way`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np

from tapestry.plan.solver.pairs import ROUNDING, Certificate, Pairs

Scope = tuple[int, ...]
Table = tuple[Scope, np.ndarray]
Key = tuple[int, tuple[tuple[int, Scope], ...]]
Part = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(number of a table, order of its axes, shape to add it in)."""
AXES = 60  # of an array; numpy has 64
MANY = 10**18  # cells: more than there ever are
MANY_TIMES = 10  # so many of the largest tables are worked out at most


@dataclass(frozen=True, slots=True)
class Way:
    """How all nodes go.

    Attributes:
        made: each new table: sums of parts, which are added up, of which the least along an axis is taken.
        steps: nodes that are gone, with the nodes that they follow and the new table of which the best choice is theirs.
        rest: tables that are left, numbers; the least cost is their sum.
        cells: that are worked out.
    """

    made: list[tuple[list[list[Part]], int]]
    steps: list[tuple[int, Scope, int]]
    rest: list[int]
    cells: int


@dataclass(slots=True)
class Elimination:
    """Tables over the nodes that are left, by number, and how those that are gone follow from them.

    Attributes:
        tables: by place, which tells apart tables that are one: the nodes, and the number of the table.
        at: by node, the places of its tables.
        kinds: what is eliminated, told apart by numbers; ``keys`` by node.
        groups: nodes whose elimination is the same one, by that.
        done: by that: the number of the new table.
        shapes: of tables, by number; new ones come after those given.
    """

    sizes: Sequence[int]
    shapes: list[Scope]
    given: int
    tables: dict[int, tuple[Scope, int]] = field(default_factory=dict[int, tuple[Scope, int]])
    at: list[set[int]] = field(default_factory=list[set[int]])
    kinds: dict[Key, int] = field(default_factory=dict[Key, int])
    keys: dict[int, int] = field(default_factory=dict[int, int])
    groups: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    done: dict[int, int] = field(default_factory=dict[int, int])
    cells: dict[int, int] = field(default_factory=dict[int, int])
    way: Way = field(default_factory=lambda: Way([], [], [], 0))
    places: int = 0
    spent: int = 0

    def add(self, scope: Scope, number: int) -> None:
        """One more table; the cost of a choice is their sum."""
        self.tables[self.places] = (scope, number)
        for n in scope:
            self.at[n].add(self.places)
        self.places += 1

    def neighbours(self, node: int) -> Scope:
        """A node and those that share a table with it, in order."""
        return tuple(sorted({node}.union(*[self.tables[k][0] for k in self.at[node]])))

    def sort(self, node: int) -> None:
        """Find out what eliminating a node takes now."""
        held = [self.tables[k] for k in self.at[node]]
        scope = sorted({node}.union(*[s for s, _ in held]))
        place = {n: k for k, n in enumerate(scope)}
        parts = [(t, tuple([place[n] for n in s])) for s, t in held]  # (a list is quicker here)
        kind = (place[node], tuple(sorted(parts)))
        key = self.kinds.setdefault(kind, len(self.kinds))
        if self.keys.get(node) != key:
            self.forget(node)
            self.keys[node] = key
            self.groups.setdefault(key, set()).add(node)
            self.cells[key] = min(prod([self.sizes[n] for n in scope]), MANY) if len(scope) <= AXES else MANY

    def forget(self, node: int) -> None:
        """Take a node out of its group."""
        key = self.keys.pop(node, None)
        if key is not None:
            self.groups[key].discard(node)
            if not self.groups[key]:
                del self.groups[key]

    def next(self) -> int:
        """The group that takes least for each node; what is worked out takes nothing."""
        best, least = -1, np.inf
        for key, nodes in self.groups.items():
            if key in self.done:
                return key
            each = self.cells[key] / len(nodes)
            if each < least:
                best, least = key, each
        return best

    def work(self, node: int) -> set[int]:
        """Eliminate a node; returns its neighbours."""
        key, scope = self.keys[node], self.neighbours(node)
        if key not in self.done:
            self.way.made.append((self._parts(node, scope), scope.index(node)))
            self.done[key] = len(self.shapes)
            self.shapes.append(tuple(self.sizes[n] for n in scope if n != node))
            self.spent += self.cells[key]
        others = tuple(n for n in scope if n != node)
        self.way.steps.append((node, others, self.done[key] - self.given))
        for k in list(self.at[node]):
            for n in self.tables.pop(k)[0]:
                self.at[n].discard(k)
        self.forget(node)
        self.add(others, self.done[key])
        return set(others)

    def _parts(self, node: int, scope: Scope) -> list[list[Part]]:
        """What is summed over a node and its neighbours."""
        found: list[tuple[Scope, list[Part]]] = []  # small ones go into larger ones first: the sum over all takes time
        for k in sorted(self.at[node], key=lambda k: (-prod(self.shapes[self.tables[k][1]]), k)):
            nodes, number = self.tables[k]
            shape = tuple(self.sizes[n] if n in nodes else 1 for n in scope)
            part = number, tuple(np.argsort(nodes).tolist()), shape
            into = next((parts for other, parts in found if set(nodes) <= set(other)), None)
            if into is None:
                found.append((nodes, [part]))
            else:
                into.append(part)
        return [parts for _, parts in found]


@lru_cache(maxsize=1 << 8)
def way(sizes: tuple[int, ...], tables: tuple[tuple[Scope, int], ...], shapes: tuple[Scope, ...], most: int) -> Way | None:
    """How nodes go; None where a table would take more than ``most`` cells, or all too many times that.

    Args:
        tables: nodes, and the number of the table.
    """
    state = Elimination(sizes, list(shapes), len(shapes), at=[set() for _ in sizes])
    for scope, number in tables:
        state.add(scope, number)
    for n in range(len(sizes)):
        state.sort(n)
    while state.groups:
        key = state.next()
        if state.cells[key] > most or state.spent > MANY_TIMES * most:
            return None
        touched, blocked = set[int](), set[int]()
        for node in sorted(state.groups[key]):
            if node not in blocked:
                near = state.work(node)
                blocked |= near
                touched |= near
        for n in touched & state.keys.keys():
            state.sort(n)
    return Way(state.way.made, state.way.steps, [t for _, t in state.tables.values()], state.spent)


def minimise(sizes: Sequence[int], tables: Sequence[Table], most: int) -> tuple[float, list[int], int] | None:
    """(least cost, a choice of that cost, cells worked out); None where a table would take more than ``most`` cells, or all too
    many times that.

    Args:
        tables: costs by nodes; equal ones should be one array.
    """
    numbers: dict[int, int] = {}
    values: list[np.ndarray] = []
    named: list[tuple[Scope, int]] = []
    for scope, table in tables:
        number = numbers.setdefault(id(table), len(values))
        if number == len(values):
            values.append(table)
        named.append((scope, number))
    found = way(tuple(sizes), tuple(named), tuple(t.shape for t in values), most)
    if found is None:
        return None
    best: list[np.ndarray] = []
    for parts, axis in found.made:
        total = sum((_sum(p, values) for p in parts[1:]), _sum(parts[0], values))
        best.append(total.argmin(axis=axis).astype(np.int32))
        values.append(total.min(axis=axis))
    choice = [0] * len(sizes)
    for node, others, number in reversed(found.steps):
        choice[node] = int(best[number][tuple([choice[n] for n in others])])
    return float(sum(float(values[t]) for t in found.rest)), choice, found.cells


def _sum(parts: Sequence[Part], values: Sequence[np.ndarray]) -> np.ndarray:
    first, *rest = (values[number].transpose(order).reshape(shape) for number, order, shape in parts)
    return sum(rest, first)


# Labels that another label of the same node beats whatever the neighbours choose (dead-end elimination).
#
# Label b of a node may go when some label a costs no more in itself and, over all its tables together, no more against any
# labels of the neighbours: ``u[a] - u[b] + sum_e max_r (T_e[a, r] - T_e[b, r]) <= 0`` (Goldstein 1994). Some optimal choice is
# left then, so that the least cost, and every bound of it, stay what they were. Equal nodes with equal tables are done once:
# the time grows with what is distinct, and layers that repeat cost nothing.


PairTable = tuple[tuple[int, ...], np.ndarray]
ROUNDS = 8
FEW_LABELS = 16  # labels that all others are compared with first: the cheapest ones beat most
LARGEST = 1 << 28  # differences that one table may take
SMALL = 1 << 17  # differences that are all worked out, equal columns again


@dataclass(slots=True)
class Undominated:
    """The labels of each node that are left, and for all of them the one that stands in for it.

    A choice in which every label gives way to the one that stands in for it costs no more.
    """

    kept: list[np.ndarray]
    instead: list[np.ndarray]

    @property
    def sizes(self) -> list[int]:
        """Number of labels left of each node."""
        return [len(k) for k in self.kept]

    def restrict(self, tables: Sequence[PairTable]) -> list[PairTable]:
        """The same tables over the labels that are left; one array where it was one."""
        made: dict[tuple[int | bytes, ...], np.ndarray] = {}
        out: list[PairTable] = []
        for nodes, table in tables:
            key = (id(table), *(self.kept[n].tobytes() for n in nodes))
            if key not in made:
                made[key] = np.ascontiguousarray(table[np.ix_(*(self.kept[n] for n in nodes))])
            out.append((nodes, made[key]))
        return out

    def shrink(self, choice: Sequence[int]) -> list[int]:
        """A choice of all labels as one of those that are left."""
        return [int(np.flatnonzero(k == i[c])[0]) for k, i, c in zip(self.kept, self.instead, choice, strict=True)]

    def restore(self, choice: Sequence[int]) -> list[int]:
        """A choice of the labels that are left as one of all."""
        return [int(k[c]) for k, c in zip(self.kept, choice, strict=True)]


def undominated(
    sizes: Sequence[int], tables: Sequence[PairTable], uses: Sequence[tuple[int, np.ndarray]] = ()
) -> Undominated | None:
    """Remove labels until no more go; None where none does.

    Args:
        tables: costs by node or by pair of nodes; nodes of larger groups keep all labels.
        uses: of a node, what each of its labels uses of something limited: only a label that uses no more may stand in.
    """
    state = _State(sizes, tables, uses)
    if max(sizes, default=0) > 2 * FEW_LABELS:
        state.round(FEW_LABELS)
    for _ in range(ROUNDS):
        if not state.round():
            break
    left = state.left
    return left if any(len(k) < n for k, n in zip(left.kept, sizes, strict=True)) else None


@dataclass(slots=True)
class _State:
    sizes: Sequence[int]
    tables: Sequence[PairTable]
    uses: Sequence[tuple[int, np.ndarray]]
    left: Undominated = field(init=False)
    unary: list[np.ndarray] = field(init=False)
    used: list[list[np.ndarray]] = field(init=False)
    near: list[list[tuple[np.ndarray, int, int]]] = field(init=False)
    stay: set[int] = field(default_factory=set[int])
    sets: dict[bytes, int] = field(default_factory=dict[bytes, int])
    most: dict[tuple[int | bytes, ...], np.ndarray] = field(default_factory=dict[tuple[int | bytes, ...], np.ndarray])

    def __post_init__(self) -> None:
        every = {n: np.arange(n) for n in set(self.sizes)}
        self.left = Undominated([every[n] for n in self.sizes], [every[n] for n in self.sizes])
        self.unary = [np.zeros(n) for n in self.sizes]
        self.near = [[] for _ in self.sizes]
        self.used = [[] for _ in self.sizes]
        for node, amounts in self.uses:
            self.used[node].append(amounts)
        for nodes, table in self.tables:
            if len(nodes) == 1:
                self.unary[nodes[0]] = self.unary[nodes[0]] + table
            elif len(set(nodes)) == 2 and max(table.shape) * table.size <= LARGEST:
                self.near[nodes[0]].append((table, 0, nodes[1]))
                self.near[nodes[1]].append((table, 1, nodes[0]))
            else:
                self.stay |= set(nodes)

    def round(self, few: int = 0) -> bool:
        """Every node once, against what the others had before; whether any label went.

        Args:
            few: labels of each node that the others are compared with, the cheapest ones; 0: all of them.
        """
        kept = self.left.kept
        numbers = [self.sets.setdefault(k.tobytes(), len(self.sets)) for k in kept]
        classes: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}
        after = Undominated(list(kept), list(self.left.instead))
        for i, near in enumerate(self.near):
            if i in self.stay or len(kept[i]) < 2:
                continue
            tables = sorted((id(t), side, numbers[j]) for t, side, j in near)
            key = (numbers[i], self.unary[i].tobytes(), *tables, *(u.tobytes() for u in self.used[i]))
            if key not in classes:
                by = self.cheapest(i, few) if few else np.arange(len(kept[i]))
                classes[key] = _dominated(self.differences(i, numbers, by), kept[i], by, self.sizes[i])
            after.kept[i] = classes[key][0]
            after.instead[i] = classes[key][1][self.left.instead[i]]
        changed = any(len(a) < len(b) for a, b in zip(after.kept, kept, strict=True))
        self.left = after
        return changed

    def cheapest(self, i: int, few: int) -> np.ndarray:
        """Some labels of a node, by their places among those that are left: the cheapest with the best labels of neighbours."""
        kept = self.left.kept
        least = self.unary[i][kept[i]]
        for table, side, j in self.near[i]:
            least = least + (table if side == 0 else table.T)[np.ix_(kept[i], kept[j])].min(axis=1)
        return np.sort(np.argsort(least, kind="stable")[:few])

    def differences(self, i: int, numbers: list[int], by: np.ndarray) -> np.ndarray:
        """[a, b]: by how much label a of a node, one of some, may at most cost more than label b, of those that are left;
        infinite where it uses more of anything."""
        own = self.left.kept[i]
        with np.errstate(invalid="ignore"):  # infinity less infinity says nothing: never at most 0
            out = self.unary[i][own[by], None] - self.unary[i][None, own]
            for table, side, j in self.near[i]:
                key = (id(table), side, numbers[i], numbers[j], by.tobytes())
                if key not in self.most:
                    whole = table if side == 0 else table.T
                    self.most[key] = _most(whole[np.ix_(own, self.left.kept[j])], by)
                out = out + self.most[key]
        for u in self.used[i]:
            out = np.where(u[own[by], None] <= u[None, own], out, np.inf)
        return out


def _most(table: np.ndarray, by: np.ndarray) -> np.ndarray:
    """[a, b]: the largest of ``table[a, r] - table[b, r]`` over the columns, for some rows and all."""
    if len(by) * table.size <= SMALL:
        return (table[by, None] - table[None]).max(axis=2)
    rows = np.unique(table, axis=1)
    out = np.empty((len(by), len(rows)))
    for a, row in enumerate(rows[by]):
        (row - rows).max(axis=1, out=out[a])
    return out


def _dominated(differences: np.ndarray, kept: np.ndarray, by: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(labels left, by label the one that stands in for it) of those that were ``kept``; of equals the first one stays."""
    beats = differences <= 0
    order, mutual = np.arange(len(by)), beats[:, by]
    beats[:, by] = mutual & (~mutual.T | (order[:, None] < order[None, :]))
    left: np.ndarray = ~np.any(beats, axis=0)
    instead = np.arange(size)
    for b in np.flatnonzero(~left):
        standing = np.flatnonzero(beats[:, b] & left[by])
        left[b] = not len(standing)  # (by rounding alone)
        instead[kept[b]] = kept[by[standing[0]]] if len(standing) else kept[b]
    return kept[left], instead


# The least cost of a large network at given prices, exactly, where it is nearly a forest; and what each choice adds to it.
#
# Nodes are eliminated in rounds (Bertelè and Brioschi 1972): in each one those that take few cells and have no pair among them,
# so that long chains halve as in parallel tree contraction (Miller and Reif 1985). Nodes of one round whose tables have equal
# shapes are worked out together. On the way back every table gets the least cost of all that went after it.


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
