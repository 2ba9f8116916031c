"""What a run need not do: buffers at fixed positions in one piece of memory, and segments of kernels bound to them.

A kernel that can write where it is told has its output in an arena (`arena`), which outlives the run. A kernel whose inputs
are all there, or are resident weights, is the same call at every run; neighbours among those calls are one segment, and where
all kernels are such calls a run is little more than one segment. What is alive and how many bytes that is follows from the
program, as it does step by step: the first run counts it, and later ones hold the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import torch

from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, shape, whole
from tapestry.ir.program import Free, Launch, Load, Program, allocated
from tapestry.ir.types import HOST, numpy_dtype
from tapestry.runtime import arrays as arrays_module
from tapestry.runtime.executor import Held
from tapestry.runtime.one_process.arena import allocate, most_alive, slots
from tapestry.runtime.target_protocol import Array, Call, Given, Recorder, RecordingTarget, Run, Source, WholeRun

Positioned = Mapping[str, tuple[Array, int]]
"""Arrays by buffer, with what they count as."""


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program of one device with its kernels made and its weights loaded.

    Attributes:
        launches: by step, the kernel and the buffers that it reads; not those that are done, whose results are kept.
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
    calls: Sequence[Call] = ()

    def __call__(self, held: Held, feeds: Source) -> None:
        """Do the steps."""
        self.run()
        held.peak[0] = max(held.peak[0], held.alive[0] + self.high)
        held.drop(0, self.gone)
        for name, (array, size) in self.born.items():
            held.arrays[0][name] = array
            held.count(0, name, size)


@dataclass(frozen=True, slots=True)
class Placed:
    """What a step has made in memory of its own, copied to the position where launches that are bound read it."""

    last: int
    arrays: Mapping[str, Array]

    def __call__(self, held: Held, feeds: Source) -> None:
        """Copy it."""
        for name, array in self.arrays.items():
            array.copy_(held.arrays[0][name])
            held.arrays[0][name] = array


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where the inputs are that are copied to their positions, each by a call where the program loads it."""

    last: int
    given: Sequence[tuple[Given, str, Box]]

    def __call__(self, held: Held, feeds: Source) -> None:
        """Say where they are."""
        for given, tensor, box in self.given:
            held.arrays[0][f"given {tensor} {box}"] = given.of(feeds(tensor, box))  # stays there for the run


Action = Segment | Placed | Inputs | int


@dataclass(frozen=True)
class Schedule:
    """A program's steps: segments, inputs and results with a position, and (as numbers) steps as they are.

    Attributes:
        fixed: arrays that are the same at every run: weights, and buffers with a position, where the next run writes again.
        extra: bytes beyond the plan's peak.
        recorders: by step, the kernels that are bound.
        at_once: a whole run, from inputs to outputs as numpy has them; ``None`` where not all of it is calls.
    """

    actions: tuple[Action, ...]
    fixed: Mapping[str, Array]
    extra: int
    recorders: Mapping[int, Recorder]
    at_once: WholeRun | None


def schedule(bound: BoundProgram) -> Schedule | None:
    """How to run a program of one device; ``None`` where nothing is gained, or memory has no room for it."""
    program = bound.program
    recorders = bound.target.recorders({at: run for at, (run, _) in bound.launches.items()})
    if not recorders:
        return None
    views = _positioned(bound, recorders)
    computed = [program.buffers[n] for n in views if program.buffers[n].tensor not in bound.graph.inputs]
    for at, recorder in recorders.items():
        views.update(zip(bound.launch(at).outs, recorder.arrays, strict=True))
    wanted, tensors = slots(program, 0, bound.resident), bound.graph.tensors
    inputs = {n for n in views if program.buffers[n].tensor in bound.graph.inputs}
    ports = {n for n in (*inputs, *program.outputs.values()) if n in views}  # apart: the caller's arrays may take their place
    arena = allocate([s for s in wanted if s.name in views and s.name not in ports])
    extra = arena.size + most_alive([s for s in wanted if s.name not in views or s.name in ports]) - most_alive(wanted)
    extra = max(0, extra) + sum(b.nbytes(0) for b in computed)  # each is there twice for a moment
    if extra > bound.room:
        return None
    sizes = {s.name: s.nbytes for s in wanted if s.name in views}
    memory = _memory(program, {n: (at, sizes[n]) for n, at in arena.offsets.items()}, arena.size)
    for n in ports:
        memory |= _memory(program, {n: (0, sizes[n])}, sizes[n])
    there = {n: (view(memory[n]), sizes[n]) for n, view in views.items()}
    scratch = bound.target.scratch(bound.room - extra)
    actions = tuple(_Steps(bound, recorders, memory, there, scratch).actions())
    fixed = {n: a for n, (a, _) in (*bound.kept.items(), *there.items())}
    outputs = tuple(t for t, n in program.outputs.items() if n in fixed)
    given = [g for a in actions if isinstance(a, Inputs) for g in a.given]
    alone = len(outputs) == len(program.outputs) == len({*program.outputs.values()} - inputs)
    alone = alone and all(isinstance(a, Segment | Inputs) for a in actions)
    at_once = None
    if alone and all(box == whole(tensors[name].shape) for _, name, box in given):
        calls = [c for a in actions if isinstance(a, Segment) for c in a.calls]
        kinds = {t: (fixed[program.outputs[t]], numpy_dtype(tensors[t].dtype)) for t in outputs}
        at_once = bound.target.at_once([(name, g) for g, name, _ in given], calls, kinds)
    moved = at_once.moved if at_once else ()
    extra += scratch.nbytes + sum(sizes[n] for n in ports if program.buffers[n].tensor not in moved)
    if extra > bound.room:
        return None
    return Schedule(actions, fixed, extra, recorders, at_once)


def _positioned(bound: BoundProgram, recorders: Mapping[int, Recorder]) -> dict[str, Callable[[Array], Array]]:
    """Inputs, and results of other launches, that a kernel reads: wherever they are, it would be bound anew at every run."""
    program, out = bound.program, dict[str, Callable[[Array], Array]]()
    reads = {n for at in recorders for n in bound.launch(at).ins}
    for at, step in enumerate(program.steps):
        names = (step.buffer,) if isinstance(step, Load) else ()
        names = bound.launch(at).outs if at in bound.launches and at not in recorders else names
        for name in reads.intersection(names):
            buffer = program.buffers[name]
            box, weight = buffer.boxes[0], buffer.tensor in bound.graph.weights
            if box is not None and not weight and buffer.dtype not in (HOST, "c128"):
                out[name] = methodcaller("view", shape(box))
    return out


def _memory(program: Program, parts: Mapping[str, tuple[int, int]], nbytes: int) -> dict[str, torch.Tensor]:
    """New memory, cut into parts (offset, bytes) of buffers: flat tensors, each with a storage of its own."""
    whole, dtypes = torch.empty(nbytes, dtype=torch.uint8).numpy(), {n: program.buffers[n].dtype for n in parts}
    flat = {n: torch.as_tensor(whole[offset : offset + size]) for n, (offset, size) in parts.items()}
    return {n: x.view(arrays_module.torch_dtype(dtypes[n])) for n, x in flat.items()}


@dataclass(slots=True)
class _Steps:
    """A program's steps in order, neighbours that are fixed joined."""

    bound: BoundProgram
    recorders: Mapping[int, Recorder]
    memory: Mapping[str, Array]
    arrays: Positioned
    scratch: Any
    out: list[Action] = field(default_factory=list[Action])
    now: list[tuple[int, Call | None]] = field(default_factory=list[tuple[int, Call | None]])
    given: list[tuple[Given, str, Box]] = field(default_factory=list[tuple[Given, str, Box]])

    def actions(self) -> list[Action]:
        """All of them."""
        fixed = {**self.bound.kept, **self.arrays}
        for at, step in enumerate(self.bound.program.steps):
            quiet = isinstance(step, Free) and all(b in fixed for b in step.buffers)
            quiet = quiet or (isinstance(step, Launch) and at not in self.bound.launches)  # of weights alone: it is done
            if quiet or (isinstance(step, Load) and step.buffer in self.bound.kept):
                self.now.append((at, None))
            elif isinstance(step, Load) and step.buffer in self.arrays:
                self.now.append((at, self._copied(step)))
            elif (call := self._bound(at, fixed) if at in self.recorders else None) is not None:
                self.now.append((at, call))
            else:
                self._close()
                self.out.append(at)
                made = step.outs if isinstance(step, Launch) else ()
                placed = {n: self.arrays[n][0] for n in made if n in self.arrays}
                self.out += [Placed(at, placed)] if placed else []
        self._close()
        return [Inputs(-1, self.given), *self.out] if self.given else self.out

    def _bound(self, at: int, fixed: Positioned) -> Call | None:
        """The call of a kernel whose inputs stay where they are; ``None`` where some do not, or torch computes on the way."""
        outs, ins = self.bound.launch(at).outs, self.bound.launches[at][1]
        if not all(n in fixed for n in ins if n):
            return None
        memory = tuple(self.memory[n] for n in outs)
        return self.bound.target.bind(self.recorders[at], [fixed[n][0] if n else None for n in ins], memory, self.scratch)

    def _copied(self, step: Load) -> Call | None:
        """The call that copies an input to its position."""
        buffer, given = self.bound.program.buffers[step.buffer], self.bound.target.given(self.memory[step.buffer])
        if given is None:
            return None
        box = buffer.boxes[0]
        assert box is not None
        self.given.append((given, buffer.tensor, box))
        return given.call

    def _close(self) -> None:
        """End the segment that is open."""
        if self.now:
            self.out.append(self._segment())
            self.now.clear()

    def _segment(self) -> Segment:
        """Steps as one; sizes change as they would one by one."""
        alive, high, fixed = 0, 0, {**self.bound.kept, **self.arrays}
        born: dict[str, tuple[Array, int]] = {}
        gone: list[str] = []
        for at in dict.fromkeys(at for at, _ in self.now):
            step = self.bound.program.steps[at]
            if isinstance(step, Free):
                for name in step.buffers:
                    alive -= fixed[name][1]
                    if born.pop(name, None) is None:
                        gone.append(name)
                continue
            for name in allocated(step):
                born[name] = fixed[name]
                alive += born[name][1]
            high = max(high, alive)
        calls = [c for _, c in self.now if c is not None]
        run = self.bound.target.batch(calls) if calls else _nothing
        return Segment(self.now[-1][0], run, born, tuple(gone), high, calls)


def _nothing() -> None:
    """Of weights that stay and buffers that go there is nothing to compute."""
