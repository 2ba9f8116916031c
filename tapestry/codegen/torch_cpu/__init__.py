"""The default target: blocks run by torch's own operators on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tapestry.codegen.torch_cpu import kernels, scalars
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, Kernel, shape


class TorchCpu:
    """Implements `tapestry.runtime.local.Target` on torch tensors."""

    def kernel(self, graph: Graph, kernel: Kernel) -> kernels.Run:
        """A function that computes one block."""
        return kernels.build(graph, kernel)

    def merge(self, monoid: str, states: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Merge the states of several devices, in their order."""
        stacked = [torch.stack(list(fields), dim=-1) for fields in zip(*states, strict=True)]
        return scalars.reduce(monoid, stacked, stacked[0].dim() - 1)

    def slice(self, array: torch.Tensor, box: Box, origin: Box) -> torch.Tensor:
        """A copy of a box of an array that holds ``origin``."""
        place = tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(box, origin, strict=True))
        return array[place].clone(memory_format=torch.contiguous_format)

    def assemble(self, box: Box, dtype: str, pieces: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
        """A new array of a box, filled from pieces that cover it."""
        out = torch.empty(shape(box), dtype=scalars.TORCH_DTYPES[dtype])
        for part, values in pieces:
            out[tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(part, box, strict=True))] = values
        return out

    def full(self, box: Box, dtype: str, value: float) -> torch.Tensor:
        """A new array of a box with one value everywhere."""
        return torch.full(shape(box), value, dtype=scalars.TORCH_DTYPES[dtype])

    def nbytes(self, array: torch.Tensor) -> int:
        """Bytes of the tensor's storage."""
        return array.untyped_storage().nbytes()


__all__ = ["TorchCpu"]
