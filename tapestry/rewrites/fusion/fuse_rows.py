"""A reduction of rows and the map that reads its result back over the same rows become one operation."""

from __future__ import annotations

from dataclasses import replace

from tapestry.ir.graph import Block, Dim, names_of, points
from tapestry.ir.index import Aff, Floor, const, dim, floordiv
from tapestry.ir.monoid import primitive_of
from tapestry.ir.recognition.exponential import exponential
from tapestry.ir.recognition.state import row_groups
from tapestry.rewrites.core.edit import merge_reads, read_dims, reindex, substitute_read, unused
from tapestry.rewrites.core.inline import inline
from tapestry.rewrites.core.matching import Draft, Match, OpRule
from tapestry.rewrites.core.rule import Refusal, refuse, register
from tapestry.rewrites.fusion.softmax_pattern import WEIGHTS


def along_columns(op: Block) -> Block:
    """The operation with its one reduced dimension, where that runs row-major over several columns, as a dimension for each.

    Only where the reduction then reads what ``then`` reads as ``then`` does, so that a row may be read once: a row that was
    flattened for its statistics and is written in its own shape. Itself where it is not so.
    """
    if len(op.reduce) != 1 or op.splits or op.inner or not op.then:
        return op
    groups = row_groups(op)
    taken = names_of(op.space)
    columns, here = list[Dim](), dict[str, Aff]()  # the columns; the map's dimensions at a column of the row
    for d in op.dims:
        k = groups.get(d.name, 1)
        if k == 1:
            continue
        name = unused(f"{d.name}_", taken)
        taken.add(name)
        columns.append(Dim(name, k))
        here[d.name] = floordiv(dim(d.name), k, op.ranges) * k + dim(name)
    if len(columns) < 2 or points(columns) != op.reduce[0].size:
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
                one = along_columns(inline(op, k, rows, draft.tensors)) if not (no := _not_one(draft, at, op, rows)) else None
                return no if one is None else Match({at: (one,), draft.makers[r.tensor]: ()})
        return None


def _not_one(draft: Draft, at: int, op: Block, rows: Block) -> Refusal | None:
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
