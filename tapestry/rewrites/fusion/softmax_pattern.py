"""Softmax weights inside a sum: which factor of its terms is ``exp(score - maximum)``, and what rows without one give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tapestry.ir.expr import Acc, Call, Const, Expr, call, cast, number, rewrite, walk
from tapestry.ir.monoid import MONOIDS, lowest
from tapestry.ir.recognition.exponential import Exponential, exponential
from tapestry.ir.types import FLOATS
from tapestry.rewrites.core.constants import constant
from tapestry.rewrites.core.edit import with_part, without_casts


@dataclass(frozen=True, slots=True)
class Weight:
    """``exp(score - maximum) / total * values / divisors``.

    Attributes:
        weight: the factors that are the softmax's, as written, guards included, over the state (maximum, sum of weights).
        divided: whether the weights are divided by their sum at all.
    """

    weight: Expr
    score: Expr
    divided: bool
    values: tuple[Expr, ...]
    divisors: tuple[Expr, ...]


def as_weight(term: Expr) -> Weight | None:
    """The terms of a sum, written over the state of a softmax (``Acc``), as weighted values; ``None`` if they are not."""
    over, under = _factors(term)
    mine = [e for e in over if _holds_state(e)]
    below = [e for e in under if _holds_state(e)]
    if len(mine) != 1 or len(below) > 1:
        return None
    weight: Expr = mine[0] / below[0] if below else mine[0]
    core, bottom = _unguarded(weight)
    if not isinstance(core, Call) or core.fn != "exp" or (bottom is not None and not is_state(bottom, 1)):
        return None
    found = _less_maximum(core.args[0])
    if found is None or _holds_state(found[0]) or (found[1] and bottom is not None):
        return None
    values = tuple(e for e in over if not _holds_state(e))
    divisors = tuple(e for e in under if not _holds_state(e))
    return Weight(weight, found[0], found[1] or bottom is not None, values, divisors)


def _holds_state(e: Expr) -> bool:
    return any(isinstance(x, Acc) for x in walk(e))


def _less_maximum(e: Expr) -> tuple[Expr, bool] | None:
    """(the score, whether the logarithm of the sum of weights is subtracted too) of a score less its maximum."""
    if not isinstance(e, Call) or e.fn != "sub":
        return None
    left, right = e.args
    if is_state(right, 0):
        return left, False
    if _is_log_total(right) and isinstance(left, Call) and left.fn == "sub" and is_state(left.args[1], 0):
        return left.args[0], True
    if isinstance(right, Call) and right.fn == "add":
        pair = right.args
        if any(is_state(m, 0) and _is_log_total(s) for m, s in (pair, pair[::-1])):
            return left, True
    return None


def _is_log_total(e: Expr) -> bool:
    return isinstance(e, Call) and e.fn == "log" and is_state(e.args[0], 1)


def _factors(e: Expr) -> tuple[list[Expr], list[Expr]]:
    """Numerators and denominators of a product; only what holds the weights is taken apart."""
    if _holds_state(e):
        e = without_casts(e, FLOATS)  # a narrower type in between would only lose digits
        if isinstance(e, Call) and e.fn in ("mul", "div"):
            (a, b), (c, d) = _factors(e.args[0]), _factors(e.args[1])
            return (a + c, b + d) if e.fn == "mul" else (a + d, b + c)
    return [e], []


def _unguarded(e: Expr) -> tuple[Expr, Expr | None]:
    """(exponential, divisor) of a weight; a guard against NaN around the whole and casts between floats are taken off."""
    e = without_casts(e, FLOATS)
    if isinstance(e, Call) and e.fn == "where":
        test, zero, kept = e.args
        if test == call("isnan", kept) and isinstance(zero, Const) and zero.value == 0:
            e = without_casts(kept, FLOATS)
    if isinstance(e, Call) and e.fn == "div":
        return e.args[0], e.args[1]
    return e, None


def is_state(e: Expr, field: int) -> bool:
    """Whether an expression over a softmax's state is one of its fields, but where the maximum (field 0) is not finite."""
    while isinstance(e, Call) and e.fn == "where" and _never_finite(e.args[0]):
        e = e.args[2]
    return isinstance(e, Acc) and e.field == field


def _never_finite(test: Expr) -> bool:
    """Whether a test holds for no finite maximum: it is infinite, or less itself it is not a number."""
    if not isinstance(test, Call):
        return False
    inner, m = test.args[0], Acc(0, test.args[0].dtype)
    if test.fn == "isnan":
        return inner in (m, m - m)
    if test.fn == "eq":
        return inner == m and isinstance(test.args[1], Const) and math.isinf(float(test.args[1].value))
    return test.fn == "isinf" and inner == m


def guarded(w: Weight) -> bool:
    """Whether a guard makes weights 0 that are no numbers: what is left of values that are not finite is then 0 times them."""
    return _row_value(w, math.nan) == 0


def centres(w: Weight, last: int = 1, zeros: Expr | None = None) -> Callable[[Expr], Expr] | None:
    """What rows whose maximum is infinite or NaN give instead of a result; ``None`` when it is no constant.

    The weight is evaluated as it was written. A weight of zero makes the row 0 times its values, whose sum is field ``last``
    of the state where that is above 1; a NaN makes it NaN. Where the state has no sum of the values (for it is NaN in rows
    of NaN), ``zeros`` is 0 times them.
    """
    least, most, none = (_row_value(w, top) for top in (-math.inf, math.inf, math.nan))
    if least is None or most is None or none is None or not _equal_numbers(most, none):
        return None

    def value(of: float, dtype: str) -> Expr:
        # inf - inf rather than a literal: a NaN in the text of a graph is not equal to itself
        return Acc(0, dtype) - Acc(0, dtype) if math.isnan(of) else number(of, dtype)

    def special(out: Expr) -> Expr:
        top = Acc(0, out.dtype)
        out = call("where", call("isnan", top - top), zeros or value(none, out.dtype), out)
        if _equal_numbers(least, none):
            return out
        # weights of 0 times values: 0, but NaN where a value is not finite
        row = Acc(last, out.dtype) * 0 if least == 0 and last > 1 else value(least, out.dtype)
        return call("where", call("eq", top, lowest(top.dtype)), row, out)

    return special


WEIGHTS = Exponential("max", 1.0, 1)
"""Sums of ``exp(score - maximum)``, by structure: those of the built-in log-sum-exp."""


def weighted_sums(count: int) -> str:
    """Name of the monoid of so many sums with softmax weights."""
    return next(name for name in MONOIDS if exponential(name) == replace(WEIGHTS, sums=count))


def _equal_numbers(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _row_value(w: Weight, top: float) -> float | None:
    """0 or NaN: the weights of a row with this maximum, one and all; ``None`` when they are something else."""
    out = 0.0
    for score in [top] if top == -math.inf else [top, 0.0, -math.inf]:
        e = with_part(w.weight, w.score, Const(score, w.score.dtype))
        got = constant(rewrite(e, lambda x: Const(1.0 if x.field else top, x.dtype) if isinstance(x, Acc) else x))
        if got is None or (got != 0 and not math.isnan(got)):
            return None
        out += got
    return out


def product_of(over: tuple[Expr, ...], under: tuple[Expr, ...], dtype: str) -> Expr:
    """The product of some factors, divided by others, in one type."""
    out: Expr = number(1, dtype) if not over else cast(over[0], dtype)
    for e in over[1:]:
        out *= cast(e, dtype)
    for e in under:
        out /= cast(e, dtype)
    return out
