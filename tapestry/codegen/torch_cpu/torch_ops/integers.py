"""Products of integers of 8 bits, summed in floats that hold them: exact for any zero points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from tapestry.codegen.torch_cpu.base import contract
from tapestry.codegen.torch_cpu.base.epilogue import Epilogue
from tapestry.codegen.torch_cpu.base.local_view import localise
from tapestry.codegen.torch_cpu.base.point_values import Expressions, Run, held
from tapestry.codegen.torch_cpu.base.strided_reads import Frame, Tensor
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c.c_calls import CpuKernel, Ins, Pack
from tapestry.codegen.torch_cpu.torch_ops import dense
from tapestry.ir.expr import Arg, Call, Const, Expr
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.recognition.contraction import Narrow, dims_read, factors, narrow

HELD = 1 << 24  # integers up to this a float holds


def product(
    op: Block, graph: Graph, kernel: Kernel, frame: Frame
) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | Refusal:
    """States of a sum of products of integers of 8 bits over the block."""
    both = factors(op)
    if both is None or op.body[0].dtype != "i32" or any(d.size == 0 for d in op.space):
        return Refusal("it is no sum of products in i32")
    a, b = narrow(both[0]), narrow(both[1])
    reduced = {d.name for d in op.reduce if d.size > 1}
    if a is None or b is None:
        return Refusal("a factor is no integer of 8 bits less a zero point")
    dims = dims_read(op, both[0]), dims_read(op, both[1])
    if not all(reduced <= d for d in dims):
        return Refusal("a factor does not vary within a sum")
    values = Expressions(op, graph, kernel, (_in_f32(a), _in_f32(b)), frame)
    run = contract.matmul(op, frame, *dims, multiply=_in_floats)
    return lambda ins: [run(*values.values(ins, []))]


def _in_f32(e: Narrow) -> Expr:
    value = Call("cast", (e.value,), "f32")
    return value if e.shift is None else Call("sub", (value, Call("cast", (e.shift,), "f32")), "f32")


def shift_of(
    op: Block, graph: Graph, kernel: Kernel, frame: Frame, zero: Expr | None
) -> Callable[[Sequence[Tensor | None]], Tensor] | None:
    """A zero point over the map dimensions."""
    if zero is None:
        return None
    found, maps = Expressions(op, graph, kernel, (zero,), frame), len(op.dims)

    def value(ins: Sequence[Tensor | None]) -> Tensor:
        (v,) = found.values(ins, [])
        v = v.to(torch.int32)
        return v.reshape(v.shape[:maps]) if v.dim() > maps else v

    return value


def _in_floats(left: Tensor, right: Tensor) -> Tensor:
    """Products in floats that hold every sum; what is beyond i32 wraps around, as it does in the integer product."""
    if left.shape[-1] * 255 * 255 <= HELD:
        return _integers(torch.matmul(left, right))
    return _integers(torch.matmul(left.double(), right.double()))


def _integers(sums: Tensor) -> Tensor:
    """Sums in floats as i32, as the integer product wraps them around."""
    return sums.to(torch.int32) if sums.dtype == torch.float32 else sums.to(torch.int64).to(torch.int32)


def _both(op: Block) -> tuple[Narrow | None, Narrow | None]:
    """The factors of a sum in i32 of products, as integers of 8 bits."""
    both = factors(op) if op.monoid == "sum" and not op.inner and op.body[0].dtype == "i32" else None
    return (narrow(both[0]), narrow(both[1])) if both else (None, None)


def packed_product(op: Block, graph: Graph, kernel: Kernel, plain: Run) -> CpuKernel | Refusal:
    """A product on a weight in floats, packed once: parts of the sum that floats hold, added as integers."""
    a, b = _both(op)
    frame, maps = Frame(op.space, kernel.block), len(op.dims)
    long = [k for k, n in enumerate(frame.extents) if k >= maps and n > 1]
    if a is None or b is None or len(long) != 1 or 0 in frame.extents:
        return Refusal("it is no sum in i32 of products of integers of 8 bits over one dimension")
    for x, w in ((a, b), (b, a)):
        if not isinstance(w.value, Arg) or w.value.pos in op.then_reads():
            continue
        folded = isinstance(w.shift, Const)
        zero = None if folded else shift_of(op, graph, kernel, frame, w.shift)
        if zero and w.shift and dims_read(op, w.shift) & {d.name for d in op.reduce}:
            continue
        value = _in_f32(x)
        at, (lo, hi) = long[0], kernel.block[long[0]]
        deep = HELD // 255 // (w.largest if folded or w.value.dtype == "u8" else 128)
        cuts = ((k, min(k + deep, hi)) for k in range(lo, hi, deep))
        blocks = [replace(kernel, block=(*kernel.block[:at], cut, *kernel.block[at + 1 :])) for cut in cuts]
        dims = dims_read(op, value), dims_read(op, w.value)
        parts = [dense.by_weight(op, graph, k, value, w.value.pos, *dims, Epilogue()) for k in blocks]
        found = [p for p in parts if p is not None]
        if len(found) == len(parts):
            rows = Expressions(op, graph, kernel, (value,), frame)
            q = int(w.shift.value) if isinstance(w.shift, Const) else 0
            return _in_parts(op, graph, kernel, plain, found, w.value.pos, q, zero, rows)
    return Refusal("neither factor is a weight that is read by rows of the sum and by one more dimension")


def _in_parts(
    op: Block, graph: Graph, kernel: Kernel, plain: Run, parts: Sequence[dense.Dense], w: int,
    folded: int, zero: Callable[[Ins], Tensor] | None, rows: Expressions,
) -> CpuKernel:  # fmt: skip
    tail = Expressions(op, graph, kernel, op.then, Frame(op.dims, kernel.block[: len(op.dims)]))
    maps, cells = len(op.dims), prod(hi - lo for lo, hi in kernel.block[: len(op.dims)])

    def pack(buffer: Tensor) -> Tensor:
        return torch.cat([p.pack.run(buffer.float() - folded) for p in parts])

    def packed(ins: Ins, _: Sequence[Tensor]) -> list[Tensor]:
        total, at = None, 0
        for p in parts:
            given = list(ins)
            given[w] = held(ins[w])[at:]
            part = p(given, None, None, cells).to(torch.int32)
            total = part if total is None else total.add_(part)
            at += p.packed
        assert total is not None
        q = zero and zero(ins)
        if q is not None and bool(q.any()):
            every = rows.values(ins, [])[0].to(torch.int32).expand([*total.shape, *rows.shape[maps:]])
            total = total - q * every.sum(dim=tuple(range(maps, every.dim())), dtype=torch.int32)
        return tail(ins, [total])

    key = ("parts of eights", folded, *(p.pack.key for p in parts))
    return CpuKernel(plain=plain, packs={w: Pack(key, pack)}, on_packed=CpuKernel(plain=packed))


# Convolutions of the same integers, less their zero points, in floats that hold every sum.


@dataclass(frozen=True, slots=True)
class _Eights:
    """A convolution of 8-bit integers: ``run`` takes a part of ``weights`` in floats, less its zero point ``q``."""

    x: int
    w: int
    takes: tuple[tuple[slice | int, ...], tuple[slice | int, ...]]
    zeros: tuple[Callable[[Ins], Tensor] | None, Callable[[Ins], Tensor] | None]
    run: Callable[[Tensor, Tensor], Tensor]
    wanted: Sequence[int]

    def weights(self, buffer: Tensor, q: Tensor | None = None) -> Tensor:
        """Parts whose sums of products with bytes floats hold: the weight as it is, or its digits of 16.

        In doubles where singles may be convolved by other sums than those (Winograd's, by NNPACK, which oneDNN comes before).
        """
        w = buffer[self.takes[1]].float()
        w = w if q is None else w - q.reshape(-1, *[1] * (w.dim() - 1))
        high = torch.round(w / 16)
        dnn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        for parts in (w[None], torch.stack([high, w - 16 * high])) if dnn else ():
            if 255 * parts.abs().flatten(2).sum(2).amax() <= 1 << 24:
                return parts
        return w[None].double()

    def states(self, ins: Ins) -> list[Tensor]:
        """The sums, on a weight as it is."""
        q = self.zeros[1]
        return self.sums(ins, self.weights(held(ins[self.w]), q and q(ins)))

    def sums(self, ins: Ins, weights: Tensor) -> list[Tensor]:
        """The sums in i32."""
        x, p = held(ins[self.x])[self.takes[0]].movedim(1, -1), self.zeros[0]
        x = x.to(weights.dtype, memory_format=torch.contiguous_format)
        x = (x.sub_(p(ins).reshape(())) if p else x).movedim(-1, 1)
        total, *more = (_integers(self.run(x, part)).reshape(self.wanted) for part in weights)
        return [total.mul_(16).add_(more[0]) if more else total]


def convolution(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> Callable[[Ins], list[Tensor]] | Refusal:
    """States of a convolution of integers of 8 bits over the block."""
    found = _eights(op, graph, kernel, frame)
    return found.states if isinstance(found, _Eights) else found


def packed_convolution(op: Block, graph: Graph, kernel: Kernel, plain: Run) -> CpuKernel | Refusal:
    """The same on a weight that is taken apart once."""
    found = _eights(op, graph, kernel, Frame(op.space, kernel.block))
    if not isinstance(found, _Eights):
        return found
    whole = found.takes[1] == tuple(slice(0, hi - lo) for lo, hi in kernel.ins[found.w] or ())
    if found.zeros[1] or not whole or found.w in op.then_reads():
        return Refusal("the weight is not read whole, or has a zero point, or what follows the sum reads it")
    tail = Expressions(op, graph, kernel, op.then, Frame(op.dims, kernel.block[: len(op.dims)]))
    on_packed = CpuKernel(plain=lambda ins, _: tail(ins, found.sums(ins, held(ins[found.w]))))
    return CpuKernel(plain=plain, packs={found.w: Pack(("eights",), found.weights)}, on_packed=on_packed)


def _eights(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> _Eights | Refusal:
    a, b = _both(op)
    if a is None or b is None:
        return Refusal("it is no sum in i32 of products of integers of 8 bits less a zero point")
    reads = tuple(r if r.other is None else replace(r, other=0.0) for r in op.reads)  # as it is once the zero point is off
    here = localise(replace(op, body=(Call("mul", (a.value, b.value), "i32"),), reads=reads), graph, kernel)
    found = contract.conv_of(here)
    if found is None:
        return Refusal("no factor is read at windows of an image")
    at = {d.name: hi - lo for d, (lo, hi) in zip(here.frame.dims, here.frame.box, strict=True)}
    if all(at.get(v.window, 1) == 1 for v in found.windows) and at.get(found.channel, 1) > 1:
        return Refusal("with one tap it is a product")
    image, weight = (a, b) if isinstance(a.value, Arg) and a.value.pos == found.x else (b, a)
    varies = [frozenset[str]() if z.shift is None else dims_read(op, z.shift) for z in (image, weight)]
    other, zero = op.reads[found.x].other, image.shift
    if varies[0] or varies[1] - {found.feature}:
        return Refusal("a zero point varies")
    if other is not None and other != (0 if zero is None else zero.value if isinstance(zero, Const) else None):
        return Refusal("the image is something else than its zero point outside")
    x, w = here.held[found.x], here.held[found.w]
    return _Eights(
        found.x,
        found.w,
        (x.take, w.take),
        (shift_of(op, graph, kernel, frame, zero), shift_of(op, graph, kernel, frame, weight.shift)),
        contract.conv(here.op, found, here.frame, x.box, w.box, x.shape),
        frame.extents[: len(op.dims)],
    )
