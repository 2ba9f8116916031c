"""The least cost of a network without limits, exactly: nodes are eliminated one after another, equal ones together.

Eliminating a node replaces its tables by one over its neighbours, of its best choice for each of theirs (Bertelè and
Brioschi 1972). Nodes with the same tables in the same roles, as in layers that repeat, give the same new table: it is worked
out once, so that the time grows with what is distinct, and with the logarithm of the length of a chain of equal layers.

In which order nodes go hangs on the nodes of the tables and on which tables are one, not on what is in them: networks that
differ in costs alone, as those of one game do, go the same way, which is looked for once (`Way`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np

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
