"""Small graphs as people write them, each with work in it that an equation saves: what `bench rules` measures.

Weights are initialisers. Sizes are those of small models, so that a CPU takes milliseconds. ``SEEN`` are the graphs that the
rules were written with; ``UNOPENED`` were written before the search was run on them, and not looked at until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Net:
    """An ONNX graph while it is written; methods return names of tensors."""

    def __init__(self, name: str) -> None:
        self.name, self.rng = name, np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, *shape: int, dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def weight(self, *shape: int) -> str:
        """Normal values over the square root of the last but one size, so that results stay of the size of one."""
        scale = 1 / np.sqrt(shape[-2] if len(shape) > 1 else 1)
        return self.const((self.rng.standard_normal(shape) * scale).astype(np.float32))

    def const(self, value: np.ndarray | list[int]) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def op(self, kind: str, *ins: str, **attributes: Any) -> str:
        out = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(ins), [out], **attributes))
        return out

    def mm(self, a: str, b: str) -> str:
        return self.op("MatMul", a, b)

    def ein(self, equation: str, *ins: str) -> str:
        return self.op("Einsum", *ins, equation=equation)

    def slice(self, x: str, start: int, end: int, axis: int) -> str:
        return self.op("Slice", x, self.ints(start), self.ints(end), self.ints(axis))

    def ints(self, *values: int) -> str:
        return self.const(np.array(values, np.int64))

    def scalar(self, value: float) -> str:
        return self.const(np.array(value, np.float32))

    def model(self, *outputs: str, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
        outs = [helper.make_tensor_value_info(o, dtype, None) for o in outputs]
        graph = helper.make_graph(self.nodes, self.name, self.inputs, outs, self.weights)
        out = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        return onnx.shape_inference.infer_shapes(out, strict_mode=True, data_prop=True)


def lora() -> onnx.ModelProto:
    """An adapter that was added to its weight: x (W + s A B) + b."""
    n = Net("lora")
    x, w = n.input("x", 64, 1024), n.weight(1024, 1024)
    delta = n.op("Mul", n.mm(n.weight(1024, 8), n.weight(8, 1024)), n.scalar(0.5))
    return n.model(n.op("Add", n.mm(x, n.op("Add", w, delta)), n.weight(1024)))


def low_rank() -> onnx.ModelProto:
    """A layer whose weight is stored as the factors of its singular value decomposition: x ((U S) V)."""
    n = Net("low_rank")
    x = n.input("x", 64, 1024)
    return n.model(n.mm(x, n.mm(n.op("Mul", n.weight(1024, 32), n.weight(32)), n.weight(32, 1024))))


def linear_attention() -> onnx.ModelProto:
    """(φ(q) φ(k)ᵀ) v, in the order in which it is written."""
    n = Net("linear_attention")
    q, k, v = (n.input(c, 4, 512, 64) for c in "qkv")
    q, k = n.op("Relu", q), n.op("Relu", k)
    return n.model(n.mm(n.mm(q, n.op("Transpose", k, perm=[0, 2, 1])), v))


def last_token() -> onnx.ModelProto:
    """The head of a language model, of which the last token's logits are taken."""
    n = Net("last_token")
    x = n.input("x", 1, 128, 256)
    return n.model(n.slice(n.mm(x, n.weight(256, 4096)), -1, 1 << 40, 1))


def segmentation() -> onnx.ModelProto:
    """A 1x1 convolution behind an upsampling by the nearest neighbour."""
    n = Net("segmentation")
    x = n.input("x", 1, 64, 32, 32)
    up = n.op("Resize", x, "", n.const(np.array([1, 1, 4, 4], np.float32)), mode="nearest",
              coordinate_transformation_mode="asymmetric", nearest_mode="floor")  # fmt: skip
    return n.model(n.op("Conv", up, n.weight(32, 64, 1, 1), kernel_shape=[1, 1]))


def rms_norm() -> onnx.ModelProto:
    """RMSNorm before a linear layer; the gain is a weight."""
    n = Net("rms_norm")
    x = n.input("x", 128, 1024)
    mean = n.op("ReduceMean", n.op("Mul", x, x), n.ints(-1), keepdims=1)
    h = n.op("Mul", n.op("Div", x, n.op("Sqrt", n.op("Add", mean, n.scalar(1e-6)))), n.weight(1024))
    return n.model(n.mm(h, n.weight(1024, 1024)))


def chain() -> onnx.ModelProto:
    """A product of three matrices, from the left, that ends in a vector."""
    n = Net("chain")
    a, b, v = n.input("a", 512, 512), n.input("b", 512, 512), n.input("v", 512, 1)
    return n.model(n.mm(n.mm(a, b), v))


def pooled() -> onnx.ModelProto:
    """A linear layer for every token, and their mean."""
    n = Net("pooled")
    x = n.input("x", 8, 128, 256)
    return n.model(n.op("ReduceMean", n.mm(x, n.weight(256, 512)), n.ints(1), keepdims=0))


def embedding() -> onnx.ModelProto:
    """A table that is projected as a whole, and looked up for a few tokens."""
    n = Net("embedding")
    ids = n.input("ids", 64, dtype=TensorProto.INT64)
    return n.model(n.op("Gather", n.mm(n.weight(4096, 128), n.weight(128, 512)), ids))


def two_products() -> onnx.ModelProto:
    """Two branches of one input by two weights, added."""
    n = Net("two_products")
    x, y, w = n.input("x", 256, 512), n.input("y", 256, 512), n.weight(512, 512)
    return n.model(n.op("Add", n.mm(x, w), n.mm(y, w)))


def distances() -> onnx.ModelProto:
    """All squared distances between tokens and a codebook, as a vector quantiser computes them."""
    n = Net("distances")
    x, c = n.input("x", 256, 1, 64), n.weight(1, 512, 64)
    d = n.op("Sub", x, c)
    return n.model(n.op("ReduceSum", n.op("Mul", d, d), n.ints(-1), keepdims=0))


def unet() -> onnx.ModelProto:
    """A 1x1 convolution over a concat of a skip connection and an upsampled path."""
    n = Net("unet")
    skip, deep = n.input("skip", 1, 16, 64, 64), n.input("deep", 1, 128, 16, 16)
    up = n.op("Resize", deep, "", n.const(np.array([1, 1, 4, 4], np.float32)), mode="nearest",
              coordinate_transformation_mode="asymmetric", nearest_mode="floor")  # fmt: skip
    return n.model(n.op("Conv", n.op("Concat", skip, up, axis=1), n.weight(32, 144, 1, 1), kernel_shape=[1, 1]))


def trace() -> onnx.ModelProto:
    """The trace of a product of two matrices."""
    n = Net("trace")
    a, b = n.input("a", 512, 512), n.input("b", 512, 512)
    eye = n.const(np.eye(512, dtype=np.float32))
    return n.model(n.op("ReduceSum", n.op("Mul", n.mm(a, b), eye), keepdims=0))


def greedy() -> onnx.ModelProto:
    """The greatest probability's logit over a vocabulary: a maximum of a monotone function."""
    n = Net("greedy")
    x = n.input("x", 64, 4096)
    return n.model(n.op("ReduceMax", n.op("Tanh", n.op("Exp", x)), n.ints(-1), keepdims=0))


SEEN: Mapping[str, Callable[[], onnx.ModelProto]] = {
    f.__name__: f
    for f in (lora, low_rank, linear_attention, last_token, segmentation, rms_norm, chain, pooled, embedding, two_products,
              distances, unet, trace, greedy)
}  # fmt: skip


def class_token() -> onnx.ModelProto:
    """A feed-forward layer for every token, of which the first token's result is taken by a Gather."""
    n = Net("class_token")
    x = n.input("x", 4, 196, 384)
    h = n.op("Tanh", n.op("Add", n.mm(x, n.weight(384, 1536)), n.weight(1536)))
    y = n.op("Add", n.mm(h, n.weight(1536, 384)), n.weight(384))
    return n.model(n.op("Gather", y, n.const(np.array(0, np.int64)), axis=1))


def pooled_attention() -> onnx.ModelProto:
    """Attention without a softmax over linear scores, pooled over all queries."""
    n = Net("pooled_attention")
    q, k, v = (n.input(c, 4, 256, 64) for c in "qkv")
    scores = n.op("Mul", n.mm(q, n.op("Transpose", k, perm=[0, 2, 1])), n.scalar(0.125))
    return n.model(n.op("ReduceSum", n.mm(scores, v), n.ints(1), keepdims=0))


def wide_bottleneck() -> onnx.ModelProto:
    """Two linear layers without anything in between, the middle one wide."""
    n = Net("wide_bottleneck")
    x = n.input("x", 512, 128)
    return n.model(n.mm(n.mm(x, n.weight(128, 1024)), n.weight(1024, 64)))


def max_pool() -> onnx.ModelProto:
    """A maximum pool of sigmoids' arguments: exp before pooling."""
    n = Net("max_pool")
    x = n.input("x", 1, 64, 128, 128)
    return n.model(n.op("MaxPool", n.op("Tanh", x), kernel_shape=[2, 2], strides=[2, 2]))


def average_pool() -> onnx.ModelProto:
    """A 1x1 convolution, and average pooling of its result."""
    n = Net("average_pool")
    x = n.input("x", 1, 128, 56, 56)
    return n.model(n.op("AveragePool", n.op("Conv", x, n.weight(256, 128, 1, 1), kernel_shape=[1, 1]), kernel_shape=[2, 2],
                        strides=[2, 2]))  # fmt: skip


def experts() -> onnx.ModelProto:
    """A mixture of experts that is written densely, with one gate for a whole sequence."""
    n = Net("experts")
    x, g = n.input("x", 256, 256), n.input("g", 8)
    each = n.ein("tm,emn->etn", x, n.weight(8, 256, 256))
    return n.model(n.ein("e,etn->tn", g, each))


def einsum_chain() -> onnx.ModelProto:
    """Three factors of a low-rank bilinear form by einsums in the order of the paper."""
    n = Net("einsum_chain")
    a, b, c = n.input("a", 256, 256), n.input("b", 256, 256), n.input("c", 256, 8)
    return n.model(n.ein("ik,kr->ir", n.ein("ij,jk->ik", a, b), c))


def qk_norm() -> onnx.ModelProto:
    """Attention whose queries and keys are RMS-normalised before their product."""
    n = Net("qk_norm")
    q, k, v = (n.input(c, 4, 256, 64) for c in "qkv")

    def norm(x: str) -> str:
        mean = n.op("ReduceMean", n.op("Mul", x, x), n.ints(-1), keepdims=1)
        return n.op("Mul", x, n.op("Reciprocal", n.op("Sqrt", n.op("Add", mean, n.scalar(1e-6)))))

    scores = n.mm(norm(q), n.op("Transpose", norm(k), perm=[0, 2, 1]))
    return n.model(n.mm(n.op("Softmax", scores, axis=-1), v))


def gated_mlp() -> onnx.ModelProto:
    """silu(x W) · (x V), projected."""
    n = Net("gated_mlp")
    x = n.input("x", 128, 256)
    g = n.mm(x, n.weight(256, 1024))
    h = n.op("Mul", n.op("Mul", g, n.op("Sigmoid", g)), n.mm(x, n.weight(256, 1024)))
    return n.model(n.mm(h, n.weight(1024, 256)))


def grouped_attention() -> onnx.ModelProto:
    """Grouped-query attention: eight heads of queries share two of keys and values, which are repeated first."""
    n = Net("grouped_attention")
    q, k, v = n.input("q", 8, 128, 64), n.input("k", 2, 128, 64), n.input("v", 2, 128, 64)

    def repeated(x: str) -> str:
        wide = n.op("Expand", n.op("Unsqueeze", x, n.ints(1)), n.ints(2, 4, 128, 64))
        return n.op("Reshape", wide, n.ints(8, 128, 64))

    scores = n.mm(n.op("Mul", q, n.scalar(0.125)), n.op("Transpose", repeated(k), perm=[0, 2, 1]))
    return n.model(n.mm(n.op("Softmax", scores, axis=-1), repeated(v)))


def selective_scan() -> onnx.ModelProto:
    """Mamba's scan: h = a·h + b at every step, and what each step's state gives by its own row of c."""
    n = Net("selective_scan")
    a, b, c = (n.input(name, 64, 32, 16) for name in "abc")
    given, made = ([helper.make_tensor_value_info(t, TensorProto.FLOAT, [32, 16]) for t in ts]
                   for ts in (("h", "a_t", "b_t"), ("new", "seen")))  # fmt: skip
    nodes = [
        helper.make_node("Mul", ["a_t", "h"], ["kept"]), helper.make_node("Add", ["kept", "b_t"], ["new"]),
        helper.make_node("Identity", ["new"], ["seen"]),
    ]  # fmt: skip
    body = helper.make_graph(nodes, "step", given, made)
    first = n.const(np.zeros((32, 16), np.float32))
    n.nodes.append(helper.make_node("Scan", [first, a, b], ["last", "states"], body=body, num_scan_inputs=2))
    return n.model(n.op("ReduceSum", n.op("Mul", "states", c), n.ints(-1), keepdims=0))


UNOPENED: Mapping[str, Callable[[], onnx.ModelProto]] = {
    f.__name__: f
    for f in (class_token, pooled_attention, wide_bottleneck, max_pool, average_pool, experts, einsum_chain, qk_norm, gated_mlp,
              grouped_attention, selective_scan)
}  # fmt: skip
