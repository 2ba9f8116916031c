"""Which fusions pay on one device: launches and bytes saved, against arithmetic and loads done again.

The rules that cost nothing are simplifications and have been applied already. Those here are choices, so they are moves: a map
computed by its readers (`inline_map`), contractions of one factor side by side (`fuse_sums`), and contractions that read 8 bits
as they are (`narrow_factors`), for devices that multiply those. An operation is priced by its
tiles (`rewrites.footprint`): its launch, each tensor once from memory, what every tile loads once from the cache in between,
and each primitive as often as the tiles compute it. A device that runs expressions operator by operator (torch on a CPU) has
no tiles, but a price for every operator, and what a reduction computes before it reduces is written and read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tapestry.ir.contraction import products
from tapestry.ir.expr import Call, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.types import itemsize
from tapestry.plan.topology.model import Device
from tapestry.rewrites.footprint import Tile, evaluated, loaded, tile_of
from tapestry.rewrites.fuse_sums import FuseSums
from tapestry.rewrites.inline_map import InlineMap
from tapestry.rewrites.narrow_factors import NarrowFactors
from tapestry.rewrites.rule import Move
from tapestry.rewrites.simplify import simplify

CACHE = 2.0  # bandwidth of the cache that tiles share (L2), as a multiple of the memory's: 5.5 of 3.35 TB/s on H100
_NONE = frozenset[str]()
OPERATOR = 2e-6  # s, one of torch's operators on a CPU beyond its arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device, and whether it runs expressions operator by operator."""

    device: Device
    eager: bool


def fused(graph: Graph, machine: Machine, leave: frozenset[str] = _NONE) -> tuple[Graph, list[Move]]:
    """The graph with every fusion that pays, and the moves that lead there; ``leave``: simplifications that are left out."""
    prices: dict[Block, float] = {}

    def price(op: Block) -> float:
        if op not in prices:
            prices[op] = seconds(graph, op, machine)
        return prices[op]

    def accept(op: Block, old: list[Block], new: list[Block]) -> bool:
        return sum(map(price, new)) < price(op) + sum(map(price, old))

    graph, first = (graph, list[Move]()) if machine.eager else NarrowFactors().choose(graph)
    graph, moves = InlineMap().choose(graph, accept)
    graph, more = FuseSums().choose(graph)
    found = [*first, *moves, *more]
    return (simplify(graph, leave=leave) if found else graph), found


def seconds(graph: Graph, op: Block, machine: Machine) -> float:
    """Time of one operation, whole, without its contractions: those are the same however the rest is fused."""
    device = machine.device
    tile = {d.name: d.size for d in op.space} if machine.eager else tile_of(op)
    calls = {e for x in (*op.point, *op.then) for e in walk(x) if isinstance(e, Call) and e.fn != "cast"}
    exact = sum(evaluated(op, e, tile) for e in calls)
    from_memory = sum(prod(d.size for d in op.dims) * itemsize(graph.tensors[t].dtype) for t in op.outs)
    from_cache = 0
    for t in op.inputs:
        size = itemsize(graph.tensors[t].dtype)
        cells = [loaded(op, r, graph.tensors[t].shape, tile) for r in op.reads if r.tensor == t]
        from_memory += min(graph.tensors[t].nbytes, sum(cells) * size)
        from_cache += 0 if machine.eager else sum(cells) * size
    out = device.launch + from_memory / device.bandwidth + from_cache / (CACHE * device.bandwidth) + exact / device.vector
    return out + (_operators(op, calls, tile, device) if machine.eager else 0.0)


def _operators(op: Block, calls: set[Call], tile: Tile, device: Device) -> float:
    """What torch takes beyond the arithmetic: every operator, and every operand of a reduction that is none of its inputs."""
    operands = [f for pair in products(op) or () for f in pair] if products(op) else list(op.body if op.monoid else ())
    operands += [f for s in op.inner if isinstance(s.body, Call) for f in s.body.args]
    made = [e for e in operands if isinstance(e, Call)]
    moved = sum(2 * evaluated(op, e, tile) * itemsize(e.dtype) for e in made)
    return OPERATOR * len(calls) + device.launch * len(made) + moved / device.bandwidth
