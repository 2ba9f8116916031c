"""Nodes of a prepared model, one after another, to operations: by their lifters, or as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from tapestry.errors import ModelError, refusing
from tapestry.lift.builder import Builder, Node
from tapestry.lift.file.protos import ML, node_name, source_of
from tapestry.lift.file.structure import opsets_of
from tapestry.lift.opaque import MOVES, emit_opaque, lift_stored, reason, touches_stored
from tapestry.lift.registry import Declined, find

SUSPECT = "check the model with onnx.checker and onnxruntime; if they take it, this is a bug of Tapestry's"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A static model to lift.

    Attributes:
        types: the type of every value.
        hinted: values whose shape the file declares and inference does not imply.
    """

    model: ModelProto
    types: Mapping[str, TypeProto]
    hinted: frozenset[str] = frozenset()


def lift_nodes(prepared: Prepared, seed: int, steps: bool) -> Builder:
    """The operations of a prepared model's nodes.

    Args:
        seed: session seed of the random operators.
        steps: whether recurrences are lifted step by step.

    Raises:
        ModelError: a node does not fit its operator.
    """
    graph = prepared.model.graph
    stored = {t.name: t for t in graph.initializer if t.data_type != TensorProto.STRING}
    nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in graph.initializer if t.name not in stored]
    for node in graph.node:
        value = _constant(node) if node.op_type == "Constant" else None
        if value is None:
            nodes.append(node)
        else:
            stored[node.output[0]] = value
    builder = Builder(prepared.types, stored, opsets_of(prepared.model), seed, steps)
    for proto in nodes:
        _lift_node(Node(builder, proto, builder.opsets.get("", 1), source_of(proto)), prepared.hinted)
    return builder


def _lift_node(node: Node, hinted: frozenset[str]) -> None:
    why, lifter = node.beyond_blocks(), find(node.proto, node.version)
    declared = bool(node.outs) and node.outs[0] in hinted
    if declared and lifter is not None and node.proto.domain != ML:  # (onnx infers no shapes of that domain)
        why = why or "its shape is only declared in the file"
    with refusing(ModelError, "the node does not fit its operator", node.where, SUSPECT):
        if not why and touches_stored(node) and node.kind not in MOVES:
            lift_stored(node)
            return
        try:
            if why or lifter is None:
                raise Declined
            lifter(node)
        except Declined:
            emit_opaque(node, reason(node, why))


def _constant(node: NodeProto) -> TensorProto | None:
    """The value of a Constant node, which its attributes may give in several ways; None when it is text."""
    a = node.attribute[0]
    if a.name in ("value_string", "value_strings") or (a.name == "value" and a.t.data_type == TensorProto.STRING):
        return None
    if a.name == "value":
        return a.t
    dtype = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}.get(a.name)
    if dtype is None:
        where = f"node '{node_name(node)}'"
        raise ModelError("constants of this kind are not supported", where=where, why=f"it has {a.name}")
    return numpy_helper.from_array(np.array(helper.get_attribute_value(a), dtype))
