"""Unary functions that torch has as one operator, recognised in an expression by structure, and what an epilogue adds first."""

from __future__ import annotations

import math
from collections.abc import Callable

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, walk

CLOSE = 1e-6  # constants of an exported formula are rounded to f32


def native(e: Expr) -> tuple[str, Expr] | None:
    """(name, argument) of a function of one argument that is one torch operator; the argument may be any expression."""
    if not isinstance(e, Call) or e.fn != "mul" or e.dtype != "f32":
        return None
    scale, factors = _factored(e)
    for k, f in enumerate(factors):
        rest = factors[:k] + factors[k + 1 :]
        if len(rest) != 1 or not isinstance(f, Call):
            continue
        x = rest[0]
        if f.fn == "sigmoid" and f.args[0] == x and scale == 1:
            return "silu", x
        if f.fn == "add" and _near(scale, 0.5):
            one, curve = f.args if isinstance(f.args[0], Const) else f.args[::-1]
            name = _curve(curve, x) if isinstance(one, Const) and one.value == 1 else None
            if name:
                return name, x
    return None


def _curve(e: Expr, x: Expr) -> str | None:
    """Which GELU has this curve: ``erf(x / sqrt 2)``, or ``tanh(sqrt(2 / pi) (x + 0.044715 x^3))`` (Hendrycks, Gimpel 2016)."""
    if not isinstance(e, Call) or e.fn not in ("erf", "tanh"):
        return None
    scale, factors = _factored(e.args[0])
    if e.fn == "erf":
        return "gelu" if factors == [x] and _near(scale, math.sqrt(0.5)) else None
    if len(factors) != 1 or not _near(scale, math.sqrt(2 / math.pi)):
        return None
    inner = factors[0]
    if not isinstance(inner, Call) or inner.fn != "add" or x not in inner.args:
        return None
    other = inner.args[1] if inner.args[0] == x else inner.args[0]
    cubic, power = _factored(other)
    return "gelu_tanh" if power == [x, x, x] and _near(cubic, 0.044715) else None


def _factored(e: Expr) -> tuple[float, list[Expr]]:
    """An expression as a number times factors."""
    if isinstance(e, Const):
        return float(e.value), []
    if isinstance(e, Call) and e.fn == "mul":
        (a, x), (b, y) = _factored(e.args[0]), _factored(e.args[1])
        return a * b, x + y
    if isinstance(e, Call) and e.fn == "div" and isinstance(e.args[1], Const) and e.args[1].value:
        a, x = _factored(e.args[0])
        return a / float(e.args[1].value), x
    if isinstance(e, Call) and e.fn == "pow" and isinstance(e.args[1], Const) and e.args[1].value in (2, 3):
        a, x = _factored(e.args[0])
        return a ** int(e.args[1].value), x * int(e.args[1].value)
    return 1.0, [e]


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * abs(b)


def added_first(then: tuple[Expr, ...], may_add: Callable[[int], bool], field: int = 0) -> tuple[int, tuple[Expr, ...]] | None:
    """(the read that every use of a state's field adds first, the expressions without it); ``None`` when there is none.

    A bias, then: the operation that makes the state may add it on its way.
    """

    def state(x: Expr) -> bool:
        return isinstance(x, Acc) and x.field == field

    uses = [x for e in then for x in walk(e) if state(x)]
    sums = [x for e in then for x in walk(e) if isinstance(x, Call) and x.fn == "add" and any(map(state, x.args))]
    if not sums or len(sums) != len(uses) or len({*sums}) != 1:
        return None
    acc, arg = sums[0].args if state(sums[0].args[0]) else sums[0].args[::-1]
    if not isinstance(arg, Arg) or not may_add(arg.pos):
        return None

    def without(e: Expr) -> Expr:
        if e == sums[0]:
            return acc
        return Call(e.fn, tuple(without(a) for a in e.args), e.dtype) if isinstance(e, Call) else e

    return arg.pos, tuple(without(e) for e in then)
