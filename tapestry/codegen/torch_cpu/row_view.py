"""Norms of rows as they are on a matrix: one function in C for any sizes."""

from __future__ import annotations

from dataclasses import replace

from tapestry.codegen.torch_cpu.views import Seen, View
from tapestry.ir.expr import Index, arg_positions, walk
from tapestry.ir.graph import Block, Dim, Graph, Read
from tapestry.ir.index import Aff, const, dim
from tapestry.ir.kernel import Box, Kernel, shape, size, whole
from tapestry.rewrites.core.edit import fresh_dim


def rows(op: Block, graph: Graph, kernel: Kernel) -> Seen | None:
    """A reduction of the last dimension, and what follows it, over all rows; ``None`` where it reads otherwise."""
    if kernel.mode != "full" or op.inner or len(op.reduce) != 1 or not op.dims or any(b != kernel.outs[0] for b in kernel.outs):
        return None
    out, (last, row) = kernel.outs[0], (op.dims[-1], op.reduce[0])
    exprs = (*op.point, *op.then)
    ends = out[-1] == (0, last.size) and kernel.block[-1] == (0, row.size) and last.size == row.size > 1
    if not ends or out != kernel.block[: len(op.dims)] or any(isinstance(x, Index) for e in exprs for x in walk(e)):
        return None
    count, name = size(out[:-1]), fresh_dim(op, "row")
    tensors, reads, ins, views = (
        dict(graph.tensors),
        list(op.reads),
        list(kernel.ins),
        list[View | None]([None] * len(op.reads)),
    )
    for k in arg_positions(exprs):
        r, box = op.reads[k], kernel.ins[k]
        axes = None if box is None or r.when or r.other is not None else _row_index(op, r, box, out)
        if axes is None:
            return None
        end, many = axes[-1], len(axes) > 1
        extents = (count, last.size) if many else (last.size,)
        t = graph.tensors[r.tensor]
        reads[k] = replace(r, tensor=f"view {k}", index=(dim(name), end) if many else (end,))
        tensors[f"view {k}"] = replace(t, name=f"view {k}", shape=extents)
        ins[k], views[k] = whole(extents), View(extents, tuple(range(len(extents))))
    tensors |= {t: replace(graph.tensors[t], shape=(count, last.size)) for t in op.outs}
    new = replace(op, dims=(Dim(name, count), last), reads=tuple(reads), splits=())
    alone = Graph(name=graph.name, tensors=tensors, ops=(new,), inputs=(), outputs=op.outs)
    there = whole((count, last.size))
    block = (*there, (0, row.size))
    moved = Kernel(op=0, mode="full", block=block, ins=tuple(ins), outs=(there,) * len(op.outs))
    return Seen(alone, moved, tuple(views), (0, 1), shape(out))


def _row_index(op: Block, r: Read, box: Box, out: Box) -> tuple[Aff, ...] | None:
    """The index of a read of whole rows, or of one row for all; ``None`` where it is neither."""
    last = r.index[-1] if r.index else const(0)
    if not last.is_dim or str(last) not in (op.dims[-1].name, op.reduce[0].name) or box[-1] != out[-1]:
        return None
    if all(e == const(0) and b == (0, 1) for e, b in zip(r.index[:-1], box[:-1], strict=True)):
        return (last,)
    same = len(r.index) == len(op.dims) and box == out
    plain = (str(e) == d.name or (d.size == 1 and e == const(0)) for e, d in zip(r.index[:-1], op.dims, strict=False))
    return r.index if same and all(plain) else None
