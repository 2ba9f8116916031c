"""The product of monoids as a rule: two reductions over the same points of the same input in one pass."""

from __future__ import annotations

from collections.abc import Iterator

from tapestry.errors import TapestryError
from tapestry.ir.expr import Acc, Expr, rewrite
from tapestry.ir.graph import Block, Graph
from tapestry.rewrites.core.edit import shift_args
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register
from tapestry.rewrites.reductions import joined_reductions
from tapestry.rewrites.reductions.joined_reductions import Index, Merged, Pair


@register
class FuseProduct(Rule):
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

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move or refusal per reduction and the one before it over an input of the same name."""
        index = Index(graph)
        for i, j in _candidates(graph):
            found = match(graph, index, i, j)
            at, params = graph.ops[j].outs[0], (("with", graph.ops[i].outs[0]),)
            yield Refusal(self.name, at, found) if isinstance(found, str) else Move(self.name, at, params)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Join two reductions."""
        i, j = graph.find(move.text("with")), graph.find(move.at)
        if not 0 <= i < j:
            raise TapestryError("no such two reductions, the first one before the second", where=str(move))
        found = match(graph, Index(graph), i, j)
        if isinstance(found, str):
            raise TapestryError(found, where=str(move))
        return joined_reductions.replaced(graph, [found])

    def sweep(self, graph: Graph) -> Graph:
        """All pairs that have no reduction in common, in one pass."""
        index, taken, found = Index(graph), set[int](), list[Pair]()
        for i, j in _candidates(graph):
            pair = match(graph, index, i, j) if not {i, j} & taken else ""
            if isinstance(pair, Pair):
                found.append(pair)
                taken |= {i, j}
        return joined_reductions.together(graph, found)


def _candidates(graph: Graph) -> Iterator[tuple[int, int]]:
    """Reductions, each with the one before it that goes over a tensor of the same name."""
    last: dict[str, int] = {}
    for j, op in enumerate(graph.ops):
        if not isinstance(op, Block) or not joined_reductions.reduction(op):
            continue
        tensors = sorted({r.tensor for r in joined_reductions.swept(op)})
        before = sorted({last[t] for t in tensors if t in last}, reverse=True)
        yield from ((i, j) for i in before)
        last |= dict.fromkeys(tensors, j)


def match(graph: Graph, index: Index, i: int, j: int) -> Pair | str:
    """Reductions i and j as one; why they cannot be."""
    a, b = graph.ops[i], graph.ops[j]
    if (
        not isinstance(a, Block)
        or not isinstance(b, Block)
        or not joined_reductions.reduction(a)
        or not joined_reductions.reduction(b)
    ):
        return "only reductions that are not split, not running and have no inner ones are joined"
    env = joined_reductions.aligned(a, b)
    if env is None:
        return "they reduce or keep dimensions of different sizes"
    first = joined_reductions.moved(a, env, b)
    why = joined_reductions.unlike(first, b)
    if why:
        return why
    mine = {k for k, r in enumerate(b.reads) if r.tensor in a.outs}
    if mine & b.body_reads():
        return "the second reduces what the first makes"
    if not all(joined_reductions.at_rows(b.reads[k], a, env, b) for k in mine):
        return "the second reads the first's result of another row"
    if a.lowers is False and b.lowers is False and {d.size for d in a.dims} != {d.size for d in b.dims} and len(a.body) > 1:
        return "states that are results themselves keep their shape"
    return joined_reductions.needs(graph, index, b, i, j) or joined_reductions.joined(
        graph, index, (i, j), env, (first, b), _product(first, b)
    )


def _product(a: Block, b: Block) -> Merged:
    """The two states side by side; one of them where they are the same."""
    shift, n = shift_args(len(a.reads)), len(a.body)
    body = tuple(rewrite(e, shift) for e in b.body)
    if a.monoid == b.monoid and all(
        joined_reductions.resolved(x, a.reads, b) == joined_reductions.resolved(y, b.reads, b)
        for x, y in zip(a.body, b.body, strict=True)
    ):
        accs: tuple[Expr, ...] = tuple(Acc(k, e.dtype) for k, e in enumerate(b.body))
        return Merged(monoid=a.monoid or "", body=a.body, first=a.then, accs=accs)
    accs = tuple(Acc(n + k, e.dtype) for k, e in enumerate(b.body))
    return Merged(monoid=f"{a.monoid}.{b.monoid}", body=a.body + body, first=a.then, accs=accs)
