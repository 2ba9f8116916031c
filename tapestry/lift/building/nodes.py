"""Nodes of a prepared model, one after another, to operations: by their lifters, or as they are."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from tapestry.errors import ModelError, refusing
from tapestry.lift.building import opaque, pointwise
from tapestry.lift.building.builder import Builder, Node
from tapestry.lift.building.registry import find
from tapestry.lift.file.structure import node_name
from tapestry.lift.normalize.prepare import SOURCE, Prepared
from tapestry.lift.operators.ml import ML

SUSPECT = "check the model with onnx.checker and onnxruntime; if they take it, this is a bug of Tapestry's"


def lift_nodes(prepared: Prepared, seed: int, steps: bool) -> Builder:
    """The operations of a prepared model's nodes.

    Args:
        steps: whether recurrences are lifted step by step.

    Raises:
        ModelError: a node does not fit its operator.
    """
    graph = prepared.model.graph
    known = {t.name: t for t in graph.initializer if t.data_type != TensorProto.STRING}
    opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in prepared.model.opset_import}
    nodes = [onnx.helper.make_node("Constant", [], [t.name], value=t) for t in graph.initializer if t.name not in known]
    for node in graph.node:
        value = _constant(node) if node.op_type == "Constant" else None
        if value is None:
            nodes.append(node)
        else:
            known[node.output[0]] = value
    version = opsets.get("", 1)
    builder = Builder(prepared.types, known, opsets, seed, steps)
    for proto in nodes:
        source = next((p.value for p in proto.metadata_props if p.key == SOURCE), node_name(proto))
        node = Node(builder, proto, version, source)
        why, lifter = node.beyond_blocks(), find(proto, version)
        declared = bool(proto.output) and proto.output[0] in prepared.hinted
        if declared and lifter is not None and proto.domain != ML:  # (onnx infers no shapes of that domain)
            why = why or "its shape is declared, and depends on the data"
        with refusing(ModelError, "the node does not fit its operator", node.where, SUSPECT):
            if not why and pointwise.touches_stored(node) and proto.op_type not in pointwise.MOVES:
                pointwise.lift_stored(node)
            elif why or lifter is None or lifter(node) is False:
                node.opaque(opaque.reason(node, why))
    return builder


def _constant(node: onnx.NodeProto) -> TensorProto | None:
    """The value of a Constant node, which its attributes may give in several ways; None when it is text."""
    a = node.attribute[0]
    if a.name in ("value_string", "value_strings") or (a.name == "value" and a.t.data_type == TensorProto.STRING):
        return None
    if a.name == "value":
        return a.t
    value = onnx.helper.get_attribute_value(a)
    if a.name in ("value_float", "value_floats"):
        return onnx.numpy_helper.from_array(np.array(value, np.float32))
    if a.name in ("value_int", "value_ints"):
        return onnx.numpy_helper.from_array(np.array(value, np.int64))
    raise ModelError("constants of this kind are not supported", where=f"node '{node_name(node)}'", why=f"it has {a.name}")
