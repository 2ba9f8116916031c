"""Quasi-affine index expressions: integer sums of dimensions, ``floor(e/k)`` and ``e mod k``.

Projections are tuples of these, one per axis of the tensor read. They are kept in a canonical form (terms sorted, like
terms added), so that structural equality is a sound, incomplete test of equality; `ir.space` has the complete one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

Ranges = Mapping[str, int]  # dimension name -> size; a dimension runs over [0, size)


@dataclass(frozen=True, slots=True)
class Floor:
    """``floor(arg / div)``, div > 0."""

    arg: Aff
    div: int

    def __str__(self) -> str:
        return f"floor(({self.arg})/{self.div})"


@dataclass(frozen=True, slots=True)
class Mod:
    """``arg mod div``, div > 0, result in [0, div)."""

    arg: Aff
    div: int

    def __str__(self) -> str:
        return f"(({self.arg}) mod {self.div})"


Atom = str | Floor | Mod


@dataclass(frozen=True, slots=True)
class Aff:
    """``sum(coef * atom) + const``; terms are sorted by their text and have non-zero coefficients."""

    terms: tuple[tuple[Atom, int], ...] = ()
    const: int = 0

    def __add__(self, other: Aff | int) -> Aff:
        if isinstance(other, int):
            return Aff(self.terms, self.const + other)
        return _make([*self.terms, *other.terms], self.const + other.const)

    def __sub__(self, other: Aff | int) -> Aff:
        return self + (other * -1 if isinstance(other, Aff) else -other)

    def __mul__(self, k: int) -> Aff:
        if k == 0:
            return Aff((), 0)
        return Aff(tuple((a, c * k) for a, c in self.terms), self.const * k)

    def __str__(self) -> str:
        out = ""
        for atom, coef in self.terms:
            text = str(atom) if abs(coef) == 1 else f"{abs(coef)}*{atom}"
            out += (f" {'-' if coef < 0 else '+'} " if out else "-" if coef < 0 else "") + text
        if not out:
            return str(self.const)
        return out if not self.const else f"{out} {'-' if self.const < 0 else '+'} {abs(self.const)}"

    @property
    def is_dim(self) -> bool:
        """Whether this is one dimension and nothing else."""
        return self.const == 0 and len(self.terms) == 1 and self.terms[0][1] == 1 and isinstance(self.terms[0][0], str)

    @property
    def is_affine(self) -> bool:
        """Whether there is no floor and no mod."""
        return all(isinstance(a, str) for a, _ in self.terms)

    def coef(self, dim: str) -> int:
        """Coefficient of a plain dimension (0 when absent)."""
        return next((c for a, c in self.terms if a == dim), 0)


def atoms(e: Aff) -> int:
    """How many dimensions, floors and mods it is written with."""
    return sum(1 if isinstance(a, str) else 1 + atoms(a.arg) for a, _ in e.terms)


def _make(terms: list[tuple[Atom, int]], const: int) -> Aff:
    total: dict[Atom, int] = {}
    for atom, coef in terms:
        total[atom] = total.get(atom, 0) + coef
    for atom, coef in total.items():
        if isinstance(atom, Mod) and coef:  # a mod k + k*floor(a/k) = a
            floor = floordiv(atom.arg, atom.div)
            partner = floor.terms[0][0] if len(floor.terms) == 1 and floor.terms[0][1] == 1 and not floor.const else None
            if partner is not None and total.get(partner) == coef * atom.div:
                rest = [(a, c) for a, c in total.items() if a not in (atom, partner)]
                whole = atom.arg * coef
                return _make([*rest, *whole.terms], const + whole.const)
    kept = sorted(((a, c) for a, c in total.items() if c), key=lambda t: (not isinstance(t[0], str), str(t[0])))
    return Aff(tuple(kept), const)


def dim(name: str) -> Aff:
    """The expression that is one dimension."""
    return Aff(((name, 1),))


def const(value: int) -> Aff:
    """A constant expression."""
    return Aff((), value)


def floordiv(e: Aff, k: int, ranges: Ranges | None = None) -> Aff:
    """``floor(e / k)``, simplified: multiples of k leave the floor; the rest goes when its range is inside [0, k)."""
    assert k > 0
    if k == 1:
        return e
    whole, rest = _divide(e, k)
    lo, hi = (0, -1) if ranges is None and rest.terms else span(rest, ranges or {})
    if lo <= hi and lo // k == hi // k:
        return whole + lo // k
    g = gcd(k, *(c for _, c in rest.terms))
    if g > 1:
        rest = Aff(tuple((a, c // g) for a, c in rest.terms), rest.const // g)
        return whole + floordiv(rest, k // g, ranges)
    if len(rest.terms) == 1 and rest.terms[0][1] == 1 and isinstance(inner := rest.terms[0][0], Floor):
        return whole + floordiv(inner.arg + rest.const * inner.div, inner.div * k, ranges)
    if ranges is not None and (found := _coarse(rest, k, ranges)) is not None:  # floor((g*a + b) / (g*k')) is floor(a / k')
        g, coarse, _ = found
        return whole + floordiv(coarse, k // g, ranges)
    return whole + Aff(((Floor(rest, k), 1),))


def modulo(e: Aff, k: int, ranges: Ranges | None = None) -> Aff:
    """``e mod k``, simplified: multiples of k vanish; an expression whose range is inside one period is shifted."""
    assert k > 0
    if k == 1:
        return const(0)
    _, rest = _divide(e, k)
    lo, hi = (0, -1) if ranges is None and rest.terms else span(rest, ranges or {})
    if lo <= hi and lo // k == hi // k:
        return rest - (lo // k) * k
    g = gcd(k, *(c for _, c in rest.terms))
    if g > 1:  # (g*r + c) mod (g*k') = g*((r + c//g) mod k') + c mod g
        inner = Aff(tuple((a, c // g) for a, c in rest.terms), rest.const // g)
        return modulo(inner, k // g, ranges) * g + rest.const % g
    if ranges is not None and (found := _coarse(rest, k, ranges)) is not None:
        g, coarse, fine = found
        return modulo(coarse, k // g, ranges) * g + fine
    return Aff(((Mod(rest, k), 1),))


def _coarse(e: Aff, k: int, ranges: Ranges) -> tuple[int, Aff, Aff] | None:
    """e as ``g*a + b`` with g > 1 a divisor of k and b in [0, g): (g, a, b), for the largest such g."""
    for g in sorted({gcd(k, c) for _, c in e.terms} - {1}, reverse=True):
        fine = Aff(tuple((a, c) for a, c in e.terms if c % g), e.const % g)
        lo, hi = span(fine, ranges)
        if lo // g == hi // g:
            coarse = Aff(tuple((a, c // g) for a, c in e.terms if not c % g), e.const // g + lo // g)
            return g, coarse, fine - lo // g * g
    return None


def _divide(e: Aff, k: int) -> tuple[Aff, Aff]:
    """``e = k * whole + rest``; coefficients of rest keep their sign and are below k, its constant is in [0, k)."""
    quotient = {a: (c // k if c >= 0 else -(-c // k)) for a, c in e.terms}
    whole = Aff(tuple((a, q) for a, q in quotient.items() if q), e.const // k)
    rest = Aff(tuple((a, c - k * quotient[a]) for a, c in e.terms if c - k * quotient[a]), e.const % k)
    return whole, rest


def span(e: Aff, ranges: Ranges) -> tuple[int, int]:
    """Inclusive lower and upper bound of e over the box of ranges (exact for affine e)."""
    lo, hi = bounds(e, {n: (0, s - 1) for n, s in ranges.items()})
    return int(lo), int(hi)


Interval = tuple[Any, Any]  # inclusive; ints, or int64 arrays with one entry per device


def bounds(e: Aff, box: Mapping[str, Interval]) -> Interval:
    """Inclusive interval hull of e over a box of inclusive intervals; works elementwise on arrays of boxes.

    Exact for affine expressions (each row is bounded term by term, so mixed signs are right); for floor exact; for mod
    exact while the argument stays in one period, else the whole period.
    """
    lo: Any = e.const
    hi: Any = e.const
    for atom, coef in e.terms:
        a, b = _atom_bounds(atom, box)
        lo = lo + coef * (a if coef > 0 else b)
        hi = hi + coef * (b if coef > 0 else a)
    return lo, hi


def _atom_bounds(atom: Atom, box: Mapping[str, Interval]) -> Interval:
    if isinstance(atom, str):
        return box[atom]
    a, b = bounds(atom.arg, box)
    if isinstance(atom, Floor):
        return a // atom.div, b // atom.div
    same = a // atom.div == b // atom.div
    return np.where(same, a % atom.div, 0), np.where(same, b % atom.div, atom.div - 1)


def substitute(e: Aff, env: Mapping[str, Aff], ranges: Ranges | None = None) -> Aff:
    """Replace dimensions by expressions, simplifying floors and mods with the new dimensions' ranges."""
    out = const(e.const)
    for atom, coef in e.terms:
        if isinstance(atom, str):
            out = out + env.get(atom, dim(atom)) * coef
        elif isinstance(atom, Floor):
            out = out + floordiv(substitute(atom.arg, env, ranges), atom.div, ranges) * coef
        else:
            out = out + modulo(substitute(atom.arg, env, ranges), atom.div, ranges) * coef
    return out


def dims_of(e: Aff) -> frozenset[str]:
    """Names of the dimensions that e depends on."""
    out: set[str] = set()
    for atom, _ in e.terms:
        out |= {atom} if isinstance(atom, str) else dims_of(atom.arg)
    return frozenset(out)


def evaluate(e: Aff, env: Mapping[str, Any]) -> Any:
    """Value of e at integer (or integer-array) values of its dimensions."""
    out: Any = e.const
    for atom, coef in e.terms:
        if isinstance(atom, str):
            out = out + coef * env[atom]
        elif isinstance(atom, Floor):
            out = out + coef * (evaluate(atom.arg, env) // atom.div)
        else:
            out = out + coef * (evaluate(atom.arg, env) % atom.div)
    return out
