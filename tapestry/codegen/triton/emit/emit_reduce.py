"""Reductions by any monoid: a tile of rows (map points) by columns (reduced points), looped over the columns.

Each lane of the tile keeps a state of its own, merged with the next tile's by the monoid's ``combine``; the lanes of a row
are folded at the end by the same function. Centred states are folded tile by tile (`folds`). Lanes past the end
hold the identity.
"""

from __future__ import annotations

from tapestry.codegen.triton.model.kernel_config import KernelConfig
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.folds import reduction
from tapestry.codegen.triton.text.scope import Frame, Scope, Written


def emit_reduce(frame: Frame, config: KernelConfig) -> Written:
    """Reduced outputs (``full``) or states (``partial``)."""
    task, namer = frame.task, frame.namer
    rows = Axis(task.dims, config.rows, "ROWS", namer, "row")
    cols = Axis(task.reduce, config.cols, "COLS", namer, "col")
    tile = Scope(frame, View([(rows, "[:, None]"), (cols, "[None, :]")], task.ranges))
    accs = tuple(namer.take("acc" if len(task.body) == 1 else f"acc{f}") for f in range(len(task.body)))
    start, merge, end = reduction(frame, tile, cols, accs)
    last = Scope(frame, View([(rows, "")], task.ranges), accs)
    values = last.results(task.then) if task.mode == "full" else list(accs)
    for access, name, value in zip(task.outs, frame.outs, values, strict=True):
        last.store(access, name, value)
    head = (frame.program(), f"{rows.name} = pid * ROWS + tl.arange(0, ROWS)", *rows.lines, *start)
    step = (*cols.lines, *tile.lines, *merge)
    lines = (*head, *loop(cols, step, namer.take(f"{cols.name}_0"), frame.wide), *end, *last.lines)
    return Written(constants=(("ROWS", config.rows), ("COLS", config.cols)), lines=lines, programs=rows.tiles)


def loop(axis: Axis, step: tuple[str, ...], start: str, wide: bool) -> list[str]:
    """The steps for every tile of an axis; no loop where one tile is all."""
    tile = f"tl.arange(0, {axis.tile})"
    index = tile if axis.tiles == 1 else f"{start} + {tile}"
    steps = [f"{axis.name} = " + (f"({index}).to(tl.int64)" if wide else index), *step]
    if axis.tiles == 1:
        return steps
    return [f"for {start} in range(0, {axis.size}, {axis.tile}):", *("    " + s for s in steps)]
