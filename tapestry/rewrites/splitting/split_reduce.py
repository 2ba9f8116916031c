"""`split_reduce`: a long reduction as partial states and a merge tree of any fan-in. Linear ⇒ matmul ⇒ sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.ir.expr import Arg, Const, Expr, Index, arg_positions, call, number, rewrite
from tapestry.ir.graph import Block, Dim, Graph, Guard, Read, ranges_of, replace_op
from tapestry.ir.index import Aff, const, dim
from tapestry.ir.monoid import MONOIDS
from tapestry.rewrites.core.constants import constant
from tapestry.rewrites.core.edit import (
    accept,
    block_at,
    cut_refusal,
    fresh_dim,
    order_refusal,
    plain_index,
    prune,
    read_dims,
    reindex,
    resized,
    results,
    splits_in,
    state_names,
    with_args,
)
from tapestry.rewrites.core.rule import Move, Refusal, Rule, refuse, register


@register
class SplitReduce(Rule):
    """Cut a reduced dimension into partial states, merged by a tree of fan-in b with ⌈log_b parts⌉ levels.

    The partial states become tensors, one per field of the monoid, with a new leading dimension that runs over the
    parts. All blocks have ⌈size / parts⌉ points: where that does not divide the dimension, the points beyond its end
    give the monoid's identity. Blocks and groups are contiguous, so the order of merging is kept.

    before:
        graph linear
        input x: f32[4, 7]
        input w: f32[7, 3]
        input b: f32[3]
        y: f32[4, 3] = op [i: 4, n: 3 | m: 7 sum]
          reads x[i, m], w[m, n], b[n]
          body x * w
          then acc0 + b
        output y

    move: split_reduce@y{dim=m,parts=3,fanin=2}

    after:
        graph linear
        input x: f32[4, 7]
        input w: f32[7, 3]
        input b: f32[3]
        y.p.value: f32[3, 4, 3] = op [k: 3, i: 4, n: 3 | m: 3 sum]
          reads x[i, 3*k + m] when -3*k - m + 6 >= 0 else 0.0, w[3*k + m, n] when -3*k - m + 6 >= 0 else 0.0
          body x * w
        y.p1.value: f32[2, 4, 3] = op [k: 2, i: 4, n: 3 | j: 2 sum]
          reads a0 = y.p.value[j + 2*k, i, n] else 0.0
          body a0
        y: f32[4, 3] = op [i: 4, n: 3 | k: 2 sum]
          reads a0 = y.p1.value[k, i, n], b[n]
          body a0
          then acc0 + b
        output y

    legal when:
        the dimension is reduced by a monoid and not split already; 2 <= parts <= size and fan-in >= 2; where the monoid
        does not commute, the dimension is the first reduced one.
    """

    name = "split_reduce"
    phase = "request"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """For every reduced dimension two parts merged at once; parts and fan-in are the searcher's to choose."""
        for op in graph.blocks:
            for d in op.reduce:
                move = Move(self.name, op.outs[0], (("dim", d.name), ("parts", 2), ("fanin", 2)))
                yield self.offered(move, split_reduce_refusal(op, d.name, 2, 2))

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with partial states and their merge tree in place of the operation."""
        at, op = block_at(graph, move)
        name, parts, fanin = move.text("dim"), move.number("parts"), move.number("fanin")
        accept(split_reduce_refusal(op, name, parts, fanin), move)
        ops = [_partial(graph, op, name, parts)]
        while parts > fanin:
            ops.append(_level(graph, op, ops[-1].outs, parts, fanin, len(ops)))
            parts = -(-parts // fanin)
        return replace_op(graph, at, (*ops, _last(op, ops[-1].outs, parts)), results(*ops))


def split_reduce_refusal(op: Block, name: str, parts: int, fanin: int) -> Refusal | None:
    """Why a reduced dimension cannot be cut so; ``None`` when it can."""

    size = ranges_of(op.reduce).get(name)
    if size is None or op.monoid not in MONOIDS:
        known = ", ".join(f"'{d.name}'" for d in op.reduce) or "none"
        return refuse(f"'{name}' is not reduced by a monoid", f"the reduced dimensions are {known}")
    if no_parts := cut_refusal(name, size, parts):
        return no_parts
    if fanin < 2:
        return refuse(f"a tree of fan-in {fanin} never ends", f"{parts} states stay {parts}")
    if any(s.dim == name for s in op.splits):
        return refuse(f"'{name}' is split already", str(next(s for s in op.splits if s.dim == name)))
    return order_refusal(op, name)


def _partial(graph: Graph, op: Block, name: str, parts: int) -> Block:
    """The operation over blocks of the dimension, writing monoid states."""
    size = op.ranges[name]
    each = -(-size // parts)
    k = Dim(fresh_dim(op, "k"), parts)
    dims, reduce = (k, *op.dims), resized(op.reduce, name, each)
    place = dim(k.name) * each + dim(name)
    inner = prune(replace(op, then=()))
    out = replace(
        reindex(inner, {name: place}, dims + reduce),
        outs=state_names(graph, op, "p"),
        dims=dims,
        reduce=reduce,
        splits=splits_in(op, (*op.dims, *op.reduce)),
    )
    return out if each * parts == size else _guarded(graph, out, inner, name, const(size - 1) - place)


def _guarded(graph: Graph, op: Block, old: Block, name: str, inside: Aff) -> Block:
    """The partial operation with points beyond the dimension's end giving the monoid's identity.

    Where what the guarded reads give there makes the body that identity by itself (``0 * 0`` under a sum), the body
    stays as it is, so that a contraction is still seen as one.
    """
    assert op.monoid
    zero = MONOIDS[op.monoid].zero(op.dtypes)
    touched = {i for i, r in enumerate(old.reads) if name in read_dims(r)}
    dtypes = [graph.tensors[r.tensor].dtype for r in op.reads]
    for fill in (0, zero[0].value):
        if all(fill == 0 or dtypes[i] == zero[0].dtype for i in touched):
            reads = tuple(_guard(r, inside, dtypes[i], fill) if i in touched else r for i, r in enumerate(op.reads))
            if _vanishes(op, reads, touched, zero):
                return replace(op, reads=reads)
    reads = tuple(_guard(r, inside, dtypes[i], 0) if i in touched else r for i, r in enumerate(op.reads))
    valid = call("ge", Index(inside), 0)
    body = tuple(call("where", valid, e, z) for e, z in zip(op.body, zero, strict=True))
    return replace(op, reads=reads, body=body)


def _guard(read: Read, inside: Aff, dtype: str, fill: float) -> Read:
    other = number(fill, dtype).value if read.other is None else read.other
    return replace(read, when=(*read.when, Guard(inside, "ge")), other=other)


def _vanishes(op: Block, reads: tuple[Read, ...], touched: set[int], zero: tuple[Const, ...]) -> bool:
    """Whether the body is the monoid's identity where every guarded read gives what it fills in."""
    if op.inner or not arg_positions(op.body) <= touched:
        return False
    fills = [0 if r.other is None else r.other for r in reads]  # the body has those alone that are touched
    return all(constant(e, fills) == z.value for e, z in zip(op.body, zero, strict=True))


def _level(graph: Graph, op: Block, states: tuple[str, ...], count: int, fanin: int, level: int) -> Block:
    """Groups of ``fanin`` neighbouring states merged into one each."""
    assert op.monoid
    k, j = Dim(fresh_dim(op, "k"), -(-count // fanin)), Dim(fresh_dim(op, "j"), fanin)
    zero = MONOIDS[op.monoid].zero(op.dtypes)
    place = dim(k.name) * fanin + dim(j.name)
    reads = tuple(
        Read(tensor=t, index=(place, *plain_index(op.dims)), other=z.value if count % fanin else None)
        for t, z in zip(states, zero, strict=True)
    )
    return Block(
        outs=state_names(graph, op, f"p{level}"),
        dims=(k, *op.dims),
        reduce=(j,),
        monoid=op.monoid,
        reads=reads,
        body=_args(op.body),
        source=op.source,
        splits=splits_in(op, op.dims),
    )


def _last(op: Block, states: tuple[str, ...], count: int) -> Block:
    """The last merge, which also does what the operation did after reducing."""
    k = Dim(fresh_dim(op, "k"), count)
    kept = sorted(op.then_reads())
    leaf = with_args({}, {old: len(states) + new for new, old in enumerate(kept)})
    reads = tuple(Read(tensor=t, index=(dim(k.name), *plain_index(op.dims))) for t in states)
    return replace(
        op,
        reduce=(k,),
        inner=(),
        reads=reads + tuple(op.reads[i] for i in kept),
        body=_args(op.body),
        then=tuple(rewrite(e, leaf) for e in op.then),
        splits=splits_in(op, op.dims),
    )


def _args(body: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return tuple(Arg(i, e.dtype) for i, e in enumerate(body))
