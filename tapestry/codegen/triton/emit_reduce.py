"""Reductions by any monoid: a tile of rows (map points) by columns (reduced points), looped over the columns.

Each lane of the tile keeps a state of its own, merged with the next tile's by the monoid's ``combine``; the lanes of a row
are folded at the end by the same function. Lanes past the end hold the identity.
"""

from __future__ import annotations

from tapestry.codegen.triton.axes import Axis, View
from tapestry.codegen.triton.knobs import Knobs
from tapestry.codegen.triton.primitives import TRITON_TYPES, compute, literal
from tapestry.codegen.triton.printer import combine_source
from tapestry.codegen.triton.scope import Frame, Scope, Written
from tapestry.ir.monoid import MONOIDS


def emit_reduce(frame: Frame, knobs: Knobs) -> Written:
    """Reduced outputs (``full``) or states (``partial``)."""
    task, namer = frame.task, frame.namer
    rows = Axis(task.dims, knobs.rows, "ROWS", namer, "row")
    cols = Axis(task.reduce, knobs.cols, "COLS", namer, "col")
    tile = Scope(frame, View([(rows, "[:, None]"), (cols, "[None, :]")], task.ranges))
    accs = tuple(namer.take("acc" if len(task.body) == 1 else f"acc{f}") for f in range(len(task.body)))
    merge = merge_line(frame, tile, cols, accs)
    start = [
        f"{a} = tl.full((ROWS, COLS), {v}, {t})" for a, v, t in zip(accs, identity(frame), state_types(frame), strict=True)
    ]
    last = Scope(frame, View([(rows, "")], task.ranges), accs)
    values = last.printer.all(task.then) if task.mode == "full" else list(accs)
    for access, name, value in zip(task.outs, frame.outs, values, strict=True):
        last.store(access, name, value)
    head = (frame.program(), f"{rows.name} = pid * ROWS + tl.arange(0, ROWS)", *rows.lines, *start)
    step = (*cols.lines, *tile.lines, merge)
    lines = (*head, *loop(cols, step, namer.take(f"{cols.name}_0"), frame.wide), fold_line(frame, accs), *last.lines)
    return Written(constants=(("ROWS", knobs.rows), ("COLS", knobs.cols)), lines=lines, programs=rows.tiles)


def loop(axis: Axis, step: tuple[str, ...], start: str, wide: bool) -> list[str]:
    """The steps for every tile of an axis; no loop where one tile is all."""
    tile = f"tl.arange(0, {axis.tile})"
    index = tile if axis.tiles == 1 else f"{start} + {tile}"
    steps = [f"{axis.name} = " + (f"({index}).to(tl.int64)" if wide else index), *step]
    if axis.tiles == 1:
        return steps
    return [f"for {start} in range(0, {axis.size}, {axis.tile}):", *("    " + s for s in steps)]


def merge_line(frame: Frame, tile: Scope, cols: Axis, accs: tuple[str, ...]) -> str:
    """The line that merges one tile into the states."""
    task = frame.task
    values = tile.printer.all(task.body)
    if cols.ragged:
        inside = tile.view.laid(cols, cols.inside())
        values = [f"tl.where({inside}, {v}, {z})" for v, z in zip(values, identity(frame), strict=True)]
    if task.monoid == "sum":
        return f"{accs[0]} += {values[0]}"
    assert task.monoid is not None
    dtypes = tuple(e.dtype for e in task.body)
    frame.functions.append(combine_source(MONOIDS[task.monoid].combiner(dtypes), dtypes, frame.helpers))
    return f"{', '.join(accs)} = combine({', '.join((*accs, *values))})"


def fold_line(frame: Frame, accs: tuple[str, ...]) -> str:
    """The line that folds the lanes of each row."""
    if frame.task.monoid == "sum" and compute(frame.task.body[0].dtype) in ("f32", "f64", "i32", "i64"):
        return f"{accs[0]} = tl.sum({accs[0]}, axis=1)"
    if frame.task.monoid == "sum":  # tl.sum widens small integers, which would not wrap around
        frame.functions.append("@triton.jit\ndef combine(a, b):\n    return a + b")
    states = accs[0] if len(accs) == 1 else f"({', '.join(accs)})"
    return f"{', '.join(accs)} = tl.reduce({states}, 1, combine)"


def state_types(frame: Frame) -> list[str]:
    """Types of the state's fields."""
    return [TRITON_TYPES[compute(e.dtype)] for e in frame.task.body]


def identity(frame: Frame) -> list[str]:
    """The monoid's zero as literals."""
    assert frame.task.monoid is not None
    zero = MONOIDS[frame.task.monoid].zero(tuple(e.dtype for e in frame.task.body))
    return [literal(z.value, z.dtype) for z in zero]
