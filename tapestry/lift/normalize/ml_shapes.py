"""Shapes of what ai.onnx.ml gives for a table of samples, where onnx infers none; as onnxruntime's kernels have them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto

from tapestry.errors import ModelError
from tapestry.lift.file.protos import ML, attributes, node_name, static_shape
from tapestry.onnx_eval.ort_session import OrtError, apart, foreign

WIDTHS = {"TreeEnsembleRegressor": "n_targets", "LinearRegressor": "targets", "SVMRegressor": ""}


def foreign_types(model: ModelProto, types: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
    """Types of results that `types` lacks, of operators that are onnxruntime's own, as far as its inference says them.

    Raises:
        ModelError: it takes no such node.
    """
    stored, out = {t.name: t for t in model.graph.initializer}, dict[str, TypeProto]()
    for node in filter(foreign, model.graph.node):
        wanted = [o for o in node.output if o]
        ins = dict.fromkeys(i for i in node.input if i)
        known = {n for n in (*wanted, *ins) if types.get(n, TypeProto()).WhichOneof("value")}
        if known.issuperset(wanted) or not known.issuperset(ins):
            continue
        ends = [onnx.helper.make_value_info(i, types[i]) for i in ins if i not in stored]
        results = [onnx.helper.make_value_info(o, TypeProto()) for o in wanted]
        graph = onnx.helper.make_graph([node], "node", ends, results, [stored[i] for i in ins if i in stored])
        alone = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
        try:
            found = apart(alone.SerializeToString(), None)
        except OrtError as e:
            where, why = f"node '{node_name(node)}' ({node.op_type})", " ".join(str(e).split())[:300]
            raise ModelError("onnxruntime does not take the node", where=where, why=why, hint="a function for it") from None
        for o, (kind, sizes) in zip(wanted, found, strict=True):
            tensor = re.fullmatch(r"tensor\((\w+)\)", kind)
            if tensor:
                code = TensorProto.DataType.Value(tensor[1].upper())
                static = sizes and all(isinstance(n, int) and n >= 0 for n in sizes)  # ([] is also said of unknown ranks)
                out[o] = onnx.helper.make_tensor_type_proto(code, sizes if static else None)
    return out


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
