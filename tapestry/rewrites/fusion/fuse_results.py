"""A map over the rows of a reduction with several results becomes one of its results."""

from __future__ import annotations

from dataclasses import replace

from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Read, placed, points, shape_of
from tapestry.ir.index import Aff, const, dim
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import plain_index, reindex
from tapestry.rewrites.core.inline import inline
from tapestry.rewrites.core.matching import Draft, Match, OpRule
from tapestry.rewrites.core.rule import Refusal, refuse, register
from tapestry.rewrites.fusion import joined_reductions


@register
class FuseResults(OpRule):
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
    nothing = "it reads no reduction with several results"
    at_once = live = True

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        """The reduction with the map inside."""
        op = draft.block(at)
        if op is None or op.monoid or op.splits or len(op.outs) != 1:
            return None
        for i in dict.fromkeys(draft.makers[t] for t in op.inputs if t in draft.makers):
            rows = draft.block(i)
            if rows is None or len(rows.outs) < 2 or not joined_reductions.reduction(rows):
                continue
            if points(op.dims) != points(rows.dims) or (isinstance(op.body[0], Arg) and not _renames(draft, op)):
                continue
            wide, own = ([d for d in o.dims if d.size > 1] for o in (op, rows))
            if shape_of(wide) != shape_of(own):
                return refuse("its rows are not those of the reduction, in order")
            env = {d.name: const(0) for d in rows.dims}
            env |= placed(own, plain_index(wide))
            if not all(joined_reductions.at_rows(r, rows, env, op) for r in op.reads if r.tensor in rows.outs):
                return refuse("it reads a result of another row")
            rest = replace(op, reads=tuple(r for r in op.reads if r.tensor not in rows.outs))
            return joined_reductions.needs(draft, rest, i, at) or _with_map_result(draft, (i, at), rows, op, env)
        return None


def _renames(draft: Draft, op: Block) -> bool:
    """Whether a map gives a tensor of its own shape the name of a graph output, and does nothing else."""
    (read,) = op.reads
    sizes = shape_of(op.dims)
    return op.outs[0] in draft.outputs and read.other is None and draft.tensors[read.tensor].shape == sizes


def _with_map_result(draft: Draft, at: tuple[int, int], rows: Block, op: Block, env: dict[str, Aff]) -> Match:
    """The reduction with the map as a result: in the map's shape where no other result is left, else in its own."""
    i, j = at
    needed = [t for t in rows.outs if t in draft.outputs or set(draft.readers_of(t)) - {j}]
    shape, (out,) = shape_of(rows.dims), op.outs
    views, tensors = list[Block](), list[Tensor]()
    if needed:
        if shape_of(op.dims) != shape:
            view, tensor = joined_reductions.reshaped(draft, out, op, tuple(env[d.name] for d in rows.dims), shape)
            views, tensors, out = [view], [tensor], tensor.name
        back = {d.name: const(0) for d in op.dims} | {str(e): dim(n) for n, e in env.items() if e.terms}
        op = replace(reindex(op, back, rows.dims), dims=rows.dims)
    # the map hands on the other results that are needed
    own = tuple(Read(tensor=t, index=plain_index(rows.dims)) for t in needed)
    handed = tuple(Arg(len(op.reads) + k, draft.tensors[t].dtype) for k, t in enumerate(needed))
    op = replace(op, outs=(*needed, out), reads=op.reads + own, body=handed + op.body)
    k = next(k for k, r in enumerate(op.reads) if r.tensor in rows.outs)
    return Match({i: (), j: (inline(op, k, rows, draft.tensors), *views)}, tuple(tensors))
