"""Exponentially weighted sums in one pass over the keys: two products per tile, and states moved to each new centre.

The centre of the states is the running maximum (or minimum); the action of the monoid, ``exp(rate * (old - new))``, moves sums
to it. A row whose centre is still the identity, minus infinity for a maximum, is moved to 0: nothing has any weight there,
whatever the centre is. Centres are kept in the units of the product, before a positive factor that all scores have; that
factor, the rate and log2(e) meet in one constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tapestry.codegen.triton.emit.emit_dot import (
    Axes,
    described,
    dot_options,
    factor,
    k_loop,
    loop,
    mentions,
    operands,
    product_axes,
    tile_order,
)
from tapestry.codegen.triton.kernel_config import KernelConfig
from tapestry.codegen.triton.task.descriptors import TileBox, operand_boxes, stream_boxes
from tapestry.codegen.triton.task.lowered import (
    Access,
    Check,
    Task,
    points,
    substitute_access,
    substitute_indices,
    substitute_task,
)
from tapestry.codegen.triton.task.primitives import HALVES, TRITON_TYPES, Chip, literal
from tapestry.codegen.triton.task.tiles import (
    Folded,
    KernelForm,
    Stream,
    exact_dtype,
    power_of_two,
    row_dims,
    split_selection,
    transposing_dims,
)
from tapestry.codegen.triton.text.folds import by_share, identity, lane_reduction, reduction, state_types, tile_reduction
from tapestry.codegen.triton.text.scope import Axis, Frame, KeyRange, Scope, View, Written, combine_source, key_range, unguarded
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let, call, rewrite, walk
from tapestry.ir.graph import Dim
from tapestry.ir.index import dim, dims_of
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.recognise import Kept, Selection, dims_read, exponential, routed


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
    frame: Frame, ax: _Axes, e: Expr, box: TileBox | None, axes: tuple[Axis, Axis], start: str, along: Axis, operand: str,
    wish: str, *, transposed: bool = False,
) -> tuple[str, list[str]]:  # fmt: skip
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


# Maps: every element of the block on its own, in one flat tile axis, or in tiles of two axes where memory is transposed.


def emit_map(frame: Frame, config: KernelConfig) -> Written:
    """Outputs of a map, or (mode ``finish``) what ``then`` makes of merged states."""
    found = transposing_dims(frame.task) if config.rows > 1 else None
    return _flat_stream(frame, config) if found is None else _transposed(frame, config, *found)


def _flat_stream(frame: Frame, config: KernelConfig) -> Written:
    axis = Axis(frame.task.dims, config.block, "BLOCK", frame.namer, "i")
    lines = _values(frame, View([(axis, "")], frame.task.ranges))
    index = f"{axis.name} = pid * BLOCK + tl.arange(0, BLOCK)"
    return Written(
        constants=(("BLOCK", config.block),), lines=(frame.program(), index, *axis.lines, *lines), programs=axis.tiles
    )


def _transposed(frame: Frame, config: KernelConfig, at: int, end: int) -> Written:
    """Tiles of a dimension that reads run along by the one that writes do: both are copied by whole rows of a tile."""
    dims = frame.task.dims
    batch = Axis((*dims[:at], *dims[at + 1 : end], *dims[end + 1 :]), 0, "", frame.namer, "batch")
    rows = Axis((dims[at],), config.rows, "ROWS", frame.namer, "row")
    cols = Axis((dims[end],), config.cols, "COLS", frame.namer, "col")
    view = View([(batch, ""), (rows, "[:, None]"), (cols, "[None, :]")], frame.task.ranges)
    lines = _values(frame, view)
    tile = rows.tiles * cols.tiles
    head = [frame.program(), f"tile = pid % {tile}" if batch.size > 1 else "tile = pid"]
    head += [f"{batch.name} = pid // {tile}"] if batch.size > 1 else []
    head.append(f"{rows.name} = tile // {cols.tiles} * ROWS + tl.arange(0, ROWS)")
    head.append(f"{cols.name} = tile % {cols.tiles} * COLS + tl.arange(0, COLS)")
    body = (*head, *batch.lines, *rows.lines, *cols.lines, *lines)
    return Written(constants=(("ROWS", config.rows), ("COLS", config.cols)), lines=body, programs=batch.tiles * tile)


def _values(frame: Frame, view: View) -> list[str]:
    """Lines that load, compute and store one tile."""
    task = frame.task
    loads = Scope(frame, view)
    states = tuple(loads.load(a, n) for a, n in zip(task.states, frame.states, strict=True))
    scope = Scope(frame, view, states)
    return [*loads.lines, *scope.store_results()]


# Gathers (`ir.recognise`): the places are loaded once for each row, and what stands there along the columns.


def emit_gather(frame: Frame, s: Selection, config: KernelConfig) -> Written:
    """Outputs (``full``) or the picked elements (``partial``); a place outside the block gives zero."""
    task, namer = frame.task, frame.namer
    of_place, others = split_selection(task, s)
    rows = Axis(of_place, config.rows, "ROWS", namer, "row")
    cols = Axis(others, config.cols, "COLS", namer, "col")
    over = Axis((s.over,), 0, "", namer, "place")  # known at run time: a number for each row, not one of the grid's
    first = Scope(frame, View([(rows, "")], task.ranges))
    (wanted,) = first.printer.all((s.wanted,))
    inside = namer.take("inside")
    place = over.name
    lines = [
        *first.lines,
        f"{place} = {wanted}" + (f" - {s.shift}" if s.shift > 0 else f" + {-s.shift}" if s.shift else ""),
        f"{inside} = ({place} >= 0) & ({place} < {s.over.size})",
        f"{place} = tl.where({inside}, {place}, 0).to({'tl.int64' if frame.wide else 'tl.int32'})",
    ]
    acc = namer.take("acc")
    axes = [(over, "[:, None]"), (rows, "[:, None]"), (cols, "[None, :]")]
    tile = Scope(frame, View(axes, task.ranges), (acc,))
    (picked,) = tile.printer.all((s.picked,))
    tile.lines.append(f"{acc} = tl.where({inside}[:, None], {picked}, 0)")
    tile.store_results((acc,))
    head = [
        frame.program(),
        *([f"pid_row = pid // {cols.tiles}"] if cols.tiles > 1 else []),
        f"{rows.name} = {'pid_row' if cols.tiles > 1 else 'pid'} * ROWS + tl.arange(0, ROWS)",
        f"{cols.name} = " + (f"pid % {cols.tiles} * COLS + tl.arange(0, COLS)" if cols.tiles > 1 else "tl.arange(0, COLS)"),
    ]
    body = (*head, *rows.lines, *lines, *over.lines, *cols.lines, *tile.lines)
    constants = (("ROWS", config.rows), ("COLS", config.cols))
    return Written(constants=constants, lines=body, programs=rows.tiles * cols.tiles)


# Reductions of rows whose results are used at every element of the row: one program per few rows, read once.
#
# Where a row fits one tile, the elements that were reduced are still in registers when the results are written: a reduced
# dimension and the map dimension of the same size that reads the same cells are one axis. A longer row is read twice, the
# second time from the cache.


def emit_rows(frame: Frame, config: KernelConfig) -> Written:
    """Outputs of a row operation (mode ``full``)."""
    task, namer = frame.task, frame.namer
    found = row_dims(task)
    assert found is not None
    rows = Axis(found[0], config.rows, "ROWS", namer, "row")
    joined = joint(task, found[1]) if max(points(task.reduce), points(found[1])) <= config.cols else None
    accs = frame.accumulators()
    shares = _shares(frame, accs)
    head = (frame.program(), f"{rows.name} = pid * ROWS + tl.arange(0, ROWS)")
    spread = tuple(f"{a}[:, None]" for a in (*accs, *shares))
    constants = (("ROWS", config.rows), ("COLS", config.cols))
    if joined is not None:
        frame.task = replace(joined, then=tuple(by_share(e, 2) for e in joined.then)) if shares else joined
        cols = Axis(found[1], config.cols, "COLS", namer, "col")
        tile = Scope(frame, View([(rows, "[:, None]"), (cols, "[None, :]")], joined.ranges))
        start, merge, end = reduction(frame, tile, cols, accs)
        first = list(tile.lines)
        last = _stores(tile, spread, len(first))
        index = f"{cols.name} = tl.arange(0, COLS)"
        body = (index, *rows.lines, *cols.lines, *start, *first, *merge, *end, *_worth(accs, shares), *last)
        return Written(constants=constants, lines=(*head, *body), programs=rows.tiles)
    reduced = Axis(task.reduce, config.cols, "COLS", namer, "red")
    cols = Axis(found[1], config.cols, "COLS", namer, "col")
    tile = Scope(frame, View([(rows, "[:, None]"), (reduced, "[None, :]")], task.ranges))
    start, merge, end = reduction(frame, tile, reduced, accs)
    frame.task = replace(task, then=tuple(by_share(e, 2) for e in task.then)) if shares else task
    over = Scope(frame, View([(rows, "[:, None]"), (cols, "[None, :]")], task.ranges))
    last = _stores(over, spread, 0)
    once = loop(reduced, (*reduced.lines, *tile.lines, *merge), namer.take(f"{reduced.name}_0"), frame.wide)
    again = loop(cols, (*cols.lines, *last), namer.take(f"{cols.name}_0"), frame.wide)
    lines = (*head, *rows.lines, *start, *once, *end, *_worth(accs, shares), *again)
    return Written(constants=constants, lines=lines, programs=rows.tiles)


def _shares(frame: Frame, accs: tuple[str, ...]) -> tuple[str, ...]:
    """The name of what one weight of a row is worth, where results are weights divided by their total."""
    task = frame.task
    if exponential(task.monoid, sums=1) is None or all(by_share(e, 2) == e for e in task.then):
        return ()
    return (frame.namer.take(f"{accs[1]}_share"),)


def _worth(accs: tuple[str, ...], shares: tuple[str, ...]) -> list[str]:
    return [f"{s} = 1.0 / {accs[1]}" for s in shares]


def _stores(scope: Scope, accs: tuple[str, ...], seen: int) -> list[str]:
    """Lines that write the results; those of the scope before ``seen`` are elsewhere already."""
    scope.accs = accs
    return scope.store_results()[seen:]


def joint(task: Task, columns: tuple[Dim, ...]) -> Task | None:
    """The task with its reduced dimensions named as the columns, where they have the same sizes; equal reads become one."""
    sizes = [d.size for d in task.reduce if d.size > 1]
    if sizes != [d.size for d in columns]:
        return None
    places = iter(columns)
    moved = substitute_task(task, {d.name: dim(next(places).name) for d in task.reduce if d.size > 1})
    first = {p: next(q for q, b in moved.reads.items() if b == a) for p, a in moved.reads.items()}

    def expr(e: Expr) -> Expr:
        return rewrite(e, lambda x: replace(x, pos=first[x.pos]) if isinstance(x, Arg) else x)

    return replace(moved, body=tuple(map(expr, moved.body)), then=tuple(map(expr, moved.then)))


# Running states (`scans`): a tile of rows by places, scanned along the places, with the state carried from tile to tile.


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


# Reductions of a product, tile by tile: the product stays in registers, bias, activation and residual included.
#
# Where reduced dimensions are columns of the product, the lanes of a tile's rows are folded and merged into the rows' states,
# and a program goes through all columns. Where they are taps of a window (a pool behind a convolution), the products of one
# tap after another are merged lane by lane.


def emit_folded(frame: Frame, op: KernelForm, f: Folded, config: KernelConfig, chip: Chip) -> Written:
    """Outputs (``full``) or states (``partial``)."""
    if f.row is not None:
        frame.task = _rows(frame.task, f.row)
        config = replace(config, bn=max(config.bn, power_of_two(f.row.over.size)))  # whole rows, whatever is asked for
    task, namer, c = frame.task, frame.namer, f.product
    ax, outer = _tile_axes(frame, f, config)
    product = namer.take("product")
    accs = frame.accumulators()
    boxes = operand_boxes(task, c) if config.descriptors and chip.descriptors else None
    loads, rows, columns = operands(frame, c, ax, boxes, config)
    how = dot_options(c.operand, op.precision, config.bk, chip)
    step = f"{product} = tl.dot({rows[c.a]}, {columns[c.b]}, {product}, {how})"
    inner = k_loop(frame, ax, (*(() if boxes else ax.k.lines), *loads, step), boxes is not None)
    scalars = [(a, "") for a in (ax.batch, outer)]
    tile = Scope(frame, View([*scalars, (ax.m, "[:, None]"), (ax.n, "[None, :]")], task.ranges), (product,), narrow=True)
    if f.folds:
        start, merge = tile_reduction(frame, tile, ax.n, accs, once=outer.size * ax.n.tiles == 1)
    else:
        start, merge = lane_reduction(frame, tile, accs)
    own = ""
    if f.row is not None:
        own = namer.take("element")
        (text,) = tile.printer.all((_on_row(f.row.value, f.row),))
        merge = [f"{own} = {text}", *merge]
    last = _results_of_emit_folded(frame, ax, accs, own, folds=f.folds)
    turn = [f"{product} = tl.zeros((ROWS, COLS), tl.float32)", *inner, *tile.lines, *merge]
    turn = turn if f.folds else _only_picked(frame, scalars, (ax.m, ax.n), turn)
    loop = _turns(frame, ax, outer, turn, last if own else [], folds=f.folds)
    n = [] if f.folds else [*_index_of_emit_folded(frame, ax.n, "pid_n * COLS", [*turn, *last]), *ax.n.lines]
    lines = (
        frame.program(),
        *_program_of_emit_folded(ax, config, folds=f.folds),
        *ax.batch.lines,
        *_index_of_emit_folded(frame, ax.m, "pid_m * ROWS", [*turn, *last]),
        *ax.m.lines,
        *n,
        *start,
        *loop,
        *last,
    )
    programs = ax.batch.tiles * ax.m.tiles * (1 if f.folds else ax.n.tiles)
    return Written(constants=(("ROWS", config.bm), ("COLS", config.bn), ("BK", config.bk)), lines=lines, programs=programs)


def _only_picked(frame: Frame, scalars: list[tuple[Axis, str]], lanes: tuple[Axis, Axis], turn: list[str]) -> list[str]:
    """A turn that nothing is done in where no row of the tile picks its matrix: the matrix is not loaded either."""
    found = routed(frame.task)
    along = dims_read(frame.task, found.wanted) if found else frozenset[str]()
    rows = [a for a in lanes if along & {d.name for d in a.dims}]
    if found is None or len(rows) != 1:
        return turn
    scope = Scope(frame, View([*scalars, (rows[0], "")], frame.task.ranges))
    (test,) = scope.printer.all((call("eq", found.wanted, Index(dim(found.over.name) + found.shift)),))
    return [*scope.lines, f"if tl.max(({test}).to(tl.int32), axis=0) > 0:", *(f"    {line}" for line in turn)]


def _tile_axes(frame: Frame, f: Folded, config: KernelConfig) -> tuple[Axes, Axis]:
    """The axes of the product's tiles, and that of what tiles go through one after another."""
    namer = frame.namer
    outer = Axis(f.outer, 0, "", namer, "turn")
    ax = product_axes(namer, f.product, config, ("ROWS", "COLS"), outer)
    if f.folds:
        ax.n_0 = namer.take(f"{ax.n.name}_0") if ax.n.tiles > 1 else "0"
    return ax, outer


def _index_of_emit_folded(frame: Frame, axis: Axis, start: str, lines: list[str]) -> list[str]:
    """The line that says which points of an axis a tile has, where any other line asks."""
    text = f"{start} + tl.arange(0, {axis.tile})" if start != "0" else f"tl.arange(0, {axis.tile})"
    wide = f"({text}).to(tl.int64)" if frame.wide else text
    return [f"{axis.name} = {wide}"] if axis.lines or mentions(lines, axis.name) else []


def _program_of_emit_folded(ax: Axes, config: KernelConfig, *, folds: bool) -> list[str]:
    """The tile that a program computes; of tiles that are folded, neighbours go through the same columns."""
    if not folds:
        return tile_order(ax, "pid", config.group)
    if ax.batch.size == 1:
        return ["pid_m = pid"]
    return [f"{ax.batch.name} = pid // {ax.m.tiles}", f"pid_m = pid % {ax.m.tiles}"]


def _turns(frame: Frame, ax: Axes, outer: Axis, turn: list[str], last: list[str], *, folds: bool) -> list[str]:
    """One product after another: every tile of the columns that are folded, at every point of the outer dimensions."""
    columns = ax.n.tiles if folds else 1
    own = [*_index_of_emit_folded(frame, ax.n, ax.n_0, [*turn, *last]), *ax.n.lines] if folds else []
    wide = [f"{outer.name} = {outer.name}.to(tl.int64)"] if frame.wide and outer.size > 1 else []
    body = [*wide, *outer.lines, *own, *turn]
    if outer.size * columns == 1:
        return body
    if columns == 1:
        head = f"for {outer.name} in range(0, {outer.size}):"
    elif outer.size == 1:
        head = f"for {ax.n_0} in range(0, {ax.n.size}, COLS):"
    else:
        count = frame.namer.take("turn")
        head = f"for {count} in range(0, {outer.size * columns}):"
        body = [f"{outer.name} = {count} % {outer.size}", f"{ax.n_0} = {count} // {outer.size} * COLS", *body]
    return [head, *(f"    {line}" for line in body)]


def _rows(task: Task, row: Kept) -> Task:
    """The task with the row's elements no state: what is computed at each column is computed at each lane that is one."""
    lane = dim(row.over.name)
    env = {row.column.name: lane - row.first}
    part = (Check(lane, ">=", row.first), Check(lane, "<", row.first + row.column.size))

    def access(a: Access) -> Access:
        along = any(row.column.name in dims_of(e) for e in (a.offset, *(c.aff for c in a.checks)))
        more = part if along and row.column.size < row.over.size else ()
        moved = substitute_access(a, env)
        return replace(moved, checks=(*moved.checks, *more))

    assert task.monoid is not None
    return replace(
        task, dims=tuple(d for d in task.dims if d != row.column), monoid=task.monoid.removesuffix(".sum"),
        reads={p: access(a) for p, a in task.reads.items()}, outs=tuple(map(access, task.outs)),
        body=tuple(_on_row(e, row) for e in task.body[:-1]), then=tuple(_on_row(e, row) for e in task.then),
    )  # fmt: skip


def _on_row(e: Expr, row: Kept) -> Expr:
    env = {row.column.name: dim(row.over.name) - row.first}
    return substitute_indices(e, env)


def _results_of_emit_folded(frame: Frame, ax: Axes, accs: tuple[str, ...], own: str, *, folds: bool) -> list[str]:
    """Lines that store what ``then`` makes of the states (``full``), or the states (``partial``).

    Args:
        own: the lanes themselves, where results are those of every column of a row.
    """
    task = frame.task
    lanes = [(ax.m, "")] if folds and not own else [(ax.m, "[:, None]"), (ax.n, "[None, :]")]
    states = (*(f"{a}[:, None]" for a in accs), own) if own else accs
    last = Scope(frame, View([(ax.batch, ""), *lanes], task.ranges), states, narrow=bool(own))
    return last.store_results(accs)
