"""The planner's solver: nodes with choices, costs of single nodes and of groups, and usages of memory over time.

`solve` gives a choice and a certified lower bound. Choices that others beat go first (`plan.solver.elimination`). Networks that
are narrow enough are solved by elimination: exactly without limits, with prices where there are some
(`plan.solver.lagrange`). What is left goes to the search on flat arrays (`plan.solver.incumbent`): groups of three and more
nodes become a node of their own whose choices are the joint ones, and costs and usages are laid out flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.dominance import Undominated, undominated
from tapestry.plan.solver.pairs import FORBIDDEN, PROVED, Instance, Solution, Usage, proved
from tapestry.plan.solver.shared_prices import WORTH, Demand, SharedPrices

FLAT = 400_000  # joint choices of all pairs: larger networks with limits are not laid out flat
BRIEF = 20_000  # joint choices of all pairs up to which a quick search goes on where prices leave little of a gap
ROUGH = 0.01  # of the cost: how near an answer that is one of many has to be there
BEATEN = 200.0  # units for a cell of a table in which choices that others beat are sought, about
MOST = 20_000_000  # the same without limits, where a solve is one of many


@dataclass(frozen=True, slots=True)
class Factor:
    """Costs of the joint choices of some nodes: ``table[choice of nodes[0], choice of nodes[1], …]``; infinite ones forbid."""

    nodes: tuple[int, ...]
    table: np.ndarray


@dataclass(frozen=True, slots=True)
class Network:
    """Choices, costs and usages; ``limits[t]`` bounds the sum of all demands at time t. A group may have several factors."""

    sizes: Sequence[int]
    factors: Sequence[Factor]
    demands: Sequence[Demand] = ()
    limits: Sequence[float] = ()

    def cells(self) -> int:
        """Joint choices of all groups."""
        return sum(f.table.size for f in self.factors if len(f.nodes) > 1)


def solve(
    net: Network,
    time_limit: float | Budget | None = None,
    start: Sequence[int] | None = None,
    bound: float = -np.inf,
    gap: float = PROVED,
    quick: bool = False,
    plain: bool = False,
    price: np.ndarray | None = None,
) -> Solution:
    """Minimise the sum of all factors within the limits.

    Args:
        time_limit: seconds, a budget, or nothing: the usual amount of work. A choice and an honest bound come out of 0.
        start: a choice to improve on; one that keeps to the limits is never made worse.
        bound: a lower bound that is already proved.
        gap: the search ends when no choice can be cheaper by more than this part of the cost; infinite: any choice will do.
        quick: bound and improve once, however much of the budget is left.
        plain: choices that others beat are not sought first: that takes longer than a solve that is one of many.
        price: over time, of what is used, where better ones are looked for first; of an earlier solution.

    Returns:
        The best choice, its cost and a bound. The cost is infinite when no choice within the limits was found, and so is the
        bound when there is none.
    """
    from tapestry.plan.solver import pairwise

    given, budget = start, Budget.of(time_limit)
    if start is not None and within(net, start) and proved(cost := evaluate(start, net.factors), bound):
        return Solution(list(start), cost, min(bound, cost))
    fewer, small = _without_beaten(net, budget, plain) if not plain or net.cells() > FLAT else (None, net)  # (those repeat)
    start = fewer.shrink(start) if fewer is not None and start is not None else start
    exact = SharedPrices(small.sizes, [(f.nodes, f.table) for f in small.factors], small.demands, np.array(small.limits, float))
    exact.once, exact.near = plain and fewer is None, ROUGH if plain and small.cells() > BRIEF else WORTH
    known = exact.search(price, gap, budget)
    if known is not None:  # all that there is to know without limits, or so near that a large network is not laid out flat
        bound = max(bound, known.bound)
        cells = small.cells()
        enough = max(gap, ROUGH if plain else WORTH) if quick and cells > BRIEF else gap
        if not small.demands or proved(known.objective, bound, enough) or cells > FLAT:
            return _given(net, fewer, known, given, bound)
        start = known.choice if np.isfinite(known.objective) else start
    elif plain and small.cells() > MOST:
        return _given(net, fewer, Solution([], np.inf, bound), given, bound)
    sizes, factors = _grouped(small)
    begin = None if start is None else [*start, *_of_groups(small, start)]
    result = pairwise.search(_instance(sizes, factors, small), budget, begin, bound, gap, quick).solution()
    result = Solution(result.choice[: len(net.sizes)], result.objective, result.bound, exact.price)
    return _given(net, fewer, result, given, bound)


def _without_beaten(net: Network, budget: Budget, counted: bool) -> tuple[Undominated | None, Network]:
    """The network of the choices that no other one beats; ``counted``: as work, where it is one of many."""
    budget.spend(BEATEN * sum(t.size for t in {id(f.table): f.table for f in net.factors}.values()) if counted else 0.0)
    tables = [(f.nodes, f.table) for f in net.factors]
    fewer = undominated(net.sizes, tables, [(d.node, d.amounts) for d in net.demands])
    if fewer is None:
        return None, net
    demands = [Demand(d.node, d.lo, d.hi, d.amounts[fewer.kept[d.node]]) for d in net.demands]
    return fewer, Network(fewer.sizes, [Factor(*t) for t in fewer.restrict(tables)], demands, net.limits)


def _given(net: Network, fewer: Undominated | None, found: Solution, given: Sequence[int] | None, bound: float) -> Solution:
    """What was found, in the numbers of the whole network, or the given choice where that is better."""
    choice = fewer.restore(found.choice) if fewer is not None and found.choice else found.choice or [0] * len(net.sizes)
    objective = evaluate(choice, net.factors) if np.isfinite(found.objective) else np.inf
    if given is not None and within(net, given) and (cost := evaluate(given, net.factors)) < objective:
        choice, objective = list(given), cost  # only by rounding, or where nothing was found in time
    return Solution(choice, objective, min(max(found.bound, bound), objective), found.price)


def evaluate(choice: Sequence[int], factors: Sequence[Factor]) -> float:
    """Cost of a choice."""
    return float(sum(f.table[tuple(choice[n] for n in f.nodes)] for f in factors))


def within(net: Network, choice: Sequence[int]) -> bool:
    """Whether a choice keeps to the limits."""
    used = np.zeros(len(net.limits))
    for d in net.demands:
        used[d.lo : d.hi] += d.amounts[choice[d.node]]
    return bool((used <= np.array(net.limits, float)).all())


def _grouped(net: Network) -> tuple[list[int], list[Factor]]:
    """Groups of three and more as nodes whose choices are the joint ones, each tied to its members."""
    sizes, factors = list(net.sizes), list[Factor]()
    for f in net.factors:
        if len(f.nodes) <= 2:
            factors.append(f)
            continue
        factors.append(Factor((len(sizes),), f.table.ravel()))
        for k, n in enumerate(f.nodes):
            joint = np.indices(f.table.shape)[k].reshape(-1, 1)
            factors.append(Factor((len(sizes), n), np.where(joint == np.arange(net.sizes[n]), 0.0, np.inf)))
        sizes.append(f.table.size)
    return sizes, factors


def _of_groups(net: Network, choice: Sequence[int]) -> list[int]:
    """The choices of the nodes that stand for groups."""
    groups = [f for f in net.factors if len(f.nodes) > 2]
    return [int(np.ravel_multi_index([choice[n] for n in f.nodes], f.table.shape)) for f in groups]


def _instance(sizes: Sequence[int], factors: Sequence[Factor], net: Network) -> Instance:
    """Flat arrays of nodes, pairs and usages."""
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    costs = np.zeros(first[-1])
    pairs = [f for f in factors if len(f.nodes) == 2]
    for f in factors:
        if len(f.nodes) == 1:
            costs[first[f.nodes[0]] : first[f.nodes[0] + 1]] += f.table
    joint = np.concatenate([f.table.ravel() for f in pairs]) if pairs else np.zeros(0)
    return Instance(
        sizes=np.array(sizes, np.int64),
        unary=np.where(np.isfinite(costs), costs, FORBIDDEN),
        pairs=np.array([f.nodes for f in pairs], np.int64).reshape(-1, 2),
        tables=np.where(np.isfinite(joint), joint, FORBIDDEN),
        usage=_usage(net, first),
    )


def _usage(net: Network, first: np.ndarray) -> Usage:
    if not net.demands:
        return Usage.none()
    count = [len(d.amounts) for d in net.demands]
    label = np.repeat([first[d.node] for d in net.demands], count)
    lo, hi = np.repeat([(d.lo, d.hi) for d in net.demands], count, axis=0).T
    label = label + np.arange(len(label)) - np.repeat(np.cumsum(count) - count, count)
    amount = np.concatenate([d.amounts for d in net.demands]).astype(float)
    used = (amount != 0) & (hi > lo)
    limits = np.array(net.limits, float)
    return Usage(label[used], lo[used], hi[used], amount[used], limits, np.arange(len(limits)))
