"""Memory that a session shares with its ranks: a place for every input and output, the same at every step.

The caller's arrays are copied into it once; ranks read their parts where they lie, and write their parts of outputs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from tapestry.errors import RunError
from tapestry.ir.types import Tensor, numpy_dtype

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Tensor]
ALIGNMENT = 64


class SharedPlaces:
    """Arrays over one piece of anonymous shared memory.

    Args:
        members: inputs and outputs of each.
        file: a descriptor of `new_memory`.

    Attributes:
        inputs, outputs: for each member, arrays by name; values of the host have none.
        nbytes: of the memory.
    """

    def __init__(self, members: Sequence[tuple[Tensors, Tensors]], file: int) -> None:
        tensors = [[[t for t in ts.values() if not t.on_host] for ts in member] for member in members]
        flat = [t for member in tensors for group in member for t in group]
        starts, self.nbytes = _offsets(flat)
        try:
            os.ftruncate(file, self.nbytes)
            self._memory = mmap.mmap(file, self.nbytes)
        except (OSError, OverflowError) as e:
            raise RunError(f"no memory for {self.nbytes:,} bytes of inputs and outputs: {e}") from None
        found = iter([self._array(t, at) for t, at in zip(flat, starts, strict=True)])
        self.inputs: list[dict[str, Array]] = []
        self.outputs: list[dict[str, Array]] = []
        for ins, outs in tensors:
            self.inputs.append({t.name: next(found) for t in ins})
            self.outputs.append({t.name: next(found) for t in outs})

    @staticmethod
    def part(place: Array, shape: Sequence[int]) -> Array:
        """The beginning of a place as an array of a shape that it has room for."""
        return place.reshape(-1)[: prod(shape)].reshape(shape)

    def _array(self, t: Tensor, offset: int) -> Array:
        dtype = numpy_dtype(t.dtype)
        return np.frombuffer(self._memory, dtype, t.size, offset).reshape(t.shape)


def _offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each lies, and how many bytes there are in all (at least one)."""
    starts, end = list[int](), 0
    for t in tensors:
        starts.append(end)
        end += -(-t.size * numpy_dtype(t.dtype).itemsize // ALIGNMENT) * ALIGNMENT
    return starts, max(end, 1)


def new_memory() -> int:
    """A file of no name that lies in memory, as a descriptor."""
    return os.memfd_create("tapestry session", os.MFD_CLOEXEC)
