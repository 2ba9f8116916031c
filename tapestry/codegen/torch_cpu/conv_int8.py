"""Convolutions of integers of 8 bits, summed in i32: pixels with adjacent channels, as rows of torch's integer matrix product.

The image is padded once, with what its read gives outside; one copy puts the taps of each window side by side. Zero points
are taken off the sums (`integers`), the input's with a number for each feature. Depthwise ones are a kernel in C.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base import contract
from tapestry.codegen.torch_cpu.base.point_values import Expressions, Run, held
from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.codegen.torch_cpu.base.strided_reads import Frame, Held, Tensor, localise
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c import conv_c, print_c
from tapestry.codegen.torch_cpu.c.c_calls import CpuKernel, Pack
from tapestry.codegen.torch_cpu.c.print_c import TYPES, Writer, written
from tapestry.codegen.torch_cpu.torch_ops import dense
from tapestry.codegen.torch_cpu.torch_ops.dense import one_product, shift_of, signed, takes_unsigned
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, arg_positions, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import dims_of
from tapestry.ir.kernel import Kernel, size
from tapestry.ir.recognise import Narrow, dims_read, factors, narrow

# What follows a sum in i32 for each feature, as one pass in C over rows of features: a bias, scales, rounding, saturation.


Then = Callable[[Sequence[Tensor | None], Tensor, Tensor | int], Tensor | None]
LEAST = 1 << 10  # points: fewer take no time in torch's operators either


def requantised(op: Block, graph: Graph, kernel: Kernel, feature: str) -> Then | None:
    """A function of the buffers, sums (rows by features) and what is added to each row; ``None`` where it cannot be written.

    It gives ``None`` where there turns out to be no working compiler.

    Args:
        feature: the dimension along which alone what is read varies.
    """
    then, columns = op.then, [b for d, b in zip(op.dims, kernel.block, strict=False) if d.name == feature]
    small = size(kernel.block[: len(op.dims)]) < LEAST
    if conv_c.available() is None or small or len(then) != 1 or len(columns) != 1 or isinstance(then[0], Acc):
        return None
    if then[0].dtype not in TYPES or not written(then) or any(isinstance(x, Index) for x in walk(then[0])):
        return None
    used = sorted(arg_positions(then))
    boxes = {k: b for k in used if (b := kernel.ins[k]) is not None}
    reads = {k: op.reads[k] for k in used}
    along = {n for r in reads.values() for e in (*r.index, *(g.aff for g in r.when)) for n in dims_of(e)}
    if len(boxes) < len(used) or along - {feature}:
        return None
    tensors = {k: graph.tensors[r.tensor] for k, r in reads.items()}
    described = {k: (reads[k], boxes[k], t.shape, t.dtype) for k, t in tensors.items()}
    dtype = TORCH_DTYPES[then[0].dtype]
    name = print_c.register(Writer((feature,), described, (columns[0],)).columns(then[0], then[0].dtype))

    def run(ins: Sequence[Tensor | None], total: Tensor, more: Tensor | int) -> Tensor | None:
        function: Any = print_c.function(name)
        if function is None:
            return None
        rows, width = total.shape
        added = more.expand(width).contiguous() if isinstance(more, Tensor) else torch.full((width,), more, dtype=torch.int32)
        out = torch.empty(rows, width, dtype=dtype)
        given = (*(held(ins[k]).contiguous() for k in used), total.contiguous(), added, out)
        function((ctypes.c_int64 * 1)(rows), (ctypes.c_void_p * len(given))(*(x.data_ptr() for x in given)))
        return out

    return run


Ins = Sequence[Tensor | None]
BAND = 1 << 20  # bytes of windows that are copied at once, so that they are still in cache when they are multiplied
MOST_PRODUCTS = 64  # one after another; more are the general contraction's
MOST_JOINED = 64  # channels that are multiplied as if they were one group's
ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Zero:
    """A zero point: a number, or what is read when it runs (one value, or one for each feature)."""

    known: int | None
    read: Callable[[Ins], Tensor] | None = None

    def value(self, ins: Ins, less: int) -> Tensor | int:
        """It, less a number."""
        return self.read(ins).reshape(-1) - less if self.read else (self.known or 0) - less


@dataclass(frozen=True, slots=True)
class Weight:
    """A packed weight: ``values`` as the product takes them, ``sums`` of each feature's values in i32."""

    values: Tensor
    sums: Tensor


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution of 8-bit integers over a block.

    Attributes:
        x, w: positions of the reads.
        parts: what is convolved, as one call.
        outside: what the input is outside; ``shape`` of the output (images, features, places) and ``kernel`` of the window.
        whole: whether the weight's buffer is read whole, as it is.
    """

    x: int
    w: int
    parts: contract.Call
    held: tuple[Held, Held]
    outside: int
    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    zeros: tuple[Zero, Zero]
    unsigned: tuple[bool, bool]
    whole: bool

    @property
    def depthwise(self) -> bool:
        """Whether every channel is a group with one feature; such a weight is packed in 16 bits."""
        return 1 < self.parts.groups == self.parts.input[1] == self.shape[1]

    @property
    def depth(self) -> int:
        """Products of a sum."""
        return prod(self.kernel) * self.parts.input[1] // self.parts.groups

    @property
    def joined(self) -> int:
        """Groups of few channels that are multiplied as one, by zeros where they are not each other's."""
        groups, channels = self.parts.groups, self.parts.input[1] // self.parts.groups
        if self.depthwise or self.zeros[1].known != (128 if self.unsigned[1] else 0):
            return 1
        return max(n for n in range(1, groups + 1) if groups % n == 0 and (n == 1 or n * channels <= MOST_JOINED))

    @property
    def products(self) -> int:
        """Matrix products of an image."""
        return 1 if self.depthwise else self.parts.groups // self.joined

    def pack(self, buffer: Tensor) -> Tensor:
        """The weight (features, channels of a group, window) by depth and then features, and the sums behind, as bytes."""
        if self.depthwise:
            values = buffer.movedim(1, -1).reshape(self.shape[1], self.depth).t().to(torch.int16).contiguous()
            sums = torch.sum(values, dim=0, dtype=torch.int32)
        else:
            values = self._matrices(signed(buffer) if self.unsigned[1] else buffer)
            sums = torch.sum(values, dim=1, dtype=torch.int32).view(-1)
        n = values.numel() * values.element_size()
        room = -(-n // ALIGNED) * ALIGNED
        out = torch.zeros(room + 4 * sums.numel(), dtype=torch.uint8)
        out[:n], out[room:] = values.view(-1).view(torch.uint8), sums.view(torch.uint8)
        return out

    def _matrices(self, buffer: Tensor) -> Tensor:
        """One for each product: taps, groups and channels by groups and features."""
        products, joined, taps = self.products, self.joined, prod(self.kernel)
        each = buffer.movedim(1, -1).reshape(products, joined, -1, taps, buffer.shape[1]).permute(1, 0, 3, 4, 2)
        if joined == 1:
            return each[0].reshape(products, self.depth, -1).contiguous()
        out = torch.zeros(products, taps, joined, buffer.shape[1], joined, each.shape[-1], dtype=buffer.dtype)
        for k, group in enumerate(each):
            out[:, :, k, :, k] = group
        return out.view(products, self.depth * joined, -1)

    def unpacked(self, packed: Tensor) -> Weight:
        """Views of a packed weight."""
        n = self.shape[1] * self.depth * (2 if self.depthwise else self.joined)
        values, sums = packed[:n], packed[-(-n // ALIGNED) * ALIGNED :].view(torch.int32)
        if self.depthwise:
            return Weight(values.view(torch.int16).view(self.depth, self.shape[1]), sums)
        return Weight(values.view(torch.int8).view(self.products, -1, self.shape[1] // self.products), sums)

    def sums(self, ins: Ins, weight: Tensor) -> tuple[Tensor, Tensor | int]:
        """(sums by pixel and feature, what is to be added to every pixel's) for the packed weight."""
        w, image = self.unpacked(weight), self._padded(held(ins[self.x]))
        if self.depthwise:
            q = self.zeros[1].value(ins, 0)
            return self._depthwise(image, w.values - q if isinstance(q, Tensor) or q else w.values), self._offset(ins, 0, q, w)
        moved = 0
        if image.dtype == torch.uint8 and not takes_unsigned():
            image, moved = signed(image), 128
        q = self.zeros[1].value(ins, 128 if self.unsigned[1] else 0)
        used = isinstance(q, Tensor) or q != 0
        out = self._products(image, w.values, q if used else None)
        return out, self._offset(ins, moved, q, w)

    def _offset(self, ins: Ins, moved: int, q: Tensor | int, w: Weight) -> Tensor | int:
        """What the input's zero point gives: a number for each feature."""
        p = self.zeros[0].value(ins, moved)
        if not isinstance(p, Tensor) and p == 0:
            return 0
        sums = w.sums - q * self.depth if isinstance(q, Tensor) or q else w.sums
        return (sums * -p).to(torch.int32)

    def _padded(self, buffer: Tensor) -> Tensor:
        """The image with adjacent channels and what is outside of it: (images, places, channels)."""
        piece = buffer[self.held[0].take][self.parts.take].movedim(1, -1)
        pads = self._pads()
        if not any(lo or hi for lo, hi in pads):
            return piece.contiguous()
        sizes = [n + lo + hi for n, (lo, hi) in zip(piece.shape[1:-1], pads, strict=True)]
        out = torch.full((piece.shape[0], *sizes, piece.shape[-1]), self.outside, dtype=piece.dtype)
        inner = tuple(slice(lo, lo + n) for n, (lo, _) in zip(piece.shape[1:-1], pads, strict=True))
        out[(slice(None), *inner)] = piece
        return out

    def _pads(self) -> list[tuple[int, int]]:
        extra = self.parts.extra
        if extra:
            return list(zip(extra[-2::-2], extra[::-2], strict=True))
        return [(n, n) for n in self.parts.padding]

    def _windows(self, image: Tensor, first: int, channels: int) -> Tensor:
        """Views: images, places, taps, channels of a group."""
        steps = image.stride()
        places = [s * k for s, k in zip(steps[1:-1], self.parts.stride, strict=True)]
        taps = [s * k for s, k in zip(steps[1:-1], self.parts.dilation, strict=True)]
        sizes = (self.shape[0], *self.shape[2:], *self.kernel, channels)
        return image.as_strided(sizes, (steps[0], *places, *taps, 1), image.storage_offset() + first)

    def _bands(self, image: Tensor, group: int) -> Iterator[Tensor]:
        """Rows of the matrix, in order."""
        channels = self.parts.input[1] // self.products
        depth = prod(self.kernel) * channels
        views = self._windows(image, group * channels, channels)
        if prod(self.kernel) == prod(self.parts.stride) == self.products == 1:
            yield image.reshape(-1, channels)
            return
        row = prod(self.shape[3:]) * depth
        step = max(1, BAND // row)
        lib = conv_c.available()
        if lib is not None and len(self.kernel) == 2:
            yield from self._copied(lib, image, group * channels, channels, min(step, self.shape[2]))
            return
        if self.shape[2] * row * self.shape[0] <= BAND:
            yield views.reshape(-1, depth)
            return
        for one in views:
            for at in range(0, self.shape[2], step):
                yield one[at : at + step].reshape(-1, depth)

    def _copied(self, lib: ctypes.CDLL, image: Tensor, first: int, channels: int, step: int) -> Iterator[Tensor]:
        """Rows of the matrix, ``step`` rows of places at a time, by our kernel."""
        row, places = prod(self.kernel) * channels, self.shape[3]
        together = min(self.shape[0], max(1, BAND // (self.shape[2] * places * row))) if step == self.shape[2] else 1
        memory = torch.empty(together * step * places, row, dtype=image.dtype)
        _, height, width, whole = image.shape
        for n in range(0, self.shape[0], together):
            for at in range(0, self.shape[2], step):
                rows, done = min(step, self.shape[2] - at), 0
                about = (places, *self.kernel, *self.parts.stride, *self.parts.dilation, channels)
                sizes = native.Windows8(width, whole, rows, *about)
                for k in range(n, min(n + together, self.shape[0])):
                    start = image.data_ptr() + (k * height + at * self.parts.stride[0]) * width * whole + first
                    lib.tapestry_windows8(ctypes.byref(sizes), start, memory.data_ptr() + done * row)
                    done += rows * places
                yield memory[:done]

    def _products(self, image: Tensor, weight: Tensor, q: Tensor | int | None) -> Tensor:
        """Sums of products of signed weights, less the sums of the image where those count (times q)."""
        products, _, columns = weight.shape
        out = torch.empty(products, prod(self.shape) // self.shape[1], columns, dtype=torch.int32)
        for g in range(products):
            shift = q.expand(self.shape[1])[g * columns : (g + 1) * columns] if isinstance(q, Tensor) else q
            done = 0
            for rows in self._bands(image, g):
                found = one_product(rows, weight[g], out[g, done : done + rows.shape[0]])
                if shift is not None:
                    found -= torch.sum(rows, dim=1, keepdim=True, dtype=torch.int32) * shift
                done += rows.shape[0]
        return out[0] if products == 1 else out.transpose(0, 1).reshape(-1, self.shape[1])

    def _depthwise(self, image: Tensor, weight: Tensor) -> Tensor:
        """Sums of every channel's products with values of 16 bits, by tap."""
        lib, weight = conv_c.available(), weight.to(torch.int16).contiguous()
        places = prod(self.shape) // self.shape[1]
        if lib is not None and len(self.kernel) == 2:
            out = torch.empty(places, self.shape[1], dtype=torch.int32)
            sizes = native.Depthwise8(
                self.shape[0], *image.shape[1:], *self.shape[2:], *self.kernel, *self.parts.stride, *self.parts.dilation,
                int(image.dtype == torch.uint8),
            )  # fmt: skip
            lib.tapestry_depthwise8(ctypes.byref(sizes), image.data_ptr(), weight.data_ptr(), out.data_ptr())
            return out
        out = torch.zeros(places, self.shape[1], dtype=torch.int32)
        views, total, rank = self._windows(image, 0, self.shape[1]), self.image(out).movedim(1, -1), len(self.kernel)
        for row, tap in zip(weight.to(torch.int32), itertools.product(*map(range, self.kernel)), strict=True):
            total.addcmul_(views[(*[slice(None)] * (rank + 1), *tap)].to(torch.int32), row)
        return out

    def image(self, matrix: Tensor) -> Tensor:
        """The output (images, features, places) of rows."""
        return matrix.view(self.shape[0], *self.shape[2:], self.shape[1]).movedim(-1, 1)


def convolution(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> Callable[[Ins], list[Tensor]] | Refusal:
    """States of a convolution of 8-bit integers."""
    found = _find(op, graph, kernel)
    if isinstance(found, Refusal):
        return found
    wanted = frame.extents[: len(op.dims)]

    def states(ins: Ins) -> list[Tensor]:
        total, more = found.sums(ins, found.pack(held(ins[found.w])[found.held[1].take]))
        return [found.image(total + more if isinstance(more, Tensor) else total).reshape(wanted)]

    return states


def packable(op: Block, graph: Graph, kernel: Kernel, plain: Run) -> CpuKernel | Refusal:
    """A sum of products of 8-bit integers with what follows it in one pass; a convolution's on a weight packed beforehand."""
    if op.inner or op.monoid != "sum" or op.body[0].dtype != "i32":
        return Refusal("it is no sum of i32")
    found = _find(op, graph, kernel)
    if isinstance(found, Refusal):
        return _in_one_pass(op, graph, kernel)
    if not found.whole or found.w in op.then_reads():
        return Refusal("the weight is not read whole, or what follows the sum reads it")
    base = Frame(op.dims, kernel.block[: len(op.dims)])
    wanted = base.extents
    then, tail = requantised(op, graph, kernel, str(op.reads[found.w].index[0])), Expressions(op, graph, kernel, op.then, base)

    def run(ins: Ins, _: Sequence[Tensor]) -> list[Tensor]:
        total, more = found.sums(ins, held(ins[found.w]))
        if then and (out := then(ins, total, more)) is not None:
            return [found.image(out).reshape(wanted)]
        return tail(ins, [found.image(total + more if isinstance(more, Tensor) else total).reshape(wanted)])

    key = ("eights", found.depthwise, found.parts.groups, found.joined, found.unsigned[1])
    return CpuKernel(plain=plain, packs={found.w: Pack(key, found.pack)}, on_packed=CpuKernel(plain=run))


def _in_one_pass(op: Block, graph: Graph, kernel: Kernel) -> CpuKernel | Refusal:
    """A matrix product with what follows it, which may vary along the last dimension."""
    frame = Frame(op.space, kernel.block)
    then = requantised(op, graph, kernel, op.dims[-1].name) if op.dims else None
    if then is None:
        return Refusal("nothing follows the sum that C can write")
    states = dense.product(op, graph, kernel, frame)
    if isinstance(states, Refusal):
        return states
    tail = Expressions(op, graph, kernel, op.then, Frame(op.dims, kernel.block[: len(op.dims)]))
    wanted = frame.extents[: len(op.dims)]

    def run(ins: Ins, _: Sequence[Tensor]) -> list[Tensor]:
        (total,) = found = states(ins)
        out = then(ins, total.expand(wanted).reshape(-1, wanted[-1]), 0)
        return tail(ins, found) if out is None else [out.view(wanted)]

    return CpuKernel(plain=run)


def _find(op: Block, graph: Graph, kernel: Kernel) -> Convolution | Refusal:
    both = factors(op) if op.monoid == "sum" and len(op.body) == 1 and op.body[0].dtype == "i32" else None
    if both is None or any(hi <= lo for lo, hi in kernel.block):
        return Refusal("it is no sum of products in i32")
    parts = [narrow(e) for e in both]
    if parts[0] is None or parts[1] is None:
        return Refusal("a factor is no integer of 8 bits less a zero point")
    bare = replace(op, body=(Call("mul", (parts[0].value, parts[1].value), "i32"),))
    return _matched(op, bare, graph, kernel, (parts[0], parts[1]))


def _matched(op: Block, bare: Block, graph: Graph, kernel: Kernel, parts: tuple[Narrow, Narrow]) -> Convolution | Refusal:
    reads = tuple(r if r.other is None else replace(r, other=0.0) for r in bare.reads)
    here = localise(replace(bare, reads=reads), graph, kernel)
    found = contract.conv_of(here)
    if found is None or kernel.ins[found.w] is None:
        return Refusal("no factor is read at windows of an image")
    x, w = here.held[found.x], here.held[found.w]
    cut = contract.call(here.op, found, here.frame, x.box, w.box, x.shape)
    image, weight = parts if isinstance(e := parts[0].value, Arg) and e.pos == found.x else parts[::-1]
    if cut is None or _varies(op, image.shift) or _varies(op, weight.shift) - {found.feature}:
        return Refusal("a zero point varies, or the block is no one convolution")
    outside, padded = op.reads[found.x].other, any(cut.extra) or any(cut.padding)
    if padded and outside is None:
        return Refusal("nothing says what the image is outside")
    at = {d.name: hi - lo for d, (lo, hi) in zip(here.frame.dims, here.frame.box, strict=True)}
    shape = (at[found.batch], at[found.feature], *(at[v.out] for v in found.windows))
    window = tuple(at[v.window] if v.window else 1 for v in found.windows)
    box = kernel.ins[found.w] or ()
    whole = all(isinstance(t, slice) and t == slice(0, hi - lo) for t, (lo, hi) in zip(w.take, box, strict=True))
    zeros = (_zero(op, graph, kernel, image.shift), _zero(op, graph, kernel, weight.shift))
    unsigned = (image.value.dtype == "u8", weight.value.dtype == "u8")
    out = Convolution(found.x, found.w, cut, (x, w), int(outside or 0), shape, window, zeros, unsigned, whole)
    return out if out.products <= MOST_PRODUCTS else Refusal(f"{out.products} products one after another take longer")


def _varies(op: Block, shift: Expr | None) -> frozenset[str]:
    return frozenset() if shift is None else dims_read(op, shift)


def _zero(op: Block, graph: Graph, kernel: Kernel, shift: Expr | None) -> Zero:
    if shift is None:
        return Zero(0)
    if isinstance(shift, Const):
        return Zero(int(shift.value))
    return Zero(None, shift_of(op, graph, kernel, Frame(op.space, kernel.block), shift))
