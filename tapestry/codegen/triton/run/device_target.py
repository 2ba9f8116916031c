"""The ``triton`` target: generated kernels, launched on arrays or bound to buffers whose addresses never change.

On the CPU Triton's interpreter runs them, by the same code path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.base import scalars
from tapestry.codegen.torch_cpu.kernels import Run
from tapestry.codegen.triton.emit.source import TritonKernel, generate, kernel_key
from tapestry.codegen.triton.run import library
from tapestry.codegen.triton.run.execute import launch
from tapestry.codegen.triton.run.launcher import Call, Shared, bind, compile_all, here, interpreted
from tapestry.codegen.triton.run.tuned import Choice, Tuned, as_knobs
from tapestry.codegen.triton.task.chips import CHIPS, DEFAULT, plain
from tapestry.codegen.triton.task.lowered import unavailable
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, shape

Tensor = torch.Tensor
_WIDE = (torch.uint16, torch.uint32, torch.uint64)


class TritonTarget:
    """Implements `runtime.target_protocol.BindingTarget` with generated kernels; merging and moving are torch's.

    Arrays are on a GPU, or on the CPU for Triton's interpreter (``TRITON_INTERPRET=1``). Opaque operations, which no kernel
    expresses, run on the host as in the ``torch-cpu`` target.

    Args:
        device: where arrays are: a process group that sends them takes NCCL for ``cuda`` and gloo for ``cpu``.
        tuned: gives the knobs measured for a kernel, if any.
        libraries: whether a product may run in the vendor's library where that was measured to be faster.
        target: what the interpreter stands for; a GPU is its own.
        precision: of products of f32.
        knobs: a build's own, for kernels of which this machine knows nothing better.
    """

    def __init__(
        self, device: torch.device | None = None, tuned: Tuned | None = None, *, libraries: bool = False, target: str = DEFAULT,
        precision: str = "ieee", knobs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.device = device or torch.device("cpu")
        self.knobs = knobs or {}
        self.target, self.precision = chip_name(self.device, target), precision
        self.tuned, self.libraries = tuned, libraries
        self.host = TorchCpu()
        self.shared: Shared = {}
        self.made: dict[str, TritonKernel] = {}

    def runs_on_host(self, graph: Graph, op: int) -> str:
        """Why an operation runs on the host; "" where it has a kernel."""
        return unavailable(graph, op)

    def kernel(self, graph: Graph, kernel: Kernel) -> Run:
        """A function that launches the generated kernel of one block, or computes it on the host where there is none."""
        op = graph.ops[kernel.op]
        if unavailable(graph, kernel.op) or not isinstance(op, Block):
            return self._on_host(self.host.kernel(graph, kernel))
        made = generate(graph, kernel, target=self.target, precision=self.precision)
        dtypes = [e.dtype for e in op.body] if kernel.mode == "partial" else [graph.tensors[t].dtype for t in op.outs]
        wanted = [(shape(b), scalars.TORCH_DTYPES[d]) for b, d in zip(kernel.outs, dtypes, strict=True)]

        def run(ins: Sequence[Tensor | None], states: Sequence[Tensor]) -> list[Tensor]:
            given = [x for k in made.reads if (x := ins[k]) is not None]
            outs = [torch.empty(extents, dtype=dtype, device=self.device) for extents, dtype in wanted]
            launch(made, [*given, *states, *outs])
            return outs

        return run

    def _on_host(self, host: Run) -> Run:
        """A function of the host on arrays of the device; its results are rows as generated kernels take them."""

        def there(v: Any) -> Any:
            return v.contiguous().to(self.device) if isinstance(v, Tensor) else v

        def here(v: Any) -> Any:
            return v.cpu() if isinstance(v, Tensor) else v

        return lambda ins, states: [there(v) for v in host([here(x) for x in ins], [here(s) for s in states])]

    def prepare(self, graph: Graph, kernels: Sequence[Kernel]) -> None:
        """Compile what is going to be bound, several kernels at a time."""
        if self.device.type != "cpu":
            compile_all([self._made(graph, k) for k in kernels], here(), os.cpu_count() or 1)

    def _choice(self, graph: Graph, kernel: Kernel) -> Choice:
        return self.tuned(graph, kernel) if self.tuned else Choice()

    def _made(self, graph: Graph, kernel: Kernel) -> TritonKernel:
        """What is generated for a kernel; equal ones in other layers share it, and are compiled once."""
        key = kernel_key(graph, kernel)
        if key not in self.made:
            knobs = self._choice(graph, kernel).knobs
            if knobs is None and key in self.knobs:
                knobs = as_knobs(self.knobs[key])
            self.made[key] = generate(graph, kernel, knobs, target=self.target, precision=self.precision)
        return self.made[key]

    def bind(
        self, graph: Graph, kernel: Kernel, ins: Sequence[Tensor | None], states: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Call:
        """A function that computes one block from these buffers into ``outs``."""
        theirs = self.libraries and self._choice(graph, kernel).library
        if theirs and (call := library.bind(graph, kernel, ins, outs)) is not None:
            return call
        made = self._made(graph, kernel)
        given = [x for k in made.reads if (x := ins[k]) is not None]
        return bind(made, [*given, *states, *outs], self.shared)

    def merge(self, monoid: str, states: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Merge the states of several devices, in their order."""
        if self.merges_on_host(states[0]):
            merged = self.merge(monoid, [[f.cpu() for f in fields] for fields in states])
            return [f.to(self.device) for f in merged]
        return self.host.merge(monoid, states)

    def merges_on_host(self, fields: Sequence[Tensor]) -> str:
        """Why states are merged on the host; "" where they are not."""
        wide = any(f.dtype in _WIDE and f.device.type != "cpu" for f in fields)
        return "torch merges no wide unsigned integers on a GPU" if wide else ""

    def from_numpy(self, array: Any) -> Any:
        """An array of the device with the bits of one of numpy's; values of the host stay as they are."""
        value = self.host.from_numpy(array)
        return value.to(self.device) if isinstance(value, Tensor) else value

    def to_numpy(self, array: Any, dtype: str = "") -> Any:
        """The other way."""
        return self.host.to_numpy(array.cpu() if isinstance(array, Tensor) else array, dtype)


def find_device(*, ask: Callable[[], bool] = torch.cuda.is_available) -> torch.device:
    """Where generated kernels can run: the current GPU, or the CPU where Triton's interpreter is asked for.

    Raises:
        TapestryError: there is neither.
    """
    if interpreted():
        return torch.device("cpu")
    if not ask():
        raise TapestryError(
            "this build is for a GPU, and there is none that torch can use",
            why=f"torch {torch.__version__} sees no CUDA or HIP device",
            hint="TRITON_INTERPRET=1 runs the kernels on the CPU (slowly); or compile with --target torch-cpu",
        )
    return torch.device("cuda", torch.cuda.current_device())


def chip_name(device: torch.device, interpreted_as: str = DEFAULT) -> str:
    """The target whose limits and instructions a GPU has: the latest one that is not newer than it."""
    if device.type == "cpu":
        return plain(interpreted_as)
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    older = [n for n, c in CHIPS.items() if isinstance(c.arch, int) and c.arch <= 10 * major + minor]
    return "sm80" if not older or major == 12 else older[-1]  # sm120 has neither wgmma nor tensor memory
