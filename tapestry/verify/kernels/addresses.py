"""Where a kernel writes and reads: every cell of its block once, and nothing outside of what it was given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tapestry.errors import LawError
from tapestry.ir.kernel import Box, shape
from tapestry.verify.kernels.evaluation import Evaluation, OutOfReach, together
from tapestry.verify.kernels.integer_conditions import Conditions, Undecided
from tapestry.verify.kernels.kernel_text import Buffer
from tapestry.verify.kernels.reading.lane_tiles import lanes
from tapestry.verify.kernels.reading.program_reading import Access, Program, Store
from tapestry.verify.kernels.terms import Terms, Unsupported

Array = np.ndarray[Any, Any]
PART = 1 << 22  # addresses looked at together
MOST = 1 << 28  # addresses of one statement that are looked at one by one


def reads(terms: Terms, ask: Conditions, loads: Sequence[Access], buffers: Mapping[str, Buffer]) -> int:
    """Check that no load leaves its buffer; returns how many statements were looked at.

    Raises:
        LawError: one does, at the program and lane that it names.
    """
    for a in loads:
        size = buffers[a.buffer].size
        lo, hi = terms.reach(a.at)
        if lo >= 0 and hi < size:
            continue
        for outside in (terms.at_least(a.at * -1 - 1), terms.at_least(a.at - size)):
            try:
                found = ask.witness(a.mask, outside)
            except Undecided:
                raise Unsupported(f"line {a.line}: isl does not decide whether a read stays inside") from None
            if found is not None:
                place = ", ".join(f"{n} {v}" for n, v in sorted(found.items()) if n[0] != "#")
                raise LawError(
                    "kernel_reads", f"a read leaves '{a.buffer}' of {size} elements", where=f"line {a.line}", why=f"at {place}"
                )
    return len(loads)


def variables(terms: Terms, store: Store, grid: Mapping[str, int]) -> dict[str, int]:
    """What a statement that writes runs over: programs, lanes, steps of loops."""
    names = {v: n for v, n in grid.items() if n != 1}
    names |= {str(v): terms.sizes[str(v)] for v in lanes(terms, store.to.shape) if v.terms}
    free = terms.free[terms.int(store.to.at)] | terms.free[store.to.mask]
    names |= {n: terms.sizes[n] for n in store.to.loops}
    unknown = free - names.keys()
    if unknown:
        raise Unsupported(f"line {store.to.line}: an address from {sorted(unknown)}")
    return names


def placed(terms: Terms, store: Store, names: Mapping[str, int]) -> Iterator[Array]:
    """The cells that a statement writes, each as often as it does, a part of the programs at a time."""
    total = math.prod(names.values())
    if total > MOST:
        raise Unsupported(f"line {store.to.line}: {total:,} addresses")
    first, count = next(iter(names.items()), ("", 1))
    step = max(1, PART * count // max(total, 1))
    for lo in range(0, count, step):
        at = {n: np.arange(size) for n, size in names.items()}
        if first:
            at[first] = np.arange(lo, min(count, lo + step))
        run = Evaluation(terms, at, {})
        try:
            _, (place, inside) = together([run.aff(store.to.at), run.of(store.to.mask)])
        except OutOfReach:
            raise Unsupported(f"line {store.to.line}: too many addresses at once") from None
        extents = [len(a) for a in at.values()]
        full = np.broadcast_shapes(place.shape, inside.shape)
        times = math.prod(extents) // max(1, math.prod(full))  # what an address does not depend on repeats it
        cells = np.broadcast_to(place, full)[np.broadcast_to(inside, full)]
        yield np.repeat(cells, times) if times > 1 else cells


def writes(terms: Terms, stores: Sequence[Store], grid: Mapping[str, int], name: str, size: int, wanted: Array | None) -> Array:
    """How often each cell of a buffer is written: once where ``wanted`` (at most once without), elsewhere never.

    Raises:
        LawError: a cell is not, or twice, or lies outside of the buffer.
    """
    counts = np.zeros(size, np.int32)
    line = 0
    for store in stores:
        if store.to.buffer != name:
            continue
        line = store.to.line
        for cells in placed(terms, store, variables(terms, store, grid)):
            if len(cells) and (int(cells.min()) < 0 or int(cells.max()) >= size):
                bad = int(cells.min()) if int(cells.min()) < 0 else int(cells.max())
                raise LawError(
                    "kernel_writes", f"a write leaves '{name}' of {size} elements", where=f"line {line}", why=f"at {bad}"
                )
            counts += np.bincount(cells, minlength=size).astype(np.int32)
    wrong = np.flatnonzero(counts > 1 if wanted is None else counts != wanted)
    if len(wrong):
        cell = int(wrong[0])
        raise LawError(
            "kernel_writes", f"cell {cell} of '{name}' is written {int(counts[cell])} times", where=f"line {line}",
            why=f"{len(wrong)} of {size} cells are wrong",
        )  # fmt: skip
    return counts


def reads_of_scratch(terms: Terms, program: Program, buffers: Mapping[str, Buffer], filled: Mapping[str, Array]) -> None:
    """Check that a pass reads those cells of scratch alone that were written.

    Raises:
        LawError: it reads another one.
    """
    for a in program.loads:
        if not buffers[a.buffer].scratch or (a.buffer in filled and bool(np.all(filled[a.buffer]))):
            continue
        if a.buffer not in filled:
            raise LawError("kernel_reads", f"'{a.buffer}' is read before it is written", where=f"line {a.line}")
        for cells in placed(terms, Store(a, terms.unknown), variables(terms, Store(a, terms.unknown), program.grid)):
            if not np.all(filled[a.buffer][cells]):
                raise LawError("kernel_reads", f"a cell of '{a.buffer}' is read that nobody wrote", where=f"line {a.line}")


def cells_of(block: Box, box: Box, along: Sequence[bool], buffer: Buffer) -> Array:
    """Which cells of a buffer belong to a block, as 0 and 1; ``along`` says on which axes the buffer has the block's cells."""
    out = np.zeros(shape(box), np.int32)
    parts = (slice(lo - at, hi - at) if own else slice(None) for (lo, hi), (at, _), own in zip(block, box, along, strict=True))
    out[tuple(parts)] = 1
    return out.transpose(sorted(range(len(box)), key=lambda k: (-buffer.steps(box)[k], k))).reshape(-1)
