"""Element-wise operations and rows of tables as fixed calls: C from their expressions, compiled once for all of a model."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tapestry.codegen.torch_cpu.base.piecewise import cut_pieces
from tapestry.codegen.torch_cpu.base.point_values import Run, held
from tapestry.codegen.torch_cpu.c import conv_c, generated_c
from tapestry.codegen.torch_cpu.c.c_calls import Call, Ins, Recorded, Written, row_major, shares
from tapestry.codegen.torch_cpu.c.print_c import Chosen, Piece, Writer, written
from tapestry.ir.expr import Expr, arg_positions
from tapestry.ir.graph import Block, Graph, Read
from tapestry.ir.index import dims_of
from tapestry.ir.kernel import Box, Kernel, shape, size
from tapestry.ir.recognise.selection_sum import selection

Tensor = torch.Tensor
LEAST = 1 << 10  # points: fewer are worth a function in a program of many small operations alone
MOST_PIECES = 32


@dataclass(frozen=True, slots=True)
class How:
    """How functions in C are made: with sizes as arguments, so that one serves all sizes of a plan; and compiled where they are
    not there yet, or not used."""

    any_size: bool = False
    compiles: bool = True


PLAIN = How()


@dataclass(frozen=True, slots=True)
class Mapped:
    """An operation with a function in C of the same meaning, which is compiled when a machine first asks for it.

    Attributes:
        plain: the operation on torch's operators.
        names: of the functions in C.
        recorded: the calls of that function.
        reads: which reads of the operation a function that is all of it is given, in order.
        few: whether torch's operators take no longer but for their calls.
        compiles: whether it is compiled where it is not there yet.
        sizes: what a function that takes sizes is called with.
    """

    plain: Run
    names: tuple[str, ...]
    recorded: Recorded | Written
    reads: tuple[int, ...] = ()
    few: bool = False
    compiles: bool = True
    sizes: tuple[int, ...] = ()

    def __call__(self, ins: Ins, states: Sequence[Tensor]) -> list[Tensor]:
        """Compute into new memory: by torch, where there are few points."""
        found = None if self.few else self.recorder()
        return self.plain(ins, states) if found is None else found(ins, states)

    def recorder(self) -> Recorded | Written | None:
        """The operation as one that writes where it is told; ``None`` without a working compiler."""
        return self.recorded if all(generated_c.function(n, self.compiles) for n in self.names) else None


def mapped(op: Block, graph: Graph, kernel: Kernel, plain: Run, how: How = PLAIN) -> Run:
    """The operation with its function in C, where it has one and torch is to use one thread."""
    found = _pieces(op, kernel) if conv_c.available() and kernel.mode == "full" and not op.inner else None
    out = kernel.block[: len(op.dims)]
    if not found or any(hi <= lo for lo, hi in kernel.block) or kernel.outs[0] != out:
        return plain
    used = sorted(arg_positions(tuple(e for p in found for e in _exprs(p))))
    boxes = {k: b for k in used if (b := kernel.ins[k]) is not None}
    if (
        len(boxes) < len(used)
        or not all(_row_by_row(op, op.reads[k], boxes[k], out) for k in used)
        or (how.any_size and _image(op, used))
    ):
        return plain
    names = tuple(d.name for d in op.dims)
    tensors = {k: graph.tensors[op.reads[k].tensor] for k in used}
    reads = {k: (op.reads[k], boxes[k], t.shape, t.dtype) for k, t in tensors.items()}
    writer = Writer(names, reads, out, given=[] if how.any_size else None)
    name = generated_c.register(writer.function(found), how.compiles)
    extents = shape(out)
    record = functools.partial(_record, name, used, writer.sizes())
    call = Recorded(lambda memory: memory.view(extents), record, size(out))
    return Mapped(plain, (name,), call, tuple(used), few=size(out) < LEAST, compiles=how.compiles, sizes=writer.arguments)


def _record(name: str, used: Sequence[int], sizes: Any, ins: Ins, memory: Tensor) -> Call:
    function: Any = generated_c.function(name)
    given = [row_major(held(ins[k])) for k in used]
    buffers = (ctypes.c_void_p * (len(given) + 1))(*(x.data_ptr() for x in given), memory.data_ptr())
    fixed = all(shares(x, held(ins[k])) for x, k in zip(given, used, strict=True))
    return Call(function, sizes, buffers, (*given, memory), fixed)


def _exprs(p: Piece) -> tuple[Expr, ...]:
    return (p.value, *((p.chosen.wanted, p.chosen.picked) if p.chosen else ()))


def _pieces(op: Block, kernel: Kernel) -> list[Piece] | None:
    """The operation box by box, if all of it can be written in C."""
    if op.monoid is None:
        found = [Piece(box, body[0]) for box, body in cut_pieces(op.body, op, kernel.block)] if len(op.body) == 1 else []
    else:
        parts = selection(op) if len(op.then) == 1 else None
        if parts is None or parts.shift or parts.picked.dtype != "f32":
            return None
        chosen = Chosen(parts.over.name, parts.wanted, parts.picked, kernel.block[-1])
        found = [Piece(kernel.block[:-1], op.then[0], chosen)]
    fine = all(p.value.dtype == "f32" and written(_exprs(p)) for p in found)
    return found if fine and len(found) <= MOST_PIECES else None


def _row_by_row(op: Block, r: Read, box: Box, out: Box) -> bool:
    """Whether cells that follow each other in the last axis of the output are one cell of the buffer, or neighbours there."""
    inner = next((d.name for d, (lo, hi) in reversed(list(zip(op.dims, out, strict=True))) if hi - lo > 1), None)
    step, along = 1, 0
    for e, n in reversed(list(zip(r.index, shape(box), strict=True))):
        if any(not isinstance(a, str) and inner in dims_of(a.arg) for a, _ in e.terms):
            return False
        along += step * e.coef(inner or "")
        step *= n
    return along in (0, 1)


def _image(op: Block, used: Sequence[int]) -> bool:
    """Whether images are read as such: their channels may be adjacent, as they are not in a row-major result."""
    plain = [sum(len(e.terms) == 1 and len(dims_of(e)) == 1 for e in op.reads[k].index) for k in used]
    return len(op.dims) == 4 and any(n >= 3 and len(op.reads[k].index) == 4 for n, k in zip(plain, used, strict=True))
