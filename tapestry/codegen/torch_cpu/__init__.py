"""The default target: blocks run by torch's own operators on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tapestry.codegen.torch_cpu import kernels
from tapestry.codegen.torch_cpu.base import state_merges
from tapestry.codegen.torch_cpu.c import copies, thread_parts
from tapestry.codegen.torch_cpu.c.blocks_c import PLAIN, How
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall, CpuKernel, batch
from tapestry.codegen.torch_cpu.c.generated_c import compile_waiting
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Kernel

__all__ = ["How", "TorchCpu", "compile_waiting"]

FEWEST = 2  # operations on few numbers in a program that are worth a compiler's start, if nothing else is


class TorchCpu:
    """Implements `runtime.target_protocol`: `Target`, and `RecordingTarget` by our kernels in C.

    Args:
        how: our kernels in C are made.
    """

    def __init__(self, how: How = PLAIN) -> None:
        self.how, self.device = how, torch.device("cpu")

    def kernel(self, graph: Graph, kernel: Kernel) -> CpuKernel:
        """A function that computes one block."""
        return kernels.build(graph, kernel, self.how)

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

    def described(self) -> dict[str, Any]:
        """How many threads share a kernel, and what decides that."""
        return {"threads": {"count": thread_parts.threads(), "why": thread_parts.why_threads()}}

    # calls on fixed addresses

    def recorders(self, runs: Mapping[int, object]) -> dict[int, CpuKernel]:
        """The kernels (by step) that write where they are told: those of ours."""
        ours = {at: run for at, run in runs.items() if isinstance(run, CpuKernel)}
        few = sum(r.few for r in ours.values()) >= FEWEST or any(r.functions for r in ours.values() if not r.few)
        return {at: found for at, r in ours.items() if (few or not r.few) and (found := r.recorder())}

    def scratch(self, room: int) -> copies.Scratch:
        """Memory for what calls copy."""
        return copies.Scratch(room)

    def bind(
        self, recorder: object, ins: Sequence[torch.Tensor | None], memory: Sequence[torch.Tensor], scratch: object
    ) -> Calls | None:
        """The call of a recorder on arrays that stay where they are; ``None`` where it has to be made at every run."""
        assert isinstance(recorder, CpuKernel) and isinstance(scratch, copies.Scratch), "a recorder of another target"
        return copies.bind(recorder, ins, memory, scratch)

    def given(self, to: torch.Tensor) -> copies.Given | None:
        """Copies of inputs to their position."""
        return copies.Given.to_place(to)

    def at_once(
        self, given: Sequence[tuple[str, copies.Given]], calls: Sequence[object], ends: Mapping[str, copies.End]
    ) -> copies.WholeRun | None:
        """A run that is nothing but calls, on the caller's arrays; ``None`` where an output is copied by torch."""
        run = copies.WholeRun(given, _ours(calls), ends, kernels.from_numpy)
        return run if run.whole else None

    def batch(self, calls: Sequence[object]) -> Callable[[], None]:
        """Calls of recorders one after another, as one."""
        return batch(_ours(calls))


def _ours(calls: Sequence[object]) -> list[CCall | Calls]:
    ours = [c for c in calls if isinstance(c, CCall | Calls)]
    assert len(ours) == len(calls), "calls of another target"
    return ours
