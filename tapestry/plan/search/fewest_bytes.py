"""Of plans that take nearly the same time the one that sends least: the clock is not so exact, and what is not sent cannot be
late.

What travels is priced dearer, and the network answers again: a chain of operations then changes its cut as a whole. And as the
network prices every reader of a tensor by itself, where on the clock a footprint travels once, operations are let read what
another one gathers anyway: all that are alike, and do the same, together. A plan is taken where the clock says that it is as
good.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tapestry.ir.program import Reduce, Transfer, transfer_bytes
from tapestry.ir.syntax.printer import signature
from tapestry.plan.search.planner import ringed
from tapestry.plan.search.priced_plan import PricedPlan, choice_of, peak, priced_plan
from tapestry.plan.search.problem import Problem
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.network import Factor, Network, solve

NEARLY = 1.005  # of the best time
DEARER = (1.25, 2.0, 4.0, 16.0)  # times what travels costs
BEST = 2  # strategies of an operation that are put on the clock: those that take least by themselves
LARGE = 1 << 24  # cells of tables: with more, they are not made again


def fewest_bytes(found: PricedPlan, budget: Budget) -> PricedPlan:
    """The plan, or one that `preferred` is to it, of the same graph."""
    problem = found.problem
    if problem is None or not sends(found)[1]:
        return found
    merging = [Factor((i,), m.merging) for i, m in enumerate(problem.menus) if m.merging.any()]
    factors = [*problem.factors, *merging]
    tables = {id(f.table): f.table for f in factors}
    if sum(t.size for t in tables.values()) > LARGE:
        return found
    alone, choice = {id(f.table) for f in problem.factors if len(f.nodes) == 1}, choice_of(problem, found.plan)
    best, met, own = found, [choice], budget.part(SECOND)
    for times in DEARER:
        if own.over():
            break
        dear = {k: t if k in alone else t * times for k, t in tables.items()}
        dear |= {id(f.table): (times - 1) * f.table for f in merging}
        network = Network(problem.sizes, [Factor(f.nodes, dear[id(f.table)]) for f in factors])
        answer = solve(network, own, choice, quick=True, plain=True).choice
        if answer not in met:
            met.append(answer)
            other = ringed(priced_plan(problem, answer, found.bound))
            budget.spend(problem.lowering)
            if peak(other) <= problem.topo.device.memory and preferred(other, best, found.objective):
                best = other
    return best


def preferred(one: PricedPlan, best: PricedPlan, least: float) -> bool:
    """Whether a plan takes the place of the best one: it is clearly faster, or nearly as fast and sends fewer bytes, else in
    fewer transfers, else cuts operations that are alike more alike; ``least``: seconds that some plan takes."""
    if max(one.objective, best.objective) > NEARLY * min(one.objective, best.objective, least):
        return one.objective < best.objective
    return (*sends(one), one.objective) < (*sends(best), best.objective)


def sends(found: PricedPlan) -> tuple[int, int, int]:
    """Bytes, transfers, and kinds of operations with what cuts them."""
    steps = [s for s in found.program.steps if isinstance(s, Transfer | Reduce)]
    cuts = zip(found.plan.graph.ops, found.plan.strategies, strict=True)
    kinds = {(signature(op, found.plan.graph), s.dims) for op, s in cuts}
    return sum(transfer_bytes(s, found.program) for s in steps), len(steps), len(kinds)


def shared(found: PricedPlan, budget: Budget) -> PricedPlan:
    """The plan, or one that is `preferred` to it, of the same graph, in which operations read what others gather."""
    problem, own, met = found.problem, budget.part(SECOND), set[tuple[int, int, int]]()
    while problem and not own.over():
        choice = choice_of(problem, found.plan)
        new = next(((i, c) for i, c in _offers(problem, choice) if (id(problem.menus[i]), choice[i], c) not in met), None)
        if new is None:
            break
        i, c = new
        alike = id(problem.menus[i]), choice[i]
        met.add((*alike, c))
        changed = [c if (id(m), k) == alike else k for m, k in zip(problem.menus, choice, strict=True)]
        other = ringed(priced_plan(problem, changed, found.bound))
        own.spend(problem.lowering)
        if peak(other) <= problem.topo.device.memory and preferred(other, found, min(other.objective, found.objective)):
            found = other
    return found


def _offers(problem: Problem, choice: list[int]) -> Iterator[tuple[int, int]]:
    """Operations, each with a strategy that reads of some tensor just what another operation reads of it."""
    readers = dict[str, list[tuple[int, int]]]()
    for i, op in enumerate(problem.graph.ops):
        for k, t in enumerate(op.operands):
            readers.setdefault(t, []).append((i, k))
    for mine in (r for t, r in readers.items() if t in problem.graph.producers() and len(r) > 1):
        read = [(i, k, problem.menus[i].reads[choice[i]][k].tobytes()) for i, k in mine]
        for i, k, now in read:
            wanted = {r for j, _, r in read if j != i} - {now}
            menu = problem.menus[i]
            fitting = [c for c, r in enumerate(menu.reads) if r[k].tobytes() in wanted] if wanted else []
            yield from ((i, c) for c in sorted(fitting, key=lambda c: float(np.max(menu.own[:, c]) + menu.merging[c]))[:BEST])
