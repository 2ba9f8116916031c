"""A contraction is computed inside the reduction that reads it: pools behind convolutions, reductions of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

from tapestry.errors import TapestryError
from tapestry.ir.expr import Acc, Arg, Expr, Index, Let, call, rewrite, walk
from tapestry.ir.graph import Block, Dim, Graph, Inner, Op, with_ops
from tapestry.ir.index import Aff, dim
from tapestry.ir.monoid import number
from tapestry.ir.recognise.contraction import MOST_KEPT, dims_read, factors, folded_roles, kept, products
from tapestry.ir.recognise.running_state import as_scan
from tapestry.rewrites.core.edit import block_at, merge_reads, prune, shift_args, substitute_expr, substitute_read
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register
from tapestry.rewrites.maps.inline_map import MOST_NODES, written_out

Accept = Callable[[Block, Block, Block], bool]
"""Whether a contraction and its reader are worth replacing by a reader that computes it itself."""


@register
class FuseContraction(Rule):
    """Compute a contraction, with all that follows it, inside the one reduction that reads it: its result is never written.

    The product becomes an inner reduction, which kernels compute tile by tile. Where windows of the reduction overlap it is
    computed again for each of them, so it is a choice. What the reader finds outside the contraction's cells, such as the minus
    infinity around a maximum pool, stays what it is.

    before:
        graph g
        input x: f32[6, 9]
        input w: f32[9, 5]
        input c: f32[5]
        t: f32[6, 5] = op [i: 6, n: 5 | m: 9 sum]
          reads x[i, m], w[m, n], c[n]
          body x * w
          then max((acc0 + c), 0.0)
        y: f32[3, 5] = op [x0: 3, x1: 5 | r: 3 max]
          reads t[2*x0 + r - 1, x1] else -inf
          body t
        output y
    move: fuse_contraction@y{tensor=t}
    after:
        graph g
        input x: f32[6, 9]
        input w: f32[9, 5]
        input c: f32[5]
        y: f32[3, 5] = op [x0: 3, x1: 5 | r: 3 max]
          reads x[r + 2*x0 - 1, m] when r + 2*x0 - 1 >= 0 else 0.0, w[m, x1], c[x1]
          let [m: 9 sum] x * w
          body where(ge(index(r + 2*x0 - 1), 0), max((let0 + c), 0.0), f32(-inf))
        output y
    legal when: one reduction alone reads the contraction, before it reduces, through one projection that uses all of its
    dimensions; both factors keep dimensions of their own, so that tiles of the product are matrices. A norm, which reads
    elements of the row again, keeps them as the sum that picks the row's own: rows of up to 256 columns, as they fit a tile.
    """

    name = "fuse_contraction"
    phase = "fusion"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move or refusal per reduction and contraction that it reads."""
        makers, readers = graph.producers(), graph.consumers()
        for op in graph.ops:
            if not isinstance(op, Block) or not op.reduce or op.inner or _contracts(op):
                continue
            for t in op.inputs:
                maker = graph.ops[makers[t]] if t in makers else None
                if isinstance(maker, Block) and factors(maker):
                    reason, witness = refuse(graph, op, maker, t, len(readers[t]))
                    move = Move(self.name, op.outs[0], (("tensor", t),))
                    yield Refusal(self.name, op.outs[0], reason, witness) if reason else move

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Compute one contraction in its reader."""
        tensor = move.text("tensor")
        at, op = block_at(graph, move)
        made = graph.producers().get(tensor, -1)
        readers = graph.consumers().get(tensor, [])
        if made < 0 or at not in readers:
            raise TapestryError(f"'{tensor}' is not written by an operation that it reads", where=str(move))
        reason, witness = refuse(graph, op, graph.ops[made], tensor, len(readers))
        if reason:
            raise TapestryError(reason, where=str(move), why=witness)
        maker = graph.ops[made]
        assert isinstance(maker, Block)
        new = contracted(graph, op, maker, tensor)
        return with_ops(graph, tuple(new if i == at else o for i, o in enumerate(graph.ops) if i != made))

    def choose(self, graph: Graph, accept: Accept) -> tuple[Graph, list[Move]]:
        """Every one that is worth it, in one pass."""
        makers, readers = graph.producers(), graph.consumers()
        ops: list[Op | None] = list(graph.ops)
        moves: list[Move] = []
        for j, op in enumerate(graph.ops):
            if not isinstance(op, Block) or not op.reduce or op.inner or _contracts(op):
                continue
            for t in op.inputs:
                maker = ops[makers[t]] if t in makers else None
                if not isinstance(maker, Block) or refuse(graph, op, maker, t, len(readers[t]))[0]:
                    continue
                new = contracted(graph, op, maker, t)
                if accept(maker, op, new):
                    ops[j], ops[makers[t]] = new, None
                    moves.append(Move(self.name, op.outs[0], (("tensor", t),)))
                    break
        return with_ops(graph, tuple(o for o in ops if o is not None)), moves


def _contracts(op: Block) -> bool:
    """Whether a reduction is a contraction itself; a sum of squares is none."""
    return any(dims_read(op, a) != dims_read(op, b) for a, b in products(op) or ())


def refuse(graph: Graph, op: Block, maker: Op, tensor: str, readers: int) -> tuple[str, str]:
    """Why a reduction may not compute a contraction that it reads ("" when it may), and a witness."""
    if not isinstance(maker, Block) or factors(maker) is None or maker.inner or len(maker.outs) != 1:
        return f"'{tensor}' is no contraction with one result", ""
    if not op.monoid or not op.reduce or op.inner or _contracts(op) or as_scan(op):
        return "only a plain reduction computes a contraction itself", ""
    if op.splits or maker.splits:
        return "an operation that is split already is not fused", ""
    if readers > 1 or tensor in graph.outputs:
        elsewhere = f"{readers} operations read it" if readers > 1 else "it is an output of the graph"
        return f"'{tensor}' is needed elsewhere", elsewhere
    row = keeping(op, tensor)
    if isinstance(row, str):
        return f"'{tensor}' is used again after the reduction: {row}", ""
    op = row
    mine = [k for k, r in enumerate(op.reads) if r.tensor == tensor]
    if len(mine) > 1:
        return f"'{tensor}' is read through {len(mine)} projections: it would be computed for each", ""
    nodes = sum(1 for e in (*op.point, *maker.then) for _ in walk(e))
    if nodes > MOST_NODES:
        return f"'{op.outs[0]}' would grow too large", f"it would have {nodes} nodes"
    within, own = dims_read(op, Arg(mine[0], "f32")), kept(op.monoid, op.dims, op.reduce, op.body)
    along = [d.name for d in op.space if d.size > 1 and d.name not in within and not (own and d == own.column)]
    if along:
        ratio = prod(op.ranges[n] for n in along)
        return f"'{tensor}' does not vary along '{along[0]}': it would be computed for each", f"{ratio} times"
    if folded_roles(contracted(graph, op, maker, tensor)) is None:
        return "it leaves too few rows or columns of its factors' own: tiles of it would be no matrices", f"'{tensor}'"
    return "", ""


def keeping(op: Block, tensor: str) -> Block | str:
    """The reduction with elements that ``then`` reads again as a state that picks them; why that cannot be."""
    again = [k for k in sorted(op.then_reads()) if op.reads[k].tensor == tensor]
    first = [k for k in sorted(op.body_reads()) if op.reads[k].tensor == tensor]
    over = [d for d in op.reduce if d.size > 1]
    if not again:
        return op
    if len(again) > 1 or len(first) != 1 or len(over) != 1 or not op.monoid:
        return "rows are of one dimension, and elements are read at their own place alone"
    if over[0].size > MOST_KEPT:
        return f"a row of {over[0].size} is more than a tile holds"
    read = op.reads[first[0]]
    for d in op.dims:
        there = substitute_read(read, {over[0].name: dim(d.name)}, op.ranges)
        if d.size != over[0].size or d.name in dims_read(op, Arg(first[0], "f32")) or there != op.reads[again[0]]:
            continue
        x = next(e for out in op.then for e in walk(out) if isinstance(e, Arg) and e.pos == again[0])
        own = call(
            "where", call("eq", Index(dim(over[0].name)), Index(dim(d.name))), Arg(first[0], x.dtype), number(0, x.dtype)
        )
        wide = replace(
            op, monoid=f"{op.monoid}.sum", body=(*op.body, own), then=tuple(_picked(e, x, len(op.body)) for e in op.then)
        )
        return prune(wide)
    return "an element is not read at its own place"


def _picked(e: Expr, x: Arg, field: int) -> Expr:
    return rewrite(e, lambda leaf: Acc(field, x.dtype) if leaf == x else leaf)


def contracted(graph: Graph, op: Block, maker: Block, tensor: str) -> Block:
    """The reduction with the contraction behind ``tensor`` as an inner reduction."""
    row = keeping(op, tensor)
    op = op if isinstance(row, str) else row
    k = next(k for k, r in enumerate(op.reads) if r.tensor == tensor)
    taken, inner, rename = {d.name for d in (*op.space, *maker.dims)}, list[Dim](), dict[str, Aff]()
    for d in maker.reduce:
        name = d.name
        while name in taken:
            name += "_"
        taken.add(name)
        inner.append(Dim(name, d.size))
        rename[d.name] = dim(name)
    ranges = {d.name: d.size for d in (*maker.dims, *inner)}
    reads = tuple(substitute_read(r, rename, ranges) for r in maker.reads)
    env = dict(zip((d.name for d in maker.dims), op.reads[k].index, strict=True)) | rename
    number = len(op.inner)
    after: Callable[[Expr], Expr] = lambda x: Let(number, x.dtype) if isinstance(x, Acc) else x  # noqa: E731
    product = substitute_expr(maker.body[0], env, op.ranges | ranges, shift_args(len(op.reads)))
    wide = replace(op, inner=(*op.inner, Inner(dims=tuple(inner), monoid="sum", body=product)))
    body = (rewrite(maker.then[0], after),)
    map_of = replace(maker, reduce=(), monoid=None, reads=reads, body=body, then=())
    new = written_out(graph, wide, map_of, k)
    return merge_reads(replace(new, source=tuple(dict.fromkeys(maker.source + op.source))))
