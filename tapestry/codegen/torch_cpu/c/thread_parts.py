"""What a kernel in C has that the threads of a run may share, and how many threads there are.

A part is a share of the outermost dimension whose results have nothing to do with each other, as a device's share is; results
are the same bits however many parts there are. How many there are follows from how long a kernel takes (`native/run.c`).
"""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import dataclass
from typing import Any

import torch

from tapestry import flags
from tapestry.codegen.torch_cpu import native
from tapestry.system import cores

# Estimates, seen on two x86 cores with AVX2; what is computed does not depend on them.
PRODUCTS = 24  # products of a nanosecond, of one thread
FEW_TILES, FEATURES = 512, 32  # tiles, as in winograd.c; and features of a part, where these are shared out
CELLS = 3  # other primitives of a nanosecond, where they are done in vectors


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel does: ``units`` that may be shared out, and about how many nanoseconds all of them take one thread.

    The estimate is that of the first run; what takes less than a millisecond is timed then.
    """

    units: int = 1
    nanoseconds: float = 0.0


def threads() -> int:
    """How many threads a run has: as many as torch has been given, and no more than the process may use at a time."""
    return min(torch.get_num_threads(), cores.usable()[0])


@functools.cache
def quiet_torch() -> None:
    """Have torch's idle threads sleep, also where torch was imported first: they spin for 10 ms on cores that ours want.

    libgomp's do so until there are more of them than cores; those of a few more threads, which wait, see to that.
    """
    if not flags.torch_spins:
        return
    others = torch.get_num_threads() - 1
    more = len(os.sched_getaffinity(0)) // others if hasattr(os, "sched_getaffinity") and others else 0
    begun = threading.Barrier(more + 1)

    def wait() -> None:
        torch.ones(1 << 17).add_(1)
        begun.wait()
        threading.Event().wait()

    for _ in range(more):
        threading.Thread(target=wait, daemon=True).start()
    begun.wait()


def why_threads() -> str:
    """What decides that."""
    most, why = cores.usable()
    return why if most <= torch.get_num_threads() else "as torch was told (OMP_NUM_THREADS, or set_num_threads)"


def work_of(kernel: str, sizes: Any) -> Work:
    """The work of one of the library's kernels."""
    match sizes:
        case native.Conv():
            return _of_images(kernel, sizes)
        case native.Attention():
            products = sizes.outer * sizes.inner * sizes.rows * sizes.keys * (sizes.depth + (sizes.columns or sizes.depth))
            heads = sizes.outer * sizes.inner
            return Work(-(-heads // sizes.group) if kernel == "tapestry_attend" else heads, products / PRODUCTS)
        case _:
            return Work()


def _of_images(kernel: str, c: native.Conv) -> Work:
    rows, taps = c.images * c.out_d * c.out_h, c.groups * c.kernel_d * c.kernel_h * c.kernel_w
    match kernel.removeprefix("tapestry_"):
        case "depthwise":
            return Work(rows, rows * c.out_w * c.channels * taps / CELLS)
        case "winograd":
            lines = c.images * -(-c.out_h // 2)
            units = lines if lines * -(-c.out_w // 2) >= FEW_TILES else -(-c.features // FEATURES)
            return Work(units, rows * c.out_w * c.features * c.channels * taps / 2 / PRODUCTS)
        case _:
            units = max(rows * c.out_w // 8, c.groups, -(-c.features // 64))
            return Work(units, rows * c.out_w * c.features * c.channels * taps / PRODUCTS)
