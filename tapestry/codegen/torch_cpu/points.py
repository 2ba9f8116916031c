"""Values at the points of a block: expressions over a frame, and the matrix product that a sum of products is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tapestry.codegen.torch_cpu import contract, scalars
from tapestry.codegen.torch_cpu.reads import Fetch, Frame, Tensor, index_values, reader
from tapestry.ir.expr import Arg, Expr, Index, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel

Run = Callable[[Sequence[Tensor | None], Sequence[Tensor]], list[Tensor]]
"""From the buffers of the reads, and the merged states in ``finish`` mode, to new contiguous buffers."""


class Expressions:
    """Values of expressions over a frame, as new contiguous tensors of the frame's shape."""

    def __init__(self, op: Block, graph: Graph, kernel: Kernel, exprs: tuple[Expr, ...], frame: Frame) -> None:
        self.exprs, self.frame = exprs, frame
        self.fetch = _fetchers(op, graph, kernel, exprs, frame)
        self.index = {x: index_values(x.aff, frame) for e in exprs for x in walk(e) if isinstance(x, Index)}

    def values(self, ins: Sequence[Tensor | None], states: list[Tensor]) -> list[Tensor]:
        """Values that broadcast to the frame."""
        args = {k: f(held(ins[k])) for k, f in self.fetch.items()}
        return [scalars.value(e, args, states, lambda i: self.index[i]) for e in self.exprs]

    def __call__(self, ins: Sequence[Tensor | None], states: list[Tensor]) -> list[Tensor]:
        shape = self.frame.extents
        given = {t.data_ptr() for t in (*ins, *states) if t is not None}
        out = [v.expand(shape).contiguous() for v in self.values(ins, states)]
        # a buffer of its own for every output: a view of an input must not outlive the input's
        return [v.clone() if v.data_ptr() in given or v.untyped_storage().nbytes() != v.nbytes else v for v in out]


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
        out[k] = reader(r, frame, box, graph.tensors[r.tensor].shape)
    return out


def product(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    """States of a contraction over the block, on matrix units; ``None`` when the operation is none."""
    found = contract.sides(op)
    if found is None or any(d.size == 0 for d in op.space):
        return None
    a, b, a_dims, b_dims = found
    both = Expressions(op, graph, kernel, (a, b), frame)
    run = contract.matmul(op, frame, a_dims, b_dims)
    dtype = op.body[0].dtype

    def states(ins: Sequence[Tensor | None]) -> list[Tensor]:
        left, right = (scalars.cast(v, dtype) for v in both.values(ins, []))
        return [run(left, right)]

    return states
