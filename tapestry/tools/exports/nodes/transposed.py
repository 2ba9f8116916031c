"""Transposed convolutions: products with a cell where a stride divides a difference of places, as ConvTranspose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tapestry.ir.graph import Block, Guard, Read
from tapestry.ir.index import Aff, Floor, Mod, const, dim, dims_of
from tapestry.ir.kernel import Box, inside
from tapestry.ir.recognition.contraction import factors
from tapestry.ir.recognition.convolution import plain_read
from tapestry.ir.types import FLOATS
from tapestry.tools.exports.nodes.onnx_nodes import Nodes, Range, Value, relative
from tapestry.tools.exports.nodes.plain_reads import implied
from tapestry.tools.exports.nodes.read_nodes import Frame


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
    nodes: Nodes,
    op: Block,
    frame: Frame,
    extents: Sequence[Sequence[int]],
    ins: Sequence[Box | None],
    held: Sequence[Value | None],
) -> Value | None:
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
        "ConvTranspose",
        [image, weight],
        shape,
        x.dtype,
        kernel_shape=list(weight.shape[2:]),
        group=1,
        strides=[a.stride for a in c.axes],
        dilations=[a.dilation for a in c.axes],
        pads=[i.cut[0] for i in found] + [i.cut[1] for i in found],
        output_padding=[i.more for i in found],
    )


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
