"""Operators that are onnxruntime's own: what no definition here gives is an opaque node."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import tapestry
from tapestry.errors import ModelError
from tapestry.onnx_eval.ort_session import ort_session

RNG = np.random.default_rng(0)
OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def eight_bits(*shape):
    return RNG.integers(-100, 100, shape).astype(np.int8)


LSTM = {
    "W": eight_bits(1, 4, 20), "R": eight_bits(1, 5, 20), "": None, "ws": np.full(1, 0.01, np.float32), "wz": np.zeros(1, np.int8),
    "rs": np.full(1, 0.02, np.float32), "rz": np.zeros(1, np.int8),
}  # fmt: skip
CASES = {
    "DynamicQuantizeLSTM": ({"x": floats(3, 2, 4)}, LSTM, ["y", "h"], {"hidden_size": 5}),
    "CDist": ({"x": floats(3, 4), "b": floats(5, 4)}, {}, ["y"], {"metric": "euclidean"}),
    "ExpandDims": ({"x": floats(3, 4)}, {"a": np.array(1, np.int32)}, ["y"], {}),
    "Unique": ({"x": np.array([2, 1, 2], np.float32)}, {}, ["y", "i", "n"], {}),  # as many as there are different ones
    "MatMulInteger16": ({"x": RNG.integers(-9, 9, (2, 3)).astype(np.int16)}, {"b": np.ones((3, 2), np.int16)}, ["y"], {}),
}


def made(op, *, nested=False):
    feeds, constants, outs, attributes = CASES[op]
    names = [n for k in constants for n in ([k] if k else [""] * 5)]
    nodes = [helper.make_node(op, [*feeds, *names], outs, domain="com.microsoft", **attributes)]
    results = [helper.make_value_info(o, helper.make_tensor_type_proto(T.FLOAT, None)) for o in outs]
    codes = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in feeds.items()}
    given = [helper.make_tensor_value_info(n, codes[n], a.shape) for n, a in feeds.items()]
    stored = [numpy_helper.from_array(a, n) for n, a in constants.items() if n]
    if nested:
        branch = helper.make_graph(nodes, "b", [], results)
        nodes = [helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch)]
        results = [helper.make_tensor_value_info("z", T.FLOAT, [3, 5])]
        given.append(helper.make_tensor_value_info("c", T.BOOL, []))
    else:
        results = [helper.make_empty_tensor_value_info(o) for o in outs]
    return helper.make_model(helper.make_graph(nodes, "g", given, results, stored), opset_imports=OPSETS, ir_version=9), feeds


def same_as_onnxruntime(model, feeds, folder):
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    theirs = ort_session(model.SerializeToString()).run(None, feeds)
    ours = tapestry.compile(str(folder / "m.onnx"), devices=2, topology="cpu").run(feeds)
    for a, b in zip(theirs, ours.values(), strict=True):
        assert a.dtype == b.dtype
        assert np.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("op", CASES)
def test_it_runs_as_onnxruntime_runs_it(op, tmp_path):
    same_as_onnxruntime(*made(op), tmp_path)


def test_it_runs_inside_of_a_branch(tmp_path):
    model, feeds = made("CDist", nested=True)
    same_as_onnxruntime(model, {**feeds, "c": np.array(True)}, tmp_path)


def test_a_model_in_blocks_of_channels_as_onnxruntime_saves_it(tmp_path):
    conv = helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3])
    ends = [[helper.make_tensor_value_info(n, T.FLOAT, s)] for n, s in (("x", [1, 32, 8, 8]), ("y", [1, 32, 6, 6]))]
    graph = helper.make_graph([conv], "g", *ends, [numpy_helper.from_array(floats(32, 32, 3, 3), "w")])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(tmp_path / "o.onnx")
    options.log_severity_level = 4
    model = helper.make_model(graph, opset_imports=OPSETS[:1], ir_version=9)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = floats(1, 32, 8, 8)
    found = tapestry.compile(str(tmp_path / "o.onnx"), devices=2, topology="cpu").run({"x": x})["y"]
    assert np.allclose(found, ort_session(model.SerializeToString()).run(None, {"x": x})[0], atol=1e-4)


def test_what_it_does_not_take_is_refused_in_words(tmp_path):
    model, _ = made("CDist")
    model.graph.node[0].op_type = "MatMulInteger16"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="onnxruntime does not take the node") as caught:
        tapestry.compile(str(tmp_path / "m.onnx"), devices=2, topology="cpu")
    assert "MatMulInteger16" in str(caught.value)
