"""The ``triton`` target: generated kernels, launched on arrays or bound to buffers whose addresses never change.

On the CPU Triton's interpreter runs them, by the same code path.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from tapestry.codegen.blocks.lowered import unavailable
from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.base import scalars
from tapestry.codegen.torch_cpu.kernels import Run
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import TritonKernel, generate, kernel_key
from tapestry.codegen.triton.run import library
from tapestry.codegen.triton.run.compile_ahead import measured
from tapestry.codegen.triton.run.launcher import Call, Shared, bind, done_once, launch, shared_memory
from tapestry.codegen.triton.run.sound_choice import sound
from tapestry.codegen.triton.run.tuned import Choice, Tuned, card_of, chip_name, config_from
from tapestry.codegen.triton.task.chips import CHIPS, DEFAULT, chip_of
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, shape

Tensor = torch.Tensor


log = logging.getLogger("tapestry")
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
        self,
        device: torch.device | None = None,
        tuned: Tuned | None = None,
        *,
        libraries: bool = False,
        target: str = DEFAULT,
        precision: str = "ieee",
        knobs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.knobs = knobs or {}
        self.target, self.precision = chip_name(self.device, target), precision
        if self.device.type == "cuda":  # the model of tiles goes by this machine's card: an H100 copies 3.0 TB/s, an H200 4.3
            CHIPS[self.target] = chip_of(self.target, card_of(self.target))
        self.tuned, self.libraries = tuned, libraries
        self.host = TorchCpu()
        self.shared: Shared = {}
        self.kept = 0
        self.made: dict[str, TritonKernel] = {}

    def runs_on_host(self, graph: Graph, op: int) -> str:
        """Why an operation runs on the host; "" where it has a kernel."""
        return unavailable(graph, op)

    def kernel(self, graph: Graph, kernel: Kernel) -> Run:
        """A function that launches the generated kernel of one block, or computes it on the host where there is none."""
        op = graph.ops[kernel.op]
        if unavailable(graph, kernel.op) or not isinstance(op, Block):
            return self._on_host(self.host.kernel(graph, kernel))
        made = self._made(graph, kernel)
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
        """Compile what is going to be bound, several kernels at a time, and choose other candidates for what came out badly."""
        if self.device.type == "cpu":
            return
        new = {key: k for k in kernels if (key := kernel_key(graph, k)) not in self.made}
        # compiled once, and what the assembler says is kept: `bind` finds them in Triton's cache, `sound` what they take
        measured([self._wished(graph, k) or self._generated(graph, k) for k in new.values()], self.target)
        for kernel in new.values():
            self._made(graph, kernel)

    def _choice(self, graph: Graph, kernel: Kernel) -> Choice:
        return self.tuned(graph, kernel) if self.tuned else Choice()

    def _generated(self, graph: Graph, kernel: Kernel, config: KernelConfig | None = None) -> TritonKernel:
        return generate(graph, kernel, config, target=self.target, precision=self.precision)

    def _wished(self, graph: Graph, kernel: Kernel) -> TritonKernel | None:
        """A kernel as it was measured here, or as the build has it."""
        choice = self._choice(graph, kernel)
        if choice.wrong:
            raise TapestryError(
                "a kernel computed wrong values when it was tuned on this GPU",
                where=graph.ops[kernel.op].outs[0],
                why=choice.wrong,
                hint="compile with --target torch-cpu; or measure it again with tapestry tune --again",
            )
        config = choice.config
        if config is None and (own := self.knobs.get(kernel_key(graph, kernel))) is not None:
            config = config_from(own)
        return None if config is None else self._generated(graph, kernel, config)

    def _made(self, graph: Graph, kernel: Kernel) -> TritonKernel:
        """What is generated for a kernel; equal ones in other layers share it, and are compiled once."""
        key = kernel_key(graph, kernel)
        if key not in self.made:
            self.made[key] = self._wished(graph, kernel) or self._chosen(graph, kernel)
        return self.made[key]

    def _chosen(self, graph: Graph, kernel: Kernel) -> TritonKernel:
        """The generator's own choice: on a GPU the first candidate whose machine code is sound there."""
        if self.device.type == "cpu":
            return self._generated(graph, kernel)
        return sound(graph, kernel, self.target, self.precision, shared_memory()).made

    def bind(
        self,
        graph: Graph,
        kernel: Kernel,
        ins: Sequence[Tensor | None],
        states: Sequence[Tensor],
        outs: Sequence[Tensor],
        fixed: Collection[int] = (),
    ) -> Call:
        """A function that computes one block from these buffers into ``outs``; what it can make of ``fixed`` inputs, which
        never change, is made here, as long as that leaves half of the GPU's memory that is free."""
        theirs = self.libraries and self._choice(graph, kernel).library
        if theirs and (call := library.bind_library(graph, kernel, ins, outs)) is not None:
            return call
        made = self._made(graph, kernel)
        given = [x for k in made.reads if (x := ins[k]) is not None]
        there = [at for at, k in enumerate(k for k in made.reads if ins[k] is not None) if k in fixed]
        _, nbytes = done_once(made, there)
        there = there if nbytes <= self._room() else []
        self.kept += nbytes if there else 0
        try:
            return bind(made, [*given, *states, *outs], self.shared, there)
        except TapestryError as e:
            other = self._chosen(graph, kernel)
            if other == made:
                raise
            log.warning("%s: what was measured or is in the build does not run here (%s)", made.name, e.why or e.what)
            self.made[kernel_key(graph, kernel)] = other
            return bind(other, [*given, *states, *outs], self.shared)

    def _room(self) -> float:
        """Bytes that copies of weights may take."""
        return torch.cuda.mem_get_info(self.device)[0] / 2 if self.device.type == "cuda" else math.inf

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
