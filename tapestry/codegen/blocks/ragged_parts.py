"""A reduced dimension in parts of equal size, but for the last one, which may have fewer points."""

from __future__ import annotations

from dataclasses import replace

from tapestry.codegen.blocks.forms import KernelForm, bare_read, centred
from tapestry.codegen.blocks.lowered import Access, Check, Task, inside, lower, substitute_task
from tapestry.codegen.blocks.operands import HALVES
from tapestry.ir.expr import Expr
from tapestry.ir.graph import Block, Dim, Graph
from tapestry.ir.index import dim
from tapestry.ir.kernel import Kernel
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.recognition.running_state import Scan, as_scan

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


# Running states (`ir.recognition`) as tasks: the scanned dimension becomes a segment and a step.
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
        moved,
        dims=dims,
        reduce=(Dim(u, steps),),
        states=(),
        outs=tuple(checked(a, placed) for a in moved.outs),
        reads={p: checked(a, elements if p in body else placed) for p, a in moved.reads.items()},
    )
