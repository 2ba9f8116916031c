"""Uneven shares of mesh axes, where devices differ: in proportion to what the weakest device at each coordinate has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tapestry.ir.plan import MeshAxis, coordinates
from tapestry.plan.topology.fabric import Device, Topology

FINEST = 32  # the largest weight
MEASURES: tuple[Callable[[Device], float], ...] = (
    lambda d: d.rate("f32"),
    lambda d: d.bandwidth,
    lambda d: float(d.memory),
)


def shared(topo: Topology) -> list[Topology]:
    """The topology with equal shares, and, where devices differ, with shares of every mesh axis in proportion to contraction
    rate, to memory bandwidth, and to memory."""
    out = [topo]
    for measure in MEASURES if topo.kinds else ():
        value = topo.each(measure)
        coords = np.array(coordinates(topo.mesh)).reshape(len(value), -1)
        mesh = tuple(_weighted(a, value, coords[:, k]) for k, a in enumerate(topo.mesh))
        if all(mesh != t.mesh for t in out):
            out.append(replace(topo, mesh=mesh))
    return out


def _weighted(axis: MeshAxis, value: np.ndarray, at: np.ndarray) -> MeshAxis:
    weakest = [float(value[at == k].min()) for k in range(axis.size)]
    part = [w / max(weakest) for w in weakest]
    tries = [tuple(max(1, round(scale * p)) for p in part) for scale in range(1, FINEST + 1)]
    weights = min(tries, key=lambda t: max(abs(w / max(t) - p) / p for w, p in zip(t, part, strict=True)))
    return replace(axis, weights=() if len({*weights}) == 1 else weights)
