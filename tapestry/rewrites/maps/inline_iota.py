"""What is computed of positions alone is computed where it is read: masks of triangles, windows, blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.errors import TapestryError
from tapestry.ir.expr import Arg, Call, Expr, rewrite, walk
from tapestry.ir.graph import Block, Graph, Op, map_exprs, with_ops
from tapestry.rewrites.core.edit import merge_reads, substitute_expr
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register

MOST = 16  # primitives that are computed again rather than read


@register
class FusePlaces(Rule):
    """Compute a small function of positions in every reader, instead of reading it from a tensor.

    before:
        graph g
        input x: f32[3, 4, 6]
        see: bool[4, 6] = op [i: 4, n: 6]
          body ge(index(i), index(n))
        y: f32[3, 4, 6] = op [h: 3, i: 4, n: 6]
          reads x[h, i, n], see[i, n]
          body where(see, x, 0.0)
        output y
    move: fuse_places@y{tensor=see}
    after:
        graph g
        input x: f32[3, 4, 6]
        y: f32[3, 4, 6] = op [h: 3, i: 4, n: 6]
          reads x[h, i, n]
          body where(ge(index(i), index(n)), x, 0.0)
        output y
    legal when: the map reads nothing, has at most 16 primitives and draws no random numbers; it is read inside its cells.
    """

    name = "fuse_places"
    phase = "simplify"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move or refusal per operation and map of positions that it reads."""
        makers = _makers(graph)
        for op in graph.ops:
            for t in dict.fromkeys(t for t in op.inputs if t in makers):
                why = _refuse(op, t)
                at, params = op.outs[0], (("tensor", t),)
                yield Refusal(self.name, at, why) if why else Move(self.name, at, params)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Compute one function of positions in one reader."""
        at, tensor = graph.find(move.at), move.text("tensor")
        makers = _makers(graph)
        if at < 0 or tensor not in makers or tensor not in graph.ops[at].inputs:
            raise TapestryError(f"'{tensor}' is no small function of positions that the operation reads", where=str(move))
        why = _refuse(graph.ops[at], tensor)
        if why:
            raise TapestryError(why, where=str(move))
        ops = [_inside(op, {tensor: makers[tensor]}) if i == at else op for i, op in enumerate(graph.ops)]
        return with_ops(graph, _needed(ops, graph, {tensor}))

    def sweep(self, graph: Graph) -> Graph:
        """Every one, in one pass."""
        makers = _makers(graph)
        if not makers:
            return graph
        ops = [_inside(op, {t: makers[t] for t in op.inputs if t in makers and not _refuse(op, t)}) for op in graph.ops]
        return with_ops(graph, _needed(ops, graph, set(makers)))


def _makers(graph: Graph) -> dict[str, Block]:
    """Small functions of positions, by the tensor that they write."""
    return {op.outs[0]: op for op in graph.ops if isinstance(op, Block) and _small(op)}


def _small(op: Block) -> bool:
    if op.monoid or op.reads or op.splits or len(op.outs) != 1:
        return False
    calls = [x.fn for x in walk(op.body[0]) if isinstance(x, Call)]
    return len(calls) <= MOST and "philox" not in calls


def _refuse(op: Op, tensor: str) -> str:
    """Why a function of positions is not computed in a reader ("" when it is)."""
    if not isinstance(op, Block):
        return "an opaque operation reads tensors"
    if op.splits:
        return "an operation that is split already is not fused"
    if any(r.other is not None for r in op.reads if r.tensor == tensor):
        return f"'{tensor}' is read outside its cells, where it is not defined"
    return "" if len(op.reads) > 1 or not isinstance(op.body[0], Arg) else "the operation only moves it"


def _inside(op: Op, makers: dict[str, Block]) -> Op:
    """The operation with functions of positions written out."""
    if not makers or not isinstance(op, Block):
        return op
    values: dict[int, Expr] = {}
    for k, r in enumerate(op.reads):
        if r.tensor in makers:
            maker = makers[r.tensor]
            env = dict(zip((d.name for d in maker.dims), r.index, strict=True))
            values[k] = substitute_expr(maker.body[0], env, op.ranges)
    source = tuple(dict.fromkeys((*(s for m in makers.values() for s in m.source), *op.source)))
    put = map_exprs(op, lambda e: rewrite(e, lambda x: values.get(x.pos, x) if isinstance(x, Arg) else x))
    return merge_reads(replace(put, source=source))


def _needed(ops: list[Op], graph: Graph, gone: set[str]) -> tuple[Op, ...]:
    """The operations without those whose function is written out everywhere."""
    read = {t for op in ops for t in op.inputs} | set(graph.outputs)
    return tuple(op for op in ops if not (set(op.outs) <= gone and not set(op.outs) & read))
