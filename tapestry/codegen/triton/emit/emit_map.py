"""Maps: every element of the block on its own, in one flat tile axis, or in tiles of two axes where memory is transposed."""

from __future__ import annotations

from tapestry.codegen.triton.model.config_fields import KernelConfig
from tapestry.codegen.triton.task.tiles import transposing_dims
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.scope import Frame, Scope, Written


def emit_map(frame: Frame, config: KernelConfig) -> Written:
    """Outputs of a map, or (mode ``finish``) what ``then`` makes of merged states."""
    found = transposing_dims(frame.task) if config.rows > 1 else None
    return _flat(frame, config) if found is None else _transposed(frame, config, *found)


def _flat(frame: Frame, config: KernelConfig) -> Written:
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
