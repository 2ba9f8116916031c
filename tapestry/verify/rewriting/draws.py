"""Drawn values for the cells of a region's inputs: a function of the tensor and the cell, so that nothing has to be stored.

Every draw has a purpose. ``exact``: floats are multiples of 1/32 of at most 2, an eighth of them 0; float64 holds sums of
their products without rounding. ``range``: up to 128, and around the constants of the region. ``awkward``: a third of the
floats are infinite, NaN, -0 or 1e30. ``dense``: floats with all their digits. ``positive``: for logarithms and roots, and
with ``negative`` for maxima and minima. ``off`` and ``on``: booleans all alike. A *poke* puts one value, such as NaN, into
chosen cells of one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tapestry.ir.types import Array, Tensor, numpy_dtype

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64's (Steele, Lea and Flood, OOPSLA'14)
_GAMMA = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One way of drawing, for inputs that are numbered in order.

    Attributes:
        numbers, scale: constants of the region, and the greatest value over 2, for ``range``.
        most: the greatest extent in the region: integers may be places.
        poke: tensor to (some of its cells, the value that each gets).
        places: of tensors of places the first one and the end.
    """

    kind: str
    numbers: Sequence[float] = ()
    most: int = 8
    scale: int = 64
    poke: Mapping[str, tuple[Array, Array]] = field(default_factory=dict[str, tuple[Array, Array]])
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def values(self, t: Tensor, ordinal: int, flat: Array) -> Array:
        """Values of some cells (row-major positions), in the tensor's dtype."""
        bits = _bits(ordinal * 64 + _seed(self.kind), flat)
        dtype = numpy_dtype(t.dtype)
        if t.dtype == "bool":
            drawn = np.full(flat.shape, self.kind == "on") if self.kind in ("on", "off") else (bits & np.uint64(1)).astype(bool)
            return self._poked(t, flat, drawn)
        if np.issubdtype(dtype, np.integer) or t.dtype[0] in "iu":
            out = self._integers(t, bits).astype(dtype)
            if t.name in self.places:
                first, end = self.places[t.name]
                out = (first + np.mod(out.astype(np.int64) - first, end - first)).astype(dtype)
        else:
            out = self._floats(bits).astype(dtype)
        return self._poked(t, flat, out)

    def _poked(self, t: Tensor, flat: Array, out: Array) -> Array:
        if t.name not in self.poke:
            return out
        out = out.copy()
        for cell, value in zip(*self.poke[t.name], strict=True):
            out[flat == cell] = value
        return out

    def _floats(self, bits: Array) -> Array:
        if self.kind == "dense":
            return ((bits >> np.uint64(11)).astype(np.float64) / (1 << 53) - 0.5) * 4
        eighths = (bits % np.uint64(129)).astype(np.float64) - 64
        small = np.where(bits >> np.uint64(61) == 0, 0.0, eighths / 32)
        if self.kind == "awkward":
            odd = np.array([np.inf, -np.inf, np.nan, -0.0, 1e30])[((bits >> np.uint64(8)) % np.uint64(5)).astype(np.int64)]
            return np.where((bits >> np.uint64(40)) % np.uint64(3) == 0, odd, small)
        if self.kind == "positive":
            return np.abs(small) + 0.25
        if self.kind == "negative":
            return -np.abs(small) - 0.25
        if self.kind != "range":
            return small
        wide = np.asarray(small * self.scale)
        near = np.array([*(c * f for c in self.numbers for f in (0.5, 0.99, 1, 1.01, 2, -1)), 0.0])
        picked = near[((bits >> np.uint64(8)) % np.uint64(len(near))).astype(np.int64)]
        return np.where((bits >> np.uint64(40)) % np.uint64(3) == 0, picked, wide)

    def _integers(self, t: Tensor, bits: Array) -> Array:
        signed = not t.dtype.startswith("u")
        if self.kind in ("positive", "negative"):
            return np.asarray(1 + (bits % np.uint64(9)).astype(np.int64)) * (-1 if signed and self.kind == "negative" else 1)
        small = (bits % np.uint64(9)).astype(np.int64) - (4 if signed else 0)
        places = (bits % np.uint64(max(1, self.most))).astype(np.int64)
        which = (bits >> np.uint64(40)) % np.uint64(4)
        out = np.where(which == 1, places, small)
        if self.kind == "range" and numpy_dtype(t.dtype).itemsize > 1:
            out = np.where(which == 2, bits.astype(np.int64) >> (64 - 8 * numpy_dtype(t.dtype).itemsize + (not signed)), out)
        if numpy_dtype(t.dtype).itemsize == 1 and t.dtype in ("i8", "u8"):
            full = (bits % np.uint64(256)).astype(np.int64) - (128 if signed else 0)
            out = np.where(which >= 2, full, np.clip(out, -128 if signed else 0, 127))
        return out


def _seed(kind: str) -> int:
    return sum(kind.encode()) % 64


def _bits(stream: int, flat: Array) -> Array:
    x = flat.astype(np.uint64) + np.uint64((stream + 1) * _GAMMA & _WORD)
    with np.errstate(over="ignore"):
        x = x * np.uint64(_GAMMA)
        x = (x ^ (x >> np.uint64(30))) * _MIX[0]
        x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))
