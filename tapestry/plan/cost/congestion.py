"""How busy the wires of a fabric are when layouts turn into footprints.

Exact: the bytes that each device of a line (the devices that the fabric joins) takes from each coordinate of the line, and
the path that they take. Modelled: a message that crosses several fabrics is counted on each of them in the line of its
receiver; where the footprints of a line's receivers differ along tensor axes that have nothing to do with the fabric, the
largest counts for all, so that the time is not underestimated.
"""

from __future__ import annotations

from math import prod

import numpy as np

from tapestry.plan.cost.footprint_overlap import Along, Axes, Senders
from tapestry.plan.topology.fabric import Fabric
from tapestry.plan.topology.routing import routes

CONGESTION_CHUNK = 1 << 22  # numbers in an array
Cuts = tuple[tuple[int, Axes], ...]  # (tensor axis, mesh axes that cut it)


def busiest(found: Senders, fabric: Fabric, axes: Axes) -> tuple[np.ndarray, np.ndarray]:
    """[layouts, footprints, devices] of (seconds per byte of an element's width that the busiest wire of the device's line is
    busy, latency of the longest path that anything for the device takes); ``axes`` are the fabric's."""
    busy, path = np.zeros((2, len(found.held), *found.size.shape))
    known: dict[Cuts, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for n, (layout, _) in enumerate(found.held):
        cuts = tuple((i, tuple(a for a, t in enumerate(layout) if t == i)) for i in range(len(found.axes)))
        active = tuple((i, cut) for i, cut in cuts if set(cut) & set(axes))
        if not active:
            continue
        if active not in known:
            known[active] = _lines(found.axes, active, fabric, axes)
        seconds, latency, rows = known[active]
        others = np.ones_like(found.size)
        for i, along in enumerate(found.axes):
            if all(i != k for k, _ in active):
                others = others * np.maximum(along.want[..., 1] - along.want[..., 0], 0)[along.which]
        line = others.reshape(len(others), -1, fabric.size, fabric.stride)
        most = np.broadcast_to(line.max(axis=2, keepdims=True), line.shape).reshape(others.shape)
        busy[n], path[n] = seconds[rows] * most, np.where(most > 0, latency[rows], 0.0)
    return busy, path


def _lines(axes: list[Along], active: Cuts, fabric: Fabric, joined: Axes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([kinds, devices] of seconds, of latencies, kind of each footprint) along the tensor axes that the fabric cuts."""
    which = np.stack([axes[i].which for i, _ in active])
    kinds, rows = np.unique(which, axis=1, return_inverse=True)
    shared = [tuple(a for a in cut if a in joined) for _, cut in active]
    tables = [axes[i].by_sender(cut, s) for (i, cut), s in zip(active, shared, strict=True)]
    devices = tables[0].shape[1]
    at, back, line = _places(axes[0], fabric, joined, tuple(a for s in shared for a in s))
    step = max(1, CONGESTION_CHUNK // (devices * max(fabric.size, at.shape[1])))
    seconds, latency = np.zeros((2, kinds.shape[1], devices))
    for k in range(0, kinds.shape[1], step):
        taken = np.ones((len(kinds[0, k : k + step]), devices, 1))
        for table, kind in zip(tables, kinds[:, k : k + step], strict=True):
            taken = (taken[..., None] * table[kind][:, :, None, :]).reshape(len(taken), devices, -1)
        seconds[k : k + step], latency[k : k + step] = _busy(taken, at, back, line, fabric)
    return seconds, latency, rows.reshape(-1)


def _busy(
    taken: np.ndarray, at: np.ndarray, back: np.ndarray, line: np.ndarray, fabric: Fabric
) -> tuple[np.ndarray, np.ndarray]:
    """[kinds, devices] of seconds and latencies, of ``taken`` [kinds, devices, coordinates] cells."""
    found = routes(fabric.size, fabric.wires)
    flow = np.zeros((fabric.size, fabric.size, taken.shape[1] // fabric.size, len(taken)))
    flow[back[:, None], at, line[:, None]] = taken.transpose(1, 2, 0)
    busy = found.busiest(flow).reshape(flow.shape[2:])
    latency = np.max(np.where(taken > 0, found.alpha[back[:, None], at], 0.0), axis=2)
    return busy[line].T, latency


def _places(along: Along, fabric: Fabric, joined: Axes, moving: Axes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([devices, coordinates along ``moving``] of the sender's coordinate in the fabric, the device's own, its line)."""
    sizes = [along.mesh[a].size for a in moving]
    numbers = np.arange(prod(sizes))
    digit = dict(zip(moving, np.unravel_index(numbers, sizes), strict=True))
    device = np.arange(int(along.coords.shape[1]))
    at = np.zeros((len(device), len(numbers)), np.int64)
    for a in joined:
        own = np.broadcast_to(along.coords[a][:, None], at.shape)
        at = at * along.mesh[a].size + (digit[a][None, :] if a in digit else own)
    line = device // (fabric.stride * fabric.size) * fabric.stride + device % fabric.stride
    return at, device // fabric.stride % fabric.size, line
