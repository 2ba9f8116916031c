"""Reading the bytes behind a `Weight`: memory-mapped from external data, or out of the ONNX protobuf.

Used by the runtime when a device loads its blocks, and by `lift` for the hash of every weight.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from tapestry.build import weight_tiles
from tapestry.errors import BuildError, ModelError, refusing
from tapestry.ir.kernel import slices, slices_within
from tapestry.ir.types import PACKED, Tensor, Weight, numpy_dtype
from tapestry.lift.file.external_data import check_inline, open_inside
from tapestry.lift.file.protos import is_standard
from tapestry.lift.file.stored_ranges import stored_ranges
from tapestry.lift.file.structure import TEXT, load

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
    else:
        whole = _whole(model, weight, tensor)
    part = whole if box is None else whole[slices(box)]
    return np.require(part, requirements=["C", "A"]).reshape(part.shape)


def read_checked(model: Path, weight: Weight, tensor: Tensor, box: Box, honest: set[tuple[Weight, int]]) -> np.ndarray:
    """A copy of a box of a weight in the model's files, every tile that it touches held against its hash (`Weight.tiles`).

    Args:
        honest: (weight, tile) that have been compared before, by this process; those that are found right are added.

    Raises:
        ModelError: the data is missing, unsafe or shorter than the reference says.
        BuildError: it is not what the model held when it was compiled.
    """
    whole = _whole(model, weight, tensor)
    out = np.empty([hi - lo for lo, hi in box], whole.dtype)
    for number, tile in weight_tiles.touched(tensor.shape, whole.itemsize, box):
        part = whole[slices(tile)]
        if (weight, number) not in honest:
            part = np.ascontiguousarray(part).reshape(part.shape)  # what is checked is what is used
            at = number * weight_tiles.DIGEST
            if weight_tiles.digest(part) != weight.tiles[at : at + weight_tiles.DIGEST]:
                raise BuildError(
                    f"weight '{tensor.name}' has changed since the model was compiled",
                    where=str(model),
                    why=f"in its part {', '.join(f'{lo}:{hi}' for lo, hi in tile)}" if tile else "",
                    hint="compile the model again",
                )
            honest.add((weight, number))
        common = [(max(a, lo), min(b, hi)) for (a, b), (lo, hi) in zip(tile, box, strict=True)]
        out[slices_within(common, box)] = part[slices_within(common, tile)]
        _let_go(whole)
    return out


def _let_go(array: np.ndarray) -> None:
    """Drop what has been read of a mapped file from this process's memory; the kernel keeps it as long as it likes."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def _whole(model: Path, weight: Weight, tensor: Tensor) -> np.ndarray:
    """A weight in the model's files, mapped where its elements are stored as they are."""
    whole = _inline(model, weight, tensor) if weight.name else _mapped(model.parent, weight, tensor)
    if whole.shape != tensor.shape or whole.dtype != numpy_dtype(tensor.dtype):
        raise ModelError(
            "the weight is not what the plan says",
            where=f"weight '{tensor.name}'",
            why=f"expected {tensor.dtype}{list(tensor.shape)}, found {whole.dtype}{list(whole.shape)}",
            hint="compile the model again",
        )
    return whole


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
    if packed is not None:
        data_type = onnx.helper.np_dtype_to_tensor_dtype(dtype)
        return numpy_helper.to_array(TensorProto(data_type=data_type, dims=tensor.shape, raw_data=data.tobytes()))
    return data.view(dtype).reshape(tensor.shape)


def _inline(model: Path, weight: Weight, tensor: Tensor) -> np.ndarray:
    """A tensor inside a protobuf: mapped where it is stored as raw bytes, else parsed, it alone.

    The protobuf is the model itself, which may have been moved, or what a line of IR text names beside the text.
    """
    path = model.parent / weight.file if model.suffix == TEXT else model
    unreadable = refusing(ModelError, "the model cannot be read", str(path), "compile the model again")
    with _opened(model, weight, tensor) as f, unreadable:
        status = os.fstat(f.fileno())
        plain = stat.S_ISREG(status.st_mode)
        found = stored_ranges(str(path), status.st_mtime_ns, status.st_size).get(weight.name) if plain else None
        if found is None:
            return _once_sparse(path, weight.name)
        if found.raw is not None and tensor.dtype not in PACKED and found.raw[1] - found.raw[0] == tensor.nbytes > 0:
            data = np.memmap(f, np.uint8, "r", found.raw[0], (tensor.nbytes,))
            return data.view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)
        lo, hi = found.message
        f.seek(lo)
        stored = TensorProto.FromString(f.read(hi - lo))
        check_inline(stored)
        return numpy_helper.to_array(stored)


def _opened(model: Path, weight: Weight, tensor: Tensor) -> BinaryIO:
    """The file that has a tensor inside; what IR text names is not trusted, and never outside the text's folder."""
    if model.suffix == TEXT:
        return os.fdopen(open_inside(model.parent, weight.file, tensor.name), "rb")
    try:
        return os.fdopen(os.open(model, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as e:
        hint = "put the model back where it was compiled, or say where it is now: tapestry run BUILD --model FILE"
        raise ModelError("cannot read the model", where=str(model), why=e.strerror or "", hint=hint) from None


def _once_sparse(model: Path, name: str) -> np.ndarray:
    """A weight that the file has as a sparse tensor."""
    stored = stored_tensors(load(model)).get(name)
    if stored is None:
        raise ModelError("the weight is not in the model file", where=f"weight '{name}'", why=f"looked in {model}")
    return numpy_helper.to_array(stored)


def stored_tensors(model: onnx.ModelProto) -> dict[str, TensorProto]:
    """Initializers and values of top-level Constant nodes, by the name of the tensor that they define."""
    stored = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        if is_standard(node, "Constant") and node.output:
            for a in node.attribute:
                if a.name == "value":
                    stored[node.output[0]] = a.t
    return stored
