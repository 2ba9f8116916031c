"""Reductions of windows as MaxPool and AveragePool."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tapestry.exports.onnx_blocks.contractions import image_of
from tapestry.exports.onnx_blocks.onnx_nodes import Nodes, Value
from tapestry.exports.onnx_blocks.read_nodes import Frame
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block
from tapestry.ir.index import dims_of
from tapestry.ir.kernel import Box
from tapestry.ir.monoid import lowest, primitive_of
from tapestry.ir.recognise.convolution import Window, window
from tapestry.ir.types import FLOATS


def pooled(
    nodes: Nodes, op: Block, frame: Frame, ins: Sequence[Box | None], held: Sequence[Value | None]
) -> Value | None:  # fmt: skip
    """The maximum, or the sum, of sliding windows; None where an operation is neither."""
    windows = _windows(op)
    if windows is None or 0 in frame.extents:
        return None
    body = op.body[0]
    assert isinstance(body, Arg)
    x, box = held[body.pos], ins[body.pos]
    assert x is not None and box is not None
    at = dict(zip(frame.names, frame.box, strict=True))
    images = [image_of(v, at, box[k + 2]) for k, v in enumerate(windows)]
    outer = [at[op.dims[k].name] for k in range(2)]
    if any(i is None for i in images) or any(lo < b[0] or hi > b[1] for (lo, hi), b in zip(outer, box, strict=False)):
        return None
    cells = [(lo - b[0], hi - b[0]) for (lo, hi), b in zip(outer, box, strict=False)] + [i.cells for i in images if i]
    kernel = [at[v.window][1] - at[v.window][0] if v.window else 1 for v in windows]
    pads = [i.zeros[0] for i in images if i] + [i.zeros[1] for i in images if i]
    if any(p >= k for p, k in zip(pads, kernel * 2, strict=True)):
        return None
    how = {
        "kernel_shape": kernel, "strides": [v.stride for v in windows], "pads": pads,
        "dilations": [v.dilation for v in windows],
    }  # fmt: skip
    extents = frame.extents[: len(op.dims)]
    if primitive_of(op.monoid) == "max":
        return nodes.add("MaxPool", [nodes.slice(x, cells)], extents, x.dtype, **how)
    mean = nodes.add("AveragePool", [nodes.slice(x, cells)], extents, x.dtype, count_include_pad=1, **how)
    return nodes.apply("Mul", [mean, nodes.scalar(prod(kernel), x.dtype)])


def _windows(op: Block) -> list[Window] | None:
    """The windows of each axis but the first two, which are dimensions of the result."""
    merge, body = primitive_of(op.monoid), op.body[0] if len(op.body) == 1 else None
    if merge not in ("max", "add") or not isinstance(body, Arg) or op.inner or body.dtype not in FLOATS - {"bf16"}:
        return None
    read = op.reads[body.pos]
    rank = len(read.index)
    around = lowest(body.dtype).value if merge == "max" else 0.0
    if rank not in (3, 4, 5) or len(op.dims) != rank or read.when or read.other not in (None, around):
        return None
    names, reduced, ranges = [d.name for d in op.dims], {d.name for d in op.reduce}, op.ranges
    if any(not e.is_dim or str(e) != n for e, n in zip(read.index[:2], names, strict=False)):
        return None
    found: list[Window] = []
    used: list[str] = []
    for axis in range(2, rank):
        own = sorted(dims_of(read.index[axis]) & reduced)
        v = window(op, read, axis, own[0] if own else "", ranges) if len(own) < 2 else None
        if v is None:
            return None
        found.append(v)
        used += own
    if len(set(used)) < len(used) or any(d.size > 1 and d.name not in used for d in op.reduce) or not used:
        return None
    return found
