"""Plans that a person would think of first, priced beside the planner's: the whole model on one device with the others idle,
the same on all, cut along the batch, cut along the weights.

All but the first are choices within the search's own tables. One device is a plan with a single stage: it may have other
fusions, the rates of a device that works alone (where they were measured), and no transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapestry.ir.graph import Graph
from tapestry.ir.plan import MeshAxis, Stage, Strategy, stages_refused
from tapestry.ir.recognition.input_axes import NONE, input_axes
from tapestry.plan.pipelines.staged_plan import lower_plan, stage_topology
from tapestry.plan.search.planner import spatial
from tapestry.plan.search.priced_plan import PricedPlan, peak, priced_plan
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.network import Factor, Network, evaluate, solve
from tapestry.plan.topology import Topology

LARGE = 1 << 12  # cells; smaller weights are nobody's load
MISSED = 1e3  # seconds for each mesh axis that does not cut what it should: taken where an operation cannot be cut so
WORK = 2.0 * SECOND  # for one of them
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePlan:
    """A plan of the whole graph by one idea, and whether it fits (``None``: that was not worked out, the graph is large);
    ``found``: lowered."""

    name: str
    objective: float
    fits: bool | None
    found: PricedPlan | None = None

    def data(self) -> dict[str, object]:
        """For the JSON document."""
        return {"name": self.name, "objective_s": self.objective, "fits": self.fits}


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


def within_tables(problem: Problem, budget: Budget) -> list[WholePlan]:
    """The whole graph on every device, cut along the batch, and cut along the weights, as far as pins and layouts let it be."""
    batched = batch_dims(problem.graph)
    out: list[WholePlan] = []
    if not any(d for m in problem.menus for d in m.strategies[0].dims):
        out.append(_priced("replicated", problem, [0] * len(problem.menus), budget))
    if any(batched):
        out.append(_preferred("batch", problem, lambda i, s: sum(d is None or d != batched[i] for d in s.dims), budget))
    out.append(
        _preferred("tensor", problem, lambda i, s: _largest_share(problem, i, s) + s.dims.count(batched[i] or ""), budget)
    )
    return out


def _preferred(name: str, problem: Problem, missed: Callable[[int, Strategy], float], budget: Budget) -> WholePlan:
    """The cheapest plan of those that miss as little as they can of what is wanted of every operation."""
    more = [
        Factor((i,), MISSED * np.array([float(missed(i, s)) for s in menu.strategies])) for i, menu in enumerate(problem.menus)
    ]
    solution = solve(Network(problem.sizes, [*problem.factors, *more]), budget.part(WORK), quick=True)
    return _priced(name, problem, solution.choice, budget)


def _priced(name: str, problem: Problem, choice: Sequence[int], budget: Budget) -> WholePlan:
    if problem.lowering > WORK:
        return WholePlan(name=name, objective=evaluate(choice, problem.factors), fits=None)
    found = priced_plan(problem, choice, -np.inf)
    budget.spend(problem.lowering)
    fits = peak(found) <= problem.topo.device.memory
    return WholePlan(name=name, objective=found.objective, fits=fits, found=found)


def batch_dims(graph: Graph) -> list[str | None]:
    """For each operation the dimension that counts what axis 0 of the inputs counts (or axis 1, where axis 0 of every input is
    1 long)."""
    inputs = [t for t in graph.inputs if t not in graph.weights and graph.tensors[t].shape]
    at = 0 if any(graph.tensors[t].shape[0] > 1 for t in inputs) else 1
    long = max((graph.tensors[t].shape[at] for t in inputs if len(graph.tensors[t].shape) > at), default=1)
    batch = {(t, at) for t in inputs if graph.tensors[t].shape[at : at + 1] == (long,)}
    runs = zip(graph.ops, input_axes(graph), strict=True)
    return [next((d.name for d in op.dims if d.size > 1 and along.get(d.name, NONE) & batch), None) for op, along in runs]


def _largest_share(problem: Problem, i: int, s: Strategy) -> float:
    """The largest share that a device holds of a large weight that an operation reads; 0 where it reads none."""
    op, graph, menu = problem.graph.ops[i], problem.graph, problem.menus[i]
    reads = menu.reads[menu.strategies.index(s)]
    weights = ((k, graph.tensors[t].size) for k, t in enumerate(op.operands) if t in graph.weights)
    large = {k: n for k, n in weights if n >= LARGE}
    held = [int(np.prod(b[:, :, 1] - b[:, :, 0], axis=1).max()) / large[k] for k, b in reads.items() if k in large]
    return max(held, default=0.0)
