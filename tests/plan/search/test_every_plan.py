"""The bound against every plan of small random graphs; what closes the gap, against brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from bench.planning import bounds
from tapestry.plan.search import paths
from tapestry.plan.search.any_order import least_seconds
from tapestry.plan.search.marginals import marginals
from tapestry.plan.search.planner import search
from tapestry.plan.search.priced_plan import priced_plan
from tapestry.plan.simulate import simulate
from tapestry.plan.solver.elimination import minimise

FEW_PLANS = (10, 11, 13, 15, 23, 26, 29, 36, 39)  # of the first 40 graphs those with at most 60 plans


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(200))
def test_no_plan_is_below_the_bound(seed: int) -> None:
    """Splits in time, rings, short memory, fan-out and orders of transfers among them."""
    row = bounds.measure(seed)
    assert row["plans"] > 1 and not bounds.below(row), row


def test_a_plan_below_a_bound_is_seen() -> None:
    """The comparison itself."""
    assert bounds.below({"bound_s": 1.0, "best_s": 0.999})
    assert not bounds.below({"bound_s": 1.0, "best_s": 1.0})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", FEW_PLANS)
def test_small_graphs_are_proved(seed: int) -> None:
    """With memory for all plans, the best of all is found, and in turns it is proved."""
    given = bounds.case(seed)
    problem = bounds.problem_of(given)
    every = [priced_plan(problem, c, -np.inf).objective for c in itertools.product(*map(range, problem.sizes))]
    found = search(given.graph, given.topo, inputs=given.inputs, outputs=given.outputs)
    assert found.objective <= min(every) * (1 + 1e-9)
    assert found.proved or given.topo.overlap


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_transfers_is_below_its_bound(seed: int) -> None:
    """Of the better orders that are found, and of the program's own."""
    given = bounds.case(seed)
    given = replace(given, topo=replace(given.topo, overlap=True))
    problem = bounds.problem_of(given)
    for choice in itertools.islice(itertools.product(*map(range, problem.sizes)), 0, None, 17):
        found = priced_plan(problem, choice, -np.inf)
        least = least_seconds(simulate(found.plan, found.program, given.topo))
        assert least <= bounds.in_better_order(found.plan, found.program, given.topo)[1] * (1 + 1e-12)
        assert least >= 0.5 * found.objective


@pytest.mark.parametrize("seed", range(4))
def test_bounds_of_large_graphs_hold_for_small_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal weights for equal operations, few rounds: a bound below the one that any weights give, and not far."""
    given = bounds.case(seed)
    exact = search(given.graph, given.topo, inputs=given.inputs, outputs=given.outputs)
    monkeypatch.setattr(paths, "LARGE", -1)
    monkeypatch.setattr("tapestry.plan.search.planner.SMALL", 0)
    rough = search(given.graph, given.topo, inputs=given.inputs, outputs=given.outputs)
    assert rough.bound <= exact.objective * (1 + 1e-9)
    assert rough.bound >= 0.8 * exact.bound


def test_marginals_are_least_costs() -> None:
    """Beside brute force, forbidden choices among them, and beside the solver's elimination."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        sizes = rng.integers(1, 4, rng.integers(1, 6)).tolist()
        tables: list[tuple[tuple[int, ...], np.ndarray]] = []
        for _ in range(rng.integers(1, 8)):
            nodes = tuple(rng.permutation(len(sizes))[: rng.integers(1, min(len(sizes), 3) + 1)].tolist())
            table = rng.random([sizes[n] for n in nodes])
            tables.append((nodes, np.where(rng.random(table.shape) < 0.1, np.inf, table)))
        least = [np.full(n, np.inf) for n in sizes]
        for choice in itertools.product(*map(range, sizes)):
            cost = sum(t[tuple(choice[n] for n in nodes)] for nodes, t in tables)
            for i, c in enumerate(choice):
                least[i][c] = min(least[i][c], cost)
        found = marginals(sizes, tables, 10**6)
        assert found is not None and all(np.allclose(a, b) for a, b in zip(found.of, least, strict=True))
        assert found.least == pytest.approx(least[0].min())
    assert marginals([9, 9], [((0, 1), np.zeros((9, 9)))], 80) is None


def test_a_node_with_many_neighbours_is_no_array() -> None:
    """More axes than numpy has: said to be too large."""
    star = [((0, n), np.zeros((1, 1))) for n in range(1, 80)]
    assert minimise([1] * 80, star, 10**6) is not None  # (leaves go first)
    joint = [(tuple(range(70)), np.zeros(()))]
    assert marginals([1] * 70, joint, 10**6) is None and minimise([1] * 70, joint, 10**6) is None
