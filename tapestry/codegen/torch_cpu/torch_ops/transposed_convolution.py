"""Transposed convolutions, read off the projections: phases of their results that are convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.ir.graph import Block, Graph, Guard, Read
from tapestry.ir.index import Aff, Floor, Mod
from tapestry.ir.kernel import Kernel, slices_within
from tapestry.ir.recognition.contraction import factors
from tapestry.ir.recognition.convolution import plain_read


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of a transposed convolution: input place i adds to outputs ``stride * i + dilation * r + first``."""

    stride: int
    dilation: int
    first: int


@dataclass(frozen=True, slots=True)
class Phase:
    """Every ``stride``-th output along an axis from ``first`` on: a convolution with some of the taps, in the image's order."""

    first: int
    outs: int
    taps: tuple[int, ...]
    padding: int


@dataclass(frozen=True, slots=True)
class Spread:
    """A transposed convolution of the image ``x`` with the weight ``w``: parts of their buffers, and phases of both axes."""

    x: int
    w: int
    x_take: tuple[slice, ...]
    w_take: tuple[slice, ...]
    strides: tuple[int, int]
    phases: tuple[Sequence[Phase], Sequence[Phase]]


def transposed(op: Block, graph: Graph, kernel: Kernel) -> Spread | Refusal:
    """A transposed convolution over two axes, one group, on any block: convolutions whose results lie between each other's."""
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
        index, names = op.reads[x].index[:2], [str(e) for e in op.reads[w].index]
        if any(at[str(e)][1] > n for e, n in zip(index, graph.tensors[op.reads[x].tensor].shape, strict=False)):
            return Refusal("a pad adds images or channels")
        outs = [d.name for d in op.dims[2:]]
        phases = [_phases(a, at[out], at[r], p) for a, out, r, (p, _) in zip(axes, outs, names[2:], boxes[0][2:], strict=True)]
        if (
            any(a.dilation > 1 for a in axes)
            or any(not p.taps for some in phases for p in some)
            or any(lo >= hi for lo, hi in boxes[0])
        ):
            return Refusal("some outputs are of no tap at all, or taps are apart")
        take = slices_within([at[op.dims[0].name], at[names[0]], *boxes[0][2:]], boxes[0])
        strides = (axes[0].stride, axes[1].stride)
        return Spread(x, w, take, slices_within([at[n] for n in names], boxes[1]), strides, (phases[0], phases[1]))
    return Refusal("no factor is spread over the result with a stride")


def _phases(a: _Axis, out: tuple[int, int], taps: tuple[int, int], start: int) -> list[Phase]:
    found = list[Phase]()
    for n in range(min(a.stride, out[1] - out[0])):
        reach = {r: out[0] + n - a.first - r for r in reversed(range(*taps))}
        places = {r: v // a.stride - start for r, v in reach.items() if v % a.stride == 0}
        outs = -(-(out[1] - out[0] - n) // a.stride)
        found.append(Phase(n, outs, tuple(r - taps[0] for r in places), -min(places.values(), default=0)))
    return found


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
