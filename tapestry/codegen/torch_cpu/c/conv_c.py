"""Convolutions by our own kernels (`native`): images with adjacent channels, the whole epilogue in the same pass.

There is one core for products, over up to three axes and in groups; channels by themselves, and 3 x 3 windows whose images are
worth transforming, have kernels for two axes. Frames without a window along the depth are images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base import contract
from tapestry.codegen.torch_cpu.base.epilogue import Epilogue
from tapestry.codegen.torch_cpu.base.ways import Refusal, Tried, Way, first
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall

Tensor = torch.Tensor


Convolve = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor], CCall | Calls]
"""From the image, the packed weight, the bias, the residual and flat memory for the result to the call that computes it."""
DEEPEST = 1 << 20  # steps of a reduced dimension: their blocks are listed on the stack
NO_LIBRARY = Refusal("the kernels in C are not built here")


@functools.cache
def zeros(n: int) -> Tensor:
    """What taps outside the image read."""
    return torch.zeros(n)


def packed_size(features: int, depth: int) -> int:
    """Floats of panels."""
    lib: Any = native.library()
    return int(lib.tapestry_packed_size(features, depth))


def pack_panels(matrix: Tensor) -> Tensor:
    """A (features, depth) matrix as panels of features for `tile.h`."""
    lib = native.library()
    assert lib is not None
    rows, depth = matrix.shape
    plain = matrix.contiguous()
    out = torch.empty(packed_size(rows, depth))
    lib.tapestry_pack(plain.data_ptr(), out.data_ptr(), rows, depth)
    return out


def pack_convolution(weight: Tensor) -> Tensor:
    """A convolution's weight (features, channels, axes) with the channels of a tap together."""
    return pack_panels(weight.movedim(1, -1).flatten(1))


def pack_depthwise(weight: Tensor) -> Tensor:
    """A depthwise convolution's weight (channels, 1, height, width), by tap."""
    return weight.permute(1, 2, 3, 0).contiguous().reshape(-1)


def last(x: Tensor) -> Tensor:
    """The image with adjacent channels, as it is if it has them."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


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
        tried: kernels that refused before it.
    """

    call: Convolve
    pack: Callable[[Tensor], Tensor]
    key: str
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

    def kernel(self, call: Any, pack: Callable[[Tensor], Tensor], key: str) -> ConvKernel:
        """A kernel of the library."""
        return ConvKernel(caller(call, self.parts, self.weight, self.shape, self.then), pack, key)


def convolve(parts: contract.Call, weight: Sequence[int], shape: Sequence[int], then: Epilogue) -> ConvKernel | Refusal:
    """The first of `CONVOLUTIONS` that takes a convolution over two axes or three.

    Args:
        weight: the weight's shape (features, channels of a group, (depth,) height, width).
        shape: the output's shape (images, features, (frames,) height, width).
    """
    lib = native.library()
    if lib is None:
        return NO_LIBRARY
    if too_deep(weight[1:]):
        return Refusal(f"{prod(weight[1:]):,} channels and taps are more than a kernel lists on its stack")
    if len(shape) == 5 and weight[2] == parts.stride[0] == 1 and not parts.padding[0]:
        return _frames_as_images(parts, weight, shape, then)
    found = first(CONVOLUTIONS, Convolution(parts, weight, shape, then, lib))
    return found if isinstance(found, Refusal) else replace(found.made, tried=found.tried)


def _frames_as_images(
    parts: contract.Call, weight: Sequence[int], shape: Sequence[int], then: Epilogue
) -> ConvKernel | Refusal:
    frames, (features, *places) = shape[0] * shape[2], (shape[1], *shape[3:])
    axes = {name: getattr(parts, name)[1:] for name in ("stride", "padding", "dilation")}
    flat = replace(parts, input=(frames, parts.input[1], *parts.input[3:]), **axes)
    inner = convolve(flat, (*weight[:2], *weight[3:]), (frames, features, *places), then)
    if isinstance(inner, Refusal):
        return inner

    def images(x: Tensor) -> Tensor:
        return last(x).transpose(1, 2).flatten(0, 1)

    def call(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> CCall | Calls:
        return inner.call(images(x), w, bias, None if residual is None else images(residual), out)

    return ConvKernel(call, lambda w: inner.pack(w.squeeze(2)), f"{inner.key} of 3 axes", inner.tried)


def _in_panels(c: Convolution) -> ConvKernel | Refusal:
    """Taps of all channels of a group in a row, times panels of its features."""
    groups, each = c.parts.groups, c.weight[0] // c.parts.groups
    if groups > 1 and (each == 1 or 4 * each < c.lib.tapestry_lanes()):
        return Refusal(f"{each} features of a group leave most lanes empty")

    def pack(w: Tensor) -> Tensor:
        return torch.cat([pack_convolution(w[i : i + each]) for i in range(0, w.shape[0], each)])

    return c.kernel(c.lib.tapestry_conv, pack, f"panels of {groups} groups" if groups > 1 else "panels")


def _depthwise(c: Convolution) -> ConvKernel | Refusal:
    """Each channel by itself, neighbouring channels in a register."""
    if not 1 < c.parts.groups == c.weight[0] or c.weight[1] > 1 or len(c.shape) > 4:
        return Refusal("its groups are not of one channel and one feature each, or it has three axes")
    return c.kernel(c.lib.tapestry_depthwise, pack_depthwise, "taps")


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
    return c.kernel(c.lib.tapestry_winograd, pack_winograd, "winograd")


CONVOLUTIONS = (
    Way("convolution, depthwise", _depthwise, "with one channel a group there is no matrix to multiply"),
    Way("convolution, winograd", _winograd, "fewer products than panels need, where its conditions hold"),
    Way("convolution, panels", _in_panels, "takes every convolution whose groups fill registers, so it comes last"),
)


def caller(
    call: Any,
    parts: contract.Call,
    weight: Sequence[int],
    shape: Sequence[int],
    then: Epilogue,
    *,
    steps: tuple[int, ...] = (),
) -> Convolve:
    """Calls of a kernel.

    Args:
        steps: cells from one image, (frame,) row and pixel of the result to the next, if they do not follow each other.
    """
    images, features, *places = shape
    groups = 1 if weight[1] == 1 == features // parts.groups else parts.groups  # channels by themselves have a kernel
    axes = ((1,) * (5 - len(shape)) + tuple(of) for of in (parts.input[2:], places, weight[2:], parts.stride))
    none = (0,) * (5 - len(shape))
    nothing = zeros(weight[-1] * max(parts.input[1], 64))
    sizes = (images, groups, parts.input[1] // groups, features // groups)
    sizes += (*(n for of in axes for n in of), *none, *parts.padding, *none, *parts.dilation)
    y_steps = _cells_apart(steps or tuple(features * prod(places[k:]) for k in range(len(places) + 1)))
    clamp = (int(then.clamped), then.low, then.high)

    def record(image: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> CCall:
        x, r = last(image), None if residual is None else last(residual)
        of_x, of_r = (_cells_apart([s for k, s in enumerate(t.stride()) if k != 1]) for t in (x, x if r is None else r))
        given = (x, w, bias, r, nothing, out)
        return CCall(call, native.Conv(*sizes, *of_x, *y_steps, *of_r, *clamp), native.Buffers(*map(_at, given)), given)

    return record


def _cells_apart(steps: Sequence[int]) -> tuple[int, ...]:
    """Cells from one image, frame, row and pixel to the next, of those that there are."""
    return (steps[0], *(0,) * (4 - len(steps)), *steps[1:])


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def multiply(m: int, n: int, k: int, then: Epilogue) -> Convolve | Refusal:
    """Rows times packed weights: (m, k) and (m, n) residuals to (m, n)."""
    lib = native.library()
    if lib is None:
        return NO_LIBRARY
    if k > DEEPEST:
        return Refusal(f"{k:,} products of a sum are more than a kernel lists on its stack")
    rows = (m * n, 0, m * n, n)
    sizes = (1, 1, k, n, *(1, 1, m), *(1, 1, m), *(1,) * 6, *(0,) * 3, *(1,) * 3, m * k, 0, m * k, k, *rows, *rows)
    kernel: Any = lib.tapestry_conv

    def record(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> CCall:
        conv = native.Conv(*sizes, int(then.clamped), then.low, then.high)
        return CCall(kernel, conv, native.Buffers(*map(_at, (x, w, bias, residual, None, out))), (x, w, bias, residual, out))

    return record
