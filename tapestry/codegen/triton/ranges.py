"""Which tiles of a reduced axis a tile of rows visits: where an affine mask leaves nothing, no tile is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from tapestry.codegen.triton.axes import Axis
from tapestry.codegen.triton.scope import Frame
from tapestry.ir.expr import Call, Const, Expr, Index
from tapestry.ir.index import Aff, dims_of
from tapestry.ir.monoid import lowest


def key_range(frame: Frame, rows: Axis, key: Axis, tile: str) -> tuple[list[str], str]:
    """Lines that find the first and last key that any row of the tile may see, and the bounds of the loop over keys.

    Taken from guards ``where(c, score, -inf)`` in which c is an inequality of one row dimension and the key: causal masks
    and sliding windows. The lower end is rounded down to a whole tile.
    """
    names = [d.name for d in rows.dims]
    if len(names) > 1 or len(key.dims) != 1:
        return [], f"0, {key.size}"
    row = names[0] if names else ""
    highs, lows = list[str](), list[str]()
    for e in _guards(frame.task.body[0]):  # e >= 0 wherever the score is not minus infinity
        a, b = e.coef(row) if row else 0, e.coef(key.dims[0].name)
        if dims_of(e) - {row, key.dims[0].name} or not e.is_affine or b == 0:
            continue
        best = f"tl.minimum(pid_row * {tile} + {tile} - 1, {rows.size - 1})" if a > 0 else f"pid_row * {tile}"
        reach = _sum("" if a == 0 else best if a == 1 else f"{best} * {a}", e.const)
        # // truncates: for a negative reach that is one key more than needed, never one less
        if b < 0:
            highs.append(f"{_over(reach, -b)} + 1")  # key <= reach / -b
        else:
            lows.append(f"-{_over(reach, b)}")  # key >= -reach / b
    return _bounds(frame, highs, lows, key) if highs or lows else ([], f"0, {key.size}")


def _sum(text: str, offset: int) -> str:
    if not text or not offset:
        return text or str(offset)
    return f"{text} {'-' if offset < 0 else '+'} {abs(offset)}"


def _over(text: str, divisor: int) -> str:
    return f"({text})" if divisor == 1 else f"(({text}) // {divisor})"


def _bounds(frame: Frame, highs: list[str], lows: list[str], key: Axis) -> tuple[list[str], str]:
    lines: list[str] = []
    first, end = "0", str(key.size)
    if lows:
        first = frame.namer.take(f"{key.name}_first")
        lines.append(f"{first} = tl.maximum({lows[0]}, 0)")
        lines += [f"{first} = tl.maximum({first}, {v})" for v in lows[1:]]
        lines.append(f"{first} = {first} // {key.tile} * {key.tile}")
    if highs:
        end = frame.namer.take(f"{key.name}_end")
        lines.append(f"{end} = tl.minimum({highs[0]}, {key.size})")
        lines += [f"{end} = tl.minimum({end}, {v})" for v in highs[1:]]
    return lines, f"{first}, {end}"


def _guards(e: Expr) -> Iterator[Aff]:
    """Affine expressions that are not negative wherever an expression is not minus infinity."""
    if not isinstance(e, Call):
        return
    if e.fn == "where" and e.args[2] == lowest(e.dtype):
        yield from _conditions(e.args[0])
        yield from _guards(e.args[1])


def _conditions(test: Expr) -> Iterator[Aff]:
    if not isinstance(test, Call):
        return
    if test.fn == "and":
        for a in test.args:
            yield from _conditions(a)
        return
    if test.fn not in ("ge", "le", "gt", "lt"):
        return
    a, b = _affine(test.args[0]), _affine(test.args[1])
    if a is None or b is None:
        return
    yield {"ge": a - b, "le": b - a, "gt": a - b - 1, "lt": b - a - 1}[test.fn]


def _affine(e: Expr) -> Aff | None:
    if isinstance(e, Index):
        return e.aff
    return Aff((), int(e.value)) if isinstance(e, Const) and e.dtype in ("i64", "i32") else None
