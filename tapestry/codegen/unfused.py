"""What eager execution would launch and move: one kernel for each ONNX node, its inputs read and its results written once."""

from __future__ import annotations

from tapestry.ir.graph import Graph, Op
from tapestry.rewrites.core.edit import is_view


def unfused(graph: Graph) -> dict[str, int]:
    """``{kernels, bytes}`` of a graph as it was lifted; nodes that only view their input are free."""
    groups: dict[str, list[Op]] = {}
    for i, op in enumerate(graph.ops):
        groups.setdefault(op.source[0] if op.source else f"#{i}", []).append(op)
    kernels = [ops for ops in groups.values() if not all(is_view(op) for op in ops)]
    readers = graph.consumers()
    views = {op.outs[0]: op.inputs[0] for op in graph.ops if is_view(op)}
    total = 0
    for ops in kernels:
        made = {t for op in ops for t in op.outs}
        inside = {id(op) for op in ops}
        total += sum(graph.tensors[t].nbytes for t in {_behind(t, views) for op in ops for t in op.inputs} - made)
        for t in made:
            if t in graph.outputs or any(id(graph.ops[i]) not in inside for i in readers.get(t, [])):
                total += graph.tensors[t].nbytes
    return {"kernels": len(kernels), "bytes": total}


def _behind(tensor: str, views: dict[str, str]) -> str:
    while tensor in views:
        tensor = views[tensor]
    return tensor
