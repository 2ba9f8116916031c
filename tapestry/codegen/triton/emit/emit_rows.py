"""Reductions of rows whose results are used at every element of the row: one program per few rows, read once.

Where a row fits one tile, the elements that were reduced are still in registers when the results are written: a reduced
dimension and the map dimension of the same size that reads the same cells are one axis. A longer row is read twice, the
second time from the cache.
"""

from __future__ import annotations

from dataclasses import replace

from tapestry.codegen.blocks.forms import row_dims
from tapestry.codegen.blocks.lowered import Task, points, substitute_task
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.emit_dot import loop
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.folds import by_share, reduction
from tapestry.codegen.triton.text.scope import Frame, Scope, Written
from tapestry.ir.expr import Arg, Expr, rewrite
from tapestry.ir.graph import Dim
from tapestry.ir.index import dim
from tapestry.ir.recognition.exponential import exponential


def emit_rows(frame: Frame, config: KernelConfig) -> Written:
    """Outputs of a row operation (mode ``full``)."""
    task, namer = frame.task, frame.namer
    found = row_dims(task)
    assert found is not None
    rows = Axis(found[0], config.rows, "ROWS", namer, "row")
    joined = joint(task, found[1]) if max(points(task.reduce), points(found[1])) <= config.cols else None
    accs = frame.accumulators()
    shares = _shares(frame, accs)
    head = (frame.program(), f"{rows.name} = pid * ROWS + tl.arange(0, ROWS)")
    spread = tuple(f"{a}[:, None]" for a in (*accs, *shares))
    constants = (("ROWS", config.rows), ("COLS", config.cols))
    if joined is not None:
        frame.task = replace(joined, then=tuple(by_share(e, 2) for e in joined.then)) if shares else joined
        cols = Axis(found[1], config.cols, "COLS", namer, "col")
        tile = Scope(frame, View([(rows, "[:, None]"), (cols, "[None, :]")], joined.ranges))
        start, merge, end = reduction(frame, tile, cols, accs)
        first = list(tile.lines)
        last = _stores(tile, spread, len(first))
        index = f"{cols.name} = tl.arange(0, COLS)"
        body = (index, *rows.lines, *cols.lines, *start, *first, *merge, *end, *_worth(accs, shares), *last)
        return Written(constants=constants, lines=(*head, *body), programs=rows.tiles)
    reduced = Axis(task.reduce, config.cols, "COLS", namer, "red")
    cols = Axis(found[1], config.cols, "COLS", namer, "col")
    tile = Scope(frame, View([(rows, "[:, None]"), (reduced, "[None, :]")], task.ranges))
    start, merge, end = reduction(frame, tile, reduced, accs)
    frame.task = replace(task, then=tuple(by_share(e, 2) for e in task.then)) if shares else task
    over = Scope(frame, View([(rows, "[:, None]"), (cols, "[None, :]")], task.ranges))
    last = _stores(over, spread, 0)
    once = loop(reduced, (*reduced.lines, *tile.lines, *merge), namer.take(f"{reduced.name}_0"), frame.wide)
    again = loop(cols, (*cols.lines, *last), namer.take(f"{cols.name}_0"), frame.wide)
    lines = (*head, *rows.lines, *start, *once, *end, *_worth(accs, shares), *again)
    return Written(constants=constants, lines=lines, programs=rows.tiles)


def _shares(frame: Frame, accs: tuple[str, ...]) -> tuple[str, ...]:
    """The name of what one weight of a row is worth, where results are weights divided by their total."""
    task = frame.task
    if exponential(task.monoid, sums=1) is None or all(by_share(e, 2) == e for e in task.then):
        return ()
    return (frame.namer.take(f"{accs[1]}_share"),)


def _worth(accs: tuple[str, ...], shares: tuple[str, ...]) -> list[str]:
    return [f"{s} = 1.0 / {accs[1]}" for s in shares]


def _stores(scope: Scope, accs: tuple[str, ...], seen: int) -> list[str]:
    """Lines that write the results; those of the scope before ``seen`` are elsewhere already."""
    scope.accs = accs
    return scope.store_results()[seen:]


def joint(task: Task, columns: tuple[Dim, ...]) -> Task | None:
    """The task with its reduced dimensions named as the columns, where they have the same sizes; equal reads become one."""
    sizes = [d.size for d in task.reduce if d.size > 1]
    if sizes != [d.size for d in columns]:
        return None
    places = iter(columns)
    moved = substitute_task(task, {d.name: dim(next(places).name) for d in task.reduce if d.size > 1})
    first = {p: next(q for q, b in moved.reads.items() if b == a) for p, a in moved.reads.items()}

    def expr(e: Expr) -> Expr:
        return rewrite(e, lambda x: replace(x, pos=first[x.pos]) if isinstance(x, Arg) else x)

    return replace(moved, body=tuple(map(expr, moved.body)), then=tuple(map(expr, moved.then)))
