"""Contractions on matrix units. A convolution comes down this path too: its projections make it an implicit matrix product."""

from __future__ import annotations

from tapestry.codegen.triton.axes import Axis, View
from tapestry.codegen.triton.emit_reduce import loop
from tapestry.codegen.triton.primitives import TRITON_TYPES
from tapestry.codegen.triton.scope import Frame, Scope, Written
from tapestry.codegen.triton.tiles import Contraction, Knobs, bare_read
from tapestry.ir.expr import Expr


def emit_dot(frame: Frame, c: Contraction, knobs: Knobs) -> Written:
    """``acc[m, n] += a[m, k] * b[k, n]`` for each batch point, then ``then`` (``full``) or the sums (``partial``)."""
    task, namer = frame.task, frame.namer
    batch = Axis(c.batch, 0, "", namer, "batch")
    m = Axis(c.m, knobs.bm, "BM", namer, "m")
    n = Axis(c.n, knobs.bn, "BN", namer, "n")
    k = Axis(c.k, knobs.bk, "BK", namer, "k")
    taps = Axis(c.taps, 0, "", namer, "tap")
    accs = tuple(namer.take("acc") for _ in task.body)
    left = Scope(frame, View([(batch, ""), (taps, ""), (m, "[:, None]"), (k, "[None, :]")], task.ranges))
    right = Scope(frame, View([(batch, ""), (taps, ""), (k, "[:, None]"), (n, "[None, :]")], task.ranges))
    pairs = ((c.a, c.b), *c.more)
    rows = {e: factor(left, e, k, c.operand, "a") for e in dict.fromkeys(a for a, _ in pairs)}
    columns = {e: factor(right, e, k, c.operand, "b") for e in dict.fromkeys(b for _, b in pairs)}
    steps = [
        f'{acc} = tl.dot({rows[a]}, {columns[b]}, {acc}, input_precision="ieee")'
        for acc, (a, b) in zip(accs, pairs, strict=True)
    ]
    last = Scope(frame, View([(batch, ""), (m, "[:, None]"), (n, "[None, :]")], task.ranges), accs)
    values = last.printer.all(task.then) if task.mode == "full" else accs
    for access, name, value in zip(task.outs, frame.outs, values, strict=True):
        last.store(access, name, value)
    inner = _loop(frame, k, taps, (*k.lines, *left.lines, *right.lines, *steps))
    grid, pid_m, pid_n = _tile_order(frame, batch, m, n, knobs.group)
    lines = (
        *grid,
        *batch.lines,
        f"{m.name} = {pid_m} * BM + tl.arange(0, BM)",
        *m.lines,
        f"{n.name} = {pid_n} * BN + tl.arange(0, BN)",
        *n.lines,
        *(f"{acc} = tl.zeros((BM, BN), tl.float32)" for acc in accs),
        *inner,
        *last.lines,
    )
    constants = (("BM", knobs.bm), ("BN", knobs.bn), ("BK", knobs.bk))
    return Written(constants=constants, lines=lines, programs=batch.tiles * m.tiles * n.tiles)


def factor(scope: Scope, e: Expr, k: Axis, operand: str, wish: str) -> str:
    """One operand's tile, with zeros in the lanes past the end of k: 0 times garbage might be NaN."""
    task = scope.frame.task
    position = bare_read(e)
    along: list[Axis] = scope.view.tiled
    if position is not None:
        access = task.reads[position]
        padded = bool(access.checks) and access.other not in (None, 0)
        value = scope.load(access, scope.frame.reads[position], raw=access.dtype == operand, empty="0.0" if k.ragged else "")
        covered = {id(x) for e in (access.offset, *(c.aff for c in access.checks)) for x in scope.view.axes_of(e)}
        full, clean = all(id(x) in covered for x in along), not padded and id(k) in covered
        text = value if access.dtype == operand or operand == "f32" else f"{value}.to({TRITON_TYPES[operand]})"
    else:
        text, full, clean = scope.printer.all((e,))[0], False, False
        if operand != "f32":
            text = f"({text}).to({TRITON_TYPES[operand]})"
    if k.ragged and not clean:
        text = f"tl.where({scope.view.laid(k, k.inside())}, {text}, 0.0)"
    if not full:
        text = f"tl.broadcast_to({text}, {scope.view.shape})"
    if text.isidentifier():
        return text
    name = scope.frame.namer.take(wish)
    scope.lines.append(f"{name} = {text}")
    return name


def _loop(frame: Frame, k: Axis, taps: Axis, step: tuple[str, ...]) -> list[str]:
    """The steps for every tile of k and every tap; the taps of one tile follow each other, for they share cache lines."""
    if taps.size == 1:
        return loop(k, step, frame.namer.take(f"{k.name}_0"), frame.wide)
    if k.tiles == 1:
        head, lines = f"for {taps.name} in range(0, {taps.size}):", [f"{k.name} = tl.arange(0, BK)"]
    else:
        head = f"for step in range(0, {taps.size * k.tiles}):"
        lines = [f"{taps.name} = step % {taps.size}", f"{k.name} = step // {taps.size} * BK + tl.arange(0, BK)"]
    if frame.wide:
        lines.append(f"{k.name} = {k.name}.to(tl.int64)")
    return [head, *("    " + line for line in (*lines, *taps.lines, *step))]


def _tile_order(frame: Frame, batch: Axis, m: Axis, n: Axis, group: int) -> tuple[list[str], str, str]:
    """Which tile a program computes: batch outermost, and ``group`` rows of tiles at a time so that b's tiles are reused."""
    lines = [frame.program()]
    tile = "pid"
    if batch.size > 1:
        lines += [f"{batch.name} = pid // {m.tiles * n.tiles}", f"tile = pid % {m.tiles * n.tiles}"]
        tile = "tile"
    if m.tiles == 1 or n.tiles == 1:
        one = ("0", tile) if m.tiles == 1 else (tile, "0")
        return [*lines, f"pid_m = {one[0]}", f"pid_n = {one[1]}"], "pid_m", "pid_n"
    if m.tiles <= group:
        return [*lines, f"pid_m = {tile} % {m.tiles}", f"pid_n = {tile} // {m.tiles}"], "pid_m", "pid_n"
    lines += [
        f"first = {tile} // {group * n.tiles} * {group}",
        f"high = tl.minimum({m.tiles} - first, {group})" if m.tiles % group else f"high = {group}",
        f"pid_m = first + {tile} % {group * n.tiles} % high",
        f"pid_n = {tile} % {group * n.tiles} // high",
    ]
    return lines, "pid_m", "pid_n"
