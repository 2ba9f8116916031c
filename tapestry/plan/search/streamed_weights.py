"""Which weights may be loaded from the host for every use, and which must be for a plan to fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapestry.ir.graph import Graph
from tapestry.ir.program import Free, allocated, device_bytes
from tapestry.ir.types import itemsize
from tapestry.plan.cost import compute
from tapestry.plan.lower import distinct
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.search.problem import load_seconds
from tapestry.plan.topology import Topology


def streamable(graph: Graph, fixed: Sequence[str], limit: int) -> frozenset[str]:
    """Weights that may be streamed: none in a fixed layout, no outputs, none so small that its loads are not worth it."""
    least = min(limit, 1 << 26) / 1000
    readers = graph.consumers()
    stay = {*fixed, *graph.outputs}
    return frozenset(t for t in graph.weights if t not in stay and t in readers and graph.tensors[t].nbytes >= least)


def fewest(found: PricedPlan, topo: Topology) -> frozenset[str]:
    """Of the weights that a plan streams, those that must be for it to fit; the others stay where they are needed most often.

    Worked out on the plan's own program: a weight that stays holds its footprints from the start to the end instead of
    around its uses. Those stay first whose loads take the most seconds per byte held.
    """
    program = found.program
    over = np.zeros((len(program.steps), program.devices), np.int64)  # alive after each step, less the limit
    kept: dict[str, np.ndarray] = {}
    seconds: dict[str, float] = {}
    boxes: dict[str, list[np.ndarray]] = {}
    ends = {b: i for i, s in enumerate(program.steps) if isinstance(s, Free) for b in s.buffers}
    for i, step in enumerate(program.steps):
        for b in allocated(step):
            buffer = program.buffers[b]
            sizes = device_bytes(buffer)
            until = ends.get(b, len(program.steps))
            over[i:until] += sizes
            if buffer.tensor in found.plan.streamed:
                t = buffer.tensor
                kept.setdefault(t, np.zeros_like(over))[i:until] -= sizes
                seconds[t] = seconds.get(t, 0.0) + load_seconds(int(sizes.max()), topo.device)
                boxes.setdefault(t, []).append(np.array(buffer.boxes, np.int64).reshape(program.devices, -1, 2))
    over -= np.array(topo.memories(), np.int64)
    for t, found_boxes in boxes.items():
        width = itemsize(found.plan.graph.tensors[t].dtype)
        kept[t] += sum(compute.sizes(b) * width for b in distinct(found_boxes))
    streamed = set(found.plan.streamed)
    for t in sorted(kept, key=lambda t: -seconds[t] / max(1, int(kept[t].max()))):
        if not np.any(over + kept[t] > 0):
            over += kept[t]
            streamed.remove(t)
    return frozenset(streamed)
