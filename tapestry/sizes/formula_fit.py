"""Formulas of integers that are known at some sizes: a guess, which the laws of the plan decide about.

``floor((p . n + q) / d)`` has the slope p / d along each symbol between sizes that differ by a multiple of d; what q may then
be is an interval for each size, and all of them have a common one or the guess fails. A size for each remainder modulo d
makes the formula unique; so do quotients that the model is known to make of its sizes, which are tried before others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np

from tapestry.ir.many_sizes.size_formula import Formula, Sizes

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def fitted(
    values: Array, sizes: Sequence[Sizes], divisors: Sequence[int], known: Sequence[Formula] = ()
) -> tuple[dict[int, Formula], list[int]]:
    """Formulas of columns of integers.

    Args:
        values: [sizes, columns].
        divisors: the d to try, the first that fits is taken.
        known: quotients, multiples of which are tried where 1 does not fit.

    Returns:
        formulas by column, of those that are not the same at all sizes; and the columns that no formula fits.
    """
    changing = np.flatnonzero((values != values[:1]).any(axis=0))
    out, failed = dict[int, Formula](), list[int]()
    if not len(changing):
        return out, failed
    distinct, which = np.unique(values[:, changing], axis=1, return_inverse=True)
    found = [_formula(column, sizes, divisors, known) for column in distinct.T.tolist()]
    for at, k in zip(changing.tolist(), which.reshape(-1).tolist(), strict=True):
        formula = found[k]
        if formula is None:
            failed.append(at)
        else:
            out[at] = formula
    return out, failed


def _formula(
    column: Sequence[int], sizes: Sequence[Sizes], divisors: Sequence[int], known: Sequence[Formula]
) -> Formula | None:
    plain = _with_divisor(column, sizes, 1)
    if plain is not None:
        return plain
    of_known = next(filter(None, (_multiple(column, sizes, f) for f in known)), None)
    if of_known is not None:
        return of_known
    found = next(filter(None, (_with_divisor(column, sizes, d) for d in divisors)), None)
    step = gcd(*(v - column[0] for v in column))
    if found is not None or step == 1:
        return found
    steps = [(v - column[0]) // step for v in column]
    found = next(filter(None, (_with_divisor(steps, sizes, d) for d in divisors)), None)
    return None if found is None else found.scaled(step, column[0])


def _multiple(column: Sequence[int], sizes: Sequence[Sizes], f: Formula) -> Formula | None:
    """So many times a formula and a number, if that is the column."""
    values = [f.at(size) for size in sizes]
    other = next((k for k, v in enumerate(values) if v != values[0]), None)
    if other is None or (column[other] - column[0]) % (values[other] - values[0]):
        return None
    times = (column[other] - column[0]) // (values[other] - values[0])
    found = f.scaled(times, column[0] - times * values[0]) if times else None
    return found if found is not None and [found.at(size) for size in sizes] == list(column) else None


def _with_divisor(column: Sequence[int], sizes: Sequence[Sizes], d: int) -> Formula | None:
    slopes: list[int] = []
    for k in range(len(sizes[0])):
        slope = _slope(column, sizes, k, d)
        if slope is None:
            return None
        slopes.append(slope)
    least = [d * v - sum(p * n for p, n in zip(slopes, size, strict=True)) for v, size in zip(column, sizes, strict=True)]
    low, high = max(least), min(least) + d - 1
    if low > high:
        return None
    const = min(max(0, low), high)
    g = gcd(d, *slopes)
    return Formula(tuple(p // g for p in slopes), const // g, d // g)


def _slope(column: Sequence[int], sizes: Sequence[Sizes], k: int, d: int) -> int | None:
    """d times the slope along one symbol, from two sizes that differ in it alone, by a multiple of d; 0 if it never varies."""
    first, varies = sizes[0], False
    for v, size in zip(column[1:], sizes[1:], strict=True):
        by = size[k] - first[k]
        varies = varies or by != 0
        if by and by % d == 0 and all(a == b for j, (a, b) in enumerate(zip(size, first, strict=True)) if j != k):
            return d * (v - column[0]) // by if d * (v - column[0]) % by == 0 else None
    return None if varies else 0
