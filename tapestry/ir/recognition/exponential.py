"""Sums with exponential weights: which monoids they are, by their structure.

Their states are (centre, sums), where the centre is a maximum or a minimum and every sum refers to it: moved from ``old``
to ``new`` it is multiplied by ``exp(rate * (old - new))``, which is at most 1. ``max`` with rate 1 is log-sum-exp and, with
a sum of values besides, attention; a rate of log 2 weighs by powers of 2, a minimum with a negative rate is a soft minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tapestry.ir.expr import Arg, Call, Const, Expr
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Monoid, Product, Rebased, highest, lowest


@dataclass(frozen=True, slots=True)
class Exponential:
    """A sum, or several side by side, of what is weighted by ``exp(rate * (score - centre))``.

    Attributes:
        fn: the primitive that merges centres, ``max`` or ``min``.
        rate: positive for ``max``, negative for ``min``.
        sums: how many sums there are; the first of two is that of the weights.
    """

    fn: str
    rate: float
    sums: int

    def hidden(self, dtype: str) -> Const:
        """The score that has no weight: the identity of the centre."""
        return lowest(dtype) if self.fn == "max" else highest(dtype)


def exponential(monoid: str | None, sums: int = 0) -> Exponential | None:
    """The exponential weights of a monoid, of so many sums if that is asked for; ``None`` for another monoid."""
    weights = _exponential(MONOIDS[monoid]) if monoid and monoid in MONOIDS else None
    return weights if weights and sums in (0, weights.sums) else None


@lru_cache(maxsize=1 << 8)
def _exponential(monoid: Monoid) -> Exponential | None:
    s = monoid.structure
    if not isinstance(s, Rebased) or not isinstance(s.centre.structure, ByPrimitive):
        return None
    parts = s.acted.structure.parts if isinstance(s.acted.structure, Product) else (s.acted,)
    if any(p.structure != ByPrimitive("add") for p in parts):
        return None
    old, new, *sums = (Arg(k, "f64") for k in range(2 + len(parts)))
    rates = {_rate(e, x) for e, x in zip(s.act((old,), (new,), tuple(sums)), sums, strict=True)}
    rate = rates.pop() if len(rates) == 1 else None
    fn = s.centre.structure.fn
    fits = rate is not None and ((fn == "max" and rate > 0) or (fn == "min" and rate < 0))
    return Exponential(fn, rate, len(parts)) if rate is not None and fits else None


def _rate(e: Expr, x: Arg) -> float | None:
    """The rate of ``x * exp(rate * (old - new))``, perhaps only where ``old`` and ``new`` differ, and x else."""
    if isinstance(e, Call) and e.fn == "where" and e.args[1] == x:
        test = e.args[0]
        same = isinstance(test, Call) and test.fn == "eq" and {a.pos for a in test.args if isinstance(a, Arg)} == {0, 1}
        return _rate(e.args[2], x) if same else None
    if not isinstance(e, Call) or e.fn != "mul" or x not in e.args:
        return None
    weight = e.args[1] if e.args[0] == x else e.args[0]
    linear = _linear(weight.args[0]) if isinstance(weight, Call) and weight.fn == "exp" else None
    return linear[0] if linear and linear[0] == -linear[1] else None


def _linear(e: Expr) -> tuple[float, float] | None:
    """(a, b) of ``a * old + b * new``."""
    if isinstance(e, Arg):
        return (1.0, 0.0) if e.pos == 0 else (0.0, 1.0) if e.pos == 1 else None
    if not isinstance(e, Call) or e.fn not in ("add", "sub", "neg", "mul", "div"):
        return None
    if e.fn in ("mul", "div"):
        inner, factor = e.args if isinstance(e.args[1], Const) or e.fn == "div" else e.args[::-1]
        found = _linear(inner)
        if found is None or not isinstance(factor, Const):
            return None
        by = float(factor.value) if e.fn == "mul" else 1.0 / float(factor.value)
        return found[0] * by, found[1] * by
    parts = [_linear(a) for a in e.args]
    first, second = parts[0], parts[-1]
    if first is None or second is None:
        return None
    if e.fn == "neg":
        return -first[0], -first[1]
    sign = 1.0 if e.fn == "add" else -1.0
    return first[0] + sign * second[0], first[1] + sign * second[1]


INT8 = frozenset({"i8", "u8"})
