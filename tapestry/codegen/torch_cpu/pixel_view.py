"""Operations on images as they are on pixels: channels are the last dimension, as they lie behind our convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

from tapestry.codegen.torch_cpu.base.piecewise import cut_pieces
from tapestry.codegen.torch_cpu.views import Seen, View
from tapestry.ir.expr import arg_positions
from tapestry.ir.graph import Block, Graph, Read
from tapestry.ir.index import dims_of
from tapestry.ir.kernel import Kernel, shape
from tapestry.ir.recognition.contraction import has_matrices
from tapestry.ir.recognition.convolution import convolution

_T = TypeVar("_T")
SIGNAL, VIDEO = 3, 5  # axes; four are an image's. Tensors of texts have three as well: a convolution tells


def order(rank: int) -> tuple[int, ...]:
    """Of an image's axes by pixels."""
    return (0, *range(2, rank), 1)


def _back(rank: int) -> tuple[int, ...]:
    return (0, rank - 1, *range(1, rank - 1))


def pixels(op: Block, graph: Graph, kernel: Kernel, *, anyhow: bool = False) -> Seen | None:
    """A map of images, or a reduction that is no product, by pixels; ``None`` where it is something else.

    Args:
        anyhow: the result is by pixels, whatever is read.
    """
    if kernel.mode != "full" or op.inner or not op.dims or any(b != kernel.outs[0] for b in kernel.outs):
        return None
    if op.monoid is not None and len(op.body) == 1 and (has_matrices(op) or convolution(op)):
        return None
    pieces = cut_pieces(op.body, op, kernel.block) if op.monoid is None else [(kernel.block, (*op.point, *op.then))]
    used = sorted(arg_positions(tuple(e for _, body in pieces for e in body)))
    rank = len(op.dims)
    images = [k for k in used if _is_image(graph.tensors[op.reads[k].tensor].shape)]
    if rank != VIDEO:
        images = [k for k in images if len(op.reads[k].index) < VIDEO]
    plain = (SIGNAL + 1, VIDEO) if anyhow else (SIGNAL + 1,)
    images = [k for k in images if len(op.reads[k].index) in plain or _is_convolved(graph, op.reads[k].tensor)]
    if any(kernel.ins[k] is None for k in images):
        return None
    if images and all(_is_last(op, op.reads[k]) for k in images) and any(_is_channel(op, op.reads[k]) for k in images):
        return _seen(op, graph, kernel, images, turned=False)
    if not _is_image(shape(kernel.block[:rank])) or any(len(op.reads[k].index) != rank for k in images):
        return None
    along = [_along(op, op.reads[k]) for k in images]
    fine = all(a is not None for a in along) and (anyhow or {*range(1, rank)} in along)
    return _seen(op, graph, kernel, images, turned=True) if fine else None


def _seen(op: Block, graph: Graph, kernel: Kernel, images: Sequence[int], *, turned: bool) -> Seen:
    """The operation on images by pixels, and its own dimensions so, if it is ``turned``."""
    reads, ins, views, tensors = list(op.reads), list(kernel.ins), list[View | None](), dict(graph.tensors)
    for k, r in enumerate(op.reads):
        box, t = ins[k], graph.tensors[r.tensor]
        if k not in images or box is None:
            views.append(None)
            continue
        name = f"view {k}"
        tensors[name] = replace(t, name=name, shape=_in_memory_order(t.shape))
        reads[k] = replace(r, tensor=name, index=_in_memory_order(r.index))
        ins[k] = _in_memory_order(box)
        views.append(View(shape(box), order(len(box))))
    n, out = len(op.dims), kernel.outs[0]
    at = {d.name: (d, b) for d, b in zip(op.space, kernel.block, strict=True)}
    reduced = _reduced_in_order(op, [op.reads[k] for k in images])
    new = replace(op, reduce=tuple(at[name][0] for name in reduced), reads=tuple(reads), splits=())
    block, place = kernel.block[:n], out
    if turned:
        tensors |= {t: replace(graph.tensors[t], shape=_in_memory_order(graph.tensors[t].shape)) for t in op.outs}
        new, block, place = replace(new, dims=_in_memory_order(op.dims)), _in_memory_order(block), _in_memory_order(out)
    alone = Graph(name=graph.name, tensors=tensors, ops=(new,), inputs=(), outputs=op.outs)
    block = (*block, *(at[name][1] for name in reduced))
    moved = Kernel(op=0, mode="full", block=block, ins=tuple(ins), outs=(place,) * len(op.outs))
    return Seen(alone, moved, tuple(views), _back(n) if turned else tuple(range(n)), shape(out))


def _is_last(op: Block, r: Read) -> bool:
    """Whether an image's places are not along the operation's last dimension."""
    return not any(op.dims[-1].name in dims_of(e) for e in r.index[2:])


def _is_channel(op: Block, r: Read) -> bool:
    """Whether an image's channels are along the operation's last dimension, of several that it has."""
    return op.dims[-1].size > 1 and op.dims[-1].name in dims_of(r.index[1])


def _in_memory_order(axes: Sequence[_T]) -> tuple[_T, ...]:
    return tuple(axes[k] for k in order(len(axes)))


def _is_image(extents: Sequence[int]) -> bool:
    return SIGNAL <= len(extents) <= VIDEO and extents[1] > 1 and prod(extents[2:]) > 1


def _is_convolved(graph: Graph, tensor: str) -> bool:
    """Whether a tensor is what a convolution makes, or follows from that point by point."""
    at, todo, seen, rank = graph.producers(), [tensor], set[str](), len(graph.tensors[tensor].shape)
    while todo:
        t = todo.pop()
        op = graph.ops[at[t]] if t in at and len(graph.tensors[t].shape) == rank else None
        if t in seen or not isinstance(op, Block):
            continue
        seen.add(t)
        if op.monoid and (convolution(op) or (has_matrices(op) and _has_window(op))):
            return True
        todo += () if op.monoid else op.inputs
    return False


def _has_window(op: Block) -> bool:
    """Whether a reduction reads at a place along one of its own dimensions and one of the result's, in whatever rank."""
    own, dims = {d.name for d in op.reduce}, {d.name for d in op.dims}
    return any(own & at and dims & at for r in op.reads for at in map(dims_of, r.index))


def _along(op: Block, r: Read) -> set[int] | None:
    """Axes of an image that the output's same axis is along; ``None`` where one is along another axis."""
    out = set[int]()
    for axis, e in enumerate(r.index):
        for k, d in enumerate(op.dims):
            if d.name in dims_of(e) and d.size > 1:
                if (axis == 1) != (k == 1):
                    return None
                out.add(k)
    return out


def _reduced_in_order(op: Block, images: Sequence[Read]) -> list[str]:
    """The reduced dimensions in the order in which an image's cells lie."""
    names = [d.name for d in op.reduce]
    for r in images:
        found = [n for k in order(len(r.index)) for n in sorted(dims_of(r.index[k])) if n in names]
        if sorted(found) == sorted(names):
            return found
    return names
