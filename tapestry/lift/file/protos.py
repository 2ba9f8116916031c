"""Typed readings of ONNX protos that every room of the loader shares, and the notes that the loader puts on nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TypeProto, helper

STANDARD = ("", "ai.onnx")  # both names of ONNX's own operator domain
EARLY = 7  # the first opset that lifters know; what was written before is written anew as that one
MICROSOFT = "com.microsoft"  # onnxruntime's own
ML = "ai.onnx.ml"
NO_NAMES = frozenset({"external_data", "doc_string", "metadata_props", "producer_name", "producer_version", "raw_data"})
# notes on nodes, as metadata or as attributes
SOURCE = "tapestry.source"  # the node of the file that this one comes from
WHY_NOT = "tapestry.not_linear"  # why the states of a loop are no linear recurrences
AFTER = "tapestry.after"  # the padding that was written in the file: what count_include_pad counts


def is_standard(node: NodeProto, *ops: str) -> bool:
    """Whether a node is one of ONNX's own operators: any of them, or one of those named."""
    return node.domain in STANDARD and (not ops or node.op_type in ops)


def standard_opset(model: ModelProto) -> int:
    """The version of ONNX's own operators that a model imports; 1 where it does not say."""
    return next((o.version for o in model.opset_import if o.domain in STANDARD), 1)


def attributes(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node by name, as Python values (strings as bytes)."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def set_attributes(node: NodeProto, **values: Any) -> None:
    """Give attributes a value, in place; None drops them."""
    others = [a for a in node.attribute if a.name not in values]
    del node.attribute[:]
    node.attribute.extend([*others, *(helper.make_attribute(k, v) for k, v in values.items() if v is not None)])


def static_shape(type_: TypeProto | None) -> list[int] | None:
    """The sizes of a tensor type; None where it is no tensor, or where a size is not stated."""
    t = (type_ or TypeProto()).tensor_type
    stated = t.HasField("shape") and all(d.HasField("dim_value") for d in t.shape.dim)
    return [d.dim_value for d in t.shape.dim] if stated else None


def node_name(node: NodeProto) -> str:
    """The name by which messages and `source` call a node: its own, or its first output's."""
    return node.name or next((o for o in node.output if o), node.op_type)


def source_of(node: NodeProto) -> str:
    """The name of the node of the file that a node comes from."""
    return next((p.value for p in node.metadata_props if p.key == SOURCE), node_name(node))


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Graphs in a node's attributes."""
    for a in node.attribute:
        if a.type == AttributeProto.GRAPH:
            yield a.g
        elif a.type == AttributeProto.GRAPHS:
            yield from a.graphs


def nested(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes, each followed by those of its subgraphs, however deep."""
    for node in nodes:
        yield node
        for g in subgraphs(node):
            yield from nested(g.node)


def model_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Every node of a model: of its graph, of all subgraphs, and of its functions."""
    yield from nested(model.graph.node)
    for f in model.functions:
        yield from nested(f.node)


def own_names(graph: GraphProto) -> set[str]:
    """Names of the values that a graph itself defines."""
    return {i.name for i in graph.input} | {t.name for t in graph.initializer} | {o for n in graph.node for o in n.output}


def captured(node: NodeProto) -> list[str]:
    """Outer names that a node's subgraphs read, each once, in order."""
    outer: dict[str, None] = {}
    for g in subgraphs(node):
        own = own_names(g)
        read = [i for n in g.node for i in (*n.input, *captured(n)) if i] + [o.name for o in g.output]
        outer |= dict.fromkeys(i for i in read if i not in own)
    return list(outer)


def rename_captured(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename outer values inside a subgraph, except where the subgraph defines the name itself."""
    own = own_names(graph)
    names = {a: b for a, b in names.items() if a not in own}
    for node in graph.node:
        for k, i in enumerate(node.input):
            node.input[k] = names.get(i, i)
        for g in subgraphs(node):
            rename_captured(g, names)
    for o in graph.output:
        o.name = names.get(o.name, o.name)


def replace_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Give a graph other nodes, some of which may be its own."""
    copies = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(copies)
