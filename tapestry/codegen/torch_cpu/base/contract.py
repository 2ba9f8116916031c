"""Contractions: a product of two factors under ``sum``, as a convolution or a (batched) matrix product.

Which of the two, and with which strides, dilations and groups, is read off the projections alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch

from tapestry.codegen.torch_cpu.base.local_view import Local
from tapestry.codegen.torch_cpu.base.strided_reads import Frame
from tapestry.ir.graph import Block
from tapestry.ir.index import bounds, evaluate
from tapestry.ir.kernel import Box, slices_within
from tapestry.ir.recognition.convolution import Conv, Window, convolution

Tensor = torch.Tensor


def matmul(
    op: Block,
    frame: Frame,
    a_dims: frozenset[str],
    b_dims: frozenset[str],
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Contract two values over the reduced dimensions; the result has the map dimensions in order.

    Dimensions of both are batch, of one alone rows or columns; a reduced dimension of one alone is summed first, but where
    that is infinite or NaN: ∞·1 + ∞·(−1) is no ∞·(1 − 1), nor ∞·0 + ∞·1 one of ∞·(0 + 1). ``multiply`` is given batches of
    matrices.
    """
    names = [d.name for d in frame.dims]
    maps, reduced = [d.name for d in op.dims], [d.name for d in op.reduce]
    extent = dict(zip(names, frame.extents, strict=True))
    batch = [n for n in maps if n in a_dims and n in b_dims]
    rows = [n for n in maps if n in a_dims and n not in b_dims]
    columns = [n for n in maps if n in b_dims and n not in a_dims]
    inner = [n for n in reduced if n in a_dims and n in b_dims]
    lone = [n for n in reduced if n in a_dims ^ b_dims and extent[n] > 1]
    loose = [n for n in maps if n not in a_dims and n not in b_dims]
    swap = bool(rows and columns) and maps.index(columns[0]) < maps.index(rows[0])
    first, second = (columns, rows) if swap else (rows, columns)
    order = batch + first + second
    back = [([*order, *loose]).index(n) for n in maps]
    spare = points([n for n in reduced if n not in a_dims | b_dims], extent)

    def side(x: Tensor, own: frozenset[str], inner: list[str], outer: list[str], transpose: bool) -> Tensor:
        x = x.reshape([1] * (len(names) - x.dim()) + list(x.shape))  # a literal has no axes
        x = x.expand([extent[n] if n in own else k for n, k in zip(names, x.shape, strict=True)])  # a guard may always hold
        alone = [i for i, n in enumerate(names) if n in reduced and n not in inner and x.shape[i] > 1]
        x = x.sum(dim=alone, keepdim=True, dtype=x.dtype) if alone else x
        wanted = batch + (inner + outer if transpose else outer + inner)
        x = x.permute([names.index(n) for n in wanted] + [i for i, n in enumerate(names) if n not in wanted])
        sizes = [extent[n] for n in wanted]
        x = x.reshape(sizes)
        k, m, b = points(inner, extent), points(outer, extent), points(batch, extent)
        return x.reshape((b, k, m) if transpose else (b, m, k))

    def contract(a: Tensor, b: Tensor) -> Tensor:
        sides = ((b, b_dims), (a, a_dims)) if swap else ((a, a_dims), (b, b_dims))
        out = multiply(side(*sides[0], inner, first, False), side(*sides[1], inner, second, True))
        if lone and not out.isfinite().all():
            whole = [(x, own.union(lone), [*inner, *lone]) for x, own in sides]
            term_by_term = multiply(side(*whole[0], first, False), side(*whole[1], second, True))
            out = torch.where(out.isfinite(), out, term_by_term)
        out = out * spare if spare > 1 else out
        out = out.reshape([extent[n] for n in order] + [1] * len(loose)).permute(back)
        return out.expand([extent[n] for n in maps])

    return contract


def points(names: Sequence[str], extent: Mapping[str, int]) -> int:
    """How many points some dimensions have together."""
    return prod(extent[n] for n in names)


def conv_of(here: Local) -> Conv | None:
    """The convolution that a block is; ``None`` when it is none, or when images or channels are padded as well as axes."""
    found = convolution(here.op)
    if found is None or 0 in here.frame.extents:
        return found
    for e, n in zip(here.op.reads[found.x].index[:2], here.held[found.x].shape, strict=False):
        lo, hi = bounds(e, here.frame.intervals)
        if int(lo) < 0 or int(hi) >= n:
            return None
    return found


def conv(
    op: Block, c: Conv, frame: Frame, x_box: Box, w_box: Box, x_shape: tuple[int, ...]
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of the two buffers that convolves the block."""
    takes, pads, rows, w_take, groups = _window_cut(op, c, frame, x_box, w_box, x_shape)
    at = {d.name: b for d, b in zip(frame.dims, frame.box, strict=True)}
    sizes = [hi - lo for lo, hi in (at[c.batch], at[c.feature], *(at[v.out] for v in c.windows))]
    if 0 in sizes or any(not _window_meets_input(v, at, x_shape[k + 2]) for k, v in enumerate(c.windows)):
        return partial(_of_padding, w_take, sizes)
    function = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[len(c.windows)]
    calls = [(_one_call(c, x_box, takes, pads, rows, w_take, g), slice(g[2], g[3])) for g in groups]

    def run(x: Tensor, w: Tensor) -> Tensor:
        w = w[w_take]
        parts: list[Tensor] = []
        skips = is_finite(w) if any(any(one.padding) for one, _ in calls) else True
        for one, features in calls:
            extra = one.extra if skips else _around(one)
            piece = torch.nn.functional.pad(x[one.take], extra) if extra else x[one.take]
            image, weight = channels_first(piece), channels_first(w[features])
            padding = one.padding if skips else [0] * len(one.padding)
            parts.append(function(image, weight, None, one.stride, padding, one.dilation, one.groups))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    return run


def _of_padding(take: tuple[slice, ...], sizes: list[int], _: Tensor, w: Tensor) -> Tensor:
    """A convolution of nothing but padding, of which a buffer may be any part: 0 times each weight (NaN of infinite ones)."""
    each = (w[take] * 0).flatten(1).sum(1)
    return each.view(1, len(each), *[1] * (len(sizes) - 2)).expand(sizes).contiguous()


def is_finite(weight: Tensor) -> bool:
    """Whether torch may leave padding out: 0 times an infinite weight or NaN is NaN. Huge ones may count as infinite."""
    return bool(weight.sum().isfinite())


def _around(one: Call) -> tuple[int, ...]:
    """All zeros around a call's image, in torch's order."""
    return one.extra or tuple(p for n in reversed(one.padding) for p in (n, n))


def channels_first(x: Tensor) -> Tensor:
    """The same tensor; one channel lies as one of several would.

    Any stride of that axis is right, but torch takes some for channels last, and oneDNN's convolutions of those are wrong for
    one channel where strides leave places over (torch 2.13, oneDNN's brgemm kernels).
    """
    return x.contiguous().view(-1).view(x.shape) if x.shape[1] == 1 else x


@dataclass(frozen=True, slots=True)
class Call:
    """A convolution that is one call on a weight buffer as it is.

    Attributes:
        take: the part of the input's buffer.
        extra: zeros to add to it first (torch's order, last axis first), when ``padding`` cannot say them.
        input: shape of what is convolved.
    """

    take: tuple[slice, ...]
    extra: tuple[int, ...]
    input: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def call(op: Block, c: Conv, frame: Frame, x_box: Box, w_box: Box, x_shape: tuple[int, ...]) -> Call | None:
    """The one call that the block is; ``None`` when it is several, or reads a part of the weight's buffer."""
    takes, pads, rows, w_take, groups = _window_cut(op, c, frame, x_box, w_box, x_shape)
    whole = [hi - lo for lo, hi in w_box]
    at = {d.name: b for d, b in zip(frame.dims, frame.box, strict=True)}
    if any(not _window_meets_input(v, at, x_shape[k + 2]) for k, v in enumerate(c.windows)):
        return None
    if len(groups) != 1 or any(s != slice(0, n) for s, n in zip(w_take, whole, strict=True)):
        return None
    takes, pads = _simple(c, frame, takes, pads, [hi - lo for lo, hi in x_box[2:]])
    return _one_call(c, x_box, takes, pads, rows, w_take, groups[0])


def _one_call(
    c: Conv,
    x_box: Box,
    takes: list[slice],
    pads: list[tuple[int, int]],
    rows: slice,
    w_take: tuple[slice, ...],
    group: tuple[int, int, int, int],
) -> Call:
    """The call for one of `_groups`."""
    even = all(lo == hi for lo, hi in pads)
    first, count, _, _ = group
    start, channels = first - x_box[1][0], (w_take[1].stop - w_take[1].start) * count
    add = [0 if even else lo + hi for lo, hi in pads]
    return Call(
        take=(rows, slice(start, start + channels), *takes),
        extra=() if even else tuple(p for pair in reversed(pads) for p in pair),
        input=(rows.stop - rows.start, channels, *(t.stop - t.start + a for t, a in zip(takes, add, strict=True))),
        stride=tuple(v.stride for v in c.windows),
        padding=tuple(lo if even else 0 for lo, _ in pads),
        dilation=tuple(v.dilation for v in c.windows),
        groups=count,
    )


def _simple(
    c: Conv, frame: Frame, takes: list[slice], pads: list[tuple[int, int]], held: list[int]
) -> tuple[list[slice], list[tuple[int, int]]]:
    """The same convolution with as many zeros at both ends and, if it can be, all of the buffer to its end.

    A stride leaves places at the end that no window reaches: there, data or zeros make no difference.
    """
    at = {d.name: b for d, b in zip(frame.dims, frame.box, strict=True)}
    new_takes, new_pads = list[slice](), list[tuple[int, int]]()
    for v, take, (lo, hi), n in zip(c.windows, takes, pads, held, strict=True):
        o0, o1 = at[v.out]
        r0, r1 = at[v.window] if v.window else (0, 1)
        reach = v.dilation * (r1 - r0 - 1) + 1
        for stop in (n, take.stop) if hi == 0 and take.stop > take.start else (take.stop,):
            if (stop - take.start + 2 * lo - reach) // v.stride + 1 == o1 - o0:
                take, hi = slice(take.start, stop), lo
                break
        new_takes.append(take)
        new_pads.append((lo, hi))
    return new_takes, new_pads


_Cut = tuple[list[slice], list[tuple[int, int]], slice, tuple[slice, ...], list[tuple[int, int, int, int]]]


def _window_cut(op: Block, c: Conv, frame: Frame, x_box: Box, w_box: Box, x_shape: tuple[int, ...]) -> _Cut:
    """(spatial slices of the input's buffer, zeros around them, its rows, the part of the weight, the calls) of a block."""
    at = {d.name: b for d, b in zip(frame.dims, frame.box, strict=True)}
    both = [_axis(v, at, x_box[k + 2], x_shape[k + 2]) for k, v in enumerate(c.windows)]
    b0, b1 = at[c.batch]
    w_axes = [at[n] if n else (0, 1) for n in (c.feature, c.channel, *(v.window for v in c.windows))]
    w_take = slices_within(w_axes, w_box)
    rows = slice(b0 - x_box[0][0], b1 - x_box[0][0])
    return [t for t, _ in both], [p for _, p in both], rows, w_take, _groups(op, c, at)


def _axis(v: Window, at: dict[str, tuple[int, int]], box: tuple[int, int], extent: int) -> tuple[slice, tuple[int, int]]:
    """(slice of the buffer, zeros to add before and after) along one spatial axis.

    A buffer may begin behind the first cell of the input: strides step over what lies between it and the padding.
    """
    low, high = _extent(v, at)
    inner = (max(low, 0, box[0]), min(high, extent, box[1]))
    return slice(inner[0] - box[0], inner[1] - box[0]), (inner[0] - low, high - inner[1])


def _extent(v: Window, at: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """The positions that a block's windows span along one axis, padding among them."""
    o0, o1 = at[v.out]
    r0, r1 = at[v.window] if v.window else (0, 1)
    low = v.stride * o0 + v.dilation * r0 + v.offset
    return low, v.stride * (o1 - 1) + v.dilation * (r1 - 1) + v.offset + 1


def _window_meets_input(v: Window, at: dict[str, tuple[int, int]], extent: int) -> bool:
    """Whether some place reads inside the input; strides and dilations may step over it, on which oneDNN crashes."""
    places, taps = np.arange(*at[v.out]), np.arange(*(at[v.window] if v.window else (0, 1)))
    read = v.stride * places[:, None] + v.dilation * taps + v.offset
    return bool(((read >= 0) & (read < extent)).any())


def _groups(op: Block, c: Conv, at: dict[str, tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """(first input channel, number of groups, first and last+1 local output feature) for each call needed."""
    o0, o1 = at[c.feature]
    c0, c1 = at[c.channel] if c.channel else (0, 1)
    e = op.reads[c.x].index[1]
    firsts = np.ravel(evaluate(e, {c.feature: np.arange(o0, o1), c.channel: c0}) + np.zeros(o1 - o0, np.int64))
    edges = [0, *(int(k) + 1 for k in np.flatnonzero(np.diff(firsts))), o1 - o0]
    runs = [(int(firsts[lo]), 1, lo, hi) for lo, hi in itertools.pairwise(edges)]
    same = len({hi - lo for _, _, lo, hi in runs}) == 1
    if same and all(b[0] - a[0] == c1 - c0 for a, b in itertools.pairwise(runs)):
        return [(runs[0][0], len(runs), 0, o1 - o0)]
    return runs
