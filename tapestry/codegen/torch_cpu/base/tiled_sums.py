"""Reductions by torch operators, tile by tile: what is written out of an index space at once has a bound."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch

from tapestry.codegen.torch_cpu.base import state_merges
from tapestry.codegen.torch_cpu.base.point_values import Expressions, States, product
from tapestry.codegen.torch_cpu.base.strided_reads import Frame, Tensor
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.ir.expr import arg_positions
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, size
from tapestry.ir.recognition.contraction import sides

NO_CONTRACTION = Refusal("it is no sum of products of two factors that torch multiplies as matrices")
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
    return list(itertools.product(*cuts))


def states(op: Block, graph: Graph, kernel: Kernel) -> States:
    """Monoid states of each output point: values at the points of a tile, merged by dense operators, and tiles in order."""
    monoid, keep = op.monoid, len(op.dims)
    assert monoid is not None

    def one(box: Box) -> States:
        frame = Frame(op.space, box)
        body = Expressions(op, graph, replace(kernel, block=box), op.body, frame)
        return lambda ins: state_merges.reduce(monoid, [v.expand(frame.extents) for v in body.values(ins, [])], keep)

    return _merged(op, kernel, tiles(kernel.block, POINTS), one)


def tiled_product(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> States | Refusal:
    """States of a contraction.

    In tiles where a factor is written out at many more points than its tensor has cells, such as a window's.
    """
    found = sides(op)
    if found is None or any(d.size == 0 for d in op.space):
        return NO_CONTRACTION
    steps = {d.name: hi - lo for d, (lo, hi) in zip(op.space, kernel.block, strict=True)}
    for factor, dims in zip(found[:2], found[2:], strict=True):
        cells = sum(size(box) for k in arg_positions((factor,)) if (box := kernel.ins[k]) is not None)
        points, most = prod(steps[d] for d in dims), max(POINTS, 2 * cells)
        for d in (d.name for d in op.space if d.name in dims and points > most):
            step = max(1, steps[d] * POINTS // points)
            steps[d], points = step, points // steps[d] * step
    cuts = [
        [(a, min(a + steps[d.name], hi)) for a in range(lo, hi, steps[d.name])]
        for d, (lo, hi) in zip(op.space, kernel.block, strict=True)
    ]

    boxes = list(itertools.product(*cuts))
    if len(boxes) == 1:
        return product(op, graph, kernel, frame) or NO_CONTRACTION
    parts = {b: product(op, graph, replace(kernel, block=b), Frame(op.space, b)) for b in boxes}
    runs = {b: run for b, run in parts.items() if run is not None}
    return _merged(op, kernel, boxes, lambda box: runs[box]) if len(runs) == len(boxes) else NO_CONTRACTION


def _merged(op: Block, kernel: Kernel, boxes: Sequence[Box], one: Callable[[Box], States]) -> States:
    """States of boxes that cover a block, those of equal output points one after another."""
    if len(boxes) == 1:
        return one(boxes[0])
    monoid, keep, dtypes = op.monoid or "", len(op.dims), tuple(e.dtype for e in op.body)
    cells = [(cell, [one(box) for box in of]) for cell, of in itertools.groupby(boxes, key=lambda box: box[:keep])]
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
