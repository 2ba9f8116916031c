"""Convolutions: contractions of windows that slide over an image, recognised from the projections alone."""

from __future__ import annotations

from dataclasses import dataclass

from tapestry.ir.expr import Arg, Expr
from tapestry.ir.graph import Block, Read, names_of
from tapestry.ir.index import dim, dims_of
from tapestry.ir.recognition.contraction import factors


@dataclass(frozen=True, slots=True)
class Window:
    """One spatial axis of a convolution: output dimension, window dimension ("" when there is none), stride, dilation."""

    out: str
    window: str
    stride: int
    dilation: int
    offset: int


@dataclass(frozen=True, slots=True)
class Conv:
    """A contraction that is a convolution: positions of the reads, and what each axis is."""

    x: int
    w: int
    batch: str
    channel: str
    feature: str
    windows: tuple[Window, ...]


def convolution(op: Block) -> Conv | None:
    """The convolution that a contraction is, by its projections; ``None`` when it is none."""
    both = factors(op)
    if both is None:
        return None
    reads = [plain_read(op, e) for e in both]
    if None in reads:
        return None
    for x, w in (reads, reads[::-1]):
        assert x is not None and w is not None
        found = _match(op, x, w)
        if found is not None:
            return found
    return None


def plain_read(op: Block, e: Expr, *, guarded: bool = False) -> int | None:
    """The read that a factor is."""
    return e.pos if isinstance(e, Arg) and (guarded or not op.reads[e.pos].when) else None


def _match(op: Block, x: int, w: int) -> Conv | None:
    rx, rw = op.reads[x], op.reads[w]
    rank = len(rx.index) - 2
    ranges, reduced = op.ranges, names_of(op.reduce)
    if rank not in (1, 2, 3) or len(rw.index) != rank + 2 or rw.other is not None or rx.other not in (None, 0.0):
        return None
    if not rx.index[0].is_dim or str(rx.index[0]) in reduced or len(op.dims) != rank + 2:
        return None
    plain = [str(e) if e.is_dim else "" for e in rw.index]
    if any(not p and (e.terms or e.const) for p, e in zip(plain, rw.index, strict=True)):
        return None
    batch, feature, channel = str(rx.index[0]), plain[0], plain[1]
    if not feature or feature in reduced or (channel and channel not in reduced) or batch == feature:
        return None
    if dims_of(rx.index[1]) - {feature, channel}:
        return None
    if channel and ranges[channel] > 1 and channel in dims_of(rx.index[1] - dim(channel)):  # not one channel after another
        return None
    windows = [window(op, rx, axis + 2, plain[axis + 2], ranges) for axis in range(rank)]
    if any(v is None for v in windows):
        return None
    outs = [batch, feature, *(v.out for v in windows if v)]
    known = [n for n in (channel, *(v.window for v in windows if v)) if n]
    if len({*known}) < len(known) or not {*known} <= reduced:  # a diagonal of windows, or a weight of each place
        return None
    if outs != [d.name for d in op.dims] or any(d.name not in known and d.size > 1 for d in op.reduce):
        return None
    return Conv(x, w, batch, channel, feature, tuple(v for v in windows if v))


def window(op: Block, rx: Read, axis: int, window: str, ranges: dict[str, int]) -> Window | None:
    """What one spatial axis is, given its window's dimension."""
    e = rx.index[axis]
    out = op.dims[axis].name
    if not e.is_affine or dims_of(e) - {out, window}:
        return None
    stride, dilation = e.coef(out), e.coef(window) if window else 1
    if ranges[out] == 1 and stride == 0:
        stride = 1
    if window and dilation == 0 and ranges[window] == 1:
        dilation = 1
    return Window(out, window, stride, dilation, e.const) if stride > 0 and dilation > 0 else None
