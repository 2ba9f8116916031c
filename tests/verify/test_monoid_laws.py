"""A monoid of one's own is tried on states that its graph makes: what keeps the laws passes, and what breaks one is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tapestry.errors import LawError
from tapestry.ir.expr import Const, Expr, call
from tapestry.ir.monoid import MONOIDS, Monoid, number, register
from tapestry.ir.syntax.parser import parse
from tapestry.verify import monoid_laws

Merge = Callable[[Expr, Expr], Expr]

HOLD: dict[str, tuple[Merge, float]] = {
    "hypot": (lambda a, b: call("sqrt", call("add", call("mul", a, a), call("mul", b, b))), 0.0),
    "total": (lambda a, b: call("add", a, b), 0.0),
    "most": (lambda a, b: call("max", a, b), -math.inf),
    "velocity": (lambda a, b: call("div", call("add", a, b), call("add", number(1, a.dtype), call("mul", a, b))), 0.0),
}
BREAK: dict[str, tuple[Merge, float, str]] = {
    "difference": (lambda a, b: call("sub", a, b), 0.0, "1x = x|xy"),
    "mean": (lambda a, b: call("mul", call("add", a, b), number(0.5, a.dtype)), 0.0, "xy"),
    "wrong one": (lambda a, b: call("add", a, b), 1.0, "x1 = x"),
    "whole": (lambda a, b: call("floor", call("add", a, b)), 0.0, "x1 = x|xy"),
    "leftmost": (lambda a, b: a, 0.0, "1x = x"),
}


@contextmanager
def registered(merge: Merge, one: float, commutative: bool = True) -> Iterator[None]:
    """A monoid of one field for a while."""

    def zero(dtypes: tuple[str, ...]) -> tuple[Const, ...]:
        return (number(one, dtypes[0]),)

    register(Monoid(name="own", fields=("s",), zero=zero, combine=lambda a, b: (merge(a[0], b[0]),), commutative=commutative))
    try:
        yield
    finally:
        del MONOIDS["own"]


def checked(dtype: str, body: str, monoid: str = "own") -> int:
    text = f"graph g input x: {dtype}[4, 6] y: {dtype}[4] = op [i: 4 | k: 6 {monoid}] reads x[i, k] body {body} output y"
    return monoid_laws.check_monoids(parse(text))


@pytest.mark.parametrize("name", HOLD)
def test_what_keeps_the_laws_but_for_rounding_passes(name):
    """Every law on every state: how many is said."""
    with registered(*HOLD[name]):
        body = "x / (1.0 + abs(x))" if name == "velocity" else "abs(x)"
        tried = checked("f32", body)
        assert tried and tried % monoid_laws.DRAWS == 0
    with registered(*HOLD[name], commutative=False):
        assert 0 < checked("f32", body) < tried, "one law less"


@pytest.mark.parametrize("name", BREAK)
def test_what_breaks_a_law_is_refused_with_the_law_and_states(name):
    merge, one, law = BREAK[name]
    with registered(merge, one), pytest.raises(LawError, match=rf"'own' does not keep \S*({law})") as e:
        checked("f32", "x")
    assert "x = (" in str(e.value) and "the sides are" in str(e.value)


def test_integers_are_exact():
    """Of floats a rounding is forgiven, of integers nothing."""
    with registered(lambda a, b: call("add", a, b), 0.0):
        assert checked("i64", "x")
    with registered(lambda a, b: call("add", call("add", a, b), number(1, a.dtype)), -1.0):
        assert checked("i64", "x"), "one is minus one"
    with registered(lambda a, b: call("add", call("add", a, b), number(1, a.dtype)), 0.0), pytest.raises(LawError):
        checked("i64", "x")


def test_the_packages_own_are_proved_elsewhere():
    assert checked("f32", "x", "sum") == checked("f32", "x", "max") == 0
