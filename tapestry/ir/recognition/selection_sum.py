"""Selections: sums that pick one element of their reduced dimension, and so are gathers; and routed products, which pick the
matrix that a row is multiplied by, as a mixture of experts does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tapestry.ir.expr import Arg, Call, Const, Expr, Index, Let, call
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, dim, dims_of
from tapestry.ir.monoid import primitive_of
from tapestry.ir.recognition.contraction import Nest, dims_read, inner_product


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """``sum_v where(wanted == v + shift, picked, 0)``: the element at one place, or none.

    Attributes:
        wanted: the place, which does not depend on ``over``.
        picked: what stands at v.
        over: the reduced dimension v.
        base: the first place, which may vary along map dimensions; ``shift`` where it does not.
    """

    wanted: Expr
    picked: Expr
    over: Dim
    base: Aff

    @property
    def shift(self) -> int:
        """The first place of a block of ``over``."""
        return self.base.const


def selection(op: Nest) -> Selection | None:
    """The selection that an operation is; ``None`` where it is none."""
    found = None if op.inner else _selection(op)
    return found if found and not found.base.terms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """``sum_v where(wanted == v, sum_m rows * matrices, 0)``: each row times the matrix that ``wanted`` names for it.

    Attributes:
        wanted, over, base: as in `Selection`.
        places: how many matrices there are, of which each row picks one.
        rows, matrices: the factors; only the second varies along ``over``.
        of_rows, of_columns: map dimensions of the rows, along which ``wanted`` may vary, and of the matrices.
    """

    wanted: Expr
    over: Dim
    base: Aff
    places: int
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
    groups = dims_of(s.base)
    if s.over.name not in dims or s.over.name in along or any(d.name in dims & along - groups for d in op.dims if d.size > 1):
        return None
    places = s.over.size * prod(d.size for d in op.dims if d.name in groups)
    own, columns = (tuple(d for d in op.dims if (d.name in dims) == picked) for picked in (False, True))
    return Routed(
        wanted=s.wanted, over=s.over, base=s.base, places=places, rows=rows, matrices=matrices, of_rows=own, of_columns=columns
    )


def as_onnx_counts(wanted: Expr, count: int) -> Expr:
    """The index of a place that counts a negative one from the end of ``count`` places, as ONNX's Gather does by itself; any
    other place as it is."""
    i = wanted.args[2] if isinstance(wanted, Call) and wanted.fn == "where" else wanted
    wrapped = call("where", call("lt", i, 0), i + count, i)
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
    over, units = op.reduce[0], {d.name for d in op.dims if d.size == 1}
    for wanted, place in (test.args, test.args[::-1]):
        if (
            isinstance(place, Index)
            and (
                base := Aff(tuple(t for t in (place.aff - dim(over.name)).terms if t[0] not in units), place.aff.const)
            ).is_affine
            and dims_of(base) <= {d.name for d in op.dims}
            and not (dims_of(base) | {over.name}) & dims_read(op, wanted)
        ):
            return Selection(wanted=wanted, picked=picked, over=over, base=base)
    return None


# Which axes of the graph's inputs a dimension runs along: what it is, whatever it is called.
