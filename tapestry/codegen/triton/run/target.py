"""The ``triton`` target with ordinary arrays, for machines that move them themselves (`runtime.processes.distributed`).

Arrays are on a GPU, or on the CPU for Triton's interpreter (``TRITON_INTERPRET=1``). Opaque operations, which no kernel
expresses, run on the host as in the ``torch-cpu`` target. A machine that is alone with its GPU takes `device.DeviceTarget`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.codegen.torch_cpu.kernels import Run, from_numpy, to_numpy
from tapestry.codegen.triton.emit.source import generate
from tapestry.codegen.triton.run.device_target import chip_name
from tapestry.codegen.triton.run.execute import launch
from tapestry.codegen.triton.task.chips import DEFAULT
from tapestry.codegen.triton.task.lowered import unavailable
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, shape
from tapestry.ir.types import HOST

Tensor = torch.Tensor


class TritonTarget(TorchCpu):
    """Implements `tapestry.runtime.one_process.logical_devices.Target` with generated kernels; merging and moving are torch's.

    Attributes:
        device: where arrays are: a process group that sends them takes NCCL for ``cuda`` and gloo for ``cpu``.
    """

    def __init__(self, device: torch.device | None = None, target: str = DEFAULT, precision: str = "ieee") -> None:
        super().__init__()
        self.device = device or torch.device("cpu")
        self.target, self.precision = chip_name(self.device, target), precision

    def kernel(self, graph: Graph, kernel: Kernel) -> Run:
        """A function that launches the generated kernel of one block."""
        op = graph.ops[kernel.op]
        if unavailable(graph, kernel.op) or not isinstance(op, Block):
            return self._on_host(super().kernel(graph, kernel))
        made = generate(graph, kernel, target=self.target, precision=self.precision)
        dtypes = [e.dtype for e in op.body] if kernel.mode == "partial" else [graph.tensors[t].dtype for t in op.outs]
        wanted = [(shape(b), TORCH_DTYPES[d]) for b, d in zip(kernel.outs, dtypes, strict=True)]

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

    def assemble(self, box: Box, dtype: str, pieces: Sequence[tuple[Box, Any]]) -> Any:
        """A new array of a box, filled from pieces that cover it."""
        if dtype == HOST:
            return pieces[0][1]
        out = torch.empty(shape(box), dtype=TORCH_DTYPES[dtype], device=self.device)
        for part, values in pieces:
            out[tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(part, box, strict=True))] = values
        return out

    def full(self, box: Box, dtype: str, value: float) -> Tensor:
        """A new array of a box with one value everywhere."""
        return torch.full(shape(box), value, dtype=TORCH_DTYPES[dtype], device=self.device)

    def from_numpy(self, a: Any) -> Any:
        """An array of the device with the bits of one of numpy's; values of the host stay as they are."""
        found = from_numpy(a)
        return found.to(self.device) if isinstance(found, Tensor) else found

    def to_numpy(self, a: Any, dtype: str = "") -> Any:
        """The other way."""
        return to_numpy(a.cpu() if isinstance(a, Tensor) else a, dtype)
