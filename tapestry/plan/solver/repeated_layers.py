"""Repeated subgraphs: one copy of equal layers stands for all of them, and what that finds is a start for the whole network.

A network of equal layers repeats itself every so many nodes. Nodes that many apart are held to one label: their costs add up,
pairs between two of them become costs of that label with itself. The folded network is a restriction of the whole one, so that
its best choice, unfolded, is a choice of the whole with the same cost. It bounds nothing: bounds stay those of the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Tables = dict[tuple[int, ...], np.ndarray]

PERIODS = 16  # distances that are tried
ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Folded:
    """A smaller network, and the node of it that stands for each node of the whole."""

    sizes: list[int]
    tables: Tables
    of: np.ndarray

    def unfold(self, choice: Sequence[int]) -> list[int]:
        """A choice of the whole, of the same cost."""
        return [int(c) for c in np.asarray(choice, np.int64)[self.of]]


def fold(sizes: Sequence[int], tables: Tables) -> Folded | None:
    """Hold nodes of equal layers to one label; None when nothing repeats itself.

    Args:
        tables: costs of single nodes and of pairs, by nodes in increasing order.
    """
    of = _classes(_codes(sizes, tables))
    count = int(of.max(initial=-1)) + 1
    if count == len(sizes):
        return None
    small = np.zeros(count, np.int64)
    small[of] = sizes
    out: Tables = {}
    for nodes, table in tables.items():
        key = tuple(int(n) for n in of[list(nodes)])
        if len(key) == 2 and key[0] == key[1]:
            key, table = key[:1], np.diagonal(table)
        elif len(key) == 2 and key[0] > key[1]:
            key, table = key[::-1], table.T
        out[key] = out[key] + table if key in out else table.astype(float)
    return Folded([int(n) for n in small], out, of)


def polish(sizes: Sequence[int], tables: Tables, choice: Sequence[int]) -> list[int]:
    """Iterated conditional modes (Besag 1986): each node in turn takes its best label, until none changes."""
    near: list[list[tuple[np.ndarray, int]]] = [[] for _ in sizes]
    unary = [np.zeros(n) for n in sizes]
    for nodes, table in tables.items():
        if len(nodes) == 1:
            unary[nodes[0]] = unary[nodes[0]] + table
        else:
            near[nodes[0]].append((table, nodes[1]))
            near[nodes[1]].append((table.T, nodes[0]))
    out, waiting = list(choice), dict.fromkeys(range(len(sizes)), 0)
    while waiting:
        n, times = next(iter(waiting.items()))
        del waiting[n]
        total = unary[n].copy()
        for table, other in near[n]:
            total += table[:, out[other]]
        best = int(total.argmin())
        if total[best] < total[out[n]]:
            out[n] = best
            waiting |= {other: times + 1 for _, other in near[n] if times < ROUNDS}
    return out


def _codes(sizes: Sequence[int], tables: Tables) -> np.ndarray:
    """A number for each node, equal where the number of labels and the tables of pairs with earlier nodes are."""
    kinds: dict[bytes, int] = {}
    into: list[list[int]] = [[] for _ in sizes]
    for nodes, table in tables.items():
        if len(nodes) == 2:
            into[nodes[1]].append(kinds.setdefault(repr(table.shape).encode() + table.tobytes(), len(kinds)))
    codes: dict[tuple[int, ...], int] = {}
    return np.array([codes.setdefault((n, *sorted(k)), len(codes)) for n, k in zip(sizes, into, strict=True)], np.int64)


def _classes(codes: np.ndarray) -> np.ndarray:
    """Nodes a period apart in a run of at least two periods share a number; numbers are consecutive."""
    count = len(codes)
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for i, c in enumerate(codes.tolist()):
        if c in last:
            gaps[i - last[c]] += 1
        last[c] = i
    spans = {p: _runs(codes, p) for p, _ in gaps.most_common(PERIODS)}
    root, free = np.arange(count), np.ones(count, bool)
    for p in sorted(spans, key=lambda p: (-sum(b - a for a, b in spans[p]), p)):
        for a, b in spans[p]:
            if free[a : b + p].all():
                root[a : b + p] = a + np.arange(b + p - a) % p
                free[a : b + p] = False
    return np.unique(root, return_inverse=True)[1].reshape(-1)


def _runs(codes: np.ndarray, period: int) -> list[tuple[int, int]]:
    """Ranges of at least one period in which every code comes again a period later."""
    same = np.concatenate([[False], codes[:-period] == codes[period:], [False]]).astype(np.int8)
    edge = np.flatnonzero(np.diff(same))
    return [(int(a), int(b)) for a, b in zip(edge[::2], edge[1::2], strict=True) if b - a >= period]
