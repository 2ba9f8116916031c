"""Whether a value at a cell is the reference's: the same up to rounding, or to what rounding decides at that very cell.

First the result in float64 against a few roundings of the operation's coarsest type, and of everything that it sums. What is
farther away is judged by evidence: the cell is computed again with every rounding made larger and random. A value is accepted
where it lies within the spread of the results; one behind a discontinuity (a rounding, a comparison, the place of a maximum)
where one of them is exactly that value. At last, where infinities and NaN are about, as the graph's own types compute it.
"""

from __future__ import annotations

import numpy as np

from tapestry.ir.graph import Block
from tapestry.ir.types import Array
from tapestry.verify.model.cell_values import UNIT, CellValues

NEAR = 16.0  # roundings, of the value and of a typical one
TRIALS = 12
UNLIKE = 2.5  # of Kolmogorov and Smirnov's statistic: one in 100,000 by chance
SPREAD = 4.0  # times as far from the result as the farthest trial


def same(values: Array, slack: Array, reference: Array, dtype: str, unit: float, typical_of: Array | None = None) -> Array:
    """Cells that are the reference's up to rounding; what is a typical value is taken from it, or from ``typical_of``."""
    if dtype not in UNIT:
        return values == reference
    with np.errstate(all="ignore"):
        a, b = as_stored(values, dtype), reference.astype(np.float64)
        finite = np.abs(b if typical_of is None else typical_of.astype(np.float64))
        finite = finite[np.isfinite(finite)]
        typical = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
        near = np.abs(a - b) <= NEAR * max(unit, UNIT[dtype]) * (np.abs(b) + typical) + 2 * np.where(
            np.isfinite(slack), slack, 0
        )
    return (near & np.isfinite(b)) | (a == b) | (np.isnan(a) & np.isnan(b))


def as_stored(values: Array, dtype: str) -> Array:
    """Values in float64, as infinite as their type makes them."""
    from tapestry.ir.types import numpy_dtype

    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        return np.where(np.isinf(values.astype(numpy_dtype(dtype)).astype(np.float64)), np.copysign(np.inf, wide), wide)


def explained(cells: CellValues, op: Block, k: int, points: Array, reference: Array, dtype: str, seed: int) -> Array:
    """Cells whose value rounding explains, of some that are not near their reference."""
    rng = np.random.default_rng(seed)
    middle = cells.block(op, points)[k][0]
    found = np.zeros(len(points), bool)
    floating = dtype in UNIT
    spread = np.zeros(len(points))
    for _ in range(TRIALS):
        noisy = CellValues(cells.graph, cells.known, noise=rng, coarsest=cells.coarsest).block(op, points)[k][0]
        with np.errstate(all="ignore"):
            if floating:
                moved = np.abs(noisy - middle)
                spread = np.fmax(spread, np.where(np.isinf(moved), 0, moved))
                stored = as_stored(noisy, dtype)
                near = np.abs(stored - reference) <= NEAR * UNIT[dtype] * np.abs(reference.astype(np.float64))
                near = np.where(np.isfinite(reference), near, stored == reference)
                found |= near | ((np.isnan(noisy) & np.isnan(reference.astype(np.float64))) & ~np.isnan(middle))
            else:
                found |= noisy == reference
    if floating:
        with np.errstate(all="ignore"):
            found |= np.abs(middle - reference.astype(np.float64)) <= SPREAD * spread
        typed = CellValues(cells.graph, cells.known, wide=False, coarsest=cells.coarsest)
        made = typed.block(op, points)[k][0]
        found |= same(made, np.zeros(len(points)), reference, dtype, typed.unit)
    return found


def other_distribution(theirs: Array, mine: Array) -> str:
    """How two samples differ, by Kolmogorov and Smirnov's test; nothing where they may be of one distribution."""
    a, b = np.sort(theirs.reshape(-1).astype(np.float64)), np.sort(mine.reshape(-1).astype(np.float64))
    if not a.size or not b.size:
        return ""
    every = np.concatenate([a, b])
    apart = np.abs(np.searchsorted(a, every, "right") / a.size - np.searchsorted(b, every, "right") / b.size).max()
    if apart * np.sqrt(a.size * b.size / (a.size + b.size)) <= UNLIKE:
        return ""
    return f"means {a.mean():.4g} and {b.mean():.4g}, standard deviations {a.std():.4g} and {b.std():.4g}"
