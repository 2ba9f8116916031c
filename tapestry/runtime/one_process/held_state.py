"""Caches on the devices of one process, updated in place: a step appends its own cells to what is there, and copies no other.

Each row of a batch is appended to at a place of its own, and may begin again while others go on. Programs of several sizes
share caches; where two programs have one in different parts, it is there in both ways. A cache that a device has along its
whole length has places behind it for a step's own cells, and the program's present is that memory (`grown_caches`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tapestry.build.cache import Cache
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Box, intersect, shape
from tapestry.ir.program import Launch, Load, reads
from tapestry.runtime import arrays
from tapestry.runtime.one_process.grown_caches import Filled, Grown
from tapestry.runtime.target_protocol import Array, RecordingTarget

if TYPE_CHECKING:
    from tapestry.runtime.one_process.logical_devices import LocalExecutor

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
                        self._allocate(place, cache, arrays.torch_dtype(buffer.dtype))
                    executor.stays[d, step.buffer] = self.arrays[place]
                    self._grow(executor, place, cache)
        executor.after = lambda: self._append(executor, by_input)
        executor.bound = lambda: self._bound(executor, by_input)

    def _allocate(self, place: Place, cache: Cache, dtype: torch.dtype) -> None:
        """Zeros, with places behind the last cell where the cache's whole length is there."""
        box, (lo, hi) = place[2], place[2][cache.axis]
        more = self.longest if (lo, hi) == (0, cache.capacity) else 0
        self.memory[place] = torch.zeros(shape(_along(box, cache.axis, lo, hi + more)), dtype=dtype)
        self.arrays[place] = self.memory[place].narrow(cache.axis, 0, hi - lo)

    def _grow(self, executor: LocalExecutor, place: Place, cache: Cache) -> None:
        """Let the device's present be the cache's own memory, where one launch makes it and it is as long."""
        _, device, box = place
        name, wanted = executor.program.outputs[cache.present], _along(box, cache.axis, 0, cache.capacity + cache.new)
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
                there = arrays.part(self.arrays[place], at, place[2]) if me == receiver else None
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
                yield from self._rows(executor, place, cache, _along(place[2], 0, lo, hi), at)

    def _rows(
        self, executor: LocalExecutor, place: Place, cache: Cache, box: Box, at: tuple[int, int]
    ) -> Iterator[tuple[int, Box, Box]]:
        """The same of some rows, which are appended to at one place."""
        lo, hi = box[cache.axis]
        lo, hi, shift = max(lo, at[0]), min(hi, sum(at)), cache.capacity - at[0]
        if lo >= hi:
            return
        wanted = _along(box, cache.axis, lo + shift, hi + shift)
        boxes, owner = executor.program.buffers[executor.program.outputs[cache.present]].boxes, executor.route.owner
        whole = [d for d, b in enumerate(boxes) if b is not None and intersect(b, wanted) == wanted]
        if whole:
            near = place[1] if place[1] in whole else next((d for d in whole if owner[d] == owner[place[1]]), whole[0])
            yield near, wanted, _along(box, cache.axis, lo, hi)
            return
        for box, d in executor.blocks[cache.present].items():
            piece = intersect(box, wanted)
            if piece is not None:
                first, last = piece[cache.axis]
                yield d, piece, _along(piece, cache.axis, first - shift, last - shift)


def _along(box: Box, axis: int, lo: int, hi: int) -> Box:
    """A box with another interval on one axis."""
    return (*box[:axis], (lo, hi), *box[axis + 1 :])
