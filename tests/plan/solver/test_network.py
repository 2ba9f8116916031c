"""The cost network: elimination, the HiGHS local polytope and brute force give one optimum; a bound is never above a cost."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tapestry.plan.solver import network
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.network import Factor, evaluate, solve, solve_highs


def random_network(seed: int, *, forbid: float = 0.0, ternary: bool = True) -> tuple[list[int], list[Factor]]:
    """A connected network of at most 7 nodes: unary, pairwise and ternary tables, some groups twice and out of order."""
    rng = np.random.default_rng(seed)
    sizes = [int(s) for s in rng.integers(1, 5, rng.integers(2, 8))]
    groups = [(n,) for n in range(len(sizes)) if rng.random() < 0.7]
    groups += [(int(rng.integers(0, n)), n) if rng.random() < 0.5 else (n, int(rng.integers(0, n))) for n in range(1, len(sizes))]
    groups += [tuple(int(n) for n in rng.permutation(len(sizes))[: 3 if ternary and len(sizes) > 2 else 2]) for _ in range(4)]
    factors = []
    for g in groups:
        table = rng.integers(-20, 60, [sizes[n] for n in g]) * 0.125
        if forbid and len(g) > 1:
            table[rng.random(table.shape) < forbid] = math.inf
        factors.append(Factor(g, table))
    return sizes, factors


def brute(sizes: list[int], factors: list[Factor]) -> float:
    return min(evaluate(c, factors) for c in itertools.product(*map(range, sizes)))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("forbid", [0.0, 0.15])
def test_elimination_is_exact(seed, forbid):
    sizes, factors = random_network(seed, forbid=forbid)
    best = brute(sizes, factors)
    found = solve(sizes, factors)
    if math.isinf(best):
        assert math.isinf(found.objective) and math.isinf(found.bound)
        return
    assert found.objective == pytest.approx(best, abs=1e-9)
    assert found.bound == pytest.approx(best, abs=1e-9)
    assert evaluate(found.choice, factors) == found.objective
    assert all(0 <= c < n for c, n in zip(found.choice, sizes, strict=True))


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("forbid", [0.0, 0.15])
def test_highs_alone_is_exact(seed, forbid):
    sizes, factors = random_network(seed, forbid=forbid)
    best = brute(sizes, factors)
    if math.isinf(best):
        pytest.skip("nothing is allowed; see test_what_cannot_be_is_said")
    merged = [Factor(k, t) for k, t in network._merged(factors).items()]
    choice, bound = solve_highs(sizes, range(len(sizes)), merged, Budget.of(30.0))
    assert evaluate([choice[n] for n in range(len(sizes))], factors) == pytest.approx(best, abs=1e-6)
    assert best - 1e-5 <= bound <= best + 1e-6


@pytest.mark.parametrize("limit", [1, 4, 16, 64])
@pytest.mark.parametrize("seed", range(12))
def test_what_elimination_leaves_goes_to_highs(seed, limit, monkeypatch):
    sizes, factors = random_network(100 + seed, forbid=0.1 if seed % 2 else 0.0)
    best = brute(sizes, factors)
    called = []
    real = network.solve_highs
    monkeypatch.setattr(network, "TABLE_LIMIT", limit)
    monkeypatch.setattr(network, "solve_highs", lambda *a: called.append(1) or real(*a))
    found = solve(sizes, factors)
    assert called or limit > 1 or len(sizes) < 3  # two nodes: the dual bound alone settles them
    if math.isinf(best):
        assert math.isinf(found.objective)
        return
    assert found.objective == pytest.approx(best, abs=1e-6)
    assert found.bound <= found.objective + 1e-6
    assert found.bound == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_what_cannot_be_is_said(limit, monkeypatch):
    """Every joint choice is forbidden: the cost is infinite, and the bound never claims a finite optimum above it."""
    monkeypatch.setattr(network, "TABLE_LIMIT", limit)
    never = np.array([[math.inf, 1.0], [2.0, math.inf]])
    factors = [Factor((0, 1), never), Factor((0,), np.array([0.0, math.inf])), Factor((1,), np.array([3.0, math.inf]))]
    found = solve([2, 2], factors)
    assert math.isinf(found.objective)
    assert found.bound <= found.objective
    assert not math.isnan(found.bound)


def test_no_nodes_and_nodes_without_factors():
    found = solve([], [])
    assert (found.choice, found.objective, found.bound) == ([], 0.0, 0.0)
    found = solve([3, 1], [])
    assert (found.choice, found.objective, found.bound) == ([0, 0], 0.0, 0.0)
    found = solve([3, 2], [Factor((0,), np.array([5.0, 1.0, 4.0]))])
    assert (found.choice[0], found.objective, found.bound) == (1, 1.0, 1.0)


@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_costs_of_microseconds_are_told_apart(limit, monkeypatch):
    """Seconds of real plans: 1e-5 here, 1e-14 a tie-breaker, 10 s of a bad choice beside them."""
    monkeypatch.setattr(network, "TABLE_LIMIT", limit)
    unary = np.array([2e-5, 1e-5, 10.0])
    pair = np.array([[0.0, 5e-6, 1.0], [5e-6, 2e-6, 1.0], [0.0, 0.0, 0.0]])
    factors = [Factor((0,), unary), Factor((1,), unary), Factor((0, 1), pair)]
    found = solve([3, 3], factors)
    best = brute([3, 3], factors)
    assert best <= found.objective <= best * (1 + 1e-3)
    assert found.bound <= found.objective


def test_a_loopy_network_that_elimination_cannot_do():
    """A 5x5 torus of 6 choices each: tree width 10, so that the tables would have 6**10 entries."""
    rng = np.random.default_rng(0)
    side, k = 5, 6
    node = lambda i, j: (i % side) * side + j % side  # noqa: E731
    factors = [Factor((n,), rng.random(k)) for n in range(side * side)]
    for i in range(side):
        for j in range(side):
            for other in (node(i + 1, j), node(i, j + 1)):
                factors.append(Factor((node(i, j), other), rng.random((k, k)) * 0.5))
    found = solve([k] * side * side, factors, 20.0)
    assert found.objective * 0.99 <= found.bound <= found.objective + 1e-9
    greedy = network._greedy([k] * side * side, range(side * side), factors)
    assert found.objective <= evaluate([greedy[n] for n in range(side * side)], factors) + 1e-9


def test_out_of_time_still_gives_a_choice_and_a_bound(monkeypatch):
    monkeypatch.setattr(network, "TABLE_LIMIT", 1)
    sizes, factors = random_network(3)
    found = solve(sizes, factors, 0.0)
    best = brute(sizes, factors)
    assert len(found.choice) == len(sizes)
    assert found.bound <= best + 1e-6 <= found.objective + 2e-6
