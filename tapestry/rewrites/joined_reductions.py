"""Two reductions over the same points as one operation: how they correspond, what both read, what becomes of their results.

Which monoid the one operation has is the rules' business (`fuse_nested`, `fuse_product`); here is all that they share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, cast, rewrite
from tapestry.ir.graph import Block, Op, Read
from tapestry.ir.index import Aff, const, dim, substitute
from tapestry.ir.monoid import MONOIDS, Moments, number, primitive_of
from tapestry.ir.recognise import factors
from tapestry.ir.states import as_scan
from tapestry.ir.types import FLOATS, Tensor
from tapestry.rewrites.core.edit import (
    inline,
    merge_reads,
    over,
    points,
    read_dims,
    same_value,
    shift_args,
    unused,
    without_casts,
    without_units,
)
from tapestry.rewrites.core.rule import Draft, Match, OpRule, Refusal, refuse, register
from tapestry.rewrites.stream_softmax import as_weight, centres, is_state, product_of, weighted_sums

Env = Mapping[str, Aff]
MOST_VISITED = 256  # operations looked at to tell whether one reduction needs another


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The state of the one operation, and the results of both in terms of it.

    Attributes:
        body: the lifted fields, over the reads of the first (moved) and then those of the second.
        first: ``then`` of the first, over the new state and its own reads (moved).
        accs: what the fields of the second are in the new state.
    """

    monoid: str
    body: tuple[Expr, ...]
    first: tuple[Expr, ...]
    accs: tuple[Expr, ...]


def reduction(op: Op) -> bool:
    """Whether an operation is a reduction that may be joined to another one at all."""
    without_units = isinstance(op, Block) and bool(op.reduce) and op.monoid is not None and not op.inner and not op.splits
    return without_units and as_scan(op) is None and all(d.size for d in op.space)


def aligned(a: Block, b: Block) -> dict[str, Aff] | None:
    """The dimensions of one reduction as those of another, in order and by size; ``None`` where they differ. Those of size 1
    do not matter."""
    env: dict[str, Aff] = {}
    for mine, theirs in ((a.dims, b.dims), (a.reduce, b.reduce)):
        if [d.size for d in mine] == [d.size for d in theirs]:
            env |= {d.name: dim(o.name) for d, o in zip(mine, theirs, strict=True)}
            continue
        wide = [d for d in theirs if d.size > 1]
        if [d.size for d in mine if d.size > 1] != [d.size for d in wide]:
            return None
        env |= {d.name: const(0) for d in mine if d.size == 1}
        env |= {d.name: dim(o.name) for d, o in zip((d for d in mine if d.size > 1), wide, strict=True)}
    return env


@lru_cache(maxsize=1 << 12)
def swept(op: Block) -> frozenset[Read]:
    """What the body reads along the reduced dimensions."""
    along = {d.name for d in op.reduce if d.size > 1}
    reads = (without_units(op.reads[k], op) for k in op.body_reads())
    return frozenset(r for r in reads if along & read_dims(r))


def unlike(a: Block, b: Block) -> Refusal | None:
    """Why two reductions, the first in the dimensions of the second, do not go once over the same input."""
    mine, theirs = swept(a), swept(b)
    if not (mine <= theirs or theirs <= mine) or not mine & theirs:
        return refuse("they go over different inputs")
    space = {d.name for d in b.space if d.size > 1}
    if not any(space <= read_dims(r) for r in mine & theirs):
        return refuse("what both read is used in several rows")
    for pair in (factors(a), factors(b)):
        if pair is not None and {type(e) for e in pair} == {Arg} and pair[0] != pair[1]:
            return refuse("one of them is a contraction")
    return None


def opened(draft: Draft, op: Block, first: Block) -> Block:
    """The reduction with the maps written out that stand between it and the results of an earlier one."""
    for _ in range(4):
        for k in sorted(op.body_reads()):
            maker = draft.maker(op.reads[k].tensor)
            if maker is None or maker.monoid or len(maker.outs) != 1 or maker.splits:
                continue
            if op.reads[k].other is None and (set(maker.inputs) & set(first.outs) or _between(draft, maker, first)):
                op = inline(op, k, maker, draft.tensors)
                break
        else:
            return op
    return op


def _between(draft: Draft, maker: Block, first: Block) -> bool:
    """Whether a map reads another map that reads what an earlier reduction makes."""
    behind = (draft.maker(t) for t in maker.inputs)
    return any(m is not None and not m.monoid and bool(set(first.outs) & set(m.inputs)) for m in behind)


def needs(draft: Draft, op: Block, first: int, second: int) -> Refusal | None:
    """Why an operation at ``second`` cannot run together with the one at ``first``: what it reads is made from what the first
    makes."""
    one = draft.block(first)
    inputs = set(op.inputs)
    queue = [i for t in (one.outs if one else ()) for i in draft.readers_of(t) if i < second]
    seen = set(queue)
    while queue:
        if len(seen) > MOST_VISITED:
            return refuse("too much depends on the first one to tell whether the second does")
        reader = draft.op(queue.pop())
        for t in reader.outs if reader else ():
            if t in inputs:
                return refuse(f"'{t}', made from the result of the first, is read by the second")
            more = [i for i in draft.readers_of(t) if i < second and i not in seen]
            seen |= set(more)
            queue += more
    return None


def joined(draft: Draft, at: tuple[int, int], env: Env, parts: tuple[Block, Block], merged: Merged) -> Match:
    """The one operation in place of the second; ``parts`` are the first (in the second's dimensions) and the second (maps
    written out)."""
    a, b = parts
    old = draft.block(at[0])
    assert old is not None
    needed = [k for k, t in enumerate(old.outs) if t in draft.outputs or set(draft.readers_of(t)) - {at[1]}]
    op = merge_reads(side_by_side(a, b, merged, needed))
    shape, sizes = tuple(d.size for d in b.dims), tuple(d.size for d in old.dims)
    if sizes == shape:
        return Match({at[0]: (), at[1]: (op,)})
    back = {str(e): d.name for d in old.dims if (e := env[d.name]).terms}
    index = tuple(dim(back[d.name]) if d.name in back else const(0) for d in b.dims)
    views, tensors = list[Block](), list[Tensor]()
    for k in needed:
        view, tensor = reshaped(draft, old.outs[k], old, index, shape)
        views.append(view)
        tensors.append(tensor)
    op = replace(op, outs=(*(t.name for t in tensors), *b.outs))
    return Match({at[0]: (), at[1]: (op, *views)}, tuple(tensors))


def side_by_side(a: Block, b: Block, merged: Merged, needed: Sequence[int]) -> Block:
    """Two reductions over the same dimensions as one, with those results of the first that are ``needed``; what the second
    does after its reduction may refer to results of the first."""
    shift, results = shift_args(len(a.reads)), dict(zip(a.outs, merged.first, strict=True))

    def after(x: Expr) -> Expr:
        if isinstance(x, Acc):
            return merged.accs[x.field]
        return results[t] if isinstance(x, Arg) and (t := b.reads[x.pos].tensor) in results else shift(x)

    return replace(
        b, outs=(*(a.outs[k] for k in needed), *b.outs), monoid=merged.monoid, reads=a.reads + b.reads, body=merged.body,
        then=(*(merged.first[k] for k in needed), *(rewrite(e, after) for e in b.then)),
        source=tuple(dict.fromkeys(a.source + b.source)),
    )  # fmt: skip


def reshaped(draft: Draft, out: str, op: Block, index: tuple[Aff, ...], shape: tuple[int, ...]) -> tuple[Block, Tensor]:
    """A view that gives a result its own shape, that of ``op``, when it is computed in another one, and the new tensor."""
    tensor = replace(draft.tensors[out], name=unused(f"{out}.rows", draft.tensors), shape=shape, kind="value")
    read = Read(tensor=tensor.name, index=index)
    return Block(outs=(out,), dims=op.dims, reads=(read,), body=(Arg(0, tensor.dtype),), source=op.source), tensor


def at_rows(read: Read, a: Block, env: Env, b: Block) -> bool:
    """Whether a read of a result of the first is of the row that the second is at."""
    one = {d.name: const(0) for d in b.space if d.size == 1}
    want = tuple(substitute(env[d.name], one, b.ranges) for d in a.dims)
    return without_units(read, b).index == want and read.other is None


# The semidirect product of monoids as a rule: a reduction of what another one over the same points refers to, in one pass.


@register
class FuseNested(OpRule):
    """One pass for a reduction and a later one whose terms refer to its result, where moving that result acts on the later sum.

    Exponentials less a maximum: ``max ⋉ sum`` with the action ``exp(old - new)`` is log-sum-exp. Squares of distances from a
    mean: the merge of moments (Chan, Golub and LeVeque 1979). So softmax, log-softmax, cross-entropy and layer norms that an
    exporter took apart become what they were, whatever their operators were called.

    before:
        graph g
        input x: f32[4, 6]
        top: f32[4] = op [i: 4 | n: 6 max]
          reads x[i, n]
          body x
        y: f32[4] = op [i: 4 | n: 6 sum]
          reads x[i, n], top[i]
          body exp((x - top))
          then log(acc0) + top
        output y
    move: fuse_nested@y
    after:
        graph g
        input x: f32[4, 6]
        y: f32[4] = op [i: 4 | n: 6 logsumexp]
          reads x[i, n]
          body x, 1.0
          then log(where(isnan((acc0 - acc0)), (acc0 - acc0), acc1)) + acc0
        output y
    legal when: the second reduction keeps the rows of the first and goes over the same dimensions; its terms are those of a
    known action: ``exp(x - m) * v`` for the maximum m of x, or ``(x - c)²`` for the mean c of x, x being equal by projection;
    rows without a finite maximum keep the value that they had.
    """

    name = "fuse_nested"
    phase = "simplify"
    nothing = "it refers to no reduction over the same points"
    at_once = live = True

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        """A sum with the first reduction that its terms refer to and that it can be joined with."""
        b, no = draft.block(at), None
        if b is None or not reduction(b) or primitive_of(b.monoid) != "add":
            return None
        for i in _referred(draft, b):
            result = _joined(draft, i, at, b)
            if isinstance(result, Match):
                return result
            no = no or result
        return no


def _referred(draft: Draft, b: Block) -> list[int]:
    """Maxima and sums whose results a body reads, through at most three maps."""
    out: list[int] = []
    tensors, depth = [b.reads[k].tensor for k in sorted(b.body_reads())], 0
    while tensors and depth < 4:
        makers = dict.fromkeys(draft.makers[t] for t in tensors if t in draft.makers)
        ops = [(i, op) for i in makers if (op := draft.block(i)) is not None]
        centres = [i for i, op in ops if reduction(op) and primitive_of(op.monoid) in ("max", "add")]
        out += [i for i in centres if i not in out]
        tensors, depth = [t for _, op in ops if not op.monoid for t in op.inputs], depth + 1
    return out


def _joined(draft: Draft, i: int, at: int, b: Block) -> Match | Refusal | None:
    a = draft.block(i)
    env = aligned(a, b) if a is not None else None
    if a is None or env is None or len(a.outs) != 1:
        return None
    b = opened(draft, b, a)
    mine = {k for k, r in enumerate(b.reads) if r.tensor in a.outs}
    if not mine & b.body_reads():
        return None
    if not all(at_rows(b.reads[k], a, env, b) for k in mine):
        return refuse("it reads the other's result of another row")
    first = over(a, env, b)
    merged = _exponentials(first, b) if primitive_of(a.monoid) == "max" else _squares(first, b)
    if isinstance(merged, Refusal):
        return merged
    return needs(draft, b, i, at) or joined(draft, (i, at), env, (first, b), merged)


def _exponentials(a: Block, b: Block) -> Merged | Refusal:
    """``max ⋉ sum``: exponentials of what is less its maximum, times what does not refer to it."""
    if not is_state(a.then[0], 0):
        return refuse("what is subtracted is not the maximum")
    w = as_weight(rewrite(b.body[0], lambda x: a.then[0] if isinstance(x, Arg) and b.reads[x.pos].tensor in a.outs else x))
    if w is None or w.divided:
        return refuse("its terms are not exponentials of scores less their maximum")
    if not same_value(w.score, b, a.body[0], a):
        return refuse("the maximum is that of other scores")
    special = centres(w)
    if special is None:
        return refuse("rows without a finite maximum would get another value")
    dtype = a.body[0].dtype
    if dtype not in FLOATS or b.body[0].dtype != dtype:
        return refuse("scores and sum differ in type")
    weights = rewrite(product_of(w.values, w.divisors, dtype), shift_args(len(a.reads)))
    return Merged(monoid=weighted_sums(1), body=(a.body[0], weights), first=a.then, accs=(special(Acc(1, dtype)),))


def _squares(a: Block, b: Block) -> Merged | Refusal:
    """Moments: squares of distances from the mean of the same numbers."""
    if points(a.reduce) == 1:  # the moments of one number are 0 about it, and a NaN less itself is none
        return refuse("the mean is of one number alone")
    dtype = b.body[0].dtype
    x = _distance(b.body[0], b, a)
    if x is None or dtype not in FLOATS:
        return refuse("its terms are not squares of distances from a mean")
    own = without_casts(a.body[0], FLOATS)
    if not same_value(without_casts(x, FLOATS), b, own, a):
        return refuse("the mean is that of other numbers")
    mean = _mean(a.then[0], points(a.reduce), Acc(1, dtype))
    if mean is None:
        return refuse("what it subtracts is not the mean")
    moments = next(name for name, m in MONOIDS.items() if isinstance(m.structure, Moments))
    body = (number(1, dtype), cast(own, dtype), number(0, dtype))
    return Merged(monoid=moments, body=body, first=(mean,), accs=(Acc(2, dtype),))


def _distance(e: Expr, b: Block, a: Block) -> Expr | None:
    """x where an expression is ``(x - c) * (x - c)`` or a second power of it, c a result of the other reduction."""
    e = without_casts(e, FLOATS)
    if not isinstance(e, Call) or e.fn not in ("mul", "pow"):
        return None
    d, again = without_casts(e.args[0], FLOATS), without_casts(e.args[1], FLOATS)
    twice = again == d if e.fn == "mul" else isinstance(again, Const) and again.value == 2
    if not twice or not isinstance(d, Call) or d.fn != "sub":
        return None
    left, right = (without_casts(x, FLOATS) for x in d.args)
    for centre, x in ((right, d.args[0]), (left, d.args[1])):
        if isinstance(centre, Arg) and b.reads[centre.pos].tensor in a.outs:
            return x
    return None


def _mean(then: Expr, count: int, mean: Expr) -> Expr | None:
    """What follows a sum, with the mean of a state in place of the sum divided by the number of its terms."""
    if isinstance(then, Call) and then.fn == "cast":
        inside = _mean(then.args[0], count, mean)
        return None if inside is None else cast(inside, then.dtype)
    if not isinstance(then, Call) or then.fn not in ("div", "mul"):
        return None
    acc, by = then.args if isinstance(then.args[0], Acc) else then.args[::-1]
    if not isinstance(acc, Acc) or not isinstance(by, Const) or (then.fn == "div" and then.args[0] != acc):
        return None
    right = by.value == count if then.fn == "div" else abs(float(by.value) * count - 1) < 1e-6
    return cast(mean, then.dtype) if right else None
