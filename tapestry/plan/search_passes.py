"""The passes of the search: each takes the best candidate so far and gives one that is at least as good.

A candidate is a form of the graph with the best plan in space of it. Forms differ in the fusions that were chosen by price and
in the simplifications that were left out; after those come moves in time, structural rewrites and pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tapestry.ir.graph import Graph
from tapestry.plan.fusion import fused
from tapestry.plan.memory.fit import Fitted, fit
from tapestry.plan.memory.refit import refitted
from tapestry.plan.pipelines.stage_choice import Choice, choose
from tapestry.plan.search.planner import cheapest
from tapestry.plan.search.priced_plan import PricedPlan, TooBig
from tapestry.plan.search.problem import Problem
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.structural_search import WORTH, Improvement
from tapestry.plan.task import Task
from tapestry.rewrites.core.driver import OPTIONAL, disabled_by, simplify, without
from tapestry.rewrites.core.rule import Move

STRUCTURE = 1.5 * SECOND  # for the built-in structural rules
FIRST = 0.7  # of the budget, for one form of the model
QUICK = 2.0 * SECOND  # in which a graph is planned for which the one without fusions is planned as well
BRIEF = 0.5 * SECOND  # in all, for those without some simplifications


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A graph to plan.

    Attributes:
        graph: with the fusions that pay on one device; ``plain`` without them, the same object where there are none.
        disabled: simplifications that are left out, beyond those that the task leaves out.
        moves: that lead from the task's graph to this one.
        began: the reading of the task's meter when this form was begun.
    """

    graph: Graph
    plain: Graph
    disabled: frozenset[str]
    moves: tuple[Move, ...]
    began: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A form of the graph with its best plan, or with why none fits; ``fitted`` says how it was made to fit in time."""

    form: Form
    result: PricedPlan | TooBig
    fitted: Fitted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan taken, with stages or without.

    Attributes:
        graph: the graph planned, before the rewrites of a fitted or staged plan.
        moves: that led from the task's graph to the plan's.
        base: those of them that led to ``graph``.
        fitted: how the plan was made to fit, if no plan in space does.
    """

    graph: Graph
    moves: tuple[Move, ...]
    base: tuple[Move, ...]
    choice: Choice
    fitted: Fitted | None


def fuse_by_price(graph: Graph, task: Task) -> Form:
    """The graph with every fusion that pays on one device."""
    return _form(graph, task, frozenset())


def enumerate_strategies(form: Form, task: Task) -> list[Problem]:
    """What each operation may do, what that costs, and what moves between operations then: one problem for each topology."""
    return task.problems(form.graph)


def solve(form: Form, problems: Sequence[Problem], task: Task, budget: Budget) -> Candidate:
    """The best choice of strategies, lowered; within the memory, if any is. Gathers become rings where that is better."""
    try:
        return Candidate(form=form, result=cheapest(problems, budget.share(FIRST), task.start))
    except TooBig as e:
        return Candidate(form=form, result=e)


def try_without_fusions(candidate: Candidate, task: Task, budget: Budget) -> Candidate:
    """The graph without the fusions, where that is worth a look: where fused nothing fits (two weights at once take more room),
    or, on several devices, where planning was quick (fused operations are cut alike)."""
    form, result = candidate.form, candidate.result
    quick = task.several_devices and task.meter.spent - form.began < QUICK and not budget.over()
    if form.graph is form.plain or (isinstance(result, PricedPlan) and not quick):
        return candidate
    plain = replace(form, graph=form.plain, moves=tuple(map(without, sorted(form.disabled))))
    other = solve(plain, enumerate_strategies(plain, task), task, budget)
    if isinstance(result, TooBig):
        return other
    return other if isinstance(other.result, PricedPlan) and other.result.objective < result.objective else candidate


def try_without_simplifications(candidate: Candidate, task: Task, budget: Budget) -> Candidate:
    """Some simplifications cost one device nothing but tie operations to one cut on several. Where planning is brief, each is
    left out in turn, and stays out where that is better."""
    for rule in OPTIONAL if task.lifted is not None and task.several_devices else ():
        result, disabled = candidate.result, candidate.form.disabled | {rule}
        if isinstance(result, TooBig) or task.meter.spent > BRIEF or budget.over():
            break
        assert task.lifted
        graph = simplify(task.lifted, disabled=task.disabled_rules | disabled)
        if graph.ops == candidate.form.plain.ops:
            continue
        form = _form(graph, task, disabled)
        other = try_without_fusions(solve(form, enumerate_strategies(form, task), task, budget), task, budget)
        if isinstance(other.result, PricedPlan) and other.result.objective < result.objective * WORTH:
            candidate = other
    return candidate


def _form(graph: Graph, task: Task, disabled: frozenset[str]) -> Form:
    began, moves = task.meter.spent, tuple(map(without, sorted(disabled)))
    new, fusions = fused(graph, task.machine, task.disabled_rules | disabled) if task.machine else (graph, list[Move]())
    return Form(graph=new if fusions else graph, plain=graph, disabled=disabled, moves=(*moves, *fusions), began=began)


def fit_in_time(candidate: Candidate, task: Task, budget: Budget) -> Candidate:
    """Where nothing fits in space: splits in time, recomputation and streamed weights; else why nothing fits so either.

    Raises:
        TooBig: nothing fits, and the graph may not be rewritten.
    """
    result, graph = candidate.result, candidate.form.graph
    if isinstance(result, PricedPlan):
        return candidate
    if not task.rewritable:
        raise result
    if task.request.explicit:
        return candidate
    part = budget.share(FIRST) if task.request.stages != 1 and task.several_devices else budget  # stages may still fit
    previous = None
    if task.previous_plan:
        plan, moves = task.previous_plan
        again = refitted(graph, task.topology, plan, moves, inputs=task.inputs, outputs=task.outputs)
        previous = (again, moves) if again else None
    try:
        fitted = fit(
            graph, task.topology, result.closest, inputs=task.inputs, outputs=task.outputs, budget=part, previous=previous
        )
    except TooBig as e:
        return replace(candidate, result=e)
    return replace(candidate, result=fitted.found, fitted=fitted)


def restructure(candidate: Candidate, task: Task, budget: Budget) -> Candidate:
    """Structural rewrites around the solved plan, kept where the best plan of the rewritten graph is better."""
    form, result = candidate.form, candidate.result
    if isinstance(result, TooBig) or not task.rewritable or candidate.fitted:  # (simplifying would undo recomputation)
        return candidate
    disabled = task.disabled_rules | disabled_by(form.moves)
    search = Improvement(plan=task.attempt, budget=budget, units=STRUCTURE, least=task.meter.spent, disabled=disabled)
    graph, found, moves = search.run(form.graph, result)
    return (
        replace(candidate, form=replace(form, graph=graph, moves=(*form.moves, *moves)), result=found) if moves else candidate
    )


def choose_stages(candidate: Candidate, task: Task, budget: Budget) -> tuple[Planned, PricedPlan]:
    """The plan with pipeline stages where they are asked for, or pay; else the candidate's own.

    Raises:
        PlanError: nothing fits, or there is no plan as asked for.
    """
    form, fitted = candidate.form, candidate.fitted
    choice = choose(
        form.graph, task.topology, candidate.result, task.request, budget, tight=fitted is not None, spent=task.meter.spent
    )
    fitted = None if choice.staged else fitted
    moves = (*form.moves, *(fitted.moves if fitted else choice.moves))
    return Planned(graph=form.graph, moves=moves, base=form.moves, choice=choice, fitted=fitted), choice.found
