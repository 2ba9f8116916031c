"""A decoder of two layers, as torch's exporter writes it, and how Megatron cuts it."""

from __future__ import annotations

import numpy as np
import onnx

from tests.support.small_models import N, T, f32, i64, net

LAYERS, WIDTH, HEADS, INNER, TOKENS = 2, 16, 4, 32, 6


def linear(x: str, module: str, out: str, n: int, m: int, weights, bias: bool = False):
    """A linear layer as torch's exporter writes it: the parameter by its own name, turned over."""
    weights[f"{module}.weight"] = f32(n, m)
    nodes = [
        N("Transpose", [f"{module}.weight"], [f"{out}.t"], f"{out}.t", perm=[1, 0]),
        N("MatMul", [x, f"{out}.t"], [f"{out}.mm" if bias else out], f"{out}.mm"),
    ]
    if bias:
        weights[f"{module}.bias"] = f32(n)
        nodes.append(N("Add", [f"{out}.mm", f"{module}.bias"], [out], f"{out}.bias"))
    return nodes


def decoder(uneven: bool = False) -> onnx.ModelProto:
    """Layers of attention and of a gated MLP, on a table of 32 tokens, with a head."""
    weights = {"split": i64(0, 0, HEADS, WIDTH // HEADS), "join": i64(0, 0, WIDTH), "scale": np.float32(0.5)}
    weights["m.model.embed_tokens.weight"] = f32(32, WIDTH)
    nodes, x = [N("Gather", ["m.model.embed_tokens.weight", "ids"], ["h"], "embed")], "h"
    for k in range(LAYERS):
        p, a = f"m.model.layers.{k}", f"l{k}"
        for name in "qkv":
            nodes += linear(x, f"{p}.self_attn.{name}_proj", f"{a}.{name}", WIDTH, WIDTH, weights, bias=name == "q")
            nodes += [N("Reshape", [f"{a}.{name}", "split"], [f"{a}.{name}1"], f"{a}.{name}1"),
                      N("Transpose", [f"{a}.{name}1"], [f"{a}.{name}2"], f"{a}.{name}2", perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3])]  # fmt: skip
        nodes += [N("MatMul", [f"{a}.q2", f"{a}.k2"], [f"{a}.s"], f"{a}.s"), N("Mul", [f"{a}.s", "scale"], [f"{a}.s1"], f"{a}.s1"),
                  N("Softmax", [f"{a}.s1"], [f"{a}.p"], f"{a}.p", axis=-1), N("MatMul", [f"{a}.p", f"{a}.v2"], [f"{a}.o"], f"{a}.o"),
                  N("Transpose", [f"{a}.o"], [f"{a}.o1"], f"{a}.o1", perm=[0, 2, 1, 3]), N("Reshape", [f"{a}.o1", "join"], [f"{a}.o2"], f"{a}.o2")]  # fmt: skip
        nodes += linear(f"{a}.o2", f"{p}.self_attn.o_proj", f"{a}.attn", WIDTH, WIDTH, weights)
        nodes.append(N("Add", [f"{a}.attn", x], [f"{a}.h"], f"{a}.h"))
        inner = INNER - 1 if uneven else INNER
        nodes += linear(f"{a}.h", f"{p}.mlp.up_proj", f"{a}.u", inner, WIDTH, weights)
        nodes.append(N("Relu", [f"{a}.u"], [f"{a}.r"], f"{a}.r"))
        nodes += linear(f"{a}.r", f"{p}.mlp.down_proj", f"{a}.d", WIDTH, inner, weights)
        nodes.append(N("Add", [f"{a}.d", f"{a}.h"], [f"{a}.y"], f"{a}.y"))
        x = f"{a}.y"
    nodes += linear(x, "m.lm_head", "y", 32, WIDTH, weights)
    return net(nodes, {"ids": (T.INT64, [1, TOKENS])}, {"y": T.FLOAT}, weights)


MEGATRON = [
    "layers.*.self_attn.q_proj:out=tp",
    "layers.*.self_attn.o_proj:in=tp",
    "layers.*.mlp.up_proj:out=tp",
    "layers.*.mlp.down_proj:in=tp",
]
