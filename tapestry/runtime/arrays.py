"""Arrays of the runtime, which are torch's: their dtypes, their parts, and how many bytes they take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tapestry.ir.kernel import Box, shape, slices_within
from tapestry.ir.types import DTYPES, HOST, STORED
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.runtime.target_protocol import Array


def torch_dtype(dtype: str) -> torch.dtype:
    """The dtype that holds elements of the IR's; types that are only stored are held as their bits."""
    bits = dtype == HOST or (dtype in STORED and not dtype.startswith("c"))
    return torch.uint8 if bits else getattr(torch, DTYPES[dtype][1])


def part(array: Array, box: Box, origin: Box) -> Array:
    """A view of a box of an array that holds ``origin``."""
    return array[slices_within(box, origin)]


def assemble(box: Box, dtype: str, pieces: Sequence[tuple[Box, Array]], device: torch.device) -> torch.Tensor:
    """A new array of a box, filled from pieces that cover it."""
    out = torch.empty(shape(box), dtype=torch_dtype(dtype), device=device)
    for piece, values in pieces:
        part(out, piece, box).copy_(values)
    return out


def rounded(array: Array, dtype: str) -> Array:
    """An array's numbers rounded to another dtype, in its own."""
    return array.to(torch_dtype(dtype)).to(array.dtype)


def nbytes(array: Array) -> int:
    """Bytes of the storage of a tensor, which is more than it needs where it is a view; a host value is on no device."""
    if isinstance(array, HostValue):
        return 0
    return array.untyped_storage().nbytes()
