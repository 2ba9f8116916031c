"""N logical devices on one GPU: each has an arena with every buffer at a fixed offset, transfers are copies on the GPU.

Addresses never change between runs, so all work is bound once: a run is a list of calls without arguments, and what stands
between two operations of the host is captured in a CUDA graph and replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, Kernel, shape
from tapestry.ir.program import Launch, Load, Program
from tapestry.ir.types import HOST
from tapestry.runtime.arrays import torch_dtype
from tapestry.runtime.executor import Executor, copy, kernel_of, silent
from tapestry.runtime.one_process.arena import Arena, allocate, slots
from tapestry.runtime.target_protocol import Array, BindingTarget, Measured, Progress, Source

log = logging.getLogger("tapestry")
Tensor = torch.Tensor
Call = Callable[[], None]


@dataclass(slots=True)
class Part:
    """Calls that follow each other, and the CUDA graph that stands for them once captured.

    ``host`` says why they cannot be captured ("" where they can).
    """

    host: str
    calls: list[Call] = field(default_factory=list[Call])
    steps: int = 0  # how many steps of the program are done when they are
    graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Do it."""
        if self.graph is not None:
            self.graph.replay()
            return
        for call in self.calls:
            call()


@dataclass(frozen=True, slots=True)
class _Feed:
    """Where a graph input goes on one device: a buffer of the host that is copied from there, or a value of the host."""

    device: int
    name: str
    tensor: str
    box: Box
    stage: Tensor | None


class GpuExecutor(Executor):
    """Runs one Program any number of times on one GPU (or on the CPU, in the interpreter).

    Args:
        keep_inputs: graph inputs have buffers of their own for as long as the executor lives, beyond the plan's peak, so that
            `replay` works on what is there without copying it from the host.

    Attributes:
        arenas: where each logical device's buffers lie.
        reasons: why some steps are not captured: by reason, how many.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        target: BindingTarget,
        weights: Source,
        streamed: frozenset[str] = frozenset(),
        keep_inputs: bool = False,
    ) -> None:
        super().__init__(graph, program, target, weights, streamed)
        self.binding, self.keep_inputs, self.home = target, keep_inputs, torch.device("cpu")
        lasting = self.resident | frozenset(graph.inputs if keep_inputs else ())
        self.arenas: list[Arena] = [allocate(slots(program, d, lasting)) for d in range(program.devices)]
        self.memory = [torch.empty(max(a.size, 1), dtype=torch.uint8, device=target.device) for a in self.arenas]
        self.values: list[dict[str, Any]] = [{} for _ in range(program.devices)]
        self.feeds: list[_Feed] = []
        self.parts: list[Part] = []
        self.measured.packed = [0] * program.devices
        self.runs, cuda = 0, target.device.type == "cuda"
        self.ways = 3 if cuda else 1  # the second run captures, the third one replays alone
        self.ended = torch.cuda.Event() if cuda else None
        self._bind()

    @property
    def arena_bytes(self) -> list[int]:
        """Bytes allocated for each logical device: the plan's peak, and what positions of buffers cost beyond it."""
        return [a.size for a in self.arenas]

    @property
    def reasons(self) -> dict[str, int]:
        """Why steps are not captured, and how many of them."""
        out: dict[str, int] = {}
        for p in self.parts:
            if p.host:
                out[p.host] = out.get(p.host, 0) + len(p.calls)
        return out

    def described(self) -> dict[str, Any]:
        """Where it runs, what is allocated there, and what is replayed: for the JSON of ``run``."""
        cuda = self.target.device.type == "cuda"
        done = [p for p in self.parts if p.graph is not None]
        gpu = {
            "device": torch.cuda.get_device_name(self.target.device) if cuda else "Triton's interpreter",
            "arena_bytes": self.arena_bytes,
            "copied_weights_bytes": self.measured.packed,
            "graphs": len(done),
            "captured": sum(len(p.calls) for p in done),
            "calls": sum(len(p.calls) for p in self.parts),
            "not_captured": self.reasons,
        }
        return {"gpu": gpu}

    def array(self, device: int, name: str) -> Array:
        """A buffer's tensor inside its device's arena, or a value of the host."""
        b = self.buffers[name]
        if b.dtype == HOST:
            return self.values[device][name]
        first = self.arenas[device].offsets[name]
        raw = self.memory[device][first : first + b.nbytes(device)]
        return raw.view(torch_dtype(b.dtype)).view(shape(self.box(device, name)))

    def allocate(self, device: int, name: str) -> Array:
        """Where the buffer always lies."""
        return self.array(device, name)

    def nbytes(self, device: int, name: str) -> int:
        """Bytes of the buffer in its arena."""
        return 0 if self.buffers[name].dtype == HOST else self.array(device, name).nbytes

    def run(
        self, feeds: Source, progress: Progress = silent, wanted: Collection[str] | None = None
    ) -> tuple[dict[str, Array], Measured]:
        """Outputs by name, gathered to the host, and what the run used."""
        if self.ended is not None:
            self.ended.synchronize()  # a run before may still read what inputs are put into
        for f in self.feeds:
            value = feeds(f.tensor, f.box)
            if f.stage is None:
                self.values[f.device][f.name] = value
            else:
                f.stage.copy_(value)
        if self.runs == 1:  # the first run has compiled and loaded everything, and warmed up
            self._capture()
        for part in self.parts:
            part.run()
            progress(part.steps, len(self.program.steps))
        self.runs += 1
        if self.ended is not None:
            self.ended.record()
        return self.outputs(wanted), self.measured

    def replay(self) -> None:
        """The work of a run alone, on the inputs that are there: for measuring."""
        for part in self.parts:
            part.run()

    # binding: the steps are walked once, and what they do is recorded

    def _bind(self) -> None:
        self.loaded = {s.buffer for s in self.program.steps if isinstance(s, Load)}
        for step in self.program.steps:
            name = step.buffer if isinstance(step, Load) else ""
            if name and (tensor := self.buffers[name].tensor) in self.resident:
                for d, box in self.mine(self.buffers[name].boxes):
                    self.array(d, name).copy_(self.weights(tensor, box))
        launches = [s for s in self.program.steps if isinstance(s, Launch) and not self.binding.runs_on_host(self.graph, s.op)]
        kernels = [kernel_of(s, d, self.program) for s in launches for d, _ in self.mine(s.blocks)]
        self.binding.prepare(self.graph, kernels)
        for at in range(len(self.program.steps)):
            self.step(at)
            if self.parts:
                self.parts[-1].steps = at + 1

    def do(self, work: Call, on_host: str = "") -> None:
        """Record a call."""
        if not self.parts or self.parts[-1].host != on_host:
            self.parts.append(Part(on_host))
        self.parts[-1].calls.append(work)

    def load(self, name: str, device: int, box: Box) -> None:
        """Weights are there; others come from the host at every run, inputs through memory that can be copied from at once."""
        b = self.buffers[name]
        if b.tensor in self.streamed:
            work = partial(self._stream, self.array(device, name), b.tensor, box)
            self.do(work, "streamed weights come from the host at every run")
        elif b.dtype == HOST:
            self.feeds.append(_Feed(device, name, b.tensor, box, None))
        elif b.tensor not in self.resident:
            there = self.array(device, name)
            if self.keep_inputs:
                self.feeds.append(_Feed(device, name, b.tensor, box, there))
                return
            stage = torch.empty(shape(box), dtype=there.dtype, pin_memory=self.target.device.type == "cuda")
            self.feeds.append(_Feed(device, name, b.tensor, box, stage))
            self.do(partial(copy, stage, there))

    def _stream(self, there: Tensor, tensor: str, box: Box) -> None:
        there.copy_(self.weights(tensor, box))

    def launch(self, at: int, step: Launch, device: int) -> None:
        """Bind a kernel to its buffers, or record what the host computes."""
        kernel, reason = kernel_of(step, device, self.program), self.binding.runs_on_host(self.graph, step.op)
        if reason:
            self.do(self._on_host(step, device, kernel), reason)
            return
        ins = [self.array(device, n) if n else None for n in step.ins]
        states, outs = [self.array(device, n) for n in step.states], [self.array(device, n) for n in step.outs]
        fixed = [k for k, n in enumerate(step.ins) if n and self.buffers[n].tensor in self.resident and n in self.loaded]
        before, alone = self.binding.kept, step.mode == "partial" and states  # the kernel knows nothing of other parts
        self.do(self.binding.bind(self.graph, kernel, ins, [] if alone else states, outs, fixed))
        self.measured.packed[device] += self.binding.kept - before
        if alone:
            self.merge(self.monoid(step.op), [states, outs], [outs])

    def _on_host(self, step: Launch, device: int, kernel: Kernel) -> Call:
        run = self.target.kernel(self.graph, kernel)

        def call() -> None:
            ins = [self.array(device, n) if n else None for n in step.ins]
            for name, value in zip(step.outs, run(ins, [self.array(device, n) for n in step.states]), strict=True):
                if self.buffers[name].dtype == HOST:
                    self.values[device][name] = value
                else:
                    self.array(device, name).copy_(value)

        return call

    def merge(self, monoid: str, states: list[list[Array]], into: list[list[Array]], sent_as: str = "") -> None:
        """Record a merge."""
        self.do(partial(self._merge, monoid, states, into, sent_as), self.binding.merges_on_host(states[0]))

    def _capture(self) -> None:
        """Each part that is the device's alone becomes a CUDA graph."""
        if self.target.device.type != "cuda":
            return
        for part in self.parts:
            if part.host or len(part.calls) < 2:
                continue
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    part.run()
            except RuntimeError as e:  # it runs all the same, call by call
                torch.cuda.set_stream(stream)
                part.host = f"capture failed: {str(e).splitlines()[0]}"
                log.warning("not captured in a CUDA graph: %s", part.host)
                continue
            part.graph = graph
