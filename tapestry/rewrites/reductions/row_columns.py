"""Rows of an operation that keeps states once per row: how many there are, and the reduced dimension as the row's columns."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tapestry.ir.graph import Block, Dim
from tapestry.ir.index import Aff, const, dim, floordiv
from tapestry.ir.state import row_groups
from tapestry.rewrites.core.edit import merge_reads, reindex, substitute_read, unused


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
