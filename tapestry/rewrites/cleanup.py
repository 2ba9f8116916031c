"""Common subexpressions and dead code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tapestry.ir.graph import Block, Op
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import renamed, repeatable
from tapestry.rewrites.core.matching import Draft, Match, OpRule, PairRule
from tapestry.rewrites.core.rule import Refusal, refuse, register


@register
class Share(PairRule):
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
    second = "with"
    nothing = "the operations are not equal, or the second is an output"

    def partners(self, draft: Draft, at: int) -> Iterable[str]:
        """The first of the operations before that equal this one."""
        op = draft.op(at)
        if op is None:
            return ()
        similar = draft.memo.setdefault((type(op), op.inputs, op.dims), op.outs[0])
        if similar == op.outs[0] or (before := draft.op(draft.makers[similar])) is None:
            return ()  # whole texts are compared only of those that read the same
        draft.memo.setdefault(_key(before, draft.tensors), similar)
        first = draft.memo.setdefault(_key(op, draft.tensors), op.outs[0])
        return [first] if first != op.outs[0] else ()

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """The readers of the second operation, reading what the first one writes."""
        op, first = draft.op(at), draft.op(other)
        if op is None or first is None or _key(op, draft.tensors) != _key(first, draft.tensors):
            return None
        if draft.outputs & set(op.outs):
            return refuse("it is an output of the graph")
        rename = dict(zip(op.outs, first.outs, strict=True))
        where = sorted({i for t in op.outs for i in draft.readers_of(t)})
        return Match({at: ()} | {i: (renamed(o, rename),) for i in where if (o := draft.op(i)) is not None})


@register
class DropDead(OpRule):
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
    nothing = "its results are needed"
    backwards = True

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        """Nothing in place of an operation without a reader."""
        op = draft.op(at)
        needed = op is None or any(draft.readers_of(t) or t in draft.outputs for t in op.outs)
        return None if needed else Match({at: ()})


def _key(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """Everything of an operation but the names of its results and its nodes."""
    if isinstance(op, Block):
        types = [tensors[t].dtype for t in op.outs]
        return f"{types} {op.reads} {op.dims} {op.reduce} {op.monoid} {op.inner} {op.body} {op.then} {op.splits}"
    return repr(replace(op, outs=(), source=(), why="")) if repeatable(op) else f"{op.outs}"
