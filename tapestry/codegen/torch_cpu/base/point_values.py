"""Values at the points of a block: expressions over a frame, and the matrix product that a sum of products is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from tapestry.codegen.torch_cpu.base import contract, scalars
from tapestry.codegen.torch_cpu.base.closures import compile_value
from tapestry.codegen.torch_cpu.base.strided_reads import Fetch, Frame, Tensor, index_values, reader
from tapestry.ir.expr import Arg, Expr, Index, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.recognition.contraction import sides
from tapestry.ir.types import STORED, numpy_dtype

States = Callable[[Sequence[Tensor | None]], list[Tensor]]


Run = Callable[[Sequence[Tensor | None], Sequence[Tensor]], list[Tensor]]
"""From the buffers of the reads, and the merged states in ``finish`` mode, to new contiguous buffers."""


class Expressions:
    """Values of expressions over a frame, as new dense tensors of the frame's shape, in whatever order of axes."""

    def __init__(self, op: Block, graph: Graph, kernel: Kernel, exprs: tuple[Expr, ...], frame: Frame) -> None:
        self.shape = frame.extents
        self.fetch = _fetchers(op, graph, kernel, exprs, frame)
        index = {x: index_values(x.aff, frame) for e in exprs for x in walk(e) if isinstance(x, Index)}
        self.compiled = [compile_value(e, index) for e in exprs]

    def values(self, ins: Sequence[Tensor | None], states: list[Tensor]) -> list[Tensor]:
        """Values that broadcast to the frame."""
        args = {k: f(held(ins[k])) for k, f in self.fetch.items()}
        return [run(args, states) for run in self.compiled]

    def __call__(self, ins: Sequence[Tensor | None], states: list[Tensor], kept: Sequence[Tensor] = ()) -> list[Tensor]:
        """New tensors: a state may be one itself unless it is ``kept``."""
        values = self.values(ins, states)
        given = {t.data_ptr() for t in (*ins, *kept) if t is not None}
        return [_own(v.expand(self.shape), given) for v in values]


def _own(v: Tensor, given: set[int]) -> Tensor:
    """A buffer of its own for every output: a view of an input must not outlive the input's."""
    if v.data_ptr() not in given and v.untyped_storage().nbytes() == v.nbytes and (v.is_contiguous() or _dense(v)):
        return v
    return v.clone(memory_format=torch.preserve_format if _dense(v) else torch.contiguous_format)


def _dense(v: Tensor) -> bool:
    """Whether no two places of a tensor are one cell, and no cell between them is left out."""
    step = 1
    for stride, n in sorted(zip(v.stride(), v.shape, strict=True)):
        if n == 1:
            continue
        if stride != step:
            return False
        step *= n
    return True


def held(buffer: Tensor | None) -> Tensor:
    """The buffer of a read that the kernel uses."""
    assert buffer is not None, "a read that the kernel uses has no buffer"
    return buffer


def _fetchers(op: Block, graph: Graph, kernel: Kernel, exprs: tuple[Expr, ...], frame: Frame) -> dict[int, Fetch]:
    out: dict[int, Fetch] = {}
    for k in sorted({x.pos for e in exprs for x in walk(e) if isinstance(x, Arg)}):
        box = kernel.ins[k]
        assert box is not None
        r = op.reads[k]
        tensor = graph.tensors[r.tensor]
        if r.other is not None and tensor.dtype in STORED and scalars.TORCH_DTYPES[tensor.dtype] == torch.uint8:  # held as bits
            r = replace(r, other=int(np.array(r.other, numpy_dtype(tensor.dtype)).view(np.uint8)))
        out[k] = reader(r, frame, box, tensor.shape)
    return out


def product(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    """States of a contraction over the block, on matrix units; ``None`` when the operation is none."""
    found = sides(op)
    dtype = op.body[0].dtype
    if found is None or any(d.size == 0 for d in op.space) or scalars.TORCH_DTYPES[dtype] in scalars.UNSIGNED:
        return None
    a, b, a_dims, b_dims = found
    both = Expressions(op, graph, kernel, (a, b), frame)
    run = contract.matmul(op, frame, a_dims, b_dims)

    def states(ins: Sequence[Tensor | None]) -> list[Tensor]:
        left, right = (scalars.cast(v, dtype) for v in both.values(ins, []))
        return [run(left, right)]

    return states
