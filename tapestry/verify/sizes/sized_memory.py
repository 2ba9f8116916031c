"""The largest peak of a plan over a region of sizes, exactly.

Every extent of a buffer is a difference of two floors: over a step of the least common multiple L of all divisors it grows by
its slope times L. Where no slope is negative, bytes at a size are no more than L further on, so the largest peak is reached
among the last L sizes of each symbol: those are evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from math import lcm

from tapestry.errors import LawError
from tapestry.ir.program import Free, Program, allocated
from tapestry.ir.sizes.size_formula import Region, Sizes, formula_of
from tapestry.ir.sizes.symbolic_plan import SymbolicPlan

MOST = 4096  # sizes that are evaluated


def largest_peaks(plan: SymbolicPlan, region: Region) -> tuple[list[int], list[Sizes]]:
    """By device, the most bytes at any size of a region, and a size at which it is so many.

    Raises:
        LawError: something shrinks as a size grows, or there are too many sizes to look at.
    """
    period = _period(plan.program, len(region.low))
    last = [_last(region, k, period) for k in range(len(region.low))]
    count = 1
    for some in last:
        count *= len(some)
    if count > MOST:
        raise LawError("memory", f"{count} sizes would have to be looked at", why=f"cuts repeat after {period}")
    peaks, at = [-1] * plan.program.devices, [region.high] * plan.program.devices
    for sizes in product(*last):
        for d, peak in enumerate(peaks_at(plan, sizes)):
            if peak > peaks[d]:
                peaks[d], at[d] = peak, sizes
    return peaks, at


def peaks_at(plan: SymbolicPlan, sizes: Sizes) -> list[int]:
    """By device, the most bytes that are alive at once, at some sizes."""
    _, program = plan.at(sizes)
    alive, peak = [0] * program.devices, [0] * program.devices
    for step in program.steps:
        for b in allocated(step):
            for d in range(program.devices):
                alive[d] += program.buffers[b].nbytes(d)
        peak = [max(p, a) for p, a in zip(peak, alive, strict=True)]
        for b in step.buffers if isinstance(step, Free) else ():
            for d in range(program.devices):
                alive[d] -= program.buffers[b].nbytes(d)
    return peak


def _last(region: Region, k: int, period: int) -> list[int]:
    some = region.along(k)
    if k in region.among:  # between listed sizes anything may lie
        return list(some)
    return list(some[-period:])


def _period(program: Program, symbols: int) -> int:
    """After how many sizes all cuts repeat.

    Raises:
        LawError: an extent shrinks as a size grows.
    """
    found = 1
    for name, lo, hi in _extents(program):
        ends = [formula_of(lo), formula_of(hi)]
        found = lcm(found, *(f.div for f in ends if f))
        for k in range(symbols):
            a, b = (Fraction(f.coefs[k], f.div) if f else Fraction(0) for f in ends)
            if b < a:
                raise LawError("memory", f"buffer '{name}' shrinks as a size grows", why=f"{lo} to {hi}")
    return found


def _extents(program: Program) -> Iterator[tuple[str, int, int]]:
    for b in program.buffers.values():
        for box in b.boxes:
            yield from ((b.name, lo, hi) for lo, hi in box or ())
