"""The whole model on one device with the others idle, priced beside the planner's plan.

It is a plan with a single stage: it may have other fusions, the rates of a device that works alone (where they were measured),
and no transfers.
"""

from __future__ import annotations

from dataclasses import replace

from tapestry.ir.graph import Graph
from tapestry.ir.plan import MeshAxis, Stage, stages_refused
from tapestry.plan.pipelines.staged_plan import lower_plan, stage_topology
from tapestry.plan.search.planner import spatial
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.search.problem import build
from tapestry.plan.solver.budget import Budget
from tapestry.plan.topology import Topology

UNLIMITED = 1 << 62


def one_device(graph: Graph, topo: Topology, budget: Budget) -> PricedPlan:
    """The graph on the first device, of unlimited memory, at the rates of one that works alone; its plan is of that device."""
    stage = Stage(0, (MeshAxis(topo.mesh[-1].name, 1),))
    device = replace(topo.alone or topo.device, memory=UNLIMITED)
    alone = replace(stage_topology(topo, stage), device=device, kinds=(), calls=())
    problem = build(graph, alone, {}, {}, {})
    budget.spend(problem.work)
    return spatial(problem, budget)


def idle_beside(found: PricedPlan, topo: Topology) -> PricedPlan | None:
    """The plan of one device as one of the whole mesh; ``None`` where it is none."""
    stage = Stage(0, found.plan.mesh)
    plan = replace(found.plan, mesh=topo.mesh, stages=(stage,), stage_of=(0,) * len(found.plan.graph.ops))
    return None if stages_refused(plan) else replace(found, plan=plan, program=lower_plan(plan), problem=None)
