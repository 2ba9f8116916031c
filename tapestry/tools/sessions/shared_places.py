"""Memory that a session shares with its ranks: a place for every input and output, the same at every step.

The caller's arrays are copied into it once; ranks read their parts where they lie, and write their parts of outputs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

import numpy as np

from tapestry.api import Compiled
from tapestry.errors import RunError
from tapestry.ir.types import Array, Tensor, numpy_dtype

Tensors = Sequence[Tensor]
ALIGNMENT = 64


class SharedPlaces:
    """Arrays over one piece of anonymous shared memory.

    Args:
        file: a descriptor of a file in memory.

    Attributes:
        inputs, outputs: arrays by name; values of the host have none.
        nbytes: of the memory, at least one.
    """

    def __init__(self, inputs: Tensors, outputs: Tensors, file: int) -> None:
        tensors = [[t for t in ts if not t.on_host] for ts in (inputs, outputs)]
        flat = [t for group in tensors for t in group]
        cells = (-(-t.size * numpy_dtype(t.dtype).itemsize // ALIGNMENT) * ALIGNMENT for t in flat)
        *starts, end = accumulate(cells, initial=0)
        self.nbytes = max(end, 1)
        try:
            os.ftruncate(file, self.nbytes)
            self._memory = mmap.mmap(file, self.nbytes)
        except (OSError, OverflowError) as e:
            raise RunError(f"no memory for {self.nbytes:,} bytes of inputs and outputs: {e}") from None
        places = zip(flat, starts, strict=True)
        found = (np.frombuffer(self._memory, numpy_dtype(t.dtype), t.size, at).reshape(t.shape) for t, at in places)
        self.inputs, self.outputs = ({t.name: next(found) for t in group} for group in tensors)

    @staticmethod
    def part(place: Array, shape: Sequence[int]) -> Array:
        """The beginning of a place as an array of a shape that it has room for."""
        return place.reshape(-1)[: prod(shape)].reshape(shape)


def places_of(compiled: Compiled, file: int) -> SharedPlaces:
    """Places with as many cells along each axis as at any size of a build."""

    def widest(name: str) -> Tensor:
        t = compiled.build.plan.graph.tensors[name]
        if compiled.sized is None:
            return t
        return replace(t, shape=tuple(map(max, zip(*(r.widest(name) for r in compiled.sized.regions), strict=True))))

    graph, program = compiled.build.plan.graph, compiled.build.program
    return SharedPlaces([*map(widest, graph.inputs)], [*map(widest, program.outputs)], file)
