"""Results of an operation that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph, Op, with_ops
from tapestry.rewrites.core.edit import merge_reads
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register


@register
class DropResults(Rule):
    """Leave out the results of an operation that nobody reads, where it has others; the states behind them stay.

    before:
        graph g
        input x: f32[4, 6]
        a: f32[4], r: f32[4] = op [i: 4 | n: 6 moments]
          reads x[i, n]
          body 1.0, x, 0.0
          then acc1, 1.0 / sqrt((acc2 / acc0))
        output r
    move: drop_results@a
    after:
        graph g
        input x: f32[4, 6]
        r: f32[4] = op [i: 4 | n: 6 moments]
          reads x[i, n]
          body 1.0, x, 0.0
          then 1.0 / sqrt((acc2 / acc0))
        output r
    legal when: no operation reads the result, it is no output of the graph, and another result of the operation is needed.
    """

    name = "drop_results"
    phase = "simplify"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move per operation with a result too many."""
        readers = graph.consumers()
        for op in graph.ops:
            kept = _needed(op, graph, readers)
            if isinstance(op, Block) and 0 < len(kept) < len(op.outs):
                yield Move(self.name, op.outs[0])

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Leave out the results of one operation that nobody reads."""
        at = graph.find(move.at)
        readers = graph.consumers()
        op = graph.ops[at] if at >= 0 else None
        kept = _needed(op, graph, readers) if op is not None else []
        if not isinstance(op, Block) or not 0 < len(kept) < len(op.outs):
            raise TapestryError("every result is needed, or none is", where=str(move))
        return with_ops(graph, tuple(_less(o, kept) if i == at else o for i, o in enumerate(graph.ops)))

    def sweep(self, graph: Graph) -> Graph:
        """All results that nobody reads."""
        readers = graph.consumers()
        ops: list[Op] = []
        for op in graph.ops:
            kept = _needed(op, graph, readers)
            ops.append(_less(op, kept) if 0 < len(kept) < len(op.outs) else op)
        return with_ops(graph, tuple(ops))


def _needed(op: Op, graph: Graph, readers: dict[str, list[int]]) -> list[int]:
    """Which results of an operation are read, or are outputs of the graph."""
    if len(op.outs) == 1 or not isinstance(op, Block):
        return list(range(len(op.outs)))
    return [k for k, t in enumerate(op.outs) if t in readers or t in graph.outputs]


def _less(op: Op, kept: list[int]) -> Op:
    assert isinstance(op, Block)
    outs = tuple(op.outs[k] for k in kept)
    if op.monoid is None:
        return merge_reads(replace(op, outs=outs, body=tuple(op.body[k] for k in kept)))
    return merge_reads(replace(op, outs=outs, then=tuple(op.then[k] for k in kept)))
