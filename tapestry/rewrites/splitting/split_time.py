"""`split_time`: the split of a dimension bound to time. A region is run part after part, so that it needs less memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.ir.graph import Block, Graph, Op, names_of
from tapestry.rewrites.core.edit import accept, cut_refusal, op_at, order_refusal
from tapestry.rewrites.core.rule import Move, Refusal, Rule, refuse, register
from tapestry.rewrites.splitting.tiled_region import Clones, Cut, clone, even, grow

REACH = 8  # positions before an operation that `find` looks at; moves may reach further


@register
class SplitTime(Rule):
    """Run an operation, and those before it that feed each part with a part, once per part of a dimension.

    Of a map dimension that is tiling, of one that reaches the graph's inputs micro-batching; of a reduced one
    accumulation: the states of a part are merged into those of the parts before it. The region reaches ``back`` positions
    before the operation. Each producer in it computes for every part the hull of what that part reads (a window's overlap
    is computed again); one that some part needs whole stays before the region. Readers outside get the parts put together.

    before:
        graph mlp
        input x: f32[4, 3]
        input w: f32[3, 8]
        input v: f32[8, 2]
        h: f32[4, 8] = op [i: 4, n: 8 | m: 3 sum]
          reads x[i, m], w[m, n]
          body x * w
          then max(acc0, 0.0)
        y: f32[4, 2] = op [i: 4, n: 2 | m: 8 sum]
          reads h[i, m], v[m, n]
          body h * v
        output y

    move: split_time@y{dim=m,parts=2,back=1}

    after:
        graph mlp
        input x: f32[4, 3]
        input w: f32[3, 8]
        input v: f32[8, 2]
        "h@0": f32[4, 4] = op [i: 4, n: 4 | m: 3 sum]
          reads x[i, m], w[m, n]
          body x * w
          then max(acc0, 0.0)
        "y@0.value": f32[4, 2] = op [i: 4, n: 2 | m: 4 sum]
          reads a0 = "h@0"[i, m], v[m, n]
          body a0 * v
        "h@1": f32[4, 4] = op [i: 4, n: 4 | m: 3 sum]
          reads x[i, m], w[m, n + 4]
          body x * w
          then max(acc0, 0.0)
        "y@1.value": f32[4, 2] = op [i: 4, n: 2 | m: 4 sum]
          reads a0 = "h@1"[i, m], v[m + 4, n]
          body a0 * v
        y: f32[4, 2] = op [i: 4, n: 2]
          reads a0 = "y@0.value"[i, n], a1 = "y@1.value"[i, n]
          body a0 + a1
        output y

    legal when:
        the operation has the dimension and no part of it is empty; it is not split already; a reduced dimension is the
        first one where its monoid does not commute.
    """

    name = "split_time"
    phase = "fit"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """For every dimension two parts: of the operation alone, and with what feeds it part by part from nearby."""
        for at, op in enumerate(graph.ops):
            for d in op.space:
                no = split_time_refusal(op, d.name, 2)
                if no:
                    yield replace(no, rule=self.name, at=op.outs[0])
                    continue
                reach = at - min(grow(graph, {at: even(d.name, d.size, 2)}, at - REACH))
                for back in dict.fromkeys((0, reach)):
                    yield time_move(op, d.name, 2, back)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the region once per part."""
        return split_time(graph, move).graph


def time_move(op: Op, dim: str, parts: int, back: int) -> Move:
    """The move that runs an operation, and what feeds it from ``back`` positions before, part after part."""
    return Move("split_time", op.outs[0], (("dim", dim), ("parts", parts), ("back", back)))


def split_time(graph: Graph, move: Move) -> Clones:
    """Apply the move; says which part each operation belongs to.

    Raises:
        TapestryError: it is not legal here.
    """
    at, op = op_at(graph, move)
    name, parts = move.text("dim"), move.number("parts")
    accept(split_time_refusal(op, name, parts), move)
    return clone(graph, region(graph, at, name, parts, move.number("back")))


def region(graph: Graph, at: int, dim: str, parts: int, back: int) -> dict[int, Cut]:
    """The operations of the region, and how each is cut."""
    return grow(graph, {at: even(dim, graph.ops[at].ranges[dim], parts)}, at - back)


def split_time_refusal(op: Op, name: str, parts: int) -> Refusal | None:
    """Why a dimension cannot be run in so many parts; ``None`` when it can."""

    size = op.ranges.get(name)
    if size is None:
        known = ", ".join(f"'{d.name}'" for d in op.space) or "none"
        return refuse(f"there is no dimension '{name}'", f"the dimensions are {known}")
    if isinstance(op, Block) and any(d.name == name for d in op.inner_dims):
        return refuse(f"'{name}' is reduced whole inside every point", "an inner reduction is never cut")
    if no_parts := cut_refusal(name, size, parts):
        return no_parts
    if op.splits:
        return refuse("it is split already", str(op.splits[0]))
    return order_refusal(op, name) if isinstance(op, Block) and name in names_of(op.reduce) else None
