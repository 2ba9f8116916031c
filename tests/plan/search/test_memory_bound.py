"""The bound on simulated time within a limit on memory: averages of sums and prices of memory, against every choice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from bench.planning import bounds
from tapestry.ir.graph import Graph
from tapestry.ir.syntax.parser import parse
from tapestry.plan.search.memory_limit import Room, demands
from tapestry.plan.search.path_weights import Master
from tapestry.plan.search.paths import Paths
from tapestry.plan.search.planner import search
from tapestry.plan.search.priced_plan import peak
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.search.time_bound import Game
from tapestry.plan.solver.budget import Budget
from tapestry.plan.topology import parse_mesh, topology

ROUNDS = 48


def deep(layers: int, n: int) -> Graph:
    """Products with a weight each, one after another."""
    text = f"graph deep\ninput x: f32[{n}, {n}]\n"
    text += "".join(f'weight w{k}: f32[{n}, {n}] at "w.bin" 0 {4 * n * n} "w{k}" "{k}"\n' for k in range(layers))
    for k in range(layers):
        before = f"t{k - 1}" if k else "x"
        text += f"t{k}: f32[{n}, {n}] = op [i: {n}, j: {n} | m: {n} sum]\n"
        text += f"  reads {before}[i, m], w{k}[m, j]\n  body {before} * w{k}\n"
    return parse(text + f"output t{layers - 1}\n")


def game_within(problem: Problem, limit: float) -> Game:
    """The game of the choices that keep to a limit by what they hold at least."""
    return Game(problem, demands(problem, surely=True), [limit] * len(problem.graph.ops))


def played(game: Game, choice: list[int]) -> list[float]:
    """The bound after every round."""
    return [game.bound for _ in game.play(choice, ROUNDS, Budget.of(None))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_no_choice_within_the_limit_is_below_the_bound(seed: int) -> None:
    """At every limit and after every round; and never below the bound of all choices."""
    problem = bounds.problem_of(bounds.case(seed))
    room, paths = Room(problem, surely=True), Paths(problem)
    every = [(float(room.estimate(c).max()), paths.largest(c), list(c)) for c in itertools.product(*map(range, problem.sizes))]
    free = max(played(Game(problem), every[0][2]))
    assert free <= min(seconds for _, seconds, _ in every) * (1 + 1e-9)
    for limit in sorted({m for m, _, _ in every}):
        fitting = [(seconds, c) for m, seconds, c in every if m <= limit]
        rounds = played(game_within(problem, limit), max(fitting)[1])
        assert rounds == sorted(rounds)
        assert rounds[-1] <= min(fitting)[0] * (1 + 1e-9)
        assert rounds[-1] >= free * 0.99  # (rounds end where they bring little)


@pytest.mark.slow
def test_prices_raise_the_bound() -> None:
    """Where what is fast does not fit, the bound is of what fits: above the best plan without a limit, near the one with it."""
    graph, topo = deep(24, 2048), topology(parse_mesh("4"), "h100")
    free = search(graph, topo)
    tight = replace(topo, device=replace(topo.device, memory=int(0.5 * peak(free))))
    found = search(graph, tight)
    assert peak(found) <= tight.device.memory
    assert free.objective * 1.02 < found.bound <= found.objective <= found.bound * 1.05


@pytest.mark.parametrize("rows", [0, 3])
def test_the_linear_program_takes_prices_where_they_help(rows: int) -> None:
    """Against a fast choice that passes a limit and a slow one within it: any average, and the dearest price, is the slow one's
    value; without prices the fast one's."""
    graph, topo = deep(3, 512), topology(parse_mesh("2"), "h100")
    paths = Paths(build(graph, topo, {}, {}, {}))
    every = sorted(itertools.product(*map(range, paths.problem.sizes)), key=paths.largest)
    master = Master(paths, rows=rows)
    for choice, excess in ((every[-1], -0.5), (every[0], 0.5)):
        master.against(choice, np.full(rows, excess) if rows else None)
    average, price = master.weights()
    assert average.shape == (paths.lanes, 2 * paths.count + len(paths.problem.flows)) and price.shape == (rows,)
    assert (price >= 0).all() and (price.sum() > 0) == bool(rows)
    assert (master.value > paths.largest(every[0]) * (1 + 1e-9)) == bool(rows)
