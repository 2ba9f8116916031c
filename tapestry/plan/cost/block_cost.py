"""What cutting an operation into blocks costs: cells that several blocks read, points beyond an even share, seconds a block.

The blocks of an operation together read at least what the whole reads. What they read more, since footprints overlap (a
window's halo, a weight that every block needs), and what each launch takes, is the marginal cost of a block; merges of
partial states come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tapestry.ir.footprint import Boxes
from tapestry.ir.graph import Block, Graph
from tapestry.ir.plan import Mesh, Strategy
from tapestry.ir.types import itemsize
from tapestry.plan.cost.compute import seconds_each, sizes
from tapestry.plan.strategy import op_boxes, reads_once, result_boxes
from tapestry.plan.topology import Topology

MOST = 1 << 24  # cells of the grid in which overlaps are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The blocks of one operation.

    Attributes:
        blocks: different ones; ``copies``: devices that compute each.
        uneven: points of the largest block over the mean, less 1.
        overlap: bytes by tensor that blocks read beyond those that the operation reads once.
        seconds: that one block more takes: all blocks' less that of the whole, over the blocks beyond the first.
    """

    blocks: int
    copies: int
    uneven: float
    overlap: dict[str, int]
    seconds: float


def block_cost(op: Block, graph: Graph, s: Strategy, mesh: Mesh, topo: Topology) -> BlockCost | None:
    """What its cut costs; ``None`` where it is not cut."""
    block = op_boxes(op, s.dims, mesh)
    first = np.sort(np.unique(block.reshape(len(block), -1), axis=0, return_index=True)[1])
    if len(first) == 1:
        return None
    points = sizes(block[first])
    overlap: dict[str, int] = {}
    for (t, _), boxes in reads_once(op, graph, s, mesh).items():
        mine = boxes[first]
        more = int(sizes(mine).sum()) - union(mine)
        overlap[t] = overlap.get(t, 0) + more * itemsize(graph.tensors[t].dtype)
    whole = Strategy(tuple(None for _ in mesh), tuple(None for _ in mesh))
    one = _seconds(op, graph, whole, mesh, topo)[0]
    each = _seconds(op, graph, s, mesh, topo)[first]
    return BlockCost(
        blocks=len(first),
        copies=len(block) // len(first),
        uneven=float(points.max() / points.mean() - 1),
        overlap={t: n for t, n in overlap.items() if n},
        seconds=float((each.sum() - one) / (len(first) - 1)),
    )


def _seconds(op: Block, graph: Graph, s: Strategy, mesh: Mesh, topo: Topology) -> np.ndarray:
    block, final = op_boxes(op, s.dims, mesh), result_boxes(op, s, mesh)
    return seconds_each(op, graph, block, final, reads_once(op, graph, s, mesh), topo)


def union(boxes: Boxes) -> int:
    """Cells in at least one of some boxes; in a grid too fine to count in, as if none overlapped."""
    some = np.unique(boxes[sizes(boxes) > 0], axis=0)
    if not len(some):
        return 0
    edges = [np.unique(some[:, a]) for a in range(some.shape[1])]
    if np.prod([float(max(1, len(e) - 1)) for e in edges]) * len(some) > MOST:
        return int(sizes(some).sum())
    seen = np.zeros([len(e) - 1 for e in edges], bool)
    for box in some:
        places = zip(edges, box, strict=True)
        seen[tuple(slice(*np.searchsorted(e, (lo, hi))) for e, (lo, hi) in places)] = True
    for e in reversed(edges):
        seen = seen @ np.diff(e)
    return int(seen)
