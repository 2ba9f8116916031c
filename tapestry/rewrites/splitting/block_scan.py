"""`block_scan`: a running state as one per block, started with the merged states of the blocks before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.ir.expr import Acc, Arg, Expr, Index, call, rewrite
from tapestry.ir.graph import Block, Dim, Graph, Guard, Read, replace_op
from tapestry.ir.index import Aff, const, dim, floordiv, modulo
from tapestry.ir.monoid import MONOIDS, Driven
from tapestry.ir.recognition.running_state import Scan, as_scan, running, unguarded
from tapestry.rewrites.core.edit import (
    accept,
    block_at,
    fresh_dim,
    plain_index,
    prune,
    reindex,
    resized,
    results,
    state_names,
)
from tapestry.rewrites.core.rule import Move, Refusal, Rule, refuse, register


@register
class BlockScan(Rule):
    """Cut a scan into blocks: every block's total, the totals of the blocks before each, and a scan inside each block.

    What one block needs of the others is a single state. Cut over a mesh axis, only the totals travel: reduce-then-scan
    (Blelloch 1990). The order of merging is kept, so the monoid need not commute.

    before:
        graph running
        input x: f32[6, 4]
        y: f32[6, 4] = op [i: 6, c: 4 | j: 6 sum]
          reads x[j, c] when i - j >= 0 else 0.0
          body x
        output y

    move: block_scan@y{parts=3}

    after:
        graph running
        input x: f32[6, 4]
        y.total.value: f32[3, 4] = op [k: 3, c: 4 | j: 2 sum]
          reads x[j + 2*k, c] else 0.0
          body x
        y.before.value: f32[3, 4] = op [k: 3, c: 4 | m: 3 sum]
          reads a0 = y.total.value[m, c] when k - m - 1 >= 0 else 0.0
          body a0
        y: f32[6, 4] = op [i: 6, c: 4 | j: 2 sum]
          reads x[j + 2*floor((i)/2), c] when -j + ((i) mod 2) >= 0 else 0.0, a1 = y.before.value[floor((i)/2), c]
          body x
          then a1 + acc0
        output y

    legal when:
        the operation is a scan that is not in blocks already, not split, and 2 <= parts <= its points.
    """

    name = "block_scan"
    phase = "search"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """Every scan in two blocks; `sized` gives the number of a mesh axis."""
        yield from self.sized(graph, 2)

    def sized(self, graph: Graph, parts: int) -> Iterator[Move | Refusal]:
        """Every scan in so many blocks."""
        for op in graph.blocks:
            if as_scan(op):
                yield self.offered(Move(self.name, op.outs[0], (("parts", parts),)), refusal_of_scan(op, parts))

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the scan in blocks."""
        at, op = block_at(graph, move)
        parts = move.number("parts")
        accept(refusal_of_scan(op, parts), move)
        scan = as_scan(op)
        assert scan
        each = -(-op.ranges[scan.dim] // parts)
        totals = _totals(graph, op, scan, each)
        before = _before(graph, op, scan, totals)
        return replace_op(graph, at, (totals, before, _scan_in_blocks(op, scan, each, before)), results(totals, before))


def refusal_of_scan(op: Block, parts: int) -> Refusal | None:
    """Why an operation cannot be put into so many blocks; ``None`` when it can."""
    scan = as_scan(op)
    if scan is None:
        return refuse("it is not a running state", "no guard says that place i merges what is at j <= i")
    size = op.ranges[scan.dim]
    if scan.segment < size:
        return refuse("it runs in blocks already", f"it starts again every {scan.segment} points of '{scan.dim}'")
    if op.splits:
        return refuse("it is split already", str(op.splits[0]))
    if not 2 <= parts <= size:
        return refuse(f"{size} points of '{scan.dim}' cannot be cut into {parts} blocks")
    if op.ranges[scan.over] != size:
        return refuse(f"'{scan.dim}' and '{scan.over}' differ in size", f"{size} and {op.ranges[scan.over]}")
    return None


def _totals(graph: Graph, op: Block, scan: Scan, each: int) -> Block:
    """The merged state of every block."""
    k = Dim(fresh_dim(op, "k"), -(-op.ranges[scan.dim] // each))
    dims = tuple(k if d.name == scan.dim else d for d in op.dims)
    inner = prune(replace(unguarded(op, scan), then=(), outs=state_names(graph, op, "total")))
    reduce = resized(op.reduce, scan.over, each)
    place = dim(k.name) * each + dim(scan.over)
    out = reindex(inner, {scan.over: place}, dims + reduce)
    return _within(replace(out, dims=dims, reduce=reduce), op, scan, place)


def _before(graph: Graph, op: Block, scan: Scan, totals: Block) -> Block:
    """The merged totals of the blocks before each one (after, where the scan runs backwards)."""
    assert op.monoid
    k = next(new for new, old in zip(totals.dims, op.dims, strict=True) if old.name == scan.dim)
    m = Dim(fresh_dim(totals, "m"), k.size)
    when = running(dim(k.name), m.name, reverse=scan.sign < 0, exclusive=True)
    index = tuple(dim(m.name) if d == k else dim(d.name) for d in totals.dims)
    zero = MONOIDS[op.monoid].zero(op.dtypes)
    return Block(
        outs=state_names(graph, op, "before"),
        dims=totals.dims,
        reduce=(m,),
        monoid=op.monoid,
        source=op.source,
        reads=tuple(Read(tensor=t, index=index, other=z.value, when=(when,)) for t, z in zip(totals.outs, zero, strict=True)),
        body=tuple(Arg(i, e.dtype) for i, e in enumerate(op.body)),
    )


def _scan_in_blocks(op: Block, scan: Scan, each: int, before: Block) -> Block:
    """The scan inside each block, started with what comes before the block."""
    assert op.monoid
    reduce = resized(op.reduce, scan.over, each)
    block = floordiv(dim(scan.dim), each)
    place = block * each + dim(scan.over)
    out = reindex(unguarded(op, scan), {scan.over: place}, op.dims + reduce)
    out = _within(replace(out, reduce=reduce), op, scan, place)
    when = running(modulo(dim(scan.dim), each), scan.over, reverse=scan.sign < 0, exclusive=scan.shift == 1)
    body = out.body_reads()
    reads = tuple(replace(r, when=(when, *r.when)) if i in body else r for i, r in enumerate(out.reads))
    index = tuple(block if d.name == scan.dim else e for d, e in zip(op.dims, plain_index(op.dims), strict=True))
    starts = tuple(Arg(len(reads) + i, e.dtype) for i, e in enumerate(op.body))
    accs = tuple(Acc(i, e.dtype) for i, e in enumerate(op.body))
    monoid = MONOIDS[op.monoid]
    merged = monoid.combine(*((starts, accs) if scan.sign > 0 else (accs, starts)))
    if isinstance(monoid.structure, Driven) and scan.sign > 0:  # there, an infinite factor times nothing is NaN
        first = call("eq", Index(block), 0)
        merged = tuple(call("where", first, acc, both) for acc, both in zip(accs, merged, strict=True))

    def leaf(x: Expr) -> Expr:
        return merged[x.field] if isinstance(x, Acc) else x

    return replace(
        out,
        reads=reads + tuple(Read(tensor=t, index=index) for t in before.outs),
        then=tuple(rewrite(e, leaf) for e in op.then),
    )


def _within(out: Block, op: Block, scan: Scan, place: Aff) -> Block:
    """Reads of the body kept from the points beyond the dimension's end, where the last block is not full."""
    size, inside = op.ranges[scan.dim], const(op.ranges[scan.dim] - 1) - place
    if size % out.ranges[scan.over] == 0:
        return out
    body = out.body_reads()
    guard = Guard(inside, "ge")
    return replace(out, reads=tuple(replace(r, when=(*r.when, guard)) if i in body else r for i, r in enumerate(out.reads)))
