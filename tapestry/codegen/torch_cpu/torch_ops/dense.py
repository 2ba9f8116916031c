"""Linear layers and convolutions by our kernels in C on weights packed once, when they are loaded: whole buffers, or parts."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base import contract, state_merges
from tapestry.codegen.torch_cpu.base.epilogue import Epilogue, epilogue
from tapestry.codegen.torch_cpu.base.local_view import localise
from tapestry.codegen.torch_cpu.base.point_values import Expressions, Run, held
from tapestry.codegen.torch_cpu.base.strided_reads import Frame, Tensor
from tapestry.codegen.torch_cpu.base.ways import Refusal, Tried
from tapestry.codegen.torch_cpu.c import conv_c
from tapestry.codegen.torch_cpu.c.blocks_c import LEAST, PLAIN, Cells, How, cells_of, each_cell
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall, CpuKernel, Ins, Pack, recorded
from tapestry.codegen.torch_cpu.c.thread_parts import Work
from tapestry.codegen.torch_cpu.pixel_view import order as by_pixels
from tapestry.codegen.torch_cpu.pixel_view import pixels
from tapestry.codegen.torch_cpu.torch_ops.transposed_convolution import Phase, Spread, transposed
from tapestry.ir.expr import Acc, Arg, Expr
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import bounds
from tapestry.ir.kernel import Box, Kernel
from tapestry.ir.recognition.contraction import sides

Record = Callable[[Ins, Tensor | None, Tensor | None, Tensor], CCall | Calls]
"""From the buffers (the weight packed), the bias, the residual and flat memory to the call that writes the result there."""


@dataclass(frozen=True, slots=True)
class Dense:
    """``record`` is our kernel, on flat memory that ``array`` makes the result of, over the map dimensions."""

    weight: int
    pack: Pack
    then: Epilogue
    record: Record
    array: Callable[[Tensor], Tensor]
    order: tuple[int, ...] = by_pixels(4)  # of the map dimensions in memory
    name: str = "matrix product in panels"
    tried: Tried = ()
    packed: int = 0  # floats of the weight

    def __call__(self, ins: Ins, bias: Tensor | None, residual: Tensor | None, size: int) -> Tensor:
        """The result, in new memory."""
        memory = torch.empty(size)
        self.record(ins, bias, residual, memory).run()
        return self.array(memory)


def packable(op: Block, graph: Graph, kernel: Kernel, plain: Run, how: How = PLAIN) -> CpuKernel | Refusal:
    """A convolution or a linear layer that reads its weight packed."""
    return convolution_on_packed(op, graph, kernel, plain, how) or linear_on_packed(op, graph, kernel, plain, how)


def convolution_on_packed(op: Block, graph: Graph, kernel: Kernel, plain: Run, how: How) -> CpuKernel | Refusal:
    """A convolution that reads its weight packed."""
    return _on_packed(op, graph, kernel, plain, how, _convolution)


def linear_on_packed(op: Block, graph: Graph, kernel: Kernel, plain: Run, how: How) -> CpuKernel | Refusal:
    """A linear layer that reads its weight packed."""
    return _on_packed(op, graph, kernel, plain, how, _linear)


def _on_packed(
    op: Block, graph: Graph, kernel: Kernel, plain: Run, how: How, product: Callable[[Block, Graph, Kernel], Dense | Refusal]
) -> CpuKernel | Refusal:
    """A product with what follows it: by our kernel alone, by torch's operators, or by a function in C."""
    if native.library() is None:
        return conv_c.NO_LIBRARY
    if any(hi <= lo for lo, hi in kernel.block):
        return Refusal("it has no points")
    if op.inner or op.monoid != "sum" or len(op.body) != 1 or op.body[0].dtype != "f32":
        return Refusal("it is no sum of f32")
    found = product(op, graph, kernel)
    if not found:
        return found
    if found.weight in op.then_reads():
        return Refusal("what follows the sum reads the weight too")
    then, base = found.then, Frame(op.dims, kernel.block[: len(op.dims)])
    whole = _Whole(
        found,
        prod(base.extents),
        _part(op, kernel, then.bias),
        _part(op, kernel, then.residual),
        None if then.rest is None else Expressions(op, graph, kernel, then.rest, base),
    )
    alone, rest = then.rest == (Acc(0, "f32"),), then.rest if kernel.outs == (base.box,) else None
    after = _after(op, graph, kernel, rest[0], found.order, how) if rest and not alone else None
    if whole.tail is None or alone:
        made = recorded(found.array, whole.record, whole.size)
    elif after is None:
        made = CpuKernel(plain=whole)
    else:
        made = recorded(
            found.array,
            lambda ins, memory: _followed(whole.record(ins, memory), after, ins, memory),
            whole.size,
            plain=whole,
            functions=(after.name,),
            few=whole.size < LEAST,
            compiles=how.compiles,
        )
    return CpuKernel(plain=plain, packs={found.weight: found.pack}, on_packed=made, way=found.name, tried=found.tried)


def _followed(call: CCall | Calls, after: Cells, ins: Ins, memory: Tensor) -> CCall | Calls:
    """A product and what follows it, which is done on results in cache where it is of each cell alone."""
    lib: Any = native.library()
    last = after.record(ins, memory)
    able = (lib.tapestry_conv, lib.tapestry_depthwise, lib.tapestry_winograd)
    if after.box or not isinstance(call, CCall) or call.function not in able:
        return Calls.of(call, last)
    call.sizes.then = ctypes.cast(last.function, ctypes.c_void_p).value
    work, more = call.in_all, last.in_all
    return replace(call, work=Work(work.units, work.nanoseconds + more.nanoseconds))


@dataclass(frozen=True, slots=True)
class _Whole:
    """A product with the bias and the residual that it takes, and the rest of what follows by torch's operators."""

    product: Dense
    size: int
    bias: Callable[[Ins], Tensor] | None
    residual: Callable[[Ins], Tensor] | None
    tail: Expressions | None

    def __call__(self, ins: Ins, _: Sequence[Tensor]) -> list[Tensor]:
        """Compute into new memory."""
        out = self.product(ins, *self._added(ins), self.size)
        return self.tail(ins, [out]) if self.tail else [out]

    def record(self, ins: Ins, memory: Tensor) -> CCall | Calls:
        """The call of our kernel, which has no tail."""
        return self.product.record(ins, *self._added(ins), memory)

    def _added(self, ins: Ins) -> tuple[Tensor | None, Tensor | None]:
        return self.bias(ins) if self.bias else None, self.residual(ins) if self.residual else None


def _after(op: Block, graph: Graph, kernel: Kernel, value: Expr, order: tuple[int, ...], how: How) -> Cells | None:
    """What follows a sum, in memory that has the map dimensions in an order."""
    if found := each_cell(value):
        return found
    if order == tuple(range(len(op.dims))):
        return cells_of(op, graph, kernel, [d.name for d in op.dims], value, how)
    alone = Block(outs=op.outs[:1], dims=op.dims, reads=op.reads, body=(value,))
    part = replace(kernel, block=kernel.block[: len(op.dims)])
    view = pixels(alone, graph, part, anyhow=True) if order == by_pixels(len(op.dims)) else None
    if view is None or view.op.dims != tuple(op.dims[k] for k in order):
        return None
    cells = cells_of(view.op, view.graph, view.kernel, [d.name for d in view.op.dims], value, how)

    def record(ins: Ins, memory: Tensor) -> CCall:
        assert cells
        return cells.record(view.of(ins), memory)

    return cells and replace(cells, record=record)


def partial(op: Block, graph: Graph, kernel: Kernel, plain: Run) -> CpuKernel | Refusal:
    """A part of a sum on a packed weight, added to the sums that are given."""
    alone = replace(op, then=(Acc(0, "f32"),))
    found = packable(alone, graph, replace(kernel, mode="full"), plain)
    if isinstance(found, Refusal):
        return found
    part = found.packed

    def merged(ins: Ins, before: Sequence[Tensor]) -> list[Tensor]:
        new = part(ins, [])
        return state_merges.combine("sum", list(before), new, ("f32",)) if before else new

    return replace(found, on_packed=CpuKernel(plain=merged, parts=(part,)))


def _part(op: Block, kernel: Kernel, k: int | None) -> Callable[[Ins], Tensor] | None:
    """What the block reads of a buffer whose axes are dimensions, in their order."""
    if k is None:
        return None
    block = dict(zip((d.name for d in op.dims), kernel.block, strict=False))
    box = kernel.ins[k]
    assert box is not None
    at = tuple(slice(block[str(e)][0] - o, block[str(e)][1] - o) for e, (o, _) in zip(op.reads[k].index, box, strict=True))
    names = [d.name for d in op.dims]
    order = sorted(range(len(box)), key=lambda axis: names.index(str(op.reads[k].index[axis])))
    if order == [*range(len(box))] and all(s == slice(0, hi - lo) for s, (lo, hi) in zip(at, box, strict=True)):
        return lambda ins: held(ins[k])
    return lambda ins: held(ins[k])[at].permute(order)


def _linear(op: Block, graph: Graph, kernel: Kernel) -> Dense | Refusal:
    """Rows of one factor times a weight read by columns and the reduced dimensions alone."""
    found = sides(op)
    if found is None or not op.reduce:
        return Refusal("no two factors of which each has dimensions of its own")
    a, b, a_dims, b_dims = found
    for x, w, x_dims, w_dims in ((a, b, a_dims, b_dims), (b, a, b_dims, a_dims)):
        if x.dtype == "f32" and isinstance(w, Arg) and w.dtype == "f32":
            dense = by_weight(op, graph, kernel, x, w.pos, x_dims, w_dims)
            if dense:
                return dense
    return Refusal("no factor is a tensor of f32 that is read by rows of the sum and by one more dimension")


def by_weight(
    op: Block,
    graph: Graph,
    kernel: Kernel,
    x: Expr,
    w: int,
    x_dims: frozenset[str],
    w_dims: frozenset[str],
    then: Epilogue | None = None,
) -> Dense | None:
    """The product of an expression in f32 and of a weight, read by columns and the reduced dimensions alone."""
    frame = Frame(op.space, kernel.block)
    extent = dict(zip((d.name for d in frame.dims), frame.extents, strict=True))
    block = dict(zip((d.name for d in frame.dims), frame.box, strict=True))
    wide = [d.name for d in op.dims if extent[d.name] > 1]
    columns = [n for n in wide if n in w_dims]
    inner = [d.name for d in op.reduce if extent[d.name] > 1]
    part = _plain_axes(op, w, kernel.ins[w], block)
    if part is None or len(columns) != 1 or columns[0] in x_dims or not inner:
        return None
    order, take, cut = part
    rows = [n for n in wide if n in x_dims]
    if {*order} != {columns[0], *inner} or not {*inner} <= x_dims or {*rows} | {*columns} != {*wide}:
        return None
    names = [d.name for d in frame.dims]
    n, k = extent[columns[0]], contract.points(inner, extent)
    m = contract.points(rows, extent)
    turn = [order.index(d) for d in (columns[0], *inner)]
    values = Expressions(op, graph, kernel, (x,), frame)
    axes = [names.index(d) for d in (*rows, *inner)]
    axes += [i for i in range(len(names)) if i not in axes]
    full = [extent[d] for d in (*rows, *inner)] + [1] * (len(axes) - len(rows) - len(inner))
    wanted = [extent[d.name] for d in op.dims]
    back = [(*rows, *columns).index(d) for d in wide]
    sizes = [extent[d] for d in (*rows, *columns)]
    then = then or epilogue(op, kernel, columns[0])
    ours = conv_c.multiply(m, n, k, then)
    if not ours:
        return None

    def matrix(value: Tensor) -> Tensor:
        return value.permute(axes).expand(full).reshape(m, k).contiguous()

    forth = [back.index(i) for i in range(len(back))]

    def added(r: Tensor) -> Tensor:
        return r.reshape([extent[d] for d in wide]).permute(forth).reshape(m, n).contiguous()

    def rows_of(ins: Ins) -> Tensor:
        value = values.values(ins, [])[0]
        return matrix(value if isinstance(x, Arg) else value.mul(1))  # seen to be computed: numpy takes roots unseen

    def result(out: Tensor) -> Tensor:
        return out.reshape(sizes).permute(back).reshape(wanted)

    def pack(buffer: Tensor) -> Tensor:
        return conv_c.pack_panels(buffer[take].float().reshape([extent[d] for d in order]).permute(turn).flatten(1))

    def record(ins: Ins, bias: Tensor | None, residual: Tensor | None, memory: Tensor) -> CCall | Calls:
        return ours(rows_of(ins), held(ins[w]), bias, None if residual is None else added(residual), memory)

    return Dense(
        w,
        Pack(("panels", *turn, *cut), pack),
        then,
        record,
        result,
        order=_order(op, (*rows, *columns)),
        packed=conv_c.packed_size(n, k),
    )


def _order(op: Block, names: Sequence[str]) -> tuple[int, ...]:
    """Map dimensions as they are in memory that has some of them in an order, and one point of the others."""
    wide = [n for d in op.dims for n in (d.name,) if n in names]
    single = [i for i, d in enumerate(op.dims) if d.name not in names]
    at = {d.name: i for i, d in enumerate(op.dims)}
    return tuple(range(len(op.dims))) if wide == list(names) else (*single, *(at[n] for n in names))


def _plain_axes(
    op: Block, w: int, box: Box | None, block: dict[str, tuple[int, int]]
) -> tuple[list[str], tuple[slice, ...], tuple[tuple[int, int], ...]] | None:
    """(the dimension of each axis of a buffer, those read at one place left out; the part that is read, and, if that is not
    all, its bounds)."""
    read = op.reads[w]
    if box is None or read.when:
        return None
    out, take = list[str](), list[slice]()
    for e, b in zip(read.index, box, strict=True):
        lo, last = bounds(e, {n: (lo, hi - 1) for n, (lo, hi) in block.items()})
        if lo < b[0] or last >= b[1] or (lo < last and (not e.is_dim or str(e) in out)):
            return None
        take.append(slice(int(lo) - b[0], int(last) + 1 - b[0]))
        if lo < last:
            out.append(str(e))
    whole = all(s == slice(0, hi - lo) for s, (lo, hi) in zip(take, box, strict=True))
    return out, tuple(take), () if whole else tuple((s.start, s.stop) for s in take)


def _convolution(op: Block, graph: Graph, kernel: Kernel) -> Dense | Refusal:
    """A convolution over two axes or three whose weight buffer is read whole, as one call."""
    if spread := transposed(op, graph, kernel):
        return _phase_by_phase(op, kernel, spread)
    here = localise(op, graph, kernel)
    found = contract.conv_of(here)
    if found is None or len(found.windows) not in (2, 3) or len(here.op.dims) != len(op.dims):
        return Refusal("no factor is read at windows of two or three axes")
    x, w = here.held[found.x], here.held[found.w]
    box = kernel.ins[found.w]
    parts = contract.call(here.op, found, here.frame, x.box, w.box, x.shape)
    whole = all(isinstance(t, slice) for t in w.take) and box is not None
    if parts is None or not whole or any(s != slice(0, hi - lo) for s, (lo, hi) in zip(w.take, box or (), strict=True)):
        return Refusal("the weight's buffer is not read whole, or the block is no one convolution")
    padded, fetch, at = any(parts.padding), _image(x.take, parts), found.x
    shape = [hi - lo for lo, hi in kernel.block[: len(op.dims)]]
    weight = [hi - lo for lo, hi in box or ()]
    then = epilogue(op, kernel, found.feature)
    rank = len(shape)
    ours = conv_c.convolve(parts, weight, shape, then)
    if not ours:
        return ours
    strides = (prod(shape[1:]), 1, *(shape[1] * prod(shape[k + 1 :]) for k in range(2, rank)))

    def record(ins: Ins, bias: Tensor | None, residual: Tensor | None, memory: Tensor) -> CCall | Calls:
        return ours.call(fetch(held(ins[at])), held(ins[found.w]), bias, residual, memory)

    def array(memory: Tensor) -> Tensor:
        return memory.as_strided(shape, strides)

    return Dense(
        found.w,
        Pack((ours.key,), ours.pack, padded),
        then,
        record=record,
        array=array,
        order=by_pixels(rank),
        name=f"convolution, {ours.key}",
        tried=ours.tried,
    )


def _phase_by_phase(op: Block, kernel: Kernel, found: Spread) -> Dense | Refusal:
    """A transposed convolution: each phase of both axes writes between the results of the others."""
    images, features, height, width = shape = [hi - lo for lo, hi in kernel.block[:4]]
    channels = found.x_take[1].stop - found.x_take[1].start
    box, then = kernel.ins[found.x] or (), epilogue(op, kernel, op.dims[1].name)
    steps = (height * width * features, found.strides[0] * width * features, found.strides[1] * features)
    lib: Any = native.library()
    calls, size = list[tuple[Phase, Phase, int, conv_c.Convolve]](), 0
    for h, w in itertools.product(*found.phases):
        taps = (len(h.taps), len(w.taps))
        if conv_c.too_deep([channels, *taps]):
            return Refusal("there are too many taps and channels")
        padding = (h.padding, w.padding)
        input_shape = (images, channels, *(hi - lo for lo, hi in box[2:]))
        parts = contract.Call((), (), input_shape, (1, 1), padding, (1, 1), 1)
        out = (images, features, h.outs, w.outs)
        calls.append((h, w, size, conv_c.caller(lib.tapestry_conv, parts, (features, channels, *taps), out, then, steps=steps)))
        size += conv_c.packed_size(features, channels * prod(taps))

    def pack(buffer: Tensor) -> Tensor:
        w = buffer[found.w_take].transpose(0, 1)
        return torch.cat([conv_c.pack_convolution(w[:, :, h.taps][:, :, :, v.taps]) for h, v, _, _ in calls])

    def record(ins: Ins, bias: Tensor | None, residual: Tensor | None, memory: Tensor) -> Calls:
        x, w = conv_c.last(held(ins[found.x])[found.x_take]), held(ins[found.w])
        r, (sh, sw) = None if residual is None else conv_c.last(residual), found.strides
        return Calls.of(*(
            call(
                x, w[start:], bias, None if r is None else r[:, :, h.first :: sh, v.first :: sw],
                memory[(h.first * width + v.first) * features :],
            )
            for h, v, start, call in calls
        ))  # fmt: skip

    strides = (steps[0], 1, width * features, features)
    pads = any(p.padding > 0 or p.outs > 1 for some in found.phases for p in some)
    key = ("phases", *((h.taps, v.taps) for h, v, _, _ in calls), *((s.start, s.stop) for s in found.w_take))
    return Dense(
        found.w, Pack(key, pack, pads), then, record, lambda memory: memory.as_strided(shape, strides),
        name="transposed convolution, phase by phase",
    )  # fmt: skip


def _image(read: tuple[slice | int, ...], cut: contract.Call) -> Callable[[Tensor], Tensor]:
    """What is convolved, of a buffer."""

    def image(buffer: Tensor) -> Tensor:
        piece = buffer[read][cut.take]
        return torch.nn.functional.pad(piece, cut.extra) if cut.extra else piece

    return image
