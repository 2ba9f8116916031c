"""A contraction that one reduction alone reads becomes an inner reduction of it."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tapestry.ir.expr import Arg, Call, Const, Expr, Let, count, rewrite
from tapestry.ir.graph import Block, Read, placed
from tapestry.ir.recognition.contraction import dims_read, factors
from tapestry.ir.types import FLOATS
from tapestry.rewrites.core.edit import substitute_read
from tapestry.rewrites.core.inline import inline, nest
from tapestry.rewrites.core.matching import Draft


def with_inner(draft: Draft, op: Block, at: int, maker: Block) -> Block | None:
    """The reduction with read number ``at`` computed in place by the contraction behind it.

    ``None`` where it is no contraction, or would be computed more often than it was.
    """
    read = op.reads[at]
    if factors(maker) is None or len(maker.outs) != 1 or maker.splits or maker.inner or read.other is not None:
        return None
    if prod(op.ranges[name] for name in dims_read(op, Arg(at, "f32"))) > draft.tensors[read.tensor].size:
        return None
    return _unscaled(draft, inline(op, at, nest(maker), draft.tensors), len(op.inner))


def _unscaled(draft: Draft, op: Block, k: int) -> Block:
    """Constant factors of the inner product moved out of it, through maps that do nothing but scale what they read.

    ``sum (a q)(b k) = ab sum q k``: keys that were repeated and scaled for each head of a group are read as they are.
    """
    product = op.inner[k].body
    reads, scale = list(op.reads), 1.0
    for e in product.args if isinstance(product, Call) and product.fn == "mul" else ():
        if not isinstance(e, Arg):
            continue
        maker = draft.maker(reads[e.pos].tensor)
        scaling = _scaling(maker) if maker else None
        if maker is None or scaling is None or reads[e.pos].other is not None:
            continue
        if count(op.point, lambda x, pos=e.pos: isinstance(x, Arg) and x.pos == pos) != 1:
            continue
        env = placed(maker.dims, reads[e.pos].index)
        reads[e.pos] = substitute_read(scaling[0], env, op.ranges)
        scale *= scaling[1]
    if scale == 1.0:
        return replace(op, reads=tuple(reads))
    out = replace(op, reads=tuple(reads))

    def put(x: Expr) -> Expr:
        return x * Const(scale, x.dtype) if isinstance(x, Let) and x.pos == k else x

    return replace(out, body=tuple(rewrite(e, put) for e in out.body))


def _scaling(op: Block) -> tuple[Read, float] | None:
    """What a map reads and the constant that it multiplies (or divides) it by; ``None`` when it does anything else."""
    if op.monoid or len(op.outs) != 1 or len(op.reads) != 1 or op.splits or op.reads[0].other is not None:
        return None
    e = op.body[0]
    if not isinstance(e, Call) or e.fn not in ("mul", "div") or {type(a) for a in e.args} != {Arg, Const}:
        return None
    value = float(next(a for a in e.args if isinstance(a, Const)).value)
    if e.fn == "div":
        return (op.reads[0], 1.0 / value) if isinstance(e.args[1], Const) and value and e.dtype in FLOATS else None
    return op.reads[0], value
