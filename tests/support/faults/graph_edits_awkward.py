"""Edits of plans that show at infinities, NaN and huge numbers alone, where the inputs may lead to none.

They are put into operations whose results the model has: what a part of an unrolled recurrence does with an infinity need not
be seen in any of its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from tapestry.ir.expr import Arg, Call, Expr, call, distinct, rewrite
from tapestry.ir.graph import Block, map_exprs
from tapestry.ir.monoid import number
from tests.support.faults import claim_edits
from tests.support.faults.graph_edits import EDITS, Edit, Edited, blocks, put_call
from tests.support.faults.graph_edits_later import LATER, result_changed

AWKWARD: dict[str, Edit] = {}


def awkward(f: Edit) -> Edit:
    AWKWARD[f.__name__] = f
    return f


def _clamped(x: Expr, most: float) -> Expr:
    return call("max", call("min", x, number(most, "f32")), number(-most, "f32"))


def _own_blocks(e: Edited) -> Iterator[tuple[int, Block]]:
    return ((i, op) for i, op in blocks(e) if "." not in op.outs[0])


def _result_changed(e: Edited, change: Callable[[Block, Expr], Expr | None]) -> bool:
    return result_changed(e, lambda op, x: None if "." in op.outs[0] else change(op, x))


def _picks(op: Block) -> bool:
    """Whether a maximum or a minimum is taken: there evaluators differ in what they make of a NaN."""
    fns = {c.fn for c in distinct((*op.point, *op.then)) if isinstance(c, Call)}
    return op.monoid not in (None, "sum") or bool(op.inner) or bool(fns & {"max", "min"})


def _operand_changed(e: Edited, change: Callable[[Expr], Expr], picking: bool = True) -> bool:
    """One float operand of an operation that is no weight is changed wherever it is read."""
    for i, op in _own_blocks(e):
        if _picks(op) and not picking:
            continue
        for k, r in enumerate(op.reads):
            if r.tensor in e.graph.weights or e.graph.tensors[r.tensor].dtype != "f32":
                continue
            new = map_exprs(op, lambda x, k=k: rewrite(x, lambda a: change(a) if isinstance(a, Arg) and a.pos == k else a))
            if new != op:
                return e.op(i, new)
    return False


def _calls_changed(e: Edited, fn: str, change: Callable[[Call], Expr]) -> bool:
    """One call; behind a sum some values never are."""
    for i, op in _own_blocks(e):
        if op.monoid is not None:
            continue
        for x in distinct((*op.point, *op.then)):
            if isinstance(x, Call) and x.fn == fn and x.dtype == "f32":
                return e.op(i, put_call(op, x, change(x)))
    return False


@awkward
def operand_that_is_nan_made_zero(e: Edited) -> bool:
    return _operand_changed(e, lambda x: call("where", call("isnan", x), number(0, "f32"), x), picking=False)


@awkward
def operand_that_is_infinite_made_zero(e: Edited) -> bool:
    return _operand_changed(e, lambda x: call("where", call("isinf", x), number(0, "f32"), x))


@awkward
def operand_cut_off(e: Edited) -> bool:
    return _operand_changed(e, lambda x: _clamped(x, 1e6))


@awkward
def operand_cut_off_at_a_huge_number(e: Edited) -> bool:
    return _operand_changed(e, lambda x: _clamped(x, 1e20))


@awkward
def very_negative_operand_made_zero(e: Edited) -> bool:
    return _operand_changed(e, lambda x: call("where", call("lt", x, number(-1e8, "f32")), number(0, "f32"), x))


@awkward
def nan_made_infinite(e: Edited) -> bool:
    return _result_changed(e, lambda op, x: call("where", call("isnan", x), number(math.inf, "f32"), x))


@awkward
def infinity_made_nan(e: Edited) -> bool:
    """Where no maximum is: there a NaN of ours is a policy."""

    def change(op: Block, x: Expr) -> Expr | None:
        return None if _picks(op) else call("where", call("isinf", x), number(math.nan, "f32"), x)

    return _result_changed(e, change)


@awkward
def negative_infinity_made_large(e: Edited) -> bool:
    return _result_changed(e, lambda op, x: call("max", x, number(-3e38, "f32")))


@awkward
def huge_results_cut_off(e: Edited) -> bool:
    return _result_changed(e, lambda op, x: _clamped(x, 1e30))


@awkward
def zero_times_infinity_made_zero(e: Edited) -> bool:
    def change(x: Call) -> Expr:
        a, b = x.args
        return call("where", call("eq", a, number(0, "f32")), number(0, "f32"), call("mul", a, b))

    return _calls_changed(e, "mul", change)


@awkward
def quotient_by_zero_made_zero(e: Edited) -> bool:
    def change(x: Call) -> Expr:
        a, b = x.args
        return call("where", call("eq", b, number(0, "f32")), number(0, "f32"), call("div", a, b))

    return _calls_changed(e, "div", change)


@awkward
def root_of_a_negative_number_made_zero(e: Edited) -> bool:
    return _calls_changed(e, "sqrt", lambda x: Call("sqrt", (call("max", x.args[0], number(0, "f32")),), x.dtype))


@awkward
def exponential_capped(e: Edited) -> bool:
    return _calls_changed(e, "exp", lambda x: call("min", x, number(1e20, "f32")))


@awkward
def maximum_that_loses_a_nan(e: Edited) -> bool:
    def change(x: Call) -> Expr:
        a, b = x.args
        return call("where", call("isnan", a), b, call("max", a, b))

    return _calls_changed(e, "max", change)


@awkward
def terms_that_are_nan_left_out_of_a_sum(e: Edited) -> bool:
    for i, op in _own_blocks(e):
        plain = op.monoid == "sum" and not any(r.when for r in op.reads)  # what a guard leaves out is 0 in no evaluator alike
        if plain and op.body[0].dtype == "f32" and op.reduce[0].size > 1:
            x = op.body[0]
            return e.op(i, replace(op, body=(call("where", call("isnan", x), number(0, "f32"), x), *op.body[1:])))
    return False


ALL_EDITS: dict[str, Edit] = {**EDITS, **LATER, **AWKWARD}
"""Every kind of edit by its name; those of claims are put into `EDITS` by their module."""
assert claim_edits.layouts_removed.__name__ in ALL_EDITS
