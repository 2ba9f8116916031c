"""Exact transfers: a device receives ``footprint − what it holds``, each cell from the nearest device that holds it.

Written for many (layout, footprint) pairs at once: an array [layouts, footprints, receivers, senders] of overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from tapestry.ir.plan import Layout, Mesh, coordinates
from tapestry.plan.strategy import Boxes
from tapestry.plan.topology import Topology


@dataclass(frozen=True, slots=True)
class Costs:
    """Per (layout, footprint): seconds, and bytes on the wire in all.

    A transfer also fills a new buffer with the whole footprint, which costs memory bandwidth and a launch.
    """

    seconds: np.ndarray
    bytes: np.ndarray


def owners(layout: Layout, mesh: Mesh) -> np.ndarray:
    """Which sender each receiver takes a block from: [receiver, sender] is True for the sender that differs from the
    receiver only along mesh axes that the layout cuts, so that every block has exactly one sender."""
    coords = np.array(coordinates(mesh))
    same = coords[:, None, :] == coords[None, :, :]
    replicated = np.array([t is None for t in layout], bool)
    return np.all(same | ~replicated, axis=-1)


def costs(held: list[tuple[Layout, Boxes]], wanted: list[Boxes], width: int, topo: Topology) -> Costs:
    """Cost of turning every held layout into every wanted footprint.

    Args:
        width: bytes per element.
    """
    mesh = topo.mesh
    shape = (len(held), len(wanted))
    want = np.stack(wanted)
    total = np.zeros(shape, np.int64)
    seconds = np.zeros(shape)
    alpha, beta = _distance(topo)
    for i, (layout, boxes) in enumerate(held):
        overlap = _overlap(want, boxes)
        overlap = overlap * owners(layout, mesh)
        diagonal = np.arange(overlap.shape[1])
        overlap[:, diagonal, diagonal] = 0
        received = overlap * width
        total[i] = received.sum(axis=(1, 2))
        peers = (overlap > 0).sum(axis=2)
        latency = np.max(np.where(overlap > 0, alpha, 0.0), axis=2) * np.ceil(np.log2(peers + 1))
        filled = np.prod(want[..., 1] - want[..., 0], axis=-1) * width / topo.device.bandwidth
        moving = np.max((received * beta).sum(axis=2) + latency + filled, axis=1) + topo.device.launch
        seconds[i] = np.where(total[i] > 0, moving, 0.0)
    return Costs(seconds, total)


def _overlap(want: np.ndarray, boxes: Boxes) -> np.ndarray:
    """[footprints, receivers, senders] number of common points."""
    out: np.ndarray | None = None
    for axis in range(want.shape[2]):
        lo = np.maximum(want[:, :, None, axis, 0], boxes[None, None, :, axis, 0])
        hi = np.minimum(want[:, :, None, axis, 1], boxes[None, None, :, axis, 1])
        extent = np.maximum(hi - lo, 0)
        out = extent if out is None else out * extent
    return np.ones((len(want), want.shape[1], len(boxes)), np.int64) if out is None else out


def _distance(topo: Topology) -> tuple[np.ndarray, np.ndarray]:
    """alpha and beta between every two devices: those of the slowest mesh axis along which they differ."""
    coords = np.array(coordinates(topo.mesh)).reshape(len(coordinates(topo.mesh)), len(topo.mesh))
    alpha = np.zeros((len(coords), len(coords)))
    beta = np.zeros_like(alpha)
    for k, link in enumerate(topo.links):
        differ = coords[:, None, k] != coords[None, :, k]
        alpha = np.maximum(alpha, differ * link.alpha)
        beta = np.maximum(beta, differ * link.beta)
    return alpha, beta


def reduce_seconds(nbytes: int, axes: list[tuple[int, bool]], topo: Topology) -> float:
    """Time to merge states of ``nbytes`` per device along mesh axes, one after another.

    Args:
        axes: (mesh axis, whether it is a reduce-scatter). The cheaper of recursive halving (and doubling back, for an
            all-reduce), ``⌈log2 n⌉ α + (n-1)/n B β`` per phase, and recursive doubling of whole states,
            ``⌈log2 n⌉ (α + B β)``; after Thakur, Rabenseifner and Gropp 2005.
    """
    total = 0.0
    for axis, scatter in axes:
        n, link = topo.mesh[axis].size, topo.links[axis]
        if n == 1:
            continue
        steps = ceil(log2(n))
        halving = (1 if scatter else 2) * (steps * link.alpha + (n - 1) / n * nbytes * link.beta)
        total += min(halving, steps * (link.alpha + nbytes * link.beta))
        nbytes = nbytes // n if scatter else nbytes
    return total
