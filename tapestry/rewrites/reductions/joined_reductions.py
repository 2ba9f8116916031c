"""Two reductions over the same points as one operation: how they correspond, what both read, what becomes of their results.

Which monoid the one operation has is the rules' business (`fuse_nested`, `fuse_product`); here is all that they share.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tapestry.ir.expr import Acc, Arg, Expr, rewrite
from tapestry.ir.graph import Block, Dim, Graph, Op, Read, map_exprs, with_ops
from tapestry.ir.index import Aff, const, dim, substitute
from tapestry.ir.recognise.contraction import factors
from tapestry.ir.recognise.running_state import as_scan
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import merge_reads, read_dims, shift_args, substitute_expr, substitute_read

Env = Mapping[str, Aff]
MOST_VISITED = 256  # operations looked at to tell whether one reduction needs another


class Index:
    """Makers and readers of a graph's tensors; operations whose results nobody needs do not count."""

    def __init__(self, graph: Graph) -> None:
        self.makers = graph.producers()
        self.readers: dict[str, list[int]] = {}
        needed = set(graph.outputs)
        for i in range(len(graph.ops) - 1, -1, -1):
            if needed & set(graph.ops[i].outs):
                needed |= set(graph.ops[i].inputs)
                for t in graph.ops[i].inputs:
                    self.readers.setdefault(t, []).append(i)
        for found in self.readers.values():
            found.reverse()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A reduction, a later one over the same points, and what takes the place of both: ``ops``, with new ``tensors``."""

    first: int
    second: int
    ops: tuple[Block, ...]
    tensors: tuple[Tensor, ...]


def reduction(op: Op) -> bool:
    """Whether an operation is a reduction that may be joined to another one at all."""
    plain = isinstance(op, Block) and bool(op.reduce) and op.monoid is not None and not op.inner and not op.splits
    return plain and as_scan(op) is None and all(d.size for d in op.space)


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


def plain(read: Read, op: Block) -> Read:
    """A read with the dimensions of size 1 left out, so that equal places are equal."""
    return substitute_read(read, {d.name: const(0) for d in op.space if d.size == 1}, op.ranges)


def swept(op: Block) -> frozenset[Read]:
    """What the body reads along the reduced dimensions."""
    along = {d.name for d in op.reduce if d.size > 1}
    reads = (plain(op.reads[k], op) for k in op.body_reads())
    return frozenset(r for r in reads if along & read_dims(r))


def moved(op: Block, env: Env, onto: Block) -> Block:
    """The reads and expressions of a reduction in the dimensions of another one."""
    out = replace(op, reads=tuple(substitute_read(r, env, onto.ranges) for r in op.reads))
    return map_exprs(out, lambda e: substitute_expr(e, env, onto.ranges))


def unlike(a: Block, b: Block) -> str:
    """Why two reductions, the first in the dimensions of the second, do not go once over the same input ("" when they do)."""
    mine, theirs = swept(replace(b, reads=a.reads, body=a.body)), swept(b)
    if not (mine <= theirs or theirs <= mine) or not mine & theirs:
        return "they go over different inputs"
    space = {d.name for d in b.space if d.size > 1}
    if not any(space <= read_dims(r) for r in mine & theirs):
        return "what both read is used in several rows"
    for op in (replace(b, reads=a.reads, body=a.body, monoid=a.monoid), b):
        pair = factors(op)
        if pair is not None and {type(e) for e in pair} == {Arg} and pair[0] != pair[1]:
            return "one of them is a contraction"
    return ""


def resolved(e: Expr, reads: Sequence[Read], op: Block) -> str:
    """Text of an expression with what it reads in place of the numbers of its reads."""
    names: list[str] = []

    def leaf(x: Expr) -> Expr:
        if isinstance(x, Arg):
            names.append(repr(plain(reads[x.pos], op)))
            return replace(x, pos=0)
        return x

    return f"{rewrite(e, leaf)} {names}"


def opened(graph: Graph, index: Index, op: Block, first: int) -> Block:
    """The reduction with the maps written out that stand between it and the results of operation ``first``."""
    for _ in range(4):
        for k in sorted(op.body_reads()):
            at = index.makers.get(op.reads[k].tensor, -1)
            maker = graph.ops[at] if at >= 0 else None
            if not isinstance(maker, Block) or maker.monoid or len(maker.outs) != 1 or maker.splits:
                continue
            direct = set(maker.inputs) & set(graph.ops[first].outs)
            if op.reads[k].other is None and (direct or _between(graph, index, maker, first)):
                op = _written_out(op, k, maker)
                break
        else:
            return op
    return op


def _between(graph: Graph, index: Index, maker: Block, first: int) -> bool:
    """Whether a map reads another map that reads what operation ``first`` makes."""
    makers = (graph.ops[index.makers[t]] for t in maker.inputs if t in index.makers)
    outs = set(graph.ops[first].outs)
    return any(isinstance(m, Block) and not m.monoid and bool(outs & set(m.inputs)) for m in makers)


def _written_out(op: Block, at: int, maker: Block) -> Block:
    """The reduction with the reads equal to number ``at`` replaced by the body of the map behind them."""
    env = dict(zip((d.name for d in maker.dims), op.reads[at].index, strict=True))
    theirs = tuple(substitute_read(r, env, op.ranges) for r in maker.reads)
    body = substitute_expr(maker.body[0], env, op.ranges, shift_args(len(op.reads)))
    same = {k for k, r in enumerate(op.reads) if r == op.reads[at]}
    wide = replace(op, reads=op.reads + theirs, source=tuple(dict.fromkeys(maker.source + op.source)))
    return merge_reads(map_exprs(wide, lambda e: rewrite(e, lambda x: body if isinstance(x, Arg) and x.pos in same else x)))


def needs(graph: Graph, index: Index, op: Block, first: int, second: int) -> str:
    """Why an operation at ``second`` cannot run together with the one at ``first`` ("" when it can): what it reads is made from
    what the first makes."""
    inputs, outs = set(op.inputs), graph.ops[first].outs
    queue = [i for t in outs for i in index.readers.get(t, ()) if i < second]
    seen = set(queue)
    while queue:
        if len(seen) > MOST_VISITED:
            return "too much depends on the first one to tell whether the second does"
        for t in graph.ops[queue.pop()].outs:
            if t in inputs:
                return f"'{t}', made from the result of the first, is read by the second"
            more = [i for i in index.readers.get(t, ()) if i < second and i not in seen]
            seen |= set(more)
            queue += more
    return ""


def joined(graph: Graph, index: Index, at: tuple[int, int], env: Env, parts: tuple[Block, Block], merged: Merged) -> Pair:
    """The one operation; ``parts`` are the first (in the second's dimensions) and the second (maps written out)."""
    a, b = parts
    old = graph.ops[at[0]]
    assert isinstance(old, Block)
    shift = shift_args(len(a.reads))

    def lowered(x: Expr) -> Expr:
        if isinstance(x, Acc):
            return merged.accs[x.field]
        if isinstance(x, Arg) and b.reads[x.pos].tensor in old.outs:
            return merged.first[old.outs.index(b.reads[x.pos].tensor)]
        return shift(x)

    kept = [k for k, t in enumerate(old.outs) if t in graph.outputs or set(index.readers.get(t, ())) - {at[1]}]
    names, views, tensors = _results(graph, old, env, b, kept)
    op = merge_reads(
        replace(
            b, outs=(*names, *b.outs), monoid=merged.monoid, reads=a.reads + b.reads, body=merged.body,
            then=(*(merged.first[k] for k in kept), *(rewrite(e, lowered) for e in b.then)),
            source=tuple(dict.fromkeys(a.source + b.source)),
        )
    )  # fmt: skip
    return Pair(first=at[0], second=at[1], ops=(op, *views), tensors=tensors)


def _results(
    graph: Graph, old: Block, env: Env, b: Block, kept: list[int]
) -> tuple[list[str], tuple[Block, ...], tuple[Tensor, ...]]:
    """Names for results of the first in the shape of the second, views that give them their own shape again, new tensors."""
    shape = tuple(d.size for d in b.dims)
    if tuple(d.size for d in old.dims) == shape:
        return [old.outs[k] for k in kept], (), ()
    names, views, tensors = list[str](), list[Block](), list[Tensor]()
    back = {str(e): d.name for d in old.dims if (e := env[d.name]).terms}
    index = tuple(dim(back[d.name]) if d.name in back else const(0) for d in b.dims)
    for k in kept:
        name = f"{old.outs[k]}.rows"
        while name in graph.tensors:
            name += "_"
        dtype = graph.tensors[old.outs[k]].dtype
        names.append(name)
        tensors.append(Tensor(name=name, dtype=dtype, shape=shape))
        read = Read(tensor=name, index=index)
        views.append(Block(outs=(old.outs[k],), dims=old.dims, reads=(read,), body=(Arg(0, dtype),), source=old.source))
    return names, tuple(views), tuple(tensors)


def replaced(graph: Graph, pairs: Sequence[Pair]) -> Graph:
    """The graph with pairs of reductions as one each, in an order in which everything is made before it is read."""
    gone, new = {p.first for p in pairs}, {p.second: p for p in pairs}
    ops: list[Op] = []
    for i, op in enumerate(graph.ops):
        if i in new:
            ops += new[i].ops
        elif i not in gone:
            ops.append(op)
    return with_ops(graph, tuple(ordered(ops)), tuple(t for p in pairs for t in p.tensors))


def ordered(ops: Sequence[Op]) -> list[Op]:
    """The operations in the order given as far as everything is made before it is read; fewer where that cannot be."""
    makers = {t: i for i, op in enumerate(ops) for t in op.outs}
    missing = [len({makers[t] for t in op.inputs if t in makers}) for op in ops]
    readers: dict[int, list[int]] = {}
    for i, op in enumerate(ops):
        for m in {makers[t] for t in op.inputs if t in makers}:
            readers.setdefault(m, []).append(i)
    ready, out = [i for i, n in enumerate(missing) if n == 0], list[Op]()
    heapq.heapify(ready)
    while ready:
        i = heapq.heappop(ready)
        out.append(ops[i])
        for r in readers.get(i, ()):
            missing[r] -= 1
            if not missing[r]:
                heapq.heappush(ready, r)
    return out


def together(graph: Graph, found: Sequence[Pair]) -> Graph:
    """As many of some pairs as can be joined at once: two of them may need each other crosswise."""
    done = replaced(graph, found)
    size = len(graph.ops) + sum(len(p.ops) - 2 for p in found)
    return done if len(done.ops) == size else replaced(graph, found[:1]) if found else graph


def points(dims: Sequence[Dim]) -> int:
    """Number of points of some dimensions."""
    return prod(d.size for d in dims)


def at_rows(read: Read, a: Block, env: Env, b: Block) -> bool:
    """Whether a read of a result of the first is of the row that the second is at."""
    one = {d.name: const(0) for d in b.space if d.size == 1}
    want = tuple(substitute(env[d.name], one, b.ranges) for d in a.dims)
    return plain(read, b).index == want and read.other is None
