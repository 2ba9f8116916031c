"""A contraction that one reduction alone reads becomes an inner reduction of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Let, call, rewrite
from tapestry.ir.graph import Block, Dim, Graph, Inner, Read, map_exprs
from tapestry.ir.index import Aff, dim
from tapestry.ir.recognise.contraction import dims_read, factors
from tapestry.ir.types import FLOATS
from tapestry.rewrites.core.edit import shift_args, substitute_expr, substitute_read


def with_inner(graph: Graph, op: Block, at: int, maker: Block) -> Block | None:
    """The reduction with read number ``at`` computed in place by the contraction behind it.

    ``None`` where it is no contraction, or would be computed more often than it was.
    """
    read = op.reads[at]
    if factors(maker) is None or len(maker.outs) != 1 or maker.splits or maker.inner or read.other is not None:
        return None
    taken, inner = {d.name for d in op.space}, list[Dim]()
    env: dict[str, Aff] = dict(zip((d.name for d in maker.dims), read.index, strict=True))
    for d in maker.reduce:
        name = _free(d.name, taken)
        taken.add(name)
        inner.append(Dim(name, d.size))
        env[d.name] = dim(name)
    ranges = op.ranges | {d.name: d.size for d in inner}
    points = 1
    for name in dims_read(op, Arg(at, "f32")):
        points *= op.ranges[name]
    if points > graph.tensors[read.tensor].size:
        return None
    moved = tuple(substitute_read(r, env, ranges) for r in maker.reads)
    shift = shift_args(len(op.reads))
    k = len(op.inner)
    product = substitute_expr(maker.body[0], env, ranges, shift)
    score = substitute_expr(maker.then[0], env, ranges, shift)
    score = rewrite(score, lambda x: Let(k, x.dtype) if isinstance(x, Acc) else x)
    positions = {i for i, r in enumerate(op.reads) if r == read}
    new = replace(op, reads=op.reads + moved, source=tuple(dict.fromkeys(maker.source + op.source)))
    new = map_exprs(new, lambda e: rewrite(e, lambda x: score if isinstance(x, Arg) and x.pos in positions else x))
    new = replace(new, inner=(*op.inner, Inner(dims=tuple(inner), monoid="sum", body=product)))
    return _unscaled(graph, new, k)


def _free(base: str, taken: set[str]) -> str:
    name = base
    while name in taken:
        name += "_"
    return name


def _unscaled(graph: Graph, op: Block, k: int) -> Block:
    """Constant factors of the inner product moved out of it, through maps that do nothing but scale what they read.

    ``sum (a q)(b k) = ab sum q k``: keys that were repeated and scaled for each head of a group are read as they are.
    """
    makers, product = graph.producers(), op.inner[k].body
    reads, scale = list(op.reads), 1.0
    for e in product.args if isinstance(product, Call) and product.fn == "mul" else ():
        if not isinstance(e, Arg):
            continue
        maker = graph.ops[makers[reads[e.pos].tensor]] if reads[e.pos].tensor in makers else None
        found = _scaling(maker) if isinstance(maker, Block) else None
        if found is None or reads[e.pos].other is not None or not isinstance(maker, Block):
            continue
        if sum(isinstance(x, Arg) and x.pos == e.pos for s in op.point for x in _leaves(s)) != 1:
            continue
        env: Mapping[str, Aff] = dict(zip((d.name for d in maker.dims), reads[e.pos].index, strict=True))
        reads[e.pos] = substitute_read(found[0], env, op.ranges)
        scale *= found[1]
    if scale == 1.0:
        return replace(op, reads=tuple(reads))
    out = replace(op, reads=tuple(reads))

    def put(x: Expr) -> Expr:
        return call("mul", x, Const(scale, x.dtype)) if isinstance(x, Let) and x.pos == k else x

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


def _leaves(e: Expr) -> list[Expr]:
    return [x for a in e.args for x in _leaves(a)] if isinstance(e, Call) else [e]


__all__ = ["with_inner"]
