"""Running states (`ir.scan`): a tile of rows by places, scanned along the places, with the state carried from tile to tile.

The scanned dimension becomes a segment (one more map dimension) and a step u in the order of merging; place and element
are then affine in both. Steps at which there is no element give the identity, and those without a place are not stored.
"""

from __future__ import annotations

from dataclasses import replace

from tapestry.codegen.triton.axes import Axis, View
from tapestry.codegen.triton.emit_reduce import identity, loop, state_types
from tapestry.codegen.triton.lowered import Access, Check, Task, lower, points, recombine
from tapestry.codegen.triton.printer import combine_source
from tapestry.codegen.triton.scope import Frame, Scope, Written
from tapestry.codegen.triton.tiles import Knobs, power_of_two
from tapestry.ir.expr import Arg, Expr, Index, rewrite
from tapestry.ir.graph import Block, Dim, Graph
from tapestry.ir.index import Aff, dim, span, substitute
from tapestry.ir.kernel import Kernel
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.scan import Scan, as_scan, unguarded


def scan_of(graph: Graph, kernel: Kernel) -> Scan | None:
    """The scan that a kernel runs; ``None`` for other kernels, and for one that only finishes merged states."""
    return None if kernel.mode == "finish" else as_scan(graph.ops[kernel.op])


def scan_task(graph: Graph, kernel: Kernel, scan: Scan) -> Task:
    """The kernel in block coordinates, over the other map dimensions, segments and (as the reduced dimension) steps."""
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    plain = replace(graph, ops=(*graph.ops[: kernel.op], unguarded(op, scan), *graph.ops[kernel.op + 1 :]))
    task = lower(plain, kernel)
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
        kept = [substitute(c.aff, env, ranges) - c.bound for c in a.checks]
        own = [Check(e - e.const, c.op, -e.const) for e, c in zip(kept, a.checks, strict=True)]
        return replace(a, offset=recombine(substitute(a.offset, env, ranges)), checks=tuple(dict.fromkeys((*own, *more))))

    def leaf(e: Expr) -> Expr:
        return Index(substitute(e.aff, env, ranges), e.dtype) if isinstance(e, Index) else e

    return replace(
        task, dims=dims, reduce=(step,), states=(),
        reads={p: access(a, elements if p in body else placed) for p, a in task.reads.items()},
        outs=tuple(access(a, placed) for a in task.outs),
        body=tuple(rewrite(e, leaf) for e in task.body), then=tuple(rewrite(e, leaf) for e in task.then),
    )  # fmt: skip


def scan_knobs(task: Task) -> Knobs:
    """Tiles of 2048 elements, long along what lies contiguous in memory."""
    rows, steps = points(task.dims), points(task.reduce)
    along = any(a.offset.coef(task.reduce[0].name) in (1, -1) for a in task.reads.values())
    width = min(power_of_two(steps), 1024 if along else 64)
    height = min(power_of_two(rows), max(1, 2048 // width))
    return Knobs(rows=height, cols=width, num_warps=4 if height * width >= 512 else 1)


def emit_scan(frame: Frame, knobs: Knobs, *, reverse: bool) -> Written:
    """Outputs (``full``) or states (``partial``) at every place."""
    task, namer = frame.task, frame.namer
    rows = Axis(task.dims, knobs.rows, "ROWS", namer, "row")
    cols = Axis(task.reduce, knobs.cols, "COLS", namer, "col")
    count = len(task.body)
    accs = tuple(namer.take("acc" if count == 1 else f"acc{f}") for f in range(count))
    tile = Scope(frame, View([(rows, "[:, None]"), (cols, "[None, :]")], task.ranges), accs)
    _combine(frame, reverse)
    lines, start = _running(frame, tile, cols, accs)
    tile.lines.extend(lines)
    values = tile.printer.all(task.then) if task.mode == "full" else list(accs)
    for access, name, value in zip(task.outs, frame.outs, values, strict=True):
        tile.store(access, name, value)
    head = (frame.program(), f"{rows.name} = pid * ROWS + tl.arange(0, ROWS)")
    steps = loop(cols, (*cols.lines, *tile.lines), namer.take(f"{cols.name}_0"), frame.wide)
    constants = (("ROWS", knobs.rows), ("COLS", knobs.cols))
    return Written(constants=constants, lines=(*head, *rows.lines, *start, *steps), programs=rows.tiles)


def _running(frame: Frame, tile: Scope, cols: Axis, accs: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Lines that make the states of one tile out of its values, and those before the first tile."""
    task, namer = frame.task, frame.namer
    assert task.monoid
    shape = tile.view.shape
    lines = [f"{a} = tl.broadcast_to({v}, {shape})" for a, v in zip(accs, tile.printer.all(task.body), strict=True)]
    states = accs[0] if len(accs) == 1 else f"({', '.join(accs)})"
    lines.append(f"{', '.join(accs)} = tl.associative_scan({states}, 1, combine)")
    if cols.tiles == 1:
        return lines, []
    carries = [namer.take(f"{a}_end") for a in accs]
    start = [f"{c} = tl.full((ROWS,), {z}, {t})" for c, z, t in zip(carries, identity(frame), state_types(frame), strict=True)]
    lines.append(f"{', '.join(accs)} = combine({', '.join((*(f'{c}[:, None]' for c in carries), *accs))})")
    end = namer.take("end")
    lines.append(f"{end} = tl.arange(0, COLS)[None, :] == COLS - 1")
    lines += [f"{c} = tl.sum(tl.where({end}, {a}, 0), axis=1).to({a}.dtype)" for c, a in zip(carries, accs, strict=True)]
    return lines, start


def _combine(frame: Frame, reverse: bool) -> None:
    """The merge of two states, the first one met standing left (right, where elements come last first)."""
    task = frame.task
    assert task.monoid
    dtypes = tuple(e.dtype for e in task.body)
    left, right = (tuple(Arg(f + k * len(dtypes), d) for f, d in enumerate(dtypes)) for k in (0, 1))
    merged = MONOIDS[task.monoid].combine(*((right, left) if reverse else (left, right)))
    frame.functions.append(combine_source(merged, dtypes, frame.helpers))
