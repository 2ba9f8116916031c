"""Time to merge states along mesh axes: of the backend's calls that `ir.program` names, each by its algorithms.

A measured time of a call decides (`Topology.call_seconds`). Otherwise, on a switch, for n devices and B bytes:

- a reduce-scatter takes ``⌈log2 n⌉ α + (n-1)/n B β``: a tree for each part, aggregated (NCCL's PAT, Jeaugey 2025);
- an all-reduce twice that: two binary trees at once, each with half of the data (Sanders, Speck and Träff 2009; NCCL gives
  them a ring's bandwidth, `src/graph/tuning.cc`). A ring has the same bytes and more latencies, ``2 (n-1) α``;
- a direct exchange of parts ``⌈log2 n⌉ α`` and the bytes that come in, one after another, as transfers do (`cost.transfer`).

On wires a ring is a list of steps in which all devices send at once, routed: a step takes the longest path's latency and the
time of the busiest wire; one ring, or one each way with half of the data. Besides there is a tree up and down. Over several
fabrics: one after another, or hierarchical, which reduce-scatters inside, merges across and gathers back inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2, prod

import numpy as np

from tapestry.ir.collective_calls import ALL_REDUCE, EXCHANGE, merge_phases, reduce_op
from tapestry.ir.graph import Op
from tapestry.ir.plan import Mesh, Strategy
from tapestry.plan.cost.compute import sizes
from tapestry.plan.strategy import merges, result_boxes
from tapestry.plan.topology import Topology
from tapestry.plan.topology.fabric import Fabric, digits
from tapestry.plan.topology.routing import routes

Reductions = tuple[str, str]
"""The backend's reductions of a reduce-scatter and of an all-reduce; "" where the monoid merges what is exchanged."""


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


def reduce_seconds(op: Op, s: Strategy, nbytes: int, topo: Topology) -> float:
    """Seconds to merge states of ``nbytes`` per device where a strategy cuts reduced dimensions."""
    return sum(w.seconds for w in merge(nbytes, merges(op, s), topo, reductions(op, s, topo.mesh)))


def reductions(op: Op, s: Strategy, mesh: Mesh) -> Reductions:
    """What merges an operation's states; the backend scatters equal parts only."""
    fn = reduce_op(op)
    return fn if not fn or np.ptp(sizes(result_boxes(op, s, mesh))) == 0 else "", fn


def merge(nbytes: int, axes: Sequence[tuple[int, bool]], topo: Topology, by: Reductions) -> list[Way]:
    """How to merge states of ``nbytes`` per device along mesh axes: first what is reduce-scattered, then, on the part of the
    states that is left, what is all-reduced.

    Args:
        axes: (mesh axis, whether it is a reduce-scatter).
        by: see `reductions`.
    """
    out: list[Way] = []
    for scatter, reduction in zip((True, False), by, strict=True):
        mine = tuple(sorted(a for a, s in axes if s == scatter))
        if levels := _levels(topo, mine):
            n = prod(k.size for k in levels)
            phases = merge_phases("reduce_scatter" if scatter else "all_reduce", reduction, n, nbytes)
            stride, span = (prod(a.size for a in topo.mesh[k:]) for k in (mine[-1] + 1, mine[0]))
            measured = [topo.call_seconds(call, n, moved, stride, span) for call, moved in phases]
            ways = [
                _way(call, moved, levels) if t is None else Way(f"measured {call}", t)
                for (call, moved), t in zip(phases, measured, strict=True)
            ]
            out.append(Way(ways[0].name, sum(w.seconds for w in ways)))
            nbytes = nbytes // n if scatter else nbytes
    return out


def _way(call: str, nbytes: int, levels: tuple[_Level, ...]) -> Way:
    """One call of the backend."""
    if call == EXCHANGE:
        return _exchange(levels, nbytes)
    return _reduce(levels, nbytes) if call == ALL_REDUCE else _scatter(levels, nbytes)


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
    best = _in_turn([_cheapest_way(k, nbytes, False) for k in levels])
    if len(levels) > 1:
        inside = _cheapest_way(levels[0], nbytes, True)
        across = _reduce(levels[1:], nbytes // levels[0].size)
        seconds = 2 * inside.seconds + across.seconds
        if seconds < best.seconds:
            best = Way(f"hierarchical ({inside.name} inside, {across.name} across)", seconds)
    return best


def _scatter(levels: tuple[_Level, ...], nbytes: int) -> Way:
    """A reduce-scatter, the fastest fabric first: it carries the most."""
    ways: list[Way] = []
    for k in levels:
        ways.append(_cheapest_way(k, nbytes, True))
        nbytes //= k.size
    return _in_turn(ways)


def _in_turn(ways: list[Way]) -> Way:
    return Way(" then ".join(w.name for w in ways), sum(w.seconds for w in ways))


def _exchange(levels: tuple[_Level, ...], nbytes: int) -> Way:
    """Everybody receives an equal piece from everybody else: through switches one after another, each at the slowest switch
    that it crosses; on wires all at once."""
    n = prod(k.size for k in levels)
    piece, taken, busy, latency = nbytes / (n - 1), 0.0, 0.0, 0.0
    near = prod(k.size for k in levels if k.fabric.wires)
    for k in levels:
        if k.fabric.wires:
            path, beta = _all_pairs(k)
            busy, latency = max(busy, n // k.size * piece * beta), latency + path
        else:
            taken += (near * k.size - near) * piece * k.fabric.link.beta
            near *= k.size
    alpha = max((k.fabric.link.alpha for k in levels if not k.fabric.wires), default=0.0)
    return Way("direct exchange", max(taken, busy) + latency + ceil(log2(n)) * alpha)


def _cheapest_way(level: _Level, nbytes: int, scatter: bool) -> Way:
    return min(_ways(level, nbytes, scatter), key=lambda w: w.seconds)


def _ways(level: _Level, nbytes: int, scatter: bool) -> Iterator[Way]:
    n, phases = level.size, 1 if scatter else 2
    if not level.fabric.wires:
        link = level.fabric.link
        name = "aggregated trees" if scatter else "two trees"
        yield Way(name, phases * (ceil(log2(n)) * link.alpha + (n - 1) / n * nbytes * link.beta))
        return
    for name, shifts in (("ring", (1,)), ("ring the other way", (-1,)), ("ring both ways", (1, -1))):
        alpha, beta = _ring_step(level, shifts)
        yield Way(name, phases * (n - 1) * (alpha + beta * nbytes / n / len(shifts)))
    if not scatter and len(level.groups) == 1:
        yield Way("tree", sum(a + b * nbytes for a, b in _tree(level.fabric)))


@lru_cache(maxsize=1 << 12)
def _ring_step(level: _Level, shifts: tuple[int, ...]) -> tuple[float, float]:
    """(latency, s/B) when every device sends to its neighbours in the order of its group."""
    n = level.size
    return _together(level.fabric, tuple((g[j], g[(j + d) % n]) for g in level.groups for j in range(n) for d in shifts))


@lru_cache(maxsize=1 << 12)
def _all_pairs(level: _Level) -> tuple[float, float]:
    """(latency, s/B) when everybody sends to everybody in its group."""
    return _together(level.fabric, tuple((a, b) for g in level.groups for a in g for b in g if a != b))


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
