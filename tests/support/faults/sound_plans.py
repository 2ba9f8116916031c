"""Plans in which nothing is wrong, for faults to be put into."""

from __future__ import annotations

from typing import Any

from tapestry.ir.graph import Block
from tapestry.ir.plan import Plan, Strategy
from tapestry.plan.strategy import strategies
from tests.support.small_models import case, mesh_of


def halo_plan() -> Plan:
    """conv1 and conv2 cut along height over 4 devices: two halos, a pool of another halo, a gather."""
    graph, mesh = case("conv_chain").graph, mesh_of("4")
    chosen = []
    for op in graph.ops:
        offered = strategies(op, mesh)
        chosen.append(next((s for s in offered if s.dims == ("h",)), offered[0]))
    return Plan(graph=graph, mesh=mesh, strategies=tuple(chosen))


def row_parallel_plan() -> Plan:
    """Every operation that can cuts a reduced dimension over 3 devices: partial states, all-reduces, finishes."""
    graph, mesh = case("mlp").graph, mesh_of("3")
    return Plan(graph=graph, mesh=mesh, strategies=tuple(_reduced(op, mesh, False) for op in graph.ops))


def scatter_plan() -> Plan:
    """As before, over 2x2 with reduce-scatters where there are some."""
    graph, mesh = case("batched").graph, mesh_of("2x2")
    return Plan(graph=graph, mesh=mesh, strategies=tuple(_reduced(op, mesh, True) for op in graph.ops))


def norm_plan() -> Plan:
    """Monoids of several fields, over 2 devices."""
    graph, mesh = case("norms").graph, mesh_of("2")
    return Plan(graph=graph, mesh=mesh, strategies=tuple(_reduced(op, mesh, False) for op in graph.ops))


def opaque_plan() -> Plan:
    graph, mesh = case("opaques").graph, mesh_of("3")
    return Plan(graph=graph, mesh=mesh, strategies=tuple(strategies(op, mesh)[-1] for op in graph.ops))


def _reduced(op: Any, mesh: Any, scatter: bool) -> Strategy:
    offered = strategies(op, mesh)
    inner = {d.name for d in op.reduce} if isinstance(op, Block) else set()
    cut = [s for s in offered if set(s.dims) & inner and any(o is not None for o in s.out) == scatter]
    return cut[0] if cut else offered[0]


PLANS = {f.__name__: f for f in (halo_plan, row_parallel_plan, scatter_plan, norm_plan, opaque_plan)}
