"""Small terms over the IR, all of them up to a number of operations, by their values in exact arithmetic.

A term is a leaf ``("x",)``, a size ``("size", "m")``, a primitive ``("mul", a, b)``, or a reduction ``("SUM", "m", t)`` over a
dimension. Values are integers and fractions in numpy arrays of all dimensions of a family, of size one where a term does not
vary; ``exp`` is a power of two, which is an increasing function with exp(x + z) = exp(x)·exp(z), too. ``pick`` is a gather:
the sum over v of what stands where v is the place that is asked for, and ``join`` a concat along m.

A term with the values of an earlier one makes an equation with it, and no larger terms: what is built on it is built on the
earlier one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

Term = Any
Values = np.ndarray[Any, np.dtype[np.object_]]
COMMUTES = frozenset({"add", "mul", "max", "min"})
REDUCTIONS: Mapping[str, np.ufunc] = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum}
PARTS = ("", "low", "high")  # of m: all, below the place where `join` changes, and from there on
DRAWS = 7  # of values and sizes that two terms must agree on
MOST_EXPONENT = 300


class Undefined(Exception):
    """A term has no exact value: a quotient by zero, an exponential of what is no small integer."""


@dataclass(frozen=True, slots=True)
class Family:
    """What terms are made of.

    Attributes:
        dims: letters, one for each dimension.
        leaves: name → the dimensions that it varies along.
        reductions: (monoid, primitive, dimension): of one term, or (with a primitive) of two as a contraction.
        sizes: dimensions whose size is a term.
    """

    name: str
    dims: str
    leaves: Mapping[str, str]
    unary: tuple[str, ...] = ()
    binary: tuple[str, ...] = ()
    reductions: tuple[tuple[str, str, str], ...] = ()
    sizes: str = ""

    def dims_of(self, t: Term) -> frozenset[str]:
        """The dimensions that a term varies along."""
        if t[0] in self.leaves:
            return frozenset(self.leaves[t[0]])
        if t[0] == "size":
            return frozenset()
        inner = frozenset[str]().union(*(self.dims_of(a) for a in t[1:] if not isinstance(a, str)))
        if t[0] == "pick":
            return inner - {"v"} | {"i"}
        return inner - {t[1]} if t[0] in REDUCTIONS else inner | {"m"} if t[0] == "join" else inner


class Draw:
    """Sizes and values for the leaves of a family; values of terms are kept."""

    def __init__(self, family: Family, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def whole(low: int, high: int) -> int:
            return int(rng.integers(low, high, endpoint=True))

        self.family = family
        self.sizes = {d: whole(*((2, 3) if seed == 0 or d == "m" else (1, 4))) for d in family.dims}
        self.join = whole(1, self.sizes.get("m", 2) - 1)
        self.known: dict[Term, Values] = {}
        for name, dims in family.leaves.items():
            shape = [self.sizes[d] if d in dims else 1 for d in family.dims]
            flat = [(2 * whole(0, 1) - 1) * whole(1, 4 if seed % 2 else 40) for _ in range(int(np.prod(shape)))]
            if name == "p":  # places, some of them outside
                flat = [whole(-1, self.sizes["v"]) for _ in flat]
            self.known[(name,)] = np.array(flat, dtype=object).reshape(shape)

    def value(self, t: Term) -> Values:
        """The values of a term.

        Raises:
            Undefined: it has none.
        """
        if t not in self.known:
            self.known[t] = self._made(t)
        return self.known[t]

    def _made(self, t: Term) -> Values:
        dims = self.family.dims
        if t[0] == "size":
            return np.full([1] * len(dims), self.sizes[t[1]], dtype=object)
        if t[0] in REDUCTIONS:
            x, axis = self.value(t[2]), dims.index(t[1])
            wide = np.broadcast_to(x, [self.sizes[t[1]] if k == axis else n for k, n in enumerate(x.shape)])
            part = {"low": slice(0, self.join), "high": slice(self.join, None)}.get(t[3] if len(t) > 3 else "", slice(None))
            return REDUCTIONS[t[0]].reduce(wide[(slice(None),) * axis + (part,)], axis=axis, keepdims=True)
        if t[0] == "pick":
            return self._picked(self.value(t[1]))
        args = [self.value(a) for a in t[1:]]
        if t[0] == "join":
            return self._joined(*args)
        return _APPLIED[t[0]](*args)

    def _picked(self, x: Values) -> Values:
        i, v = self.family.dims.index("i"), self.family.dims.index("v")
        whole = np.broadcast_to(
            x, [self.sizes["i"] if k == i else self.sizes["v"] if k == v else n for k, n in enumerate(x.shape)]
        )
        places = np.broadcast_to(self.known["p",], [n if k == i else 1 for k, n in enumerate(whole.shape)])
        at = np.arange(self.sizes["v"], dtype=object).reshape([-1 if k == v else 1 for k in range(whole.ndim)])
        return np.where(places == at, whole, 0).sum(axis=v, keepdims=True)

    def _joined(self, a: Values, b: Values) -> Values:
        m = self.family.dims.index("m")
        at = np.arange(self.sizes["m"]).reshape([-1 if k == m else 1 for k in range(a.ndim)])
        return np.where(at < self.join, a, b)


def _power(x: Any) -> Fraction:
    if x != int(x) or abs(x) > MOST_EXPONENT:
        raise Undefined
    return Fraction(2) ** int(x)


def _quotient(a: Any, b: Any) -> Fraction:
    if b == 0:
        raise Undefined
    return Fraction(a) / b


_APPLIED: Mapping[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "neg": np.negative,
    "abs": np.absolute, "exp": np.frompyfunc(_power, 1, 1), "div": np.frompyfunc(_quotient, 2, 1),
}  # fmt: skip


@dataclass(slots=True)
class Enumeration:
    """The equations between the terms of a family; ``tried`` counts terms whose values were taken, at most ``most``."""

    family: Family
    most: int
    tried: int = 0

    def equations(self, operations: int) -> Iterator[tuple[Term, Term]]:
        """Pairs of a term and an earlier one that is no larger, with equal values in all draws."""
        draws = [Draw(self.family, seed) for seed in range(DRAWS)]
        known: dict[Any, list[Term]] = {}
        leaves: list[Term] = [(n,) for n in self.family.leaves if n != "p"] + [("size", d) for d in self.family.sizes]
        levels: list[list[Term]] = [leaves]
        for t in leaves:
            known.setdefault(_key(draws[0].value(t)), []).append(t)
        for size in range(1, operations + 1):
            levels.append([])
            for t in self._of(levels, size, last=size == operations):
                if self.tried >= self.most:
                    return
                self.tried += 1
                try:
                    alike = known.setdefault(_key(draws[0].value(t)), [])
                    old = next((r for r in alike if all(_key(d.value(r)) == _key(d.value(t)) for d in draws)), None)
                except Undefined:
                    continue
                finally:
                    for d in draws if size == operations else ():
                        d.known.pop(t, None)
                if old is None:
                    alike.append(t)
                    levels[size].append(t)
                else:
                    yield t, old

    def _of(self, levels: list[list[Term]], size: int, *, last: bool) -> Iterator[Term]:
        """Terms of a number of operations; of the largest, those that reduce, as others reduce nothing."""
        reducing = bool(self.family.reductions)
        for x in levels[size - 1]:
            for fn in self.family.unary:
                if not last or not reducing or reduces(x):
                    yield (fn, x)
            for monoid, fn, dim in self.family.reductions:
                if not fn and (dim in self.family.dims_of(x) or (self.family.sizes and leaves_of(self.family, x))):
                    yield from [("pick", x)] if monoid == "pick" else self._reduced(monoid, dim, x)
        for left in range(size):
            for a in levels[left]:
                for b in levels[size - 1 - left]:
                    yield from self._pairs(a, b, wanted=not last or not reducing or reduces(a) or reduces(b))

    def _reduced(self, monoid: str, dim: str, x: Term) -> Iterator[Term]:
        yield (monoid, dim, x)
        if "join" in self.family.binary and dim == "m" and not joins(x):
            yield from ((monoid, dim, x, part) for part in PARTS[1:])

    def _pairs(self, a: Term, b: Term, *, wanted: bool) -> Iterator[Term]:
        first = repr(a) <= repr(b)
        for fn in self.family.binary if wanted else ():
            if (fn not in COMMUTES or first) and (a != b or fn == "mul"):
                yield (fn, a, b)
        both = self.family.dims_of(a) & self.family.dims_of(b) if first and self.family.reductions else frozenset[str]()
        for monoid, fn, dim in self.family.reductions:
            if fn and first and dim in both:
                yield from self._reduced(monoid, dim, (fn, a, b))


def _key(x: Values) -> tuple[Any, ...]:
    return (x.shape, *x.ravel().tolist())


def reduces(t: Term) -> bool:
    """Whether there is a reduction in a term."""
    return t[0] in REDUCTIONS or t[0] == "pick" or any(reduces(a) for a in t[1:] if not isinstance(a, str))


def joins(t: Term) -> bool:
    """Whether there is a concat in a term, or a reduction of a part."""
    return t[0] == "join" or len(t) > 3 or any(joins(a) for a in t[1:] if not isinstance(a, str))


def work(family: Family, t: Term) -> float:
    """Points at which operations of a term compute, all dimensions being of one size; dearer primitives count more often."""
    if t[0] in family.leaves or t[0] == "size":
        return 0.0
    space = family.dims_of(t) | ({t[1]} if t[0] in REDUCTIONS else {"v"} if t[0] == "pick" else frozenset[str]())
    own = 64.0 ** len(space) * {"exp": 8, "div": 4}.get(t[0], 1) / (2 if len(t) > 3 else 1)
    return own + sum(work(family, a) for a in set(t[1:]) if not isinstance(a, str))


def alike(family: Family, pair: tuple[Term, Term]) -> str:
    """A pair up to the names of leaves of equal dimensions."""
    groups: dict[str, list[str]] = {}
    for name, dims in family.leaves.items():
        groups.setdefault(dims, []).append(name)
    texts: list[str] = []
    for chosen in itertools.product(*(itertools.permutations(g) for g in groups.values())):
        new = dict(zip([n for g in groups.values() for n in g], [n for g in chosen for n in g], strict=True))
        texts.append(repr(tuple(ordered(_renamed(t, new)) for t in pair)))
    return min(texts)


def _renamed(t: Term, names: Mapping[str, str]) -> Term:
    return (names.get(t[0], t[0]), *(_renamed(a, names) if not isinstance(a, str) else a for a in t[1:]))


def leaves_of(family: Family, t: Term) -> frozenset[str]:
    """The leaves in a term."""
    if t[0] in family.leaves:
        return frozenset({t[0]})
    return frozenset[str]().union(*(leaves_of(family, a) for a in t[1:] if not isinstance(a, str)))


def rewritten(family: Family, t: Term, known: list[tuple[Term, Term]]) -> Term:
    """A term after equations from left to right, their leaves standing for any terms, while that makes less work."""
    if t[0] in family.leaves or t[0] == "size":
        return t
    t = (t[0], *(rewritten(family, a, known) if not isinstance(a, str) else a for a in t[1:]))
    for left, right in known:
        for found in _matches(family, left, t, {}):
            new = _filled(right, found)
            if work(family, new) < work(family, t):
                return rewritten(family, new, known)
    return t


def _matches(family: Family, pattern: Term, t: Term, bound: dict[str, Term]) -> Iterator[dict[str, Term]]:
    if pattern[0] in family.leaves:
        if bound.get(pattern[0], t) == t and family.dims_of(t) <= frozenset(family.leaves[pattern[0]]):
            yield bound | {pattern[0]: t}
        return
    if (
        pattern[0] != t[0]
        or len(pattern) != len(t)
        or [a for a in pattern if isinstance(a, str)] != [a for a in t if isinstance(a, str)]
    ):
        return
    inner = [a for a in pattern[1:] if not isinstance(a, str)]
    given = [a for a in t[1:] if not isinstance(a, str)]
    for args in (given, given[::-1]) if t[0] in COMMUTES else (given,):
        found = [bound]
        for a, x in zip(inner, args, strict=True):
            found = [f for b in found for f in _matches(family, a, x, b)]
        yield from found


def _filled(t: Term, bound: Mapping[str, Term]) -> Term:
    return bound.get(t[0]) or (t[0], *(_filled(a, bound) if not isinstance(a, str) else a for a in t[1:]))


def ordered(t: Term) -> Any:
    """A term without the order and nesting of sums, products and extrema, and with differences as sums."""
    if isinstance(t, str):
        return t
    if t[0] == "sub":
        return ordered(("add", t[1], ("neg", t[2])))
    if t[0] == "neg" and t[1][0] in ("neg", "add", "sub"):
        parts = t[1][1:] if t[1][0] != "sub" else (t[1][1], ("neg", t[1][2]))
        return ordered(parts[0]) if t[1][0] == "neg" else ordered(("add", *(("neg", a) for a in parts)))
    parts = [ordered(a) for a in t[1:]]
    if t[0] in COMMUTES:
        flat = [a for p in parts for a in (p[1:] if not isinstance(p, str) and p[0] == t[0] else (p,))]
        return (t[0], *sorted(flat, key=repr))
    return (t[0], *parts)


# no quotients under reductions: where a divisor is zero, NaN and infinities would change places, and instances refute them
FAMILIES = (
    Family("one point", "i", {"x": "i", "z": "i", "c": "i"}, ("neg", "exp", "abs"), ("add", "sub", "mul", "div", "max", "min")),
    Family(
        "one reduction", "im", {"x": "im", "z": "im", "c": "i", "r": "i"}, ("exp",), ("add", "sub", "mul", "max", "min"),
        (("SUM", "", "m"), ("MAX", "", "m"), ("MIN", "", "m")), sizes="m",
    ),
    Family(
        "contractions", "inmk", {"x": "im", "z": "im", "w": "nm", "u": "nk", "a": "mk", "c": "i", "e": "n"}, (),
        ("add", "sub", "mul"),
        (("SUM", "mul", "m"), ("SUM", "mul", "k"), ("SUM", "", "i"), ("SUM", "", "n"), ("SUM", "", "m"), ("SUM", "", "k")),
    ),
    Family(
        "tropical", "inmk", {"x": "im", "w": "nm", "z": "im", "u": "nk", "a": "mk", "c": "i"}, (), ("add", "sub", "max", "min"),
        (("MAX", "add", "m"), ("MAX", "add", "k"), ("MAX", "", "n"), ("MAX", "", "m"), ("MIN", "add", "m"), ("MIN", "", "n")),
    ),
    Family(
        "gathers", "imv", {"a": "vm", "b": "vm", "w": "m", "s": "v", "p": "i"}, (), ("add", "sub", "mul", "max"),
        (("pick", "", "v"), ("SUM", "", "m"), ("MAX", "", "m"), ("SUM", "mul", "m")),
    ),
    Family(
        "concats", "inm", {"x": "im", "z": "im", "w": "nm", "c": "i"}, (), ("join", "add", "mul", "max", "min"),
        (("SUM", "", "m"), ("MAX", "", "m"), ("MIN", "", "m"), ("SUM", "mul", "m"), ("MAX", "add", "m")),
    ),
)  # fmt: skip
