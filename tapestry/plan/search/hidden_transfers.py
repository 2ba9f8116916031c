"""Transfers behind kernels: an operation next to a transfer that the clock waits for is run in parts, so that one part travels
while the next is computed (as in Megatron's and XLA's collective matmul, for any operation and dimension).

What is tried are moves of the rule `split_time` on all operations of a kind at once. Parts keep the strategy of the whole, and
what puts them together again the cheapest one; the clock says whether that is faster, launches and smaller parts included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import numpy as np

from tapestry.ir.graph import Graph, Op
from tapestry.ir.plan import Strategy, still
from tapestry.ir.program import Reduce, Transfer
from tapestry.ir.syntax.printer import signature
from tapestry.plan.pipelines.stage_constraints import before_cut
from tapestry.plan.search.planner import beginning, ringed
from tapestry.plan.search.priced_plan import PricedPlan, on_the_clock, peak, priced_plan
from tapestry.plan.search.problem import Problem
from tapestry.plan.search.resume import Start, start_of
from tapestry.plan.simulate import Schedule, critical_path
from tapestry.plan.solver.budget import Budget
from tapestry.rewrites.core.driver import apply_legal
from tapestry.rewrites.core.rule import Move
from tapestry.rewrites.splitting.split_time import split_time_refusal, time_move

ProblemOf = Callable[[Graph, Mapping[int, Strategy]], Problem | None]
WAITED = 0.01  # of the time: less is not worth more launches
PARTS = (2, 4)
KINDS = 6  # of operations beside what is waited for most
GAIN = 1 - 1e-3  # of the time, that a split is worth at least
FEW = 8  # operations that are split without trying one of them first


def hidden(found: PricedPlan, problem_of: ProblemOf, budget: Budget) -> tuple[PricedPlan, list[Move]]:
    """A plan that waits less, and the moves that lead to its graph; the same one and none where nothing gains.

    Args:
        problem_of: what the operations of a rewritten graph may do, some of them one thing; ``None``: it may not be planned.
    """
    best, moves = found, list[Move]()
    limit = best.problem.topo.device.memory if best.problem else 0
    while best.problem and not budget.over(2 * best.problem.lowering):  # which is what trying one split takes
        timed, more = on_the_clock(best.problem, best.plan)[1], list[Move]()
        if timed.exposed().max() < WAITED * timed.total:
            break
        for groups in _splits(best, timed):
            now = best
            for group in groups if not budget.over() else ():
                if len(group) > FEW and _in_parts(now, group[:1], problem_of, budget)[0].objective >= now.objective:
                    continue  # what one of them gains nothing by is not worth trying on all layers
                other, done = _in_parts(now, group, problem_of, budget)
                if other.objective < best.objective * GAIN and peak(other) <= limit:
                    best, more = other, done
            if more:
                break
        if not more:
            break
        moves += more
    return best, moves


def _splits(found: PricedPlan, timed: Schedule) -> Iterator[list[list[Move]]]:
    """Splits of all operations of a kind along a dimension, in two parts and in more: of those on both sides of transfers on
    the critical path, beside the longest waits first."""
    graph, waited = found.plan.graph, dict[int, float]()
    makers, program = graph.producers(), found.program
    for hop in critical_path(timed):
        step = program.steps[hop.timed.step]
        sent = step.src if isinstance(step, Transfer) else step.srcs[0] if isinstance(step, Reduce) else None
        ends = {hop.timed.op, makers.get(program.buffers[sent].tensor)} if sent else set[int | None]()
        waited |= {i: waited.get(i, 0.0) + hop.seconds for i in ends if i is not None}
    kinds, alike = dict[tuple[str, Strategy], float](), dict[tuple[str, Strategy], list[Op]]()
    for i, (op, s) in enumerate(zip(graph.ops, found.plan.strategies, strict=True)):
        if before_cut(op.outs[0]) != op.outs[0] or any(before_cut(t) in op.outs for t in op.inputs):
            continue  # neither a part nor what puts parts together is cut again
        kind = signature(op, graph), s
        alike.setdefault(kind, []).append(op)
        kinds[kind] = kinds.get(kind, 0.0) + waited.get(i, 0.0)
    for kind in sorted((k for k in kinds if kinds[k] > (1 - GAIN) * timed.total), key=lambda k: -kinds[k])[:KINDS]:
        one, cuts = alike[kind][0], kind[1].dims
        for d in sorted(one.dims, key=lambda d: (d.name not in cuts, -d.size)):
            most = d.size // prod(a.size for c, a in zip(cuts, found.plan.mesh, strict=True) if c == d.name)
            allowed = [n for n in PARTS if n <= most and split_time_refusal(one, d.name, n) is None]
            if allowed:
                yield [[time_move(op, d.name, n, 0) for op in alike[kind]] for n in allowed]


def _in_parts(found: PricedPlan, group: Sequence[Move], problem_of: ProblemOf, budget: Budget) -> tuple[PricedPlan, list[Move]]:
    graph, done = apply_legal(found.plan.graph, group)
    known = start_of(found.plan).strategies
    mine = {t: known.get(t) or known.get(before_cut(t)) for t in (op.outs[0] for op in graph.ops)}
    kept = {t: still(s) for t, s in mine.items() if s}
    joined = {m.at for m in done}
    only = {i: kept[t] for i, t in enumerate(op.outs[0] for op in graph.ops) if t in kept and t not in joined}
    problem = problem_of(graph, only) if done else None
    if problem is None:
        return found, []
    budget.spend(problem.work + 2 * problem.lowering)
    choice = beginning(problem, Start(kept))
    if choice is None:
        return found, []
    plans = (ringed(priced_plan(problem, c, found.bound)) for c in (choice, _joined_late(problem, choice, done)))
    return min(plans, key=lambda p: p.objective), done


def _joined_late(problem: Problem, choice: list[int], moves: Sequence[Move]) -> list[int]:
    """The choice with what puts parts together where its readers want it: parts then travel one by one."""
    out, makers = list(choice), problem.graph.producers()
    for i in (makers[m.at] for m in moves if m.at in makers):
        reads, own = (np.zeros(problem.sizes[i]) for _ in range(2))
        for f in (f for f in problem.factors if i in f.nodes):
            row = f.table[tuple(slice(None) if n == i else out[n] for n in f.nodes)]
            reads, own = (reads + row, own) if max(f.nodes) > i else (reads, own + row)
        out[i] = int(np.lexsort((own, reads))[0])
    return out
