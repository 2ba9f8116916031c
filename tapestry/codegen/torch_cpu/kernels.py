"""Kernels of the ``torch-cpu`` target: closures over torch operators, one per distinct block of one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tapestry.codegen.torch_cpu import contract, scalars, scan
from tapestry.codegen.torch_cpu.local import localise
from tapestry.codegen.torch_cpu.reads import Fetch, Frame, Tensor, index_values, reader
from tapestry.ir import opaque
from tapestry.ir.contraction import dims_read
from tapestry.ir.expr import Arg, Call, Const, Expr, Index, walk
from tapestry.ir.graph import Block, Graph, Opaque
from tapestry.ir.kernel import Kernel
from tapestry.ir.scan import as_scan

Run = Callable[[Sequence[Tensor | None], Sequence[Tensor]], list[Tensor]]
"""From the buffers of the reads, and the merged states in ``finish`` mode, to new contiguous buffers."""


def build(graph: Graph, kernel: Kernel) -> Run:
    """The function that computes a block; nothing of its shape is worked out again when it runs."""
    op = graph.ops[kernel.op]
    if isinstance(op, Opaque):
        return _opaque(op, graph, kernel)
    if kernel.mode == "finish":
        return _finish(op, graph, kernel)
    if op.monoid is None:
        results = _Expressions(op, graph, kernel, op.body, Frame(op.dims, kernel.block))
        return lambda ins, _: results(ins, [])
    states = _states(op, graph, kernel)
    if kernel.mode == "partial":
        return lambda ins, _: [s.contiguous() for s in states(ins)]
    tail = _Expressions(op, graph, kernel, op.then, Frame(op.dims, kernel.block[: len(op.dims)]))
    return lambda ins, _: tail(ins, states(ins))


class _Expressions:
    """Values of expressions over a frame, as new contiguous tensors of the frame's shape."""

    def __init__(self, op: Block, graph: Graph, kernel: Kernel, exprs: tuple[Expr, ...], frame: Frame) -> None:
        self.exprs, self.frame = exprs, frame
        self.fetch = _fetchers(op, graph, kernel, exprs, frame)
        self.index = {x: index_values(x.aff, frame) for e in exprs for x in walk(e) if isinstance(x, Index)}

    def values(self, ins: Sequence[Tensor | None], states: list[Tensor]) -> list[Tensor]:
        """Values that broadcast to the frame."""
        args = {k: f(_held(ins[k])) for k, f in self.fetch.items()}
        return [scalars.value(e, args, states, lambda i: self.index[i]) for e in self.exprs]

    def __call__(self, ins: Sequence[Tensor | None], states: list[Tensor]) -> list[Tensor]:
        shape = self.frame.extents
        given = {t.data_ptr() for t in (*ins, *states) if t is not None}
        out = [v.expand(shape).contiguous() for v in self.values(ins, states)]
        # a buffer of its own for every output: a view of an input must not outlive the input's
        return [v.clone() if v.data_ptr() in given or v.untyped_storage().nbytes() != v.nbytes else v for v in out]


def _held(buffer: Tensor | None) -> Tensor:
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


def _finish(op: Block, graph: Graph, kernel: Kernel) -> Run:
    tail = _Expressions(op, graph, kernel, op.then, Frame(op.dims, kernel.block))
    return lambda ins, states: tail(ins, list(states))


def _states(op: Block, graph: Graph, kernel: Kernel) -> Callable[[Sequence[Tensor | None]], list[Tensor]]:
    """Monoid states of each output point over the block."""
    frame = Frame(op.space, kernel.block)
    special = (
        _scan(op, graph, kernel)
        or _convolution(op, graph, kernel, frame)
        or _product(op, graph, kernel, frame)
        or _selection(op, graph, kernel, frame)
    )
    if special is not None:
        return special
    body = _Expressions(op, graph, kernel, op.body, frame)
    keep, monoid = len(op.dims), op.monoid
    assert monoid is not None
    return lambda ins: scalars.reduce(monoid, [v.expand(frame.extents) for v in body.values(ins, [])], keep)


def _scan(op: Block, graph: Graph, kernel: Kernel) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    found = as_scan(op)
    if found is None or any(d.size == 0 for d in op.space):
        return None
    runs = scan.runs(op, found, kernel.block)
    body = _Expressions(runs.op, graph, kernel, runs.op.body, runs.frame)
    shape = runs.frame.extents
    return lambda ins: scan.states(op, found, runs, [v.expand(shape) for v in body.values(ins, [])])


def _convolution(
    op: Block, graph: Graph, kernel: Kernel, frame: Frame
) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    if len(op.body) != 1 or op.body[0].dtype not in ("f32", "f64"):
        return None
    here = localise(op, graph, kernel)
    found = contract.as_conv(here.op)
    if found is None:
        return None
    x, w = here.held[found.x], here.held[found.w]
    run = contract.conv(here.op, found, here.frame, x.box, w.box, x.shape)
    shape = frame.extents[: len(op.dims)]
    return lambda ins: [run(_held(ins[found.x])[x.take], _held(ins[found.w])[w.take]).reshape(shape)]


def _product(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    found = contract.sides(op)
    if found is None or any(d.size == 0 for d in op.space):
        return None
    a, b, a_dims, b_dims = found
    both = _Expressions(op, graph, kernel, (a, b), frame)
    run = contract.matmul(op, frame, a_dims, b_dims)
    dtype = op.body[0].dtype

    def states(ins: Sequence[Tensor | None]) -> list[Tensor]:
        left, right = (scalars.cast(v, dtype) for v in both.values(ins, []))
        return [run(left, right)]

    return states


def _selection(
    op: Block, graph: Graph, kernel: Kernel, frame: Frame
) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    """``sum_v where(i == v, x[v], 0)`` without the sum: a masked gather, exact on any block of v."""
    parts = _selected_parts(op)
    if parts is None:
        return None
    where_index, picked = parts
    base = Frame(op.dims, kernel.block[: len(op.dims)])
    lo, hi = kernel.block[-1]
    index = _Expressions(op, graph, kernel, (where_index,), base)
    rows = _Expressions(op, graph, kernel, (picked,), frame)

    def states(ins: Sequence[Tensor | None]) -> list[Tensor]:
        at = index.values(ins, [])[0] - lo
        table = rows.values(ins, [])[0]
        table = table.expand([*base.extents, hi - lo])
        inside = (at >= 0) & (at < hi - lo)
        place = at.clamp(0, hi - lo - 1).expand(base.extents).unsqueeze(-1)
        taken = torch.gather(table, -1, place).squeeze(-1)
        return [torch.where(inside, taken, torch.zeros((), dtype=taken.dtype))]

    return states


def _selected_parts(op: Block) -> tuple[Expr, Expr] | None:
    """(the index wanted, what is picked) of a sum that picks one element of its one reduced dimension."""
    e = op.body[0]
    if op.monoid not in ("sum", "any") or len(op.reduce) != 1 or not isinstance(e, Call) or e.fn != "where":
        return None
    test, picked, zero = e.args
    if not isinstance(test, Call) or test.fn != "eq" or not isinstance(zero, Const) or zero.value != 0:
        return None
    wanted, v = test.args if isinstance(test.args[1], Index) else test.args[::-1]
    name = op.reduce[0].name
    if not isinstance(v, Index) or not v.aff.is_dim or str(v.aff) != name:
        return None
    return (wanted, picked) if name not in dims_read(op, wanted) else None


def _opaque(op: Opaque, graph: Graph, kernel: Kernel) -> Run:
    """Slices along the dimensions that the node commutes with, then the node itself."""
    takes: list[tuple[slice, ...] | None] = []
    for t, axes, box in zip(op.ins, op.in_axes, kernel.ins, strict=True):
        if not t or box is None:
            takes.append(None)
            continue
        cut = [slice(-lo, n - lo) for (lo, _), n in zip(box, graph.tensors[t].shape, strict=True)]
        for (lo, hi), axis in zip(kernel.block, axes, strict=True):
            if axis is not None:
                cut[axis] = slice(lo - box[axis][0], hi - box[axis][0])
        takes.append(tuple(cut))

    def run(ins: Sequence[Tensor | None], _: Sequence[Tensor]) -> list[Tensor]:
        arrays = [None if c is None else to_numpy(_held(x)[c]) for x, c in zip(ins, takes, strict=True)]
        return [from_numpy(np.array(a)) for a in opaque.run(op, arrays)]

    return run


def to_numpy(x: Tensor) -> np.ndarray:
    """A numpy array with the tensor's bits (bfloat16 as ml_dtypes')."""
    if x.dtype == torch.bfloat16:
        import ml_dtypes

        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def from_numpy(a: np.ndarray) -> Tensor:
    """A tensor with the array's bits (it may share them)."""
    a = np.ascontiguousarray(a).reshape(a.shape)  # numpy would make a scalar a vector
    if a.dtype.name == "bfloat16":
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a if a.flags.writeable else a.copy())
