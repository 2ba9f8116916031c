"""What a proof is given: the text of a kernel's source, its launches as a run makes them, and its buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array that a kernel is given: elements of a type; ``scratch`` ones live between two passes."""

    dtype: str
    size: int
    scratch: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """A tensor descriptor of a buffer: extents and strides in elements, and the extents of a tile."""

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of a function: programs along the grid, and of each parameter the buffer, or the descriptor, that it gets."""

    function: str
    grid: tuple[int, ...]
    params: Mapping[str, str | Box]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelText:
    """A kernel as it stands in a build.

    Attributes:
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
