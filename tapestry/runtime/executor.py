"""The walk over a Program's steps: one for logical devices in a process, for a GPU, and for the ranks of a run.

An executor is told where buffers live (`Executor.allocate`, `Executor.array`), when work is done (`Executor.do`: at once, or
recorded to be replayed) and, by its `Route`, how bytes move: within the process, or as messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch

from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, Kernel, intersect, shape, whole
from tapestry.ir.program import Free, Launch, Load, Message, Program, Reduce, Transfer, allocated, transfer_bytes
from tapestry.ir.types import HOST
from tapestry.runtime import arrays as arrays_module
from tapestry.runtime.target_protocol import Array, Measured, Progress, Source, Target


@dataclass(frozen=True, slots=True)
class Route:
    """Which process runs each device, and which one this is."""

    owner: tuple[int, ...]
    rank: int = 0

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of this process."""
        return tuple(d for d, r in enumerate(self.owner) if r == self.rank)


def silent(done: int, total: int) -> None:
    """Progress that nobody looks at."""


@dataclass(slots=True)
class Held:
    """What the devices hold in the course of a run, and how many bytes of it."""

    arrays: list[dict[str, Array]]
    sizes: list[dict[str, int]]
    alive: list[int]
    peak: list[int]

    @classmethod
    def nothing(cls, devices: int) -> Held:
        """Before the first step."""
        return cls([{} for _ in range(devices)], [{} for _ in range(devices)], [0] * devices, [0] * devices)

    def reach(self, device: int) -> None:
        """A step has been done."""
        self.peak[device] = max(self.peak[device], self.alive[device])

    def count(self, device: int, name: str, size: int) -> None:
        """A buffer has been allocated."""
        self.sizes[device][name] = size
        self.alive[device] += size

    def drop(self, device: int, names: Sequence[str]) -> None:
        """Buffers are freed, where they are."""
        held, sizes = self.arrays[device], self.sizes[device]
        for name in names:
            held.pop(name, None)
            self.alive[device] -= sizes.pop(name, 0)


class Executor(ABC):
    """Runs the steps of one Program on the devices of this process.

    Attributes:
        devices: those of this process.
        resident: weights that stay loaded between runs; the others are streamed: loaded at every use.
        held: what is alive at the step that is being done.
        measured: what the run has used so far.
        room: bytes that packed weights may take on each device beyond what the plan holds; to be set before the first run.
        ways: after how many runs every way in which it does the work has been seen.
    """

    ways = 1

    def __init__(
        self,
        graph: Graph,
        program: Program,
        target: Target,
        weights: Source,
        streamed: frozenset[str] = frozenset(),
        route: Route | None = None,
    ) -> None:
        self.graph, self.program, self.target = graph, program, target
        self.buffers = program.buffers
        self.weights, self.streamed = weights, streamed
        self.route = route or Route((0,) * program.devices)
        self.devices = self.route.devices
        self.resident = frozenset(graph.weights) - streamed
        self.room = [0] * program.devices
        self.held = Held.nothing(program.devices)
        self.measured = Measured(self.held.peak)
        self.home = target.device  # where outputs are put together
        self._new = [allocated(step) for step in program.steps]

    @abstractmethod
    def run(
        self, feeds: Source, progress: Progress = silent, wanted: Collection[str] | None = None
    ) -> tuple[dict[str, Array], Measured]:
        """Outputs by name (those that are wanted, by default all), and what the run used."""

    def at_once(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], Measured] | None:
        """`run` from inputs to outputs as numpy has them, where that is one call; ``None`` where it is not."""
        del feeds
        return None

    @abstractmethod
    def allocate(self, device: int, name: str) -> Array:
        """The array of a buffer that is about to be filled."""

    @abstractmethod
    def array(self, device: int, name: str) -> Array:
        """A buffer that is alive."""

    @abstractmethod
    def load(self, name: str, device: int, box: Box) -> None:
        """Fill a buffer from the host: a part of a weight or of an input."""

    @abstractmethod
    def launch(self, at: int, step: Launch, device: int) -> None:
        """Run a kernel on one device."""

    def described(self) -> dict[str, Any]:
        """What there is to say of where it runs, for the JSON of ``run``."""
        return {}

    def do(self, work: Callable[[], None], on_host: str = "") -> None:
        """Work between buffers; ``on_host`` says why a GPU cannot do it alone."""
        del on_host
        work()

    def nbytes(self, device: int, name: str) -> int:
        """Bytes that a new buffer really occupies."""
        return arrays_module.nbytes(self.array(device, name))

    def new_at_every_run(self, name: str) -> bool:
        """Whether the next run leaves an output's array alone, so that it may be handed out as it is."""
        del name
        return False

    # the steps

    def step(self, at: int) -> None:
        """One step on the devices of this process."""
        step = self.program.steps[at]
        match step:
            case Load():
                for d, box in self.mine(self.buffers[step.buffer].boxes):
                    self.load(step.buffer, d, box)
            case Launch():
                for d, _ in self.mine(step.blocks):
                    self.launch(at, step, d)
            case Transfer():
                self.transfer(step)
            case Reduce():
                self.reduce(step)
            case Free():
                for d in self.devices:
                    self.held.drop(d, step.buffers)
        for d in self.devices:
            for name in self._new[at]:
                if self.buffers[name].boxes[d] is not None:
                    self.held.count(d, name, self.nbytes(d, name))
            self.held.reach(d)

    def mine(self, boxes: Sequence[Box | None]) -> Iterator[tuple[int, Box]]:
        """The devices of this process that take part, each with its box."""
        return ((d, box) for d in self.devices if (box := boxes[d]) is not None)

    def box(self, device: int, name: str) -> Box:
        """What a device holds in a buffer that it has."""
        return present(self.buffers[name].boxes[device])

    def part(self, device: int, name: str, box: Box) -> Array:
        """A view of a part of a buffer."""
        return arrays_module.part(self.array(device, name), box, self.box(device, name))

    def transfer(self, step: Transfer) -> None:
        """Fill a new buffer from what the device holds itself and from what others send it."""
        dst, received = self.buffers[step.dst], ends(step.messages)[1]
        total = 0
        for d, box in self.mine(dst.boxes):
            there, sent = self.allocate(d, step.dst), [step.messages[n] for n in received.get(d, ())]
            pieces = [(m.box, self.part(m.src, step.src, m.box)) for m in sent]
            total += sum(values.nbytes for _, values in pieces)
            held = self.buffers[step.src].boxes[d]
            common = None if held is None else intersect(held, box)
            if common is not None:
                pieces.append((common, self.part(d, step.src, common)))
            for piece, values in pieces:
                self.do(partial(copy, values, arrays_module.part(there, piece, box)))
        self.measured.sent(step.kind, total)

    def reduce(self, step: Reduce) -> None:
        """Merge the states of each group; devices that end with the same boxes share one merge."""
        for group in step.groups:
            alike: dict[tuple[Box, ...], list[int]] = {}
            for d in group:
                alike.setdefault(tuple(self.box(d, n) for n in step.dsts), []).append(d)
            for boxes, devices in alike.items():
                states = [[self.field(step, k, e, box) for k, box in enumerate(boxes)] for e in group]
                there = [[self.allocate(d, n) for n in step.dsts] for d in devices]
                self.merge(self.monoid(step.op), states, there, step.sent_as)
        self.measured.sent(step.kind, transfer_bytes(step, self.program))

    def field(self, step: Reduce, k: int, device: int, box: Box) -> Array:
        """What one device gives to a merge of one field: a part of its states, or the count that everybody knows."""
        if not step.known or not step.known[k]:
            return self.part(device, step.srcs[k], box)
        return self.count(step, k, device, shape(box))

    def count(self, step: Reduce, k: int, device: int, extents: tuple[int, ...]) -> Array:
        """A field that is the same number at every cell, and is not sent."""
        dtype = arrays_module.torch_dtype(self.buffers[step.srcs[k]].dtype)
        return torch.full(extents, step.known[k][device], dtype=dtype, device=self.target.device)

    def merge(self, monoid: str, states: list[list[Array]], into: list[list[Array]], sent_as: str = "") -> None:
        """Merge the states of several devices in their order, into the buffers of one or more of them."""
        self.do(partial(self._merge, monoid, states, into, sent_as))

    def _merge(self, monoid: str, states: list[list[Array]], into: list[list[Array]], sent_as: str) -> None:
        merged = self.merged_as_sent(monoid, states, sent_as)
        for fields in into:
            for there, value in zip(fields, merged, strict=True):
                there.copy_(value)

    def merged_as_sent(self, monoid: str, states: list[list[Array]], sent_as: str) -> list[Array]:
        """Merged states; where they travel in a dtype of their own they are rounded to it, before and after."""
        if not sent_as:
            return self.target.merge(monoid, states)
        came = [[arrays_module.rounded(a, sent_as) for a in s] for s in states]
        return [arrays_module.rounded(a, sent_as) for a in self.target.merge(monoid, came)]

    def monoid(self, op: int) -> str:
        """The monoid of a reduction."""
        monoid = getattr(self.graph.ops[op], "monoid", None)
        assert monoid is not None
        return monoid

    # outputs

    @cached_property
    def blocks(self) -> dict[str, dict[Box, int]]:
        """The blocks of every output, each with the first device that has it."""
        boxes = {t: self.buffers[name].boxes for t, name in self.program.outputs.items()}
        return {t: {b: d for d, b in reversed(list(enumerate(bs))) if b is not None} for t, bs in boxes.items()}

    def outputs(self, wanted: Collection[str] | None = None) -> dict[str, Array]:
        """The outputs that are wanted (by default all)."""
        names = {t: n for t, n in self.program.outputs.items() if wanted is None or t in wanted}
        plain = [t for t in names if not self._hosted(t)]
        came = iter(self.gather([(d, names[t]) for t in plain for d in self.blocks[t].values()]))
        pieces = {t: [(box, next(came)) for box in self.blocks[t]] for t in plain}
        hosted = {t: self.host_output(t, n, min(self.blocks[t].values())) for t, n in names.items() if self._hosted(t)}
        if self.route.rank:
            return {}
        return {t: hosted[t] if t in hosted else self._assembled(t, pieces[t]) for t in names}

    def _hosted(self, tensor: str) -> bool:
        return self.buffers[self.program.outputs[tensor]].dtype == HOST

    def gather(self, blocks: Sequence[tuple[int, str]]) -> list[Array]:
        """Buffers by (device, name), on the process of device 0."""
        return [self.array(d, name) for d, name in blocks]

    def _assembled(self, tensor: str, pieces: list[tuple[Box, Array]]) -> Array:
        name, everything = self.program.outputs[tensor], whole(self.graph.tensors[tensor].shape)
        found = next((a for box, a in pieces if box == everything), None)
        if found is not None and self.new_at_every_run(name):
            return found
        return arrays_module.assemble(everything, self.buffers[name].dtype, pieces, self.home)

    def host_output(self, tensor: str, name: str, device: int) -> Array:
        """An output that is a value of the host, from the device that has it."""
        del tensor
        return self.array(device, name)


def kernel_of(step: Launch, device: int, program: Program) -> Kernel:
    """What a code generator needs to know of one device's launch."""
    ins = tuple(program.buffers[b].boxes[device] if b else None for b in step.ins)
    outs = tuple(present(program.buffers[b].boxes[device]) for b in step.outs)
    return Kernel(op=step.op, mode=step.mode, block=present(step.blocks[device]), ins=ins, outs=outs)


def copy(values: torch.Tensor, there: torch.Tensor) -> None:
    """Copy an array into another; what comes from the host is pinned, and written again only after the run."""
    there.copy_(values, non_blocking=True)


@lru_cache(maxsize=1 << 8)
def ends(messages: tuple[Message, ...]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Positions of the messages that each device sends, and of those that it receives."""
    sent: dict[int, list[int]] = {}
    received: dict[int, list[int]] = {}
    for n, m in enumerate(messages):
        sent.setdefault(m.src, []).append(n)
        received.setdefault(m.dst, []).append(n)
    return sent, received


def present(box: Box | None) -> Box:
    """A box that must be there."""
    assert box is not None
    return box
