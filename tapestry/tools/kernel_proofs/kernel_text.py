"""What a proof is given: the text of a kernel's source, its launches as a run makes them, and its buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel

NOT_GIVEN = "not given:"  # begins the name of what an operation reads and its kernel does not


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


Argument = str | Box
"""What a parameter gets: a buffer by name, or a descriptor of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
    """One launch of a function: programs along the grid, and of each parameter what it gets."""

    function: str
    grid: tuple[int, ...]
    params: Mapping[str, Argument]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelText:
    """A kernel as it stands in a build.

    Attributes:
        reads: for each read of the operation that the kernel uses, the name of its buffer; states of ``finish`` come behind.
        outs: the buffers of outputs (of ``partial``: of the state's fields) in order.
    """

    name: str
    source: str
    launches: tuple[KernelLaunch, ...]
    buffers: Mapping[str, Buffer]
    reads: Mapping[int, str]
    outs: tuple[str, ...]
    states: tuple[str, ...] = field(default=())


def block_of(graph: Graph, kernel: Kernel) -> Block:
    """The operation of a kernel."""
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    return op
