"""Choices mixed by components against brute force, exact bounds of forests, and the shapes of the benchmark."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from bench.planning import iopddl
from bench.support.iopddl_shapes import INFINITE, Shape, problem
from tapestry.plan.solver import lagrange
from tapestry.plan.solver.ascent import Messages
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.crossover import Crossing, Mixture
from tapestry.plan.solver.pairs import Instance, Usage, from_instance


def forest(seed: int, count: int, labels: int = 4) -> Instance:
    """Trees in the contest's form: every second node on an earlier one, some nodes alone; all are used over short intervals."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, labels + 1, count)
    pairs = [[int(rng.integers(0, n)), n] for n in range(1, count) if rng.random() < 0.7]
    nodes = {
        "intervals": [[n, n + int(rng.integers(1, 6))] for n in range(count)],
        "costs": [rng.integers(0, 50, s).tolist() for s in sizes],
        "usages": [rng.integers(0, 20, s).tolist() for s in sizes],
    }
    tables = [rng.integers(0, 60, sizes[i] * sizes[j]).tolist() for i, j in pairs]
    return iopddl.instance({"nodes": nodes, "edges": {"nodes": pairs, "costs": tables}, "usage_limit": 35})


@pytest.mark.parametrize("seed", range(40))
def test_a_mixture_is_the_best_of_both_that_fits_or_close(seed):
    """It costs what the whole instance says, keeps to the limits where its first one does, and is never dearer than that."""
    given = forest(seed, 12)
    net, rng = from_instance(given), np.random.default_rng(seed)
    crossing = Crossing(net)
    start = net.start[:-1]
    x, y = start + np.array([u.argmin() for u in np.split(given.unary, start[1:])]), start + rng.integers(0, net.size)
    mixed = crossing.mix(x, y, np.zeros(len(net.usage.limit)))
    assert set(np.flatnonzero(mixed != x)) <= set(np.flatnonzero(y != x))
    assert crossing.cost(mixed) == pytest.approx(given.cost(mixed - start))
    differ = x != y
    for i, j in given.pairs:  # a component is taken whole
        if differ[i] and differ[j]:
            assert (mixed[i] == y[i]) == (mixed[j] == y[j])
    if given.excess(x - start) <= 0:
        assert given.excess(mixed - start) <= 0
        assert crossing.cost(mixed) <= crossing.cost(x)


@pytest.mark.parametrize("seed", range(20))
def test_a_mixture_keeps_the_better_one(seed):
    given = forest(seed, 10)
    net = from_instance(given)
    mixture, rng = Mixture(Messages(net)), np.random.default_rng(seed)
    seen = [(np.inf, np.inf)]
    for _ in range(30):
        mixture.add(net.start[:-1] + rng.integers(0, net.size), np.zeros(len(net.usage.limit)))
        now = (max(mixture.over, 0.0), mixture.cost)
        assert now <= seen[-1]
        seen.append(now)
        assert mixture.fits() == (given.excess(mixture.best - net.start[:-1]) <= 0)
        assert given.cost(mixture.best - net.start[:-1]) == pytest.approx(mixture.cost)


@pytest.mark.parametrize("seed", range(20))
def test_forests_are_bounded_exactly_by_one_pass(seed):
    """Leaves come after all other levels and give all they have."""
    given = forest(seed, 8, 3)
    messages = Messages(from_instance(given))
    messages.sweep(messages.unary, reverse=False)
    bound = messages.sweep(messages.unary, reverse=True)
    best = min(given.cost(np.array(c)) for c in itertools.product(*map(range, given.sizes)))
    assert bound == pytest.approx(best)
    choice = messages.decode(messages.unary)
    assert messages.cost(messages.unary, choice) == (pytest.approx(best), True)


def test_a_shape_has_as_many_nodes_and_edges_as_asked_and_a_choice():
    shape = Shape(400, 380, (2, 4), 20, 0.3, 7, 10.0)
    made = problem(shape)
    assert (len(made["nodes"]["costs"]), len(made["edges"]["nodes"])) == (400, 380)
    assert problem(shape) == made
    for (i, j), table in zip(made["edges"]["nodes"], made["edges"]["costs"], strict=True):
        assert len(table) == len(made["nodes"]["costs"][i]) * len(made["nodes"]["costs"][j])
        assert min(table) < INFINITE
    row = iopddl.solve("shape", made, {"seconds": 4.0}, 1.0, time.monotonic(), None)
    assert row["feasible"]
    assert row["gap"] < 0.05


def test_times_that_are_passed_cost_more(monkeypatch):
    """Ten nodes use little for long, or much at one time: equal prices over time mean the second, which does not fit."""
    count, long = 10, 100
    label = np.arange(2 * count)
    early, lo = label % 2 == 0, np.where(label % 2 == 0, 0, 5)
    usage = Usage(label, lo, np.where(early, long, 6), np.where(early, 1.0, 5.0), np.full(long, 12.0), np.arange(long))
    none = np.zeros(0)
    given = Instance(np.full(count, 2), np.tile([1.0, 0.0], count), none.reshape(0, 2).astype(int), none, usage)

    def least() -> float:
        messages = Messages(from_instance(given))
        mixture = Mixture(messages, lambda _: mixture.cost if mixture.fits() else np.inf)
        start = lagrange.Ascent(np.zeros(long), messages=messages, best_message=messages.message.copy())
        return lagrange._frugal(start, Budget(SECOND), mixture)

    assert least() <= count
    monkeypatch.setattr(lagrange.Fitting, "turns", 0)
    assert least() == np.inf
