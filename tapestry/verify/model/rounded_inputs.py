"""Whether two results of a node differ by what rounding does: by its results for inputs that are rounded at random.

A recurrence with large weights multiplies a rounding at every step: its last cells are decided by it, the first are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tapestry.ir.types import Array
from tapestry.onnx_eval.value_kinds import is_array
from tapestry.verify.model.bodies import near
from tapestry.verify.model.cell_tolerance import SPREAD, TRIALS

ROUNDINGS = 4  # of an input, at most


def within_rounding(compute: Callable[[list[Any]], Any], inputs: Sequence[Any], made: Any, other: Any, seed: int = 0) -> bool:
    """Whether another result is as near to one, cell by cell, as those for its inputs a few roundings away.

    Args:
        compute: the result for some inputs.
        made: the result for these.
    """
    if not is_array(made) or made.dtype.kind != "f" or made.shape != np.shape(other):
        return False
    rng, spread, wide = np.random.default_rng(seed), np.zeros(made.shape), made.astype(np.float64)
    for _ in range(TRIALS):
        again = compute([_rounded(v, rng) for v in inputs])
        spread = np.fmax(spread, np.abs(np.asarray(again, np.float64) - wide))
    return bool(np.all(near(made, other) | (np.abs(wide - np.asarray(other, np.float64)) <= SPREAD * spread)))


def _rounded(value: Any, rng: np.random.Generator) -> Any:
    """Numbers a few roundings away; what are no floats of numpy's as they are."""
    if not is_array(value) or value.dtype.kind != "f":
        return value
    unit = ROUNDINGS * float(np.finfo(value.dtype).eps)
    factors: Array = 1 + np.asarray(rng.uniform(-unit, unit, value.shape), np.float64)
    return np.asarray(np.multiply(value, factors), value.dtype)
