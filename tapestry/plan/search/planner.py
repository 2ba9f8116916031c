"""Find a plan: the cheapest choice of strategies, then the cheapest that keeps to the memory, with a proven bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tapestry.errors import PlanError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Layout
from tapestry.plan.layout_constraints import LayoutConstraints
from tapestry.plan.search import to_ring
from tapestry.plan.search.memory_limit import within_memory
from tapestry.plan.search.priced_plan import PricedPlan, peak, priced_plan, too_big
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.search.resume import Start, beginning, fingerprint
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.network import solve
from tapestry.plan.strategy import Pin
from tapestry.plan.topology import Topology


def search(
    graph: Graph,
    topo: Topology,
    *,
    pins: Mapping[int, tuple[Pin, ...]] | None = None,
    inputs: Mapping[str, Layout] | None = None,
    outputs: Mapping[str, Layout] | None = None,
    fixed: LayoutConstraints = LayoutConstraints(),  # noqa: B008  (immutable)
    time_limit: float | Budget | None = None,
    start: Start | None = None,
) -> PricedPlan:
    """The best plan that the strategies allow within the devices' memory.

    Args:
        pins: splits that the user insists on, by operation.
        inputs, outputs: layouts fixed for graph inputs (or weights) and outputs.
        fixed: what annotations of the model say of its operations.
        time_limit: seconds, a budget, or nothing: the usual amount of work. A plan comes out of none at all.
        start: what an earlier search found; what is found is never worse, as far as it applies.

    Raises:
        PlanError: no plan fits (or was found in time); says by how many bytes, on which device, and for which tensors.
    """
    problem, budget = build(graph, topo, pins or {}, inputs or {}, outputs or {}, fixed), Budget.of(time_limit)
    budget.spend(problem.work)
    return fitting(problem, budget, start)


def fitting(problem: Problem, budget: Budget, start: Start | None = None) -> PricedPlan:
    """The best plan of a problem within the devices' memory.

    Raises:
        TooBig: no plan fits, or none was found in time.
    """
    best, limit = spatial(problem, budget, start), problem.topo.device.memory
    if peak(best) > limit:
        raise too_big(best, limit, budget)
    return best


def spatial(problem: Problem, budget: Budget, start: Start | None = None, squeeze: bool = True) -> PricedPlan:
    """The best plan of a problem that fits; where none was found, the one with the least memory.

    Args:
        start: what an earlier search found.
        squeeze: whether to look once more near the plan with the least memory before giving up.
    """
    limit = problem.topo.device.memory
    choice = beginning(problem, start) if start else None
    bound = start.bound if start and np.isfinite(start.bound) and fingerprint(problem) == start.key else -np.inf
    begun = priced_plan(problem, choice, bound) if choice else None
    if begun is not None and (peak(begun) > limit or not np.isfinite(begun.objective)):
        begun = None
    if begun is not None and begun.proved:
        return begun
    solution = solve(problem.network, budget, choice)
    first = priced_plan(problem, solution.choice, max(solution.bound, bound))
    budget.spend(problem.lowering)
    best = with_rings(first)
    if peak(best) <= limit or max(problem.sizes, default=1) == 1:
        return best
    return with_rings(within_memory(problem, first, budget, begun, bound, squeeze))


def with_rings(best: PricedPlan) -> PricedPlan:
    """The plan with gathers of keys and values as rings, where only so it fits (or is nearer to it), or where it is faster."""
    assert best.problem
    topo = best.problem.topo
    other = to_ring.with_rings(best.plan, topo)
    if other is None:
        return best
    plan, program, extra = other
    new = replace(best, plan=plan, program=program, objective=best.objective + extra)
    if peak(best) > topo.device.memory:
        return new if peak(new) < peak(best) else best
    right = peak(new) <= topo.device.memory and to_ring.faster((plan, program), (best.plan, best.program), topo)
    return new if right else best


def cheapest(problems: Sequence[Problem], budget: Budget, start: Start | None = None) -> PricedPlan:
    """The cheapest plan of the problems that several ways to share out the mesh axes make; its bound holds for all of them.

    Raises:
        PlanError: no problem has a plan that fits; the first one's.
    """
    plans: list[PricedPlan] = []
    failed: list[PlanError] = []
    for problem in problems:
        try:
            plans.append(fitting(problem, budget, start))
        except PlanError as e:
            failed.append(e)
    if not plans:
        raise failed[0]
    best = min(plans, key=lambda p: p.objective)
    return best if len(plans) == 1 else replace(best, bound=min(p.bound for p in plans))
