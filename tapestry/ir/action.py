"""Proofs that the action of a composed monoid is one, in sympy, over the real numbers.

Floating-point values never pass through here: only the identities do. ``where(a == b, x, y)`` is read as y once it is
shown that x and y agree where a = b (there it guards infinities, whose behaviour the property tests look at).
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

from tapestry.errors import TapestryError
from tapestry.ir.expr import Arg, Call, Const, Expr
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


def _real(e: Expr) -> Any:
    """An expression as a sympy expression over real symbols."""
    sympy = _sympy()
    if isinstance(e, Arg):
        return sympy.Symbol(f"x{e.pos}", real=True)
    if isinstance(e, Const):
        return sympy.nsimplify(e.value)
    assert isinstance(e, Call), e
    if e.fn == "where":
        return _guarded(e)
    args = [_real(a) for a in e.args]
    return sympy.exp(args[0]) if e.fn == "exp" else _OPERATORS[e.fn](*args)


def _guarded(e: Call) -> Any:
    """``where(a == b, x, y)`` as y, after showing that it agrees with x where a = b."""
    sympy = _sympy()
    test, x, y = e.args
    if not (isinstance(test, Call) and test.fn == "eq"):
        raise TapestryError("a guard of an action must be an equation", why=str(test))
    (a, b), other = (_real(v) for v in test.args), _real(y)
    if a == b:
        return _real(x)
    solved = sympy.solve(sympy.Eq(a, b), next(iter((a - b).free_symbols)), dict=True)
    gaps = [sympy.simplify((_real(x) - other).subs(s)) for s in solved]
    if any(g != 0 for g in gaps):
        raise TapestryError("not an action: its guard changes the value", why=str(gaps))
    return other
