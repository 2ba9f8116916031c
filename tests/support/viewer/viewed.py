"""Small builds for the viewer: each has what one of its pictures is about."""

from __future__ import annotations

import onnx
from onnx import TensorProto as T
from onnx import helper

from tests.support.small_models import f32, net

N = helper.make_node


def halo() -> onnx.ModelProto:
    """Two convolutions with padding, products whose sums are cut, in eight layers that are alike."""
    nodes = [N("Conv", ["x", "k"], ["c"], name="conv1", pads=[1, 1, 1, 1]), N("Relu", ["c"], ["r"], name="relu1")]
    nodes += [N("Conv", ["r", "k2"], ["e"], name="conv2", pads=[1, 1, 1, 1])]
    nodes += [N("ReduceMean", ["e"], ["m"], name="mean1", axes=[1, 3], keepdims=0)]
    at = "m"
    for k in range(8):
        nodes += [
            N("MatMul", [at, f"layers.{k}.up_proj.weight"], [f"u{k}"], name=f"layers.{k}.up_proj"), N("Tanh", [f"u{k}"], [f"t{k}"], name=f"layers.{k}.act"),
            N("MatMul", [f"t{k}", f"layers.{k}.down_proj.weight"], [f"d{k}"], name=f"layers.{k}.down_proj"),
        ]  # fmt: skip
        at = f"d{k}"
    nodes += [N("Identity", [at], ["y"], name="last")]
    weights = {"k": f32(6, 4, 3, 3), "k2": f32(6, 6, 3, 3)}
    for k in range(8):
        weights |= {f"layers.{k}.up_proj.weight": f32(32, 48), f"layers.{k}.down_proj.weight": f32(48, 32)}
    return net(nodes, {"x": (T.FLOAT, (2, 4, 32, 32))}, {"y": T.FLOAT}, weights, opset=13)


HALO_PINS = (
    "conv1:h=4@d0", "conv2:h=4@d0", *(p for k in range(8) for p in (f"layers.{k}.up_proj:n=4@d0", f"layers.{k}.down_proj:m=4@d0")),
)  # fmt: skip


def causal() -> onnx.ModelProto:
    """Attention in which no query sees a later key."""
    nodes = [N("Attention", ["q", "k", "v"], ["y"], name="attention", is_causal=1)]
    shape = (T.FLOAT, (1, 4, 16, 8))
    return net(nodes, {"q": shape, "k": shape, "v": shape}, {"y": T.FLOAT}, opset=23)
