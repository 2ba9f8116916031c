"""How the lanes of a tile become one state per row.

A state that refers to a centre (``max ⋉ sum``, ``mean ⋉ squares``) is folded centre first: the centre of all lanes by one
reduction, then every lane moved to it by the action and summed. That is what the monoid's law says of any tree of merges, with
one action per lane instead of one per merge; the identity is proved where the monoid is made (`ir.monoid_action`), and of
moments it is the parallel axis theorem. Other monoids are folded by their ``combine``.
"""

from __future__ import annotations

from tapestry.codegen.triton.task.primitives import TRITON_TYPES, compute, literal
from tapestry.codegen.triton.task.tiles import centred
from tapestry.codegen.triton.text.axes import Axis
from tapestry.codegen.triton.text.expressions import combine_source
from tapestry.codegen.triton.text.scope import Frame, Scope
from tapestry.ir.expr import Arg, Const, Expr, Let, walk
from tapestry.ir.monoid import MONOIDS, number
from tapestry.ir.recognise.contraction import only_sums
from tapestry.ir.recognise.exponential import Exponential, exponential


def reduction(frame: Frame, tile: Scope, cols: Axis, accs: tuple[str, ...]) -> tuple[list[str], list[str], list[str]]:
    """Lines before the loop over tiles, lines that merge one tile (after the scope's own), and lines after the loop."""
    values = tile.printer.all(frame.task.body)
    inside = tile.view.laid(cols, cols.inside()) if cols.ragged else ""
    if centred(frame.task):
        start, lines = _centred(frame, values, inside, cols, accs, once=cols.tiles == 1)
        return start, lines, []
    if inside:
        values = [f"tl.where({inside}, {v}, {z})" for v, z in zip(values, identity(frame), strict=True)]
    types = state_types(frame)
    if cols.tiles == 1:
        plain = [not inside and _fills(frame, tile, e) for e in frame.task.body]
        lanes = zip(values, types, plain, strict=True)
        spread = [v if p else f"tl.broadcast_to({v}, (ROWS, COLS)).to({t})" for v, t, p in lanes]
        return [], [f"{a} = {v}" for a, v in zip(accs, spread, strict=True)], [fold_line(frame, accs)]
    return _zeros(frame, accs, "(ROWS, COLS)"), [_merge(frame, accs, values)], [fold_line(frame, accs)]


def _fills(frame: Frame, tile: Scope, e: Expr) -> bool:
    """Whether a value is an element read for each lane, and so has the tile's shape and the state's type already."""
    return isinstance(e, Arg) and set(tile.view.tiled) <= set(tile.view.axes_of(frame.task.reads[e.pos].offset))


def _centred(
    frame: Frame, values: list[str], inside: str, cols: Axis, accs: tuple[str, ...], *, once: bool
) -> tuple[list[str], list[str]]:  # fmt: skip
    """The state of a tile, centre first; merged row by row where there are several tiles."""
    task, namer = frame.task, frame.namer
    own = accs if once else tuple(namer.take(f"{a}_tile") for a in accs)
    count = "COLS" if not inside else str(cols.size) if cols.tiles == 1 else ""
    if (weights := exponential(task.monoid, sums=1)) is not None:
        lines = _weights(frame, weights, values, inside, own)
    else:
        lines = _moments(frame, values, inside, own, count)
    if once:
        return [], lines
    return _zeros(frame, accs, "(ROWS,)"), [*lines, _merge(frame, accs, list(own))]


def tile_reduction(frame: Frame, tile: Scope, cols: Axis, accs: tuple[str, ...], *, once: bool) -> tuple[list[str], list[str]]:
    """Lines before the loop over tiles, and lines that fold the lanes of a tile's rows and merge them into the rows' states.

    Unlike `reduction` no lane has a state of its own: beside a product's accumulator there is no room for them.
    """
    values = tile.printer.all(frame.task.body)
    inside = tile.view.laid(cols, cols.inside()) if cols.ragged else ""
    if centred(frame.task):
        return _centred(frame, values, inside, cols, accs, once=once)
    own = accs if once else tuple(frame.namer.take(f"{a}_tile") for a in accs)
    kept = [f"tl.where({inside}, {v}, {z})" for v, z in zip(values, identity(frame), strict=True)] if inside else values
    spread = [
        v if any(isinstance(x, Let) for x in walk(e)) else f"tl.broadcast_to({v}, (ROWS, COLS)).to({t})"
        for e, v, t in zip(frame.task.body, kept, state_types(frame), strict=True)
    ]
    lines = [*(f"{a} = {v}" for a, v in zip(own, spread, strict=True)), fold_line(frame, own)]
    return ([], lines) if once else (_zeros(frame, accs, "(ROWS,)"), [*lines, _merge(frame, accs, list(own))])


def lane_reduction(frame: Frame, tile: Scope, accs: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Lines before the loop over tiles, and lines that merge a tile into the states that every lane has."""
    values = tile.printer.all(frame.task.body)
    return _zeros(frame, accs, "(ROWS, COLS)"), [_merge(frame, accs, values)]


def _zeros(frame: Frame, accs: tuple[str, ...], shape: str) -> list[str]:
    return [f"{a} = tl.full({shape}, {z}, {t})" for a, z, t in zip(accs, identity(frame), state_types(frame), strict=True)]


def _moments(frame: Frame, values: list[str], inside: str, own: tuple[str, ...], count: str) -> list[str]:
    """n, mean and M2 of the lanes: ``M2 = sum M2_i + n_i (mean_i - mean)²``.

    Args:
        count: the number of lanes inside, where it is the same of every tile.
    """
    body = frame.task.body
    n, mean, spread = own
    kind = TRITON_TYPES[compute(body[1].dtype)]
    delta = frame.namer.take("delta")
    ones, flat = body[0] == number(1, body[0].dtype), _is_zero(body[2])
    wide = f"tl.broadcast_to({values[1]}, (ROWS, COLS))"
    weight = f"tl.broadcast_to({values[0]}, (ROWS, COLS))"
    if ones and count:
        own_lanes = f"tl.where({inside}, {wide}, 0.0)" if inside else wide  # lanes past the end hold anything
        lines = [f"{n} = tl.full((ROWS,), {count}, {kind})", f"{mean} = tl.sum({own_lanes}, axis=1) / {n}"]
        moved = f"{values[1]} - {mean}[:, None]"
        lines += [f"{delta} = " + (f"tl.where({inside}, {moved}, 0.0)" if inside else moved)]
        squares = f"{delta} * {delta}"
    else:
        held = frame.namer.take("weight")
        lines = [f"{held} = " + (f"tl.where({inside}, {weight}, 0.0)" if inside else weight)]
        lines += [f"{n} = tl.sum({held}, axis=1)"]
        share = f"{held} * {wide}"
        share = f"tl.where({inside}, {share}, 0.0)" if inside else share  # lanes past the end hold anything
        lines += [f"{mean} = tl.sum({share}, axis=1) / tl.where({n} == 0, 1.0, {n})"]
        lines += [
            f"{delta} = " + (f"tl.where({inside}, {wide} - {mean}[:, None], 0.0)" if inside else f"{wide} - {mean}[:, None]")
        ]
        squares = f"{held} * {delta} * {delta}"
    if not flat:
        inner = f"tl.broadcast_to({values[2]}, (ROWS, COLS))"
        squares = f"{squares} + " + (f"tl.where({inside}, {inner}, 0.0)" if inside else inner)
    return [*lines, f"{spread} = tl.sum({squares}, axis=1)"]


def _weights(frame: Frame, weights: Exponential, values: list[str], inside: str, own: tuple[str, ...]) -> list[str]:
    """Centre and sum of ``exp(rate * (x - centre))``; equal values weigh 1, infinite ones too; a NaN is one of the row."""
    top, total = own
    held = frame.namer.take("lanes")
    wide = f"tl.broadcast_to({values[0]}, (ROWS, COLS))"
    away = f"{held} - {top}[:, None]" if weights.rate == 1 else f"({held} - {top}[:, None]) * {weights.rate!r}"
    shares = f"tl.where({held} == {top}[:, None], 1.0, tl.exp({away}))"
    hidden = literal(weights.hidden("f32").value, "f32")
    return [
        f"{held} = " + (f"tl.where({inside}, {wide}, {hidden})" if inside else wide),
        f"{top} = tl.{weights.fn}({held}, axis=1)",
        f"{total} = tl.sum(" + (f"tl.where({inside}, {shares}, 0.0)" if inside else shares) + ", axis=1)",
        f"{top} = tl.where({total} == {total}, {top}, {total})",
    ]


def _is_zero(e: object) -> bool:
    return isinstance(e, Const) and e.value == 0


def _merge(frame: Frame, accs: tuple[str, ...], values: list[str]) -> str:
    """The line that merges states into those before them."""
    task = frame.task
    if only_sums(task.monoid):
        return "; ".join(f"{a} += {v}" for a, v in zip(accs, values, strict=True))
    assert task.monoid is not None
    dtypes = tuple(e.dtype for e in task.body)
    source = combine_source(MONOIDS[task.monoid].combiner(dtypes), dtypes, frame.helpers)
    if source not in frame.functions:
        frame.functions.append(source)
    return f"{', '.join(accs)} = combine({', '.join((*accs, *values))})"


def fold_line(frame: Frame, accs: tuple[str, ...]) -> str:
    """The line that folds the lanes of each row by the monoid's ``combine``."""
    task = frame.task
    assert task.monoid is not None
    dtypes = tuple(e.dtype for e in task.body)
    if only_sums(task.monoid) and all(compute(d) in ("f32", "f64", "i32", "i64") for d in dtypes):
        return "; ".join(f"{a} = tl.sum({a}, axis=1)" for a in accs)
    source = combine_source(MONOIDS[task.monoid].combiner(dtypes), dtypes, frame.helpers)
    if source not in frame.functions:  # tl.sum would widen small integers, which would not wrap around
        frame.functions.append(source)
    states = accs[0] if len(accs) == 1 else f"({', '.join(accs)})"
    return f"{', '.join(accs)} = tl.reduce({states}, 1, combine)"


def state_types(frame: Frame) -> list[str]:
    """Types of the state's fields."""
    return [TRITON_TYPES[compute(e.dtype)] for e in frame.task.body]


def identity(frame: Frame) -> list[str]:
    """The monoid's zero as literals."""
    assert frame.task.monoid is not None
    zero = MONOIDS[frame.task.monoid].zero(tuple(e.dtype for e in frame.task.body))
    return [literal(z.value, z.dtype) for z in zero]
