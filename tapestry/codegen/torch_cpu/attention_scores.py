"""Attention whose scores are any function of the products, of places and of what else is read, in generated C.

Soft caps, masks by comparison, biases for many rows: the function makes scores of a tile of products while it is in cache.
There may be no product at all: values weighted by the softmax of scores that are there.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

from tapestry.codegen.blocks.lowered import task_of
from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.attention_c import (
    NO_ATTENTION,
    Intervals,
    Tensor,
    Walk,
    adjacent,
    out_stride,
    quotient,
    three,
    walk_of,
)
from tapestry.codegen.torch_cpu.base.contract import points
from tapestry.codegen.torch_cpu.base.point_values import held
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c import conv_c, generated_c
from tapestry.codegen.torch_cpu.c.c_calls import CCall, CpuKernel, Ins, recorded
from tapestry.codegen.torch_cpu.c.print_c import TYPES, Writer, is_slow, written
from tapestry.ir.expr import Acc, Expr, Let, arg_positions, rewrite, walk
from tapestry.ir.expr import Call as Apply
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, size
from tapestry.ir.recognition.attention_roles import Attention, Weighed, attention, weighed

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Roles:
    """Dimensions of more than one point by what they are."""

    outer: Names
    inner: Names
    rows: Names
    columns: Names
    depth: Names
    key: str

    @classmethod
    def of(cls, a: Weighed, block: Intervals) -> _Roles | None:
        """Those of an attention; ``None`` where there are too many."""
        batch, rows, columns, depth = (
            tuple(d.name for d in dims if block[d.name][1] - block[d.name][0] > 1)
            for dims in (a.batch, a.rows, a.columns, a.depth)
        )
        if len(batch) > 2 or max(map(len, (rows, columns, depth))) > 1:
            return None
        return cls(batch[:-1], batch[-1:], rows, columns, depth, a.key.name)


@dataclass(frozen=True, slots=True)
class _Scored:
    """The kernel with its sizes, but for strides."""

    roles: _Roles
    q: Walk | None
    k: Walk | None
    v: Walk
    used: tuple[int, ...]
    name: str
    counts: tuple[int, int, int, int, int, int]
    columns: int
    out: tuple[int, int, int]
    normal: int

    def record(self, ins: Ins, memory: Tensor) -> CCall:
        """The call for some inputs and memory."""
        walks = [w for w in (self.q, self.k, self.v) if w]
        given = [adjacent(held(ins[w.pos])) for w in walks]
        r, crossed, turned = self.roles, self.k is not None and self._crossed(self.k), self._crossed(self.v)
        along = [r.rows, r.depth if crossed else (r.key,), r.columns if turned else (r.key,)][3 - len(walks) :]
        steps = [
            three(w.stride(x, r.outer), w.stride(x, r.inner), w.stride(x, n))
            for w, x, n in zip(walks, given, along, strict=True)
        ]
        steps = steps if self.q else [three(0, 0, 0), three(0, 0, 0), *steps]
        none = (ctypes.c_int64 * 4)()
        more = self.normal, 1.0, int(crossed), self.columns, int(turned)
        sizes = native.Attention(*self.counts, *steps, none, three(*self.out), three(0, 0, 0), *more)
        places = [w.address(x) for w, x in zip(walks, given, strict=True)]
        places = places if self.q else [None, None, *places]
        reads = [held(ins[k]).contiguous() for k in self.used]
        table = (ctypes.c_void_p * (len(reads) + 1))(*(x.data_ptr() for x in reads))
        score = ctypes.cast(generated_c.function(self.name), ctypes.c_void_p).value
        buffers = native.Heads(*places, None, memory.data_ptr(), score=score, reads=ctypes.addressof(table), count=len(reads))
        lib: Any = native.library()
        return CCall(lib.tapestry_scored, sizes, buffers, (*given, *reads, table, memory))

    def _crossed(self, w: Walk) -> bool:
        return w.steps.get(self.roles.key) == ((len(w.first) - 1, 1),)


def scored(op: Block, graph: Graph, kernel: Kernel) -> CpuKernel | Refusal:
    """The values weighted by the softmax of scores of any kind, which generated C makes."""
    a = attention(op) or weighed(op)
    if a is None:
        return NO_ATTENTION
    if native.library() is None:
        return conv_c.NO_LIBRARY
    normal, given = quotient(op.then[0]) if len(op.then) == 1 else (0, None)
    if not normal or given is not None or any(hi <= lo for lo, hi in kernel.block):
        return Refusal("what follows is more than dividing by the sum of weights")
    if a.weights.rate != 1 or a.score.dtype != "f32":
        return Refusal("weights are no exp of a score of f32")
    block = {d.name: b for d, b in zip(op.space, kernel.block, strict=True)}
    parts = (a.query, a.keys, a.value) if isinstance(a, Attention) else (a.value,)
    roles, walks = _Roles.of(a, block), [walk_of(op, kernel, block, e) for e in parts]
    extent = {n: hi - lo for n, (lo, hi) in block.items()}
    if roles is None or None in walks:
        return Refusal("queries, keys or values do not lie in even steps, or there are three axes of heads")
    *qk, v = (w for w in walks if w)
    q, k = qk or (None, None)
    name = _score(op, graph, kernel, a.score, roles)
    group = _group(roles, q, k, v, extent)
    if name is None or not group or not _fits(roles, q, k, v, extent):
        return Refusal("a score is no expression that C can write, or rows of keys and values lie otherwise")
    outer, inner, rows = (points(n, extent) for n in (roles.outer, roles.inner, roles.rows))
    count, depth, columns = extent[roles.key], points(roles.depth, extent) if q else 1, points(roles.columns, extent)
    if max(count, depth, columns) > conv_c.DEEPEST:
        return Refusal("there are more keys than are listed on the stack")
    out = {"outer": rows * inner * columns, "inner": columns, "rows": inner * columns}
    strides = [out_stride(d.name, roles.outer, roles.inner, roles.rows, out) for d in op.dims]
    extents = [extent[d.name] for d in op.dims]
    used = tuple(sorted(arg_positions((a.score,))))
    counts = (outer, inner, group, rows, count, depth)
    one = _Scored(roles, q, k, v, used, name, counts, columns, (out["outer"], out["inner"], out["rows"]), normal)
    points_out = size(kernel.block[: len(op.dims)])
    return recorded(lambda memory: memory.as_strided(extents, strides), one.record, points_out, functions=(name,))


def _group(roles: _Roles, q: Walk | None, k: Walk | None, v: Walk, extent: dict[str, int]) -> int:
    """How many inner heads share keys and values; 0 where reads step otherwise."""
    both = [w for w in (k, v) if w]
    for w in (q, *both):
        if w and any(g > 1 and (n not in roles.inner or w is q) for n, g in w.shared.items()):
            return 0
    groups = {w.shared[n] if w.steps.get(n) else points(roles.inner, extent) for w in both for n in roles.inner}
    return (groups.pop() if len(groups) == 1 else 0) if groups else 1


def _fits(roles: _Roles, q: Walk | None, k: Walk | None, v: Walk, extent: dict[str, int]) -> bool:
    """Whether rows lie as the kernel reads them: of keys and values, these or the others are adjacent."""

    def ends(w: Walk, names: Names) -> bool:
        return [s for n in names for s in w.steps.get(n, ())] == [(len(w.first) - 1, 1)] or not names

    def either(w: Walk, names: Names) -> bool:
        return ends(w, names) or (ends(w, (roles.key,)) and bool(names))

    if q is None or k is None:
        return either(v, roles.columns) and extent[roles.key] > 1
    return ends(q, roles.depth) and either(v, roles.columns) and either(k, roles.depth)


def _score(op: Block, graph: Graph, kernel: Kernel, score: Expr, roles: _Roles) -> str | None:
    """The function that makes scores: ``sizes`` are outer and inner head, first row, rows, and cells from row to row.

    Returns:
        its name; ``None`` where the score cannot be written.
    """
    products: dict[Expr, Expr] = {x: Acc(0, x.dtype) for x in walk(score) if isinstance(x, Let)}
    alone = Block(outs=op.outs[:1], dims=op.space, reads=op.reads, body=(rewrite(score, lambda x: products.get(x, x)),))
    used = sorted(arg_positions(alone.body))
    slow = any(isinstance(x, Apply) and is_slow(x) for x in walk(score))
    types = {graph.tensors[op.reads[k].tensor].dtype for k in used}
    if slow or not written((score,), few=True) or any(kernel.ins[k] is None for k in used) or types - TYPES.keys():
        return None
    task = task_of(alone, graph, replace(kernel, outs=(kernel.block,)))
    writer = Writer(tuple(task.ranges), task.ranges, task.reads, slots={k: i for i, k in enumerate(used)})
    lines = [f"const {TYPES[a.dtype]} *restrict p{i} = p[{i}];" for i, a in enumerate(task.reads.values())]
    lines.append(f"float *restrict s = p[{len(used)}];")
    ranks = {n: f"sizes[{i}]" for i, names in enumerate((roles.outer, roles.inner)) for n in names}
    ranks |= dict.fromkeys(roles.rows, "sizes[2] + r")
    lines.append("for (int64_t r = 0; r < sizes[3]; r++) {\nfloat *restrict t = s + r * sizes[4];")
    lines += [f"const int64_t d{i} = {ranks.get(d.name, '0')};" for i, d in enumerate(op.dims)]
    i = writer.names.index(roles.key)
    lines.append(f"#pragma omp simd\nfor (int64_t m = 0; m < {task.ranges[roles.key]}; m++) {{\nconst int64_t d{i} = m;")
    lines.append(f"t[m] = {writer.expr(task.body[0], ['t[m]'])};")
    return generated_c.register("\n".join([*lines, "}}"]))
