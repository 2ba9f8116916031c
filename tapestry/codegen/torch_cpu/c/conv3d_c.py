"""Convolutions over three axes by the kernels for two.

Frames without a window along the depth are images; places without a window in a frame are one axis. Any other convolution is
the sum of those of its frames' taps, each added to what is there, at once for all frames with the same taps inside the image.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base import contract
from tapestry.codegen.torch_cpu.base.epilogue import Epilogue
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall
from tapestry.codegen.torch_cpu.c.conv_c import (
    NO_LIBRARY,
    ConvKernel,
    Convolve,
    Tensor,
    caller,
    convolve,
    last,
    pack_convolution,
    too_deep,
)

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
            stride=(parts.stride[0], 1),
            padding=(parts.padding[0], 0),
            dilation=(parts.dilation[0], 1),
        )
        flat, out = (*weight[:3], 1), (images, features, frames, columns)
        return _folded(convolve(part, flat, out, then), flat, lambda x: x.flatten(3), lambda r: r.flatten(3))
    return _summed(parts, weight, shape, then)


def _over(parts: contract.Call, sizes: tuple[int, ...], axes: slice) -> contract.Call:
    """The convolution of an image of other sizes, over some of the axes."""
    strides, pads, dilations = parts.stride[axes], parts.padding[axes], parts.dilation[axes]
    return replace(parts, input=sizes, stride=strides, padding=pads, dilation=dilations)


def _folded(inner: ConvKernel | Refusal, weight: tuple[int, ...], image: View, added: View) -> ConvKernel | Refusal:
    """A kernel for two axes as one for three; ``image`` and ``added`` are views of what it reads."""
    if isinstance(inner, Refusal):
        return inner

    def call(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> CCall | Calls:
        near, r = image(last(x)), None if residual is None else added(last(residual))
        return inner.call(near, w, bias, r, out)

    return ConvKernel(call, lambda w: inner.pack(w.reshape(weight)), f"{inner.key} of 3 axes", tried=inner.tried)


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
    lib = native.library()
    images, features, frames, height, width = shape
    stride, pad, dilation, taps = parts.stride[0], parts.padding[0], parts.dilation[0], weight[2]
    found = _frames(parts, taps, frames)
    if lib is None:
        return NO_LIBRARY
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
        x, r = last(image), None if residual is None else last(residual)
        calls, size = list[CCall | Calls](), w.numel() // taps
        for n, (f, t, run) in itertools.product(range(images), each):
            at = f.first * stride - pad + t * dilation
            source = x[n, :, at : at + (f.end - f.first - 1) * stride + 1 : stride].transpose(0, 1)
            more = r[n, :, f.first : f.end].transpose(0, 1) if r is not None and t == f.stop - 1 else None
            own = bias if t == f.tap else None
            calls.append(run(source, w[t * size :], own, more, out[(n * frames + f.first) * pixel :]))
        return Calls.of(*calls)

    def pack(w: Tensor) -> Tensor:
        return torch.cat([pack_convolution(w[:, :, t]) for t in range(taps)])

    return ConvKernel(call, pack, f"panels of {taps} frames")
