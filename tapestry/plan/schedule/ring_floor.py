"""What a ring instead of a gather makes an operation wait for at least, beyond the time of its own kernels."""

from __future__ import annotations

import numpy as np

from tapestry.ir.graph import Block, Graph
from tapestry.ir.plan import Strategy, device_count
from tapestry.ir.types import itemsize
from tapestry.plan import ring_attention
from tapestry.plan.cost import compute
from tapestry.plan.pipelines.staged_plan import link_between
from tapestry.plan.strategy import Boxes
from tapestry.plan.topology import Topology


def ring_floors(
    op: Block, graph: Graph, s: Strategy, wanted: dict[int, Boxes], own: np.ndarray, lanes: list[int], topo: Topology
) -> dict[int, np.ndarray]:
    """For each read that may travel round a ring, by lane: seconds of all its messages but for what kernels may hide.

    A device gets all blocks but its own, one message after another. The kernel of the last block, at least an even share of all
    that they do, follows the last message. Where transfers and kernels share a stream, all of them and their launches add up.

    Args:
        wanted: what each read gathers.
        own: seconds of the operation's kernels, by lane.
    """
    out: dict[int, np.ndarray] = {}
    launch = np.broadcast_to(topo.each(lambda d: d.launch), device_count(topo.mesh))[lanes]
    for r in ring_attention.rings(op, s, topo.mesh):
        axis = ring_attention.axis_of(r)
        assert axis is not None
        turning = ring_attention.travelling(op, r)
        for k in turning:
            held = ring_attention.held(op, graph, r, topo.mesh, k, 0)
            width = itemsize(graph.tensors[op.reads[k].tensor].dtype)
            missing = np.maximum(compute.sizes(wanted[k]) - compute.sizes(held), 0) * width
            senders = {m.dst: m.src for m in ring_attention.passed_on(held, topo.mesh, axis)}
            links = [link_between(topo, senders[d], d) if d in senders else None for d in lanes]
            steps = topo.mesh[axis].size - 1
            way = [steps * link.alpha + missing[d] * link.beta if link else 0.0 for d, link in zip(lanes, links, strict=True)]
            if topo.overlap:
                floor = np.maximum(np.array(way) + own / topo.mesh[axis].size - own, 0.0)
            else:  # (launches are shared out among the tensors that travel)
                floor = np.array(way) + topo.mesh[axis].size * launch / len({op.reads[m].tensor for m in turning})
            out[k] = np.minimum(out[k], floor) if k in out else floor
    return out
