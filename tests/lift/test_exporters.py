"""What exporters other than torch's write (tf2onnx, onnxmltools, skl2onnx, CatBoost): declarations that do not hold, functions of
other opsets, operators of onnxruntime's own domain; whole models, on 1 and 2 devices, against onnxruntime.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

import tapestry
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Opaque
from tapestry.lift import lift
from tapestry.onnx_eval.ort_session import ort_session
from tests.support.lifting import data

F, L = T.FLOAT, T.INT64


def value(name, kind, *shape):
    return helper.make_tensor_value_info(name, kind, list(shape))


def model(nodes, ins, outs, *, inits=(), opset=18, functions=(), domains=()):
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    graph = helper.make_graph(nodes, "g", ins, outs, list(inits))
    return helper.make_model(graph, opset_imports=imports, ir_version=9, functions=list(functions))


def held(made, feeds, folder, *, cut=None, rtol=1e-5):
    """Compiled for 1 and 2 devices a model gives what onnxruntime gives; ``cut`` is a split forced on two. Its report is returned."""
    path = folder / "m.onnx"
    path.write_bytes(made.SerializeToString())
    session = ort_session(path)
    want = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    shapes = {n: a.shape for n, a in feeds.items() if a.ndim and a.dtype != object}
    for devices in (1, 2):
        compiled = tapestry.compile(path, devices=devices, shapes=shapes, pins=[cut] if cut and devices == 2 else ())
        got = compiled.run(feeds)
        for name, array in want.items():
            assert got[name].shape == array.shape and got[name].dtype == array.dtype
            np.testing.assert_allclose(got[name], array, rtol=rtol, atol=1e-5)
    return compiled.report


TREES = {
    "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [1, 0, 0], "nodes_values": [0.1, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0],
}  # fmt: skip
CLASSES = {"class_treeids": [0, 0, 0], "class_nodeids": [1, 1, 2], "class_ids": [0, 1, 2], "class_weights": [0.3, 0.6, 0.9]}
TARGETS = {"target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 1], "target_weights": [1.5, -2.0]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("declared", [(1,), (None,), (None, 3), ()], ids=str)
def test_trees_run_whatever_the_file_declares(tmp_path, declared):
    """onnxmltools declares labels of one sample (LightGBM), CatBoost other things; onnx infers nothing."""
    nodes = [
        helper.make_node(
            "TreeEnsembleClassifier",
            ["x"],
            ["label", "raw"],
            "c",
            domain="ai.onnx.ml",
            classlabels_int64s=[4, 7, 9],
            **TREES,
            **CLASSES,
        ),
        helper.make_node("TreeEnsembleRegressor", ["x"], ["value"], "r", domain="ai.onnx.ml", n_targets=2, **TREES, **TARGETS),
        helper.make_node("Add", ["raw", "raw"], ["scores"], "a"),
    ]
    outs = [value("label", L, *declared), value("scores", F, None, 3), value("value", F, 1)]
    made = model(nodes, [value("x", F, "n", 3)], outs, domains=["ai.onnx.ml"])
    report = held(made, {"x": data(8, 3)}, tmp_path)
    assert report["host_values"] == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "op, attributes, width",
    [
        ("LinearRegressor", {"coefficients": [0.5, -1.0, 2.0, 0.25, 1.0, -0.5], "targets": 2}, 2),
        ("Normalizer", {"norm": "L1"}, 3),
        ("Scaler", {"offset": [0.5], "scale": [2.0]}, 3),
        ("Imputer", {"imputed_value_floats": [1.0], "replaced_value_float": 0.0}, 3),
        ("SVMRegressor", {"coefficients": [0.5, 1.0], "support_vectors": [0.1, 0.2, 0.3, -1.0, 0.5, 0.0], "kernel_type": "RBF", "kernel_params": [0.4, 0.0, 3.0], "n_supports": 2, "rho": [0.2]}, 1),
    ],
)  # fmt: skip
def test_samples_of_undeclared_shape(tmp_path, op, attributes, width):
    nodes = [
        helper.make_node(op, ["x"], ["m"], "o", domain="ai.onnx.ml", **attributes),
        helper.make_node("Exp", ["m"], ["y"], "e"),
    ]
    made = model(nodes, [value("x", F, "n", 3)], [value("y", F, None, None)], domains=["ai.onnx.ml"])
    report = held(made, {"x": data(8, 3)}, tmp_path)
    assert report["host_values"] == {}
    path = tmp_path / "m.onnx"
    assert tapestry.compile(path, shapes={"n": 8}).build.plan.graph.tensors["y"].shape == (8, width)


def test_an_output_declared_with_another_rank(tmp_path):
    """skl2onnx (OneVsOneClassifier) declares a list of labels where it computes a column; onnxruntime warns, as we do."""
    nodes = [helper.make_node("TopK", ["x", "k"], ["v", "i"], "t")]
    made = model(
        nodes, [value("x", F, "n", 3)], [value("i", L, None)], inits=[onnx.numpy_helper.from_array(np.array([1]), "k")]
    )
    held(made, {"x": data(5, 3)}, tmp_path)


def test_ranges_of_onnxruntime_s_own_domain_inside_a_loop(tmp_path):
    """tf2onnx writes com.microsoft's Range, in loops too."""
    one = onnx.numpy_helper.from_array(np.array(1), "one")
    inside = [
        helper.make_node("Range", ["zero", "four"], ["r"], "r", domain="com.microsoft"),
        helper.make_node("Cast", ["r"], ["f"], "f", to=F),
        helper.make_node("Add", ["h", "f"], ["hn"], "a"),
        helper.make_node("Identity", ["c"], ["cn"], "i"),
    ]
    body = helper.make_graph(
        inside, "b", [value("k", L), value("c", T.BOOL), value("h", F, 3, 4)], [value("cn", T.BOOL), value("hn", F, 3, 4)]
    )
    inits = [one, *(onnx.numpy_helper.from_array(np.array(v), n) for n, v in (("zero", 0), ("four", 4), ("three", 3)))]
    made = model(
        [helper.make_node("Loop", ["three", "", "x"], ["y"], "l", body=body)],
        [value("x", F, 3, 4)],
        [value("y", F, 3, 4)],
        inits=inits,
        domains=["com.microsoft"],
    )
    held(made, {"x": data(3, 4)}, tmp_path)


def written_for(version, op, **attributes):
    """A function of another opset, called twice, once by another function."""
    call = helper.make_node("inner", ["a"], ["b"], domain="local")
    opsets = [helper.make_opsetid("", version)]
    inner = helper.make_function("local", "inner", ["a"], ["b"], [helper.make_node(op, ["a"], ["b"], **attributes)], opsets)
    both = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    outer = helper.make_function("local", "outer", ["a"], ["c"], [call, helper.make_node("Neg", ["b"], ["c"])], both)
    nodes = [helper.make_node("outer", ["x"], ["m"], domain="local"), helper.make_node("inner", ["m"], ["y"], domain="local")]
    return model(nodes, [value("x", F, "n", 3, 2)], [value("y", F, None, 3, 2)], functions=[inner, outer], domains=["local"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("version, op", [(14, "Relu"), (13, "Softmax"), (16, "LeakyRelu")])
def test_functions_of_another_opset(tmp_path, version, op):
    """skl2onnx's KNNImputer mixes opsets 14, 16 and 18."""
    held(written_for(version, op), {"x": data(4, 3, 2)}, tmp_path)


def test_a_function_whose_operators_have_changed_is_refused(tmp_path):
    """Softmax of opset 12 is over all axes from its own on: taken for opset 18's it would be wrong in silence."""
    path = tmp_path / "m.onnx"
    path.write_bytes(written_for(12, "Softmax", axis=1).SerializeToString())
    with pytest.raises(TapestryError, match="12 whereas model imports version 18"):
        tapestry.compile(path, shapes={"n": 2})


def counting(limit, *, start=0, step=1, most=None, test="Less", by="state", kind=np.int32):
    """A while loop of TensorFlow: a counter is carried, added to and compared; a state of floats, and what it was in every step."""
    nodes = [
        helper.make_node("Add", ["i", "one"], ["next"], "add"),
        helper.make_node("Cast", ["next" if by == "state" else "k"], ["now"], "cast", to=F),
        helper.make_node(test, ["now", "limit"], ["goes"], "test"),
        helper.make_node("And", ["goes", "c"], ["on"], "and"),
        helper.make_node("MatMul", ["h", "w"], ["hw"], "m"),
        helper.make_node("Cast", ["i"], ["fi"], "fi", to=F),
        helper.make_node("Add", ["hw", "fi"], ["hf"], "af"),
        helper.make_node("Tanh", ["hf"], ["hn"], "t"),
    ]
    number = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    ins = [value("k", L), value("c", T.BOOL), value("i", number), value("h", F, None, 4)]
    outs = [value("on", T.BOOL), value("next", number), value("hn", F, None, 4), value("hw", F, None, 4)]
    held_here = [("one", kind(step)), ("limit", np.float32(limit)), ("w", data(4, 4) / 2)]
    body = helper.make_graph(nodes, "b", ins, outs, [onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in held_here])
    inits = [onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in (("start", kind(start)), ("yes", True))]
    inits += [onnx.numpy_helper.from_array(np.array(most), "most")] if most is not None else []
    loop = helper.make_node(
        "Loop", ["most" if most is not None else "", "yes", "start", "x"], ["n", "y", "all"], "l", body=body
    )
    return model(
        [loop],
        [value("x", F, "b", 4)],
        [value("n", number), value("y", F, None, 4), value("all", F, None, None, 4)],
        inits=inits,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "how, steps",
    [
        ({"limit": 6}, 6), ({"limit": 6, "step": 4, "start": 1}, 2), ({"limit": 6, "most": 4}, 4), ({"limit": 3, "most": 9}, 3),
        ({"limit": 2.5, "by": "step"}, 4), ({"limit": -5, "step": -2, "test": "Greater"}, 3), ({"limit": 6, "kind": np.float32}, 6),
        ({"limit": 0}, 1), ({"limit": (1 << 62) + 0.0, "most": 5}, 5), ({"limit": 1e9}, None),
    ],
)  # fmt: skip
def test_a_loop_that_counts_to_a_known_number_is_written_out(tmp_path, how, steps):
    """tf2onnx writes no trip count, or the greatest: the condition ends the loop."""
    path = tmp_path / "m.onnx"
    path.write_bytes(counting(**how).SerializeToString())
    lifted = lift(path, {"b": 3})
    assert all(isinstance(op, Block) for op in lifted.graph.ops) == (steps is not None)
    if steps is not None:
        assert lifted.graph.tensors["all"].shape == (steps, 3, 4)
        held(counting(**how), {"x": data(6, 4)}, tmp_path)


def test_a_loop_that_ends_by_its_data_stays_opaque(tmp_path):
    made = counting(6)
    body = made.graph.node[0].attribute[0].g
    body.node[2].input[0] = "sum"
    body.node.insert(2, helper.make_node("ReduceSum", ["h"], ["sum"], "s", keepdims=0))
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    assert any(isinstance(op, Opaque) for op in lift(path, {"b": 3}).graph.ops)
    held(made, {"x": data(6, 4)}, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("ConvTranspose", {"output_shape": [9, 3], "strides": [2, 1]}),
        ("MaxPool", {"kernel_shape": [2, 2], "strides": [3, 3], "pads": [0, 0, 1, 1], "ceil_mode": 1}),
    ],
)
def test_sizes_that_inference_gets_wrong_inside_of_a_function(tmp_path, op, attributes):
    names = ["x", "w"] if op == "ConvTranspose" else ["x"]
    body = [helper.make_node(op, names, ["z"], **attributes), helper.make_node("Relu", ["z"], ["r"])]
    part = helper.make_function("local", "part", names, ["r"], body, [helper.make_opsetid("", 18)])
    nodes = [helper.make_node("part", names, ["r"], "call", domain="local")]
    ins = [value("x", F, 2, 3, 5, 5), value("w", F, 3, 4, 3, 3)][: len(names)]
    made = model(nodes, ins, [value("r", F, None, None, None, None)], functions=[part], domains=["local"])
    held(made, {"x": data(2, 3, 5, 5), "w": data(3, 4, 3, 3)} if len(names) > 1 else {"x": data(2, 3, 5, 5)}, tmp_path)


def test_a_pool_behind_a_branch_that_is_known(tmp_path):
    """What the pool reads has no shape before the branch is chosen, and inference a wrong one for the pool after."""
    then = helper.make_graph([helper.make_node("Identity", ["x"], ["a"])], "then", [], [value("a", F)])
    other = helper.make_graph([helper.make_node("Constant", [], ["b"], value_float=0.0)], "other", [], [value("b", F)])
    then.output[0].type.tensor_type.ClearField("shape")
    nodes = [
        helper.make_node("If", ["c"], ["i"], "if", then_branch=then, else_branch=other),
        helper.make_node("MaxPool", ["i"], ["y"], "pool", kernel_shape=[2, 2], strides=[3, 3], pads=[0, 0, 1, 1], ceil_mode=1),
    ]
    known = helper.make_tensor("c", T.BOOL, [], [True])
    made = model(nodes, [value("x", F, 2, 3, 5, 5)], [value("y", F, None, None, None, None)], inits=[known])
    held(made, {"x": data(2, 3, 5, 5)}, tmp_path)
