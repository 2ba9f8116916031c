"""The front of latency against memory: plans of which no other is both faster and smaller, among those that prices find.

Rising prices of memory trace the lower convex hull of the front (supported plans); plans above the hull are not found. The
hulls of several graphs (the model's own, and those that structural rewrites make of it) are put together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tapestry.ir.program import peak_bytes
from tapestry.plan.search.planner import Found, Prices, found_plan, raise_price
from tapestry.plan.search.problem import Problem
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.network import solve

STEPS = 24
SHARE = 0.3  # of the time left, for one graph


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of the front: estimated seconds, peak bytes of the device that needs most, the rewrites of its graph."""

    objective_s: float
    peak_bytes: int
    moves: tuple[str, ...] = ()


def fronts(problems: Iterable[tuple[Problem, tuple[str, ...]]], budget: Budget) -> list[Point]:
    """The front over several graphs with the moves that made them; the first one gets its share in any case."""
    points: list[Point] = []
    for problem, moves in problems:
        points += front(problem, budget.share(SHARE), moves)
        if budget.over():
            break
    return undominated(points)


def front(problem: Problem, time_limit: float | Budget, moves: tuple[str, ...] = ()) -> list[Point]:
    """Supported plans from the fastest to the smallest, within a time limit in seconds."""
    budget = Budget.of(time_limit)
    first = solve(problem.sizes, problem.factors, budget)
    found = found_plan(problem, first, first.bound)
    seen = [found]
    prices = Prices(problem, {}, {})
    unit = found.objective / max(1, 16 * _peak(found))
    for _ in range(STEPS):
        if budget.over():
            break
        raise_price(prices, found, unit)
        solution, bound = prices.solve(1.0, 1.0, budget)
        found = found_plan(problem, solution, bound)
        seen.append(found)
    return undominated([Point(f.objective, _peak(f), moves) for f in seen])


def undominated(points: list[Point]) -> list[Point]:
    """The points that no other one beats in both, fastest first."""
    out: list[Point] = []
    for p in sorted(set(points), key=lambda p: (p.objective_s, p.peak_bytes, len(p.moves))):
        if not out or p.peak_bytes < out[-1].peak_bytes:
            out.append(p)
    return out


def _peak(found: Found) -> int:
    return max(peak_bytes(found.program)[0])
