"""N logical devices in one process, each with its own buffers and nothing else.

Knows Programs, not plans. What computes a kernel, merges states and reads weights is handed in as a `Target`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, Kernel, intersect
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Transfer, allocated, transfer_bytes
from tapestry.runtime.one_process.packing import Packing, pack, renamed
from tapestry.runtime.one_process.static_schedule import Recorder, Schedule, schedule

Array = Any  # the target's own array type
Run = Callable[[Sequence[Array | None], Sequence[Array]], list[Array]]


class Target(Protocol):
    """What a code generator gives to the runtime."""

    def kernel(self, graph: Graph, kernel: Kernel) -> Run:
        """A function that computes one block."""
        ...

    def merge(self, monoid: str, states: Sequence[Sequence[Array]]) -> list[Array]:
        """Merge the states (one list of fields per device) in order."""
        ...

    def slice(self, array: Array, box: Box, origin: Box) -> Array:
        """A copy of a box of an array that holds ``origin``."""
        ...

    def assemble(self, box: Box, dtype: str, pieces: Sequence[tuple[Box, Array]]) -> Array:
        """A new array of a box, filled from pieces that cover it."""
        ...

    def full(self, box: Box, dtype: str, value: float) -> Array:
        """A new array of a box with one value everywhere."""
        ...

    def nbytes(self, array: Array) -> int:
        """Bytes of memory that an array really occupies."""
        ...

    def packs(self, run: Run) -> Mapping[int, tuple[Hashable, Callable[[Array], Array]]]:
        """Reads of a kernel that may be weights packed beforehand: position to (key, function); equal keys, equal copies."""
        ...

    def packed(self, run: Run) -> Run:
        """The kernel that takes all of `packs` packed."""
        ...

    def recorder(self, run: Run) -> Recorder | None:
        """The kernel as one that writes where it is told, if it can."""
        ...

    def follows(self, before: Any, after: Any) -> int | None:
        """Of two recorders, the input that the second one may read while the first one makes it, where that pays."""
        ...

    def chain(self, calls: Sequence[Any]) -> Any | None:
        """Calls of recorders of which each follows the one before, as one call; ``None`` where they cannot be that."""
        ...

    def place(self, box: Box, dtype: str) -> Callable[[Array], Array] | None:
        """Memory of a box's size as an array of it; ``None`` where inputs of that type have no place of their own."""
        ...

    def copy(self, to: Array, array: Array) -> None:
        """Fill an array with another one's values."""
        ...

    def memory(self, nbytes: int) -> Callable[[int, int], Array]:
        """New memory: a function that gives a part of it, by offset and bytes."""
        ...

    def batch(self, calls: Sequence[Any]) -> Callable[[], None]:
        """Calls of recorders one after another, as one."""
        ...


Source = Callable[[str, Box], Array]
"""Data of a weight or graph input: (tensor, box) to an array of the target."""


@dataclass(slots=True)
class Measured:
    """What a run really used: peak bytes of buffers per device, and (count, bytes) per kind of transfer.

    ``packed`` is what packed weights take beyond the plan's buffers, for as long as they stay loaded; ``gaps`` what buffers
    with places of their own (`runtime.one_process.static_schedule`) take beyond the plan's peak.
    """

    peak: list[int]
    transfers: dict[str, tuple[int, int]] = field(default_factory=dict)
    packed: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)

    def sent(self, kind: str, nbytes: int) -> None:
        """Count one transfer."""
        count, total = self.transfers.get(kind, (0, 0))
        self.transfers[kind] = (count + 1, total + nbytes)


@dataclass(frozen=True, slots=True)
class _Bound:
    """A launch on one device."""

    device: int
    run: Run
    ins: tuple[str, ...]


@dataclass(slots=True)
class Held:
    """What the devices hold in the course of a run, and how many bytes of it."""

    arrays: list[dict[str, Array]]
    sizes: list[dict[str, int]]
    alive: list[int]
    peak: list[int]

    @classmethod
    def of(cls, machine: Machine) -> Held:
        """Before the first step: nothing but copies of weights, which count as packed."""
        n = machine.program.devices
        return cls([{b: p.arrays[b] for b in p.copies} for p in machine.packing], [{} for _ in range(n)], [0] * n, [0] * n)

    def reach(self, device: int) -> None:
        """A step has been done."""
        self.peak[device] = max(self.peak[device], self.alive[device])

    def count(self, device: int, name: str, size: int) -> None:
        """A buffer has been allocated."""
        self.sizes[device][name] = size
        self.alive[device] += size

    def drop(self, device: int, names: Sequence[str]) -> None:
        """Buffers are freed, where they are."""
        arrays, sizes, freed = self.arrays[device], self.sizes[device], 0
        for name in names:
            if name in arrays:
                del arrays[name]
                freed += sizes.pop(name)
        self.alive[device] -= freed


class Machine:
    """Runs one Program any number of times; weights stay loaded between runs, but for those that are streamed.

    Attributes:
        devices: those that this process runs: all of them, but for `runtime.processes.distributed`.
        room: bytes that packed weights may take on each device beyond what the plan holds; to be set before the first run.
    """

    def __init__(
        self, graph: Graph, program: Program, target: Target, weights: Source, streamed: frozenset[str] = frozenset(),
        devices: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.program, self.target = graph, program, target
        self.weights, self.streamed = weights, streamed
        self.devices = tuple(range(program.devices)) if devices is None else tuple(devices)
        self.room = [0] * program.devices
        self.alone = devices is None
        self.launches: dict[int, list[_Bound]] = {}
        self.packing: list[Packing] = []
        self.kept: list[dict[str, tuple[Array, int]]] = []
        self.schedule: Schedule | None = None  # of a machine that runs all devices
        self.busy = Lock()  # places of buffers are the machine's, not the run's
        self.steps = [(step, allocated(step)) for step in program.steps]
        self._computed = {b for step in program.steps if not isinstance(step, Load) for b in allocated(step)}
        self.resident: list[dict[str, Array]] = [{} for _ in range(program.devices)]
        for step in program.steps:
            if isinstance(step, Load) and program.buffers[step.buffer].tensor in set(graph.weights) - streamed:
                for d, box in self._mine(program.buffers[step.buffer].boxes):
                    self.resident[d][step.buffer] = weights(program.buffers[step.buffer].tensor, box)

    def _mine(self, boxes: Sequence[Box | None]) -> Iterator[tuple[int, Box]]:
        """The devices of this process that take part, each with its box."""
        return ((d, box) for d in self.devices if (box := boxes[d]) is not None)

    def run(
        self, feeds: Source, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[dict[str, Array], Measured]:
        """Outputs by name, gathered to the host, and what the run used."""
        self.bind()
        with self.busy:
            memory = Held.of(self)
            measured = Measured(memory.peak, packed=[p.extra for p in self.packing])
            total = len(self.steps)
            if self.schedule is None:
                for i in range(total):
                    self._step(i, memory, feeds, measured)
                    progress(i + 1, total)
            else:
                measured.gaps.append(self.schedule.extra)
                for action in self.schedule.actions:
                    if isinstance(action, int):
                        self._step(action, memory, feeds, measured)
                    else:
                        action(memory, feeds)
                    progress((action if isinstance(action, int) else action.last) + 1, total)
            return {t: self._gather(t, b, memory.arrays) for t, b in self.program.outputs.items()}, measured

    def _step(self, i: int, memory: Held, feeds: Source, measured: Measured) -> None:
        """One step on all devices."""
        step, new = self.steps[i]
        match step:
            case Launch():
                self._launch(i, step, memory.arrays)
            case Load():
                self._load(step, memory.arrays, feeds)
            case Free():
                for d in range(self.program.devices):
                    memory.drop(d, step.buffers)
                return
            case Transfer():
                self._transfer(step, memory.arrays, measured)
            case Reduce():
                self._reduce(step, memory.arrays)
                measured.sent(step.kind, transfer_bytes(step, self.program))
        for d, held in enumerate(memory.arrays):
            kept = self.kept[d]
            for name in new:
                if name in held:
                    memory.count(d, name, kept[name][1] if name in kept else self.target.nbytes(held[name]))
            memory.reach(d)

    def bind(self) -> None:
        """Make every kernel and pack the weights, once: all that later runs need not do."""
        if self.packing:
            return
        kernels: dict[tuple[int, int], Run] = {}
        for i, step in enumerate(self.program.steps):
            for d, _ in self._mine(step.blocks) if isinstance(step, Launch) else ():
                assert isinstance(step, Launch)
                kernels[i, d] = self.target.kernel(self.graph, kernel_of(step, d, self.program))
        for d in range(self.program.devices):
            wanted = {i: self.target.packs(k) for (i, e), k in kernels.items() if e == d}
            packing = pack(self.program, wanted, self.resident[d], self._weigh, self.room[d])
            self.packing.append(packing)
        for (i, d), kernel in kernels.items():
            step = self.program.steps[i]
            assert isinstance(step, Launch)
            names = self.packing[d].names.get(i)
            kernel, ins = (self.target.packed(kernel), renamed(step.ins, names)) if names else (kernel, step.ins)
            self.launches.setdefault(i, []).append(_Bound(d, kernel, ins))
        for d, p in enumerate(self.packing):  # of a packed weight count the plan's bytes: the rest is in `Measured.packed`
            sizes = {b: self.program.buffers[b].nbytes(d) for b in p.arrays if b not in p.copies}
            plain = {b: (a, self.target.nbytes(a)) for b, a in self.resident[d].items()}
            self.kept.append(plain | {b: (p.arrays[b], size) for b, size in sizes.items()})
        self.schedule = schedule(self) if self.alone else None

    def _weigh(self, array: Array) -> int:
        """Bytes of a weight that is being packed."""
        return self.target.nbytes(array)

    def weight_bytes(self) -> int:
        """Bytes of all weights that stay loaded, packed ones included."""
        packed = (a for p in self.packing for a in p.arrays.values())
        return sum(self.target.nbytes(a) for a in (*packed, *(a for held in self.resident for a in held.values())))

    def _load(self, step: Load, memory: list[dict[str, Array]], feeds: Source) -> None:
        buffer = self.program.buffers[step.buffer]
        source = self.weights if buffer.tensor in self.streamed else feeds
        for d, box in self._mine(buffer.boxes):
            known = self.kept[d].get(step.buffer)
            memory[d][step.buffer] = source(buffer.tensor, box) if known is None else known[0]

    def _launch(self, at: int, step: Launch, memory: list[dict[str, Array]]) -> None:
        for b in self.launches.get(at, ()):
            if b.device not in self.devices:
                continue
            held = memory[b.device]
            outs = b.run([held[n] if n else None for n in b.ins], [held[s] for s in step.states])
            held.update(zip(step.outs, outs, strict=True))

    def _transfer(self, step: Transfer, memory: list[dict[str, Array]], measured: Measured) -> None:
        src, dst = self.program.buffers[step.src], self.program.buffers[step.dst]
        pieces: list[list[tuple[Box, Array]]] = [[] for _ in range(self.program.devices)]
        sent = 0
        for m in step.messages:
            origin = src.boxes[m.src]
            assert origin is not None
            message = self.target.slice(memory[m.src][step.src], m.box, origin)
            sent += self.target.nbytes(message)
            pieces[m.dst].append((m.box, message))
        for d, box in enumerate(dst.boxes):
            if box is None:
                continue
            own = src.boxes[d]
            common = None if own is None else intersect(own, box)
            if own is not None and common is not None:
                pieces[d].append((common, self.target.slice(memory[d][step.src], common, own)))
            memory[d][step.dst] = self.target.assemble(box, dst.dtype, pieces[d])
        measured.sent(step.kind, sent)

    def _reduce(self, step: Reduce, memory: list[dict[str, Array]]) -> None:
        op = self.graph.ops[step.op]
        monoid = getattr(op, "monoid", None)
        assert monoid is not None
        dsts = [self.program.buffers[b] for b in step.dsts]
        for group in step.groups:
            done: dict[tuple[Box, ...], list[Array]] = {}
            for d in group:
                boxes = tuple(_box(b.boxes[d]) for b in dsts)
                if boxes not in done:
                    done[boxes] = self.target.merge(monoid, [self._states(step, e, boxes, memory) for e in group])
                fresh = [self.target.slice(f, box, box) for f, box in zip(done[boxes], boxes, strict=True)]
                memory[d].update(zip(step.dsts, fresh, strict=True))

    def _states(self, step: Reduce, device: int, boxes: tuple[Box, ...], memory: list[dict[str, Array]]) -> list[Array]:
        """What one device gives to a merge: slices of its states, and counts that everybody knows."""
        out: list[Array] = []
        for k, (s, box) in enumerate(zip(step.srcs, boxes, strict=True)):
            b = self.program.buffers[s]
            if step.known and step.known[k]:
                out.append(self.target.full(box, b.dtype, step.known[k][device]))
            else:
                out.append(self.target.slice(memory[device][s], box, _box(b.boxes[device])))
        return out

    def _gather(self, tensor: str, name: str, memory: list[dict[str, Array]]) -> Array:
        buffer = self.program.buffers[name]
        pieces = {box: memory[d][name] for d, box in enumerate(buffer.boxes) if box is not None}
        whole = tuple((0, n) for n in self.graph.tensors[tensor].shape)
        placed = self.schedule is not None and name in self.schedule.placed
        if whole in pieces and name in self._computed and not placed:  # new at every run: it may be handed out as it is
            return pieces[whole]
        return self.target.assemble(whole, buffer.dtype, list(pieces.items()))


def kernel_of(step: Launch, device: int, program: Program) -> Kernel:
    """What a code generator needs to know of one device's launch."""
    block = step.blocks[device]
    assert block is not None
    ins = tuple(program.buffers[b].boxes[device] if b else None for b in step.ins)
    outs = tuple(_box(program.buffers[b].boxes[device]) for b in step.outs)
    return Kernel(op=step.op, mode=step.mode, block=block, ins=ins, outs=outs)


def _box(box: Box | None) -> Box:
    assert box is not None
    return box
