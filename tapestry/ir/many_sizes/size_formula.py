"""Integers that follow from sizes: ``floor((p . n + q) / d)`` of the sizes n of some symbols, in order, or a multiple of that.

A balanced cut of an affine size is one of these for each part, so that a plan for every size is a list of them: one set for
each device, never one map over devices, which would multiply a device's number and a size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Formula:
    """``times * floor((coefs . n + const) / div) + plus``, div > 0."""

    coefs: tuple[int, ...]
    const: int
    div: int = 1
    times: int = 1
    plus: int = 0

    def at(self, sizes: Sequence[int]) -> int:
        """The value at some sizes."""
        top = sum(c * n for c, n in zip(self.coefs, sizes, strict=True)) + self.const
        return self.times * (top // self.div) + self.plus

    def scaled(self, times: int, plus: int) -> Formula:
        """So many times the formula, and a number: one way to write it for each."""
        times, plus = self.times * times, self.plus * times + plus
        if self.div == 1:
            return Formula(tuple(c * times for c in self.coefs), self.const * times + plus)
        if times == 1:
            return Formula(self.coefs, self.const + plus * self.div, self.div)
        return Formula(self.coefs, self.const % self.div, self.div, times, plus + times * (self.const // self.div))

    def text(self, names: Sequence[str]) -> str:
        """As isl reads it, in parentheses unless it is a name."""
        terms = [n if c == 1 else f"{c} * {n}" for c, n in zip(self.coefs, names, strict=True) if c]
        terms += [str(self.const)] if self.const or not terms else []
        if len(terms) == 1 and self.div == 1 and "*" not in terms[0]:
            return terms[0]
        out = f"floor(({' + '.join(terms)})/{self.div})" if self.div > 1 else f"({' + '.join(terms)})"
        return out if (self.times, self.plus) == (1, 0) else f"({self.times} * {out} + {self.plus})"


class Size(int):
    """An integer of a plan, as it is at the sizes at which the plan was made, which knows its formula.

    It is equal to another one of the same formula alone, and prints as the formula over ``n0``, ``n1``, …: what makes isl's
    text of a graph makes that of all its sizes. Arithmetic gives plain integers.
    """

    formula: Formula

    def __new__(cls, formula: Formula, value: int) -> Size:
        """The integer ``value`` with its formula."""
        out = super().__new__(cls, value)
        out.formula = formula
        return out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.formula == other.formula

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.formula)

    def __str__(self) -> str:
        return self.formula.text(names_of(len(self.formula.coefs)))

    def __repr__(self) -> str:
        return str(self)

    def __format__(self, spec: str) -> str:
        return str(self)


def names_of(count: int) -> tuple[str, ...]:
    """What symbols are called in conditions, whatever they are called in the model."""
    return tuple(f"n{k}" for k in range(count))


def formula_of(value: int) -> Formula | None:
    """The formula of an integer that has one."""
    return value.formula if isinstance(value, Size) else None


def text_of(value: int, names: Sequence[str]) -> str:
    """An integer, or its formula over the names of symbols."""
    found = formula_of(value)
    return str(int(value)) if found is None else found.text(names)


@dataclass(frozen=True, slots=True)
class Region:
    """Sizes that one plan is for: from ``low`` to ``high``, both included, and where ``among`` has an entry, only of those.

    Attributes:
        among: by position of the symbol.
    """

    low: Sizes
    high: Sizes
    among: Mapping[int, Sizes]

    def __contains__(self, sizes: object) -> bool:
        given = cast(Sizes, sizes)
        inside = all(a <= n <= b for a, n, b in zip(self.low, given, self.high, strict=True))
        return inside and all(given[k] in some for k, some in self.among.items())

    def text(self) -> str:
        """The condition on the sizes, as isl reads it."""
        names = names_of(len(self.low))
        rules = [f"{a} <= {n} <= {b}" for a, n, b in zip(self.low, names, self.high, strict=True)]
        rules += [f"({' or '.join(f'{names[k]} = {n}' for n in some)})" for k, some in sorted(self.among.items())]
        return " and ".join(rules)

    def along(self, k: int) -> Sequence[int]:
        """The sizes of one symbol."""
        some = self.among.get(k)
        return range(self.low[k], self.high[k] + 1) if some is None else [n for n in some if self.low[k] <= n <= self.high[k]]

    def only(self, k: int) -> Region:
        """The sizes of one symbol alone."""
        some = {0: self.among[k]} if k in self.among else dict[int, Sizes]()
        return Region((self.low[k],), (self.high[k],), some)

    def corners(self) -> Iterator[Sizes]:
        """The least and the largest sizes, each once."""
        ends = [dict.fromkeys((min(self.along(k)), max(self.along(k)))) for k in range(len(self.low))]
        return iter(product(*ends))

    def near(self, sizes: Sizes) -> Sizes:
        """Other sizes, next to some in the region, where there are other ones."""
        out: list[int] = []
        for k, n in enumerate(sizes):
            some = self.along(k)
            out.append(next((m for m in some if m > n), next((m for m in reversed(some) if m < n), n)))
        return tuple(out)

    def shown(self, names: Sequence[str]) -> str:
        """For people: ``batch 1..4, sequence 128, 256``."""
        out: list[str] = []
        for k, name in enumerate(names):
            some = self.along(k)
            whole = k not in self.among and len(some) > 1
            out.append(f"{name} {some[0]}..{some[-1]}" if whole else f"{name} {', '.join(map(str, some))}")
        return ", ".join(out)
