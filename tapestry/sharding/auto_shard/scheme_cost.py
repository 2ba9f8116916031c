"""What a sharding scheme costs: per stage seconds, FLOPs and memory; many schemes at once in several processes.

A scheme is one set of subgraphs per stage, as a bit mask. Costs depend on the set alone, so they are kept by mask.

The model. A stage computes its operations one after another; before that it receives every activation that an earlier
stage made and it reads (``alpha + beta * bytes`` each); nothing overlaps inside a stage. The *interval* of the pipeline
is its slowest stage, its *latency* the sum over stages: one run passes all of them. Memory of a stage: its weights, and the
activations at their peak, where what is received is there from the beginning and what is sent stays to the end.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from tapestry.sharding.auto_shard.candidates import Unit
from tapestry.sharding.auto_shard.node_graph import NodeGraph

Scheme = tuple[int, ...]  # a mask of subgraphs per stage
WORTH = 400_000  # operations in a batch of schemes from which on other processes are started


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
        self.parents = [0] * count
        for u, nodes in enumerate(self.units):
            for p in {self.home[p] for k in nodes for p in graph.parents[k]} - {u}:
                self.parents[u] |= 1 << p
        self.children = [0] * count
        for u, mask in enumerate(self.parents):
            for p in bits(mask):
                self.children[p] |= 1 << u
        self._known: dict[int, StageCost] = {}

    def weight_bytes(self, weights: frozenset[int]) -> int:
        """Bytes of distinct weights."""
        return sum(self.graph.weight_bytes[w] for w in weights)

    def cost(self, mask: int) -> StageCost:
        """The cost of a stage of these subgraphs."""
        if mask not in self._known:
            self._known[mask] = self._cost(mask)
        return self._known[mask]

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
        graph = self.graph
        units = list(bits(mask))
        weights = self.weight_bytes(frozenset[int]().union(*(self.weights[u] for u in units)))
        steps = sorted(i for u in units for i in self.steps[u])
        inside, last = set[int](), dict[int, int]()
        for at, i in enumerate(steps):
            inside.update(graph.steps[i].writes)
            last.update(dict.fromkeys((*graph.steps[i].reads, *graph.steps[i].writes), at))
        received = [t for t in last if t not in inside]
        for t in inside:
            if t in graph.kept or self.readers[t] & ~mask:
                last[t] = len(steps)
        peak, node = self._peak(steps, received, last)
        return StageCost(
            sum(self.time[u] for u in units), sum(graph.moves[t] for t in received if self.made[t] >= 0),
            sum(self.flops[u] for u in units), weights, peak, node if node >= 0 else max(self.units[units[-1]]),
        )  # fmt: skip

    def _peak(self, steps: list[int], received: list[int], last: dict[int, int]) -> tuple[int, int]:
        """Bytes of activations at their peak, and the node there."""
        graph = self.graph
        dies: list[int] = [0] * (len(steps) + 1)
        for t, at in last.items():
            dies[at] += graph.sizes[t]
        alive = peak = sum(graph.sizes[t] for t in received)
        node = graph.steps[steps[0]].node if steps else -1
        for at, i in enumerate(steps):
            alive += sum(graph.sizes[t] for t in graph.steps[i].writes)
            if alive > peak:
                peak, node = alive, graph.steps[i].node
            alive -= dies[at]
        return peak, node


def bits(mask: int) -> Iterator[int]:
    """Positions of the ones."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


_problem: Problem | None = None  # of a worker process


def _start(graph: NodeGraph, units: tuple[Unit, ...]) -> None:
    global _problem
    _problem = Problem(graph, units)


def _work(scheme: Scheme) -> Evaluation:
    assert _problem is not None
    return _problem.evaluate(scheme)


class Workers:
    """Evaluates batches of schemes, in order, in up to ``processes`` processes, started when there is enough to do."""

    def __init__(self, problem: Problem, processes: int, worth: int | None = None) -> None:
        self.problem, self.processes = problem, processes
        self.worth = WORTH if worth is None else worth
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, schemes: Sequence[Scheme]) -> list[Evaluation]:
        """Evaluations in the order of the schemes, whatever the number of processes."""
        if self.processes == 1 or len(schemes) * len(self.problem.graph.steps) < self.worth:
            return [self.problem.evaluate(s) for s in schemes]
        if self._pool is None:
            # not fork: the parent may have threads of numpy's or torch's, which do not survive it
            self._pool = ProcessPoolExecutor(
                self.processes, multiprocessing.get_context("spawn"), _start, (self.problem.graph, self.problem.units)
            )
        chunk = max(1, len(schemes) // (2 * self.processes))
        return list(self._pool.map(_work, schemes, chunksize=chunk))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
