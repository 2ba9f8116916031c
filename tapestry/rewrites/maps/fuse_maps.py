"""Map-map and map-reduction fusion: a map is computed where its only reader needs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.errors import TapestryError
from tapestry.ir import space
from tapestry.ir.expr import Arg, Expr, count
from tapestry.ir.graph import Block, Graph, Op, Read, map_exprs, with_ops
from tapestry.ir.index import dims_of
from tapestry.rewrites.core.edit import (
    MOST_ATOMS,
    MOST_DEPTH,
    merge_reads,
    shift_args,
    substitute_expr,
    substitute_read,
    too_deep,
    too_long,
    with_args,
)
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register

GROWTH = 200  # nodes that a fusion may add to an expression tree by writing a body more than once


@register
class FuseMaps(Rule):
    """Put the body of a map into its only reader.

    before:
        graph g
        input x: f32[4, 6]
        t: f32[4, 6] = op [x0: 4, x1: 6]
          reads x[x0, x1]
          body exp(x)
        y: f32[4] = op [x0: 4 | x1: 6 sum]
          reads t[x0, x1]
          body t
        output y
    move: fuse_maps@y{tensor=t}
    after:
        graph g
        input x: f32[4, 6]
        y: f32[4] = op [x0: 4 | x1: 6 sum]
          reads x[x0, x1]
          body exp(x)
        output y
    legal when: the map has one reader, which reads every cell at most once and never outside (asked of isl), so that
    nothing is computed twice; a body that the reader uses several times is small, and what comes out is not too long.
    """

    name = "fuse_maps"
    phase = "simplify"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move or refusal per operation and map that it alone reads."""
        readers = graph.consumers()
        makers = graph.producers()
        for op in graph.ops:
            for t in op.inputs:
                if isinstance(op, Block) and t in makers and len(readers[t]) == 1 and t not in graph.outputs:
                    maker = graph.ops[makers[t]]
                    if isinstance(maker, Block) and maker.monoid is None:
                        reason, witness = refuse(op, maker, t)
                        move = Move(self.name, op.outs[0], (("tensor", t),))
                        yield Refusal(self.name, op.outs[0], reason, witness) if reason else move

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Fuse one map into its reader."""
        at, tensor = graph.find(move.at), move.text("tensor")
        maker = graph.producers().get(tensor, -1)
        op = graph.ops[at] if at >= 0 else None
        if not isinstance(op, Block) or maker < 0 or graph.consumers().get(tensor) != [at] or tensor in graph.outputs:
            raise TapestryError(f"'{tensor}' is not written by an operation with that reader alone", where=str(move))
        source = graph.ops[maker]
        reason, witness = refuse(op, source, tensor)
        if reason:
            raise TapestryError(reason, where=str(move), why=witness)
        assert isinstance(source, Block)
        ops = [fuse(op, source, tensor) if i == at else o for i, o in enumerate(graph.ops) if i != maker]
        return with_ops(graph, tuple(ops))

    def sweep(self, graph: Graph) -> Graph:
        """Fuse every map that may be, in one pass over the operations in order."""
        readers, makers = graph.consumers(), graph.producers()
        ops: list[Op | None] = list(graph.ops)
        for i in range(len(ops)):
            op = ops[i]
            pending = list(op.inputs) if isinstance(op, Block) else []
            while pending:
                t = pending.pop()
                maker = ops[makers[t]] if t in makers else None
                if not isinstance(maker, Block) or len(readers[t]) != 1 or t in graph.outputs or refuse(op, maker, t)[0]:
                    continue
                assert isinstance(op, Block)
                op = fuse(op, maker, t)
                ops[makers[t]], ops[i] = None, op
                for s in maker.inputs:
                    readers[s] = sorted({i if k == makers[t] else k for k in readers[s]})
                pending += [s for s in maker.inputs if s not in pending]
        return with_ops(graph, tuple(op for op in ops if op is not None))


def refuse(op: Op | None, maker: Op, tensor: str) -> tuple[str, str]:
    """Why a map may not move into its reader ("" when it may), and a witness."""
    if not isinstance(op, Block) or not isinstance(maker, Block) or maker.monoid or len(maker.outs) != 1:
        return "only a map with one result moves into a block operation", ""
    if op.splits or maker.splits:
        return "an operation that is split already is not fused", ""
    mine = [r for r in op.reads if r.tensor == tensor]
    if any(r.other is not None for r in mine):
        return f"'{tensor}' is read outside its cells, where the map is not defined", ""
    if len(set(mine)) > 1:
        return f"'{tensor}' is read through {len(set(mine))} projections: it would be computed for each", ""
    at = {k for k, r in enumerate(op.reads) if r.tensor == tensor}
    times = count((*op.point, *op.then), lambda x: isinstance(x, Arg) and x.pos in at)
    nodes = count(maker.body[:1], lambda _: True)
    if (times - 1) * nodes > GROWTH:
        return f"the body of '{tensor}' would be written {times} times", f"it has {nodes} nodes"
    used = frozenset(n for e in mine[0].index for n in dims_of(e))
    spare = [d.name for d in op.space if d.name not in used and d.size > 1]
    if spare:
        return f"every cell of '{tensor}' is read at each {', '.join(spare)}: it would be computed again", ""
    if too_deep((*op.point, *op.then), maker.body[:1]):
        return "the expression would be nested too deeply", f"at most {MOST_DEPTH} calls inside each other"
    env = dict(zip((d.name for d in maker.dims), mine[0].index, strict=True))
    if any(too_long(substitute_read(r, env, op.ranges), r, mine[0]) for r in maker.reads):
        return f"the projections would have more than {MOST_ATOMS} terms", ""
    if all(e.is_dim for e in mine[0].index) and len(set(mine[0].index)) == len(mine[0].index):
        return "", ""
    collision = space.used(op, mine[0]).collision()
    if collision:
        return f"a cell of '{tensor}' is read at two points: it would be computed again", str(collision)
    return "", ""


def fuse(op: Block, maker: Block, tensor: str) -> Block:
    """The reader with the map's body in place of the read."""
    position = next(k for k, r in enumerate(op.reads) if r.tensor == tensor)
    env = dict(zip((d.name for d in maker.dims), op.reads[position].index, strict=True))
    moved = tuple(substitute_read(r, env, op.ranges) for r in maker.reads)
    kept: tuple[Read, ...] = tuple(r for r in op.reads if r.tensor != tensor)
    numbers = [k for k, r in enumerate(op.reads) if r.tensor != tensor]
    body = substitute_expr(maker.body[0], env, op.ranges, shift_args(len(kept)))
    gone: dict[int, Expr] = {k: body for k, r in enumerate(op.reads) if r.tensor == tensor}
    leaf = with_args(gone, {k: i for i, k in enumerate(numbers)})

    def put(e: Expr) -> Expr:
        return substitute_expr(e, {}, op.ranges, lambda x: leaf(x) if isinstance(x, Arg) else x)

    new = replace(op, reads=kept + moved, source=tuple(dict.fromkeys(maker.source + op.source)))
    return merge_reads(map_exprs(new, put))
