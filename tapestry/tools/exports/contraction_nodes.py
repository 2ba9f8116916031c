"""Sums of products as nodes: Conv where the projections are a convolution's, else MatMul."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tapestry.ir.expr import Acc, Arg, Call, Expr, call, distinct
from tapestry.ir.graph import Block, Guard, Read
from tapestry.ir.index import Aff, Floor, Mod, const, dim, dims_of, evaluate
from tapestry.ir.kernel import Box, inside
from tapestry.ir.monoid import lowest, primitive_of
from tapestry.ir.recognise import Conv, Window, convolution, counts_ones, exponential, factors, plain_read
from tapestry.ir.types import FLOATS
from tapestry.tools.exports.onnx_nodes import Frame, Nodes, Range, Value, implied, relative


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
    image = _image(nodes, c, at, (run.first, run.first + run.channels), x, x_box)
    axes = (run.features, *(at[n] if n else (0, 1) for n in (c.channel, *(v.window for v in c.windows))))
    if image is None or not inside(axes, w_box):
        return None
    weight = nodes.slice(w, relative(axes, w_box))
    shape = [hi - lo for lo, hi in (at[c.batch], run.features, *(at[v.out] for v in c.windows))]
    how = {"kernel_shape": list(weight.shape[2:]), "group": run.groups, **image[1]}
    return nodes.add("Conv", [image[0], weight], shape, x.dtype, **how)


def _image(
    nodes: Nodes, c: Conv, at: dict[str, Range], channels: Range, x: Value, box: Box
) -> tuple[Value, dict[str, list[int]]] | None:  # fmt: skip
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


# Reductions of windows as MaxPool and AveragePool.


def pooled(
    nodes: Nodes, op: Block, frame: Frame, ins: Sequence[Box | None], held: Sequence[Value | None]
) -> Value | None:  # fmt: skip
    """The maximum, or the sum, of sliding windows; None where an operation is neither."""
    c = _windows(op)
    if c is None or 0 in frame.extents:
        return None
    x, box, at = held[c.x], ins[c.x], dict(zip(frame.names, frame.box, strict=True))
    assert x is not None and box is not None
    image = _image(nodes, c, at, at[c.feature], x, box)
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


# Attention whose weights are a softmax, said with ONNX's Softmax.


def softmax_sum(op: Block) -> tuple[Expr, ...] | None:
    """``then`` over one state, the sum of values under the softmax of scores: of an operation whose sum of weighted values is
    only ever divided by the sum of the weights; None for another one.

    Softmax is NaN in a row whose scores are all minus infinity, as that division is where hidden keys count for nothing, or
    where ``then`` gives ``m - m`` for such a centre m.
    """
    weights = exponential(op.monoid, sums=2)
    if weights is None or weights.fn != "max" or weights.rate != 1 or len(op.reduce) != 1:
        return None
    guarded, then = False, list[Expr]()
    for e in op.then:
        inside = _unguarded(e)
        guarded = guarded or inside is not None
        then.append(_divided(e if inside is None else inside))
    if any(isinstance(x, Acc) and x != _sum(x) for x in distinct(then)):
        return None
    masks = isinstance(op.body[1], Call)
    return tuple(then) if counts_ones(op.body, weights.hidden(op.body[0].dtype)) and (masks or guarded) else None


def _sum(like: Expr) -> Acc:
    return Acc(-1, like.dtype)


def _unguarded(e: Expr) -> Expr | None:
    """What stands in ``where(isnan(m - m), m - m, …)``; None for anything else."""
    if not isinstance(e, Call) or e.fn != "where":
        return None
    test, bad, rest = e.args
    m = Acc(0, bad.dtype)
    off = call("sub", m, m)
    return rest if bad == off and test == call("isnan", off) else None


def _divided(e: Expr) -> Expr:
    """An expression with the state in the place of every ``o / s``."""
    if not isinstance(e, Call):
        return e
    if e.fn == "div" and e.args == (Acc(2, e.dtype), Acc(1, e.dtype)):
        return _sum(e)
    return Call(e.fn, tuple(map(_divided, e.args)), e.dtype)


# Transposed convolutions: products with a cell where a stride divides a difference of places, as ConvTranspose.


@dataclass(frozen=True, slots=True)
class Spread:
    """One spatial axis: the image's cell (out − dilation·window + offset) / stride, where that is whole."""

    out: str
    window: str
    stride: int
    dilation: int
    offset: int


@dataclass(frozen=True, slots=True)
class Transposed:
    """Positions of the reads, and what each axis is."""

    x: int
    w: int
    batch: str
    channel: str
    feature: str
    axes: tuple[Spread, ...]


@dataclass(frozen=True, slots=True)
class SpreadImage:
    """Cells of the buffer that an axis needs, what is cut off before and behind, and what is added behind."""

    cells: Range
    cut: Range
    more: int


def transposed(op: Block, extents: Sequence[Sequence[int]]) -> Transposed | None:
    """The transposed convolution, of one group, that an operation is; None where it is none.

    Args:
        extents: of the tensor of each read.
    """
    both = factors(op)
    found = [plain_read(op, e, guarded=True) for e in both or ()]
    for x, w in (found, found[::-1]) if both else ():
        if x is not None and w is not None and (c := _match(op, x, w, extents[x])) is not None:
            return c
    return None


def _match(op: Block, x: int, w: int, extents: Sequence[int]) -> Transposed | None:
    rx, rw = op.reads[x], op.reads[w]
    if len(rx.index) < 3 or rw.when or rw.other is not None or rx.other != 0 or not all(e.is_dim for e in rw.index):
        return None
    if not (rx.index[0].is_dim and rx.index[1].is_dim) or len(rw.index) != len(rx.index):
        return None
    batch, channel, feature, *windows = map(str, (rx.index[0], *rw.index))
    outs = [d.name for d in op.dims[2:]]
    if [d.name for d in op.dims] != [batch, feature, *outs] or channel != str(rx.index[1]) or len(outs) != len(windows):
        return None
    if sorted([channel, *windows]) != sorted(d.name for d in op.reduce):
        return None
    axes = [_spread(e, o, v) for e, o, v in zip(rx.index[2:], outs, windows, strict=True)]
    if None in axes:
        return None
    found = Transposed(x, w, batch, channel, feature, tuple(a for a in axes if a))
    return found if _guarded(op, rx, found, extents) else None


def _spread(e: Aff, out: str, window: str) -> Spread | None:
    """What an index is along an axis."""
    divided = [(t.arg, t.div) for t, k in e.terms if isinstance(t, Floor) and k == 1]
    if len(divided) == 1:
        ((inside, stride),) = divided
        rest = Aff(tuple((t, k) for t, k in e.terms if isinstance(t, str)), e.const)
        e = inside + rest * stride if len(rest.terms) == len(e.terms) - 1 else e
    else:
        stride = 1
    right = e.is_affine and not dims_of(e) - {out, window} and e.coef(out) == 1 and e.coef(window) < 0
    return Spread(out, window, stride, -e.coef(window), e.const) if right else None


def _guarded(op: Block, r: Read, c: Transposed, extents: Sequence[int]) -> bool:
    """Whether a read is guarded as the axes need: that strides divide, and nothing but what their places imply."""
    needed = [a for a in c.axes if a.stride > 1]
    bare, met = replace(r, when=()), [next((a for a in needed if _divides(g, a)), None) for g in r.when]
    others = [g for g, a in zip(r.when, met, strict=True) if a is None]
    return all(a in met for a in needed) and all(implied(op, g, bare, extents) for g in others)


def _divides(g: Guard, a: Spread) -> bool:
    """Whether a guard says that an axis' stride divides its place."""
    (atom, times), *more = (*g.aff.terms, ("", 0))
    if g.op != "eq" or not isinstance(atom, Mod) or times != 1 or len(more) > 1 or g.aff.const or atom.div != a.stride:
        return False
    apart = atom.arg - _window_place(a)
    return apart.is_affine and not any(n % a.stride for n in (apart.const, *(k for _, k in apart.terms)))


def _window_place(a: Spread) -> Aff:
    return dim(a.out) - dim(a.window) * a.dilation + const(a.offset)


def transpose_convolved(
    nodes: Nodes, op: Block, frame: Frame, extents: Sequence[Sequence[int]], ins: Sequence[Box | None],
    held: Sequence[Value | None],
) -> Value | None:  # fmt: skip
    """A block as ConvTranspose; None where it is none, or where its buffers do not hold all that this takes."""
    c = None if 0 in frame.extents or op.body[0].dtype not in FLOATS else transposed(op, extents)
    if c is None:
        return None
    x, w, x_box, w_box = held[c.x], held[c.w], ins[c.x], ins[c.w]
    if x is None or w is None or x_box is None or w_box is None or not x.dtype == w.dtype == op.body[0].dtype:
        return None
    at = dict(zip(frame.names, frame.box, strict=True))
    images = [image_of_spread(a, at, x_box[k + 2], extents[c.x][k + 2]) for k, a in enumerate(c.axes)]
    found = [i for i in images if i]
    cells, places = (at[c.batch], at[c.channel]), tuple(at[n] for n in (c.channel, c.feature, *(a.window for a in c.axes)))
    if len(found) < len(images) or not inside(cells, x_box[:2]) or not inside(places, w_box):
        return None
    image = nodes.slice(x, relative(cells, x_box[:2]) + [i.cells for i in found])
    weight = nodes.slice(w, relative(places, w_box))
    shape = [at[n][1] - at[n][0] for n in (c.batch, c.feature, *(a.out for a in c.axes))]
    return nodes.add(
        "ConvTranspose", [image, weight], shape, x.dtype, kernel_shape=list(weight.shape[2:]), group=1,
        strides=[a.stride for a in c.axes], dilations=[a.dilation for a in c.axes],
        pads=[i.cut[0] for i in found] + [i.cut[1] for i in found], output_padding=[i.more for i in found],
    )  # fmt: skip


def image_of_spread(a: Spread, at: Mapping[str, Range], box: Range, size: int) -> SpreadImage | None:
    """What a block reads along one axis of an image; None where ConvTranspose cannot say it, or the buffer lacks it.

    A cell i adds to the places stride·i + dilation·window − offset; what lies outside of the block is cut off.
    """
    (o0, o1), (r0, r1) = at[a.out], at[a.window]
    first, reach = o0 + a.offset - r0 * a.dilation, (r1 - r0 - 1) * a.dilation
    low, high = max(-((reach - first) // a.stride), 0), min((first + o1 - o0 - 1) // a.stride + 1, size)
    if low < high and low * a.stride > first and low > box[0]:
        low -= -(-(low * a.stride - first) // a.stride)  # earlier cells, so that places begin before the block
    before = first - low * a.stride
    behind = (high - low - 1) * a.stride + reach + 1 - before - (o1 - o0)
    if low >= high or low < box[0] or high > box[1] or before < 0 or -behind >= a.stride:
        return None
    return SpreadImage((low - box[0], high - box[0]), (before, max(behind, 0)), max(-behind, 0))
