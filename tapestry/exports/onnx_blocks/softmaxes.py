"""Attention whose weights are a softmax, said with ONNX's Softmax."""

from __future__ import annotations

from dataclasses import dataclass

from tapestry.ir.expr import Acc, Call, Expr, call, distinct
from tapestry.ir.graph import Block
from tapestry.ir.monoid import number
from tapestry.ir.recognise.exponential import exponential


@dataclass(frozen=True, slots=True)
class SoftmaxSum:
    """``then`` over one state: the sum of values under the softmax of the scores."""

    then: tuple[Expr, ...]


def softmax_sum(op: Block) -> SoftmaxSum | None:
    """An operation whose sum of weighted values is only ever divided by the sum of the weights; None for another one.

    Softmax is NaN in a row whose scores are all minus infinity, as that division is where hidden keys count for nothing, or
    where ``then`` gives ``m - m`` for such a centre m.
    """
    weights = exponential(op.monoid, sums=2)
    if weights is None or weights.fn != "max" or weights.rate != 1 or len(op.reduce) != 1:
        return None
    guarded, then = False, list[Expr]()
    for e in op.then:
        inside = _unguarded(e)
        guarded = guarded or inside is not None
        then.append(_divided(e if inside is None else inside))
    if any(isinstance(x, Acc) and x != _sum(x) for x in distinct(then)):
        return None
    score, one = op.body[:2]
    hidden = weights.hidden(score.dtype)
    counts = isinstance(score, Call) and isinstance(one, Call) and score.fn == one.fn == "where"
    if counts and isinstance(score, Call) and isinstance(one, Call):
        counts = score.args[2] == hidden and score.args[0] == one.args[0] and one.args[1] == number(1, one.dtype)
    return SoftmaxSum(tuple(then)) if counts or (guarded and one == number(1, one.dtype)) else None


def _sum(like: Expr) -> Acc:
    """The one state."""
    return Acc(-1, like.dtype)


def _unguarded(e: Expr) -> Expr | None:
    """What stands in ``where(isnan(m - m), m - m, …)``; None for anything else."""
    if not isinstance(e, Call) or e.fn != "where":
        return None
    test, bad, rest = e.args
    m = Acc(0, bad.dtype)
    off = call("sub", m, m)
    return rest if bad == off and test == call("isnan", off) else None


def _divided(e: Expr) -> Expr:
    """An expression with the state in the place of every ``o / s``."""
    if not isinstance(e, Call):
        return e
    if e.fn == "div" and e.args == (Acc(2, e.dtype), Acc(1, e.dtype)):
        return _sum(e)
    return Call(e.fn, tuple(map(_divided, e.args)), e.dtype)
