"""Tiles as tensor descriptors (TMA): which accesses are boxes of a strided tensor of two or three axes, and which boxes.

An access over two tile axes is one when each axis is a single run with one stride, one of the strides is 1 and the other is a
multiple of 16 bytes. What is left of the offset, from batch dimensions and constants, becomes the coordinate along a third,
outer axis whose stride is its greatest common divisor. Reads past the end of a run give zeros, stores there are dropped, so
that no masks are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from tapestry.codegen.blocks.forms import Contraction, Stream, bare_read
from tapestry.codegen.blocks.lowered import Access, Task, points
from tapestry.codegen.blocks.operands import operand_size
from tapestry.codegen.triton.task.primitives import NARROW_POINTERS, POINTERS
from tapestry.ir.expr import Expr, arg_positions
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, Ranges, dims_of, span
from tapestry.ir.types import itemsize

_ALIGN = 16  # bytes, of every stride but the innermost and of the base


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """The tensor of a descriptor argument, in elements from the start of the buffer; ``block`` is one tile."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    dtype: str


def descriptor_type(d: Descriptor) -> str:
    """The type of a descriptor argument, for ahead-of-time compilation."""
    return f"tensordesc<{NARROW_POINTERS.get(d.dtype, POINTERS[d.dtype])[1:]}{list(d.block)}>".replace(" ", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileBox:
    """An access as a strided tensor: ``shape`` and ``strides`` have the outer axis first if there is one.

    Attributes:
        outer: the coordinate along it; ``None`` for a tensor of two axes.
        transposed: whether the first of the two tile axes is the contiguous one.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    outer: Aff | None
    transposed: bool
    dtype: str

    def descriptor(self, first: int, second: int) -> Descriptor:
        """The descriptor for tiles of ``first`` by ``second`` elements along the two tile axes."""
        tile = (second, first) if self.transposed else (first, second)
        return Descriptor(
            shape=self.shape, strides=self.strides, block=((1,) if self.outer is not None else ()) + tile, dtype=self.dtype
        )


def tile_box(access: Access, first: Sequence[Dim], second: Sequence[Dim], ranges: Ranges) -> TileBox | None:
    """The access over two tile axes as a box; ``None`` where a descriptor cannot say it."""
    size = itemsize(access.dtype)
    if access.checks or size not in (1, 2, 4) or (access.dtype[0] in "iu" and access.dtype != "i8") or access.dtype == "bool":
        return None
    steps = _stride(access.offset, first), _stride(access.offset, second)
    if steps[0] is None or steps[1] is None or 1 not in steps:
        return None
    transposed = steps[1] != 1
    extents = [points(tuple(first)), points(tuple(second))]
    if transposed:
        extents.reverse()
    far = max(steps[0], steps[1])
    inner = {d.name for d in (*first, *second)}
    rest = Aff(tuple((a, c) for a, c in access.offset.terms if a not in inner), access.offset.const)
    if far * size % _ALIGN or dims_of(rest) & {d.name for d in (*first, *second) if d.size > 1}:
        return None
    if not rest.terms and not rest.const:
        return TileBox(shape=tuple(extents), strides=(far, 1), outer=None, transposed=transposed, dtype=access.dtype)
    unit = gcd(rest.const, *(c for _, c in rest.terms))
    low, high = span(rest, ranges)
    if unit * size % _ALIGN or low < 0:
        return None
    outer = Aff(tuple((a, c // unit) for a, c in rest.terms), rest.const // unit)
    return TileBox(
        shape=(high // unit + 1, *extents), strides=(unit, far, 1), outer=outer, transposed=transposed, dtype=access.dtype
    )


def operand_boxes(task: Task, c: Contraction) -> dict[Expr, TileBox] | None:
    """Every factor of a contraction (m by k, or k by n) as a box of the operand's own dtype; ``None`` if one is none."""
    found = {a: (_of(task, c.value(a, task), c.kind(a), c.m, c.k), False) for a, _ in c.pairs}
    found |= {b: (_of(task, c.value(b, task), c.kind(b), c.k, c.n), True) for _, b in c.pairs}
    small = operand_size(c.operand) == 1  # matrix units take operands of 8 bits along k only
    boxes = {
        e: box for e, (box, transposed) in found.items() if box is not None and not (small and box.transposed != transposed)
    }
    return boxes if len(boxes) == len(found) and not c.masked else None


def aligned(task: Task, c: Contraction) -> bool:
    """Whether every row of every factor begins at a multiple of 16 bytes, so that tiles can be loaded in units of that."""
    for p in arg_positions(tuple(c.value(e, task) for pair in c.pairs for e in pair)):
        access = task.reads[p]
        step = max(1, _ALIGN // itemsize(access.dtype))
        if any(abs(k) != 1 and k % step for _, k in access.offset.terms):
            return False
    return True


def stream_boxes(task: Task, s: Stream) -> tuple[TileBox | None, TileBox | None, TileBox | None]:
    """Query (rows by depth), keys (keys by depth) and values (keys by columns) as boxes, each if it is one."""
    query = _of(task, s.query, s.kind(s.query), s.rows, s.depth)
    keys = _of(task, s.keys, s.kind(s.keys), (s.key,), s.depth)
    values = _of(task, s.value, s.weighted, (s.key,), s.columns)
    return query, keys, values


def _of(task: Task, e: Expr, dtype: str, first: tuple[Dim, ...], second: tuple[Dim, ...]) -> TileBox | None:
    position = bare_read(e)
    if position is None or task.reads[position].dtype != dtype:
        return None
    return tile_box(task.reads[position], first, second, task.ranges)


def _stride(offset: Aff, dims: Sequence[Dim]) -> int | None:
    """The one stride of some dimensions flattened in order; ``None`` where there is none (or it is not positive)."""
    kept = [d for d in dims if d.size > 1]
    if not kept:
        return None
    for outer, inner in pairwise(kept):
        if offset.coef(outer.name) != offset.coef(inner.name) * inner.size:
            return None
    step = offset.coef(kept[-1].name)
    return step if step > 0 else None
