"""Sizes of symbols that follow from those of others, because an operator takes no other ones.

A model's shapes are computed at sizes of its symbols that have nothing in common. Two sizes that an operator wants to be equal
(up to an axis of 1, which is broadcast) are an equation if their difference is one linear sum of symbols at all of them; so are
an axis in which places are looked up, and their number, if nothing else reads it. A symbol in no equation has to be given.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from tapestry.errors import ModelError
from tapestry.ir.sizes.size_formula import Region
from tapestry.lift.file.protos import attributes, captured, is_standard, node_name
from tapestry.lift.file.symbols import Given, bind
from tapestry.lift.sizes.model_sizes import MALFORMED, NotUnderstood, Scope, Walk
from tapestry.lift.sizes.shape_rules import BROADCAST, Known
from tapestry.lift.sizes.size_columns import Array, Grid

OTHERS, LARGEST = 10, 5000  # sizes at which an equation is held to what it says; beyond the tables that models have of places
LOOKS = ("Gather", "GatherND")
MOVES = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")  # the integers of a tensor stay
PLAIN = (*" ".join(BROADCAST).split(), "Concat", "Not", "Shape", "Slice", *({*MOVES} - {"Expand", "Reshape"}))
"""No cell of what they give follows from several cells of what they read."""
Pair = tuple[str, Array, Array]
Inputs = Mapping[str, Sequence[int | str]]


@dataclass(frozen=True, slots=True)
class Sum:
    """Symbols with their factors, and a number, which an equation (of one of them, or all) says to be 0; ``why`` is a node."""

    terms: Mapping[str, int]
    const: int
    why: str
    of: str = ""

    def solved(self, unknown: str) -> Sum | None:
        """What a symbol of the equation is, if it is a whole number whatever the others are."""
        by, rest = -self.terms[unknown], {s: c for s, c in self.terms.items() if s != unknown}
        if self.of not in ("", unknown) or any(c % by for c in (*rest.values(), self.const)):
            return None
        return Sum({s: c // by for s, c in rest.items()}, self.const // by, self.why)

    def at(self, sizes: Mapping[str, int]) -> int:
        """What it is at some sizes."""
        return sum(c * sizes[s] for s, c in self.terms.items()) + self.const

    def __str__(self) -> str:
        parts = [f"{'-' if c < 0 else '+'} {f'{abs(c)}*' * (abs(c) > 1)}{s}" for s, c in self.terms.items()]
        parts += [f"{'-' if self.const < 0 else '+'} {abs(self.const)}"] if self.const or not parts else []
        return " ".join(parts).removeprefix("+ ")


@dataclass
class _Equations(Walk):
    """A walk that notes what has to be equal, and goes on after what is not understood.

    Attributes:
        at: the sizes of each symbol: some, one more of each symbol in turn, and others.
        equal: what a node wants to be the same.
        looked_up: an axis in which a node looks up places, and how many there are up to the last one.
        tops: the largest integers of a tensor that has no negative ones, for each component along its last axis or for all.
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
        ins, outs = [scope[i] for i in (*node.input, *captured(node)) if i in scope], [scope[o] for o in node.output if o]
        behind = self.symbols_of(*outs)
        if any(o.shape is None for o in outs) or not is_standard(node, *PLAIN, *LOOKS):
            self.whole |= self.symbols_of(*ins)
        elif node.op_type != "Shape":
            read = [k for k in (ins[1:] if node.op_type in LOOKS else ins) if k.value is None]
            sized = [] if node.op_type in (*MOVES, *LOOKS, "Concat", "Slice") else [k for k in ins if k.value is not None]
            self.whole |= self.symbols_of(*read) - behind | self.symbols_of(*sized)

    def symbols_of(self, *some: Known) -> set[str]:
        """From which symbols sizes and numbers of tensors follow."""
        rows = [np.asarray(n).reshape(-1, 1) for k in some for n in k.shape or ()]
        rows += [k.value.reshape(len(k.value), -1) for k in some if k.value is not None]
        return {s for k, s in enumerate(self.at) if any(len(n) > 1 and (n[1 + k] != n[0]).any() for n in rows)}

    def look(self, node: NodeProto, scope: Scope) -> None:
        """Note the largest integers of a node's result, or which places it looks up."""
        kind, ins, given = node.op_type, [scope[i] for i in node.input if i], attributes(node)
        tops, found = [self.largest(i, scope) for i in node.input], list[Array]()
        if kind == "Range" and all(k.value is not None for k in ins):
            start, limit, delta = (np.asarray(k.value).reshape(-1) for k in ins)
            found = [limit - 1] if (delta == 1).all() and (start >= 0).all() and (limit > start).all() else []
        elif kind in MOVES and len(tops[0]) == 1:
            found = tops[0]
        elif (
            kind == "Add" and all(len(t) == 1 for t in tops) and any(k.value is not None and k.value[0].size == 1 for k in ins)
        ):
            found = [tops[0][0] + tops[1][0]]
        elif kind == "Concat" and given["axis"] in (-1, len(ins[0].shape or ()) - 1) and all(len(t) == 1 for t in tops):
            found = [t[0] for t in tops] if all(k.shape and (k.shape[-1] == 1).all() for k in ins) else []
        elif kind in LOOKS and ins[0].shape and (kind == "Gather" or (ins[1].shape or [0])[-1] == len(tops[1])):
            dims, where = ins[0].shape[given.get("axis", 0) :], f"node '{node_name(node)}' ({kind})"
            self.looked_up += [(where, n, t + 1) for n, t in zip(dims, tops[1], strict=False) if not given.get("batch_dims", 0)]
        self.tops[node.output[0]] = found

    def largest(self, name: str, scope: Scope) -> list[Array]:
        """The largest integers of a tensor; nothing if they are not known."""
        value = scope[name].value if name else None
        if value is None or value.dtype.kind != "i" or value.size == 0 or value.min() < 0:
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
        self.equal += [(where, a, b)] if a is not b else []


def equations(model: ModelProto, inputs: Inputs) -> list[Sum]:
    """What the symbols of a model's inputs have to come to; the model stays as it is."""
    symbols = list(dict.fromkeys(d for dims in inputs.values() for d in dims if isinstance(d, str)))
    points, copy = _points(len(symbols)), ModelProto()
    copy.CopyFrom(model)
    grid, walk = Grid(Region((1,), (len(points),), {}), (1,)), None
    try:
        walk = _Equations(copy, grid, ("sample",), at=dict(zip(symbols, points.T, strict=True)))
        walk.top({name: tuple(dims) for name, dims in inputs.items()})
    except (NotUnderstood, *MALFORMED):
        if walk is None:
            return []
        walk.looked_up.clear()  # what else reads these axes was not seen; what has to be equal is right
    walk.whole |= walk.symbols_of(*(walk.known[o.name] for o in copy.graph.output if o.name in walk.known))
    out, looks = ([e for row in rows if (e := _equation(symbols, points, *row))] for rows in (walk.equal, walk.looked_up))
    for s in (s for s in symbols if s not in walk.whole):
        of = {str(e): e for e in looks if e.terms.get(s, 0) > 0}
        out += [
            replace(e, of=s, why=f"{e.why}, which reads so many, and nothing reads more") for e in of.values() if len(of) == 1
        ]
    return out


def given_sizes(
    model: ModelProto, inputs: Mapping[str, Sequence[int | str]], shapes: Given
) -> tuple[dict[str, int], list[Sum]]:
    """The sizes that ``--shape`` gives, and equations for the others: of the model, and such as ``total=past+sequence``."""
    symbols = {d for dims in inputs.values() for d in dims if isinstance(d, str)}
    said = [e for s, value in shapes.items() if s in symbols and (e := _said(s, str(value), symbols))]
    env = bind(inputs, {s: value for s, value in shapes.items() if not any(e.of == s for e in said)})
    return env, [*said, *equations(model, inputs)] if symbols > env.keys() else []


def _said(symbol: str, value: str, symbols: set[str]) -> Sum | None:
    parts = [p.strip() for p in value.split("+")]
    if symbols.isdisjoint(parts) or not all(p in symbols or p.isdecimal() for p in parts):
        return None
    terms = Counter({symbol: -1})
    terms.update(p for p in parts if p in symbols)
    return Sum(terms, sum(int(p) for p in parts if p not in symbols), "--shape", symbol)


def _points(count: int) -> Array:
    """Sizes of so many symbols: some, each of them with one more, and others in any order; all of 2 and more."""
    draw = random.Random(0)  # noqa: S311
    first = np.array([draw.randrange(100, 1000) for _ in range(count)], np.int64)
    others = [[int(2 * (LARGEST / 2) ** draw.random()) for _ in range(count)] for _ in range(OTHERS)]
    return np.array([first, *(first + np.eye(count, dtype=np.int64)), *others], np.int64).reshape(1 + count + OTHERS, count)


def _equation(symbols: Sequence[str], points: Array, where: str, a: Array, b: Array) -> Sum | None:
    """That two columns are equal, where their difference is a sum of symbols."""
    gap = np.broadcast_to(np.asarray(a, np.int64) - np.asarray(b, np.int64), len(points))
    factors = gap[1 : 1 + len(symbols)] - gap[0]
    const = int(gap[0] - points[0] @ factors)
    if not factors.any() or (points @ factors + const != gap).any():
        return None
    by = gcd(const, *factors.tolist())
    return Sum({s: int(c) // by for s, c in zip(symbols, factors, strict=True) if c}, const // by, where)


def follow(found: Sequence[Sum], sizes: dict[str, int]) -> dict[str, Sum]:
    """What follows from the symbols that have a size; ``sizes`` gets it, too.

    Raises:
        ModelError: it would be negative.
    """
    out = dict[str, Sum]()
    while True:
        left = [(e, [s for s in e.terms if s not in sizes]) for e in found]
        solved = ((names[0], e.solved(names[0])) for e, names in left if len(names) == 1)
        symbol, what = next(((s, w) for s, w in solved if w is not None), ("", None))
        if what is None:
            return out
        sizes[symbol], out[symbol] = what.at(sizes), what
        if sizes[symbol] < 0:
            why = f"{symbol} has to be {what}, which is {sizes[symbol]}"
            raise ModelError("--shape contradicts the model", where=what.why, why=why, hint="other sizes")
