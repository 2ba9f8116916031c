"""What a proof is given: the text of a kernel's source, its launches as a run makes them, and its buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tapestry.ir import kernel

NOT_GIVEN = "not given:"  # begins the name of what an operation reads and its kernel does not


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array that a kernel is given: elements of a type; ``scratch`` ones live between two passes.

    Attributes:
        strides: of the axes of the box that it holds, in elements; row-major without.
    """

    dtype: str
    size: int
    scratch: bool = False
    strides: tuple[int, ...] | None = None

    def steps(self, box: kernel.Box) -> tuple[int, ...]:
        """Elements from one cell to the next along each axis of the box that it holds."""
        return kernel.strides(box) if self.strides is None else self.strides


@dataclass(frozen=True, slots=True)
class Box:
    """A tensor descriptor of a buffer: extents and strides in elements, and the extents of a tile."""

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class At:
    """An address: a buffer's, and how many elements behind its first one."""

    buffer: str
    offset: int = 0


Value = At | int | float | tuple[int, ...] | None
Argument = str | Box | tuple[At | int, ...] | Mapping[str, Value]
"""What a parameter gets: a buffer by name, a descriptor of one, an array of addresses or numbers, a struct by its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of a function: programs along the grid, and of each parameter what it gets."""

    function: str
    grid: tuple[int, ...] = ()
    params: Mapping[str, Argument]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelText:
    """A kernel as it stands in a build.

    Attributes:
        language: of the source, ``triton`` or ``c``.
        reads: for each read of the operation that the kernel uses, the name of its buffer; states of ``finish`` come behind.
        outs: the buffers of outputs (of ``partial``: of the state's fields) in order.
    """

    name: str
    source: str
    launches: tuple[Launch, ...]
    buffers: Mapping[str, Buffer]
    reads: Mapping[int, str]
    outs: tuple[str, ...]
    states: tuple[str, ...] = field(default=())
    language: str = "triton"
