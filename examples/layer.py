"""Write a transformer layer as an ONNX model: ``python examples/layer.py layer.onnx``.

It has 23 nodes and random weights: layer norm, attention with 8 heads, a residual, layer norm, an MLP, a residual. The nodes
have names, which ``--pin`` and ``tapestry explain`` use.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BATCH, TOKENS, WIDTH, HEADS, HIDDEN = 2, 64, 128, 8, 512


class Layer:
    """The nodes and weights of the layer, collected one by one."""

    def __init__(self, seed: int = 0):
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(seed)

    def const(self, name: str, value: np.ndarray) -> str:
        """Add a weight and return its name."""
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def op(self, kind: str, name: str, *reads: str, **attributes: object) -> str:
        """Add a node whose only output has the node's own name, and return that name."""
        self.nodes.append(helper.make_node(kind, list(reads), [name], name, **attributes))
        return name

    def linear(self, name: str, x: str, rows: int, columns: int) -> str:
        """Add ``x @ W`` with a random W of shape (rows, columns)."""
        w = self.rng.standard_normal((rows, columns)) / np.sqrt(rows)
        return self.op("MatMul", name, x, self.const(f"{name}.weight", w.astype(np.float32)))

    def heads(self, name: str, x: str, order: list[int]) -> str:
        """Add a projection of ``x`` cut into heads, with its axes in ``order``."""
        flat = self.linear(f"{name}_proj", x, WIDTH, WIDTH)
        return self.op("Transpose", f"{name}_heads", self.op("Reshape", f"{name}_split", flat, "by_head"), perm=order)

    def attention(self, x: str) -> str:
        """Add self-attention over ``x`` of shape (batch, tokens, width)."""
        q, k, v = self.heads("q", x, [0, 2, 1, 3]), self.heads("k", x, [0, 2, 3, 1]), self.heads("v", x, [0, 2, 1, 3])
        scores = self.op("Mul", "scaled", self.op("MatMul", "scores", q, k), "scale")
        mixed = self.op("MatMul", "mixed", self.op("Softmax", "weights", scores, axis=-1), v)
        merged = self.op("Reshape", "merged", self.op("Transpose", "mixed_heads", mixed, perm=[0, 2, 1, 3]), "flat")
        return self.linear("o_proj", merged, WIDTH, WIDTH)


def model() -> onnx.ModelProto:
    """The layer as a model with input ``x`` and output ``y``, both float32 of shape (2, 64, 128)."""
    layer = Layer()
    layer.const("by_head", np.array([0, 0, HEADS, WIDTH // HEADS]))
    layer.const("flat", np.array([0, 0, WIDTH]))
    layer.const("scale", np.float32((WIDTH // HEADS) ** -0.5))
    layer.const("gain", np.ones(WIDTH, np.float32))
    h = layer.op("Add", "h", layer.attention(layer.op("LayerNormalization", "norm1", "x", "gain")), "x")
    up = layer.linear("up_proj", layer.op("LayerNormalization", "norm2", h, "gain"), WIDTH, HIDDEN)
    layer.op("Add", "y", layer.linear("down_proj", layer.op("Relu", "relu", up), HIDDEN, WIDTH), h)
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [BATCH, TOKENS, WIDTH]) for n in ("x", "y")]
    graph = helper.make_graph(layer.nodes, "layer", ends[:1], ends[1:], layer.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


if __name__ == "__main__":
    onnx.checker.check_model(model())
    onnx.save(model(), sys.argv[1] if len(sys.argv) > 1 else "layer.onnx")
