"""Of plans that take nearly the same time the one that sends least: the clock is not so exact, and what is not sent cannot be
late.

What travels is priced dearer, and the network answers again: a chain of operations then changes its cut as a whole. And as the
network knows neither what is hidden nor what travels once for several readers, kinds of operations are let do something else,
one at a time: all that are alike, and do the same, together. A plan is taken where the clock says that it is as good.
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
BEST = 4  # other choices of a kind of operations that are put on the clock
KINDS = 6.0 * SECOND  # for that


def fewest_bytes(found: PricedPlan, budget: Budget) -> PricedPlan:
    """The plan, or one that `preferred` is to it, of the same graph."""
    problem = found.problem
    if problem is None or not sends(found)[1]:
        return found
    merging = [Factor((i,), m.merging) for i, m in enumerate(problem.menus) if m.merging.any()]
    factors = [*problem.factors, *merging]
    tables = {id(f.table): f.table for f in factors}
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


def by_kinds(found: PricedPlan, budget: Budget) -> PricedPlan:
    """The plan, or one that is `preferred` to it, of the same graph, in which some kinds of operations do something else: in
    however many steps, it takes no more than half a percent longer than the best that was met. What was of no use is tried
    again after others changed. One that sends nothing and is within half a percent of its bound stays."""
    problem, own, met = found.problem, budget.part(KINDS), set[tuple[int, int, int]]()
    if not sends(found)[1] and found.objective <= found.bound * NEARLY:
        return found
    offers: Iterator[tuple[int, int, list[int]]] = iter(())
    least, begun = found.objective, None
    while problem and not own.over():
        if (new := next(offers, None)) is None:
            if begun is found:
                break
            begun, offers = found, _offers(problem, choice_of(problem, found.plan))
            met.clear()
            continue
        i, c, choice = new
        alike = id(problem.menus[i]), choice[i]
        if (move := (*alike, c)) in met:
            continue
        met.add(move)
        changed = [c if (id(m), k) == alike else k for m, k in zip(problem.menus, choice, strict=True)]
        other = ringed(priced_plan(problem, changed, found.bound))
        own.spend(problem.lowering)
        if peak(other) <= problem.topo.device.memory and preferred(other, found, least):
            found, offers, least = other, _offers(problem, changed), min(least, other.objective)
    return found


def _offers(problem: Problem, choice: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Of each kind of operations one, with another choice: those that add least to a choice of all; first of all kinds those
    that read what is there anyway."""
    rows, made = [np.zeros(n) for n in problem.sizes], problem.graph.producers()
    for f in problem.factors:
        for n in f.nodes:
            rows[n] += f.table[tuple(slice(None) if m == n else choice[m] for m in f.nodes)]

    def read(i: int, c: int) -> set[tuple[str, bytes]]:
        return {(t, problem.menus[i].reads[c][k].tobytes()) for k, t in enumerate(problem.graph.ops[i].operands) if t in made}

    there = {r for i, c in enumerate(choice) for r in read(i, c)}
    offers = list[tuple[int, int, int]]()
    for i in {(id(m), c): i for i, (m, c) in enumerate(zip(problem.menus, choice, strict=True))}.values():
        alone, now = problem.menus[i].own.max(axis=0) + problem.menus[i].merging, read(i, choice[i])
        shared = [-len((read(i, c) - now) & there) for c in range(len(alone))]
        best = {*np.argsort(rows[i], kind="stable")[: BEST + 1].tolist(), *np.lexsort((alone, shared))[:BEST].tolist()}
        offers += [(shared[c], i, c) for c in best if c != choice[i]]
    yield from ((i, c, choice) for _, i, c in sorted(offers))
