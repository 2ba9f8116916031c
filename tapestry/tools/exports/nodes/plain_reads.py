"""Reads of an operation as recognition wants them: without guards that their index implies, and of whole dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tapestry.ir.graph import Block, Guard, Read
from tapestry.ir.index import Aff, dim
from tapestry.ir.kernel import Box
from tapestry.rewrites.core import tile_footprint
from tapestry.tools.exports.nodes.onnx_nodes import Nodes, Value, relative


def implied(op: Block, g: Guard, r: Read, extents: Sequence[int]) -> bool:
    """Whether a guard fails only where the read leaves the tensor, and has its other value as it is."""
    ends = [Guard(e, "ge") for i, n in zip(r.index, extents, strict=True) for e in (i, i * -1 + (n - 1))]
    return r.other is not None and tile_footprint.implied(op, ends, g)


def plain(op: Block, extents: Sequence[Sequence[int]]) -> Block:
    """An operation without implied guards, and with whole dimensions where it reads every so many cells (see `cut_out`).

    Args:
        extents: of the tensor of each read.
    """
    reads = list[Read]()
    for read, shape in zip(op.reads, extents, strict=True):
        r = replace(read, when=tuple(g for g in read.when if not implied(op, g, read, shape)))
        names = [_stepped(e) for e in r.index]
        whole = "" in names or len({*names}) < len(names) or r.when or r.other is not None
        reads.append(r if whole else replace(r, index=tuple(map(dim, names))))
    return replace(op, reads=tuple(reads))


def _stepped(e: Aff) -> str:
    """The dimension of which an index is every so many cells; "" where it is none."""
    (atom, step), *more = (*e.terms, ("", 0))
    return atom if isinstance(atom, str) and step > 0 and len(more) == 1 else ""


def cut_out(
    nodes: Nodes, r: Read, at: Mapping[str, tuple[int, int]], box: Box | None, value: Value | None
) -> tuple[Box | None, Value | None]:
    """What a block reads every so many cells of, as the part of whole dimensions; a buffer that has it, and its cells."""
    parts = [(at[_stepped(e)], e.coef(_stepped(e)), e.const) for e in r.index]
    cells = [(s * a + c, s * (b - 1) + c + 1) for (a, b), s, c in parts]
    if box is None or value is None or any(a >= b or a < lo or hi < b for (a, b), (lo, hi) in zip(cells, box, strict=True)):
        return None, None
    return tuple(p for p, _, _ in parts), nodes.slice(value, relative(cells, box), [s for _, s, _ in parts])
