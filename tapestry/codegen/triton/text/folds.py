"""How the lanes of a tile become one state per row.

A state that refers to a centre (``max ⋉ sum``, ``mean ⋉ squares``) is folded centre first: the centre of all lanes by one
reduction, then every lane moved to it by the action and summed. That is what the monoid's law says of any tree of merges, with
one action per lane instead of one per merge; the identity is proved where the monoid is made (`ir.monoid`), and of
moments it is the parallel axis theorem. Other monoids are folded by their ``combine``.
"""

from __future__ import annotations

import math

from tapestry.codegen.blocks.forms import centred
from tapestry.codegen.blocks.operands import compute
from tapestry.codegen.triton.task.primitives import TRITON_TYPES, literal
from tapestry.codegen.triton.text.axes import Axis
from tapestry.codegen.triton.text.expressions import combine_source
from tapestry.codegen.triton.text.scope import Frame, Scope
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Let, number, walk
from tapestry.ir.monoid import MONOIDS, Monoid
from tapestry.ir.recognition.contraction import only_sums
from tapestry.ir.recognition.exponential import Exponential, exponential


def reduction(frame: Frame, tile: Scope, cols: Axis, accs: tuple[str, ...]) -> tuple[list[str], list[str], list[str]]:
    """Lines before the loop over tiles, lines that merge one tile (after the scope's own), and lines after the loop."""
    values = tile.values(frame.task.body)
    inside = tile.view.laid(cols, cols.inside()) if cols.ragged else ""
    if (first := centred(frame.task)) is not None:
        start, lines = _centred(frame, first, values, inside, cols, accs, once=cols.tiles == 1)
        return start, lines, []
    values = [_only(inside, v, z) for v, z in zip(values, identity(frame), strict=True)]
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
    frame: Frame, first: Monoid, values: list[str], inside: str, cols: Axis, accs: tuple[str, ...], *, once: bool
) -> tuple[list[str], list[str]]:
    """The state of a tile, centre first, and sums beside it; merged row by row where there are several tiles."""
    namer, n = frame.namer, len(first.fields)
    own = accs if once else tuple(namer.take(f"{a}_tile") for a in accs)
    count = "COLS" if not inside else str(cols.size) if cols.tiles == 1 else ""
    if (weights := exponential(first.name, sums=1)) is not None:
        lines = _weights(frame, weights, values[:n], inside, own[:n])
    else:
        lines = _moments(frame, values[:n], inside, own[:n], count)
    spread = [_only(inside, f"tl.broadcast_to({v}, (ROWS, COLS))") for v in values[n:]]
    lines += [f"{a} = tl.sum({v}, axis=1)" for a, v in zip(own[n:], spread, strict=True)]
    if once:
        return [], lines
    return _zeros(frame, accs, "(ROWS,)"), [*lines, _merge(frame, accs, list(own))]


def tile_reduction(frame: Frame, tile: Scope, cols: Axis, accs: tuple[str, ...], *, once: bool) -> tuple[list[str], list[str]]:
    """Lines before the loop over tiles, and lines that fold the lanes of a tile's rows and merge them into the rows' states.

    Unlike `reduction` no lane has a state of its own: beside a product's accumulator there is no room for them.
    """
    values = tile.printer.all(frame.task.body)
    inside = tile.view.laid(cols, cols.inside()) if cols.ragged else ""
    if (first := centred(frame.task)) is not None:
        return _centred(frame, first, values, inside, cols, accs, once=once)
    own = accs if once else tuple(frame.namer.take(f"{a}_tile") for a in accs)
    kept = [_only(inside, v, z) for v, z in zip(values, identity(frame), strict=True)]
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
    ones = body[0] == number(1, body[0].dtype)
    weight, wide, inner = (f"tl.broadcast_to({v}, (ROWS, COLS))" for v in values)
    if ones and count:
        lines = [f"{n} = tl.full((ROWS,), {count}, {kind})", f"{mean} = tl.sum({_only(inside, wide)}, axis=1) / {n}"]
        lines.append(f"{delta} = {_only(inside, f'{values[1]} - {mean}[:, None]')}")
        squares = f"{delta} * {delta}"
    else:
        held = frame.namer.take("weight")
        lines = [f"{held} = {_only(inside, weight)}", f"{n} = tl.sum({held}, axis=1)"]
        share = _only(inside, f"{held} * {wide}")
        lines.append(f"{mean} = tl.sum({share}, axis=1) / tl.where({n} == 0, 1.0, {n})")
        lines.append(f"{delta} = {_only(inside, f'{wide} - {mean}[:, None]')}")
        squares = f"{held} * {delta} * {delta}"
    if not (isinstance(body[2], Const) and body[2].value == 0):
        squares = f"{squares} + {_only(inside, inner)}"
    return [*lines, f"{spread} = tl.sum({squares}, axis=1)"]


def _weights(frame: Frame, weights: Exponential, values: list[str], inside: str, own: tuple[str, ...]) -> list[str]:
    """Centre and sum of ``exp(rate * (x - centre))``; equal values weigh 1, infinite ones too; a NaN is one of the row."""
    top, total = own
    held = frame.namer.take("lanes")
    wide = f"tl.broadcast_to({values[0]}, (ROWS, COLS))"
    away = f"({held} - {top}[:, None]) * {weights.rate * math.log2(math.e)!r}"
    shares = f"tl.where({held} == {top}[:, None], 1.0, tl.exp2({away}))"  # exp keeps what is below 1e-38: three instructions
    hidden = literal(weights.hidden("f32").value, "f32")
    return [
        f"{held} = {_only(inside, wide, hidden)}",
        f"{top} = tl.{weights.fn}({held}, axis=1)",
        f"{total} = tl.sum({_only(inside, shares)}, axis=1)",
        f"{top} = tl.where({total} == {total}, {top}, {total})",
    ]


def by_share(e: Expr, share: int) -> Expr:
    """``x / total`` as x times what one weight of the row is worth, state ``share``: a division per row, not per element.

    A total is at least 1, the weight of the maximum; else it is 0 or NaN, and both ways the result is NaN.
    """
    if not isinstance(e, Call):
        return e
    args = tuple(by_share(a, share) for a in e.args)
    if e.fn == "div" and e.dtype == "f32" and args[1] == Acc(1, "f32"):
        return Call(fn="mul", args=(args[0], Acc(share, "f32")), dtype="f32")
    return Call(fn=e.fn, args=args, dtype=e.dtype)


def _only(inside: str, text: str, other: str = "0.0") -> str:
    """A value in the lanes inside, all of them for ``""``; the others, past the end, hold anything."""
    return f"tl.where({inside}, {text}, {other})" if inside else text


def _merge(frame: Frame, accs: tuple[str, ...], values: list[str]) -> str:
    """The line that merges states into those before them."""
    task = frame.task
    if only_sums(task.monoid):
        return "; ".join(f"{a} += {v}" for a, v in zip(accs, values, strict=True))
    _define_combine(frame)
    return f"{', '.join(accs)} = combine({', '.join((*accs, *values))})"


def _define_combine(frame: Frame) -> None:
    """The monoid's ``combine`` among the kernel's functions."""
    assert frame.task.monoid is not None
    dtypes = tuple(e.dtype for e in frame.task.body)
    source = combine_source(MONOIDS[frame.task.monoid].combiner(dtypes), dtypes, frame.helpers)
    if source not in frame.functions:
        frame.functions.append(source)


def fold_line(frame: Frame, accs: tuple[str, ...]) -> str:
    """The line that folds the lanes of each row by the monoid's ``combine``."""
    task = frame.task
    if only_sums(task.monoid) and all(compute(e.dtype) in ("f32", "f64", "i32", "i64") for e in task.body):
        return "; ".join(f"{a} = tl.sum({a}, axis=1)" for a in accs)
    _define_combine(frame)  # tl.sum would widen small integers, which would not wrap around
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
