"""An exported model in 16 bits: every float32 of it becomes float16 or bfloat16, as `model.half()` does before an export."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

KINDS = {"f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
_NUMPY = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
BF16_OPSET = 22  # the first in which Conv, Cos and others take bfloat16; exports of 18 and later mean the same in it
_OF_TYPE = ("to", "dtype")  # attributes that name an element type


def in_half(model: onnx.ModelProto, dtype: str) -> onnx.ModelProto:
    """The model with every f32 in ``dtype``; weights that lie elsewhere keep their places, at half the length.

    Scales of Resize stay: ONNX has them in f32 alone.
    """
    graph, opset = model.graph, next(o for o in model.opset_import if not o.domain)
    if dtype == "bf16":
        opset.version = max(opset.version, BF16_OPSET)
    kept = {n for node in graph.node if node.op_type == "Resize" for n in node.input[1:3]}
    for t in graph.initializer:
        if t.name not in kept:
            _tensor(t, dtype)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in kept:
            value.type.tensor_type.elem_type = KINDS[dtype]
    for node in graph.node:
        if not kept & set(node.output):
            _attributes(node.attribute, dtype)
    return model


def rewritten(path: Path, dtype: str, *, with_weights: bool) -> Path:
    """A model file beside another one, with every f32 in ``dtype``; without weights it only names where they would be."""
    model, there = onnx.load(path, load_external_data=with_weights), path.with_name(f"{path.stem}.{dtype}.onnx")
    beside = (
        {"save_as_external_data": True, "location": f"{there.name}.data", "size_threshold": 1 << 16} if with_weights else {}
    )
    onnx.save(in_half(model, dtype), there, **beside)
    return there


def _attributes(attributes: Iterable[onnx.AttributeProto], dtype: str) -> None:
    for a in attributes:
        if a.name in _OF_TYPE and a.i == TensorProto.FLOAT:
            a.i = KINDS[dtype]
        elif a.type == onnx.AttributeProto.TENSOR:
            _tensor(a.t, dtype)
        elif a.name in ("value_float", "value_floats"):
            values = np.array(a.f if a.name == "value_float" else list(a.floats), np.float32)
            a.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(_rounded(values, dtype))))


def _tensor(t: TensorProto, dtype: str) -> None:
    if t.data_type != TensorProto.FLOAT:
        return
    if t.data_location == TensorProto.EXTERNAL:
        t.data_type = KINDS[dtype]
        for entry in t.external_data:
            if entry.key == "length":
                entry.value = str(int(entry.value) // 2)
        return
    name = t.name
    t.CopyFrom(numpy_helper.from_array(_rounded(numpy_helper.to_array(t), dtype), name))


def _rounded(a: np.ndarray, dtype: str) -> np.ndarray:
    """Finite values stay finite: masks are the least float32, which becomes the least of the type."""
    most = float(ml_dtypes.finfo(_NUMPY[dtype]).max)
    return np.where(np.isfinite(a), np.clip(a, -most, most), a).astype(_NUMPY[dtype])
