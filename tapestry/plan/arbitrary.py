"""A plan that nothing optimises: a random legal strategy for every operation, to test that any plan computes the same."""

from __future__ import annotations

import random

from tapestry.ir.graph import Graph
from tapestry.ir.plan import Mesh, Plan
from tapestry.plan.strategy import strategies


def random_plan(graph: Graph, mesh: Mesh, seed: int) -> Plan:
    """One strategy per operation, drawn from all that are legal; an operation that can be split is, where it can be."""
    rng = random.Random(seed)  # noqa: S311  (a test case, not a secret)
    chosen = []
    for op in graph.ops:
        found = strategies(op, mesh)
        cut = [s for s in found if any(d is not None for d in s.dims)]
        chosen.append(rng.choice(cut or found))
    return Plan(graph=graph, mesh=mesh, strategies=tuple(chosen))
