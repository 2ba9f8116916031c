"""What every plan of a graph needs at least, however its operations are cut in space and time: said before any is sought.

Two things are certain of each graph that splits in time and recomputation make of one, and of each plan of it:

- Results stay to the end, each whole on all devices together. The operation that writes the last of them reads at least as
  much as the graph's own operation does, its states, or, where that was run part by part, the parts that are put together.
- A launch has at least one point of what it computes, with all that this point reads: inner reductions and what an opaque
  node does not commute with are never cut, nor is a reduced dimension that its monoid keeps in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from tapestry.errors import PlanError
from tapestry.ir.graph import Block, Graph, Op, Opaque
from tapestry.ir.recognition.state import varies
from tapestry.ir.types import itemsize
from tapestry.plan.cost.floor import least_cells
from tapestry.plan.search.priced_plan import MORE_ROOM
from tapestry.plan.topology import Topology
from tapestry.rewrites.splitting import split_time
from tapestry.rewrites.splitting.split import splittable


class Lack(NamedTuple):
    """An operation for which no plan has the memory: the bytes it takes at least, and those that there are.

    Attributes:
        tensor: what the operation writes.
        together: whether all devices share them; else one device has them.
    """

    tensor: str
    need: int
    have: int
    together: bool


def refuse(forms: Sequence[Graph], topo: Topology) -> None:
    """Say before any search that no plan of some forms of a graph fits; forms without simplifications are not looked at then.

    Raises:
        PlanError: for each form of the graph an operation has not the memory in any plan; says which.
    """
    found = [lacking(graph, topo) for graph in forms]
    if (lack := found[0]) and all(found):
        held = "outputs are held to the end, beside all that the last operation reads, however it is cut"
        point = "one point of it reads and writes so much, which no cut in space or time makes smaller"
        have = f"{'all devices together have' if lack.together else 'no device has over'} {lack.have:,}"
        needs = f"what writes '{lack.tensor}' needs {lack.need:,} bytes at once, {lack.need - lack.have:,} too many: {have}"
        raise PlanError(f"no plan fits, fused or not: {needs}", why=held if lack.together else point, hint=MORE_ROOM)


def lacking(graph: Graph, topo: Topology) -> Lack | None:
    """The operation for which no plan in space and time has the memory; none where nothing says so."""
    memories = topo.memories()
    need, tensor = _at_the_end(graph)
    if need > sum(memories):
        return Lack(tensor, need, sum(memories), True)
    need, tensor = max(((_point_bytes(op, graph), op.outs[0]) for op in graph.ops), default=(0, ""))
    return Lack(tensor, need, max(memories), False) if need > max(memories) else None


def _at_the_end(graph: Graph) -> tuple[int, str]:
    """Bytes of all results, and of what the last of them is made of: the one of which that is least; and which that is."""
    held, makers = sum(graph.tensors[t].nbytes for t in set(graph.outputs)), graph.producers()
    if any(t not in makers for t in graph.outputs):  # (one that nothing writes may be loaded last)
        return held, graph.outputs[0]
    beside = [(_beside(graph.ops[makers[t]], t, graph), t) for t in graph.outputs]
    most, tensor = min(beside, default=(0, ""))
    return held + most, tensor


def _beside(op: Op, tensor: str, graph: Graph) -> int:
    """Bytes that are there beside all results when the operation that writes one of them ends."""
    if isinstance(op, Opaque):
        return min(graph.tensors[tensor].nbytes, sum(graph.tensors[t].nbytes for t in op.inputs if t not in graph.outputs))
    others = frozenset(k for k in op.body_reads() if op.reads[k].tensor not in graph.outputs)  # (results are counted already)
    most = [graph.tensors[tensor].nbytes, _read_bytes(op, graph, op.ranges, others)]
    if op.monoid and op.lowers:
        fields = zip(op.body, varies(op), strict=True)
        most.append(sum(itemsize(e.dtype) * prod(d.size for d, v in zip(op.dims, along) if v) for e, along in fields))
    return min(most)


def _point_bytes(op: Op, graph: Graph) -> int:
    """Bytes of one point of an operation, of the dimensions that may be cut."""
    if isinstance(op, Opaque):
        cuts = {t: {a for a in axes if a is not None} for t, axes in zip((*op.ins, *op.outs), (*op.in_axes, *op.out_axes))}
        shapes = {t: prod(n for a, n in enumerate(graph.tensors[t].shape) if a not in cut) for t, cut in cuts.items() if t}
        return sum(n * itemsize(graph.tensors[t].dtype) for t, n in shapes.items() if not graph.tensors[t].on_host)
    cut = {d.name for d in (*op.dims, *splittable(op))} | {
        d.name for d in op.reduce if split_time.split_time_refusal(op, d.name, 2) is None
    }
    sizes = {d.name: 1 if d.name in cut else d.size for d in op.space}
    results = 0 if op.monoid else sum(itemsize(graph.tensors[t].dtype) for t in op.outs)
    return results + _read_bytes(op, graph, sizes, op.body_reads())


def _read_bytes(op: Block, graph: Graph, sizes: dict[str, int], some: frozenset[int]) -> int:
    """Bytes that some reads of an operation touch at least, in a part of it of so many points along each dimension."""
    most: dict[str, int] = {}
    for r in (op.reads[k] for k in some):
        t = graph.tensors[r.tensor]
        most[r.tensor] = max(most.get(r.tensor, 0), least_cells(op, r, t.shape, sizes) * itemsize(t.dtype))
    return sum(most.values())
