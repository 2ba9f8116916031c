"""Sums of products as nodes: Conv where the projections are a convolution's, else MatMul."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tapestry.ir.graph import Block
from tapestry.ir.index import evaluate
from tapestry.ir.kernel import Box, inside
from tapestry.ir.recognition.convolution import Conv, Window, convolution
from tapestry.ir.types import FLOATS
from tapestry.tools.exports.nodes.onnx_nodes import Nodes, Range, Value, relative
from tapestry.tools.exports.nodes.read_nodes import Frame


@dataclass(frozen=True, slots=True)
class Run:
    """Features of a convolution that are computed together: the first channel that they read, how many, and their groups."""

    first: int
    channels: int
    features: tuple[int, int]
    groups: int


def contract(nodes: Nodes, a: Value, b: Value, extents: tuple[int, ...], kept: int) -> Value:
    """The sum over all dimensions of a frame after the first ``kept`` of the product of two values.

    Dimensions of both are batch, of one alone rows or columns; a reduced dimension of one alone is summed first.
    """
    a, b = (nodes.reshape(v, (1,) * len(extents)) if not v.shape else v for v in (a, b))
    wide_a, wide_b = ([k for k, n in enumerate(v.shape) if n > 1] for v in (a, b))
    reduced = range(kept, len(extents))
    inner = [k for k in reduced if k in wide_a and k in wide_b]
    a = nodes.reduce("ReduceSum", a, [k for k in reduced if k in wide_a and k not in inner])
    b = nodes.reduce("ReduceSum", b, [k for k in reduced if k in wide_b and k not in inner])
    spare = prod(extents[k] for k in reduced if k not in wide_a and k not in wide_b)
    if inner:
        out = _product(nodes, a, b, kept, inner)
    else:
        out = nodes.apply("Mul", [a, b])
    out = out if spare == 1 else nodes.apply("Mul", [out, nodes.scalar(spare, out.dtype)])
    return nodes.reshape(out, out.shape[:kept])


def _product(nodes: Nodes, a: Value, b: Value, kept: int, inner: list[int]) -> Value:
    """A batch of matrix products, back in the order of the frame; of one cell along what is summed."""
    rank = len(a.shape)
    both = [k for k in range(kept) if a.shape[k] > 1 and b.shape[k] > 1]
    rows, columns = ([k for k in range(kept) if k not in both and v.shape[k] > 1] for v in (a, b))
    if rows and columns and columns[0] < rows[0]:
        a, b, rows, columns = b, a, columns, rows
    depth, height, width = (prod(v.shape[k] for k in own) for v, own in ((a, inner), (a, rows), (b, columns)))
    batch = [a.shape[k] for k in both]
    ones = [k for k in range(rank) if k not in (*both, *rows, *columns, *inner)]
    left = nodes.transpose(a, [*both, *rows, *inner, *[k for k in range(rank) if k not in (*both, *rows, *inner)]])
    right = nodes.transpose(b, [*both, *inner, *columns, *[k for k in range(rank) if k not in (*both, *inner, *columns)]])
    lines = [height] if both or not rows else [a.shape[k] for k in rows]
    left = nodes.reshape(left, [*batch, *lines, depth])
    right = nodes.reshape(right, [*batch, depth, width])
    out = nodes.add("MatMul", [left, right], [*batch, *lines, width], a.dtype)
    sizes = [*batch, *(a.shape[k] for k in rows), *(b.shape[k] for k in columns)]
    order = [*both, *rows, *columns]
    out = nodes.reshape(out, [*sizes, *(1 for _ in range(rank - len(order)))])
    places = [*order, *ones, *inner]
    return nodes.transpose(out, [places.index(k) for k in range(rank)])


@dataclass(frozen=True, slots=True)
class Image:
    """What of an axis of the image a block's windows span: cells of the buffer, and zeros before and after."""

    cells: tuple[int, int]
    zeros: tuple[int, int]


def convolve(nodes: Nodes, op: Block, frame: Frame, ins: Sequence[Box | None], held: Sequence[Value | None]) -> Value | None:
    """A sum of products as Conv; None where it is none, or reads padding alone."""
    found = convolution(op)
    if found is None or op.body[0].dtype not in FLOATS or 0 in frame.extents:
        return None
    x, w, x_box, w_box = held[found.x], held[found.w], ins[found.x], ins[found.w]
    if x is None or w is None or x_box is None or w_box is None or x.dtype != w.dtype or x.dtype != op.body[0].dtype:
        return None
    at = dict(zip(frame.names, frame.box, strict=True))
    parts = [_one(nodes, found, at, run, (x, w), (x_box, w_box)) for run in _runs(op, found, at)]
    kept = [p for p in parts if p is not None]
    return nodes.concat(kept, 1) if len(kept) == len(parts) else None


def _one(
    nodes: Nodes, c: Conv, at: dict[str, Range], run: Run, held: tuple[Value, Value], boxes: tuple[Box, Box]
) -> Value | None:
    """One convolution, of a run of features; None where the buffers do not hold what it reads."""
    (x, w), (x_box, w_box) = held, boxes
    image = conv_image(nodes, c, at, (run.first, run.first + run.channels), x, x_box)
    axes = (run.features, *(at[n] if n else (0, 1) for n in (c.channel, *(v.window for v in c.windows))))
    if image is None or not inside(axes, w_box):
        return None
    weight = nodes.slice(w, relative(axes, w_box))
    shape = [hi - lo for lo, hi in (at[c.batch], run.features, *(at[v.out] for v in c.windows))]
    how = {"kernel_shape": list(weight.shape[2:]), "group": run.groups, **image[1]}
    return nodes.add("Conv", [image[0], weight], shape, x.dtype, **how)


def conv_image(
    nodes: Nodes, c: Conv, at: dict[str, Range], channels: Range, x: Value, box: Box
) -> tuple[Value, dict[str, list[int]]] | None:
    """The cells of an image that a block's windows span, and how these go over it; None where that is padding alone, or the
    buffer lacks some."""
    images = [i for k, v in enumerate(c.windows) if (i := image_of(v, at, box[k + 2])) is not None]
    wanted = (at[c.batch], channels)
    if len(images) < len(c.windows) or not inside(wanted, box[:2]):
        return None
    how = {"strides": [v.stride for v in c.windows], "dilations": [v.dilation for v in c.windows]}
    how["pads"] = [i.zeros[0] for i in images] + [i.zeros[1] for i in images]
    return nodes.slice(x, relative(wanted, box[:2]) + [i.cells for i in images]), how


def image_of(v: Window, at: dict[str, tuple[int, int]], box: tuple[int, int]) -> Image | None:
    """What a block reads along one axis of an image; None where that is padding alone.

    A stride passes over the last cells, or zeros: they are kept where that makes the window the whole image's, or its padding
    even, as the author's was; no window begins there.
    """
    o0, o1 = at[v.out]
    r0, r1 = at[v.window] if v.window else (0, 1)
    low = v.stride * o0 + v.dilation * r0 + v.offset
    high = v.stride * (o1 - 1) + v.dilation * (r1 - 1) + v.offset + 1
    cells = (max(low, box[0]), min(high, box[1]))
    if cells[0] >= cells[1]:
        return None
    before, after, spare = cells[0] - low, high - cells[1], v.stride - 1
    if not after:
        more = min(spare, box[1] - cells[1])
        cells, spare = (cells[0], cells[1] + more), spare - more
    if cells[1] == box[1]:
        after = max(after, min(before, after + spare))
    return Image((cells[0] - box[0], cells[1] - box[0]), (before, after))


def _runs(op: Block, c: Conv, at: dict[str, tuple[int, int]]) -> list[Run]:
    """The convolutions that a block's features need: one of whole groups, else one for each group or part of one."""
    o0, o1 = at[c.feature]
    c0, c1 = at[c.channel] if c.channel else (0, 1)
    e = op.reads[c.x].index[1]
    firsts = np.ravel(evaluate(e, {c.feature: np.arange(o0, o1), c.channel: c0}) + np.zeros(o1 - o0, np.int64))
    edges = [0, *(int(k) + 1 for k in np.flatnonzero(np.diff(firsts))), o1 - o0]
    runs = [Run(int(firsts[a]), c1 - c0, (o0 + a, o0 + b), 1) for a, b in itertools.pairwise(edges)]
    same = len({b - a for a, b in (r.features for r in runs)}) == 1
    if same and all(b.first - a.first == c1 - c0 for a, b in itertools.pairwise(runs)):
        return [Run(runs[0].first, (c1 - c0) * len(runs), (o0, o1), len(runs))]
    return runs
