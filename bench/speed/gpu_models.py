"""Whole models of bench/speed/gpu.py, in f16: each written twice over the same weights, as ONNX nodes and as torch functions.

The torch side is what one would write by hand (fused attention, channels last, batch norms folded), not a decomposed export.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

Tensor = torch.Tensor
Weights = dict[str, Tensor]
HALF = np.float16


@dataclass
class Net:
    """An ONNX graph in the making; every method adds nodes and gives the name of their result."""

    rng: np.random.Generator
    nodes: list[Any] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def op(self, kind: str, *ins: str, **attributes: Any) -> str:
        out = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(ins), [out], name=out, **attributes))
        return out

    def weight(self, name: str, *shape: int, scale: float | None = None, shift: float = 0.0) -> str:
        fan = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
        spread = 1.0 / np.sqrt(fan) if scale is None else scale
        self.weights[name] = (self.rng.standard_normal(shape, np.float32) * spread + shift).astype(HALF)
        return name

    def ints(self, *values: int) -> str:
        name = "i" + "_".join(str(v).replace("-", "m") for v in values)
        self.weights[name] = np.array(values, np.int64)
        return name

    def linear(self, x: str, name: str, n: int, m: int, *, bias: bool = True) -> str:
        y = self.op("MatMul", x, self.weight(f"{name}.w", n, m))
        return self.op("Add", y, self.weight(f"{name}.b", m, scale=0.02)) if bias else y

    def norm(self, x: str, name: str, n: int) -> str:
        g, b = self.weight(f"{name}.g", n, scale=0.1, shift=1.0), self.weight(f"{name}.b", n, scale=0.1)
        return self.op("LayerNormalization", x, g, b, axis=-1, epsilon=1e-5)

    def heads(self, x: str, batch: int, s: int, h: int, d: int) -> str:
        return self.op("Transpose", self.op("Reshape", x, self.ints(batch, s, h, d)), perm=[0, 2, 1, 3])

    def merged(self, x: str, batch: int, s: int, n: int) -> str:
        return self.op("Reshape", self.op("Transpose", x, perm=[0, 2, 1, 3]), self.ints(batch, s, n))

    def model(self, name: str, kind: int, shape: Sequence[int], out: str) -> onnx.ModelProto:
        stored = [numpy_helper.from_array(a, n) for n, a in self.weights.items()]
        given = helper.make_tensor_value_info("x", kind, list(shape))
        result = helper.make_tensor_value_info(out, TensorProto.FLOAT16, None)
        graph = helper.make_graph(self.nodes, name, [given], [result], stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


@dataclass(frozen=True)
class Whole:
    """A model, its input, and the same in torch (weights on the device, then the input)."""

    name: str
    model: onnx.ModelProto
    weights: dict[str, np.ndarray]
    make: Callable[[torch.Generator], Tensor]
    run: Callable[[Weights, Tensor], Tensor]
    flops: float


# transformers


@dataclass(frozen=True)
class Size:
    batch: int
    s: int
    n: int
    h: int
    inner: int
    layers: int
    vocab: int


def _block(net: Net, x: str, name: str, z: Size, *, before: bool, causal: bool, gelu: str) -> str:
    """A transformer block; norms before (GPT-2) or after (BERT)."""
    d = z.n // z.h
    y = net.norm(x, f"{name}.n1", z.n) if before else x
    q, k, v = (net.heads(net.linear(y, f"{name}.{c}", z.n, z.n), z.batch, z.s, z.h, d) for c in "qkv")
    a = net.merged(net.op("Attention", q, k, v, is_causal=int(causal)), z.batch, z.s, z.n)
    x = net.op("Add", x, net.linear(a, f"{name}.o", z.n, z.n))
    x = x if before else net.norm(x, f"{name}.n1", z.n)
    y = net.norm(x, f"{name}.n2", z.n) if before else x
    y = net.linear(net.op("Gelu", net.linear(y, f"{name}.up", z.n, z.inner), approximate=gelu), f"{name}.down", z.inner, z.n)
    x = net.op("Add", x, y)
    return x if before else net.norm(x, f"{name}.n2", z.n)


def _torch_block(w: Weights, x: Tensor, name: str, z: Size, *, before: bool, causal: bool, gelu: str) -> Tensor:
    def norm(x: Tensor, k: str) -> Tensor:
        return F.layer_norm(x, (z.n,), w[f"{name}.{k}.g"], w[f"{name}.{k}.b"], 1e-5)

    def linear(x: Tensor, k: str) -> Tensor:
        return x @ w[f"{name}.{k}.w"] + w[f"{name}.{k}.b"]

    y = norm(x, "n1") if before else x
    q, k, v = (linear(y, c).view(z.batch, z.s, z.h, z.n // z.h).transpose(1, 2) for c in "qkv")
    a = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(z.batch, z.s, z.n)
    x = x + linear(a, "o")
    x = x if before else norm(x, "n1")
    y = norm(x, "n2") if before else x
    x = x + linear(F.gelu(linear(y, "up"), approximate=gelu), "down")
    return x if before else norm(x, "n2")


def transformer(name: str, z: Size, *, gpt: bool) -> Whole:
    """BERT-base (norms after, exact GELU) or GPT-2 with its head (norms before, causal, tanh GELU)."""
    net = Net(np.random.default_rng(0))
    how: dict[str, Any] = {"before": gpt, "causal": gpt, "gelu": "tanh" if gpt else "none"}
    x = net.op("Gather", net.weight("words", z.vocab, z.n, scale=0.05), "x", axis=0)
    x = net.op("Add", x, net.weight("places", z.s, z.n, scale=0.05))
    x = x if gpt else net.norm(x, "first", z.n)
    for k in range(z.layers):
        x = _block(net, x, f"l{k}", z, **how)
    if gpt:
        x = net.op("MatMul", net.norm(x, "last", z.n), net.weight("head", z.n, z.vocab))

    def run(w: Weights, ids: Tensor) -> Tensor:
        y = F.embedding(ids, w["words"]) + w["places"]
        y = y if gpt else F.layer_norm(y, (z.n,), w["first.g"], w["first.b"], 1e-5)
        for k in range(z.layers):
            y = _torch_block(w, y, f"l{k}", z, **how)
        return F.layer_norm(y, (z.n,), w["last.g"], w["last.b"], 1e-5) @ w["head"] if gpt else y

    tokens = z.batch * z.s
    flops = tokens * z.layers * (2.0 * (4 * z.n * z.n + 2 * z.n * z.inner) + 4.0 * z.s * z.n * (0.5 if gpt else 1)) + (
        2.0 * tokens * z.n * z.vocab if gpt else 0
    )
    return Whole(
        name,
        net.model(name, TensorProto.INT64, (z.batch, z.s), x),
        net.weights,
        lambda g: torch.randint(0, z.vocab, (z.batch, z.s), generator=g, device=g.device),
        run,
        flops,
    )


def llama_layer(name: str, z: Size) -> Whole:
    """One layer: RMS norms, rotary positions, causal attention, SwiGLU."""
    net, d = Net(np.random.default_rng(1)), z.n // z.h
    angle = np.outer(np.arange(z.s), 10000.0 ** (-np.arange(0, d, 2) / d))
    net.weights["cos"], net.weights["sin"] = (np.concatenate([f(angle)] * 2, -1).astype(HALF) for f in (np.cos, np.sin))

    def rotated(x: str) -> str:
        low = net.op("Slice", x, net.ints(0), net.ints(d // 2), net.ints(3))
        high = net.op("Slice", x, net.ints(d // 2), net.ints(d), net.ints(3))
        turned = net.op("Concat", net.op("Neg", high), low, axis=3)
        return net.op("Add", net.op("Mul", x, "cos"), net.op("Mul", turned, "sin"))

    g1, g2 = (net.weight(f"g{k}", z.n, scale=0.1, shift=1.0) for k in (1, 2))
    y = net.op("RMSNormalization", "x", g1, axis=-1, epsilon=1e-6)
    q, k, v = (net.heads(net.linear(y, c, z.n, z.n, bias=False), z.batch, z.s, z.h, d) for c in "qkv")
    a = net.merged(net.op("Attention", rotated(q), rotated(k), v, is_causal=1), z.batch, z.s, z.n)
    x = net.op("Add", "x", net.linear(a, "o", z.n, z.n, bias=False))
    y = net.op("RMSNormalization", x, g2, axis=-1, epsilon=1e-6)
    gate, up = (net.linear(y, c, z.n, z.inner, bias=False) for c in ("gate", "up"))
    gated = net.op("Mul", net.op("Mul", gate, net.op("Sigmoid", gate)), up)
    out = net.op("Add", x, net.linear(gated, "down", z.inner, z.n, bias=False))

    def run(w: Weights, x: Tensor) -> Tensor:
        def turn(x: Tensor) -> Tensor:
            low, high = x[..., : d // 2], x[..., d // 2 :]
            return x * w["cos"] + torch.cat([-high, low], -1) * w["sin"]

        y = F.rms_norm(x, (z.n,), w["g1"], 1e-6)
        q, k, v = ((y @ w[f"{c}.w"]).view(z.batch, z.s, z.h, d).transpose(1, 2) for c in "qkv")
        a = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True).transpose(1, 2).reshape(z.batch, z.s, z.n)
        x = x + a @ w["o.w"]
        y = F.rms_norm(x, (z.n,), w["g2"], 1e-6)
        return x + (F.silu(y @ w["gate.w"]) * (y @ w["up.w"])) @ w["down.w"]

    tokens = z.batch * z.s
    flops = tokens * (2.0 * (4 * z.n * z.n + 3 * z.n * z.inner) + 2.0 * z.s * z.n)
    return Whole(
        name,
        net.model(name, TensorProto.FLOAT16, (z.batch, z.s, z.n), out),
        net.weights,
        lambda g: torch.randn(z.batch, z.s, z.n, generator=g, device=g.device).half(),
        run,
        flops,
    )


# ResNet-50


def resnet(name: str, batch: int, size: int, layers: Sequence[int], width: int) -> Whole:
    """ResNet with bottlenecks, batch norms folded; ONNX's axes in ONNX's order, channels last in torch."""
    net = Net(np.random.default_rng(2))
    flops = [0.0]

    def conv(x: str, key: str, shape: tuple[int, int, int], hw: int, stride: int = 1) -> str:
        c, o, k = shape
        w, b = net.weight(f"{key}.w", o, c, k, k), net.weight(f"{key}.b", o, scale=0.02)
        flops[0] += 2.0 * batch * (hw // stride) ** 2 * o * c * k * k
        return net.op("Conv", x, w, b, kernel_shape=[k, k], strides=[stride] * 2, pads=[k // 2] * 4)

    plan: list[tuple[str, int, int, int, bool]] = []  # name, channels in, width, stride, whether the short cut is a convolution
    c = width
    for stage, count in enumerate(layers):
        for k in range(count):
            plan.append((f"s{stage}.{k}", c, width << stage, 2 if stage and not k else 1, not k))
            c = 4 * width << stage
    hw = size // 4
    x = net.op("Relu", conv("x", "stem", (3, width, 7), size, 2))
    x = net.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for key, ins, wide, stride, cut in plan:
        y = net.op("Relu", conv(x, f"{key}.a", (ins, wide, 1), hw))
        y = net.op("Relu", conv(y, f"{key}.b", (wide, wide, 3), hw, stride))
        y = conv(y, f"{key}.c", (wide, 4 * wide, 1), hw // stride)
        x = net.op("Relu", net.op("Add", y, conv(x, f"{key}.d", (ins, 4 * wide, 1), hw, stride) if cut else x))
        hw //= stride
    out = net.linear(net.op("Flatten", net.op("GlobalAveragePool", x)), "fc", c, 1000 if width == 64 else 10)

    def run(w: Weights, x: Tensor) -> Tensor:
        def conv(x: Tensor, key: str, stride: int = 1) -> Tensor:
            k = w[f"{key}.w"].shape[-1]
            return F.conv2d(x, w[f"{key}.w"], w[f"{key}.b"], stride=stride, padding=k // 2)

        x = F.max_pool2d(F.relu(conv(x.to(memory_format=torch.channels_last), "stem", 2)), 3, 2, 1)
        for key, _, _, stride, cut in plan:
            y = conv(F.relu(conv(F.relu(conv(x, f"{key}.a")), f"{key}.b", stride)), f"{key}.c")
            x = F.relu(y + (conv(x, f"{key}.d", stride) if cut else x))
        return x.mean((2, 3)) @ w["fc.w"] + w["fc.b"]

    return Whole(
        name,
        net.model(name, TensorProto.FLOAT16, (batch, 3, size, size), out),
        net.weights,
        lambda g: torch.randn(batch, 3, size, size, generator=g, device=g.device).half(),
        run,
        flops[0],
    )


def wholes(tiny: bool) -> dict[str, Callable[[], Whole]]:
    """The four models, made when they are wanted."""
    if tiny:
        small = Size(batch=2, s=5, n=16, h=2, inner=24, layers=1, vocab=11)
        return {
            "resnet": lambda: resnet("resnet", 1, 32, (1, 1), 4),
            "bert": lambda: transformer("bert", small, gpt=False),
            "gpt2": lambda: transformer("gpt2", small, gpt=True),
            "llama layer": lambda: llama_layer("llama layer", small),
        }
    base = {"n": 768, "h": 12, "inner": 3072, "layers": 12}
    return {
        "resnet50 b32": lambda: resnet("resnet50", 32, 224, (3, 4, 6, 3), 64),
        "bert_base b8 s512": lambda: transformer("bert_base", Size(batch=8, s=512, vocab=30522, **base), gpt=False),
        "gpt2 b4 s1024": lambda: transformer("gpt2", Size(batch=4, s=1024, vocab=50257, **base), gpt=True),
        "llama7b_layer b1 s2048": lambda: llama_layer(
            "llama7b_layer", Size(batch=1, s=2048, n=4096, h=32, inner=11008, layers=1, vocab=0)
        ),
    }
