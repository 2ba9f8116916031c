"""Gather: a view where the positions are known index expressions, else a sum over the axis of ``where(index = v, x, 0)``."""

from __future__ import annotations

from collections.abc import Sequence

from tapestry.ir.expr import Arg, Expr, Index, call, cast
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, dim, span
from tapestry.ir.monoid import number
from tapestry.lift.affine import affine_value
from tapestry.lift.builder import Node, axes, here
from tapestry.lift.registry import lifts


def wrap(value: Aff, size: int, ranges: dict[str, int]) -> Aff | None:
    """A position counted from the front; None where that cannot be told, or it leaves the axis."""
    lo, hi = span(value, ranges)
    if hi < 0:
        value, lo, hi = value + size, lo + size, hi + size
    return value if lo >= 0 and hi < size else None


@lifts("Gather")
def lift_gather(n: Node) -> bool | None:
    """y[.., i.., ..] = x[.., index[i..], ..]."""
    x, rank, places = n.tensor(0), len(n.shape(0)), len(n.shape(1))
    axis = n.axis(0, rank)
    dims = n.out_dims()
    ranges = {d.name: d.size for d in dims}
    spots = here(dims)
    inner = spots[axis : axis + places]
    if n.out().size == 0:
        return False
    position = affine_value(n.b, n.ins[1], tuple(inner), ranges)
    position = None if position is None else wrap(position, x.shape[axis], ranges)
    if position is not None:
        n.view(n.out(), x.name, dims, [*spots[:axis], position, *spots[axis + places :]])
        return None
    select(n, n.outs[0], x.name, n.ins[1], dims, axis, places)
    return None


def select(n: Node, out: str, data: str, index: str, dims: Sequence[Dim], axis: int, places: int) -> str:
    """Emit a gather by data-dependent positions, as a sum over the axis: split over it, each part adds what it holds."""
    spots, x = here(dims), n.b.tensor(data)
    v = Dim("v", x.shape[axis])
    index_read = n.read(index, spots[axis : axis + places])
    reads = [n.read(x.name, [*spots[:axis], dim("v"), *spots[axis + places :]]), index_read]
    i = cast(Arg(1, index_read[1].dtype), "i64")
    wrapped = call("where", call("lt", i, number(0, "i64")), call("add", i, number(v.size, "i64")), i)
    hit = call("eq", wrapped, Index(dim("v")))
    body: Expr = call("where", hit, Arg(0, x.dtype), number(0, x.dtype))
    return n.reduce([out], dims, [v], "any" if x.dtype == "bool" else "sum", reads, [body])[0]


def lift_affine_gather_nd(n: Node) -> bool:
    """GatherND by positions that are known index expressions, as a view; False when they are not."""
    x, index = n.tensor(0), n.tensor(1)
    batch, count = int(n.attr("batch_dims", 0)), index.shape[-1]
    dims = axes(n.out().shape)
    ranges = {d.name: d.size for d in dims}
    spots = here(dims)
    outer = spots[: len(index.shape) - 1]
    if n.out().size == 0:
        return False
    found: list[Aff] = []
    for k in range(count):
        at = affine_value(n.b, index.name, (*outer, dim("k") * 0 + k), ranges)
        at = None if at is None else wrap(at, x.shape[batch + k], ranges)
        if at is None:
            return False
        found.append(at)
    n.view(n.out(), x.name, dims, [*spots[:batch], *found, *spots[len(index.shape) - 1 :]])
    return True
