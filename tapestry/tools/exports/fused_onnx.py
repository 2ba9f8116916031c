"""``onnx-fused``: the graph that was planned, after every rewrite, as one file of plain ONNX for one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tapestry.build.atomic import new_file
from tapestry.build.store import Build
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.provenance import operation_names
from tapestry.tools.exports.nodes.blocks import launch, opset_of
from tapestry.tools.exports.nodes.onnx_nodes import Nodes, NotExpressible, Value
from tapestry.tools.exports.onnx_files import DataFile, checked, model_of, refused, stored, weights_of


def export_fused(build: Build, constants: bytes, target: Path) -> dict[str, Any]:
    """Write the rewritten graph of a build, with its weights in ``TARGET.data`` beside it; returns what was written.

    Raises:
        NotExpressible: an operation has no form in ONNX; names it.
    """
    graph = build.plan.graph
    nodes, values = graph_nodes(graph)
    data = target.with_name(f"{target.name}.data")
    used = {t for op in graph.ops for t in op.inputs} | set(graph.outputs)
    read = weights_of(build, constants)
    with new_file(target) as path:
        with new_file(data) as beside, open(beside, "wb") as file:
            store = DataFile(data.name, file, read)
            weights = [
                stored(store, t, t, whole(graph.tensors[t].shape), graph.tensors[t].dtype) for t in graph.weights if t in used
            ]
        outputs = [values[t] for t in graph.outputs]
        model = model_of(nodes, graph.name, [values[t] for t in graph.inputs], outputs, weights, opset_of(graph))
        path.write_bytes(model.SerializeToString())
        checked(path)
    return {"model": str(target), "data": str(data), "nodes": len(model.graph.node), "operations": len(graph.ops)}


def graph_nodes(graph: Graph) -> tuple[Nodes, dict[str, Value]]:
    """The nodes of a graph, and its tensors."""
    nodes = Nodes.of(graph)
    values = {t: Value(t, x.shape, x.dtype) for t, x in graph.tensors.items()}
    for k, (op, name) in enumerate(zip(graph.ops, operation_names(graph), strict=True)):
        nodes.begin(name)
        kernel = _whole_kernel(graph, op, k)
        names = [r.tensor for r in op.reads] if isinstance(op, Block) else list(op.ins)
        try:
            results = launch(nodes, graph, kernel, [values[t] if t else None for t in names])
        except NotExpressible as e:
            raise refused(op, name, e) from None
        for t, v in zip(op.outs, results, strict=True):
            values[t] = nodes.result(v, t)
    return nodes, values


def _whole_kernel(graph: Graph, op: Op, k: int) -> Kernel:
    names = [r.tensor for r in op.reads] if isinstance(op, Block) else op.ins
    ins = tuple(whole(graph.tensors[t].shape) if t else None for t in names)
    outs = tuple(whole(graph.tensors[t].shape) for t in op.outs)
    return Kernel(op=k, mode="full", block=whole(tuple(d.size for d in op.space)), ins=ins, outs=outs)
