"""Reductions by any monoid: a tile of rows (map points) by columns (reduced points), looped over the columns.

Each lane of the tile keeps a state of its own, merged with the next tile's by the monoid's ``combine``; the lanes of a row
are folded at the end by the same function. Centred states are folded tile by tile (`folds`). Lanes past the end
hold the identity. Inner reductions that no other form fits run point by point over theirs, in plain loops at every lane:
correct for every body, monoid and projection.
"""

from __future__ import annotations

from tapestry.codegen.blocks.operands import compute
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.emit_dot import loop
from tapestry.codegen.triton.task.primitives import TRITON_TYPES, literal
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.expressions import Printer
from tapestry.codegen.triton.text.folds import reduction
from tapestry.codegen.triton.text.scope import Frame, Scope, Written
from tapestry.ir.expr import Arg, Expr
from tapestry.ir.monoid import MONOIDS


def emit_reduce(frame: Frame, config: KernelConfig) -> Written:
    """Outputs (``full``) or states (``partial``)."""
    task, namer = frame.task, frame.namer
    rows = Axis(task.dims, config.rows, "ROWS", namer, "row")
    cols = Axis(task.reduce, config.cols, "COLS", namer, "col")
    axes = [(rows, "[:, None]"), (cols, "[None, :]")]
    lets = tuple(namer.take("let" if len(task.inner) == 1 else f"let{k}") for k in range(len(task.inner)))
    inner = [line for k in range(len(lets)) for line in _inner(frame, k, lets, axes)]
    tile = Scope(frame, View(axes, task.ranges), lets)
    head = (frame.program(), f"{rows.name} = pid * ROWS + tl.arange(0, ROWS)")
    constants = (("ROWS", config.rows), ("COLS", config.cols))
    if task.monoid is None:
        tile.store_results()
        index = f"{cols.name} = tl.arange(0, COLS)"
        lines = (*head, index, *rows.lines, *cols.lines, *inner, *tile.lines)
        return Written(constants=constants, lines=lines, programs=rows.tiles)
    accs = frame.accumulators()
    start, merge, end = reduction(frame, tile, cols, accs)
    last = Scope(frame, View([(rows, "")], task.ranges), accs).store_results(accs)
    step = (*cols.lines, *inner, *tile.lines, *merge)
    steps = loop(cols, step, namer.take(f"{cols.name}_0"), frame.wide, config.num_stages)
    return Written(constants=constants, lines=(*head, *rows.lines, *start, *steps, *end, *last), programs=rows.tiles)


def _inner(frame: Frame, k: int, lets: tuple[str, ...], axes: list[tuple[Axis, str]]) -> list[str]:
    """Lines that compute the value of one inner reduction at every point of the tile."""
    s = frame.task.inner[k]
    dtype = s.body.dtype
    axis = Axis(s.dims, 0, "", frame.namer, "inner")
    scope = Scope(frame, View([(axis, ""), *axes], frame.task.ranges), lets)
    (value,) = scope.printer.all((s.body,))
    item = frame.namer.take(f"{lets[k]}_item")

    def leaf(e: Expr) -> str:
        assert isinstance(e, Arg), e
        return (lets[k], item)[e.pos]

    lines = [f"{item} = tl.broadcast_to({value}, (ROWS, COLS))"]
    (merged,) = Printer(leaf, lines, frame.namer, frame.helpers).all(MONOIDS[s.monoid].combiner((dtype,)))
    (zero,) = MONOIDS[s.monoid].zero((dtype,))
    kind = TRITON_TYPES[compute(dtype)]
    wide = [f"{axis.name} = {axis.name}.to(tl.int64)"] if frame.wide else []
    body = [*wide, *axis.lines, *scope.lines, *lines, f"{lets[k]} = ({merged}).to({kind})"]
    return [
        f"{lets[k]} = tl.full((ROWS, COLS), {literal(zero.value, zero.dtype)}, {kind})",
        f"for {axis.name} in range(0, {axis.size}):",
        *(f"    {line}" for line in body),
    ]
