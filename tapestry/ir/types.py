"""Element types, tensors, and where the bytes of a constant tensor come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

# name -> (bytes per element, numpy name); bfloat16 comes from ml_dtypes
DTYPES: dict[str, tuple[int, str]] = {
    "f64": (8, "float64"), "f32": (4, "float32"), "f16": (2, "float16"), "bf16": (2, "bfloat16"),
    "i64": (8, "int64"), "i32": (4, "int32"), "i16": (2, "int16"), "i8": (1, "int8"),
    "u64": (8, "uint64"), "u32": (4, "uint32"), "u16": (2, "uint16"), "u8": (1, "uint8"), "bool": (1, "bool"),
}  # fmt: skip
FLOATS = frozenset({"f64", "f32", "f16", "bf16"})
INTEGERS = frozenset({"i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8"})


def itemsize(dtype: str) -> int:
    """Bytes per element."""
    return DTYPES[dtype][0]


def numpy_dtype(dtype: str, wide: bool = False) -> np.dtype[Any]:
    """The numpy type of an element type (float64 for every float when ``wide``)."""
    if dtype == "bf16" and not wide:
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(np.float64 if wide and dtype in FLOATS else DTYPES[dtype][1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A reference to constant bytes, never a copy of them.

    Attributes:
        file: path relative to the model's folder, or ``""`` for bytes kept in the build's own ``constants.bin``.
        offset, length: byte range in that file (little-endian, row-major).
        name: the initializer's name when the bytes are inside the ONNX protobuf itself (offset is then 0).
        sha256: of the bytes; ``""`` where the data is absent (``--no-weights``).
    """

    file: str
    offset: int
    length: int
    name: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of the graph: ``kind`` is ``input``, ``weight`` (constant data) or ``value`` (written by an operation)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = "value"

    @property
    def size(self) -> int:
        """Number of elements."""
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * itemsize(self.dtype)
