"""The default target: blocks run by torch's own operators on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tapestry.codegen.torch_cpu import exact_kernels as exact
from tapestry.codegen.torch_cpu import kernels
from tapestry.codegen.torch_cpu.base import state_merges
from tapestry.codegen.torch_cpu.c import conv_chain
from tapestry.codegen.torch_cpu.c.c_calls import Call, Calls, Recorded, Together, batch
from tapestry.codegen.torch_cpu.c.generated_c import compile_waiting
from tapestry.codegen.torch_cpu.c.maps_c import PLAIN, How, Mapped
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Kernel

__all__ = ["How", "TorchCpu", "compile_waiting"]


class TorchCpu:
    """Implements `runtime.target_protocol`: `Target`, and `RecordingTarget` by our kernels in C.

    Args:
        exact: compute in canonical blocks, so that results do not depend on the number of devices (`ir.canonical_parts`).
        how: our kernels in C are made.
    """

    def __init__(self, exact: bool = False, how: How = PLAIN) -> None:
        self.exact, self.how, self.device = exact, how, torch.device("cpu")

    def kernel(self, graph: Graph, kernel: Kernel) -> kernels.Run:
        """A function that computes one block."""
        return exact.build(graph, kernel) if self.exact else kernels.build(graph, kernel, self.how)

    def merge(self, monoid: str, states: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Merge the states of several devices, in their order."""
        stacked = [torch.stack(list(fields), dim=-1) for fields in zip(*states, strict=True)]
        return state_merges.reduce(monoid, stacked, stacked[0].dim() - 1)

    def from_numpy(self, array: Any) -> Any:
        """A tensor with the array's bits, which it may share; values of the host stay as they are."""
        return kernels.from_numpy(array)

    def to_numpy(self, array: Any, dtype: str = "") -> Any:
        """The other way."""
        return kernels.to_numpy(array, dtype)

    # calls on fixed addresses

    def recorder(self, run: object) -> Recorded | Together | None:
        """The kernel as one that writes where it is told, if it is one of ours."""
        if isinstance(run, Mapped):
            return run.recorder()
        return run if isinstance(run, Recorded | Together) else None

    def follows(self, before: object, after: object) -> int | None:
        """The input that ``after`` may read while ``before`` makes it, where that pays."""
        assert isinstance(before, Recorded | Together) and isinstance(after, Recorded | Together)
        return conv_chain.follows(before, after)

    def chain(self, calls: Sequence[object]) -> Call | None:
        """Calls of which each follows the one before, as one; ``None`` where they cannot be that as they are bound."""
        ours = [c for c in calls if isinstance(c, Call)]
        return conv_chain.chain(ours) if len(ours) == len(calls) else None

    def batch(self, calls: Sequence[object]) -> Callable[[], None]:
        """Calls of recorders one after another, as one."""
        ours = [c for c in calls if isinstance(c, Call | Calls)]
        assert len(ours) == len(calls), "calls of another target"
        return batch(ours)
