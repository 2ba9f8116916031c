"""A selection goes through what is computed of the cells: they are picked first, and the rest is computed for those alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.errors import TapestryError
from tapestry.ir.expr import Acc, Arg, Call, Expr, Index, call, rewrite, walk
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.index import dims_of
from tapestry.ir.monoid import number
from tapestry.ir.recognise.contraction import dims_read
from tapestry.ir.recognise.selection_sum import selection
from tapestry.rewrites.core.edit import merge_reads
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register


@register
class SelectFirst(Rule):
    """Pick a cell before computing with it: of a log-softmax only the class that is wanted.

    What is left is a selection of the input itself, which goes over it like the log-sum-exp, and so becomes one pass with it.

    before:
        graph g
        input x: f32[4, 6]
        input m: f32[4]
        input t: i64[4]
        y: f32[4] = op [i: 4 | n: 6 sum]
          reads x[i, n], m[i], t[i]
          body where(eq(t, index(n)), tanh((x - m)), 0.0)
        output y
    move: select_first@y
    after:
        graph g
        input x: f32[4, 6]
        input m: f32[4]
        input t: i64[4]
        y: f32[4] = op [i: 4 | n: 6 sum]
          reads x[i, n], m[i], t[i]
          body where(eq(t, index(n)), x, 0.0)
          then where(and(ge(t, 0), lt(t, 6)), tanh((acc0 - m)), 0.0)
        output y
    legal when: one reduced dimension is selected by what does not depend on it; what is picked is computed of one read along
    that dimension, inside its tensor, and does not look at the place.
    """

    name = "select_first"
    phase = "simplify"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move or refusal per selection of something computed."""
        for op in graph.ops:
            found = _match(graph, op)
            if isinstance(found, Block):
                yield Move(self.name, op.outs[0])
            elif found:
                yield Refusal(self.name, op.outs[0], found)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Pick first in one selection."""
        at = graph.find(move.at)
        found = _match(graph, graph.ops[at]) if at >= 0 else "no such operation"
        if not isinstance(found, Block):
            raise TapestryError(found or "it selects nothing that is computed", where=str(move))
        return replace(graph, ops=tuple(found if i == at else op for i, op in enumerate(graph.ops)))

    def sweep(self, graph: Graph) -> Graph:
        """Every one, in one pass."""
        found = (_match(graph, op) for op in graph.ops)
        return replace(graph, ops=tuple(f if isinstance(f, Block) else op for f, op in zip(found, graph.ops, strict=True)))


def _match(graph: Graph, op: Op) -> Block | str:
    """The operation that picks first; why there is none ("" where nobody would expect one)."""
    parts = _parts(op)
    if parts is None or not isinstance(op, Block):
        return ""
    wanted, picked = parts
    along = op.reduce[0].name
    used = {x.pos for x in walk(picked) if isinstance(x, Arg) and along in dims_read(op, x)}
    if len(used) != 1 or any(isinstance(x, Index) and along in dims_of(x.aff) for x in walk(picked)):
        return "what is picked is not computed of one read along the dimension that it is picked from"
    pos = used.pop()
    dtype = graph.tensors[op.reads[pos].tensor].dtype
    if op.reads[pos].other is not None or (op.monoid == "any") != (dtype == "bool"):
        return "what is picked is read outside its tensor, or has another type than the selection"
    made = rewrite(picked, lambda x: Acc(0, dtype) if isinstance(x, Arg) and x.pos == pos else x)
    inside = call("and", call("ge", wanted, number(0, "i64")), call("lt", wanted, number(op.reduce[0].size, "i64")))
    lowered = call("where", inside, made, number(0, made.dtype))
    test = op.body[0].args[0] if isinstance(op.body[0], Call) else op.body[0]
    then = tuple(rewrite(e, lambda x: lowered if isinstance(x, Acc) else x) for e in op.then)
    return merge_reads(replace(op, body=(call("where", test, Arg(pos, dtype), number(0, dtype)),), then=then))


def _parts(op: Op) -> tuple[Expr, Expr] | None:
    """(the place wanted, what is picked there) of a sum that picks one of something computed."""
    chosen = selection(op) if isinstance(op, Block) and not op.splits else None
    if chosen is None or chosen.shift or not isinstance(chosen.picked, Call) or chosen.wanted.dtype != "i64":
        return None
    return chosen.wanted, chosen.picked
