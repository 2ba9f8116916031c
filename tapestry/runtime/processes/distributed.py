"""One process's share of a Program: its devices, and its part in what all of them move.

Every process runs consecutive devices, as many as the others or one more. What a run does is worked out once: a list of calls
per step, buffers for all that travels, process groups. Steps are taken in the program's order by every rank. Transfers and
reductions are started at their step and left to fly; what they bring is waited for before the step that first names it, so that
it overlaps with the steps between. Where that is follows from the program alone, so all ranks start and wait in one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch

from tapestry.ir.collective_calls import Call
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, shape
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Transfer, allocated, reads
from tapestry.ir.types import HOST
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.runtime import arrays
from tapestry.runtime.executor import Route, silent
from tapestry.runtime.messages.merging import merge
from tapestry.runtime.messages.message_buffers import MessageBuffers
from tapestry.runtime.messages.message_schedule import calls_of, first_uses, freed_at, set_times, signature
from tapestry.runtime.messages.moves import Move, RankDevices, transfer
from tapestry.runtime.messages.point_to_point import Piece, PointToPoint
from tapestry.runtime.processes.heartbeat import COMPUTE, WEIGHTS
from tapestry.runtime.processes.host_values import decode, encode
from tapestry.runtime.processes.process_groups import Groups, Team
from tapestry.runtime.processes.wire import Wire, clock
from tapestry.runtime.step_messages import owners
from tapestry.runtime.target_protocol import Array, Measured, Progress, Source, Target

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


class RankExecutor(RankDevices):
    """The devices of one rank.

    Attributes:
        actions: what each step does on this rank.
        put: takes the blocks of outputs of this rank (output, box, array) where rank 0 is not to gather them.
        backend_calls: calls of torch.distributed in the last run, by name, without those that bring outputs to rank 0.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        target: Target,
        weights: Source,
        streamed: frozenset[str] = frozenset(),
        *,
        wire: Wire,
        trace: bool = False,
    ) -> None:
        self.wire, self.tracing = wire, trace
        self.slices: list[Slice] = []
        self.calls = calls_of(graph, program, wire.backend)
        self.one_device_each = wire.world == program.devices
        self.placed = {}
        self.moves: dict[int, Move] = {}
        self.actions: list[tuple[Callable[[], object], ...]] = []
        self.last: list[Move] = []
        self.put: Callable[[str, Box, Array], None] | None = None
        self.backend_calls: dict[str, int] = {}
        self.groups: Groups | None = None
        self._left: dict[str, int] = {}  # by what kernels make, the last step that reads it
        self._weights = weights
        super().__init__(graph, program, target, self._read, streamed, Route(owners(program.devices, wire.world), wire.rank))
        firsts = {r: d for d, r in reversed(list(enumerate(self.route.owner)))}
        self._local = [d - firsts[r] for d, r in enumerate(self.route.owner)]

    def _read(self, tensor: str, box: Box) -> Array:
        """A part of a weight; reading takes a while: say that this rank lives."""
        self.wire.heartbeat.at(-1, WEIGHTS)
        return self._weights(tensor, box)

    def weigh(self, array: Array) -> int:
        """Packing takes a while as well."""
        self.wire.heartbeat.at(-1, WEIGHTS)
        return super().weigh(array)

    def scheduled(self) -> None:
        """Kernels are called one by one."""

    # what is made once

    def connect(self, mesh: Sequence[int] = (), timeout: timedelta = timedelta(seconds=60)) -> None:
        """Agree on all calls with the other ranks, make process groups and buffers; once, by all ranks together.

        Args:
            mesh: sizes of the axes of the plan's mesh.
            timeout: of calls in these groups.

        Raises:
            Mismatch: a rank would make other calls.
        """
        self.bind()
        self.wire.shake_hands(signature(self.calls, self.wire.world))
        steps = self.program.steps
        done = set[int]().union(*(f.steps for f in self.folded))
        self._left = {b: -1 for at, s in enumerate(steps) if isinstance(s, Launch) and at not in done for b in s.outs}
        self._left |= {b: at for at, s in enumerate(steps) for b in reads(s) if b in self._left}
        uses, end = first_uses(self.program), len(self.program.steps)
        for at, call in self.calls.items():
            step = self.program.steps[at]
            assert isinstance(step, Transfer | Reduce)
            if isinstance(step, Transfer):
                self.moves[at] = transfer(self, at, step, uses[at], call)
            else:
                self.moves[at] = merge(self, at, step, uses[at], call)
        collective = [self.calls[at].groups for at, m in self.moves.items() if m.collective]
        self.groups = self.wire.groups(mesh, collective, timeout)
        set_times([p for m in self.moves.values() for p in m.parts], self.wire.ahead, end)
        self._place(freed_at(self.program), end)
        self._schedule(end)

    def dies_at(self, at: int, name: str) -> bool:
        """Whether a buffer is a kernel's, and a step is the last to read it."""
        return name in self._left and self._left[name] == at and name not in self.program.outputs.values()

    def team(self, call: Call) -> Team | None:
        """Those with whom this rank makes a call; ``None`` where it takes no part."""
        assert self.groups is not None
        return self.groups.team(call.groups)

    def _place(self, freed: dict[str, int], end: int) -> None:
        """Memory for all that travels."""
        buffers, arriving = MessageBuffers(), list[tuple[Move, int, str]]()
        for at, m in self.moves.items():  # what is read is freed by the plan while it may still be on its way
            for name in reads(self.program.steps[at]):
                freed[name] = max(freed.get(name, end), m.until)
        for m in self.moves.values():
            for name in m.fills:
                for d, _ in self.mine(self.buffers[name].boxes):
                    buffers.reserve(f"{d} {name}", m.since, freed.get(name, end), self.buffers[name].nbytes(d))
                    arriving.append((m, d, name))
            m.reserve(buffers)
        self.wire.staged = buffers.place(self.target.device)
        for m, d, name in arriving:
            dtype = arrays.torch_dtype(self.buffers[name].dtype)
            self.placed[d, name] = buffers.view(f"{d} {name}", dtype, shape(self.box(d, name)))
            m.into.append((d, name, self.placed[d, name]))
        for m in self.moves.values():
            m.prepare(buffers)

    def _schedule(self, end: int) -> None:
        """What each step does."""
        finished, expected = defaultdict[int, list[Move]](list), defaultdict[int, list[PointToPoint]](list)
        for m in self.moves.values():
            finished[m.use].append(m)
            for p in m.parts:
                if p.since < p.sent_at:
                    expected[p.since].append(p)
        for at in range(end):
            before: list[Callable[[], object]] = [partial(self._finish, m) if self.tracing else m.finish for m in finished[at]]
            before += [p.post_receives for p in expected[at]]
            self.actions.append((*before, partial(self._begin, at), *self._own(at), partial(self._count, self._sizes(at))))
        self.last = finished[end]

    def _own(self, at: int) -> Iterator[Callable[[], None]]:
        """The step's own work."""
        match step := self.program.steps[at]:
            case Load():
                for d, box in self.mine(self.buffers[step.buffer].boxes):
                    yield partial(self.load, step.buffer, d, box)
            case Launch():
                for d, _ in self.mine(step.blocks):
                    yield partial(self.launch, at, step, d)
            case Transfer() | Reduce():
                yield partial(self._start, self.moves[at]) if self.tracing else self.moves[at].start
            case Free():
                for d in self.devices:
                    yield partial(self._drop, d, step.buffers)

    def _sizes(self, at: int) -> tuple[tuple[int, str, int], ...]:
        """(device, buffer, bytes; -1 where they are to be measured) of what a step allocates."""
        names = [(d, n) for n in allocated(self.program.steps[at]) for d, _ in self.mine(self.buffers[n].boxes)]
        return tuple((d, n, self.buffers[n].nbytes(d) if (d, n) in self.placed else -1) for d, n in names)

    # a run

    def run(
        self, feeds: Source, progress: Progress = silent, wanted: Collection[str] | None = None
    ) -> tuple[dict[str, Array], Measured]:
        """Outputs by name on rank 0, nothing on the others; and what this rank's devices used."""
        if not self.actions:
            self.connect()
        self.wire.calls.clear()
        outputs, measured = super().run(feeds, progress, wanted)
        self.wire.drain(0, len(self.program.steps))
        return outputs, measured

    def step(self, at: int) -> None:
        """One step, once what it uses has come."""
        for action in self.actions[at]:
            action()

    def _begin(self, at: int) -> None:
        step = self.program.steps[at]
        streams = isinstance(step, Load) and self.buffers[step.buffer].tensor in self.streamed
        self.wire.heartbeat.at(at, WEIGHTS if streams else COMPUTE)

    def _start(self, move: Move) -> None:
        move.began = start = clock()
        move.start()
        self._trace(move.at, -1, MOVED, start)

    def _finish(self, move: Move) -> None:
        start = clock()
        arrived = move.finish()
        if arrived:
            self._trace(move.at, -1, FLOWN, move.began)
        self._trace(move.at, -1, MOVED, start)

    def _drop(self, device: int, names: tuple[str, ...]) -> None:
        self.held.drop(device, names)

    def _count(self, sizes: tuple[tuple[int, str, int], ...]) -> None:
        for d, name, nbytes in sizes:
            self.held.count(d, name, self.nbytes(d, name) if nbytes < 0 else nbytes)
        for d in self.devices:
            self.held.reach(d)

    def launch(self, at: int, step: Launch, device: int) -> None:
        """Run a kernel, and note when."""
        start = clock()
        super().launch(at, step, device)
        self._trace(at, device, COMPUTED, start)

    def new_at_every_run(self, name: str) -> bool:
        """What comes has a place that the next run uses again."""
        return super().new_at_every_run(name) and all(n != name for _, n in self.placed)

    def tag(self, at: int, part: int, src: int, dst: int) -> int:
        """The tag of a message between two devices in one part of a step."""
        most = max(self._local) + 1
        return ((2 * at + part) * most + self._local[src]) * most + self._local[dst]

    def _trace(self, step: int, device: int, stream: int, start: int) -> None:
        if self.tracing:
            self.slices.append(Slice(self.wire.batch, step, device, stream, start, clock()))

    # outputs: counted as ``gathered``, apart from the program's bytes

    def outputs(self, wanted: Collection[str] | None = None) -> dict[str, Array]:
        """The outputs that are wanted on rank 0, nothing on the others; with a place for them they go there from every rank."""
        for move in self.last:
            self._finish(move)
        for at, move in self.moves.items():
            step = self.program.steps[at]
            assert isinstance(step, Transfer | Reduce)
            self.measured.sent(step.kind, move.sent)
        before, self.backend_calls = self.wire.payload, dict(self.wire.calls)
        out = super().outputs(wanted) if self.put is None else self._put(wanted, self.put)
        self.wire.payload, self.wire.gathered = before, self.wire.gathered + self.wire.payload - before
        return {} if self.wire.rank else out

    def _put(self, wanted: Collection[str] | None, put: Callable[[str, Box, Array], None]) -> dict[str, Array]:
        """Every rank's blocks go where they are to be; values of the host to rank 0, which returns them."""
        hosted: dict[str, Array] = {}
        for t, name in self.program.outputs.items():
            if wanted is not None and t not in wanted:
                continue
            if self.buffers[name].dtype == HOST:
                value = self.host_output(t, name, min(self.blocks[t].values()))
                hosted |= {} if self.wire.rank else {t: value}
                continue
            for box, d in self.blocks[t].items():
                if self.route.owner[d] == self.wire.rank:
                    put(t, box, self.array(d, name))
        return hosted

    def gather(self, blocks: Sequence[tuple[int, str]]) -> list[Array]:
        """Blocks on rank 0: its own as they are, the others' in new arrays."""
        end = len(self.program.steps)
        messages, found = PointToPoint(self.wire, end, end, end), list[Array]()
        for n, (d, name) in enumerate(blocks):
            owner, dtype = self.route.owner[d], arrays.torch_dtype(self.buffers[name].dtype)
            extents = shape(self.box(d, name))
            found.append(self.array(d, name) if owner == self.wire.rank else None)
            piece = Piece(f"{n} {name}", owner, self.tag(end, 0, d, 0), extents, dtype, False)
            if owner == self.wire.rank and owner:
                messages.sends.append(replace(piece, peer=0, take=partial(self.array, d, name)))
            elif owner and not self.wire.rank:
                found[n] = torch.empty(extents, dtype=dtype, device=self.wire.device)
                messages.receives.append(replace(piece, where=partial(found.__getitem__, n)))
        messages.prepare(MessageBuffers())
        messages.post()
        messages.wait()
        return found

    def host_output(self, tensor: str, name: str, device: int) -> Array:
        """A value of the host on rank 0: first how many bytes it has, then the bytes."""
        owner = self.route.owner[device]
        value = self.array(device, name) if owner == self.wire.rank else None
        if owner == 0:
            return value
        data = encode(value.value) if value is not None else b""
        size = self._bytes_to_first(f"{tensor} size", device, len(data).to_bytes(8, "little"))
        data = self._bytes_to_first(tensor, device, data.ljust(int.from_bytes(size, "little"), b"\0"))
        return HostValue(decode(data)) if self.wire.rank == 0 else None

    def _bytes_to_first(self, what: str, device: int, data: bytes) -> bytes:
        """Bytes from a device's process to rank 0, on the host; as many are expected there as are given."""
        end, given = len(self.program.steps), torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        messages, owner = PointToPoint(self.wire, end, end, end), self.route.owner[device]
        piece = Piece(what, owner, self.tag(end, 1, device, 0), tuple(given.shape), torch.uint8, False)
        if self.wire.rank == owner:
            messages.sends.append(replace(piece, peer=0, take=lambda: given))
        elif self.wire.rank == 0:
            messages.receives.append(replace(piece, where=lambda: given))
        messages.prepare(MessageBuffers())
        messages.post()
        messages.wait()
        return given.numpy().tobytes() if self.wire.rank == 0 else data
