"""Sums of products, extrema and other reductions of terms over the real numbers, with the lemmas about their ranges."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from tapestry.ir.expr import PRIMITIVES
from tapestry.rewrites.equations.term_walks import (
    NAMES,
    OPPOSITE,
    Term,
    Unprovable,
    canonical,
    canonical_part,
    mentions,
    places,
    renamed,
    replaced,
    variable,
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the conditions say of sizes and bodies.

    Attributes:
        products: (K, L) → the size that K·L is.
        below: (A, M) where A < M is asked for.
        increasing, placeless: open bodies.
        seen: of an open body, the dimensions that it may look at wherever the right-hand side applies it.
    """

    products: Mapping[tuple[str, str], str]
    below: frozenset[tuple[str, str]]
    increasing: frozenset[str]
    placeless: frozenset[str]
    seen: Mapping[str, frozenset[str]]


def real_number(value: Fraction) -> Term:
    """A constant."""
    return ("sum", ((value, (), ()),) if value else ())


def _alone(t: Term) -> Term:
    """The factor that a polynomial is, and nothing beside it; ``("",)`` for any other."""
    ((c, b, f),) = t[1] if len(t[1]) == 1 else ((0, (), ()),)
    return f[0] if c == 1 and not b and len(f) == 1 else ("",)


def atom(t: Term) -> Term:
    """A polynomial that is one factor."""
    return ("sum", ((Fraction(1), (), (t,)),))


def plus(*terms: Term) -> Term:
    """The sum; what is added to a maximum or minimum goes inside."""
    found = [m for t in terms for m in t[1]]
    at = next((k for k, (c, b, f) in enumerate(found) if c == 1 and not b and len(f) == 1 and f[0][0] in OPPOSITE), None)
    if at is not None and len(found) > 1:
        rest = ("sum", (*found[:at], *found[at + 1 :]))
        return inside(("sum", (found[at],)), lambda x: plus(x, rest))
    return ("sum", tuple(found))


def times(*terms: Term) -> Term:
    """The product, multiplied out; bound variables of different factors are different ones."""
    out: list[Term] = [(Fraction(1), (), ())]
    for t in terms:
        out = [(c * d, (*b, *e), (*f, *g)) for c, b, f in out for d, e, g in map(_renewed, t[1])]
    return ("sum", tuple(out))


def _renewed(m: Term) -> Term:
    c, bounds, factors = m
    new = {n: f"n{next(NAMES)}" for n, _ in bounds}
    return (c, tuple((new[n], s) for n, s in bounds), renamed(factors, new)) if bounds else m


def negative(t: Term) -> Term:
    """The negative: of a maximum the minimum of negatives."""
    f = _alone(t)
    if f[0] in OPPOSITE:
        return atom((OPPOSITE[f[0]], tuple((bounds, negative(x)) for bounds, x in f[1])))
    return ("sum", tuple((-c, b, f) for c, b, f in t[1]))


def inside(t: Term, do: Callable[[Term], Term]) -> Term:
    """An increasing function of a maximum or minimum as one of its terms."""
    f = _alone(t)
    return atom((f[0], tuple((bounds, do(x)) for bounds, x in f[1]))) if f[0] in OPPOSITE else do(t)


def applied(fn: str, args: list[Term], facts: Facts) -> Term:
    """A primitive over the reals."""
    match fn, args:
        case "add", [a, b]:
            return plus(a, b)
        case "sub", [a, b]:
            return plus(a, negative(b))
        case "neg", [a]:
            return negative(a)
        case "mul", [a, b]:
            return times(a, b)
        case "div", [a, b]:
            return times(a, _inverse(b))
        case (("max" | "min"), [a, b]):
            return _extreme(fn, [*_parts(fn, a), *_parts(fn, b)])
        case "where", [p, a, b]:
            return _chosen(p, a, b)
        case "exp", [a]:
            return (
                times(*(atom(("call", "exp", (("sum", (m,)),))) for m in a[1])) if _plain_sum(a) else atom(("call", fn, (a,)))
            )
        case "log", [a] if _exponent(a) is not None:
            return _exponent(a)
        case "and", [a, b]:
            return times(a, b)
        case "abs", [a]:
            return _absolute(a)
        case "sqrt", [a]:
            return atom(("root", a))
        case _:
            return atom(
                ("call", fn, tuple(sorted(map(canonical, args), key=repr)) if PRIMITIVES[fn].commutative else tuple(args))
            )


def _plain_sum(t: Term) -> bool:
    return all(c in (1, -1) and not b and f for c, b, f in t[1])


def _exponent(t: Term) -> Term:
    if len(t[1]) == 1 and t[1][0][0] == 1 and not t[1][0][1] and all(f[:2] == ("call", "exp") for f in t[1][0][2]):
        return plus(*(f[2][0] for f in t[1][0][2]))
    return None


def _absolute(t: Term) -> Term:
    """|−x| = |x|, and |(|x|)| = |x|."""
    if len(t[1]) == 1 and not t[1][0][1] and len(t[1][0][2]) == 1:
        c, _, (f,) = t[1][0]
        return ("sum", ((abs(c), (), (f if f[0] == "abs" else ("abs", atom(f)),)),))
    return atom(("abs", t))


def _inverse(t: Term) -> Term:
    if len(t[1]) == 1 and not t[1][0][1]:
        c, _, factors = t[1][0]
        return times(("sum", ((1 / c, (), ()),)), *map(_inverse_factor, factors))
    return atom(("inverse", t))


def _inverse_factor(f: Term) -> Term:
    if f[:2] == ("call", "exp"):
        return atom(("call", "exp", (negative(f[2][0]),)))
    return f[1] if f[0] == "inverse" else atom(("inverse", atom(f)))


def _chosen(p: Term, a: Term, b: Term) -> Term:
    """[p]·a + b − [p]·b."""
    (condition,) = (f for _, _, f in p[1])
    holds = ("sum", ((Fraction(1), (), tuple(("if", c) for c in condition)),))
    return a if canonical(a) == canonical(b) else plus(times(holds, a), b, negative(times(holds, b)))


# reductions


def reduced(monoid: str, bounds: tuple[Term, ...], value: Term, facts: Facts) -> Term:
    """A reduction over bound variables, the first outermost."""
    if monoid == "sum":
        done = [_summed(c, (*bounds, *b), f, facts) for c, b, f in value[1]]
        return ("sum", tuple(m for t in done for m in t))
    if monoid in OPPOSITE:
        return _extreme(monoid, [(p, x) for part in _pieces(bounds, value, facts) for p, x in _under(monoid, *part)])
    if monoid == "prod" and (up := _exponent(value)) is not None:
        return atom(("call", "exp", (reduced("sum", bounds, up, facts),)))
    f = _alone(value)
    if f[:2] == ("reduce", monoid):
        bounds, value = (*bounds, *f[2]), f[3]
    return atom(("reduce", monoid, *_radix(bounds, value, facts)))


def _summed(c: Fraction, bounds: tuple[Term, ...], factors: tuple[Term, ...], facts: Facts) -> list[Term]:
    """A monomial with more sums in front, by the lemmas about ranges."""
    for n, size in bounds:
        here = ("at", ((("v", n), "1"),), ())
        if size in ("0", "1"):  # no point, or the first
            rest = tuple(b for b in bounds if b[0] != n)
            return _summed(c, rest, replaced(factors, here, ("at", (), ())), facts) if size == "1" else []
        below = next(
            (f for f in factors if f[0] == "if" and f[1][:2] == ("call", "lt") and f[1][2][0] == atom(("index", here))), None
        )
        if below is not None:
            limit = _below(below, size, facts)
            narrowed = tuple((m, limit if m == n else s) for m, s in bounds)
            return _summed(c, narrowed, tuple(f for f in factors if f != below), facts)
        picked = next(
            (f for f in factors if f[0] == "if" and f[1][:2] == ("call", "eq") and canonical(atom(("index", here))) in f[1][2]),
            None,
        )
        if picked is not None:
            p = next(x for x in picked[1][2] if x != canonical(atom(("index", here))))
            if n in repr(p):
                raise Unprovable
            rest = replaced(tuple(f for f in factors if f != picked), here, ("at", ((("value", p), "1"),), ()))
            tests = (
                ("if", ("call", "ge", (p, canonical(real_number(Fraction(0)))))),
                ("if", ("call", "lt", (p, canonical(atom(("size", size)))))),
            )
            return _summed(c, tuple(b for b in bounds if b[0] != n), (*rest, *tests), facts)
        start = _shift(n, size, factors)
        if start:
            whole = size.split(" - ")[0]
            plain = replaced(factors, ("at", ((("v", n), "1"),), ((start, 1),)), here)
            parts = [(c, whole), (-c, start)]
            return [m for d, s in parts for m in _summed(d, tuple((k, s if k == n else z) for k, z in bounds), plain, facts)]
        if not mentions(factors, n):
            return _summed(c, tuple(b for b in bounds if b[0] != n), (*factors, ("size", size)), facts)
    bounds, within = _radix(bounds, factors, facts)
    return [(c, bounds, tuple(dict.fromkeys(f for f in within if f[0] == "if")) + tuple(f for f in within if f[0] != "if"))]


def _below(test: Term, size: str, facts: Facts) -> str:
    """The place below which a test of a variable holds; it is inside the variable's range."""
    limit = _size(test[1][2][1])
    if (limit, size) not in facts.below:
        raise Unprovable
    return limit


def _size(t: Term) -> str:
    f = _alone(t)
    if f[0] != "size":
        raise Unprovable
    return f[1]


def _shift(n: str, size: str, factors: Term) -> str:
    """A where a variable of [0, M − A) occurs as A + variable alone."""
    whole, minus, start = size.partition(" - ")
    found = list(places(factors, n))
    here = ("at", ((("v", n), "1"),), ((start, 1),))
    return start if whole and minus and found and all(p == here for p in found) else ""


def _radix(bounds: tuple[Term, ...], within: Term, facts: Facts) -> tuple[tuple[Term, ...], Term]:
    """Two variables that occur as L·k + j alone, j of L, as one."""
    sizes = dict(bounds)
    for (k, big), (j, small) in itertools.permutations(bounds, 2):
        found = {*places(within, k), *places(within, j)}
        pair = ("at", tuple(sorted(((("v", k), small), (("v", j), "1")), key=repr)), ())
        ordered = list(sizes).index(k) < list(sizes).index(j)
        if found == {pair} and (big, small) in facts.products and ordered:
            joined = tuple((n, facts.products[big, small] if n == k else s) for n, s in bounds if n != j)
            return joined, replaced(within, pair, variable(k))
    return bounds, within


def _parts(fn: str, t: Term) -> list[Term]:
    """The terms of which something is the maximum (or minimum), with their bound variables."""
    f = _alone(t)
    return list(f[1]) if f[0] == fn else [((), t)]


def _pieces(bounds: tuple[Term, ...], value: Term, facts: Facts) -> list[tuple[tuple[Term, ...], Term]]:
    """A range in two, where what is below a place is chosen."""
    for n, size in bounds:
        test = next(
            (f for _, _, fs in value[1] for f in fs if f[0] == "if" and f[1][:2] == ("call", "lt") and mentions(f, n)), None
        )
        if test is not None:
            start = _below(test, size, facts)
            yes, no = [list[Term](), list[Term]()]
            for c, b, fs in value[1]:
                (yes if test in fs else no).append((c, b, tuple(f for f in fs if f != test)))
            minus = [m for m in yes if m[0] < 0]
            if [(-c, b, f) for c, b, f in minus] != no:
                raise Unprovable
            later = replaced(("sum", tuple(no)), variable(n), ("at", ((("v", n), "1"),), ((start, 1),)))
            chosen = ("sum", tuple(m for m in yes if m[0] > 0))
            low, high = (tuple((m, s if m == n else z) for m, z in bounds) for s in (start, f"{size} - {start}"))
            return [(low, chosen), (high, later)]
    return [(bounds, value)]


def _under(fn: str, bounds: tuple[Term, ...], value: Term) -> list[tuple[tuple[Term, ...], Term]]:
    """Terms of a maximum over bound variables; terms of a minimum inside that do not vary along them go outside."""
    out: list[tuple[tuple[Term, ...], Term]] = []
    for own, x in _parts(fn, value):
        other = _parts(OPPOSITE[fn], x)
        names = {n for n, _ in bounds}
        fixed = [o for o in other if not any(mentions(o[1], n) for n in names)]
        if 0 < len(fixed) < len(other):
            rest = _extreme(OPPOSITE[fn], [o for o in other if o not in fixed])
            out.append(((), _extreme(OPPOSITE[fn], [*_parts(OPPOSITE[fn], reduced(fn, bounds, rest, _NOTHING)), *fixed])))
        else:
            used = tuple(b for b in (*bounds, *own) if mentions(x, b[0]))
            out.append((used, x))
    return out


def _extreme(fn: str, parts: list[Term]) -> Term:
    done = {canonical_part(p): p for p in parts}
    only = next(iter(done.values()))
    return only[1] if len(done) == 1 and not only[0] else atom((fn, tuple(done.values())))


_NOTHING = Facts({}, frozenset(), frozenset(), frozenset(), {})
