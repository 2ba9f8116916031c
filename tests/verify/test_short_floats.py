"""Models of 16-bit floats with long rows: right plans are taken, wrong ones refused, and all of it soon."""

from __future__ import annotations

import random
import time

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import tapestry
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import BuildError, LawError
from tapestry.ir.graph import Opaque
from tapestry.onnx_eval import opaque_node
from tapestry.verify import model_outputs
from tests.support.faults import edited_build, graph_edits
from tests.support.small_models import N, net

RNG = np.random.default_rng(0)
TYPES = {"bf16": (T.BFLOAT16, ml_dtypes.bfloat16), "f16": (T.FLOAT16, np.float16)}
ROWS = {"x": (7, 3001)}
LAST, AXES = {"axis": -1}, {"a": [1]}
MODELS = {  # nodes, inputs, sizes of weights, constants
    "softmax": ([N("Softmax", ["x"], ["y"], **LAST)], ROWS, {}, {}),
    "softmax of columns": ([N("Softmax", ["x"], ["y"], axis=0)], {"x": (4097, 3)}, {}, {}),
    "log softmax": ([N("LogSoftmax", ["x"], ["y"], **LAST)], {"x": (5, 4999)}, {}, {}),
    "layer norm": ([N("LayerNormalization", ["x", "s", "t"], ["y"])], {"x": (9, 2049)}, {"s": (2049,), "t": (2049,)}, {}),
    "rms norm": ([N("RMSNormalization", ["x", "s"], ["y"])], {"x": (9, 2051)}, {"s": (2051,)}, {}),
    "instance norm": ([N("InstanceNormalization", ["x", "s", "t"], ["y"])], {"x": (2, 3, 45, 51)}, {"s": (3,), "t": (3,)}, {}),
    "attention": ([N("Attention", ["q", "k", "v"], ["y"])], {"q": (1, 2, 37, 16), "k": (1, 2, 1029, 16), "v": (1, 2, 1029, 16)},
                  {}, {}),
    "loss": ([N("SoftmaxCrossEntropyLoss", ["x", "l"], ["y"])], {"x": (1031, 1500), "l": (1031,)}, {}, {}),
    "loss of a log softmax": ([N("LogSoftmax", ["x"], ["p"], axis=1), N("NegativeLogLikelihoodLoss", ["p", "l"], ["y"])],
                              {"x": (1031, 70), "l": (1031,)}, {}, {}),
    "product": ([N("MatMul", ["x", "s"], ["y"])], {"x": (33, 4099)}, {"s": (4099, 41)}, {}),
    "gemm": ([N("Gemm", ["x", "s", "t"], ["y"], transB=1)], {"x": (35, 1537)}, {"s": (43, 1537), "t": (43,)}, {}),
    "convolution": ([N("Conv", ["x", "s"], ["y"])], {"x": (1, 130, 9, 7)}, {"s": (31, 130, 3, 3)}, {}),
    "mean of a picture": ([N("GlobalAveragePool", ["x"], ["y"])], {"x": (2, 5, 57, 61)}, {}, {}),
    "running sum": ([N("CumSum", ["x", "a"], ["y"])], {"x": (5, 2500)}, {}, {"a": np.array(1)}),
    "rows in a branch": ([N("Mul", ["x", "x"], ["q"]), "branch"], {"x": (5, 2000), "l": ()}, {}, {}),
    "softmax by nodes": (
        [N("ReduceMax", ["x", "a"], ["m"]), N("Sub", ["x", "m"], ["z"]), N("Exp", ["z"], ["e"]), N("ReduceSum", ["e", "a"], ["f"]),
         N("Div", ["e", "f"], ["y"])], ROWS, {}, AXES),
    "layer norm by nodes, far from 0": (
        [N("Add", ["x", "c"], ["b"]), N("ReduceMean", ["b", "a"], ["m"]), N("Sub", ["b", "m"], ["z"]), N("Mul", ["z", "z"], ["q"]),
         N("ReduceMean", ["q", "a"], ["v"]), N("Sqrt", ["v"], ["d"]), N("Div", ["z", "d"], ["y"])], ROWS, {"c": (1, 1)}, AXES),
}  # fmt: skip
MODELS |= {
    op: ([N(op, ["x", "a"], ["y"], keepdims=0)], {"x": (11, 4321)}, {}, AXES)
    for op in ("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp")
}


def model(name, dtype):
    nodes, ins, weights, constants = MODELS[name]
    t, array = TYPES[dtype]
    integer = T.BOOL if "branch" in nodes else T.INT64
    drawn = {n: (20 if n == "c" else 1) * RNG.standard_normal(s).astype(np.float32).astype(array) for n, s in weights.items()}
    if nodes[-1] == "branch":
        ax = numpy_helper.from_array(np.array([1]), "ax")
        result = [helper.make_tensor_value_info("o", t, None)]
        sides = [helper.make_graph([N("ReduceSum", [n, "ax"], ["o"])], "side", [], result, [ax]) for n in ("x", "q")]
        nodes = [nodes[0], N("If", ["l"], ["y"], then_branch=sides[0], else_branch=sides[1])]
    types = {n: (integer if n == "l" else t, s) for n, s in ins.items()}
    return net(nodes, types, {"y": t}, {**drawn, **{n: np.asarray(v) for n, v in constants.items()}}, opset=23)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_long_rows_is_its_plan(name, dtype, tmp_path):
    """onnx's reference sums in the type of the numbers: in bfloat16 a sum of 4,321 squares is 2,048."""
    path = tmp_path / "m.onnx"
    path.write_bytes(model(name, dtype).SerializeToString())
    build = tapestry.compile(path, topology="cpu")
    assert build.evidence[0]["kind"] == "sampled cells" and "disputed" not in build.evidence[0]
    assert build.check()["passed"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("independent", [False, True])
def test_a_product_of_half_types_takes_no_longer_than_one_of_singles(independent):
    n, t = 1024, ml_dtypes.bfloat16
    a = RNG.standard_normal((n, n)).astype(t)
    node = N("MatMul", ["a", "b"], ["y"])
    op = Opaque(outs=("y",), ins=("a", "b"), kind="MatMul", node=node.SerializeToString(), opsets=(("", 21),))
    begin = time.process_time()
    (found,) = opaque_node.run(op, [a, a], [("bf16", (n, n))], independent=independent)
    assert time.process_time() - begin < 3  # more than 5 element by element
    wide = a.astype(np.float64) @ a.astype(np.float64)
    assert np.abs(found.astype(np.float64) - wide).max() <= 2.0**-8 * np.abs(wide).max()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean", "CumSum", "MatMul"])
def test_a_folded_constant_is_rounded_once(op, dtype, tmp_path):
    """Ones that a file spreads over 4,096 cells: added one by one in bfloat16 they are 256."""
    t, array = TYPES[dtype]
    second = {"CumSum": "z", "MatMul": "k"}.get(op, "a")
    nodes = [
        N("Expand", ["c", "n"], ["e"]),
        N("Expand", ["c", "h"], ["k"]),
        N(op, ["e", second], ["s"]),
        N("Add", ["s", "x"], ["y"]),
    ]
    constants = {"c": np.ones((1, 1), array), "n": np.array([1, 4096]), "h": np.array([4096, 1]), "a": np.array([1]),
                 "z": np.array(1)}  # fmt: skip
    path = tmp_path / "m.onnx"
    path.write_bytes(net(nodes, {"x": (t, (1, 1))}, {"y": t}, constants).SerializeToString())
    found = tapestry.compile(path, topology="cpu").run({"x": np.zeros((1, 1), array)})["y"]
    assert float(found.reshape(-1)[-1]) == (1 if op == "ReduceMean" else 4096)


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """A saved build of a bfloat16 layer with rows of 1,031."""
    folder, n = tmp_path_factory.mktemp("layer"), 1031
    nodes = [
        N("LayerNormalization", ["x", "s", "t"], ["h"]), N("MatMul", ["h", "u"], ["g0"]), N("Relu", ["g0"], ["g"]),
        N("MatMul", ["g", "v"], ["o"]), N("Add", ["x", "o"], ["z"]), N("Softmax", ["z"], ["y"]),
    ]  # fmt: skip
    sizes = {"s": (n,), "t": (n,), "u": (n, n), "v": (n, n)}
    weights = {k: (RNG.standard_normal(s) / n ** (len(s) / 2 - 0.5)).astype(ml_dtypes.bfloat16) for k, s in sizes.items()}
    path = folder / "layer.onnx"
    path.write_bytes(net(nodes, {"x": (T.BFLOAT16, (17, n))}, {"y": T.BFLOAT16}, weights, opset=21).SerializeToString())
    tapestry.compile(path, devices=2, topology="cpu").save(folder / "good")
    verify_build(folder / "good")
    return folder / "good"


SHOWN = (
    "weights_exchanged", "stale_tensor", "arguments_exchanged", "literal_negated", "product_for_sum", "quotient_for_product",
    "another_curve", "sum_made_a_maximum", "branches_exchanged", "index_one_further", "axes_exchanged",
)  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", SHOWN)
def test_a_wrong_plan_of_half_types_is_refused(kind, layer, tmp_path):
    """Of some kinds of edits one that changes what comes out by more than bfloat16's rounding does."""
    right = tapestry.load(layer)
    feeds = right.random_feeds(0)
    expected = right.run(feeds)["y"]
    for seed in range(6):
        e, folder = edited_build.load(layer, random.Random(f"{kind} {seed}")), tmp_path / str(seed)
        before = e.graph
        if graph_edits.EDITS[kind](e) and edited_build.alters(before, e.graph):
            edited_build.save(e, folder)
            try:
                found = tapestry.load(folder).run(feeds)["y"]
            except BuildError:
                return  # (a constant that is not the one of its hash)
            if not model_outputs.compare_outputs(found, expected, 0.1).passed:
                break
    else:
        pytest.fail("the layer has no place for it")
    with pytest.raises((LawError, BuildError)):
        verify_build(folder)
