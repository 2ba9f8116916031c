"""What a run need not do: buffers at places of their own in one piece of memory, and stretches of kernels bound to them.

A kernel that can write where it is told has its output in an arena (`arena`), which outlives the run. One whose inputs
are all there, or are resident weights, is the same call at every run; neighbours among those are one call. What is alive and
how many bytes that is follows from the program, as it does step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tapestry.ir.program import Free, Launch, Load, allocated
from tapestry.runtime.one_process.arena import Slot, place, slots
from tapestry.runtime.one_process.launch_chains import chains, together

if TYPE_CHECKING:
    from tapestry.ir.kernel import Box
    from tapestry.runtime.one_process.logical_devices import Held, Machine, Source

Array = Any  # the target's own array type
COPIED = 1 << 18  # bytes: an output of no more is copied out of its place


class Call(Protocol):
    """A kernel with what it works on."""

    @property
    def fixed(self) -> bool:
        """Whether it reads and writes the arrays that it was made for and nothing else."""
        ...

    def run(self) -> None:
        """Compute."""
        ...


@runtime_checkable
class Lender(Protocol):
    """A source of inputs that need not copy what is copied at once."""

    def lend(self, tensor: str, box: Box, /) -> Array:
        """An array that may be the caller's own: to be read now, and neither kept nor written."""
        ...


class Recorder(Protocol):
    """A kernel that can write into given memory."""

    @property
    def arrays(self) -> Sequence[Callable[[Array], Array]]:
        """Each output as an array, over memory of its size."""
        ...

    def bind(self, ins: Sequence[Array | None], memory: Sequence[Array]) -> Call:
        """The call for some inputs and memory for each output."""
        ...


@dataclass(slots=True)
class Stretch:
    """Steps that are one call: what is alive after them that was not before, what is gone, and the most bytes between."""

    last: int
    run: Callable[[], None]
    born: dict[str, tuple[Array, int]] = field(default_factory=dict[str, Any])
    gone: tuple[str, ...] = ()
    high: int = 0

    def __call__(self, held: Held, feeds: Source) -> None:
        """Do the steps."""
        self.run()
        held.peak[0] = max(held.peak[0], held.alive[0] + self.high)
        held.drop(0, self.gone)
        for name, (array, size) in self.born.items():
            held.arrays[0][name] = array
            held.count(0, name, size)


@dataclass(slots=True)
class Fresh:
    """A launch into places of its own, of inputs that are elsewhere at every run."""

    last: int
    recorder: Recorder
    ins: tuple[str, ...]
    outs: tuple[tuple[str, Array, int], ...]
    memory: tuple[Array, ...]

    def __call__(self, held: Held, feeds: Source) -> None:
        """Do the step."""
        arrays = held.arrays[0]
        self.recorder.bind([arrays[n] if n else None for n in self.ins], self.memory).run()
        for name, array, size in self.outs:
            arrays[name] = array
            held.count(0, name, size)
        held.reach(0)


@dataclass(slots=True)
class Given:
    """An input that is copied into its place."""

    last: int
    name: str
    tensor: str
    box: Box
    array: Array
    size: int
    copy: Callable[[Array, Array], None]

    def __call__(self, held: Held, feeds: Source) -> None:
        """Do the step."""
        lend = feeds.lend if isinstance(feeds, Lender) else feeds
        self.copy(self.array, lend(self.tensor, self.box))
        held.arrays[0][self.name] = self.array
        held.count(0, self.name, self.size)
        held.reach(0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A program's steps: stretches, launches and inputs into a place, and (as numbers) steps as they are.

    Attributes:
        placed: buffers that have a place, where the next run writes again.
        extra: bytes beyond the plan's peak.
    """

    actions: tuple[Stretch | Fresh | Given | int, ...]
    placed: frozenset[str]
    extra: int


def schedule(machine: Machine) -> Schedule | None:
    """How a machine of one device may run its program; ``None`` where nothing is gained, or memory has no room for it."""
    program = machine.program
    if program.devices != 1:
        return None
    recorders: dict[int, Recorder] = {}
    for i, bound in machine.launches.items():
        recorder = machine.target.recorder(bound[0].run)
        step = program.steps[i]
        if recorder is None or not isinstance(step, Launch):
            continue
        if all(n not in program.outputs.values() or program.buffers[n].nbytes(0) <= COPIED for n in step.outs):
            recorders[i] = recorder
    if not recorders:
        return None
    made = _inputs(machine, recorders) | {
        name: array
        for i, recorder in recorders.items()
        if isinstance(step := program.steps[i], Launch)
        for name, array in zip(step.outs, recorder.arrays, strict=True)
    }
    wanted = slots(program, 0, frozenset(machine.graph.weights) - machine.streamed)
    found = chains(program, recorders, lambda i, j: machine.target.follows(recorders[i], recorders[j]))
    for joined in (found, []) if found else ([],):  # apart, they take less where there is little room
        arena = place([s for s in together(wanted, program, joined) if s.name in made])
        extra = max(0, arena.size + _most([s for s in wanted if s.name not in made]) - _most(wanted))
        if extra <= machine.room[0] - machine.packing[0].extra:
            break
    else:
        return None
    take = machine.target.memory(arena.size)
    memory = {n: take(arena.offsets[n], program.buffers[n].nbytes(0)) for n in made}
    arrays = {n: (array(memory[n]), program.buffers[n].nbytes(0)) for n, array in made.items()}
    return Schedule(tuple(_Steps(machine, recorders, memory, arrays, joined).actions()), frozenset(made), extra)


def _inputs(machine: Machine, recorders: Mapping[int, Recorder]) -> dict[str, Callable[[Array], Array]]:
    """Inputs that are copied into a place: those that a kernel reads which knows where it is."""
    program = machine.program
    reads = {n for i in recorders if isinstance(step := program.steps[i], Launch) for n in step.ins}
    out: dict[str, Callable[[Array], Array]] = {}
    for step in program.steps:
        if not isinstance(step, Load) or step.buffer not in reads:
            continue
        buffer = program.buffers[step.buffer]
        box = buffer.boxes[0]
        array = machine.target.place(box, buffer.dtype) if box is not None and buffer.tensor in machine.graph.inputs else None
        if array:
            out[step.buffer] = array
    return out


def _most(wanted: Sequence[Slot]) -> int:
    """The most bytes that live at once."""
    events = sorted([(s.first, 1, s.nbytes) for s in wanted] + [(s.last + 1, 0, -s.nbytes) for s in wanted])
    alive = most = 0
    for _, _, change in events:
        alive += change
        most = max(most, alive)
    return most


Known = Mapping[str, tuple[Array, int]]


@dataclass(slots=True)
class _Steps:
    """A program's steps in order, neighbours that are fixed joined."""

    machine: Machine
    recorders: Mapping[int, Recorder]
    memory: Mapping[str, Array]
    arrays: Known
    chains: Sequence[tuple[int, ...]]
    out: list[Stretch | Fresh | Given | int] = field(default_factory=list[Any])
    now: list[tuple[int, Call | None]] = field(default_factory=list[Any])

    def actions(self) -> list[Stretch | Fresh | Given | int]:
        """All of them."""
        kept = {n: (a, 0) for n, a in self.machine.packing[0].arrays.items()} | self.machine.kept[0]
        known = {**kept, **self.arrays}
        for i, step in enumerate(self.machine.program.steps):
            quiet = isinstance(step, Free) and all(b in self.arrays for b in step.buffers)
            if quiet or (isinstance(step, Load) and step.buffer in self.machine.kept[0]):
                self.now.append((i, None))
            elif i in self.recorders:
                assert isinstance(step, Launch)
                self._launch(i, step, known)
            else:
                self._close()
                self.out.append(self._given(i, step) if isinstance(step, Load) and step.buffer in self.arrays else i)
        self._close()
        return self.out

    def _launch(self, i: int, step: Launch, known: Known) -> None:
        ins, places = self.machine.launches[i][0].ins, tuple(self.memory[n] for n in step.outs)
        held = [known[n][0] if n else None for n in ins] if all(n in known for n in ins if n) else None
        call = None if held is None else self.recorders[i].bind(held, places)
        if call is not None and call.fixed:
            self.now.append((i, call))
            return
        self._close()
        self.out.append(Fresh(i, self.recorders[i], ins, tuple((n, *self.arrays[n]) for n in step.outs), places))

    def _given(self, i: int, step: Load) -> Given:
        buffer = self.machine.program.buffers[step.buffer]
        box = buffer.boxes[0]
        assert box is not None
        return Given(i, step.buffer, buffer.tensor, box, *self.arrays[step.buffer], self.machine.target.copy)

    def _close(self) -> None:
        if self.now:
            self.out.append(_stretch(self.machine, self.now, self._calls(), self.arrays, self.machine.kept[0]))
            self.now.clear()

    def _calls(self) -> list[Call]:
        """The calls of the stretch, those of a chain as one."""
        calls = {i: c for i, c in self.now if c is not None}
        for chain in self.chains:
            if all(i in calls for i in chain):
                one = self.machine.target.chain([calls[i] for i in chain])
                if one is not None:
                    calls = {i: one if i == chain[0] else c for i, c in calls.items() if i == chain[0] or i not in chain}
        return list(calls.values())


def _stretch(
    machine: Machine, steps: Sequence[tuple[int, Call | None]], calls: Sequence[Call], arrays: Known, kept: Known
) -> Stretch:
    """Steps as one; sizes change as they would one by one."""
    alive = high = 0
    born: dict[str, tuple[Array, int]] = {}
    gone: list[str] = []
    for i, _ in steps:
        step = machine.program.steps[i]
        if isinstance(step, Free):
            for name in step.buffers:
                alive -= arrays[name][1]
                if born.pop(name, None) is None:
                    gone.append(name)
            continue
        for name in allocated(step):
            born[name] = arrays[name] if name in arrays else kept[name]
            alive += born[name][1]
        high = max(high, alive)
    return Stretch(steps[-1][0], machine.target.batch(calls) if calls else _nothing, born, tuple(gone), high)


def _nothing() -> None:
    """Of weights that stay and buffers that go there is nothing to compute."""
