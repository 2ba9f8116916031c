"""Scatter: a choice cell by cell where the places are known at compile time, else opaque and split inside its slices."""

from __future__ import annotations

from collections.abc import Sequence

from tapestry.ir.expr import Arg, Index, call
from tapestry.ir.graph import Dim, Guard, ranges_of
from tapestry.ir.index import Aff, const, dim, dims_of, floordiv, modulo
from tapestry.lift.affine_values import affine_value, fit
from tapestry.lift.builder import Node, axes, every, here
from tapestry.lift.opaque import emit_opaque
from tapestry.lift.operators.gather import check_known, wrap
from tapestry.lift.registry import lifts


@lifts("ScatterElements", "Scatter")
def lift_scatter_elements(n: Node) -> None:
    """Indices pick along one axis; other axes commute where data and indices are equally long."""
    data, index = n.shape(0), n.shape(1)
    at, places = n.axis(0, len(data)), axes(index, "u")
    check_known(n, data[at])
    if n.attr("reduction", "none") == "none" and 0 not in index:
        ranges = ranges_of(places)
        picked = affine_value(n.b, n.ins[1], tuple(here(places)), ranges)
        picked = None if picked is None else wrap(picked, data[at], ranges)
        cells = [picked if a == at else dim(d.name) for a, d in enumerate(places)]
        if _choose(n, [c for c in cells if c is not None], places, len(data)):
            return
    same = [a for a in range(len(data)) if a != at and data[a] == index[a]]
    dims, tests_inside = [Dim(f"x{a}", data[a]) for a in same], dict.fromkeys(range(3), same)
    emit_opaque(n, "writes where the data say", dims, tests_inside, {0: same})


@lifts("ScatterND")
def lift_scatter_nd(n: Node) -> None:
    """Indices pick slices to write: what is inside the slices commutes."""
    data, outer, count = n.shape(0), len(n.shape(1)) - 1, n.shape(1)[-1]
    check_known(n, *data[:count])
    places = axes(n.shape(1)[:-1], "u")
    if n.attr("reduction", "none") == "none" and 0 not in n.shape(1):
        ranges = ranges_of(places)
        found = (_component(n, places, c) for c in range(count))
        cells = [None if v is None else wrap(v, data[c], ranges) for c, v in enumerate(found)]
        if _choose(n, [c for c in cells if c is not None], places, count):
            return
    tests_inside = list(range(count, len(data)))
    dims = [Dim(f"x{a}", data[a]) for a in tests_inside]
    emit_opaque(
        n, "writes where the data say", dims, {0: tests_inside, 2: [outer + a - count for a in tests_inside]}, {0: tests_inside}
    )


def _component(n: Node, places: Sequence[Dim], c: int) -> Aff | None:
    """One coordinate of the places, over the leading dimensions of the updates; of a table, by itself."""
    known = n.const(1)
    if known is None:
        return affine_value(n.b, n.ins[1], (*here(places), const(c)), ranges_of(places))
    found = fit(known[..., c])
    if found is None:
        return None
    return sum((dim(d.name) * step for d, step in zip(places, found[1], strict=True)), const(found[0]))


def _choose(n: Node, cells: Sequence[Aff], places: Sequence[Dim], count: int) -> bool:
    """Emit a choice between updates and data, where every update has one cell of its own: ``cells`` says which.

    Args:
        cells: the position on each of the first ``count`` axes of the data, over the leading dimensions of the updates;
            fewer where one of them is not known.
    """
    dims = n.out_dims()
    ranges = ranges_of(dims)
    back: dict[str, Aff] = {}
    tests: list[tuple[Aff, str]] = []
    if len(cells) != count:
        return False
    for d, cell in zip(dims, cells, strict=False):
        if not cell.is_affine or len(cell.terms) > 1 or dims_of(cell) & back.keys():
            return False
        if not cell.terms:
            tests += [(dim(d.name) - cell.const, "eq")] if d.size > 1 else []
            continue
        ((name,), step) = dims_of(cell), cell.terms[0][1]
        size = next(p.size for p in places if p.name == name)
        gap = (dim(d.name) - cell.const) * (1 if step > 0 else -1)
        back[name] = floordiv(gap, abs(step), ranges)
        if abs(step) > 1:
            tests.append((modulo(gap, abs(step), ranges), "eq"))
        if (cell, size) != (dim(name), d.size):  # not the whole axis, in order
            tests += [(gap, "ge"), (gap * -1 + (size - 1) * abs(step), "ge")]
    if any(p.size > 1 and p.name not in back for p in places):
        return False  # several updates for one cell
    index = [back.get(p.name, const(0)) for p in places] + here(dims[count:])
    guards = tuple(Guard(e, op) for e, op in tests)
    update = n.read(n.ins[2], index, 0 if tests else None, guards)
    if not tests:
        n.block(n.out(), dims, [update], Arg(0, update[1].dtype))
        return True
    here_is = every(call(op, Index(e), 0) for e, op in tests)
    n.block(n.out(), dims, [n.read(n.ins[0], dims), update], lambda old, new: call("where", here_is, new, old))
    return True
