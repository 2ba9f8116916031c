"""What a cut costs a block: overlaps counted by hand, uneven parts, seconds of the cost model."""

from __future__ import annotations

import numpy as np
import pytest

from tapestry.ir.plan import Strategy
from tapestry.ir.syntax.parser import parse
from tapestry.plan.cost.block_cost import block_cost, union
from tapestry.plan.topology import parse_mesh, topology

LINEAR = """
graph g
input x: f32[7, 16]
input w: f32[16, 8]
y: f32[7, 8] = op [i: 7, n: 8 | m: 16 sum]
  reads x[i, m], w[m, n]
  body x * w
output y
"""
CONV = """
graph g
input x: f32[2, 12]
input k: f32[3, 2, 3]
y: f32[3, 12] = op [o: 3, h: 12 | c: 2 sum, r: 3 sum]
  reads x[c, h + r - 1] else 0.0, k[o, c, r]
  body x * k
output y
"""


def cost(text: str, mesh: str, *dims: str | None):
    graph, axes = parse(text, "g"), parse_mesh(mesh)
    op = graph.ops[0]
    names = [d.name for d in op.dims]
    out = tuple(names.index(d) if d in names else None for d in dims)
    return block_cost(op, graph, Strategy(dims, out), axes, topology(axes, "cpu"))


def test_overlaps_by_hand():
    batch = cost(LINEAR, "3", "i")
    assert (batch.blocks, batch.copies, batch.overlap) == (3, 1, {"w": 2 * 16 * 8 * 4})
    assert batch.uneven == pytest.approx(3 / (7 / 3) - 1)  # blocks of 2, 2 and 3 rows
    assert cost(LINEAR, "4", "n").overlap == {"x": 3 * 7 * 16 * 4}
    assert cost(LINEAR, "4", "m").overlap == {}
    both = cost(LINEAR, "2x2", "n", "m")
    assert (both.blocks, both.overlap) == (4, {"x": 7 * 16 * 4})
    part = cost(LINEAR, "2x2", "n", None)
    assert (part.blocks, part.copies, part.overlap) == (2, 2, {"x": 7 * 16 * 4})
    assert cost(LINEAR, "2", None) is None
    halo = cost(CONV, "4", "h")  # each of three seams is read by both sides, one cell beyond it
    assert halo.overlap == {"x": 3 * 2 * 2 * 4, "k": 3 * 3 * 2 * 3 * 4}


def test_seconds_are_the_models():
    batch, reduced = cost(LINEAR, "2", "i"), cost(LINEAR, "2", "m")
    assert batch.seconds > reduced.seconds > 0  # w is read once more; each has a launch of its own


def test_unions_are_counted():
    rng = np.random.default_rng(0)
    for _ in range(50):
        low = rng.integers(0, 6, (5, 3))
        boxes = np.stack([low, low + rng.integers(0, 4, (5, 3))], axis=-1)
        cells = {p for b in boxes for p in np.ndindex(9, 9, 9) if all(lo <= q < hi for q, (lo, hi) in zip(p, b, strict=True))}
        assert union(boxes) == len(cells)
