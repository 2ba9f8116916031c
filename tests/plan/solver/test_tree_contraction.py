"""Exact elimination of large networks against brute force: the least cost, what choices add to it, and where it gives up."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench.planning.iopddl import instance
from bench.support.iopddl_shapes import Shape, problem
from tapestry.plan.solver import lagrange, pairwise
from tapestry.plan.solver.ascent import Messages
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.crossover import Mixture
from tapestry.plan.solver.lagrange import ExactPrices
from tapestry.plan.solver.network_reduction import components, settle
from tapestry.plan.solver.pairs import Infeasible, Instance, Pairs, Usage, from_instance
from tapestry.plan.solver.tree_contraction import Contraction, forest


def network(seed: int, nodes: int = 7) -> Pairs:
    """A forest and some pairs that close cycles, with forbidden joint choices and labels."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, nodes)
    pairs = [(int(rng.integers(0, n)), n) for n in range(1, nodes) if rng.random() < 0.8]
    pairs += [tuple(sorted(rng.permutation(nodes)[:2].tolist())) for _ in range(3)]
    tables = [
        np.where(rng.random(sizes[a] * sizes[b]) < 0.15, 1e18, rng.integers(0, 50, sizes[a] * sizes[b])) for a, b in pairs
    ]
    unary = np.where(rng.random(int(sizes.sum())) < 0.05, 1e18, rng.integers(0, 30, int(sizes.sum())))
    net = from_instance(Instance(sizes, unary.astype(float), np.array(pairs), np.concatenate(tables).astype(float)))
    settle(net)
    return net


def every(net: Pairs) -> list[tuple[float, set[int], set[int]]]:
    """Of every choice that is allowed: its cost, labels and joint choices."""
    table = {
        (e, a, b): (k, c) for k, (e, a, b, c) in enumerate(zip(net.edge.tolist(), net.a.tolist(), net.b.tolist(), net.cost))
    }
    out: list[tuple[float, set[int], set[int]]] = []
    for labels in itertools.product(*(np.flatnonzero(net.alive() & (net.node == v)).tolist() for v in net.nodes())):
        at = dict(zip(net.nodes().tolist(), labels))
        keys = [(e, at[a], at[b]) for e, (a, b) in enumerate(zip(net.tail.tolist(), net.head.tolist()))]
        if all(key in table for key in keys):
            found = [table[key] for key in keys]
            cost = sum(float(net.unary[k]) for k in labels) + sum(c for _, c in found)
            out.append((cost, set(labels), {k for k, _ in found}))
    return out


@pytest.mark.parametrize("seed", range(40))
def test_least_costs_are_those_of_brute_force(seed):
    try:
        net = network(seed)
    except Infeasible:
        return
    choices = every(net)
    order = Contraction.of(net)
    assert order is not None
    value, label = order.least(net.unary)
    best = min((c for c, _, _ in choices), default=np.inf)
    assert value == pytest.approx(best, abs=1e-6)
    if not choices:
        return
    assert (best, set(label.tolist())) in [(c, labels) for c, labels, _ in choices]
    proof = order.certificate(value)
    for k in np.flatnonzero(net.alive()):
        assert proof.label[k] == pytest.approx(min((c for c, labels, _ in choices if k in labels), default=np.inf) - best)
    for k in range(len(net.a)):
        assert proof.joint[k] == pytest.approx(min((c for c, _, joint in choices if k in joint), default=np.inf) - best)


def test_a_network_that_is_too_wide_is_given_up():
    size, nodes = 6, 9
    pairs = np.array(list(itertools.combinations(range(nodes), 2)))
    given = Instance(np.full(nodes, size), np.zeros(nodes * size), pairs, np.arange(len(pairs) * size * size) % 7.0)
    assert Contraction.of(from_instance(given), 1000) is None
    assert Contraction.of(from_instance(given), size ** (nodes + 1)) is not None


@pytest.mark.parametrize("seed", range(6))
def test_exact_prices_never_pass_the_optimum_and_reach_that_of_the_dual(seed):
    """Chains with limits at three times: below every choice that fits, and near the best mixture of choices (by its program)."""
    rng = np.random.default_rng(seed)
    nodes = 8
    sizes = np.full(nodes, 2)
    pairs = np.array([(n, n + 1) for n in range(nodes - 1)])
    label = np.arange(2 * nodes)
    use = Usage(
        label,
        np.zeros(len(label), int),
        np.full(len(label), 3),
        rng.integers(0, 20, len(label)) + 1.0,
        np.zeros(3),
        np.arange(3),
    )
    use.lo = np.repeat(rng.integers(0, 2, nodes), 2)
    use.limit = np.array([0.45, 0.5, 0.5]) * use.of(np.ones(len(label)))
    net = from_instance(
        Instance(sizes, rng.integers(0, 30, 2 * nodes).astype(float), pairs, rng.integers(0, 30, 4 * len(pairs)) * 1.0, use)
    )
    choices = every(net)
    weights = np.array([[float(k in labels) for k in label] for _, labels, _ in choices])
    used, costs = np.array([net.usage.of(w) for w in weights]), np.array([c for c, _, _ in choices])
    rows = (used - use.limit) / use.limit
    price = lagrange._model(costs, rows, np.zeros(3), np.full(3, 1e5))
    dual = float((costs + rows @ price).min())
    if dual > costs.max():  # nothing fits, mixed or not
        return
    messages, order = Messages(net), Contraction.of(net)
    assert order is not None
    mixture = Mixture(messages, lambda _: np.inf)
    prices = ExactPrices(np.zeros(3), order=order, mixture=mixture, budget=Budget(60 * SECOND))
    prices.turn(prices.budget)
    prices.refine(60)
    assert dual * 0.999 <= prices.best <= dual * (1 + 1e-9)
    fitting = costs[(used <= use.limit).all(axis=1)]
    assert prices.best <= fitting.min(initial=np.inf) + 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_the_forest_within_costs_no_more(seed):
    try:
        net = network(seed)
    except Infeasible:
        return
    less = forest(net)
    parts = len({*components(len(net.gone), less.tail, less.head)[net.nodes()].tolist()})
    assert len(less.tail) == len(net.nodes()) - parts  # no cycle is left, and what was connected still is
    assert parts == len({*components(len(net.gone), net.tail, net.head)[net.nodes()].tolist()})
    whole, within = Contraction.of(net), Contraction.of(less)
    assert whole is not None and within is not None
    assert within.least(net.unary)[0] <= whole.least(net.unary)[0] + 1e-9


@pytest.mark.slow
def test_a_long_chain_with_little_memory_is_closed():
    """One of the benchmark's shapes, smaller: prices alone leave a gap there, and messages a large one."""
    made = instance(problem(Shape(4096, 4160, (4, 8), 240, 0.1, 1, 6.0)))
    state = pairwise.search(made, Budget(4 * SECOND))
    assert state.cost < np.inf
    assert state.cost - state.bound <= 1e-3 * state.cost
