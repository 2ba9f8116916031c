"""Linear layers and convolutions on weights packed once, when they are loaded (oneDNN's own blocked layouts).

What is packed is a whole weight buffer. oneDNN's fused clamps drop a NaN, so only the bias is fused; the rest of the epilogue
runs in place on the result while it is in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tapestry.codegen.torch_cpu import contract
from tapestry.codegen.torch_cpu.local import localise
from tapestry.codegen.torch_cpu.natives import added_first
from tapestry.codegen.torch_cpu.points import Expressions, Run, held
from tapestry.codegen.torch_cpu.reads import Frame, Remembered, Tensor
from tapestry.codegen.torch_cpu.windows import transposed
from tapestry.ir.expr import Arg, Expr
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel

States = Callable[[Sequence[Tensor | None], Tensor | None], Tensor]
"""From the buffers (the weight packed) and the bias to the sum over the block, as a new tensor of the map dimensions."""


@dataclass(frozen=True, slots=True)
class Pack:
    """How one weight is packed; equal keys make equal copies."""

    key: tuple[object, ...]
    run: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Packable:
    """A kernel that may read a weight packed: ``packs`` by position of the read; without, it is an ordinary kernel."""

    plain: Run
    packs: dict[int, Pack]
    packed: Run

    def __call__(self, ins: Sequence[Tensor | None], states: Sequence[Tensor]) -> list[Tensor]:
        """Compute on buffers as they are."""
        return self.plain(ins, states)


@dataclass(frozen=True, slots=True)
class _Dense:
    weight: int
    pack: Pack
    columns: str  # the dimension along which a bias may vary
    run: States


def packable(op: Block, graph: Graph, kernel: Kernel, plain: Run) -> Run:
    """The kernel with its packed form, where it has one."""
    frame = Frame(op.space, kernel.block)
    if kernel.mode != "full" or not torch.backends.mkldnn.is_available() or any(hi <= lo for lo, hi in kernel.block):
        return plain
    if op.inner or op.monoid != "sum" or len(op.body) != 1 or op.body[0].dtype != "f32":
        return plain
    if transposed(op, graph, kernel):
        return plain
    found = _convolution(op, graph, kernel) or _linear(op, graph, kernel, frame)  # of one point it is linear: less to set up
    if found is None or found.weight in op.then_reads():
        return plain
    base = Frame(op.dims, kernel.block[: len(op.dims)])

    def is_bias(k: int) -> bool:
        r = op.reads[k]
        return len(r.index) == 1 and r.index[0].is_dim and str(r.index[0]) == found.columns and not r.when and r.other is None

    bias = added_first(op.then, is_bias)
    then = bias[1] if bias else op.then
    tail = Expressions(op, graph, kernel, then, base, owned=True)
    at = _bias_slice(op, kernel, bias[0]) if bias else None
    states = found.run

    take = Remembered(lambda buffer: buffer[at[1]] if at else buffer)

    def packed(ins: Sequence[Tensor | None], _: Sequence[Tensor]) -> list[Tensor]:
        return tail(ins, [states(ins, take(held(ins[at[0]])) if at else None)])

    return Packable(plain, {found.weight: found.pack}, packed)


def _bias_slice(op: Block, kernel: Kernel, k: int) -> tuple[int, slice]:
    block = dict(zip((d.name for d in op.dims), kernel.block, strict=False))
    lo, hi = block[str(op.reads[k].index[0])]
    box = kernel.ins[k]
    assert box is not None
    return k, slice(lo - box[0][0], hi - box[0][0])


def _linear(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> _Dense | None:
    """Rows of one factor times a weight read by columns and the reduced dimensions alone."""
    found = contract.sides(op)
    if found is None or not op.reduce:
        return None
    a, b, a_dims, b_dims = found
    for x, w, x_dims, w_dims in ((a, b, a_dims, b_dims), (b, a, b_dims, a_dims)):
        if x.dtype == "f32" and isinstance(w, Arg) and w.dtype == "f32":
            dense = _product(op, graph, kernel, frame, x, w.pos, x_dims, w_dims)
            if dense:
                return dense
    return None


def _product(
    op: Block, graph: Graph, kernel: Kernel, frame: Frame, x: Expr, w: int, x_dims: frozenset[str], w_dims: frozenset[str]
) -> _Dense | None:  # fmt: skip
    extent = dict(zip((d.name for d in frame.dims), frame.extents, strict=True))
    block = dict(zip((d.name for d in frame.dims), frame.box, strict=True))
    wide = [d.name for d in op.dims if extent[d.name] > 1]
    columns = [n for n in wide if n in w_dims]
    inner = [d.name for d in op.reduce if extent[d.name] > 1]
    order = _plain_axes(op, w, kernel.ins[w], block)
    if order is None or len(columns) != 1 or columns[0] in x_dims or not inner:
        return None
    rows = [n for n in wide if n in x_dims]
    if {*order} != {columns[0], *inner} or not {*inner} <= x_dims or {*rows} | {*columns} != {*wide}:
        return None
    names = [d.name for d in frame.dims]
    n, k = extent[columns[0]], _size(inner, extent)
    m = _size(rows, extent)
    turn = [order.index(d) for d in (columns[0], *inner)]
    values = Expressions(op, graph, kernel, (x,), frame)
    axes = [names.index(d) for d in (*rows, *inner)]
    axes += [i for i in range(len(names)) if i not in axes]
    full = [extent[d] for d in (*rows, *inner)] + [1] * (len(axes) - len(rows) - len(inner))
    wanted = [extent[d.name] for d in op.dims]
    back = [(*rows, *columns).index(d) for d in wide]
    sizes = [extent[d] for d in (*rows, *columns)]
    shape_of_w = [extent[d] for d in order]

    def pack(buffer: Tensor) -> Tensor:
        plain = buffer.reshape(shape_of_w).permute(turn).reshape(n, k).contiguous()
        return torch.ops.mkldnn._reorder_linear_weight(plain, m)

    multiply = torch.ops.mkldnn._linear_pointwise.default

    def matrix(value: Tensor) -> Tensor:
        return value.permute(axes).expand(full).reshape(m, k).contiguous()

    at = x.pos if isinstance(x, Arg) else None
    fetch = Remembered(lambda buffer: matrix(values.fetch[at](buffer))) if at is not None else None
    result = Remembered(lambda out: out.reshape(sizes).permute(back).reshape(wanted))

    def run(ins: Sequence[Tensor | None], bias: Tensor | None) -> Tensor:
        left = fetch(held(ins[at])) if fetch and at is not None else matrix(values.values(ins, [])[0])
        return result(multiply(left, ins[w], bias, "none", [], ""))

    return _Dense(w, Pack(("linear", m, n, k, *turn), pack), columns[0], run)


def _plain_axes(op: Block, w: int, box: Box | None, block: dict[str, tuple[int, int]]) -> list[str] | None:
    """The dimension of each axis of a buffer that is read whole, axes of one cell left out."""
    read = op.reads[w]
    if box is None or read.when:
        return None
    out: list[str] = []
    for e, b in zip(read.index, box, strict=True):
        if b[1] - b[0] == 1 and not any(block[d] != b for d in _dims(e)):
            continue
        if not e.is_dim or block[str(e)] != b or str(e) in out:
            return None
        out.append(str(e))
    return out


def _dims(e: object) -> list[str]:
    return [str(e)] if getattr(e, "is_dim", False) else []


def _size(names: list[str], extent: dict[str, int]) -> int:
    n = 1
    for name in names:
        n *= extent[name]
    return n


def _convolution(op: Block, graph: Graph, kernel: Kernel) -> _Dense | None:
    """A convolution over two axes whose weight buffer is read whole, as one call."""
    here = localise(op, graph, kernel)
    found = contract.as_conv(here.op)
    if sum(hi - lo > 1 for lo, hi in kernel.block[len(op.dims) :]) <= 1 and found and op.ranges.get(found.channel, 1) > 1:
        return None
    if found is None or len(found.windows) != 2 or len(here.op.dims) != len(op.dims):
        return None
    x, w = here.held[found.x], here.held[found.w]
    box = kernel.ins[found.w]
    parts = contract.call(here.op, found, here.frame, x.box, w.box, x.shape)
    whole = all(isinstance(t, slice) for t in w.take) and box is not None
    if parts is None or not whole or any(s != slice(0, hi - lo) for s, (lo, hi) in zip(w.take, box or (), strict=True)):
        return None
    shape = [hi - lo for lo, hi in kernel.block[: len(op.dims)]]
    stride, dilation, pads, count = list(parts.stride), list(parts.dilation), list(parts.padding), parts.groups
    convolve, layout = torch.ops.mkldnn._convolution_pointwise.default, torch.channels_last

    def pack(buffer: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_convolution_weight(buffer, pads, stride, dilation, count, list(parts.input))

    def image(buffer: Tensor) -> Tensor:
        piece = buffer[x.take][parts.take]
        piece = torch.nn.functional.pad(piece, parts.extra) if parts.extra else piece
        return piece.contiguous(memory_format=layout)

    fetch = Remembered(image)

    def run(ins: Sequence[Tensor | None], bias: Tensor | None) -> Tensor:
        out = convolve(fetch(held(ins[found.x])), ins[found.w], bias, pads, stride, dilation, count, "none", [], "")
        return out.reshape(shape)

    key = ("conv", *pads, *stride, *dilation, count, *parts.input)
    return _Dense(found.w, Pack(key, pack), found.feature, run)


__all__ = ["Pack", "Packable", "packable"]
