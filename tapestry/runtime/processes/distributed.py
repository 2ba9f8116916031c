"""One process's share of a Program: its devices, and messages to the others'.

Every process runs consecutive devices, as many as the others or one more. Steps are taken in the program's order by every
rank. Sends are posted and left to fly; what a transfer or a reduction brings is waited for where it is first used, so that it
overlaps with the steps between. Where that is follows from the program alone, so all ranks post and wait in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tapestry.ir.kernel import Box, intersect, shape
from tapestry.ir.program import Free, Launch, Load, Message, Program, Reduce, Step, Transfer
from tapestry.ir.types import DTYPES, HOST, STORED
from tapestry.runtime.one_process.logical_devices import Array, Held, Machine, Measured, Source
from tapestry.runtime.processes import output_gather
from tapestry.runtime.processes.heartbeat import COMPUTE, WEIGHTS
from tapestry.runtime.processes.merging import Share
from tapestry.runtime.processes.step_messages import Memory, Parcels, Receives, owners, part
from tapestry.runtime.processes.wire import Tag, Wire, clock

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


class RankMachine(Machine):
    """The devices of one rank."""

    def __init__(self, *args: Any, wire: Wire, trace: bool = False, **more: Any) -> None:
        self.wire, self.tracing = wire, trace
        program: Program = args[1]
        self.owner = owners(program.devices, wire.world)
        self.slices: list[Slice] = []
        self._agenda: list[tuple[Tag, Receives]] | None = None
        self.late: dict[str, tuple[int, Callable[[], None]]] = {}
        self.dtypes = {b.name: _torch_dtype(b.dtype) for b in program.buffers.values()}
        super().__init__(*args, devices=[d for d, r in enumerate(self.owner) if r == wire.rank], **more)

    def run(
        self, feeds: Source, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[dict[str, Array], Measured]:
        """Outputs by name on rank 0, nothing on the others; and what this rank's devices used."""
        self.bind()
        held = Held.of(self)
        memory, measured = held.arrays, Measured(held.peak, packed=[p.extra for p in self.packing])
        if self._agenda is None:
            self._agenda = self.agenda()
        self.wire.expect(self._agenda)
        for i, (step, new) in enumerate(self.steps):
            self._settle(_touched(step))
            self.wire.pulse.at(i, COMPUTE)
            start = clock()
            self._do(i, step, memory, feeds, measured)
            if isinstance(step, Free):
                for d in self.devices:
                    held.drop(d, step.buffers)
                continue
            if isinstance(step, Transfer | Reduce):
                self._trace(i, -1, MOVED, start)
            for d in self.devices:
                for name in new:
                    if name in memory[d] or name in self.late:
                        held.count(d, name, self._nbytes(name, d, memory))
                held.reach(d)
            progress(i + 1, len(self.steps))
        self._settle(tuple(self.program.outputs.values()))
        outputs = output_gather.outputs(self, memory)
        self.wire.drain(0, len(self.steps))
        return outputs, measured

    def _weigh(self, array: Array) -> int:
        """Packing takes a while: say that this rank lives."""
        self.wire.pulse.at(-1, WEIGHTS)
        return super()._weigh(array)

    def _do(self, i: int, step: Step, memory: Memory, feeds: Source, measured: Measured) -> None:
        match step:
            case Load():
                if self.program.buffers[step.buffer].tensor in self.streamed:
                    self.wire.pulse.at(i, WEIGHTS)
                self._load(step, memory, feeds)
            case Launch():
                self._launch(i, step, memory)
            case Transfer():
                self._carry(i, step, memory, measured)
            case Reduce():
                self._merge(i, step, memory, measured)
            case Free():
                pass

    def _nbytes(self, name: str, device: int, memory: Memory) -> int:
        """Bytes of a new buffer; one that is still on its way has its place already."""
        if name in self.kept[device]:
            return self.kept[device][name][1]
        return self.target.nbytes(memory[device][name]) if name in memory[device] else self.program.buffers[name].nbytes(device)

    def _settle(self, names: Sequence[str]) -> None:
        """Wait for buffers that are still on their way."""
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

    def _launch(self, at: int, step: Launch, memory: Memory) -> None:
        mine = self.devices
        for d, _ in list(self._mine(step.blocks)):
            self.devices, start = (d,), clock()
            try:
                super()._launch(at, step, memory)
            finally:
                self.devices = mine
            self._trace(at, d, COMPUTED, start)

    def _moved(self, i: int, step: Transfer, memory: Memory, dry: bool = False) -> Parcels:
        """What a transfer sends and expects."""
        src = self.program.buffers[step.src]
        parcels = Parcels(self.wire, self.owner, i, dry=dry)
        sent, received = _ends(step.messages)
        mine = dict.fromkeys(n for d in self.devices for n in (*sent.get(d, ()), *received.get(d, ())))
        for n in sorted(mine):
            m = step.messages[n]
            take = lambda m=m: part(memory[m.src][step.src], m.box, src.boxes[m.src])  # noqa: E731
            parcels.carry(f"{step.dst}@{m.dst} {m.box}", m.src, m.dst, shape(m.box), self.dtypes[step.src], take)
        return parcels

    def _shares(self, step: Reduce) -> list[Share]:
        return [Share(self, step, g) for g in step.groups if any(self.owner[d] == self.wire.rank for d in g)]

    def agenda(self) -> list[tuple[Tag, Receives]]:
        """All that comes to this rank in a run, in the order in which all ranks send."""
        found: list[Parcels] = []
        merging: dict[str, tuple[int, Reduce]] = {}
        for i, step in enumerate((*self.program.steps, None)):
            for name in tuple(self.program.outputs.values()) if step is None else _touched(step):
                if name in merging:
                    at, reduce = merging[name]
                    merging = {n: x for n, x in merging.items() if x[0] != at}
                    found.append(Parcels(self.wire, self.owner, at, 1, dry=True))
                    for s in self._shares(reduce):
                        s.give_back(found[-1])
            if isinstance(step, Transfer):
                found.append(self._moved(i, step, [], dry=True))
            elif isinstance(step, Reduce):
                found.append(Parcels(self.wire, self.owner, i, dry=True))
                for s in self._shares(step):
                    s.give(found[-1], [])
                merging.update(dict.fromkeys(step.dsts, (i, step)))
        return [((p.step, p.part), p.receives) for p in found if p.receives]

    def _carry(self, i: int, step: Transfer, memory: Memory, measured: Measured) -> None:
        dst, received = self.program.buffers[step.dst], _ends(step.messages)[1]
        parcels = self._moved(i, step, memory)
        wait = self._fly(parcels)
        measured.sent(step.kind, parcels.sent)
        own = {d: self._copies(d, step, memory) for d, _ in self._mine(dst.boxes)}

        def finish() -> None:
            came = wait()
            for d, box in self._mine(dst.boxes):
                boxes = [step.messages[n].box for n in received.get(d, ())]
                pieces = [(b, came[f"{step.dst}@{d} {b}"]) for b in boxes]
                memory[d][step.dst] = self.target.assemble(box, dst.dtype, [*pieces, *own[d]])

        self._later(i, (step.dst,), finish, bool(parcels.receives))

    def _copies(self, device: int, step: Transfer, memory: Memory) -> list[tuple[Box, Array]]:
        """What a device holds already of what it shall have."""
        own, box = self.program.buffers[step.src].boxes[device], self.program.buffers[step.dst].boxes[device]
        common = None if own is None or box is None else intersect(own, box)
        return [] if common is None else [(common, self.target.slice(memory[device][step.src], common, own))]  # type: ignore[arg-type]

    def _merge(self, i: int, step: Reduce, memory: Memory, measured: Measured) -> None:
        shares = self._shares(step)
        parcels = Parcels(self.wire, self.owner, i)
        for s in shares:
            s.give(parcels, memory)
        wait = self._fly(parcels)

        def finish() -> None:
            came = wait()
            back = Parcels(self.wire, self.owner, i, 1)
            for s in shares:
                s.merge(came)
                s.give_back(back)
            came = self._fly(back)()
            for s in shares:
                s.finish(came, memory)
            measured.sent(step.kind, parcels.sent + back.sent)

        self._later(i, step.dsts, finish, bool(parcels.receives))

    def _fly(self, parcels: Parcels) -> Callable[[], dict[str, torch.Tensor]]:
        """Post, and note how long what comes is on its way: since the last of it left its sender."""
        wait = parcels.go()

        def arrive() -> dict[str, torch.Tensor]:
            came = wait()
            if parcels.receives:
                self._trace(parcels.step, -1, FLOWN, self.wire.left)
            return came

        return arrive

    def _later(self, i: int, names: Sequence[str], finish: Callable[[], None], late: bool) -> None:
        """Fill a step's buffers where one of them is first used, or now if nothing is on its way."""
        if late:
            self.late.update(dict.fromkeys(names, (i, finish)))
        else:
            finish()


@lru_cache(maxsize=1 << 8)
def _ends(messages: tuple[Message, ...]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Positions of the messages that each device sends, and of those that it receives."""
    sent: dict[int, list[int]] = {}
    received: dict[int, list[int]] = {}
    for n, m in enumerate(messages):
        sent.setdefault(m.src, []).append(n)
        received.setdefault(m.dst, []).append(n)
    return sent, received


def _touched(step: Step) -> tuple[str, ...]:
    match step:
        case Launch():
            return tuple(b for b in (*step.ins, *step.states) if b)
        case Transfer():
            return (step.src,)
        case Reduce():
            return step.srcs
        case Free():
            return step.buffers
        case Load():
            return ()


def _torch_dtype(dtype: str) -> torch.dtype:
    """Types that are only stored travel as their bits; values of the host do not travel (the verifier sees to that)."""
    bits = dtype == HOST or (dtype in STORED and not dtype.startswith("c"))
    return torch.uint8 if bits else getattr(torch, DTYPES[dtype][1])
