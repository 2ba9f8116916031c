"""Blocks of operations, and buffers that hold what a block reads."""

from __future__ import annotations

import random

import numpy as np
import torch

from tapestry.codegen.torch_cpu.kernels import from_numpy
from tapestry.ir import space
from tapestry.ir.footprint import hull, opaque_boxes
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import Box


def sub_box(box: Box, rng: random.Random) -> Box:
    out = []
    for lo, hi in box:
        a = rng.randint(lo, max(lo, hi - 1))
        out.append((a, rng.randint(min(a + 1, hi), hi)))
    return tuple(out)


def buffers(op: Block, graph, block: Box, values, rng: random.Random, used) -> tuple[list, list]:
    """A buffer per read that holds the block's footprint and a random rim around it."""
    boxes, arrays = [], []
    for k, r in enumerate(op.reads):
        if k not in used:
            boxes.append(None)
            arrays.append(None)
            continue
        shape = graph.tensors[r.tensor].shape
        image = space.access(op, r, shape).image(block)
        hull = tuple((0, 0) for _ in shape) if image is None else image.hull()
        box = tuple(
            (max(0, lo - rng.randint(0, 2)), min(n, hi + rng.randint(0, 2))) for (lo, hi), n in zip(hull, shape, strict=True)
        )
        boxes.append(box)
        arrays.append(from_numpy(np.array(values[r.tensor][tuple(slice(lo, hi) for lo, hi in box)])))
    return boxes, arrays


def dense(t: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, each cell once, in whatever order of axes."""
    steps = sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1)
    return all(s == int(np.prod([n for _, n in steps[:k]])) for k, (s, _) in enumerate(steps))


def read_box(op: Op, graph: Graph, k: int, block: Box) -> Box:
    """The part of its tensor that read number k of a block needs, clipped to the tensor."""
    points = np.array(block, np.int64).reshape(1, len(block), 2)
    if not isinstance(op, Block):
        found = next(boxes for n, _, boxes in opaque_boxes(op, graph, points) if n == k)
    else:
        spans = {d.name: (points[:, i, 0], points[:, i, 1] - 1) for i, d in enumerate(op.space)}
        found = hull(op.reads[k], spans, graph.tensors[op.reads[k].tensor].shape, 1)
    return tuple((int(lo), int(hi)) for lo, hi in found[0])
