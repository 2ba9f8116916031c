"""Caches on the devices of one process, updated in place: a step appends its own cells to what is there, and copies no other.

Each row of a batch is appended to at a place of its own, and may begin again while others go on. Programs of several sizes
share caches; where two programs have one in different parts, it is there in both ways. A cache that a device has along its
whole length has places behind it for a step's own cells, and the program's present is that memory (`grown_caches`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tapestry.build.store import Cache
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, intersect, shape
from tapestry.ir.program import Launch, Load, Program, reads
from tapestry.ir.types import HOST
from tapestry.runtime import target_protocol
from tapestry.runtime.target_protocol import Array, RecordingTarget, Run

if TYPE_CHECKING:
    from tapestry.runtime.one_process.logical_devices import LocalExecutor


# Weights of one device by buffer, each read when it is first asked for: one that is there packed already need not be read.


class HeldWeights(MutableMapping[str, Array]):
    """A table whose values are read when they are first wanted."""

    def __init__(self) -> None:
        self._sources: dict[str, Callable[[], Array]] = {}
        self._there: dict[str, Array] = {}

    def promise(self, name: str, read: Callable[[], Array]) -> None:
        """A weight that is read by a function."""
        self._sources[name] = read

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __getitem__(self, name: str) -> Array:
        if name not in self._there:
            self._there[name] = self._sources[name]()
        return self._there[name]

    def __setitem__(self, name: str, value: Array) -> None:
        self._sources[name], self._there[name] = (lambda: value), value

    def __delitem__(self, name: str) -> None:
        del self._sources[name]
        self._there.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


# Caches that a step appends to where they lie: the present is the past's own memory, with places behind it for what is new.
#
# A model's ``present = Concat(past, new)`` then writes the new cells alone. Nothing else of the cache is read or written by it.


@dataclass(slots=True)
class Filled:
    """What kernels in C know of the caches of a process: numbers (i64).

    Of the cells of a present, those before the first number count, and those from the second on; the others are where the next
    step appends, for each row of the first axis.
    """

    numbers: ctypes.Array[ctypes.c_int64]

    @classmethod
    def nothing(cls, rows: int) -> Filled:
        """All cells count."""
        return cls((ctypes.c_int64 * (2 + rows))())

    @property
    def address(self) -> int:
        """Of the numbers."""
        return ctypes.addressof(self.numbers)

    def place(self, row: int) -> int:
        """The address of where a row is appended to."""
        return self.address + 8 * (2 + row)


@dataclass(frozen=True, slots=True)
class Grown:
    """A cache in one memory with the step's own cells behind it.

    Attributes:
        memory: capacity and new cells along the cache's axis (more, where another size of the model appends more at once).
        filled: which of them count.
        first: the first row that is here.
    """

    cache: Cache
    memory: torch.Tensor
    filled: Filled
    first: int

    @property
    def past(self) -> torch.Tensor:
        """The cache, as the program's past."""
        return self.memory.narrow(self.cache.axis, 0, self.cache.capacity)

    @property
    def present(self) -> torch.Tensor:
        """The program's present."""
        return self.memory.narrow(self.cache.axis, 0, self.cache.capacity + self.cache.new)

    @property
    def tail(self) -> torch.Tensor:
        """The places for what is new."""
        return self.memory.narrow(self.cache.axis, self.cache.capacity, self.cache.new)

    def kernel(self, whole: Kernel) -> Kernel:
        """What of the present's kernel is to be computed."""
        cells = (self.cache.capacity, self.cache.capacity + self.cache.new)
        box: Box = tuple(cells if k == self.cache.axis else b for k, b in enumerate(whole.block))
        return replace(whole, block=box, outs=(box,))


Place = tuple[str, int, Box]
"""A part of a cache: its input, the device, and which cells."""
Places = Sequence[tuple[int, int]]
"""Where a step appends to caches: for each row, its first cell there, and how many of the step's cells it keeps."""
Carry = Callable[[Array | None, Array | None, int, int], None]
"""Moves a piece between processes: (what is sent, if that is here; where it goes, if that is here; sender; receiver)."""


class HeldState:
    """The caches of this process.

    Attributes:
        places: parts of caches on all devices, of which this process has the arrays of its own.
        longest: how many cells a step of any size appends at most.
        at: where the next step appends.
        filled: where, and which cells count, for kernels in C.
        written: bytes that steps have appended.
    """

    def __init__(self, longest: int, rows: int, carry: Carry | None = None) -> None:
        """``rows``: of a step, or of the caches' first axis, if those are more."""
        self.longest, self.rows = longest, rows
        self.places: dict[Place, Cache] = {}
        self.arrays: dict[Place, Array] = {}
        self.memory: dict[Place, Array] = {}
        self.carry, self.at, self.filled, self.written = carry, tuple[tuple[int, int], ...](), Filled.nothing(rows), 0

    def join(self, executor: LocalExecutor, caches: Sequence[Cache]) -> None:
        """Let an executor read its caches here, and append to them after every run; before it is bound."""
        program, by_input = executor.program, {c.past: c for c in caches}
        for step in program.steps:
            if not isinstance(step, Load) or (cache := by_input.get(program.buffers[step.buffer].tensor)) is None:
                continue
            buffer = program.buffers[step.buffer]
            for d, box in enumerate(buffer.boxes):
                if box is None:
                    continue
                place = (cache.past, d, box)
                self.places[place] = cache
                if d in executor.devices:
                    if place not in self.arrays:
                        self._allocate(place, cache, target_protocol.torch_dtype(buffer.dtype))
                    executor.stays[d, step.buffer] = self.arrays[place]
                    self._grow(executor, place, cache)
        executor.after = lambda: self._append(executor, by_input)
        executor.bound = lambda: self._bound(executor, by_input)

    def _allocate(self, place: Place, cache: Cache, dtype: torch.dtype) -> None:
        """Zeros, with places behind the last cell where the cache's whole length is there."""
        box, (lo, hi) = place[2], place[2][cache.axis]
        more = self.longest if (lo, hi) == (0, cache.capacity) else 0
        self.memory[place] = torch.zeros(shape(_with_interval(box, cache.axis, lo, hi + more)), dtype=dtype)
        self.arrays[place] = self.memory[place].narrow(cache.axis, 0, hi - lo)

    def _grow(self, executor: LocalExecutor, place: Place, cache: Cache) -> None:
        """Let the device's present be the cache's own memory, where one launch makes it and it is as long."""
        _, device, box = place
        name, wanted = executor.program.outputs[cache.present], _with_interval(box, cache.axis, 0, cache.capacity + cache.new)
        if box[cache.axis] != (0, cache.capacity) or executor.program.buffers[name].boxes[device] != wanted:
            return
        if any(
            not isinstance(s, Launch) and name in reads(s) for s in executor.program.steps
        ):  # messages want rows as they are
            return
        for step in executor.program.steps:
            if isinstance(step, Launch) and step.outs == (name,) and step.mode == "full" and step.blocks[device] == wanted:
                op = executor.graph.ops[step.op]
                if isinstance(op, Block) and op.monoid is None:
                    executor.grown[device, name] = Grown(cache, self.memory[place], self.filled, box[0][0])

    def expect(self, at: Places, cache: Cache, mask: np.ndarray[Any, Any]) -> None:
        """Before a step: where it appends, and which cells its mask [batch, capacity + new] has for any row."""
        self.at = tuple(at)
        there = np.flatnonzero(mask[:, : cache.capacity].any(axis=0))
        filled = self.filled.numbers
        filled[0], filled[1] = int(there[-1]) + 1 if len(there) else 0, cache.capacity
        # a row that keeps nothing is appended to behind the cache, where its cells are already
        ends = [a if n else cache.capacity for a, n in self.at]
        filled[2:] = [ends[0]] * (len(filled) - 2) if self._even else [*ends, *[0] * (len(filled) - 2 - len(ends))]

    @property
    def _even(self) -> bool:
        """Whether all rows are appended to at the same place; then rows need not be the first axis of a cache."""
        return len(set(self.at)) == 1

    def _bound(self, executor: LocalExecutor, caches: dict[str, Cache]) -> None:
        """Once kernels are bound: what is appended is one call, where all of it is in the caches' own memory."""
        target, grown = executor.target, list(executor.grown.values())
        mine = [p for p in self.places if p[0] in caches]
        if not isinstance(target, RecordingTarget) or executor.schedule is None or len(grown) < len(mine):
            return
        moves = target.batch([target.move(g.tail, g.past, g.cache.axis, self.filled.place(g.first)) for g in grown])
        size = sum(g.tail.nbytes for g in grown)

        def append() -> None:
            moves()
            self.written += size

        executor.after = append

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of this process."""
        return sum(a.nbytes for a in self.arrays.values())

    def clear(self, rows: Collection[int]) -> None:
        """Forget what is there, in some rows or all; zeros, so that nothing that is no number stays behind a mask."""
        whole = len(rows) == self.rows
        for (_, _, box), a in self.arrays.items() if rows else ():
            if whole:
                a.zero_()
                continue
            for r in rows:
                if box[0][0] <= r < box[0][1]:
                    a[r - box[0][0]].zero_()

    def _append(self, executor: LocalExecutor, caches: dict[str, Cache]) -> None:
        owner, me = executor.route.owner, executor.route.rank
        for place, known in self.places.items():
            cache = caches[known.past]
            for device, piece, at in self._pieces(executor, place, cache):
                sender, receiver = owner[device], owner[place[1]]
                if me not in (sender, receiver):
                    continue
                there = target_protocol.part(self.arrays[place], at, place[2]) if me == receiver else None
                values = executor.part(device, executor.program.outputs[cache.present], piece) if me == sender else None
                if there is not None:
                    self.written += there.nbytes
                if there is not None and values is not None:
                    there.copy_(values)
                else:
                    assert self.carry is not None
                    self.carry(values, there, sender, receiver)

    def _pieces(self, executor: LocalExecutor, place: Place, cache: Cache) -> Iterator[tuple[int, Box, Box]]:
        """What a part of a cache gets of a step: (the device that has it, its cells of the present, cells of the cache)."""
        if self._even:
            yield from self._rows(executor, place, cache, place[2], self.at[0])
            return
        row = 0
        for at, same in groupby(self.at):
            first, row = row, row + sum(1 for _ in same)
            lo, hi = max(first, place[2][0][0]), min(row, place[2][0][1])
            if lo < hi:
                yield from self._rows(executor, place, cache, _with_interval(place[2], 0, lo, hi), at)

    def _rows(
        self, executor: LocalExecutor, place: Place, cache: Cache, box: Box, at: tuple[int, int]
    ) -> Iterator[tuple[int, Box, Box]]:
        """The same of some rows, which are appended to at one place."""
        lo, hi = box[cache.axis]
        lo, hi, shift = max(lo, at[0]), min(hi, sum(at)), cache.capacity - at[0]
        if lo >= hi:
            return
        wanted = _with_interval(box, cache.axis, lo + shift, hi + shift)
        boxes, owner = executor.program.buffers[executor.program.outputs[cache.present]].boxes, executor.route.owner
        whole = [d for d, b in enumerate(boxes) if b is not None and intersect(b, wanted) == wanted]
        if whole:
            near = place[1] if place[1] in whole else next((d for d in whole if owner[d] == owner[place[1]]), whole[0])
            yield near, wanted, _with_interval(box, cache.axis, lo, hi)
            return
        for box, d in executor.blocks[cache.present].items():
            piece = intersect(box, wanted)
            if piece is not None:
                first, last = piece[cache.axis]
                yield d, piece, _with_interval(piece, cache.axis, first - shift, last - shift)


def _with_interval(box: Box, axis: int, lo: int, hi: int) -> Box:
    """A box with another interval on one axis."""
    return (*box[:axis], (lo, hi), *box[axis + 1 :])


# Launches that depend on weights alone are done once, when a machine is set up: what others read of them stays.
#
# To the plan they are launches like all others: their results count when and as it says. What is there all the time in their
# place is beyond it, and `Folded.extra` counts that.


SMALL = 1 << 20  # bytes: a result that is no larger stays, whatever it is made of


@dataclass(slots=True)
class Folded:
    """What was done on one device.

    Attributes:
        steps: the launches.
        arrays: their results; those that nobody reads any more, and weights that nobody else reads, are empty.
        extra: bytes beyond the plan's buffers.
    """

    steps: set[int] = field(default_factory=set[int])
    arrays: dict[str, Array] = field(default_factory=dict[str, Array])
    extra: int = 0


def fold(
    graph: Graph, program: Program, kernels: Mapping[int, Run], held: MutableMapping[str, Array],
    nbytes: Callable[[str], int], room: int, empty: Callable[[], Array],
) -> Folded:  # fmt: skip
    """Do one device's launches that read weights alone, as far as what stays of them finds room.

    Args:
        kernels: of the device, by step.
        held: its weights, to which results that are read later are added, and from which those that are not read any more go.
        nbytes: of a buffer, as the plan has it.
        room: bytes that may be taken beyond the plan.
        empty: an array of nothing.
    """
    steps = _launches(graph, program, kernels, held, nbytes)
    later = {b for at, step in enumerate(program.steps) if at not in steps for b in reads(step)} | {*program.outputs.values()}
    made = {b for step in steps.values() for b in step.outs}
    used = {b for step in steps.values() for b in step.ins if b and b not in made}
    extra = sum(map(nbytes, made & later)) - sum(map(nbytes, used - later))
    if not steps or extra > room:
        return Folded()
    out, there = Folded({*steps}, extra=max(0, extra)), dict[str, Array]()
    left = {b: at for at, step in steps.items() for b in step.ins}
    for at, step in steps.items():
        found = kernels[at]([None if not b else there[b] if b in there else held[b] for b in step.ins], [])
        there.update(zip(step.outs, found, strict=True))
        for b in {*step.ins} - later - {""}:
            if left[b] == at:
                out.arrays[b] = empty()
                there.pop(b, None)
                if b in used:
                    del held[b]
    for b in made:
        if b in later:
            held[b] = there[b].contiguous()  # as a weight is
        else:
            out.arrays[b] = empty()
    return out


def _launches(
    graph: Graph, program: Program, kernels: Mapping[int, Run], held: Mapping[str, Array], nbytes: Callable[[str], int]
) -> dict[int, Launch]:
    """Launches of weights, and of results of others of them, that are not much larger than what they are made of."""
    out, known = dict[int, Launch](), {*held}
    for at, step in enumerate(program.steps):
        if not isinstance(step, Launch) or at not in kernels or step.states or not isinstance(graph.ops[step.op], Block):
            continue
        if any(program.buffers[b].dtype == HOST for b in step.outs):
            continue
        given = {*step.ins} - {""}
        size = sum(map(nbytes, step.outs))
        if given <= known and not {*step.outs} & {*program.outputs.values()} and size <= max(SMALL, sum(map(nbytes, given))):
            out[at] = step
            known.update(step.outs)
    return out
