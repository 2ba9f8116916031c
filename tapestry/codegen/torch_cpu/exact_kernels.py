"""Kernels in canonical blocks (`ir.canonical_parts`): the same calls on the same bytes, however many devices share them.

Each call has one thread, whatever torch is set to: which kernel is taken, and in how many pieces it sums, may depend on that.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from tapestry.codegen.torch_cpu import kernels
from tapestry.codegen.torch_cpu.base import scalars
from tapestry.ir import canonical_parts
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import Box, Kernel, shape
from tapestry.ir.types import HOST
from tapestry.plan.strategy import read_box

Tensor = torch.Tensor
ALIGNMENT = 64  # bytes, of whatever torch allocates


def build(graph: Graph, kernel: Kernel) -> kernels.Run:
    """The function that computes a block, canonical block by canonical block."""
    op = graph.ops[kernel.op]
    along = None if canonical_parts.free(op) else canonical_parts.canonical(op)
    if canonical_parts.free(op) or any(graph.tensors[t].dtype == HOST for t in (*op.inputs, *op.outs)):
        return kernels.build(graph, kernel)
    assert kernel.mode == "full", "a reduction that rounds is not cut"
    at = -1 if along is None else [d.name for d in op.dims].index(along.name)
    spans = [(0, 0)] if along is None else canonical_parts.blocks(along.size, *kernel.block[at])
    with _one_thread():
        parts = [_Part(graph, kernel, op, at, span) for span in spans]
    dtypes = [scalars.TORCH_DTYPES[graph.tensors[t].dtype] for t in op.outs]

    def run(ins: Sequence[Tensor | None], states: Sequence[Tensor]) -> list[Tensor]:
        outs = [torch.empty(shape(box), dtype=d) for box, d in zip(kernel.outs, dtypes, strict=True)]
        copies: dict[tuple[int, Box], Tensor] = {}  # a weight that every block reads whole is copied once
        with _one_thread():
            for part in parts:
                part(ins, outs, copies)
        return outs

    return run


@contextmanager
def _one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Part:
    """One canonical block: slices of the inputs, a kernel of its own, and where its results go."""

    def __init__(self, graph: Graph, kernel: Kernel, op: Op, at: int, span: tuple[int, int]) -> None:
        block = tuple(span if i == at else box for i, box in enumerate(kernel.block))
        self.takes: list[tuple[tuple[slice, ...], Box] | None] = []
        boxes: list[Box | None] = []
        for k, held in enumerate(kernel.ins):
            want = None if held is None else read_box(op, graph, k, block)
            boxes.append(want)
            self.takes.append(None if want is None or held is None else (_within(want, held), want))
        self.outs = [_out_box(op, n, block, box) for n, box in enumerate(kernel.outs)]
        self.places = [_within(box, whole) for box, whole in zip(self.outs, kernel.outs, strict=True)]
        inner = Kernel(op=kernel.op, mode="full", block=block, ins=tuple(boxes), outs=tuple(self.outs))
        self.kernel = kernels.build(graph, inner)

    def __call__(self, ins: Sequence[Tensor | None], outs: Sequence[Tensor], copies: dict[tuple[int, Box], Tensor]) -> None:
        """Compute the block; inputs are contiguous and aligned alike, copied where they are not: kernels may tell otherwise."""
        given: list[Tensor | None] = []
        for k, (x, take) in enumerate(zip(ins, self.takes, strict=True)):
            if x is None or take is None:
                given.append(None)
                continue
            place, box = take
            if (k, box) not in copies:
                part = x[place]
                same = part.is_contiguous() and part.data_ptr() % ALIGNMENT == 0
                copies[k, box] = part if same else part.clone(memory_format=torch.contiguous_format)
            given.append(copies[k, box])
        for out, place, value in zip(outs, self.places, self.kernel(given, []), strict=True):
            out[place] = value


def _out_box(op: Op, n: int, block: Box, whole: Box) -> Box:
    if isinstance(op, Block):
        return block[: len(whole)]
    box = list(whole)
    for i, axis in enumerate(op.out_axes[n]):
        if axis is not None:
            box[axis] = block[i]
    return tuple(box)


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(box, outer, strict=True))
