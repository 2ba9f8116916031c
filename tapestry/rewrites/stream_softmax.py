"""A sum weighted by a softmax over the same dimension becomes one pass: max ⋉ (sum of weights, weighted sum)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Let, arg_positions, call, cast, count, distinct, rewrite, walk
from tapestry.ir.graph import Block, Read
from tapestry.ir.index import Aff, dim, dims_of
from tapestry.ir.monoid import MONOIDS, lowest, number, primitive_of
from tapestry.ir.recognise import Exponential, dims_read, exponential, factors
from tapestry.ir.types import FLOATS, Tensor
from tapestry.rewrites.core.edit import (
    constant,
    inline,
    merge_reads,
    nest,
    over,
    same_value,
    substitute_read,
    with_part,
    without_casts,
)
from tapestry.rewrites.core.rule import Draft, Match, OpRule, Refusal, refuse, register

# Softmax weights inside a sum: which factor of its terms is ``exp(score - maximum)``, and what rows without one give.


@dataclass(frozen=True, slots=True)
class Weight:
    """``exp(score - maximum) / total * values / divisors``.

    Attributes:
        weight: the factors that are the softmax's, as written, guards included, over the state (maximum, sum of weights).
        divided: whether the weights are divided by their sum at all.
    """

    weight: Expr
    score: Expr
    divided: bool
    values: tuple[Expr, ...]
    divisors: tuple[Expr, ...]


def as_weight(term: Expr) -> Weight | None:
    """The terms of a sum, written over the state of a softmax (``Acc``), as weighted values; ``None`` if they are not."""
    over, under = _factors(term)
    mine = [e for e in over if _holds_state(e)]
    below = [e for e in under if _holds_state(e)]
    if len(mine) != 1 or len(below) > 1:
        return None
    weight: Expr = call("div", mine[0], below[0]) if below else mine[0]
    core, bottom = _unguarded(weight)
    if not isinstance(core, Call) or core.fn != "exp" or (bottom is not None and not is_state(bottom, 1)):
        return None
    found = _less_maximum(core.args[0])
    if found is None or _holds_state(found[0]) or (found[1] and bottom is not None):
        return None
    values = tuple(e for e in over if not _holds_state(e))
    divisors = tuple(e for e in under if not _holds_state(e))
    return Weight(weight, found[0], found[1] or bottom is not None, values, divisors)


def _holds_state(e: Expr) -> bool:
    return any(isinstance(x, Acc) for x in walk(e))


def _less_maximum(e: Expr) -> tuple[Expr, bool] | None:
    """(the score, whether the logarithm of the sum of weights is subtracted too) of a score less its maximum."""
    if not isinstance(e, Call) or e.fn != "sub":
        return None
    left, right = e.args
    if is_state(right, 0):
        return left, False
    if _is_log_total(right) and isinstance(left, Call) and left.fn == "sub" and is_state(left.args[1], 0):
        return left.args[0], True
    if isinstance(right, Call) and right.fn == "add":
        pair = right.args
        if any(is_state(m, 0) and _is_log_total(s) for m, s in (pair, pair[::-1])):
            return left, True
    return None


def _is_log_total(e: Expr) -> bool:
    return isinstance(e, Call) and e.fn == "log" and is_state(e.args[0], 1)


def _factors(e: Expr) -> tuple[list[Expr], list[Expr]]:
    """Numerators and denominators of a product; only what holds the weights is taken apart."""
    if _holds_state(e):
        e = without_casts(e, FLOATS)  # a narrower type in between would only lose digits
        if isinstance(e, Call) and e.fn in ("mul", "div"):
            (a, b), (c, d) = _factors(e.args[0]), _factors(e.args[1])
            return (a + c, b + d) if e.fn == "mul" else (a + d, b + c)
    return [e], []


def _unguarded(e: Expr) -> tuple[Expr, Expr | None]:
    """(exponential, divisor) of a weight; a guard against NaN around the whole and casts between floats are taken off."""
    e = without_casts(e, FLOATS)
    if isinstance(e, Call) and e.fn == "where":
        test, zero, kept = e.args
        if test == call("isnan", kept) and isinstance(zero, Const) and zero.value == 0:
            e = without_casts(kept, FLOATS)
    if isinstance(e, Call) and e.fn == "div":
        return e.args[0], e.args[1]
    return e, None


def is_state(e: Expr, field: int) -> bool:
    """Whether an expression over a softmax's state is one of its fields, but where the maximum (field 0) is not finite."""
    while isinstance(e, Call) and e.fn == "where" and _never_finite(e.args[0]):
        e = e.args[2]
    return isinstance(e, Acc) and e.field == field


def _never_finite(test: Expr) -> bool:
    """Whether a test holds for no finite maximum: it is infinite, or less itself it is not a number."""
    if not isinstance(test, Call):
        return False
    inner, m = test.args[0], Acc(0, test.args[0].dtype)
    if test.fn == "isnan":
        return inner in (m, call("sub", m, m))
    if test.fn == "eq":
        return inner == m and isinstance(test.args[1], Const) and math.isinf(float(test.args[1].value))
    return test.fn == "isinf" and inner == m


def guarded(w: Weight) -> bool:
    """Whether a guard makes weights 0 that are no numbers: what is left of values that are not finite is then 0 times them."""
    return _row_value(w, math.nan) == 0


def centres(w: Weight, last: int = 1, zeros: Expr | None = None) -> Callable[[Expr], Expr] | None:
    """What rows whose maximum is infinite or NaN give instead of a result; ``None`` when it is no constant.

    The weight is evaluated as it was written. A weight of zero makes the row 0 times its values, whose sum is field ``last``
    of the state where that is above 1; a NaN makes it NaN. Where the state has no sum of the values (for it is NaN in rows
    of NaN), ``zeros`` is 0 times them.
    """
    least, most, none = (_row_value(w, top) for top in (-math.inf, math.inf, math.nan))
    if least is None or most is None or none is None or not _equal_numbers(most, none):
        return None

    def value(of: float, dtype: str) -> Expr:
        # inf - inf rather than a literal: a NaN in the text of a graph is not equal to itself
        return call("sub", Acc(0, dtype), Acc(0, dtype)) if math.isnan(of) else number(of, dtype)

    def special(out: Expr) -> Expr:
        top = Acc(0, out.dtype)
        out = call("where", call("isnan", call("sub", top, top)), zeros or value(none, out.dtype), out)
        if _equal_numbers(least, none):
            return out
        # weights of 0 times values: 0, but NaN where a value is not finite
        row = call("mul", Acc(last, out.dtype), number(0, out.dtype)) if least == 0 and last > 1 else value(least, out.dtype)
        return call("where", call("eq", top, lowest(top.dtype)), row, out)

    return special


WEIGHTS = Exponential("max", 1.0, 1)
"""Sums of ``exp(score - maximum)``, by structure: those of the built-in log-sum-exp."""


def weighted_sums(count: int) -> str:
    """Name of the monoid of so many sums with softmax weights."""
    return next(name for name in MONOIDS if exponential(name) == replace(WEIGHTS, sums=count))


def _equal_numbers(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _row_value(w: Weight, top: float) -> float | None:
    """0 or NaN: the weights of a row with this maximum, one and all; ``None`` when they are something else."""
    out = 0.0
    for score in [top] if top == -math.inf else [top, 0.0, -math.inf]:
        e = with_part(w.weight, w.score, Const(score, w.score.dtype))
        got = constant(rewrite(e, lambda x: Const(1.0 if x.field else top, x.dtype) if isinstance(x, Acc) else x))
        if got is None or (got != 0 and not math.isnan(got)):
            return None
        out += got
    return out


def product_of(over: tuple[Expr, ...], under: tuple[Expr, ...], dtype: str) -> Expr:
    """The product of some factors, divided by others, in one type."""
    out: Expr = number(1, dtype) if not over else cast(over[0], dtype)
    for e in over[1:]:
        out = call("mul", out, cast(e, dtype))
    for e in under:
        out = call("div", out, cast(e, dtype))
    return out


# A contraction that one reduction alone reads becomes an inner reduction of it.


def with_inner(draft: Draft, op: Block, at: int, maker: Block) -> Block | None:
    """The reduction with read number ``at`` computed in place by the contraction behind it.

    ``None`` where it is no contraction, or would be computed more often than it was.
    """
    read = op.reads[at]
    if factors(maker) is None or len(maker.outs) != 1 or maker.splits or maker.inner or read.other is not None:
        return None
    if prod(op.ranges[name] for name in dims_read(op, Arg(at, "f32"))) > draft.tensors[read.tensor].size:
        return None
    return _unscaled(draft, inline(op, at, nest(maker), draft.tensors), len(op.inner))


def _unscaled(draft: Draft, op: Block, k: int) -> Block:
    """Constant factors of the inner product moved out of it, through maps that do nothing but scale what they read.

    ``sum (a q)(b k) = ab sum q k``: keys that were repeated and scaled for each head of a group are read as they are.
    """
    product = op.inner[k].body
    reads, scale = list(op.reads), 1.0
    for e in product.args if isinstance(product, Call) and product.fn == "mul" else ():
        if not isinstance(e, Arg):
            continue
        maker = draft.maker(reads[e.pos].tensor)
        scaling = _scaling(maker) if maker else None
        if maker is None or scaling is None or reads[e.pos].other is not None:
            continue
        if count(op.point, lambda x, pos=e.pos: isinstance(x, Arg) and x.pos == pos) != 1:
            continue
        env = dict(zip((d.name for d in maker.dims), reads[e.pos].index, strict=True))
        reads[e.pos] = substitute_read(scaling[0], env, op.ranges)
        scale *= scaling[1]
    if scale == 1.0:
        return replace(op, reads=tuple(reads))
    out = replace(op, reads=tuple(reads))

    def put(x: Expr) -> Expr:
        return call("mul", x, Const(scale, x.dtype)) if isinstance(x, Let) and x.pos == k else x

    return replace(out, body=tuple(rewrite(e, put) for e in out.body))


def _scaling(op: Block) -> tuple[Read, float] | None:
    """What a map reads and the constant that it multiplies (or divides) it by; ``None`` when it does anything else."""
    if op.monoid or len(op.outs) != 1 or len(op.reads) != 1 or op.splits or op.reads[0].other is not None:
        return None
    e = op.body[0]
    if not isinstance(e, Call) or e.fn not in ("mul", "div") or {type(a) for a in e.args} != {Arg, Const}:
        return None
    value = float(next(a for a in e.args if isinstance(a, Const)).value)
    if e.fn == "div":
        return (op.reads[0], 1.0 / value) if isinstance(e.args[1], Const) and value and e.dtype in FLOATS else None
    return op.reads[0], value


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
        new = [Tensor(name=z.outs[0], dtype=z.body[0].dtype, shape=tuple(d.size for d in z.dims), kind="value") for z in made]
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
    env = dict(zip((d.name for d in rows.dims), row, strict=True)) | {theirs.name: dim(key.name)}
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
    body = (call("mul", values, number(0, dtype)),)
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
    out = special(call("div", weighted, total) if w.divided else weighted)
    if wide.body[0].dtype != dtype:
        return refuse("weights and values are summed in another type than the scores")
    results = dict(zip(rows.outs, rows.then, strict=True))
    then = (rewrite(e, lambda x: out if isinstance(x, Acc) else x) for e in wide.then)
    return replace(
        wide, monoid=weighted_sums(2), body=(w.score, number(1, dtype), product_of(w.values, w.divisors, dtype)),
        then=tuple(_stated(e, wide, results) for e in then), source=tuple(dict.fromkeys(rows.source + wide.source)),
    )  # fmt: skip


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
