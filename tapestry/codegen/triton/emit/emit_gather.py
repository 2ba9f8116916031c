"""Gathers (`ir.recognise.selection_sum`): the places are loaded once for each row, and what stands there along the columns."""

from __future__ import annotations

from tapestry.codegen.triton.model.config_fields import KernelConfig
from tapestry.codegen.triton.task.tiles import split_selection
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.scope import Frame, Scope, Written
from tapestry.ir.recognise.selection_sum import Selection


def emit_gather(frame: Frame, s: Selection, config: KernelConfig) -> Written:
    """Outputs (``full``) or the picked elements (``partial``); a place outside the block gives zero."""
    task, namer = frame.task, frame.namer
    of_place, others = split_selection(task, s)
    rows = Axis(of_place, config.rows, "ROWS", namer, "row")
    cols = Axis(others, config.cols, "COLS", namer, "col")
    over = Axis((s.over,), 0, "", namer, "place")  # known at run time: a number for each row, not one of the grid's
    first = Scope(frame, View([(rows, "")], task.ranges))
    (wanted,) = first.printer.all((s.wanted,))
    inside = namer.take("inside")
    place = over.name
    lines = [
        *first.lines,
        f"{place} = {wanted}" + (f" - {s.shift}" if s.shift > 0 else f" + {-s.shift}" if s.shift else ""),
        f"{inside} = ({place} >= 0) & ({place} < {s.over.size})",
        f"{place} = tl.where({inside}, {place}, 0).to({'tl.int64' if frame.wide else 'tl.int32'})",
    ]
    acc = namer.take("acc")
    axes = [(over, "[:, None]"), (rows, "[:, None]"), (cols, "[None, :]")]
    tile = Scope(frame, View(axes, task.ranges), (acc,))
    (picked,) = tile.printer.all((s.picked,))
    tile.lines.append(f"{acc} = tl.where({inside}[:, None], {picked}, 0)")
    tile.store_results((acc,))
    head = [
        frame.program(),
        *([f"pid_row = pid // {cols.tiles}"] if cols.tiles > 1 else []),
        f"{rows.name} = {'pid_row' if cols.tiles > 1 else 'pid'} * ROWS + tl.arange(0, ROWS)",
        f"{cols.name} = " + (f"pid % {cols.tiles} * COLS + tl.arange(0, COLS)" if cols.tiles > 1 else "tl.arange(0, COLS)"),
    ]
    body = (*head, *rows.lines, *lines, *over.lines, *cols.lines, *tile.lines)
    constants = (("ROWS", config.rows), ("COLS", config.cols))
    return Written(constants=constants, lines=body, programs=rows.tiles * cols.tiles)
