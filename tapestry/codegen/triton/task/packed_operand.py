"""Operands copied first, into a scratch buffer whose rows a matrix unit's loads can take 16 bytes at a time.

A convolution's input with channels in front is gathered element by element, and so is a matrix whose rows are not multiples
of 16 bytes. A copy with the contracted axis last, or with padded rows, costs its bytes once; the contraction then reads
tiles by descriptors or 16-byte loads. To the rest of the generator the copy is a tensor like any other: the read's axes are
permuted.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tapestry.codegen.blocks.forms import Contraction, KernelForm, PackedOperands, bare_read, classified
from tapestry.codegen.blocks.lowered import lower
from tapestry.codegen.blocks.operands import EXACT_IN, operand_size
from tapestry.codegen.triton.task.descriptors import tile_box
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Dim, Graph, Read
from tapestry.ir.index import dim
from tapestry.ir.kernel import Box, Kernel, shape
from tapestry.ir.types import Tensor, itemsize

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
) -> PackedOperands:
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
