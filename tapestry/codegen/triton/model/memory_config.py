"""Tiles of the kernels that memory decides: maps, rows, reductions, gathers, scans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from tapestry.codegen.triton.model.config_fields import KernelConfig
from tapestry.codegen.triton.task.chips import Chip
from tapestry.codegen.triton.task.kernel_form import KernelForm
from tapestry.codegen.triton.task.lowered import Access, Task, points
from tapestry.codegen.triton.task.ragged_parts import splits
from tapestry.codegen.triton.task.tiles import centred, power_of_two, row_dims, split_selection, transposing_dims
from tapestry.ir.graph import Dim
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.recognise.selection_sum import Selection
from tapestry.ir.types import itemsize

LONGEST = 16384  # elements of a row that are kept in registers, by up to 16 warps
_AHEAD, _RING = 3, 48 << 10  # tiles of a reduction that are on their way while one is merged; bytes of shared memory for them
_LATENCY = 7e-7  # seconds from a load to its value when memory is busy: so many bytes must be on their way


def memory_config(form: KernelForm, chip: Chip) -> KernelConfig:
    """The model's choice for a kernel that is no product."""
    task = form.task
    if form.kind == "map":
        return _map(task)
    if form.kind == "rows":
        return _rows(task)
    if form.kind == "scan":
        return _scan(task)
    if form.kind == "gather" and form.picked is not None:
        return _gather(form.task, form.picked)
    return _reduce(form, chip)


def neighbours(first: KernelConfig, form: KernelForm, chip: Chip) -> Iterator[KernelConfig]:
    """The model's choice, then its neighbours in every field that the kind has."""
    yield first
    for warps in (first.num_warps * 2, first.num_warps // 2):
        if 1 <= warps <= (16 if chip.warp == 64 else 32):
            yield replace(first, num_warps=warps)
    if form.kind == "map":
        for block in (first.block * 2, first.block // 2, first.block * 4):
            if 64 <= block <= 8192:
                yield replace(first, rows=1, block=block, num_warps=max(1, min(16, first.num_warps * block // first.block)))
        return
    for rows in (first.rows * 2, first.rows // 2):
        if 1 <= rows <= 64:
            yield replace(first, rows=rows)
    if form.kind == "reduce":
        for cols in (first.cols * 2, first.cols // 2):
            if 1 <= cols <= 8192 and first.cols > 1:
                yield replace(first, cols=cols)


def _map(task: Task) -> KernelConfig:
    """Tiles of a map: 4 KiB of output (16 bytes per thread and access), fewer for a small block.

    Where reads run along another dimension than writes: 64 x 64.
    """
    width = max(itemsize(a.dtype) for a in task.outs)
    flat = min(max(1024, 4096 // width), power_of_two(points(task.dims)))
    if (found := transposing_dims(task)) is None:
        return KernelConfig(block=flat)
    tall, wide = (min(64, power_of_two(task.dims[k].size)) for k in found)
    return KernelConfig(block=flat, rows=tall, cols=wide, num_warps=4 if tall * wide <= 2048 else 8)


def _rows(task: Task) -> KernelConfig:
    """A row to a program, or several short ones; warps by the length of what is kept in registers."""
    found = row_dims(task)
    assert found is not None
    longest = LONGEST if len(task.body) == 1 or centred(task) else LONGEST // 2
    width = min(longest, max(power_of_two(points(task.reduce)), power_of_two(points(found[1]))))
    height = max(1, min(power_of_two(points(found[0])), 1024 // width))
    held = width * height
    warps = 1 if held <= 512 else 2 if held <= 1024 else 4 if held <= 4096 else 8 if held <= 8192 else 16
    return KernelConfig(rows=height, cols=width, num_warps=warps)


def _reduce(form: KernelForm, chip: Chip) -> KernelConfig:
    """Tiles of a reduction: about 2048 elements (1024 with several fields), long along what lies contiguous in memory."""
    task = form.task
    rows, cols = points(task.dims), points(task.reduce)
    lanes = 2048 if len(task.body) == 1 else 1024
    if task.monoid and not MONOIDS[task.monoid].commutative:
        return KernelConfig(rows=min(128, power_of_two(rows)), cols=1, num_stages=1)  # lanes would merge out of order
    along_rows = _moved_along(task, task.dims) > _moved_along(task, task.reduce)
    width = min(power_of_two(cols), 32 if along_rows else lanes)
    height = min(power_of_two(rows), max(1, lanes // max(1, width)))
    size = max((itemsize(a.dtype) for a in task.reads.values()), default=4)
    least, wanted = (64 // size, 2 * chip.units) if along_rows else (8, chip.units)  # whole sectors of memory
    while height > least and -(-rows // height) < wanted:
        height //= 2
    width = min(power_of_two(cols), max(width, lanes // height if not along_rows else width))
    parts = 1
    programs = -(-rows // height)
    while programs * parts < chip.units and points(task.reduce) // parts >= 8192 and splits(form, parts * 2, 1024):
        parts *= 2
    moved = size * programs * parts * _AHEAD
    while moved * height * width < _LATENCY * chip.bandwidth and width < cols // parts and height * width < 2 * lanes:
        width *= 2
    ahead = form.kind == "reduce" and chip.backend == "cuda" and (_AHEAD + 1) * _tile_bytes(task, height, width) <= _RING
    return KernelConfig(
        rows=height, cols=max(1, width), num_warps=4 if height * width >= 512 else 1, split_k=parts,
        num_stages=_AHEAD + 1 if ahead else 1,
    )  # fmt: skip


def _tile_bytes(task: Task, height: int, width: int) -> int:
    """Bytes that a tile of rows and columns loads."""
    rows, cols = ({d.name for d in dims if d.size > 1} for dims in (task.dims, task.reduce))
    used = [(a, task.read_dims(p)) for p, a in task.reads.items()]
    return sum(itemsize(a.dtype) * (height if d & rows else 1) * (width if d & cols else 1) for a, d in used)


def _moved_along(task: Task, dims: tuple[Dim, ...]) -> int:
    """Bytes of the reads that lie contiguous along some of the dimensions and along none of the others."""
    ranges, others = task.ranges, tuple(d for d in (*task.dims, *task.reduce) if d not in dims)
    found = [(p, a) for p, a in task.reads.items() if contiguous(a, dims) and not contiguous(a, others)]
    return sum(itemsize(a.dtype) * prod(ranges[n] for n in task.read_dims(p)) for p, a in found)


def _gather(task: Task, s: Selection) -> KernelConfig:
    """Tiles of 2048 elements, long along the columns."""
    rows, columns = split_selection(task, s)
    width = min(1024, power_of_two(points(columns)))
    height = max(1, min(power_of_two(points(rows)), 2048 // width))
    return KernelConfig(rows=height, cols=width, num_warps=4 if height * width >= 512 else 1)


def _scan(task: Task) -> KernelConfig:
    """Tiles of 2048 elements, long along what lies contiguous in memory."""
    rows, steps = points(task.dims), points(task.reduce)
    along = any(a.offset.coef(task.reduce[0].name) in (1, -1) for a in task.reads.values())
    width = min(power_of_two(steps), 1024 if along else 64)
    height = min(power_of_two(rows), max(1, 2048 // width))
    return KernelConfig(rows=height, cols=width, num_warps=4 if height * width >= 512 else 1)


def contiguous(access: Access, dims: tuple[Dim, ...]) -> bool:
    """Whether neighbours along one of the dimensions are neighbours in memory."""
    return any(access.offset.coef(d.name) in (1, -1) and d.size > 1 for d in dims)
