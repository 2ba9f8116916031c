"""Selections: sums that pick one element of their reduced dimension, and so are gathers."""

from __future__ import annotations

from dataclasses import dataclass

from tapestry.ir.expr import Call, Const, Expr, Index
from tapestry.ir.graph import Dim
from tapestry.ir.index import dim
from tapestry.ir.monoid import primitive_of
from tapestry.ir.recognise.contraction import Nest, dims_read


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
    e = op.body[0] if len(op.body) == 1 else None
    if primitive_of(op.monoid) not in ("add", "or") or op.inner or len(op.reduce) != 1:
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
