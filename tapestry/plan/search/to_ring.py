"""Gathers of keys and values turned into rings, where a plan does not fit otherwise or is faster so.

The search's tables have the gather: the same bytes over the same links. A ring costs launches and latencies more, holds two
blocks instead of all of them, and what comes next travels while a block is computed. The bound on time counts of a gather
that could be a ring only what the ring would be waited for, so it holds for every ring.
"""

from __future__ import annotations

from dataclasses import replace

from tapestry.ir.graph import Block
from tapestry.ir.plan import Plan
from tapestry.plan import ring_attention
from tapestry.plan.topology import Topology


def with_rings(plan: Plan, topo: Topology) -> Plan | None:
    """The plan with every gather of what an attention goes over as a ring; ``None`` where nothing is gathered."""
    made = {t for op in plan.graph.ops for t in op.outs} | set(plan.inputs)
    strategies = list(plan.strategies)
    for i, (op, s) in enumerate(zip(plan.graph.ops, plan.strategies, strict=True)):
        for other in ring_attention.rings(op, s, topo.mesh) if isinstance(op, Block) else ():
            assert isinstance(op, Block)
            if all(op.reads[k].tensor in made for k in ring_attention.travelling(op, other)):
                strategies[i] = other
                break
    return replace(plan, strategies=tuple(strategies)) if tuple(strategies) != plan.strategies else None
