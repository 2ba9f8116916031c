"""Caches that a step appends to where they lie: the present is the past's own memory, with places behind it for what is new.

A model's ``present = Concat(past, new)`` then writes the new cells alone. Nothing else of the cache is read or written by it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch

from tapestry.build.cache import Cache
from tapestry.ir.kernel import Box, Kernel


@dataclass(slots=True)
class Filled:
    """What kernels in C know of the caches of a process: numbers (i64).

    Of the cells of a present, those before the first number count, and those from the second on; the others are where the next
    step appends, for each row of the first axis.
    """

    numbers: ctypes.Array[ctypes.c_int64]

    @classmethod
    def nothing(cls, rows: int) -> Filled:
        """All cells count."""
        return cls((ctypes.c_int64 * (2 + rows))())

    @property
    def address(self) -> int:
        """Of the numbers."""
        return ctypes.addressof(self.numbers)

    def place(self, row: int) -> int:
        """The address of where a row is appended to."""
        return self.address + 8 * (2 + row)


@dataclass(frozen=True, slots=True)
class Grown:
    """A cache in one memory with the step's own cells behind it.

    Attributes:
        memory: capacity and new cells along the cache's axis (more, where another size of the model appends more at once).
        filled: which of them count.
        first: the first row that is here.
    """

    cache: Cache
    memory: torch.Tensor
    filled: Filled
    first: int

    @property
    def past(self) -> torch.Tensor:
        """The cache, as the program's past."""
        return self.memory.narrow(self.cache.axis, 0, self.cache.capacity)

    @property
    def present(self) -> torch.Tensor:
        """The program's present."""
        return self.memory.narrow(self.cache.axis, 0, self.cache.capacity + self.cache.new)

    @property
    def tail(self) -> torch.Tensor:
        """The places for what is new."""
        return self.memory.narrow(self.cache.axis, self.cache.capacity, self.cache.new)

    def kernel(self, whole: Kernel) -> Kernel:
        """What of the present's kernel is to be computed."""
        cells = (self.cache.capacity, self.cache.capacity + self.cache.new)
        box: Box = tuple(cells if k == self.cache.axis else b for k, b in enumerate(whole.block))
        return replace(whole, block=box, outs=(box,))
