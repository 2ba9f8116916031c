"""The semidirect product of monoids as a rule: a reduction of what another one over the same points refers to, in one pass."""

from __future__ import annotations

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, cast, number, rewrite
from tapestry.ir.graph import Block, points
from tapestry.ir.monoid import MONOIDS, Moments, primitive_of
from tapestry.ir.types import FLOATS
from tapestry.rewrites.core.edit import over, same_value, shift_args, without_casts
from tapestry.rewrites.core.matching import Draft, Match, OpRule
from tapestry.rewrites.core.rule import Refusal, refuse, register
from tapestry.rewrites.fusion.joined_reductions import Merged, aligned, at_rows, joined, needs, opened, reduction
from tapestry.rewrites.fusion.softmax_pattern import as_weight, centres, is_state, product_of, weighted_sums


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
