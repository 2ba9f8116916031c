"""A selection goes through what is computed of the cells: they are picked first, and the rest is computed for those alone."""

from __future__ import annotations

from dataclasses import replace

from tapestry.ir.expr import Acc, Arg, Call, Index, call, rewrite, walk
from tapestry.ir.index import dims_of
from tapestry.ir.monoid import number, primitive_of
from tapestry.ir.recognise.contraction import dims_read
from tapestry.ir.recognise.selection import selection
from tapestry.rewrites.core.edit import merge_reads
from tapestry.rewrites.core.matching import Draft, Match, OpRule
from tapestry.rewrites.core.rule import Refusal, refuse, register


@register
class SelectFirst(OpRule):
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
    nothing = "it selects nothing that is computed"

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        """The selection that picks first."""
        op = draft.block(at)
        chosen = selection(op) if op is not None and not op.splits else None
        if op is None or chosen is None or chosen.shift or not isinstance(chosen.picked, Call) or chosen.wanted.dtype != "i64":
            return None
        wanted, picked, along = chosen.wanted, chosen.picked, chosen.over.name
        used = {x.pos for x in walk(picked) if isinstance(x, Arg) and along in dims_read(op, x)}
        if len(used) != 1 or any(isinstance(x, Index) and along in dims_of(x.aff) for x in walk(picked)):
            return refuse("what is picked is not computed of one read along the dimension that it is picked from")
        pos = used.pop()
        dtype = draft.tensors[op.reads[pos].tensor].dtype
        if op.reads[pos].other is not None or (primitive_of(op.monoid) == "or") != (dtype == "bool"):
            return refuse("what is picked is read outside its tensor, or has another type than the selection")
        made = rewrite(picked, lambda x: Acc(0, dtype) if isinstance(x, Arg) and x.pos == pos else x)
        inside = call("and", call("ge", wanted, number(0, "i64")), call("lt", wanted, number(chosen.over.size, "i64")))
        lowered = call("where", inside, made, number(0, made.dtype))
        test = op.body[0].args[0] if isinstance(op.body[0], Call) else op.body[0]
        then = tuple(rewrite(e, lambda x: lowered if isinstance(x, Acc) else x) for e in op.then)
        body = call("where", test, Arg(pos, dtype), number(0, dtype))
        return Match({at: (merge_reads(replace(op, body=(body,), then=then)),)})
