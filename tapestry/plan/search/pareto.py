"""The front of latency against memory: plans of which no other is both faster and smaller.

The fastest plan is sought within limits on memory that go down step by step, to where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tapestry.ir.program import peak_bytes
from tapestry.plan.search.memory_limit import Room
from tapestry.plan.search.priced_plan import peak, priced_plan
from tapestry.plan.search.problem import Problem
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.network import solve

STEPS = 24  # limits that are tried
SHARE = 0.3  # of the budget left


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of the front: estimated seconds, peak bytes of the device that needs most, the rewrites of its graph."""

    objective_s: float
    peak_bytes: int
    moves: tuple[str, ...] = ()


def front(problem: Problem, time_limit: float | Budget | None, moves: tuple[str, ...] = ()) -> list[Point]:
    """Plans from the fastest to the smallest, each the fastest within a limit, while there is something left of the budget."""
    budget, room = Budget.of(time_limit), Room(problem, surely=False)
    solution = solve(problem.network, budget)
    plans = [priced_plan(problem, solution.choice, solution.bound)]
    for limit in np.linspace(peak(plans[0]), room.least(), STEPS + 1)[1:]:
        if budget.over() or not np.isfinite(solution.objective):
            break
        if room.estimate(solution.choice).max(initial=0.0) > limit:
            solution = room.solve(float(limit), budget)
            plans += [priced_plan(problem, solution.choice, solution.bound)] if np.isfinite(solution.objective) else []
    return undominated([Point(p.objective, max(peak_bytes(p.program)[0]), moves) for p in plans])


def undominated(points: list[Point]) -> list[Point]:
    """The points that no other one beats in both, fastest first."""
    out: list[Point] = []
    for p in sorted(set(points), key=lambda p: (p.objective_s, p.peak_bytes, len(p.moves))):
        if not out or p.peak_bytes < out[-1].peak_bytes:
            out.append(p)
    return out
