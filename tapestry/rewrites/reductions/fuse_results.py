"""A map over the rows of a reduction with several results becomes one of its results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tapestry.errors import TapestryError
from tapestry.ir.expr import Arg, Expr
from tapestry.ir.graph import Block, Dim, Graph, Op, Read, with_ops
from tapestry.ir.index import Aff, const, dim
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import merge_reads, shift_args, substitute_expr, substitute_read
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register
from tapestry.rewrites.reductions import joined_reductions
from tapestry.rewrites.reductions.joined_reductions import Index


@register
class FuseResults(Rule):
    """Compute what is made of a row's statistics where they are: ``1 / sqrt(variance + e)``, ``log(sum) + maximum``.

    `fuse_epilogue` does this for reductions with one result; here others may be left beside it.

    before:
        graph g
        input x: f32[4, 6]
        a: f32[4], v: f32[4] = op [i: 4 | n: 6 moments]
          reads x[i, n]
          body 1.0, x, 0.0
          then acc1, acc2 / acc0
        r: f32[4] = op [i: 4]
          reads v[i]
          body 1.0 / sqrt(v)
        y: f32[6, 4] = op [k: 6, i: 4]
          reads x[i, k], a[i], r[i]
          body (x - a) * r
        output y
    move: fuse_results@r
    after:
        graph g
        input x: f32[4, 6]
        a: f32[4], r: f32[4] = op [i: 4 | n: 6 moments]
          reads x[i, n]
          body 1.0, x, 0.0
          then acc1, 1.0 / sqrt((acc2 / acc0))
        y: f32[6, 4] = op [k: 6, i: 4]
          reads x[i, k], a[i], r[i]
          body (x - a) * r
        output y
    legal when: the map has a point for each row and reads results of the reduction, which has several, at its own row alone;
    nothing else that it reads is made from them.
    """

    name = "fuse_results"
    phase = "simplify"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move or refusal per map that reads a reduction with several results."""
        index = Index(graph)
        for j in range(len(graph.ops)):
            found = _match(graph, index, j)
            if isinstance(found, _Found):
                yield Move(self.name, graph.ops[j].outs[0])
            elif found:
                yield Refusal(self.name, graph.ops[j].outs[0], found)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Put one map into the reduction."""
        at = graph.find(move.at)
        found = _match(graph, Index(graph), at) if at >= 0 else "no such operation"
        if not isinstance(found, _Found):
            raise TapestryError(found or "it reads no reduction with several results", where=str(move))
        return _replaced(graph, [found])

    def sweep(self, graph: Graph) -> Graph:
        """Every one; a reduction takes one map at a time."""
        index, taken, found = Index(graph), set[int](), list[_Found]()
        for j in range(len(graph.ops)):
            f = _match(graph, index, j)
            if isinstance(f, _Found) and not {f.rows, f.map} & taken:
                found.append(f)
                taken |= {f.rows, f.map}
        done = _replaced(graph, found) if found else graph
        whole = len(graph.ops) + sum(len(f.ops) - 2 for f in found)
        return done if len(done.ops) == whole else _replaced(graph, found[:1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A reduction and a map, and what takes the place of both."""

    rows: int
    map: int
    ops: tuple[Block, ...]
    tensors: tuple[Tensor, ...]


def _replaced(graph: Graph, found: list[_Found]) -> Graph:
    gone, new = {f.rows for f in found}, {f.map: f.ops for f in found}
    ops: list[Op] = []
    for i, op in enumerate(graph.ops):
        ops += new.get(i, () if i in gone else (op,))
    return with_ops(graph, tuple(joined_reductions.ordered(ops)), tuple(t for f in found for t in f.tensors))


def _match(graph: Graph, index: Index, j: int) -> _Found | str:
    """The reduction with map j inside; why there is none ("" where nobody would expect one)."""
    op = graph.ops[j]
    if not isinstance(op, Block) or op.monoid or op.splits or len(op.outs) != 1:
        return ""
    for i in dict.fromkeys(index.makers[t] for t in op.inputs if t in index.makers):
        rows = graph.ops[i]
        if not isinstance(rows, Block) or len(rows.outs) < 2 or not joined_reductions.reduction(rows):
            continue
        wide = [d for d in op.dims if d.size > 1]
        kept = [d for d in rows.dims if d.size > 1]
        if joined_reductions.points(op.dims) != joined_reductions.points(rows.dims) or (
            isinstance(op.body[0], Arg) and not _renames(graph, op)
        ):
            continue
        if [d.size for d in wide] != [d.size for d in kept]:
            return "its rows are not those of the reduction, in order"
        env = {d.name: const(0) for d in rows.dims}
        env |= {d.name: dim(o.name) for d, o in zip(kept, wide, strict=True)}
        mine = [r for r in op.reads if r.tensor in rows.outs]
        if not all(joined_reductions.at_rows(r, rows, env, op) for r in mine):
            return "it reads a result of another row"
        rest = replace(op, reads=tuple(r for r in op.reads if r.tensor not in rows.outs))
        return joined_reductions.needs(graph, index, rest, i, j) or _inside(graph, index, (i, j), rows, op, env)
    return ""


def _apart(rows: Block, op: Block) -> tuple[Dim, ...]:
    """The reduced dimensions, by names that the map does not have."""
    taken, out = {d.name for d in op.dims}, list[Dim]()
    for d in rows.reduce:
        name = d.name
        while name in taken:
            name += "_"
        taken.add(name)
        out.append(Dim(name, d.size))
    return tuple(out)


def _reduced(rows: Block, op: Block) -> dict[str, Aff]:
    return {old.name: dim(new.name) for old, new in zip(rows.reduce, _apart(rows, op), strict=True)}


def _renames(graph: Graph, op: Block) -> bool:
    """Whether a map gives a tensor of its own shape the name of a graph output, and does nothing else."""
    (read,) = op.reads
    sizes = tuple(d.size for d in op.dims)
    return op.outs[0] in graph.outputs and read.other is None and graph.tensors[read.tensor].shape == sizes


def _inside(graph: Graph, index: Index, at: tuple[int, int], rows: Block, op: Block, env: dict[str, Aff]) -> _Found:
    """The reduction with the map as a result: in the map's shape where no other result is left, else in its own."""
    i, j = at
    kept = [k for k, t in enumerate(rows.outs) if t in graph.outputs or set(index.readers.get(t, ())) - {j}]
    if not kept:
        space = replace(op, reduce=_apart(rows, op))
        rows = replace(joined_reductions.moved(rows, env | _reduced(rows, op), space), dims=op.dims, reduce=space.reduce)
    back = {d.name: const(0) for d in op.dims} | {str(e): dim(n) for n, e in env.items() if e.terms} if kept else {}
    theirs = tuple(substitute_read(r, back, rows.ranges) for r in op.reads)
    shift = shift_args(len(rows.reads))

    def put(x: Expr) -> Expr:
        if isinstance(x, Arg) and op.reads[x.pos].tensor in rows.outs:
            return rows.then[rows.outs.index(op.reads[x.pos].tensor)]
        return shift(x)

    value = substitute_expr(op.body[0], back, rows.ranges, put)
    shape = tuple(d.size for d in rows.dims)
    out, dtype = op.outs[0], graph.tensors[op.outs[0]].dtype
    views, tensors = tuple[Block, ...](), tuple[Tensor, ...]()
    if tuple(d.size for d in op.dims) != shape:
        out = f"{out}.rows"
        while out in graph.tensors:
            out += "_"
        tensors = (Tensor(name=out, dtype=dtype, shape=shape),)
        read = Read(tensor=out, index=tuple(env[d.name] for d in rows.dims))
        views = (Block(outs=op.outs, dims=op.dims, reads=(read,), body=(Arg(0, dtype),), source=op.source),)
    one = replace(
        rows, outs=(*(rows.outs[k] for k in kept), out), reads=rows.reads + theirs,
        then=(*(rows.then[k] for k in kept), value), source=tuple(dict.fromkeys(rows.source + op.source)),
    )  # fmt: skip
    return _Found(rows=i, map=j, ops=(merge_reads(one), *views), tensors=tensors)
