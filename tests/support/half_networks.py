"""Networks in float16 whose tensors a GPU plan lays out anew."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tapestry.plan.alternatives import Machine
from tapestry.plan.topology.topology_files import SOURCES

GPU = Machine(device=SOURCES["h100"].device, eager=False)
HALF = np.float16


def model(nodes: list[onnx.NodeProto], shapes: dict[str, tuple[int, ...]], weights: dict[str, tuple[int, ...]], out: str):
    """A model in float16 with random weights."""
    rng = np.random.default_rng(0)
    held = [numpy_helper.from_array((rng.standard_normal(s) * 0.4).astype(HALF), n) for n, s in weights.items()]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, s) for n, s in shapes.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info(out, TensorProto.FLOAT16, None)], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def network() -> onnx.ModelProto:
    """A residual block with a pool before and behind it."""
    conv = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], strides=[2, 2], **conv), helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["c", "w1"], ["d"], **conv), helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("Conv", ["e", "w2"], ["f"], **conv), helper.make_node("Add", ["f", "c"], ["g"]),
        helper.make_node("Relu", ["g"], ["h"]), helper.make_node("Conv", ["h", "w3"], ["i"]),
        helper.make_node("GlobalAveragePool", ["i"], ["y"]),
    ]  # fmt: skip
    weights = {"w0": (6, 3, 3, 3), "w1": (6, 6, 3, 3), "w2": (6, 6, 3, 3), "w3": (5, 6, 1, 1)}
    return model(nodes, {"x": (2, 3, 17, 13)}, weights, "y")


def projections() -> onnx.ModelProto:
    """Three projections of one tensor, two of them scaled in heads, as exporters write attention."""
    nodes = [helper.make_node("Constant", [], ["s"], value_ints=[2, 7, 3, 4])]
    for n, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            helper.make_node("MatMul", ["x", f"w{n}"], [f"{n}0"]), helper.make_node("Reshape", [f"{n}0", "s"], [f"{n}1"]),
            helper.make_node("Transpose", [f"{n}1"], [f"{n}2"], perm=perm),
        ]  # fmt: skip
    nodes += [
        helper.make_node("Mul", ["q2", "r"], ["q3"]), helper.make_node("Mul", ["k2", "r"], ["k3"]),
        helper.make_node("MatMul", ["q3", "k3"], ["scores"]), helper.make_node("Softmax", ["scores"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v2"], ["y"]),
    ]  # fmt: skip
    return model(nodes, {"x": (2, 7, 10)}, {**{f"w{n}": (10, 12) for n in "qkv"}, "r": (1,)}, "y")
