"""Common subexpressions and dead code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph, Op, with_ops
from tapestry.ir.syntax.printer import op_text
from tapestry.rewrites.core.edit import renamed, repeatable
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register


@register
class Share(Rule):
    """Compute equal operations once.

    before:
        graph g
        input x: f32[4]
        a: f32[4] = op [x0: 4]
          reads x[x0]
          body exp(x)
        b: f32[4] = op [x0: 4]
          reads x[x0]
          body exp(x)
        y: f32[4] = op [x0: 4]
          reads a[x0], b[x0]
          body a + b
        output y
    move: share@b{with=a}
    after:
        graph g
        input x: f32[4]
        a: f32[4] = op [x0: 4]
          reads x[x0]
          body exp(x)
        y: f32[4] = op [x0: 4]
          reads a[x0], a1 = a[x0]
          body a + a1
        output y
    legal when: both have the same index space, projections, body and inputs, and the second is not a graph output.
    """

    name = "share"
    phase = "simplify"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """Each operation that an earlier one equals."""
        seen: dict[str, Op] = {}
        for op in graph.ops:
            first = seen.setdefault(_key(op, graph), op)
            if first is not op:
                reason = "it is an output of the graph" if set(op.outs) & set(graph.outputs) else ""
                yield (
                    Refusal(self.name, op.outs[0], reason)
                    if reason
                    else Move(self.name, op.outs[0], (("with", first.outs[0]),))
                )

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Drop one operation and let its readers read the other's results."""
        at, kept = graph.find(move.at), graph.find(move.text("with"))
        equal = at >= 0 and kept >= 0 and _key(graph.ops[at], graph) == _key(graph.ops[kept], graph)
        if not equal or at == kept or set(graph.ops[at].outs) & set(graph.outputs):
            raise TapestryError("the operations are not equal, or the second is an output", where=str(move))
        rename = dict(zip(graph.ops[at].outs, graph.ops[kept].outs, strict=True))
        ops = [renamed(op, rename) for i, op in enumerate(graph.ops) if i != at]
        return with_ops(graph, tuple(ops))

    def sweep(self, graph: Graph) -> Graph:
        """Share all equal operations in one pass."""
        seen: dict[str, Op] = {}
        rename: dict[str, str] = {}
        ops: list[Op] = []
        for op in graph.ops:
            op = renamed(op, rename)
            first = seen.setdefault(_key(op, graph), op)
            if first is op or set(op.outs) & set(graph.outputs):
                ops.append(op)
            else:
                rename.update(zip(op.outs, first.outs, strict=True))
        return with_ops(graph, tuple(ops))


@register
class DropDead(Rule):
    """Remove operations whose results nobody needs.

    before:
        graph g
        input x: f32[4]
        a: f32[4] = op [x0: 4]
          reads x[x0]
          body exp(x)
        y: f32[4] = op [x0: 4]
          reads x[x0]
          body neg(x)
        output y
    move: drop_dead@a
    after:
        graph g
        input x: f32[4]
        y: f32[4] = op [x0: 4]
          reads x[x0]
          body neg(x)
        output y
    legal when: no operation reads any of its results and none is an output of the graph.
    """

    name = "drop_dead"
    phase = "simplify"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """Each operation without a reader."""
        readers = graph.consumers()
        for op in graph.ops:
            if not any(t in readers or t in graph.outputs for t in op.outs):
                yield Move(self.name, op.outs[0])

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Remove one operation."""
        at, readers = graph.find(move.at), graph.consumers()
        if at < 0 or any(t in readers or t in graph.outputs for t in graph.ops[at].outs):
            raise TapestryError("its results are needed", where=str(move))
        return with_ops(graph, graph.ops[:at] + graph.ops[at + 1 :])

    def sweep(self, graph: Graph) -> Graph:
        """Remove all dead operations, from the end."""
        needed = set(graph.outputs)
        kept: list[Op] = []
        for op in reversed(graph.ops):
            if needed & set(op.outs):
                kept.append(op)
                needed |= set(op.inputs)
        return with_ops(graph, tuple(reversed(kept)))


def _key(op: Op, graph: Graph) -> str:
    """Everything of an operation but the names of its results and its nodes."""
    if isinstance(op, Block):
        types = [graph.tensors[t].dtype for t in op.outs]
        return f"{types} {op.reads} {op.dims} {op.reduce} {op.monoid} {op.inner} {op.body} {op.then} {op.splits}"
    text = op_text(replace(op, source=(), why=""), graph)
    return text.partition(" = ")[2] if repeatable(op) else f"{op.outs}"
