"""Reading the bytes behind a `Weight`: memory-mapped from external data, or out of the ONNX protobuf.

Used by the runtime when a device loads its blocks, and by `lift` for the hash of every weight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from tapestry.errors import ModelError
from tapestry.ir.types import PACKED, Tensor, Weight, numpy_dtype
from tapestry.lift.file.external_data import check_inline, open_inside
from tapestry.lift.file.protos import is_standard
from tapestry.lift.file.structure import load

Box = tuple[tuple[int, int], ...]  # half-open interval per axis


def read_weight(
    model: Path, weight: Weight, tensor: Tensor, box: Box | None = None, constants: Mapping[str, np.ndarray] | None = None
) -> np.ndarray:
    """The data of a weight, or of a box of it.

    Args:
        model: the .onnx file that the reference is relative to.
        box: half-open interval per axis; only its pages are read when the data is external.
        constants: data of the derived constants (references with an empty ``file``).

    Raises:
        ModelError: the data is missing, unsafe or shorter than the reference says.
    """
    if not weight.file:
        assert constants is not None and tensor.name in constants, f"constant '{tensor.name}' without data"
        whole = constants[tensor.name]
    elif weight.name:
        whole = _inline(model, weight.name)
    else:
        whole = _mapped(model.parent, weight, tensor)
    if whole.shape != tensor.shape or whole.dtype != numpy_dtype(tensor.dtype):
        raise ModelError(
            "the weight is not what the plan says",
            where=f"weight '{tensor.name}'",
            why=f"expected {tensor.dtype}{list(tensor.shape)}, found {whole.dtype}{list(whole.shape)}",
            hint="compile the model again",
        )
    part = whole if box is None else whole[tuple(slice(a, b) for a, b in box)]
    return np.ascontiguousarray(part).reshape(part.shape)


def _mapped(folder: Path, weight: Weight, tensor: Tensor) -> np.ndarray:
    dtype = numpy_dtype(tensor.dtype)
    packed = PACKED.get(tensor.dtype)
    need = tensor.nbytes if packed is None else -(-tensor.size * packed // 8)
    if weight.length == 0:
        return np.empty(tensor.shape, dtype)
    fd = open_inside(folder, weight.file, tensor.name)
    with os.fdopen(fd, "rb") as f:
        if weight.offset + weight.length > os.fstat(f.fileno()).st_size or weight.length != need:
            raise ModelError("the data file is too short", where=f"weight '{tensor.name}'", why=f"in '{weight.file}'")
        data = np.memmap(f, np.uint8, "r", weight.offset, (weight.length,))
    if weight.offset % dtype.itemsize:
        data = np.array(data)  # misaligned: copied, since not every reader of the mapping may assume x86
    if packed is not None:
        data_type = onnx.helper.np_dtype_to_tensor_dtype(dtype)
        return numpy_helper.to_array(TensorProto(data_type=data_type, dims=tensor.shape, raw_data=data.tobytes()))
    return data.view(dtype).reshape(tensor.shape)


def _inline(model: Path, name: str) -> np.ndarray:
    status = model.stat()
    stored = _tensors(str(model), status.st_mtime_ns, status.st_size).get(name)
    if stored is None:
        raise ModelError("the weight is not in the model file", where=f"weight '{name}'", why=f"looked in {model}")
    return numpy_helper.to_array(stored)


@lru_cache(maxsize=2)
def _tensors(path: str, _mtime: int, _size: int) -> dict[str, TensorProto]:
    """Tensors inside a model file, by name; cached by path, time and size, so that many weights parse it once."""
    model = load(Path(path))
    stored = stored_tensors(model)
    for t in stored.values():
        if t.data_location != TensorProto.EXTERNAL:
            check_inline(t)
    return stored


def stored_tensors(model: onnx.ModelProto) -> dict[str, TensorProto]:
    """Initializers and values of top-level Constant nodes, by the name of the tensor that they define."""
    stored = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        if is_standard(node, "Constant") and node.output:
            for a in node.attribute:
                if a.name == "value":
                    stored[node.output[0]] = a.t
    return stored
