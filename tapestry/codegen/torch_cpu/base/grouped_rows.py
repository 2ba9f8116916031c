"""Rows shared by groups of a dimension: statistics of ``floor(c/k)`` are computed once for the k channels of a group.

A dimension that the reduction sees as whole groups alone is really two, the group and the place in it. Buffers are row-major,
so that a block of whole groups is the same cells in the same order with the dimension cut in two.
"""

from __future__ import annotations

from dataclasses import replace

from tapestry.ir.graph import Block, Dim, Graph
from tapestry.ir.index import Aff, dim
from tapestry.ir.kernel import Box, Kernel
from tapestry.ir.recognition.state import row_groups
from tapestry.rewrites.core.edit import fresh_dim, reindex


def regrouped(op: Block, graph: Graph, kernel: Kernel) -> tuple[Graph, Kernel] | None:
    """The operation alone, with every such dimension cut in two, and its kernel; ``None`` where the block has none, or parts of
    groups."""
    if kernel.mode != "full" or op.inner:
        return None
    box = dict(zip((d.name for d in op.space), kernel.block, strict=True))
    sizes = {d.name: d.size for d in op.dims}
    found = {n: k for n, k in row_groups(op).items() if k < sizes[n] and not (box[n][0] % k or box[n][1] % k)}
    if not found:
        return None
    cut, bounds, env = list[Dim](), list[tuple[int, int]](), dict[str, Aff]()
    for d in op.dims:
        k, (lo, hi) = found.get(d.name, 0), box[d.name]
        if not k:
            cut, bounds = [*cut, d], [*bounds, (lo, hi)]
            continue
        taken = replace(op, dims=(*op.dims, *cut))
        outer, inner = fresh_dim(taken, f"{d.name}_group"), fresh_dim(taken, f"{d.name}_in")
        env[d.name] = dim(outer) * k + dim(inner)
        cut += [Dim(outer, d.size // k), Dim(inner, k)]
        bounds += [(lo // k, hi // k), (0, k)]
    new = replace(reindex(op, env, (*cut, *op.reduce)), dims=tuple(cut))
    shape, block = tuple(d.size for d in cut), (*bounds, *kernel.block[len(op.dims) :])
    tensors = {t: graph.tensors[t] for t in op.inputs} | {t: replace(graph.tensors[t], shape=shape) for t in op.outs}
    alone = Graph(name=graph.name, tensors=tensors, ops=(new,), inputs=op.inputs, outputs=op.outs)
    outs: tuple[Box, ...] = (tuple(bounds),) * len(op.outs)
    return alone, replace(kernel, op=0, block=block, outs=outs)
