"""The least cost of a network for every choice of every node, exactly: by elimination, there and back.

On the way there each node goes with the sum of its tables (Bertelè and Brioschi 1972); on the way back that sum gets the
least cost of all that went after it. What is left of it is the least cost of all choices that agree on the nodes in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tapestry.plan.solver.dominance import PairTable
from tapestry.plan.solver.elimination import AXES

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
