"""Where the buffers of a program lie in one piece of memory per device: each has an offset for as long as it lives.

Everything is known before the program runs, so that addresses never change: kernels are bound to theirs once, and a whole
run can be captured in a CUDA graph. What a device needs at least is its peak of live bytes; what placing costs beyond that
(gaps, alignment) is `Arena.size` less the peak.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapestry.ir.program import Free, Load, Program, allocated
from tapestry.ir.types import HOST

ALIGNMENT = 256  # bytes: what cudaMalloc gives; descriptors and 128-bit accesses want 16


@dataclass(frozen=True, slots=True)
class Slot:
    """A buffer that lives from the step that allocates it to the one that frees it, both included."""

    name: str
    first: int
    last: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Arena:
    """Offsets in bytes by buffer name, and how many bytes there are in all."""

    offsets: Mapping[str, int]
    size: int


def slots(program: Program, device: int, resident: frozenset[str]) -> list[Slot]:
    """What a device holds, and when; resident tensors live before the first step and after the last one.

    Values of the host are not held by a device.
    """
    end = len(program.steps)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, step in enumerate(program.steps):
        for name in allocated(step):
            assert name not in first, f"{name} is allocated twice"
            fixed = isinstance(step, Load) and program.buffers[name].tensor in resident
            first[name] = -1 if fixed else i
            last[name] = end
        if isinstance(step, Free):
            last.update((name, i) for name in step.buffers if first[name] >= 0)
    buffers = program.buffers
    held = (n for n in first if buffers[n].boxes[device] is not None and buffers[n].dtype != HOST)
    return [Slot(n, first[n], last[n], buffers[n].nbytes(device)) for n in held]


def allocate(wanted: Sequence[Slot]) -> Arena:
    """Offsets for slots so that no two that live at once overlap: what stays at the bottom, the rest the best of some ways.

    Best fit over an order by size is how offsets are usually planned (Pisarchyk and Lee 2020, "Efficient memory management for
    deep neural net inference"); orders by time win where sizes are alike, and from both ends in turns in a chain.
    """
    lasting = [s for s in wanted if s.first < 0]
    bottom, offsets = 0, dict[str, int]()
    for s in lasting:
        offsets[s.name] = bottom
        bottom += _aligned(s.nbytes)
    passing = [s for s in wanted if s.first >= 0]
    by_time = sorted(passing, key=lambda s: (s.first, -s.nbytes))
    by_size = sorted(passing, key=lambda s: (-s.nbytes, s.first))
    by_life = sorted(passing, key=lambda s: (s.first - s.last, -s.nbytes))
    ways = [_fitted(by_size), _fitted(by_time), _fitted(by_life), _fitted(by_time, most_alive(passing, ALIGNMENT))]
    best = min(ways, key=lambda a: a.size)
    return Arena(offsets | {n: bottom + o for n, o in best.offsets.items()}, bottom + best.size)


def most_alive(wanted: Sequence[Slot], alignment: int = 1) -> int:
    """The most bytes that live at once, each slot's rounded up: no allocation needs less."""
    sizes = [(s, _aligned(s.nbytes, alignment)) for s in wanted]
    events = sorted([(s.first, 1, n) for s, n in sizes] + [(s.last + 1, 0, -n) for s, n in sizes])
    alive = most = 0
    for _, _, change in events:
        alive += change
        most = max(most, alive)
    return most


def _fitted(order: Sequence[Slot], top: int = 0) -> Arena:
    """Each slot into the smallest gap that holds it; with ``top``, every second one ends as near to it as may be."""
    offsets: dict[str, int] = {}
    taken: list[tuple[int, int, Slot]] = []  # by offset
    size = 0
    for k, s in enumerate(order):
        need = _aligned(s.nbytes)
        gaps = _gaps(taken, s, max(top, size))
        fits = [(hi - lo, lo, hi) for lo, hi in gaps if hi - lo >= need]
        if top and fits and k % 2:
            offset = max(hi for _, _, hi in fits) - need
        else:
            offset = min(fits)[1] if fits else gaps[-1][0] if gaps and gaps[-1][1] == max(top, size) else max(top, size)
        offsets[s.name] = offset
        size = max(size, offset + need)
        if need:
            insort(taken, (offset, offset + need, s), key=lambda t: t[0])
    return Arena(offsets, size)


def _gaps(taken: Sequence[tuple[int, int, Slot]], s: Slot, end: int) -> list[tuple[int, int]]:
    """What is free below ``end`` for as long as a slot lives."""
    out: list[tuple[int, int]] = []
    at = 0
    for lo, hi, other in taken:
        if other.last < s.first or s.last < other.first:
            continue
        if lo > at:
            out.append((at, lo))
        at = max(at, hi)
    return [*out, (at, end)] if at < end else out


def _aligned(n: int, alignment: int = ALIGNMENT) -> int:
    return -(-n // alignment) * alignment
