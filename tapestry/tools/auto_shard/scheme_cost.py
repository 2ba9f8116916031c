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

import numpy as np
from onnx import ModelProto, TensorProto

from tapestry.ir.graph import Graph, Op
from tapestry.ir.plan import device_count
from tapestry.ir.syntax.printer import signature
from tapestry.lift.file.external_data import tensor_bytes
from tapestry.lift.file.protos import captured, node_name
from tapestry.lift.normalize.prepare import RANDOM
from tapestry.plan.cost import compute
from tapestry.plan.pipelines.segments import needed, receive_seconds
from tapestry.plan.pipelines.staged_plan import link_between
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.edit import is_view

# The graph that stages are cut from: one vertex per ONNX node, with costs from the lifted Graph's index spaces.
#
# Vertices and edges are the ONNX file's, because stages are written back onto its nodes; bytes, FLOPs and seconds are
# those of the operations that the nodes lift to. Nodes that lifting folds away (shape arithmetic, a node equal to another one)
# cost nothing; views are names for the tensor behind them. Seconds are whole picoseconds: sums are then exact, so that
# "never worse" can be tested with ``<=`` and does not depend on the order of addition.

PICO = 10**12  # picoseconds in a second


@dataclass(frozen=True, slots=True)
class Step:
    """One operation as stages see it: its node, picoseconds, FLOPs, and the activations that it reads and writes."""

    node: int
    time: int
    flops: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGraph:
    """Nodes in topological order.

    Attributes:
        parents: nodes that each node needs.
        joined: how many different intermediate inputs each node has (model inputs and constants do not count).
        weights: numbers of the weights that each node reads; ``weight_names`` and ``weight_bytes`` say what they are.
        tensors: names of the activations and of the model's inputs; ``sizes`` their bytes, ``moves`` the picoseconds that it
            takes to send one to another device, ``maker`` the node that writes it (-1: a model input).
        steps: operations, in an order that their data allow and nodes follow.
        kept: tensors that the model returns.
    """

    names: tuple[str, ...]
    parents: tuple[tuple[int, ...], ...]
    joined: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    weight_names: tuple[str, ...]
    weight_bytes: tuple[int, ...]
    tensors: tuple[str, ...]
    sizes: tuple[int, ...]
    moves: tuple[int, ...]
    maker: tuple[int, ...]
    steps: tuple[Step, ...]
    kept: frozenset[int]


def node_graph(model: ModelProto, lifted: Graph, topo: Topology) -> NodeGraph:
    """The graph of a model's nodes.

    Args:
        model: the file, its nodes in topological order (`lift.file.structure.check_structure` sorts them).
        lifted: the same model as a Graph, not simplified: its operations still name one node each.
        topo: device rates, and the slowest link that a stage may receive over: which stages it lies between is not known.
    """
    return _Builder(model, lifted, topo).finish()


class _Builder:
    def __init__(self, model: ModelProto, lifted: Graph, topo: Topology) -> None:
        self.model, self.lifted, self.topo = model, lifted, topo
        self.nodes = list(model.graph.node)
        self.producer = {o: k for k, n in enumerate(self.nodes) for o in n.output if o}  # tensor of the file → node
        self.parents: list[set[int]] = [set() for _ in self.nodes]
        self.constant: list[bool] = []
        self.weights: list[dict[int, None]] = [{} for _ in self.nodes]
        self.weight_ids: dict[str, int] = {}
        self.weight_bytes: list[int] = []
        self.root: dict[str, str] = {}  # view → the tensor behind it
        self.ids: dict[str, int] = {}
        self.maker: list[int] = []
        self.steps: list[Step] = []
        self.alive: set[int] = set()  # nodes that compute something
        self.priced: dict[str, tuple[int, int]] = {}

    def finish(self) -> NodeGraph:
        self._edges()
        for t in self.lifted.inputs:
            self._tensor(t, -1)
        homes = self._homes()
        order = sorted(range(len(self.lifted.ops)), key=lambda i: (homes[i], i))
        for i in order:
            self._step(self.lifted.ops[i], homes[i])
        outputs = (self.root.get(t, t) for t in self.lifted.outputs)
        names = tuple(self.ids)
        sizes = tuple(self.lifted.tensors[t].nbytes for t in names)
        link = link_between(self.topo, 0, device_count(self.topo.mesh) - 1)
        return NodeGraph(
            names=tuple(node_name(n) for n in self.nodes),
            parents=tuple(tuple(sorted(p)) for p in self.parents), joined=tuple(self._joined()),
            weights=tuple(tuple(w) for w in self.weights), weight_names=tuple(self.weight_ids),
            weight_bytes=tuple(self.weight_bytes), tensors=names, sizes=sizes,
            moves=tuple(round(receive_seconds(n, link, self.topo) * PICO) for n in sizes), maker=tuple(self.maker),
            steps=tuple(self.steps), kept=frozenset(self.ids[t] for t in outputs if t in self.ids),
        )  # fmt: skip

    def _edges(self) -> None:
        """Edges, weights and which nodes are constant, from the file alone."""
        stored = {t.name: t for t in self.model.graph.initializer}
        for k, node in enumerate(self.nodes):
            names = [i for i in (*node.input, *captured(node)) if i]
            self.parents[k] = {self.producer[i] for i in names if i in self.producer}
            known = all(i in stored or (i in self.producer and self.constant[self.producer[i]]) for i in names)
            self.constant.append(known and node.op_type not in RANDOM)
            for name in names:
                if name in stored:
                    self._weight(k, name, tensor_bytes(stored[name]) if stored[name].data_type != TensorProto.STRING else 0)

    def _weight(self, node: int, name: str, nbytes: int) -> None:
        if name not in self.weight_ids:
            self.weight_ids[name] = len(self.weight_ids)
            self.weight_bytes.append(nbytes)
        self.weights[node][self.weight_ids[name]] = None

    def _homes(self) -> list[int]:
        """The node of each operation; never before a node that it reads from, whatever passes did to names."""
        named: dict[str, list[int]] = {}
        for k, node in enumerate(self.nodes):
            named.setdefault(node_name(node), []).append(k)
        homes: list[int] = []
        home_of: dict[str, int] = {}
        for op in self.lifted.ops:
            first = max((home_of[t] for t in op.inputs if t in home_of), default=0)
            same = [k for s in op.source for k in named.get(s, ())]
            makes = [self.producer[t] for t in op.outs if t in self.producer]
            chosen = next((k for k in makes if k in same), None)
            if chosen is None:
                chosen = next((k for k in (*same, *makes) if k >= first), first)
            homes.append(max(chosen, first))
            home_of.update(dict.fromkeys(op.outs, homes[-1]))
        return homes

    def _step(self, op: Op, home: int) -> None:
        self.alive.add(home)
        roots = list(dict.fromkeys(self.root.get(t, t) for t in op.inputs))
        for t in roots:
            if t not in self.ids:
                self._weight(home, t, self.lifted.tensors[t].nbytes)
        reads = tuple(self.ids[t] for t in roots if t in self.ids)
        self.parents[home] |= {self.maker[t] for t in reads if self.maker[t] not in (-1, home)}
        if is_view(op):
            self.root[op.outs[0]] = roots[0]
            return
        constant = self.constant[home] and not reads
        writes = () if constant else tuple(self._tensor(t, home) for t in op.outs)  # a constant is a weight of its readers
        time, flops = self._price(op)
        self.steps.append(Step(home, time, flops, reads, writes))

    def _tensor(self, name: str, maker: int) -> int:
        self.ids[name] = len(self.ids)
        self.maker.append(maker)
        return self.ids[name]

    def _price(self, op: Op) -> tuple[int, int]:
        """(picoseconds, FLOPs) on one device, worked out once for operations that are alike."""
        key = signature(op, self.lifted)
        if key not in self.priced:
            block = _whole(tuple(d.size for d in op.space))
            final = block[:, : len(op.dims)]
            reads = {(t, b""): _whole(self.lifted.tensors[t].shape) for t in op.inputs}
            seconds = compute.seconds(op, self.lifted, block, final, reads, self.topo)
            heavy, light, _ = compute.quantities(op, self.lifted, block, final, reads)
            self.priced[key] = round(seconds * PICO), int(heavy[0] + light[0])
        return self.priced[key]

    def _joined(self) -> Iterator[int]:
        for node in self.nodes:
            made = {i: self.producer[i] for i in (*node.input, *captured(node)) if i in self.producer}
            yield sum(k in self.alive and not self.constant[k] for k in made.values())


def _whole(shape: tuple[int, ...]) -> np.ndarray:
    return np.array([[(0, s) for s in shape]], np.int64).reshape(1, len(shape), 2)


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
            sum(self.time[u] for u in units), sum(graph.moves[t] for t in received if self.made[t] >= 0),
            sum(self.flops[u] for u in units), self.weight_bytes(frozenset(w for u in units for w in self.weights[u])), peak,
            steps[alive.index(peak)].node if steps else max(self.units[units[-1]]),
        )  # fmt: skip


def bits(mask: int) -> Iterator[int]:
    """Positions of the ones."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
