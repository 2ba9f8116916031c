"""Monoids: the associative merges that make a dimension splittable without being a map dimension.

A monoid has a tuple of state fields, an identity (``zero``) and an associative ``combine``, written once as expressions
and evaluated by every target. Lifting a value into the state is the ``body`` of an operation, lowering the state to a
result is its ``then``. Associativity, identity and (where claimed) commutativity are property-tested for every entry.

Monoids compose. A `product` makes two reductions one pass; products need no registration: `max.argmax` is one. A `rebased`
pair is a reduction whose lifted values refer to the result of another one, the *centre*: states are moved to a common centre by
an action and then merged. ``max`` with the action ``exp(old - new)`` on sums gives log-sum-exp, the softmax, and, with a sum
of vectors, flash attention. A `driven` pair is the other semidirect product, in which a state acts on all that came before:
``prod`` acting on ``sum`` is a linear recurrence. That an action is one is proved (`ir.monoid_action`) when the monoid is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from tapestry.ir.expr import Arg, Const, Expr, call
from tapestry.ir.monoid_action import prove_driven, prove_moments, prove_rebased
from tapestry.ir.types import FLOATS
from tapestry.plugins import entry_points as plugins

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


def number(value: float, dtype: str) -> Const:
    """A literal with the Python type that fits the dtype."""
    return Const(float(value) if dtype in FLOATS else bool(value) if dtype == "bool" else int(value), dtype)


def product(name: str, *parts: Monoid) -> Monoid:
    """Reductions over one domain, side by side; fields are ``a``'s, then ``b``'s, with their positions where names collide."""
    names = [f for p in parts for f in p.fields]
    ends = [sum(len(p.fields) for p in parts[:k]) for k in range(len(parts) + 1)]

    def zero(dtypes: tuple[str, ...]) -> tuple[Const, ...]:
        return tuple(z for k, p in enumerate(parts) for z in p.zero(dtypes[ends[k] : ends[k + 1]]))

    def combine(a: State, b: State) -> State:
        return tuple(x for k, p in enumerate(parts) for x in p.combine(a[ends[k] : ends[k + 1]], b[ends[k] : ends[k + 1]]))

    return Monoid(
        name=name, fields=tuple(f if names.count(f) == 1 else f"{f}{k}" for k, f in enumerate(names)), zero=zero,
        combine=combine, commutative=all(p.commutative for p in parts), structure=Product(parts),
    )  # fmt: skip


def rebased(name: str, centre: Monoid, acted: Monoid, act: Action, fields: tuple[str, ...]) -> Monoid:
    """``centre ⋉ acted``: states refer to a centre and are moved to the merged one before they are merged.

    Needed of the action, and proved by `ir.monoid_action.prove_rebased`: ``act(c, c, s) = s``,
    ``act(c', c'', act(c, c', s)) = act(c, c'', s)``, ``act(c, c', s + t) = act(c, c', s) + act(c, c', t)``.
    """
    n = len(centre.fields)

    def combine(a: State, b: State) -> State:
        c = centre.combine(a[:n], b[:n])
        return c + acted.combine(act(a[:n], c, a[n:]), act(b[:n], c, b[n:]))

    return Monoid(
        name=name, fields=fields, zero=lambda d: centre.zero(d[:n]) + acted.zero(d[n:]), combine=combine,
        commutative=centre.commutative and acted.commutative, structure=Rebased(centre, acted, act),
        proof=partial(prove_rebased, centre, acted, act),
    )  # fmt: skip


def driven(name: str, by: Monoid, acted: Monoid, act: Callable[[State, State], State], fields: tuple[str, ...]) -> Monoid:
    """``by ⋉ acted`` in order: what comes later acts on the state before, ``(a, s)(b, t) = (ab, act(b, s) + t)``.

    Needed of the action, and proved by `ir.monoid_action.prove_driven`: ``act(1, s) = s``, ``act(ab, s) = act(b, act(a, s))``,
    ``act(a, s + t) = act(a, s) + act(a, t)``. Not commutative.
    """
    n = len(by.fields)

    def combine(a: State, b: State) -> State:
        return by.combine(a[:n], b[:n]) + acted.combine(act(b[:n], a[n:]), b[n:])

    return Monoid(
        name=name, fields=fields, zero=lambda d: by.zero(d[:n]) + acted.zero(d[n:]), combine=combine, commutative=False,
        structure=Driven(by, acted, act), proof=partial(prove_driven, by, acted, act),
    )  # fmt: skip


def rescale(old: State, new: State, s: State) -> State:
    """Sums of ``exp(x - old)`` times anything as sums of ``exp(x - new)``; equal centres, even infinite, change nothing."""
    scale = call("exp", call("sub", old[0], new[0]))
    same = call("eq", old[0], new[0])
    return tuple(call("where", same, x, call("mul", x, scale)) for x in s)


def _single(name: str, fn: str, zero: Callable[[str], Const]) -> Monoid:
    return Monoid(
        name=name, fields=("value",), zero=lambda d: (zero(d[0]),), combine=lambda a, b: (call(fn, a[0], b[0]),),
        structure=ByPrimitive(fn),
    )  # fmt: skip


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


def _best(name: str, better: str, worst: Callable[[str], Const]) -> Monoid:
    def combine(a: State, b: State) -> State:
        nan_a, nan_b = (call("isnan", a[0]), call("isnan", b[0])) if a[0].dtype in FLOATS else (None, None)
        first = call("lt", b[1], a[1])
        take: Expr = call("or", call(better, b[0], a[0]), call("and", call("eq", a[0], b[0]), first))
        if nan_a is not None and nan_b is not None:  # a NaN wins, the first of several
            wins = call("and", nan_b, call("or", call("not", nan_a), first))
            take = call("or", wins, call("and", take, call("not", nan_a)))
        return call("where", take, b[0], a[0]), call("where", take, b[1], a[1])

    return Monoid(
        name=name, fields=("value", "index"), zero=lambda d: (worst(d[0]), highest(d[1])), combine=combine,
        structure=Best(better),
    )  # fmt: skip


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
    return (call("mul", by[0], s[0]),)


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
            name="moments", fields=("n", "mean", "m2"), zero=lambda d: tuple(number(0, x) for x in d), combine=_moments,
            structure=Moments(), proof=partial(prove_moments, _moments),
        ),
        rebased("logsumexp", _MAX, _SUM, rescale, ("m", "s")),
        rebased("softsum", _MAX, product("", _SUM, _SUM), rescale, ("m", "s", "o")),
        # (a, b) for the map h -> a*h + b, the earlier one applied first: a scan of it is the recurrence h = a*h + b
        driven("affine", _PROD, _SUM, _scale, ("a", "b")),
        _best("argmax", "gt", lowest),
        _best("argmin", "lt", highest),
    )
)  # fmt: skip
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
