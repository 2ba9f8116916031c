"""Exact transfers: a device receives ``footprint − what it holds``, each cell from the nearest device that holds it.

Exact: who sends how many cells to whom, hence the bytes, the number of senders of every receiver, and which mesh axes lie
between them. Modelled (alpha-beta): all receivers work at once, and a transfer takes as long as its slowest one. Through
switches a receiver takes its bytes one after another, each at the slowest switch that it crosses, after ``⌈log2(senders + 1)⌉``
latencies of the slowest one that any of them crosses. On wires the busiest one bounds the time (`congestion`), and the longest
path the latency. Ports and wires work at the same time. Where the backend's call that carries a transfer was measured, its
table counts instead. The receiver then fills a new buffer with the whole footprint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2, prod

import numpy as np

from tapestry.ir.graph import Op
from tapestry.ir.plan import Layout, Mesh, Strategy
from tapestry.ir.program import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, merge_phases, reduce_op
from tapestry.plan.cost.compute import Along, Axes, Senders
from tapestry.plan.strategy import Boxes, merges, tensor_boxes
from tapestry.plan.topology import Topology
from tapestry.plan.topology.fabric import Digits, Fabric, digits, routes

# Time to merge states along mesh axes: of the backend's calls that `ir.program` names, each by its algorithms.
#
# A measured time of a call decides (`Topology.call_seconds`). Otherwise, on a switch, for n devices and B bytes:
#
# - a reduce-scatter takes ``⌈log2 n⌉ α + (n-1)/n B β``: a tree for each part, aggregated (NCCL's PAT, Jeaugey 2025);
# - an all-reduce twice that: two binary trees at once, each with half of the data (Sanders, Speck and Träff 2009; NCCL gives
#   them a ring's bandwidth, `src/graph/tuning.cc`). A ring has the same bytes and more latencies, ``2 (n-1) α``;
# - a direct exchange of parts ``⌈log2 n⌉ α`` and the bytes that come in, one after another, as transfers do (`cost.transfer`).
#
# On wires a ring is a list of steps in which all devices send at once, routed: a step takes the longest path's latency and the
# time of the busiest wire; one ring, or one each way with half of the data. Besides there is a tree up and down. Over several
# fabrics: one after another, or hierarchical, which reduce-scatters inside, merges across and gathers back inside.


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
    final = tensor_boxes(tuple(d.size for d in op.dims), s.out, mesh) if fn else np.zeros((1, 0, 2))
    return fn if np.ptp(np.prod(final[..., 1] - final[..., 0], axis=-1)) == 0 else "", fn


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
        if levels := _levels_of_collective(topo, mine):
            n = prod(k.size for k in levels)
            phases = merge_phases("reduce_scatter" if scatter else "all_reduce", reduction, n, nbytes)
            stride = prod(a.size for a in topo.mesh[mine[-1] + 1 :])
            measured = [topo.call_seconds(call, n, moved, stride) for call, moved in phases]
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


def _levels_of_collective(topo: Topology, axes: tuple[int, ...]) -> tuple[_Level, ...]:
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
    ways = [_cheapest_way(k, nbytes, False) for k in levels]
    best = Way(" then ".join(w.name for w in ways), sum(w.seconds for w in ways))
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


# How busy the wires of a fabric are when layouts turn into footprints.
#
# Exact: the bytes that each device of a line (the devices that the fabric joins) takes from each coordinate of the line, and
# the path that they take. Modelled: a message that crosses several fabrics is counted on each of them in the line of its
# receiver; where the footprints of a line's receivers differ along tensor axes that have nothing to do with the fabric, the
# largest counts for all, so that the time is not underestimated.


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
    size = np.prod(np.maximum(want[..., 1] - want[..., 0], 0), axis=-1)
    along = [Along(want[:, :, i], i, parts.mesh) for i in range(want.shape[2])]
    total = np.zeros((len(held), len(wanted)), np.int64)
    seconds = np.zeros(total.shape)
    step = max(1, CHUNK // max(1, size.size))
    for k in range(0, len(held), step):
        found = Senders(size, along, held[k : k + step])
        own = found.cells(found.everywhere)
        total[k : k + step] = (size - own).sum(axis=2) * width
        if total[k : k + step].any():
            seconds[k : k + step] = _seconds(found, own, width, topo, parts)
    return Costs(np.where(total > 0, seconds, 0.0), total)


def _seconds(found: Senders, own: np.ndarray, width: int, topo: Topology, parts: Digits) -> np.ndarray:
    """Of the slowest receiver, per (layout, footprint); measured times of the call that carries it count before the model's."""
    filled = found.size * (width / topo.each(lambda d: d.bandwidth))
    moved = _modelled(found, own, width, topo, parts)
    total: np.ndarray = np.max(moved + filled, axis=2)
    if topo.calls:
        known = _measured(found, own, width, topo)
        most: np.ndarray = np.max(filled, axis=-1)
        total = np.where(np.isnan(known), total, known + most)
    return total + topo.device.launch


def _measured(found: Senders, own: np.ndarray, width: int, topo: Topology) -> np.ndarray:
    """Seconds of the backend's calls, chosen as by `ir.program.transfer_call`; NaN where they were not measured."""
    senders = found.number(())
    n = np.max(senders + ((own == 0) & (senders > 0)), axis=2)
    piece = np.stack([np.prod(np.maximum(b[..., 1] - b[..., 0], 0), axis=-1) for _, b in found.held])[:, None, :]
    alike = (np.ptp(senders, axis=2) == 0) & np.all(found.size == found.size[:, :1], axis=-1) & (np.ptp(piece, axis=2) == 0)
    gathers = alike & np.all((own == piece) & (found.size == senders * piece), axis=2)
    swaps = alike & np.all((own * senders == piece) & (found.size == piece), axis=2)
    call = np.where(gathers, 0, np.where(swaps, 1, 2))
    received: np.ndarray = np.max(found.size - own, axis=2)
    whole: np.ndarray = np.max(found.size, axis=-1)
    nbytes = np.where(call == 2, received, whole) * width
    kinds, at = np.unique(np.stack([call, n, nbytes]).reshape(3, -1), axis=1, return_inverse=True)
    rows: list[list[int]] = kinds.T.tolist()
    times = [topo.call_seconds((ALL_GATHER, ALL_TO_ALL, EXCHANGE)[c], group, size) for c, group, size in rows]
    return np.array([np.nan if t is None else t for t in times])[at.reshape(-1)].reshape(n.shape)


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
