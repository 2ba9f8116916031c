"""Fields of partial states that are known without looking: counts.

A field whose lifted value is a constant and whose merge is a sum is, over a part of the reduced dimensions, that constant times
the number of points. The count of a variance's (n, mean, M2) is one. Whoever knows the blocks knows it, so it is not sent.
"""

from __future__ import annotations

from tapestry.ir.expr import Arg, Const, call
from tapestry.ir.graph import Block
from tapestry.ir.monoid import MONOIDS


def counted(op: Block) -> dict[int, float]:
    """Field number to what one point adds to it, for the fields of an operation's states that count."""
    if op.monoid not in MONOIDS:
        return {}
    dtypes = tuple(e.dtype for e in op.body)
    merged = MONOIDS[op.monoid].combiner(dtypes)
    out: dict[int, float] = {}
    for k, e in enumerate(op.body):
        adds = merged[k] == call("add", Arg(k, e.dtype), Arg(len(dtypes) + k, e.dtype))
        if isinstance(e, Const) and e.dtype != "bool" and adds:
            out[k] = float(e.value)
    return out
