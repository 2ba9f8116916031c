"""Maps: every element of the block on its own, in one flat tile axis."""

from __future__ import annotations

from tapestry.codegen.triton.axes import Axis, View
from tapestry.codegen.triton.knobs import Knobs
from tapestry.codegen.triton.scope import Frame, Scope, Written


def emit_map(frame: Frame, knobs: Knobs) -> Written:
    """Outputs of a map, or (mode ``finish``) what ``then`` makes of merged states."""
    task = frame.task
    axis = Axis(task.dims, knobs.block, "BLOCK", frame.namer, "i")
    view = View([(axis, "")], task.ranges)
    loads = Scope(frame, view)
    states = tuple(loads.load(a, n) for a, n in zip(task.states, frame.states, strict=True))
    scope = Scope(frame, view, states)
    values = scope.printer.all(task.then if task.monoid else task.body)
    for access, name, value in zip(task.outs, frame.outs, values, strict=True):
        scope.store(access, name, value)
    index = f"{axis.name} = pid * BLOCK + tl.arange(0, BLOCK)"
    lines = (frame.program(), index, *axis.lines, *loads.lines, *scope.lines)
    return Written(constants=(("BLOCK", knobs.block),), lines=lines, programs=axis.tiles)
