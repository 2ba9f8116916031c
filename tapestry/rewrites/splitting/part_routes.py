"""`part_routes`: the matrices of routed products in groups, so that what picks one group's need not meet another's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tapestry.ir.expr import Arg, call, rewrite
from tapestry.ir.graph import Block, Dim, Graph, Read, names_of, placed, with_ops
from tapestry.ir.index import dim, dims_of
from tapestry.ir.recognition.route_groups import in_group
from tapestry.ir.recognition.selection_sum import place_read, routed
from tapestry.rewrites.core.edit import (
    accept,
    block_at,
    cut_refusal,
    fresh,
    fresh_dim,
    merge_reads,
    reindex,
    resized,
    results,
    single_consumer,
    substitute_read,
)
from tapestry.rewrites.core.rule import Move, Refusal, Rule, refuse, register


@register
class PartRoutes(Rule):
    """Give every group of a routed product's matrices results of its own, up to the sum that joins them.

    A row picks a matrix of one group. What becomes of the row, up to the next product by a matrix of the same number, is asked
    for in that group alone: each group goes through the whole chain with its own matrices, and the sum at its end takes each
    row from its group. Groups on a device each are a mixture of experts cut by experts: between its products nothing travels.

    before:
        graph g
        input x: f32[3, 5]
        input w: f32[4, 6, 5]
        input u: f32[4, 2, 6]
        input e: i64[6]
        t: f32[6, 6] = op [i: 6, n: 6 | v: 4 sum]
          reads x[floor((i)/2), m], w[v, n, m], e[i]
          let [m: 5 sum] x * w
          body where(eq(e, index(v)), let0, 0.0)
        h: f32[6, 6] = op [i: 6, n: 6]
          reads t[i, n]
          body max(t, 1.0)
        y: f32[6, 2] = op [i: 6, n: 2 | v: 4 sum]
          reads h[i, m], u[v, n, m], e[i]
          let [m: 6 sum] h * u
          body where(eq(e, index(v)), let0, 0.0)
        z: f32[3, 2] = op [i: 3, n: 2 | k: 2 sum]
          reads y[2*i + k, n]
          body y
        output z
    move: part_routes@t{parts=2}
    after:
        graph g
        input x: f32[3, 5]
        input w: f32[4, 6, 5]
        input u: f32[4, 2, 6]
        input e: i64[6]
        t.parts: f32[2, 6, 6] = op [g: 2, i: 6, n: 6 | v: 2 sum]
          reads x[floor((i)/2), m], w[2*g + v, n, m], e[i]
          let [m: 5 sum] x * w
          body where(eq(e, index(2*g + v)), let0, 0.0)
        h.parts: f32[2, 6, 6] = op [g: 2, i: 6, n: 6]
          reads a0 = t.parts[g, i, n], e[i]
          body where(and(ge(e, index(2*g)), lt(e, index(2*g + 2))), max(a0, 1.0), 0.0)
        y.parts: f32[2, 6, 2] = op [g: 2, i: 6, n: 2 | v: 2 sum]
          reads a0 = h.parts[g, i, m], u[2*g + v, n, m], e[i]
          let [m: 6 sum] a0 * u
          body where(eq(e, index(2*g + v)), let0, 0.0)
        z: f32[3, 2] = op [i: 3, n: 2 | g: 2 sum, k: 2 sum]
          reads a0 = y.parts[g, 2*i + k, n], e[2*i + k]
          body where(and(ge(e, index(2*g)), lt(e, index(2*g + 2))), a0, 0.0)
        output z
    legal when: each result along the chain is read by one operation, at one row for each result; a sum at its end reads rows
    along what it sums; parts of the matrices are equal. Places are places of the matrices, as for `route_products`.
    """

    name = "part_routes"
    phase = "request"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """Every routed product that no other one leads to, in two groups; `sized` gives the number of a mesh axis."""
        yield from self.sized(graph, 2)

    def sized(self, graph: Graph, parts: int) -> Iterator[Move | Refusal]:
        """The same in so many groups."""
        inside = set[str]()
        for op in graph.blocks:
            if op.outs[0] in inside or routed(op) is None:
                continue
            found = _chain(graph, op, parts)
            if not isinstance(found, Refusal):
                inside |= {o.outs[0] for _, o, _ in found}
            yield self.offered(Move(self.name, op.outs[0], (("parts", parts),)), found)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the chain in groups."""
        _, op = block_at(graph, move)
        parts = move.number("parts")
        chain = accept(_chain(graph, op, parts), move)
        ops, new, names = list(graph.ops), list[Block](), dict[str, str]()
        for at, old, place in chain[:-1]:
            names[old.outs[0]] = fresh(graph, f"{old.outs[0]}.parts")
            new.append(_in_groups(old, names, place, op, parts))
            ops[at] = new[-1]
        at, last, place = chain[-1]
        ops[at] = _sum_of_groups(last, names, place, op, parts)
        return with_ops(graph, tuple(ops), results(*new))


def _of_group(op: Block, names: Mapping[str, str], g: str) -> tuple[Read, ...]:
    """The reads of an operation, with what is in groups read in one of them."""
    return tuple(replace(r, tensor=names[r.tensor], index=(dim(g), *r.index)) if r.tensor in names else r for r in op.reads)


def _chain(graph: Graph, op: Block, parts: int) -> list[tuple[int, Block, Read]] | Refusal:
    """Position, operation and place read of what each row goes through, from a routed product to a sum over rows."""
    found = routed(op)
    known = found and place_read(found.wanted, found.over.size)
    if found is None or known is None or found.base.terms or found.base.const or op.splits or len(op.outs) != 1:
        return refuse("no matrix is picked for each row")
    count = found.over.size
    if no := cut_refusal(found.over.name, count, parts):
        return no
    if count % parts:
        return refuse(f"{count} matrices are not {parts} groups of the same size", f"{count % parts} would be left")
    out = [(graph.find(op.outs[0]), op, op.reads[known[0]])]
    while True:
        _, before, place = out[-1]
        tensor = before.outs[0]
        at = single_consumer(graph, tensor)
        nxt = None if at is None else graph.ops[at]
        if at is None or not isinstance(nxt, Block) or nxt.splits or len(nxt.outs) != 1 or place.when:
            return refuse(f"'{tensor}' is not read by one operation alone that goes by rows")
        mine = [r for r in nxt.reads if r.tensor == tensor]
        rows = {substitute_read(place, placed(before.dims, r.index), nxt.ranges) for r in mine}
        if len(rows) != 1 or any(r.when for r in mine):
            return refuse(f"'{nxt.outs[0]}' reads several rows of '{tensor}' at once")
        (row,) = rows
        out.append((at, nxt, row))
        if not {n for e in row.index for n in dims_of(e)} <= names_of(nxt.dims):
            break
    late = any(nxt.reads[k].tensor == tensor for k in nxt.then_reads())
    if nxt.monoid != "sum" or nxt.inner or len(nxt.body) != 1 or late:
        return refuse(f"'{nxt.outs[0]}' is no sum over rows of '{tensor}'")
    return out


def _in_groups(op: Block, names: Mapping[str, str], place: Read, first: Block, parts: int) -> Block:
    """An operation of the chain for each group, at its rows; of a product by the same place, with its matrices."""
    g, found = fresh_dim(op, "g"), routed(op)
    op = replace(op, outs=(names[op.outs[0]],), dims=(Dim(g, parts), *op.dims), reads=_of_group(op, names, g))
    known = found and place_read(found.wanted, found.over.size)
    if found is None or known is None or op.reads[known[0]] != place or found.base.terms:
        return _at_rows(op, g, place, first, parts, late=op.monoid is not None)
    each = found.over.size // parts
    small = resized(op.reduce, found.over.name, each)
    env = {found.over.name: dim(g) * each + dim(found.over.name)}
    return replace(reindex(op, env, (*op.dims, *small)), reduce=small)


def _sum_of_groups(op: Block, names: Mapping[str, str], place: Read, first: Block, parts: int) -> Block:
    """The sum over rows, each of its own group."""
    g = Dim(fresh_dim(op, "g"), parts)
    op = replace(op, reduce=(g, *op.reduce), reads=_of_group(op, names, g.name))
    return _at_rows(op, g.name, place, first, parts, late=False)


def _at_rows(op: Block, g: str, place: Read, first: Block, parts: int, *, late: bool) -> Block:
    """An operation whose body, or what becomes of its state, is 0 at rows of other groups."""
    found = routed(first)
    assert found is not None
    wanted = rewrite(found.wanted, lambda x: replace(x, pos=len(op.reads)) if isinstance(x, Arg) else x)
    each = found.over.size // parts
    (e,) = op.then if late else op.body
    own = (call("where", in_group(wanted, dim(g) * each, each), e, 0),)
    op = replace(op, then=own) if late else replace(op, body=own)
    return merge_reads(replace(op, reads=(*op.reads, place)))
