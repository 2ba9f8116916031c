"""The default target: blocks run by torch's own operators on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tapestry.codegen.torch_cpu import exact_kernels as exact
from tapestry.codegen.torch_cpu import kernels
from tapestry.codegen.torch_cpu.base import scalars, state_merges
from tapestry.codegen.torch_cpu.c import conv_chain
from tapestry.codegen.torch_cpu.c.c_calls import Call, Calls, Recorded, Together, batch
from tapestry.codegen.torch_cpu.c.maps_c import Mapped
from tapestry.codegen.torch_cpu.torch_ops.dense import Packable
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, Kernel, shape
from tapestry.ir.types import HOST
from tapestry.onnx_eval.opaque_node import HostValue


class TorchCpu:
    """Implements `tapestry.runtime.one_process.logical_devices.Target` on torch tensors.

    Args:
        exact: compute in canonical blocks, so that results do not depend on the number of devices (`ir.canonical_parts`).
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact

    def kernel(self, graph: Graph, kernel: Kernel) -> kernels.Run:
        """A function that computes one block."""
        return exact.build(graph, kernel) if self.exact else kernels.build(graph, kernel)

    def packs(self, run: kernels.Run) -> Mapping[int, tuple[Hashable, Callable[[torch.Tensor], torch.Tensor]]]:
        """Reads of a kernel that may be weights packed beforehand."""
        return {k: (p.key, p.run) for k, p in run.packs.items()} if isinstance(run, Packable) else {}

    def packed(self, run: kernels.Run) -> kernels.Run:
        """The kernel that takes these packed."""
        assert isinstance(run, Packable)
        return run.packed

    def recorder(self, run: kernels.Run) -> Recorded | Together | None:
        """The kernel as one that writes where it is told, if it is one of ours."""
        if isinstance(run, Mapped):
            return run.recorder()
        return run if isinstance(run, Recorded | Together) else None

    def memory(self, nbytes: int) -> Callable[[int, int], torch.Tensor]:
        """New memory; its parts are tensors of f32 with a storage of their own."""
        whole = torch.empty(nbytes, dtype=torch.uint8).numpy()
        return lambda offset, n: torch.from_numpy(whole[offset : offset + n].view(np.float32))

    def follows(self, before: Recorded | Together, after: Recorded | Together) -> int | None:
        """The input that ``after`` may read while ``before`` makes it, where that pays."""
        return conv_chain.follows(before, after)

    def chain(self, calls: Sequence[Call]) -> Call | None:
        """Calls of which each follows the one before, as one; ``None`` where they cannot be that as they are bound."""
        return conv_chain.chain(calls)

    def place(self, box: Box, dtype: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Memory of a box's size as an array of it, for what may have a place of its own."""
        extents = shape(box)
        return (lambda memory: memory.view(extents)) if dtype == "f32" else None

    def copy(self, to: torch.Tensor, array: torch.Tensor) -> None:
        """Fill an array."""
        to.copy_(array)

    def batch(self, calls: Sequence[Call | Calls]) -> Callable[[], None]:
        """Calls of recorders one after another, as one."""
        return batch(calls)

    def merge(self, monoid: str, states: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Merge the states of several devices, in their order."""
        stacked = [torch.stack(list(fields), dim=-1) for fields in zip(*states, strict=True)]
        return state_merges.reduce(monoid, stacked, stacked[0].dim() - 1)

    def slice(self, array: Any, box: Box, origin: Box) -> Any:
        """A copy of a box of an array that holds ``origin``."""
        place = tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(box, origin, strict=True))
        return array[place].clone(memory_format=torch.contiguous_format)

    def assemble(self, box: Box, dtype: str, pieces: Sequence[tuple[Box, Any]]) -> Any:
        """A new array of a box, filled from pieces that cover it."""
        if dtype == HOST:
            return pieces[0][1]
        out = torch.empty(shape(box), dtype=scalars.TORCH_DTYPES[dtype])
        for part, values in pieces:
            out[tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(part, box, strict=True))] = values
        return out

    def full(self, box: Box, dtype: str, value: float) -> torch.Tensor:
        """A new array of a box with one value everywhere."""
        return torch.full(shape(box), value, dtype=scalars.TORCH_DTYPES[dtype])

    def nbytes(self, array: Any) -> int:
        """Bytes of the tensor's storage; a value of the host is on no device."""
        if isinstance(array, HostValue):
            return 0
        if array.is_mkldnn:
            return torch.ops.mkldnn._nbytes(array)
        return array.untyped_storage().nbytes()


__all__ = ["TorchCpu"]
