"""Element types, tensors, and where the bytes of a constant tensor come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

# name -> (bytes per element, numpy name); bfloat16 comes from ml_dtypes
DTYPES: dict[str, tuple[int, str]] = {
    "f64": (8, "float64"), "f32": (4, "float32"), "f16": (2, "float16"), "bf16": (2, "bfloat16"),
    "i64": (8, "int64"), "i32": (4, "int32"), "i16": (2, "int16"), "i8": (1, "int8"),
    "u64": (8, "uint64"), "u32": (4, "uint32"), "u16": (2, "uint16"), "u8": (1, "uint8"), "bool": (1, "bool"),
    # only stored and moved: what computes with them is opaque, but for casts that widen `FLOAT8`. Sub-byte elements take a
    # byte each outside a file.
    "f8e4m3fn": (1, "float8_e4m3fn"), "f8e4m3fnuz": (1, "float8_e4m3fnuz"), "f8e5m2": (1, "float8_e5m2"),
    "f8e5m2fnuz": (1, "float8_e5m2fnuz"), "f8e8m0": (1, "float8_e8m0fnu"), "f4e2m1": (1, "float4_e2m1fn"),
    "i4": (1, "int4"), "u4": (1, "uint4"), "i2": (1, "int2"), "u2": (1, "uint2"),
    "c64": (8, "complex64"), "c128": (16, "complex128"),
    # a value that stays on the host: see `Tensor`
    "host": (0, "object"),
}  # fmt: skip
HOST = "host"
PACKED = {"i4": 4, "u4": 4, "f4e2m1": 4, "i2": 2, "u2": 2}  # bits per element in a file
STORED = frozenset(d for d in DTYPES if d[:2] in ("f8", "f4", "i4", "u4", "i2", "u2", "c6", "c1"))
FLOAT8 = frozenset({"f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz"})  # exact in f16, in bf16 and in f32
FLOATS = frozenset({"f64", "f32", "f16", "bf16"})
INTEGERS = frozenset({"i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8"})


def itemsize(dtype: str) -> int:
    """Bytes per element on a device; 0 for a value of the host, which no device holds."""
    return DTYPES[dtype][0]


@cache
def numpy_dtype(dtype: str, wide: bool = False) -> np.dtype[Any]:
    """The numpy type of an element type (float64 for every float when ``wide``)."""
    if wide and dtype in FLOATS:
        return np.dtype(np.float64)
    name = DTYPES[dtype][1]
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A reference to constant bytes, never a copy of them.

    Attributes:
        file: path relative to the model's folder, or ``""`` for bytes kept in the build's own ``constants.bin``.
        offset, length: byte range in that file (little-endian, row-major).
        name: the initializer's name when the bytes are inside the ONNX protobuf itself (offset is then 0).
        sha256: of the elements, row-major, or of the hashes of their tiles (`build.packed_program`); ``""`` where the data is
            absent (``--no-weights``).
        tiles: those hashes, one after another; no part of the graph's text.
    """

    file: str
    offset: int
    length: int
    name: str = ""
    sha256: str = ""
    tiles: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of the graph: ``kind`` is ``input``, ``weight`` (constant data) or ``value`` (written by an operation).

    A **host value** has dtype ``host`` and no axes: strings, sequences, optionals, and tensors whose shape depends on the
    data. It stays in the memory of the host, where the operations that touch it run; no device holds it, it is never sent,
    and its bytes are unknown before the run (0 on every device). ``about`` is its ONNX type: ``int64[2, ?]``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = "value"
    about: str = ""

    @property
    def on_host(self) -> bool:
        """Whether this is a value of the host rather than cells on devices."""
        return self.dtype == HOST

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
