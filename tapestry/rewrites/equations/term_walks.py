"""Terms of the proofs for all sizes as data: nested tuples with their kind in front.

A polynomial is ``("sum", ((coefficient, bounds, factors), …))`` with bounds ``((name, size), …)``, a place
``("at", ((variable, coefficient), …), constants)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, cast

Term = Any
MOST_BOUND = 5  # variables of one monomial that are brought into order by trying all
OPPOSITE = {"max": "min", "min": "max"}
NAMES = itertools.count()  # of bound variables


class Unprovable(Exception):
    """There is no term for a rule, or the two sides have different ones."""


def variable(name: str) -> Term:
    """The place that is one variable."""
    return ("at", ((("v", name), "1"),), ())


def children(t: Term) -> tuple[Term, ...]:
    """The parts of a term; none of a name or number."""
    return cast("tuple[Term, ...]", t) if isinstance(t, tuple) else ()


def renamed(t: Term, names: Mapping[str, str]) -> Term:
    """A term with other variables."""
    if not isinstance(t, tuple):
        return t
    parts = children(t)
    if len(parts) == 2 and parts[0] == "v":
        return ("v", names.get(parts[1], parts[1]))
    out = tuple(renamed(x, names) for x in parts)
    return ("at", tuple(sorted(out[1], key=repr)), out[2]) if out and out[0] == "at" else out


def replaced(t: Term, old: Term, new: Term) -> Term:
    """A term with one part replaced wherever it stands."""
    if t == old:
        return new
    return tuple(replaced(x, old, new) for x in children(t)) if isinstance(t, tuple) else t


def mentions(t: Term, name: str) -> bool:
    """Whether a variable occurs."""
    return t == ("v", name) or any(mentions(x, name) for x in children(t))


def places(t: Term, name: str) -> Iterator[Term]:
    """The index expressions in which a variable occurs."""
    parts = children(t)
    if parts and parts[0] == "at" and any(a == ("v", name) for a, _ in parts[1]):
        yield t
    for x in parts:
        yield from places(x, name)


def canonical(t: Term) -> Term:
    """A polynomial with its monomials in order, equal ones together, bound variables named by where they stand."""
    total: dict[Term, Fraction] = {}
    for c, bounds, factors in t[1]:
        done = _ordered(bounds, tuple(map(_canonical_atom, factors)))
        total[done] = total.get(done, Fraction(0)) + c
    roots = [(c, b, f) for (b, f), c in total.items() if c]
    return ("sum", tuple(sorted(roots, key=repr)))


def _canonical_atom(t: Term) -> Term:
    parts = children(t)
    if not parts:
        return t
    if parts[0] == "sum":
        return canonical(t)
    if parts[0] in OPPOSITE:
        return (parts[0], tuple(sorted(map(canonical_part, parts[1]), key=repr)))
    if parts[0] == "reduce":
        bounds, (within,) = _ordered(parts[2], (canonical(parts[3]),), keep=True)
        return ("reduce", parts[1], bounds, within)
    return tuple(map(_canonical_atom, parts))


def canonical_part(part: Term) -> Term:
    """A term of a maximum with its variables in order."""
    bounds, (inside,) = _ordered(part[0], (canonical(part[1]),))
    return (bounds, inside)


def _height(t: Term) -> int:
    parts = children(t)
    own = int(parts[1][1:].split("_")[0]) if len(parts) == 2 and parts[0] == "v" and parts[1][:1] == "#" else 0
    return max([own, *map(_height, parts)])


def _ordered(bounds: tuple[Term, ...], factors: tuple[Term, ...], keep: bool = False) -> tuple[Term, Term]:
    """Bound variables named by the order that gives the least text (``keep``: as they stand); equal roots are their square."""
    factors = _roots(tuple(dict.fromkeys(f for f in factors if f[0] == "if")) + tuple(f for f in factors if f[0] != "if"))
    if not bounds:
        return (), tuple(sorted(factors, key=repr))
    if len(bounds) > MOST_BOUND:
        raise Unprovable
    level = _height(factors) + 1
    best: Term = None
    for order in [bounds] if keep else itertools.permutations(bounds):
        names = {n: f"#{level}_{k}" for k, (n, _) in enumerate(order)}
        found = tuple((names[n], s) for n, s in order), tuple(sorted(_canonical_atom(renamed(factors, names)), key=repr))
        best = found if best is None or repr(found) < repr(best) else best
    return best


def _roots(factors: tuple[Term, ...]) -> tuple[Term, ...]:
    out = list(factors)
    for f in factors:
        if f[0] == "root" and out.count(f) > 1 and len(f[1][1]) == 1 and not f[1][1][0][1] and f[1][1][0][0] == 1:
            out.remove(f)
            out.remove(f)
            out += f[1][1][0][2]
    return tuple(out)
