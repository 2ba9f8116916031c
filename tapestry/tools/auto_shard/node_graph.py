"""The graph that stages are cut from: one vertex per ONNX node, with costs from the lifted Graph's index spaces.

Vertices and edges are the ONNX file's, because stages are written back onto its nodes; bytes, FLOPs and seconds are
those of the operations that the nodes lift to. Nodes that lifting folds away (shape arithmetic, a node equal to another one)
cost nothing; views are names for the tensor behind them. Seconds are whole picoseconds: sums are then exact, so that
"never worse" can be tested with ``<=`` and does not depend on the order of addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto

from tapestry.ir.graph import Graph, Op
from tapestry.ir.plan import device_count
from tapestry.ir.syntax.printer import signature
from tapestry.lift.file.external_data import tensor_bytes
from tapestry.lift.file.protos import captured, node_name
from tapestry.onnx_eval.opaque_node import RANDOM
from tapestry.plan.cost import compute
from tapestry.plan.pipelines.segments import receive_seconds
from tapestry.plan.pipelines.staged_plan import link_between
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.edit import is_view

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
            parents=tuple(tuple(sorted(p)) for p in self.parents),
            joined=tuple(self._joined()),
            weights=tuple(tuple(w) for w in self.weights),
            weight_names=tuple(self.weight_ids),
            weight_bytes=tuple(self.weight_bytes),
            tensors=names,
            sizes=sizes,
            moves=tuple(round(receive_seconds(n, link, self.topo) * PICO) for n in sizes),
            maker=tuple(self.maker),
            steps=tuple(self.steps),
            kept=frozenset(self.ids[t] for t in outputs if t in self.ids),
        )

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
