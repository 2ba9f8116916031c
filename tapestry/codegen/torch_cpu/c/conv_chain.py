"""Convolutions one behind the other as one call: of what lies between two of them, some rows are in the cache at a time."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.c.c_calls import CCall, CpuKernel
from tapestry.codegen.torch_cpu.c.thread_parts import threads

LEAST = 1 << 19  # bytes of an image that is not worth writing and reading again; less stays in the cache as it is
CACHE = 3 << 16  # bytes that all kept rows may take, of a cache of half a megabyte
MOST_ROWS = 8  # of the last output at once
KINDS = ("tapestry_conv", "tapestry_planes", "tapestry_depthwise")  # as chain.c numbers them


def follows(before: CpuKernel, after: CpuKernel) -> int | None:
    """The input of ``after`` that it may read while ``before`` makes it, where that pays."""
    if not before.link or not after.link or threads() > 1:  # of several threads, each takes rows of one convolution
        return None
    return after.link.image if after.link.behind and before.link.nbytes >= LEAST else None


def chain(calls: Sequence[CCall]) -> CCall | None:
    """Calls of convolutions, each of the image that the one before makes; ``None`` where they are not that."""
    lib: Any = native.library()
    kinds = [KINDS.index(c.function.__name__) if c.function.__name__ in KINDS else -1 for c in calls]
    if not 2 <= len(calls) <= native.MOST_LINKS or -1 in kinds or 1 in kinds[1:]:
        return None
    for a, b in itertools.pairwise(calls):
        x = (b.sizes.images, b.sizes.channels, b.sizes.in_h, b.sizes.in_w, b.sizes.x_row, b.sizes.x_pixel, b.buffers.x)
        y = (a.sizes.images, a.sizes.features, a.sizes.out_h, a.sizes.out_w, a.sizes.y_row, a.sizes.y_pixel, a.buffers.y)
        if x != y:
            return None
    rows = MOST_ROWS
    while rows > 1 and sum(4 * c.sizes.y_row * n for c, n in zip(calls[:-1], rows_held(calls, rows), strict=False)) > CACHE:
        rows //= 2
    links = (
        native.Link(ctypes.addressof(c.sizes), ctypes.addressof(c.buffers), kind, n)
        for c, kind, n in zip(calls, kinds, rows_held(calls, rows), strict=True)
    )
    sizes = native.Chain(len(calls), rows, (native.Link * native.MOST_LINKS)(*links))
    kept = (*(x for c in calls for x in c.kept), *calls)
    return CCall(lib.tapestry_chain, sizes, ctypes.c_void_p(), kept)


def rows_held(calls: Sequence[CCall], rows: int) -> list[int]:
    """How many rows of each output have to be there at once, where ``rows`` of the last one are made at a time."""
    out = [calls[-1].sizes.out_h]
    new = min(rows, out[0])
    for c in reversed([c.sizes for c in calls[1:]]):
        window = (new - 1) * c.stride_h + (c.kernel_h - 1) * c.dilation_h + 1
        new = min(c.in_h, max(window, new * c.stride_h))
        out.append(min(c.in_h, window))
    return out[::-1]
