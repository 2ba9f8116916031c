"""Projections of random blocks, as IR text and as numpy: what is read at every point of an index space."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tests.fuzz.generate.evaluate import Array

Grid = Mapping[str, Array]  # the coordinates of every point, a sparse array per dimension


@dataclass(frozen=True, slots=True)
class Term:
    """``coef * dim``, or coef times ``floor((dim + by)/div)`` or ``(dim + by) mod div``."""

    coef: int
    dim: str
    kind: str = ""
    by: int = 0
    div: int = 1

    def __str__(self) -> str:
        inside = f"({self.dim} + {self.by})"
        text = {"": self.dim, "floor": f"floor({inside}/{self.div})", "mod": f"({inside} mod {self.div})"}[self.kind]
        return f"{'-' if self.coef < 0 else '+'} {abs(self.coef)}*{text}"

    def at(self, grid: Grid) -> Array:
        """Its value at every point."""
        x = grid[self.dim] + self.by
        return self.coef * (x if not self.kind else x // self.div if self.kind == "floor" else x % self.div)


@dataclass(frozen=True, slots=True)
class Index:
    """A sum of terms and a number."""

    terms: tuple[Term, ...] = ()
    const: int = 0

    def __str__(self) -> str:
        text = " ".join(map(str, self.terms)).removeprefix("+ ")
        return f"{text or 0} {'-' if self.const < 0 else '+'} {abs(self.const)}"

    def at(self, grid: Grid) -> Array:
        """Its value at every point."""
        return sum((t.at(grid) for t in self.terms), np.asarray(self.const))


@dataclass(frozen=True, slots=True)
class Projection:
    """What a block reads of a tensor.

    Attributes:
        when: expressions and ``>=`` or ``==``: each compared with 0.
        other: what is read where one of them does not hold.
    """

    tensor: str
    index: tuple[Index, ...]
    when: tuple[tuple[Index, str], ...] = ()
    other: int = 0

    def text(self, *, real: bool) -> str:
        """As IR text."""
        when = "".join(f" when {e} {op} 0" for e, op in self.when)
        other = f" else {float(self.other) if real else self.other}" if when else ""
        return f"{self.tensor}[{', '.join(map(str, self.index))}]{when}{other}"

    def at(self, a: Array, grid: Grid) -> Array:
        """The values read of a tensor, at every point."""
        held = np.asarray(True)
        for e, op in self.when:
            x = e.at(grid)
            held = held & (x >= 0 if op == ">=" else x == 0)
        places = tuple(np.where(held, e.at(grid), 0) for e in self.index)
        return np.where(held, a[places], np.asarray(self.other, a.dtype))


def along(*names: str) -> tuple[Index, ...]:
    """An index per dimension."""
    return tuple(Index((Term(1, n),)) for n in names)


def grid_of(sizes: Mapping[str, int]) -> Grid:
    """Every point of an index space."""
    places = np.meshgrid(*(np.arange(n) for n in sizes.values()), indexing="ij", sparse=True) if sizes else ()
    return dict(zip(sizes, places, strict=True))


def varied(p: Projection, names: list[str], rng: random.Random) -> Projection:
    """One axis, or a guard, otherwise than it was."""
    every = rng.choice(names)
    if not p.index or rng.random() < 0.15:
        e, op = Index((Term(rng.choice([1, -1]), every),), rng.randint(-2, 2)), ">="
        if rng.random() < 0.3:
            e, op = Index((Term(1, every, "mod", rng.randint(0, 3), rng.choice([2, 3])),)), "=="
        return replace(p, when=(*p.when, (e, op)), other=rng.choice([0, 0, 1]))
    axis, out = rng.randrange(len(p.index)), list(p.index)
    change = rng.choice(["axis", "more", "turn", "step", "gap", "none", "swap", "again"])
    if change == "swap":
        other = rng.randrange(len(out))
        out[axis], out[other] = out[other], out[axis]
    elif change == "again":
        out.insert(axis, out[axis])
    else:
        out[axis] = _changed(out[axis], every, change, rng)
    return replace(p, index=tuple(out))


def _changed(e: Index, every: str, change: str, rng: random.Random) -> Index:
    if change == "axis" or not e.terms:
        return Index((Term(1, every),))
    if change == "more":
        return replace(e, terms=(*e.terms, Term(rng.choice([1, -1, 2]), every)))
    if change == "turn":
        return replace(e, terms=tuple(replace(t, coef=-t.coef) for t in e.terms))
    if change == "step":
        return replace(e, terms=(replace(e.terms[0], coef=e.terms[0].coef * 2), *e.terms[1:]))
    if change == "gap":
        odd = Term(1, e.terms[0].dim, rng.choice(["floor", "mod"]), rng.randint(0, 2), rng.choice([2, 3]))
        return replace(e, terms=(odd, *e.terms[rng.randint(0, 1) :]))
    return Index()


def settled(p: Projection, grid: Grid, rng: random.Random) -> tuple[Projection, tuple[int, ...]]:
    """The projection into a tensor of some shape that holds what is read, or less of it and guards for the rest."""
    index: list[Index] = []
    shape: list[int] = []
    when = list(p.when)
    for e in p.index:
        parts = [t.at(grid) for t in e.terms]  # each for itself, as the laws bound floors and remainders
        if not all(x.size for x in parts):  # nothing is read: any tensor holds it
            index.append(e)
            shape.append(rng.randint(0, 2))
            continue
        lo, hi = (e.const + sum(int(end(x)) for x in parts) for end in (np.min, np.max))
        outside = rng.random() < 0.2
        before = -rng.randint(0, 1) if outside else rng.choice([0, 0, 0, 1, 2])
        moved = replace(e, const=e.const - lo + before)
        n = max(1, hi - lo + 1 + before + rng.choice([0, -1, 1] if outside else [0, 0, 0, 1, 3]))
        if outside:
            back = Index(tuple(replace(t, coef=-t.coef) for t in moved.terms), n - 1 - moved.const)
            when += [(moved, ">="), (back, ">=")]
        index.append(moved)
        shape.append(n)
    return replace(p, index=tuple(index), when=tuple(when)), tuple(shape)
