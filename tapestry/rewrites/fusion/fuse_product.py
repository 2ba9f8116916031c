"""The product of monoids as a rule: two reductions over the same points of the same input in one pass."""

from __future__ import annotations

from collections.abc import Iterable

from tapestry.ir.expr import Acc, rewrite
from tapestry.ir.graph import Block
from tapestry.rewrites.core.edit import over, same_value, shift_args
from tapestry.rewrites.core.matching import Draft, Match, PairRule
from tapestry.rewrites.core.rule import Refusal, refuse, register
from tapestry.rewrites.fusion import joined_reductions
from tapestry.rewrites.fusion.joined_reductions import Merged


@register
class FuseProduct(PairRule):
    """Read an input once for two reductions over the same dimensions: maximum and position, several norms, sum and minimum.

    Their states stand side by side in a product of monoids. What comes after one of them (its ``then``) may read the other's
    result: log-sum-exp and the score that is right, divided at the end, are a cross-entropy in one pass.

    before:
        graph g
        input x: f32[4, 6]
        top: f32[4] = op [i: 4 | n: 6 max]
          reads x[i, n]
          body x
        place: i64[4] = op [i: 4 | n: 6 argmax]
          reads x[i, n]
          body x, index(n)
          then acc1
        output top, place
    move: fuse_product@place{with=top}
    after:
        graph g
        input x: f32[4, 6]
        top: f32[4], place: i64[4] = op [i: 4 | n: 6 max.argmax]
          reads x[i, n]
          body x, x, index(n)
          then acc0, acc2
        output top, place
    legal when: both reduce dimensions of the same sizes and keep dimensions of the same sizes, in order; one goes over nothing
    that the other does not, through the same projections, and is no contraction; what the second reads before its reduction
    is not made from what the first makes.
    """

    name = "fuse_product"
    phase = "simplify"
    second = "with"
    nothing = "no such two reductions, the first one before the second"
    at_once = live = True

    def partners(self, draft: Draft, at: int) -> Iterable[str]:
        """The reductions before that go over tensors of the same name, the nearest for each."""
        op = draft.block(at)
        if op is None or not joined_reductions.reduction(op):
            return ()
        tensors = sorted({r.tensor for r in joined_reductions.swept(op)})
        before = {draft.memo[t] for t in tensors if t in draft.memo}
        draft.memo |= dict.fromkeys(tensors, op.outs[0])
        return sorted(before, key=lambda t: draft.makers[t], reverse=True)

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """Both reductions as one."""
        a, b = draft.block(other), draft.block(at)
        if other > at:
            return None
        if a is None or b is None or not joined_reductions.reduction(a) or not joined_reductions.reduction(b):
            return refuse("only reductions that are not split, not running and have no inner ones are joined")
        env = joined_reductions.aligned(a, b)
        if env is None:
            return refuse("they reduce or keep dimensions of different sizes")
        first = over(a, env, b)
        no = joined_reductions.unlike(first, b) or _dependent(a, b, env) or joined_reductions.needs(draft, b, other, at)
        return no or joined_reductions.joined(draft, (other, at), env, (first, b), _both_states(first, b))


def _dependent(a: Block, b: Block, env: joined_reductions.Env) -> Refusal | None:
    """Why two states cannot stand side by side, for what the second reads of the first or for their shapes."""
    mine = {k for k, r in enumerate(b.reads) if r.tensor in a.outs}
    if mine & b.body_reads():
        return refuse("the second reduces what the first makes")
    if not all(joined_reductions.at_rows(b.reads[k], a, env, b) for k in mine):
        return refuse("the second reads the first's result of another row")
    if not a.lowers and not b.lowers and {d.size for d in a.dims} != {d.size for d in b.dims} and len(a.body) > 1:
        return refuse("states that are results themselves keep their shape")
    return None


def _both_states(a: Block, b: Block) -> Merged:
    """The two states side by side; one of them where they are the same."""
    assert a.monoid and b.monoid
    if a.monoid == b.monoid and all(same_value(x, a, y, b) for x, y in zip(a.body, b.body, strict=True)):
        return Merged(monoid=a.monoid, body=a.body, first=a.then, accs=tuple(Acc(k, e.dtype) for k, e in enumerate(b.body)))
    shift = shift_args(len(a.reads))
    accs = tuple(Acc(len(a.body) + k, e.dtype) for k, e in enumerate(b.body))
    body = a.body + tuple(rewrite(e, shift) for e in b.body)
    return Merged(monoid=f"{a.monoid}.{b.monoid}", body=body, first=a.then, accs=accs)
