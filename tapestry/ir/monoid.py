"""Monoids: the associative merges that make a dimension splittable without being a map dimension.

A monoid has a tuple of state fields, an identity (``zero``) and an associative ``combine``, written once as expressions
and evaluated by every target. Lifting a value into the state is the ``body`` of an operation, lowering the state to a
result is its ``then``. Associativity, identity and (where claimed) commutativity are property-tested for every entry.

Monoids compose. A `product` makes two reductions one pass; products need no registration: `max.argmax` is one. A `rebased`
pair is a reduction whose lifted values refer to the result of another one, the *centre*: states are moved to a common centre by
an action and then merged. ``max`` with the action ``exp(old - new)`` on sums gives log-sum-exp, the softmax, and, with a sum
of vectors, flash attention. A `driven` pair is the other semidirect product, in which a state acts on all that came before:
``prod`` acting on ``sum`` is a linear recurrence. That an action is one is proved (`ir.monoid`) when the monoid is made.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from tapestry.errors import TapestryError
from tapestry.ir.expr import Arg, Call, Const, Expr, call, number
from tapestry.ir.types import FLOATS
from tapestry.plugins import entry_points as plugins

# Proofs that the action of a composed monoid is one, in sympy, over the real numbers.
#
# Floating-point values never pass through here: only the identities do. ``where(a == b, x, y)`` is read as y once it is
# shown that x and y agree where a = b (there it guards infinities, whose behaviour the property tests look at).


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
    _check_equal("act(c, c, s) = s", act(c0, c0, s), s)
    _check_equal("act(c', c'', act(c, c', s)) = act(c, c'', s)", act(c1, c2, act(c0, c1, s)), act(c0, c2, s))
    both = acted.combine(act(c0, c1, s), act(c0, c1, t))
    _check_equal("act(c, c', s + t) = act(c, c', s) + act(c, c', t)", act(c0, c1, acted.combine(s, t)), both)


def prove_driven(by: Monoid, acted: Monoid, act: Callable[[State, State], State]) -> None:
    """Prove what `monoid.driven` needs of an action.

    Raises:
        TapestryError: naming the identity that does not hold, with what is left of it.
    """
    n, k = len(by.fields), len(acted.fields)
    names = _names(2 * n + 2 * k)
    a, b, s, t = names[:n], names[n : 2 * n], names[2 * n : 2 * n + k], names[2 * n + k :]
    _check_equal("act(1, s) = s", act(by.zero(("f64",) * n), s), s)
    _check_equal("act(ab, s) = act(b, act(a, s))", act(by.combine(a, b), s), act(b, act(a, s)))
    _check_equal("act(a, s + t) = act(a, s) + act(a, t)", act(a, acted.combine(s, t)), acted.combine(act(a, s), act(a, t)))


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


def _check_equal(what: str, left: State, right: State) -> None:
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
        return _taken_branch(e, positive)
    args = [_real(a, positive) for a in e.args]
    return sympy.exp(args[0]) if e.fn == "exp" else _OPERATORS[e.fn](*args)


def _taken_branch(e: Call, positive: frozenset[Any]) -> Any:
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


State = tuple[Expr, ...]
_INT_RANGE = {"i64": 63, "i32": 31, "i16": 15, "i8": 7, "u64": 64, "u32": 32, "u16": 16, "u8": 8}


Action = Callable[[State, State, State], State]
"""``act(old, new, s)``: the state s, which refers to the centre ``old``, as it would be had it referred to ``new``."""


@dataclass(frozen=True, slots=True)
class ByPrimitive:
    """One field, merged by one scalar primitive."""

    fn: str


@dataclass(frozen=True, slots=True)
class Product:
    """Monoids side by side."""

    parts: tuple[Monoid, ...]


@dataclass(frozen=True, slots=True)
class Rebased:
    """States that refer to a centre, and are moved to the merged one before they are merged."""

    centre: Monoid
    acted: Monoid
    act: Action


@dataclass(frozen=True, slots=True)
class Driven:
    """States on which what comes later acts."""

    by: Monoid
    acted: Monoid
    act: Callable[[State, State], State]


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations (n, mean, M2)."""


@dataclass(frozen=True, slots=True)
class Best:
    """The (value, index) whose value is better by a comparison, the least index among equals; a NaN beats all."""

    better: str


Structure = ByPrimitive | Product | Rebased | Driven | Moments | Best
"""How a monoid is made. Targets choose fast kernels by it, never by the monoid's name."""


def _nothing() -> None:
    """The proof of a monoid that rests on no identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Monoid:
    """``zero(dtypes)`` gives the identity for given field dtypes; ``combine(a, b)`` merges two states, a before b.

    ``structure`` says how ``combine`` is made, as far as it is known. ``proof`` checks the identities that a composition
    rests on, and raises a `TapestryError` where one does not hold.
    """

    name: str
    fields: tuple[str, ...]
    zero: Callable[[tuple[str, ...]], tuple[Const, ...]]
    combine: Callable[[State, State], State]
    commutative: bool = True
    structure: Structure | None = None
    proof: Callable[[], None] = _nothing

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


def product(name: str, *parts: Monoid) -> Monoid:
    """Reductions over one domain, side by side; fields are ``a``'s, then ``b``'s, with their positions where names collide."""
    names = [f for p in parts for f in p.fields]
    ends = [sum(len(p.fields) for p in parts[:k]) for k in range(len(parts) + 1)]

    def zero(dtypes: tuple[str, ...]) -> tuple[Const, ...]:
        return tuple(z for k, p in enumerate(parts) for z in p.zero(dtypes[ends[k] : ends[k + 1]]))

    def combine(a: State, b: State) -> State:
        return tuple(x for k, p in enumerate(parts) for x in p.combine(a[ends[k] : ends[k + 1]], b[ends[k] : ends[k + 1]]))

    return Monoid(
        name=name,
        fields=tuple(f if names.count(f) == 1 else f"{f}{k}" for k, f in enumerate(names)),
        zero=zero,
        combine=combine,
        commutative=all(p.commutative for p in parts),
        structure=Product(parts),
    )


def rebased(name: str, centre: Monoid, acted: Monoid, act: Action, fields: tuple[str, ...]) -> Monoid:
    """``centre ⋉ acted``: states refer to a centre and are moved to the merged one before they are merged.

    Needed of the action, and proved by `ir.monoid.prove_rebased`: ``act(c, c, s) = s``,
    ``act(c', c'', act(c, c', s)) = act(c, c'', s)``, ``act(c, c', s + t) = act(c, c', s) + act(c, c', t)``.
    """
    n = len(centre.fields)

    def combine(a: State, b: State) -> State:
        c = centre.combine(a[:n], b[:n])
        return c + acted.combine(act(a[:n], c, a[n:]), act(b[:n], c, b[n:]))

    return Monoid(
        name=name,
        fields=fields,
        zero=lambda d: centre.zero(d[:n]) + acted.zero(d[n:]),
        combine=combine,
        commutative=centre.commutative and acted.commutative,
        structure=Rebased(centre, acted, act),
        proof=partial(prove_rebased, centre, acted, act),
    )


def driven(name: str, by: Monoid, acted: Monoid, act: Callable[[State, State], State], fields: tuple[str, ...]) -> Monoid:
    """``by ⋉ acted`` in order: what comes later acts on the state before, ``(a, s)(b, t) = (ab, act(b, s) + t)``.

    Needed of the action, and proved by `ir.monoid.prove_driven`: ``act(1, s) = s``, ``act(ab, s) = act(b, act(a, s))``,
    ``act(a, s + t) = act(a, s) + act(a, t)``. Not commutative.
    """
    n = len(by.fields)

    def combine(a: State, b: State) -> State:
        return by.combine(a[:n], b[:n]) + acted.combine(act(b[:n], a[n:]), b[n:])

    return Monoid(
        name=name,
        fields=fields,
        zero=lambda d: by.zero(d[:n]) + acted.zero(d[n:]),
        combine=combine,
        commutative=False,
        structure=Driven(by, acted, act),
        proof=partial(prove_driven, by, acted, act),
    )


def rescale(old: State, new: State, s: State) -> State:
    """Sums of ``exp(x - old)`` times anything as sums of ``exp(x - new)``; equal centres, even infinite, change nothing."""
    scale = call("exp", old[0] - new[0])
    same = call("eq", old[0], new[0])
    return tuple(call("where", same, x, x * scale) for x in s)


def _single(name: str, fn: str, zero: Callable[[str], Const]) -> Monoid:
    return Monoid(
        name=name,
        fields=("value",),
        zero=lambda d: (zero(d[0]),),
        combine=lambda a, b: (call(fn, a[0], b[0]),),
        structure=ByPrimitive(fn),
    )


def _moments(a: State, b: State) -> State:
    """(n, mean, M2) merge of Chan, Golub and LeVeque (1979): ``(n, sum, sum of squares)`` cancels badly."""
    n = a[0] + b[0]
    one, zero = number(1, n.dtype), number(0, n.dtype)
    safe = call("where", call("eq", n, zero), one, n)
    delta = b[1] - a[1]
    share = b[0] / safe
    mean = a[1] + delta * share
    spread = delta * (delta * (a[0] * share))  # delta² alone overflows, and inf * 0 is a NaN
    return n, mean, a[2] + b[2] + spread


def _best(name: str, better: str, worst: Callable[[str], Const]) -> Monoid:
    def combine(a: State, b: State) -> State:
        nan_a, nan_b = (call("isnan", a[0]), call("isnan", b[0])) if a[0].dtype in FLOATS else (None, None)
        first = call("lt", b[1], a[1])
        take: Expr = call(better, b[0], a[0]) | call("eq", a[0], b[0]) & first
        if nan_a is not None and nan_b is not None:  # a NaN wins, the first of several
            wins = nan_b & (~nan_a | first)
            take = wins | take & ~nan_a
        return call("where", take, b[0], a[0]), call("where", take, b[1], a[1])

    return Monoid(
        name=name,
        fields=("value", "index"),
        zero=lambda d: (worst(d[0]), highest(d[1])),
        combine=combine,
        structure=Best(better),
    )


_SUM = _single("sum", "add", lambda d: number(0, d))
_PROD = _single("prod", "mul", lambda d: number(1, d))
_MAX = _single("max", "max", lowest)


MOST_SUMS = 4  # sums side by side: an accumulator each, on chip at the same time


def sums(fields: int) -> str:
    """Name of the monoid of so many sums side by side: several contractions in one pass over what they share."""
    return "sum" if fields == 1 else f"sums{fields}"


def primitive_of(name: str | None) -> str:
    """The primitive that merges the one field of a monoid, ``"add"`` for ``sum``; ``""`` for any other monoid or none."""
    structure = MONOIDS[name].structure if name in MONOIDS and name else None
    return structure.fn if isinstance(structure, ByPrimitive) else ""


def _scale(by: State, s: State) -> State:
    return (by[0] * s[0],)


class _Table(dict[str, Monoid]):
    """Monoids by name, those of plug-ins as well, with products of them by the names of their parts, ``a.b``; iteration shows
    what is registered."""

    def __missing__(self, name: str) -> Monoid:
        if name not in self:
            raise KeyError(name)
        if "." not in name:
            made = plugins.get("monoids", name)
            if not isinstance(made, Monoid) or made.name != name:
                raise plugins.refused("monoids", name, f"it is no tapestry.ir.monoid.Monoid called '{name}'")
            return _of_plugin(made)
        return _product_of(name, tuple(self[n] for n in name.split(".")))

    def __contains__(self, name: object) -> bool:
        known = super().__contains__
        return known(name) or (isinstance(name, str) and all(known(n) or plugins.has("monoids", n) for n in name.split(".")))


@lru_cache(maxsize=1 << 8)
def _product_of(name: str, parts: tuple[Monoid, ...]) -> Monoid:
    return product(name, *parts)


@lru_cache(maxsize=1 << 8)
def _of_plugin(made: Monoid) -> Monoid:
    """A monoid of a plug-in, whose identities are proved; its laws are tried where a graph uses it (`verify.monoid_laws`).

    Raises:
        TapestryError: it is composed by an action that is not one.
    """
    made.proof()
    return made


def parts_of(name: str) -> tuple[tuple[str, int, int], ...]:
    """The monoids of a product (or the one monoid itself), each with where its fields begin and end in the state."""
    out: list[tuple[str, int, int]] = []
    for n in name.split("."):
        at = out[-1][2] if out else 0
        out.append((n, at, at + len(MONOIDS[n].fields)))
    return tuple(out)


MONOIDS: dict[str, Monoid] = _Table(
    (m.name, m)
    for m in (
        _SUM,
        *(product(sums(n), *(_SUM,) * n) for n in range(2, MOST_SUMS + 1)),
        _PROD,
        _MAX,
        _single("min", "min", highest),
        _single("any", "or", lambda d: number(0, d)),
        _single("all", "and", lambda d: number(1, d)),
        Monoid(
            name="moments",
            fields=("n", "mean", "m2"),
            zero=lambda d: tuple(number(0, x) for x in d),
            combine=_moments,
            structure=Moments(),
            proof=partial(prove_moments, _moments),
        ),
        rebased("logsumexp", _MAX, _SUM, rescale, ("m", "s")),
        rebased("softsum", _MAX, product("", _SUM, _SUM), rescale, ("m", "s", "o")),
        # (a, b) for the map h -> a*h + b, the earlier one applied first: a scan of it is the recurrence h = a*h + b
        driven("affine", _PROD, _SUM, _scale, ("a", "b")),
        _best("argmax", "gt", lowest),
        _best("argmin", "lt", highest),
    )
)
BUILT_IN = frozenset(MONOIDS)


def register(monoid: Monoid) -> Monoid:
    """Add a monoid of your own; its laws are then tested like the built-in ones' (tests/test_monoid.py).

    Raises:
        TapestryError: it is composed by an action that is not one.
    """
    assert monoid.name not in MONOIDS and "." not in monoid.name, monoid.name
    monoid.proof()
    MONOIDS[monoid.name] = monoid
    return monoid
