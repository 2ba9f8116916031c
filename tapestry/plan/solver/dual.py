"""A lower bound by reparametrisation, a good choice, and the labels that no optimal choice can use.

Costs are moved between nodes and pairs without changing any total; the sum of all minima is then a lower bound. One node
at a time collects what its pairs can spare and passes it on in the direction of the sweep: sequential tree-reweighted
message passing (Kolmogorov 2006, 2015), written on the tables themselves, so that the bound never decreases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tapestry.plan.solver.budget import Budget


@dataclass(slots=True)
class Dual:
    """Reparametrised costs of single nodes and of pairs (i < j), and the best choice seen."""

    unary: list[np.ndarray]
    pairs: dict[tuple[int, int], np.ndarray]
    original: tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]
    edges: list[list[tuple[int, int]]] = field(default_factory=list[list[tuple[int, int]]])
    choice: list[int] = field(default_factory=list[int])
    objective: float = np.inf

    def bound(self) -> float:
        """Sum of all minima."""
        return float(sum(u.min() for u in self.unary) + sum(p.min() for p in self.pairs.values()))


def ascend(
    sizes: Sequence[int],
    tables: dict[tuple[int, ...], np.ndarray],
    budget: Budget,
    start: Sequence[int] | None = None,
    sweeps: int = 300,
) -> Dual:
    """Raise the bound until it stops rising, meets the best choice, or time is up; at least one sweep.

    Args:
        tables: costs of single nodes and of pairs, by nodes in increasing order; infinite costs forbid.
        start: a choice that is already known.
    """
    dual = _start(sizes, tables)
    if start is not None:
        offer(dual, list(start))
    last = -np.inf
    for sweep in range(sweeps):
        for reverse in (False, True):
            for i in reversed(range(len(sizes))) if reverse else range(len(sizes)):
                _pass_on(dual, i, reverse)
        over = budget.over()
        if sweep % 5 == 4 or sweep == 0 or over:
            _decode(dual)
            bound = dual.bound()
            closed = dual.objective - bound <= 1e-9 * abs(dual.objective)
            if closed or over or bound - last <= 1e-7 * abs(bound):
                break
            last = bound
    return dual


def offer(dual: Dual, choice: list[int]) -> None:
    """Keep a choice when it is the best so far."""
    unary, pairs = dual.original
    cost = float(sum(u[c] for u, c in zip(unary, choice, strict=True)))
    cost += float(sum(p[choice[a], choice[b]] for (a, b), p in pairs.items()))
    if cost < dual.objective:
        dual.choice, dual.objective = choice, cost


def _start(sizes: Sequence[int], tables: dict[tuple[int, ...], np.ndarray]) -> Dual:
    finite = [float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) for t in tables.values()]
    large = 4 * (sum(finite) + 1e-12)  # stands for infinity: dearer than any allowed choice
    unary = [np.zeros(n) for n in sizes]
    pairs: dict[tuple[int, int], np.ndarray] = {}
    edges: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for nodes, table in tables.items():
        costs = np.where(np.isfinite(table), table, large)
        if len(nodes) == 1:
            unary[nodes[0]] = unary[nodes[0]] + costs
        else:
            key = (nodes[0], nodes[1])
            pairs[key] = costs.copy()
            edges[key[0]].append(key)
            edges[key[1]].append(key)
    kept = [u.copy() for u in unary], {k: p.copy() for k, p in pairs.items()}
    return Dual(unary, pairs, kept, edges)


def _pass_on(dual: Dual, i: int, reverse: bool) -> None:
    """Collect at node i what its pairs can spare, and share it among the pairs that the sweep meets next."""
    forward: list[tuple[int, int]] = []
    u = dual.unary[i]
    for key in dual.edges[i]:
        p = dual.pairs[key]
        if key[0] == i:
            spare = p.min(axis=1)
            p -= spare[:, None]
        else:
            spare = p.min(axis=0)
            p -= spare
        u = u + spare
        if (key[0] == i) != reverse:
            forward.append(key)
    if forward:
        share = u / max(len(forward), len(dual.edges[i]) - len(forward))
        for key in forward:
            dual.pairs[key] += share[:, None] if key[0] == i else share
        u = u - share * len(forward)
    dual.unary[i] = u


def _decode(dual: Dual) -> None:
    """A choice, node after node, then improved one node at a time; kept when it is the best so far."""
    choice: list[int] = []
    for i in range(len(dual.unary)):
        total = dual.unary[i].copy()
        for key in dual.edges[i]:
            p = dual.pairs[key]
            if key[0] == i:
                total += p.min(axis=1)
            else:
                total += p[choice[key[0]]]
        choice.append(int(total.argmin()))
    unary, pairs = dual.original
    for _ in range(10):
        changed = False
        for i in range(len(unary)):
            total = unary[i].copy()
            for key in dual.edges[i]:
                total += pairs[key][:, choice[key[1]]] if key[0] == i else pairs[key][choice[key[0]]]
            best = int(total.argmin())
            if total[best] < total[choice[i]]:
                choice[i], changed = best, True
        if not changed:
            break
    offer(dual, choice)


def survivors(dual: Dual) -> list[np.ndarray]:
    """For each node, the labels that a choice at least as good as the best one seen may use.

    Taking a label costs at least the bound plus what its own terms are above their minima.
    """
    bound = dual.bound()
    slack = dual.objective - bound + 1e-9 * abs(dual.objective)
    out: list[np.ndarray] = []
    for i, u in enumerate(dual.unary):
        extra = u - u.min()
        for key in dual.edges[i]:
            p = dual.pairs[key]
            extra = extra + (p.min(axis=1) if key[0] == i else p.min(axis=0)) - p.min()
        keep = extra <= slack
        keep[dual.choice[i]] = True
        out.append(np.flatnonzero(keep))
    return out
