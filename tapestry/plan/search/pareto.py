"""The front of latency against memory: plans of which no other is both faster and smaller, among those that prices find.

Rising prices of memory trace the lower convex hull of the front (supported plans); plans above the hull are not found.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tapestry.ir.program import peak_bytes
from tapestry.plan.search.network import solve
from tapestry.plan.search.planner import Found, Prices, found_plan, raise_price
from tapestry.plan.search.problem import Problem

STEPS = 24


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of the front: estimated seconds, and peak bytes of the device that needs most."""

    objective_s: float
    peak_bytes: int


def front(problem: Problem, time_limit: float) -> list[Point]:
    """Supported plans from the fastest to the smallest, within a time limit in seconds."""
    deadline = time.monotonic() + time_limit
    first = solve(problem.sizes, problem.factors, time_limit)
    found = found_plan(problem, first, first.bound)
    seen = [found]
    prices = Prices(problem, {}, {})
    unit = found.objective / max(1, 16 * _peak(found))
    for _ in range(STEPS):
        if time.monotonic() > deadline:
            break
        raise_price(prices, found, unit)
        solution, bound = prices.solve(1.0, 1.0, max(1.0, deadline - time.monotonic()))
        found = found_plan(problem, solution, bound)
        seen.append(found)
    return undominated([Point(f.objective, _peak(f)) for f in seen])


def undominated(points: list[Point]) -> list[Point]:
    """The points that no other one beats in both, fastest first."""
    out: list[Point] = []
    for p in sorted(set(points), key=lambda p: (p.objective_s, p.peak_bytes)):
        if not out or p.peak_bytes < out[-1].peak_bytes:
            out.append(p)
    return out


def _peak(found: Found) -> int:
    return max(peak_bytes(found.program)[0])
