"""Rows are multiplied by the matrix that each picks, without a copy of that matrix for each row: a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from tapestry.ir.expr import Arg, Index, Let, call, rewrite
from tapestry.ir.graph import Block, Dim, Inner
from tapestry.ir.index import dim
from tapestry.ir.monoid import number
from tapestry.ir.recognise.contraction import dims_read, factors
from tapestry.ir.recognise.selection_sum import place_read, routed, selection
from tapestry.rewrites.core.edit import fresh_dim, merge_reads, shift_args, substitute_expr, substitute_read
from tapestry.rewrites.core.matching import Draft, Match, PairRule
from tapestry.rewrites.core.rule import Refusal, refuse, register


@register
class RouteProducts(PairRule):
    """Multiply rows by the matrix that each picks, and pick the product instead of the matrix.

    A matrix for each row is never written: products go by groups of rows that pick the same one, and the dimension of the
    matrices can be cut over devices, as experts are.

    before:
        graph g
        input x: f32[5, 3]
        input w: f32[4, 6, 3]
        input e: i64[5]
        t: f32[5, 6, 3] = op [x0: 5, x1: 6, x2: 3 | v: 4 sum]
          reads w[v, x1, x2], e[x0]
          body where(eq(e, index(v)), w, 0.0)
        y: f32[5, 6] = op [i: 5, n: 6 | m: 3 sum]
          reads x[i, m], t[i, n, m]
          body x * t
          then max(acc0, 0.0)
        output y
    move: route_products@y{tensor=t}
    after:
        graph g
        input x: f32[5, 3]
        input w: f32[4, 6, 3]
        input e: i64[5]
        y: f32[5, 6] = op [i: 5, n: 6 | v: 4 sum]
          reads x[i, m], w[v, n, m], e[i]
          let [m: 3 sum] x * w
          body where(eq(e, index(v)), let0, 0.0)
          then max(acc0, 0.0)
        output y
    legal when: the product alone reads what is picked, as a factor, and everywhere inside it; which matrix is picked does not
    vary along what the product sums or along its columns. Places are places of the matrices: for one outside, 0 is the result,
    where 0 times an infinite row would be NaN.
    """

    name = "route_products"
    phase = "simplify"
    nothing = "that is no matrix picked for each row of a product"

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """The product of the matrices themselves, of which one is picked."""
        op, maker = draft.block(at), draft.block(other)
        picked = selection(maker) if maker is not None else None
        if op is None or maker is None or picked is None or len(maker.outs) != 1 or op.inner or factors(op) is None:
            return None
        t = maker.outs[0]
        mine = [k for k, r in enumerate(op.reads) if r.tensor == t]
        if maker.lowers or op.splits or maker.splits or picked.shift:
            return refuse(f"'{t}' is more than what is picked, or split already")
        if draft.only_reader(t) is None or len(mine) != 1:
            return refuse(f"'{t}' is needed elsewhere")
        read = op.reads[mine[0]]
        if read.when or mine[0] not in op.body_reads() or mine[0] in op.then_reads():
            return refuse(f"'{t}' is read outside its cells, or after the sum")
        if place_read(picked.wanted, picked.over.size) is None:
            return refuse(f"the place in '{t}' is computed: whether it is one of the matrices' is not known")
        new = _routed(op, maker, mine[0])
        found = routed(new)
        if found is None or not found.of_columns or dims_read(new, found.wanted) & {d.name for d in new.inner_dims}:
            return refuse(f"rows do not pick a matrix each: '{t}' has no columns of its own, or the pick varies along them")
        if not dims_read(new, found.wanted) & dims_read(new, found.rows):
            return refuse("one matrix is picked for several rows alike: look it up first")
        return Match({at: (new,), other: ()})


def _routed(op: Block, maker: Block, k: int) -> Block:
    """The product with what read ``k`` picks inside, and the pick around it."""
    picked = selection(maker)
    assert picked is not None
    over = Dim(fresh_dim(op, picked.over.name), picked.over.size)
    ranges = op.ranges | {over.name: over.size}
    env = dict(zip((d.name for d in maker.dims), op.reads[k].index, strict=True)) | {picked.over.name: dim(over.name)}
    reads = (*op.reads, *(substitute_read(r, env, ranges) for r in maker.reads))
    shift = shift_args(len(op.reads))
    wanted, matrix = (substitute_expr(e, env, ranges, shift) for e in (picked.wanted, picked.picked))
    (body,) = op.body
    product = rewrite(body, lambda x: matrix if isinstance(x, Arg) and x.pos == k else x)
    test = call("eq", wanted, Index(dim(over.name)))
    return merge_reads(replace(
        op, reduce=(over,), monoid="sum", reads=reads, inner=(Inner(dims=op.reduce, monoid="sum", body=product),),
        body=(call("where", test, Let(0, body.dtype), number(0, body.dtype)),),
        source=tuple(dict.fromkeys(maker.source + op.source)),
    ))  # fmt: skip
