"""A BERT encoder of any depth as ONNX, node by node as exporters write it. All layers read the same stretch of one data
file, under names of their own, so that 48 layers need the disk space of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, WIDTH, HEADS, INNER = 30522, 768, 12, 3072  # BERT-base (Devlin et al. 2019)


class Builder:
    """Nodes, and weights in one external file."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []
        self.offsets: dict[str, int] = {}
        self.rng = np.random.default_rng(0)
        data.write_bytes(b"")

    def weight(self, name: str, shape: Sequence[int], key: str) -> str:
        """A weight whose bytes are those of every weight with the same key."""
        count = int(np.prod(shape))
        if key not in self.offsets:
            self.offsets[key] = self.data.stat().st_size
            scale = shape[0] ** -0.5 if len(shape) == 2 else 0.1
            with self.data.open("ab") as f:
                f.write((self.rng.standard_normal(count, dtype=np.float32) * np.float32(scale)).tobytes())
        t = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        for k, v in (("location", self.data.name), ("offset", self.offsets[key]), ("length", 4 * count)):
            t.external_data.add(key=k, value=str(v))
        self.weights.append(t)
        return name

    def small(self, name: str, value: object, dtype: type) -> str:
        """A constant inside the model file."""
        if all(t.name != name for t in self.weights):
            self.weights.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def node(self, op: str, *ins: str, out: str, **attributes: object) -> str:
        """Add a node and return its output."""
        self.nodes.append(helper.make_node(op, list(ins), [out], name=f"{out}/{op}", **attributes))
        return out

    def linear(self, x: str, at: str, name: str, shape: tuple[int, int]) -> str:
        """x @ w + b."""
        w = self.weight(f"{at}.{name}.weight", shape, f"{name}.weight")
        b = self.weight(f"{at}.{name}.bias", shape[1:], f"{name}.bias")
        return self.node("Add", self.node("MatMul", x, w, out=f"{at}.{name}.product"), b, out=f"{at}.{name}")

    def norm(self, x: str, at: str, name: str) -> str:
        """Layer normalisation over the width."""
        scale, shift = (self.weight(f"{at}.{name}.{k}", (WIDTH,), f"{name}.{k}") for k in ("scale", "shift"))
        return self.node("LayerNormalization", x, scale, shift, out=f"{at}.{name}", axis=-1, epsilon=1e-12)

    def heads(self, x: str, shape: str, perm: list[int]) -> str:
        """[batch, tokens, width] to heads."""
        return self.node("Transpose", self.node("Reshape", x, shape, out=f"{x}.split"), out=f"{x}.heads", perm=perm)

    def layer(self, x: str, at: str, batch: int, tokens: int) -> str:
        """Self-attention and a feed-forward network, each with a residual and a norm after it."""
        split = self.small("split", [batch, tokens, HEADS, WIDTH // HEADS], np.int64)
        join = self.small("join", [batch, tokens, WIDTH], np.int64)
        q, k, v = (self.linear(x, at, n, (WIDTH, WIDTH)) for n in ("query", "key", "value"))
        q, v = (self.heads(t, split, [0, 2, 1, 3]) for t in (q, v))
        scores = self.node("MatMul", q, self.heads(k, split, [0, 2, 3, 1]), out=f"{at}.scores")
        scaled = self.node("Div", scores, self.small("root", (WIDTH // HEADS) ** 0.5, np.float32), out=f"{at}.scaled")
        weights = self.node("Softmax", scaled, out=f"{at}.weights", axis=-1)
        mixed = self.node("MatMul", weights, v, out=f"{at}.mixed")
        mixed = self.node("Transpose", mixed, out=f"{at}.tokens", perm=[0, 2, 1, 3])
        mixed = self.linear(self.node("Reshape", mixed, join, out=f"{at}.joined"), at, "output", (WIDTH, WIDTH))
        x = self.norm(self.node("Add", mixed, x, out=f"{at}.residual"), at, "norm1")
        inner = self.gelu(self.linear(x, at, "up", (WIDTH, INNER)), at)
        down = self.linear(inner, at, "down", (INNER, WIDTH))
        return self.norm(self.node("Add", down, x, out=f"{at}.residual2"), at, "norm2")

    def gelu(self, x: str, at: str) -> str:
        """x/2 (1 + erf(x/√2)), as exporters write it before opset 20."""
        root, one, half = (self.small(n, v, np.float32) for n, v in (("sqrt2", 2**0.5), ("one", 1), ("half", 0.5)))
        erf = self.node("Erf", self.node("Div", x, root, out=f"{at}.div"), out=f"{at}.erf")
        gate = self.node("Add", erf, one, out=f"{at}.gate")
        return self.node("Mul", self.node("Mul", x, gate, out=f"{at}.mul"), half, out=f"{at}.gelu")


def write(layers: int, folder: Path, batch: int = 1, tokens: int = 128) -> Path:
    """Write the encoder and return its path; the input is ``ids``, the output ``hidden``."""
    folder.mkdir(parents=True, exist_ok=True)
    b = Builder(folder / f"encoder_{layers}.bin")
    table = b.weight("embedding", (VOCABULARY, WIDTH), "embedding")
    x = b.norm(b.node("Gather", table, "ids", out="embedded"), "embeddings", "norm")
    for k in range(layers):
        x = b.layer(x, f"layer{k}", batch, tokens)
    b.node("Identity", x, out="hidden")
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [batch, tokens])
    hidden = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, [batch, tokens, WIDTH])
    graph = helper.make_graph(b.nodes, f"encoder_{layers}", [ids], [hidden], b.weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    path = folder / f"encoder_{layers}.onnx"
    onnx.save(made, path)
    return path
