"""The Kernel: one block of one operation, with the boxes of the buffers it reads and writes.

Everything a code generator needs besides the Graph. Boxes are half-open intervals per axis in the coordinates of the
whole tensor or index space; a buffer is a contiguous row-major array of exactly its box.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A block of ``graph.ops[op]``.

    Attributes:
        mode: ``full`` computes outputs; ``partial`` computes monoid states over the block's part of the reduced
            dimensions (one buffer per field, no ``then``); ``finish`` applies ``then`` to merged states.
        block: box over ``op.space`` (map dimensions, then reduced ones); for ``finish`` over the map dimensions alone.
        ins: for each read of a Block (each input of an Opaque), the box of the buffer that holds it; ``None`` for a read
            that this mode does not use (and for an absent optional input).
        outs: for each output (``partial``: each field; ``finish``: also the box of the states read), the buffer's box.
    """

    op: int
    mode: str
    block: Box
    ins: tuple[Box | None, ...]
    outs: tuple[Box, ...]


def shape(box: Box) -> tuple[int, ...]:
    """Extents of a box."""
    return tuple(hi - lo for lo, hi in box)


def size(box: Box) -> int:
    """Number of points of a box."""
    return prod(max(0, hi - lo) for lo, hi in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Common points of two boxes of one rank; ``None`` when there are none."""
    out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return None if any(lo >= hi for lo, hi in out) else out


def inside(a: Box, b: Box) -> bool:
    """Whether every point of a is in b."""
    return all(r <= p and q <= s for (p, q), (r, s) in zip(a, b, strict=True)) or size(a) == 0


def whole(extents: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, n) for n in extents)


def slices(box: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    """A box as an index of an array of the whole."""
    return tuple(slice(lo, hi) for lo, hi in box)


def slices_within(box: Iterable[tuple[int, int]], held: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    """A box as an index of an array that holds another box."""
    return tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(box, held, strict=True))


def cut(extent: int, parts: int, k: int) -> tuple[int, int]:
    """Block k of ``parts`` contiguous blocks of [0, extent): sizes differ by at most one, none is empty if parts <= extent."""
    return k * extent // parts, (k + 1) * extent // parts


def strides(box: Box) -> tuple[int, ...]:
    """Row-major strides, in elements, of the buffer that holds a box."""
    extents = shape(box)
    return tuple(prod(extents[k + 1 :]) for k in range(len(extents)))
