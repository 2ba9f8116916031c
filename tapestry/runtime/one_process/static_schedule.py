"""What a run need not do: buffers at fixed positions in one piece of memory, and segments of kernels bound to them.

A kernel that can write where it is told has its output in an arena (`arena`), which outlives the run. A kernel whose inputs
are all there, or are resident weights, is the same call at every run; neighbours among those calls are one segment. What is
alive and how many bytes that is follows from the program, as it does step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, shape
from tapestry.ir.program import Free, Launch, Load, Program, allocated
from tapestry.runtime.executor import Held
from tapestry.runtime.one_process.arena import allocate, most_alive, slots
from tapestry.runtime.one_process.launch_chains import chains, together
from tapestry.runtime.target_protocol import Array, Call, Recorder, RecordingTarget, Run, Source

COPIED = 1 << 18  # bytes: an output of no more is copied out of its position
Positioned = Mapping[str, tuple[Array, int]]
"""Arrays by buffer, with what they count as."""


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program of one device with its kernels made and its weights loaded.

    Attributes:
        launches: by step, the kernel and the buffers that it reads.
        resident: weights that stay loaded.
        kept: their arrays by buffer, with what they count as.
        room: bytes that may be taken beyond the plan.
    """

    graph: Graph
    program: Program
    target: RecordingTarget
    launches: Mapping[int, tuple[Run, tuple[str, ...]]]
    resident: frozenset[str]
    kept: Positioned
    room: int

    def launch(self, at: int) -> Launch:
        """A step that is a launch."""
        step = self.program.steps[at]
        assert isinstance(step, Launch)
        return step


@dataclass(slots=True)
class Segment:
    """Steps that are one call.

    Attributes:
        born: buffers that are alive after them and were not before, with their bytes.
        gone: buffers that are freed.
        high: the most bytes that are alive in between, beyond those before.
    """

    last: int
    run: Callable[[], None]
    born: Positioned
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
class BoundLaunch:
    """A launch into memory at a fixed position, of inputs that are elsewhere at every run."""

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
class StagedInput:
    """An input that is copied to its position."""

    last: int
    name: str
    tensor: str
    box: Box
    array: Array
    size: int

    def __call__(self, held: Held, feeds: Source) -> None:
        """Do the step."""
        self.array.copy_(feeds(self.tensor, self.box))
        held.arrays[0][self.name] = self.array
        held.count(0, self.name, self.size)
        held.reach(0)


Action = Segment | BoundLaunch | StagedInput | int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A program's steps: segments, launches and inputs with a position, and (as numbers) steps as they are.

    Attributes:
        placed: buffers that have a position, where the next run writes again.
        extra: bytes beyond the plan's peak.
    """

    actions: tuple[Action, ...]
    placed: frozenset[str]
    extra: int


def schedule(bound: BoundProgram) -> Schedule | None:
    """How to run a program of one device; ``None`` where nothing is gained, or memory has no room for it."""
    program, recorders = bound.program, dict[int, Recorder]()
    for at, (run, _) in bound.launches.items():
        recorder, outs = bound.target.recorder(run), bound.launch(at).outs
        if recorder and all(n not in program.outputs.values() or program.buffers[n].nbytes(0) <= COPIED for n in outs):
            recorders[at] = recorder
    if not recorders:
        return None
    views = _inputs(bound, recorders)
    for at, recorder in recorders.items():
        views.update(zip(bound.launch(at).outs, recorder.arrays, strict=True))
    wanted = slots(program, 0, bound.resident)
    together_at = chains(program, recorders, lambda i, j: bound.target.follows(recorders[i], recorders[j]))
    for joined in (together_at, []) if together_at else ([],):  # apart, they take less where there is little room
        arena = allocate([s for s in together(wanted, program, joined) if s.name in views])
        extra = max(0, arena.size + most_alive([s for s in wanted if s.name not in views]) - most_alive(wanted))
        if extra <= bound.room:
            break
    else:
        return None
    memory = _memory({n: (arena.offsets[n], program.buffers[n].nbytes(0)) for n in views}, arena.size)
    arrays = {n: (view(memory[n]), program.buffers[n].nbytes(0)) for n, view in views.items()}
    return Schedule(tuple(_Steps(bound, recorders, memory, arrays, joined).actions()), frozenset(views), extra)


def _inputs(bound: BoundProgram, recorders: Mapping[int, Recorder]) -> dict[str, Callable[[Array], Array]]:
    """Inputs of f32 that are copied to a position: those that a kernel reads which can be bound to it."""
    program, out = bound.program, dict[str, Callable[[Array], Array]]()
    reads = {n for at in recorders for n in bound.launch(at).ins}
    for step in program.steps:
        if not isinstance(step, Load) or step.buffer not in reads:
            continue
        buffer = program.buffers[step.buffer]
        box = buffer.boxes[0]
        if box is not None and buffer.tensor in bound.graph.inputs and buffer.dtype == "f32":
            out[step.buffer] = partial(_viewed, extents=shape(box))
    return out


def _viewed(memory: torch.Tensor, extents: tuple[int, ...]) -> torch.Tensor:
    return memory.view(extents)


def _memory(parts: Mapping[str, tuple[int, int]], nbytes: int) -> dict[str, torch.Tensor]:
    """New memory, cut into parts (offset, bytes): flat tensors of f32, each with a storage of its own."""
    whole = torch.empty(nbytes, dtype=torch.uint8).numpy()
    return {n: torch.as_tensor(whole[offset : offset + size].view(np.float32)) for n, (offset, size) in parts.items()}


@dataclass(slots=True)
class _Steps:
    """A program's steps in order, neighbours that are fixed joined."""

    bound: BoundProgram
    recorders: Mapping[int, Recorder]
    memory: Mapping[str, Array]
    arrays: Positioned
    chains: Sequence[tuple[int, ...]]
    out: list[Action] = field(default_factory=list[Action])
    now: list[tuple[int, Call | None]] = field(default_factory=list[tuple[int, Call | None]])

    def actions(self) -> list[Action]:
        """All of them."""
        fixed = {**self.bound.kept, **self.arrays}
        for at, step in enumerate(self.bound.program.steps):
            quiet = isinstance(step, Free) and all(b in self.arrays for b in step.buffers)
            if quiet or (isinstance(step, Load) and step.buffer in self.bound.kept):
                self.now.append((at, None))
            elif at in self.recorders:
                self._launch(at, fixed)
            else:
                self._close()
                self.out.append(self._staged(at, step) if isinstance(step, Load) and step.buffer in self.arrays else at)
        self._close()
        return self.out

    def _launch(self, at: int, fixed: Positioned) -> None:
        outs, ins = self.bound.launch(at).outs, self.bound.launches[at][1]
        memory = tuple(self.memory[n] for n in outs)
        if all(n in fixed for n in ins if n):
            call = self.recorders[at].bind([fixed[n][0] if n else None for n in ins], memory)
            if call.fixed:
                self.now.append((at, call))
                return
        self._close()
        self.out.append(BoundLaunch(at, self.recorders[at], ins, tuple((n, *self.arrays[n]) for n in outs), memory))

    def _staged(self, at: int, step: Load) -> StagedInput:
        buffer = self.bound.program.buffers[step.buffer]
        box = buffer.boxes[0]
        assert box is not None
        return StagedInput(at, step.buffer, buffer.tensor, box, *self.arrays[step.buffer])

    def _close(self) -> None:
        """End the segment that is open."""
        if self.now:
            self.out.append(self._segment())
            self.now.clear()

    def _calls(self) -> list[Call]:
        """The calls of the segment, those of a chain as one."""
        calls = {at: c for at, c in self.now if c is not None}
        for chain in self.chains:
            if all(at in calls for at in chain):
                one = self.bound.target.chain([calls[at] for at in chain])
                if one is not None:
                    calls = {at: one if at == chain[0] else c for at, c in calls.items() if at == chain[0] or at not in chain}
        return list(calls.values())

    def _segment(self) -> Segment:
        """Steps as one; sizes change as they would one by one."""
        alive = high = 0
        born: dict[str, tuple[Array, int]] = {}
        gone: list[str] = []
        for at, _ in self.now:
            step = self.bound.program.steps[at]
            if isinstance(step, Free):
                for name in step.buffers:
                    alive -= self.arrays[name][1]
                    if born.pop(name, None) is None:
                        gone.append(name)
                continue
            for name in allocated(step):
                born[name] = self.arrays[name] if name in self.arrays else self.bound.kept[name]
                alive += born[name][1]
            high = max(high, alive)
        calls = self._calls()
        return Segment(self.now[-1][0], self.bound.target.batch(calls) if calls else _nothing, born, tuple(gone), high)


def _nothing() -> None:
    """Of weights that stay and buffers that go there is nothing to compute."""
