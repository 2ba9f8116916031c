"""Sums weighted by a softmax, in one pass over the keys: two products per tile, and states moved to each new maximum.

The centre of the states is the running maximum; the action of the monoid, ``exp(old - new)``, moves sums to it. A row whose
maximum is still minus infinity keeps the centre 0: nothing has any weight there, whatever the centre is.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapestry.codegen.triton.axes import Axis, View
from tapestry.codegen.triton.emit_dot import factor
from tapestry.codegen.triton.primitives import TRITON_TYPES
from tapestry.codegen.triton.ranges import key_range
from tapestry.codegen.triton.scope import Frame, Scope, Written
from tapestry.codegen.triton.tiles import Knobs, Stream, power_of_two
from tapestry.ir.graph import Dim

_NONE = 'float("-inf")'


@dataclass(slots=True)
class _Axes:
    batch: Axis
    rows: Axis
    key: Axis
    depth: Axis
    columns: Axis


def emit_stream(frame: Frame, s: Stream, knobs: Knobs) -> Written:
    """Outputs (``full``) or the states (``partial``): maximum and sum of weights by rows, weighted sums by rows and columns."""
    namer = frame.namer
    widths = [max(16, power_of_two(_points(dims))) for dims in (s.depth, s.columns)]
    ax = _Axes(
        Axis(s.batch, 0, "", namer, "batch"),
        Axis(s.rows, knobs.bm, "BM", namer, "row"),
        Axis((s.key,), knobs.bn, "BN", namer, "key"),
        Axis(s.depth, widths[0], "DEPTH", namer, "depth"),
        Axis(s.columns, widths[1], "WIDTH", namer, "column"),
    )
    once, query = _query(frame, s, ax)
    top, total, acc = (namer.take(n) for n in ("top", "total", "acc"))
    step = _step(frame, s, ax, query, (top, total, acc))
    last = _results(frame, ax, (top, total, acc))
    start = namer.take(f"{ax.key.name}_0")
    setup, bounds = key_range(frame, ax.rows, ax.key, "BM")
    body = [f"{ax.key.name} = {_index(frame, f'{start} + tl.arange(0, BN)')}", *ax.key.lines, *step]
    lines = (
        frame.program(),
        *_program(ax),
        *ax.batch.lines,
        f"{ax.rows.name} = {_index(frame, 'pid_row * BM + tl.arange(0, BM)')}",
        *ax.rows.lines,
        f"{ax.depth.name} = tl.arange(0, DEPTH)",
        *ax.depth.lines,
        f"{ax.columns.name} = tl.arange(0, WIDTH)",
        *ax.columns.lines,
        *once,
        f"{top} = tl.full((BM,), {_NONE}, tl.float32)",
        f"{total} = tl.zeros((BM,), tl.float32)",
        f"{acc} = tl.zeros((BM, WIDTH), tl.float32)",
        *setup,
        f"for {start} in range({bounds}, BN):",
        *("    " + line for line in body),
        f"{top} = tl.where({total} == {total}, {top}, {total})  # a NaN among the scores is a NaN of the row",
        *last,
    )
    constants = (("BM", knobs.bm), ("BN", knobs.bn), ("DEPTH", widths[0]), ("WIDTH", widths[1]))
    return Written(constants=constants, lines=lines, programs=ax.batch.tiles * ax.rows.tiles)


def _points(dims: tuple[Dim, ...]) -> int:
    n = 1
    for d in dims:
        n *= d.size
    return n


def _index(frame: Frame, text: str) -> str:
    return f"({text}).to(tl.int64)" if frame.wide else text


def _program(ax: _Axes) -> list[str]:
    """Tiles of rows of one batch point follow each other: they read the same keys and values."""
    if ax.batch.size == 1:
        return ["pid_row = pid"]
    return [f"{ax.batch.name} = pid // {ax.rows.tiles}", f"pid_row = pid % {ax.rows.tiles}"]


def _query(frame: Frame, s: Stream, ax: _Axes) -> tuple[list[str], str]:
    """Lines that load the queries' tile, which stays, and its name."""
    scope = Scope(frame, View([(ax.batch, ""), (ax.rows, "[:, None]"), (ax.depth, "[None, :]")], frame.task.ranges))
    name = factor(scope, s.query, ax.depth, s.operand, "q")
    return scope.lines, name


def _step(frame: Frame, s: Stream, ax: _Axes, query: str, state: tuple[str, str, str]) -> list[str]:
    """One tile of keys: scores, the new centre, weights, and the states moved to it and added to."""
    task, namer = frame.task, frame.namer
    top, total, acc = state
    score = namer.take("score")
    left = Scope(frame, View([(ax.batch, ""), (ax.depth, "[:, None]"), (ax.key, "[None, :]")], task.ranges))
    keys = factor(left, s.keys, ax.depth, s.operand, "k")
    tile = Scope(frame, View([(ax.batch, ""), (ax.rows, "[:, None]"), (ax.key, "[None, :]")], task.ranges), (score,))
    (masked,) = tile.printer.all(task.body[:1])
    if ax.key.ragged:
        masked = f"tl.where({tile.view.laid(ax.key, ax.key.inside())}, {masked}, {_NONE})"
    right = Scope(frame, View([(ax.batch, ""), (ax.key, "[:, None]"), (ax.columns, "[None, :]")], task.ranges))
    values = factor(right, s.value, ax.key, s.weights, "v")
    high, centre, scale, weights = (namer.take(n) for n in ("high", "centre", "scale", "weights"))
    half = "" if s.weights == "f32" else f".to({TRITON_TYPES[s.weights]})"
    return [
        *left.lines,
        f'{score} = tl.dot({query}, {keys}, tl.zeros((BM, BN), tl.float32), input_precision="ieee")',
        *tile.lines,
        f"{score} = {masked}" if masked != score else "",
        f"{high} = tl.maximum({top}, tl.max({score}, 1))",
        f"{centre} = tl.where({high} == {_NONE}, 0.0, {high})",
        f"{scale} = tl.exp({top} - {centre})",
        f"{weights} = tl.exp({score} - {centre}[:, None])",
        *right.lines,
        f"{total} = {total} * {scale} + tl.sum({weights}, 1)",
        f'{acc} = tl.dot({weights}{half}, {values}, {acc} * {scale}[:, None], input_precision="ieee")',
        f"{top} = {high}",
    ]


def _results(frame: Frame, ax: _Axes, state: tuple[str, str, str]) -> list[str]:
    """Stores of what ``then`` makes of the states, or of the states themselves."""
    task = frame.task
    over = View([(ax.batch, ""), (ax.rows, "[:, None]"), (ax.columns, "[None, :]")], task.ranges)
    if task.mode == "full":
        last = Scope(frame, over, (f"{state[0]}[:, None]", f"{state[1]}[:, None]", state[2]))
        for access, name, value in zip(task.outs, frame.outs, last.printer.all(task.then), strict=True):
            last.store(access, name, value)
        return last.lines
    lines: list[str] = []
    for k, (access, name) in enumerate(zip(task.outs, frame.outs, strict=True)):
        by_rows = View([(ax.batch, ""), (ax.rows, "")], task.ranges)
        scope = Scope(frame, over if k == 2 else by_rows)
        scope.store(access, name, state[k])
        lines += scope.lines
    return lines
