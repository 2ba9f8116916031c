"""Gather, GatherElements, GatherND: a view of known positions, else a sum over the axis of ``where(index = v, x, 0)``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tapestry.errors import ModelError
from tapestry.ir.expr import Arg, Expr, Index, call, cast, number
from tapestry.ir.graph import Dim, ranges_of
from tapestry.ir.index import Aff, const, dim, span
from tapestry.lift.affine_values import affine_value
from tapestry.lift.builder import Node, Operand, axes, every, from_front, here, tests_inside
from tapestry.lift.operators.shape import reshape
from tapestry.lift.registry import Declined, lifts


def wrap(value: Aff, size: int, ranges: dict[str, int]) -> Aff | None:
    """A position counted from the front; None where that cannot be told, or it leaves the axis."""
    lo, hi = span(value, ranges)
    if hi < 0:
        value, lo, hi = value + size, lo + size, hi + size
    return value if lo >= 0 and hi < size else None


def check_known(n: Node, *sizes: int, at: int = 1, least: int | None = None) -> None:
    """Refuse positions (input ``at``) that are known, and outside of an axis; of several axes, coordinates along the last."""
    known = n.const(at) if n.has(at) else None
    if known is None or not known.size:
        return
    for c, size in enumerate(sizes):
        places = known if len(sizes) == 1 else known[..., c]
        _check_ends(n, int(places.min()), int(places.max()), size, least)


def _check_ends(n: Node, low: int, high: int, size: int, least: int | None = None) -> None:
    least = -size if least is None else least
    if low < least or high >= size:
        why = f"{low if low < least else high} where there are {size} elements"
        raise ModelError("an index outside of what it indexes", where=n.where, why=why)


@lifts("Gather")
def lift_gather(n: Node) -> None:
    """y[.., i.., ..] = x[.., index[i..], ..]."""
    x, rank, places = n.tensor(0), len(n.shape(0)), len(n.shape(1))
    axis = n.axis(0, rank)
    dims = n.out_dims()
    ranges = ranges_of(dims)
    spots = here(dims)
    inner = spots[axis : axis + places]
    check_known(n, x.shape[axis])
    if n.out().size == 0:
        raise Declined
    position = affine_value(n.b, n.ins[1], tuple(inner), ranges)
    if position is not None:
        if all(isinstance(atom, str) for atom, _ in position.terms):  # both ends are taken
            _check_ends(n, *span(position, ranges), x.shape[axis])
        position = wrap(position, x.shape[axis], ranges)
    if position is not None:
        n.view(n.out(), x.name, dims, [*spots[:axis], position, *spots[axis + places :]])
        return
    select(n, n.outs[0], x.name, n.ins[1], dims, axis, places)


def select(n: Node, out: str, data: str, index: str, dims: Sequence[Dim], axis: int, places: int) -> str:
    """Emit a gather by data-dependent positions, as a sum over the axis: split over it, each part adds what it holds."""
    spots = here(dims)
    index_read = n.read(index, spots[axis : axis + places])
    data_read = n.read(data, [*spots[:axis], dim("v"), *spots[axis + places :]])
    return _pick(n, out, dims, data_read, index_read, data_read[1].shape[axis])


def _pick(n: Node, out: str, dims: Sequence[Dim], data: Operand, index: Operand, size: int) -> str:
    """``sum_v where(index = v, data, 0)``, where ``data`` is read at ``v`` and a negative index counts from the back."""
    dtype = data[1].dtype
    hit = call("eq", from_front(cast(Arg(1, index[1].dtype), "i64"), size), Index(dim("v")))
    body: Expr = call("where", hit, Arg(0, dtype), 0)
    return n.reduce([out], dims, [Dim("v", size)], "any" if dtype == "bool" else "sum", [data, index], [body])[0]


@lifts("GatherElements")
def lift_gather_elements(n: Node) -> None:
    """y[.., i, ..] = x[.., index[.., i, ..], ..], whose other axes may be shorter than those of x."""
    x, at = n.tensor(0), n.axis(0, len(n.shape(0)))
    if n.out().size == 0 or x.size == 0:
        raise Declined
    check_known(n, x.shape[at])
    dims = n.out_dims()
    spots = here(dims)
    data = n.read(x.name, [*spots[:at], dim("v"), *spots[at + 1 :]])
    _pick(n, n.outs[0], dims, data, n.read(n.ins[1], spots), x.shape[at])


@lifts("GatherND")
def lift_gather_nd(n: Node) -> None:
    """y[b.., i.., r..] = x[b.., index[b.., i.., 0], index[b.., i.., 1], .., r..], by the row-major index of what is picked."""
    x, index = n.tensor(0), n.tensor(1)
    batch, count = int(n.attr("batch_dims", 0)), index.shape[-1]
    check_known(n, *x.shape[batch : batch + count])
    if n.out().size == 0 or x.size == 0:
        raise Declined
    if lift_affine_gather_nd(n):
        return
    picked, outer = x.shape[batch : batch + count], len(index.shape) - 1
    size = math.prod(picked)
    rows = axes((*x.shape[:batch], size, *x.shape[batch + count :]), "r")
    table = reshape(n, n.temp("rows"), x.name, [d.size for d in rows], rows)
    dims = n.out_dims()
    spots = here(dims)
    data = n.read(table, [*spots[:batch], dim("v"), *spots[outer:]])
    _pick(n, n.outs[0], dims, data, n.read(_flat(n, dims[:outer], picked), spots[:outer]), size)


def _flat(n: Node, dims: Sequence[Dim], picked: Sequence[int]) -> str:
    """Row-major positions in a tensor of shape ``picked``; -size - 1, which is nowhere, where a coordinate is outside."""
    reads = [n.read(n.ins[1], [*here(dims), const(k)]) for k in range(len(picked))]

    def body(*coordinates: Expr) -> Expr:
        flat: Expr = number(0, "i64")
        within: Expr = number(1, "bool")
        for c, size in zip(coordinates, picked, strict=True):
            i = from_front(cast(c, "i64"), size)
            within &= every(tests_inside(i, size))
            flat = flat * size + i
        return call("where", within, flat, -math.prod(picked) - 1)

    return n.block(n.temp("flat"), dims, reads, body)


def lift_affine_gather_nd(n: Node) -> bool:
    """GatherND by positions that are known index expressions, as a view; False when they are not."""
    x, index = n.tensor(0), n.tensor(1)
    batch, count = int(n.attr("batch_dims", 0)), index.shape[-1]
    dims = axes(n.out().shape)
    ranges = ranges_of(dims)
    spots = here(dims)
    outer = spots[: len(index.shape) - 1]
    if n.out().size == 0:
        return False
    places: list[Aff] = []
    for k in range(count):
        at = affine_value(n.b, index.name, (*outer, const(k)), ranges)
        if at is not None and all(isinstance(atom, str) for atom, _ in at.terms):
            _check_ends(n, *span(at, ranges), x.shape[batch + k])
        at = None if at is None else wrap(at, x.shape[batch + k], ranges)
        if at is None:
            return False
        places.append(at)
    n.view(n.out(), x.name, dims, [*spots[:batch], *places, *spots[len(index.shape) - 1 :]])
    return True
