"""A lifted graph's tensors as values of the table: one function for the model and for each rank's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from tapestry.ir.expr import Acc, Arg, Const, Expr, Index, Let
from tapestry.ir.graph import Block, Dim, Guard, Opaque, Read
from tapestry.ir.index import Aff, const, dim, dims_of, substitute
from tapestry.ir.monoid import MONOIDS, Moments, Monoid, Product, Rebased
from tapestry.ir.types import FLOATS, Tensor, numpy_dtype
from tapestry.tools.prove.padded_reads import chosen, padded, with_padding
from tapestry.tools.prove.reductions import Reduction, reduced, settled
from tapestry.tools.prove.rescaling import rescaled
from tapestry.tools.prove.values import Node, Ref, Table, Value, ordered

Lookup = Callable[[str], Value]


@dataclass(slots=True)
class _Block:
    """An operation while its expressions become values."""

    table: Table
    op: Block
    single: dict[str, Aff]
    ranges: dict[str, int]
    reads: list[Value]
    lets: list[Value]
    states: list[Value]
    known: dict[tuple[int, bool], Value]

    def value(self, e: Expr, small: bool = False) -> Value:
        """The value of an expression; ``small``: over the map dimensions alone."""
        key = (id(e), small)
        if key not in self.known:
            self.known[key] = self._value(e, small)
        return self.known[key]

    def _value(self, e: Expr, small: bool) -> Value:
        if isinstance(e, Const):  # as its type has it: 1e-5 of one file is 9.99999974737875e-06 in another
            return Const(np.asarray(e.value).astype(numpy_dtype(e.dtype)).item(), e.dtype) if e.dtype in FLOATS else e
        if isinstance(e, Arg):
            return self.reads[e.pos]
        if isinstance(e, Index):
            return self.table.iota(substitute(e.aff, self.single, self.ranges), e.dtype)
        if isinstance(e, Let):
            return self.lets[e.pos]
        if isinstance(e, Acc):
            return self.states[e.field]
        return self.call(e.fn, [self.value(a, small) for a in e.args], e.dtype)

    def call(self, fn: str, args: Sequence[Value], dtype: str) -> Value:
        """A primitive of values over this operation's space."""
        for way in () if self.table.building else chain([args], with_padding(self.table, args, self.ranges)):
            found = self.table.applied_before((fn, dtype), ordered(fn, way), self.ranges)
            if found is not None and (way is not args or self.table.nodes[found.node].model):
                return found
        if fn == "where":
            found = chosen(self.table, args, dtype, self.ranges)
            if found is not None:
                return found
        if fn == "where" and self._either_way(*args):
            return args[2]
        plain = self.table.call(fn, args, dtype, self.ranges)
        if self.table.building or not isinstance(plain, Ref) or self.table.nodes[plain.node].model:
            return plain
        return rescaled(self.table, fn, tuple(args), self.ranges) or plain

    def _either_way(self, test: Value, yes: Value, no: Value) -> bool:
        """Whether a choice is of s where a is b, else of ``s * exp(a - b)``: that is the same where a is b."""
        sides = self.table.args_of(test, "eq")
        kind = self.table.dtype(sides[0]) if sides else ""
        if not sides or kind not in FLOATS or not isinstance(no, Ref):
            return False
        a, b = sides
        apart = (self.call("exp", [self.call("sub", pair, kind)], kind) for pair in ((a, b), (b, a)))
        return any(self.call("mul", [yes, e], kind) == no for e in apart)

    def reduce(self, monoid: Monoid, values: Sequence[Value], dims: tuple[Dim, ...]) -> list[Value]:
        """The fields of a reduction; a composed monoid is written as the reductions that it stands for."""
        s, names = monoid.structure, {d.name for d in dims}
        small = {n: k for n, k in self.ranges.items() if n not in names}
        if isinstance(s, Product):
            out: list[Value] = []
            for part in s.parts:
                out += self.reduce(part, values[len(out) : len(out) + len(part.fields)], dims)
            return out
        if isinstance(s, Rebased):  # each state moved to the common centre, then merged
            n = len(s.centre.fields)
            centre = self.reduce(s.centre, values[:n], dims)
            reads = [*values[:n], *centre, *values[n:]]
            args = tuple(Arg(k, self.table.dtype(v)) for k, v in enumerate(reads))
            over = replace(self, reads=reads, known={})
            moved = [over.value(e) for e in s.act(args[:n], args[n : 2 * n], args[2 * n :])]
            return [*centre, *self.reduce(s.acted, moved, dims)]
        if isinstance(s, Moments) and [v.value if isinstance(v, Const) else None for v in values[::2]] == [1, 0]:
            return self._moments(values, dims)
        count = len(monoid.fields)
        return [reduced(self.table, Reduction(monoid.name, k, tuple(values), dims, small)) for k in range(count)]

    def _moments(self, values: Sequence[Value], dims: tuple[Dim, ...]) -> list[Value]:
        """Count, mean and sum of squared deviations, as what they are."""
        one, x, _ = values
        dtype = self.table.dtype(one)
        plain = MONOIDS["sum"]
        (count,), (total,) = self.reduce(plain, [one], dims), self.reduce(plain, [x], dims)
        mean = self.call("div", (total, count), dtype)
        off = self.call("sub", (x, mean), dtype)
        (spread,) = self.reduce(plain, [self.call("mul", (off, off), dtype)], dims)
        return [count, mean, spread]


def block_values(table: Table, op: Block, lookup: Lookup, tensors: Mapping[str, Tensor]) -> list[Value]:
    """The results of an operation, over ``y0, y1, …``: the axes of what it writes."""
    single = {d.name: const(0) for d in op.space if d.size == 1}
    ranges = {d.name: d.size for d in op.space if d.size != 1}
    b = _Block(table, op, single, ranges, [], [], [], {})
    used = op.body_reads() | op.then_reads()
    b.reads = [_read(b, r, lookup, tensors[r.tensor]) if k in used else Const(0, "i64") for k, r in enumerate(op.reads)]
    for s in op.inner:
        b.lets += b.reduce(MONOIDS[s.monoid], [b.value(s.body)], s.dims)
    results = op.body
    if op.monoid is not None:
        b.states = b.reduce(MONOIDS[op.monoid], [b.value(e) for e in op.body], op.reduce)
        results = op.then
        b.ranges = {d.name: d.size for d in op.dims if d.size != 1}
    env = {d.name: dim(f"y{k}") if d.size != 1 else const(0) for k, d in enumerate(op.dims)}
    over = {f"y{k}": d.size for k, d in enumerate(op.dims) if d.size != 1}
    return [table.read(b.value(e, True), env, over) for e in results]


def _read(b: _Block, r: Read, lookup: Lookup, tensor: Tensor) -> Value:
    """What a read gives: the tensor's value at its places, chosen by its guards."""
    index = [substitute(e, b.single, b.ranges) for e in r.index]
    env = {f"y{k}": e for k, e in enumerate(index)}
    inside = settled(b.table, b.table.read(lookup(r.tensor), env, b.ranges), b.ranges)
    if r.other is None:
        return inside
    guards = [Guard(substitute(g.aff, b.single, b.ranges), g.op) for g in r.when]
    for e, n in zip(index, tensor.shape, strict=True):
        guards += [Guard(e, "ge"), Guard(e * -1 + (n - 1), "ge")]
    other = Const(r.other, tensor.dtype)
    if b.op.monoid is not None or len(b.op.reads) == 1:  # a choice among several tensors by place is no padding
        around = padded(b.table, lookup(r.tensor), inside, guards, other, tensor.shape, b.ranges)
        if around is not None:
            return around
    out = inside
    for g in sorted(guards, key=lambda g: (str(g.aff), g.op), reverse=True):
        out = b.call("where", (b.table.test(g.op, g.aff, b.ranges), out, other), tensor.dtype)
    return out


def opaque_values(table: Table, op: Opaque, lookup: Lookup, tensors: Mapping[str, Tensor]) -> list[Value] | None:
    """The results of an opaque operation: a function of whole axes, and of places along the dimensions it commutes with.

    None where it touches a value of the host, or reads along such a dimension what is not that dimension alone.
    """
    if any(t and tensors[t].on_host for t in (*op.ins, *op.outs)):
        return None
    sizes: list[int] = []
    slots: dict[Aff, int] = {}
    args: list[Value] = []
    for name, axes in zip(op.ins, op.in_axes or ((),) * len(op.ins), strict=True):
        value = lookup(name) if name else Const(False, "bool")
        own = {f"y{a}": dim(d.name) for a, d in zip(axes, op.dims, strict=True) if a is not None}
        whole = [k for k in range(len(tensors[name].shape)) if f"y{k}" not in own] if name else []
        bound = {f"y{k}": dim(f"r{len(sizes) + i}") for i, k in enumerate(whole)}
        sizes += [tensors[name].shape[k] for k in whole]
        if isinstance(value, Ref):
            places = [_opaque_place(e, own, bound, slots) for e in value.index]
            if None in places:
                return None
            value = Ref(value.node, tuple(p for p in places if p is not None))
        args.append(value)
    out: list[Value] = []
    for k, name in enumerate(op.outs):
        axes = op.out_axes[k] if op.out_axes else ()
        own = {d.name: dim(f"y{a}") for a, d in zip(axes, op.dims, strict=True) if a is not None}
        whole = [dim(f"y{a}") if n != 1 else const(0) for a, n in enumerate(tensors[name].shape) if a not in axes]
        label = (op.node, k, op.opsets, tuple(sizes))
        made = Node("opaque", label, tuple(args), len(slots) + len(whole), tensors[name].dtype)
        at = table.interned(("opaque", label, tuple(args)), made)
        out.append(Ref(at, (*(substitute(e, own) for e in slots), *whole)))
    return out


def _opaque_place(e: Aff, own: Mapping[str, Aff], bound: Mapping[str, Aff], slots: dict[Aff, int]) -> Aff | None:
    """A place in what an opaque operation reads, over its slots and its own whole axes."""
    mine = dims_of(e) & own.keys()
    if not mine:
        return substitute(e, bound)
    if dims_of(e) - own.keys():
        return None
    return dim(f"v{slots.setdefault(substitute(e, own), len(slots))}")
