"""Shapes of what ai.onnx.ml gives for a table of samples, where onnx infers none; as onnxruntime's kernels have them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto

from tapestry.lift.file.protos import ML, attributes, static_shape

WIDTHS = {"TreeEnsembleRegressor": "n_targets", "LinearRegressor": "targets", "SVMRegressor": ""}


def ml_types(model: ModelProto, types: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
    """Types of results whose shape `types` lacks and implies, of nodes that read [samples, features]."""
    out: dict[str, TypeProto] = {}
    for node in model.graph.node:
        given = types.get(node.input[0], TypeProto()) if node.domain == ML and node.input else TypeProto()
        sizes = static_shape(given)
        if sizes is not None and len(sizes) == 2:
            made = zip(node.output, _results(node, given.tensor_type.elem_type, sizes), strict=False)
            out.update({o: t for o, t in made if o and not types.get(o, TypeProto()).tensor_type.HasField("shape")})
    return out


def _results(node: NodeProto, code: int, sizes: list[int]) -> list[TypeProto]:
    """Of one node, by its input's element type and sizes; none of another operator."""
    given = attributes(node)
    rows, tensor = sizes[0], onnx.helper.make_tensor_type_proto
    if node.op_type in WIDTHS:
        return [tensor(TensorProto.FLOAT, [rows, given.get(WIDTHS[node.op_type], 1)])]
    if node.op_type in ("Scaler", "Normalizer", "Imputer"):
        return [tensor(code if node.op_type == "Imputer" else TensorProto.FLOAT, sizes)]
    if node.op_type == "TreeEnsembleClassifier":
        names, numbers = given.get("classlabels_strings", []), given.get("classlabels_int64s", [])
        label = tensor(TensorProto.STRING if names else TensorProto.INT64, [rows])
        classes = len(names or numbers)
        return [label, tensor(TensorProto.FLOAT, [rows, classes])] if classes > 1 else []
    return []
