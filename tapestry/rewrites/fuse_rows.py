"""A reduction of rows and the map that reads its result back over the same rows become one operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from tapestry.ir import space
from tapestry.ir.expr import Acc, Arg, rewrite
from tapestry.ir.graph import Block, Dim, Read
from tapestry.ir.index import Aff, Floor, const, dim, floordiv
from tapestry.ir.monoid import primitive_of
from tapestry.ir.recognise import exponential
from tapestry.ir.states import as_scan, layered, row_groups
from tapestry.ir.types import Tensor
from tapestry.rewrites import joined_reductions
from tapestry.rewrites.core.edit import (
    MOST_DEPTH,
    fresh_dims,
    inline,
    merge_reads,
    over,
    plain_index,
    points,
    read_dims,
    reindex,
    renamed_dims,
    same_value,
    shift_args,
    substitute_read,
    too_deep,
    unused,
)
from tapestry.rewrites.core.rule import Draft, Match, OpRule, PairRule, Refusal, refuse, register
from tapestry.rewrites.joined_reductions import Merged
from tapestry.rewrites.stream_softmax import WEIGHTS

# The product of monoids as a rule: two reductions over the same points of the same input in one pass.


@register
class FuseProduct(PairRule):
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
    second = "with"
    nothing = "no such two reductions, the first one before the second"
    at_once = live = True

    def partners(self, draft: Draft, at: int) -> Iterable[str]:
        """The reductions before that go over tensors of the same name, the nearest for each."""
        op = draft.block(at)
        if op is None or not joined_reductions.reduction(op):
            return ()
        tensors = sorted({r.tensor for r in joined_reductions.swept(op)})
        before = {draft.memo[t] for t in tensors if t in draft.memo}
        draft.memo |= dict.fromkeys(tensors, op.outs[0])
        return sorted(before, key=lambda t: draft.makers[t], reverse=True)

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """Both reductions as one."""
        a, b = draft.block(other), draft.block(at)
        if other > at:
            return None
        if a is None or b is None or not joined_reductions.reduction(a) or not joined_reductions.reduction(b):
            return refuse("only reductions that are not split, not running and have no inner ones are joined")
        env = joined_reductions.aligned(a, b)
        if env is None:
            return refuse("they reduce or keep dimensions of different sizes")
        first = over(a, env, b)
        no = joined_reductions.unlike(first, b) or _dependent(a, b, env) or joined_reductions.needs(draft, b, other, at)
        return no or joined_reductions.joined(draft, (other, at), env, (first, b), _both_states(first, b))


def _dependent(a: Block, b: Block, env: joined_reductions.Env) -> Refusal | None:
    """Why two states cannot stand side by side, for what the second reads of the first or for their shapes."""
    mine = {k for k, r in enumerate(b.reads) if r.tensor in a.outs}
    if mine & b.body_reads():
        return refuse("the second reduces what the first makes")
    if not all(joined_reductions.at_rows(b.reads[k], a, env, b) for k in mine):
        return refuse("the second reads the first's result of another row")
    if not a.lowers and not b.lowers and {d.size for d in a.dims} != {d.size for d in b.dims} and len(a.body) > 1:
        return refuse("states that are results themselves keep their shape")
    return None


def _both_states(a: Block, b: Block) -> Merged:
    """The two states side by side; one of them where they are the same."""
    assert a.monoid and b.monoid
    if a.monoid == b.monoid and all(same_value(x, a, y, b) for x, y in zip(a.body, b.body, strict=True)):
        return Merged(monoid=a.monoid, body=a.body, first=a.then, accs=tuple(Acc(k, e.dtype) for k, e in enumerate(b.body)))
    shift = shift_args(len(a.reads))
    accs = tuple(Acc(len(a.body) + k, e.dtype) for k, e in enumerate(b.body))
    body = a.body + tuple(rewrite(e, shift) for e in b.body)
    return Merged(monoid=f"{a.monoid}.{b.monoid}", body=body, first=a.then, accs=accs)


# A map over the rows of a reduction with several results becomes one of its results.


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
            if [d.size for d in wide] != [d.size for d in own]:
                return refuse("its rows are not those of the reduction, in order")
            env = {d.name: const(0) for d in rows.dims}
            env |= {d.name: dim(o.name) for d, o in zip(own, wide, strict=True)}
            if not all(joined_reductions.at_rows(r, rows, env, op) for r in op.reads if r.tensor in rows.outs):
                return refuse("it reads a result of another row")
            rest = replace(op, reads=tuple(r for r in op.reads if r.tensor not in rows.outs))
            return joined_reductions.needs(draft, rest, i, at) or _with_map_result(draft, (i, at), rows, op, env)
        return None


def _renames(draft: Draft, op: Block) -> bool:
    """Whether a map gives a tensor of its own shape the name of a graph output, and does nothing else."""
    (read,) = op.reads
    sizes = tuple(d.size for d in op.dims)
    return op.outs[0] in draft.outputs and read.other is None and draft.tensors[read.tensor].shape == sizes


def _with_map_result(draft: Draft, at: tuple[int, int], rows: Block, op: Block, env: dict[str, Aff]) -> Match:
    """The reduction with the map as a result: in the map's shape where no other result is left, else in its own."""
    i, j = at
    needed = [t for t in rows.outs if t in draft.outputs or set(draft.readers_of(t)) - {j}]
    shape, (out,) = tuple(d.size for d in rows.dims), op.outs
    views, tensors = list[Block](), list[Tensor]()
    if needed:
        if tuple(d.size for d in op.dims) != shape:
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


# Rows of an operation that keeps states once per row: how many there are, and the reduced dimension as the row's columns.


def rows(op: Block) -> int:
    """Rows whose states an operation computes: points of the map dimensions that the body depends on."""
    return prod(d.size // row_groups(op).get(d.name, 1) for d in op.dims)


def along_columns(op: Block) -> Block:
    """The operation with its one reduced dimension, where that runs row-major over several columns, as a dimension for each.

    Only where the reduction then reads what ``then`` reads as ``then`` does, so that a row may be read once: a row that was
    flattened for its statistics and is written in its own shape. Itself where it is not so.
    """
    if len(op.reduce) != 1 or op.splits or op.inner or not op.then:
        return op
    groups = row_groups(op)
    taken = {d.name for d in op.space}
    columns, here = list[Dim](), dict[str, Aff]()  # the columns; the map's dimensions at a column of the row
    for d in op.dims:
        k = groups.get(d.name, 1)
        if k == 1:
            continue
        name = unused(f"{d.name}_", taken)
        taken.add(name)
        columns.append(Dim(name, k))
        here[d.name] = floordiv(dim(d.name), k, op.ranges) * k + dim(name)
    if len(columns) < 2 or prod(d.size for d in columns) != op.reduce[0].size:
        return op
    flat = const(0)
    for d in columns:
        flat = flat * d.size + dim(d.name)
    space = (*op.dims, *columns)
    found = reindex(replace(op, reduce=tuple(columns)), {op.reduce[0].name: flat}, space)
    ranges, swept = found.ranges, op.body_reads()
    theirs = {found.reads[k] for k in swept}
    mine = {substitute_read(r, here, ranges) for k, r in enumerate(op.reads) if k not in swept}
    return merge_reads(found) if theirs & mine else op


@register
class FuseRows(OpRule):
    """Normalise a row where its statistics are: softmax, layer norm, RMS norm in one pass over the row.

    The statistics do not vary along the map's other dimensions, so that they are computed once for each row and kept once.

    before:
        graph g
        input x: f32[4, 6]
        input w: f32[6]
        r: f32[4] = op [i: 4 | n: 6 sum]
          reads x[i, n]
          body x * x
          then 1.0 / sqrt((acc0 / 6.0))
        y: f32[4, 6] = op [i: 4, j: 6]
          reads x[i, j], r[i], w[j]
          body (x * r) * w
        output y
    move: fuse_rows@y
    after:
        graph g
        input x: f32[4, 6]
        input w: f32[6]
        y: f32[4, 6] = op [i: 4, j: 6 | n: 6 sum]
          reads x[i, n], a1 = x[i, j], w[j]
          body x * x
          then (a1 * (1.0 / sqrt((acc0 / 6.0)))) * w
        output y
    legal when: the map is the only reader of the reduction's results and reads them by plain dimensions or whole groups of a
    dimension (``floor(c/k)``), the same for each;
    the reduction goes once through what it reads (no value of it is used in several rows), and the map reads that as well.
    """

    name = "fuse_rows"
    phase = "simplify"
    nothing = "no map that reads a reduction of its rows"
    at_once = True

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        """The map with the reduction of its rows inside."""
        op = draft.block(at)
        if op is None or op.monoid or len(op.outs) != 1 or op.splits:
            return None
        for k, r in enumerate(op.reads):
            rows = draft.maker(r.tensor)
            if rows is None or not rows.monoid or draft.readers[r.tensor] != [at]:
                continue
            if {d.name for d in op.dims if d.size > 1} - read_dims(r) and set(rows.inputs) & set(op.inputs):
                one = along_columns(inline(op, k, rows, draft.tensors)) if not (no := _refused(draft, at, op, rows)) else None
                return no if one is None else Match({at: (one,), draft.makers[r.tensor]: ()})
        return None


def _refused(draft: Draft, at: int, op: Block, rows: Block) -> Refusal | None:
    """Why a map and a reduction of rows may not be one."""
    after = [draft.block(i) for i in draft.readers_of(op.outs[0])]
    if exponential(rows.monoid) == WEIGHTS and any(o is not None and primitive_of(o.monoid) == "add" for o in after):
        return refuse("the weights of a sum are left to stream_softmax")
    if rows.inner or rows.splits:
        return refuse("the reduction is split or has inner reductions")
    if any(t in draft.outputs or draft.readers.get(t, [at]) != [at] for t in rows.outs):
        return refuse("a result of the reduction is needed elsewhere")
    mine = {r.index for r in op.reads if r.tensor in rows.outs}
    if len(mine) != 1 or any(r.other is not None for r in op.reads if r.tensor in rows.outs):
        return refuse("results of the reduction are read at different places")
    named = [_row(e, op) for e in mine.pop() if e.terms]
    if None in named or len(set(named)) != len(named):
        return refuse("rows are not dimensions of the map or groups of one: statistics would be computed again")
    needed = {d.name for d in rows.space if d.size > 1}
    if any(needed - read_dims(rows.reads[k]) for k in rows.body_reads()):
        return refuse("the reduction uses what it reads in several rows: it is a contraction")
    return None


def _row(e: Aff, op: Block) -> str | None:
    """The map's dimension d that an index of a row is, as ``d`` or as groups that fill it, ``floor(d/k)``."""
    atom = e.terms[0][0] if len(e.terms) == 1 and e.terms[0][1] == 1 and not e.const else ""
    if isinstance(atom, str):
        return atom or None
    whole = isinstance(atom, Floor) and atom.arg.is_dim and op.ranges[str(atom.arg)] % atom.div == 0
    return str(atom.arg) if whole else None


# Reduction-map fusion: a map that reads each reduced value once becomes the reduction's ``then``.


@register
class FuseEpilogue(PairRule):
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
    phase = "simplify"
    nothing = "no reduction with that reader alone"

    @property
    def reach(self) -> int:
        """See `MatchRule.reach`."""
        return 1

    def partners(self, draft: Draft, at: int) -> Iterable[str]:
        """Reductions that a map alone reads; the one with most points first."""
        op = draft.block(at)
        makers = {t: made for t in (op.inputs if op else ()) if (made := draft.maker(t)) is not None}
        return sorted(makers, key=lambda t: (points(makers[t].space), t), reverse=True)

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """The reduction with the map as its ``then``."""
        op, maker = draft.block(at), draft.block(other)
        if op is None or op.monoid or maker is None or not maker.monoid:
            return None
        if all(draft.only_reader(t) != at for t in maker.outs):
            return None
        return _refused_of_fuse_epilogue(op, maker) or _fused(draft, at, other, op, maker)


def _refused_of_fuse_epilogue(op: Block, maker: Block) -> Refusal | None:
    """Why a map may not become the reduction's ``then``."""
    if len(maker.outs) != 1:
        return refuse("only a map becomes the 'then' of a reduction with one result")
    if op.splits or maker.splits:
        return refuse("an operation that is split already is not fused")
    (tensor,) = maker.outs
    mine = {r for r in op.reads if r.tensor == tensor}
    if len(mine) > 1 or any(r.other is not None for r in mine):
        return refuse(f"'{tensor}' is not read through one unguarded projection")
    (read,) = mine
    if too_deep(op.body, maker.then):
        return refuse("the expression would be nested too deeply", f"at most {MOST_DEPTH} calls inside each other")
    cells = points((*maker.dims, *maker.inner_dims))
    if cells != points(op.dims):
        return refuse(f"'{tensor}' has {cells} cells, its reader {points(op.dims)} points")
    if _permutes(op, read):
        return None
    if as_scan(maker):
        return refuse(f"'{tensor}' runs along a dimension that its reader does not keep")
    collision = space.access(op, read, ()).collision()  # injective, and as many points as cells: a bijection
    if collision:
        return refuse("two points read one reduced value", str(collision))
    return None


def _fused(draft: Draft, at: int, other: int, op: Block, maker: Block) -> Match | Refusal:
    """The reduction over the map's dimensions, with the map as its ``then``; plain dimensions keep the reduction's names."""
    k = next(k for k, r in enumerate(op.reads) if r.tensor in maker.outs)
    fused = along_columns(inline(renamed_dims(op, _names(op, maker, op.reads[k])), k, maker, draft.tensors))
    if layered(maker) and not _permutes(op, op.reads[k]) and rows(fused) > rows(maker):
        return refuse(f"statistics of rows of '{maker.outs[0]}' would be computed again")
    return Match({at: (fused,), other: ()})


def _permutes(op: Block, read: Read) -> bool:
    """Whether the read is a permutation of the dimensions of size above 1."""
    plain = [str(e) for e in read.index if e.is_dim]
    fixed = all(e.is_dim or not e.terms for e in read.index)
    return fixed and len(set(plain)) == len(plain) and {d.name for d in op.dims if d.size > 1} <= set(plain)


def _names(op: Block, maker: Block, read: Read) -> dict[str, str]:
    """New names for the map's dimensions: the reduction's where a dimension is one of its own, else fresh."""
    out: dict[str, str] = {}
    for d, e in zip(maker.dims, read.index, strict=True):
        if e.is_dim:
            out[str(e)] = d.name
    others = fresh_dims((d for d in op.dims if d.name not in out), maker.space)
    return out | {name: d.name for name, d in others.items()}
