"""Reductions of a product, tile by tile: the product stays in registers, bias, activation and residual included.

Where reduced dimensions are columns of the product, the lanes of a tile's rows are folded and merged into the rows' states,
and a program goes through all columns. Where they are taps of a window (a pool behind a convolution), the products of one
tap after another are merged lane by lane.
"""

from __future__ import annotations

from dataclasses import replace

from tapestry.codegen.blocks.forms import Folded, KernelForm, power_of_two
from tapestry.codegen.blocks.lowered import Access, Check, Task, substitute_access, substitute_indices
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.emit_dot import Axes, dot_options, k_loop, mentions, operands, product_axes, tile_order
from tapestry.codegen.triton.task.chips import Chip
from tapestry.codegen.triton.task.descriptors import operand_boxes
from tapestry.codegen.triton.task.row_order import sorted_rows
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.folds import lane_reduction, tile_reduction
from tapestry.codegen.triton.text.scope import Frame, Scope, Written
from tapestry.ir.expr import Expr
from tapestry.ir.index import dim, dims_of
from tapestry.ir.recognition.contraction import Kept
from tapestry.ir.recognition.selection_sum import Routed


def emit_folded(frame: Frame, op: KernelForm, f: Folded, config: KernelConfig, chip: Chip) -> Written:
    """Outputs (``full``) or states (``partial``)."""
    if f.row is not None:
        frame.task = _rows(frame.task, f.row)
        config = replace(config, bn=max(config.bn, power_of_two(f.row.over.size)))  # whole rows, whatever is asked for
    task, namer, c = frame.task, frame.namer, f.product
    ax, outer = _tile_axes(frame, f, config)
    product = namer.take("product")
    accs = frame.accumulators()
    made = sorted_rows(op)
    if made:
        (ax.m if made[1] == c.m else ax.n).spare = made[0].over.size + 1
    boxes = operand_boxes(task, c) if config.descriptors and chip.descriptors and not made else None
    loads, rows, columns = operands(frame, c, ax, boxes, config)
    how = dot_options(c.operand, op.precision, config.bk, chip)
    step = f"{product} = tl.dot({rows[c.a]}, {columns[c.b]}, {product}, {how})"
    inner = k_loop(frame, ax, (*(() if boxes else ax.k.lines), *loads, step), boxes is not None)
    scalars = [(a, "") for a in (ax.batch, outer)]
    tile = Scope(frame, View([*scalars, (ax.m, "[:, None]"), (ax.n, "[None, :]")], task.ranges), (product,), narrow=True)
    if f.folds:
        start, merge = tile_reduction(frame, tile, ax.n, accs, once=outer.size * ax.n.tiles == 1)
    else:
        start, merge = lane_reduction(frame, tile, accs)
    own = ""
    if f.row is not None:
        own = namer.take("element")
        (text,) = tile.printer.all((_on_row(f.row.value, f.row),))
        merge = [f"{own} = {text}", *merge]
    last = _results(frame, ax, accs, own, folds=f.folds)
    turn = [f"{product} = tl.zeros((ROWS, COLS), tl.float32)", *inner, *tile.lines, *merge]
    index, begin = [_index(frame, a, f"pid_{x} * {a.tile}", [*turn, *last]) for a, x in ((ax.m, "m"), (ax.n, "n"))], list[str]()
    if made:
        k = 0 if made[1] == c.m else 1
        index[k], begin, picked = _by_order(frame, made[0], (ax.m, ax.n)[k], index[k], outer)
        inside = [*start, *outer.lines, *turn, *last] if frame.loose else [*outer.lines, *turn]
        each = [picked, *(f"    {line}" for line in inside)]
        each = each if frame.loose else [*start, *each, *last]
    else:
        each = [*start, *_turns(frame, ax, outer, turn, last if own else [], folds=f.folds), *last]
    lines = (
        frame.program(),
        *_program(ax, config, folds=f.folds),
        *ax.batch.lines,
        *index[0],
        *ax.m.lines,
        *([] if f.folds else [*index[1], *ax.n.lines]),
        *begin,
        *each,
    )
    programs = ax.batch.tiles * ax.m.tiles * (1 if f.folds else ax.n.tiles)
    return Written(constants=(("ROWS", config.bm), ("COLS", config.bn), ("BK", config.bk)), lines=lines, programs=programs)


def _by_order(frame: Frame, found: Routed, rows: Axis, index: list[str], outer: Axis) -> tuple[list[str], list[str], str]:
    """Lines that say which rows a tile has, by the order (`task.row_order`), and which matrix they all pick; and the test that
    it is one of the block's, without which nothing is loaded or multiplied."""
    order, at, count = frame.reads[max(frame.reads)], frame.namer.take("at"), found.over.size
    frame.pointers.add(order)
    scope = Scope(frame, View([(rows, "")], frame.task.ranges))
    (wanted,) = scope.printer.all((found.wanted,))
    picked = f"({wanted}) - ({found.base.const})" if found.base.const else wanted
    wide, kind = (".to(tl.int64)", "tl.int64") if frame.wide else ("", "tl.int32")
    lines = [
        *(line.replace(f"{rows.name} =", f"{at} =", 1) for line in index),
        f"{rows.name} = tl.load({order}_ptr + {at}){wide}",
    ]
    begin = [*scope.lines, f"{outer.name} = tl.min(tl.where({rows.inside()}, {picked}, {count}), axis=0).to({kind})"]
    return lines, begin, f"if ({outer.name} >= 0) & ({outer.name} < {count}):"


def _tile_axes(frame: Frame, f: Folded, config: KernelConfig) -> tuple[Axes, Axis]:
    """The axes of the product's tiles, and that of what tiles go through one after another."""
    namer = frame.namer
    outer = Axis(f.outer, 0, "", namer, "turn")
    ax = product_axes(namer, f.product, config, ("ROWS", "COLS"), outer)
    if f.folds:
        ax.n_0 = namer.take(f"{ax.n.name}_0") if ax.n.tiles > 1 else "0"
    return ax, outer


def _index(frame: Frame, axis: Axis, start: str, lines: list[str]) -> list[str]:
    """The line that says which points of an axis a tile has, where any other line asks."""
    text = f"{start} + tl.arange(0, {axis.tile})" if start != "0" else f"tl.arange(0, {axis.tile})"
    wide = f"({text}).to(tl.int64)" if frame.wide else text
    return [f"{axis.name} = {wide}"] if axis.lines or mentions(lines, axis.name) else []


def _program(ax: Axes, config: KernelConfig, *, folds: bool) -> list[str]:
    """The tile that a program computes; of tiles that are folded, neighbours go through the same columns."""
    if not folds:
        return tile_order(ax, "pid", config.group)
    if ax.batch.size == 1:
        return ["pid_m = pid"]
    return [f"{ax.batch.name} = pid // {ax.m.tiles}", f"pid_m = pid % {ax.m.tiles}"]


def _turns(frame: Frame, ax: Axes, outer: Axis, turn: list[str], last: list[str], *, folds: bool) -> list[str]:
    """One product after another: every tile of the columns that are folded, at every point of the outer dimensions."""
    columns = ax.n.tiles if folds else 1
    own = [*_index(frame, ax.n, ax.n_0, [*turn, *last]), *ax.n.lines] if folds else []
    wide = [f"{outer.name} = {outer.name}.to(tl.int64)"] if frame.wide and outer.size > 1 else []
    body = [*wide, *outer.lines, *own, *turn]
    if outer.size * columns == 1:
        return body
    if columns == 1:
        head = f"for {outer.name} in range(0, {outer.size}):"
    elif outer.size == 1:
        head = f"for {ax.n_0} in range(0, {ax.n.size}, COLS):"
    else:
        count = frame.namer.take("turn")
        head = f"for {count} in range(0, {outer.size * columns}):"
        body = [f"{outer.name} = {count} % {outer.size}", f"{ax.n_0} = {count} // {outer.size} * COLS", *body]
    return [head, *(f"    {line}" for line in body)]


def _rows(task: Task, row: Kept) -> Task:
    """The task with the row's elements no state: what is computed at each column is computed at each lane that is one."""
    lane = dim(row.over.name)
    env = {row.column.name: lane - row.first}
    part = (Check(lane, ">=", row.first), Check(lane, "<", row.first + row.column.size))

    def access(a: Access) -> Access:
        along = any(row.column.name in dims_of(e) for e in (a.offset, *(c.aff for c in a.checks)))
        more = part if along and row.column.size < row.over.size else ()
        moved = substitute_access(a, env)
        return replace(moved, checks=(*moved.checks, *more))

    assert task.monoid is not None
    return replace(
        task,
        dims=tuple(d for d in task.dims if d != row.column),
        monoid=task.monoid.removesuffix(".sum"),
        reads={p: access(a) for p, a in task.reads.items()},
        outs=tuple(map(access, task.outs)),
        body=tuple(_on_row(e, row) for e in task.body[:-1]),
        then=tuple(_on_row(e, row) for e in task.then),
    )


def _on_row(e: Expr, row: Kept) -> Expr:
    env = {row.column.name: dim(row.over.name) - row.first}
    return substitute_indices(e, env)


def _results(frame: Frame, ax: Axes, accs: tuple[str, ...], own: str, *, folds: bool) -> list[str]:
    """Lines that store what ``then`` makes of the states (``full``), or the states (``partial``).

    Args:
        own: the lanes themselves, where results are those of every column of a row.
    """
    task = frame.task
    lanes = [(ax.m, "")] if folds and not own else [(ax.m, "[:, None]"), (ax.n, "[None, :]")]
    states = (*(f"{a}[:, None]" for a in accs), own) if own else accs
    last = Scope(frame, View([(ax.batch, ""), *lanes], task.ranges), states, narrow=bool(own))
    return last.store_results(accs)
