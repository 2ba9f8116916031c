"""Messages over the wires that exist: shortest paths, and how many bytes the busiest wire carries.

Routes are fixed, whatever the message: the least ``alpha + beta * REFERENCE``, ties towards fewer hops, then lower numbers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tapestry.errors import TapestryError
from tapestry.plan.topology.fabric import Wire

REFERENCE = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Routes:
    """Paths of a fabric of n devices.

    Attributes:
        hops: [to, from] number of wires on the path.
        next: [to, from] the device that the path goes to first.
        wire: [to, from] the wire it takes there.
        alpha: [to, from] sum of latencies, s.
        beta: of every wire, s/B.
    """

    hops: np.ndarray
    next: np.ndarray
    wire: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray

    def busiest(self, flow: np.ndarray) -> np.ndarray:
        """Seconds that the busiest wire is busy; ``flow`` is [to, from, …] of bytes, all sent at once."""
        n = len(self.hops)
        flow = flow.reshape(n * n, -1).astype(float)
        load = np.zeros((len(self.beta), flow.shape[1]))
        hops, wire = self.hops.reshape(-1), self.wire.reshape(-1)
        onward = (np.arange(n)[:, None] * n + self.next).reshape(-1)
        for far in range(int(hops.max(initial=0)), 0, -1):
            at = np.flatnonzero(hops == far)
            np.add.at(load, wire[at], flow[at])
            if far > 1:
                np.add.at(flow, onward[at], flow[at])
        return (load * self.beta[:, None]).max(axis=0, initial=0.0)


@lru_cache(maxsize=256)
def routes(n: int, wires: tuple[Wire, ...]) -> Routes:
    """Shortest paths between all devices.

    Raises:
        TapestryError: some device cannot reach another; names the pair.
    """
    into: list[list[tuple[int, Wire]]] = [[] for _ in range(n)]
    for k, w in enumerate(wires):
        into[w.dst].append((k, w))
    hops, onward, wire = np.zeros((3, n, n), np.int64)
    out = Routes(hops, onward, wire, np.zeros((n, n)), np.array([w.beta for w in wires]))
    for end in range(n):
        _towards(end, into, out)
    return out


def _towards(end: int, into: list[list[tuple[int, Wire]]], out: Routes) -> None:
    """Dijkstra's algorithm, backwards from where the messages go."""
    known: set[int] = set()
    queue = [(0.0, 0, end, end, -1, 0.0)]
    while queue:
        cost, hops, at, onward, wire, alpha = heapq.heappop(queue)
        if at in known:
            continue
        known.add(at)
        out.hops[end, at], out.next[end, at], out.wire[end, at], out.alpha[end, at] = hops, onward, max(wire, 0), alpha
        for k, w in into[at]:
            if w.src not in known:
                heapq.heappush(queue, (cost + w.alpha + w.beta * REFERENCE, hops + 1, w.src, at, k, alpha + w.alpha))
    if len(known) < len(into):
        lost = min(set(range(len(into))) - known)
        raise TapestryError(f"device {lost} cannot reach device {end}", hint="links that join all devices, in both directions")
