"""Reduction-map fusion: a map that reads each reduced value once becomes the reduction's ``then``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.errors import TapestryError
from tapestry.ir import space
from tapestry.ir.expr import Arg, Expr
from tapestry.ir.graph import Block, Dim, Graph, Op, Read, with_ops
from tapestry.ir.index import Aff, dim
from tapestry.ir.recognise.running_state import as_scan
from tapestry.ir.state import layered
from tapestry.rewrites.core.edit import MOST_DEPTH, inline, merge_reads, shift_args, substitute_expr, substitute_read, too_deep
from tapestry.rewrites.core.rule import Move, Refusal, register
from tapestry.rewrites.reductions.row_columns import along_columns, rows


@register
class FuseEpilogue:
    """Put a map into the reduction that it reads: bias, activation, residual, normalisation by a reduced value.

    before:
        graph g
        input x: f32[4, 6]
        input w: f32[6, 3]
        input c: f32[3]
        t: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[i, m], w[m, n]
          body x * w
        y: f32[4, 3] = op [x0: 4, x1: 3]
          reads t[x0, x1], c[x1]
          body tanh(t + c)
        output y
    move: fuse_epilogue@y{tensor=t}
    after:
        graph g
        input x: f32[4, 6]
        input w: f32[6, 3]
        input c: f32[3]
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[i, m], w[m, n], c[n]
          body x * w
          then tanh((acc0 + c))
        output y
    legal when: the map is the reduction's only reader and reads it by a bijection (asked of isl), so that each reduced
    value is used at exactly one point.
    """

    name = "fuse_epilogue"
    kind = "simplify"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move or refusal per map and reduction that it alone reads."""
        readers, makers = graph.consumers(), graph.producers()
        for op in graph.ops:
            if not isinstance(op, Block) or op.monoid:
                continue
            for t in op.inputs:
                maker = graph.ops[makers[t]] if t in makers and len(readers[t]) == 1 and t not in graph.outputs else None
                if isinstance(maker, Block) and maker.monoid:
                    reason, witness = refuse(op, maker, t)
                    move = Move(self.name, op.outs[0], (("tensor", t),))
                    yield Refusal(self.name, op.outs[0], reason, witness) if reason else move

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Fuse one map into the reduction that it reads."""
        at, tensor = graph.find(move.at), move.text("tensor")
        maker = graph.producers().get(tensor, -1)
        if at < 0 or maker < 0 or graph.consumers().get(tensor) != [at] or tensor in graph.outputs:
            raise TapestryError(f"'{tensor}' is not written by an operation with that reader alone", where=str(move))
        op, source = graph.ops[at], graph.ops[maker]
        reason, witness = refuse(op, source, tensor)
        if reason:
            raise TapestryError(reason, where=str(move), why=witness)
        assert isinstance(op, Block) and isinstance(source, Block)
        ops = [fuse(op, source, tensor) if i == at else o for i, o in enumerate(graph.ops) if i != maker]
        return with_ops(graph, tuple(ops))

    def sweep(self, graph: Graph) -> Graph:
        """Fuse every map that may be, in one pass; of several reductions that a map reads, the one with most points."""
        readers, makers = graph.consumers(), graph.producers()
        ops: list[Op | None] = list(graph.ops)
        for i in range(len(ops)):
            op = ops[i]
            if not isinstance(op, Block) or op.monoid:
                continue
            found: list[tuple[int, str]] = []
            for t in op.inputs:
                maker = ops[makers[t]] if t in makers and len(readers[t]) == 1 and t not in graph.outputs else None
                if isinstance(maker, Block) and not refuse(op, maker, t)[0]:
                    found.append((_points(maker), t))
            if found:
                t = max(found)[1]
                maker = ops[makers[t]]
                assert isinstance(maker, Block)
                ops[i], ops[makers[t]] = fuse(op, maker, t), None
                for s in maker.inputs:
                    readers[s] = sorted({i if k == makers[t] else k for k in readers[s]})
        return with_ops(graph, tuple(op for op in ops if op is not None))


def _points(op: Block) -> int:
    n = 1
    for d in op.space:
        n *= d.size
    return n


def refuse(op: Op, maker: Op, tensor: str) -> tuple[str, str]:
    """Why a map may not become the reduction's ``then`` ("" when it may), and a witness."""
    if not isinstance(op, Block) or op.monoid or not isinstance(maker, Block) or not maker.monoid or len(maker.outs) != 1:
        return "only a map becomes the 'then' of a reduction with one result", ""
    if op.splits or maker.splits:
        return "an operation that is split already is not fused", ""
    mine = {r for r in op.reads if r.tensor == tensor}
    if len(mine) > 1 or any(r.other is not None for r in mine):
        return f"'{tensor}' is not read through one unguarded projection", ""
    read = next(iter(mine))
    if too_deep(op.body, maker.then):
        return "the expression would be nested too deeply", f"at most {MOST_DEPTH} calls inside each other"
    if _points(replace(maker, reduce=())) != _points(op):
        return f"'{tensor}' has {_points(replace(maker, reduce=()))} cells, its reader {_points(op)} points", ""
    if _permutes(op, read):
        return "", ""
    if as_scan(maker):
        return f"'{tensor}' runs along a dimension that its reader does not keep", ""
    collision = space.access(op, read, ()).collision()  # injective, and as many points as cells: a bijection
    if collision:
        return "two points read one reduced value", str(collision)
    if layered(maker) and rows(fuse(op, maker, tensor)) > rows(maker):
        return f"statistics of rows of '{tensor}' would be computed again", ""
    return "", ""


def _permutes(op: Block, read: Read) -> bool:
    """Whether the read is a permutation of the dimensions of size above 1."""
    plain = [str(e) for e in read.index if e.is_dim]
    fixed = all(e.is_dim or not e.terms for e in read.index)
    return fixed and len(set(plain)) == len(plain) and {d.name for d in op.dims if d.size > 1} <= set(plain)


def fuse(op: Block, maker: Block, tensor: str) -> Block:
    """The reduction over the map's dimensions, with the map as its ``then``; plain dimensions keep the reduction's names."""
    read = next(r for r in op.reads if r.tensor == tensor)
    rename = _names(op, maker, read)
    dims = tuple(Dim(rename[d.name], d.size) for d in op.dims)
    ranges = {d.name: d.size for d in (*dims, *maker.reduce, *maker.inner_dims)}
    outer = {old: dim(new) for old, new in rename.items()}
    env: dict[str, Aff] = {}
    for d, e in zip(maker.dims, read.index, strict=True):
        env[d.name] = substitute_read(Read(tensor="", index=(e,)), outer, ranges).index[0]
    mine = tuple(substitute_read(r, env, ranges) for r in maker.reads)
    others = [k for k, r in enumerate(op.reads) if r.tensor != tensor]
    theirs = tuple(substitute_read(op.reads[k], outer, ranges) for k in others)
    lowered = substitute_expr(maker.then[0], env, ranges)
    gone: dict[int, Expr] = {k: lowered for k, r in enumerate(op.reads) if r.tensor == tensor}
    shift = shift_args(len(mine))
    leaf = inline(gone, {k: i for i, k in enumerate(others)})

    def put(x: Expr) -> Expr:
        return x if not isinstance(x, Arg) else (leaf(x) if x.pos in gone else shift(leaf(x)))

    joined = Block(
        outs=op.outs, dims=dims, reduce=maker.reduce, monoid=maker.monoid, reads=mine + theirs,
        body=tuple(substitute_expr(e, env, ranges) for e in maker.body),
        inner=tuple(replace(s, body=substitute_expr(s.body, env, ranges)) for s in maker.inner),
        then=tuple(substitute_expr(e, outer, ranges, put) for e in op.body),
        source=tuple(dict.fromkeys(maker.source + op.source)),
    )  # fmt: skip
    return along_columns(merge_reads(joined))


def _names(op: Block, maker: Block, read: Read) -> dict[str, str]:
    """New names for the map's dimensions: the reduction's where a dimension is one of its own, else fresh."""
    out: dict[str, str] = {}
    for d, e in zip(maker.dims, read.index, strict=True):
        if e.is_dim:
            out[str(e)] = d.name
    taken = {d.name for d in maker.space}
    for d in op.dims:
        if d.name not in out:
            name = d.name
            while name in taken:
                name += "_"
            out[d.name] = name
        taken.add(out[d.name])
    return out
