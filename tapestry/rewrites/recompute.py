"""`recompute`: a late reader gets its own copy of what computes a tensor, so that the tensor need not stay alive until then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph, Op, with_ops
from tapestry.rewrites.core.edit import accept, fresh, op_at, renamed, repeatable
from tapestry.rewrites.core.rule import Move, Refusal, Rule, refuse, register


@register
class Recompute(Rule):
    """Compute an operation again for all readers but the first ``keep``, just before the first of them.

    Chains are moves in a row: the copy reads the operation's inputs late, and those may then be computed again too.

    before:
        graph skip
        input x: f32[4]
        a: f32[4] = op [x0: 4]
          reads x[x0]
          body exp(x)
        b: f32[4] = op [x0: 4]
          reads a[x0]
          body sqrt(a)
        y: f32[4] = op [x0: 4]
          reads a[x0], b[x0]
          body a + b
        output y

    move: recompute@a{keep=1}

    after:
        graph skip
        input x: f32[4]
        a: f32[4] = op [x0: 4]
          reads x[x0]
          body exp(x)
        b: f32[4] = op [x0: 4]
          reads a[x0]
          body sqrt(a)
        a.again: f32[4] = op [x0: 4]
          reads x[x0]
          body exp(x)
        y: f32[4] = op [x0: 4]
          reads a0 = a.again[x0], b[x0]
          body a0 + b
        output y

    legal when:
        the operation has more readers than ``keep``, which is at least 1; it gives the same results when it is run again;
        none of its results is an output of the graph.
    """

    name = "recompute"
    phase = "fit"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """Every operation with several readers, computed again for all but the first."""
        readers = graph.consumers()
        for op in graph.ops:
            if len({r for t in op.outs for r in readers.get(t, ())}) > 1:
                yield self.offered(Move(self.name, op.outs[0], (("keep", 1),)), refusal(graph, op, 1))

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the copy before its first reader."""
        at, op = op_at(graph, move)
        keep = move.number("keep")
        if keep < 1:
            raise TapestryError(f"the operation would have {keep} readers", where=str(move), hint="keep at least 1")
        accept(refusal(graph, op, keep), move)
        late = _readers(graph, op)[keep:]
        again = {t: fresh(graph, f"{t}.again") for t in op.outs}
        new = tuple(replace(graph.tensors[t], name=n) for t, n in again.items())
        ops: list[Op] = []
        for i, other in enumerate(graph.ops):
            if i == late[0]:
                ops.append(replace(graph.ops[at], outs=tuple(again.values())))
            ops.append(renamed(other, again) if i in late else other)
        return with_ops(graph, tuple(ops), new)


def _readers(graph: Graph, op: Op) -> list[int]:
    return [i for i, other in enumerate(graph.ops) if set(op.outs) & set(other.inputs)]


def refusal(graph: Graph, op: Op, keep: int) -> Refusal | None:
    """Why an operation cannot be computed again; ``None`` when it can."""
    readers = _readers(graph, op)
    if len(readers) <= keep:
        return refuse("it has no further reader", f"{len(readers)} in all")
    stays = next((t for t in op.outs if t in graph.outputs), None)
    if stays is not None:
        return refuse("an output of the graph stays alive anyway", f"'{stays}'")
    if not repeatable(op):
        return refuse("run again, it gives other results")
    return None
