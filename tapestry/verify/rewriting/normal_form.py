"""Values by normal form: what a graph computes at one cell, composed to one term over its inputs.

Terms are kept once each, so that equal ones have equal numbers. Operands that commute are sorted, guards are sets, index
expressions are simplified by the ranges of their dimensions, products of monoids are taken apart. In *real* arithmetic sums and
products are also flattened, and a factor that does not vary along a sum stands before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tapestry.ir.expr import PRIMITIVES, Call
from tapestry.ir.graph import Block, Dim, Graph, Guard
from tapestry.ir.index import Aff, const, dim, dims_of, span, substitute
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Monoid, Product
from tapestry.ir.types import FLOATS
from tapestry.verify.interp import Walk, guards

MOST_TERMS = 20_000
_NONE = frozenset[str]()


class NoForm(Exception):
    """There is no term for it: an opaque operation, an empty dimension, or too large a one."""


def equal(before: Graph, after: Graph, *, real: bool) -> bool:
    """Whether the one output of two graphs over the same inputs is the same term.

    Without ``real`` equal terms are equal bits, NaN and infinities included (but for the sign of zeros that `min` and `max`
    choose between); with it they are equal as real numbers.
    """
    terms = _Terms(real)
    try:
        return _form(before, terms) == _form(after, terms)
    except (NoForm, RecursionError):
        return False


def _form(graph: Graph, terms: _Terms) -> int:
    if any(0 in t.shape for t in graph.tensors.values()) or any(d.size == 0 for op in graph.ops for d in op.space):
        raise NoForm
    (out,) = graph.outputs
    names = [_variable("o", k, n, terms.ranges) for k, n in enumerate(graph.tensors[out].shape)]
    return _Composition(graph, terms).cell(out, tuple(names))


def _variable(scope: str, k: int, size: int, ranges: dict[str, int]) -> Aff:
    if size == 1:
        return const(0)
    name = f"{scope}_{k}_{size}"
    ranges[name] = size
    return dim(name)


class _Terms:
    """All terms, each once, by number: its key, and the variables that it depends on."""

    def __init__(self, real: bool) -> None:
        self.real = real
        self.ranges: dict[str, int] = {}
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.keys: list[tuple[Any, ...]] = []
        self.free: list[frozenset[str]] = []

    def make(
        self, key: tuple[Any, ...], parts: Sequence[int] = (), free: frozenset[str] = _NONE, bound: frozenset[str] = _NONE
    ) -> int:
        if key not in self.numbers:
            if len(self.keys) > MOST_TERMS:
                raise NoForm
            self.numbers[key] = len(self.keys)
            self.keys.append(key)
            self.free.append(free.union(*(self.free[p] for p in parts)) - bound)
        return self.numbers[key]

    def const(self, value: float | int | bool, dtype: str) -> int:
        return self.make(("const", dtype, repr(float(value) if dtype in FLOATS else int(value))))

    def index(self, aff: Aff, dtype: str) -> int:
        return self.make(("index", str(aff), dtype), free=dims_of(aff)) if aff.terms else self.const(aff.const, dtype)

    def call(self, fn: str, dtype: str, args: Sequence[int]) -> int:
        if self.real and fn in ("add", "mul"):
            args = [a for x in args for a in (self.keys[x][3] if self.keys[x][:3] == ("call", fn, dtype) else (x,))]
        if PRIMITIVES[fn].commutative:
            args = sorted(args)
        return self.make(("call", fn, dtype, tuple(args)), args)

    def guarded(self, inner: int, guards: frozenset[tuple[str, str]], free: frozenset[str], fill: int) -> int:
        """A value where all guards hold, else the fill."""
        key = self.keys[inner]
        if inner == fill:
            return fill
        if key[0] == "guarded" and key[3] == fill:
            inner, guards, free = key[1], guards | key[2], free | self.free[inner]
        return self.make(("guarded", inner, guards, fill), (inner, fill), free)

    def reduced(self, monoid: str, bound: frozenset[str], fields: Sequence[int], dtypes: Sequence[str]) -> list[int]:
        """The fields of a reduction's state."""
        found = MONOIDS[monoid]
        if isinstance(found.structure, Product):
            out, at = list[int](), 0
            for part in found.structure.parts:
                upto = at + len(part.fields)
                out += self._reduced(part, bound, fields[at:upto], dtypes[at:upto])
                at = upto
            return out
        return self._reduced(found, bound, fields, dtypes)

    def _reduced(self, monoid: Monoid, bound: frozenset[str], fields: Sequence[int], dtypes: Sequence[str]) -> list[int]:
        if self.real and monoid.structure == ByPrimitive("add"):
            return [self._sum(bound, fields[0], dtypes[0])]
        whole = self.make(("reduce", monoid.name, tuple(sorted(bound)), tuple(fields)), fields, bound=bound)
        return [self.make(("field", whole, k), (whole,)) for k in range(len(fields))]

    def _sum(self, bound: frozenset[str], term: int, dtype: str) -> int:
        key = self.keys[term]
        if key[:3] == ("call", "add", dtype):
            return self.call("add", dtype, [self._sum(bound, a, dtype) for a in key[3]])
        factors = key[3] if key[:3] == ("call", "mul", dtype) else (term,)
        before = [f for f in factors if not self.free[f] & bound]
        behind = [f for f in factors if self.free[f] & bound]
        if not behind:
            behind, before = before[:1], before[1:]
        inside = self.call("mul", dtype, behind) if len(behind) > 1 else behind[0]
        total = self.make(("reduce", "sum", tuple(sorted(bound)), (inside,)), (inside,), bound=bound)
        return self.call("mul", dtype, [*before, total]) if before else total


class _Composition(Walk[Aff, int]):
    """Terms of one graph's cells. A reduction's variables are numbered by how many reductions its cell stands in already."""

    def __init__(self, graph: Graph, terms: _Terms) -> None:
        self.graph, self.terms = graph, terms
        self.makers = {t: op for op in graph.ops for t in op.outs}
        self.known: dict[tuple[str, tuple[Aff, ...], int], int] = {}
        self.depth = 0

    def cell(self, tensor: str, index: tuple[Aff, ...]) -> int:
        """The term of a tensor's cell."""
        key = tensor, index, self.depth
        if key not in self.known:
            self.known[key] = self._cell(tensor, index)
        return self.known[key]

    def _cell(self, tensor: str, index: tuple[Aff, ...]) -> int:
        op = self.makers.get(tensor)
        if op is None:
            free = _NONE.union(*map(dims_of, index))
            return self.terms.make(("cell", tensor, tuple(map(str, index))), free=free)
        if not isinstance(op, Block):
            raise NoForm
        return self.values(op, {d.name: e for d, e in zip(op.dims, index, strict=True)}, (op.outs.index(tensor),))[0]

    def bound(self, op: Block, dims: Sequence[Dim], env: Mapping[str, Aff]) -> tuple[dict[str, Aff], frozenset[str]]:
        places = {d.name: _variable(f"r{self.depth}", k, d.size, self.terms.ranges) for k, d in enumerate(dims)}
        self.depth += 1
        return {**env, **places}, _NONE.union(*map(dims_of, places.values()))

    def reduced(self, monoid: str, over: frozenset[str], fields: list[int], kinds: tuple[str, ...]) -> list[int]:
        self.depth -= 1
        return self.terms.reduced(monoid, over, fields, kinds)

    def const(self, value: float | int | bool, dtype: str) -> int:
        return self.terms.const(value, dtype)

    def index(self, aff: Aff, env: Mapping[str, Aff], dtype: str) -> int:
        return self.terms.index(substitute(aff, env, self.terms.ranges), dtype)

    def call(self, e: Call, args: list[int]) -> int:
        return self.terms.call(e.fn, e.dtype, args)

    def read(self, op: Block, pos: int, env: Mapping[str, Aff]) -> int:
        r, ranges = op.reads[pos], self.terms.ranges
        t = self.graph.tensors[r.tensor]
        open_ = list[Guard]()
        for g in guards(r, t.shape):
            aff = substitute(g.aff, env, ranges)
            lo, hi = span(aff, ranges)
            if hi < 0 or (g.op == "eq" and lo > 0):
                assert r.other is not None
                return self.terms.const(r.other, t.dtype)
            if lo < 0 or (g.op == "eq" and hi > 0):
                open_.append(Guard(aff, g.op))
        inner = self.cell(r.tensor, tuple(substitute(e, env, ranges) for e in r.index))
        if not open_:
            return inner
        assert r.other is not None
        free = _NONE.union(*(dims_of(g.aff) for g in open_))
        fill = self.terms.const(r.other, t.dtype)
        return self.terms.guarded(inner, frozenset((str(g.aff), g.op) for g in open_), free, fill)
