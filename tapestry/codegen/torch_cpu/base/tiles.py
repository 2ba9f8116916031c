"""Reductions by torch operators, tile by tile: what is written out of an index space at once has a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, product

import torch

from tapestry.codegen.torch_cpu.base import state_merges
from tapestry.codegen.torch_cpu.base.point_values import Expressions
from tapestry.codegen.torch_cpu.base.strided_reads import Frame, Tensor
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel

POINTS = 1 << 22  # at most in a tile: 16 MiB of f32 for each value of the body


def tiles(block: Box, most: int) -> list[Box]:
    """Boxes of at most so many points that cover a block, in the order of its points.

    A dimension is cut only where all before it are cut to single places, so that a tile's points are consecutive.
    """
    rest, cuts = 1, list[list[tuple[int, int]]]()
    for lo, hi in block:
        rest *= hi - lo
    for lo, hi in block:
        step = hi - lo if rest <= most else max(1, (hi - lo) * most // rest)
        rest = rest // max(hi - lo, 1) * step
        cuts.append([(a, min(a + step, hi)) for a in range(lo, hi, max(step, 1))] or [(lo, hi)])
    return list(product(*cuts))


def states(op: Block, graph: Graph, kernel: Kernel) -> Callable[[Sequence[Tensor | None]], list[Tensor]]:
    """Monoid states of each output point: values at the points of a tile, merged by dense operators, and tiles in order."""
    monoid, keep = op.monoid, len(op.dims)
    assert monoid is not None

    def one(box: Box) -> Callable[[Sequence[Tensor | None]], list[Tensor]]:
        frame = Frame(op.space, box)
        body = Expressions(op, graph, replace(kernel, block=box), op.body, frame)
        return lambda ins: state_merges.reduce(monoid, [v.expand(frame.extents) for v in body.values(ins, [])], keep)

    found = tiles(kernel.block, POINTS)
    if len(found) == 1:
        return one(kernel.block)
    dtypes = tuple(e.dtype for e in op.body)
    cells = [(cell, [one(box) for box in of]) for cell, of in groupby(found, key=lambda box: box[:keep])]
    extents = [hi - lo for lo, hi in kernel.block[:keep]]

    def run(ins: Sequence[Tensor | None]) -> list[Tensor]:
        outs: list[Tensor] = []
        for cell, parts in cells:
            merged = parts[0](ins)
            for part in parts[1:]:
                merged = state_merges.combine(monoid, merged, part(ins), dtypes)
            outs = outs or [torch.empty(extents, dtype=x.dtype, device=x.device) for x in merged]
            place = tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(cell, kernel.block, strict=False))
            for out, x in zip(outs, merged, strict=True):
                out[place] = x
        return outs

    return run
