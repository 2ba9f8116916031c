"""Graphs and models that are cut into pipeline stages."""

from __future__ import annotations

import itertools
import random

import onnx
from onnx import TensorProto as T

from tapestry.tools.auto_shard.node_graph import NodeGraph, Step
from tapestry.tools.auto_shard.scheme_cost import Problem, bits
from tests.support.small_models import N, f32, i64, net

DEVICE = {"memory": "1GiB", "bandwidth": 1e10, "launch": 1e-6, "vector": 1e10, "flops": {"f32": 1e10, "other": 1e10}}
NODES = {"device": DEVICE, "levels": [{"alpha": 1e-6, "beta": 1e-10}]}  # a topology file: any number of slow devices


def random_graph(seed: int, most: int = 9) -> NodeGraph:
    """One step and one tensor per node; some weights are shared, some nodes cost nothing, some end the graph."""
    rng = random.Random(seed)
    n = rng.randint(4, most)
    chain = rng.random() < 0.3
    parents = [
        (k - 1,) if chain and k else tuple(sorted({rng.randrange(k) for _ in range(rng.randint(0, 2))})) if k else ()
        for k in range(n)
    ]
    weights = [tuple({rng.randrange(n) for _ in range(rng.randint(0, 2))}) for _ in range(n)]
    # tensor 0 is the model's input
    steps = [
        Step(k, rng.choice([0, 5, 10, 40]), rng.randint(0, 9), tuple(p + 1 for p in parents[k]) or (0,), (k + 1,))
        for k in range(n)
    ]
    read = {p for row in parents for p in row}
    return NodeGraph(
        names=tuple(f"n{k}" for k in range(n)), parents=tuple(parents), joined=tuple(map(len, parents)),
        weights=tuple(weights), weight_names=tuple(f"w{k}" for k in range(n)), weight_bytes=tuple(rng.randint(1, 50) for _ in range(n)),
        tensors=tuple(f"t{k}" for k in range(n + 1)), sizes=tuple(rng.randint(1, 30) for _ in range(n + 1)),
        moves=tuple(rng.randint(0, 12) for _ in range(n + 1)), maker=(-1, *range(n)), steps=tuple(steps),
        kept=frozenset(k + 1 for k in range(n) if k not in read),
    )  # fmt: skip


def all_schemes(problem: Problem, devices: int):
    """Every monotone way to give the subgraphs to exactly so many stages."""
    count = len(problem.units)
    for stages in itertools.product(range(devices), repeat=count):
        if len(set(stages)) == devices and all(stages[p] <= stages[u] for u in range(count) for p in bits(problem.parents[u])):
            yield tuple(sum(1 << u for u in range(count) if stages[u] == k) for k in range(devices))


def branches(blocks: int = 4, width: int = 16, tied: bool = False, names: bool = True) -> onnx.ModelProto:
    """Residual blocks with two branches, and a shape computed on the way; without ``names`` all products are called alike."""
    nodes, weights, x = [], {"flat": i64(0, -1)}, "x"
    for k in range(blocks):
        a, b = ("wa0" if tied else f"wa{k}"), f"wb{k}"
        weights[a], weights[b] = f32(width, width), f32(width, width)
        nodes += [
            N("MatMul", [x, a], [f"p{k}"], f"left{k}" if names else "mm"), N("Relu", [f"p{k}"], [f"r{k}"], f"relu{k}"), N("MatMul", [x, b], [f"q{k}"], f"right{k}" if names else "mm"),
            N("Add", [f"r{k}", f"q{k}"], [f"s{k}"], f"join{k}"), N("Add", [f"s{k}", x], [f"h{k}"], f"residual{k}"),
        ]  # fmt: skip
        x = f"h{k}"
    nodes += [
        N("Shape", [x], ["shape"], "shape"),
        N("Reshape", [x, "flat"], ["z"], "view"),
        N("Reshape", ["z", "shape"], ["y"], "back"),
    ]
    return net(nodes, {"x": (T.FLOAT, [8, width])}, {"y": T.FLOAT}, weights)


def save(model: onnx.ModelProto, folder, name="m.onnx"):
    model = onnx.shape_inference.infer_shapes(model)  # the checker wants shapes of outputs
    onnx.save(model, folder / name)
    return folder / name
