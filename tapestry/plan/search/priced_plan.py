"""A plan that the search has in hand, with what it costs and needs; and the error when none fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tapestry.errors import PlanError
from tapestry.ir.plan import Plan, still
from tapestry.ir.program import Program, alive_at, peak_bytes
from tapestry.plan.lower import Shapes, lower
from tapestry.plan.search.problem import Problem
from tapestry.plan.simulate import Known, Schedule, simulate
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.network import evaluate
from tapestry.plan.solver.pairs import proved

NEAR = 1e-3  # of the objective: plans that differ by less are equally good
MORE_ROOM = "more memory (--memory; a bare number is bytes), more devices (--devices) or a smaller batch (--shape)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan with its program, its simulated seconds, a proven lower bound of any plan's, and the problem it solves.

    Attributes:
        unlimited: the plan that would have been taken with more memory, where the limit ruled that out.
    """

    plan: Plan
    program: Program
    objective: float
    bound: float
    distinct: int
    problem: Problem | None = field(default=None, compare=False, repr=False)
    unlimited: PricedPlan | None = field(default=None, compare=False, repr=False)

    @property
    def gap(self) -> float:
        """``(objective - bound) / objective``: 0 means proved optimal."""
        return max(0.0, self.objective - self.bound) / self.objective if self.objective > 0 else 0.0

    @property
    def proved(self) -> bool:
        """Whether the bound shows that no plan is faster."""
        return proved(self.objective, self.bound)


class TooBig(PlanError):
    """Nothing fits into the devices' memory; ``closest`` is the plan that needs least of those looked at."""

    def __init__(self, closest: PricedPlan, what: str, *, why: str, hint: str) -> None:
        super().__init__(what, why=why, hint=hint)
        self.closest = closest


def priced_plan(problem: Problem, choice: Sequence[int], bound: float) -> PricedPlan:
    """The plan of a choice of strategies, lowered and put on the clock; the bound is never above its time, nor below none."""
    plan, program, timed = schedule(problem, choice)
    objective = timed.total if np.isfinite(evaluate(choice, problem.factors)) else np.inf
    return PricedPlan(
        plan=plan,
        program=program,
        objective=objective,
        bound=min(max(bound, 0.0), objective),
        distinct=problem.distinct,
        problem=problem,
    )


def schedule(problem: Problem, choice: Sequence[int]) -> tuple[Plan, Program, Schedule]:
    """The plan of a choice of strategies, its program, and that on the clock."""
    plan = Plan(
        graph=problem.graph,
        mesh=problem.topo.mesh,
        inputs=problem.inputs,
        outputs=problem.outputs,
        strategies=tuple(m.strategies[c] for m, c in zip(problem.menus, choice, strict=True)),
        streamed=problem.streamed,
        native_sums=problem.topo.native_sums,
    )
    return plan, *on_the_clock(problem, plan)


def on_the_clock(problem: Problem, plan: Plan) -> tuple[Program, Schedule]:
    """The program of a plan of a problem, and that on the clock."""
    program = lower(plan, problem.clock.setdefault("shapes", Shapes()))
    return program, simulate(plan, program, problem.topo, problem.clock.setdefault("known", Known()))


def choice_of(problem: Problem, plan: Plan) -> list[int]:
    """The strategies of a plan, as if no blocks travelled, by their numbers."""
    return [m.strategies.index(still(s)) for m, s in zip(problem.menus, plan.strategies, strict=True)]


def summed(found: PricedPlan) -> float:
    """All costs of a plan added up, in seconds: as if nothing overlapped and nothing were shared."""
    problem = found.problem  # by the model of stages, which adds costs up
    return evaluate(choice_of(problem, found.plan), problem.factors) if problem else found.objective


def peak(plan: PricedPlan) -> int:
    """Bytes that the tightest device needs, as if all devices had as much memory as the one that has least."""
    need = peak_bytes(plan.program)[0]
    return plan.problem.topo.strain(need) if plan.problem else max(need)


def too_big(closest: PricedPlan, limit: int, budget: Budget, tried: str = "") -> TooBig:
    """By how much, on which device and for which tensors a plan does not fit; and what was tried."""
    most, at = peak_bytes(closest.program)
    device = int(np.argmax(most))
    if closest.problem:
        device = closest.problem.topo.tightest(most)
        limit = closest.problem.topo.memories()[device]
    alive = alive_at(closest.program, at[device])
    largest = sorted(alive, key=lambda b: -closest.program.buffers[b].nbytes(device))[:4]
    names = ", ".join(f"'{b}' {closest.program.buffers[b].nbytes(device):,}" for b in largest)
    ended = (
        "the search was interrupted before" if budget.interrupted() else "the budget was over before" if budget.over() else ""
    )
    return TooBig(
        closest,
        f"{ended + ' a plan was found that fits' if ended else 'no plan fits'}: device {device} needs {most[device]:,} bytes"
        f" of {limit:,}, {most[device] - limit:,} too many",
        why=f"the plan with the least memory that was found holds there (bytes): {names}{tried}",
        hint=("more time (--time-limit), " if ended else "") + MORE_ROOM,
    )
