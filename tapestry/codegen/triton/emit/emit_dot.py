"""Contractions on matrix units. A convolution comes down this path too: its projections make it an implicit matrix product."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tapestry.codegen.blocks.forms import (
    Contraction,
    KernelForm,
    Siblings,
    bare_read,
    plain_results,
    shifted,
    short_reads,
    siblings,
)
from tapestry.codegen.blocks.lowered import Task, points
from tapestry.codegen.blocks.operands import HALVES
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.task.chips import Chip
from tapestry.codegen.triton.task.descriptors import TileBox, operand_boxes, tile_box
from tapestry.codegen.triton.task.primitives import TRITON_TYPES, widened
from tapestry.codegen.triton.text.axes import Axis, Namer, View
from tapestry.codegen.triton.text.scope import Frame, Scope, Written
from tapestry.ir.expr import Acc, Arg, Const, Expr, arg_positions, walk
from tapestry.ir.recognition.exponential import INT8
from tapestry.ir.types import FLOAT8


def loop(axis: Axis, step: tuple[str, ...], start: str, wide: bool, stages: int = 1) -> list[str]:
    """The steps for every tile of an axis; no loop where one tile is all.

    Args:
        stages: tiles that are on their way at a time; Triton by itself loads ahead only for products.
    """
    tile = f"tl.arange(0, {axis.tile})"
    index = tile if axis.tiles == 1 else f"{start} + {tile}"
    steps = [f"{axis.name} = " + (f"({index}).to(tl.int64)" if wide else index), *step]
    if axis.tiles == 1:
        return steps
    span = f"0, {axis.size}, {axis.tile}"
    head = f"tl.range({span}, num_stages={stages})" if stages > 1 else f"range({span})"
    return [f"for {start} in {head}:", *("    " + s for s in steps)]


IMPRECISE = 128  # products of 8-bit floats whose sum may be kept in fewer bits than f32 has


@dataclass(slots=True)
class Axes:
    """The axes of a contraction's tiles, and where the tile of each begins, as source text."""

    batch: Axis
    m: Axis
    n: Axis
    k: Axis
    taps: Axis
    k_0: str
    m_0: str
    n_0: str
    outer: Axis | None = None  # what tiles go through one after another, of a product that is reduced
    sums: tuple[int, int] = (1, 1)  # how many sums have rows, or columns, of tiles of their own

    @property
    def scalars(self) -> list[tuple[Axis, str]]:
        """The axes that a tile has one point of."""
        return [(a, "") for a in (self.batch, self.outer, self.taps) if a is not None]


def product_axes(namer: Namer, c: Contraction, config: KernelConfig, tile: tuple[str, str], outer: Axis | None = None) -> Axes:
    """The axes of a contraction; ``tile`` names the constants of its rows and columns."""
    batch, m, n, k, taps = (
        Axis(dims, block, name, namer, wish)
        for dims, block, name, wish in (
            (c.batch, 0, "", "batch"),
            (c.m, config.bm, tile[0], "m"),
            (c.n, config.bn, tile[1], "n"),
            (c.k, config.bk, "BK", "k"),
            (c.taps, 0, "", "tap"),
        )
    )
    return Axes(batch, m, n, k, taps, namer.take(f"{k.name}_0"), f"pid_m * {tile[0]}", f"pid_n * {tile[1]}", outer)


def emit_dot(frame: Frame, op: KernelForm, config: KernelConfig, chip: Chip) -> Written:
    """``acc[m, n] += a[m, k] * b[k, n]`` for each batch point, then ``then`` (``full``) or the sums (``partial``)."""
    own = Selected(frame, found) if config.apart and (found := siblings(op)) else None
    sums = [(frame, op)] if own is None else own.sums
    frame, op = sums[0]
    task, namer, c = frame.task, frame.namer, op.product
    assert c is not None
    ax = product_axes(namer, c, config, ("BM", "BN"))
    ax.sums = (1, 1) if own is None else own.along
    accs = tuple(namer.take("acc") for _ in task.body)
    boxes = operand_boxes(task, c) if config.descriptors and chip.descriptors else None
    loads, rows, columns = operands(frame, c, ax, boxes, config)
    half = c.operand == "f16" and all(e.dtype == "f16" for e in task.body)  # sums in f16 (compile --accumulate f16)
    how = dot_options(c.operand, op.precision, config.bk, chip) + (", out_dtype=tl.float16" if half else "")
    steps = [f"{acc} = tl.dot({rows[a]}, {columns[b]}, {acc}, {how})" for acc, (a, b) in zip(accs, c.pairs, strict=True)]
    zeros = zero_points(frame, c, rows, columns) if c.operand == "i8" else ZeroPoints()
    after = [*zeros.after(frame, ax, accs), *_as_floats(task, c, accs, half)]
    held = "int32" if c.operand == "i8" else "float16" if half else "float32"
    ahead, results = _epilogues(sums, ax, accs, config, boxes is not None, early=chip.arch == 90)
    selected, stored = ([], results[0]) if own is None else own.lines(ax, results)
    epilogue = [*after, *stored]
    inner = k_loop(frame, ax, (*(() if boxes else ax.k.lines), *loads, *steps, *zeros.steps), boxes is not None)
    tile = [*ax.m.lines, *ax.n.lines, *ahead, *inner, *epilogue]
    once = [
        *selected,
        *ax.batch.lines,
        *([f"{ax.m.name} = pid_m * BM + tl.arange(0, BM)"] if mentions(tile, ax.m.name) else []),
        *ax.m.lines,
        *([f"{ax.n.name} = pid_n * BN + tl.arange(0, BN)"] if mentions(tile, ax.n.name) else []),
        *ax.n.lines,
        *ahead,
        *(f"{acc} = tl.zeros((BM, BN), tl.{held})" for acc in accs),
        *zeros.before,
        *inner,
        *epilogue,
    ]
    tiles = ax.batch.tiles * ax.m.tiles * ax.n.tiles * len(sums)
    programs = min(tiles, chip.units) if config.persistent else tiles
    lines = _grid(frame, ax, config, once, tiles, programs)
    return Written(constants=(("BM", config.bm), ("BN", config.bn), ("BK", config.bk)), lines=tuple(lines), programs=programs)


class Selected:
    """Sums side by side, of which each has tiles of its own: all through one loop, which calls what they differ in the same.

    Attributes:
        sums: the kernel of each sum alone, with names that are common where it can be.
        along: how many sums share the rows, and the columns, of the grid.
    """

    def __init__(self, frame: Frame, found: Siblings) -> None:
        self.frame, self.buffers, count = frame, dict[str, list[str]](), len(found.forms)
        self.along = (1, count) if found.side else (count, 1)
        outs = dict(zip((a.tensor for a in frame.task.outs), frame.outs, strict=True))
        self.sums = [
            (replace(frame, task=f.task, reads=dict(frame.reads), outs=[outs[a.tensor] for a in f.task.outs]), f)
            for f in found.forms
        ]
        for wish, positions in (("factor", found.factors), *(("term", same) for same in found.shared)):
            if len(set(positions)) > 1:
                name = frame.namer.take(wish)
                self.buffers[name] = [frame.reads[p] for p in positions]
                for (own, _), p in zip(self.sums, positions, strict=True):
                    own.reads[p] = name

    def lines(self, ax: Axes, results: list[list[str]]) -> tuple[list[str], list[str]]:
        """Lines that say which sum a tile is of and what its buffers are; those of the results of that sum alone."""
        held, which, chosen = self.frame, self.frame.namer.take("which"), [list[str]() for _ in self.sums]
        for name, buffers in self.buffers.items():
            boxes = {p: d for p, (n, d) in held.descriptors.items() if n == name}
            for own, buffer in zip(chosen, buffers, strict=True):
                own += [f"{param} = {held.descriptor(buffer, d)}" for param, d in boxes.items()]
                own += [f"{name}_ptr = {buffer}_ptr"] if name in held.pointers else []
            for param in boxes:
                del held.descriptors[param]
            for names in (held.pointers, held.operands):
                names.update(buffers if name in names else ())
        tiles, at = (ax.m.tiles, "pid_m") if self.along[0] > 1 else (ax.n.tiles, "pid_n")
        head = [f"{which} = {at} // {tiles}  # of the sums", f"{at} = {at} % {tiles}"]
        return [*head, *_branches(which, chosen)], _branches(which, results)


def _branches(which: str, bodies: list[list[str]]) -> list[str]:
    heads = [f"{'elif' if k else 'if'} {which} == {k}:" for k in range(len(bodies) - 1)]
    return [line for head, body in zip((*heads, "else:"), bodies, strict=True) for line in (head, *(f"    {b}" for b in body))]


def mentions(lines: list[str], name: str) -> bool:
    return any(re.search(rf"\b{name}\b", line) for line in lines)


def operands(
    frame: Frame, c: Contraction, ax: Axes, boxes: dict[Expr, TileBox] | None, config: KernelConfig
) -> tuple[list[str], dict[Expr, str], dict[Expr, str]]:
    """Lines that load the tiles of the factors, each once, and the names: those of m by k, those of k by n."""
    ranges = frame.task.ranges
    firsts, seconds = dict.fromkeys(a for a, _ in c.pairs), dict.fromkeys(b for _, b in c.pairs)
    if boxes is not None:
        k_at = "0" if ax.k.tiles == 1 else ax.k_0
        scalars = View(ax.scalars, ranges)
        m, n = ax.m.tile, ax.n.tile
        sides = ((firsts, (ax.m_0, k_at), (m, "BK")), (seconds, (k_at, ax.n_0), ("BK", n)))
        sizes = {m: config.bm, n: config.bn, "BK": config.bk}
        lines: list[str] = []
        names: list[dict[Expr, str]] = []
        for factors, at, tile in sides:
            names.append({})
            for e in factors:
                names[-1][e], more = described(
                    frame, c.value(e, frame.task), boxes[e], scalars, at, tile, (sizes[tile[0]], sizes[tile[1]])
                )
                lines += more
        return lines, names[0], names[1]
    left = Scope(frame, View([*ax.scalars, (ax.m, "[:, None]"), (ax.k, "[None, :]")], ranges))
    right = Scope(frame, View([*ax.scalars, (ax.k, "[:, None]"), (ax.n, "[None, :]")], ranges))
    rows = {e: factor(left, c.value(e, frame.task), ax.k, c.kind(e), "a") for e in firsts}
    columns = {e: factor(right, c.value(e, frame.task), ax.k, c.kind(e), "b") for e in seconds}
    return [*left.lines, *right.lines], rows, columns


def dot_options(operand: str, precision: str, depth: int, chip: Chip) -> str:
    """Arguments of ``tl.dot`` behind the accumulator.

    Hopper's matrix units keep some 14 bits of a running sum of 8-bit floats (DeepSeek-V3 technical report, section 3.3.2).
    Triton would let it run (its default there is 2^30 products) or, for 0, multiply in f16 at half the rate. Here it is added
    to the accumulator, in f32, after every tile's depth, 128 products at most. Elsewhere sums are in f32 as they are.
    """
    if operand == "i8":
        return "out_dtype=tl.int32"
    if operand == "f8":
        return f"max_num_imprecise_acc={min(depth, IMPRECISE) if chip.arch == 90 else 0}"
    return f'input_precision="{"ieee" if operand in HALVES else precision}"'


def _as_floats(task: Task, c: Contraction, accs: tuple[str, ...], half: bool) -> list[str]:
    """Lines that round sums of integers to the floats that the operation sums, and go on in f32 behind sums in f16."""
    if half:
        return [f"{acc} = {acc}.to(tl.float32)" for acc in accs]
    if c.operand != "i8":
        return []
    return [f"{acc} = {acc}.to(tl.float32)" for acc, e in zip(accs, task.body, strict=True) if e.dtype != "i32"]


@dataclass(frozen=True, slots=True)
class ZeroPoints:
    """Sums of ``(a + p)(b + q)`` from those of ``ab``: q times a's sums by rows, p times b's by columns, and pq times k.

    Attributes:
        before, steps: lines before the loop and in it, which make the sums of the tiles that need them.
        shifts: p and q of every pair, as expressions and, for the factors, what was added to them (u8 becomes i8).
    """

    before: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    shifts: tuple[tuple[Shift, Shift], ...] = ()

    def after(self, frame: Frame, ax: Axes, accs: tuple[str, ...]) -> list[str]:
        """Lines behind the loop."""
        by_rows = Scope(frame, View([(ax.batch, ""), (ax.m, "[:, None]")], frame.task.ranges))
        by_columns = Scope(frame, View([(ax.batch, ""), (ax.n, "[None, :]")], frame.task.ranges))
        depth, lines = points(frame.task.reduce), list[str]()
        for acc, (p, q) in zip(accs, self.shifts, strict=bool(self.shifts)):
            of_p, of_q = p.text(by_rows), q.text(by_columns)
            lines += [f"{acc} += {p.sums}[:, None] * {of_q}"] if of_q else []
            lines += [f"{acc} += {q.sums}[None, :] * {of_p}"] if of_p else []
            lines += [f"{acc} += {of_p} * {of_q} * {depth}"] if of_p and of_q else []
        return [*by_rows.lines, *by_columns.lines, *lines]


@dataclass(frozen=True, slots=True)
class Shift:
    """What was taken from a factor, ``bias`` less its zero point, and the name of the sums of the factor's tiles."""

    zero: Expr | None
    bias: int
    sums: str

    @property
    def none(self) -> bool:
        """Whether it is known to be 0."""
        return self.bias == (int(self.zero.value) if isinstance(self.zero, Const) else 0 if self.zero is None else None)

    def text(self, scope: Scope) -> str:
        """The shift as a literal or a tensor; ``""`` for 0."""
        if self.none:
            return ""
        if self.zero is None or isinstance(self.zero, Const):
            return f"({self.bias - int(self.zero.value if self.zero else 0)})"
        zero = scope.printer.all((self.zero,))[0]
        return f"({self.bias} - {zero})"


def zero_points(frame: Frame, c: Contraction, rows: dict[Expr, str], columns: dict[Expr, str]) -> ZeroPoints:
    """The zero points of integer factors."""
    task, namer = frame.task, frame.namer
    found: dict[Expr, Shift] = {}
    for e in dict.fromkeys(e for pair in c.pairs for e in pair):
        n = shifted(e, task)
        assert n is not None
        found[e] = Shift(n.shift, 128 if n.value.dtype == "u8" else 0, "")
    before, steps = list[str](), list[str]()

    def summed(e: Expr, tile: str, axis: int) -> Shift:
        if not found[e].sums:
            found[e] = replace(found[e], sums=namer.take("total"))
            before.append(f"{found[e].sums} = tl.zeros(({'BN' if axis == 0 else 'BM'},), tl.int32)")
            steps.append(f"{found[e].sums} += tl.sum({tile}.to(tl.int32), {axis})")
        return found[e]

    shifts: list[tuple[Shift, Shift]] = []
    for a, b in c.pairs:
        p = found[a] if found[b].none else summed(a, rows[a], 1)
        q = found[b] if found[a].none else summed(b, columns[b], 0)
        shifts.append((p, q))
    return ZeroPoints(tuple(before), tuple(steps), tuple(shifts))


def described(
    frame: Frame, e: Expr, box: TileBox, scalars: View, at: tuple[str, str], tile: tuple[str, str], sizes: tuple[int, int]
) -> tuple[str, list[str]]:
    """A tile by descriptor: its name, and the lines that copy it; lanes past the end are zeros."""
    position = bare_read(e)
    assert position is not None
    name = frame.reads[position]
    param = frame.descriptor(name, box.descriptor(*sizes))
    narrow = ".to(tl.int32)" if frame.wide else ""
    where = [f"({x}){narrow}" if narrow and x != "0" else x for x in (reversed(at) if box.transposed else at)]
    text = f"{param}.load([{', '.join([*_outer(box, scalars, narrow), *where])}])"
    if box.outer is not None:
        text += f".reshape({', '.join(reversed(tile) if box.transposed else tile)})"
    if box.transposed:
        text = f"tl.trans({text})"
    out = frame.namer.take(name) if name in frame.assigned else name
    frame.assigned.add(out)
    return out, [f"{out} = {text}"]


def _outer(box: TileBox, scalars: View, narrow: str) -> list[str]:
    if box.outer is None:
        return []
    text = scalars.text(box.outer)
    return [f"({text}){narrow}" if narrow and not text.isdigit() else text]


def _epilogues(
    sums: list[tuple[Frame, KernelForm]],
    ax: Axes,
    accs: tuple[str, ...],
    config: KernelConfig,
    descriptors: bool,
    *,
    early: bool,
) -> tuple[list[str], list[list[str]]]:
    """Lines that load what results need besides sums, where it is short; for each sum, lines that store its results.

    A bias is loaded before the sum (``early``): behind it, ptxas moves the rounding of the sums across the wait for Hopper's
    matrix units, to have work until the bias is there, and then lets every product wait for the one before (C7514).
    """
    axes: list[tuple[Axis, str]] = [(ax.batch, ""), (ax.m, "[:, None]"), (ax.n, "[None, :]")]
    short = [{f.reads[p]: p for p in (short_reads(op) if early else ())} for f, op in sums]
    ahead, loaded, stores = list[str](), dict[str, str](), list[list[str]]()
    for (frame, op), found in zip(sums, short, strict=True):
        last = Scope(frame, View(axes, frame.task.ranges), accs)
        for name, p in found.items():
            if name in loaded:
                last.known(p, loaded[name])
            elif all(name in names for names in short):
                loaded[name] = last.leaf(Arg(p, frame.task.reads[p].dtype))
        ahead += last.lines
        last.lines.clear()
        _store_results(frame, op, ax, config, last, descriptors)
        stores.append(last.lines)
    return ahead, stores


def _store_results(frame: Frame, op: KernelForm, ax: Axes, config: KernelConfig, last: Scope, descriptors: bool) -> None:
    """What becomes of the sums that ``last`` has, stored."""
    task, c = frame.task, op.product
    assert c is not None
    if descriptors:
        _whole_tiles(frame, c, ax, config, last)
    exprs = task.then if task.mode == "full" else task.body
    values = last.results(exprs) if task.mode == "full" else last.accs
    for access, name, value, out in zip(task.outs, frame.outs, values, exprs, strict=True):
        box = tile_box(access, c.m, c.n, task.ranges) if descriptors else None
        if box is None or box.transposed or access.dtype not in HALVES:
            last.store(access, name, value)
            continue
        param = frame.descriptor(name, box.descriptor(config.bm, config.bn))
        narrow = ".to(tl.int32)" if frame.wide else ""
        where = [f"({x}){narrow}" if narrow else x for x in ("pid_m * BM", "pid_n * BN")]
        coordinates = [*_outer(box, View([(ax.batch, "")], task.ranges), narrow), *where]
        shape = "" if box.outer is None else ".reshape(1, BM, BN)"
        summed = task.mode != "full" or any(isinstance(e, Acc) for e in walk(out))  # of the tile's shape, as the sums are
        tile = (value if value.isidentifier() else f"({value})") if summed else f"tl.broadcast_to({value}, (BM, BN))"
        tile += f".to({TRITON_TYPES[access.dtype]}){shape}"
        last.lines.append(f"{param}.store([{', '.join(coordinates)}], {tile})")


def _whole_tiles(frame: Frame, c: Contraction, ax: Axes, config: KernelConfig, last: Scope) -> None:
    """Load what results need of every cell, such as a residual, by descriptor: the wait for it also keeps the sums behind."""
    task = frame.task
    for p in sorted(arg_positions(task.then)):
        access = task.reads[p]
        box = tile_box(access, c.m, c.n, task.ranges)
        if box is not None and not box.transposed and access.dtype in HALVES:
            scalars, at = View([(ax.batch, "")], task.ranges), ("pid_m * BM", "pid_n * BN")
            name, lines = described(frame, Arg(p, access.dtype), box, scalars, at, ("BM", "BN"), (config.bm, config.bn))
            last.lines += [*lines, f"{name} = {name}.to(tl.float32)"]
            last.known(p, name)


def factor(scope: Scope, e: Expr, k: Axis, operand: str, wish: str) -> str:
    """One operand's tile, with zeros in the lanes past the end of k: 0 times garbage might be NaN.

    For ``i8``, unsigned bytes become signed ones: their value less 128.
    """
    task = scope.frame.task
    position, native = bare_read(e), scope.frame.native
    along: list[Axis] = scope.view.tiled
    dtype = "f32"
    if position is not None:
        access = task.reads[position]
        padded = bool(access.checks) and access.other not in (None, 0)
        raw, dtype = access.dtype == operand, access.dtype
        empty = "" if not k.ragged else "0" if dtype in INT8 | FLOAT8 and not (raw and dtype in FLOAT8) else "0.0"
        text = scope.load(access, scope.frame.reads[position], raw=raw, empty=empty)
        covered = {id(x) for e in (access.offset, *(c.aff for c in access.checks)) for x in scope.view.axes_of(e)}
        full, clean = all(id(x) in covered for x in along), not padded and id(k) in covered and (raw or operand != "i8")
        if not raw and operand != "i8" and (dtype not in HALVES or operand != "f32"):
            text = scope.printer.helped(widened(text, dtype, operand, native))
    else:
        text, full, clean = scope.printer.all((e,))[0], False, False
        dtype = e.dtype
        if operand in HALVES:
            text = f"({text}).to({TRITON_TYPES[operand]})"
    if operand == "i8" and dtype == "u8":
        text = f"(({text}) ^ 128).to(tl.int8)"
    if k.ragged and not clean:
        text = f"tl.where({scope.view.laid(k, k.inside())}, {text}, {'0' if operand == 'i8' else '0.0'})"
    if not full:
        text = f"tl.broadcast_to({text}, {scope.view.shape})"
    if text.isidentifier():
        return text
    name = scope.frame.namer.take(wish)
    scope.lines.append(f"{name} = {text}")
    return name


def k_loop(frame: Frame, ax: Axes, step: tuple[str, ...], descriptors: bool) -> list[str]:
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


def _grid(frame: Frame, ax: Axes, config: KernelConfig, once: list[str], tiles: int, programs: int) -> list[str]:
    """The tile that a program computes, or the loop over the tiles that a program of a persistent grid computes."""
    if programs == tiles:
        return [frame.program(), *tile_order(ax, "pid", config.group), *once]
    wide = ".to(tl.int64)" if frame.wide else ""
    # on Hopper one excludes the other; what reads more than its sums is laid out anew in each turn of one flat loop
    how = "warp_specialize=True" if config.warp_specialize else "flatten=True" if plain_results(frame.task) else ""
    return [
        "first_tile = tl.program_id(0)",
        f"for tile_index in tl.range(first_tile, {tiles}, {programs}{', ' * bool(how)}{how}):",
        *(f"    {line}" for line in (f"pid = tile_index{wide}", *tile_order(ax, "pid", config.group), *once)),
    ]


def tile_order(ax: Axes, tile: str, group: int) -> list[str]:
    """Which tile it is: batch outermost, and ``group`` rows of tiles at a time so that b's tiles are reused."""
    lines: list[str] = []
    m, n = ax.m.tiles * ax.sums[0], ax.n.tiles * ax.sums[1]
    if ax.batch.size > 1:
        lines += [f"{ax.batch.name} = {tile} // {m * n}", f"tile = {tile} % {m * n}"]
        tile = "tile"
    if m == 1 or n == 1:
        one = ("0", tile) if m == 1 else (tile, "0")
        return [*lines, f"pid_m = {one[0]}", f"pid_n = {one[1]}"]
    if m <= group:
        return [*lines, f"pid_m = {tile} % {m}", f"pid_n = {tile} // {m}"]
    return [
        *lines,
        f"# {group} x {n} tiles together: what they share stays in the L2 cache",
        f"first = {tile} // {group * n} * {group}",
        f"high = tl.minimum({m} - first, {group})" if m % group else f"high = {group}",
        f"pid_m = first + {tile} % {group * n} % high",
        f"pid_n = {tile} % {group * n} // high",
    ]
