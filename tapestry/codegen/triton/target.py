"""The ``triton`` target of the runtime: generated kernels, today in Triton's interpreter (``TRITON_INTERPRET=1``).

Opaque operations, which no kernel expresses, run on the host as in the ``torch-cpu`` target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.kernels import Run
from tapestry.codegen.torch_cpu.scalars import TORCH_DTYPES
from tapestry.codegen.triton.chips import DEFAULT
from tapestry.codegen.triton.execute import launch
from tapestry.codegen.triton.lowered import unavailable
from tapestry.codegen.triton.source import generate
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, shape


class TritonTarget(TorchCpu):
    """Implements `tapestry.runtime.local.Target` with generated kernels; merging and moving are torch's."""

    def __init__(self, target: str = DEFAULT, precision: str = "ieee") -> None:
        super().__init__()
        self.target, self.precision = target, precision

    def kernel(self, graph: Graph, kernel: Kernel) -> Run:
        """A function that launches the generated kernel of one block."""
        op = graph.ops[kernel.op]
        if unavailable(graph, kernel.op) or not isinstance(op, Block):
            host = super().kernel(graph, kernel)
            return lambda ins, states: [v.contiguous() for v in host(ins, states)]  # generated kernels take rows as they are
        made = generate(graph, kernel, target=self.target, precision=self.precision)
        dtypes = [e.dtype for e in op.body] if kernel.mode == "partial" else [graph.tensors[t].dtype for t in op.outs]

        def run(ins: Sequence[torch.Tensor | None], states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            given = [x for k in made.reads if (x := ins[k]) is not None]
            outs = [torch.empty(shape(b), dtype=TORCH_DTYPES[d]) for b, d in zip(kernel.outs, dtypes, strict=True)]
            launch(made, [*given, *states, *outs])
            return outs

        return run
