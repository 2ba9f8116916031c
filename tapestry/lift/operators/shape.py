"""Views: operators that only rename positions. Each is a block with one read and no arithmetic, or a choice of reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import numpy_helper

from tapestry.errors import ModelError
from tapestry.ir.expr import Arg, Expr, Index, call, cast, choose, literal, number
from tapestry.ir.graph import Dim, ranges_of
from tapestry.ir.index import Aff, const, dim, floordiv, modulo
from tapestry.ir.types import Tensor
from tapestry.lift.builder import Node, Operand, axes, broadcast, every, from_front, here, tests_inside
from tapestry.lift.registry import Declined, lifts

WIDEST = 16  # tensors side by side in a padding that repeats them


def regroup(source: Sequence[int], target: Sequence[int], place: Sequence[Aff], ranges: dict[str, int]) -> list[Aff]:
    """Index into a tensor of shape ``source`` for a position in shape ``target``, both row-major of equal size.

    Axes are matched in groups of equal product, so that what does not change stays a plain dimension, and a floor or
    mod appears only inside a group of several source axes.
    """
    out: list[Aff] = [const(0)] * len(source)
    rows = [k for k, s in enumerate(source) if s != 1]
    columns = [k for k, s in enumerate(target) if s != 1]
    while rows:
        a, b = [rows.pop(0)], [columns.pop(0)]
        have, want = source[a[0]], target[b[0]]
        while have != want:
            if have < want:
                a.append(rows.pop(0))
                have *= source[a[-1]]
            else:
                b.append(columns.pop(0))
                want *= target[b[-1]]
        flat, stride = const(0), 1
        for k in reversed(b):
            flat, stride = flat + place[k] * stride, stride * target[k]
        stride = 1
        for k in reversed(a):
            part = floordiv(flat, stride, ranges)
            out[k] = part if k == a[0] else modulo(part, source[k], ranges)
            stride *= source[k]
    return out


def reshape(n: Node, out: str | Tensor, src: str, shape: Sequence[int], dims: Sequence[Dim] | None = None) -> str:
    """Emit a view of a tensor in another shape (row-major)."""
    t = n.b.tensor(src)
    dims = dims or axes(shape)
    if t.size == 0:
        return n.view(out, src, dims, [const(0)] * len(t.shape), 0)
    return n.view(out, src, dims, regroup(t.shape, shape, here(dims), ranges_of(dims)))


@lifts("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
def lift_reshape(n: Node) -> None:
    """The same elements in the same order; inference has worked out the shape."""
    before, after = n.b.tensor(n.ins[0]), n.out()
    if before.size != after.size:
        why = f"{list(before.shape)} has {before.size:,} elements, {list(after.shape)} {after.size:,}"
        hint = "check the shape that the node asks for against the sizes given with --shape"
        raise ModelError("not as many elements as before", where=n.where, why=why, hint=hint)
    reshape(n, after, n.ins[0], after.shape)


@lifts("Transpose")
def lift_transpose(n: Node) -> None:
    """Axes permuted."""
    rank = len(n.shape(0))
    perm = [int(p) for p in n.attr("perm", list(reversed(range(rank))))]
    if sorted(perm) != list(range(rank)):
        raise ModelError("not a permutation of the axes", where=n.where, why=f"perm is {perm}, the rank {rank}")
    dims = n.out_dims()
    n.view(n.out(), n.ins[0], dims, [dim(f"x{perm.index(a)}") for a in range(rank)])


@lifts("Expand")
def lift_expand(n: Node) -> None:
    """Broadcasting as a projection."""
    dims = n.out_dims()
    n.view(n.out(), n.ins[0], dims, broadcast(n.shape(0), dims))


@lifts("Tile", since=6)
def lift_tile(n: Node) -> None:
    """Repetition: positions modulo the input's size."""
    dims = n.out_dims()
    ranges = ranges_of(dims)
    n.view(n.out(), n.ins[0], dims, [modulo(dim(d.name), max(s, 1), ranges) for d, s in zip(dims, n.shape(0), strict=True)])


@lifts("Slice")
def lift_slice(n: Node) -> None:
    """start + step * position; bounds are attributes before opset 10."""
    shape, rank = n.shape(0), len(n.shape(0))
    starts, ends = n.ints(1, "starts"), n.ints(2, "ends")
    if starts is None or ends is None or (n.has(3) and n.const(3) is None) or (n.has(4) and n.const(4) is None):
        raise Declined
    which = n.ints(3, "axes") or list(range(len(starts)))
    steps = n.ints(4) or [1] * len(starts)
    dims = n.out_dims()
    index: list[Aff] = here(dims)
    for start, axis, step in zip(starts, which, steps, strict=True):
        size = shape[axis % rank]
        first = start + size if start < 0 else start
        first = min(max(first, 0), size - 1 if step < 0 else size)
        index[axis % rank] = dim(f"x{axis % rank}") * step + first
    n.view(n.out(), n.ins[0], dims, index, 0 if n.out().size == 0 else None)


@lifts("Split")
def lift_split(n: Node) -> None:
    """One view per piece."""
    rank = len(n.shape(0))
    axis, start = n.axis(0, rank), 0
    for k, name in enumerate(n.outs):
        size = n.out(k).shape[axis] if name else -(-n.shape(0)[axis] // len(n.outs))
        if name:
            dims = n.out_dims(k)
            index = [dim(d.name) + (start if a == axis else 0) for a, d in enumerate(dims)]
            n.view(n.out(k), n.ins[0], dims, index)
        start += size


def concat(n: Node, out: str | Tensor, names: Sequence[str], axis: int) -> str:
    """Emit a concatenation: a guarded read of each part, and a choice by position."""
    whole = [n.b.tensor(i) for i in names]
    parts = [t for t in whole if t.size] or whole
    shape = list(parts[0].shape)
    shape[axis] = sum(t.shape[axis] for t in parts)
    dims = axes(shape)
    starts: list[int] = []
    reads: list[Operand] = []
    at = 0
    for t in parts:
        index = [dim(d.name) - (at if a == axis else 0) for a, d in enumerate(dims)]
        reads.append(n.read(t.name, index, 0 if len(parts) > 1 else None))
        starts.append(at)
        at += t.shape[axis]
    place = Index(dim(f"x{axis}"))
    return n.block(out, dims, reads, choose(place, starts, [Arg(k, t.dtype) for k, t in enumerate(parts)]))


@lifts("Concat", since=4)
def lift_concat(n: Node) -> None:
    """Concatenation along an axis."""
    concat(n, n.out(), n.ins, n.axis(0, len(n.out().shape)))


@lifts("Pad")
def lift_pad(n: Node) -> None:
    """Constant padding is a guarded read; the other modes are choices between reads, one axis after another."""
    rank, pads = len(n.shape(0)), n.ints(1, "pads" if n.version >= 2 else "paddings")
    if pads is None or (n.has(3) and n.const(3) is None):
        raise Declined
    which = [a % rank for a in (n.ints(3) or range(rank))]
    before, after = [0] * rank, [0] * rank
    for k, a in enumerate(which):
        before[a], after[a] = pads[k], pads[k + len(which)]
    mode = n.attr("mode", "constant")
    if mode == "constant":
        return _pad_constant(n, before)
    if any(p < 0 for p in before + after):
        raise Declined
    src = n.ins[0]
    todo = [a for a in range(rank) if before[a] or after[a]]
    for a in todo[:-1]:
        src = _pad_axis(n, n.temp(f"pad{a}"), src, a, before[a], after[a], mode)
    last = todo[-1] if todo else 0
    _pad_axis(n, n.out(), src, last, before[last], after[last], mode)


def _pad_constant(n: Node, before: Sequence[int]) -> None:
    dims = n.out_dims()
    index = [dim(d.name) - b for d, b in zip(dims, before, strict=True)]
    if n.has(2) and n.const(2) is None:
        value = n.read(n.ins[2], [const(0)] * len(n.shape(2)))
        within = every(test for e, s in zip(index, n.shape(0), strict=True) for test in tests_inside(Index(e), s))
        n.block(n.out(), dims, [n.read(n.ins[0], index, 0), value], lambda x, v: call("where", within, x, v))
        return
    given: Any = n.const(2)
    value = given.reshape(-1)[0].item() if given is not None else n.attr("value", 0.0)
    if value != value:
        raise Declined
    grown = any(b > 0 or d.size - b > s for b, d, s in zip(before, dims, n.shape(0), strict=True))
    n.view(n.out(), n.ins[0], dims, index, value if grown else None)


def _pad_axis(n: Node, out: str | Tensor, src: str, axis: int, before: int, after: int, mode: str) -> str:
    shape = n.b.tensor(src).shape
    size = shape[axis]
    dims = axes([s + before + after if a == axis else s for a, s in enumerate(shape)])
    x = dim(f"x{axis}")
    if not before and not after:
        return n.view(out, src, dims, dims)
    if mode == "reflect" and before + after > WIDEST * size:
        why = f"axis {axis} has {size} cells, the pads are {before} and {after}"
        raise ModelError("the padding reflects the tensor too often", where=n.where, why=why)
    if mode == "wrap":
        index = here(dims)
        index[axis] = modulo(x - before, size, {f"x{axis}": dims[axis].size})
        return n.view(out, src, dims, index)
    pieces = _mirrored(x, before, size, after) if mode == "reflect" and size > 1 else _clamped(x, before, size, after)
    reads: list[Operand] = []
    for _, e in pieces:
        index = [e if a == axis else dim(d.name) for a, d in enumerate(dims)]
        reads.append(n.read(src, index, None if e.is_affine and not e.terms else 0))
    values = [Arg(k, t.dtype) for k, (_, t) in enumerate(reads)]
    return n.block(out, dims, reads, choose(Index(x), [start for start, _ in pieces], values))


def _clamped(x: Aff, before: int, size: int, after: int) -> list[tuple[int, Aff]]:
    """First place and position read of each piece, where the ends repeat."""
    pieces = [(0, const(0), before), (before, x - before, size), (before + size, const(size - 1), after)]
    return [(start, e) for start, e, length in pieces if length]


def _mirrored(x: Aff, before: int, size: int, after: int) -> list[tuple[int, Aff]]:
    """First place and position read of each piece, where the tensor (of two cells or more) is reflected at its ends."""
    out: list[tuple[int, Aff]] = []
    last = size - 1
    for k in range(-before // last, (last + after - 1) // last + 1):
        start = max(k * last + (k > 0), -before) + before
        position = x - (before + k * last) if k % 2 == 0 else x * -1 + (before + (k + 1) * last)
        out.append((start, position))
    return out


@lifts("DepthToSpace", "SpaceToDepth")
def lift_depth_space(n: Node) -> None:
    """Blocks of positions to and from channels: one view through the row-major index."""
    s = int(n.attr("blocksize"))
    dims = n.out_dims()
    b, ch, h, w = here(dims)
    ranges = ranges_of(dims)
    if n.kind == "SpaceToDepth":
        c = n.shape(0)[1]
        block, channel = floordiv(ch, c, ranges), modulo(ch, c, ranges)
        if n.attr("mode", "DCR") == "CRD":
            block, channel = modulo(ch, s * s, ranges), floordiv(ch, s * s, ranges)
        index = [b, channel, h * s + floordiv(block, s, ranges), w * s + modulo(block, s, ranges)]
    else:
        c = n.out().shape[1]
        block = modulo(h, s, ranges) * s + modulo(w, s, ranges)
        channel = ch + block * c if n.attr("mode", "DCR") == "DCR" else ch * (s * s) + block
        index = [b, channel, floordiv(h, s, ranges), floordiv(w, s, ranges)]
    n.view(n.out(), n.ins[0], dims, index)


@lifts("ConstantOfShape")
def lift_constant(n: Node) -> None:
    """A constant at every position."""
    given = n.attr("value")
    value = 0.0 if given is None else numpy_helper.to_array(given).reshape(-1)[0].item()
    n.block(n.out(), n.out_dims(), [], literal(value, n.out().dtype))


@lifts("Range")
def lift_range(n: Node) -> None:
    """start + step * position, of known start and step."""
    start, step = n.const(0), n.const(2)
    if start is None or step is None:
        raise Declined
    dtype = n.out().dtype
    if np.issubdtype(start.dtype, np.integer):
        e: Expr = cast(Index(dim("x0") * int(step) + int(start)) if int(step) else Index(const(int(start))), dtype)
    else:
        place = cast(Index(dim("x0")), dtype)
        e = start.item() + place * step.item()
    n.block(n.out(), n.out_dims(), [], e)


@lifts("EyeLike")
def lift_eye(n: Node) -> None:
    """1 where column - row = k."""
    dtype = n.out().dtype
    hit = call("eq", Index(dim("x1") - dim("x0")), int(n.attr("k", 0)))
    n.block(n.out(), n.out_dims(), [], call("where", hit, number(1, dtype), number(0, dtype)))


@lifts("Trilu")
def lift_trilu(n: Node) -> None:
    """x in a triangle, 0 elsewhere."""
    k = n.const(1) if n.has(1) else np.zeros(())
    if k is None:
        raise Declined
    dims, rank = n.out_dims(), len(n.shape(0))
    gap = Index(dim(f"x{rank - 1}") - dim(f"x{rank - 2}"))
    keep = call("ge" if n.attr("upper", 1) else "le", gap, int(k.reshape(-1)[0]))
    n.block(n.out(), dims, [n.read(n.ins[0], dims)], call("where", keep, Arg(0, n.dtype(0)), 0))


@lifts("OneHot")
def lift_one_hot(n: Node) -> None:
    """on where the position along the new axis is the index (a negative one counts from the back), off elsewhere.

    A fraction is cast to int64 first, as ONNX has it: -0.5 is place 0.
    """
    dims = n.out_dims()
    axis = int(n.attr("axis", -1)) % len(dims)
    depth = dims[axis].size
    index = n.read(n.ins[0], [e for a, e in enumerate(here(dims)) if a != axis])
    values = [n.read(n.ins[2], [const(k)]) for k in (0, 1)]

    def body(i: Expr, off: Expr, on: Expr) -> Expr:
        place = from_front(cast(i, "i64"), depth)
        return call("where", call("eq", place, Index(dim(f"x{axis}"))), on, off)

    n.block(n.out(), dims, [index, *values], body)
