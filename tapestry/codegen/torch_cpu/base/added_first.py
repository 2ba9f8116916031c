"""What an epilogue adds first: a bias, which the operation that makes a sum may add on its way."""

from __future__ import annotations

from collections.abc import Callable

from tapestry.ir.expr import Acc, Arg, Call, Expr, walk


def added_first(then: tuple[Expr, ...], may_add: Callable[[int], bool], field: int = 0) -> tuple[int, tuple[Expr, ...]] | None:
    """(the read that every use of a state's field adds first, the expressions without it); ``None`` when there is none.

    A bias, then: the operation that makes the state may add it on its way.
    """

    def state(x: Expr) -> bool:
        return isinstance(x, Acc) and x.field == field

    uses = [x for e in then for x in walk(e) if state(x)]
    sums = [x for e in then for x in walk(e) if isinstance(x, Call) and x.fn == "add" and any(map(state, x.args))]
    if not sums or len(sums) != len(uses) or len({*sums}) != 1:
        return None
    acc, arg = sums[0].args if state(sums[0].args[0]) else sums[0].args[::-1]
    if not isinstance(arg, Arg) or not may_add(arg.pos):
        return None

    def without(e: Expr) -> Expr:
        if e == sums[0]:
            return acc
        return Call(e.fn, tuple(without(a) for a in e.args), e.dtype) if isinstance(e, Call) else e

    return arg.pos, tuple(without(e) for e in then)
