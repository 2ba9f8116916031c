"""Convolutions by our own kernels (`native`): images with adjacent channels, the whole epilogue in the same pass."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base import contract
from tapestry.codegen.torch_cpu.base.closures import Epilogue
from tapestry.codegen.torch_cpu.base.point_values import held
from tapestry.codegen.torch_cpu.base.ways import Refusal, Tried, Way, first
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall, CpuKernel, Ins, Link, hold, recorded, shares
from tapestry.ir.expr import Acc, Arg
from tapestry.ir.graph import Block, Graph, Guard, Read
from tapestry.ir.index import Aff, Floor, Mod
from tapestry.ir.kernel import Box, Kernel
from tapestry.ir.recognise import factors, plain_read, window

Tensor = torch.Tensor


Convolve = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor], CCall | Calls]
"""From the image, the packed weight, the bias, the residual and flat memory for the result to the call that computes it."""
DEEPEST = 1 << 20  # steps of a reduced dimension: their blocks are listed on the stack
MOST_PLANES = 4  # channels of an image that our own loop makes adjacent
MOST_REREAD = 1 << 14  # cells of a weight that may be read again for every few rows of an image
FEW = 8  # rows: what they take is reading the weight
ALONE = 1 << 24  # products: more are worth several threads, which oneDNN's kernels have
MOST_LINEAR = 1 << 18  # cells of a weight; oneDNN is as fast on more, and faster on much more
MANY_PRODUCTS = Refusal("the kernels in C are not built here, or there are products for more than one thread")


@functools.cache
def zeros(n: int) -> Tensor:
    """What taps outside the image read."""
    return torch.zeros(n)


def pack_panels(matrix: Tensor) -> Tensor:
    """A (features, depth) matrix as panels of features for `tile.h`."""
    lib = native.library()
    assert lib is not None
    rows, depth = matrix.shape
    plain = matrix.contiguous()
    out = torch.empty(lib.tapestry_packed_size(rows, depth))
    lib.tapestry_pack(plain.data_ptr(), out.data_ptr(), rows, depth)
    return out


def pack_convolution(weight: Tensor) -> Tensor:
    """A convolution's weight (features, channels, height, width) with the channels of a tap together."""
    return pack_panels(weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1))


def pack_depthwise(weight: Tensor) -> Tensor:
    """A depthwise convolution's weight (channels, 1, height, width), by tap."""
    return weight.permute(1, 2, 3, 0).contiguous().reshape(-1)


def last(x: Tensor) -> Tensor:
    """The image with adjacent channels, as it is if it has them."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x
    return x.contiguous(memory_format=torch.channels_last)


def _planes(x: Tensor) -> bool:
    """Whether an image is a few planes side by side, of which our kernel makes pixels as it goes."""
    return 2 <= x.shape[1] <= MOST_PLANES and x.stride()[2:] == (x.shape[3], 1) and x.stride(1) != 1


def pack_winograd(weight: Tensor) -> Tensor:
    """A 3 x 3 convolution's weight as 16 matrices, G g G' of Lavin and Gray (2015), each in panels.

    Where they are not finite the weight itself is at the beginning, and a NaN at the end.
    """
    g = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], dtype=torch.float64)
    matrices = torch.einsum("ar,kcrs,bs->abkc", g, weight.double(), g).float().flatten(0, 1)
    packed = torch.cat([pack_panels(m) for m in matrices])
    if bool(packed.isfinite().all()):
        return packed
    plain = pack_convolution(weight)
    return torch.cat([plain, torch.full((packed.numel() - plain.numel(),), float("nan"))])


@dataclass(frozen=True, slots=True)
class ConvKernel:
    """A convolution with its epilogue, and how its weight is packed; equal keys make equal copies.

    Attributes:
        link: what it is to a chain, if it may be part of one.
        tried: kernels that refused before it.
    """

    call: Convolve
    pack: Callable[[Tensor], Tensor]
    key: str
    link: Link | None = None
    tried: Tried = ()


def too_deep(window: Sequence[int]) -> bool:
    """Whether channels and taps (channels of a group, height, width) are more than a kernel lists on its stack."""
    return prod(window) > DEEPEST or prod(window[1:]) > DEEPEST >> 8


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution of images of which a kernel is asked: shapes of its weight and of its result, and what follows it."""

    parts: contract.Call
    weight: Sequence[int]
    shape: Sequence[int]
    then: Epilogue
    lib: Any

    @property
    def single(self) -> bool:
        """Whether a pixel of the result is made of one pixel at the same place."""
        return tuple(self.weight[2:]) == self.parts.stride == (1, 1) and not any(self.parts.padding)

    def kernel(self, call: Any, pack: Callable[[Tensor], Tensor], key: str, behind: bool) -> ConvKernel:
        """A kernel of the library; ``behind``: whether it may read its image from memory that has but some rows at a time."""
        link = Link(4 * prod(self.shape[1:]), behind) if prod(self.weight) <= MOST_REREAD else None
        return ConvKernel(caller(call, self.parts, self.weight, self.shape, self.then), pack, key, link)


def convolve(parts: contract.Call, weight: Sequence[int], shape: Sequence[int], then: Epilogue) -> ConvKernel | Refusal:
    """The first of `CONVOLUTIONS` that takes a convolution.

    Args:
        weight: the weight's shape (features, channels of a group, height, width).
        shape: the output's shape (images, features, height, width).
    """
    lib = available(prod(shape) * prod(weight[1:]))
    if lib is None:
        return MANY_PRODUCTS
    if too_deep(weight[1:]):
        return Refusal(f"{prod(weight[1:]):,} channels and taps are more than a kernel lists on its stack")
    found = first(CONVOLUTIONS, Convolution(parts, weight, shape, then, lib))
    return found if isinstance(found, Refusal) else replace(found.made, tried=found.tried)


def _in_panels(c: Convolution) -> ConvKernel | Refusal:
    """Taps of all channels in a row, times panels of features."""
    if c.parts.groups > 1:
        return Refusal(f"it has {c.parts.groups} groups")
    return c.kernel(c.lib.tapestry_conv, pack_convolution, "panels", c.single)


def _depthwise(c: Convolution) -> ConvKernel | Refusal:
    """Each channel by itself, neighbouring channels in a register."""
    if not 1 < c.parts.groups == c.weight[0] or c.weight[1] > 1:
        return Refusal("its groups are not of one channel and one feature each")
    return c.kernel(c.lib.tapestry_depthwise, pack_depthwise, "taps", True)


def _winograd(c: Convolution) -> ConvKernel | Refusal:
    """Tiles of 4 x 4 of an image and 3 x 3 weights, transformed so that 16 products do the work of 36 (Lavin and Gray 2015)."""
    features, channels = c.weight[:2]
    if c.parts.groups > 1:
        return Refusal(f"it has {c.parts.groups} groups")
    if tuple(c.weight[2:]) != (3, 3) or not c.parts.stride == c.parts.dilation == (1, 1):
        return Refusal("its window is not 3 x 3 with stride and dilation 1")
    lanes = c.lib.tapestry_lanes()
    if channels % lanes or features % lanes:
        return Refusal(f"{channels} channels or {features} features leave a part of {lanes} lanes empty")
    if min(channels, features) < 32 or channels + features <= 64:  # measured: they are done with before they are transformed
        return Refusal(f"{channels} channels and {features} features are fewer than transforming an image pays for")
    return replace(c.kernel(c.lib.tapestry_winograd, pack_winograd, "winograd", False), link=None)


def _grouped(c: Convolution) -> ConvKernel | Refusal:
    """A convolution of groups of several features, group by group."""
    parts, weight, shape, then = c.parts, c.weight, c.shape, c.then
    count, each = parts.groups, weight[0] // parts.groups
    if count == 1 or (weight[1] == 1 and count == weight[0]):
        return Refusal("it has one group, or groups of one channel and one feature")
    if 2 * each < (lanes := c.lib.tapestry_lanes()):
        return Refusal(f"{each} features of a group leave most of {lanes} lanes empty")
    part = replace(parts, groups=1, input=(parts.input[0], weight[1], *parts.input[2:]))
    one = caller(available().tapestry_conv, part, (each, *weight[1:]), (shape[0], each, *shape[2:]), then, weight[0])

    def pack(w: Tensor) -> Tensor:
        return torch.cat([pack_convolution(w[i : i + each]) for i in range(0, weight[0], each)])

    def call(image: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> Calls:
        calls, x = list[CCall](), last(image)
        r = None if residual is None else last(residual)
        for g in range(count):
            own = slice(g * each, (g + 1) * each)
            panel = w[g * (w.numel() // count) :]
            some = None if bias is None else bias[own], None if r is None else r[:, own]
            calls += Calls.of(one(x[:, g * weight[1] : (g + 1) * weight[1]], panel, *some, out[own.start :])).parts
        moved = not shares(x, image) or (r is not None and residual is not None and not shares(r, residual))
        calls[-1].fixed &= not moved
        return Calls(tuple(calls))

    return ConvKernel(call, pack, f"panels of {count} groups")


CONVOLUTIONS = (
    Way("convolution group by group", _grouped, "the kernels below know one group, or groups of one channel"),
    Way("convolution, depthwise", _depthwise, "with one channel a group there is no matrix to multiply"),
    Way("convolution, winograd", _winograd, "fewer products than panels need, where its conditions hold"),
    Way("convolution, panels", _in_panels, "takes every convolution of one group, so it comes last"),
)


def available(products: int = 0) -> Any:
    """The library, where so many products are as well done by one thread: our kernels know no more."""
    return native.library() if torch.get_num_threads() == 1 or products <= ALONE else None


def caller(
    call: Any, parts: contract.Call, weight: Sequence[int], shape: Sequence[int], then: Epilogue, pixel: int = 0,
    *, onto: bool = False,
) -> Convolve:  # fmt: skip
    """Calls of a kernel.

    Args:
        pixel: cells from one pixel of the result to the next, by default its features.
        onto: add to what the result holds.
    """
    images, features, out_h, out_w = shape
    _, channels, in_h, in_w = parts.input
    nothing = zeros(weight[3] * max(channels, 64))
    sizes = (images, channels, features, in_h, in_w, out_h, out_w, weight[2], weight[3], *parts.stride, *parts.padding,
             *parts.dilation)  # fmt: skip
    wide = pixel or features
    y_strides = (out_h * out_w * wide, 1, out_w * wide, wide)
    clamp = (int(then.clamped), then.low, then.high, int(onto))
    known: dict[tuple[int, ...], Any] = {}
    planes: Any = native.library()
    planes = planes.tapestry_planes if parts.groups == 1 and call is not planes.tapestry_winograd else None

    def layout(x: tuple[int, ...], r: tuple[int, ...], apart: bool) -> Any:
        step = x[1 if apart else 3]
        return native.Conv(*sizes, x[0], x[2], step, *(y_strides[i] for i in (0, 2, 3)), r[0], r[2], r[3], *clamp)

    def record(image: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> CCall:
        apart = planes is not None and _planes(image)
        x, r = image if apart else last(image), None if residual is None else last(residual)
        strides = x.stride() + (y_strides if r is None else r.stride())
        if strides not in known:
            known[strides] = layout(strides[:4], strides[4:], apart)
        given = (x, w, bias, r, nothing, out)
        fixed = shares(x, image) and (r is None or residual is None or shares(r, residual))
        return CCall(planes if apart else call, known[strides], native.Buffers(*map(_at, given)), given, fixed)

    return record


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def multiply(m: int, n: int, k: int, then: Epilogue) -> Convolve | Refusal:
    """Rows times packed weights: (m, k) and (m, n) residuals to (m, n)."""
    lib = available(m * n * k)
    if lib is None:
        return MANY_PRODUCTS
    if k > DEEPEST or (n * k > MOST_LINEAR and m > FEW):
        return Refusal(f"oneDNN is as fast on {m} rows and {n * k:,} weights")
    rows = (m * n, m * n, n)
    sizes = (1, k, n, 1, m, 1, m, *(1, 1), *(1, 1), *(0, 0), *(1, 1), m * k, m * k, k, *rows, *rows)
    conv = native.Conv(*sizes, int(then.clamped), then.low, then.high)
    kernel: Any = lib.tapestry_conv

    def record(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> CCall:
        return CCall(kernel, conv, native.Buffers(*map(_at, (x, w, bias, residual, None, out))), (x, w, bias, residual, out))

    return record


# Convolutions over three axes by the kernels for two.
#
# Frames without a window along the depth are images; places without a window in a frame are one axis. Any other convolution is
# the sum of those of its frames' taps, each added to what is there, at once for all frames with the same taps inside the image.


View = Callable[[Tensor], Tensor]


def convolve_3d(parts: contract.Call, weight: Sequence[int], shape: Sequence[int], then: Epilogue) -> ConvKernel | Refusal:
    """A convolution over three axes by the kernels for two.

    Args:
        weight: the weight's shape (features, channels, depth, height, width).
        shape: the output's shape (images, features, depth, height, width).
    """
    if parts.groups > 1:
        return Refusal(f"it has {parts.groups} groups and three axes")
    images, features, frames, height, width = shape
    single = all(weight[k + 2] == parts.stride[k] == 1 and not parts.padding[k] for k in (1, 2))
    if weight[2] == 1 and not parts.padding[0]:
        own = slice(0, (frames - 1) * parts.stride[0] + 1, parts.stride[0])

        def as_images(x: Tensor) -> Tensor:
            return x[:, :, own].transpose(1, 2).flatten(0, 1)

        part = _over(parts, (images * frames, *parts.input[1:2], *parts.input[3:]), slice(1, 3))
        flat = (*weight[:2], *weight[3:])
        out = (images * frames, features, height, width)
        return _folded(convolve(part, flat, out, then), flat, as_images, lambda r: r.transpose(1, 2).flatten(0, 1))
    if single:
        rows, columns = parts.input[2], prod(parts.input[3:])
        part = replace(
            _over(parts, (*parts.input[:2], rows, columns), slice(0, 1)),
            stride=(parts.stride[0], 1), padding=(parts.padding[0], 0), dilation=(parts.dilation[0], 1),
        )  # fmt: skip
        flat, out = (*weight[:3], 1), (images, features, frames, columns)
        return _folded(convolve(part, flat, out, then), flat, lambda x: x.flatten(3), lambda r: r.flatten(3))
    return _summed(parts, weight, shape, then)


def _over(parts: contract.Call, sizes: tuple[int, ...], axes: slice) -> contract.Call:
    """The convolution of an image of other sizes, over some of the axes."""
    strides, pads, dilations = parts.stride[axes], parts.padding[axes], parts.dilation[axes]
    return replace(parts, input=sizes, stride=strides, padding=pads, dilation=dilations)


def pixels(x: Tensor) -> Tensor:
    """The image with adjacent channels, as it is if it has them, or is a few planes."""
    if x.stride(1) == 1 or x.shape[1] == 1 or (x.shape[1] <= MOST_PLANES and x.is_contiguous()):
        return x
    return x.contiguous(memory_format=torch.channels_last_3d)


def _folded(inner: ConvKernel | Refusal, weight: tuple[int, ...], image: View, added: View) -> ConvKernel | Refusal:
    """A kernel for two axes as one for three; ``image`` and ``added`` are views of what it reads."""
    if isinstance(inner, Refusal):
        return inner

    def call(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> CCall | Calls:
        near, r = image(pixels(x)), None if residual is None else added(_last(residual))
        fixed = shares(near, x) and (r is None or residual is None or shares(r, residual))
        return hold(inner.call(near, w, bias, r, out), fixed)

    return ConvKernel(call, lambda w: inner.pack(w.reshape(weight)), f"{inner.key} of 3 axes", tried=inner.tried)


def _last(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous(memory_format=torch.channels_last_3d)


@dataclass(frozen=True, slots=True)
class _Frames:
    """Frames [first, end) of the output, that have the same taps [tap, stop) inside the image."""

    first: int
    end: int
    tap: int
    stop: int


def _frames(parts: contract.Call, taps: int, frames: int) -> list[_Frames]:
    stride, pad, dilation, depth = parts.stride[0], parts.padding[0], parts.dilation[0], parts.input[2]
    inside = [[t for t in range(taps) if 0 <= z * stride - pad + t * dilation < depth] for z in range(frames)]
    out = list[_Frames]()
    for own, some in itertools.groupby(range(frames), lambda z: inside[z]):
        zs = list(some)
        out.append(_Frames(zs[0], zs[-1] + 1, own[0] if own else 0, own[-1] + 1 if own else 0))
    return out


def _summed(parts: contract.Call, weight: Sequence[int], shape: Sequence[int], then: Epilogue) -> ConvKernel | Refusal:
    """The sum over the taps along the depth."""
    lib = available(prod(shape) * prod(weight[1:]))
    images, features, frames, height, width = shape
    stride, pad, dilation, taps = parts.stride[0], parts.padding[0], parts.dilation[0], weight[2]
    found = _frames(parts, taps, frames)
    if lib is None:
        return MANY_PRODUCTS
    if any(f.tap == f.stop for f in found) or too_deep([weight[1], *weight[3:]]):
        return Refusal("a frame has no tap inside the image, or there are too many taps and channels")
    flat, pixel = (*weight[:2], *weight[3:]), height * width * features

    def one(f: _Frames, t: int) -> Convolve:
        count = f.end - f.first
        part = _over(parts, (count, parts.input[1], *parts.input[3:]), slice(1, 3))
        last = then if t == f.stop - 1 else Epilogue()
        return caller(lib.tapestry_conv, part, flat, (count, features, height, width), last, onto=t > f.tap)

    each = [(f, t, one(f, t)) for f in found for t in range(f.tap, f.stop)]

    def call(image: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> Calls:
        x, r = pixels(image), None if residual is None else _last(residual)
        calls, size = list[CCall | Calls](), w.numel() // taps
        for n, (f, t, run) in itertools.product(range(images), each):
            at = f.first * stride - pad + t * dilation
            source = x[n, :, at : at + (f.end - f.first - 1) * stride + 1 : stride].transpose(0, 1)
            more = r[n, :, f.first : f.end].transpose(0, 1) if r is not None and t == f.stop - 1 else None
            own = bias if t == f.tap else None
            calls.append(run(source, w[t * size :], own, more, out[(n * frames + f.first) * pixel :]))
        whole = Calls.of(*calls)
        hold(whole, shares(x, image) and (r is None or residual is None or shares(r, residual)))
        return whole

    def pack(w: Tensor) -> Tensor:
        return torch.cat([pack_convolution(w[:, :, t]) for t in range(taps)])

    return ConvKernel(call, pack, f"panels of {taps} frames")


# Convolutions one behind the other as one call: of what lies between two of them, some rows are in the cache at a time.


LEAST = 1 << 19  # bytes of an image that is not worth writing and reading again; less stays in the cache as it is
CACHE = 3 << 16  # bytes that all kept rows may take, of a cache of half a megabyte
MOST_ROWS = 8  # of the last output at once
KINDS = ("tapestry_conv", "tapestry_planes", "tapestry_depthwise")  # as chain.c numbers them


def follows(before: CpuKernel, after: CpuKernel) -> int | None:
    """The input of ``after`` that it may read while ``before`` makes it, where that pays."""
    if not before.link or not after.link:
        return None
    return after.link.image if after.link.behind and before.link.nbytes >= LEAST else None


def chain(calls: Sequence[CCall]) -> CCall | None:
    """Calls of convolutions, each of the image that the one before makes; ``None`` where they are not that."""
    lib: Any = native.library()
    kinds = [KINDS.index(c.function.__name__) if c.function.__name__ in KINDS else -1 for c in calls]
    if not 2 <= len(calls) <= native.MOST_LINKS or -1 in kinds or 1 in kinds[1:]:
        return None
    for a, b in itertools.pairwise(calls):
        x = (b.sizes.images, b.sizes.channels, b.sizes.in_h, b.sizes.in_w, b.sizes.x_row, b.sizes.x_pixel, b.buffers.x)
        y = (a.sizes.images, a.sizes.features, a.sizes.out_h, a.sizes.out_w, a.sizes.y_row, a.sizes.y_pixel, a.buffers.y)
        if x != y:
            return None
    rows = MOST_ROWS
    while rows > 1 and sum(4 * c.sizes.y_row * n for c, n in zip(calls[:-1], rows_held(calls, rows), strict=False)) > CACHE:
        rows //= 2
    links = (
        native.Link(ctypes.addressof(c.sizes), ctypes.addressof(c.buffers), kind, n)
        for c, kind, n in zip(calls, kinds, rows_held(calls, rows), strict=True)
    )
    sizes = native.Chain(len(calls), rows, (native.Link * native.MOST_LINKS)(*links))
    kept = (*(x for c in calls for x in c.kept), *calls)
    return CCall(lib.tapestry_chain, sizes, ctypes.c_void_p(), kept)


def rows_held(calls: Sequence[CCall], rows: int) -> list[int]:
    """How many rows of each output have to be there at once, where ``rows`` of the last one are made at a time."""
    out = [calls[-1].sizes.out_h]
    new = min(rows, out[0])
    for c in reversed([c.sizes for c in calls[1:]]):
        window = (new - 1) * c.stride_h + (c.kernel_h - 1) * c.dilation_h + 1
        new = min(c.in_h, max(window, new * c.stride_h))
        out.append(min(c.in_h, window))
    return out[::-1]


# Maximum pooling and transposed convolutions by torch's own operators, read off the projections.


States = Callable[[Sequence[Tensor | None]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Pool:
    """A maximum over windows of two axes on a block: what of the buffer it takes, and the padding around that."""

    read: int
    take: tuple[slice, ...]
    sizes: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]


def as_pool(op: Block, kernel: Kernel) -> Pool | Refusal:
    """The block as pooling, where its windows are whole."""
    if op.monoid != "max" or len(op.body) != 1 or len(op.dims) != 4 or op.inner or any(hi <= lo for lo, hi in kernel.block):
        return Refusal("it is no maximum for each pixel of images")
    e = op.body[0]
    if not isinstance(e, Arg) or e.dtype not in ("f32", "f64") or len(op.reads[e.pos].index) != 4:
        return Refusal("the maximum is not of an image of floats as it is")
    r, box = op.reads[e.pos], kernel.ins[e.pos]
    at = {d.name: b for d, b in zip(op.space, kernel.block, strict=True)}
    names = [d.name for d in op.dims]
    if r.when or r.other not in (None, float("-inf")) or box is None or any(at[d.name] != (0, d.size) for d in op.reduce):
        return Refusal("windows have parts that are left out, or padding that is no -inf")
    if [str(i) if i.is_dim else "" for i in r.index[:2]] != names[:2]:
        return Refusal("images and channels are not read in their order")
    if not all(lo <= at[n][0] and at[n][1] <= hi for n, (lo, hi) in zip(names[:2], box[:2], strict=True)):
        return Refusal("the buffer lacks images or channels")
    take = [slice(at[n][0] - lo, at[n][1] - lo) for n, (lo, _) in zip(names[:2], box[:2], strict=True)]
    reduced = {d.name: d.size for d in op.reduce}
    found = list[tuple[int, int, int, int, int]]()
    for k in (2, 3):
        inside = [n for n in reduced if any(a == n for a, _ in r.index[k].terms)]
        w = window(op, r, k, inside[0] if inside else "", op.ranges) if len(inside) <= 1 else None
        if w is None:
            return Refusal("an axis is read at no even window")
        size, (first, end) = reduced.get(w.window, 1), at[w.out]
        lo, hi = w.stride * first + w.offset, w.stride * (end - 1) + w.offset + w.dilation * (size - 1) + 1
        start, stop = max(lo, box[k][0]), min(hi, box[k][1])  # what the buffer lacks within, no tap reads
        if stop <= start:
            return Refusal("a window lies outside the image")
        take.append(slice(start - box[k][0], stop - box[k][0]))
        found.append((size, w.stride, w.dilation, start - lo, hi - stop))
    used = [a for i in r.index for a, _ in i.terms]
    if any(used.count(n) != 1 and size > 1 for n, size in reduced.items()):  # a diagonal, where an axis has it twice
        return Refusal("a window runs along a diagonal")
    (sh, th, dh, bh, ah), (sw, tw, dw, bw, aw) = found
    return Pool(e.pos, tuple(take), (sh, sw), (th, tw), (dh, dw), (bh, bw), (ah, aw))


def max_pool(op: Block, kernel: Kernel) -> States | Refusal:
    """States of a maximum over windows of two axes."""
    p = as_pool(op, kernel)
    if isinstance(p, Refusal):
        return p
    even = all(0 <= b - a < t and 2 * b <= n for n, t, b, a in zip(p.sizes, p.strides, p.before, p.after, strict=True))
    sizes, strides, dilations, pads = list(p.sizes), list(p.strides), list(p.dilations), list(p.before) if even else [0, 0]
    around = [p.before[1], p.after[1], p.before[0], p.after[0]]

    def run(ins: Sequence[Tensor | None]) -> list[Tensor]:
        x = held(ins[p.read])[p.take]
        x = x if even else torch.nn.functional.pad(x, around, value=float("-inf"))
        return [torch.max_pool2d(_last_of_pooling(x), sizes, strides, pads, dilations)]

    return run


def pooled(op: Block, kernel: Kernel) -> CpuKernel | Refusal:
    """A maximum over windows and nothing more, by our own kernel."""
    lib: Any = available()
    p = as_pool(op, kernel)
    if isinstance(p, Refusal):
        return p
    if lib is None or op.then != (Acc(0, "f32"),):
        return Refusal("something follows the maximum, or the kernels in C are not built here")
    b, c, h, w = (hi - lo for lo, hi in kernel.block[:4])
    strides = (h * w * c, 1, w * c, c)

    def record(ins: Ins, memory: Tensor) -> CCall:
        buffer = held(ins[p.read])
        x = last(buffer[p.take])
        s = x.stride()
        sizes = native.Conv(
            b, c, c, x.shape[2], x.shape[3], h, w, *p.sizes, *p.strides, *p.before, *p.dilations, s[0], s[2], s[3],
            strides[0], strides[2], strides[3], 0, 0, 0, 0, 0.0, 0.0,
        )  # fmt: skip
        buffers = native.Buffers(x.data_ptr(), None, None, None, None, memory.data_ptr())
        return CCall(lib.tapestry_max_pool, sizes, buffers, (x, memory), shares(x, buffer))

    return recorded(lambda memory: memory.as_strided((b, c, h, w), strides), record, b * c * h * w)


def _last_of_pooling(x: Tensor) -> Tensor:
    """Channels last, where torch's windows are many times faster, with strides that say so for a batch of one too."""
    _, c, h, w = x.shape
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, (h * w * c, 1, w * c, c))


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of a transposed convolution: input place i adds to outputs ``stride * i + dilation * r + first``."""

    stride: int
    dilation: int
    first: int


def transposed(op: Block, graph: Graph, kernel: Kernel) -> States | Refusal:
    """States of a transposed convolution over two axes, one group, on any block."""
    both = factors(op)
    if both is None or op.body[0].dtype != "f32" or len(op.dims) != 4 or any(hi <= lo for lo, hi in kernel.block):
        return Refusal("it is no sum of products of f32 for each pixel of images")
    reads = [plain_read(op, e, guarded=True) for e in both]
    at = {d.name: b for d, b in zip(op.space, kernel.block, strict=True)}
    for x, w in (reads, reads[::-1]):
        boxes = [box for k in (x, w) if k is not None and (box := kernel.ins[k]) is not None]
        if x is None or w is None or len(boxes) < 2:
            return Refusal("a factor is no tensor as it is")
        axes = _spread(op, op.reads[x], op.reads[w])
        if axes is None:
            continue
        if any(at[str(e)][1] > n for e, n in zip(op.reads[x].index[:2], graph.tensors[op.reads[x].tensor].shape, strict=False)):
            return Refusal("a pad adds images or channels")
        found = _transposed_part(op, at, op.reads[w], axes, *boxes)
        return _transposed(x, w, axes, found)
    return Refusal("no factor is spread over the result with a stride")


def _spread(op: Block, x: Read, w: Read) -> list[_Axis] | None:
    """The axes by projections ``x[b, c, floor((h - r + p) / s), …]`` and ``w[c, o, r, s]``."""
    b, o, *outs = (d.name for d in op.dims)
    plain = [str(e) if e.is_dim else "" for e in w.index]
    if len(x.index) != 4 or len(w.index) != 4 or "" in plain or w.when or w.other is not None or x.other != 0:
        return None
    c = plain[0]
    if [str(e) if e.is_dim else "" for e in x.index[:2]] != [b, c] or plain[1] != o:
        return None
    if {c, *plain[2:]} != {d.name for d in op.reduce} or len({*plain}) != 4:
        return None
    guards = list(x.when)
    axes = [_place(x.index[k + 2], out, r, guards) for k, (out, r) in enumerate(zip(outs, plain[2:], strict=True))]
    found = [a for a in axes if a is not None]
    return found if len(found) == 2 and not guards else None


@dataclass(frozen=True, slots=True)
class _Part:
    """A block of a transposed convolution: parts of its buffers, and what of their transposed convolution it is.

    Attributes:
        shape: of the result; of zeros alone where ``x`` is empty.
        first: the place of the first output of the parts, from the block's first cell.
        lengths: outputs of the parts along each axis.
    """

    x: tuple[slice, ...]
    w: tuple[slice, ...]
    shape: tuple[int, ...]
    first: tuple[int, ...]
    lengths: tuple[int, ...]


def _transposed_part(
    op: Block, at: dict[str, tuple[int, int]], w: Read, axes: Sequence[_Axis], x_box: Box, w_box: Box
) -> _Part:  # fmt: skip
    b, _, *outs = (d.name for d in op.dims)
    c, _, *taps = (str(e) for e in w.index)
    wanted = [at[b], at[c]]
    first, lengths = list[int](), list[int]()
    for a, out, r, (p, q) in zip(axes, outs, taps, x_box[2:], strict=True):
        (o0, o1), (r0, r1) = at[out], at[r]
        lo = -((a.first + a.dilation * (r1 - 1) - o0) // a.stride)  # the first input that reaches the block
        lo, hi = max(lo, p), min(q, (o1 - 1 - a.first - a.dilation * r0) // a.stride + 1)  # all others reach nothing
        wanted.append((lo, hi))
        first.append(a.stride * lo + a.dilation * r0 + a.first - o0)
        lengths.append((hi - lo - 1) * a.stride + a.dilation * (r1 - r0 - 1) + 1)
    some = all(p <= lo < hi <= q for (lo, hi), (p, q) in zip(wanted, x_box, strict=True))
    x = tuple(slice(lo - p, hi - p) for (lo, hi), (p, _) in zip(wanted, x_box, strict=True))
    weight = tuple(slice(at[str(e)][0] - p, at[str(e)][1] - p) for e, (p, _) in zip(w.index, w_box, strict=True))
    shape = tuple(at[d.name][1] - at[d.name][0] for d in op.dims)
    return _Part(x if some else (), weight, shape, tuple(first), tuple(lengths))


def _place(e: Aff, out: str, r: str, guards: list[Guard]) -> _Axis | None:
    """The axis with ``e = floor((out - dilation * r - first) / stride)``, whose guard (it is taken out) says it is exact."""
    inner, stride = e, 1
    if e.const == 0 and len(e.terms) == 1 and isinstance(e.terms[0][0], Floor) and e.terms[0][1] == 1:
        inner, stride = e.terms[0][0].arg, e.terms[0][0].div
        exact = [g for g in guards if g.op == "eq" and g.aff == Aff(((Mod(inner, stride), 1),))]
        if len(exact) != 1:
            return None
        guards.remove(exact[0])
    if not inner.is_affine or {a for a, _ in inner.terms} != {out, r} or inner.coef(out) != 1 or inner.coef(r) >= 0:
        return None
    return _Axis(stride, -inner.coef(r), -inner.const)


def _transposed(x: int, w: int, axes: Sequence[_Axis], part: _Part) -> States:
    if not part.x:
        return lambda ins: [torch.zeros(part.shape)]
    strides, dilations = [a.stride for a in axes], [a.dilation for a in axes]
    pads = [-n for n in part.first]  # torch cuts the padding at both ends
    more = [n - length + 2 * p for n, length, p in zip(part.shape[2:], part.lengths, pads, strict=True)]
    ready = all(p >= 0 and 0 <= m < s for p, m, s in zip(pads, more, strides, strict=True))
    places = zip(part.first, part.lengths, part.shape[2:], strict=True)
    around = [v for first, length, n in reversed(list(places)) for v in (first, n - length - first)]

    def run(ins: Sequence[Tensor | None]) -> list[Tensor]:
        image, weight = _last_of_pooling(held(ins[x])[part.x]), held(ins[w])[part.w]
        if ready:
            return [torch.conv_transpose2d(image, weight, None, strides, pads, more, 1, dilations)]
        whole = torch.conv_transpose2d(image, weight, None, strides, 0, 0, 1, dilations)
        return [torch.nn.functional.pad(whole, around)]  # negative padding cuts

    return run
