"""One network of cuts in space and splits in time: what it says of a choice is never above what its plan takes."""

import random

import numpy as np
import pytest

from tapestry.ir.graph import Block
from tapestry.ir.program import alive_bytes
from tapestry.plan.memory.time_choice import TimeChoice
from tapestry.plan.memory.time_network import TimeNetwork, TimePaths, stretches, way_of
from tapestry.plan.search.planner import spatial
from tapestry.plan.search.priced_plan import peak, priced_plan
from tapestry.plan.search.problem import Tables, build, watched
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.network import evaluate
from tapestry.plan.topology import topology
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.partition.micro_batch import batch_move
from tapestry.rewrites.partition.split_time import time_move
from tapestry.verify import certificate
from tests.support.small_models import assert_same, case, execute, mesh_of

HUGE = 1 << 60


def network(graph, topo, rng):
    """A network of random ways."""
    moves = [
        time_move(op, d.name, p, back) for op in graph.ops if isinstance(op, Block) for d in op.space for p in (2, 3)
        for back in (0, 1, 3)
    ]  # fmt: skip
    found, batch = [w for m in rng.sample(moves, min(24, len(moves))) if (w := way_of(graph, m))], batch_move(graph, 2)
    wide = [w for m in ([batch] if batch else []) if (w := way_of(graph, m))]
    some, known = stretches(found[:6]), Tables()
    problems = [[build(w.graph, topo, {}, {}, {}, known=known) for w in ways] for ways in (*some, wide)]
    return TimeNetwork(build(graph, topo, {}, {}, {}, known=known), [*some, wide], problems), known


def random_choice(net, rng):
    """Any ways, and any cuts of what is on."""
    wide = rng.randrange(len(net.ways[-1]) + 1) if rng.random() < 0.3 else 0
    choice = [len(w) + wide if wide else rng.randrange(len(w) + 1) for w in net.ways[:-1]] + [wide]
    for k, n in net.numbered():
        size = len(n.problem.menus[n.at].strategies)
        on = n.stretch < 0 or choice[n.stretch] in n.ways
        choice.append(rng.randrange(size) if on else size)
        assert k == len(choice) - 1
    return choice


@pytest.mark.parametrize("name", ["conv_chain", "mlp", "attention", "residual", "branches"])
@pytest.mark.parametrize("mesh", ["1", "2"])
def test_time_and_memory_of_a_choice_are_underestimates(name, mesh):
    graph, topo, rng, some = case(name).graph, topology(mesh_of(mesh), memory=HUGE), random.Random(name), 0
    net, known = network(graph, topo, rng)
    paths, (uses, limits) = TimePaths(net), net.usages(1e6, surely=True)
    for _ in range(12):
        choice = random_choice(net, rng)
        assert np.isfinite(evaluate(choice, net.firm))
        moves, running = net.moves(choice), net.taken(choice)
        made = apply_moves(graph, moves[::-1])
        problem = build(made, topo, {}, {}, {}, known=known)
        assert [net.problem.graph.ops[k].space for k in running] == [op.space for op in made.ops]
        plan = priced_plan(problem, [choice[k] for k in running], 0.0)
        assert paths.largest(choice) <= plan.objective * (1 + 1e-9)
        used = np.zeros(len(limits))
        for d in uses:
            used[d.lo : d.hi] += d.amounts[choice[d.node]]
        held = max(alive[watched(topo)] for alive in alive_bytes(plan.program))
        assert (used - (limits - 1e6) <= held + 1e-6).all(), (moves, int((used - limits + 1e6).argmax()))
        some += bool(moves)
    assert some


@pytest.mark.slow
def test_what_does_not_fit_is_split_where_that_is_cheapest():
    """The plan fits, is right, and no dearer than any one split of those offered, each with its best cuts."""
    c, mesh = case("conv_chain"), mesh_of("2")
    free = spatial(build(c.graph, topology(mesh, memory=HUGE), {}, {}, {}), Budget.of().part(SECOND))
    topo = topology(mesh, memory=int(0.85 * peak(free)))
    found = TimeChoice(c.graph, topo, {}, {}, frozenset(), Budget.of().part(5 * SECOND)).search([free], ())
    assert found and peak(found.found) <= topo.device.memory and 0 < found.bound <= found.found.objective
    certificate.check(found.found.plan.annotated(), found.found.program, mesh=found.found.plan.mesh)
    assert_same(execute(found.found.plan.graph, found.found.program, c)[0], c.expected, c.graph)
    for move in found.offered[:2]:
        one = spatial(build(apply_moves(c.graph, [move]), topo, {}, {}, {}), Budget.of().part(SECOND))
        if peak(one) <= topo.device.memory:
            assert one.objective >= found.bound * (1 - 1e-9)
