"""Contractions: products of two factors under ``sum``, recognised from the body alone, and reductions of what they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tapestry.ir.expr import Arg, Call, Const, Expr, Index, Let, uncast, walk
from tapestry.ir.graph import Block, Dim, Inner, names_of, points
from tapestry.ir.index import dim, dims_of
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Product, primitive_of
from tapestry.ir.recognition.exponential import INT8, exponential


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


def has_matrices(op: Block) -> bool:
    """Whether a sum is of products of which each factor is read again for other results, as matrix products have it."""
    if (found := sides(op)) is None:
        return False
    *_, left, right = found
    wide = {d.name for d in op.dims if d.size > 1}
    return bool(wide & left - right and wide & right - left)


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
            out |= dims_read(op, inner.body) - names_of(inner.dims)
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
        return points((*self.batch, *self.taps)) * _padded(points(self.rows)) * _padded(points(self.columns))


def roles(dims: Sequence[Dim], reduce: Sequence[Dim], first: frozenset[str], second: frozenset[str]) -> Roles | None:
    """How a reduction over ``reduce`` of products, whose factors vary along ``first`` and ``second``, goes in tiles.

    Of all ways the one that computes fewest lanes; folding along an axis may compute twice as many, since then tiles are
    independent programs. ``None`` where a factor has no dimension of its own, so that there is no matrix product.
    """
    found: list[tuple[float, Roles]] = []
    for swapped, own, other in ((False, first - second, second - first), (True, second - first, first - second)):
        rows, columns = (tuple(d for d in dims if d.name in s) for s in (own, other))
        folded = tuple(d for d in reduce if d.name in other)
        if not swapped and points(rows) > 1 and points(columns) > 1:
            r = _roles(dims, reduce, False, rows, columns, folds=False)
            found.append((2.0 * r.lanes, r))
        if points(folded) >= MIN_FOLD and (own & names_of((*dims, *reduce))):
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
    summed = {d.name for s in op.inner for d in s.dims} or names_of(op.reduce)
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
