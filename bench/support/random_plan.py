"""Plans that nothing optimises: a random legal strategy for every operation, to test that any plan computes the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tapestry.ir.graph import Graph
from tapestry.ir.plan import Arrival, Mesh, Plan, Stage, Strategy
from tapestry.plan.strategy import strategies, tensor_boxes


def random_plan(graph: Graph, mesh: Mesh, seed: int) -> Plan:
    """One strategy per operation, drawn from all that are legal; an operation that can be split is, where it can be."""
    rng = random.Random(seed)
    chosen: list[Strategy] = []
    for op in graph.ops:
        found = strategies(op, mesh)
        cut = [s for s in found if any(d is not None for d in s.dims)]
        chosen.append(rng.choice(cut or found))
    return Plan(graph=graph, mesh=mesh, strategies=tuple(chosen))


def random_staged_plan(graph: Graph, mesh: Mesh, stages: Sequence[Stage], seed: int) -> Plan:
    """Operations in any of the stages, in the graph's order, any legal strategy for each on its stage's mesh, and any layout
    that leaves no device without cells for what arrives at a later stage (or none: all of it on every device)."""
    rng = random.Random(seed)
    of = sorted(rng.randrange(len(stages)) for _ in graph.ops)
    chosen = tuple(rng.choice(strategies(op, stages[k].mesh)) for op, k in zip(graph.ops, of, strict=True))
    arrivals: list[Arrival] = []
    for t, i in graph.producers().items():
        for k in range(of[i] + 1, len(stages)):
            shape, on = graph.tensors[t].shape, stages[k].mesh
            layout = tuple(rng.choice([None, *range(len(shape))]) for _ in on)
            boxes = tensor_boxes(shape, layout, on)
            if rng.random() < 0.6 and not graph.tensors[t].on_host and bool((boxes[..., 1] > boxes[..., 0]).all()):
                arrivals.append(Arrival(t, k, layout))
    return Plan(graph=graph, mesh=mesh, strategies=chosen, stages=tuple(stages), stage_of=tuple(of), arrivals=tuple(arrivals))
