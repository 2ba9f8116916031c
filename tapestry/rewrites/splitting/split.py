"""`split`: cut a dimension into contiguous blocks and bind them to a resource. The one rule that planning is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tapestry.ir.graph import Block, Dim, Graph, Op, Read, Split
from tapestry.ir.index import bounds, dims_of
from tapestry.ir.kernel import cut
from tapestry.ir.monoid import MONOIDS
from tapestry.rewrites.core.edit import accept, op_at, order_refusal
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register

_RESOURCE = re.compile(r"mesh\.\w+|time|grid|loop")


@register
class SplitRule(Rule):
    """Cut a dimension into ``parts`` contiguous blocks, bound to ``mesh.<axis>``, ``time``, ``grid`` or ``loop``.

    Block k of a dimension of size n is ``[k*n // parts, (k+1)*n // parts)``: sizes differ by at most one. A block of a
    map dimension computes its own cells of the outputs; a block of a reduced one computes a partial monoid state, and
    the states are merged. Each block must receive its footprint in every tensor it reads: where neighbouring footprints
    overlap (a convolution's window), the cells beyond the block's own share are its `halo`.

    before:
        graph example
        input x: f32[7, 5]
        y: f32[7] = op [n: 7 | m: 5 sum]
          reads x[n, m]
          body x
        output y

    move: split@y{dim=n,parts=3,to=mesh.d0}

    after:
        graph example
        input x: f32[7, 5]
        y: f32[7] = op [n: 7 | m: 5 sum]
          reads x[n, m]
          body x
          split n/3 mesh.d0
        output y

    legal when:
        the operation has the dimension (an opaque one only has those along which it commutes with splitting); no part
        is empty; a mesh axis cuts one dimension of an operation, once; a reduced dimension has a monoid, and where that
        does not commute it is the first reduced one.
    """

    name = "split"
    phase = "request"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """For every operation and dimension the cut in two over mesh axis d0; `splittable` lists dimensions for any other."""
        for op in graph.ops:
            for d in splittable(op):
                yield split_move(op, d.name, 2, "mesh.d0")
            yield from refusals(op)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the split added to the operation."""
        at, op = op_at(graph, move)
        new = Split(move.text("dim"), move.number("parts"), move.text("to"))
        accept(refusal(op, new), move)
        changed = replace(op, splits=(*op.splits, new))
        return replace(graph, ops=(*graph.ops[:at], changed, *graph.ops[at + 1 :]))


def split_move(op: Op, dim: str, parts: int, to: str) -> Move:
    """The move that splits an operation."""
    return Move("split", op.outs[0], (("dim", dim), ("parts", parts), ("to", to)))


def splittable(op: Op) -> tuple[Dim, ...]:
    """The dimensions of an operation that can be cut into at least two parts."""
    return tuple(d for d in op.space if refusal(op, Split(d.name, 2, "time")) is None)


def refusals(op: Op) -> tuple[Refusal, ...]:
    """Why the other dimensions of an operation cannot be cut; for an opaque one, why its other axes cannot."""
    found = [refusal(op, Split(d.name, 2, "time")) for d in op.space]
    if not isinstance(op, Block):
        found.append(Refusal("split", op.outs[0], f"no other axis commutes with splitting: {op.why or op.kind}"))
    return tuple(r for r in found if r)


def refusal(op: Op, new: Split) -> Refusal | None:
    """Why a split is not legal here; ``None`` when it is."""

    def no(reason: str, witness: str = "") -> Refusal:
        return Refusal("split", op.outs[0], reason, witness)

    size = op.ranges.get(new.dim)
    names = ", ".join(f"'{d.name}'" for d in op.space) or "none"
    if size is None and not isinstance(op, Block):
        return no(f"axis '{new.dim}' does not commute with splitting: {op.why or op.kind}", f"it may be cut along {names}")
    if size is None:
        return no(f"there is no dimension '{new.dim}'", f"the dimensions are {names}")
    if isinstance(op, Block) and any(d.name == new.dim for d in op.inner_dims):
        return no(f"'{new.dim}' is reduced whole inside every point", "an inner reduction is never cut")
    if not _RESOURCE.fullmatch(new.to):
        return no(f"'{new.to}' is not a resource", "mesh.d0, time, grid and loop are")
    for s in op.splits:
        if s.to == new.to and s.to.startswith("mesh."):
            return no(f"'{new.to}' already cuts '{s.dim}'", f"{s.dim}/{s.parts} {s.to}")
    return _size_refusal(op, new, size, no("")) or _monoid_refusal(op, new.dim, no(""))


def _size_refusal(op: Op, new: Split, size: int, at: Refusal) -> Refusal | None:
    if new.parts < 1:
        return replace(at, reason=f"a dimension cannot be cut into {new.parts} parts")
    parts = new.parts
    for s in op.splits:
        parts *= s.parts if s.dim == new.dim else 1
    if parts <= size:
        return None
    empty = next(k for k in range(parts) if k * size // parts == (k + 1) * size // parts)
    points = "1 point" if size == 1 else f"{size} points"
    return replace(
        at, reason=f"{points} of '{new.dim}' cannot be cut into {parts} non-empty parts", witness=f"part {empty} is empty"
    )


def _monoid_refusal(op: Op, dim: str, at: Refusal) -> Refusal | None:
    if not isinstance(op, Block) or all(d.name != dim for d in op.reduce):
        return None
    if op.monoid not in MONOIDS:
        return replace(at, reason=f"'{dim}' is reduced by no known monoid", witness=f"monoid {op.monoid}")
    no = order_refusal(op, dim)
    return no and replace(no, rule=at.rule, at=at.at)


def halo(op: Block, read: Read, dim: str, parts: int, graph: Graph) -> tuple[int, int]:
    """Cells that a block reads before and after its own share of the tensor, at most, when ``dim`` is cut.

    The own share of block k is block k of the axis that ``dim`` walks, cut into as many parts. A read that does not
    depend on ``dim`` has no halo: every block reads the same cells.
    """
    before = after = 0
    shape = graph.tensors[read.tensor].shape
    for axis, e in enumerate(read.index):
        if dim not in dims_of(e):
            continue
        for k in range(parts):
            box = {d.name: (0, d.size - 1) for d in op.space}
            lo, hi = cut(box[dim][1] + 1, parts, k)
            box[dim] = (lo, hi - 1)
            first, last = bounds(e, box)
            own = cut(shape[axis], parts, k)
            before = max(before, own[0] - max(0, int(first)))
            after = max(after, min(shape[axis], int(last) + 1) - own[1])
    return before, after
