"""Small terms over the IR, all of them up to a number of operations, by their values in whole numbers.

A term is a leaf ``("x",)``, a size ``("size", "m")``, a primitive ``("mul", a, b)``, or a reduction ``("SUM", "m", t)``
over a dimension. ``("pick", "v", t)`` is a gather: the sum over v of what stands where v is the place that is asked for.
Values are integers in numpy arrays of all dimensions of a family, of size one where a term does not vary.

A term with the values of an earlier one makes an equation with it, and no larger terms: what is built on it is built on the
earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Term = Any
Values = np.ndarray[Any, np.dtype[np.int64]]
COMMUTES = frozenset({"add", "mul", "max", "min"})
APPLIED: Mapping[str, np.ufunc] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
REDUCTIONS: Mapping[str, np.ufunc] = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum, "pick": np.add}
DRAWS = 7  # of values and sizes that two terms must agree on


@dataclass(frozen=True, slots=True)
class Family:
    """What terms are made of.

    Attributes:
        dims: letters, one for each dimension.
        leaves: name → the dimensions that it varies along.
        binary: primitives of two operands.
        reductions: (monoid, primitive, dimension): of one term, or (with a primitive) of two as a contraction.
        sizes: dimensions whose size is a term.
    """

    name: str
    dims: str
    leaves: Mapping[str, str]
    binary: tuple[str, ...]
    reductions: tuple[tuple[str, str, str], ...]
    sizes: str = ""

    def dims_of(self, t: Term) -> frozenset[str]:
        """The dimensions that a term varies along."""
        if t[0] in self.leaves:
            return frozenset(self.leaves[t[0]])
        inner = frozenset[str]().union(*map(self.dims_of, parts(t)))
        gathered = {"i"} if t[0] == "pick" else set[str]()
        return (inner - {t[1]}) | gathered if t[0] in REDUCTIONS else inner

    def leaves_of(self, t: Term) -> frozenset[str]:
        """The leaves in a term."""
        return frozenset({t[0]} & self.leaves.keys()).union(*map(self.leaves_of, parts(t)))

    def work(self, t: Term) -> float:
        """Points at which operations of a term compute, all dimensions being of one size."""
        if not parts(t):
            return 0.0
        space = self.dims_of(t) | ({t[1]} if t[0] in REDUCTIONS else frozenset[str]())
        return 64.0 ** len(space) + sum(map(self.work, set(parts(t))))


def parts(t: Term) -> list[Term]:
    """The operands of a term."""
    return [a for a in t[1:] if not isinstance(a, str)]


class Draw:
    """Sizes and values for the leaves of a family; values of terms are kept."""

    def __init__(self, family: Family, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.family = family
        self.sizes = {d: int(rng.integers(*((2, 4) if seed == 0 else (1, 5)))) for d in family.dims}
        self.known: dict[Term, Values] = {}
        for name, dims in family.leaves.items():
            shape = [self.sizes[d] if d in dims else 1 for d in family.dims]
            values, places = rng.integers(1, 5 if seed % 2 else 41, shape), self.sizes.get("v", 0) + 1  # some of them outside
            self.known[(name,)] = rng.integers(-1, places, shape) if name == "p" else values * rng.choice([-1, 1], shape)

    def value(self, t: Term) -> Values:
        """The values of a term."""
        if t not in self.known:
            self.known[t] = self._made(t)
        return self.known[t]

    def _made(self, t: Term) -> Values:
        dims = self.family.dims
        if t[0] == "size":
            return np.full([1] * len(dims), self.sizes[t[1]])
        args = [self.value(a) for a in parts(t)]
        if t[0] not in REDUCTIONS:
            return APPLIED[t[0]](*args)
        axis = dims.index(t[1])
        at = np.arange(self.sizes[t[1]]).reshape([-1 if k == axis else 1 for k in range(len(dims))])
        wide = np.where(at == self.known["p",], args[0], 0) if t[0] == "pick" else args[0] + 0 * at
        return REDUCTIONS[t[0]].reduce(wide, axis=axis, keepdims=True)


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
            for t in self._of(levels, size):
                if size == operations and not reduces(t):  # nothing is built on it that would
                    continue
                if self.tried >= self.most:
                    return
                self.tried += 1
                alike = known.setdefault(_key(draws[0].value(t)), [])
                old = next((r for r in alike if all(_key(d.value(r)) == _key(d.value(t)) for d in draws)), None)
                for d in draws if size == operations else ():
                    d.known.pop(t, None)
                if old is None:
                    alike.append(t)
                    levels[size].append(t)
                else:
                    yield t, old

    def _of(self, levels: list[list[Term]], size: int) -> Iterator[Term]:
        """Terms of a number of operations."""
        of = self.family
        for x in levels[size - 1]:
            for monoid, fn, dim in of.reductions:
                if not fn and (dim in of.dims_of(x) or (of.sizes and of.leaves_of(x))):
                    yield (monoid, dim, x)
        for left in range(size):
            for a in levels[left]:
                for b in levels[size - 1 - left]:
                    first = repr(a) <= repr(b)
                    yield from ((fn, a, b) for fn in of.binary if (fn not in COMMUTES or first) and (a != b or fn == "mul"))
                    both = of.dims_of(a) & of.dims_of(b) if first else frozenset[str]()
                    yield from ((monoid, dim, (fn, a, b)) for monoid, fn, dim in of.reductions if fn and dim in both)


def _key(x: Values) -> tuple[Any, ...]:
    return (x.shape, x.tobytes())


def reduces(t: Term) -> bool:
    """Whether there is a reduction in a term."""
    return t[0] in REDUCTIONS or any(map(reduces, parts(t)))


def rewritten(family: Family, t: Term, known: list[tuple[Term, Term]]) -> Term:
    """A term after equations from left to right, their leaves standing for any terms, while that makes less work."""
    t = (t[0], *(a if isinstance(a, str) else rewritten(family, a, known) for a in t[1:]))
    for left, right in known:
        for found in _matches(family, left, t, {}):
            new = _bound_term(right, found)
            if family.work(new) < family.work(t):
                return rewritten(family, new, known)
    return t


def _matches(family: Family, pattern: Term, t: Term, bound: dict[str, Term]) -> Iterator[dict[str, Term]]:
    if pattern[0] in family.leaves:
        if bound.get(pattern[0], t) == t and family.dims_of(t) <= frozenset(family.leaves[pattern[0]]):
            yield bound | {pattern[0]: t}
        return
    inner, given = parts(pattern), parts(t)
    if pattern[0] != t[0] or (pattern[1] != t[1] and isinstance(pattern[1], str)):
        return
    for args in (given, given[::-1]) if t[0] in COMMUTES else (given,):
        found = [bound]
        for a, x in zip(inner, args, strict=True):
            found = [f for b in found for f in _matches(family, a, x, b)]
        yield from found


def _bound_term(t: Term, bound: Mapping[str, Term]) -> Term:
    return bound.get(t[0]) or (t[0], *(a if isinstance(a, str) else _bound_term(a, bound) for a in t[1:]))


def ordered(t: Term) -> Any:
    """A term without the order and nesting of sums, products and extrema, and with differences as sums."""
    if t[0] == "sub":
        return ordered(("add", t[1], ("neg", t[2])))
    if t[0] == "neg" and t[1][0] in ("neg", "add", "sub"):
        inner = t[1][1:] if t[1][0] != "sub" else (t[1][1], ("neg", t[1][2]))
        return ordered(inner[0]) if t[1][0] == "neg" else ordered(("add", *(("neg", a) for a in inner)))
    made = [a if isinstance(a, str) else ordered(a) for a in t[1:]]
    if t[0] in COMMUTES:
        return (t[0], *sorted((a for p in made for a in (p[1:] if p[0] == t[0] else (p,))), key=repr))
    return (t[0], *made)


# no quotients: where a divisor is zero, NaN and infinities would change places, and instances refute them
FAMILIES = (
    Family(
        "one reduction", "im", {"x": "im", "z": "im", "c": "i", "r": "i"}, ("add", "sub", "mul", "max", "min"),
        (("SUM", "", "m"), ("MAX", "", "m"), ("MIN", "", "m")), sizes="m",
    ),
    Family(
        "contractions", "inmk", {"x": "im", "z": "im", "w": "nm", "u": "nk", "a": "mk", "c": "i", "e": "n"},
        ("add", "sub", "mul"),
        (("SUM", "mul", "m"), ("SUM", "mul", "k"), ("SUM", "", "i"), ("SUM", "", "n"), ("SUM", "", "m"), ("SUM", "", "k")),
    ),
    Family(
        "tropical", "inmk", {"x": "im", "w": "nm", "z": "im", "u": "nk", "a": "mk", "c": "i"}, ("add", "sub", "max", "min"),
        (("MAX", "add", "m"), ("MAX", "add", "k"), ("MAX", "", "n"), ("MAX", "", "m"), ("MIN", "add", "m"), ("MIN", "", "n")),
    ),
    Family(
        "gathers", "imv", {"a": "vm", "b": "vm", "w": "m", "s": "v", "p": "i"}, ("add", "sub", "mul", "max"),
        (("pick", "", "v"), ("SUM", "", "m"), ("MAX", "", "m"), ("SUM", "mul", "m")),
    ),
)  # fmt: skip
