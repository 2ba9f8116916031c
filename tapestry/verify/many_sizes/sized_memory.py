"""The largest peak of a plan over a region of sizes, exactly.

Every extent of a buffer is a difference of multiples of floors: over a step of the least common multiple L of all divisors it
grows by its slope times L. Where no slope is negative, bytes at a size are no more than L further on, so the largest peak is
reached among the last L sizes of each symbol; where one is, at some size. Those are evaluated, all at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np

from tapestry.errors import LawError
from tapestry.ir.many_sizes.size_formula import Formula, Region, Sizes, formula_of
from tapestry.ir.many_sizes.symbolic_plan import SymbolicPlan
from tapestry.ir.program import Free, Program, allocated
from tapestry.ir.types import Array, itemsize

MOST = 1 << 20  # sizes that are evaluated


def largest_peaks(plan: SymbolicPlan, region: Region) -> tuple[list[int], list[Sizes]]:
    """By device, the most bytes at any size of a region, and a size at which it is so many.

    Raises:
        LawError: there are too many sizes to look at.
    """
    period = _period(plan.program, len(region.low))
    last = [_last(region, k, period) for k in range(len(region.low))]
    count = math.prod(map(len, last))
    if count > MOST:
        raise LawError("memory", f"{count:,} sizes would have to be looked at", why=f"cuts repeat after {period}")
    peaks, at = list[int](), list[Sizes]()
    for peak in _peaks(plan.program, last):
        place = np.unravel_index(int(peak.argmax()), peak.shape)
        peaks.append(int(peak.max()))
        at.append(tuple(some[p] for some, p in zip(last, place, strict=True)))
    return peaks, at


def peaks_at(plan: SymbolicPlan, sizes: Sizes) -> list[int]:
    """By device, the most bytes that are alive at once, at some sizes."""
    return [int(peak.max()) for peak in _peaks(plan.program, [[n] for n in sizes])]


def _peaks(program: Program, along: Sequence[Sequence[int]]) -> list[Array]:
    """By device, the most bytes that are alive at once, for each combination of sizes."""
    shape = tuple(map(len, along))
    axes = [np.array(some, np.int64).reshape([-1 if j == k else 1 for j in range(len(along))]) for k, some in enumerate(along)]
    found = dict[Formula, Array]()

    def column(value: int) -> Any:
        f = formula_of(value)
        if f is None:
            return int(value)
        if f not in found:
            top: Any = sum((c * n for c, n in zip(f.coefs, axes, strict=True) if c), np.int64(f.const))
            found[f] = f.times * (top // f.div) + f.plus
        return found[f]

    out: list[Array] = []
    for d in range(program.devices):
        alive, peak = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        sizes = dict[str, Any]()
        for step in program.steps:
            for name in allocated(step):
                b = program.buffers[name]
                box = b.boxes[d]
                cells = 0 if box is None else math.prod((column(hi) - column(lo) for lo, hi in box), start=itemsize(b.dtype))
                sizes[name] = cells
                alive += cells
            peak = np.maximum(peak, alive)
            for name in step.buffers if isinstance(step, Free) else ():
                alive -= sizes[name]
        out.append(peak)
    return out


def _last(region: Region, k: int, period: int) -> list[int]:
    some = region.along(k)
    if k in region.among or not period:  # between listed sizes anything may lie
        return list(some)
    return list(some[-period:])


def _period(program: Program, symbols: int) -> int:
    """After how many sizes all cuts repeat; 0 where an extent shrinks as a size grows."""
    found = 1
    for lo, hi in (ends for b in program.buffers.values() for box in b.boxes for ends in box or ()):
        ends = [formula_of(lo), formula_of(hi)]
        found = lcm(found, *(f.div for f in ends if f))
        for k in range(symbols):
            a, b = (Fraction(f.times * f.coefs[k], f.div) if f else Fraction(0) for f in ends)
            if b < a:
                return 0
    return found
