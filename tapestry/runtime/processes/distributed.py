"""One process's share of a Program: its devices, and messages to the others'.

Every process runs consecutive devices, as many as the others or one more. Steps are taken in the program's order by every
rank. Sends are posted and left to fly; what a transfer or a reduction brings is waited for where it is first used, so that it
overlaps with the steps between. Where that is follows from the program alone, so all ranks post and wait in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tapestry.ir.graph import Graph
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Step, Transfer, reads
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.runtime.executor import silent
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.runtime.processes import host_values
from tapestry.runtime.processes.heartbeat import COMPUTE, WEIGHTS
from tapestry.runtime.processes.merging import GroupMerge
from tapestry.runtime.processes.wire import Tag, Wire, clock
from tapestry.runtime.step_messages import Receives, Route, StepMessages, owners
from tapestry.runtime.target_protocol import Array, Measured, Progress, Source, Target

if TYPE_CHECKING:
    from tapestry.ir.kernel import Box

COMPUTED, MOVED, FLOWN = 0, 1, 2  # streams of a trace: kernels, work and waiting for messages, messages on their way


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval of one rank's time: nanoseconds since 1970."""

    batch: int
    step: int
    device: int
    stream: int
    start: int
    end: int


class RankExecutor(LocalExecutor):
    """The devices of one rank.

    Attributes:
        late: buffers that are still on their way: at which step they were sent, and what fills them.
    """

    def __init__(
        self, graph: Graph, program: Program, target: Target, weights: Source, streamed: frozenset[str] = frozenset(), *,
        wire: Wire, trace: bool = False,
    ) -> None:  # fmt: skip
        self.wire, self.tracing = wire, trace
        self.slices: list[Slice] = []
        self._agenda: list[tuple[Tag, Receives]] | None = None
        self.late: dict[str, tuple[int, Callable[[], None]]] = {}
        self._weights = weights
        super().__init__(graph, program, target, self._read, streamed, Route(owners(program.devices, wire.world), wire))

    def _read(self, tensor: str, box: Box) -> Array:
        """A part of a weight; reading takes a while: say that this rank lives."""
        self.wire.heartbeat.at(-1, WEIGHTS)
        return self._weights(tensor, box)

    def run(self, feeds: Source, progress: Progress = silent) -> tuple[dict[str, Array], Measured]:
        """Outputs by name on rank 0, nothing on the others; and what this rank's devices used."""
        if self._agenda is None:
            self._agenda = self.agenda()
        self.wire.expect(self._agenda)
        outputs, measured = super().run(feeds, progress)
        self.wire.drain(0, len(self.program.steps))
        return outputs, measured

    def weigh(self, array: Array) -> int:
        """Packing takes a while as well."""
        self.wire.heartbeat.at(-1, WEIGHTS)
        return super().weigh(array)

    def step(self, at: int) -> None:
        """One step, once what it uses has come."""
        step = self.program.steps[at]
        self._wait_for(_used(step))
        streams = isinstance(step, Load) and self.program.buffers[step.buffer].tensor in self.streamed
        self.wire.heartbeat.at(at, WEIGHTS if streams else COMPUTE)
        start = clock()
        super().step(at)
        if isinstance(step, Transfer | Reduce):
            self._trace(at, -1, MOVED, start)

    def launch(self, at: int, step: Launch, device: int) -> None:
        """Run a kernel, and note when."""
        start = clock()
        super().launch(at, step, device)
        self._trace(at, device, COMPUTED, start)

    def nbytes(self, device: int, name: str) -> int:
        """Bytes of a new buffer; one that is still on its way has its place already."""
        return self.program.buffers[name].nbytes(device) if name in self.late else super().nbytes(device, name)

    def _wait_for(self, names: Sequence[str]) -> None:
        """Fill buffers that are still on their way."""
        for name in names:
            if name in self.late:
                at, finish = self.late[name]
                self.late = {n: x for n, x in self.late.items() if x[0] != at}
                start = clock()
                finish()
                self._trace(at, -1, MOVED, start)

    def _trace(self, step: int, device: int, stream: int, start: int) -> None:
        if self.tracing:
            self.slices.append(Slice(self.wire.batch, step, device, stream, start, clock()))

    def when_there(self, at: int, names: Sequence[str], finish: Callable[[], None], messages: StepMessages) -> None:
        """Fill a step's buffers where one of them is first used, or now if nothing is on its way."""
        if messages.receives:
            self.late.update(dict.fromkeys(names, (at, finish)))
        else:
            finish()

    def post(self, messages: StepMessages) -> Callable[[], dict[str, Array]]:
        """Post, and note how long what comes is on its way: since the last of it left its sender."""
        wait = messages.post()

        def arrive() -> dict[str, Array]:
            came = wait()
            if messages.receives:
                self._trace(messages.step, -1, FLOWN, self.wire.left)
            return came

        return arrive

    def _groups(self, step: Reduce) -> list[GroupMerge]:
        return [GroupMerge(self, step, g) for g in step.groups if any(d in self.devices for d in g)]

    def reduce(self, at: int, step: Reduce) -> None:
        """Merge the states of each group between processes: in parts, which are sent back where all need the whole."""
        groups, messages = self._groups(step), StepMessages(self.route, at)
        for g in groups:
            g.give(messages)
        arrive = self.post(messages)

        def finish() -> None:
            came = arrive()
            back = StepMessages(self.route, at, 1)
            for g in groups:
                g.merge(came)
                g.give_back(back)
            came = self.post(back)()
            for g in groups:
                g.finish(came)
            self.measured.sent(step.kind, messages.sent + back.sent)

        self.when_there(at, step.dsts, finish, messages)

    def agenda(self) -> list[tuple[Tag, Receives]]:
        """All that comes to this rank in a run, in the order in which all ranks send."""
        out: list[StepMessages] = []
        merging: dict[str, tuple[int, Reduce]] = {}
        for at, step in enumerate((*self.program.steps, None)):
            for name in tuple(self.program.outputs.values()) if step is None else _used(step):
                if name in merging:
                    since, reduce = merging[name]
                    merging = {n: x for n, x in merging.items() if x[0] != since}
                    out.append(StepMessages(self.route, since, 1, dry=True))
                    for g in self._groups(reduce):
                        g.give_back(out[-1])
            if isinstance(step, Transfer):
                out.append(self.messages(at, step, dry=True))
            elif isinstance(step, Reduce):
                out.append(StepMessages(self.route, at, dry=True))
                for g in self._groups(step):
                    g.give(out[-1])
                merging.update(dict.fromkeys(step.dsts, (at, step)))
        return [((m.step, m.part), m.receives) for m in out if m.receives]

    # outputs: counted as ``gathered``, apart from the program's bytes

    def outputs(self) -> dict[str, Array]:
        """Every output on rank 0, nothing on the others."""
        self._wait_for(tuple(self.program.outputs.values()))
        before = self.wire.payload
        out = super().outputs()
        self.wire.payload, self.wire.gathered = before, self.wire.gathered + self.wire.payload - before
        return out

    def host_output(self, tensor: str, name: str, device: int) -> Array:
        """A value of the host on rank 0: first how many bytes it has, then the bytes."""
        owner = self.route.owner[device]
        value = self.array(device, name) if owner == self.wire.rank else None
        if owner == 0:
            return value
        data = host_values.encode(value.value) if value is not None else b""
        size = self._bytes_to_first(f"{tensor} size", device, len(data).to_bytes(8, "little"))
        data = self._bytes_to_first(tensor, device, data.ljust(int.from_bytes(size, "little"), b"\0"))
        return HostValue(host_values.decode(data)) if self.wire.rank == 0 else None

    def _bytes_to_first(self, what: str, device: int, data: bytes) -> bytes:
        """Bytes from a device's process to rank 0; as many are expected there as are given."""
        messages = StepMessages(self.route, len(self.program.steps))
        given = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        messages.carry(what, (device, 0), tuple(given.shape), torch.uint8, lambda: given)
        came = messages.post()()
        return came[what].cpu().numpy().tobytes() if what in came else data


def _used(step: Step) -> tuple[str, ...]:
    """Buffers that a step reads or frees."""
    return step.buffers if isinstance(step, Free) else tuple(b for b in reads(step) if b)
