"""Transposed convolutions by torch's own operator, read off the projections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tapestry.codegen.torch_cpu.base.point_values import held
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c.conv_c import Tensor
from tapestry.ir.graph import Block, Graph, Guard, Read
from tapestry.ir.index import Aff, Floor, Mod
from tapestry.ir.kernel import Box, Kernel, slices_within
from tapestry.ir.recognition.contraction import factors
from tapestry.ir.recognition.convolution import plain_read

States = Callable[[Sequence[Tensor | None]], list[Tensor]]


def _last(x: Tensor) -> Tensor:
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
) -> _Part:
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
    x = slices_within(wanted, x_box)
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
        image, weight = _last(held(ins[x])[part.x]), held(ins[w])[part.w]
        if ready:
            return [torch.conv_transpose2d(image, weight, None, strides, pads, more, 1, dilations)]
        whole = torch.conv_transpose2d(image, weight, None, strides, 0, 0, 1, dilations)
        return [torch.nn.functional.pad(whole, around)]  # negative padding cuts

    return run
