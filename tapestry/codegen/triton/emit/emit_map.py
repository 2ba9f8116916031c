"""Maps: every element of the block on its own, in one flat tile axis, or in tiles of two axes where memory is transposed."""

from __future__ import annotations

from tapestry.codegen.blocks.forms import split_selection, transposing_dims
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.scope import Frame, Scope, Written
from tapestry.ir.recognition.selection_sum import Selection


def emit_map(frame: Frame, config: KernelConfig) -> Written:
    """Outputs of a map, or (mode ``finish``) what ``then`` makes of merged states."""
    found = transposing_dims(frame.task) if config.rows > 1 else None
    return _flat_stream(frame, config) if found is None else _transposed(frame, config, *found)


def _flat_stream(frame: Frame, config: KernelConfig) -> Written:
    axis = Axis(frame.task.dims, config.block, "BLOCK", frame.namer, "i")
    lines = _values(frame, View([(axis, "")], frame.task.ranges))
    index = f"{axis.name} = pid * BLOCK + tl.arange(0, BLOCK)"
    return Written(
        constants=(("BLOCK", config.block),), lines=(frame.program(), index, *axis.lines, *lines), programs=axis.tiles
    )


def _transposed(frame: Frame, config: KernelConfig, at: int, end: int) -> Written:
    """Tiles of a dimension that reads run along by the one that writes do: both are copied by whole rows of a tile."""
    dims = frame.task.dims
    batch = Axis((*dims[:at], *dims[at + 1 : end], *dims[end + 1 :]), 0, "", frame.namer, "batch")
    rows = Axis((dims[at],), config.rows, "ROWS", frame.namer, "row")
    cols = Axis((dims[end],), config.cols, "COLS", frame.namer, "col")
    view = View([(batch, ""), (rows, "[:, None]"), (cols, "[None, :]")], frame.task.ranges)
    lines = _values(frame, view)
    tile = rows.tiles * cols.tiles
    head = [frame.program(), f"tile = pid % {tile}" if batch.size > 1 else "tile = pid"]
    head += [f"{batch.name} = pid // {tile}"] if batch.size > 1 else []
    head.append(f"{rows.name} = tile // {cols.tiles} * ROWS + tl.arange(0, ROWS)")
    head.append(f"{cols.name} = tile % {cols.tiles} * COLS + tl.arange(0, COLS)")
    body = (*head, *batch.lines, *rows.lines, *cols.lines, *lines)
    return Written(constants=(("ROWS", config.rows), ("COLS", config.cols)), lines=body, programs=batch.tiles * tile)


def _values(frame: Frame, view: View) -> list[str]:
    """Lines that load, compute and store one tile."""
    task = frame.task
    loads = Scope(frame, view)
    states = tuple(loads.load(a, n) for a, n in zip(task.states, frame.states, strict=True))
    scope = Scope(frame, view, states)
    return [*loads.lines, *scope.store_results()]


# Gathers (`ir.recognition`): the places are loaded once for each row, and what stands there along the columns.


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
