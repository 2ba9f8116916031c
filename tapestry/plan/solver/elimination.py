"""The least cost of a network without limits, exactly: nodes are eliminated one after another, equal ones together.

Eliminating a node replaces its tables by one over its neighbours, of its best choice for each of theirs (Bertelè and
Brioschi 1972). Nodes with the same tables in the same roles, as in layers that repeat, give the same new table: it is worked
out once, so that the time grows with what is distinct, and with the logarithm of the length of a chain of equal layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

Scope = tuple[int, ...]
Table = tuple[Scope, np.ndarray]
Key = tuple[int, tuple[tuple[int, Scope], ...]]
AXES = 60  # of an array; numpy has 64
MANY = 10**18  # cells: more than there ever are
MANY_TIMES = 10  # so many of the largest tables are worked out at most


@dataclass(slots=True)
class Elimination:
    """Tables over the nodes that are left, and how those that are gone follow from them.

    Attributes:
        at: by node, the numbers of its tables.
        groups: nodes whose elimination is the same one.
        done: by what is eliminated: the new table and the best choice for each of its cells.
        steps: nodes that are gone, with the nodes that they follow and the best choice for each of theirs.
        spent: cells worked out.
    """

    sizes: Sequence[int]
    tables: dict[int, Table] = field(default_factory=dict[int, Table])
    at: list[set[int]] = field(default_factory=list[set[int]])
    keys: dict[int, Key] = field(default_factory=dict[int, Key])
    groups: dict[Key, set[int]] = field(default_factory=dict[Key, set[int]])
    done: dict[Key, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict[Key, tuple[np.ndarray, np.ndarray]])
    cells: dict[Key, int] = field(default_factory=dict[Key, int])
    steps: list[tuple[int, Scope, np.ndarray]] = field(default_factory=list[tuple[int, Scope, np.ndarray]])
    held: list[np.ndarray] = field(default_factory=list[np.ndarray])
    spent: int = 0

    def add(self, scope: Scope, table: np.ndarray) -> None:
        """One more table; the cost of a choice is their sum."""
        number = len(self.held)
        self.held.append(table)  # (tables are told apart by identity)
        self.tables[number] = (scope, table)
        for n in scope:
            self.at[n].add(number)

    def neighbours(self, node: int) -> Scope:
        """A node and those that share a table with it, in order."""
        return tuple(sorted({node}.union(*[self.tables[k][0] for k in self.at[node]])))

    def sort(self, node: int) -> None:
        """Find out what eliminating a node takes now."""
        held = [self.tables[k] for k in self.at[node]]
        scope = sorted({node}.union(*[s for s, _ in held]))
        place = {n: k for k, n in enumerate(scope)}
        parts = [(id(t), tuple([place[n] for n in s])) for s, t in held]  # (a list is quicker here)
        key = (place[node], tuple(sorted(parts)))
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

    def work(self, node: int) -> set[int]:
        """Eliminate a node; returns its neighbours."""
        key, scope = self.keys[node], self.neighbours(node)
        if key not in self.done:
            self.done[key] = self._least(node, scope)
            self.spent += self.cells[key]
        least, best = self.done[key]
        others = tuple(n for n in scope if n != node)
        self.steps.append((node, others, best))
        for k in list(self.at[node]):
            for n in self.tables.pop(k)[0]:
                self.at[n].discard(k)
        self.forget(node)
        self.add(others, least)
        return set(others)

    def _least(self, node: int, scope: Scope) -> tuple[np.ndarray, np.ndarray]:
        parts: list[Table] = []  # small ones go into larger ones first: the sum over all of the scope is what takes time
        for k in sorted(self.at[node], key=lambda k: (-self.tables[k][1].size, k)):
            nodes, table = self.tables[k]
            table = table.transpose(np.argsort(nodes)).reshape([self.sizes[n] if n in nodes else 1 for n in scope])
            into = next((m for m, (other, _) in enumerate(parts) if set(nodes) <= set(other)), -1)
            if into < 0:
                parts.append((nodes, table))
            else:
                parts[into] = (parts[into][0], parts[into][1] + table)
        total = sum((t for _, t in parts[1:]), parts[0][1])
        axis = scope.index(node)
        best = total.argmin(axis=axis)
        return np.take_along_axis(total, np.expand_dims(best, axis), axis).squeeze(axis), best.astype(np.int32)


def minimise(sizes: Sequence[int], tables: Sequence[Table], most: int) -> tuple[float, list[int], int] | None:
    """(least cost, a choice of that cost, cells worked out); None where a table would take more than ``most`` cells, or all too
    many times that.

    Args:
        tables: costs by nodes; equal ones should be one array.
    """
    state = Elimination(sizes, at=[set() for _ in sizes])
    for scope, table in tables:
        state.add(scope, table)
    for n in range(len(sizes)):
        state.sort(n)
    while state.groups:
        key = min(state.groups, key=lambda k: 0.0 if k in state.done else state.cells[k] / len(state.groups[k]))
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
    choice = [0] * len(sizes)
    for node, others, best in reversed(state.steps):
        choice[node] = int(best[tuple(choice[n] for n in others)])
    return float(sum(float(t) for _, t in state.tables.values())), choice, state.spent
