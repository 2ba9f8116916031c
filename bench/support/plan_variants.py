"""Plans that compete with the planner's choice: of the same graph, with the same tables, but chosen in other ways.

`batch` cuts what follows from axis 0 of the inputs (axis 1 where that is 1 long), and nothing else; `tensor` cuts
every weight that can be cut, along something else than that axis; `elsewhere` is the best plan for another machine (a random
one, by a seed); `random` draws a strategy for every operation. A variant is a build of its own: lowered, verified and saved.
"""

from __future__ import annotations

import json
import random as random_numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.support.random_plan import random_plan
from tapestry import api
from tapestry.build import store
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Plan, Strategy
from tapestry.ir.program import peak_bytes
from tapestry.ir.recognition.input_axes import NONE, input_axes
from tapestry.plan.lower import lower
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.simulate import simulate
from tapestry.plan.solver.network import Factor, Network, solve
from tapestry.plan.strategy import footprints
from tapestry.plan.topology import Topology, to_data, topology
from tapestry.verify import certificate

LARGE = 1 << 12  # cells; smaller weights are nobody's load
PENALTY = 1e3  # seconds for a strategy of the wrong kind: taken where an operation has no other
SECONDS = 20.0  # of the solver, for one variant
Wanted = Callable[[int, Strategy], bool]


class Competitors:
    """Plans of the graph that was compiled for one device."""

    def __init__(self, one: api.Compiled, topo: Topology, folder: Path) -> None:
        self.one, self.graph, self.topo, self.folder = one, one.build.plan.graph, topo, folder

    def named(self, seed: int) -> Iterator[tuple[str, Plan]]:
        """Batch (where there is one), tensor and random."""
        graph, problem = self.graph, build(self.graph, self.topo, {}, {}, {})
        batched = batch_dims(graph)
        if any(batched):
            yield "batch", preferred(problem, lambda i, s: set(s.dims) == ({batched[i]} if batched[i] else {None}))
        yield "tensor", preferred(problem, lambda i, s: batched[i] not in s.dims and _cuts_weights(problem, i, s))
        yield "random", random_plan(graph, self.topo.mesh, seed)

    def elsewhere(self, seed: int) -> Plan:
        """The best plan for a machine whose rates, latencies and links are others, by factors up to 30 either way."""
        rng, d = random_numbers.Random(seed), self.topo.device
        slower = [30 ** rng.uniform(-1, 1) for _ in range(6)]
        rates = {"bandwidth": d.bandwidth * slower[0], "launch": d.launch * slower[1], "vector": d.vector * slower[2]}
        flops = {k: v * slower[3] for k, v in d.flops.items()}
        level = {"alpha": self.topo.links[0].alpha * slower[4], "beta": self.topo.links[0].beta * slower[5]}
        path = self.folder / "elsewhere.json"
        path.write_text(json.dumps({"device": {"memory": d.memory, "flops": flops, **rates}, "levels": [level]}))
        return chosen(build(self.graph, topology(self.topo.mesh, str(path)), {}, {}, {}), [])


def batch_dims(graph: Graph) -> list[str | None]:
    """For each operation the dimension that counts what axis 0 of the inputs counts (or axis 1, where axis 0 of every input is
    1 long)."""
    inputs = [t for t in graph.inputs if t not in graph.weights and graph.tensors[t].shape]
    at = 0 if any(graph.tensors[t].shape[0] > 1 for t in inputs) else 1
    long = max((graph.tensors[t].shape[at] for t in inputs if len(graph.tensors[t].shape) > at), default=1)
    batch = {(t, at) for t in inputs if graph.tensors[t].shape[at : at + 1] == (long,)}
    runs = zip(graph.ops, input_axes(graph), strict=True)
    return [next((d.name for d in op.dims if d.size > 1 and along.get(d.name, NONE) & batch), None) for op, along in runs]


def preferred(problem: Problem, wanted: Wanted) -> Plan:
    """The cheapest plan that takes strategies of one kind wherever an operation has any."""
    more: list[Factor] = []
    for i, menu in enumerate(problem.menus):
        right = [wanted(i, s) for s in menu.strategies]
        if any(right):
            more.append(Factor((i,), np.where(right, 0.0, PENALTY)))
    return chosen(problem, more)


def chosen(problem: Problem, more: Sequence[Factor]) -> Plan:
    """The cheapest choice of a problem with further costs."""
    solution = solve(Network(problem.sizes, [*problem.factors, *more]), SECONDS)
    picked = tuple(m.strategies[c] for m, c in zip(problem.menus, solution.choice, strict=True))
    return Plan(graph=problem.graph, mesh=problem.topo.mesh, strategies=picked)


def _cuts_weights(problem: Problem, i: int, s: Strategy) -> bool:
    """Whether a strategy cuts all large weights that an operation reads; one that reads none may do as it likes."""
    op, graph, mesh = problem.graph.ops[i], problem.graph, problem.topo.mesh
    for _, t, boxes in footprints(op, graph, s, mesh):
        whole = int(np.prod(graph.tensors[t].shape))
        if t in graph.weights and whole >= LARGE and int(np.prod(boxes[0, :, 1] - boxes[0, :, 0])) == whole:
            return False
    return True


def saved(base: api.Compiled, plan: Plan, topo: Topology, folder: Path) -> float:
    """Write a plan as a build like another one; its simulated seconds."""
    program = lower(plan)
    peak = peak_bytes(program)[0]
    laws = certificate.check(plan.annotated(), program, stated_peak=peak, places=plan.places)
    made = replace(
        base.build, plan=plan, program=program, topology=to_data(topo), peak_bytes=tuple(peak), moves=(), report={}, knobs={}
    )
    store.write(folder, made, base.constants, {}, laws)
    return simulate(plan, program, topo).total
