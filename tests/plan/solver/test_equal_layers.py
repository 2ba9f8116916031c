"""Networks of equal layers: the optimum of the whole, bounds of the whole, and a choice whenever the time is up."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.network import Factor, Network, evaluate, solve


def layers(seed: int, count: int, *, width: int = 2, labels: int = 3, ends: bool = True, loopy: bool = True):
    """Equal layers of some nodes in a row, with pairs inside and to the next; a node of another kind at either end."""
    rng = np.random.default_rng(seed)
    kinds = [int(n) for n in rng.integers(2, labels + 1, width)]
    unary = [rng.integers(0, 40, n).astype(float) for n in kinds]
    inside = [
        (a, b, rng.integers(0, 40, (kinds[a], kinds[b])).astype(float)) for a, b in itertools.combinations(range(width), 2)
    ]
    seams = [
        (a, b, rng.integers(0, 40, (kinds[a], kinds[b])).astype(float))
        for a in range(width)
        for b in range(width)
        if loopy or (a, b) == (width - 1, 0)
    ]
    first = int(ends)
    sizes = [2] * first + kinds * count + [2] * first
    factors = []
    for k in range(count):
        at = first + k * width
        factors += [Factor((at + n,), u) for n, u in enumerate(unary)]
        factors += [Factor((at + a, at + b), t) for a, b, t in inside]
        if k:
            factors += [Factor((at - width + a, at + b), t) for a, b, t in seams]
    if ends:
        factors.append(Factor((0, 1), rng.integers(0, 40, (2, kinds[0])).astype(float)))
        factors.append(Factor((len(sizes) - 2, len(sizes) - 1), rng.integers(0, 40, (kinds[-1], 2)).astype(float)))
    return sizes, factors


def brute(sizes, factors) -> float:
    return min(evaluate(c, factors) for c in itertools.product(*map(range, sizes)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(25))
def test_chains_of_equal_layers_are_solved_exactly(seed):
    """The optimum is the brute-force one and so is the bound."""
    sizes, factors = layers(seed, 4)
    best = brute(sizes, factors)
    found = solve(Network(sizes, factors), 10.0)
    assert found.objective == pytest.approx(best, abs=1e-6)
    assert best * (1 - 1e-5) - 1e-6 <= found.bound <= best + 1e-6


def test_the_claim_is_that_of_the_whole():
    """Two layers that must differ: equal labels cost 10 each, so that the folded optimum is far above the true one."""
    unlike = np.array([[10.0, 0.0], [0.0, 10.0]])
    factors = [Factor((k, k + 1), unlike) for k in range(9)]
    sizes = [2] * 10
    found = solve(Network(sizes, factors))
    assert (found.objective, found.bound) == (0.0, 0.0)


@pytest.mark.slow
def test_eighty_layers():
    """And without time there is a choice and an honest bound."""
    sizes, factors = layers(3, 80, width=6, labels=5)
    found = solve(Network(sizes, factors), 2.0)
    none = solve(Network(sizes, factors), 0.0)
    assert none.bound <= found.objective <= none.objective


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(5))
def test_no_time_gives_a_choice_and_an_honest_bound(seed):
    sizes, factors = layers(seed, 4)
    best = brute(sizes, factors)
    stopped = Budget.of(60.0)
    stopped.interrupt.set()
    for budget in (0.0, stopped):
        found = solve(Network(sizes, factors), budget)
        assert evaluate(found.choice, factors) == found.objective
        assert found.bound <= best + 1e-6 <= found.objective + 2e-6


@pytest.mark.parametrize("seed", range(10))
def test_never_worse_than_the_start(seed):
    sizes, factors = layers(seed, 4)
    best = solve(Network(sizes, factors))
    again = solve(Network(sizes, factors), 0.0, best.choice)
    assert again.objective == best.objective
    known = solve(Network(sizes, factors), 0.0, best.choice, best.bound)
    assert (known.objective, known.bound, known.choice) == (best.objective, best.bound, best.choice)
    other = [0] * len(sizes)
    assert solve(Network(sizes, factors), 0.0, other).objective <= evaluate(other, factors)
