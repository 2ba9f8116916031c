"""Memory of one process for what travels: a buffer has its place for as long as it lives, and the same one in every batch."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from math import prod

import torch

from tapestry.runtime.one_process.arena import Slot, allocate


class MessageBuffers:
    """Places are reserved first, by name and life in steps; `place` allocates them all at once."""

    def __init__(self) -> None:
        self.wanted: list[Slot] = []
        self.offsets: dict[str, int] = {}
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, name: str, first: int, last: int, nbytes: int) -> None:
        """Bytes that live from one step to another, both included."""
        self.wanted.append(Slot(name, max(first, 0), last, nbytes))

    def place(self, device: torch.device) -> int:
        """Allocate; the number of bytes."""
        arena = allocate(self.wanted)
        self.offsets = dict(arena.offsets)
        self.memory = torch.empty(arena.size, dtype=torch.uint8, device=device)
        return arena.size

    def view(self, name: str, dtype: torch.dtype, extents: tuple[int, ...]) -> torch.Tensor:
        """The place of a name, as an array."""
        first = self.offsets[name]
        return self.memory[first : first + prod(extents) * dtype.itemsize].view(dtype).view(extents)


def posted_ahead(receives: Iterable[tuple[int, int, int]], most: int) -> list[int]:
    """The step at which each receive is posted: as early as no more than ``most`` bytes are expected, and at its own step
    at the latest.

    Args:
        receives: (step at which it is sent, step before which it is waited for, bytes), in the order of sending.
    """
    out, coming, expected, now = list[int](), 0, list[tuple[int, int]](), 0
    for step, use, nbytes in receives:
        while expected and coming > most and now < step:
            until, gone = heapq.heappop(expected)
            now, coming = max(now, until), coming - gone
        out.append(min(now, step) if most else step)
        heapq.heappush(expected, (use, nbytes))
        coming += nbytes
    return out


def drained_at(sends: Iterable[tuple[int, Iterable[int]]], most: int, end: int) -> list[int]:
    """The step at which the last of each group of sends has been waited for, where the oldest go whenever more than ``most``
    bytes are on their way, and the rest at the end.

    Args:
        sends: (step, bytes of each), in the order of sending.
    """
    groups, flying, total = list(sends), deque[tuple[int, int]](), 0
    out = [end] * len(groups)
    for k, (step, sizes) in enumerate(groups):
        for n in sizes:
            flying.append((k, n))
            total += n
        while flying and total > most:
            j, n = flying.popleft()
            total -= n
            out[j] = step
    for j, _ in flying:
        out[j] = end
    return out
