"""Maps: every element of the block on its own, in one flat tile axis, or in tiles of two axes where memory is turned."""

from __future__ import annotations

from tapestry.codegen.triton.model.kernel_config import Knobs
from tapestry.codegen.triton.task.tiles import turned
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.scope import Frame, Scope, Written


def emit_map(frame: Frame, knobs: Knobs) -> Written:
    """Outputs of a map, or (mode ``finish``) what ``then`` makes of merged states."""
    found = turned(frame.task) if knobs.rows > 1 else None
    return _flat(frame, knobs) if found is None else _turned(frame, knobs, *found)


def _flat(frame: Frame, knobs: Knobs) -> Written:
    axis = Axis(frame.task.dims, knobs.block, "BLOCK", frame.namer, "i")
    lines = _values(frame, View([(axis, "")], frame.task.ranges))
    index = f"{axis.name} = pid * BLOCK + tl.arange(0, BLOCK)"
    return Written(
        constants=(("BLOCK", knobs.block),), lines=(frame.program(), index, *axis.lines, *lines), programs=axis.tiles
    )


def _turned(frame: Frame, knobs: Knobs, at: int, end: int) -> Written:
    """Tiles of a dimension that reads run along by the one that writes do: both are copied by whole rows of a tile."""
    dims = frame.task.dims
    batch = Axis((*dims[:at], *dims[at + 1 : end], *dims[end + 1 :]), 0, "", frame.namer, "batch")
    rows = Axis((dims[at],), knobs.rows, "ROWS", frame.namer, "row")
    cols = Axis((dims[end],), knobs.cols, "COLS", frame.namer, "col")
    view = View([(batch, ""), (rows, "[:, None]"), (cols, "[None, :]")], frame.task.ranges)
    lines = _values(frame, view)
    tile = rows.tiles * cols.tiles
    head = [frame.program(), f"tile = pid % {tile}" if batch.size > 1 else "tile = pid"]
    head += [f"{batch.name} = pid // {tile}"] if batch.size > 1 else []
    head.append(f"{rows.name} = tile // {cols.tiles} * ROWS + tl.arange(0, ROWS)")
    head.append(f"{cols.name} = tile % {cols.tiles} * COLS + tl.arange(0, COLS)")
    body = (*head, *batch.lines, *rows.lines, *cols.lines, *lines)
    return Written(constants=(("ROWS", knobs.rows), ("COLS", knobs.cols)), lines=body, programs=batch.tiles * tile)


def _values(frame: Frame, view: View) -> list[str]:
    """Lines that load, compute and store one tile."""
    task = frame.task
    loads = Scope(frame, view)
    states = tuple(loads.load(a, n) for a, n in zip(task.states, frame.states, strict=True))
    scope = Scope(frame, view, states)
    values = scope.results(task.then if task.monoid else task.body)
    for access, name, value in zip(task.outs, frame.outs, values, strict=True):
        scope.store(access, name, value)
    return [*loads.lines, *scope.lines]
