"""What ``--shape`` asks for: sizes of symbols, and ranges and lists of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tapestry.errors import TapestryError
from tapestry.ir.sizes.size_formula import Region, Sizes
from tapestry.lift import onnx_to_graph as lift
from tapestry.lift.file.structure import TEXT
from tapestry.lift.sizes.equal_sizes import Sum, follow, given_sizes

MOST_LISTED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Symbols with more than one size, the sizes of all of them, and what is fixed."""

    symbols: tuple[str, ...]
    region: Region
    fixed: Mapping[str, Any]


def asked(model: Path, shapes: Mapping[str, Any]) -> Asked | None:
    """The ranges among the sizes that are asked for; ``None`` where there is none.

    Raises:
        TapestryError: a range is none, or is of no symbol of the model.
    """
    found = {name: value for name, value in shapes.items() if _several(value)}
    if not found or model.suffix == TEXT:
        return None
    proto = lift.read_model(model, False).model
    inputs = lift.input_dims(proto, set())
    found = {name: value for name, value in found.items() if name not in inputs}
    if not found:
        return None
    symbols = {s for dims in inputs.values() for s in dims if isinstance(s, str)}
    unknown = next((s for s in found if s not in symbols), None)
    if unknown is not None:
        what = f"'{unknown}' is no symbol of the model"
        why = f"its symbols are {', '.join(sorted(symbols))}" if symbols else f"it has none; its inputs are {', '.join(inputs)}"
        raise TapestryError(what, where="--shape", why=why)
    some, fixed = {s: _sizes(s, value) for s, value in found.items()}, {s: v for s, v in shapes.items() if s not in found}
    known, rules = given_sizes(proto, inputs, fixed)
    for s in reversed(found):
        others = {t: sizes for t, sizes in some.items() if t != s}
        if _follows(s, some[s], others, known, rules):
            some = others
    low, high = tuple(s[0] for s in some.values()), tuple(s[-1] for s in some.values())
    among = {k: tuple(s) for k, s in enumerate(some.values()) if not isinstance(s, range)}
    return Asked(symbols=tuple(some), region=Region(low, high, among), fixed=fixed)


def _follows(
    symbol: str, sizes: Sequence[int], others: Mapping[str, Sequence[int]], known: Mapping[str, int], rules: Sequence[Sum]
) -> bool:
    """Whether a symbol has no sizes of its own, but those that follow from others.

    Raises:
        TapestryError: those that are asked for are not the ones that follow.
    """
    ends = [{**known, **{s: some[k] for s, some in others.items()}} for k in (0, -1)]
    what = [follow(rules, end).get(symbol) for end in ends][-1]
    if what is None:
        return False
    low, high = sorted(end[symbol] for end in ends)
    if list(sizes) != list(others.get(str(what), range(low, high + 1))):
        why = f"{symbol} has to be {what} (because of {what.why}), which is {low}..{high}"
        raise TapestryError("--shape contradicts the model", where=symbol, why=why, hint=f"leave {symbol} out of --shape")
    return True


def _several(value: Any) -> bool:
    if isinstance(value, str):
        return ".." in value or "," in value
    return isinstance(value, range) or (isinstance(value, Sequence) and len(cast("Sequence[object]", value)) > 1)


def _sizes(symbol: str, value: Any) -> Sequence[int]:
    """All sizes of a symbol: a range, or a list in order.

    Raises:
        TapestryError: they are none.
    """
    try:
        if isinstance(value, range):
            some: Sequence[int] = value
        elif isinstance(value, str) and ".." in value:
            low, high = map(int, value.split(".."))
            some = range(low, high + 1)
        else:
            given = cast("str | Sequence[Any]", value)
            some = sorted({int(v) for v in (given.split(",") if isinstance(given, str) else given)})
    except ValueError:
        some = []
    step = some.step if isinstance(some, range) else 1
    if not some or some[0] < 1 or step != 1 or (not isinstance(some, range) and len(some) > MOST_LISTED):
        what = f"'{value}' is no range of sizes"
        raise TapestryError(what, where=f"--shape {symbol}", hint=f"{symbol}=1..64, or {symbol}=128,256,512")
    return some


def middle(region: Region, parts: int) -> Sizes:
    """Sizes for which the plan of a region is made: the geometric mean of each symbol's, even parts where there is room.

    Not 1, where there are others: an axis of 1 is broadcast.
    """
    out: list[int] = []
    for k in range(len(region.low)):
        some = region.along(k)
        mean = min(max(2, round(math.sqrt(some[0] * some[-1]))), some[-1])
        even = -(-mean // parts) * parts
        near = even if even <= some[-1] else mean
        out.append(near if k not in region.among else min(some, key=lambda n: abs(math.log(n / mean))))
    return tuple(out)
