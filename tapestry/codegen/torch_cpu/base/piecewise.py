"""Operations that are another expression on each side of a place (concatenation, rotary halves): a piece for each side."""

from __future__ import annotations

from tapestry.ir.expr import Call, Const, Expr, Index, walk
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Box


def cut_pieces(body: tuple[Expr, ...], op: Block, block: Box) -> list[tuple[Box, tuple[Expr, ...]]]:
    """Boxes that cover the block, and the expressions on each."""
    names = [d.name for d in op.dims]
    for x in (x for e in body for x in walk(e)):
        place = _place(x)
        if place is None or place[0] not in names:
            continue
        at, c = names.index(place[0]), place[1]
        lo, hi = block[at]
        assert isinstance(x, Call)
        sides = [((lo, min(c, hi)), x.args[1]), ((max(c, lo), hi), x.args[2])]
        out: list[tuple[Box, tuple[Expr, ...]]] = []
        for (a, b), branch in sides:
            if a < b:
                same = _where_test_is(body, x.args[0], branch is x.args[1])
                out += cut_pieces(same, op, (*block[:at], (a, b), *block[at + 1 :]))
        return out
    return [(block, body)]


def _place(e: Expr) -> tuple[str, int] | None:
    """(dimension, c) of a choice by ``index(dimension) < c``."""
    if not isinstance(e, Call) or e.fn != "where" or not isinstance(e.args[0], Call) or e.args[0].fn != "lt":
        return None
    i, c = e.args[0].args
    if not isinstance(i, Index) or not i.aff.is_dim or not isinstance(c, Const):
        return None
    return str(i.aff), int(c.value)


def _where_test_is(body: tuple[Expr, ...], test: Expr, holds: bool) -> tuple[Expr, ...]:
    """The expressions where a test is known."""

    def known(e: Expr) -> Expr:
        if not isinstance(e, Call):
            return e
        if e.fn == "where" and e.args[0] == test:
            return known(e.args[1 if holds else 2])
        return Call(e.fn, tuple(known(a) for a in e.args), e.dtype)

    return tuple(known(e) for e in body)
