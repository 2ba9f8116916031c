"""Contractions that share a factor become one operation with several sums side by side: QKV, gate and up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tapestry.errors import TapestryError
from tapestry.ir.expr import Acc, Arg, Call, Expr, rewrite
from tapestry.ir.graph import Block, Graph, Op, map_exprs, with_ops
from tapestry.ir.index import Aff, dim
from tapestry.ir.monoid import MOST_SUMS, sums
from tapestry.ir.recognise.contraction import dims_read, products
from tapestry.rewrites.core.edit import block_at, merge_reads, plain_index, shift_args, substitute_expr, substitute_read
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register


@register
class FuseSums(Rule):
    """Compute contractions of one common factor in one pass over it, each sum with an accumulator of its own.

    What the second does to its sum may use the first one's result at the same point (SwiGLU, a gate): it then never leaves
    the chip. Weights stay the tensors that they were, so that heads and columns are cut as before.

    before:
        graph g
        input x: f32[4, 6]
        input w: f32[6, 3]
        input v: f32[6, 3]
        g: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[i, m], w[m, n]
          body x * w
          then acc0 * sigmoid(acc0)
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[i, m], v[m, n], g[i, n]
          body x * v
          then g * acc0
        output y
    move: fuse_sums@y{with=g}
    after:
        graph g
        input x: f32[4, 6]
        input w: f32[6, 3]
        input v: f32[6, 3]
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sums2]
          reads x[i, m], w[m, n], v[m, n]
          body x * w, x * v
          then (acc0 * sigmoid(acc0)) * acc1
        output y
    legal when: both run over the same points, one factor is the same tensor through the same projection, the other depends on
    the same dimensions; the second needs the first at most at its own point, and nothing in between needs either; together
    they have at most four sums.
    """

    name = "fuse_sums"
    phase = "fusion"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move or refusal per contraction and the one before it that reads the same tensor over as many points."""
        index = _Index(graph)
        last: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Block] = {}
        for op in graph.ops:
            if not isinstance(op, Block) or products(op) is None or op.inner:
                continue
            sizes = tuple(d.size for d in op.dims), tuple(d.size for d in op.reduce)
            reads = sorted({op.reads[k].tensor for k in op.body_reads()})
            for first in dict.fromkeys(last[t, *sizes] for t in reads if (t, *sizes) in last):
                found = _merge(index, first, op)
                move = Move(self.name, op.outs[-1], (("with", first.outs[-1]),))
                yield move if isinstance(found, _Merged) else Refusal(self.name, op.outs[-1], found)
            last |= {(t, *sizes): op for t in reads}

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Make one operation of two."""
        _, second = block_at(graph, move)
        _, first = block_at(graph, replace(move, at=move.text("with")))
        found = _merge(_Index(graph), first, second) if first is not second else "it is one operation already"
        if not isinstance(found, _Merged):
            raise TapestryError(found, where=str(move))
        kept, gone = (first, second) if found.early else (second, first)
        return with_ops(graph, tuple(found.op if o is kept else o for o in graph.ops if o is not gone))

    def choose(self, graph: Graph) -> tuple[Graph, list[Move]]:
        """All of them, in one pass: each saves a kernel, and what it would read of the common factor."""
        index, moves = _Index(graph), list[Move]()
        last: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
        for j in range(len(index.ops)):
            op = index.ops[j]
            if not isinstance(op, Block) or products(op) is None or op.inner:
                continue
            sizes = tuple(d.size for d in op.dims), tuple(d.size for d in op.reduce)
            reads = sorted({op.reads[k].tensor for k in op.body_reads()})
            at = j
            for i in dict.fromkeys(last[t, *sizes] for t in reads if (t, *sizes) in last):
                first = index.ops[i]
                if not isinstance(first, Block) or at != j:
                    continue
                found = _merge(index, first, op)
                if isinstance(found, _Merged):
                    moves.append(Move(self.name, op.outs[-1], (("with", first.outs[-1]),)))
                    at = index.put(i, j, found)
            last |= {(t, *sizes): at for t in reads}
        return with_ops(graph, tuple(o for o in index.ops if o is not None)), moves


@dataclass(frozen=True, slots=True)
class _Merged:
    """The one operation, and which of the two it stands for: the first, or the second."""

    op: Block
    early: bool


class _Index:
    """Operations by their first position, which two that become one keep one of."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.makers, self.readers = graph, graph.producers(), graph.consumers()
        self.ops: list[Op | None] = list(graph.ops)

    def put(self, i: int, j: int, found: _Merged) -> int:
        """One operation in place of those at i and j; returns where it is."""
        at, gone = (i, j) if found.early else (j, i)
        self.ops[at], self.ops[gone] = found.op, None
        for t in found.op.outs:
            self.makers[t] = at
        for t, where in self.readers.items():
            if gone in where:
                self.readers[t] = sorted({at if k == gone else k for k in where})
        return at


def _merge(index: _Index, first: Block, second: Block) -> _Merged | str:
    """Both as one operation; why they cannot be."""
    if why := _differ(first, second):
        return why
    early = _early(index, first, second)
    if early is None:
        return "what is between the two needs the first, and the second needs it"
    theirs = _over(first, second)
    shared = _shared(first, theirs)
    if shared is None:
        return "no factor of theirs is one tensor read through one projection"
    given = {k for k, r in enumerate(theirs.reads) if r.tensor in first.outs}
    if any(theirs.reads[k].index != plain_index(first.dims) or theirs.reads[k].when for k in given) or (
        given & theirs.body_reads()
    ):
        return "the second needs the first at other points than its own"
    n, k, at = len(first.reads), len(first.body), index.makers[second.outs[0]]
    kept = [t for t in first.outs if t in index.graph.outputs or any(i != at for i in index.readers.get(t, ()))]
    results = dict(zip(first.outs, first.then, strict=True))
    shift = shift_args(n)

    def put(x: Expr) -> Expr:
        if isinstance(x, Arg) and x.pos in given:
            return results[theirs.reads[x.pos].tensor]
        return replace(x, field=x.field + k) if isinstance(x, Acc) else shift(x)

    both = replace(
        first, outs=(*kept, *second.outs), monoid=sums(k + len(second.body)), reads=first.reads + theirs.reads,
        body=_ordered(first, shared) + tuple(rewrite(e, shift) for e in _ordered(theirs, shared)),
        then=tuple(results[t] for t in kept) + tuple(rewrite(e, put) for e in theirs.then),
        source=tuple(dict.fromkeys(first.source + second.source)),
    )  # fmt: skip
    return _Merged(merge_reads(both), early)


def _differ(first: Block, second: Block) -> str:
    if products(first) is None or products(second) is None or first.inner or second.inner:
        return "only sums of products are put side by side"
    if first.splits or second.splits:
        return "an operation that is split already is not fused"
    if len(first.body) + len(second.body) > MOST_SUMS:
        return f"they would have more than {MOST_SUMS} accumulators"
    if len(first.dims) != len(second.dims) or [d.size for d in first.space] != [d.size for d in second.space]:
        return "they run over different points"
    return ""


def _early(index: _Index, first: Block, second: Block) -> bool | None:
    """Whether both can be where the first is (all that they read is there), or where the second is (nobody has needed them)."""
    i, j = index.makers[first.outs[0]], index.makers[second.outs[0]]
    if i > j:
        return None
    if all(index.makers.get(t, -1) < i for t in second.inputs if t not in first.outs):
        return True
    return None if any(k < j for t in first.outs for k in index.readers.get(t, ())) else False


def _over(first: Block, second: Block) -> Block:
    """The second over the dimensions of the first."""
    env: dict[str, Aff] = {b.name: dim(a.name) for a, b in zip(first.space, second.space, strict=True)}
    moved = replace(
        second, dims=first.dims, reduce=first.reduce, reads=tuple(substitute_read(r, env, first.ranges) for r in second.reads)
    )
    return map_exprs(moved, lambda e: substitute_expr(e, env, first.ranges))


def _shared(first: Block, second: Block) -> str | None:
    """Text of a factor that every sum of both has, the other factors varying along the same dimensions."""
    pairs = [(op, *f) for op in (first, second) for f in products(op) or ()]
    for candidate in (_text(first, e) for e in pairs[0][1:]):
        named = [(op, a, b, _text(op, a), _text(op, b)) for op, a, b in pairs]
        others = [(op, b if left == candidate else a) for op, a, b, left, right in named if candidate in (left, right)]
        if len(others) == len(pairs) and len({dims_read(op, e) for op, e in others}) == 1:
            return candidate
    return None


def _text(op: Block, e: Expr) -> str:
    """An expression with what its reads are in place of their numbers; the same text is the same value."""
    names: list[str] = []

    def leaf(x: Expr) -> Expr:
        if isinstance(x, Arg):
            names.append(repr(op.reads[x.pos]))
            return replace(x, pos=0)
        return x

    return f"{rewrite(e, leaf)} {names}"


def _ordered(op: Block, shared: str) -> tuple[Expr, ...]:
    """The body with the shared factor first in every product."""

    def put(e: Expr, pair: tuple[Expr, Expr]) -> Expr:
        assert isinstance(e, Call)
        if e.fn == "cast":
            return replace(e, args=(put(e.args[0], pair),))
        return e if _text(op, pair[0]) == shared else replace(e, args=pair[::-1])

    pairs = products(op)
    assert pairs
    return tuple(put(e, p) for e, p in zip(op.body, pairs, strict=True))
