"""Exact transfers: a device receives ``footprint − what it holds``, each cell from the nearest device that holds it.

Exact: who sends how many cells to whom, hence the bytes, the number of senders of every receiver, and which mesh axes lie
between them. Modelled (alpha-beta): all receivers work at once, and a transfer takes as long as its slowest one. Through
switches a receiver takes its bytes one after another, each at the slowest switch that it crosses, after ``⌈log2(senders + 1)⌉``
latencies of the slowest one that any of them crosses. On wires the busiest one bounds the time (`congestion`), and the longest
path the latency. Ports and wires work at the same time. Where the backend's call that carries a transfer was measured, its
table counts instead. The receiver then fills a new buffer with the whole footprint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from tapestry.ir.collective_calls import ALL_GATHER, ALL_TO_ALL, EXCHANGE
from tapestry.ir.footprint import Boxes
from tapestry.ir.plan import Layout
from tapestry.plan.cost.compute import sizes
from tapestry.plan.cost.congestion import busiest
from tapestry.plan.cost.footprint_overlap import Along, Axes, Senders
from tapestry.plan.topology import Topology
from tapestry.plan.topology.fabric import Digits, digits

CHUNK = 1 << 18  # numbers in an array


@dataclass(frozen=True, slots=True)
class Costs:
    """Per (layout, footprint): seconds, and bytes on the wire in all.

    A transfer also fills a new buffer with the whole footprint, which costs memory bandwidth and a launch.
    """

    seconds: np.ndarray
    bytes: np.ndarray


def costs(held: list[tuple[Layout, Boxes]], wanted: list[Boxes], width: int, topo: Topology) -> Costs:
    """Cost of turning every held layout into every wanted footprint.

    Args:
        held: layouts with the boxes that they give to the devices.
        width: bytes per element.
    """
    want, parts = np.stack(wanted), digits(topo)
    held = [(tuple(layout[a] for a in parts.axis), boxes) for layout, boxes in held]
    size = sizes(want)
    along = [Along(want[:, :, i], i, parts.mesh) for i in range(want.shape[2])]
    total = np.zeros((len(held), len(wanted)), np.int64)
    seconds = np.zeros(total.shape)
    step = max(1, CHUNK // max(1, size.size))
    for k in range(0, len(held), step):
        found = Senders(size, along, held[k : k + step])
        own = found.cells(found.everywhere)
        total[k : k + step] = (size - own).sum(axis=2) * width
        if total[k : k + step].any():
            seconds[k : k + step] = _seconds(found, own, want, width, topo, parts)
    return Costs(np.where(total > 0, seconds, 0.0), total)


def _seconds(found: Senders, own: np.ndarray, want: Boxes, width: int, topo: Topology, parts: Digits) -> np.ndarray:
    """Of the slowest receiver, per (layout, footprint); measured times of the call that carries it count before the model's."""
    filled = found.size * (width / topo.each(lambda d: d.bandwidth))
    moved = _modelled(found, own, width, topo, parts)
    total: np.ndarray = np.max(moved + filled, axis=2)
    total = total + topo.device.launch
    if topo.calls:
        known, gathers = _measured(found, own, width, topo, parts)
        most: np.ndarray = np.max(filled, axis=-1) + topo.device.launch
        total = np.where(np.isnan(known), total, known + np.where(_in_place(found, want, gathers), 0.0, most))
    return total


def _measured(found: Senders, own: np.ndarray, width: int, topo: Topology, parts: Digits) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of the backend's calls, chosen as by `ir.collective_calls.transfer_call`, NaN where they were not measured;
    whether they gather)."""
    senders = found.number(())
    n = np.max(senders + ((own == 0) & (senders > 0)), axis=2)
    piece = np.stack([sizes(b) for _, b in found.held])[:, None, :]
    alike = (np.ptp(senders, axis=2) == 0) & np.all(found.size == found.size[:, :1], axis=-1) & (np.ptp(piece, axis=2) == 0)
    gathers = alike & np.all((own == piece) & (found.size == senders * piece), axis=2)
    swaps = alike & np.all((own * senders == piece) & (found.size == piece), axis=2)
    call = np.where(gathers, 0, np.where(swaps, 1, 2))
    received: np.ndarray = np.max(found.size - own, axis=2)
    whole: np.ndarray = np.max(found.size, axis=-1)
    nbytes = np.where(call == 2, received, whole) * width
    span: np.ndarray = np.ones_like(nbytes)
    for k in range(len(parts.mesh)):  # the outermost digit that a sender differs in
        crossed: np.ndarray = np.any(senders > found.number((k,)), axis=2)
        span[crossed] = np.maximum(span[crossed], prod(a.size for a in parts.mesh[k:]))
    kinds, at = np.unique(np.stack([call, n, nbytes, span]).reshape(4, -1), axis=1, return_inverse=True)
    rows: list[list[int]] = kinds.T.tolist()
    times = [topo.call_seconds((ALL_GATHER, ALL_TO_ALL, EXCHANGE)[c], group, size, 0, s) for c, group, size, s in rows]
    seconds = np.array([np.nan if t is None else t for t in times])[at.reshape(-1)].reshape(n.shape)
    return seconds, gathers


def _in_place(found: Senders, want: Boxes, gathers: np.ndarray) -> np.ndarray:
    """Where parts that are gathered are the footprint one after another, as they are where its outermost axis alone is brought
    together."""
    layout, footprint = np.nonzero(gathers)
    boxes, held = want[footprint], np.stack([b for _, b in found.held])[layout]
    extents = boxes[..., 1] - boxes[..., 0]
    cut = np.any(held[..., 1] - held[..., 0] != extents, axis=1)
    out, before = np.zeros_like(gathers), np.cumsum(cut, axis=-1) == 0
    out[layout, footprint] = (cut.sum(axis=-1) == 1) & np.all(~before | (extents <= 1).all(axis=1), axis=-1)
    return out


def _modelled(found: Senders, own: np.ndarray, width: int, topo: Topology, parts: Digits) -> np.ndarray:
    """Seconds in which each device receives what it lacks, by links."""
    senders = found.number(())
    taken, alpha = np.zeros((2, *own.shape))
    ports = {a: f.link for f, axes in parts.fabrics for a in axes if not f.wires}
    for rate, axes in _levels({a: k.beta for a, k in ports.items()}):
        taken += (found.size - found.cells(axes)) * rate
    for rate, axes in _levels({a: k.alpha for a, k in ports.items()}):
        alpha += np.where(senders > found.number(axes), rate, 0.0)
    latency = alpha * np.ceil(np.log2(senders - (own > 0) + 1))
    for fabric, axes in parts.fabrics:
        if fabric.wires:
            busy, path = busiest(found, fabric, axes)
            taken, latency = np.maximum(taken, busy), latency + path
    return taken * width + latency


def _levels(rates: dict[int, float]) -> Iterator[tuple[float, Axes]]:
    """(step, axes) such that the largest rate among some axes is the sum of the steps of which they contain an axis."""
    found = sorted({*rates.values()} - {0.0})
    for below, rate in zip([0.0, *found], found, strict=False):
        yield rate - below, tuple(sorted(a for a, r in rates.items() if r >= rate))
