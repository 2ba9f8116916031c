"""Gathers of keys and values turned into rings, where a plan does not fit otherwise or is faster so.

The search's tables have the gather: the same bytes over the same links. A ring costs launches and latencies more, holds two
blocks instead of all of them, and what comes next travels while a block is computed. So every ring is a plan whose gather the
tables priced at no more, and their bound holds for it.
"""

from __future__ import annotations

from dataclasses import replace

from tapestry.ir.graph import Block
from tapestry.ir.plan import Plan, Strategy
from tapestry.ir.program import Program
from tapestry.plan import ring_attention
from tapestry.plan.lower import lower
from tapestry.plan.pipelines.staged_plan import link_between
from tapestry.plan.simulate import simulate
from tapestry.plan.topology import Topology

FASTER = 0.98  # a ring is taken for its speed if the simulated time falls under this share of what it was
STEPS = 1 << 18  # steps times devices beyond which time is not simulated for it


def with_rings(plan: Plan, topo: Topology) -> tuple[Plan, Program, float] | None:
    """The plan with every gather of what an attention goes over as a ring, its program, and what that costs in seconds by the
    tables; ``None`` where nothing is gathered."""
    made = {t for op in plan.graph.ops for t in op.outs} | set(plan.inputs)
    strategies, extra = list(plan.strategies), 0.0
    for i, (op, s) in enumerate(zip(plan.graph.ops, plan.strategies, strict=True)):
        for other in ring_attention.rings(op, s, topo.mesh) if isinstance(op, Block) else ():
            reads = ring_attention.travelling(op, other)
            assert isinstance(op, Block)
            if all(op.reads[k].tensor in made for k in reads):
                strategies[i] = other
                extra += _seconds(other, len(reads), topo)
                break
    if tuple(strategies) == plan.strategies:
        return None
    new = replace(plan, strategies=tuple(strategies))
    program = lower(new)
    return (new, program, extra) if any(getattr(s, "kind", "") == "permute" for s in program.steps) else None


def faster(new: tuple[Plan, Program], old: tuple[Plan, Program], topo: Topology) -> bool:
    """Whether a plan's simulated time is clearly less than another's."""
    if max(len(p.steps) * p.devices for _, p in (new, old)) > STEPS:
        return False
    return simulate(*new, topo).total < FASTER * simulate(*old, topo).total


def _seconds(s: Strategy, reads: int, topo: Topology) -> float:
    """What a ring costs more than a gather: a launch for every block and buffer, and a message's latency for each."""
    axis = ring_attention.axis_of(s)
    assert axis is not None
    n, stride = topo.mesh[axis].size, 1
    for a in topo.mesh[axis + 1 :]:
        stride *= a.size
    alpha = link_between(topo, 0, stride).alpha
    return n * topo.device.launch + (n - 1) * reads * (topo.device.launch + alpha)
