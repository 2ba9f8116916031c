"""The graph that stages are cut from: one vertex per ONNX node, with costs from the lifted Graph's index spaces.

Vertices and edges are the ONNX file's, because stages are written back onto its nodes; bytes, FLOPs and seconds are
those of the operations that the nodes lift to. Nodes that lifting folds away (shape arithmetic, a node equal to another one)
cost nothing; views are names for the tensor behind them. Seconds are whole picoseconds: sums are then exact, so that
"never worse" can be tested with ``<=`` and does not depend on the order of addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Graph, Op
from tapestry.lift.file.external_data import tensor_bytes
from tapestry.lift.file.protos import captured, node_name
from tapestry.lift.normalize.prepare import RANDOM
from tapestry.plan.cost import compute
from tapestry.plan.topology import Topology

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
        topo: device rates and, for transfers between stages, the link of its slowest mesh axis.
    """
    return _Builder(model, lifted, topo).finish()


@dataclass(slots=True)
class _Builder:
    model: ModelProto
    lifted: Graph
    topo: Topology
    nodes: list[NodeProto] = field(init=False)
    producer: dict[str, int] = field(init=False)  # tensor of the file → node
    parents: list[set[int]] = field(init=False)
    constant: list[bool] = field(default_factory=list[bool])
    weights: list[dict[int, None]] = field(init=False)
    weight_ids: dict[str, int] = field(default_factory=dict[str, int])
    weight_bytes: list[int] = field(default_factory=list[int])
    root: dict[str, str] = field(default_factory=dict[str, str])  # view → the tensor behind it
    ids: dict[str, int] = field(default_factory=dict[str, int])
    maker: list[int] = field(default_factory=list[int])
    steps: list[Step] = field(default_factory=list[Step])
    alive: list[bool] = field(init=False)
    priced: dict[Any, tuple[int, int]] = field(default_factory=dict[Any, tuple[int, int]])

    def __post_init__(self) -> None:
        self.nodes = list(self.model.graph.node)
        self.producer = {o: k for k, n in enumerate(self.nodes) for o in n.output if o}
        self.parents = [set() for _ in self.nodes]
        self.weights = [{} for _ in self.nodes]
        self.alive = [False] * len(self.nodes)

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
        link = max(self.topo.links, key=lambda k: (k.alpha, k.beta))
        return NodeGraph(
            names=tuple(node_name(n) for n in self.nodes),
            parents=tuple(tuple(sorted(p)) for p in self.parents), joined=tuple(self._joined()),
            weights=tuple(tuple(w) for w in self.weights), weight_names=tuple(self.weight_ids),
            weight_bytes=tuple(self.weight_bytes), tensors=names, sizes=sizes,
            moves=tuple(round((link.alpha + link.beta * n) * PICO) for n in sizes), maker=tuple(self.maker),
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
            self.weight_ids[name] = len(self.weight_bytes)
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
        self.alive[home] = True
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
        """(picoseconds, FLOPs), worked out once per signature."""
        types = tuple((self.lifted.tensors[t].dtype, self.lifted.tensors[t].shape) for t in (*op.inputs, *op.outs))
        places = tuple((r.index, r.when) for r in op.reads) if isinstance(op, Block) else ()
        body = (op.reduce, op.monoid, op.inner, op.body, op.then, places) if isinstance(op, Block) else (op.kind,)
        key = (op.dims, body, types)
        if key not in self.priced:
            self.priced[key] = _price(op, self.lifted, self.topo)
        return self.priced[key]

    def _joined(self) -> Iterator[int]:
        for node in self.nodes:
            made = {i: self.producer[i] for i in (*node.input, *captured(node)) if i in self.producer}
            yield sum(self.alive[k] and not self.constant[k] for k in made.values())


def _price(op: Op, graph: Graph, topo: Topology) -> tuple[int, int]:
    block = _whole(tuple(d.size for d in op.space))
    final = block[:, : len(op.dims)]
    reads = {(t, b""): _whole(graph.tensors[t].shape) for t in op.inputs}
    heavy, light, _ = compute.quantities(op, graph, block, final, reads)
    seconds = compute.seconds(op, graph, block, final, reads, topo)
    return round(seconds * PICO), int(heavy[0] + light[0])


def _whole(shape: tuple[int, ...]) -> np.ndarray:
    """The box of one device that holds everything."""
    return np.array([[(0, s) for s in shape]], np.int64).reshape(1, len(shape), 2)


def is_view(op: Op) -> bool:
    """Whether an operation only renames cells of one tensor, so that its readers can read that tensor instead."""
    if not isinstance(op, Block) or op.monoid or len(op.reads) != 1 or len(op.outs) != 1:
        return False
    return isinstance(op.body[0], Arg)
