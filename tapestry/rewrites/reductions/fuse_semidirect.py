"""The semidirect product of monoids as a rule: a reduction of what another one over the same points refers to, in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tapestry.errors import TapestryError
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, call, cast, rewrite
from tapestry.ir.graph import Block, Graph
from tapestry.ir.monoid import number
from tapestry.ir.types import FLOATS
from tapestry.rewrites.core.edit import shift_args
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register
from tapestry.rewrites.reductions import joined_reductions
from tapestry.rewrites.reductions.joined_reductions import Index, Merged, Pair
from tapestry.rewrites.reductions.softmax_pattern import as_weight, centres, is_state, product_of


@register
class FuseNested(Rule):
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

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move or refusal per sum of something that refers to another reduction."""
        index = Index(graph)
        for j in range(len(graph.ops)):
            found = _best(graph, index, j)
            if isinstance(found, Pair):
                yield Move(self.name, graph.ops[j].outs[0])
            elif found:
                yield Refusal(self.name, graph.ops[j].outs[0], found)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Join one reduction with the one that it refers to."""
        at = graph.find(move.at)
        found = _best(graph, Index(graph), at) if at >= 0 else "no such operation"
        if not isinstance(found, Pair):
            raise TapestryError(found or "it refers to no reduction over the same points", where=str(move))
        return joined_reductions.replaced(graph, [found])

    def sweep(self, graph: Graph) -> Graph:
        """All pairs that have no reduction in common, in one pass."""
        index, taken, found = Index(graph), set[int](), list[Pair]()
        for j in range(len(graph.ops)):
            pair = _best(graph, index, j)
            if isinstance(pair, Pair) and not {pair.first, pair.second} & taken:
                found.append(pair)
                taken |= {pair.first, pair.second}
        return joined_reductions.together(graph, found)


def _best(graph: Graph, index: Index, j: int) -> Pair | str:
    """Reduction j with one that its terms refer to; why there is none ("" where nobody would expect one)."""
    b = graph.ops[j]
    if not isinstance(b, Block) or not joined_reductions.reduction(b) or b.monoid != "sum" or len(b.body) != 1:
        return ""
    why = ""
    for i in _referred(graph, index, b):
        found = _match(graph, index, i, j)
        if isinstance(found, Pair):
            return found
        why = why or found
    return why


def _referred(graph: Graph, index: Index, b: Block) -> list[int]:
    """Maxima and sums whose results a body reads, through at most three maps."""
    out: list[int] = []
    tensors, depth = [b.reads[k].tensor for k in sorted(b.body_reads())], 0
    while tensors and depth < 4:
        makers = dict.fromkeys(index.makers[t] for t in tensors if t in index.makers)
        ops = [(i, op) for i in makers if isinstance(op := graph.ops[i], Block)]
        out += [i for i, op in ops if joined_reductions.reduction(op) and op.monoid in ("max", "sum") and i not in out]
        tensors, depth = [t for _, op in ops if not op.monoid for t in op.inputs], depth + 1
    return out


def _match(graph: Graph, index: Index, i: int, j: int) -> Pair | str:
    a, b = graph.ops[i], graph.ops[j]
    assert isinstance(a, Block) and isinstance(b, Block)
    env = joined_reductions.aligned(a, b)
    if env is None or len(a.outs) != 1:
        return ""
    b = joined_reductions.opened(graph, index, b, i)
    mine = {k for k, r in enumerate(b.reads) if r.tensor in a.outs}
    if not mine & b.body_reads():
        return ""
    if not all(joined_reductions.at_rows(b.reads[k], a, env, b) for k in mine):
        return "it reads the other's result of another row"
    first = joined_reductions.moved(a, env, b)
    merged = (_exponentials if a.monoid == "max" else _squares)(graph, a, first, b)
    if isinstance(merged, str):
        return merged
    return joined_reductions.needs(graph, index, b, i, j) or joined_reductions.joined(
        graph, index, (i, j), env, (first, b), merged
    )


def _exponentials(graph: Graph, a: Block, first: Block, b: Block) -> Merged | str:
    """``max ⋉ sum``: exponentials of what is less its maximum, times what does not refer to it."""
    if not is_state(a.then[0], 0):
        return "what is subtracted is not the maximum"
    w = as_weight(rewrite(b.body[0], lambda x: a.then[0] if isinstance(x, Arg) and b.reads[x.pos].tensor in a.outs else x))
    if w is None or w.divided:
        return "its terms are not exponentials of scores less their maximum"
    if joined_reductions.resolved(w.score, b.reads, b) != joined_reductions.resolved(first.body[0], first.reads, b):
        return "the maximum is that of other scores"
    special = centres(w)
    if special is None:
        return "rows without a finite maximum would get another value"
    dtype = first.body[0].dtype
    if dtype not in FLOATS or b.body[0].dtype != dtype:
        return "scores and sum differ in type"
    top, out = Acc(0, dtype), Acc(1, dtype)
    kept: Expr = out
    for test, value in special:
        # inf - inf rather than a literal: a NaN in the text of a graph is not equal to itself
        kept = call("where", test(top), call("sub", top, top) if math.isnan(value) else number(value, dtype), kept)
    weights = rewrite(product_of(w.values, w.divisors, dtype), shift_args(len(first.reads)))
    return Merged(monoid="logsumexp", body=(first.body[0], weights), first=first.then, accs=(kept,))


def _squares(graph: Graph, a: Block, first: Block, b: Block) -> Merged | str:
    """Moments: squares of distances from the mean of the same numbers."""
    dtype = b.body[0].dtype
    x = _distance(b.body[0], b, a)
    if x is None or dtype not in FLOATS:
        return "its terms are not squares of distances from a mean"
    own = _bare(first.body[0])
    if joined_reductions.resolved(_bare(x), b.reads, b) != joined_reductions.resolved(own, first.reads, b):
        return "the mean is that of other numbers"
    mean = _mean(first.then[0], joined_reductions.points(a.reduce), Acc(1, dtype))
    if mean is None:
        return "what it subtracts is not the mean"
    body = (number(1, dtype), cast(own, dtype), number(0, dtype))
    return Merged(monoid="moments", body=body, first=(mean,), accs=(Acc(2, dtype),))


def _distance(e: Expr, b: Block, a: Block) -> Expr | None:
    """x where an expression is ``(x - c) * (x - c)`` or a second power of it, c a result of the other reduction."""
    e = _bare(e)
    if not isinstance(e, Call) or e.fn not in ("mul", "pow"):
        return None
    d, again = _bare(e.args[0]), _bare(e.args[1])
    twice = again == d if e.fn == "mul" else isinstance(again, Const) and again.value == 2
    if not twice or not isinstance(d, Call) or d.fn != "sub":
        return None
    left, right = (_bare(x) for x in d.args)
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


def _bare(e: Expr) -> Expr:
    """An expression without casts between floats around it: a narrower type in between would only lose digits."""
    while isinstance(e, Call) and e.fn == "cast" and e.dtype in FLOATS and e.args[0].dtype in FLOATS:
        e = e.args[0]
    return e
