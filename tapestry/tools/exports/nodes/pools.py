"""Reductions of windows as MaxPool and AveragePool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tapestry.ir.expr import Arg, call
from tapestry.ir.graph import Block, Read
from tapestry.ir.index import const, dim, dims_of
from tapestry.ir.kernel import Box
from tapestry.ir.monoid import lowest, primitive_of
from tapestry.ir.recognition.convolution import Conv, convolution
from tapestry.ir.types import FLOATS
from tapestry.tools.exports.nodes.contraction_nodes import conv_image
from tapestry.tools.exports.nodes.onnx_nodes import Nodes, Value
from tapestry.tools.exports.nodes.read_nodes import Frame


def pooled(nodes: Nodes, op: Block, frame: Frame, ins: Sequence[Box | None], held: Sequence[Value | None]) -> Value | None:
    """The maximum, or the sum, of sliding windows; None where an operation is neither."""
    c = _windows(op)
    if c is None or 0 in frame.extents:
        return None
    x, box, at = held[c.x], ins[c.x], dict(zip(frame.names, frame.box, strict=True))
    assert x is not None and box is not None
    image = conv_image(nodes, c, at, at[c.feature], x, box)
    kernel = [at[v.window][1] - at[v.window][0] if v.window else 1 for v in c.windows]
    if image is None or any(p >= k for p, k in zip(image[1]["pads"], kernel * 2, strict=True)):
        return None
    extents = frame.extents[: len(op.dims)]
    if primitive_of(op.monoid) == "max":
        return nodes.add("MaxPool", [image[0]], extents, x.dtype, kernel_shape=kernel, **image[1])
    mean = nodes.add("AveragePool", [image[0]], extents, x.dtype, kernel_shape=kernel, count_include_pad=1, **image[1])
    return nodes.apply("Mul", [mean, nodes.scalar(prod(kernel), x.dtype)])


def _windows(op: Block) -> Conv | None:
    """The windows that are merged, as those of the convolution that weighs each channel by itself."""
    merge, body = primitive_of(op.monoid), op.body[0] if len(op.body) == 1 else None
    if merge not in ("max", "add") or not isinstance(body, Arg) or op.inner or body.dtype not in FLOATS - {"bf16"}:
        return None
    read, reduced = op.reads[body.pos], {d.name for d in op.reduce}
    own = [next(iter(sorted(dims_of(e) & reduced)), "") for e in read.index[2:]]
    around = lowest(body.dtype).value if merge == "max" else 0.0
    if not any(own) or len(op.dims) != len(read.index) or read.other not in (None, around):
        return None
    if [str(e) for e in read.index[:2] if e.is_dim] != [d.name for d in op.dims[:2]]:
        return None
    weight = Read(tensor="", index=(dim(op.dims[1].name), *(dim(n) if n else const(0) for n in ("", *own))))
    factors = Arg(0, body.dtype), Arg(1, body.dtype)
    c = convolution(replace(op, monoid="sum", body=(call("mul", *factors),), reads=(replace(read, other=None), weight)))
    return replace(c, x=body.pos) if c and not c.x else None
