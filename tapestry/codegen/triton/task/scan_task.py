"""Running states (`ir.recognise.running_state`) as tasks: the scanned dimension becomes a segment and a step.

The segment is one more map dimension, the step u counts in the order of merging; place and element are then affine in both.
Steps at which there is no element give the identity, and those without a place are not stored.
"""

from __future__ import annotations

from dataclasses import replace

from tapestry.codegen.triton.task.lowered import Access, Check, Task, lower, substitute_access, substitute_indices
from tapestry.ir.expr import Expr
from tapestry.ir.graph import Block, Dim, Graph
from tapestry.ir.index import Aff, dim, span
from tapestry.ir.kernel import Kernel
from tapestry.ir.recognise.running_state import Scan, as_scan


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
    return _moved(task, op, env, dims, Dim(u, steps), _inside(env, (i1 - i0, j1 - j0), dims, Dim(u, steps)))


def _inside(env: dict[str, Aff], extents: tuple[int, int], dims: tuple[Dim, ...], step: Dim) -> tuple[tuple[Check, ...], ...]:
    """Checks that a step has a place, and that it has an element."""
    ranges = {d.name: d.size for d in (*dims, step)}
    out: list[tuple[Check, ...]] = []
    for e, n in zip(env.values(), extents, strict=True):
        lo, hi = span(e, ranges)
        checks = [Check(e - e.const, ">=", -e.const)] if lo < 0 else []
        out.append((*checks, *([Check(e - e.const, "<", n - e.const)] if hi >= n else [])))
    return tuple(out)


def _moved(
    task: Task, op: Block, env: dict[str, Aff], dims: tuple[Dim, ...], step: Dim, checks: tuple[tuple[Check, ...], ...]
) -> Task:
    ranges = {d.name: d.size for d in (*dims, step)}
    body, (placed, elements) = op.body_reads(), checks

    def access(a: Access, more: tuple[Check, ...]) -> Access:
        moved = substitute_access(a, env, ranges)
        return replace(moved, checks=tuple(dict.fromkeys((*moved.checks, *more))))

    def expr(e: Expr) -> Expr:
        return substitute_indices(e, env, ranges)

    return replace(
        task, dims=dims, reduce=(step,), states=(),
        reads={p: access(a, elements if p in body else placed) for p, a in task.reads.items()},
        outs=tuple(access(a, placed) for a in task.outs),
        body=tuple(map(expr, task.body)), then=tuple(map(expr, task.then)),
    )  # fmt: skip
