"""Contractions on matrix units. A convolution comes down this path too: its projections make it an implicit matrix product."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tapestry.codegen.triton.axes import Axis, View
from tapestry.codegen.triton.chips import Chip
from tapestry.codegen.triton.descriptors import TileBox, operand_boxes, tile_box
from tapestry.codegen.triton.emit_reduce import loop
from tapestry.codegen.triton.knobs import Knobs
from tapestry.codegen.triton.operation import Operation
from tapestry.codegen.triton.primitives import HALVES, TRITON_TYPES
from tapestry.codegen.triton.scope import Frame, Scope, Written
from tapestry.codegen.triton.tiles import Contraction, bare_read
from tapestry.ir.expr import Acc, Expr, walk


@dataclass(slots=True)
class _Axes:
    batch: Axis
    m: Axis
    n: Axis
    k: Axis
    taps: Axis
    k_0: str  # where the tile of k begins


def emit_dot(frame: Frame, op: Operation, knobs: Knobs, chip: Chip) -> Written:
    """``acc[m, n] += a[m, k] * b[k, n]`` for each batch point, then ``then`` (``full``) or the sums (``partial``)."""
    task, namer, c = frame.task, frame.namer, op.product
    assert c is not None
    ax = _Axes(
        Axis(c.batch, 0, "", namer, "batch"),
        Axis(c.m, knobs.bm, "BM", namer, "m"),
        Axis(c.n, knobs.bn, "BN", namer, "n"),
        Axis(c.k, knobs.bk, "BK", namer, "k"),
        Axis(c.taps, 0, "", namer, "tap"),
        "",
    )
    ax.k_0 = namer.take(f"{ax.k.name}_0")
    accs = tuple(namer.take("acc") for _ in task.body)
    boxes = operand_boxes(task, c) if knobs.descriptors and chip.descriptors else None
    loads, rows, columns = _operands(frame, c, ax, boxes, knobs)
    precision = op.precision if c.operand not in HALVES else "ieee"
    steps = [
        f'{acc} = tl.dot({rows[a]}, {columns[b]}, {acc}, input_precision="{precision}")'
        for acc, (a, b) in zip(accs, c.pairs, strict=True)
    ]
    epilogue = _epilogue(frame, op, ax, accs, knobs, boxes is not None)
    inner = _loop(frame, ax, (*(() if boxes else ax.k.lines), *loads, *steps), boxes is not None)
    held = [*ax.m.lines, *ax.n.lines, *inner, *epilogue]
    once = [
        *ax.batch.lines,
        *([f"{ax.m.name} = pid_m * BM + tl.arange(0, BM)"] if _mentions(held, ax.m.name) else []),
        *ax.m.lines,
        *([f"{ax.n.name} = pid_n * BN + tl.arange(0, BN)"] if _mentions(held, ax.n.name) else []),
        *ax.n.lines,
        *(f"{acc} = tl.zeros((BM, BN), tl.float32)" for acc in accs),
        *inner,
        *epilogue,
    ]
    tiles = ax.batch.tiles * ax.m.tiles * ax.n.tiles
    programs = min(tiles, chip.units) if knobs.persistent else tiles
    lines = _grid(frame, ax, knobs, once, tiles, programs)
    return Written(constants=(("BM", knobs.bm), ("BN", knobs.bn), ("BK", knobs.bk)), lines=tuple(lines), programs=programs)


def _mentions(lines: list[str], name: str) -> bool:
    return any(re.search(rf"\b{name}\b", line) for line in lines)


def _operands(
    frame: Frame, c: Contraction, ax: _Axes, boxes: dict[Expr, TileBox] | None, knobs: Knobs
) -> tuple[list[str], dict[Expr, str], dict[Expr, str]]:
    """Lines that load the tiles of the factors, each once, and the names: those of m by k, those of k by n."""
    ranges = frame.task.ranges
    firsts, seconds = dict.fromkeys(a for a, _ in c.pairs), dict.fromkeys(b for _, b in c.pairs)
    if boxes is not None:
        k_at = "0" if ax.k.tiles == 1 else ax.k_0
        scalars = View([(ax.batch, ""), (ax.taps, "")], ranges)
        sides = ((firsts, ("pid_m * BM", k_at), ("BM", "BK")), (seconds, (k_at, "pid_n * BN"), ("BK", "BN")))
        sizes = {"BM": knobs.bm, "BN": knobs.bn, "BK": knobs.bk}
        lines: list[str] = []
        names: list[dict[Expr, str]] = []
        for factors, at, tile in sides:
            names.append({})
            for e in factors:
                names[-1][e], more = described(frame, e, boxes[e], scalars, at, tile, (sizes[tile[0]], sizes[tile[1]]))
                lines += more
        return lines, names[0], names[1]
    left = Scope(frame, View([(ax.batch, ""), (ax.taps, ""), (ax.m, "[:, None]"), (ax.k, "[None, :]")], ranges))
    right = Scope(frame, View([(ax.batch, ""), (ax.taps, ""), (ax.k, "[:, None]"), (ax.n, "[None, :]")], ranges))
    rows = {e: factor(left, e, ax.k, c.operand, "a") for e in firsts}
    columns = {e: factor(right, e, ax.k, c.operand, "b") for e in seconds}
    return [*left.lines, *right.lines], rows, columns


def described(
    frame: Frame, e: Expr, box: TileBox, scalars: View, at: tuple[str, str], tile: tuple[str, str], sizes: tuple[int, int]
) -> tuple[str, list[str]]:  # fmt: skip
    """A tile by descriptor: its name, and the lines that copy it; lanes past the end are zeros."""
    position = bare_read(e)
    assert position is not None
    name = frame.reads[position]
    param = frame.descriptor(name, box.descriptor(*sizes))
    narrow = ".to(tl.int32)" if frame.wide else ""
    where = [f"({x}){narrow}" if narrow and x != "0" else x for x in (reversed(at) if box.turned else at)]
    text = f"{param}.load([{', '.join([*_outer(box, scalars, narrow), *where])}])"
    if box.outer is not None:
        text += f".reshape({', '.join(reversed(tile) if box.turned else tile)})"
    if box.turned:
        text = f"tl.trans({text})"
    out = frame.namer.take(name) if name in frame.assigned else name
    frame.assigned.add(out)
    return out, [f"{out} = {text}"]


def _outer(box: TileBox, scalars: View, narrow: str) -> list[str]:
    if box.outer is None:
        return []
    text = scalars.text(box.outer)
    return [f"({text}){narrow}" if narrow and not text.isdigit() else text]


def _epilogue(frame: Frame, op: Operation, ax: _Axes, accs: tuple[str, ...], knobs: Knobs, descriptors: bool) -> list[str]:
    """Lines that compute the results from the sums and store them."""
    task, c = frame.task, op.product
    assert c is not None
    last = Scope(frame, View([(ax.batch, ""), (ax.m, "[:, None]"), (ax.n, "[None, :]")], task.ranges), accs)
    exprs = task.then if task.mode == "full" else task.body
    values = last.results(exprs) if task.mode == "full" else accs
    for access, name, value, out in zip(task.outs, frame.outs, values, exprs, strict=True):
        box = tile_box(access, c.m, c.n, task.ranges) if descriptors else None
        if box is None or box.turned or access.dtype not in HALVES:
            last.store(access, name, value)
            continue
        param = frame.descriptor(name, box.descriptor(knobs.bm, knobs.bn))
        narrow = ".to(tl.int32)" if frame.wide else ""
        where = [f"({x}){narrow}" if narrow else x for x in ("pid_m * BM", "pid_n * BN")]
        coordinates = [*_outer(box, View([(ax.batch, "")], task.ranges), narrow), *where]
        shape = "" if box.outer is None else ".reshape(1, BM, BN)"
        summed = task.mode != "full" or any(isinstance(e, Acc) for e in walk(out))  # of the tile's shape, as the sums are
        tile = (value if value.isidentifier() else f"({value})") if summed else f"tl.broadcast_to({value}, (BM, BN))"
        tile += f".to({TRITON_TYPES[access.dtype]}){shape}"
        last.lines.append(f"{param}.store([{', '.join(coordinates)}], {tile})")
    return last.lines


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


def _loop(frame: Frame, ax: _Axes, step: tuple[str, ...], descriptors: bool) -> list[str]:
    """The steps for every tile of k and every tap; the taps of one tile follow each other, for they share cache lines."""
    k, taps = ax.k, ax.taps
    if taps.size == 1:
        if not descriptors:
            return loop(k, step, ax.k_0, frame.wide)
        indented = [f"    {s}" for s in step]
        return list(step) if k.tiles == 1 else [f"for {ax.k_0} in range(0, {k.size}, BK):", *indented]
    if k.tiles == 1:
        head, lines = f"for {taps.name} in range(0, {taps.size}):", [f"{k.name} = tl.arange(0, BK)"]
    else:
        head = f"for step in range(0, {taps.size * k.tiles}):"
        lines = [f"{taps.name} = step % {taps.size}", f"{ax.k_0} = step // {taps.size} * BK"]
        lines.append(f"{k.name} = {ax.k_0} + tl.arange(0, BK)")
    if frame.wide:
        lines.append(f"{k.name} = {k.name}.to(tl.int64)")
    return [head, *("    " + line for line in (*lines, *taps.lines, *step))]


def _grid(frame: Frame, ax: _Axes, knobs: Knobs, once: list[str], tiles: int, programs: int) -> list[str]:
    """The tile that a program computes, or the loop over the tiles that a program of a persistent grid computes."""
    if programs == tiles:
        return [frame.program(), *_tile_order(ax, "pid", knobs.group), *once]
    wide = ".to(tl.int64)" if frame.wide else ""
    how = "warp_specialize=True" if knobs.warp_specialize else "flatten=True"  # on Hopper one excludes the other
    return [
        "first_tile = tl.program_id(0)",
        f"for tile_index in tl.range(first_tile, {tiles}, {programs}, {how}):",
        *(f"    {line}" for line in (f"pid = tile_index{wide}", *_tile_order(ax, "pid", knobs.group), *once)),
    ]


def _tile_order(ax: _Axes, tile: str, group: int) -> list[str]:
    """Which tile it is: batch outermost, and ``group`` rows of tiles at a time so that b's tiles are reused."""
    lines: list[str] = []
    m, n = ax.m, ax.n
    if ax.batch.size > 1:
        lines += [f"{ax.batch.name} = {tile} // {m.tiles * n.tiles}", f"tile = {tile} % {m.tiles * n.tiles}"]
        tile = "tile"
    if m.tiles == 1 or n.tiles == 1:
        one = ("0", tile) if m.tiles == 1 else (tile, "0")
        return [*lines, f"pid_m = {one[0]}", f"pid_n = {one[1]}"]
    if m.tiles <= group:
        return [*lines, f"pid_m = {tile} % {m.tiles}", f"pid_n = {tile} // {m.tiles}"]
    return [
        *lines,
        f"first = {tile} // {group * n.tiles} * {group}",
        f"high = tl.minimum({m.tiles} - first, {group})" if m.tiles % group else f"high = {group}",
        f"pid_m = first + {tile} % {group * n.tiles} % high",
        f"pid_n = {tile} % {group * n.tiles} // high",
    ]
