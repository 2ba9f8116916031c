"""Time to merge states along mesh axes: the cheapest of the algorithms that the links allow, by name.

On a switch (after Thakur, Rabenseifner and Gropp 2005): recursive halving (and doubling back, for an all-reduce), per phase
``⌈log2 n⌉ α + (n-1)/n B β``, and recursive doubling of whole states, ``⌈log2 n⌉ (α + B β)``. On wires every algorithm is a list
of steps in which all devices send at once, routed: a step takes the longest path's latency and the time of the busiest wire.
There are rings (one-way, and both ways with half of the data each), halving, doubling, and a tree up and down. Over
several fabrics: one after another, or hierarchical, which reduce-scatters inside, merges across and gathers back inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2, prod

import numpy as np

from tapestry.plan.topology import Fabric, Topology
from tapestry.plan.topology.fabric import digits
from tapestry.plan.topology.routing import routes


@dataclass(frozen=True, slots=True)
class Way:
    """An algorithm and the seconds that it takes."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Level:
    """Groups of devices that merge: the coordinates of each group in a fabric, in the order of the group."""

    fabric: Fabric
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.groups[0])


def reduce_seconds(nbytes: int, axes: Sequence[tuple[int, bool]], topo: Topology) -> float:
    """Seconds of `merge`, in all."""
    return sum(w.seconds for w in merge(nbytes, axes, topo))


def merge(nbytes: int, axes: Sequence[tuple[int, bool]], topo: Topology) -> list[Way]:
    """How to merge states of ``nbytes`` per device along mesh axes: first what is reduce-scattered, then, on the part of the
    states that is left, what is all-reduced.

    Args:
        axes: (mesh axis, whether it is a reduce-scatter).
    """
    out: list[Way] = []
    for scatter in (True, False):
        mine = tuple(sorted(a for a, s in axes if s == scatter))
        levels = _levels(topo, mine)
        if levels:
            out.append(_scatter(levels, nbytes) if scatter else _reduce(levels, nbytes))
            nbytes = nbytes // prod(k.size for k in levels) if scatter else nbytes
    return out


def _levels(topo: Topology, axes: tuple[int, ...]) -> tuple[_Level, ...]:
    """The fabrics that mesh axes run through, the fastest first."""
    parts = digits(topo)
    found: list[_Level] = []
    for fabric, joined in parts.fabrics:
        mine = [a for a in joined if parts.axis[a] in axes]
        if mine:
            sizes = [parts.mesh[a].size for a in joined]
            at = np.arange(fabric.size).reshape(sizes)
            kept = [k for k, a in enumerate(joined) if a not in mine]
            groups = at.transpose(*kept, *(k for k, a in enumerate(joined) if a in mine))
            groups = groups.reshape(-1, prod(parts.mesh[a].size for a in mine))
            found.append(_Level(fabric, tuple(tuple(g) for g in groups.tolist())))
    return tuple(sorted(found, key=lambda k: (k.fabric.link.beta, k.fabric.link.alpha)))


def _reduce(levels: tuple[_Level, ...], nbytes: int) -> Way:
    """An all-reduce."""
    ways = [_flat(k, nbytes, False) for k in levels]
    best = Way(" then ".join(w.name for w in ways), sum(w.seconds for w in ways))
    if len(levels) > 1:
        inside = _flat(levels[0], nbytes, True)
        across = _reduce(levels[1:], nbytes // levels[0].size)
        seconds = 2 * inside.seconds + across.seconds
        if seconds < best.seconds:
            best = Way(f"hierarchical ({inside.name} inside, {across.name} across)", seconds)
    return best


def _scatter(levels: tuple[_Level, ...], nbytes: int) -> Way:
    """A reduce-scatter, the fastest fabric first: it carries the most."""
    ways: list[Way] = []
    for k in levels:
        ways.append(_flat(k, nbytes, True))
        nbytes //= k.size
    return Way(" then ".join(w.name for w in ways), sum(w.seconds for w in ways))


def _flat(level: _Level, nbytes: int, scatter: bool) -> Way:
    return min(_ways(level, nbytes, scatter), key=lambda w: w.seconds)


def _ways(level: _Level, nbytes: int, scatter: bool) -> Iterator[Way]:
    n, phases = level.size, 1 if scatter else 2
    steps = ceil(log2(n))
    if not level.fabric.wires:
        link = level.fabric.link
        yield Way("recursive halving", phases * (steps * link.alpha + (n - 1) / n * nbytes * link.beta))
        yield Way("recursive doubling", steps * (link.alpha + nbytes * link.beta))
        return
    for name, shifts in (("ring", (1,)), ("ring the other way", (-1,)), ("ring both ways", (1, -1))):
        alpha, beta = _step(level, shifts)
        yield Way(name, phases * (n - 1) * (alpha + beta * nbytes / n / len(shifts)))
    if n & (n - 1) == 0:
        hops = [_swap(level, 1 << k) for k in range(steps)]
        yield Way("recursive halving", phases * sum(a + b * nbytes / (2 << k) for k, (a, b) in enumerate(hops)))
        yield Way("recursive doubling", sum(a + b * nbytes for a, b in hops))
    if not scatter and len(level.groups) == 1:
        yield Way("tree", sum(a + b * nbytes for a, b in _tree(level.fabric)))


@lru_cache(maxsize=1 << 12)
def _step(level: _Level, shifts: tuple[int, ...]) -> tuple[float, float]:
    """(latency, s/B) when every device sends to its neighbours in the order of its group."""
    n = level.size
    return _together(level.fabric, tuple((g[j], g[(j + d) % n]) for g in level.groups for j in range(n) for d in shifts))


@lru_cache(maxsize=1 << 12)
def _swap(level: _Level, distance: int) -> tuple[float, float]:
    """(latency, s/B) when all pairs of a distance exchange."""
    return _together(level.fabric, tuple((g[j], g[j ^ distance]) for g in level.groups for j in range(level.size)))


@lru_cache(maxsize=256)
def _tree(fabric: Fabric) -> tuple[tuple[float, float], ...]:
    """(latency, s/B) of every level of a tree of shortest paths, up and then down; from the root with the least depth."""
    found = routes(fabric.size, fabric.wires)
    root = int(np.argmin(np.maximum(found.hops, found.hops.T).max(axis=0)))
    up = [
        tuple((int(v), int(found.next[root, v])) for v in np.flatnonzero(found.hops[root] == depth))
        for depth in range(int(found.hops[root].max()), 0, -1)
    ]
    down = [tuple((b, a) for a, b in level) for level in reversed(up)]
    return tuple(_together(fabric, level) for level in (*up, *down))


def _together(fabric: Fabric, sent: tuple[tuple[int, int], ...]) -> tuple[float, float]:
    """(longest path's latency, seconds per byte of the busiest wire) when one byte goes from and to each of some pairs."""
    found = routes(fabric.size, fabric.wires)
    flow = np.zeros((fabric.size, fabric.size))
    for a, b in sent:
        flow[b, a] += 1
    return max((float(found.alpha[b, a]) for a, b in sent), default=0.0), float(found.busiest(flow)[0])
