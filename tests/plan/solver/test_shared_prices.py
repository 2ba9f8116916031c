"""Elimination and shared prices against enumeration; equal layers are worked out once."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.elimination import minimise
from tapestry.plan.solver.network import Factor, Network, evaluate, solve, within
from tapestry.plan.solver.shared_prices import Demand, SharedPrices


def layers(seed: int, count: int, labels: int = 3) -> Network:
    """A chain of equal layers of three nodes with a way around the second one; weights stay, results live for one layer."""
    rng = np.random.default_rng(seed)
    unary = [rng.integers(0, 40, labels).astype(float) for _ in range(3)]
    tables = [rng.integers(0, 20, (labels, labels)).astype(float) for _ in range(4)]
    weights, results = rng.integers(1, 9, labels).astype(float), rng.integers(1, 9, labels).astype(float)
    nodes = 3 * count
    factors = [Factor((i,), unary[i % 3]) for i in range(nodes)]
    for i in range(0, nodes, 3):
        factors += [Factor((i, i + 1), tables[0]), Factor((i + 1, i + 2), tables[1]), Factor((i, i + 2), tables[2])]
        factors += [Factor((i + 2, i + 3), tables[3])] if i + 3 < nodes else []
    demands = [Demand(i, 0, nodes, weights) for i in range(1, nodes, 3)]
    demands += [Demand(i, i, min(i + 2, nodes), results) for i in range(nodes)]
    return Network([labels] * nodes, factors, demands, [0.0] * nodes)


def limited(net: Network, share: float) -> Network:
    """With limits between the least and the most that is used."""
    most = np.zeros(len(net.limits))
    least = np.zeros(len(net.limits))
    for d in net.demands:
        most[d.lo : d.hi] += d.amounts.max()
        least[d.lo : d.hi] += d.amounts.min()
    return Network(net.sizes, net.factors, net.demands, (least + share * (most - least)).tolist())


def least(net: Network) -> float:
    fits = (c for c in itertools.product(*map(range, net.sizes)) if within(net, c))
    return min((evaluate(c, net.factors) for c in fits), default=math.inf)


def shared(net: Network) -> SharedPrices:
    tables = [(f.nodes, f.table) for f in net.factors]
    return SharedPrices(net.sizes, tables, net.demands, np.array(net.limits, float))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0.0, 1.0))
def test_bound_and_choice_against_enumeration(seed: int, share: float):
    net = limited(layers(seed, 2), share)
    best, found = least(net), shared(net).search(None, 1e-9, Budget.of())
    assert found is not None and found.bound <= best * (1 + 1e-9)
    if np.isfinite(found.objective):
        assert within(net, found.choice) and evaluate(found.choice, net.factors) == pytest.approx(found.objective)
        assert found.objective >= best - 1e-9
    solved = solve(net)
    assert solved.objective == pytest.approx(best) and solved.bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_elimination_is_exact(seed: int):
    net = layers(seed, 2)
    cost, choice, _ = minimise(net.sizes, [(f.nodes, f.table) for f in net.factors], 1000)
    assert cost == least(Network(net.sizes, net.factors)) == evaluate(choice, net.factors)


def test_elimination_gives_up_on_wide_networks():
    table = np.zeros((4, 4))
    wide = [(pair, table + sum(pair)) for pair in itertools.combinations(range(8), 2)]
    assert minimise([4] * 8, wide, 4**6) is None


def test_equal_layers_are_worked_out_once():
    spent = [minimise(n.sizes, [(f.nodes, f.table) for f in n.factors], 10**6)[2] for n in (layers(1, k, 9) for k in (8, 64))]
    assert spent[1] < 3 * spent[0]


def test_a_deep_network_is_nearly_proved():
    net = limited(layers(3, 60, 6), 0.3)
    found = shared(net).search(None, 1e-9, Budget.of())
    assert found is not None and within(net, found.choice)
    assert found.objective - found.bound <= 0.025 * found.objective  # one layer of sixty, with its changes of layout
    again = shared(net).search(found.price, 1e-9, Budget.of())
    assert again is not None and again.bound >= found.bound * (1 - 1e-3)


def test_nothing_allowed():
    table = np.full((2, 2), np.inf)
    found = solve(Network([2, 2], [Factor((0, 1), table)], [Demand(0, 0, 1, np.array([1.0, 2.0]))], [1.0]))
    assert found.objective == math.inf and found.bound == math.inf
