"""Values by normal form: what a graph computes at one cell, composed to one term over its inputs.

Terms are kept once each, so that equal ones have equal numbers. Operands that commute are sorted, guards are sets, index
expressions are simplified by the ranges of their dimensions, products of monoids are taken apart. In *real* arithmetic sums and
products are also flattened, and a factor that does not vary along a sum stands before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from tapestry.ir import laws, space
from tapestry.ir.expr import PRIMITIVES, Arg, Call, Const, Expr, arg_positions, call, rewrite
from tapestry.ir.graph import Block, Dim, Graph, Guard, Read, Rewrite, map_exprs, with_ops
from tapestry.ir.index import Aff, const, dim, dims_of, span, substitute
from tapestry.ir.kernel import whole
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Monoid, Product
from tapestry.ir.space import Point
from tapestry.ir.types import FLOATS, Array, Tensor, numpy_dtype
from tapestry.verify import certificate
from tapestry.verify.interp import Walk, guards
from tapestry.verify.model.cell_values import CellValues

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


# Dependences by isl: which cells of the inputs each cell of the output reads, before and after, for all cells at once.


OPERATIONS = 400_000  # of isl, for one comparison: about a second


@dataclass(frozen=True, slots=True)
class Difference:
    """A pair of cells that is a dependence on one side alone: ``lost`` or ``gained``."""

    verb: str
    source: str
    cell: Point
    read: Point


def compare(before: Graph, after: Graph) -> list[Difference] | None:
    """A witness for every input and direction in which dependences differ; ``None`` where isl takes too long."""
    try:
        with space.bounded(OPERATIONS):
            return _compare(before, after)
    except space.TooHard:
        return None


def _compare(before: Graph, after: Graph) -> list[Difference]:
    (out,) = before.outputs
    box = whole(before.tensors[out].shape)
    old, new = laws.dependences(before, out), laws.dependences(after, after.outputs[0])
    found = list[Difference]()
    for source in {**old, **new}:
        for one, other, verb in ((old.get(source), new.get(source), "lost"), (new.get(source), old.get(source), "gained")):
            if one is None or (one := one.image(box)) is None:
                continue
            point = one.witness(other)
            if point is not None:
                found.append(Difference(verb, source, *point))
    return found


# A graph whose values are assumed to be finite: tests for NaN and infinities are false, and what only they chose is gone.
#
# This is no rewrite that can be proved: it is the user's word (``--assume-finite``). It stands in the log under a name of its
# own, so that a checker counts what rests on it, and makes the same graph again.


ASSUMED = "assume_finite"
TESTS = ("isnan", "isinf")
FALSE = Const(False, "bool")


def assume_finite(graph: Graph) -> Graph:
    """The graph without its tests for NaN and infinities, with that in its log; the same graph where it has none."""
    out = _assumed(graph)
    return replace(out, log=Rewrite(ASSUMED, graph, out)) if out.ops != graph.ops else graph


def tests_dropped(graph: Graph) -> int:
    """How many operations behind a graph are as they are by this assumption."""
    step = graph.log
    while step is not None and step.by != ASSUMED:
        step = step.before.log
    return 0 if step is None else sum(a is not b for a, b in zip(step.before.ops, step.after.ops, strict=True))


def follows(before: Graph, after: Graph) -> bool:
    """Whether a graph is another one under the assumption, operation by operation."""
    return _assumed(before).ops == after.ops


def _assumed(graph: Graph) -> Graph:
    never = set[str]()  # tensors that are false everywhere
    ops = list(graph.ops)
    for k, op in enumerate(ops):
        if not isinstance(op, Block):
            continue
        known = {i: FALSE for i, r in enumerate(op.reads) if r.tensor in never and not r.when and r.other is None}
        new = map_exprs(
            op, lambda e, known=known: _without(rewrite(e, lambda x: known.get(x.pos, x) if isinstance(x, Arg) else x))
        )
        if new != op:
            ops[k] = new = _pruned(new)
        if not new.monoid and all(e == FALSE for e in new.body):
            never |= {*new.outs}
    return with_ops(graph, tuple(ops))


def _without(e: Expr) -> Expr:
    """An expression with tests of floats false, and the choices made that follow."""
    if not isinstance(e, Call):
        return e
    args = tuple(map(_without, e.args))
    if e.fn in TESTS and args[0].dtype in FLOATS:
        return FALSE
    if e.fn == "where" and args[0] == FALSE:
        return args[2]
    if e.fn in ("and", "or") and FALSE in args:
        return FALSE if e.fn == "and" else args[1 - args.index(FALSE)]
    return e if args == e.args else replace(e, args=args) if e.fn == "cast" else call(e.fn, *args)


def _pruned(op: Block) -> Block:
    """An operation without the reads that nothing uses any more."""
    used = sorted(arg_positions((*op.point, *op.then)))
    places = {k: i for i, k in enumerate(used)}
    moved = map_exprs(op, lambda e: rewrite(e, lambda x: replace(x, pos=places[x.pos]) if isinstance(x, Arg) else x))
    return replace(moved, reads=tuple(op.reads[k] for k in used))


# Drawn values for the cells of a region's inputs: a function of the tensor and the cell, so that nothing has to be stored.
#
# Every draw has a purpose. ``exact``: floats are multiples of 1/32 of at most 2, an eighth of them 0; float64 holds sums of
# their products without rounding. ``range``: up to 128, and around the constants of the region. ``awkward``: a third of the
# floats are infinite, NaN, -0 or 1e30. ``dense``: floats with all their digits. ``positive``: for logarithms and roots, and
# with ``negative`` for maxima and minima. ``off`` and ``on``: booleans all alike. A *poke* puts one value, such as NaN, into
# chosen cells of one tensor.


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


# Values of a graph at some cells of a tensor for drawn inputs: no more of any tensor than those cells depend on.
#
# So a product of large matrices is compared at cells of its own size. Reductions merge their states pairwise, in order, however
# many cells are asked for together.


class TooMuch(Exception):
    """The cells asked for depend on more points than may be computed."""


class _Deep(Exception):
    """Cells that are asked for far inside of others: they are computed first, and the others from the start."""

    def __init__(self, tensor: str, flat: Array) -> None:
        super().__init__(tensor)
        self.wanted = tensor, flat


NESTED = 32  # operations followed back inside each other: Python's stack holds some 100 of them

Place = tuple[tuple[int, ...], Array, Array, Array]
"""Of a read: the shape of its values, which are inside the tensor, the distinct cells, which of them each value inside is."""


class Cells(CellValues):
    """The cells of one graph for one draw of its inputs.

    Attributes:
        asked: the cells of each input that were read.
    """

    def __init__(
        self, graph: Graph, order: Mapping[str, int], draw: Draw, wide: bool, most: int, places: list[Place], real: bool = False
    ) -> None:  # fmt: skip
        """``order`` numbers the inputs, by which they are drawn: the same in the graphs that are compared. ``most`` points may
        be computed; ``real`` is as in `CellValues`. ``places`` says where each read looks, in the order in which they are met:
        the same for every draw, so they are found once."""
        super().__init__(graph, lambda tensor: None, wide=wide, plain=True, real=real)
        self.order, self.draw, self.most, self.places = order, draw, most, places
        self.points = self.met = self.depth = 0
        self.asked: dict[str, list[Array]] = {}
        self.before: dict[tuple[str, bytes], Array] = {}  # cells that were asked for too far inside of others

    def cells(self, tensor: str, flat: Array) -> Array:
        """Values of some cells of a tensor, given by their row-major positions.

        Raises:
            TooMuch: they depend on too many points; LawError: a read leaves its tensor.
        """
        wanted = [(tensor, flat)]
        while wanted:
            self.depth = 0
            try:
                made = self._cells(*wanted[-1])
            except _Deep as e:
                wanted.append(e.wanted)
                continue
            name, at = wanted.pop()
            self.before[name, at.tobytes()] = made
        return self.before.pop((tensor, flat.tobytes()))

    def _cells(self, tensor: str, flat: Array) -> Array:
        if self.depth >= NESTED and tensor in self.makers:
            if (tensor, flat.tobytes()) not in self.before:
                raise _Deep(tensor, flat)
            return self.before[tensor, flat.tobytes()]
        t = self.graph.tensors[tensor]
        dtype = numpy_dtype(t.dtype, self.wide)
        if tensor not in self.makers:
            self.asked.setdefault(tensor, []).append(flat)
            return self.draw.values(t, self.order[tensor], flat).astype(dtype)
        op = self.graph.ops[self.makers[tensor]]
        if not isinstance(op, Block):
            raise TooMuch
        self._count(len(flat) * prod(d.size for d in (*op.reduce, *op.inner_dims)))
        coords = np.stack(np.unravel_index(flat, t.shape), axis=1) if t.shape else np.zeros((len(flat), 0), int)
        self.depth += 1
        made = self.block(op, coords)[op.outs.index(tensor)][0].astype(dtype)
        self.depth -= 1
        return made

    def read(self, op: Block, pos: int, env: Mapping[str, Array]) -> Array:
        r = op.reads[pos]
        t = self.graph.tensors[r.tensor]
        if self.met == len(self.places):
            self.places.append(self._place(op, r, env))
        shape, valid, wanted, back = self.places[self.met]
        self.met += 1
        out = np.full(shape, 0 if r.other is None else r.other, numpy_dtype(t.dtype, self.wide))
        if len(wanted):
            out[valid] = self._cells(r.tensor, wanted)[back]
        return out

    def _place(self, op: Block, r: Read, env: Mapping[str, Array]) -> Place:
        t = self.graph.tensors[r.tensor]
        index, valid = self.looked_at(op, r, env)
        shape = np.broadcast_shapes(valid.shape, *(i.shape for i in index))
        self._count(prod(shape))
        flat = np.zeros(shape, np.int64)
        for i, n in zip(index, t.shape, strict=True):
            flat = flat * n + np.clip(i, 0, max(0, n - 1))
        valid = np.broadcast_to(valid, shape)
        return shape, valid, *certificate.distinct_cells(flat[valid], t.size)

    def _count(self, points: int) -> None:
        self.points += points
        if self.points > self.most:
            raise TooMuch
