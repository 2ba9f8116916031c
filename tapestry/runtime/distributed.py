"""One process's share of a Program: its devices, and messages to the others'.

Every process runs consecutive devices, as many as the others or one more. Steps are taken in the program's order by every
rank. Sends are posted and left to fly; what a transfer brings is waited for where it is first used, so that it overlaps with
the steps between. A reduction is: every device sends each other one the part that it merges, merges in the order of the group,
and (all-reduce) sends what it merged to the others: (n-1)·B bytes each way in all, as the plan counts, and the same bits as in
one process. Two devices exchange whole states at once, which is as many bytes and one latency less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch

from tapestry.errors import TapestryError
from tapestry.ir.kernel import Box, cut, intersect, shape
from tapestry.ir.program import Buffer, Free, Launch, Load, Message, Program, Reduce, Step, Transfer, allocated
from tapestry.ir.types import DTYPES, HOST, STORED
from tapestry.runtime.local import Array, Machine, Measured, Source
from tapestry.runtime.pulse import COMPUTE, WEIGHTS
from tapestry.runtime.wire import Piece, Wire, clock

COMPUTED, MOVED = 0, 1  # streams of a trace
Memory = list[dict[str, Array]]
Sends = defaultdict[int, list[tuple[Piece, torch.Tensor]]]
Receives = defaultdict[int, list[Piece]]


def owners(devices: int, world: int) -> tuple[int, ...]:
    """The rank of every device.

    Raises:
        TapestryError: there are more ranks than devices.
    """
    if not 1 <= world <= devices:
        raise TapestryError(
            f"{world} processes for the {devices} devices of the plan", hint=f"at most {devices}: a process runs whole devices"
        )
    return tuple(r for r in range(world) for _ in range(*cut(devices, world, r)))


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval of one rank's time: nanoseconds since 1970."""

    batch: int
    step: int
    device: int
    stream: int
    start: int
    end: int


@dataclass(slots=True)
class Parcels:
    """What one step sends and expects, per rank, and what stays in the process, by the name of the piece."""

    wire: Wire
    owner: tuple[int, ...]
    step: int
    sends: Sends = field(default_factory=lambda: defaultdict(list))
    receives: Receives = field(default_factory=lambda: defaultdict(list))
    here: dict[str, torch.Tensor] = field(default_factory=dict)
    sent: int = 0

    def carry(
        self, name: str, src: int, dst: int, extents: tuple[int, ...], dtype: torch.dtype, take: Callable[[], Array]
    ) -> None:
        """A piece from one device to another; ``take`` gives the data on the sender's side."""
        mine = self.wire.rank
        if self.owner[src] == mine:
            data = take()
            assert isinstance(data, torch.Tensor), f"'{name}' is no array and cannot travel between processes"
            self.sent += data.numel() * data.element_size()
            if self.owner[dst] == mine:
                self.here[name] = data
            else:
                self.sends[self.owner[dst]].append(((name, extents, dtype), data))
        elif self.owner[dst] == mine:
            self.receives[self.owner[src]].append((name, extents, dtype))

    def go(self) -> Callable[[], dict[str, torch.Tensor]]:
        """Post everything; the function returned waits, and gives every piece for this process by name."""
        wait = self.wire.post(self.step, self.sends, self.receives)
        here, expected = self.here, dict(self.receives)

        def arrive() -> dict[str, torch.Tensor]:
            came = wait()
            return here | {p[0]: a for r, pieces in expected.items() for p, a in zip(pieces, came[r], strict=True)}

        return arrive


class RankMachine(Machine):
    """The devices of one rank."""

    def __init__(self, *args: Any, wire: Wire, trace: bool = False, **more: Any) -> None:
        self.wire, self.tracing = wire, trace
        program: Program = args[1]
        self.owner = owners(program.devices, wire.world)
        self.slices: list[Slice] = []
        self.late: dict[str, Callable[[], None]] = {}
        self.dtypes = {b.name: _torch_dtype(b.dtype) for b in program.buffers.values()}
        super().__init__(*args, devices=[d for d, r in enumerate(self.owner) if r == wire.rank], **more)

    def run(
        self, feeds: Source, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[dict[str, Array], Measured]:
        """Outputs by name on rank 0, nothing on the others; and what this rank's devices used."""
        self.bind()
        memory: Memory = [{} for _ in range(self.program.devices)]
        alive = [0] * self.program.devices
        measured = Measured([0] * self.program.devices)
        for i, step in enumerate(self.program.steps):
            self._settle(i, _touched(step))
            self.wire.pulse.at(i, COMPUTE)
            start = clock()
            self._do(i, step, memory, feeds, measured)
            if isinstance(step, Free):
                for d in self.devices:
                    alive[d] -= sum(self.target.nbytes(memory[d].pop(b)) for b in step.buffers if b in memory[d])
                continue
            if isinstance(step, Transfer | Reduce):
                self._trace(i, -1, MOVED, start)
            for d in self.devices:
                alive[d] += sum(self._nbytes(b, d, memory) for b in allocated(step))
                measured.peak[d] = max(measured.peak[d], alive[d])
            progress(i + 1, len(self.program.steps))
        outputs = self._outputs(memory)
        self.wire.drain(0, len(self.program.steps))
        return outputs, measured

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
        if name in memory[device]:
            return self.target.nbytes(memory[device][name])
        return self.program.buffers[name].nbytes(device) if name in self.late else 0

    def _settle(self, i: int, names: Sequence[str]) -> None:
        """Wait for buffers that are still on their way."""
        for name in names:
            if name in self.late:
                start = clock()
                self.late.pop(name)()
                self._trace(i, -1, MOVED, start)

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

    def _carry(self, i: int, step: Transfer, memory: Memory, measured: Measured) -> None:
        src, dst = self.program.buffers[step.src], self.program.buffers[step.dst]
        parcels = Parcels(self.wire, self.owner, i)
        sent, received = _ends(step.messages)
        mine = dict.fromkeys(n for d in self.devices for n in (*sent.get(d, ()), *received.get(d, ())))
        for n in sorted(mine):
            m = step.messages[n]
            take = lambda m=m: _part(memory[m.src][step.src], m.box, src.boxes[m.src])  # noqa: E731
            parcels.carry(f"{step.dst}@{m.dst} {m.box}", m.src, m.dst, shape(m.box), self.dtypes[step.src], take)
        wait = parcels.go()
        measured.sent(step.kind, parcels.sent)
        own = {d: self._copies(d, step, memory) for d, _ in self._mine(dst.boxes)}

        def finish() -> None:
            came = wait()
            for d, box in self._mine(dst.boxes):
                boxes = [step.messages[n].box for n in received.get(d, ())]
                pieces = [(b, came[f"{step.dst}@{d} {b}"]) for b in boxes]
                memory[d][step.dst] = self.target.assemble(box, dst.dtype, [*pieces, *own[d]])

        if parcels.receives:
            self.late[step.dst] = finish
        else:
            finish()

    def _copies(self, device: int, step: Transfer, memory: Memory) -> list[tuple[Box, Array]]:
        """What a device holds already of what it shall have."""
        own, box = self.program.buffers[step.src].boxes[device], self.program.buffers[step.dst].boxes[device]
        common = None if own is None or box is None else intersect(own, box)
        return [] if common is None else [(common, self.target.slice(memory[device][step.src], common, own))]  # type: ignore[arg-type]

    def _merge(self, i: int, step: Reduce, memory: Memory, measured: Measured) -> None:
        groups = [g for g in step.groups if any(self.owner[d] == self.wire.rank for d in g)]
        shares = [Share(self, step, g) for g in groups]
        there = Parcels(self.wire, self.owner, i)
        for s in shares:
            s.give(there, memory)
        came = there.go()()
        back = Parcels(self.wire, self.owner, i)
        for s in shares:
            s.merge(came, memory)
            s.give_back(back, memory)
        came = back.go()()
        for s in shares:
            s.finish(came, memory)
        measured.sent(step.kind, there.sent + back.sent)

    def _outputs(self, memory: Memory) -> dict[str, Array]:
        """Every output, each block from the first device that has it, on rank 0."""
        self._settle(len(self.program.steps), tuple(self.program.outputs.values()))
        parcels = Parcels(self.wire, self.owner, len(self.program.steps))
        first = self.owner.index(0)
        blocks: dict[str, list[Box]] = {}
        for t, name in self.program.outputs.items():
            buffer = self.program.buffers[name]
            holders = {box: d for d, box in reversed(list(enumerate(buffer.boxes))) if box is not None}
            blocks[t] = list(holders)
            if buffer.dtype == HOST and any(self.owner[d] for d in holders.values()):
                raise TapestryError(f"output '{t}' is no array, and not on rank 0", hint="run it in one process")
            if buffer.dtype == HOST:
                continue
            for box, d in holders.items() if self.wire.rank == 0 else [(b, d) for b, d in holders.items() if d in self.devices]:
                parcels.carry(f"{t} {box}", d, first, shape(box), self.dtypes[name], lambda d=d, n=name: memory[d][n])
        before = self.wire.payload
        came = parcels.go()()
        self.wire.payload, self.wire.gathered = before, self.wire.gathered + self.wire.payload - before
        if self.wire.rank:
            return {}
        out: dict[str, Array] = {}
        for t, name in self.program.outputs.items():
            whole = tuple((0, n) for n in self.graph.tensors[t].shape)
            if self.program.buffers[name].dtype == HOST:
                out[t] = memory[first][name]
                continue
            pieces = [(b, came[f"{t} {b}"]) for b in blocks[t]]
            out[t] = self.target.assemble(whole, self.program.buffers[name].dtype, pieces)
        return out


@dataclass(slots=True)
class Share:
    """A reduction in one group, as far as this process takes part."""

    machine: RankMachine
    step: Reduce
    group: tuple[int, ...]
    merged: dict[int, list[Array]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether every device merges all that it ends with (else an equal part of it, for all)."""
        return self.step.kind != "all_reduce" or len(self.group) <= 2

    def buffers(self, names: Sequence[str]) -> list[Buffer]:
        """The buffers of all fields."""
        return [self.machine.program.buffers[b] for b in names]

    def known(self, k: int) -> bool:
        """Whether a field is a count that is not sent."""
        return bool(self.step.known and self.step.known[k])

    def mine(self) -> Iterator[int]:
        """Devices of the group in this process."""
        return (d for d in self.group if self.machine.owner[d] == self.machine.wire.rank)

    def rows(self, device: int) -> tuple[int, int, int]:
        """(leading axes that all fields share, first row, end) of the part that a device merges of an all-reduce."""
        boxes = [_box(b.boxes[self.group[0]]) for b in self.buffers(self.step.dsts)]
        common = 0
        while all(len(b) > common and b[common] == boxes[0][common] for b in boxes):
            common += 1
        return common, *cut(prod(shape(boxes[0][:common])), len(self.group), self.group.index(device))

    def part(self, array: Array, box: Box, device: int) -> Array:
        """The rows of an array of a box that a device merges."""
        common, first, end = self.rows(device)
        rest = shape(box)[common:]
        return array.reshape(prod(shape(box)[:common]), *rest)[first:end]

    def extents(self, k: int, device: int) -> tuple[int, ...]:
        """Shape of what a device merges of one field."""
        box = _box(self.buffers(self.step.dsts)[k].boxes[device])
        if self.whole:
            return shape(box)
        common, first, end = self.rows(device)
        return (end - first, *shape(box)[common:])

    def taken(self, k: int, sender: int, receiver: int, memory: Memory) -> Array:
        """What one device has of another's part of one field."""
        src, dst = self.buffers(self.step.srcs)[k], self.buffers(self.step.dsts)[k]
        held = memory[sender][src.name]
        if self.whole:
            return _part(held, _box(dst.boxes[receiver]), src.boxes[sender])
        return self.part(held, _box(src.boxes[sender]), receiver)

    def give(self, parcels: Parcels, memory: Memory) -> None:
        """Every device sends every other one the states of that one's part."""
        for receiver in self.group:
            for sender in self.group:
                for k, name in enumerate(self.step.srcs):
                    if sender != receiver and not self.known(k):
                        piece = (f"{name}@{sender}>{receiver}", sender, receiver, self.extents(k, receiver))
                        take = lambda k=k, s=sender, r=receiver: self.taken(k, s, r, memory)  # noqa: E731
                        parcels.carry(*piece, self.machine.dtypes[name], take)

    def merge(self, came: dict[str, torch.Tensor], memory: Memory) -> None:
        """Merge the parts of this process's devices, in the order of the group."""
        monoid = getattr(self.machine.graph.ops[self.step.op], "monoid", None)
        assert monoid is not None
        for d in self.mine():
            states: list[list[Array]] = []
            for e in self.group:
                fields: list[Array] = []
                for k, b in enumerate(self.buffers(self.step.srcs)):
                    if self.known(k):
                        fields.append(self.count(k, self.extents(k, d), e))
                    else:
                        fields.append(self.taken(k, d, d, memory) if e == d else came[f"{b.name}@{e}>{d}"])
                states.append(fields)
            self.merged[d] = self.machine.target.merge(monoid, states)

    def count(self, k: int, extents: tuple[int, ...], device: int) -> Array:
        """A field that is known, over an array."""
        dtype = self.machine.program.buffers[self.step.srcs[k]].dtype
        return self.machine.target.full(tuple((0, n) for n in extents), dtype, self.step.known[k][device])

    def give_back(self, parcels: Parcels, memory: Memory) -> None:
        """All-reduce in parts: every device sends every other one what it merged."""
        for sender in () if self.whole else self.group:
            for receiver in self.group:
                for k, name in enumerate(self.step.dsts):
                    if sender != receiver and not self.known(k):
                        piece = (f"{name}@{sender}>{receiver}", sender, receiver, self.extents(k, sender))
                        parcels.carry(*piece, self.machine.dtypes[name], lambda k=k, s=sender: self.merged[s][k])

    def finish(self, came: dict[str, torch.Tensor], memory: Memory) -> None:
        """Put the merged states into their buffers."""
        for d in self.mine():
            for k, b in enumerate(self.buffers(self.step.dsts)):
                box = _box(b.boxes[d])
                if self.whole:
                    memory[d][b.name] = self.machine.target.slice(self.merged[d][k], box, box)
                elif self.known(k):
                    counts = [[self.count(k, shape(box), e)] for e in self.group]
                    memory[d][b.name] = self.machine.target.merge("sum", counts)[0].contiguous()
                else:
                    rows = [self.merged[e][k] if e == d else came[f"{b.name}@{e}>{d}"] for e in self.group]
                    memory[d][b.name] = torch.cat(rows).reshape(shape(box))


@lru_cache(maxsize=1 << 8)
def _ends(messages: tuple[Message, ...]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Positions of the messages that each device sends, and of those that it receives."""
    sent: dict[int, list[int]] = {}
    received: dict[int, list[int]] = {}
    for n, m in enumerate(messages):
        sent.setdefault(m.src, []).append(n)
        received.setdefault(m.dst, []).append(n)
    return sent, received


def _part(array: Array, box: Box, origin: Box | None) -> Array:
    """A view of a box of an array that holds ``origin``."""
    assert origin is not None
    return array[tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(box, origin, strict=True))]


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


def _box(box: Box | None) -> Box:
    assert box is not None
    return box
