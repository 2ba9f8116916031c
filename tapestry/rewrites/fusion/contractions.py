"""A contraction is computed inside the reduction that reads it: pools behind convolutions, reductions of logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tapestry.ir.expr import Acc, Arg, Expr, Index, call, cast, rewrite, size, walk
from tapestry.ir.graph import Block, points
from tapestry.ir.index import dim
from tapestry.ir.recognition.contraction import MOST_KEPT, dims_read, factors, folded_roles, kept, products
from tapestry.ir.recognition.running_state import as_scan
from tapestry.ir.types import FLOATS, itemsize
from tapestry.rewrites.core.edit import prune, substitute_read
from tapestry.rewrites.core.inline import inline, nest
from tapestry.rewrites.core.matching import Draft, Match, PairRule
from tapestry.rewrites.core.rule import Refusal, refuse, register
from tapestry.rewrites.inline_map import MOST_NODES


@register
class FuseContraction(PairRule):
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
    nothing = "that is not written by an operation that it reads"

    def partners(self, draft: Draft, at: int) -> Iterable[str]:
        """What a plain reduction reads."""
        op = draft.block(at)
        return op.inputs if op is not None and op.reduce and not op.inner and not _contracts(op) else ()

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """The reduction with the contraction as an inner one."""
        op, maker = draft.block(at), draft.block(other)
        if op is None or maker is None or factors(maker) is None or not set(maker.outs) & set(op.inputs):
            return None
        if no := _refused(draft, op, maker):
            return no
        (tensor,) = maker.outs
        whole = _keeping(op, maker)
        if isinstance(whole, Refusal):
            return refuse(f"'{tensor}' is used again after the reduction: {whole.reason}")
        mine = [k for k, r in enumerate(whole.reads) if r.tensor == tensor]
        if no := _again(whole, maker, mine):
            return no
        new = inline(whole, mine[0], nest(maker), draft.tensors)
        if folded_roles(new) is None:
            return refuse(
                "it leaves too few rows or columns of its factors' own: tiles of it would be no matrices", f"'{tensor}'"
            )
        return Match({at: (new,), other: ()})


def _contracts(op: Block) -> bool:
    """Whether a reduction is a contraction itself; a sum of squares is none."""
    return any(dims_read(op, a) != dims_read(op, b) for a, b in products(op) or ())


def _refused(draft: Draft, op: Block, maker: Block) -> Refusal | None:
    """Why a reduction may not compute a contraction that it reads, whatever it does with it."""
    tensor = maker.outs[0]
    if maker.inner or len(maker.outs) != 1:
        return refuse(f"'{tensor}' is no contraction with one result")
    if not op.monoid or not op.reduce or op.inner or _contracts(op) or as_scan(op):
        return refuse("only a plain reduction computes a contraction itself")
    if op.splits or maker.splits:
        return refuse("an operation that is split already is not fused")
    if draft.only_reader(tensor) is None:
        readers = len(draft.readers_of(tensor))
        elsewhere = f"{readers} operations read it" if readers > 1 else "it is an output of the graph"
        return refuse(f"'{tensor}' is needed elsewhere", elsewhere)
    return None


def _again(op: Block, maker: Block, mine: list[int]) -> Refusal | None:
    """Why the contraction, which reads number ``mine`` are of, would be computed more than once, or be too much of it."""
    (tensor,) = maker.outs
    if len(mine) > 1:
        return refuse(f"'{tensor}' is read through {len(mine)} projections: it would be computed for each")
    nodes = size((*op.point, *maker.then))
    if nodes > MOST_NODES:
        return refuse(f"'{op.outs[0]}' would grow too large", f"it would have {nodes} nodes")
    within, own = dims_read(op, Arg(mine[0], "f32")), kept(op.monoid, op.dims, op.reduce, op.body)
    along = [d for d in op.space if d.size > 1 and d.name not in within and not (own and d == own.column)]
    if along:
        return refuse(
            f"'{tensor}' does not vary along '{along[0].name}': it would be computed for each", f"{points(along)} times"
        )
    return None


def _keeping(op: Block, maker: Block) -> Block | Refusal:
    """The reduction with elements that ``then`` reads again as a state that picks them; why that cannot be.

    The state, which is a sum, is of the widest type of the others: it would round more otherwise, for all that the law sees.
    """
    (tensor,) = maker.outs
    again = [k for k in sorted(op.then_reads()) if op.reads[k].tensor == tensor]
    first = [k for k in sorted(op.body_reads()) if op.reads[k].tensor == tensor]
    over = [d for d in op.reduce if d.size > 1]
    if not again:
        return op
    if len(again) > 1 or len(first) != 1 or len(over) != 1 or not op.monoid:
        return refuse("rows are of one dimension, and elements are read at their own place alone")
    if over[0].size > MOST_KEPT:
        return refuse(f"a row of {over[0].size} is more than a tile holds")
    read = op.reads[first[0]]
    for d in op.dims:
        there = substitute_read(read, {over[0].name: dim(d.name)}, op.ranges)
        if d.size != over[0].size or d.name in dims_read(op, Arg(first[0], "f32")) or there != op.reads[again[0]]:
            continue
        x = next(e for out in op.then for e in walk(out) if isinstance(e, Arg) and e.pos == again[0])
        sums = [e.dtype for e in (*op.body, *maker.body) if e.dtype in FLOATS and x.dtype in FLOATS]
        wide = max([x.dtype, *sums], key=itemsize)
        at = call("eq", Index(dim(over[0].name)), Index(dim(d.name)))
        own = call("where", at, cast(Arg(first[0], x.dtype), wide), 0)
        then = tuple(_picked(e, x, Acc(len(op.body), wide)) for e in op.then)
        return prune(replace(op, monoid=f"{op.monoid}.sum", body=(*op.body, own), then=then))
    return refuse("an element is not read at its own place")


def _picked(e: Expr, x: Arg, own: Acc) -> Expr:
    return rewrite(e, lambda leaf: cast(own, x.dtype) if leaf == x else leaf)
