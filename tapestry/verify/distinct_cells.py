"""The distinct cells among many positions of a tensor, and where each position's is: as `numpy.unique`, without sorting."""

from __future__ import annotations

import numpy as np

from tapestry.ir.types import Array

SPARSE = 16  # cells of a tensor for each position, from which on sorting is quicker


def distinct_cells(places: Array, size: int) -> tuple[Array, Array]:
    """The cells, ascending, and for every position the number of its cell, in the positions' shape.

    Args:
        places: row-major positions, each at least 0 and under ``size``.
        size: cells of the tensor.
    """
    if size > SPARSE * places.size:
        cells, number = np.unique(places, return_inverse=True)
        return cells, number.reshape(places.shape)
    met = np.zeros(size, bool)
    met[places] = True
    cells = np.flatnonzero(met)
    number = np.empty(size, np.int64)
    number[cells] = np.arange(len(cells))
    return cells, number[places]
