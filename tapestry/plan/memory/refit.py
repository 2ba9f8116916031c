"""An earlier plan with splits in time, recomputation or streamed weights, made again from its moves: a state to go on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Layout, Plan
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.search.planner import beginning
from tapestry.plan.search.priced_plan import PricedPlan, peak, priced_plan
from tapestry.plan.search.problem import build
from tapestry.plan.search.resume import start_of
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.rule import Move


def refitted(
    graph: Graph,
    topo: Topology,
    earlier: Plan,
    moves: Sequence[Move],
    *,
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout],
) -> PricedPlan | None:
    """The earlier plan on the graph that its moves make; None where that is another graph, or it does not fit.

    Args:
        graph: the model's, simplified; it is not simplified again, which would undo recomputation.
    """
    try:
        again = apply_moves(graph, moves)
    except TapestryError:
        return None
    if to_text(again) != to_text(earlier.graph) or earlier.mesh != topo.mesh:
        return None
    problem = build(again, topo, {}, inputs, outputs, streamed=earlier.streamed)
    choice = beginning(problem, start_of(earlier))
    plan = priced_plan(problem, choice, -np.inf) if choice else None
    return plan if plan is not None and peak(plan) <= topo.device.memory and np.isfinite(plan.objective) else None
