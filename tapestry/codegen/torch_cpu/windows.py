"""Maximum pooling and transposed convolutions by torch's own operators, read off the projections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tapestry.codegen.torch_cpu.contract import plain_read, window
from tapestry.codegen.torch_cpu.points import held
from tapestry.codegen.torch_cpu.reads import Tensor
from tapestry.ir.contraction import factors
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Graph, Guard, Read
from tapestry.ir.index import Aff, Floor, Mod
from tapestry.ir.kernel import Kernel, whole

States = Callable[[Sequence[Tensor | None]], list[Tensor]]


def max_pool(op: Block, graph: Graph, kernel: Kernel) -> States | None:
    """States of a maximum over windows of two axes, where the whole tensor is pooled."""
    if op.monoid != "max" or len(op.body) != 1 or len(op.dims) != 4 or op.inner:
        return None
    e = op.body[0]
    if not isinstance(e, Arg) or e.dtype not in ("f32", "f64") or len(op.reads[e.pos].index) != 4:
        return None
    r, at, shape = op.reads[e.pos], e.pos, graph.tensors[op.reads[e.pos].tensor].shape
    if r.when or r.other not in (None, float("-inf")) or kernel.ins[at] != whole(shape) or not _all(op, kernel):
        return None
    names = [d.name for d in op.dims]
    if [str(i) if i.is_dim else "" for i in r.index[:2]] != names[:2] or (op.dims[0].size, op.dims[1].size) != shape[:2]:
        return None
    reduced = {d.name: d.size for d in op.reduce}
    sizes, pads, strides, dilations = list[int](), list[int](), list[int](), list[int]()
    for k in (2, 3):
        inside = [n for n in reduced if any(a == n for a, _ in r.index[k].terms)]
        w = window(op, r, k, inside[0] if inside else "", op.ranges) if len(inside) <= 1 else None
        if w is None:
            return None
        size = reduced.get(w.window, 1)
        full = (shape[k] - 2 * w.offset - w.dilation * (size - 1) - 1) // w.stride + 1
        if w.offset > 0 or -w.offset > size // 2 or full != op.dims[k].size:
            return None
        sizes.append(size)
        pads.append(-w.offset)
        strides.append(w.stride)
        dilations.append(w.dilation)
    used = {a for i in r.index for a, _ in i.terms}
    if any(n not in used and size > 1 for n, size in reduced.items()):
        return None
    return lambda ins: [torch.max_pool2d(_last(held(ins[at])), sizes, strides, pads, dilations)]


def _last(x: Tensor) -> Tensor:
    """Channels last, where torch's windows are many times faster, with strides that say so for a batch of one too."""
    _, c, h, w = x.shape
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, (h * w * c, 1, w * c, c))


def _all(op: Block, kernel: Kernel) -> bool:
    return kernel.block == tuple((0, d.size) for d in op.space) and all(d.size for d in op.space)


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of a transposed convolution: input place i adds to outputs ``stride * i + dilation * r + first``."""

    stride: int
    dilation: int
    first: int


def transposed(op: Block, graph: Graph, kernel: Kernel) -> States | None:
    """States of a transposed convolution over two axes, one group, where all of it is computed."""
    both = factors(op)
    if both is None or op.body[0].dtype != "f32" or len(op.dims) != 4 or not _all(op, kernel):
        return None
    reads = [plain_read(op, e, guarded=True) for e in both]
    for x, w in (reads, reads[::-1]):
        if x is None or w is None or kernel.ins[x] is None or kernel.ins[w] is None:
            return None
        if kernel.ins[x] != whole(graph.tensors[op.reads[x].tensor].shape):
            continue
        if kernel.ins[w] != whole(graph.tensors[op.reads[w].tensor].shape):
            continue
        found = _spread(op, op.reads[x], op.reads[w], *(graph.tensors[op.reads[k].tensor].shape for k in (x, w)))
        if found is not None:
            return _transposed(x, w, *found)
    return None


def _spread(
    op: Block, x: Read, w: Read, shape: tuple[int, ...], weight: tuple[int, ...]
) -> tuple[list[_Axis], list[int]] | None:
    """(axes, zeros to cut at the end) by projections ``x[b, c, floor((h - r + p) / s), …]`` and ``w[c, o, r, s]``.

    The operation may be a part of one that was cut: then it runs over fewer points than its tensors have.
    """
    b, o, *outs = (d.name for d in op.dims)
    plain = [str(e) if e.is_dim else "" for e in w.index]
    if len(x.index) != 4 or len(w.index) != 4 or "" in plain or w.when or w.other is not None or x.other != 0:
        return None
    c = plain[0]
    if [str(e) if e.is_dim else "" for e in x.index[:2]] != [b, c] or plain[1] != o:
        return None
    if {c, *plain[2:]} != {d.name for d in op.reduce} or len({*plain}) != 4:
        return None
    if tuple(op.ranges[n] for n in plain) != weight or (op.ranges[b], op.ranges[c]) != shape[:2]:
        return None
    axes, extra, guards = list[_Axis](), list[int](), list(x.when)
    for k, (out, r) in enumerate(zip(outs, plain[2:], strict=True)):
        axis = _place(x.index[k + 2], out, r, guards)
        if axis is None:
            return None
        end = (shape[k + 2] - 1) * axis.stride + axis.dilation * (op.ranges[r] - 1) + axis.first + 1
        axes.append(axis)
        extra.append(op.ranges[out] - end)
    more = [n - a.first for n, a in zip(extra, axes, strict=True)]
    if guards or any(a.first > 0 for a in axes) or any(not 0 <= n < a.stride for n, a in zip(more, axes, strict=True)):
        return None
    return axes, extra


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


def _transposed(x: int, w: int, axes: list[_Axis], extra: list[int]) -> States:
    strides, dilations = [a.stride for a in axes], [a.dilation for a in axes]
    pads = [-a.first for a in axes]
    more = [n + p for n, p in zip(extra, pads, strict=True)]  # torch cuts the padding at both ends

    def run(ins: Sequence[Tensor | None]) -> list[Tensor]:
        return [torch.conv_transpose2d(_last(held(ins[x])), held(ins[w]), None, strides, pads, more, 1, dilations)]

    return run
