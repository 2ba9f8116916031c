"""The front of latency against memory: no point beats another, and each is the cost of a plan that exists."""

from __future__ import annotations

import itertools

import pytest

from tapestry.ir.plan import Plan
from tapestry.ir.program import peak_bytes
from tapestry.plan.lower import lower
from tapestry.plan.search.pareto import Point, front, undominated
from tapestry.plan.search.priced_plan import priced_plan
from tapestry.plan.search.problem import build
from tapestry.plan.topology import topology
from tests.support.small_models import case, mesh_of


def test_undominated_points() -> None:
    points = [Point(3.0, 5), Point(1.0, 9), Point(2.0, 9), Point(2.0, 6), Point(2.5, 7), Point(3.0, 5)]
    assert undominated(points) == [Point(1.0, 9), Point(2.0, 6), Point(3.0, 5)]


def test_front_is_on_the_true_front() -> None:
    graph = case("mlp").graph
    problem = build(graph, topology(mesh_of("2")), {}, {}, {})
    everything = []
    for choice in itertools.product(*map(range, problem.sizes)):
        strategies = tuple(m.strategies[c] for m, c in zip(problem.menus, choice, strict=True))
        program = lower(Plan(graph=graph, mesh=problem.topo.mesh, strategies=strategies))
        everything.append(Point(priced_plan(problem, choice, 0.0).objective, max(peak_bytes(program)[0])))
    found, truth = front(problem, 10.0), undominated(everything)
    assert found[0].objective_s == pytest.approx(min(p.objective_s for p in everything), rel=1e-3)
    assert all(
        any(abs(p.objective_s - q.objective_s) < 1e-15 and p.peak_bytes == q.peak_bytes for q in everything) for p in found
    )
    assert all(a.objective_s <= b.objective_s and a.peak_bytes > b.peak_bytes for a, b in itertools.pairwise(found))
    assert found[-1].peak_bytes <= 1.2 * truth[-1].peak_bytes
