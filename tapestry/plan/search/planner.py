"""Find the plan with the least simulated time among those tried, and a lower bound on all plans.

The first is the choice of strategies of which all costs add up to least (what would be, if nothing overlapped and nothing were
shared), within the memory. Others answer weighted sums that every plan takes at least, which also give the bound
(`plan.search.paths`, `plan.search.branches`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tapestry.errors import PlanError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Layout, still
from tapestry.ir.program import Transfer
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.layout_constraints import LayoutConstraints
from tapestry.plan.search.any_order import least_seconds
from tapestry.plan.search.branches import KNOWN, Branching, Usages
from tapestry.plan.search.memory_limit import demands, within_memory
from tapestry.plan.search.priced_plan import PricedPlan, choice_of, on_the_clock, peak, priced_plan, summed, too_big
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.search.resume import Start
from tapestry.plan.search.time_bound import Game
from tapestry.plan.search.to_ring import with_rings
from tapestry.plan.simulate import simulate
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.network import evaluate, solve
from tapestry.plan.solver.pairs import PROVED, proved
from tapestry.plan.solver.shared_prices import Demand
from tapestry.plan.strategy import Pin
from tapestry.plan.topology import Topology, to_data


def beginning(problem: Problem, start: Start) -> list[int] | None:
    """The earlier strategies as a choice; None when hardly any is offered here.

    An operation without one takes the choice that is cheapest together with those of its neighbours.
    """
    choice = [-1] * len(problem.menus)
    for i, (op, menu) in enumerate(zip(problem.graph.ops, problem.menus, strict=True)):
        known = start.strategies.get(op.outs[0])
        known = None if known is None else still(known)
        if known is not None and known in menu.strategies:
            choice[i] = menu.strategies.index(known)
    if 2 * sum(c >= 0 for c in choice) < len(choice):
        return None
    out, missing = list(choice), {i for i, c in enumerate(choice) if c < 0}
    total = {i: np.zeros(len(problem.menus[i].strategies)) for i in missing}
    for f in problem.factors:
        for k, n in enumerate(f.nodes):
            if n in missing and all(out[m] >= 0 for m in f.nodes if m != n):
                total[n] = total[n] + f.table[tuple(slice(None) if j == k else out[m] for j, m in enumerate(f.nodes))]
    for i in missing:
        out[i] = int(total[i].argmin())
    return out


def fingerprint(problem: Problem) -> str:
    """SHA-256 of all that the bound of a problem depends on: graph, devices, layouts, strategies, costs and memory."""
    found = hashlib.sha256(b"simulated seconds")
    seen: dict[int, int] = {}

    def add(*arrays: np.ndarray) -> None:
        for a in arrays:
            found.update(f"{a.dtype.str}{a.shape}".encode())
            found.update(np.ascontiguousarray(a).tobytes())

    found.update(to_text(problem.graph).encode())
    for part in (
        to_data(problem.topo),
        sorted(problem.inputs.items()),
        sorted(problem.outputs.items()),
        sorted(problem.streamed),
    ):
        found.update(repr(part).encode())
    for menu in problem.menus:
        if id(menu) not in seen:
            seen[id(menu)] = len(seen)
            found.update(repr(menu.strategies).encode())
            add(menu.seconds, menu.state_bytes, menu.outs_bytes)
        found.update(f"menu {seen[id(menu)]}".encode())
    for f in problem.factors:
        if id(f.table) not in seen:
            seen[id(f.table)] = len(seen)
            add(f.table)
        found.update(f"table {f.nodes} {seen[id(f.table)]}".encode())
    return found.hexdigest()


CLOSE = 2.0 * SECOND  # for branches that close what the game leaves
SMALL = 100  # operations of graphs for which that is tried
TINY = 24  # operations of graphs for which it is tried in passing too
HOPELESS = 1.15  # of what the costs of a plan add up to: the clock is not asked, where that takes long
ROUNDS = 48  # of the bound on time; answers that may be faster are put on the clock


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


def fitting(
    problem: Problem, budget: Budget, start: Start | None = None, upper: float = np.inf, *, small: int = SMALL
) -> PricedPlan:
    """The best plan of a problem within the devices' memory; a search that cannot get below ``upper`` ends early.

    Args:
        small: operations of a graph for which branches close what the bound leaves.

    Raises:
        TooBig: no plan fits, or none was found in time.
    """
    best, limit = spatial(problem, budget, start, upper=upper, small=small), problem.topo.device.memory
    if peak(best) > limit:
        raise too_big(best, limit, budget)
    return best


def spatial(
    problem: Problem,
    budget: Budget,
    start: Start | None = None,
    squeeze: bool = True,
    clock: bool = True,
    upper: float = np.inf,
    small: int = SMALL,
) -> PricedPlan:
    """The best plan of a problem that fits; where none was found, the one with the least memory.

    Args:
        start: what an earlier search found.
        squeeze: whether to look once more near the plan with the least memory before giving up.
        upper: no plan that takes as long is of use.
        small: operations of a graph for which branches close what the bound leaves.
        clock: whether simulated time counts; else the costs added up, and there is no bound.
    """
    limit = problem.topo.device.memory
    choice = beginning(problem, start) if start else None
    bound = start.bound if start and np.isfinite(start.bound) and fingerprint(problem) == start.key else -np.inf
    begun = ringed(priced_plan(problem, choice, bound)) if choice else None
    if begun is not None and (peak(begun) > limit or not np.isfinite(begun.objective)):
        begun = None
    if begun is not None and begun.proved:
        return begun
    solution = solve(problem.network, budget, choice)
    first = priced_plan(problem, solution.choice, -np.inf)
    budget.spend(problem.lowering)
    best, tight = ringed(first), False
    if peak(best) > limit and max(problem.sizes, default=1) > 1:
        best, tight = ringed(within_memory(problem, first, budget, begun, -np.inf, squeeze)), True
    if peak(best) > limit or not clock:
        return best
    found = _on_the_clock(problem, _faster(begun, best), budget, bound, upper, tight=tight, small=small)
    return replace(found, unlimited=first if tight else None)


def _on_the_clock(
    problem: Problem, best: PricedPlan, budget: Budget, bound: float, upper: float, *, tight: bool, small: int
) -> PricedPlan:
    """A plan that takes no longer than one that fits, and a bound at least as high; ``tight``: it is of plans that fit. From
    ``upper`` seconds on no plan is of use."""
    limit = problem.topo.device.memory
    uses: Sequence[Demand] = demands(problem, surely=True) if tight else ()
    limits = [float(limit)] * len(problem.graph.ops) if tight else []
    game, watched, met = Game(problem, uses, limits), max(problem.sizes, default=1) > 1, [choice_of(problem, best.plan)]
    if watched:
        budget.found(best.objective, bound)
    most = HOPELESS * summed(best) if problem.lowering > SECOND else np.inf
    for choice, least in game.play(choice_of(problem, best.plan), ROUNDS, budget):
        if least < best.objective * (1 - PROVED) and evaluate(choice, problem.factors) < most:
            budget.spend(problem.lowering)
            other = ringed(priced_plan(problem, choice, -np.inf))
            best = _faster(other, best) if peak(other) <= limit else best
        if watched:
            budget.found(best.objective, max(bound, game.bound))
        met.append(choice)
        if proved(best.objective, game.bound) or game.bound >= upper:
            break  # no plan of this form is better, or than that of another one
    bound = max(bound, game.bound)
    if watched and len(problem.menus) <= small and bound < min(best.objective, upper) * (1 - PROVED):
        usages = Usages(uses, limits, game.price)
        best, bound = _branched(problem, best, budget.part(CLOSE), bound, upper, met=met, usages=usages)
        budget.found(best.objective, bound)
    return replace(best, bound=min(bound, best.objective))


def _branched(
    problem: Problem, best: PricedPlan, budget: Budget, bound: float, upper: float, *, met: list[list[int]], usages: Usages
) -> tuple[PricedPlan, float]:
    """A plan at least as good, and a bound: of all choices by branches, while there is work for them.

    Args:
        bound: one that is known.
        upper: seconds from which on no plan is of use.
        met: choices that answered the game.
    """
    limit = problem.topo.device.memory

    def clock(choice: Sequence[int]) -> tuple[float, float]:
        nonlocal best
        plain = priced_plan(problem, choice, -np.inf)
        fitting = [p for p in (plain, in_rings(plain)) if p is not None and peak(p) <= limit]
        for p in fitting:
            best = _faster(p, best)
        seconds = [p.objective for p in fitting]
        least = [least_seconds(simulate(p.plan, p.program, problem.topo)) for p in fitting if np.isfinite(p.objective)]
        return min(seconds, default=np.inf), min(least, default=np.inf)

    search = Branching(problem, clock, min(best.objective, upper), budget, usages)
    bound = max(bound, search.search(met[-KNOWN:], bound))
    return best, bound


def _faster(one: PricedPlan | None, best: PricedPlan) -> PricedPlan:
    """The one that takes less time; the second unless the first one clearly does."""
    return one if one is not None and one.objective < best.objective * (1 - PROVED) else best


def ringed(best: PricedPlan) -> PricedPlan:
    """The plan with gathers of keys and values as rings, where only so it fits (or is nearer to it), or where it is faster."""
    assert best.problem
    new, limit = in_rings(best), best.problem.topo.device.memory
    if new is None:
        return best
    if peak(best) > limit:
        return new if peak(new) < peak(best) else best
    return _faster(new, best) if peak(new) <= limit else best


def in_rings(best: PricedPlan) -> PricedPlan | None:
    """The plan with gathers of keys and values as rings; ``None`` where nothing is gathered."""
    assert best.problem
    topo = best.problem.topo
    plan = with_rings(best.plan, topo)
    if plan is None:
        return None
    program, timed = on_the_clock(best.problem, plan)
    if not any(isinstance(s, Transfer) and s.kind == "permute" for s in program.steps):
        return None
    return replace(best, plan=plan, program=program, objective=timed.total)


def cheapest(
    problems: Sequence[Problem], budget: Budget, start: Start | None = None, upper: float = np.inf, *, small: int = SMALL
) -> PricedPlan:
    """The cheapest plan of the problems that several ways to share out the mesh axes make; its bound holds for all of them.

    Raises:
        PlanError: no problem has a plan that fits; the first one's.
    """
    plans: list[PricedPlan] = []
    failed: list[PlanError] = []
    for problem in problems:
        try:
            plans.append(fitting(problem, budget, start, upper, small=small))
        except PlanError as e:
            failed.append(e)
    if not plans:
        raise failed[0]
    best = min(plans, key=lambda p: p.objective)
    return best if len(plans) == 1 else replace(best, bound=min(p.bound for p in plans))
