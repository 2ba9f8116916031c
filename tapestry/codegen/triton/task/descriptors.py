"""Tiles as tensor descriptors (TMA): which accesses are boxes of a strided tensor of two or three axes, and which boxes.

An access over two tile axes is one when each axis is a single run with one stride, one of the strides is 1 and the other is a
multiple of 16 bytes. What is left of the offset, from batch dimensions and constants, becomes the coordinate along a third,
outer axis whose stride is its greatest common divisor. Reads past the end of a run give zeros, stores there are dropped, so
that no masks are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd, prod

from tapestry.codegen.triton.task.lowered import Access, Check, Task, inside, lower, points, substitute_task
from tapestry.codegen.triton.task.primitives import EXACT_IN, HALVES, NARROW_POINTERS, POINTERS, operand_size
from tapestry.codegen.triton.task.tiles import Contraction, KernelForm, PackedOperands, Stream, bare_read, centred, classified
from tapestry.ir.expr import Arg, Expr, arg_positions
from tapestry.ir.graph import Block, Dim, Graph, Read
from tapestry.ir.index import Aff, Ranges, dim, dims_of, span
from tapestry.ir.kernel import Box, Kernel, shape
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.states import Scan, as_scan
from tapestry.ir.types import Tensor, itemsize

_ALIGN = 16  # bytes, of every stride but the innermost and of the base


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """The tensor of a descriptor argument, in elements from the start of the buffer; ``block`` is one tile."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    dtype: str


def descriptor_type(d: Descriptor) -> str:
    """The type of a descriptor argument, for ahead-of-time compilation."""
    return f"tensordesc<{NARROW_POINTERS.get(d.dtype, POINTERS[d.dtype])[1:]}{list(d.block)}>".replace(" ", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileBox:
    """An access as a strided tensor: ``shape`` and ``strides`` have the outer axis first if there is one.

    Attributes:
        outer: the coordinate along it; ``None`` for a tensor of two axes.
        transposed: whether the first of the two tile axes is the contiguous one.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    outer: Aff | None
    transposed: bool
    dtype: str

    def descriptor(self, first: int, second: int) -> Descriptor:
        """The descriptor for tiles of ``first`` by ``second`` elements along the two tile axes."""
        tile = (second, first) if self.transposed else (first, second)
        return Descriptor(
            shape=self.shape, strides=self.strides, block=((1,) if self.outer is not None else ()) + tile, dtype=self.dtype
        )


def tile_box(access: Access, first: Sequence[Dim], second: Sequence[Dim], ranges: Ranges) -> TileBox | None:
    """The access over two tile axes as a box; ``None`` where a descriptor cannot say it."""
    size = itemsize(access.dtype)
    if access.checks or size not in (1, 2, 4) or (access.dtype[0] in "iu" and access.dtype != "i8") or access.dtype == "bool":
        return None
    steps = _stride(access.offset, first), _stride(access.offset, second)
    if steps[0] is None or steps[1] is None or 1 not in steps:
        return None
    transposed = steps[1] != 1
    extents = [points(tuple(first)), points(tuple(second))]
    if transposed:
        extents.reverse()
    far = max(steps[0], steps[1])
    inner = {d.name for d in (*first, *second)}
    rest = Aff(tuple((a, c) for a, c in access.offset.terms if a not in inner), access.offset.const)
    if far * size % _ALIGN or dims_of(rest) & {d.name for d in (*first, *second) if d.size > 1}:
        return None
    if not rest.terms and not rest.const:
        return TileBox(shape=tuple(extents), strides=(far, 1), outer=None, transposed=transposed, dtype=access.dtype)
    unit = gcd(rest.const, *(c for _, c in rest.terms))
    low, high = span(rest, ranges)
    if unit * size % _ALIGN or low < 0:
        return None
    outer = Aff(tuple((a, c // unit) for a, c in rest.terms), rest.const // unit)
    return TileBox(
        shape=(high // unit + 1, *extents), strides=(unit, far, 1), outer=outer, transposed=transposed, dtype=access.dtype
    )


def operand_boxes(task: Task, c: Contraction) -> dict[Expr, TileBox] | None:
    """Every factor of a contraction (m by k, or k by n) as a box of the operand's own dtype; ``None`` if one is none."""
    found = {a: (_of(task, c.value(a, task), c.kind(a), c.m, c.k), False) for a, _ in c.pairs}
    found |= {b: (_of(task, c.value(b, task), c.kind(b), c.k, c.n), True) for _, b in c.pairs}
    small = operand_size(c.operand) == 1  # matrix units take operands of 8 bits along k only
    boxes = {
        e: box for e, (box, transposed) in found.items() if box is not None and not (small and box.transposed != transposed)
    }
    return boxes if len(boxes) == len(found) and not c.masked else None


def aligned(task: Task, c: Contraction) -> bool:
    """Whether every row of every factor begins at a multiple of 16 bytes, so that tiles can be loaded in units of that."""
    for p in arg_positions(tuple(c.value(e, task) for pair in c.pairs for e in pair)):
        access = task.reads[p]
        step = max(1, _ALIGN // itemsize(access.dtype))
        if any(abs(k) != 1 and k % step for _, k in access.offset.terms):
            return False
    return True


def stream_boxes(task: Task, s: Stream) -> tuple[TileBox | None, TileBox | None, TileBox | None]:
    """Query (rows by depth), keys (keys by depth) and values (keys by columns) as boxes, each if it is one."""
    query = _of(task, s.query, s.kind(s.query), s.rows, s.depth)
    keys = _of(task, s.keys, s.kind(s.keys), (s.key,), s.depth)
    values = _of(task, s.value, s.weighted, (s.key,), s.columns)
    return query, keys, values


def _of(task: Task, e: Expr, dtype: str, first: tuple[Dim, ...], second: tuple[Dim, ...]) -> TileBox | None:
    position = bare_read(e)
    if position is None or task.reads[position].dtype != dtype:
        return None
    return tile_box(task.reads[position], first, second, task.ranges)


def _stride(offset: Aff, dims: Sequence[Dim]) -> int | None:
    """The one stride of some dimensions flattened in order; ``None`` where there is none (or it is not positive)."""
    kept = [d for d in dims if d.size > 1]
    if not kept:
        return None
    for outer, inner in pairwise(kept):
        if offset.coef(outer.name) != offset.coef(inner.name) * inner.size:
            return None
    step = offset.coef(kept[-1].name)
    return step if step > 0 else None


# Operands copied first, into a scratch buffer whose rows a matrix unit's loads can take 16 bytes at a time.
#
# A convolution's input with channels in front is gathered element by element, and so is a matrix whose rows are not multiples
# of 16 bytes. A copy with the contracted axis last, or with padded rows, costs its bytes once; the contraction then reads
# tiles by descriptors or 16-byte loads. To the rest of the generator the copy is a tensor like any other: the read's axes are
# permuted.


_ALIGN_OF_PACKED_OPERAND = 16  # bytes that rows begin at multiples of


def packed_operands(graph: Graph, kernel: Kernel, found: KernelForm) -> PackedOperands | None:
    """The operation on copies of the operands that cannot be read by whole rows; ``None`` where that is of no use."""
    op, c = graph.ops[kernel.op], found.product
    wide = c is not None and (c.operand != "f32" or found.precision != "ieee")
    if c is None or not isinstance(op, Block) or c.masked or not wide:
        return None
    copies: dict[int, tuple[Box, tuple[int, ...]]] = {}
    for pair in c.pairs:
        for side, e in enumerate(pair):
            p = bare_read(c.value(e, found.task))
            if p is None or op.reads[p].tensor == "":
                return None
            order = _order(graph, kernel, found, p, side)
            if order is None:
                return None
            box = kernel.ins[p]
            if order and box is not None:
                copies[p] = (box, order)
    return _with_copies(graph, kernel, found, copies) if copies else None


def _order(graph: Graph, kernel: Kernel, found: KernelForm, p: int, side: int) -> tuple[int, ...] | None:
    """The order of axes of a read's copy; ``()`` where none is needed, ``None`` where none helps."""
    c, op = found.product, graph.ops[kernel.op]
    assert c is not None and isinstance(op, Block)
    access, box = found.task.reads[p], kernel.ins[p]
    if access.dtype not in ("f32", *EXACT_IN["f32"]) or box is None or len(box) < 2:
        return None
    if _by_rows(found, c, p, side):
        return ()
    plain = tuple(range(len(box)))
    read = op.reads[p]
    last = next((a for a, e in enumerate(read.index) if e.coef(c.k[-1].name) == 1 and e.is_affine), None) if c.k else None
    orders = [plain] if not access.checks else []
    orders += [(*(a for a in plain if a != last), last)] if last is not None else []
    for order in orders:
        trial = _with_copies(graph, kernel, found, {p: (box, order)})
        if trial.product.product is not None and _by_rows(trial.product, trial.product.product, p, side):
            return order
    return None


def _by_rows(found: KernelForm, c: Contraction, p: int, side: int) -> bool:
    """Whether a factor's tiles are copied by a descriptor or in units of 16 bytes along k."""
    access = found.task.reads[p]
    first, second = (c.m, c.k) if side == 0 else (c.k, c.n)
    tile = tile_box(access, first, second, found.task.ranges)
    if tile is not None and (operand_size(c.operand) > 1 or tile.transposed == (side == 1)):
        return True
    step = _ALIGN_OF_PACKED_OPERAND // itemsize(access.dtype)
    rows = all(k % step == 0 for a, k in access.offset.terms if a != c.k[-1].name) if c.k else False
    return rows and access.offset.coef(c.k[-1].name) == 1


def _with_copies(
    graph: Graph, kernel: Kernel, found: KernelForm, copies: dict[int, tuple[Box, tuple[int, ...]]]
) -> PackedOperands:  # fmt: skip
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    tensors, ins, reads = dict(graph.tensors), list(kernel.ins), list(op.reads)
    made: list[tuple[int, KernelForm]] = []
    scratch: list[tuple[str, int]] = []
    moved, repeated, padding = 0, 0, False
    for p, (box, order) in copies.items():
        old = tensors[op.reads[p].tensor]
        step = _ALIGN_OF_PACKED_OPERAND // itemsize(old.dtype)
        held = tuple(box[a] for a in order)
        lo, hi = held[-1]
        padded = (*held[:-1], (lo, lo + -(-(hi - lo) // step) * step))
        new = Tensor(name=f"{old.name}.rows{p}", dtype=old.dtype, shape=tuple(old.shape[a] for a in order))
        tensors[new.name] = new
        ins[p] = padded
        reads[p] = replace(op.reads[p], tensor=new.name, index=tuple(op.reads[p].index[a] for a in order))
        made.append((p, _copy(old, new, box, held, padded, order)))
        scratch.append((old.dtype, prod(shape(padded))))
        padding = padding or padded != held
        if old.name not in graph.weights:  # whose copies are made once
            repeated += 1
            moved += 2 * prod(shape(box)) * itemsize(old.dtype)
    changed = replace(
        graph, tensors=tensors, ops=(*graph.ops[: kernel.op], replace(op, reads=tuple(reads)), *graph.ops[kernel.op + 1 :])
    )
    product = classified(lower(changed, replace(kernel, ins=tuple(ins))), found.precision)
    return PackedOperands(
        copies=tuple(made), product=product, scratch=tuple(scratch), moved=moved, repeated=repeated, padded=padding
    )


def _copy(old: Tensor, new: Tensor, box: Box, held: Box, padded: Box, order: tuple[int, ...]) -> KernelForm:
    """The map that writes a buffer's cells in another order of axes."""
    dims = tuple(Dim(f"x{k}", n) for k, n in enumerate(new.shape))
    index = tuple(dim(dims[order.index(a)].name) for a in range(len(order)))
    op = Block(outs=(new.name,), dims=dims, reads=(Read(tensor=old.name, index=index),), body=(Arg(0, old.dtype),))
    graph = Graph(name="copy", tensors={old.name: old, new.name: new}, ops=(op,), inputs=(old.name,), outputs=(new.name,))
    return classified(lower(graph, Kernel(op=0, mode="full", block=held, ins=(box,), outs=(padded,))))


# A reduced dimension in parts of equal size, but for the last one, which may have fewer points.


_GRAIN, _LARGE = 16, 64  # points that a part has a multiple of, where its end is not the dimension's: whole tiles


def part_size(total: int, parts: int) -> int:
    """Points of every part but the last, which has what is left; 0 where nothing would be left."""
    share = total // parts if total % parts == 0 else _in_tiles(-(-total // parts))
    return share if (parts - 1) * share < total else 0


def most_parts(total: int, most: int) -> int:
    """The number of parts, ``most`` at the most, that begin at whole tiles and have points all."""
    return -(-total // _in_tiles(-(-total // most))) if most > 0 else 0


def _in_tiles(share: int) -> int:
    grain = _LARGE if share >= 4 * _LARGE else _GRAIN
    return -(-share // grain) * grain


def splits(form: KernelForm, parts: int, depth: int = 1) -> str:
    """The reduced dimension that ``parts`` programs may share, each with ``depth`` points at least; ``""`` for none."""
    task = form.task
    if form.kind not in ("dot", "stream", "reduce", "folded") or task.mode != "full":
        return ""
    if task.monoid is None or not MONOIDS[task.monoid].commutative:
        return ""
    dims = (form.streamed.key,) if form.streamed else task.reduce
    fit = [d for d in dims if part_size(d.size, parts) >= max(2, depth)]
    fit = [d for d in fit if d.size % parts == 0] or (fit if _may_be_ragged(form) else [])
    return max(fit, key=lambda d: d.size).name if fit else ""


def _may_be_ragged(form: KernelForm) -> bool:
    """Whether points past the end can be kept from the result: by a hidden score, by factors of zero or by the identity."""
    if form.streamed is not None:
        return _zero_outside(form, form.streamed.value)
    if form.kind == "dot" and form.product is not None:
        c = form.product
        return c.operand in (*HALVES, "f32") and all(_zero_outside(form, e) for pair in c.pairs for e in pair)
    return form.kind == "reduce" and not centred(form.task)


def _zero_outside(form: KernelForm, e: Expr) -> bool:
    """Whether an expression is a read that may give zero where it has no cell."""
    position = bare_read(e)
    return position is not None and not form.task.reads[position].other


# Running states (`ir.recognise`) as tasks: the scanned dimension becomes a segment and a step.
#
# The segment is one more map dimension, the step u counts in the order of merging; place and element are then affine in both.
# Steps at which there is no element give the identity, and those without a place are not stored.


def scan_of(graph: Graph, kernel: Kernel) -> Scan | None:
    """The scan that a kernel runs; ``None`` for other kernels, and for one that only finishes merged states."""
    return None if kernel.mode == "finish" else as_scan(graph.ops[kernel.op])


def scan_task(graph: Graph, kernel: Kernel, scan: Scan) -> Task:
    """The kernel in block coordinates, over the other map dimensions, segments and (as the reduced dimension) steps."""
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    task = lower(graph, kernel, without=scan.guard)
    at = {d.name: b for d, b in zip(op.space, kernel.block, strict=True)}
    (i0, i1), (j0, j1), q = at[scan.dim], at[scan.over], scan.segment
    first, last = i0 // q, (max(i1, i0 + 1) - 1) // q
    low, high = (i0 - first * q, i1 - first * q) if first == last else (0, q)
    names = {d.name for d in op.space} - {scan.dim, scan.over}
    k, u = (next(n for n in (w, f"{w}_", f"{w}__") if n not in names) for w in ("segment", scan.dim))
    if scan.sign > 0:
        start = min(low, j0 + scan.shift)
        inner, element, steps = dim(u) + start, dim(u) + (start - scan.shift - j0), high - start
    else:
        start = max(high - 1, j1 - 1 - scan.shift)
        inner, element, steps = dim(u) * -1 + start, dim(u) * -1 + (start + scan.shift - j0), start - low + 1
    place = dim(k) * q + inner + (first * q - i0) if last > first else inner + (first * q - i0)
    segments = (Dim(k, last - first + 1),) if last > first else ()
    dims = tuple(e for d in task.dims for e in (segments if d.name == scan.dim else (d,)))
    env = {scan.dim: place, scan.over: element}
    ranges = {d.name: d.size for d in (*dims, Dim(u, steps))}
    placed, elements = inside(place, i1 - i0, ranges), inside(element, j1 - j0, ranges)
    moved, body = substitute_task(task, env, ranges), op.body_reads()

    def checked(a: Access, more: list[Check]) -> Access:
        return replace(a, checks=tuple(dict.fromkeys((*a.checks, *more))))

    return replace(
        moved, dims=dims, reduce=(Dim(u, steps),), states=(), outs=tuple(checked(a, placed) for a in moved.outs),
        reads={p: checked(a, elements if p in body else placed) for p, a in moved.reads.items()},
    )  # fmt: skip


# From a kernel of the Program to the form in which it is emitted.


def kernel_form(graph: Graph, kernel: Kernel, precision: str = "ieee") -> KernelForm:
    """The form of a kernel of the Program.

    Args:
        precision: of products of f32: ``ieee``, ``tf32x3`` or ``tf32``.

    Raises:
        TapestryError: the operation is opaque.
    """
    if (scan := scan_of(graph, kernel)) is not None:
        return KernelForm(kind="scan", task=scan_task(graph, kernel, scan), reverse=scan.sign < 0)
    form = classified(lower(graph, kernel), precision)
    return replace(form, packed=packed_operands(graph, kernel, form)) if form.product is not None else form
