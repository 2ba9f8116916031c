"""Merges of states as nodes: by the monoid's structure, as sums, extremes, softmaxes and moments; else by halving in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from tapestry.exports.onnx_blocks.onnx_nodes import Nodes, Value
from tapestry.exports.onnx_blocks.scalar_nodes import primitive
from tapestry.ir.expr import Arg, Call, Const, Expr
from tapestry.ir.monoid import MONOIDS, Best, ByPrimitive, Moments, Monoid, Product, Rebased, highest
from tapestry.ir.types import FLOATS

Add = Callable[[int, Value], Value]
"""The sum of a field's values over what is reduced: the field's number, and what it sums."""
_REDUCE = {"add": "ReduceSum", "mul": "ReduceProd", "max": "ReduceMax", "min": "ReduceMin"}


class Merging:
    """States over a frame, merged along its axes from ``kept`` on; those stay, with one cell."""

    def __init__(self, nodes: Nodes, extents: tuple[int, ...], kept: int) -> None:
        self.nodes, self.extents, self.kept = nodes, extents, kept
        self.axes = list(range(kept, len(extents)))

    def merged(self, monoid: Monoid, fields: Sequence[Value], add: Add | None = None) -> list[Value]:
        """The merged fields of a monoid.

        Args:
            add: how the sum of a field is taken, where a caller knows better (by a matrix product).
        """
        s = monoid.structure
        fields = [self._ranked(f) for f in fields]
        if 0 in self.extents[self.kept :]:
            zeros = monoid.zero(tuple(f.dtype for f in fields))
            return [self.nodes.filled(self._small(f), z.value, f.dtype) for f, z in zip(fields, zeros, strict=True)]
        match s:
            case ByPrimitive(fn):
                return [self.by(fn, fields[0], add)]
            case Product(parts):
                out: list[Value] = []
                for part in parts:
                    first = len(out)
                    own = None if add is None else _shifted(add, first)
                    out += self.merged(part, fields[first : first + len(part.fields)], own)
                return out
            case Rebased():
                return self._rebased(s, fields, add)
            case Moments():
                return self._moments(fields)
            case Best(better):
                return self._best(better, fields)
            case _:
                return self.folded(monoid, fields)

    def by(self, fn: str, x: Value, add: Add | None = None) -> Value:
        """One field, merged by one primitive."""
        if fn == "add" and x.dtype != "bool":
            return self.total(x) if add is None else add(0, x)
        if fn in ("and", "or") and x.dtype == "bool":
            wide = self.nodes.cast(x, "i32")
            return self.nodes.cast(self.nodes.reduce("ReduceMin" if fn == "and" else "ReduceMax", wide, self.axes), "bool")
        if fn not in _REDUCE or x.dtype == "bool":
            return self.folded(next(m for m in MONOIDS.values() if m.structure == ByPrimitive(fn)), [x])[0]
        if fn == "mul":
            x = self.nodes.expand(x, self._wide(x))
        return self.nodes.reduce(_REDUCE[fn], x, self.axes)

    def total(self, x: Value) -> Value:
        """A sum; what does not vary along an axis counts as often as that has points."""
        times = 1
        for a in self.axes:
            times *= self.extents[a] if x.shape[a] == 1 else 1
        out = self.nodes.reduce("ReduceSum", x, self.axes)
        return out if times == 1 else self.nodes.apply("Mul", [out, self.nodes.scalar(times, x.dtype)])

    def of_args(self, e: Expr, args: Sequence[Value]) -> Value:
        """The value of an expression over given arguments."""
        if isinstance(e, Arg):
            return args[e.pos]
        if isinstance(e, Const):
            return self.nodes.scalar(e.value, e.dtype)
        assert isinstance(e, Call)
        return primitive(self.nodes, e.fn, [self.of_args(a, args) for a in e.args], e.dtype)

    def _rebased(self, s: Rebased, fields: Sequence[Value], add: Add | None) -> list[Value]:
        """States moved to the common centre, then merged."""
        n = len(s.centre.fields)
        centre = self.merged(s.centre, fields[:n])
        given = [*fields[:n], *centre, *fields[n:]]
        args = [Arg(k, v.dtype) for k, v in enumerate(given)]
        exprs = s.act(tuple(args[:n]), tuple(args[n : 2 * n]), tuple(args[2 * n :]))
        if add is not None:  # what is summed is a weight times a factor that the caller contracts
            return [*centre, *self._weighed(s, exprs, given, _shifted(add, n))]
        return [*centre, *self.merged(s.acted, [self.of_args(e, given) for e in exprs])]

    def _weighed(self, s: Rebased, exprs: Sequence[Expr], given: Sequence[Value], add: Add) -> list[Value]:
        """Sums of weighted factors: the weight is what becomes of a state of 1."""
        n = len(s.centre.fields)
        one = self.nodes.scalar(1, given[2 * n].dtype)
        weight = self.of_args(exprs[0], [*given[: 2 * n], one, *given[2 * n + 1 :]])
        out = [self.total(self._ranked(self.of_args(exprs[0], given)))]
        return [*out, *(add(k, weight) for k in range(1, len(exprs)))]

    def _moments(self, fields: Sequence[Value]) -> list[Value]:
        """(n, mean, M2): the mean first, then the squares of what is left."""
        n, mean, m2 = fields
        dtype = mean.dtype
        total = self.total(n)
        safe = primitive(self.nodes, "where", [self._test("Equal", total, 0), self.nodes.scalar(1, dtype), total], dtype)
        centre = self.nodes.apply("Div", [self.total(self.nodes.apply("Mul", [n, mean])), safe])
        off = self.nodes.apply("Sub", [mean, centre])
        spread = self.nodes.apply("Add", [m2, self.nodes.apply("Mul", [n, self.nodes.apply("Mul", [off, off])])])
        return [total, centre, self.total(self._ranked(spread))]

    def _test(self, kind: str, x: Value, number: float) -> Value:
        return self.nodes.apply(kind, [x, self.nodes.scalar(number, x.dtype)], "bool")

    def _best(self, better: str, fields: Sequence[Value]) -> list[Value]:
        """The best value, and the least index of those that have it."""
        value, index = fields
        top = self.nodes.reduce("ReduceMax" if better == "gt" else "ReduceMin", value, self.axes)
        hit = best_at(self.nodes, value, top)
        last = self.nodes.scalar(highest(index.dtype).value, index.dtype)
        return [top, self.nodes.reduce("ReduceMin", self.nodes.apply("Where", [hit, index, last]), self.axes)]

    def folded(self, monoid: Monoid, fields: Sequence[Value]) -> list[Value]:
        """Any monoid, by halving in order: neighbours merge, so that associativity alone is needed."""
        common = np.broadcast_shapes(*(self._wide(f) for f in fields))
        flat, points = [self.nodes.expand(f, common) for f in fields], prod(self.extents[self.kept :])
        flat = [self.nodes.reshape(f, (*f.shape[: self.kept], points)) for f in flat]
        exprs = monoid.combiner(tuple(f.dtype for f in flat))
        while (n := flat[0].shape[-1]) > 1:
            even = n - n % 2
            halves = [[self._every(f, k, even) for f in flat] for k in (0, 1)]
            merged = [self.of_args(e, [*halves[0], *halves[1]]) for e in exprs]
            rest = [self.nodes.slice(f, [*((0, m) for m in f.shape[:-1]), (even, n)]) for f in flat] if n % 2 else []
            flat = [self.nodes.concat([m, r], self.kept) for m, r in zip(merged, rest, strict=True)] if rest else merged
        return [self.nodes.reshape(f, (*f.shape[: self.kept], *(1 for _ in self.axes))) for f in flat]

    def _every(self, x: Value, first: int, last: int) -> Value:
        box = [*((0, n) for n in x.shape[:-1]), (first, last)]
        return self.nodes.slice(x, box, [*(1 for _ in x.shape[:-1]), 2])

    def _ranked(self, x: Value) -> Value:
        return x if x.shape else self.nodes.reshape(x, (1,) * len(self.extents))

    def _wide(self, x: Value) -> tuple[int, ...]:
        """A value's shape with all that is reduced written out."""
        return (*x.shape[: self.kept], *self.extents[self.kept :])

    def _small(self, x: Value) -> tuple[int, ...]:
        return (*x.shape[: self.kept], *(1 for _ in self.axes))


def best_at(nodes: Nodes, value: Value, top: Value) -> Value:
    """Where a value is the best one; a NaN is, where there is any."""
    hit = nodes.apply("Equal", [value, top], "bool")
    if value.dtype not in FLOATS:
        return hit
    return nodes.apply("Or", [hit, nodes.apply("And", [nodes.apply("IsNaN", [v], "bool") for v in (value, top)])])


def _shifted(add: Add, by: int) -> Add:
    return lambda k, x: add(k + by, x)
