"""Contractions that share a factor become one operation with several sums side by side: QKV, gate and up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tapestry.ir.expr import Acc, Call, Expr, rewrite
from tapestry.ir.graph import Block, Op, placed, shape_of
from tapestry.ir.monoid import MOST_SUMS, sums
from tapestry.ir.recognition.contraction import dims_read, products
from tapestry.rewrites.core.edit import merge_reads, over, plain_index, resolved, shift_args
from tapestry.rewrites.core.matching import Draft, Match, PairRule
from tapestry.rewrites.core.rule import Refusal, refuse, register
from tapestry.rewrites.fusion.joined_reductions import Merged, side_by_side


@register
class FuseSums(PairRule):
    """Compute contractions of one common factor in one pass over it, each sum with an accumulator of its own.

    What the second does to its sum may use the first one's result at the same point (SwiGLU, a gate): it then never leaves
    the chip. Weights stay the tensors that they were, so that heads and columns are cut as before.

    before:
        graph g
        input x: f32[4, 6]
        input w: f32[6, 3]
        input v: f32[6, 3]
        g: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[i, m], w[m, n]
          body x * w
          then acc0 * sigmoid(acc0)
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[i, m], v[m, n], g[i, n]
          body x * v
          then g * acc0
        output y
    move: fuse_sums@y{with=g}
    after:
        graph g
        input x: f32[4, 6]
        input w: f32[6, 3]
        input v: f32[6, 3]
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sums2]
          reads x[i, m], w[m, n], v[m, n]
          body x * w, x * v
          then (acc0 * sigmoid(acc0)) * acc1
        output y
    legal when: both run over the same points, one factor is the same tensor through the same projection, the other depends on
    the same dimensions; the second needs the first at most at its own point, and nothing in between needs either; together
    they have at most four sums.
    """

    name = "fuse_sums"
    phase = "fusion"
    second = "with"
    nothing = "no two block operations"

    def named(self, op: Op) -> str:
        """The last result: those before may have been the first operation's."""
        return op.outs[-1]

    def partners(self, draft: Draft, at: int) -> Iterable[str]:
        """For each tensor that a contraction reads, the contraction before it that reads it over as many points."""
        op = draft.block(at)
        if op is None or products(op) is None or op.inner:
            return ()
        sizes = shape_of(op.dims), shape_of(op.reduce)
        keys = [(t, *sizes) for t in sorted({op.reads[k].tensor for k in op.body_reads()})]
        before = dict.fromkeys(draft.memo[key] for key in keys if key in draft.memo)
        draft.memo |= dict.fromkeys(keys, op.outs[-1])
        return list(before)

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """Both as one operation, in place of the first or of the second."""
        first, second = draft.block(other), draft.block(at)
        if first is None or second is None:
            return None
        if no := _differ(first, second):
            return no
        early = _early(draft, other, at)
        if early is None:
            return refuse("what is between the two needs the first, and the second needs it")
        env = placed(second.space, plain_index(first.space))
        theirs = over(second, env, first)
        shared = _shared(first, theirs)
        if shared is None:
            return refuse("no factor of theirs is one tensor read through one projection")
        given = {k for k, r in enumerate(theirs.reads) if r.tensor in first.outs}
        if any(theirs.reads[k].index != plain_index(first.dims) or theirs.reads[k].when for k in given) or (
            given & theirs.body_reads()
        ):
            return refuse("the second needs the first at other points than its own")
        needed = [k for k, t in enumerate(first.outs) if t in draft.outputs or set(draft.readers_of(t)) - {at}]
        both = merge_reads(side_by_side(first, theirs, _sums(first, theirs, shared), needed))
        return Match({other: (both,), at: ()} if early else {other: (), at: (both,)})


def _sums(first: Block, second: Block, shared: str) -> Merged:
    """The sums of both side by side."""
    n, shift = len(first.body), shift_args(len(first.reads))
    body = _ordered(first, shared) + tuple(rewrite(e, shift) for e in _ordered(second, shared))
    accs = tuple(Acc(n + k, e.dtype) for k, e in enumerate(second.body))
    return Merged(monoid=sums(len(body)), body=body, first=first.then, accs=accs)


def _differ(first: Block, second: Block) -> Refusal | None:
    if products(first) is None or products(second) is None or first.inner or second.inner:
        return refuse("only sums of products are put side by side")
    if first.splits or second.splits:
        return refuse("an operation that is split already is not fused")
    if len(first.body) + len(second.body) > MOST_SUMS:
        return refuse(f"they would have more than {MOST_SUMS} accumulators")
    if len(first.dims) != len(second.dims) or shape_of(first.space) != shape_of(second.space):
        return refuse("they run over different points")
    return None


def _early(draft: Draft, i: int, j: int) -> bool | None:
    """Whether both can be where the first is (all that they read is there), or where the second is (nobody has needed them)."""
    first, second = draft.block(i), draft.block(j)
    if i > j or first is None or second is None:
        return None
    if all(draft.makers.get(t, -1) < i for t in second.inputs if t not in first.outs):
        return True
    return None if any(k < j for t in first.outs for k in draft.readers_of(t)) else False


def _shared(first: Block, second: Block) -> str | None:
    """Text of a factor that every sum of both has, the other factors varying along the same dimensions."""
    pairs = [(op, *f) for op in (first, second) for f in products(op) or ()]
    for candidate in (resolved(e, first) for e in pairs[0][1:]):
        named = [(op, a, b, resolved(a, op), resolved(b, op)) for op, a, b in pairs]
        others = [(op, b if left == candidate else a) for op, a, b, left, right in named if candidate in (left, right)]
        if len(others) == len(pairs) and len({dims_read(op, e) for op, e in others}) == 1:
            return candidate
    return None


def _ordered(op: Block, shared: str) -> tuple[Expr, ...]:
    """The body with the shared factor first in every product."""

    def put(e: Expr, pair: tuple[Expr, Expr]) -> Expr:
        assert isinstance(e, Call)
        if e.fn == "cast":
            return replace(e, args=(put(e.args[0], pair),))
        return e if resolved(pair[0], op) == shared else replace(e, args=pair[::-1])

    pairs = products(op)
    assert pairs
    return tuple(put(e, p) for e, p in zip(op.body, pairs, strict=True))
