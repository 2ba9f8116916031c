"""Running states (`ir.recognition.running_state`): a tile of rows by places, scanned along the places, its state carried on."""

from __future__ import annotations

from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.emit_dot import loop
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.expressions import combine_source
from tapestry.codegen.triton.text.folds import identity, state_types
from tapestry.codegen.triton.text.scope import Frame, Scope, Written
from tapestry.ir.expr import Arg
from tapestry.ir.monoid import MONOIDS


def emit_scan(frame: Frame, config: KernelConfig, *, reverse: bool) -> Written:
    """Outputs (``full``) or states (``partial``) at every place."""
    task, namer = frame.task, frame.namer
    rows = Axis(task.dims, config.rows, "ROWS", namer, "row")
    cols = Axis(task.reduce, config.cols, "COLS", namer, "col")
    accs = frame.accumulators()
    tile = Scope(frame, View([(rows, "[:, None]"), (cols, "[None, :]")], task.ranges), accs)
    _combine(frame, reverse)
    lines, start = _running(frame, tile, cols, accs)
    tile.lines.extend(lines)
    tile.store_results(accs)
    head = (frame.program(), f"{rows.name} = pid * ROWS + tl.arange(0, ROWS)")
    steps = loop(cols, (*cols.lines, *tile.lines), namer.take(f"{cols.name}_0"), frame.wide)
    constants = (("ROWS", config.rows), ("COLS", config.cols))
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
