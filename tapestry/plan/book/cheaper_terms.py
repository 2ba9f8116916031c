"""Terms of arithmetic that equal a given one and are less work, found by values in a finite field.

Values are integers modulo a prime, at random for every leaf along its groups; sums, products and quotients are exact there,
and two terms that differ as rational functions agree at that many random points only by an accident that the prover sees.
All terms of up to two operations are made; a term is then a pair of them, or of a leaf and such a pair: the partner that a
pair needs is computed from the value that it must have, and looked up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapestry.plan.book.mined_terms import Mined
from tapestry.rewrites.equations.small_terms import Term

PRIME = 2**31 - 1
DRAWS, SIZE = 4, 2  # of all leaves, and of a group
SMALL = 2  # operations of the terms that pairs are made of
POINTS = 64.0  # of a group, where work is counted
Values = np.ndarray[Any, np.dtype[np.int64]]


def inverse(x: Values) -> Values:
    """1/x for each, and zero where there is none."""
    out, power, rest = np.ones_like(x), x % PRIME, PRIME - 2
    while rest:
        out = out * power % PRIME if rest & 1 else out
        power, rest = power * power % PRIME, rest >> 1
    return out


_Do = Callable[[Values, Values], Values]
_DO: Mapping[str, _Do] = {
    "add": lambda a, b: (a + b) % PRIME,
    "sub": lambda a, b: (a - b) % PRIME,
    "mul": lambda a, b: a * b % PRIME,
    "div": lambda a, b: a * inverse(b) % PRIME,
}
_NEEDED: Mapping[str, tuple[_Do, _Do | None]] = {  # of a pair with value t, the other operand: behind a, before b
    "add": (lambda t, a: (t - a) % PRIME, None),
    "sub": (lambda t, a: (a - t) % PRIME, lambda t, b: (t + b) % PRIME),
    "mul": (lambda t, a: t * inverse(a) % PRIME, None),
    "div": (lambda t, a: a * inverse(t) % PRIME, lambda t, b: t * b % PRIME),
}


@dataclass(slots=True)
class Cheaper:
    """The search for terms that equal one left-hand side.

    Attributes:
        tried: terms whose values were taken.
    """

    mined: Mined
    tried: int = 0
    _dims: dict[Term, frozenset[str]] = field(default_factory=dict[Term, frozenset[str]])

    def found(self) -> Term | None:
        """The term of least work that equals the left-hand side and is less than it; ``None`` where there is none."""
        leaves = self._leaves()
        target = self._value(self.mined.term, leaves)
        terms, values = self._small(leaves)
        known: dict[bytes, Term] = {}
        for t, v in sorted(zip(terms, values, strict=True), key=lambda p: self.work(p[0])):
            known.setdefault(v.tobytes(), t)
        table = np.array(values)
        options = [*self._pairs(target, terms, table, known)]
        for name, v in leaves.items():
            for fn, behind in ((fn, b) for fn in self._functions() for b in (True, False)):
                need = _NEEDED[fn][0 if behind else 1]
                rest = None if need is None else list(self._pairs(need(target, v), terms, table, known))
                options += [(fn, (name,), t) if behind else (fn, t, (name,)) for t in rest or ()]
        if direct := known.get(target.tobytes()):
            options.append(direct)
        own, equal = self.mined.term, target.tobytes()
        allowed = set(_divisors(own))
        less = sorted(
            (t for t in set(options) if self.work(t) < self.work(own) and set(_divisors(t)) <= allowed),
            key=lambda t: (self.work(t), len(repr(t)), repr(t)),
        )  # it divides by nothing that the left-hand side does not divide by
        return next((t for t in less if self._value(t, leaves).tobytes() == equal), None)

    def gain(self, after: Term) -> int:
        """How many operations less are computed at all points of the left-hand side."""
        return round((self.work(self.mined.term) - self.work(after)) / POINTS ** len(self.mined.whole))

    def work(self, t: Term) -> float:
        """Points at which operations compute, each over the groups that it varies along; literals alone are numbers."""
        if len(t) == 1 or self.literal(t):
            return 0.0
        return POINTS ** len(self.dims(t)) + sum(self.work(a) for a in set(t[1:]))

    def dims(self, t: Term) -> frozenset[str]:
        """The groups that a term varies along."""
        if t not in self._dims:
            own = frozenset(dict(self.mined.leaves)[t[0]]) if len(t) == 1 else frozenset[str]().union(*map(self.dims, t[1:]))
            self._dims[t] = own
        return self._dims[t]

    def literal(self, t: Term) -> bool:
        """Whether a term is made of literals."""
        return t[0].startswith("k") if len(t) == 1 else all(map(self.literal, t[1:]))

    def _functions(self) -> list[str]:
        return ["add", "sub", "mul", *(["div"] if "'div'" in repr(self.mined.term) else [])]

    def _leaves(self) -> dict[str, Values]:
        rng, whole = np.random.default_rng(0), self.mined.whole
        shape = (DRAWS, *([SIZE] * len(whole)))
        out: dict[str, Values] = {}
        for name, dims in self.mined.leaves:
            own = rng.integers(1, PRIME, [DRAWS, *(SIZE if d in dims else 1 for d in whole)])
            out[name] = np.broadcast_to(own, shape).reshape(-1).astype(np.int64)
        return out

    def _value(self, t: Term, leaves: dict[str, Values]) -> Values:
        if len(t) == 1:
            return leaves[t[0]]
        args = [self._value(a, leaves) for a in t[1:]]
        return (-args[0]) % PRIME if t[0] == "neg" else _DO[t[0]](*args)

    def _small(self, leaves: dict[str, Values]) -> tuple[list[Term], list[Values]]:
        """All terms of up to two operations of different values, the first of each."""
        levels: list[list[tuple[Term, Values]]] = [[((n,), v) for n, v in leaves.items()]]
        seen = {v.tobytes() for v in leaves.values()}
        for size in range(1, SMALL + 1):
            level: list[tuple[Term, Values]] = []
            for k in range(size):
                for (a, x), (b, y) in itertools.product(levels[k], levels[size - 1 - k]):
                    for fn in self._functions():
                        value = _DO[fn](x, y)
                        self.tried += 1
                        if (key := value.tobytes()) not in seen and value.any():
                            seen.add(key)
                            level.append(((fn, a, b), value))
            levels.append(level)
        flat = [p for level in levels for p in level]
        return [t for t, _ in flat], [v for _, v in flat]

    def _pairs(self, target: Values, terms: list[Term], table: Values, known: dict[bytes, Term]) -> Iterator[Term]:
        """Terms of a value whose operands are two of those that are known."""
        for fn in self._functions():
            for behind, need in zip((True, False), _NEEDED[fn], strict=True):
                if need is not None:
                    wanted = np.asarray(need(target[None, :], table))
                    for t, w in zip(terms, wanted, strict=True):
                        self.tried += 1
                        if other := known.get(w.tobytes()):
                            yield (fn, t, other) if behind else (fn, other, t)


def _divisors(t: Term) -> Iterator[Term]:
    if t[0] == "div":
        yield t[2]
    for a in t[1:]:
        yield from _divisors(a)
