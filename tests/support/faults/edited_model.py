"""One model with what exported networks seldom have: opaque nodes with attributes and bodies, branches, paddings, constants."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

N = helper.make_node


def _loop() -> onnx.NodeProto:
    """Steps of ``h = tanh(h * a) + x``, until a sum is large: how many depends on the data."""
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [N("Mul", ["h", "a"], ["ha"]), N("Tanh", ["ha"], ["t"]), N("Add", ["t", "x"], ["h2"]),
         N("ReduceSum", ["h2"], ["s"], keepdims=0), N("Less", ["s", "far"], ["go"])],
        "body", [info("i", T.INT64, []), info("c", T.BOOL, []), info("h", T.FLOAT, [4, 6])],
        [info("go", T.BOOL, []), info("h2", T.FLOAT, [4, 6])],
    )  # fmt: skip
    return N("Loop", ["steps", "", "x"], ["looped"], "loop", body=body)


def _if() -> onnx.NodeProto:
    info = helper.make_tensor_value_info
    yes = helper.make_graph([N("Mul", ["x", "a"], ["yes"])], "yes", [], [info("yes", T.FLOAT, [4, 6])])
    no = helper.make_graph([N("Add", ["x", "b"], ["no"])], "no", [], [info("no", T.FLOAT, [4, 6])])
    return N("If", ["flag"], ["branched"], "if", then_branch=yes, else_branch=no)


def mixed() -> onnx.ModelProto:
    """The model."""
    rng = np.random.default_rng(3)

    def f32(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    data = {
        "a": f32(6), "b": f32(6), "w": f32(6, 6), "v": f32(6, 6), "far": np.float32(30), "steps": np.int64(9),
        "k": np.array([3]), "wi": f32(1, 32, 6), "wr": f32(1, 32, 8), "pads": np.array([0, 1, 0, 2]), "zero": np.float32(0),
        "kernel": f32(3, 2, 3, 3), "to": np.array([2, 2, 3, 2]), "at": np.array([2, 0, 3, 1]),
        "back": f32(2, 3, 3, 3),
    }  # fmt: skip
    nodes = [
        N("MatMul", ["x", "w"], ["m1"], "first"), N("Add", ["m1", "b"], ["m2"]), N("Relu", ["m2"], ["m3"]),
        N("MatMul", ["m3", "v"], ["m4"], "second"), N("Sub", ["m4", "x"], ["m5"]), N("Softmax", ["m5"], ["y"], axis=-1),
        N("TopK", ["m4", "k"], ["top", "places"], "topk", largest=1), N("ReduceSum", ["m4"], ["low"], keepdims=0),
        N("Less", ["low", "zero"], ["flag"]), _if(), _loop(), N("Unsqueeze", ["x", "zero_axis"], ["seq"]),
        N("LSTM", ["seq", "wi", "wr"], ["states", "last"], "lstm", hidden_size=8),
        N("LSTM", ["seq", "wi", "wr"], ["bounded"], "bounded lstm", hidden_size=8, clip=2.0),
        N("ConvTranspose", ["image", "back"], ["wider"], "wider", strides=[2, 2]), N("Pad", ["m4", "pads"], ["padded"]),
        N("ReduceMax", ["m4"], ["most"], keepdims=0), N("Reshape", ["x", "to"], ["image"]),
        N("Conv", ["image", "kernel"], ["conv"], "conv", pads=[1, 1, 1, 1]), N("Gather", ["m4", "at"], ["taken"], axis=0),
        N("Concat", ["x", "taken"], ["joined"], axis=0), N("Div", ["joined", "a"], ["ratio"]), N("Clip", ["ratio", "low_", "high_"], ["clipped"]),
    ]  # fmt: skip
    data |= {"zero_axis": np.array([1]), "low_": np.float32(-2), "high_": np.float32(2)}
    nodes += [
        N("Mul", ["b", "a"], ["folded"]), N("Add", ["z", "folded"], ["shifted"]), N("LeakyRelu", ["shifted"], ["leaky"], alpha=0.3),
        N("ReduceMax", ["z", "last_axis"], ["peak"], keepdims=0), N("Tile", ["z", "twice"], ["tiled"]),
    ]  # fmt: skip
    nodes += [
        N("CumSum", ["x", "one"], ["summed"]), N("Div", ["x", "z"], ["quotient"]), N("Exp", ["z"], ["grown"]),
        N("Add", ["z", "four"], ["right"]), N("Sqrt", ["right"], ["root"]),
    ]  # fmt: skip
    data |= {"last_axis": np.array([1]), "twice": np.array([1, 3]), "one": np.array(1), "four": np.float32(4)}
    outs = ["leaky", "peak", "tiled", "y", "top", "branched", "looped", "states", "bounded"]
    outs += ["wider", "padded", "most", "conv", "clipped", "summed", "quotient", "grown", "root"]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "mixed", [info(n, T.FLOAT, [4, 6]) for n in ("x", "z")], [info(o, T.FLOAT, None) for o in outs],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in data.items()],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
