"""Distinct operations as data: index spaces, reads as index expressions that the page can evaluate, and what is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tapestry.ir.expr import Call, Const, Expr, Index
from tapestry.ir.graph import Block, Graph, Guard, Op, Read
from tapestry.ir.index import Aff, Floor
from tapestry.ir.syntax.printer import aliases, op_text
from tapestry.ir.types import itemsize

Row = dict[str, Any]


_SIDES = {"le": (-1, 0), "lt": (-1, -1), "ge": (1, 0), "gt": (1, -1), "eq": (1, 0)}
"""An order of a and b as ``sign * (a - b) + constant >= 0``, for integers; equality as ``== 0``."""


def shape_of(op: Op, graph: Graph) -> Row:
    """An operation without the names of its tensors."""
    outs = [_typed(graph, t) for t in op.outs]
    if not isinstance(op, Block):
        dims = [[d.name, d.size, "map"] for d in op.dims]
        reads = [_opaque_read(graph, t, axes) for t, axes in zip(op.ins, op.in_axes, strict=True) if t]
        return {"kind": f"opaque {op.kind}", "dims": dims, "reads": reads, "outs": outs, "skips": []}
    place = {d.name: k for k, d in enumerate(op.space)}
    roles = ["map"] * len(op.dims) + ["reduce"] * len(op.reduce) + ["inner"] * len(op.inner_dims)
    return {
        "kind": op.monoid or "map",
        "dims": [[d.name, d.size, r] for d, r in zip(op.space, roles, strict=True)],
        "reads": [_read(r, alias, graph, place) for r, alias in zip(op.reads, aliases(op), strict=True)],
        "outs": outs,
        "skips": [_guard(g, place) for e in op.point for g in _conditions(e)],
    }


def text_of(op: Op, graph: Graph) -> str:
    """The IR text, without the node of an opaque one."""
    lines = op_text(op, graph).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("node ", "opsets ", "from ")))


def _typed(graph: Graph, tensor: str) -> list[Any]:
    t = graph.tensors[tensor]
    return [t.dtype, list(t.shape), 0 if t.on_host else itemsize(t.dtype)]


def _read(r: Read, alias: str, graph: Graph, place: dict[str, int]) -> Row:
    index, text = [_aff(e, place) for e in r.index], list(map(str, r.index))
    row: Row = {"index": index, "text": text, "alias": alias, "type": _typed(graph, r.tensor)}
    if r.other is not None:
        row["other"] = repr(r.other)
    if r.when:
        row["when"] = [_guard(g, place) for g in r.when]
    return row


def _opaque_read(graph: Graph, tensor: str, axes: tuple[int | None, ...]) -> Row:
    """A read of an opaque node: along its dimensions cell by cell, along every other axis whole (null)."""
    index = [None if a is None else [0, [[1, a]]] for a in axes]
    text = ["_" if a is None else str(a) for a in axes]
    return {"index": index, "text": text, "type": _typed(graph, tensor), "alias": tensor}


def _aff(e: Aff, place: dict[str, int]) -> list[Any]:
    """``[constant, [[coefficient, atom], …]]``; an atom is a dimension's number, or ``["floor" | "mod", expression, by]``."""
    terms: list[Any] = []
    for atom, coef in e.terms:
        if isinstance(atom, str):
            terms.append([coef, place[atom]])
        else:
            terms.append([coef, ["floor" if isinstance(atom, Floor) else "mod", _aff(atom.arg, place), atom.div]])
    return [e.const, terms]


def _guard(g: Guard, place: dict[str, int]) -> list[Any]:
    return [_aff(g.aff, place), g.op]


def _conditions(e: Expr) -> Iterator[Guard]:
    """Orders of index expressions that a ``where`` of the body asks for, with a constant where they fail (causal masks)."""
    if not isinstance(e, Call):
        return
    if e.fn == "where" and isinstance(e.args[2], Const):
        yield from _holds(e.args[0])
    for a in e.args:
        yield from _conditions(a)


def _holds(e: Expr) -> Iterator[Guard]:
    """The parts of a conjunction that are orders of index expressions."""
    if not isinstance(e, Call):
        return
    if e.fn == "and":
        for a in e.args:
            yield from _holds(a)
    elif e.fn in _SIDES:
        (sign, constant), (a, b) = _SIDES[e.fn], map(_affine, e.args)
        if a is not None and b is not None:
            yield Guard((a - b) * sign + constant, "eq" if e.fn == "eq" else "ge")


def _affine(e: Expr) -> Aff | None:
    """An expression of indices alone, as an index expression."""
    if isinstance(e, Index):
        return e.aff
    if isinstance(e, Const):
        return Aff((), int(e.value)) if isinstance(e.value, int) else None
    if not isinstance(e, Call):
        return None
    if e.fn == "cast":
        return _affine(e.args[0])
    if e.fn not in ("add", "sub"):
        return None
    a, b = map(_affine, e.args)
    return None if a is None or b is None else a + b if e.fn == "add" else a - b
