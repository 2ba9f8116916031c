"""Columns: a number of a model at every size of a region, and the sizes at which one expression gives it.

A column has an axis for each symbol, of length 1 where the number does not follow from it. What is said of a column is said
of all its entries: no size is left out, so that nothing rests on where one looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from typing import Any

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.many_sizes.size_formula import Formula, Region, Sizes
from tapestry.ir.types import Array

MOST = 1 << 22  # sizes of a region
DIVISORS = 64  # of a quotient
DEGREE = 3  # of a polynomial, along each symbol
CHANCE = 64  # sizes at which a polynomial may be right because it was made to be


@dataclass(frozen=True)
class Grid:
    """All sizes of a region, and those near which expressions are looked for.

    Attributes:
        quotients: with a divisor of more than 1, that gave columns.
    """

    region: Region
    made_at: Sizes
    quotients: set[Formula] = field(default_factory=set[Formula], compare=False)

    def __post_init__(self) -> None:
        """Refuse more sizes than are looked at.

        Raises:
            TapestryError: there are more.
        """
        count = math.prod(map(len, self.along))
        if count > MOST:
            what, why = f"{count:,} sizes are too many to look at", f"a model's arithmetic is done at each; {MOST:,} at most"
            raise TapestryError(what, where="--shape", why=why, hint="a smaller range, or fewer symbols with one")

    @cached_property
    def along(self) -> list[Array]:
        """The sizes of each symbol."""
        return [np.array(self.region.along(k), np.int64) for k in range(len(self.made_at))]

    @cached_property
    def place(self) -> tuple[int, ...]:
        """Where the sizes at which the plan is made are."""
        return tuple(int(np.searchsorted(some, n)) for some, n in zip(self.along, self.made_at, strict=True))

    def axis(self, k: int) -> Array:
        """A symbol's size, as a column."""
        shape = [1] * len(self.made_at)
        shape[k] = -1
        return self.along[k].reshape(shape)

    def constant(self, value: Any) -> Array:
        """A number that is the same at all sizes."""
        return np.asarray(value).reshape((1,) * len(self.made_at))

    def here(self, column: Array) -> Any:
        """What a column, or a tensor behind axes for the symbols, is at the sizes at which the plan is made."""
        return column[tuple(p if n > 1 else 0 for p, n in zip(self.place, column.shape, strict=False))]

    def given_by(self, formula: Formula) -> Array:
        """What a formula gives, as a column."""
        top = sum((self.axis(k) * c for k, c in enumerate(formula.coefs) if c), self.constant(formula.const))
        return formula.times * (top // formula.div) + formula.plus

    def telling(self) -> list[Sizes]:
        """Sizes at which no two of the quotients, and none and a constant, differ by one number alone."""
        out = list[Sizes]()
        for k, some in enumerate(self.along):
            rows = [np.zeros_like(some), *(f.coefs[k] * some + self._others(f, k) for f in self.quotients)]
            divisors = [1, *(f.div for f in self.quotients)]
            lines = list({tuple((row // d).tolist()): row // d for row, d in zip(rows, divisors, strict=True)}.values())
            chosen = [self.place[k]]
            for a, b in combinations(lines, 2):
                gap = a - b
                if (gap[chosen] == gap[chosen[0]]).all() and (gap != gap[chosen[0]]).any():
                    others = np.flatnonzero(gap != gap[chosen[0]])
                    chosen.append(int(others[np.abs(others - self.place[k]).argmin()]))
            out += [tuple(int(some[p]) if j == k else n for j, n in enumerate(self.made_at)) for p in chosen[1:]]
        return out

    def _others(self, f: Formula, k: int) -> int:
        """What a quotient's sum has beside its term of a symbol."""
        return f.const + sum(c * n for j, (c, n) in enumerate(zip(f.coefs, self.made_at, strict=True)) if j != k)

    def first(self, mask: Array, region: Region) -> Sizes | None:
        """Sizes of a part of the region at which a column of truths is set."""
        if not mask.any():
            return None
        parts = [np.flatnonzero(np.isin(some, region.along(k))) for k, some in enumerate(self.along)]
        rows = [p if n > 1 else np.arange(1) for p, n in zip(parts, mask.shape, strict=True)]
        found = np.argwhere(mask[np.ix_(*rows)])
        if not len(found):
            return None
        at = [rows[k][p] for k, p in enumerate(found[0].tolist())]
        return tuple(
            int(some[p]) if n > 1 else m for some, p, n, m in zip(self.along, at, mask.shape, self.made_at, strict=True)
        )

    def uniform(self, column: Array) -> Array:
        """The sizes at which a column is what one expression says that gives it near ``made_at``.

        Expressions are constants, ``floor((p . n + q) / d)`` and polynomials. Any that is right at ``made_at`` will do; the
        simplest is taken that none of the others holds more than twice as often as.
        """
        best: Array = column == self.here(column)
        if best.all() or column.dtype.kind not in "iu":
            return best
        taken: Formula | None = None
        for formula in self._expressions(column):
            mask = (self._polynomial(column) if formula is None else self.given_by(formula)) == column
            if not self.here(mask):
                continue
            often = 2 * best.sum() if formula is not None else max(2 * best.sum(), CHANCE)
            if mask.all() or mask.sum() > often:
                best, taken = mask, formula
            if best.all():
                break
        if taken is not None and taken.div > 1:
            self.quotients.add(taken)
        return best

    def _expressions(self, column: Array) -> Iterator[Formula | None]:
        column = column.astype(np.int64)
        yield from (found for d in range(1, DIVISORS + 1) if (found := self._quotient(column, d)) is not None)
        yield None

    def _quotient(self, column: Array, d: int) -> Formula | None:
        """The quotient with a divisor that gives what is in a column near ``made_at``."""
        value, slopes = int(self.here(column)), list[int]()
        near = [self._window(k, d) if n > 1 else [0] for k, n in enumerate(column.shape)]
        home = [p if n > 1 else 0 for p, n in zip(self.place, column.shape, strict=True)]
        for k, (some, at) in enumerate(zip(self.along, self.place, strict=True)):
            other = next((j for j in near[k] if column.shape[k] > 1 and abs(int(some[j] - some[at])) == d), None)
            if other is None:
                if column.shape[k] > 1:
                    return None
                slopes.append(0)
                continue
            by = d * (int(column[(*home[:k], other, *home[k + 1 :])]) - value)
            slopes.append(by // int(some[other] - some[at]))  # d or -d: no rest
        top = sum((self.axis(k) * p for k, p in enumerate(slopes) if p), self.constant(0))
        index = np.ix_(*near)
        least = d * column[index] - np.broadcast_to(top, column.shape)[index]
        low, high = int(least.max()), int(least.min()) + d - 1
        return None if low > high else Formula(tuple(slopes), low, d)

    def _window(self, k: int, reach: int) -> list[int]:
        """Places of a symbol's sizes that are no further from ``made_at`` than that."""
        some, n = self.along[k], self.made_at[k]
        return list(range(int(np.searchsorted(some, n - reach)), int(np.searchsorted(some, n + reach, "right"))))

    def _polynomial(self, column: Array) -> Array:
        """Newton's polynomial through what is near ``made_at``, of a degree that leaves sizes to hold it to."""
        column = column.astype(np.int64)
        index, bases = list[list[int]](), list[Array]()
        for k, (some, at) in enumerate(zip(self.along, self.place, strict=True)):
            if column.shape[k] == 1:
                index.append([0])
                bases.append(np.ones((1, 1), np.int64))
                continue
            start = max(0, min(at, len(some) - DEGREE - 1))
            count = max(1, min(DEGREE + 1, len(some) - 1 - start, _steps_of_one(some[start:])))
            start = at if count == 1 else start
            index.append(list(range(start, start + count)))
            bases.append(np.stack([_binomial(some - some[start], j) for j in range(count)]))
        found = column[np.ix_(*index)]
        for k in range(found.ndim):
            rows = [np.take(np.diff(found, j, axis=k), [0], axis=k) for j in range(found.shape[k])]
            found = np.concatenate(rows, axis=k)
        out = np.zeros_like(column)
        for at in product(*(range(n) for n in found.shape)):
            term = self.constant(found[at])
            for k, j in enumerate(at):
                shape = [1] * found.ndim
                shape[k] = -1
                term = term * bases[k][j].reshape(shape)
            out = out + term
        return out


def _steps_of_one(some: Array) -> int:
    """How many of some sizes, from the first on, follow each other."""
    gaps = np.flatnonzero(np.diff(some) != 1)
    return int(gaps[0]) + 1 if len(gaps) else len(some)


def _binomial(n: Array, j: int) -> Array:
    """``n`` over ``j``, of negative n too: a product of j numbers in a row is a multiple of ``j!``."""
    out = np.ones_like(n)
    for i in range(j):
        out = out * (n - i)
    return out // math.factorial(j)


def box_without(grid: Grid, bad: Array) -> Region:
    """The largest part of a region around ``made_at`` that is found by taking away, a side at a time, where something is wrong.

    Args:
        bad: for all sizes of the region; not at ``made_at``.
    """
    low, high = [0] * bad.ndim, [n - 1 for n in bad.shape]
    while True:
        inside = tuple(slice(a, b + 1) for a, b in zip(low, high, strict=True))
        wrong = np.argwhere(bad[inside])
        if not len(wrong):
            break
        kept: list[tuple[float, int, int, int]] = []
        for k, at in enumerate(_nearest(wrong + low, grid.place).tolist()):
            if at != grid.place[k]:
                a, b = (at + 1, high[k]) if at < grid.place[k] else (low[k], at - 1)
                kept.append(((b - a + 1) / (high[k] - low[k] + 1), k, a, b))
        _, k, low[k], high[k] = max(kept)
    for k in range(bad.ndim):  # what was taken away along one symbol may be right after all, now that others have fewer sizes
        slabs = bad[tuple(slice(None) if j == k else slice(low[j], high[j] + 1) for j in range(bad.ndim))]
        wrong = np.flatnonzero(np.moveaxis(slabs, k, 0).reshape(bad.shape[k], -1).any(axis=1))
        low[k] = int(max(wrong[wrong < grid.place[k]], default=-1)) + 1
        high[k] = int(min(wrong[wrong > grid.place[k]], default=bad.shape[k])) - 1
    ends = [(int(some[a]), int(some[b])) for some, a, b in zip(grid.along, low, high, strict=True)]
    return Region(tuple(a for a, _ in ends), tuple(b for _, b in ends), grid.region.among)


def _nearest(places: Array, to: Sequence[int]) -> Array:
    return places[np.abs(places - np.array(to)).max(axis=1).argmin()]
