"""Which tiles of a reduced axis a tile of rows visits, and which of them need a mask.

Taken from guards ``where(c, score, hidden)`` in which c is an inequality of a row dimension, the key and scalars: causal
masks and sliding windows. Where such a mask leaves nothing, no tile is loaded; where it leaves everything, it is not
computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tapestry.codegen.blocks.lowered import place_of
from tapestry.codegen.triton.text.axes import Axis, View
from tapestry.codegen.triton.text.scope import Frame
from tapestry.ir.expr import Call, Const, Expr
from tapestry.ir.index import Aff, dims_of
from tapestry.ir.recognition.attention_roles import Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRange:
    """The keys that a tile of rows visits.

    Attributes:
        lines: what the bounds need, to be written before the loops.
        first, end: bounds of the keys that any row may see; ``first`` is a multiple of the tile.
        clear: the end of the tiles in which every row sees every key (from ``first`` on); ``""`` where there are none.
        grows: whether later rows see more keys.
        masked: the most tiles between ``clear`` and ``end``.
    """

    lines: tuple[str, ...]
    first: str
    end: str
    clear: str
    grows: bool
    masked: int


def key_range(frame: Frame, attention: Attention, batch: Axis, rows: Axis, key: Axis, tile: str) -> KeyRange:
    """Bounds of the loops over keys, for rows ``[pid_row * tile, (pid_row + 1) * tile)`` at one batch point."""
    ragged = key.size % key.block
    lines: list[str] = []
    highs, lows, clears = list[str](), list[str](), list[str]()
    guards, whole = _guards(attention.score, attention.weights.hidden(attention.score.dtype))
    scalars, masked = View([(batch, "")], frame.task.ranges), 1
    for e in guards:  # e >= 0 wherever the score is not hidden
        found = _solved(e, rows, key, scalars, tile)
        if found is None:
            whole = False
            continue
        highest, lowest_, b = found
        masked = max(masked, _partly_seen(e, rows, key))
        # // truncates: for a negative reach that is one key more than needed, never one less
        if b < 0:
            highs.append(f"{_over(highest, -b)} + 1")  # key <= reach / -b
            clears.append(f"{_over(f'tl.maximum({lowest_}, {b})', -b)} + 1")
        else:
            lows.append(f"-{_over(highest, b)}")  # key >= -reach / b
            whole = False
    first, end, clear = "0", str(key.size), ""
    if lows:
        first = frame.namer.take(f"{key.name}_first")
        lines.append(f"{first} = tl.maximum({lows[0]}, 0)")
        lines += [f"{first} = tl.maximum({first}, {v})" for v in lows[1:]]
        lines.append(f"{first} = {first} // {key.tile} * {key.tile}")
    if highs:
        end = frame.namer.take(f"{key.name}_end")
        lines.append(f"{end} = tl.minimum({highs[0]}, {key.size})")
        lines += [f"{end} = tl.minimum({end}, {v})" for v in highs[1:]]
    if whole and (clears or ragged) and key.size >= 2 * key.block:
        clear = frame.namer.take(f"{key.name}_clear")
        lines.append(f"{clear} = {key.size // key.block * key.block}")
        lines += [f"{clear} = tl.minimum({clear}, ({v}) // {key.tile} * {key.tile})" for v in clears]
    grows = any("pid_row" in h for h in highs)
    return KeyRange(lines=tuple(lines), first=first, end=end, clear=clear, grows=grows, masked=masked)


def _partly_seen(e: Aff, rows: Axis, key: Axis) -> int:
    """The most tiles of keys that some row of a tile sees and another one does not, by ``e >= 0``."""
    b = abs(e.coef(key.dims[0].name))
    steps = [(abs(e.coef(d.name)), d.size) for d in rows.dims]
    reach = steps[0][0] * (rows.block - 1) if len(steps) == 1 else sum(a * (n - 1) for a, n in steps)
    if len(steps) == 1 and steps[0][0] == b == 1 and len(e.terms) == 2 and rows.block % key.block == 0:
        return -(-(rows.block + e.const - (e.const + 1) // key.block * key.block) // key.block)  # tiles begin alike
    return 1 + -(-(reach // b + 1) // key.block)


def _solved(e: Aff, rows: Axis, key: Axis, scalars: View, tile: str) -> tuple[str, str, int] | None:
    """Greatest and least value of ``e - b * key`` over the tile of rows, as source text, and b; ``None`` if not that simple."""
    b = e.coef(key.dims[0].name) if len(key.dims) == 1 else 0
    names = [d.name for d in rows.dims]
    own = {d.name for d in scalars.axes[0].dims}
    if b == 0 or not e.is_affine or dims_of(e) - {*names, key.dims[0].name} - own:
        return None
    rest = Aff(tuple((a, c) for a, c in e.terms if a in own), 0)
    high, low = "", ""
    for d in rows.dims:
        a = e.coef(d.name)
        if a == 0:
            continue
        if len(names) == 1:
            ends = f"tl.minimum(pid_row * {tile} + {tile} - 1, {rows.size - 1})", f"pid_row * {tile}"
        else:  # a tile may hold any of them
            ends = str(d.size - 1), "0"
        top, bottom = ends if a > 0 else ends[::-1]
        high, low = _plus(high, _times_text(top, a)), _plus(low, _times_text(bottom, a))
    if rest.terms:
        text = scalars.text(rest)
        high, low = _plus(high, text), _plus(low, text)
    return _plus(high, str(e.const)) or "0", _plus(low, str(e.const)) or "0", b


def _times_text(text: str, factor: int) -> str:
    return text if factor == 1 else f"{text} * {factor}"


def _plus(text: str, more: str) -> str:
    if not text or more == "0":
        return text or more
    return f"{text} - {more[1:]}" if more.startswith("-") and more[1:].isdigit() else f"{text} + {more}"


def _over(text: str, divisor: int) -> str:
    return f"({text})" if divisor == 1 else f"(({text}) // {divisor})"


def _guards(e: Expr, hidden: Const) -> tuple[list[Aff], bool]:
    """Affine expressions that are not negative wherever a score is not hidden; whether that is all."""
    found: list[Aff] = []
    whole = True
    while isinstance(e, Call) and e.fn == "where" and e.args[2] == hidden:
        for aff in _conditions(e.args[0]):
            if aff is None:
                whole = False
            else:
                found.append(aff)
        e = e.args[1]
    return found, whole


def unguarded(e: Expr, hidden: Const) -> Expr:
    """A score without its masks, for tiles in which every row sees every key."""
    while isinstance(e, Call) and e.fn == "where" and e.args[2] == hidden:
        e = e.args[1]
    return e


def _conditions(test: Expr) -> Iterator[Aff | None]:
    """The conjuncts of a test as ``aff >= 0``; ``None`` for one that is none."""
    if isinstance(test, Call) and test.fn == "and":
        for a in test.args:
            yield from _conditions(a)
        return
    if not isinstance(test, Call) or test.fn not in ("ge", "le", "gt", "lt"):
        yield None
        return
    a, b = place_of(test.args[0]), place_of(test.args[1])
    if a is None or b is None:
        yield None
        return
    yield {"ge": a - b, "le": b - a, "gt": a - b - 1, "lt": b - a - 1}[test.fn]
