"""Sizes of symbols that follow from those of others, because an operator takes no other ones.

The model's shapes are computed at some sizes of its symbols that have nothing in common. Two sizes that an operator wants to be
equal are an equation where their difference is one linear sum of symbols at all of these sizes. What is equal up to an axis
of 1, which is broadcast, is taken to be equal. Nothing is guessed: a symbol in no equation has to be given.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from tapestry.errors import ModelError
from tapestry.ir.sizes.size_formula import Region
from tapestry.lift.file.protos import attributes, captured, is_standard, node_name
from tapestry.lift.sizes.shape_rules import BROADCAST, Known
from tapestry.lift.sizes.size_columns import Array, Grid
from tapestry.lift.sizes.size_walk import MALFORMED, Dims, NotUnderstood, Scope, Walk

OTHERS = 10  # sizes at which an equation is held to what it says, in any order
LARGEST = 5000  # beyond the tables that models have of places
LOOKS = ("Gather", "GatherND")
MOVES = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")  # the integers of a tensor stay
PLAIN = (*" ".join(BROADCAST).split(), "Cast", "Concat", "Identity", "Not", "Shape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""No cell of what they give follows from several cells of what they read."""
Pair = tuple[str, Array, Array]


@dataclass(frozen=True, slots=True)
class Follows:
    """A size that is a sum of others: symbols with their factors, and a number; ``why`` names the node."""

    terms: tuple[tuple[str, int], ...]
    const: int
    why: str

    def at(self, sizes: Mapping[str, int]) -> int:
        """What it is where the others are these."""
        return sum(c * sizes[s] for s, c in self.terms) + self.const

    def __str__(self) -> str:
        parts = [f"{'-' if c < 0 else '+'} {f'{abs(c)}*' * (abs(c) > 1)}{s}" for s, c in self.terms]
        parts += [f"{'-' if self.const < 0 else '+'} {abs(self.const)}"] if self.const or not parts else []
        return " ".join(parts).removeprefix("+ ")


@dataclass(frozen=True, slots=True)
class Equation:
    """Symbols with their factors, and a number, that come to nothing together; which symbol it says something of, if not of all."""

    terms: Mapping[str, int]
    const: int
    why: str
    of: str = ""

    def solved(self, unknown: str) -> Follows | None:
        """What one of its symbols is, if it is a whole number whatever the others are."""
        if self.of not in ("", unknown):
            return None
        by = -self.terms[unknown]
        rest = {s: c for s, c in self.terms.items() if s != unknown}
        if any(c % by for c in (*rest.values(), self.const)):
            return None
        return Follows(tuple((s, c // by) for s, c in rest.items()), self.const // by, self.why)


class _Samples(Grid):
    """Sizes of all symbols that have nothing in common, one axis for all of them together."""

    def uniform(self, column: Array) -> Array:
        """Which expression gives a column is not asked here."""
        return np.ones(1, bool)


@dataclass
class _Equations(Walk):
    """A walk that notes what has to be equal, and goes on after what is not understood.

    Attributes:
        at: the sizes of each symbol.
        equal: what a node wants to be the same.
        looked_up: an axis in which a node looks up places, and how many there are up to the last one.
        tops: the largest of a tensor's integers, for each component (along its last axis) or for all.
        whole: symbols whose axes something else than a look-up reads.
    """

    at: Mapping[str, Array] = field(default_factory=dict[str, Array])
    equal: list[Pair] = field(default_factory=list[Pair])
    looked_up: list[Pair] = field(default_factory=list[Pair])
    tops: dict[str, list[Array]] = field(default_factory=dict[str, list[Array]])
    whole: set[str] = field(default_factory=set[str])

    def column(self, d: Any) -> Array:
        """A size, or a symbol's."""
        return self.interned(self.at[d] if isinstance(d, str) else self.grid.constant(np.int64(d)))

    def node(self, node: NodeProto, scope: Scope) -> None:
        """What a node gives, nothing where that is not known."""
        try:
            super().node(node, scope)
            self.look(node, scope)
        except (NotUnderstood, *MALFORMED):
            scope.update({o: Known(None) for o in node.output if o})
        ins = [scope[i] for i in (*node.input, *captured(node)) if i in scope]
        outs = [scope[o] for o in node.output if o]
        behind = set[str]().union(*map(self.symbols_of, outs))
        if any(o.shape is None for o in outs) or not is_standard(node, *PLAIN, *LOOKS):
            self.whole.update(*map(self.symbols_of, ins))
        elif node.op_type != "Shape":
            read = ins[1:] if node.op_type in LOOKS else ins
            self.whole.update(s for k in read if k.value is None for s in self.symbols_of(k) - behind)
            if node.op_type not in (*MOVES, *LOOKS, "Concat", "Slice"):
                self.whole.update(s for k in ins if k.value is not None for s in self.symbols_of(k))

    def symbols_of(self, known: Known) -> set[str]:
        """From which symbols a tensor's sizes and numbers follow."""
        numbers = [] if known.value is None else np.moveaxis(known.value, 0, -1).reshape(-1, len(known.value))
        rows = [np.asarray(n).reshape(-1) for n in (*(known.shape or ()), *numbers)]
        return {s for k, s in enumerate(self.at) if any(len(n) > 1 and n[1 + k] != n[0] for n in rows)}

    def look(self, node: NodeProto, scope: Scope) -> None:
        """Note the largest integers of a node's result, or which places it looks up."""
        kind, ins, tops = node.op_type, [scope[i] for i in node.input if i], [self.largest(i, scope) for i in node.input]
        given = attributes(node)
        if kind == "Range" and all(k.value is not None for k in ins):
            start, limit, delta = (np.asarray(k.value).reshape(-1) for k in ins)
            self.tops[node.output[0]] = [limit - 1] if (delta == 1).all() and (limit > start).all() else []
        elif kind in MOVES and len(tops[0]) == 1:
            self.tops[node.output[0]] = tops[0]
        elif kind == "Add" and all(len(t) == 1 for t in tops):
            self.tops[node.output[0]] = [tops[0][0] + tops[1][0]]
        elif kind == "Concat" and all(k.shape and (k.shape[-1] == 1).all() for k in ins):
            last = given["axis"] in (-1, len(ins[0].shape or ()) - 1) and all(tops)
            self.tops[node.output[0]] = [t[0] for t in tops] if last else []
        elif kind in LOOKS and ins[0].shape and not given.get("batch_dims", 0):
            axis = given.get("axis", 0) if kind == "Gather" else 0
            where = f"node '{node_name(node)}' ({kind})"
            self.looked_up += [(where, n, t + 1) for n, t in zip(ins[0].shape[axis:], tops[1], strict=False)]

    def largest(self, name: str, scope: Scope) -> list[Array]:
        """The largest integer of a tensor for each component of its last axis, or for all; nothing if it is not known."""
        value = scope[name].value if name else None
        if value is None or value.dtype.kind != "i" or value.size == 0:
            return self.tops.get(name, [])
        return [value.reshape(len(value), -1).max(axis=1)] if value.ndim < 3 or value.shape[-1] == 1 else []

    def branch(self, node: NodeProto, given: Mapping[str, Any], scope: Scope, where: str) -> bool:
        """An If, unless it takes another branch at other sizes."""
        test = scope[node.input[0]].value
        if test is not None and test.size > 1:
            raise NotUnderstood
        return super().branch(node, given, scope, where)

    def equate(self, where: str, a: Array, b: Array) -> None:
        """Note it."""
        if a is not b:
            self.equal.append((where, a, b))

    def demand(self, where: str, mask: Array) -> None:
        """What is another case is of no concern."""

    def held(self, where: str, column: Array) -> None:
        """Likewise."""


def equations(model: ModelProto, inputs: Mapping[str, Dims]) -> list[Equation]:
    """What the symbols of a model's inputs have to come to.

    Args:
        model: stays as it is.
    """
    symbols = list(dict.fromkeys(d for dims in inputs.values() for d in dims if isinstance(d, str)))
    points = _points(len(symbols))
    copy, grid = ModelProto(), _Samples(Region((1,), (len(points),), {}), (1,))
    copy.CopyFrom(model)
    try:
        walk = _Equations(copy, grid, ("sample",), at=dict(zip(symbols, points.T, strict=True)))
    except NotUnderstood:
        return []
    try:
        walk.top(inputs)
    except (NotUnderstood, *MALFORMED):
        walk.looked_up.clear()  # what else reads these axes was not seen; what has to be equal is right
    for o in copy.graph.output:
        walk.whole |= walk.symbols_of(walk.known.get(o.name, Known(None)))
    out = [e for row in walk.equal if (e := _equation(symbols, points, *row)) is not None]
    looks = [e for row in walk.looked_up if (e := _equation(symbols, points, *row)) is not None]
    for s in symbols:
        of = {(tuple(e.terms.items()), e.const): e for e in looks if e.terms.get(s, 0) > 0}
        if len(of) == 1 and s not in walk.whole:
            (found,) = of.values()
            out.append(replace(found, of=s, why=f"{found.why}, which reads so many, and nothing reads more"))
    return out


def equation_of(symbol: str, value: object, symbols: Collection[str]) -> Equation | None:
    """What ``--shape`` says of a symbol, if it is a sum of symbols and numbers: ``total=past+sequence``."""
    parts = [p.strip() for p in value.split("+")] if isinstance(value, str) and symbol in symbols else []
    if not any(p in symbols for p in parts) or not all(p in symbols or p.isdecimal() for p in parts):
        return None
    terms = Counter(p for p in parts if p in symbols)
    terms[symbol] -= 1
    return Equation(terms, sum(int(p) for p in parts if p not in symbols), "--shape", symbol)


def _points(count: int) -> Array:
    """Sizes of so many symbols: some, each of them with one more, and others in any order; all of 2 and more."""
    draw = random.Random(0)
    first = [draw.randrange(100, 1000) for _ in range(count)]
    more = [[n + (j == k) for j, n in enumerate(first)] for k in range(count)]
    others = [[int(2 * (LARGEST / 2) ** draw.random()) for _ in range(count)] for _ in range(OTHERS)]
    return np.array([first, *more, *others], np.int64).reshape(1 + count + OTHERS, count)


def _equation(symbols: Sequence[str], points: Array, where: str, a: Array, b: Array) -> Equation | None:
    """That two columns are equal, where their difference is a sum of symbols."""
    gap = np.broadcast_to(np.asarray(a, np.int64) - np.asarray(b, np.int64), len(points))
    factors = gap[1 : 1 + len(symbols)] - gap[0]
    const = int(gap[0] - points[0] @ factors)
    if not factors.any() or (points @ factors + const != gap).any():
        return None
    by = gcd(const, *factors.tolist())
    return Equation({s: int(c) // by for s, c in zip(symbols, factors, strict=True) if c}, const // by, where)


def follow(found: Sequence[Equation], sizes: dict[str, int]) -> dict[str, Follows]:
    """What follows from the symbols that have a size; ``sizes`` gets it, too.

    Raises:
        ModelError: it would be negative.
    """
    out = dict[str, Follows]()
    while True:
        open_ = [(e, [s for s in e.terms if s not in sizes]) for e in found]
        solved = ((names[0], e.solved(names[0])) for e, names in open_ if len(names) == 1)
        symbol, what = next(((s, w) for s, w in solved if w is not None), ("", None))
        if what is None:
            return out
        sizes[symbol], out[symbol] = what.at(sizes), what
        if sizes[symbol] < 0:
            why = f"{symbol} has to be {what}, which is {sizes[symbol]}"
            raise ModelError("--shape contradicts the model", where=what.why, why=why, hint="other sizes")
