"""A reduction of rows and the map that reads its result back over the same rows become one operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.errors import TapestryError
from tapestry.ir.expr import Arg, Expr
from tapestry.ir.graph import Block, Dim, Graph, Op, with_ops
from tapestry.ir.index import Aff, Floor, dim
from tapestry.rewrites.core.edit import merge_reads, read_dims, shift_args, substitute_expr, substitute_read
from tapestry.rewrites.core.rule import Move, Refusal, register
from tapestry.rewrites.reductions.row_columns import along_columns


@register
class FuseRows:
    """Normalise a row where its statistics are: softmax, layer norm, RMS norm in one pass over the row.

    The statistics do not vary along the map's other dimensions, so that they are computed once for each row and kept once.

    before:
        graph g
        input x: f32[4, 6]
        input w: f32[6]
        r: f32[4] = op [i: 4 | n: 6 sum]
          reads x[i, n]
          body x * x
          then 1.0 / sqrt((acc0 / 6.0))
        y: f32[4, 6] = op [i: 4, j: 6]
          reads x[i, j], r[i], w[j]
          body (x * r) * w
        output y
    move: fuse_rows@y
    after:
        graph g
        input x: f32[4, 6]
        input w: f32[6]
        y: f32[4, 6] = op [i: 4, j: 6 | n: 6 sum]
          reads x[i, n], a1 = x[i, j], w[j]
          body x * x
          then (a1 * (1.0 / sqrt((acc0 / 6.0)))) * w
        output y
    legal when: the map is the only reader of the reduction's results and reads them by plain dimensions or whole groups of a
    dimension (``floor(c/k)``), the same for each;
    the reduction goes once through what it reads (no value of it is used in several rows), and the map reads that as well.
    """

    name = "fuse_rows"
    kind = "simplify"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move per map that reads back over rows what a reduction made of them."""
        makers, readers = graph.producers(), graph.consumers()
        for i, op in enumerate(graph.ops):
            found = _reduction(graph, i, makers, readers)
            if found is not None and (why := _refuse(graph, op, graph.ops[found], readers, i)):
                yield Refusal(self.name, op.outs[0], why)
            elif found is not None:
                yield Move(self.name, op.outs[0])

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Fuse one map into the reduction of its rows."""
        at = graph.find(move.at)
        makers, readers = graph.producers(), graph.consumers()
        found = _reduction(graph, at, makers, readers) if at >= 0 else None
        if found is None:
            raise TapestryError("no map that reads a reduction of its rows", where=str(move))
        why = _refuse(graph, graph.ops[at], graph.ops[found], readers, at)
        if why:
            raise TapestryError(why, where=str(move))
        return _replace(graph, {at: found})

    def sweep(self, graph: Graph) -> Graph:
        """Every one, in one pass: a reduction has one reader, and a map is fused with one reduction."""
        makers, readers = graph.producers(), graph.consumers()
        pairs: dict[int, int] = {}
        for i, op in enumerate(graph.ops):
            found = _reduction(graph, i, makers, readers)
            if found is not None and not _refuse(graph, op, graph.ops[found], readers, i):
                pairs[i] = found
        return _replace(graph, pairs) if pairs else graph


def _replace(graph: Graph, pairs: dict[int, int]) -> Graph:
    gone = set(pairs.values())
    ops: list[Op] = []
    for i, op in enumerate(graph.ops):
        if i in pairs:
            rows = graph.ops[pairs[i]]
            assert isinstance(op, Block) and isinstance(rows, Block)
            ops.append(fuse(op, rows))
        elif i not in gone:
            ops.append(op)
    return with_ops(graph, tuple(ops))


def _reduction(graph: Graph, at: int, makers: dict[str, int], readers: dict[str, list[int]]) -> int | None:
    """The reduction whose result a map reads at several points, if it is read here alone."""
    op = graph.ops[at]
    if not isinstance(op, Block) or op.monoid or len(op.outs) != 1 or op.splits:
        return None
    for r in op.reads:
        rows = graph.ops[makers[r.tensor]] if r.tensor in makers else None
        if not isinstance(rows, Block) or not rows.monoid or readers[r.tensor] != [at]:
            continue
        if {d.name for d in op.dims if d.size > 1} - read_dims(r) and set(rows.inputs) & set(op.inputs):
            return makers[r.tensor]
    return None


def _refuse(graph: Graph, op: Op, rows: Op, readers: dict[str, list[int]], at: int) -> str:
    """Why a map and a reduction of rows may not be one ("" when they may)."""
    assert isinstance(op, Block) and isinstance(rows, Block)
    after = [graph.ops[i] for i in readers.get(op.outs[0], [])]
    if rows.monoid == "logsumexp" and any(isinstance(o, Block) and o.monoid == "sum" for o in after):
        return "the weights of a sum are left to stream_softmax"
    if rows.inner or rows.splits:
        return "the reduction is split or has inner reductions"
    if any(t in graph.outputs or readers.get(t, [at]) != [at] for t in rows.outs):
        return "a result of the reduction is needed elsewhere"
    mine = {r.index for r in op.reads if r.tensor in rows.outs}
    if len(mine) != 1 or any(r.other is not None for r in op.reads if r.tensor in rows.outs):
        return "results of the reduction are read at different places"
    index = next(iter(mine))
    named = [_row(e, op) for e in index if e.terms]
    if None in named or len(set(named)) != len(named):
        return "rows are not dimensions of the map or groups of one: statistics would be computed again"
    needed = {d.name for d in rows.space if d.size > 1}
    if any(needed - read_dims(rows.reads[k]) for k in rows.body_reads()):
        return "the reduction uses what it reads in several rows: it is a contraction"
    return ""


def _row(e: Aff, op: Block) -> str | None:
    """The map's dimension d that an index of a row is, as ``d`` or as groups that fill it, ``floor(d/k)``."""
    atom = e.terms[0][0] if len(e.terms) == 1 and e.terms[0][1] == 1 and not e.const else ""
    if isinstance(atom, str):
        return atom or None
    whole = isinstance(atom, Floor) and atom.arg.is_dim and op.ranges[str(atom.arg)] % atom.div == 0
    return str(atom.arg) if whole else None


def fuse(op: Block, rows: Block) -> Block:
    """The map with the reduction of its rows inside."""
    index = next(r.index for r in op.reads if r.tensor in rows.outs)
    env: dict[str, Aff] = dict(zip((d.name for d in rows.dims), index, strict=True))
    taken, reduce = {d.name for d in op.dims}, list[Dim]()
    for d in rows.reduce:
        name = d.name
        while name in taken:
            name += "_"
        taken.add(name)
        reduce.append(Dim(name, d.size))
        env[d.name] = dim(name)
    ranges = op.ranges | {d.name: d.size for d in reduce}
    theirs = tuple(substitute_read(r, env, ranges) for r in rows.reads)
    states: dict[str, Expr] = {t: substitute_expr(e, env, ranges) for t, e in zip(rows.outs, rows.then, strict=True)}
    shift = shift_args(len(theirs))

    def put(x: Expr) -> Expr:
        if isinstance(x, Arg) and op.reads[x.pos].tensor in states:
            return states[op.reads[x.pos].tensor]
        return shift(x)

    joined = replace(
        op, reduce=tuple(reduce), monoid=rows.monoid, reads=theirs + op.reads,
        body=tuple(substitute_expr(e, env, ranges) for e in rows.body),
        then=tuple(substitute_expr(e, {}, ranges, put) for e in op.body),
        source=tuple(dict.fromkeys(rows.source + op.source)),
    )  # fmt: skip
    return along_columns(merge_reads(joined))
