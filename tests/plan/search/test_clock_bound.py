"""The bound on simulated time: below the clock of every plan, by brute force; and plans near the best one."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from tapestry.ir.graph import Graph
from tapestry.ir.plan import MeshAxis
from tapestry.ir.syntax.parser import parse
from tapestry.plan.hoist_transfers import early
from tapestry.plan.search.paths import Paths
from tapestry.plan.search.planner import search
from tapestry.plan.search.priced_plan import choice_of, priced_plan
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.simulate import simulate
from tapestry.plan.topology import Topology, parse_mesh, topology

NEAR = 1.02  # times the best time of all plans: what a search may leave on small graphs

PRODUCTS = """graph products
input x: f32[8, 12]
input w: f32[12, 6]
input v: f32[6, 12]
a: f32[8, 6] = op [i: 8, n: 6 | m: 12 sum]
  reads x[i, m], w[m, n]
  body x * w
  then max(acc0, 0.0)
b: f32[8, 12] = op [i: 8, n: 12 | m: 6 sum]
  reads a[i, m], v[m, n]
  body a * v
c: f32[8, 12] = op [i: 8, n: 12]
  reads b[i, n], x[i, n]
  body b + x
output c
"""

BRANCHES = """graph branches
input x: f32[64, 64]
input w: f32[64, 64]
a: f32[64, 64] = op [i: 64, n: 64 | m: 64 sum]
  reads x[i, m], w[m, n]
  body x * w
b: f32[64, 64] = op [i: 64, n: 64 | m: 64 sum]
  reads a[i, m], w[m, n]
  body a * w
c: f32[64, 64] = op [i: 64, n: 64 | m: 64 sum]
  reads a[m, i], w[m, n]
  body a * w
output b, c
"""

WINDOW = """graph window
input x: f32[3, 12]
input k: f32[3]
a: f32[3, 12] = op [c: 3, h: 12 | r: 3 sum]
  reads x[c, h + r - 1] else 0.0, k[r]
  body x * k
b: f32[3, 12] = op [c: 3, h: 12 | r: 3 max]
  reads a[c, h - r] else -inf
  body a
y: f32[3, 12] = op [c: 3, h: 12]
  reads b[c, h], a[c, h]
  body b - a
output y
"""

RESIDUAL = """graph residual
input x: f32[16, 16]
input w: f32[16, 16]
a: f32[16, 16] = op [i: 16, n: 16]
  reads x[i, n]
  body tanh(x)
b: f32[16, 16] = op [i: 16, n: 16 | m: 16 sum]
  reads x[i, m], w[m, n], r = a[n, i]
  body x * w
  then acc0 + r
c: f32[16] = op [i: 16 | n: 16 sum]
  reads a[i, n]
  body a
d: f32[16] = op [i: 16 | n: 16 max]
  reads b[i, n], s = c[i]
  body b
  then acc0 - s
output d
"""

GRAPHS = {"products": PRODUCTS, "branches": BRANCHES, "window": WINDOW, "residual": RESIDUAL}


def topologies() -> dict[str, Topology]:
    """Switches and wires, devices in a row and in a grid, alike or not, transfers beside kernels or not."""
    cpu, torus = topology(parse_mesh("3"), "cpu"), topology(parse_mesh("4"), "tpu")
    slow = replace(cpu.device, vector=cpu.device.vector / 3, bandwidth=cpu.device.bandwidth / 2)
    return {
        "row": cpu, "in turns": replace(cpu, overlap=False), "gpus": topology(parse_mesh("2"), "h100"),
        "grid": topology(parse_mesh("2x2"), "a100-pcie"), "wires": torus,
        "uneven": replace(cpu, mesh=(MeshAxis("a", 3, (5, 1, 2)),)),
        "kinds": replace(cpu, kinds=(slow, cpu.device, cpu.device), overlap=False),
        "slow links": replace(cpu, links=(replace(cpu.links[0], alpha=0.0, beta=cpu.links[0].beta * 30),)),
    }  # fmt: skip


TOPOLOGIES = topologies()


def clock(problem: Problem, choice: tuple[int, ...]) -> float:
    """Simulated seconds of a choice, with transfers as they are lowered or moved ahead."""
    found = priced_plan(problem, choice, -np.inf)
    return min(found.objective, simulate(found.plan, early(found.program), problem.topo).total)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ends", ["free", "fixed"])
@pytest.mark.parametrize("on", TOPOLOGIES)
@pytest.mark.parametrize("name", GRAPHS)
def test_no_plan_is_faster_than_the_bound(name: str, on: str, ends: str) -> None:
    """Every sum is at most the clock of its plan, the bound at most the least clock, and the plan found is near the best."""
    graph, topo, rng = parse(GRAPHS[name]), TOPOLOGIES[on], random.Random(f"{name} {on}")
    fixed = {t: (0,) * len(topo.mesh) for t in ("x", graph.outputs[0])} if ends == "fixed" else {}
    inputs, outputs = ({t: v for t, v in fixed.items() if (t in graph.inputs) == k} for k in (True, False))
    problem = build(graph, topo, {}, inputs, outputs)
    every = list(itertools.product(*map(range, problem.sizes)))
    some = every if len(every) <= 120 else rng.sample(every, 120)
    found, paths = search(graph, topo, inputs=inputs, outputs=outputs), Paths(problem)
    best = min(found.objective, *(clock(problem, c) for c in some))
    assert found.bound <= best * (1 + 1e-9)
    assert found.objective <= best * NEAR
    tight = 0
    for choice in some:
        time, largest = clock(problem, choice), paths.largest(choice)
        assert largest <= time * (1 + 1e-9)
        tight += largest >= time * 0.999
    assert tight
    assert priced_plan(problem, choice_of(problem, found.plan), -np.inf).objective >= found.objective * (1 - 1e-9)


def wide_or_long(n: int) -> Graph:
    """A product that travels while another one is computed; how long that takes is ``n``."""
    return parse(BRANCHES.replace("64", str(n)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [64, 256])
def test_what_is_hidden_is_not_paid_for(n: int) -> None:
    """Of the plans of two branches the one that takes least on the clock is found, though its costs add up to more."""
    topo = topology(parse_mesh("2"), "cpu")
    problem = build(wide_or_long(n), topo, {}, {}, {})
    best = min(clock(problem, c) for c in itertools.product(*map(range, problem.sizes)))
    found = search(wide_or_long(n), topo)
    assert found.bound <= best * (1 + 1e-9) and found.objective <= best * NEAR


def test_in_turns_everything_adds_up() -> None:
    """Where transfers and kernels share a stream, a chain takes the sum of its parts, and that is proved."""
    topo = replace(topology(parse_mesh("2"), "cpu"), overlap=False)
    found = search(parse(PRODUCTS.replace(", x[i, n]", "").replace("b + x", "b")), topo)
    assert found.proved
    run = simulate(found.plan, found.program, topo)
    assert run.total == pytest.approx((run.busy(0) + run.busy(1)).max())
