"""The order of rows sorted by what they pick (`task.row_order`): a program for each matrix, and one for rows that pick none."""

from __future__ import annotations

from tapestry.codegen.blocks.forms import power_of_two
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.task.row_order import elements
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.scope import Frame, Scope, Written
from tapestry.ir.recognition.selection_sum import Selection


def emit_order(frame: Frame, s: Selection, config: KernelConfig) -> Written:
    """Each program counts who picks what, then writes where its own rows are, and past them the number of rows."""
    namer, count, tile = frame.namer, s.over.size, config.rows
    rows = Axis(frame.task.dims, config.block, "BLOCK", namer, "row")
    scope = Scope(frame, View([(rows, "")], frame.task.ranges))
    (wanted,) = scope.printer.all((s.wanted,))
    matrix, at, mine, start, held, end = (namer.take(n) for n in ("matrix", "at", "mine", f"{rows.name}_0", "held", "end"))
    (out,), width = frame.outs, power_of_two(count + 2)
    frame.pointers.add(out)

    def turns(*each: str) -> list[str]:
        known = f"tl.where(({matrix} >= 0) & ({matrix} < {count}), {matrix}, {count})"
        lines = [
            f"{rows.name} = {start} + tl.arange(0, BLOCK)",
            *rows.lines,
            *scope.lines,
            f"{matrix} = {wanted}" + (f" - ({s.shift})" if s.shift else ""),
            f"{matrix} = ({f'tl.where({rows.inside()}, {known}, {count + 1})' if rows.ragged else known}).to(tl.int32)",
            *each,
        ]
        return [f"for {start} in range(0, {rows.size}, BLOCK):", *(f"    {line}" for line in lines)]

    lane, rest = f"tl.arange(0, {width})", f"{start} + tl.arange(0, BLOCK)"
    lines = [
        frame.program(),
        f"{held} = tl.zeros(({width},), tl.int32)",
        *turns(f"{held} += tl.histogram({matrix}, {width})"),
        f"{held} = ({held} + {tile - 1}) // {tile} * {tile}  # whole tiles",
        f"{at} = tl.sum(tl.where({lane} < pid, {held}, 0), 0)",
        f"{end} = {at} + tl.sum(tl.where({lane} == pid, {held}, 0), 0)",
        f"{end} = tl.where(pid == {count}, {elements(rows.size, count, tile)}, {end})",
        *turns(
            f"{mine} = ({matrix} == pid).to(tl.int32)",
            f"tl.store({out}_ptr + {at} + tl.cumsum({mine}, 0) - 1, {rows.name}, mask={mine} > 0)",
            f"{at} += tl.sum({mine}, 0)",
        ),
        f"for {start} in range({at}, {end}, BLOCK):",
        f"    tl.store({out}_ptr + {rest}, tl.full((BLOCK,), {rows.size}, tl.int32), mask={rest} < {end})",
    ]
    return Written(constants=(("BLOCK", config.block),), lines=tuple(lines), programs=count + 1)
