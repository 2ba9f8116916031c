"""A network of choices with costs on single nodes and on groups of nodes, minimised exactly.

A dual bound (`plan.solver.dual`) rules out most labels; variable elimination (Bertelè and Brioschi 1972) removes nodes
while the tables it makes stay small; what is then left, if anything, is solved by HiGHS in its local-polytope form: a variable
for every choice of a node and for every joint choice of a group, tied by marginalisation rows. (The weak rows
``e >= s_i + s_j - 1`` are what makes other solvers slow.) Networks of many nodes go to `plan.solver.pairwise`, which works on
all of them at once and also keeps to limits on usages over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.dominance import undominated
from tapestry.plan.solver.dual import Dual, ascend, offer, survivors
from tapestry.plan.solver.pairs import FORBIDDEN, Instance, Solution
from tapestry.plan.solver.repeated_layers import fold, polish

Tables = dict[tuple[int, ...], np.ndarray]

TABLE_LIMIT = 1 << 22  # entries of the largest table that elimination may make
AXES = 32  # of a table; numpy has at most 64
FOLDED = 0.2  # of the time left, for equal layers with equal labels
MANY = 1000  # nodes from which on a network of pairs is solved as a whole, and not node by node


@dataclass(frozen=True, slots=True)
class Factor:
    """Costs of the joint choices of some nodes: ``table[choice of nodes[0], choice of nodes[1], …]``."""

    nodes: tuple[int, ...]
    table: np.ndarray


def solve(
    sizes: Sequence[int],
    factors: Sequence[Factor],
    time_limit: float | Budget = 60.0,
    start: Sequence[int] | None = None,
    bound: float = -np.inf,
) -> Solution:
    """Minimise the sum of all factors.

    Labels that others beat go first (`plan.solver.dominance`). Then a dual bound: it is often tight, and otherwise rules out
    most labels. Elimination solves the rest, and HiGHS the core on which elimination's tables would grow too large. (Groups
    of three and more skip the dual bound.)

    Args:
        sizes: number of choices of each node.
        factors: costs; a group of nodes may appear more than once. Infinite costs forbid.
        time_limit: seconds, or a budget that may be interrupted. A choice and an honest bound come out of none at all.
        start: a choice that is known; what is found is never worse.
        bound: a lower bound that is already proved.
    """
    budget = Budget.of(time_limit)
    if start is not None and (cost := evaluate(start, factors)) - bound <= 1e-9 * abs(cost):
        return Solution(list(start), cost, min(bound, cost))
    fewer = undominated(sizes, [(f.nodes, f.table) for f in factors])
    if fewer is not None:
        small = [Factor(*t) for t in fewer.restrict([(f.nodes, f.table) for f in factors])]
        found = _solve(fewer.sizes, small, budget, None if start is None else fewer.shrink(start), bound)
        found = Solution(fewer.restore(found.choice), found.objective, found.bound)
    else:
        found = _solve(sizes, factors, budget, start, bound)
    objective = evaluate(found.choice, factors)
    if start is not None and (cost := evaluate(start, factors)) < objective:
        found, objective = Solution(list(start), cost, found.bound), cost
    return Solution(found.choice, objective, min(max(found.bound, bound), objective))


def _solve(
    sizes: Sequence[int], factors: Sequence[Factor], budget: Budget, start: Sequence[int] | None, bound: float
) -> Solution:
    tables = _merged(factors)
    if any(len(k) > 2 for k in tables):
        return _finish(sizes, tables, factors, budget, -np.inf, None)
    if len(sizes) >= MANY:
        return _many(sizes, tables, factors, budget, start, bound)
    return _few(sizes, tables, factors, budget, start)


def _many(
    sizes: Sequence[int], tables: Tables, factors: Sequence[Factor], budget: Budget, start: Sequence[int] | None, bound: float
) -> Solution:
    from tapestry.plan.solver import pairwise  # late: brings HiGHS

    begin = _folded(sizes, tables, budget.share(FOLDED))
    known = [c for c in (start, begin) if c is not None]
    best = min(known, key=lambda c: evaluate(c, factors), default=None)
    found = pairwise.solve(_instance(sizes, tables), budget, best, bound)
    objective = evaluate(found.choice, factors)
    return Solution(found.choice, objective, min(found.bound, objective))


def _few(
    sizes: Sequence[int], tables: Tables, factors: Sequence[Factor], budget: Budget, start: Sequence[int] | None
) -> Solution:
    dual = ascend(sizes, tables, budget.share(1 / 3), start)
    if dual.objective - dual.bound() > 1e-9 * abs(dual.objective):
        begin = _folded(sizes, tables, budget.share(FOLDED))
        if begin is not None:
            offer(dual, begin)
    if dual.objective - dual.bound() <= 1e-9 * abs(dual.objective) or budget.over():
        objective = evaluate(dual.choice, factors)  # infinite when every choice is forbidden
        return Solution(dual.choice, objective, min(dual.bound(), objective))
    kept = survivors(dual)
    small = _kept(tables, kept)
    found = _finish([len(k) for k in kept], small, [Factor(k, t) for k, t in small.items()], budget, dual.bound(), dual)
    choice = [int(kept[n][c]) for n, c in enumerate(found.choice)]
    return Solution(choice, evaluate(choice, factors), found.bound)


def _kept(tables: Tables, kept: Sequence[np.ndarray]) -> Tables:
    """The tables over the labels that are left; a node with one label is settled and is no axis of a table of several."""
    out: Tables = {}
    for nodes, table in tables.items():
        open_ = tuple(n for n in nodes if len(kept[n]) > 1) or nodes[:1]
        small = table[np.ix_(*(kept[n] for n in nodes))].reshape([len(kept[n]) for n in open_])
        out[open_] = out[open_] + small if open_ in out else small
    return out


def _folded(sizes: Sequence[int], tables: Tables, budget: Budget) -> list[int] | None:
    """The best choice with equal labels in equal layers, each node then improved on its own; None where nothing repeats."""
    small = fold(sizes, tables)
    if small is None:
        return None
    found = solve(small.sizes, [Factor(k, t) for k, t in small.tables.items()], budget)
    return polish(sizes, tables, small.unfold(found.choice))


def _finish(
    sizes: Sequence[int], tables: Tables, factors: Sequence[Factor], budget: Budget, bound: float, dual: Dual | None
) -> Solution:
    """Eliminate, and solve the core that is left; never worse than the dual's own choice."""
    order, core, constant = _eliminate(sizes, tables, budget)
    choice = [0] * len(sizes)
    value = constant
    if core:
        nodes = sorted({n for k in core for n in k})
        picked, lower = solve_highs(sizes, nodes, [Factor(k, t) for k, t in core.items()], budget)
        value += lower
        for n, c in picked.items():
            choice[n] = c
    for node, joint in reversed(order):
        at = tuple(choice[n] for n in joint.nodes[1:])
        choice[node] = int(np.argmin(joint.table[(slice(None), *at)]))
    objective = evaluate(choice, factors)
    if dual is not None and dual.objective < objective:
        original = [int(np.flatnonzero(k == c)[0]) for k, c in zip(survivors(dual), dual.choice, strict=True)]
        choice, objective = original, dual.objective
    return Solution(choice, objective, min(max(bound, value), objective))


def _eliminate(sizes: Sequence[int], tables: Tables, budget: Budget) -> tuple[list[tuple[int, Factor]], Tables, float]:
    """(nodes removed with their joined tables, in order; the tables left; the cost settled so far)."""
    tables = dict(tables)
    order: list[tuple[int, Factor]] = []
    touching: dict[int, set[tuple[int, ...]]] = {i: set() for i in range(len(sizes))}
    for nodes in tables:
        for n in nodes:
            touching[n].add(nodes)
    constant = 0.0
    queue = {n: _join_size(n, touching, sizes) for n in touching}
    while queue:
        node = min(queue, key=lambda n: queue[n])
        if queue.pop(node) > TABLE_LIMIT or budget.over():
            break
        joint = _join(node, [Factor(k, tables.pop(k)) for k in touching[node]], sizes)
        order.append((node, joint))
        for nodes in list(touching[node]):
            for n in nodes:
                touching[n].discard(nodes)
        rest, table = joint.nodes[1:], joint.table.min(axis=0)
        if not rest:
            constant += float(table)
            continue
        tables[rest] = tables[rest] + table if rest in tables else table
        for n in rest:
            touching[n].add(rest)
        for n in rest:
            queue[n] = _join_size(n, touching, sizes)
    return order, tables, constant


def evaluate(choice: Sequence[int], factors: Sequence[Factor]) -> float:
    """Cost of a choice."""
    return float(sum(f.table[tuple(choice[n] for n in f.nodes)] for f in factors))


def _merged(factors: Sequence[Factor]) -> Tables:
    """One table per group of nodes, axes in increasing node order."""
    out: Tables = {}
    for f in factors:
        order = sorted(range(len(f.nodes)), key=lambda k: f.nodes[k])
        nodes = tuple(f.nodes[k] for k in order)
        table = np.transpose(f.table, order)
        out[nodes] = out[nodes] + table if nodes in out else table.astype(float)
    return out


def _instance(sizes: Sequence[int], tables: Tables) -> Instance:
    """Flat arrays of nodes and pairs, without usages."""
    unary = [np.zeros(n) for n in sizes]
    pairs: list[tuple[int, ...]] = []
    flat: list[np.ndarray] = []
    for nodes, table in tables.items():
        if len(nodes) == 1:
            unary[nodes[0]] = table
        else:
            pairs.append(nodes)
            flat.append(table.ravel())
    costs = np.concatenate(unary) if unary else np.zeros(0)
    joint = np.concatenate(flat) if flat else np.zeros(0)
    return Instance(
        sizes=np.array(sizes, np.int64),
        unary=np.where(np.isfinite(costs), costs, FORBIDDEN),
        usage=np.zeros(len(costs)),
        intervals=np.zeros((len(sizes), 2), np.int64),
        pairs=np.array(pairs, np.int64).reshape(-1, 2),
        tables=np.where(np.isfinite(joint), joint, FORBIDDEN),
    )


def _join_size(node: int, touching: dict[int, set[tuple[int, ...]]], sizes: Sequence[int]) -> int:
    nodes = {node}.union(*touching[node])
    return prod(sizes[n] for n in nodes) if len(nodes) <= AXES else TABLE_LIMIT + 1


def _join(node: int, parts: list[Factor], sizes: Sequence[int]) -> Factor:
    """Sum of the factors that touch a node, with the node first."""
    others = sorted({n for f in parts for n in f.nodes} - {node})
    nodes = (node, *others)
    out = np.zeros([sizes[n] for n in nodes])
    for f in parts:
        order = sorted(range(len(f.nodes)), key=lambda k: nodes.index(f.nodes[k]))
        shape = [sizes[n] if n in f.nodes else 1 for n in nodes]
        out += np.transpose(f.table, order).reshape(shape)
    return Factor(nodes, out)


def solve_highs(
    sizes: Sequence[int], nodes: Sequence[int], factors: Sequence[Factor], budget: Budget
) -> tuple[dict[int, int], float]:
    """The local-polytope mixed-integer program; returns a choice and a proven lower bound."""
    if budget.over():
        return _greedy(sizes, nodes, factors), float(sum(np.min(f.table) for f in factors))
    import highspy

    from tapestry.plan.solver.mip import run

    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("mip_rel_gap", 1e-9)
    scale = max((float(np.max(np.abs(f.table[np.isfinite(f.table)]), initial=0.0)) for f in factors), default=1.0) or 1.0
    single = {f.nodes[0]: f.table / scale for f in factors if len(f.nodes) == 1}
    start: dict[int, int] = {}
    columns = 0
    for n in nodes:
        costs = single.get(n, np.zeros(sizes[n]))
        start[n] = columns
        _add_columns(model, np.where(np.isfinite(costs), costs, 0.0), np.where(np.isfinite(costs), 1.0, 0.0))
        model.changeColsIntegrality(
            sizes[n], np.arange(columns, columns + sizes[n], dtype=np.int32),
            np.full(sizes[n], 1, np.uint8),
        )  # fmt: skip
        index = np.arange(columns, columns + sizes[n], dtype=np.int32)
        model.addRow(1.0, 1.0, sizes[n], index, np.ones(sizes[n]))
        columns += sizes[n]
    for f in (f for f in factors if len(f.nodes) > 1):
        columns = _add_factor(model, f, start, columns, scale)
    run(model, budget)
    if model.getInfo().primal_solution_status != 2:
        return _greedy(sizes, nodes, factors), float(sum(np.min(f.table) for f in factors))
    values = np.array(model.getSolution().col_value)
    chosen = {n: int(np.argmax(values[start[n] : start[n] + sizes[n]])) for n in nodes}
    return chosen, float(model.getInfo().mip_dual_bound) * scale


def _add_columns(model: object, cost: np.ndarray, upper: np.ndarray) -> None:
    none = np.zeros(0)
    model.addCols(  # type: ignore[attr-defined]
        len(cost), cost, np.zeros(len(cost)), upper, 0, np.zeros(len(cost), np.int32), none.astype(np.int32), none
    )


def _add_factor(model: object, f: Factor, start: dict[int, int], columns: int, scale: float) -> int:
    """Variables for the finite joint choices of a factor, and a row for every choice of each of its nodes."""
    finite = np.isfinite(f.table)
    where = np.argwhere(finite)
    _add_columns(model, f.table[finite] / scale, np.ones(len(where)))
    ids = np.arange(columns, columns + len(where), dtype=np.int32)
    for k, n in enumerate(f.nodes):
        for c in range(f.table.shape[k]):
            mine = ids[where[:, k] == c]
            index = np.append(mine, np.int32(start[n] + c)).astype(np.int32)
            weights = np.append(np.ones(len(mine)), -1.0)
            model.addRow(0.0, 0.0, len(index), index, weights)  # type: ignore[attr-defined]
    return columns + len(where)


def _greedy(sizes: Sequence[int], nodes: Sequence[int], factors: Sequence[Factor]) -> dict[int, int]:
    """Iterated conditional modes: each node in turn takes its best choice given the others."""
    choice = dict.fromkeys(nodes, 0)
    for _ in range(20):
        changed = False
        for n in nodes:
            total = np.zeros(sizes[n])
            for f in factors:
                if n in f.nodes:
                    total = total + f.table[tuple(slice(None) if m == n else choice[m] for m in f.nodes)]
            best = int(np.argmin(total))
            changed, choice[n] = changed or best != choice[n], best
        if not changed:
            break
    return choice
