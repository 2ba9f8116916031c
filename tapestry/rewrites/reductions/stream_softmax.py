"""A sum weighted by a softmax over the same dimension becomes one pass: max ⋉ (sum of weights, weighted sum)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tapestry.errors import TapestryError
from tapestry.ir.expr import Acc, Arg, Expr, arg_positions, call, rewrite
from tapestry.ir.graph import Block, Graph, Read, map_exprs, with_ops
from tapestry.ir.index import Aff, dim, dims_of
from tapestry.ir.monoid import number
from tapestry.ir.recognise.contraction import dims_read
from tapestry.rewrites.contractions.nest import with_inner
from tapestry.rewrites.core.edit import merge_reads, shift_args, substitute_expr, substitute_read
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register
from tapestry.rewrites.reductions.softmax_pattern import Weight, as_weight, centres, product_of


@register
class StreamSoftmax(Rule):
    """Fold a softmax into the sum that its probabilities weight, and the contraction that makes the scores into both.

    The sum's terms ``exp(s - m) / l * v`` refer to the result of another reduction over the same dimension, the maximum m.
    Changing m acts on what was summed so far by ``exp(m - m')``, so that scores, weights and values are seen once.

    before:
        graph g
        input q: f32[4, 3]
        input k: f32[5, 3]
        input v: f32[5, 2]
        s: f32[4, 5] = op [i: 4, n: 5 | m: 3 sum]
          reads q[i, m], k[n, m]
          body q * k
          then acc0 * 0.5
        top: f32[4], total: f32[4] = op [i: 4 | n: 5 logsumexp]
          reads s[i, n]
          body s, 1.0
        p: f32[4, 5] = op [i: 4, n: 5]
          reads s[i, n], top[i], total[i]
          body exp((s - top)) / total
        y: f32[4, 2] = op [i: 4, e: 2 | n: 5 sum]
          reads p[i, n], v[n, e]
          body p * v
        output y
    move: stream_softmax@y
    after:
        graph g
        input q: f32[4, 3]
        input k: f32[5, 3]
        input v: f32[5, 2]
        y: f32[4, 2] = op [i: 4, e: 2 | n: 5 softsum]
          reads v[n, e], q[i, m], k[n, m]
          let [m: 3 sum] q * k
          body let0 * 0.5, 1.0, v
          then where(isnan((acc0 - acc0)), (acc0 - acc0), (acc2 / acc1))
        output y
    legal when: maximum, sum of weights and weights are read by this sum alone; all three range over the same scores (by
    projection); rows without a finite maximum keep the value that they had.
    """

    name = "stream_softmax"
    phase = "simplify"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move or refusal per sum of something weighted by an exponential of a maximum over the same dimension."""
        index = _Index(graph)
        for i, op in enumerate(graph.ops):
            found = _match(graph, index, i)
            if isinstance(found, Found):
                yield Move(self.name, op.outs[0])
            elif found:
                yield Refusal(self.name, op.outs[0], found)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Fuse one softmax and the sum that it weights."""
        at = graph.find(move.at)
        found = _match(graph, _Index(graph), at) if at >= 0 else "no such operation"
        if not isinstance(found, Found):
            raise TapestryError(found or "no sum that a softmax weights", where=str(move))
        return _replace(graph, [(at, found)])

    def sweep(self, graph: Graph) -> Graph:
        """Every one, in one pass: what one takes part in belongs to no other."""
        index = _Index(graph)
        found: list[tuple[int, Found]] = []
        taken: set[int] = set()
        for i in range(len(graph.ops)):
            f = _match(graph, index, i)
            if isinstance(f, Found) and not taken & {i, *f.gone}:
                found.append((i, f))
                taken |= {i, *f.gone}
        return _replace(graph, found) if found else graph


@dataclass(frozen=True, slots=True)
class Found:
    """The one operation, and the positions of those that it replaces besides its own."""

    op: Block
    gone: frozenset[int]


class _Index:
    def __init__(self, graph: Graph) -> None:
        self.makers, self.readers = graph.producers(), graph.consumers()


def _replace(graph: Graph, found: list[tuple[int, Found]]) -> Graph:
    new = {i: f.op for i, f in found}
    gone = frozenset[int]().union(*(f.gone for _, f in found))
    return with_ops(graph, tuple(new.get(i, op) for i, op in enumerate(graph.ops) if i in new or i not in gone))


def _match(graph: Graph, index: _Index, at: int) -> Found | str:
    """The streamed form of operation ``at``; why there is none ("" where nobody would expect one)."""
    op = graph.ops[at]
    if not isinstance(op, Block) or op.monoid != "sum" or len(op.body) != 1 or len(op.reduce) != 1 or op.inner or op.splits:
        return ""
    opened = _opened(graph, index, op, at)
    if opened is None:
        return ""
    wide, maps, soft = opened
    rows = graph.ops[soft]
    assert isinstance(rows, Block)
    gone = frozenset((maps, soft))
    if any(set(index.readers.get(t, [])) - {maps, at} or t in graph.outputs for t in rows.outs):
        return "the maximum or the sum of weights is needed elsewhere"
    places = {(r.index, r.other) for r in wide.reads if r.tensor in rows.outs}
    row, other = next(iter(places))
    if len(places) != 1 or other is not None:
        return "maximum and sum of weights are those of different rows"
    weight = as_weight(_stated(wide.body[0], wide, rows))
    if weight is None:
        return "the weights are not exponentials of scores less their maximum, over their sum"
    why = _same_scores(wide, weight, rows, row)
    if why:
        return why
    return _streamed(graph, index, wide, weight, rows, gone)


def _stated(e: Expr, wide: Block, rows: Block) -> Expr:
    """An expression with results of the softmax's reduction written out, over its state."""
    results = dict(zip(rows.outs, rows.then, strict=True))
    return rewrite(e, lambda x: results.get(wide.reads[x.pos].tensor, x) if isinstance(x, Arg) else x)


def _opened(graph: Graph, index: _Index, op: Block, at: int) -> tuple[Block, int, int] | None:
    """The sum with the map that makes its weights written out; positions of that map and of the softmax's reduction."""
    for k, r in enumerate(op.reads):
        soft = _softmax_of(graph, index, r.tensor)
        if soft is not None:  # weights written out already
            return op, at, soft
        maker = index.makers.get(r.tensor, -1)
        maps = graph.ops[maker] if maker >= 0 else None
        if not isinstance(maps, Block) or maps.monoid or len(maps.outs) != 1 or maps.splits or r.other is not None:
            continue
        if index.readers[r.tensor] != [at] or r.tensor in graph.outputs or not _read_once(op, k):
            continue
        for t in maps.inputs:
            soft = _softmax_of(graph, index, t)
            if soft is not None:
                return _inlined(op, k, maps), maker, soft
    return None


def _read_once(op: Block, at: int) -> bool:
    """Whether an operation reads a tensor through one projection only: its maker may then go into the reader."""
    return all(r == op.reads[at] for r in op.reads if r.tensor == op.reads[at].tensor)


def _softmax_of(graph: Graph, index: _Index, tensor: str) -> int | None:
    at = index.makers.get(tensor, -1)
    op = graph.ops[at] if at >= 0 else None
    plain = (
        isinstance(op, Block)
        and op.monoid == "logsumexp"
        and len(op.reduce) == 1
        and not op.inner
        and not op.splits
        and not arg_positions(op.then)
    )
    return at if plain else None


def _inlined(op: Block, at: int, maps: Block) -> Block:
    """The sum with read number ``at`` replaced by the body of the map behind it."""
    env = dict(zip((d.name for d in maps.dims), op.reads[at].index, strict=True))
    moved = tuple(substitute_read(r, env, op.ranges) for r in maps.reads)
    body = substitute_expr(maps.body[0], env, op.ranges, shift_args(len(op.reads)))
    put = {k: (body if r == op.reads[at] else None) for k, r in enumerate(op.reads)}
    wide = replace(op, reads=op.reads + moved, source=tuple(dict.fromkeys(maps.source + op.source)))
    return map_exprs(wide, lambda e: rewrite(e, lambda x: (put.get(x.pos) or x) if isinstance(x, Arg) else x))


def _same_scores(wide: Block, weight: Weight, rows: Block, row: tuple[Aff, ...]) -> str:
    """Why the softmax does not range over the scores that the sum does ("" when it does)."""
    key, theirs = wide.reduce[0], rows.reduce[0]
    if any(key.name in dims_of(e) for e in row):
        return "the maximum is read along the dimension of the sum"
    if key.size != theirs.size:
        return "the softmax is over another number of scores than the sum"
    env: dict[str, Aff] = dict(zip((d.name for d in rows.dims), row, strict=True)) | {theirs.name: dim(key.name)}
    inside = {k: substitute_read(r, env, wide.ranges) for k, r in enumerate(rows.reads)}
    mine = _resolved(weight.score, dict(enumerate(wide.reads)))
    if mine != _resolved(substitute_expr(rows.body[0], env, wide.ranges), inside):
        return "the softmax is over other scores than the sum"
    one = rows.body[1]
    return "" if one == number(1, one.dtype) else "the sum of weights is weighted itself"


def _resolved(e: Expr, reads: Mapping[int, Read]) -> str:
    """Text of an expression with what its reads are in place of their numbers."""
    names: list[str] = []

    def leaf(x: Expr) -> Expr:
        if isinstance(x, Arg):
            names.append(repr(reads[x.pos]))
            return replace(x, pos=0)
        return x

    return f"{rewrite(e, leaf)} {names}"


def _streamed(graph: Graph, index: _Index, wide: Block, w: Weight, rows: Block, gone: frozenset[int]) -> Found | str:
    """The one operation: state (maximum, sum of weights, weighted sum), divided at the end."""
    special = centres(w)
    if special is None:
        return "rows without a finite maximum would get another value"
    dtype = w.score.dtype
    top, total, weighted = (Acc(k, dtype) for k in range(3))
    out: Expr = call("div", weighted, total) if w.divided else weighted
    for test, value in special:
        # inf - inf rather than a literal: a NaN in the text of a graph is not equal to itself
        out = call("where", test(top), call("sub", top, top) if math.isnan(value) else number(value, dtype), out)
    if wide.body[0].dtype != dtype:
        return "weights and values are summed in another type than the scores"

    def after(x: Expr) -> Expr:
        if isinstance(x, Arg) and wide.reads[x.pos].tensor in rows.outs:
            return rows.then[rows.outs.index(wide.reads[x.pos].tensor)]
        return out if isinstance(x, Acc) else x

    op = replace(
        wide, monoid="softsum", body=(w.score, number(1, dtype), product_of(w.values, w.divisors, dtype)),
        then=tuple(rewrite(e, after) for e in wide.then),
        source=tuple(dict.fromkeys(rows.source + wide.source)),
    )  # fmt: skip
    op, taken = _with_scores(graph, index, op, gone)
    return Found(merge_reads(op), gone | taken)


def _with_scores(graph: Graph, index: _Index, op: Block, users: frozenset[int]) -> tuple[Block, frozenset[int]]:
    """The contraction that makes the scores becomes an inner reduction, where the softmax alone reads it."""
    for k, r in enumerate(op.reads):
        at = index.makers.get(r.tensor, -1)
        maker = graph.ops[at] if at >= 0 else None
        alone = at >= 0 and set(index.readers[r.tensor]) <= users and r.tensor not in graph.outputs and _read_once(op, k)
        if not isinstance(maker, Block) or not alone or op.reduce[0].name not in dims_read(op, Arg(k, op.body[0].dtype)):
            continue
        new = with_inner(graph, op, k, maker)
        if new is not None:
            return new, frozenset((at,))
    return op, frozenset()
