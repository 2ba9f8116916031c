"""Values of terms in float64, at many values of their variables at once: arrays with an axis per variable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from tapestry.ir.index import Aff, Floor
from tapestry.ir.types import Array
from tapestry.tools.kernel_proofs.kernel_text import NOT_GIVEN
from tapestry.tools.kernel_proofs.term.terms import Terms, Unsupported
from tapestry.verify.interp import NUMPY

Named = tuple[tuple[str, ...], Array]  # variables, sorted, and an axis for each
MOST_ELEMENTS = 1 << 25  # elements of one array
FOLDS: dict[str, np.ufunc] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.logical_or,
    "and": np.logical_and,
}
CALLS = {
    "imul": "mul",
    "idiv": "div",
    "imod": "fmod",
    "floormod": "mod",
    "log": "log",
    "floor": "floor",
    "ceil": "ceil",
}


COMPARISONS = {"same": np.equal, "feq": np.equal, "flt": np.less, "fle": np.less_equal}
PLAIN: dict[str, Callable[..., Array]] = {"not": np.logical_not, "where": np.where, "exp": np.exp, **COMPARISONS}


class OutOfReach(Exception):
    """More numbers than may be computed at once."""


@dataclass
class Evaluation:
    """Evaluates terms.

    Attributes:
        at: the values of free variables; others run over all that they have.
        data: contents of the buffers; a cell outside of one is a NaN (or -1 of integers).
    """

    terms: Terms
    at: Mapping[str, Array]
    data: Mapping[str, Array]
    known: dict[int, Named] = field(default_factory=dict[int, Named])

    def of(self, t: int) -> Named:
        """The values of a term."""
        if t not in self.known:
            with np.errstate(all="ignore"):
                self.known[t] = self._of(t)
        return self.known[t]

    def variable(self, name: str) -> Named:
        """The values of a variable."""
        return (name,), np.asarray(self.at[name]) if name in self.at else np.arange(self.terms.sizes[name])

    def aff(self, e: Aff) -> Named:
        """The values of an index expression."""
        total: Named = ((), np.asarray(e.const, np.int64))
        for atom, c in e.terms:
            if isinstance(atom, str):
                names, a = self.of(int(atom[1:])) if atom[0] == "#" else self.variable(atom)
            else:
                names, a = self.aff(atom.arg)
                a = a // atom.div if isinstance(atom, Floor) else a % atom.div
            names, (x, y) = evaluated_together([total, (names, a.astype(np.int64) * c)])
            total = names, x + y
        return total

    def _of(self, t: int) -> Named:
        key = self.terms.keys[t]
        match key:
            case ("int" | "ge" | "eq", a):
                names, x = self.aff(a)
                return names, x if key[0] == "int" else x >= 0 if key[0] == "ge" else x == 0
            case ("const", value):
                return (), np.asarray(value, np.float64)
            case ("true",) | ("false",):
                return (), np.asarray(key[0] == "true")
            case ("unknown",):
                return (), np.asarray(math.nan)
            case ("load", buffer, at, mask, other):
                return self._load(buffer, at, mask, other)
            case ("reduce", fn, _, body):
                return self._reduce(t, fn, body)
            case ("carried", *_):
                raise Unsupported("what a loop carries")
            case _:
                names, arrays = evaluated_together([self.of(x) for x in self.terms.parts(t)])
                return names, self._call(key, arrays)

    def _call(self, key: tuple[Any, ...], arrays: list[Array]) -> Array:
        match key:
            case ("add", base, parts):
                return sum((c * a for a, (_, c) in zip(arrays, parts, strict=True)), np.asarray(base))
            case ("mul", parts):
                return math.prod((_power(a, e) for a, (_, e) in zip(arrays, parts, strict=True)), start=np.ones(()))
            case ("all", _):
                return np.logical_and.reduce(np.broadcast_arrays(*arrays))
            case (fn, *_) if fn in PLAIN:
                return PLAIN[fn](*arrays)
            case (fn, _):
                return _applied(fn, arrays)
            case _:
                raise Unsupported(f"{key[0]}")

    def _load(self, buffer: str, at: Aff, mask: int, other: int) -> Named:
        names, (place, inside, rest) = evaluated_together([self.aff(at), self.of(mask), self.of(other)])
        if buffer.startswith(NOT_GIVEN):
            if np.any(inside):
                raise Unsupported(f"{buffer} read all the same")
            return names, rest
        cells = self.data[buffer]
        there = (place >= 0) & (place < len(cells))
        value = cells[np.where(there, place, 0)] if len(cells) else np.zeros(place.shape, cells.dtype)
        value = np.where(there, value, np.nan if cells.dtype.kind == "f" else value.dtype.type(0))
        return names, value if self.terms.keys[mask] == ("true",) else np.where(inside, value, rest)

    def _reduce(self, t: int, fn: str, body: int) -> Named:
        bound = self.terms.bound(t)
        if fn == "add" and self.terms.keys[body][0] == "mul":
            factors = [(n, _power(a, e)) for (n, a), e in ((self.of(x), e) for x, e in self.terms.keys[body][1])]
            return _contracted(factors, bound)
        names, a = self.of(body)
        axes = tuple(k for k, n in enumerate(names) if n in bound)
        missing = math.prod(self.terms.sizes[n] for n in bound if n not in names)
        folded = FOLDS[fn].reduce(a, axis=axes) if axes else a
        if missing != 1 and fn in ("add", "mul"):
            folded = folded * missing if fn == "add" else folded**missing
        return tuple(n for n in names if n not in bound), folded


def evaluated_together(items: list[Named]) -> tuple[tuple[str, ...], list[Array]]:
    """Arrays over the same axes, of extent 1 where one does not depend on a variable."""
    names = tuple(sorted({n for own, _ in items for n in own}))
    sizes = {n: a.shape[k] for own, a in items for k, n in enumerate(own)}
    if math.prod(sizes.values()) > MOST_ELEMENTS:
        raise OutOfReach
    return names, [a.reshape([sizes[n] if n in own else 1 for n in names]) for own, a in items]


def _contracted(factors: list[Named], bound: list[str]) -> Named:
    """A sum of products, by numpy's contraction."""
    names = sorted({n for own, _ in factors for n in own})
    if len(names) > 50:
        raise OutOfReach
    letters = {n: chr(97 + k) if k < 26 else chr(39 + k) for k, n in enumerate(names)}
    left = tuple(n for n in names if n not in bound)
    sizes = {n: a.shape[k] for own, a in factors for k, n in enumerate(own)}
    if math.prod(sizes[n] for n in left) > MOST_ELEMENTS or math.prod(sizes.values()) > MOST_ELEMENTS * 256:
        raise OutOfReach
    text = ",".join("".join(letters[n] for n in own) for own, _ in factors)
    made = np.einsum(f"{text}->{''.join(letters[n] for n in left)}", *(a.astype(np.float64) for _, a in factors), optimize=True)
    return left, made


def _power(a: Array, e: float) -> Array:
    if e == 1.0:
        return a
    return np.power(np.asarray(a, np.float64), int(e) if float(e).is_integer() and e > 0 else e)


def _applied(fn: str, arrays: list[Array]) -> Array:
    if fn in ("max", "min"):
        return reduce(FOLDS[fn], arrays)
    if fn == "trunc":
        return np.trunc(np.nan_to_num(arrays[0], nan=0.0, posinf=0.0, neginf=0.0)).astype(np.int64)
    if fn.endswith(" bits"):
        width = int(fn.removeprefix("u").removesuffix(" bits"))
        return arrays[0].astype(f"{'u' if fn[0] == 'u' else ''}int{width}").astype(np.int64)
    name = CALLS.get(fn, fn)
    if name not in NUMPY:
        raise Unsupported(f"'{fn}' has no value")
    return np.asarray(NUMPY[name](*arrays))
