"""N logical devices on one GPU: each has an arena with every buffer at a fixed offset, transfers are copies on the GPU.

Addresses never change between runs, so all work is bound once: a run is a list of calls without arguments, and what stands
between two operations of the host is captured in a CUDA graph and replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, Kernel, intersect, shape
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Transfer, allocated, transfer_bytes
from tapestry.ir.types import HOST
from tapestry.runtime.one_process.arena import Arena, place, slots
from tapestry.runtime.one_process.logical_devices import Measured, Run, Source, kernel_of

log = logging.getLogger("tapestry")
Tensor = torch.Tensor
Call = Callable[[], None]


class DeviceCode(Protocol):
    """What a code generator gives to the machine."""

    device: torch.device

    def host(self, graph: Graph, op: int) -> str:
        """Why an operation runs on the host; "" where it has a kernel."""
        ...

    def host_kernel(self, graph: Graph, kernel: Kernel) -> Run:
        """A function on the host's arrays."""
        ...

    def prepare(self, graph: Graph, kernels: Sequence[Kernel]) -> None:
        """All that is going to be bound."""
        ...

    def bind(
        self, graph: Graph, kernel: Kernel, ins: Sequence[Tensor | None], states: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Call:
        """A function that computes one block from these buffers into ``outs``."""
        ...

    def merge(self, monoid: str, states: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Merge the states of several devices, in their order."""
        ...

    def merges_on_host(self, fields: Sequence[Tensor]) -> str:
        """Why states are merged on the host; "" where they are not."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that holds a tensor's elements."""
        ...


@dataclass(slots=True)
class Part:
    """Calls that follow each other, and the CUDA graph that stands for them once captured.

    ``host`` says why they cannot be captured ("" where they can).
    """

    host: str
    calls: list[Call] = field(default_factory=list[Call])
    steps: int = 0  # how many steps of the program are done when they are
    graph: Any = None

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


class DeviceMachine:
    """Runs one Program any number of times on one GPU (or on the CPU, in the interpreter).

    Args:
        keep_inputs: graph inputs have buffers of their own for as long as the machine lives, beyond the plan's peak, so that
            `replay` works on what is there without copying it from the host.

    Attributes:
        arenas: where each logical device's buffers lie.
        reasons: why some steps are not captured: by reason, how many.
    """

    def __init__(
        self, graph: Graph, program: Program, target: DeviceCode, weights: Source, streamed: frozenset[str] = frozenset(),
        keep_inputs: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.program, self.target = graph, program, target
        self.weights, self.streamed, self.keep_inputs = weights, streamed, keep_inputs
        fixed = frozenset(graph.weights) - streamed
        resident = fixed | (frozenset(graph.inputs) if keep_inputs else frozenset())
        self.arenas: list[Arena] = [place(slots(program, d, resident)) for d in range(program.devices)]
        self.memory = [torch.empty(max(a.size, 1), dtype=torch.uint8, device=target.device) for a in self.arenas]
        self.values: list[dict[str, Any]] = [{} for _ in range(program.devices)]
        self.feeds: list[_Feed] = []
        self.parts: list[Part] = []
        self.measured = Measured([0] * program.devices, packed=[0] * program.devices)
        self.runs = 0
        for step in program.steps:
            if isinstance(step, Load) and program.buffers[step.buffer].tensor in fixed:
                for d, box in self._boxes(step.buffer):
                    self.view(d, step.buffer).copy_(weights(program.buffers[step.buffer].tensor, box))
        self._bind()
        self.measured.peak = self._peak()

    @property
    def arena_bytes(self) -> list[int]:
        """Bytes allocated for each logical device: the plan's peak, and what placing buffers costs beyond it."""
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
        return {
            "device": torch.cuda.get_device_name(self.target.device) if cuda else "Triton's interpreter",
            "arena_bytes": self.arena_bytes, "graphs": len(done), "captured": sum(len(p.calls) for p in done),
            "calls": sum(len(p.calls) for p in self.parts), "not_captured": self.reasons,
        }  # fmt: skip

    def view(self, device: int, name: str) -> Tensor:
        """A buffer's tensor inside its device's arena."""
        b = self.program.buffers[name]
        box = b.boxes[device]
        assert box is not None
        first = self.arenas[device].offsets[name]
        raw = self.memory[device][first : first + b.nbytes(device)]
        return raw.view(self.target.dtype(b.dtype)).view(shape(box))

    def run(
        self, feeds: Source, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[dict[str, Any], Measured]:
        """Outputs by name, gathered to the host, and what the run used."""
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
        return {t: self._gather(t, b) for t, b in self.program.outputs.items()}, self.measured

    def replay(self) -> None:
        """The work of a run alone, on the inputs that are there: for measuring."""
        for part in self.parts:
            part.run()

    # binding

    def _bind(self) -> None:
        launches = [s for s in self.program.steps if isinstance(s, Launch) and not self.target.host(self.graph, s.op)]
        blocks = [(s, d) for s in launches for d, block in enumerate(s.blocks) if block is not None]
        self.target.prepare(self.graph, [kernel_of(s, d, self.program) for s, d in blocks])
        for i, step in enumerate(self.program.steps):
            match step:
                case Launch():
                    for d, block in enumerate(step.blocks):
                        if block is not None:
                            self._launch(step, d)
                case Load():
                    self._load(step)
                case Transfer():
                    self._transfer(step)
                case Reduce():
                    self._reduce(step)
                case Free():
                    pass
            if self.parts:
                self.parts[-1].steps = i + 1

    def _add(self, call: Call, host: str = "") -> None:
        if not self.parts or self.parts[-1].host != host:
            self.parts.append(Part(host))
        self.parts[-1].calls.append(call)

    def _boxes(self, name: str) -> list[tuple[int, Box]]:
        return [(d, box) for d, box in enumerate(self.program.buffers[name].boxes) if box is not None]

    def _load(self, step: Load) -> None:
        b = self.program.buffers[step.buffer]
        if b.tensor in self.graph.weights and b.tensor not in self.streamed:
            return
        for d, box in self._boxes(step.buffer):
            if b.tensor in self.streamed:
                reason = "streamed weights come from the host at every run"
                self._add(partial(self._stream, self.view(d, step.buffer), b.tensor, box), reason)
            elif b.dtype == HOST:
                self.feeds.append(_Feed(d, step.buffer, b.tensor, box, None))
            else:
                view = self.view(d, step.buffer)
                if self.keep_inputs:
                    self.feeds.append(_Feed(d, step.buffer, b.tensor, box, view))
                    continue
                stage = torch.empty(shape(box), dtype=self.target.dtype(b.dtype), pin_memory=self.target.device.type == "cuda")
                self.feeds.append(_Feed(d, step.buffer, b.tensor, box, stage))
                self._add(partial(_copy, stage, view))

    def _launch(self, step: Launch, d: int) -> None:
        kernel = kernel_of(step, d, self.program)
        reason = self.target.host(self.graph, step.op)
        if reason:
            self._add(self._on_host(step, d, kernel), reason)
            return
        ins = [self.view(d, n) if n else None for n in step.ins]
        states, outs = [self.view(d, n) for n in step.states], [self.view(d, n) for n in step.outs]
        if step.mode == "partial" and states:  # the kernel knows nothing of other parts
            self._add(self.target.bind(self.graph, kernel, ins, [], outs))
            monoid = getattr(self.graph.ops[step.op], "monoid", None)
            assert monoid is not None
            self._add(partial(self._merge, monoid, [states, outs], [outs]), self.target.merges_on_host(states))
            return
        self._add(self.target.bind(self.graph, kernel, ins, states, outs))

    def _on_host(self, step: Launch, d: int, kernel: Kernel) -> Call:
        """Inputs copied to the host, computed there, results copied back."""
        run = self.target.host_kernel(self.graph, kernel)

        def call() -> None:
            ins = [self._to_host(d, n) if n else None for n in step.ins]
            for name, value in zip(step.outs, run(ins, [self._to_host(d, n) for n in step.states]), strict=True):
                if self.program.buffers[name].dtype == HOST:
                    self.values[d][name] = value
                else:
                    self.view(d, name).copy_(value)

        return call

    def _to_host(self, d: int, name: str) -> Any:
        return self.values[d][name] if self.program.buffers[name].dtype == HOST else self.view(d, name).cpu().clone()

    def _transfer(self, step: Transfer) -> None:
        src, dst = self.program.buffers[step.src], self.program.buffers[step.dst]
        sent = 0
        for m in step.messages:
            there = self._part(m.dst, step.dst, m.box)
            self._add(partial(_copy, self._part(m.src, step.src, m.box), there))
            sent += there.numel() * there.element_size()
        for d, box in self._boxes(step.dst):
            own = src.boxes[d]
            common = None if own is None else intersect(own, box)
            if common is not None:
                self._add(partial(_copy, self._part(d, step.src, common), self._part(d, step.dst, common)))
        assert dst.dtype == src.dtype
        self.measured.sent(step.kind, sent)

    def _stream(self, view: Tensor, tensor: str, box: Box) -> None:
        view.copy_(self.weights(tensor, box))

    def _part(self, d: int, name: str, box: Box) -> Tensor:
        origin = self.program.buffers[name].boxes[d]
        assert origin is not None
        return self.view(d, name)[tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(box, origin, strict=True))]

    def _reduce(self, step: Reduce) -> None:
        monoid = getattr(self.graph.ops[step.op], "monoid", None)
        assert monoid is not None
        for group in step.groups:
            same: dict[tuple[Box | None, ...], list[int]] = {}
            for d in group:
                same.setdefault(tuple(self.program.buffers[b].boxes[d] for b in step.dsts), []).append(d)
            for boxes, devices in same.items():
                states = [self._states(step, e, boxes) for e in group]
                places = [[self.view(d, n) for n in step.dsts] for d in devices]
                call = partial(self._merge, monoid, states, places)
                self._add(call, self.target.merges_on_host(states[0]))
        self.measured.sent(step.kind, transfer_bytes(step, self.program))

    def _merge(self, monoid: str, states: list[list[Tensor]], places: list[list[Tensor]]) -> None:
        merged = self.target.merge(monoid, states)
        for views in places:
            for view, value in zip(views, merged, strict=True):
                view.copy_(value)

    def _states(self, step: Reduce, device: int, boxes: Sequence[Box | None]) -> list[Tensor]:
        """What one device gives to a merge: parts of its states, and counts that everybody knows."""
        out: list[Tensor] = []
        for k, (s, box) in enumerate(zip(step.srcs, boxes, strict=True)):
            assert box is not None
            if step.known and step.known[k]:
                dtype = self.target.dtype(self.program.buffers[s].dtype)
                out.append(torch.full(shape(box), step.known[k][device], dtype=dtype, device=self.target.device))
            else:
                out.append(self._part(device, s, box))
        return out

    # running

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

    def _gather(self, tensor: str, name: str) -> Any:
        b = self.program.buffers[name]
        held = self._boxes(name)
        if b.dtype == HOST:
            return self.values[held[0][0]][name]
        out = torch.empty(self.graph.tensors[tensor].shape, dtype=self.target.dtype(b.dtype))
        for d, box in {box: (d, box) for d, box in held}.values():
            out[tuple(slice(lo, hi) for lo, hi in box)] = self.view(d, name).cpu()
        return out

    def _peak(self) -> list[int]:
        """The most bytes of buffers that live at once on each device, from the buffers as they are in the arena."""
        devices = range(self.program.devices)
        alive, peak = [0] * self.program.devices, [0] * self.program.devices
        sizes: list[dict[str, int]] = [{} for _ in devices]
        for step in self.program.steps:
            for name in allocated(step):
                for d, _ in self._boxes(name):
                    sizes[d][name] = 0 if self.program.buffers[name].dtype == HOST else self.view(d, name).nbytes
                    alive[d] += sizes[d][name]
            peak = [max(p, a) for p, a in zip(peak, alive, strict=True)]
            for name in step.buffers if isinstance(step, Free) else ():
                for d in devices:
                    alive[d] -= sizes[d].pop(name, 0)
        return peak


def _copy(here: Tensor, there: Tensor) -> None:
    there.copy_(here, non_blocking=True)  # what comes from the host is pinned, and read again only after the run


__all__ = ["DeviceCode", "DeviceMachine", "Part"]
