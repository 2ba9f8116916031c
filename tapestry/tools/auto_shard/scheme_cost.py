"""What a sharding scheme costs: per stage seconds, FLOPs and memory.

A scheme is one set of subgraphs per stage, as a bit mask. Costs depend on the set alone, so they are kept by mask.

Prices are the compiler's (`plan.cost.compute`, `segments.receive_seconds`). A stage computes its operations one after
another; before that it receives every activation that an earlier stage made and it reads; nothing overlaps inside a stage.
The *interval* of the pipeline is its slowest stage, its *latency* the sum over stages: one run passes all of them. Memory of
a stage: its weights, and the activations at their peak, where what is received is there from the beginning and what is sent
stays to the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from tapestry.plan.pipelines.stage_constraints import needed
from tapestry.tools.auto_shard.node_graph import NodeGraph

# Subgraphs, the smallest things that move between stages: a node where data flows join, and what leads up to it.
#
# A *candidate* (PopRT: alternative node) has several intermediate inputs. Its subgraph is everything before it that no
# earlier candidate has claimed. In topological order of the candidates the subgraphs are in topological order themselves:
# what a subgraph needs from outside was claimed earlier. Nodes after the last candidate belong to the subgraphs of the
# nodes where the graph ends.


Unit = tuple[int, ...]  # nodes, ascending; the last one is the candidate


def joins(graph: NodeGraph) -> list[int]:
    """Nodes with several intermediate inputs, in topological order."""
    return [k for k, n in enumerate(graph.joined) if n >= 2]


def everywhere(graph: NodeGraph) -> list[int]:
    """Every node that computes something: for chains, which have no joins."""
    busy = {s.node for s in graph.steps}
    return [k for k in range(len(graph.names)) if k in busy]


def candidate_subgraphs(graph: NodeGraph, candidates: Sequence[int]) -> list[Unit]:
    """One subgraph per candidate, then one per end of the graph that is left; every node is in exactly one."""
    read = {p for row in graph.parents for p in row}
    tops = [*candidates, *(k for k in range(len(graph.names)) if k not in read)]
    units = [tuple(sorted(mine)) for mine in needed([[k] for k in tops], graph.parents.__getitem__) if mine]
    assert sum(map(len, units)) == len(graph.names), "a node leads to no end of the graph"
    return units


def shares(graph: NodeGraph, units: Sequence[Unit]) -> list[float]:
    """How large a part of the whole each subgraph is, in bytes or in FLOPs, whichever is larger."""
    parts = Problem(graph, units)
    all_bytes, all_flops = max(sum(parts.bytes), 1), max(sum(parts.flops), 1)
    return [max(b / all_bytes, f / all_flops) for b, f in zip(parts.bytes, parts.flops)]


def merge(graph: NodeGraph, units: Sequence[Unit], wanted: int, at_least: int) -> list[Unit]:
    """Merge neighbours in the list while they are small in bytes and in FLOPs, down to about ``wanted``.

    Neighbours, because merging them keeps the list in topological order whatever the edges. A subgraph is small when it
    is less than a ``wanted``-th of the whole. Nothing is merged when fewer than ``at_least`` would be left.
    """
    merged = _merged_units(graph, units, wanted, [0] * len(units))
    return merged if len(merged) >= at_least else list(units)


def refine(graph: NodeGraph, units: Sequence[Unit], wanted: int) -> list[Unit]:
    """Cut subgraphs into about ``wanted`` smaller ones, down to single nodes, each inside one of the given ones.

    A list in topological order again; cuts between the given subgraphs remain cuts.
    """
    busy = {s.node for s in graph.steps}
    home = {k: u for u, nodes in enumerate(units) for k in nodes}
    # nodes that cost nothing come last of their subgraph, or else a later one would claim them
    tops = [k for nodes in units for k in (*(k for k in nodes if k in busy), *reversed(nodes))]
    small = candidate_subgraphs(graph, tops)
    return _merged_units(graph, small, wanted, [home[unit[0]] for unit in small])


def _merged_units(graph: NodeGraph, units: Sequence[Unit], wanted: int, parts: Sequence[int]) -> list[Unit]:
    """Merge small neighbours of the same part."""
    if len(units) <= wanted:
        return list(units)
    limit = 1 / wanted
    groups: list[list[int]] = []
    filled, last = 0.0, -1
    for unit, share, part in zip(units, shares(graph, units), parts):
        if filled + share > limit or part != last:
            groups.append([])
            filled, last = 0.0, part
        groups[-1].extend(unit)
        filled += share
    return [tuple(sorted(g)) for g in groups]


Scheme = tuple[int, ...]  # a mask of subgraphs per stage


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage: picoseconds of computing and of receiving, FLOPs, bytes of weights and of activations at their peak.

    ``node`` is the node at the peak.
    """

    compute: int
    receive: int
    flops: int
    weights: int
    peak: int
    node: int

    @property
    def time(self) -> int:
        """Picoseconds of a run."""
        return self.compute + self.receive

    @property
    def memory(self) -> int:
        """Bytes on the device."""
        return self.weights + self.peak


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A scheme and its stages."""

    scheme: Scheme
    stages: tuple[StageCost, ...]

    @property
    def interval(self) -> int:
        """Picoseconds between two runs: the slowest stage."""
        return max(s.time for s in self.stages)

    @property
    def latency(self) -> int:
        """Picoseconds of one run through all stages."""
        return sum(s.time for s in self.stages)

    @property
    def memory(self) -> int:
        """Bytes of the fullest stage."""
        return max(s.memory for s in self.stages)

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is better: interval, then latency."""
        return self.interval, self.latency


class Problem:
    """Subgraphs of a graph with their sums, and costs of sets of them, kept by mask."""

    def __init__(self, graph: NodeGraph, units: Sequence[Unit]) -> None:
        self.graph, self.units = graph, tuple(units)
        count = len(self.units)
        self.all = (1 << count) - 1
        self.home = {k: u for u, nodes in enumerate(self.units) for k in nodes}
        self.steps: list[list[int]] = [[] for _ in range(count)]
        self.readers = [0] * len(graph.tensors)
        for i, step in enumerate(graph.steps):
            u = self.home[step.node]
            self.steps[u].append(i)
            for t in step.reads:
                self.readers[t] |= 1 << u
        self.made = [-1 if m < 0 else self.home[m] for m in graph.maker]
        self.weights = [frozenset(w for k in nodes for w in graph.weights[k]) for nodes in self.units]
        self.time = [sum(graph.steps[i].time for i in row) for row in self.steps]
        self.flops = [sum(graph.steps[i].flops for i in row) for row in self.steps]
        self.bytes = [self.weight_bytes(w) for w in self.weights]
        self.parents, self.children = [0] * count, [0] * count
        for u, nodes in enumerate(self.units):
            for p in {self.home[p] for k in nodes for p in graph.parents[k]} - {u}:
                self.parents[u] |= 1 << p
                self.children[p] |= 1 << u
        self.cost = cache(self._cost)

    def weight_bytes(self, weights: frozenset[int]) -> int:
        """Bytes of distinct weights."""
        return sum(self.graph.weight_bytes[w] for w in weights)

    def evaluate(self, scheme: Scheme) -> Evaluation:
        """The costs of all stages."""
        return Evaluation(scheme, tuple(self.cost(m) for m in scheme))

    def translate(self, scheme: Scheme, other: Problem) -> Scheme:
        """The same scheme in the subgraphs of another problem whose own are unions of these, or parts of them."""
        out = [0] * len(scheme)
        for stage, mask in enumerate(scheme):
            for u in bits(mask):
                for k in self.units[u]:
                    out[stage] |= 1 << other.home[k]
        assert sum(m.bit_count() for m in out) == len(other.units), "a subgraph would be torn apart"
        return tuple(out)

    def _cost(self, mask: int) -> StageCost:
        """The cost of a stage of these subgraphs."""
        graph, units = self.graph, list(bits(mask))
        steps = [graph.steps[i] for i in sorted(i for u in units for i in self.steps[u])]
        first, last = dict[int, int](), dict[int, int]()
        for at, step in enumerate(steps):
            last |= dict.fromkeys((*step.reads, *step.writes), at)
            first |= dict.fromkeys(step.writes, at)
        received = [t for t in last if t not in first]
        alive = [0] * (len(steps) + 1)  # what begins to be there at each step, less what ended before
        for t, end in last.items():
            leaves = t in first and (t in graph.kept or self.readers[t] & ~mask)
            alive[first.get(t, 0)] += graph.sizes[t]
            alive[len(steps) if leaves else end + 1] -= graph.sizes[t]
        alive = list(accumulate(alive[:-1]))
        peak = max(alive, default=0)
        return StageCost(
            sum(self.time[u] for u in units),
            sum(graph.moves[t] for t in received if self.made[t] >= 0),
            sum(self.flops[u] for u in units),
            self.weight_bytes(frozenset(w for u in units for w in self.weights[u])),
            peak,
            steps[alive.index(peak)].node if steps else max(self.units[units[-1]]),
        )


def bits(mask: int) -> Iterator[int]:
    """Positions of the ones."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
