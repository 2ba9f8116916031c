"""Operations of any kind as fixed calls: loops over the index space in C, the monoid's own expressions in the innermost.

What a step of a small model takes is not its arithmetic but the calls of operators; and where torch has no operator for an
operation, points are written out before they are merged, or cells gathered one by one. Here an operation is one function, which
`tapestry_run` calls among others. Sums are in double precision; all else is in the order and the dtypes of the operation.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base.grouped_rows import regrouped
from tapestry.codegen.torch_cpu.base.piecewise import cut_pieces
from tapestry.codegen.torch_cpu.base.point_values import Run, held
from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c import conv_c, generated_c
from tapestry.codegen.torch_cpu.c.c_calls import CCall, CpuKernel, Ins
from tapestry.codegen.torch_cpu.c.print_c import TYPES, Chosen, Piece, Writer, is_slow, literal, shared_loop, written
from tapestry.codegen.torch_cpu.c.thread_parts import CELLS, Work
from tapestry.ir.expr import Arg, Const, Expr, Index, Let, arg_positions, walk
from tapestry.ir.expr import Call as Apply
from tapestry.ir.graph import Block, Dim, Graph, Read
from tapestry.ir.index import dims_of
from tapestry.ir.kernel import Box, Kernel, shape, size
from tapestry.ir.monoid import MONOIDS, Moments
from tapestry.ir.recognition.contraction import has_matrices, only_sums
from tapestry.ir.recognition.selection_sum import selection
from tapestry.ir.recognition.state import varies

Tensor = torch.Tensor


# Element-wise operations and rows of tables as fixed calls: C from their expressions, compiled once for all of a model.


LEAST = 1 << 10  # points: fewer are worth a function in a program of many small operations alone
MOST_PIECES = 32


@dataclass(frozen=True, slots=True)
class How:
    """How functions in C are made: with sizes as arguments, so that one serves all sizes of a plan; and compiled where they are
    not there yet, or not used."""

    any_size: bool = False
    compiles: bool = True


PLAIN = How()


def mapped(op: Block, graph: Graph, kernel: Kernel, plain: Run, how: How = PLAIN) -> CpuKernel | Refusal:
    """A function in C that writes the operation row by row."""
    if native.library() is None:
        return conv_c.NO_LIBRARY
    found = _pieces(op, kernel) if kernel.mode == "full" and not op.inner else None
    out = kernel.block[: len(op.dims)]
    if not found:
        return Refusal("it is no expression of f32 in each cell, nor a row picked from a table, that C can write")
    if any(hi <= lo for lo, hi in kernel.block) or kernel.outs[0] != out:
        return Refusal("it has no cells, or one axis of its result is stored once for several")
    used = sorted(arg_positions(tuple(e for p in found for e in _exprs(p))))
    boxes = {k: b for k in used if (b := kernel.ins[k]) is not None}
    if (
        len(boxes) < len(used)
        or not all(_row_by_row(op, op.reads[k], boxes[k], out) for k in used)
        or (how.any_size and _image(op, used))
    ):
        return Refusal("neighbours in a row of the result are not neighbours in what it reads")
    names = tuple(d.name for d in op.dims)
    tensors = {k: graph.tensors[op.reads[k].tensor] for k in used}
    reads = {k: (op.reads[k], boxes[k], t.shape, t.dtype) for k, t in tensors.items()}
    writer = Writer(names, reads, out, given=[] if how.any_size else None)
    exprs = [e for p in found for e in _exprs(p)]
    name = generated_c.register(writer.function(found), how.compiles)
    extents = shape(out)
    return CpuKernel(
        plain=plain,
        bind=functools.partial(_record, name, used, writer.sizes(), Work(writer.units, size(out) * _weight(exprs) / CELLS)),
        arrays=(lambda m: m.view(extents),),
        memory=((size(out), torch.float32),),
        functions=(name,),
        few=size(out) < LEAST,
        compiles=how.compiles,
    )


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


Reads = Mapping[int, tuple[Read, Box, tuple[int, ...], str]]
MOST_WORK = 1 << 18  # primitives: more take longer than torch's calls
MOST_SUMS = 1 << 16  # in sums, which torch's matrix products are better at
MOST_READ = 1 << 24  # where what is read, or one of two factors, is not read again: torch would write it out
MOST_MERGES = 1 << 14  # in other reductions, which are a cell at a time
SLOW = 32  # primitives that a call of the library takes as long as
LANES = 64  # neighbours that are summed side by side
MOST_TEXT = 2000  # primitives of an operation


def as_loops(op: Block, graph: Graph, kernel: Kernel, plain: Run, is_dear: Callable[[], bool], how: How) -> CpuKernel | Refusal:
    """A function in C that is all of the operation, where it is small or torch's way is dear.

    One for any size is compiled where it is neither: at another size it may be.
    """
    if native.library() is None:
        return conv_c.NO_LIBRARY
    if kernel.mode != "full" or any(hi <= lo for lo, hi in kernel.block):
        return Refusal("it is a part of a reduction, or has no points")
    if op.monoid is None and not op.inner and len(cut := cut_pieces(op.body, op, kernel.block)) == 1:
        op = replace(op, body=cut[0][1])  # one side of a concatenation: the other is not read
    extents = shape(kernel.outs[0])
    if grouped := regrouped(op, graph, kernel):  # the same cells in the same order
        (graph, kernel), op = grouped, cast(Block, grouped[0].ops[0])
    out, combined = kernel.block[: len(op.dims)], _combined(op)
    exprs = (*op.point, *op.then, *combined)
    inside = tuple(b for d, b in zip(op.space, kernel.block, strict=True) if d not in op.dims or d.name in _outer(op))
    work = size(inside) * _weight((*op.point, *combined)) + size(out) * _weight(op.then)
    few, ahead = work <= _most(op), how.any_size and how.compiles
    dear = is_dear()
    if not (few or ahead or dear):
        return Refusal(f"{work:,} primitives take longer than calls of torch's operators, and torch has operators for them")
    if any(b != out for b in kernel.outs):
        return Refusal("one axis of a result is stored once for several")
    reads = _reads(op, graph, kernel)
    if reads is None or not written(exprs, few=True) or any(graph.tensors[t].dtype not in TYPES for t in op.outs):
        return Refusal("C has no type or no function for a part of it")
    writer = BlockWriter(tuple(d.name for d in op.space), reads, out, given=[] if how.any_size else None)
    name = generated_c.register(writer.block(op, kernel), how.compiles)
    if not (few or dear):
        return Refusal(f"{work:,} primitives take longer than calls of torch's operators; at another size it may be few")
    arrays: list[Callable[[Tensor], Tensor]] = [lambda memory: memory.view(extents)] * len(op.outs)
    used = tuple(sorted(reads))
    memory = tuple((size(out), TORCH_DTYPES[graph.tensors[t].dtype]) for t in op.outs)
    return CpuKernel(
        plain=plain,
        bind=functools.partial(_record, name, used, writer.sizes(), Work(writer.units, work / CELLS)),
        arrays=tuple(arrays),
        memory=memory,
        functions=(name,),
        few=not dear,
        compiles=how.compiles,
    )


def _most(op: Block) -> int:
    """Primitives that an operation may have: as many as take no longer here than torch's operators for it."""
    exprs = (*op.point, *op.then)
    if any(isinstance(x, Apply) and is_slow(x) for e in exprs for x in walk(e)):
        return MOST_WORK  # torch has them in vectors
    if op.monoid is None:
        return MOST_READ
    if _plain_moments(op):
        return MOST_WORK
    if not only_sums(op.monoid):
        return MOST_MERGES
    return MOST_SUMS if has_matrices(op) else MOST_READ


def _outer(op: Block) -> frozenset[str]:
    """Map dimensions that a reduced state varies along; without a reduction all of them."""
    return frozenset(d.name for k, d in enumerate(op.dims) if op.monoid is None or any(field[k] for field in varies(op)))


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
    name = generated_c.register(Writer((), {}, ()).each_cell(value))

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
    found = _reads(alone, graph, kernel)
    if native.library() is None or found is None or value.dtype != "f32" or not written((value,), few=True):
        return None
    slow = any(isinstance(x, Apply) and is_slow(x) for x in walk(value))
    if (slow and size(box) * _weight((value,)) > MOST_WORK) or any(isinstance(x, Let) for x in walk(value)):
        return None
    writer = BlockWriter(tuple(names), found, box, given=[] if how.any_size else None)
    name = generated_c.register(writer.block(alone, replace(kernel, block=box)), how.compiles)
    sizes, used = writer.sizes(), sorted(found)
    work = Work(writer.units, size(box) * _weight((value,)) / CELLS)
    return Cells(name, box, lambda ins, memory: _record(name, used, sizes, work, ins, [memory]))


def _reads(op: Block, graph: Graph, kernel: Kernel) -> Reads | None:
    """The reads that an operation uses, as a `Writer` has them; ``None`` where one has no type in C."""
    used = sorted(arg_positions((*op.point, *op.then)))
    tensors = {k: graph.tensors[op.reads[k].tensor] for k in used}
    boxes = {k: b for k in used if (b := kernel.ins[k]) is not None}
    if len(boxes) < len(used) or any(t.dtype not in TYPES for t in tensors.values()):
        return None
    return {k: (op.reads[k], boxes[k], t.shape, t.dtype) for k, t in tensors.items()}


def _combined(op: Block) -> tuple[Expr, ...]:
    """What merges two states, as expressions; of all reductions, inner ones too."""
    inner = tuple(e for s in op.inner for e in MONOIDS[s.monoid].combiner((s.body.dtype,)))
    return (
        inner
        if op.monoid is None or _plain_moments(op)
        else (*inner, *MONOIDS[op.monoid].combiner(tuple(e.dtype for e in op.body)))
    )


@dataclass(slots=True)
class BlockWriter(Writer):
    """Writes an operation as loops over its whole index space; ``names`` are all its dimensions, ``out`` the output's box."""

    inner: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def block(self, op: Block, kernel: Kernel) -> str:
        """The body of ``void f(const int64_t *sizes, void *const *p)``: the buffers read, in order, then the outputs."""
        self._begin()
        self.inner = {n: (lo, hi - 1) for n, (lo, hi) in zip(self.names, kernel.block, strict=True)}
        n, results = len(self.slots), op.then if op.monoid else op.body
        lines = [f"const {TYPES[self.reads[k][3]]} *restrict p{i} = p[{i}];" for k, i in self.slots.items()]
        lines += [f"{TYPES[e.dtype]} *restrict y{j} = p[{n + j}];" for j, e in enumerate(results)]
        outer = _outer(op)
        begin = len(lines)
        if _side_by_side(op):
            lines += self._lanes(op, results)
            return "\n".join([*lines[:begin], *self._given(), *lines[begin:]])
        lines += [self._cut([i for i, d in enumerate(op.dims) if d.name in outer])]
        lines += self._loop([d.name for d in op.dims if d.name in outer], shared=True)
        place = self._place(self.out, [f"(d{i} - {self._size(lo)})" for i, (lo, _) in enumerate(self.out)])
        acc = self._reduced(op, lines) if op.monoid else self._let(op, lines, place)
        lines += self._loop([d.name for d in op.dims if d.name not in outer])
        lines += [f"y{j}[{place}] = {self._expr(e, self.inner, acc)};" for j, e in enumerate(results)]
        return "\n".join([*lines[:begin], *self._given(), *lines[begin:], "}" * len(op.dims)])

    def _lanes(self, op: Block, results: Sequence[Expr]) -> list[str]:
        """States of neighbours along the last dimension side by side; what follows in loops over where they do not vary."""
        last = self.names.index(_last(op).name)
        place = self._place(self.out, [f"(d{i} - {self._size(a)})" for i, (a, _) in enumerate(self.out)])
        low, high = (self._size(x) for x in self.out[last])
        names, outer = [d.name for d in op.reduce], _outer(op)
        at = f"const int64_t d{last} = first + i;"
        each = f"#pragma omp simd\nfor (int64_t i = 0; i < many; i++) {{ {at}"
        zeros, steps, acc = self._side_steps(op, names, each)
        others = [d.name for d in op.dims if d.name != _last(op).name]
        at = [self.names.index(n) for n in others if n in outer]
        able = [i for i in at if self.out[i][1] - self.out[i][0] > 1]
        cut = self._cut(able or [last])
        self.units = self.units if able else -(-self.units // LANES)
        return [
            cut,
            *self._loop([n for n in others if n in outer], shared=True),
            f"const int64_t lanes{last} = ({high} - {low} + {LANES - 1}) / {LANES};",
            f"for (int64_t block = FROM({last}, 0, lanes{last}); block < TO({last}, 0, lanes{last}); block++) {{",
            f"const int64_t first = {low} + block * {LANES};",
            f"const int64_t many = {high} - first < {LANES} ? {high} - first : {LANES};",
            *zeros,
            *steps,
            *self._loop([n for n in others if n not in outer]),
            each,
            *(f"y{j}[{place}] = {self._expr(e, self.inner, acc)};" for j, e in enumerate(results)),
            "}" * (len(op.dims) + 1),
        ]

    def _side_steps(self, op: Block, names: Sequence[str], each: str) -> tuple[list[str], list[str], list[str]]:
        """(the states of lanes before anything, loops that merge into them, their fields in a lane)."""
        assert op.monoid
        dtypes, loops, close = tuple(e.dtype for e in op.body), self._loop(names), "}" * (len(names) + 1)
        if _plain_moments(op):
            value, cells = self._expr(op.body[1], self.inner, []), self._size(self._count(names))
            zeros = [f"double mean[{LANES}] = {{0}}, spread[{LANES}] = {{0}};"]
            steps = [*loops, each, f"mean[i] += {value};", close, each, f"mean[i] /= {cells};", "}"]
            steps += [*loops, each, f"const double off = {value} - mean[i];", "spread[i] += off * off;", close]
            return zeros, steps, [f"((float){cells})", "((float)mean[i])", "((float)spread[i])"]
        zero, sums = MONOIDS[op.monoid].zero(dtypes), only_sums(op.monoid)
        kind = "double" if sums else "float"
        zeros = [f"{kind} a{k}[{LANES}];" for k in range(len(dtypes))]
        zeros += [each, *(f"a{k}[i] = {literal(z)};" for k, z in enumerate(zero)), "}"]
        before = self.once
        if isinstance(e := op.body[0], Arg) and len(dtypes) == 1:  # padding of no effect is left out, for all lanes at once
            tests, value, other = self._guarded(e.pos, self.inner)
            at = re.compile(rf"\bd{self.names.index(_last(op).name)}\b")
            if tests and other == zero[0] and not any(map(at.search, tests)):
                loops, self.once = [*loops, f"if (!({' && '.join(tests)})) continue;"], {**self.once, e: value}
        lifted = [f"const float ab{k} = {self._expr(e, self.inner, [])};" for k, e in enumerate(op.body)]
        self.once = before
        merged = [f"a{k}[i] += ab{k};" for k in range(len(dtypes))] if sums else self._merged("a", op.monoid, dtypes, "[i]")
        return zeros, [*loops, each, *lifted, *merged, close], [f"((float)a{k}[i])" for k in range(len(dtypes))]

    def _loop(self, names: Sequence[str], *, shared: bool = False) -> list[str]:
        at = [(self.names.index(n), self.inner[n]) for n in names]
        ends = [(i, self._size(lo), self._size(hi + 1)) for i, (lo, hi) in at]
        if shared:
            return [shared_loop(*end) for end in ends]
        return [f"for (int64_t d{i} = {lo}; d{i} < {hi}; d{i}++) {{" for i, lo, hi in ends]

    def _let(self, op: Block, lines: list[str], place: str = "") -> list[str]:
        """The values of inner reductions, in loops of their own; what is at the result's place may be read."""
        for k, s in enumerate(op.inner):
            lines += self._fold(f"l{k}_", s.monoid, (s.body,), [d.name for d in s.dims])
            self.once[Let(k, s.body.dtype)] = self._field(f"l{k}_", s.monoid, 0, s.body.dtype)
        return [f"y0[{place}]"]

    def _reduced(self, op: Block, lines: list[str]) -> list[str]:
        assert op.monoid
        names = [d.name for d in op.reduce]
        if _plain_moments(op):
            return self._moments(op.body[1], names, lines)
        lines += self._fold("a", op.monoid, op.body, names, op)
        return [self._field("a", op.monoid, k, e.dtype) for k, e in enumerate(op.body)]

    def _fold(self, name: str, monoid: str, body: Sequence[Expr], names: Sequence[str], op: Block | None = None) -> list[str]:
        """Loops that merge what is lifted at each point, in order, into variables of a name."""
        dtypes, count = tuple(e.dtype for e in body), len(body)
        wide = [self._double(monoid, d) for d in dtypes]
        zero = MONOIDS[monoid].zero(dtypes)
        types = ["double" if w else TYPES[d] for w, d in zip(wide, dtypes, strict=True)]
        lines = [f"{t} {name}{k} = {literal(z)};" for k, (t, z) in enumerate(zip(types, zero, strict=True))]
        loops = self._loop(names)
        if all(wide) and loops and not (op and op.inner):
            loops[-1] = f"#pragma omp simd reduction(+:{','.join(f'{name}{k}' for k in range(count))})\n{loops[-1]}"
        lines += loops
        if op:
            self._let(op, lines)
        lines += [f"const {TYPES[e.dtype]} {name}b{k} = {self._expr(e, self.inner, [])};" for k, e in enumerate(body)]
        if all(wide):
            lines += [f"{name}{k} += {name}b{k};" for k in range(count)]
        else:
            lines += self._merged(name, monoid, dtypes)
        return [*lines, "}" * len(names)]

    def _merged(self, name: str, monoid: str, dtypes: tuple[str, ...], lane: str = "") -> list[str]:
        """``combine`` of the state (of a lane) and what was lifted."""
        before, count = self.once, len(dtypes)
        states = {Arg(k, d): f"{name}{k}{lane}" for k, d in enumerate(dtypes)}
        self.once = {**states, **{Arg(count + k, d): f"{name}b{k}" for k, d in enumerate(dtypes)}}
        combined = MONOIDS[monoid].combiner(dtypes)
        lines = [
            f"const {TYPES[d]} {name}c{k} = {self._expr(e, {}, [])};"
            for k, (e, d) in enumerate(zip(combined, dtypes, strict=True))
        ]
        self.once = before
        return [*lines, *(f"{name}{k}{lane} = {name}c{k};" for k in range(count))]

    def _moments(self, x: Expr, names: Sequence[str], lines: list[str]) -> list[str]:
        """(n, mean, M2) of a row: the mean first, then the deviations from it."""
        cells = self._size(self._count(names))
        loops, value = self._loop(names), self._expr(x, self.inner, [])
        for total, term in (("mean", value), ("spread", f"({value} - mean) * ({value} - mean)")):
            pragma = f"#pragma omp simd reduction(+:{total})\n{loops[-1]}"
            lines += [f"double {total} = 0;", *loops[:-1], pragma, f"{total} += {term};", "}" * len(names)]
            lines += [f"mean /= {cells};"] * (total == "mean")
        return [f"((float){cells})", "((float)mean)", "((float)spread)"]

    def _count(self, names: Sequence[str]) -> int:
        return prod(hi - lo + 1 for lo, hi in (self.inner[n] for n in names))

    @staticmethod
    def _double(monoid: str, dtype: str) -> bool:
        return only_sums(monoid) and dtype == "f32"

    def _field(self, name: str, monoid: str, k: int, dtype: str) -> str:
        return f"((float){name}{k})" if self._double(monoid, dtype) else f"{name}{k}"


def _side_by_side(op: Block) -> bool:
    """Whether floats are merged for each of many neighbours that lie side by side in what is read, as in pooling by pixels."""
    if not op.monoid or op.inner or not op.dims or any(e.dtype != "f32" for e in op.body):
        return False
    last = _last(op)
    if last.size < LANES // 4 or last.name not in _outer(op):
        return False
    reads = [[last.name in dims_of(e) for e in op.reads[k].index] for k in arg_positions(op.body)]
    along = [r for r in reads if any(r)]
    return bool(along) and all(r[-1] and not any(r[:-1]) for r in along)


def _last(op: Block) -> Dim:
    """The last dimension of several points, of the result."""
    return next((d for d in reversed(op.dims) if d.size > 1), op.dims[-1])


def _plain_moments(op: Block) -> bool:
    """Whether each value is lifted as (1, x, 0), of which are count, mean and deviations."""
    if not op.monoid or not isinstance(MONOIDS[op.monoid].structure, Moments) or op.inner:
        return False
    n, x, spread = op.body
    return x.dtype == "f32" and n == Const(1.0, "f32") and spread == Const(0.0, "f32")
