"""What a run need not do: buffers at places of their own in one piece of memory, and stretches of kernels bound to them.

A kernel that can write where it is told has its output in an arena (`runtime.arena`), which outlives the run. One whose inputs
are all there, or are resident weights, is the same call at every run; neighbours among those are one call. What is alive and
how many bytes that is follows from the program, as it does step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tapestry.ir.program import Free, Launch, Load, allocated
from tapestry.runtime.arena import Slot, place, slots

if TYPE_CHECKING:
    from tapestry.runtime.local import Held, Machine

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

    def __call__(self, held: Held) -> None:
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

    def __call__(self, held: Held) -> None:
        """Do the step."""
        arrays = held.arrays[0]
        self.recorder.bind([arrays[n] if n else None for n in self.ins], self.memory).run()
        for name, array, size in self.outs:
            arrays[name] = array
            held.count(0, name, size)
        held.reach(0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A program's steps: stretches, launches into a place, and (as numbers) steps as they are.

    Attributes:
        placed: buffers that have a place, where the next run writes again.
        extra: bytes beyond the plan's peak.
    """

    actions: tuple[Stretch | Fresh | int, ...]
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
    made = {
        name: array
        for i, recorder in recorders.items()
        if isinstance(step := program.steps[i], Launch)
        for name, array in zip(step.outs, recorder.arrays, strict=True)
    }
    wanted = slots(program, 0, frozenset(machine.graph.weights) - machine.streamed)
    arena = place([s for s in wanted if s.name in made])
    extra = max(0, arena.size + _most([s for s in wanted if s.name not in made]) - _most(wanted))
    if extra > machine.room[0] - machine.packing[0].extra:
        return None
    take = machine.target.memory(arena.size)
    memory = {n: take(arena.offsets[n], program.buffers[n].nbytes(0)) for n in made}
    arrays = {n: (array(memory[n]), program.buffers[n].nbytes(0)) for n, array in made.items()}
    kept = {n: (a, 0) for n, a in machine.packing[0].arrays.items()} | machine.kept[0]
    return Schedule(tuple(_actions(machine, recorders, memory, arrays, kept)), frozenset(made), extra)


def _most(wanted: Sequence[Slot]) -> int:
    """The most bytes that live at once."""
    events = sorted([(s.first, 1, s.nbytes) for s in wanted] + [(s.last + 1, 0, -s.nbytes) for s in wanted])
    alive = most = 0
    for _, _, change in events:
        alive += change
        most = max(most, alive)
    return most


Known = Mapping[str, tuple[Array, int]]


def _actions(
    machine: Machine, recorders: Mapping[int, Recorder], memory: Mapping[str, Array], arrays: Known, kept: Known
) -> list[Stretch | Fresh | int]:
    """Steps in order, neighbours that are fixed joined."""
    program, out = machine.program, list[Stretch | Fresh | int]()
    known, now = {**kept, **arrays}, list[tuple[int, Call | None]]()

    def close() -> None:
        if now:
            out.append(_stretch(machine, now, arrays, machine.kept[0]))
            now.clear()

    for i, step in enumerate(program.steps):
        if isinstance(step, Free) and all(b in arrays for b in step.buffers):
            now.append((i, None))
            continue
        if isinstance(step, Load) and step.buffer in machine.kept[0]:
            now.append((i, None))
            continue
        if i not in recorders:
            close()
            out.append(i)
            continue
        assert isinstance(step, Launch)
        ins, places = machine.launches[i][0].ins, tuple(memory[n] for n in step.outs)
        held = [known[n][0] if n else None for n in ins] if all(n in known for n in ins if n) else None
        call = None if held is None else recorders[i].bind(held, places)
        if call is not None and call.fixed:
            now.append((i, call))
            continue
        close()
        out.append(Fresh(i, recorders[i], ins, tuple((n, *arrays[n]) for n in step.outs), places))
    close()
    return out


def _stretch(machine: Machine, steps: Sequence[tuple[int, Call | None]], arrays: Known, kept: Known) -> Stretch:
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
    calls = [c for _, c in steps if c is not None]
    return Stretch(steps[-1][0], machine.target.batch(calls) if calls else _nothing, born, tuple(gone), high)


def _nothing() -> None:
    """Of weights that stay and buffers that go there is nothing to compute."""
