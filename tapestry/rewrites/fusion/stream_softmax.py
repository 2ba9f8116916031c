"""A sum weighted by a softmax over the same dimension becomes one pass: max ⋉ (sum of weights, weighted sum)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from tapestry.ir.expr import Acc, Arg, Call, Expr, arg_positions, distinct, number, rewrite
from tapestry.ir.graph import Block, Read, placed, shape_of
from tapestry.ir.index import Aff, dim, dims_of
from tapestry.ir.monoid import primitive_of
from tapestry.ir.recognition.contraction import dims_read
from tapestry.ir.recognition.exponential import exponential
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import merge_reads, over, same_value
from tapestry.rewrites.core.inline import inline
from tapestry.rewrites.core.matching import Draft, Match, OpRule
from tapestry.rewrites.core.rule import Refusal, refuse, register
from tapestry.rewrites.fusion.nest import with_inner
from tapestry.rewrites.fusion.softmax_pattern import WEIGHTS, Weight, as_weight, centres, guarded, product_of, weighted_sums

HALVES = frozenset({"f16", "bf16"})


@register
class StreamSoftmax(OpRule):
    """Fold a softmax into the sum that its probabilities weight, and the contraction that makes the scores into both.

    The sum's terms ``exp(s - m) / l * v`` refer to the result of another reduction over the same dimension, the maximum m.
    Changing m acts on what was summed so far by ``exp(m - m')``, so that scores, weights and values are seen once.

    before:
        graph g
        input q: f32[4, 3]
        input k: f32[5, 3]
        input v: f32[5, 2]
        s: f32[4, 5] = op [i: 4, n: 5 | m: 3 sum]
          reads q[i, m], k[n, m]
          body q * k
          then acc0 * 0.5
        top: f32[4], total: f32[4] = op [i: 4 | n: 5 logsumexp]
          reads s[i, n]
          body s, 1.0
        p: f32[4, 5] = op [i: 4, n: 5]
          reads s[i, n], top[i], total[i]
          body exp((s - top)) / total
        y: f32[4, 2] = op [i: 4, e: 2 | n: 5 sum]
          reads p[i, n], v[n, e]
          body p * v
        output y
    move: stream_softmax@y
    after:
        graph g
        input q: f32[4, 3]
        input k: f32[5, 3]
        input v: f32[5, 2]
        y: f32[4, 2] = op [i: 4, e: 2 | n: 5 softsum]
          reads v[n, e], q[i, m], k[n, m]
          let [m: 3 sum] q * k
          body let0 * 0.5, 1.0, v
          then where(isnan((acc0 - acc0)), (acc0 - acc0), (acc2 / acc1))
        output y
    legal when: maximum, sum of weights and weights are read by this sum alone; all three range over the same scores (by
    projection); rows without a finite maximum keep the value that they had. Where a guard makes their weights 0, that is 0
    times the values, which are summed beside: NaN if one is not finite. Weights that the graph rounds to 16 bits, as it rounds
    their sum, are not rounded: the sum moves by at most u * sum(|weight * value|), u = 2^-11 for f16 and 2^-8 for bf16 (and,
    of f16, by 2^-25 of each value whose weight is below 2^-14).
    """

    name = "stream_softmax"
    phase = "simplify"
    nothing = "no sum that a softmax weights"
    at_once = True

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        """The streamed form of a sum."""
        op = draft.block(at)
        if op is None or primitive_of(op.monoid) != "add" or len(op.reduce) != 1 or op.inner or op.splits:
            return None
        opened = _opened(draft, op, at)
        if opened is None:
            return None
        wide, maps, soft = opened
        rows = draft.block(soft)
        assert rows is not None
        if any(set(draft.readers_of(t)) - {maps, at} or t in draft.outputs for t in rows.outs):
            return refuse("the maximum or the sum of weights is needed elsewhere")
        places = {(r.index, r.other) for r in wide.reads if r.tensor in rows.outs}
        row, other = next(iter(places))
        if len(places) != 1 or other is not None:
            return refuse("maximum and sum of weights are those of different rows")
        results = dict(zip(rows.outs, rows.then, strict=True))
        weight = as_weight(_stated(wide.body[0], wide, results))
        if weight is None:
            return refuse("the weights are not exponentials of scores less their maximum, over their sum")
        if draft.tensors[op.outs[0]].dtype not in HALVES and _rounded(wide.body[0], weight):
            return refuse("the weights are rounded to 16 bits, and their sum is not")
        zeros = _zeros(draft, wide, weight) if guarded(weight) and weight.values else None
        one = _other_scores(wide, weight, rows, row) or _streamed(wide, weight, rows, zeros)
        if isinstance(one, Refusal):
            return one
        one, scores = _with_scores(draft, one, {maps, soft})
        made, gone = (zeros,) if zeros else (), {maps, soft, *scores} - {at}
        new = [Tensor(name=z.outs[0], dtype=z.body[0].dtype, shape=shape_of(z.dims), kind="value") for z in made]
        return Match({at: (*made, one)} | dict.fromkeys(gone, ()), tuple(new))


def _rounded(e: Expr, w: Weight) -> bool:
    """Whether something is rounded to 16 bits in a weighted value, and in no part of it that stays."""
    stays = set(distinct((w.score, *w.values, *w.divisors)))
    return any(isinstance(x, Call) and x.fn == "cast" and x.dtype in HALVES and x not in stays for x in distinct((e,)))


def _stated(e: Expr, wide: Block, results: Mapping[str, Expr]) -> Expr:
    """An expression with results of the softmax's reduction written out, over its state."""
    return rewrite(e, lambda x: results.get(wide.reads[x.pos].tensor, x) if isinstance(x, Arg) else x)


def _opened(draft: Draft, op: Block, at: int) -> tuple[Block, int, int] | None:
    """The sum with the map that makes its weights written out; positions of that map and of the softmax's reduction."""
    for k, r in enumerate(op.reads):
        soft = _softmax_of(draft, r.tensor)
        if soft is not None:  # weights written out already
            return op, at, soft
        maps = draft.maker(r.tensor)
        if maps is None or maps.monoid or len(maps.outs) != 1 or maps.splits or r.other is not None:
            continue
        if draft.only_reader(r.tensor) != at or not _read_once(op, k):
            continue
        for t in maps.inputs:
            soft = _softmax_of(draft, t)
            if soft is not None:
                return inline(op, k, maps, draft.tensors), draft.makers[r.tensor], soft
    return None


def _read_once(op: Block, at: int) -> bool:
    """Whether an operation reads a tensor through one projection only: its maker may then go into the reader."""
    return all(r == op.reads[at] for r in op.reads if r.tensor == op.reads[at].tensor)


def _softmax_of(draft: Draft, tensor: str) -> int | None:
    """Position of the reduction that makes a tensor, if it is a maximum and one sum of weights, and nothing else."""
    op = draft.maker(tensor)
    if op is None or exponential(op.monoid) != WEIGHTS or len(op.reduce) != 1:
        return None
    return None if op.inner or op.splits or arg_positions(op.then) else draft.makers[tensor]


def _other_scores(wide: Block, weight: Weight, rows: Block, row: tuple[Aff, ...]) -> Refusal | None:
    """Why the softmax does not range over the scores that the sum does."""
    key, theirs = wide.reduce[0], rows.reduce[0]
    if any(key.name in dims_of(e) for e in row):
        return refuse("the maximum is read along the dimension of the sum")
    if key.size != theirs.size:
        return refuse("the softmax is over another number of scores than the sum")
    env = placed(rows.dims, row) | {theirs.name: dim(key.name)}
    own = over(rows, env, wide)
    if not same_value(weight.score, wide, own.body[0], own):
        return refuse("the softmax is over other scores than the sum")
    one = rows.body[1]
    return None if one == number(1, one.dtype) else refuse("the sum of weights is weighted itself")


def _zeros(draft: Draft, wide: Block, w: Weight) -> Block:
    """0 times the sum of the values: 0, but NaN where one is not finite."""
    dtype = w.score.dtype
    values = product_of(w.values, w.divisors, dtype)
    dims = tuple(d for d in wide.dims if d.name in dims_read(wide, values))
    name = next(n for k in itertools.count() if (n := f"{wide.outs[0]}.zeros{k or ''}") not in draft.tensors)
    body = (values * 0,)
    return merge_reads(replace(wide, outs=(name,), dims=dims, body=body, then=(Acc(0, dtype),)))


def _streamed(wide: Block, w: Weight, rows: Block, zeros: Block | None) -> Block | Refusal:
    """The one operation: state (maximum, sum of weights, weighted sum), divided at the end."""
    if zeros:
        read = Read(tensor=zeros.outs[0], index=tuple(dim(d.name) for d in zeros.dims))
        wide = replace(wide, reads=(*wide.reads, read))
    special = centres(w, 2, Arg(len(wide.reads) - 1, w.score.dtype) if zeros else None)
    if special is None:
        return refuse("rows without a finite maximum would get another value")
    dtype = w.score.dtype
    total, weighted = Acc(1, dtype), Acc(2, dtype)
    out = special(weighted / total if w.divided else weighted)
    if wide.body[0].dtype != dtype:
        return refuse("weights and values are summed in another type than the scores")
    results = dict(zip(rows.outs, rows.then, strict=True))
    then = (rewrite(e, lambda x: out if isinstance(x, Acc) else x) for e in wide.then)
    return replace(
        wide,
        monoid=weighted_sums(2),
        body=(w.score, number(1, dtype), product_of(w.values, w.divisors, dtype)),
        then=tuple(_stated(e, wide, results) for e in then),
        source=tuple(dict.fromkeys(rows.source + wide.source)),
    )


def _with_scores(draft: Draft, op: Block, users: set[int]) -> tuple[Block, frozenset[int]]:
    """The contraction that makes the scores becomes an inner reduction, where the softmax alone reads it."""
    op = merge_reads(op)
    for k, r in enumerate(op.reads):
        maker = draft.maker(r.tensor)
        alone = set(draft.readers_of(r.tensor)) <= users and r.tensor not in draft.outputs and _read_once(op, k)
        if maker is None or not alone or op.reduce[0].name not in dims_read(op, Arg(k, op.body[0].dtype)):
            continue
        new = with_inner(draft, op, k, maker)
        if new is not None:
            return new, frozenset((draft.makers[r.tensor],))
    return op, frozenset()
