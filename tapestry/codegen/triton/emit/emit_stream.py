"""Exponentially weighted sums in one pass over the keys: two products per tile, and states moved to each new centre.

The centre of the states is the running maximum (or minimum); the action of the monoid, ``exp(rate * (old - new))``, moves sums
to it. A row whose centre is still the identity, minus infinity for a maximum, is moved to 0: nothing has any weight there,
whatever the centre is. Centres are kept in the units of the product, before a positive factor that all scores have; that
factor, the rate and log2(e) meet in one constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tapestry.codegen.blocks.forms import KernelForm, Stream, exact_dtype, power_of_two
from tapestry.codegen.blocks.lowered import points
from tapestry.codegen.blocks.operands import HALVES
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.emit_dot import described, dot_options, factor, mentions
from tapestry.codegen.triton.task.chips import Chip
from tapestry.codegen.triton.task.descriptors import TileBox, stream_boxes
from tapestry.codegen.triton.task.primitives import TRITON_TYPES, literal
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.folds import by_share
from tapestry.codegen.triton.text.ranges import KeyRange, key_range, unguarded
from tapestry.codegen.triton.text.scope import Frame, Scope, Written
from tapestry.ir.expr import Acc, Call, Const, Expr, Index, Let, walk


@dataclass(slots=True)
class _Axes:
    batch: Axis
    rows: Axis
    key: Axis
    depth: Axis
    columns: Axis
    start: str  # where the tile of keys begins


@dataclass(slots=True)
class _Plan:
    """What the steps of one kernel share."""

    s: Stream
    ax: _Axes
    config: KernelConfig
    boxes: tuple[TileBox | None, TileBox | None, TileBox | None]
    how: tuple[str, str]  # options of the two products
    state: tuple[str, str, str]
    query: str
    score: Expr  # over Let(0), in units of the product
    scale: float  # by which the score is to be multiplied

    @property
    def hidden(self) -> str:
        """The score without a weight, the identity of the centre."""
        return literal(self.s.weights.hidden("f32").value, "f32")


def emit_stream(frame: Frame, op: KernelForm, config: KernelConfig, chip: Chip) -> Written:
    """Outputs (``full``) or the states (``partial``): maximum and sum of weights by rows, weighted sums by rows and columns."""
    namer, s = frame.namer, op.streamed
    assert s is not None
    least = 32 if s.operand == "f8" else 16
    widths = [max(w, power_of_two(points(dims))) for w, dims in ((least, s.depth), (16, s.columns))]
    ax = _Axes(
        Axis(s.batch, 0, "", namer, "batch"),
        Axis(s.rows, config.bm, "BM", namer, "row"),
        Axis((s.key,), config.bn, "BN", namer, "key"),
        Axis(s.depth, widths[0], "DEPTH", namer, "depth"),
        Axis(s.columns, widths[1], "WIDTH", namer, "column"),
        "",
    )
    boxes = stream_boxes(frame.task, s) if config.descriptors and chip.descriptors else (None, None, None)
    query, once = _loaded(frame, ax, s.query, boxes[0], (ax.rows, ax.depth), "pid_row * BM", ax.depth, s.kind(s.query), "q")
    state = (namer.take("top"), namer.take("total"), namer.take("acc"))
    how = tuple(dot_options(d, op.precision, w, chip) for d, w in ((s.operand, widths[0]), (s.weighted, config.bn)))
    score, scale = _scaled(s.score, s.weights.hidden(s.score.dtype))
    plan = _Plan(s, ax, config, boxes, (how[0], how[1]), state, query, score, scale)
    ax.start = namer.take(f"{ax.key.name}_0")
    keys = key_range(frame, s, ax.batch, ax.rows, ax.key, "BM")
    steps = _loops(frame, plan, keys)
    last = _results(frame, plan)
    top, total, acc = state
    lines = (
        frame.program(),
        *_program(ax, keys.grows),
        *ax.batch.lines,
        f"{ax.rows.name} = {_index(frame, 'pid_row * BM + tl.arange(0, BM)')}",
        *ax.rows.lines,
        *([f"{ax.depth.name} = tl.arange(0, DEPTH)"] if ax.depth.lines or mentions([*once, *steps], ax.depth.name) else []),
        *ax.depth.lines,
        f"{ax.columns.name} = tl.arange(0, WIDTH)",
        *ax.columns.lines,
        *once,
        f"{top} = tl.full((BM,), {plan.hidden}, tl.float32)",
        f"{total} = tl.zeros((BM,), tl.float32)",
        f"{acc} = tl.zeros((BM, WIDTH), tl.float32)",
        *keys.lines,
        *steps,
        *_centre(frame, plan),
        *last,
    )
    constants = (("BM", config.bm), ("BN", config.bn), ("DEPTH", widths[0]), ("WIDTH", widths[1]))
    return Written(constants=constants, lines=lines, programs=ax.batch.tiles * ax.rows.tiles)


def _index(frame: Frame, text: str) -> str:
    return f"({text}).to(tl.int64)" if frame.wide else text


def _program(ax: _Axes, grows: bool) -> list[str]:
    """Tiles of rows of one batch point follow each other: they read the same keys and values. Most keys first."""
    lines, row = [], "pid"
    if ax.batch.size > 1:
        lines, row = [f"{ax.batch.name} = pid // {ax.rows.tiles}"], f"pid % {ax.rows.tiles}"
    if grows and ax.rows.tiles > 1:
        return [*lines, f"pid_row = {ax.rows.tiles - 1} - {row}  # the longest first"]
    return [*lines, f"pid_row = {row}"]


def _scaled(e: Expr, hidden: Const) -> tuple[Expr, float]:
    """A score as (masked product, positive factor): ``where(c, let0 * s, -inf)`` is that of ``where(c, let0, -inf)`` and s."""
    if isinstance(e, Call) and e.fn == "where" and e.args[2] == hidden:
        inner, scale = _scaled(e.args[1], hidden)
        return Call(fn=e.fn, args=(e.args[0], inner, e.args[2]), dtype=e.dtype), scale
    if isinstance(e, Call) and e.fn in ("mul", "div"):
        a, b = e.args if not isinstance(e.args[0], Const) or e.fn == "div" else e.args[::-1]
        if isinstance(a, Let) and isinstance(b, Const) and 1e-6 < float(b.value) < 1e6:
            return a, float(b.value) if e.fn == "mul" else 1.0 / float(b.value)
    return e, 1.0


def _loaded(
    frame: Frame,
    ax: _Axes,
    e: Expr,
    box: TileBox | None,
    axes: tuple[Axis, Axis],
    start: str,
    along: Axis,
    operand: str,
    wish: str,
    *,
    transposed: bool = False,
) -> tuple[str, list[str]]:
    """The name of an operand's tile, and the lines that load it, by descriptor where it is a box.

    Args:
        axes: the operand's own two; ``start`` is where its tile begins along the first.
        along: the axis that the product sums over.
        transposed: whether the tile has the second axis first.
    """
    if box is not None:
        tile, sizes = (axes[0].tile, axes[1].tile), (axes[0].block, axes[1].block)
        name, lines = described(frame, e, box, View([(ax.batch, "")], frame.task.ranges), (start, "0"), tile, sizes)
        return (f"tl.trans({name})" if transposed else name), lines
    first, second = axes[::-1] if transposed else axes
    scope = Scope(frame, View([(ax.batch, ""), (first, "[:, None]"), (second, "[None, :]")], frame.task.ranges))
    return factor(scope, e, along, operand, wish), scope.lines


_BEFORE = 3  # tiles with a mask that are written out


def _loops(frame: Frame, plan: _Plan, keys: KeyRange) -> list[str]:
    """Tiles that need a mask, then the loop over the others; where that is not known, one loop, in which all have one.

    Triton 3.6 and 3.9 serialise products (C7515) where tiles with a mask come second, or are a loop of their own.
    """
    first, end, before = keys.first, keys.end, list[str]()
    # without matrix units a mask is little beside its products, and code twice as long spills
    if keys.clear and keys.masked <= _BEFORE and not plan.config.one_loop and plan.s.weighted in HALVES:
        body = [f"    {line}" for line in _keys_tile(frame, plan, True) if line]
        for k in range(keys.masked):
            before += [f"{plan.ax.start} = {keys.clear}" + f" + {k} * BN" * (k > 0), f"if {plan.ax.start} < {keys.end}:", *body]
        end = keys.clear
    special = ", warp_specialize=True" if plan.config.warp_specialize else ""
    head, body = f"for {plan.ax.start} in tl.range({first}, {end}, BN{special}):", _keys_tile(frame, plan, not before)
    return [*before, head, *(f"    {line}" for line in body if line)]


def _keys_tile(frame: Frame, plan: _Plan, masked: bool) -> list[str]:
    """One tile of keys: scores, the new centre, weights, and the states moved to it and added to."""
    task, namer, ax = frame.task, frame.namer, plan.ax
    top, total, acc = plan.state
    score = namer.take("score")
    key = Axis(ax.key.dims, ax.key.block, ax.key.tile, namer, "key") if not masked else ax.key
    if not masked:
        key.size = key.size // key.block * key.block  # whole tiles only: no lane is past the end
    s, (_, of_keys, of_values) = plan.s, plan.boxes
    keys, copies = _loaded(
        frame, ax, s.keys, of_keys, (key, ax.depth), ax.start, ax.depth, s.kind(s.keys), "k", transposed=True
    )
    values, later = _loaded(frame, ax, s.value, of_values, (key, ax.columns), ax.start, key, s.weighted, "v")
    tile = Scope(frame, View([(ax.batch, ""), (ax.rows, "[:, None]"), (key, "[None, :]")], task.ranges), (score,))
    (shown,) = tile.printer.all((plan.score if masked else unguarded(plan.score, plan.s.weights.hidden(plan.score.dtype)),))
    if masked and key.ragged:
        shown = f"tl.where({tile.view.laid(key, key.inside())}, {shown}, {plan.hidden})"
    high, centre, scale, weights = (namer.take(n) for n in ("highest", "centre", "scale", "weights"))
    half = "" if s.weighted == "f32" else f".to({TRITON_TYPES[s.weighted]})"
    by, fn = s.weights.rate * plan.scale * math.log2(math.e), s.weights.fn
    own = [
        *copies,
        f"{score} = tl.dot({plan.query}, {keys}, tl.zeros((BM, BN), tl.float32), {plan.how[0]})",
        *tile.lines,
        f"{score} = {shown}" if shown != score else "",
        f"{high} = tl.{fn}imum({top}, tl.{fn}({score}, 1))",
        f"{centre} = tl.where({high} == {plan.hidden}, 0.0, {high})",
        f"{scale} = tl.exp2(({top} - {centre}) * {by!r})  # {by:.4g} = {by / math.log2(math.e):.4g} * log2(e)",
        f"{weights} = tl.exp2({_away(score, centre, by, exact=not half or not _moderate(plan.score))})",
        *later,
        f"{total} = {total} * {scale} + tl.sum({weights}, 1)",
        f"{acc} = tl.dot({weights}{half}, {values}, {acc} * {scale}[:, None], {plan.how[1]})",
        f"{top} = {high}",
    ]
    used = key.lines or mentions(own, key.name)
    index = [f"{key.name} = {_index(frame, f'{ax.start} + tl.arange(0, BN)')}"] if used else []
    return [*index, *key.lines, *own]


def _away(score: str, centre: str, by: float, *, exact: bool) -> str:
    """The exponents of weights: one instruction for each score where weights are rounded to 16 bits; else nothing is rounded
    before the difference is made, and of the least numbers there are, as masks add them, it is finite."""
    if exact:
        return f"({score} - {centre}[:, None]) * {by!r}"
    return f"tl.fma({score}, {by!r}, ({centre} * {-by!r})[:, None])"


def _moderate(e: Expr) -> bool:
    """Whether a score is infinite or keeps digits behind the point in f32, as far as what is added to the products says."""
    if isinstance(e, Const):
        return not 1e6 < abs(float(e.value)) < float("inf")
    if isinstance(e, Call) and e.fn != "cast":
        return all(map(_moderate, e.args[e.fn == "where" :]))
    return isinstance(e, Let | Index) or exact_dtype(e) not in ("f32", "bf16")


def _centre(frame: Frame, plan: _Plan) -> list[str]:
    """Lines that turn the last centre into that of the scores, where anything reads it."""
    top, total, _ = plan.state
    if frame.task.mode == "full" and not any(isinstance(e, Acc) and e.field == 0 for out in frame.task.then for e in walk(out)):
        return []
    scaled = [f"{top} = {top} * {plan.scale!r}"] if plan.scale != 1.0 else []
    return [*scaled, f"{top} = tl.where({total} == {total}, {top}, {total})  # a NaN among the scores is one of the row"]


def _results(frame: Frame, plan: _Plan) -> list[str]:
    """Stores of what ``then`` makes of the states, or of the states themselves."""
    task, ax, state = frame.task, plan.ax, plan.state
    over = View([(ax.batch, ""), (ax.rows, "[:, None]"), (ax.columns, "[None, :]")], task.ranges)
    if task.mode == "full":
        share = frame.namer.take("share")
        then = tuple(by_share(e, 3) for e in task.then)
        first = [f"{share} = 1.0 / {state[1]}"] if then != task.then else []
        last = Scope(frame, over, (f"{state[0]}[:, None]", f"{state[1]}[:, None]", state[2], f"{share}[:, None]"))
        for access, name, value in zip(task.outs, frame.outs, last.results(then), strict=True):
            last.store(access, name, value)
        return [*first, *last.lines]
    lines: list[str] = []
    for k, (access, name) in enumerate(zip(task.outs, frame.outs, strict=True)):
        if k == 2:
            scope, value = Scope(frame, over), state[k]
        elif ax.columns in over.axes_of(access.offset):  # a result of its own, as wide as the sums
            scope, value = Scope(frame, over), f"{state[k]}[:, None]"
        else:
            scope, value = Scope(frame, View([(ax.batch, ""), (ax.rows, "")], task.ranges)), state[k]
        scope.store(access, name, value)
        lines += scope.lines
    return lines
