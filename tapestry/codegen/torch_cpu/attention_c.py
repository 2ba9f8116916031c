"""Attention as one call of our kernel (`native`) on buffers as they are: even steps, heads that share keys."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base.contract import points
from tapestry.codegen.torch_cpu.base.point_values import held
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c import conv_c
from tapestry.codegen.torch_cpu.c.blocks_c import PLAIN, Cells, How, cells_of
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall, CpuKernel, Ins, recorded
from tapestry.codegen.torch_cpu.torch_ops.attention_torch import Match, match
from tapestry.ir.expr import Acc, Arg, Const, Expr
from tapestry.ir.expr import Call as Apply
from tapestry.ir.graph import Block, Graph, Read
from tapestry.ir.index import dims_of, evaluate
from tapestry.ir.kernel import Box, Kernel, shape, size
from tapestry.ir.recognition.attention_roles import weighed
from tapestry.ir.recognition.contraction import dims_read

Tensor = torch.Tensor


FEW = 16  # rows: panels of keys and values cost more than they save
Intervals = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a read is in its buffer: axes of the first point, and by dimension (axis, step, points that share a step)."""

    pos: int
    first: tuple[int, ...]
    steps: dict[str, tuple[tuple[int, int], ...]]
    shared: dict[str, int]

    def stride(self, buffer: Tensor, names: Sequence[str]) -> int:
        """Elements from one point to the next (or to the next that does not share its step) along the one dimension, if any."""
        return sum(buffer.stride(axis) * c for n in names for axis, c in self.steps.get(n, ()))

    def address(self, buffer: Tensor) -> int:
        """Of the first point."""
        return buffer.data_ptr() + 4 * sum(buffer.stride(axis) * at for axis, at in enumerate(self.first))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the kernel works on: walks of queries, keys, values and perhaps a bias; dimensions by what they are."""

    q: Walk
    k: Walk
    v: Walk
    mask: Walk | None
    made: tuple[Made, ...]
    outer: tuple[str, ...]
    inner: tuple[str, ...]
    roles: Match
    group: int


@dataclass(frozen=True, slots=True)
class _Kernel:
    """The kernel with its sizes, but for strides.

    Attributes:
        other: what stands where a row has no maximum.
        counts: outer and inner heads, how many of these share keys, rows, keys, depth.
        out: elements between outer and inner heads, and rows, of the result.
    """

    plan: _Plan
    other: Walk | None
    counts: tuple[int, int, int, int, int, int]
    out: tuple[int, int, int]
    normal: int
    scale: float

    def record(self, ins: Ins, memory: Tensor) -> CCall | Calls:
        """The call for some inputs and memory."""
        plan, other, roles = self.plan, self.other, self.plan.roles
        walks = [w for w in (plan.q, plan.k, plan.v, plan.mask) if w]
        scratch = [torch.empty(m.shape) for m in plan.made]
        before = [m.cells.record(ins, x) for m, x in zip(plan.made, scratch, strict=True)]
        given = [scratch[-1 - w.pos] if w.pos < 0 else adjacent(held(ins[w.pos])) for w in walks]
        rest = [held(ins[other.pos])] if other else []
        along = (roles.rows, (roles.key,), (roles.key,))
        q, k, v = (
            three(w.stride(x, plan.outer), w.stride(x, plan.inner), w.stride(x, n))
            for w, x, n in zip(walks[:3], given[:3], along, strict=True)
        )
        mask = (0, 0, 0, 0)
        if plan.mask:
            mask = tuple(plan.mask.stride(given[3], n) for n in (plan.outer, plan.inner, roles.rows, (roles.key,)))
        ends = (plan.outer, plan.inner, roles.columns)
        elsewhere = three(*(other.stride(rest[0], n) for n in ends) if other else (0, 0, 0))
        sizes = native.Attention(
            *self.counts, q, k, v, (ctypes.c_int64 * 4)(*mask), three(*self.out), elsewhere, self.normal, self.scale
        )
        places = [w.address(x) for w, x in zip(walks, given, strict=True)]
        instead = other.address(rest[0]) if other else None
        buffers = native.Heads(*places[:3], places[3] if plan.mask else None, memory.data_ptr(), instead)
        lib: Any = native.library()
        function = lib.tapestry_attend if self.counts[3] <= FEW else lib.tapestry_attention
        call = CCall(function, sizes, buffers, (*given, *rest, memory))
        return Calls.of(*before, call) if before else call


NO_ATTENTION = Refusal("no values are weighted by a softmax")


def attention_kernel(op: Block, graph: Graph, kernel: Kernel, how: How = PLAIN) -> CpuKernel | Refusal:
    """The values weighted by the softmax of scaled and biased scores."""
    if native.library() is None:
        return conv_c.NO_LIBRARY
    roles = match(op) if len(op.then) == 1 else None
    normal, given = quotient(op.then[0]) if roles else (0, None)
    if roles is None or any(hi <= lo for lo, hi in kernel.block):
        return NO_ATTENTION if weighed(op) is None else Refusal("scores are no scaled products of f32, perhaps with a bias")
    if not normal:
        return Refusal("what follows is more than dividing by the sum of weights")
    a, scale = roles.attention, roles.scale
    block = {d.name: b for d, b in zip(op.space, kernel.block, strict=True)}
    keys, factor = _factored(a.keys)
    plan, scale = _plan(op, graph, kernel, roles, (a.query, keys, a.value, roles.bias), how), scale * factor
    other = walk_of(op, kernel, block, given) if given else None
    if plan is None or (given and not _once(other, (*plan.outer, *plan.inner, *roles.columns))):
        return Refusal("queries, keys, values or a bias do not lie in even steps, or there are three axes of heads")
    extent = {n: hi - lo for n, (lo, hi) in block.items()}
    outer, inner = points(plan.outer, extent), points(plan.inner, extent)
    rows, count, depth = points(roles.rows, extent), extent[roles.key], points(roles.depth, extent)
    if max(count, depth) > conv_c.DEEPEST or points(roles.columns, extent) != depth:
        return Refusal("values are not as deep as keys, or there are more keys than are listed on the stack")
    out = {"outer": rows * inner * depth, "inner": depth, "rows": inner * depth}
    strides = [out_stride(d.name, plan.outer, plan.inner, roles.rows, out) for d in op.dims]
    extents = [extent[d.name] for d in op.dims]

    counts = (outer, inner, plan.group, rows, count, depth)
    one = _Kernel(plan, other, counts, (out["outer"], out["inner"], out["rows"]), normal, scale)
    return recorded(
        lambda memory: memory.as_strided(extents, strides),
        one.record,
        size(kernel.block[: len(op.dims)]),
        functions=tuple(m.cells.name for m in plan.made),
    )


def _factored(keys: Expr) -> tuple[Expr, float]:
    """Keys without a number that all are multiplied by, and that."""
    match keys:
        case Apply("mul", (Arg() as read, Const() as c)) | Apply("mul", (Const() as c, Arg() as read)):
            return read, float(c.value)
        case _:
            return keys, 1.0


@dataclass(frozen=True, slots=True)
class Made:
    """Queries or biases that are computed before the kernel runs, in memory of this shape."""

    cells: Cells
    shape: tuple[int, ...]


def _plan(
    op: Block, graph: Graph, kernel: Kernel, roles: Match, parts: tuple[Expr, Expr, Expr, Expr | None], how: How
) -> _Plan | None:
    block = {d.name: b for d, b in zip(op.space, kernel.block, strict=True)}
    batch = [n for n in roles.batch if block[n][1] - block[n][0] > 1]
    singles = [[n for n in names if block[n][1] - block[n][0] > 1] for names in (roles.rows, roles.columns, roles.depth)]
    if len(batch) > 2 or any(len(names) > 1 for names in singles):
        return None
    walks, made = [walk_of(op, kernel, block, e) for e in parts if e is not None], list[Made]()
    for n, last in ((0, roles.depth), (3, (roles.key,))):  # queries and biases may be any expression
        if n < len(walks) and walks[n] is None:
            walks[n] = _made(op, graph, kernel, parts[n], (*roles.batch, *roles.rows, *last), made, how)
    if not all(walks):
        return None
    q, k, v, *rest = (w for w in walks if w)
    inner, outer = tuple(batch[-1:]), tuple(batch[:-1])
    groups = {w.shared[n] for w in (k, v) for n in inner if w.steps.get(n)}
    rare = [w for w in (q, k, v, *rest) for n, g in w.shared.items() if g > 1 and not (n in inner and w in (k, v))]
    ends = ((q, roles.depth), (k, roles.depth), (v, roles.columns), *((w, (roles.key,)) for w in rest))
    if rare or len(groups) > 1 or not all(_ends(w, names, w in rest, block) for w, names in ends):
        return None
    heads = block[inner[0]][1] - block[inner[0]][0] if inner else 1
    return _Plan(q, k, v, rest[0] if rest else None, tuple(made), outer, inner, roles, groups.pop() if groups else heads)


def _made(
    op: Block, graph: Graph, kernel: Kernel, e: Expr | None, names: Sequence[str], made: list[Made], how: How
) -> Walk | None:
    """A walk of what is computed along those of the dimensions that it depends on; it is added to ``made``."""
    if e is None:
        return None
    own = [n for n in names if n in dims_read(op, e)]
    found = cells_of(op, graph, kernel, own, e, how)
    if found is None:
        return None
    made.append(Made(found, shape(found.box)))
    steps = {n: ((k, 1),) for k, (n, points) in enumerate(zip(own, made[-1].shape, strict=True)) if points > 1}
    return Walk(-len(made), (0,) * len(own), steps, dict.fromkeys(own, 1))


def _ends(w: Walk, names: Sequence[str], absent: bool, block: Intervals) -> bool:
    """Whether the read's last axis, and no other, is the dimension, cell by cell; ``absent``: or no axis is."""
    last = len(w.first) - 1
    steps = [s for n in names for s in w.steps.get(n, ())]
    one = all(block[n][1] - block[n][0] == 1 for n in names)
    return steps == [(last, 1)] or one or (absent and not steps)


def walk_of(op: Block, kernel: Kernel, block: Intervals, e: Expr) -> Walk | None:
    """How a plain read steps; ``None`` for an expression that is none, or steps unevenly."""
    if not isinstance(e, Arg) or e.dtype != "f32":
        return None
    r, box = op.reads[e.pos], kernel.ins[e.pos]
    return None if r.when or r.other is not None or box is None else _steps(e.pos, r, box, block)


def _steps(pos: int, r: Read, box: Box, block: Intervals) -> Walk | None:
    steps: dict[str, list[tuple[int, int]]] = {}
    shared: dict[str, int] = {}
    first: list[int] = []
    start = {n: lo for n, (lo, _) in block.items()}
    for axis, (index, (lo, _)) in enumerate(zip(r.index, box, strict=True)):
        names = sorted(dims_of(index))
        if any(not isinstance(a, str) and len(dims_of(a.arg)) > 1 for a, _ in index.terms):
            return None
        first.append(int(evaluate(index, start)) - lo)
        for n in names:
            moved = np.asarray(evaluate(index, {**start, n: np.arange(*block[n])}), np.int64) - first[-1] - lo
            found = _even(np.broadcast_to(moved, (block[n][1] - block[n][0],)))
            if found is None or (found[0] and shared.setdefault(n, found[1]) != found[1]):
                return None
            if found[0]:
                steps.setdefault(n, []).append((axis, found[0]))
    return Walk(pos, tuple(first), {n: tuple(s) for n, s in steps.items()}, shared)


def _even(values: np.ndarray) -> tuple[int, int] | None:
    """(c, g) with value i equal to ``i // g * c``."""
    moved = np.flatnonzero(values)
    if not len(moved):
        return 0, 1
    g = int(moved[0])
    c = int(values[g])
    return (c, g) if bool((values == np.arange(len(values)) // g * c).all()) else None


def quotient(e: Expr) -> tuple[int, Arg | None]:
    """1 for weighted sum by sum of weights, 2 or 3 where that is 0 or NaN in rows whose maximum is not finite, 0 for none.

    With 2 a read may stand for the 0.
    """
    match e:
        case Apply("div", (Acc(field=2), Acc(field=1))):
            return 1, None
        case Apply("where", (Apply("isnan", (Apply("sub", (Acc(field=0), Acc(field=0))) as none,)), other, rest)):
            if quotient(rest)[0] != 1:
                return 0, None
            if isinstance(other, Arg):
                return 2, other
            return (2 if other == Const(0.0, "f32") else 3 if other == none else 0), None
        case _:
            return 0, None


def _once(w: Walk | None, names: Sequence[str]) -> bool:
    """Whether a read steps along some dimensions alone, a cell for each of their points."""
    return w is not None and all(g == 1 and (n in names or not w.steps.get(n)) for n, g in w.shared.items())


def adjacent(x: Tensor) -> Tensor:
    """The tensor with its last axis adjacent."""
    return x if x.dim() == 0 or x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def out_stride(name: str, outer: Sequence[str], inner: Sequence[str], rows: Sequence[str], out: dict[str, int]) -> int:
    """Cells from one point of a dimension to the next in the result, by those of heads and rows."""
    return out["outer"] if name in outer else out["inner"] if name in inner else out["rows"] if name in rows else 1


def three(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """Strides as the kernel has them."""
    return (ctypes.c_int64 * 3)(*values)
