"""The passes of the search: each takes the best candidate so far and gives one that is at least as good.

A candidate is a form of the graph with the best plan in space of it. Forms differ in the fusions that were chosen by price and
in the simplifications that were left out; after those come moves in time, structural rewrites and pipeline stages. Work, not
time, decides how many forms are tried, in a fixed order; what is not is said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tapestry.errors import some
from tapestry.ir.graph import Graph, changes
from tapestry.plan.algebra import Book
from tapestry.plan.memory.least_memory import refuse
from tapestry.plan.memory.memory_fit import Fitted, fit
from tapestry.plan.memory.refit import refitted
from tapestry.plan.pipelines.stage_choice import Choice, choose
from tapestry.plan.search.fewest_bytes import by_kinds, fewest_bytes, preferred
from tapestry.plan.search.hidden_transfers import hidden
from tapestry.plan.search.planner import SMALL, TINY, cheapest
from tapestry.plan.search.priced_plan import NEAR, PricedPlan, TooBig, peak
from tapestry.plan.search.problem import Problem
from tapestry.plan.search.resume import start_of
from tapestry.plan.simulate import simulate
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.structural_search import SIMPLIFYING, WORTH, Improvement, Tried, rewritten
from tapestry.plan.task import STEPS, Task
from tapestry.plan.whole_graph import idle_beside, one_device
from tapestry.rewrites.core.driver import OPTIONAL, disabled_by, rules_of, simplify, without
from tapestry.rewrites.core.rule import Move, Sized, own_rules

STRUCTURE = 3.0 * SECOND  # for the built-in structural rules
FIRST = 0.7  # of the budget, for one form of the model
UNFUSED, WHOLE, ROUTES = "unfused", "recurrences whole", "part_routes"
NAMED = 4  # forms that a sentence names; more are counted
BESIDE = 4.0 * SECOND  # for splits in time where a plan in space fits
HIDING = 4.0 * SECOND  # for those that hide transfers, whatever the search of plans has used up
OTHERS, LEAST = 0.5, 0.5 * SECOND  # of the work so far, for the book; for it and forms without simplifications at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A graph to plan.

    Attributes:
        name: for people.
        graph: the graph.
        moves: that lead from the task's graph to this one.
    """

    name: str
    graph: Graph
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Of which plans the bound is.

    Attributes:
        forms: that were planned; ``untried`` were not, for want of work.
        bound: the least of their bounds, and of those of ``rewritten`` graphs that moves tried one at a time made of the best.
            For ``unfinished`` ones there was not enough work.
        left_out: most combinations of cuts of one operation that were not looked at.
        strategies: most that were.
        moves: whether moves could rewrite the best form: tried one at a time, so that no bound is of all of them.
        equations: what the book of equations derived, and what came of it.
        in_time: whether splits in time were tried beside those in space, of which the bound is not.
        waited: seconds that devices waited for transfers, at most, before operations next to them were split.
    """

    forms: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    bound: float = math.inf
    left_out: int = 0
    strategies: int = 0
    rewritten: int = 0
    unfinished: int = 0
    moves: bool = False
    equations: tuple[Tried, ...] = ()
    in_time: bool = False
    waited: float = 0.0

    def text(self) -> str:
        """Which plans the bound is of."""
        rewritten = f" and {some(self.rewritten, 'rewritten graph')} of it" if self.rewritten else ""
        many = f"the best of {len(self.forms)} forms of the graph" if len(self.forms) > 1 else "one form of the graph"
        named = f" ({', '.join(self.forms)})" if len(self.forms) <= NAMED else ""
        return f"{many}{named}{rewritten}, with at most {self.strategies:,} strategies per operation"

    def missing(self, *, stages: bool) -> list[str]:
        """What the bound is not of; ``stages``: pipeline stages among it."""
        found = [
            (self.left_out, f"up to {self.left_out:,} combinations of cuts of one operation"),
            (self.untried, f"forms of the graph not tried, as the budget ran out ({', '.join(self.untried)})"),
            (self.unfinished, f"{some(self.unfinished, 'rewritten graph')}, as the budget ran out"),
            (self.moves, "combinations of rewrites"),
            (stages, "pipeline stages"),
            (self.in_time, "splits in time other than those tried"),
        ]
        return [text for there, text in found if there]

    def and_form(self, form: Form, result: PricedPlan | TooBig, problems: Sequence[Problem]) -> Scope:
        """One form more."""
        plan = result.closest if isinstance(result, TooBig) else result
        return replace(
            self,
            forms=(*self.forms, form.name),
            bound=min(self.bound, plan.bound),
            left_out=max(self.left_out, *(p.left_out for p in problems)),
            strategies=max(self.strategies, *(n for p in problems for n in p.sizes), 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A form of the graph with its best plan, or with why none fits; ``fitted`` says how it was made to fit in time."""

    form: Form
    result: PricedPlan | TooBig
    scope: Scope
    fitted: Fitted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan taken, with stages or without.

    Attributes:
        graph: the graph planned, before the rewrites of a fitted or staged plan.
        moves: that led from the task's graph to the plan's.
        base: those of them that led to ``graph``.
        fitted: how the plan was made to fit, if no plan in space does.
        scope: of which plans the bound is.
        alone: seconds of the best plan of one device, and whether it fits.
    """

    graph: Graph
    moves: tuple[Move, ...]
    base: tuple[Move, ...]
    choice: Choice
    fitted: Fitted | None
    scope: Scope = field(default_factory=Scope)
    alone: tuple[float, bool] | None = None


def fuse_by_price(graph: Graph, task: Task) -> Form:
    """The graph with every fusion that pays on one device.

    Raises:
        PlanError: no plan of it, fused or not, has the memory.
    """
    first = _fused(graph, task, ())
    refuse([first.graph, graph], task.topology)
    return first


def enumerate_strategies(form: Form, task: Task) -> list[Problem]:
    """What each operation may do, what that costs, and what moves between operations then: one problem for each topology."""
    return task.problems(form.graph)


def solve(form: Form, problems: Sequence[Problem], task: Task, budget: Budget) -> Candidate:
    """The best plan of the first form; see `_solved`. Where stages are given, any plan without them will do."""
    return _solved(form, problems, task, budget.part(0) if task.request.asked.cuts else budget, math.inf)


def _solved(form: Form, problems: Sequence[Problem], task: Task, budget: Budget, upper: float) -> Candidate:
    """The best choice of strategies, lowered; within the memory, if any is. Gathers become rings where that is better."""
    try:
        result: PricedPlan | TooBig = cheapest(problems, budget.share(FIRST), task.start, upper)
    except TooBig as e:
        result = e
    scope = Scope().and_form(form, result, problems)
    budget.meter.floor = min(budget.meter.floor, scope.bound)
    return Candidate(form=form, result=result, scope=scope)


def try_other_forms(candidate: Candidate, graph: Graph, task: Task, budget: Budget) -> Candidate:
    """The other forms of the graph, in a fixed order; those that leave out simplifications while they take little work. The
    best of all.

    On one device only where nothing fits: two weights at once take more room.
    """
    best, scope, spent, least = candidate, candidate.scope, task.meter.spent, _objective(candidate)
    for name, forms in _others(candidate.form, graph, task):
        missing, few = isinstance(best.result, TooBig), name == UNFUSED or task.meter.spent < spent + LEAST
        room = (few and budget.left() >= 2 * spent) or name.startswith((WHOLE, "experts"))
        if budget.over() or not (missing or (task.several_devices and room)):
            scope = replace(scope, untried=(*scope.untried, name))
            continue
        for form in filter(lambda f: task.keeps(f.graph), forms):
            problems = enumerate_strategies(form, task)
            other = _solved(form, problems, task, budget, _objective(best))
            scope = scope.and_form(form, other.result, problems)
            if _preferred(other, best, least):
                best = other
            least = min(least, _objective(other))
    return replace(best, scope=scope)


def _preferred(one: Candidate, best: Candidate, least: float) -> bool:
    if isinstance(one.result, TooBig) or isinstance(best.result, TooBig):
        return _objective(one) < _objective(best)
    return preferred(one.result, best.result, least)


def _objective(candidate: Candidate) -> float:
    return candidate.result.objective if isinstance(candidate.result, PricedPlan) else math.inf


def _others(first: Form, graph: Graph, task: Task) -> Iterator[tuple[str, Iterator[Form]]]:
    """The forms beside the fused one: experts in groups, then by what they leave out: fusions, and some simplifications,
    fewest first."""
    for parts in sorted({a.size for a in task.topology.mesh} - {1}, reverse=True):
        rule = own_rules()[ROUTES]
        allowed = task.rewritable and ROUTES not in task.disabled_rules
        found = rule.sized(first.graph, parts) if allowed and isinstance(rule, Sized) else ()
        moves = [m for m in found if isinstance(m, Move)]
        if moves:
            yield f"experts in {parts} groups", _in_groups(first, moves, task)
    if task.whole:
        yield WHOLE, iter([_recurrences_whole(task, task.whole)])
    if first.graph is not graph:
        yield UNFUSED, iter([Form(name=UNFUSED, graph=graph, moves=())])
    if task.lifted is None:
        return
    seen, did = [graph.ops], {step.by for step in changes(graph)}

    def without_rules(rules: tuple[str, ...]) -> Iterator[Form]:
        assert task.lifted
        task.meter.spent += SIMPLIFYING * len(task.lifted.ops)
        if not did.issuperset(rules):  # without a rule that did nothing it would be the same graph
            return
        other = simplify(task.lifted, disabled=task.disabled_rules | frozenset(rules))
        if other.ops not in seen:
            seen.append(other.ops)
            yield _fused(other, task, rules)

    for rules in itertools.chain.from_iterable(itertools.combinations(OPTIONAL, n) for n in range(1, len(OPTIONAL) + 1)):
        yield f"without {' and '.join(rules)}", without_rules(rules)


def _in_groups(first: Form, moves: list[Move], task: Task) -> Iterator[Form]:
    """A form with the matrices of its routed products in groups, which may be on a device each."""
    task.meter.spent += SIMPLIFYING * len(first.graph.ops)
    new, done = rewritten(first.graph, moves, task.disabled_rules | disabled_by(first.moves))
    yield Form(name=f"{first.name} in groups", graph=new, moves=(*first.moves, *done))


def _recurrences_whole(task: Task, lifted: Graph) -> Form:
    """Every recurrence as one operation, which one device runs as a library does, and several cut by batch; all fusions."""
    graph = simplify(lifted, disabled=task.disabled_rules)
    task.meter.spent += SIMPLIFYING * len(lifted.ops)
    new, fusions = task.fused(graph, task.disabled_rules)
    return Form(name=WHOLE, graph=new, moves=(without(STEPS), *fusions))


def _fused(graph: Graph, task: Task, left_out: tuple[str, ...]) -> Form:
    """A graph with every fusion that pays on one device."""
    moves, suffix = tuple(map(without, sorted(left_out))), f" without {' and '.join(left_out)}" if left_out else ""
    new, fusions = task.fused(graph, task.disabled_rules | frozenset(left_out))
    return Form(name=f"{'fused' if fusions else 'as simplified'}{suffix}", graph=new, moves=(*moves, *fusions))


def fit_in_time(candidate: Candidate, task: Task, budget: Budget) -> Candidate:
    """Where nothing fits in space: splits in time, recomputation and streamed weights; else why nothing fits so either. Where
    the limit makes the best plan in space dearer, they are choices beside those in space.

    Raises:
        TooBig: nothing fits, and the graph may not be rewritten.
    """
    result = candidate.result
    if isinstance(result, PricedPlan):
        return _beside_space(candidate, result, task, budget)
    if task.request.explicit:  # stages may still fit, also of a graph that is kept as it is
        return candidate
    if task.fixed.language:
        result.hint += ", or no --for: a format says nothing of weights that are streamed"
        raise result
    if task.pins or not task.rewritable:
        result.hint += "; pins and annotations keep the graph as it is: without them weights may be streamed"
        raise result
    part = budget.share(FIRST) if task.request.stages != 1 and task.several_devices else budget  # stages may still fit
    fitted = _fitted(candidate.form.graph, result.closest, task, part)
    if isinstance(fitted, TooBig):
        return replace(candidate, result=fitted)
    return replace(candidate, result=fitted.found, fitted=fitted)


def _beside_space(candidate: Candidate, result: PricedPlan, task: Task, budget: Budget) -> Candidate:
    """Splits in time where the limit on memory costs something, begun from the plan that would be taken without it."""
    free, graph = result.unlimited, candidate.form.graph
    dear = free is not None and free.objective < result.objective * (1 - NEAR)
    asked = bool(task.previous_plan) or (dear and len(graph.ops) <= SMALL and not budget.over())  # (what is found stays)
    if not asked or task.pins or not task.rewritable or task.request.explicit or task.fixed.language:
        return candidate
    fitted = _fitted(graph, free if free and dear else result, task, budget.part(BESIDE))
    candidate = replace(candidate, scope=replace(candidate.scope, in_time=True))
    if isinstance(fitted, TooBig) or fitted.found.objective >= result.objective * (1 - NEAR):
        return candidate
    fitted = replace(fitted, report={**fitted.report, "in_space_s": result.objective})
    return replace(candidate, result=fitted.found, fitted=fitted)


def _fitted(graph: Graph, first: PricedPlan, task: Task, budget: Budget) -> Fitted | TooBig:
    """The cheapest plan in time that is found, going on from an earlier one where there is any."""
    previous = None
    if task.previous_plan:
        plan, moves = task.previous_plan
        again = refitted(graph, task.topology, plan, moves, inputs=task.inputs, outputs=task.outputs)
        previous = (again, moves) if again else None
    try:
        return fit(graph, task.topology, first, inputs=task.inputs, outputs=task.outputs, budget=budget, previous=previous)
    except TooBig as e:
        return e


def restructure(candidate: Candidate, graph: Graph, task: Task, budget: Budget) -> Candidate:
    """Structural rewrites around the solved plan, kept where the best plan of the rewritten graph is better."""
    form, result, scope = candidate.form, candidate.result, candidate.scope
    if isinstance(result, TooBig) or not task.rewritable or candidate.fitted:  # (simplifying would undo recomputation)
        return candidate
    disabled = task.disabled_rules | disabled_by(form.moves)
    least = task.meter.spent / max(1, len(scope.forms))
    book = _book(task, disabled)

    search = Improvement(
        plan=task.attempt,
        budget=budget,
        units=STRUCTURE,
        book_units=STRUCTURE,
        least=least,
        disabled=disabled,
        book=book.derivations if book else None,
        refuse=lambda graph: task.fused(graph, disabled),
        keeps=task.keeps,
    )
    unfused = graph if form.moves and not disabled_by(form.moves) else None
    new, found, moves, anew = search.run(form.graph, result, unfused)
    if moves:
        found = _closed(new, found, task, budget)
        search.bounds.append(found.bound)
    scope = replace(
        scope,
        bound=min([scope.bound, *search.bounds]),
        rewritten=len(search.bounds),
        unfinished=search.unfinished,
        moves=search.met,
        equations=tuple(search.derived),
    )
    form = replace(form, graph=new, moves=(*(() if anew else form.moves), *moves)) if moves else form
    return replace(candidate, form=form, result=found, scope=scope)


def _book(task: Task, disabled: frozenset[str]) -> Book | None:
    """The book of equations where it is asked for, else the rules of its phase that are the user's own, if there are any."""
    if not task.book:
        if not any(r.phase == "algebra" and not r.built_in for r in own_rules().values()):
            return None
        disabled |= {r.name for r in rules_of("algebra") if r.built_in}
    return Book(topology=task.topology, meter=task.meter, units=max(LEAST, OTHERS * task.meter.spent), disabled=disabled)


def _closed(graph: Graph, found: PricedPlan, task: Task, budget: Budget) -> PricedPlan:
    """The plan of a graph that moves made, or a better one, and a better bound: in passing there was no work for branches."""
    if found.proved or budget.over() or not TINY < len(graph.ops) <= SMALL:
        return found
    again = cheapest(task.problems(graph), budget, start_of(found.plan))
    best = again if again.objective < found.objective else found
    return replace(best, bound=min(max(found.bound, again.bound), best.objective))


def prefer_few_bytes(candidate: Candidate, budget: Budget) -> Candidate:
    """Other choices of some kinds of operations, and of nearly equal plans in space the one that sends least."""
    found = candidate.result
    if isinstance(found, TooBig) or candidate.fitted:
        return candidate
    return replace(candidate, result=fewest_bytes(by_kinds(found, budget), budget))


def hide_transfers(candidate: Candidate, task: Task, budget: Budget) -> Candidate:
    """Operations next to transfers in parts, one of which travels while the next is computed."""
    found, form = candidate.result, candidate.form
    if isinstance(found, TooBig) or not found.problem or candidate.fitted or task.fixed.language or not task.rewritable:
        return candidate
    if not task.topology.overlap or task.request.explicit or "split_time" in task.disabled_rules:
        return candidate
    topo = found.problem.topo
    own = replace(budget, until=budget.meter.spent + HIDING)
    before = float(simulate(found.plan, found.program, topo).exposed().max())
    best, moves = hidden(found, lambda graph, only: task.problem(graph, topo, only), own)
    if not moves:
        return candidate
    form = replace(form, graph=best.plan.graph, moves=(*form.moves, *moves))
    return replace(candidate, form=form, result=best, scope=replace(candidate.scope, in_time=True, waited=before))


def choose_stages(candidate: Candidate, task: Task, budget: Budget) -> tuple[Planned, PricedPlan]:
    """The plan with pipeline stages where they are asked for, or pay; else the candidate's own. Its bound is of all forms.

    Raises:
        PlanError: nothing fits, or there is no plan as asked for.
    """
    form, fitted, result = candidate.form, candidate.fitted, candidate.result
    if isinstance(result, PricedPlan) and not fitted:
        result = replace(result, bound=min(result.bound, candidate.scope.bound))
    choice = choose(form.graph, task.topology, result, task.request, budget, tight=fitted is not None, spent=task.meter.spent)
    fitted = None if choice.staged else fitted
    moves = (*form.moves, *(fitted.moves if fitted else choice.moves))
    planned = Planned(graph=form.graph, moves=moves, base=form.moves, choice=choice, fitted=fitted, scope=candidate.scope)
    return planned, choice.found


def compare_whole_graph(
    planned: Planned, plan: PricedPlan, form: Form, task: Task, budget: Budget
) -> tuple[Planned, PricedPlan, int]:
    """The plan, or one device where that is better; and the peak bytes of one device that computes everything.

    One device is taken where the plan does the same on all, and where the plan is predicted to be faster by no more than
    predictions are off (`Topology.margin`), unless stages, pins or layouts of the mesh are asked for.
    """
    base = Form(name="", graph=planned.graph, moves=planned.base)
    forms = [base, form] if form.graph.ops != planned.graph.ops else [base]
    forms += [_recurrences_whole(task, task.whole)] if task.whole and STEPS not in disabled_by(planned.moves) else []
    alone = [(one_device(f.graph, task.topology, budget), f) for f in forms]
    unsharded = peak(alone[0][0])
    if not task.several_devices:
        return planned, plan, unsharded
    if not task.topology.kinds:
        fitting = [(f, o) for f, o in alone if peak(f) <= task.topology.device.memory]
        found, of = min(fitting or alone, key=lambda a: a[0].objective)
        planned = replace(planned, alone=(found.objective, bool(fitting)))
        same = found.objective <= plan.objective and not any(d for s in plan.plan.strategies for d in s.dims)
        free = task.request.stages is None and not task.request.explicit and bool(fitting)
        close = found.objective * (1 - task.topology.margin) < plan.objective * WORTH
        taken = idle_beside(found, task.topology) if free and (same or close) else None
        if taken:
            plan = replace(taken, bound=min(plan.bound, plan.objective, found.objective))
            report = {"stages": [plan.objective], "micro_batches": 1}
            choice = replace(planned.choice, found=plan, staged=True, moves=(), report=report)
            planned = replace(planned, graph=of.graph, moves=of.moves, base=of.moves, choice=choice, fitted=None)
    return planned, plan, unsharded
