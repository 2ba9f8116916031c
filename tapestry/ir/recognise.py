"""Contractions: products of two factors under ``sum``, recognised from the body alone, and reductions of what they give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Protocol

from tapestry.ir.expr import Arg, Call, Const, Expr, Index, Let, call, uncast, walk
from tapestry.ir.graph import Block, Dim, Graph, Inner, Op, Read
from tapestry.ir.index import Aff, dim, dims_of
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Monoid, Product, Rebased, highest, lowest, number, primitive_of

# Sums with exponential weights: which monoids they are, by their structure.
#
# Their states are (centre, sums), where the centre is a maximum or a minimum and every sum refers to it: moved from ``old``
# to ``new`` it is multiplied by ``exp(rate * (old - new))``, which is at most 1. ``max`` with rate 1 is log-sum-exp and, with
# a sum of values besides, attention; a rate of log 2 weighs by powers of 2, a minimum with a negative rate is a soft minimum.


@dataclass(frozen=True, slots=True)
class Exponential:
    """A sum, or several side by side, of what is weighted by ``exp(rate * (score - centre))``.

    Attributes:
        fn: the primitive that merges centres, ``max`` or ``min``.
        rate: positive for ``max``, negative for ``min``.
        sums: how many sums there are; the first of two is that of the weights.
    """

    fn: str
    rate: float
    sums: int

    def hidden(self, dtype: str) -> Const:
        """The score that has no weight: the identity of the centre."""
        return lowest(dtype) if self.fn == "max" else highest(dtype)


def exponential(monoid: str | None, sums: int = 0) -> Exponential | None:
    """The exponential weights of a monoid, of so many sums if that is asked for; ``None`` for another monoid."""
    weights = _exponential(MONOIDS[monoid]) if monoid and monoid in MONOIDS else None
    return weights if weights and sums in (0, weights.sums) else None


@lru_cache(maxsize=1 << 8)
def _exponential(monoid: Monoid) -> Exponential | None:
    s = monoid.structure
    if not isinstance(s, Rebased) or not isinstance(s.centre.structure, ByPrimitive):
        return None
    parts = s.acted.structure.parts if isinstance(s.acted.structure, Product) else (s.acted,)
    if any(p.structure != ByPrimitive("add") for p in parts):
        return None
    old, new, *sums = (Arg(k, "f64") for k in range(2 + len(parts)))
    rates = {_rate(e, x) for e, x in zip(s.act((old,), (new,), tuple(sums)), sums, strict=True)}
    rate = rates.pop() if len(rates) == 1 else None
    fn = s.centre.structure.fn
    fits = rate is not None and ((fn == "max" and rate > 0) or (fn == "min" and rate < 0))
    return Exponential(fn, rate, len(parts)) if rate is not None and fits else None


def _rate(e: Expr, x: Arg) -> float | None:
    """The rate of ``x * exp(rate * (old - new))``, perhaps only where ``old`` and ``new`` differ, and x else."""
    if isinstance(e, Call) and e.fn == "where" and e.args[1] == x:
        test = e.args[0]
        same = isinstance(test, Call) and test.fn == "eq" and {a.pos for a in test.args if isinstance(a, Arg)} == {0, 1}
        return _rate(e.args[2], x) if same else None
    if not isinstance(e, Call) or e.fn != "mul" or x not in e.args:
        return None
    weight = e.args[1] if e.args[0] == x else e.args[0]
    linear = _linear(weight.args[0]) if isinstance(weight, Call) and weight.fn == "exp" else None
    return linear[0] if linear and linear[0] == -linear[1] else None


def _linear(e: Expr) -> tuple[float, float] | None:
    """(a, b) of ``a * old + b * new``."""
    if isinstance(e, Arg):
        return (1.0, 0.0) if e.pos == 0 else (0.0, 1.0) if e.pos == 1 else None
    if not isinstance(e, Call) or e.fn not in ("add", "sub", "neg", "mul", "div"):
        return None
    if e.fn in ("mul", "div"):
        inner, factor = e.args if isinstance(e.args[1], Const) or e.fn == "div" else e.args[::-1]
        found = _linear(inner)
        if found is None or not isinstance(factor, Const):
            return None
        by = float(factor.value) if e.fn == "mul" else 1.0 / float(factor.value)
        return found[0] * by, found[1] * by
    parts = [_linear(a) for a in e.args]
    first, second = parts[0], parts[-1]
    if first is None or second is None:
        return None
    if e.fn == "neg":
        return -first[0], -first[1]
    sign = 1.0 if e.fn == "add" else -1.0
    return first[0] + sign * second[0], first[1] + sign * second[1]


INT8 = frozenset({"i8", "u8"})


class Nest(Protocol):
    """What the recognisers ask of an operation: a `Block`, or what a target makes of one."""

    @property
    def dims(self) -> tuple[Dim, ...]:
        """Map dimensions."""
        ...

    @property
    def reduce(self) -> tuple[Dim, ...]:
        """Reduced dimensions."""
        ...

    @property
    def monoid(self) -> str | None:
        """The name of what merges them."""
        ...

    @property
    def body(self) -> tuple[Expr, ...]:
        """What is merged, one expression for each field; without a monoid the results."""
        ...

    @property
    def inner(self) -> tuple[Inner, ...]:
        """Reductions inside every point."""
        ...

    @property
    def ranges(self) -> dict[str, int]:
        """Dimension name to size."""
        ...

    def read_dims(self, pos: int) -> frozenset[str]:
        """Dimensions that one read depends on."""
        ...


def factors(op: Nest) -> tuple[Expr, Expr] | None:
    """The two factors of a contraction (a product under ``sum``, casts that only widen it aside), or ``None``."""
    return _factors(op.body[0]) if primitive_of(op.monoid) == "add" and len(op.body) == 1 else None


def _factors(body: Expr) -> tuple[Expr, Expr] | None:
    """The factors of what one field sums."""
    product, e = uncast(body), body
    if not isinstance(product, Call) or product.fn != "mul":
        return None
    while isinstance(e, Call) and e.fn == "cast":
        if not _widens(product, e.dtype):
            return None
        e = e.args[0]
    return product.args[0], product.args[1]


_WIDER = {"f16": ("f16", "f32", "f64"), "bf16": ("bf16", "f32", "f64"), "f32": ("f32", "f64"), "f64": ("f64",)}


def _widens(product: Call, dtype: str) -> bool:
    """Whether factors of a dtype have the product that this one is, or round it less; an integer may overflow."""
    if product.dtype in _WIDER:
        return dtype in _WIDER[product.dtype]
    small = product.dtype in ("i32", "i64") and all(narrow(a) for a in product.args)
    return dtype == product.dtype or (small and dtype in ("i32", "i64", "f32", "f64"))


def sides(op: Nest) -> tuple[Expr, Expr, frozenset[str], frozenset[str]] | None:
    """The two factors of a contraction and the dimensions of each."""
    pair = factors(op)
    return None if pair is None else (*pair, dims_read(op, pair[0]), dims_read(op, pair[1]))


def only_sums(monoid: str | None) -> bool:
    """Whether a monoid is one sum, or several side by side."""
    structure = MONOIDS[monoid].structure if monoid in MONOIDS and monoid else None
    parts = [p.structure for p in structure.parts] if isinstance(structure, Product) else [structure]
    return all(isinstance(p, ByPrimitive) and p.fn == "add" for p in parts)


def products(op: Nest) -> tuple[tuple[Expr, Expr], ...] | None:
    """The factors of every field of a sum of products, or of several side by side; ``None`` where some field is none."""
    found = [_factors(e) for e in op.body] if only_sums(op.monoid) else []
    return tuple(f for f in found if f) if found and all(found) else None


def inner_product(op: Nest) -> Call | None:
    """The product that an operation's one inner reduction sums, any casts of it aside; ``None`` where there is none."""
    if len(op.inner) != 1 or primitive_of(op.inner[0].monoid) != "add":
        return None
    product = uncast(op.inner[0].body)
    return product if isinstance(product, Call) and product.fn == "mul" else None


def part(op: Block, field: int) -> Block:
    """One of several sums side by side as an operation of its own, over the same index space and reads."""
    return op if len(op.body) == 1 else replace(op, outs=op.outs[:1], monoid="sum", body=(op.body[field],), then=())


def dims_read(op: Nest, e: Expr) -> frozenset[str]:
    """Dimensions of the index space that an expression of the body depends on."""
    out: frozenset[str] = frozenset()
    for x in walk(e):
        if isinstance(x, Index):
            out |= dims_of(x.aff)
        elif isinstance(x, Arg):
            out |= op.read_dims(x.pos)
        elif isinstance(x, Let):
            inner = op.inner[x.pos]
            out |= dims_read(op, inner.body) - {d.name for d in inner.dims}
    return out


def dims_varied(op: Nest, e: Expr) -> frozenset[str]:
    """Dimensions of more than one point that an expression of the body depends on."""
    ranges = op.ranges
    return frozenset(d for d in dims_read(op, e) if ranges[d] > 1)


@dataclass(frozen=True, slots=True)
class Narrow:
    """``value - shift``: an integer of 8 bits less a zero point of as many bits (``None`` for 0)."""

    value: Expr
    shift: Expr | None

    @property
    def largest(self) -> int:
        """A bound on the absolute value of the difference."""
        return 255 if self.shift is not None or self.value.dtype == "u8" else 128


def narrow(e: Expr) -> Narrow | None:
    """A factor as an integer of 8 bits less a zero point, which may vary along anything; ``None`` where it is none."""
    while isinstance(e, Call) and e.fn == "cast" and e.dtype in ("f32", "i32") and e.args[0].dtype in ("i32", *INT8):
        e = e.args[0]
    if e.dtype in INT8:
        return Narrow(e, None)
    if not (isinstance(e, Call) and e.fn == "sub" and e.dtype == "i32"):
        return None
    value, z = narrow(e.args[0]), e.args[1]
    if value is None or value.shift is not None:
        return None
    if isinstance(z, Const):
        return (
            Narrow(value.value, z) if int(z.value) in (range(-128, 128) if value.value.dtype == "i8" else range(256)) else None
        )
    zero = narrow(z)
    return Narrow(value.value, z) if zero is not None and zero.shift is None else None


MIN_FOLD = 32  # points that are folded along an axis of a product's tile; fewer are gone through one after another


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The dimensions of a reduction of a product as axes of the product's tiles.

    Attributes:
        swapped: whether the second factor's dimensions are the rows.
        rows, columns: of a tile; columns are reduced dimensions where the tile is folded, else map dimensions.
        batch: map dimensions that every tile has one point of.
        taps: reduced dimensions whose points are tiles one after another.
        folds: whether columns are reduced within a tile.
    """

    swapped: bool
    rows: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    batch: tuple[Dim, ...]
    taps: tuple[Dim, ...]
    folds: bool

    @property
    def lanes(self) -> int:
        """Lanes of all tiles, those past the ends of dimensions included."""
        return _points((*self.batch, *self.taps)) * _padded(_points(self.rows)) * _padded(_points(self.columns))


def roles(dims: Sequence[Dim], reduce: Sequence[Dim], first: frozenset[str], second: frozenset[str]) -> Roles | None:
    """How a reduction over ``reduce`` of products, whose factors vary along ``first`` and ``second``, goes in tiles.

    Of all ways the one that computes fewest lanes; folding along an axis may compute twice as many, since then tiles are
    independent programs. ``None`` where a factor has no dimension of its own, so that there is no matrix product.
    """
    found: list[tuple[float, Roles]] = []
    for swapped, own, other in ((False, first - second, second - first), (True, second - first, first - second)):
        rows, columns = (tuple(d for d in dims if d.name in s) for s in (own, other))
        folded = tuple(d for d in reduce if d.name in other)
        if not swapped and _points(rows) > 1 and _points(columns) > 1:
            r = _roles(dims, reduce, False, rows, columns, folds=False)
            found.append((2.0 * r.lanes, r))
        if _points(folded) >= MIN_FOLD and (own & {d.name for d in (*dims, *reduce)}):
            r = _roles(dims, reduce, swapped, rows, folded, folds=True)
            found.append((float(r.lanes), r))
    return min(found, key=lambda f: f[0])[1] if found else None


def _roles(
    dims: Sequence[Dim], reduce: Sequence[Dim], swapped: bool, rows: tuple[Dim, ...], columns: tuple[Dim, ...], *, folds: bool
) -> Roles:
    batch = tuple(d for d in dims if d not in (*rows, *columns))
    taps = tuple(d for d in reduce if d not in columns)
    return Roles(swapped=swapped, rows=rows, columns=columns, batch=batch, taps=taps, folds=folds)


def _padded(n: int) -> int:
    block = max(16, min(128, 1 << max(0, n - 1).bit_length()))
    return -(-n // block) * block


def _points(dims: Sequence[Dim]) -> int:
    return prod(d.size for d in dims)


MOST_KEPT = 256  # columns of a row that a tile holds whole


@dataclass(frozen=True, slots=True)
class Kept:
    """A field that picks the row's own element, ``sum over n of where(n == j, value, 0)``: the last of a product of monoids.

    A norm of rows of a product needs each element again after the row is reduced; kernels of whole rows compute no sum for it.
    """

    over: Dim
    column: Dim
    value: Expr
    first: int = 0  # the row's element at which a block of the columns begins


def kept(monoid: str | None, dims: Sequence[Dim], reduce: Sequence[Dim], body: Sequence[Expr]) -> Kept | None:
    """The element that a reduction keeps beside its other fields; ``None`` where it keeps none."""
    e = body[-1] if monoid and monoid.endswith(".sum") else None
    if not isinstance(e, Call) or e.fn != "where" or not isinstance(e.args[0], Call) or e.args[0].fn != "eq":
        return None
    (left, right), zero = e.args[0].args, e.args[2]
    if not isinstance(left, Index) or not isinstance(right, Index) or not isinstance(zero, Const) or zero.value != 0:
        return None
    first = right.aff.const
    over = next((d for d in reduce if left.aff == dim(d.name)), None)
    column = next((d for d in dims if right.aff - first == dim(d.name)), None)
    return Kept(over, column, e.args[1], first) if over and column and first + column.size <= over.size else None


def folded_roles(op: Block) -> Roles | None:
    """The roles of an operation that reduces one inner sum of products; ``None`` for any other operation.

    Where it keeps elements of rows, a tile has whole rows, and the column is no dimension of the product.
    """
    product = inner_product(op) if op.monoid and exponential(op.monoid, sums=2) is None else None
    return product_roles(op, product, kept(op.monoid, op.dims, op.reduce, op.body)) if product else None


def product_roles(op: Nest, product: Call, row: Kept | None) -> Roles | None:
    """The roles of dimensions in a product that an operation sums, or sums and then reduces (``row``: see `whole_rows`)."""
    summed = {d.name for s in op.inner for d in s.dims} or {d.name for d in op.reduce}
    first, second = (dims_varied(op, e) - summed for e in product.args)
    return whole_rows(op.dims, op.reduce if op.inner else (), first, second, row)


def whole_rows(
    dims: Sequence[Dim], reduce: Sequence[Dim], first: frozenset[str], second: frozenset[str], row: Kept | None
) -> Roles | None:
    """`roles`, with tiles of whole rows where elements of rows are kept."""
    if row is None:
        return roles(dims, reduce, first, second)
    found = roles([d for d in dims if d != row.column], reduce, first, second)
    whole = found is not None and found.folds and found.columns == (row.over,) and row.over.size <= MOST_KEPT
    return found if whole and found is not None and all(d.size == 1 for d in found.taps) else None


# Convolutions: contractions of windows that slide over an image, recognised from the projections alone.


@dataclass(frozen=True, slots=True)
class Window:
    """One spatial axis of a convolution: output dimension, window dimension ("" when there is none), stride, dilation."""

    out: str
    window: str
    stride: int
    dilation: int
    offset: int


@dataclass(frozen=True, slots=True)
class Conv:
    """A contraction that is a convolution: positions of the reads, and what each axis is."""

    x: int
    w: int
    batch: str
    channel: str
    feature: str
    windows: tuple[Window, ...]


def convolution(op: Block) -> Conv | None:
    """The convolution that a contraction is, by its projections; ``None`` when it is none."""
    both = factors(op)
    if both is None:
        return None
    reads = [plain_read(op, e) for e in both]
    if None in reads:
        return None
    for x, w in (reads, reads[::-1]):
        assert x is not None and w is not None
        found = _match(op, x, w)
        if found is not None:
            return found
    return None


def plain_read(op: Block, e: Expr, *, guarded: bool = False) -> int | None:
    """The read that a factor is."""
    return e.pos if isinstance(e, Arg) and (guarded or not op.reads[e.pos].when) else None


def _match(op: Block, x: int, w: int) -> Conv | None:
    rx, rw = op.reads[x], op.reads[w]
    rank = len(rx.index) - 2
    ranges, reduced = op.ranges, {d.name for d in op.reduce}
    if rank not in (1, 2, 3) or len(rw.index) != rank + 2 or rw.other is not None or rx.other not in (None, 0.0):
        return None
    if not rx.index[0].is_dim or str(rx.index[0]) in reduced or len(op.dims) != rank + 2:
        return None
    plain = [str(e) if e.is_dim else "" for e in rw.index]
    if any(not p and (e.terms or e.const) for p, e in zip(plain, rw.index, strict=True)):
        return None
    batch, feature, channel = str(rx.index[0]), plain[0], plain[1]
    if not feature or feature in reduced or (channel and channel not in reduced) or batch == feature:
        return None
    if dims_of(rx.index[1]) - {feature, channel}:
        return None
    if channel and ranges[channel] > 1 and channel in dims_of(rx.index[1] - dim(channel)):  # not one channel after another
        return None
    windows = [window(op, rx, axis + 2, plain[axis + 2], ranges) for axis in range(rank)]
    if any(v is None for v in windows):
        return None
    outs = [batch, feature, *(v.out for v in windows if v)]
    known = [n for n in (channel, *(v.window for v in windows if v)) if n]
    if len({*known}) < len(known) or not {*known} <= reduced:  # a diagonal of windows, or a weight of each place
        return None
    if outs != [d.name for d in op.dims] or any(d.name not in known and d.size > 1 for d in op.reduce):
        return None
    return Conv(x, w, batch, channel, feature, tuple(v for v in windows if v))


def window(op: Block, rx: Read, axis: int, window: str, ranges: dict[str, int]) -> Window | None:
    """What one spatial axis is, given its window's dimension."""
    e = rx.index[axis]
    out = op.dims[axis].name
    if not e.is_affine or dims_of(e) - {out, window}:
        return None
    stride, dilation = e.coef(out), e.coef(window) if window else 1
    if ranges[out] == 1 and stride == 0:
        stride = 1
    if window and dilation == 0 and ranges[window] == 1:
        dilation = 1
    return Window(out, window, stride, dilation, e.const) if stride > 0 and dilation > 0 else None


# Attention: values weighted by exponentials of scores, in one pass over the keys, recognised by its projections.


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """``sum over key of weight(score) * value``.

    Attributes:
        rows, columns, batch: map dimensions of the scores but not of keys and values; of the values alone; the others.
        depth: those that scores are sums of products over, if they are.
        weights: how scores become weights.
    """

    value: Expr
    score: Expr
    rows: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    batch: tuple[Dim, ...]
    key: Dim
    depth: tuple[Dim, ...] = ()
    weights: Exponential


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Weighed):
    """Values weighted by scores that are made of ``sum over depth of query * keys``."""

    query: Expr
    keys: Expr


def attention(op: Nest) -> Attention | None:
    """The attention that an operation is; ``None`` where it is none."""
    weights, product = exponential(op.monoid, sums=2), inner_product(op)
    if weights is None or product is None or len(op.reduce) != 1 or product is not op.inner[0].body:
        return None
    score, _, value = op.body
    if not counts_ones(op.body, weights.hidden(score.dtype)):
        return None
    key, dims = op.reduce[0], op.inner[0].dims
    depth = {d.name for d in dims if d.size > 1}
    keyed = {key.name} if key.size > 1 else set[str]()
    of_s, of_v = dims_read(op, score), dims_read(op, value)
    for query, keys in (product.args, product.args[::-1]):
        of_q, of_k = dims_read(op, query), dims_read(op, keys)
        if of_q & keyed or not keyed <= of_k or not depth <= of_q & of_k or of_v & depth:
            continue
        columns = tuple(d for d in op.dims if d.name in of_v - of_q - of_k - of_s)
        rows = tuple(d for d in op.dims if d.name in (of_q | of_s) - of_k - of_v)
        return Attention(
            query=query, keys=keys, value=value, score=score, rows=rows, columns=columns,
            batch=tuple(d for d in op.dims if d not in rows + columns), key=key, depth=dims, weights=weights,
        )  # fmt: skip
    return None


def weighed(op: Nest) -> Weighed | None:
    """Values weighted by the exponentials of scores that are there; ``None`` where an operation is something else."""
    weights = exponential(op.monoid, sums=2)
    if weights is None or op.inner or len(op.reduce) != 1 or not counts_ones(op.body, weights.hidden(op.body[0].dtype)):
        return None
    score, _, value = op.body
    of_s, of_v = dims_read(op, score), dims_read(op, value)
    columns = tuple(d for d in op.dims if d.name in of_v - of_s)
    rows = tuple(d for d in op.dims if d.name in of_s - of_v)
    batch = tuple(d for d in op.dims if d not in rows + columns)
    return Weighed(value=value, score=score, rows=rows, columns=columns, batch=batch, key=op.reduce[0], weights=weights)


def counts_ones(body: tuple[Expr, ...], hidden: Const) -> bool:
    """Whether the second lifted field is 1 wherever the first, a score, is not hidden."""
    score, one = body[:2]
    if isinstance(score, Call) and isinstance(one, Call) and score.fn == one.fn == "where" and score.args[2] == hidden:
        return score.args[0] == one.args[0] and one.args[1] == number(1, one.dtype)
    return one == number(1, one.dtype)


def linear_score(e: Expr, hidden: Const) -> tuple[float, Expr | None] | None:
    """(scale, bias) of a score ``scale * product + bias``, where hiding it is a bias too; ``None`` where it is not linear."""
    if isinstance(e, Let):
        return 1.0, None
    if not isinstance(e, Call):
        return None
    if e.fn in ("mul", "div"):
        inner, factor = e.args if isinstance(e.args[1], Const) else e.args[::-1]
        linear = linear_score(inner, hidden)
        if linear is None or linear[1] is not None or not isinstance(factor, Const) or (e.fn == "div" and factor is e.args[0]):
            return None
        value = float(factor.value)
        return (linear[0] * value if e.fn == "mul" else linear[0] / value), None
    if e.fn == "add":
        inner, bias = e.args if _has_product(e.args[0]) else e.args[::-1]
        linear = None if _has_product(bias) else linear_score(inner, hidden)
        return linear and (linear[0], bias if linear[1] is None else call("add", linear[1], bias))
    if e.fn == "where" and e.args[2] == hidden and not _has_product(e.args[0]):
        linear = linear_score(e.args[1], hidden)
        zero: Expr = number(0, e.dtype)
        return linear and (linear[0], call("where", e.args[0], linear[1] or zero, e.args[2]))
    return None


def _has_product(e: Expr) -> bool:
    return any(isinstance(x, Let) for x in walk(e))


# Selections: sums that pick one element of their reduced dimension, and so are gathers; and routed products, which pick the
# matrix that a row is multiplied by, as a mixture of experts does.


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """``sum_v where(wanted == v + shift, picked, 0)``: the element at one place, or none.

    Attributes:
        wanted: the place, which does not depend on ``over``.
        picked: what stands at v.
        over: the reduced dimension v.
        shift: the first place of a block of it.
    """

    wanted: Expr
    picked: Expr
    over: Dim
    shift: int


def selection(op: Nest) -> Selection | None:
    """The selection that an operation is; ``None`` where it is none."""
    return None if op.inner else _selection(op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """``sum_v where(wanted == v, sum_m rows * matrices, 0)``: each row times the matrix that ``wanted`` names for it.

    Attributes:
        wanted, over, shift: as in `Selection`.
        rows, matrices: the factors; only the second varies along ``over``.
        of_rows, of_columns: map dimensions of the rows, along which ``wanted`` may vary, and of the matrices.
    """

    wanted: Expr
    over: Dim
    shift: int
    rows: Expr
    matrices: Expr
    of_rows: tuple[Dim, ...]
    of_columns: tuple[Dim, ...]


def routed(op: Nest) -> Routed | None:
    """The routed product that an operation is; ``None`` where it is none, or where rows and columns share a dimension."""
    product, s = inner_product(op), _selection(op)
    if product is None or s is None or s.picked != Let(0, s.picked.dtype):
        return None
    a, b = ((f, dims_read(op, f)) for f in product.args)
    (rows, along), (matrices, dims) = (a, b) if s.over.name in b[1] else (b, a)
    along |= dims_read(op, s.wanted)
    if s.over.name not in dims or s.over.name in along or any(d.name in dims & along for d in op.dims):
        return None
    own, columns = (tuple(d for d in op.dims if (d.name in dims) == picked) for picked in (False, True))
    return Routed(
        wanted=s.wanted, over=s.over, shift=s.shift, rows=rows, matrices=matrices, of_rows=own, of_columns=columns
    )  # fmt: skip


def as_onnx_counts(wanted: Expr, count: int) -> Expr:
    """The index of a place that counts a negative one from the end of ``count`` places, as ONNX's Gather does by itself; any
    other place as it is."""
    i = wanted.args[2] if isinstance(wanted, Call) and wanted.fn == "where" else wanted
    wrapped = call("where", call("lt", i, number(0, i.dtype)), call("add", i, number(count, i.dtype)), i)
    return i if wanted == wrapped else wanted


def place_read(wanted: Expr, count: int) -> tuple[int, bool] | None:
    """The read (by position) that a place is, and whether a negative one counts from the end of ``count`` places, as ONNX's
    do; ``None`` for a place that is computed otherwise."""
    plain = as_onnx_counts(wanted, count)
    return (plain.pos, plain is not wanted) if isinstance(plain, Arg) else None


def _selection(op: Nest) -> Selection | None:
    e = op.body[0] if len(op.body) == 1 else None
    if primitive_of(op.monoid) not in ("add", "or") or len(op.reduce) != 1:
        return None
    if not isinstance(e, Call) or e.fn != "where":
        return None
    test, picked, zero = e.args
    if not isinstance(test, Call) or test.fn != "eq" or not isinstance(zero, Const) or zero.value != 0:
        return None
    over = op.reduce[0]
    for wanted, place in (test.args, test.args[::-1]):
        if (
            isinstance(place, Index)
            and place.aff - place.aff.const == dim(over.name)
            and over.name not in dims_read(op, wanted)
        ):
            return Selection(wanted=wanted, picked=picked, over=over, shift=place.aff.const)
    return None


# Which axes of the graph's inputs a dimension runs along: what it is, whatever it is called.


Axes = frozenset[tuple[str, int]]
NONE: Axes = frozenset()


def input_axes(graph: Graph) -> list[dict[str, Axes]]:
    """For each operation, by dimension: the axes of inputs that it runs along, followed through projections. Rows of a
    flattened axis run along several; a dimension that comes of weights alone is left out."""
    inputs = (t for t in graph.inputs if t not in graph.weights)
    known = {(t, k): frozenset({(t, k)}) for t in inputs for k in range(len(graph.tensors[t].shape))}
    out: list[dict[str, Axes]] = []
    for op in graph.ops:
        found: dict[str, Axes] = {}
        for t, k, index in _places_read(op):
            for d, axes in _along(index, known.get((t, k), NONE)):
                found[d] = found.get(d, NONE) | axes
        ends = zip(op.outs, [range(len(op.dims))] * len(op.outs) if isinstance(op, Block) else op.out_axes, strict=True)
        known |= {(t, k): found.get(d.name, NONE) for t, ks in ends for k, d in zip(ks, op.dims, strict=True) if k is not None}
        out.append(found)
    return out


def _places_read(op: Op) -> Iterator[tuple[str, int, Aff]]:
    """The (tensor, axis, index) that an operation reads."""
    if isinstance(op, Block):
        yield from ((r.tensor, k, index) for r in op.reads for k, index in enumerate(r.index))
    else:
        axes = zip(op.ins, op.in_axes, strict=True)
        yield from ((t, k, dim(d.name)) for t, ks in axes for k, d in zip(ks, op.dims, strict=True) if k is not None)


def _along(index: Aff, axes: Axes) -> Iterator[tuple[str, Axes]]:
    """What of an axis's axes the dimensions of an index run along: where as many are flattened as there are dimensions, the
    one with the longest step runs along the first, and so on."""
    steps = [a for a, _ in sorted(index.terms, key=lambda x: -x[1]) if isinstance(a, str)]
    for d in dims_of(index):
        flat = d in steps and all(len({k for u, k in axes if u == t}) == len(steps) for t, _ in axes)
        yield d, frozenset({sorted(x for x in axes if x[0] == t)[steps.index(d)] for t, _ in axes}) if flat else axes
