"""Operations of any kind as fixed calls: loops over the index space in C, the monoid's own expressions in the innermost.

What a step of a small model takes is not its arithmetic but the calls of operators; and where torch has no operator for an
operation, points are written out before they are merged, or cells gathered one by one. Here an operation is one function, which
`tapestry_run` calls among others.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tapestry.codegen.blocks.lowered import Task, points, task_of
from tapestry.codegen.blocks.regroup import coalesced, split_groups
from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base.piecewise import cut_pieces
from tapestry.codegen.torch_cpu.base.point_values import Run, held
from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c import conv_c, generated_c
from tapestry.codegen.torch_cpu.c.c_calls import CCall, CpuKernel, Ins
from tapestry.codegen.torch_cpu.c.nest_c import Nest, extremes, in_rows, plain_moments, varied
from tapestry.codegen.torch_cpu.c.print_c import TYPES, Writer, is_slow, written
from tapestry.codegen.torch_cpu.c.thread_parts import CELLS, Work
from tapestry.ir.expr import Call as Apply
from tapestry.ir.expr import Expr, Index, Let, arg_positions, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, shape, size
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.recognition.contraction import has_matrices, only_sums
from tapestry.ir.recognition.selection_sum import selection

Tensor = torch.Tensor

LEAST = 1 << 10  # points: fewer are worth a function in a program of many small operations alone
MOST_PIECES = 256


@dataclass(frozen=True, slots=True)
class How:
    """How functions in C are made: with sizes as arguments, so that one serves all sizes of a plan; and compiled where they are
    not there yet, or not used."""

    any_size: bool = False
    compiles: bool = True


PLAIN = How()


MOST_WORK = 1 << 18  # primitives: more take longer than torch's calls
MOST_SUMS = 1 << 16  # in sums, which torch's matrix products are better at
MOST_READ = 1 << 24  # where what is read, or one of two factors, is not read again: torch would write it out
MOST_MERGES = 1 << 14  # in other reductions, which are a cell at a time
SLOW = 32  # primitives that a call of the library takes as long as
MOST_TEXT = 2000  # primitives of an operation


@dataclass(frozen=True, slots=True)
class Loops:
    """A block as a function in C.

    Attributes:
        tasks: the block, or the parts of it that are expressions of their own.
        work: primitives of all of it.
    """

    op: Block
    graph: Graph
    kernel: Kernel
    tasks: tuple[Task, ...]
    work: int

    def made(self, plain: Run, how: How, *, few: bool) -> CpuKernel:
        """The kernel."""
        writer = Nest(given=[] if how.any_size else None)
        name = generated_c.register(writer.function(self.tasks), how.compiles)
        extents, outs = shape(self.kernel.outs[0]), [self.graph.tensors[t].dtype for t in self.op.outs]
        view: Callable[[Tensor], Tensor] = lambda memory: memory.view(extents)  # noqa: E731
        work = Work(writer.units, self.work / CELLS)
        return CpuKernel(
            plain=plain,
            bind=functools.partial(_record, name, tuple(writer.slots), writer.sizes(), work),
            arrays=(view,) * len(outs),
            memory=tuple((prod(extents), TORCH_DTYPES[d]) for d in outs),
            functions=(name,),
            few=few,
            compiles=how.compiles,
        )


def loops_of(op: Block, graph: Graph, kernel: Kernel) -> Loops | Refusal:
    """A block as loops; a refusal where C cannot be written for it."""
    if native.library() is None:
        return conv_c.NO_LIBRARY
    out = kernel.block[: len(op.dims)]
    if kernel.mode != "full" or any(hi <= lo for lo, hi in kernel.block):
        return Refusal("it is a part of a reduction, or has no points")
    if any(b != out for b in kernel.outs):
        return Refusal("one axis of a result is stored once for several")
    pieces = cut_pieces(op.body, op, kernel.block) if op.monoid is None and not op.inner else []
    pieces = pieces if 0 < len(pieces) <= MOST_PIECES else [(kernel.block, op.body)]
    tasks = [_task(replace(op, body=body), graph, replace(kernel, block=box)) for box, body in pieces]
    if None in tasks:
        return Refusal("C has no type or no function for a part of it")
    found = tuple(t for t in tasks if t)
    return Loops(op, graph, kernel, found, sum(map(_work, found)))


def _task(op: Block, graph: Graph, kernel: Kernel) -> Task | None:
    """An operation in block coordinates; ``None`` where C has no type or no function for a part of it."""
    used = arg_positions((*op.point, *op.then))
    exprs = (*op.point, *op.then, *_combined(op))
    dtypes = {graph.tensors[t].dtype for t in (*op.outs, *(op.reads[k].tensor for k in used))}
    if any(kernel.ins[k] is None for k in used) or dtypes - TYPES.keys() or not written(exprs, few=True):
        return None
    task = task_of(op, graph, kernel)
    shared = split_groups(task) if op.monoid and not op.inner else task  # channels of a group share its statistics
    return coalesced(shared if _states(shared) < _states(task) else task)


def _states(task: Task) -> int:
    """How many states of a reduction there are."""
    outer = varied(task)
    return points(tuple(d for d in task.dims if d.name in outer))


def _work(task: Task) -> int:
    """Primitives of a task."""
    inside = _states(task) * (1 if selection(task) else points(task.reduce) * points(task.inner_dims))
    point = (*(s.body for s in task.inner), *task.body, *_combined(task))
    return inside * _weight(point) + points(task.dims) * _weight(task.then)


def by_rows(op: Block, graph: Graph, kernel: Kernel, plain: Run, how: How = PLAIN) -> CpuKernel | Refusal:
    """A function in C that writes the operation row by row, where that is one pass and torch makes one for each operator."""
    if op.inner or (op.monoid and selection(op) is None):
        return Refusal("it is no expression in each cell, nor a row picked from a table")
    found = loops_of(op, graph, kernel)
    if not found:
        return found
    if not written((*op.body, *op.then)) or not all(map(in_rows, found.tasks)):
        return Refusal("a function is called for each cell, or neighbours in a row are no neighbours in what it reads")
    return found.made(plain, how, few=size(kernel.outs[0]) < LEAST)


def as_loops(op: Block, graph: Graph, kernel: Kernel, plain: Run, is_dear: Callable[[], bool], how: How) -> CpuKernel | Refusal:
    """A function in C that is all of the operation, where it is small or torch's way is dear.

    One for any size is compiled where it is neither: at another size it may be.
    """
    found = loops_of(op, graph, kernel)
    if not found:
        return found
    few, dear = found.work <= _most(op), is_dear()
    if not (few or dear or (how.any_size and how.compiles)):
        return Refusal(f"{found.work:,} primitives take longer than calls of torch's operators, which there are for them")
    made = found.made(plain, how, few=not dear)
    return made if few or dear else Refusal(f"{found.work:,} primitives are many; at another size they may be few")


def _most(op: Block) -> int:
    """Primitives that an operation may have: as many as take no longer here than torch's operators for it."""
    exprs = (*op.point, *op.then)
    if any(isinstance(x, Apply) and is_slow(x) for e in exprs for x in walk(e)):
        return MOST_WORK  # torch has them in vectors
    if op.monoid is None:
        return MOST_READ
    if plain_moments(op):
        return MOST_WORK
    if extremes(op.monoid, [e.dtype for e in op.body]) and not op.inner:
        return MOST_READ
    if not only_sums(op.monoid):
        return MOST_MERGES
    return MOST_SUMS if has_matrices(op) else MOST_READ


def _weight(exprs: Sequence[Expr]) -> int:
    """How many primitives expressions are, those of the library for several; too many for those that are too long."""
    nodes = list(itertools.islice((x for e in exprs for x in walk(e)), MOST_TEXT))
    if len(nodes) == MOST_TEXT:
        return MOST_WORK + 1
    return sum(SLOW if isinstance(x, Apply) and is_slow(x) else 1 for x in nodes)


def _record(name: str, used: Sequence[int], sizes: Any, work: Work, ins: Ins, memory: Sequence[Tensor]) -> CCall:
    function = generated_c.function(name)
    given = [held(ins[k]).contiguous() for k in used]
    buffers = (ctypes.c_void_p * (len(given) + len(memory)))(*(x.data_ptr() for x in (*given, *memory)))
    return CCall(function, sizes, buffers, (*given, *memory), work)


@dataclass(frozen=True, slots=True)
class Cells:
    """An expression at every point of some dimensions: a function in C, and its calls on memory.

    Attributes:
        box: of the memory, which is row-major; without one, memory in any order.
    """

    name: str
    box: Box
    record: Callable[[Ins, Tensor], CCall]


def each_cell(value: Expr) -> Cells | None:
    """An expression of what is in a cell alone, its `Acc`; ``None`` where it is more, or a call of the library for each."""
    if arg_positions((value,)) or any(isinstance(x, Index) for x in walk(value)) or value.dtype != "f32":
        return None
    if native.library() is None or not written((value,)):
        return None
    name = generated_c.register(Writer().cells(value))

    def record(_: Ins, memory: Tensor) -> CCall:
        pointer = (ctypes.c_void_p * 1)(memory.data_ptr())
        work = Work(memory.numel(), memory.numel() * _weight((value,)) / CELLS)
        return CCall(generated_c.function(name), ctypes.c_int64(memory.numel()), pointer, (memory,), work)

    return Cells(name, (), record)


def cells_of(op: Block, graph: Graph, kernel: Kernel, names: Sequence[str], value: Expr, how: How = PLAIN) -> Cells | None:
    """An expression of an operation over some of its dimensions, its `Acc` what is there before; else ``None``."""
    at = {d.name: (d, b) for d, b in zip(op.space, kernel.block, strict=True)}
    box = tuple(at[n][1] for n in names)
    alone = Block(outs=op.outs[:1], dims=tuple(at[n][0] for n in names), reads=op.reads, body=(value,))
    task = _task(alone, graph, replace(kernel, mode="full", block=box, outs=(box,)))
    if native.library() is None or task is None or value.dtype != "f32":
        return None
    slow = any(isinstance(x, Apply) and is_slow(x) for x in walk(value))
    if (slow and size(box) * _weight((value,)) > MOST_WORK) or any(isinstance(x, Let) for x in walk(value)):
        return None
    writer = Nest(given=[] if how.any_size else None)
    name = generated_c.register(writer.function((task,)), how.compiles)
    sizes, used = writer.sizes(), tuple(writer.slots)
    work = Work(writer.units, size(box) * _weight((value,)) / CELLS)
    return Cells(name, box, lambda ins, memory: _record(name, used, sizes, work, ins, [memory]))


def _combined(op: Block | Task) -> tuple[Expr, ...]:
    """What merges two states, as expressions; of all reductions, inner ones too."""
    inner = tuple(e for s in op.inner for e in MONOIDS[s.monoid].combiner((s.body.dtype,)))
    return (
        inner
        if op.monoid is None or plain_moments(op)
        else (*inner, *MONOIDS[op.monoid].combiner(tuple(e.dtype for e in op.body)))
    )
