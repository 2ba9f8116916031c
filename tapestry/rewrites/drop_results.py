"""Results of an operation that nobody reads."""

from __future__ import annotations

from dataclasses import replace

from tapestry.rewrites.core.edit import merge_reads
from tapestry.rewrites.core.matching import Draft, Match, OpRule
from tapestry.rewrites.core.rule import Refusal, register


@register
class DropResults(OpRule):
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
    nothing = "every result is needed, or none is"

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        """The operation without the results that nobody reads."""
        op = draft.block(at)
        needed = [] if op is None else [k for k, t in enumerate(op.outs) if draft.readers_of(t) or t in draft.outputs]
        if op is None or not 0 < len(needed) < len(op.outs):
            return None
        less = replace(op, outs=tuple(op.outs[k] for k in needed))
        if op.monoid is None:
            return Match({at: (merge_reads(replace(less, body=tuple(op.body[k] for k in needed))),)})
        return Match({at: (merge_reads(replace(less, then=tuple(op.then[k] for k in needed))),)})
