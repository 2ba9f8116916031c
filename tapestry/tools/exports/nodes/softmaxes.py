"""Attention whose weights are a softmax, said with ONNX's Softmax."""

from __future__ import annotations

from tapestry.ir.expr import Acc, Call, Expr, call, distinct
from tapestry.ir.graph import Block
from tapestry.ir.recognition.attention_roles import counts_ones
from tapestry.ir.recognition.exponential import exponential


def softmax_sum(op: Block) -> tuple[Expr, ...] | None:
    """``then`` over one state, the sum of values under the softmax of scores: of an operation whose sum of weighted values is
    only ever divided by the sum of the weights; None for another one.

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
    masks = isinstance(op.body[1], Call)
    return tuple(then) if counts_ones(op.body, weights.hidden(op.body[0].dtype)) and (masks or guarded) else None


def _sum(like: Expr) -> Acc:
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
