"""Operations on images as they are on pixels: channels are the last dimension, as they lie behind our convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from tapestry.codegen.torch_cpu.views.image_view import Seen, View
from tapestry.ir.expr import arg_positions
from tapestry.ir.graph import Block, Graph, Read
from tapestry.ir.index import dims_of
from tapestry.ir.kernel import Kernel, shape
from tapestry.ir.recognise.contraction import sides

_T = TypeVar("_T")
ORDER = (0, 2, 3, 1)  # of an image's axes by pixels
BACK = (0, 3, 1, 2)


def pixels(op: Block, graph: Graph, kernel: Kernel) -> Seen | None:
    """A map of images, or a reduction that is no product, by pixels; ``None`` where it is something else."""
    if kernel.mode != "full" or op.inner or len(op.dims) != len(ORDER) or any(b != kernel.outs[0] for b in kernel.outs):
        return None
    _, c, h, w = (hi - lo for lo, hi in kernel.block[:4])
    if c == 1 or h * w == 1 or (op.monoid is not None and (len(op.body) == 1 and sides(op) is not None)):
        return None
    used = sorted(arg_positions((*op.point, *op.then)))
    images = [k for k in used if _is_image(graph.tensors[op.reads[k].tensor].shape)]
    whole = [op.reads[k] for k in images if _along(op, op.reads[k]) == {1, 2, 3}]
    if not whole or any(_along(op, op.reads[k]) is None or kernel.ins[k] is None for k in images):
        return None
    out, reads, ins, views, tensors = kernel.outs[0], list(op.reads), list(kernel.ins), list[View | None](), dict(graph.tensors)
    for k, r in enumerate(op.reads):
        box, t = ins[k], graph.tensors[r.tensor]
        if k not in images or box is None:
            views.append(None)
            continue
        name = f"view {k}"
        tensors[name] = replace(t, name=name, shape=_moved(t.shape))
        reads[k] = replace(r, tensor=name, index=_moved(r.index))
        ins[k] = _moved(box)
        views.append(View(shape(box), ORDER))
    at = {d.name: (d, b) for d, b in zip(op.space, kernel.block, strict=True)}
    reduced = _reduced(op, [op.reads[k] for k in images])
    tensors |= {t: replace(graph.tensors[t], shape=_moved(graph.tensors[t].shape)) for t in op.outs}
    new = replace(op, dims=_moved(op.dims), reduce=tuple(at[n][0] for n in reduced), reads=tuple(reads), splits=())
    alone = Graph(name=graph.name, tensors=tensors, ops=(new,), inputs=(), outputs=op.outs)
    block = (*_moved(kernel.block[:4]), *(at[n][1] for n in reduced))
    moved = Kernel(op=0, mode="full", block=block, ins=tuple(ins), outs=(_moved(out),) * len(op.outs))
    return Seen(alone, moved, tuple(views), BACK, shape(out))


def _moved(axes: Sequence[_T]) -> tuple[_T, ...]:
    return tuple(axes[k] for k in ORDER)


def _is_image(extents: Sequence[int]) -> bool:
    return len(extents) == len(ORDER) and extents[1] > 1 and extents[2] * extents[3] > 1


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


def _reduced(op: Block, images: Sequence[Read]) -> list[str]:
    """The reduced dimensions in the order in which an image's cells lie."""
    names = [d.name for d in op.reduce]
    for r in images:
        found = [n for k in ORDER for n in sorted(dims_of(r.index[k])) if n in names]
        if sorted(found) == sorted(names):
            return found
    return names
