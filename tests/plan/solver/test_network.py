"""The planner's solver against brute force: costs of nodes, pairs and groups, and usages over time; honest bounds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tapestry.plan.solver import incumbent, network
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.mip import Program
from tapestry.plan.solver.network import Demand, Factor, Network, _instance, evaluate, solve
from tapestry.plan.solver.pairs import from_instance, proved


def random_network(seed: int, *, forbid: float = 0.0, ternary: bool = True) -> tuple[list[int], list[Factor]]:
    """A connected network of at most 7 nodes: unary, pairwise and ternary tables, some groups twice and out of order."""
    rng = np.random.default_rng(seed)
    sizes = [int(s) for s in rng.integers(1, 5, rng.integers(2, 8))]
    groups = [(n,) for n in range(len(sizes)) if rng.random() < 0.7]
    groups += [
        (int(rng.integers(0, n)), n) if rng.random() < 0.5 else (n, int(rng.integers(0, n))) for n in range(1, len(sizes))
    ]
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
def test_the_optimum_is_that_of_brute_force(seed, forbid):
    sizes, factors = random_network(seed, forbid=forbid)
    best = brute(sizes, factors)
    found = solve(Network(sizes, factors))
    if math.isinf(best):
        assert math.isinf(found.objective) and math.isinf(found.bound)
        return
    assert found.objective == pytest.approx(best, abs=1e-9)
    assert found.bound == pytest.approx(best, abs=1e-9)
    assert evaluate(found.choice, factors) == found.objective
    assert all(0 <= c < n for c, n in zip(found.choice, sizes, strict=True))


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("forbid", [0.0, 0.15])
def test_the_integer_program_alone_is_exact(seed, forbid):
    sizes, factors = random_network(seed, forbid=forbid, ternary=False)
    best = brute(sizes, factors)
    if math.isinf(best):
        pytest.skip("nothing is allowed; see test_what_cannot_be_is_said")
    net = from_instance(_instance(sizes, factors, Network(sizes, factors)))
    point = Program(net).integer(Budget.of(30.0))
    choice = (np.flatnonzero(point.weight > 0.5) - net.start[:-1]).tolist()
    assert evaluate(choice, factors) == pytest.approx(best, abs=1e-6)
    assert best - 1e-5 <= point.bound <= best + 1e-6


@pytest.mark.parametrize("without", ["prices", "ruling out", "reductions", "dominance"])
@pytest.mark.parametrize("seed", range(12))
def test_each_part_of_the_search_is_only_a_help(seed, without, monkeypatch):
    """The optimum and its proof come out whichever part does next to nothing."""
    sizes, factors = random_network(100 + seed, forbid=0.1 if seed % 2 else 0.0)
    best = brute(sizes, factors)
    called = []
    nothing = lambda *a: called.append(1) and None  # noqa: E731
    match without:
        case "prices":
            ascend = incumbent.ascend
            monkeypatch.setattr(incumbent, "ascend", lambda *a, **k: ascend(*a, **{**k, "sweeps": 1, "rounds": 1}))
        case "ruling out":
            monkeypatch.setattr(incumbent, "rule_out", nothing)
        case "reductions":
            monkeypatch.setattr(incumbent, "reduce", nothing)
        case "dominance":
            monkeypatch.setattr(network, "undominated", nothing)
    found = solve(Network(sizes, factors))
    assert called or math.isinf(best) or without != "dominance"
    if math.isinf(best):
        assert math.isinf(found.objective)
        return
    assert found.objective == pytest.approx(best, abs=1e-6)
    assert found.bound <= found.objective
    assert found.bound == pytest.approx(best, abs=1e-5)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("quick", [False, True])
def test_limits_on_what_is_used_over_time_are_kept(seed, quick):
    """Against brute force: groups of three as well, several demands of one node, limits that change over time, equal labels."""
    rng = np.random.default_rng(seed)
    sizes, factors = random_network(seed, forbid=0.1 * (seed % 2))
    demands = []
    for n in range(len(sizes)):
        for _ in range(int(rng.integers(0, 3))):
            lo = int(rng.integers(0, 5))
            demands.append(Demand(n, lo, lo + int(rng.integers(0, 4)), rng.integers(0, 9, sizes[n]).astype(float)))
    limits = rng.integers(3, 16, 8).astype(float)
    net = Network(sizes, factors, demands, limits)

    def used(choice, t):
        return sum(d.amounts[choice[d.node]] for d in demands if d.lo <= t < d.hi)

    fits = [c for c in itertools.product(*map(range, sizes)) if all(used(c, t) <= limits[t] for t in range(8))]
    best = min((evaluate(c, factors) for c in fits), default=math.inf)
    found = solve(net, quick=quick)
    assert found.objective == pytest.approx(best, rel=1e-9)
    assert proved(best, found.bound) or (math.isinf(best) and math.isinf(found.bound))
    if not math.isinf(best):
        assert tuple(found.choice) in fits and evaluate(found.choice, factors) == found.objective
        again = solve(net, 0.0, found.choice)
        assert again.objective <= found.objective and again.bound <= best + 1e-9
        any_ = solve(net, gap=math.inf)
        assert tuple(any_.choice) in fits and any_.bound <= best + 1e-9


def test_what_cannot_be_is_said():
    """Every joint choice is forbidden: the cost is infinite, and the bound never claims a finite optimum above it."""
    never = np.array([[math.inf, 1.0], [2.0, math.inf]])
    factors = [Factor((0, 1), never), Factor((0,), np.array([0.0, math.inf])), Factor((1,), np.array([3.0, math.inf]))]
    found = solve(Network([2, 2], factors))
    assert math.isinf(found.objective)
    assert found.bound <= found.objective
    assert not math.isnan(found.bound)


def test_no_nodes_and_nodes_without_factors():
    found = solve(Network([], []))
    assert (found.choice, found.objective, found.bound) == ([], 0.0, 0.0)
    found = solve(Network([3, 1], []))
    assert (found.choice, found.objective, found.bound) == ([0, 0], 0.0, 0.0)
    found = solve(Network([3, 2], [Factor((0,), np.array([5.0, 1.0, 4.0]))]))
    assert (found.choice[0], found.objective, found.bound) == (1, 1.0, 1.0)


def test_costs_of_microseconds_are_told_apart():
    """Seconds of real plans: 1e-5 here, 1e-14 a tie-breaker, 10 s of a bad choice beside them."""
    unary = np.array([2e-5, 1e-5, 10.0])
    pair = np.array([[0.0, 5e-6, 1.0], [5e-6, 2e-6, 1.0], [0.0, 0.0, 0.0]])
    factors = [Factor((0,), unary), Factor((1,), unary), Factor((0, 1), pair)]
    found = solve(Network([3, 3], factors))
    best = brute([3, 3], factors)
    assert best <= found.objective <= best * (1 + 1e-3)
    assert found.bound <= found.objective


@pytest.mark.slow
def test_a_loopy_network():
    """A 5x5 torus of 6 choices each: tree width 10, so that elimination would make tables of 6**10 entries."""
    rng = np.random.default_rng(0)
    side, k = 5, 6
    node = lambda i, j: (i % side) * side + j % side  # noqa: E731
    factors = [Factor((n,), rng.random(k)) for n in range(side * side)]
    for i in range(side):
        for j in range(side):
            for other in (node(i + 1, j), node(i, j + 1)):
                factors.append(Factor((node(i, j), other), rng.random((k, k)) * 0.5))
    found = solve(Network([k] * side * side, factors), 20.0)
    assert found.objective * 0.99 <= found.bound <= found.objective + 1e-9
    for _ in range(20):
        assert found.objective <= evaluate(rng.integers(0, k, side * side).tolist(), factors)


def test_out_of_time_still_gives_a_choice_and_a_bound():
    sizes, factors = random_network(3)
    found = solve(Network(sizes, factors), 0.0)
    best = brute(sizes, factors)
    assert len(found.choice) == len(sizes)
    assert found.bound <= best + 1e-6 <= found.objective + 2e-6
