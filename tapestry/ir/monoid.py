"""Monoids: the associative merges that make a dimension splittable without being a map dimension.

A monoid has a tuple of state fields, an identity (``zero``) and an associative ``combine``, written once as expressions
and evaluated by every target. Lifting a value into the state is the ``body`` of an operation, lowering the state to a
result is its ``then``. Associativity, identity and (where claimed) commutativity are property-tested for every entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tapestry.ir.expr import Arg, Const, Expr, call
from tapestry.ir.types import FLOATS

State = tuple[Expr, ...]
_INT_RANGE = {"i64": 63, "i32": 31, "i16": 15, "i8": 7, "u64": 64, "u32": 32, "u16": 16, "u8": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Monoid:
    """``zero(dtypes)`` gives the identity for given field dtypes; ``combine(a, b)`` merges two states, a before b."""

    name: str
    fields: tuple[str, ...]
    zero: Callable[[tuple[str, ...]], tuple[Const, ...]]
    combine: Callable[[State, State], State]
    commutative: bool = True

    def combiner(self, dtypes: tuple[str, ...]) -> State:
        """``combine`` as expressions over Arg 0..k-1 (left state) and Arg k..2k-1 (right state)."""
        k = len(dtypes)
        return self.combine(tuple(Arg(i, d) for i, d in enumerate(dtypes)), tuple(Arg(k + i, d) for i, d in enumerate(dtypes)))


def lowest(dtype: str) -> Const:
    """The least value of a dtype (minus infinity for floats)."""
    if dtype in FLOATS:
        return Const(float("-inf"), dtype)
    if dtype == "bool":
        return Const(False, dtype)
    return Const(0 if dtype.startswith("u") else -(1 << _INT_RANGE[dtype]), dtype)


def highest(dtype: str) -> Const:
    """The greatest value of a dtype (infinity for floats)."""
    if dtype in FLOATS:
        return Const(float("inf"), dtype)
    return Const(True, dtype) if dtype == "bool" else Const((1 << _INT_RANGE[dtype]) - 1, dtype)


def number(value: float, dtype: str) -> Const:
    """A literal with the Python type that fits the dtype."""
    return Const(float(value) if dtype in FLOATS else bool(value) if dtype == "bool" else int(value), dtype)


def _single(name: str, fn: str, zero: Callable[[str], Const]) -> Monoid:
    return Monoid(name=name, fields=("value",), zero=lambda d: (zero(d[0]),), combine=lambda a, b: (call(fn, a[0], b[0]),))


def _moments(a: State, b: State) -> State:
    """(n, mean, M2) merge of Chan, Golub and LeVeque (1979): ``(n, sum, sum of squares)`` cancels badly."""
    n = call("add", a[0], b[0])
    one, zero = number(1, n.dtype), number(0, n.dtype)
    safe = call("where", call("eq", n, zero), one, n)
    delta = call("sub", b[1], a[1])
    share = call("div", b[0], safe)
    mean = call("add", a[1], call("mul", delta, share))
    spread = call("mul", delta, call("mul", delta, call("mul", a[0], share)))  # delta² alone overflows, and inf * 0 is a NaN
    return n, mean, call("add", call("add", a[2], b[2]), spread)


def _logsumexp(a: State, b: State) -> State:
    """(m, s) for ``log(sum(exp(x))) = m + log(s)``; the guard keeps a wholly masked block from making a NaN."""
    m = call("max", a[0], b[0])

    def scaled(m_old: Expr, s_old: Expr) -> Expr:
        return call("where", call("eq", m_old, m), s_old, call("mul", s_old, call("exp", call("sub", m_old, m))))

    return m, call("add", scaled(a[0], a[1]), scaled(b[0], b[1]))


def _affine(a: State, b: State) -> State:
    """(a, b) for the map h -> a*h + b, the earlier one applied first: a scan of it is the recurrence h = a*h + b."""
    return call("mul", b[0], a[0]), call("add", call("mul", b[0], a[1]), b[1])


def _arg(better: str) -> Callable[[State, State], State]:
    def combine(a: State, b: State) -> State:
        nan_a, nan_b = (call("isnan", a[0]), call("isnan", b[0])) if a[0].dtype in FLOATS else (None, None)
        first = call("lt", b[1], a[1])
        take: Expr = call("or", call(better, b[0], a[0]), call("and", call("eq", a[0], b[0]), first))
        if nan_a is not None and nan_b is not None:  # a NaN wins, the first of several
            wins = call("and", nan_b, call("or", call("not", nan_a), first))
            take = call("or", wins, call("and", take, call("not", nan_a)))
        return call("where", take, b[0], a[0]), call("where", take, b[1], a[1])

    return combine


MONOIDS: dict[str, Monoid] = {
    m.name: m
    for m in (
        _single("sum", "add", lambda d: number(0, d)),
        _single("prod", "mul", lambda d: number(1, d)),
        _single("max", "max", lowest),
        _single("min", "min", highest),
        _single("any", "or", lambda d: number(0, d)),
        _single("all", "and", lambda d: number(1, d)),
        Monoid(name="moments", fields=("n", "mean", "m2"), zero=lambda d: tuple(number(0, x) for x in d), combine=_moments),
        Monoid(name="logsumexp", fields=("m", "s"), zero=lambda d: (lowest(d[0]), number(0, d[1])), combine=_logsumexp),
        Monoid(
            name="affine", fields=("a", "b"), combine=_affine, commutative=False,
            zero=lambda d: (number(1, d[0]), number(0, d[1])),
        ),
        Monoid(name="argmax", fields=("value", "index"), zero=lambda d: (lowest(d[0]), highest(d[1])), combine=_arg("gt")),
        Monoid(name="argmin", fields=("value", "index"), zero=lambda d: (highest(d[0]), highest(d[1])), combine=_arg("lt")),
    )
}  # fmt: skip


def register(monoid: Monoid) -> Monoid:
    """Add a monoid of your own; its laws are then tested like the built-in ones' (tests/test_monoid.py)."""
    assert monoid.name not in MONOIDS, monoid.name
    MONOIDS[monoid.name] = monoid
    return monoid
