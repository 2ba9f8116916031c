"""Small models with symbols for sizes, and builds of them for ranges."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper

import tapestry
from tests.support.small_models import FOLDER, f32, i64, net

N = helper.make_node


def rows() -> onnx.ModelProto:
    """Two linear layers and a norm over rows."""
    nodes = [
        N("Gemm", ["x", "w1", "b1"], ["h"], name="up"),
        N("Relu", ["h"], ["r"], name="relu"),
        N("Gemm", ["r", "w2"], ["g"], name="down"),
        N("LayerNormalization", ["g", "scale"], ["y"], name="norm"),
    ]
    weights = {"w1": f32(24, 48), "b1": f32(48), "w2": f32(48, 24), "scale": f32(24)}
    return net(nodes, {"x": (T.FLOAT, ["batch", 24])}, {"y": T.FLOAT}, weights)


def waves() -> onnx.ModelProto:
    """Two convolutions along a length, with halos of one and two cells."""
    nodes = [
        N("Conv", ["x", "w1"], ["a"], name="first", pads=[1, 1]),
        N("Relu", ["a"], ["r"], name="relu"),
        N("Conv", ["r", "w2"], ["y"], name="second", pads=[2, 2]),
    ]
    return net(nodes, {"x": (T.FLOAT, [2, 4, "length"])}, {"y": T.FLOAT}, {"w1": f32(8, 4, 3), "w2": f32(8, 8, 5)})


def tokens() -> onnx.ModelProto:
    """Attention over a sequence of rows of several prompts, with elementwise operations before and behind it."""
    nodes = [
        N("MatMul", ["x", "wq"], ["q"], name="q"),
        N("MatMul", ["x", "wk"], ["k"], name="k"),
        N("Transpose", ["k"], ["kt"], name="turn", perm=[0, 2, 1]),
        N("MatMul", ["q", "kt"], ["s"], name="scores"),
        N("Mul", ["s", "scale"], ["scaled"], name="scale"),
        N("Softmax", ["scaled"], ["p"], name="softmax", axis=-1),
        N("MatMul", ["p", "x"], ["o"], name="mix"),
        N("Sigmoid", ["o"], ["gate"], name="gate"),
        N("Mul", ["o", "gate"], ["m"], name="silu"),
        N("Add", ["m", "x"], ["y"], name="residual"),
    ]
    weights = {"wq": f32(32, 32), "wk": f32(32, 32), "scale": np.float32(0.2)}
    return net(nodes, {"x": (T.FLOAT, ["batch", "sequence", 32])}, {"y": T.FLOAT}, weights)


def joined() -> onnx.ModelProto:
    """Rows of both symbols put together, so that a size is a product."""
    nodes = [N("Reshape", ["x", "flat"], ["f"], name="flat"), N("Gemm", ["f", "w"], ["y"], name="up")]
    return net(nodes, {"x": (T.FLOAT, ["batch", "sequence", 8])}, {"y": T.FLOAT}, {"flat": i64(-1, 8), "w": f32(8, 8)})


def shorter() -> onnx.ModelProto:
    """A sequence cut to the length of another, so that a size is the smaller one of two."""
    nodes = [
        N("Shape", ["other"], ["length"], name="length", start=0, end=1), N("Slice", ["x", "zero", "length"], ["s"], name="cut"),
        N("Tanh", ["s"], ["y"], name="tanh"), N("Neg", ["other"], ["z"], name="neg"),
    ]  # fmt: skip
    ins = {"x": (T.FLOAT, ["n", 6]), "other": (T.FLOAT, ["m", 6])}
    return net(nodes, ins, {"y": T.FLOAT, "z": T.FLOAT}, {"zero": i64(0)})


def patches() -> onnx.ModelProto:
    """Patches of four cells of a length, and two linear layers over them."""
    nodes = [
        N("Conv", ["x", "w1"], ["a"], name="patch", strides=[4]), N("Transpose", ["a"], ["t"], name="turn", perm=[0, 2, 1]),
        N("MatMul", ["t", "w2"], ["h"], name="up"), N("Relu", ["h"], ["r"], name="relu"),
        N("MatMul", ["r", "w3"], ["y"], name="down"),
    ]  # fmt: skip
    weights = {"w1": f32(16, 4, 4), "w2": f32(16, 24), "w3": f32(24, 8)}
    return net(nodes, {"x": (T.FLOAT, [2, 4, "length"])}, {"y": T.FLOAT}, weights)


# a decoder's step: a mask as long as past and new tokens, added to both or looked up place by place
STEP = """<ir_version: 9, opset_import: ["" : 18]>
g (int64[batch, sequence] ids, int64[rows, total] attention_mask, float[batch, past, 4] cache) => (float[batch, both] y) {
  e = Cast<to = 1>(ids)
  axes = Constant<value = int64[1] {2}>()
  last = Constant<value = int64[1] {1}>()
  c = ReduceSum<keepdims = 0>(cache, axes)
  joined = Concat<axis = 1>(c, e)
  f = Cast<to = 1>(attention_mask)
  MASK
}"""
LOOKED_UP = """s = Shape<start = 1>(joined)
  zero = Constant<value = int64 {0}>()
  one = Constant<value = int64 {1}>()
  n = Squeeze(s)
  places = Range(zero, n, one)
  column = Unsqueeze(places, last)
  turned = Transpose<perm = [1, 0]>(f)
  m = GatherND(turned, column)
  back = Transpose<perm = [1, 0]>(m)
  y = Mul(joined, back)"""


def added() -> onnx.ModelProto:
    """A step whose mask is multiplied with what it masks."""
    return onnx.parser.parse_model(STEP.replace("MASK", "y = Mul(joined, f)"))


def looked_up() -> onnx.ModelProto:
    """A step whose mask is looked up place by place."""
    return onnx.parser.parse_model(STEP.replace("MASK", LOOKED_UP))


def encoder() -> onnx.ModelProto:
    """A layer of an encoder as exporters write it: four heads, split off and merged by reshapes."""
    nodes, weights = list[onnx.NodeProto](), {"heads": i64(0, 0, 4, 32), "flat": i64(0, 0, 128), "scale": f32(128)}
    for name in "qkv":
        weights |= {f"w{name}": f32(128, 128) / 11, f"b{name}": f32(128)}
        nodes += [
            N("MatMul", ["x", f"w{name}"], [f"{name}0"]), N("Add", [f"{name}0", f"b{name}"], [f"{name}1"]),
            N("Reshape", [f"{name}1", "heads"], [f"{name}2"]),
            N("Transpose", [f"{name}2"], [name], perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]),
        ]  # fmt: skip
    nodes += [
        N("MatMul", ["q", "k"], ["s"]), N("Softmax", ["s"], ["p"]), N("MatMul", ["p", "v"], ["o"]),
        N("Transpose", ["o"], ["o1"], perm=[0, 2, 1, 3]), N("Reshape", ["o1", "flat"], ["merged"]),
        N("MatMul", ["merged", "wo"], ["h0"], name="out"), N("Add", ["h0", "x"], ["h1"]),
        N("LayerNormalization", ["h1", "scale"], ["h"]), N("MatMul", ["h", "up"], ["u"], name="up"), N("Relu", ["u"], ["r"]),
        N("MatMul", ["r", "down"], ["d"], name="down"), N("Add", ["d", "h"], ["d1"]), N("LayerNormalization", ["d1", "scale"], ["y"]),
    ]  # fmt: skip
    weights |= {"wo": f32(128, 128) / 11, "up": f32(128, 512) / 11, "down": f32(512, 128) / 22}
    return net(nodes, {"x": (T.FLOAT, ["batch", "sequence", 128])}, {"y": T.FLOAT}, weights)


MODELS = {f.__name__: f for f in (rows, waves, tokens, joined, shorter, patches, added, looked_up, encoder)}
PINS = {
    "patches": ("up:x1=2@d0",),
    "longer": ("up:i=2@d0",),
    "waves": ("first:w=2@d0", "second:w=2@d0"),
    "rows": ("up:i=2@d0", "down:i=2@d0"),
}


@cache
def path_of(name: str) -> Path:
    """The file of a model."""
    path = FOLDER / f"sized-{name}.onnx"
    onnx.save(MODELS[name](), path)
    return path


@cache
def compiled(name: str, devices: int, pins: tuple[str, ...], *shapes: str) -> tapestry.Compiled:
    """A build for ranges of sizes, given as on the command line."""
    given = dict(s.split("=") for s in shapes)
    return tapestry.compile(path_of(name), devices=devices, topology="cpu", pins=list(pins), shapes=given)
