"""Proofs that the action of a composed monoid is one, in sympy, over the real numbers.

Floating-point values never pass through here: only the identities do. ``where(a == b, x, y)`` is read as y once it is
shown that x and y agree where a = b (there it guards infinities, whose behaviour the property tests look at).
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapestry.errors import TapestryError
from tapestry.ir.expr import Arg, Call, Const, Expr

if TYPE_CHECKING:
    from tapestry.ir.monoid import Action, Monoid, State

_NAMES = {"add": "add", "sub": "sub", "mul": "mul", "div": "truediv", "neg": "neg"}
_OPERATORS: dict[str, Any] = {fn: getattr(operator, name) for fn, name in _NAMES.items()}


def prove_rebased(centre: Monoid, acted: Monoid, act: Action) -> None:
    """Prove what `monoid.rebased` needs of an action.

    Raises:
        TapestryError: naming the identity that does not hold, with what is left of it.
    """
    n, k = len(centre.fields), len(acted.fields)
    c0, c1, c2 = (_names(3 * n)[i * n : (i + 1) * n] for i in range(3))
    s, t = _names(3 * n + 2 * k)[3 * n : 3 * n + k], _names(3 * n + 2 * k)[3 * n + k :]
    _same("act(c, c, s) = s", act(c0, c0, s), s)
    _same("act(c', c'', act(c, c', s)) = act(c, c'', s)", act(c1, c2, act(c0, c1, s)), act(c0, c2, s))
    both = acted.combine(act(c0, c1, s), act(c0, c1, t))
    _same("act(c, c', s + t) = act(c, c', s) + act(c, c', t)", act(c0, c1, acted.combine(s, t)), both)


def prove_driven(by: Monoid, acted: Monoid, act: Callable[[State, State], State]) -> None:
    """Prove what `monoid.driven` needs of an action.

    Raises:
        TapestryError: naming the identity that does not hold, with what is left of it.
    """
    n, k = len(by.fields), len(acted.fields)
    names = _names(2 * n + 2 * k)
    a, b, s, t = names[:n], names[n : 2 * n], names[2 * n : 2 * n + k], names[2 * n + k :]
    _same("act(1, s) = s", act(by.zero(("f64",) * n), s), s)
    _same("act(ab, s) = act(b, act(a, s))", act(by.combine(a, b), s), act(b, act(a, s)))
    _same("act(a, s + t) = act(a, s) + act(a, t)", act(a, acted.combine(s, t)), acted.combine(act(a, s), act(a, t)))


def prove_moments(combine: Callable[[State, State], State]) -> None:
    """Prove that a merge of (n, mean, M2) is that of mean and squared deviations of two sets of numbers, neither empty.

    Over the power sums of a set, ``mean = S1 / n`` and ``M2 = S2 - S1² / n`` (squared deviations, multiplied out); sums of
    two sets add, and so the merge of two sets' moments must be the moments of the added sums (Chan, Golub, LeVeque 1979).

    Raises:
        TapestryError: naming the field that is another one, with what is left of it.
    """
    sympy = _sympy()
    n, s1, s2 = (tuple(sympy.Symbol(f"{f}{k}", real=True, positive=f == "n") for k in range(2)) for f in ("n", "s", "q"))

    def moments(n: Any, s1: Any, s2: Any) -> tuple[Any, ...]:
        return n, s1 / n, s2 - s1**2 / n

    names = _names(6)
    parts = (*moments(n[0], s1[0], s2[0]), *moments(n[1], s1[1], s2[1]))
    env = {_real(name): part for name, part in zip(names, parts, strict=True)}
    counts = frozenset({_real(names[0]) + _real(names[3])})
    merged = combine(names[:3], names[3:])
    wanted = moments(n[0] + n[1], s1[0] + s1[1], s2[0] + s2[1])
    for field, e, want in zip(("n", "mean", "M2"), merged, wanted, strict=True):
        rest = sympy.simplify(_real(e, counts).subs(env) - want)
        if rest != 0:
            raise TapestryError(f"not the moments of two sets: {field} is another", why=f"left over: {rest}")


def _names(count: int) -> State:
    return tuple(Arg(i, "f64") for i in range(count))


def _same(what: str, left: State, right: State) -> None:
    sympy = _sympy()
    for a, b in zip(left, right, strict=True):
        rest = sympy.simplify(_real(a) - _real(b))
        if rest != 0:
            raise TapestryError(f"not an action: {what} does not hold", why=f"left over: {rest}")


def _sympy() -> Any:
    """The library, which takes long to import and has no types."""
    return importlib.import_module("sympy")


def _real(e: Expr, positive: frozenset[Any] = frozenset()) -> Any:
    """An expression as a sympy expression over real symbols; those in ``positive`` are not 0."""
    sympy = _sympy()
    if isinstance(e, Arg):
        return sympy.Symbol(f"x{e.pos}", real=True)
    if isinstance(e, Const):
        return sympy.nsimplify(e.value)
    assert isinstance(e, Call), e
    if e.fn == "where":
        return _guarded(e, positive)
    args = [_real(a, positive) for a in e.args]
    return sympy.exp(args[0]) if e.fn == "exp" else _OPERATORS[e.fn](*args)


def _guarded(e: Call, positive: frozenset[Any]) -> Any:
    """``where(a == b, x, y)`` as y, after showing that it agrees with x where a = b (or that a is never b)."""
    sympy = _sympy()
    test, x, y = e.args
    if not (isinstance(test, Call) and test.fn == "eq"):
        raise TapestryError("a guard of an action must be an equation", why=str(test))
    (a, b), other = (_real(v, positive) for v in test.args), _real(y, positive)
    if a == b:
        return _real(x, positive)
    if a - b in positive:
        return other
    solved = sympy.solve(sympy.Eq(a, b), next(iter((a - b).free_symbols)), dict=True)
    gaps = [sympy.simplify((_real(x, positive) - other).subs(s)) for s in solved]
    if any(g != 0 for g in gaps):
        raise TapestryError("not an action: its guard changes the value", why=str(gaps))
    return other
