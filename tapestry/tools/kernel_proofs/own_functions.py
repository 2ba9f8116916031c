"""Functions that a source brings along: which primitive each is, found by its values and not by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from tapestry.ir.expr import PRIMITIVES
from tapestry.ir.types import Array
from tapestry.tools.kernel_proofs.lane_tiles import Tile
from tapestry.tools.kernel_proofs.term.evaluation import Evaluation
from tapestry.tools.kernel_proofs.term.terms import Terms, Unsupported
from tapestry.verify.interp import NUMPY

Said = Callable[[Terms, list[Tile]], Any]
CLOSE = 1e-6  # relative: formulas of helpers are approximations
_known: dict[tuple[object, tuple[str, ...]], str | None] = {}


def primitive_of(text: object, name: str, kinds: tuple[str, ...], said: Said) -> str | None:
    """The primitive that a function agrees with at every point of a sample; ``None`` when with none.

    Args:
        text: what the function says, by which answers are kept; ``kinds`` of its arguments.
        said: gives the function as a term of terms of its arguments.
    """
    key = text, kinds
    if key not in _known:
        _known[key] = _found(name, kinds, said)
    return _known[key]


def _found(name: str, kinds: tuple[str, ...], said: Said) -> str | None:
    kind = next(iter(kinds), "bool")
    if set(kinds) != {kind} or kind == "bool" or len(kinds) > 2:
        return None
    points = _points(kind, len(kinds))
    try:
        values = _values_of_terms(kinds, said, points)
    except (Unsupported, AttributeError):
        return None
    fits = [fn for fn, p in PRIMITIVES.items() if p.arity == len(kinds) and p.result in ("same", "float") and fn in NUMPY]
    named = sorted(fits, key=lambda fn: not name.startswith(fn))
    return next((fn for fn in named if _agrees(fn, points, values)), None)


def _values_of_terms(kinds: tuple[str, ...], said: Said, points: list[Array]) -> Array:
    terms = Terms()
    at = terms.variable("x", len(points[0]))
    ins = [Tile(terms.load(f"x{k}", kind, at, terms.true, terms.unknown)) for k, kind in enumerate(kinds)]
    made = said(terms, ins)
    names, found = Evaluation(terms, {}, {f"x{k}": p for k, p in enumerate(points)}).of(made.term)
    return np.broadcast_to(found, len(points[0])) if not names else found


def _agrees(fn: str, points: list[Array], values: Array) -> bool:
    with np.errstate(all="ignore"):
        try:
            right = np.asarray(NUMPY[fn](*points))
        except (TypeError, ValueError):
            return False
        if right.dtype.kind not in "fi" or values.dtype.kind not in "fi":
            return False
        finite = np.isfinite(right) & (np.abs(right) < 1e30)
        near = np.abs(values - right) <= CLOSE * (np.abs(right) + 1e-12 / CLOSE) + 1e-9
    return bool(finite.mean() > 0.2 and np.all(near[finite]))


@lru_cache
def _points(kind: str, count: int) -> list[Array]:
    rng = np.random.default_rng(7)
    if kind == "int":
        one = np.array([*range(-20, 21), 63, 64, 65, 1000, -1000], np.int64)
    else:
        one = np.concatenate([np.linspace(-8, 8, 65), np.arange(-5, 6) / 2, rng.uniform(-1.2, 1.2, 40), [30.0, -30.0, 1e-4]])
    if count == 1:
        return [one]
    a, b = np.meshgrid(one, one)
    return [a.reshape(-1), b.reshape(-1)]
