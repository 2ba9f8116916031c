"""A lower bound of what every plan of every rewritten graph costs: what its operations must do at least, evenly shared.

Splits in time and recomputation compute each point of the graph at least once, write each cell and read each cell that is
needed at least once; a cost is additive in all three, or a norm of them (the parts' norms are no less than that of their
sum). Some device does at least its share of each operation, no device is faster than the best of them in anything, and each
operation is launched. Loads, transfers and what is done twice only add. (The bound of the plans in space is not one of
these: parts may be spread more evenly than the whole, and their footprints leave out gaps that the whole's includes.)
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from tapestry.ir.footprint import Boxes
from tapestry.ir.graph import Block, Graph, Op, Read
from tapestry.ir.index import bounds, dims_of
from tapestry.ir.plan import device_count
from tapestry.ir.recognition.selection_sum import selection
from tapestry.ir.types import itemsize
from tapestry.plan.cost.compute import arithmetic, norm, rates_of, shares_read
from tapestry.plan.topology import Topology


def least_seconds(graph: Graph, topo: Topology, *, everywhere: bool = True) -> float:
    """Seconds that no plan of the graph, and of no graph that splits in time make of it, can be under.

    Args:
        everywhere: whether each device launches each operation; else some device does, as with pipeline stages.
    """
    n, kinds = device_count(topo.mesh), topo.kinds or (topo.device,)
    total, power = 0.0, np.max(topo.each(lambda d: d.power))
    for op in graph.ops:
        whole = np.array([[(0, d.size) for d in op.space]], np.int64).reshape(1, len(op.space), 2)
        heavy, light = arithmetic(op, whole, whole[:, : len(op.dims)])
        final = prod(d.size for d in op.dims)
        moved = final * sum(itemsize(graph.tensors[t].dtype) for t in op.outs) + _read_bytes(op, graph, whole)
        launch, *best = zip(*(rates_of(op, graph, d) for d in kinds), strict=True)
        work = (float(heavy[0]), float(light[0]), moved)
        each = [np.array(w / max(k)) for w, k in zip(work, best, strict=True)]
        total += min(launch) / (1 if everywhere else n) + float(norm(each, power)) / n
    return total


def _read_bytes(op: Op, graph: Graph, whole: Boxes) -> float:
    if not isinstance(op, Block):
        return sum(graph.tensors[t].nbytes for t in op.inputs)
    most, final, shares = dict[str, float](), prod(d.size for d in op.dims), shares_read(op, whole)
    for r in op.reads:
        cells = least_cells(op, r, graph.tensors[r.tensor].shape)
        cells = min(cells, final) if selection(op) else cells * float(shares.get(r.tensor, [1.0])[0])
        most[r.tensor] = max(most.get(r.tensor, 0), cells * itemsize(graph.tensors[r.tensor].dtype))
    return sum(most.values())


def least_cells(op: Block, read: Read, shape: tuple[int, ...], sizes: Mapping[str, int] | None = None) -> int:
    """Cells that a read surely touches: a product over axes that share no dimension; ``sizes``: in any part of the operation of
    so many points along each dimension.

    An affine index takes at least ``1 + Σ (size - 1)`` values (a sum of sets of integers); those outside are subtracted.
    Axes with a floor, a mod or a dimension of an earlier axis count one, reads under guards nothing.
    """
    if read.when:
        return 0
    cells, used, along = 1, set[str](), sizes or op.ranges
    for e, n in zip(read.index, shape, strict=True):
        if not e.is_affine or used & dims_of(e):
            continue
        lo, hi = bounds(e, {x.name: (0, x.size - 1) for x in op.space})
        values = 1 + sum(along[str(a)] - 1 for a, _ in e.terms)
        cells *= max(0, min(values, n) - max(0, -int(lo)) - max(0, int(hi) - n + 1))
        used |= dims_of(e)
    return cells
