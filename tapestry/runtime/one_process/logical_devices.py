"""N logical devices in one process, each with its own arrays: kernels return new ones, transfers and merges fill new ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch

from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, shape
from tapestry.ir.program import Launch, Load, Program, allocated
from tapestry.runtime import arrays
from tapestry.runtime.executor import Executor, Held, Route, kernel_of, silent
from tapestry.runtime.one_process.held_weights import HeldWeights
from tapestry.runtime.one_process.packing import Packing, pack
from tapestry.runtime.one_process.static_schedule import BoundProgram, Schedule, schedule
from tapestry.runtime.one_process.weights_only import Folded, fold
from tapestry.runtime.target_protocol import Array, Measured, PackableKernel, Progress, RecordingTarget, Run, Source, Target


def renamed(ins: Sequence[str], names: Mapping[int, str]) -> tuple[str, ...]:
    """The buffers that a launch reads, with packed weights in place of some."""
    return tuple(names.get(k, b) for k, b in enumerate(ins))


class LocalExecutor(Executor):
    """Runs one Program any number of times; weights stay loaded between runs, but for those that are streamed.

    Attributes:
        kernels: by step and device, as the target made them.
        launches: by step and device, the kernel and the buffers that it reads (packed weights in place of some).
        weights_held: weights by buffer, as the Program has them; those that are read packed alone are dropped.
        equal: launches by step and device, with a number that is the same where kernels are one function.
        packed: packed weights of the model by bytes, type, box and key; several executors may share it.
        counted: what an earlier run used, which later ones use as well.
        dynamic: whether there are values whose bytes follow from the run.
        reads_late: weights that are there packed are not read again; by default all are read, and checked, at once.
        kept: per device, the arrays that `load` takes and what they count as: weights, packed or not.
        folded: per device, the launches of weights alone, which were done when kernels were bound.
        folds: whether there are any. Sizes of one model, which are one function each, share no results.
    """

    reads_late = False
    folds = True

    def __init__(
        self,
        graph: Graph,
        program: Program,
        target: Target,
        weights: Source,
        streamed: frozenset[str] = frozenset(),
        route: Route | None = None,
    ) -> None:
        super().__init__(graph, program, target, weights, streamed, route)
        self.kernels: dict[tuple[int, int], Run] = {}
        self.launches: dict[tuple[int, int], tuple[Run, tuple[str, ...]]] = {}
        self.equal: Mapping[tuple[int, int], int] = {}
        self.packing: list[Packing] = []
        self.folded: list[Folded] = []
        self.packed: dict[Hashable, Array] = {}
        self.counted: Measured | None = None
        self.kept: list[dict[str, tuple[Array, int]]] = []
        self.schedule: Schedule | None = None
        self.feeds: Source = weights
        self.busy = Lock()  # positions of buffers are the executor's, not the run's
        self._computed = {b for step in program.steps if not isinstance(step, Load) for b in allocated(step)}
        self.weights_held = [HeldWeights() for _ in range(program.devices)]
        for step in program.steps:
            if isinstance(step, Load) and program.buffers[step.buffer].tensor in self.resident:
                for d, box in self.mine(program.buffers[step.buffer].boxes):
                    tensor, held = program.buffers[step.buffer].tensor, self.weights_held[d]
                    held.promise(step.buffer, partial(weights, tensor, box))
                    if not self.reads_late:
                        held[step.buffer]

    def run(
        self, feeds: Source, progress: Progress = silent, wanted: Collection[str] | None = None
    ) -> tuple[dict[str, Array], Measured]:
        """Outputs by name (those that are wanted, by default all), and what the run used."""
        self.bind()
        with self.busy:
            self.begin(feeds)
            try:
                self._steps(feeds, progress)
                return self.outputs(wanted), self.measured
            finally:  # nothing of a run stays beyond it
                self.held, self.feeds = Held.nothing(self.program.devices), self.weights

    def _steps(self, feeds: Source, progress: Progress) -> None:
        total = len(self.program.steps)
        actions = range(total) if self.schedule is None else self.schedule.actions
        for action in actions:
            if isinstance(action, int):
                self.step(action)
            else:
                action(self.held, feeds)
            progress((action if isinstance(action, int) else action.last) + 1, total)
        self.counted = self.measured

    def at_once(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], Measured] | None:
        """A run that is nothing but calls on fixed addresses, once one has been counted."""
        if self.counted is None or self.schedule is None or self.schedule.at_once is None:
            return None
        with self.busy:
            return self.schedule.at_once(feeds), self.counted

    def begin(self, feeds: Source) -> None:
        """Before the first step nothing is held but copies of weights, which count as packed."""
        self.feeds, self.held = feeds, Held.nothing(self.program.devices)
        for held, p in zip(self.held.arrays, self.packing, strict=True):
            held.update((b, p.arrays[b]) for b in p.copies)
        gaps = [] if self.schedule is None else [self.schedule.extra]
        self.measured = Measured(self.held.peak, packed=[p.extra for p in self.packing], gaps=gaps)

    def bind(self) -> None:
        """Make every kernel and pack the weights, once: all that later runs need not do."""
        if self.packing:
            return
        self._make_kernels()
        self.folded.clear()
        for d in range(self.program.devices):
            self._ready(d)
        for (at, d), run in self.kernels.items():
            step, names = self.program.steps[at], self.packing[d].names.get(at)
            assert isinstance(step, Launch)
            if names and isinstance(run, PackableKernel):
                self.launches[at, d] = run.packed, renamed(step.ins, names)
            else:
                self.launches[at, d] = run, step.ins
        for d, p in enumerate(self.packing):  # of a packed weight count the plan's bytes: the rest is in `Measured.packed`
            sizes = {b: self.buffers[b].nbytes(d) for b in p.arrays if b not in p.copies}
            plain = {b: (a, arrays.nbytes(a)) for b, a in self.weights_held[d].items()}
            plain |= {b: (a, self.buffers[b].nbytes(d)) for b, a in self.folded[d].arrays.items()}
            self.kept.append(plain | {b: (p.arrays[b], size) for b, size in sizes.items()})
        self.schedule, self.counted = self.scheduled(), None

    def _ready(self, d: int) -> None:
        """Fold and pack what one device has of the weights."""
        kernels = {at: run for (at, e), run in self.kernels.items() if e == d}
        plain, held, room = partial(self._plain_bytes, d), self.weights_held[d], self.room[d]
        may = self.folds and not self.equal
        empty = partial(torch.empty, 0, device=self.target.device)
        self.folded.append(fold(self.graph, self.program, kernels, held, plain, room, empty) if may else Folded())
        wanted = {at: k.packs for at, k in kernels.items() if isinstance(k, PackableKernel) and k.packs}
        more = self.folded[d].extra
        packing = pack(self.program, wanted, held, (self.weigh, plain), room - more, partial(self._packed, d))
        packing.extra += more
        self.packing.append(packing)

    def _make_kernels(self) -> None:
        made: dict[int, Run] = {}
        for at, step in enumerate(self.program.steps):
            for d, _ in self.mine(step.blocks) if isinstance(step, Launch) else ():
                assert isinstance(step, Launch)
                kernel, number = kernel_of(step, d, self.program), self.equal.get((at, d))
                if number is not None and number in made:
                    self.kernels[at, d] = made[number]
                    continue
                run = self.kernels[at, d] = self.target.kernel(self.graph, kernel)
                if number is not None:
                    made[number] = run

    def _plain_bytes(self, device: int, buffer: str) -> int:
        return self.buffers[buffer].nbytes(device)

    def _packed(self, device: int, buffer: str, key: Hashable, make: Callable[[], Array]) -> Array:
        """A packed weight; one of the model's own is packed once for all executors that share them."""
        tensor = self.buffers[buffer].tensor
        weight, t = self.graph.weights.get(tensor), self.graph.tensors[tensor]
        if weight is None or not weight.file:  # derived for this build, or worked out of weights
            return make()
        there = (weight, t.dtype, t.shape, self.box(device, buffer), key)
        if there not in self.packed:
            self.packed[there] = make()
        return self.packed[there]

    def scheduled(self) -> Schedule | None:
        """What a run need not do again, where one device runs alone on a target that can bind its kernels."""
        if self.program.devices != 1 or not isinstance(self.target, RecordingTarget):
            return None
        launches = {at: bound for (at, _), bound in self.launches.items() if at not in self.folded[0].steps}
        room = self.room[0] - self.packing[0].extra
        kept = {n: (a, 0) for n, a in self.packing[0].arrays.items()} | self.kept[0]
        return schedule(BoundProgram(self.graph, self.program, self.target, launches, self.resident, kept, room))

    def weigh(self, array: Array) -> int:
        """Bytes of a weight that is being packed."""
        return arrays.nbytes(array)

    def weight_bytes(self) -> int:
        """Bytes of all weights that stay loaded, packed ones included."""
        packed = (a for p in self.packing for a in p.arrays.values())
        return sum(arrays.nbytes(a) for a in (*packed, *(a for held in self.weights_held for a in held.values())))

    def described(self) -> dict[str, Any]:
        """What the target says of itself."""
        return self.target.described() if isinstance(self.target, RecordingTarget) else {}

    def load(self, name: str, device: int, box: Box) -> None:
        """A weight that is there, or a part of what the caller gives."""
        tensor, kept = self.buffers[name].tensor, self.kept[device].get(name)
        source = self.weights if tensor in self.streamed else self.feeds
        self.held.arrays[device][name] = source(tensor, box) if kept is None else kept[0]

    def launch(self, at: int, step: Launch, device: int) -> None:
        """Call the kernel on what the device holds."""
        (run, ins), held = self.launches[at, device], self.held.arrays[device]
        if at in self.folded[device].steps:
            held.update((name, self.kept[device][name][0]) for name in step.outs)
            return
        outs = run([held[n] if n else None for n in ins], [held[s] for s in step.states])
        held.update(zip(step.outs, outs, strict=True))

    def allocate(self, device: int, name: str) -> Array:
        """A new array."""
        extents, dtype = shape(self.box(device, name)), arrays.torch_dtype(self.buffers[name].dtype)
        out = self.held.arrays[device][name] = torch.empty(extents, dtype=dtype, device=self.target.device)
        return out

    def array(self, device: int, name: str) -> Array:
        """What the device holds."""
        found = self.held.arrays[device].get(name)
        return self.schedule.fixed[name] if found is None and self.schedule is not None else found

    def nbytes(self, device: int, name: str) -> int:
        """Bytes of the array that is there; of a packed weight, those that the plan has for it."""
        kept = self.kept[device].get(name)
        return super().nbytes(device, name) if kept is None else kept[1]

    def new_at_every_run(self, name: str) -> bool:
        """What is computed, but for what has a position of its own."""
        return name in self._computed and (self.schedule is None or name not in self.schedule.fixed)
