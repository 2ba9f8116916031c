"""Lifting: opaque operators, random numbers, symbols and whole models."""

from __future__ import annotations

import gzip
import re
import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tapestry
from tapestry.errors import ModelError
from tapestry.ir.expr import Call, walk
from tapestry.ir.graph import Block, Opaque
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import signature, to_text
from tapestry.lift import lift
from tests.support.lifting import EXPORTS, LIGHT, SHARED, agree, build, data, evaluate, lift_model, needs_shared, node
from tests.support.programs.sized_models import LOOKED_UP, STEP

# --- opaque operators


def test_opaque_keeps_what_commutes(tmp_path):
    top = node("TopK", "x k", "v i", axis=1)
    graph = agree(top, {"x": data(2, 5, 4)}, ["v", "i"], {"k": np.array([2])}, folder=tmp_path, native=False)
    op = graph.ops[0]
    assert isinstance(op, Opaque) and [(d.name, d.size) for d in op.dims] == [("x0", 2), ("x2", 4)]
    assert op.in_axes[0] == (0, 2) and op.out_axes == ((0, 2), (0, 2)) and "axis 1" in op.why


def test_opaque_unknown_structure(tmp_path):
    graph = agree(node("Det", "x"), {"x": data(3, 3)}, ["y"], folder=tmp_path, native=False)
    (op,) = graph.ops
    assert isinstance(op, Opaque) and op.dims == () and op.why


def test_subgraph_captures_become_inputs(tmp_path):
    def branch(op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info("r", TensorProto.FLOAT, [2, 3])
        return helper.make_graph([helper.make_node(op, ["x", "h"], ["r"])], op, [], [out])

    nodes = [node("Relu", "x", "h"), helper.make_node("If", ["c"], ["y"], then_branch=branch("Add"), else_branch=branch("Mul"))]
    for flag in (True, False):
        feeds = {"x": data(2, 3), "c": np.array(flag)}
        graph = agree(nodes, feeds, ["y"], folder=tmp_path, native=False)
    op = graph.ops[-1]
    assert isinstance(op, Opaque) and set(op.ins) == {"c", "x", "h"}


def test_functions_are_inlined(tmp_path):
    body = [helper.make_node("Mul", ["a", "a"], ["t"]), helper.make_node("Add", ["t", "a"], ["b"])]
    f = helper.make_function("own", "F", ["a"], ["b"], body, [helper.make_opsetid("", 18)])
    graph = helper.make_graph(
        [helper.make_node("F", ["x"], ["y"], domain="own")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    lifted = lift_model(helper.make_model(graph, opset_imports=imports, functions=[f], ir_version=8), tmp_path)
    x = data(3)
    np.testing.assert_allclose(evaluate(lifted, {"x": x})["y"], x * x + x, rtol=1e-6)


def test_operators_without_a_lifter_are_expanded(tmp_path):
    one = node("CenterCropPad", "x k", axes=[0, 1])
    graph = agree(one, {"x": data(4, 5)}, ["y"], {"k": np.array([3, 7])}, folder=tmp_path)
    assert all(op.source == ("y",) for op in graph.ops) and len(graph.ops) == 2


def test_defaults_of_an_operator_whose_inference_is_faulty(tmp_path):
    agree(node("MeanVarianceNormalization", "x"), {"x": data(2, 3, 4, 5)}, ["y"], folder=tmp_path, rtol=1e-3)


# --- random numbers


def draw(tmp_path, one: onnx.NodeProto, feeds=None, consts=None, outputs=("y",), **options) -> dict[str, np.ndarray]:
    model = build(one if isinstance(one, list) else [one], feeds or {}, list(outputs), consts)
    return evaluate(lift_model(model, tmp_path, **options), feeds or {})


@pytest.mark.slow
def test_uniform(tmp_path):
    one = helper.make_node("RandomUniform", [], ["y"], shape=[100, 100], low=-1.0, high=3.0, name="u")
    y = draw(tmp_path, one)["y"]
    assert y.min() >= -1 and y.max() < 3 and abs(y.mean() - 1) < 0.05 and len(np.unique(y)) > 9900
    assert np.array_equal(y, draw(tmp_path, one)["y"])
    assert not np.array_equal(y, draw(tmp_path, one, seed=1)["y"])
    assert not np.array_equal(y, draw(tmp_path, helper.make_node("RandomUniform", [], ["y"], shape=[100, 100], name="w"))["y"])


def test_normal(tmp_path):
    """Box-Muller from our own logarithm and cosine, against numpy's on the same words."""
    from tapestry.ir.philox import philox

    lifted = lift_model(build([helper.make_node("RandomNormal", [], ["y"], shape=[120, 90], name="z")], {}, ["y"]), tmp_path)
    y = evaluate(lifted, {})["y"].reshape(-1)
    calls = [e for op in lifted.graph.ops if isinstance(op, Block) for b in op.body for e in walk(b) if isinstance(e, Call)]
    key = next(e.args[0].value for e in calls if e.fn == "philox")  # type: ignore[union-attr]
    index = np.arange(y.size)
    u = ((philox(key, 0, 0, 0, index) >> 8) + 1) * 2.0**-24
    v = (philox(key, 0, 0, 1, index) >> 8) * 2.0**-24
    np.testing.assert_allclose(y, np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v), rtol=2e-6, atol=2e-6)
    assert abs(y.mean()) < 0.03 and abs(y.std() - 1) < 0.03
    exact = {"add", "sub", "mul", "div", "sqrt", "where", "cast", "shl", "shr", "and", "or", "eq", "ge", "neg", "philox"}
    assert {e.fn for e in calls} <= exact


def test_bernoulli(tmp_path):
    p = np.tile(np.array([0.0, 0.25, 1.0], np.float32), (3000, 1))
    y = draw(tmp_path, helper.make_node("Bernoulli", ["p"], ["y"]), {"p": p})["y"]
    assert y[:, 0].max() == 0 and y[:, 2].min() == 1 and abs(y[:, 1].mean() - 0.25) < 0.03


def test_equal_random_nodes_stay_two(tmp_path):
    """onnx_ir's common subexpression pass would make them one."""
    nodes = [node("Bernoulli", "p", "a"), node("Bernoulli", "p", "b")]
    out = draw(tmp_path, nodes, {"p": np.full(64, 0.5, np.float32)}, outputs=("a", "b"))
    assert not np.array_equal(out["a"], out["b"])


def test_dropout(tmp_path):
    x = data(40, 50)
    out = draw(
        tmp_path, node("Dropout", "x r t", "y m"), {"x": x}, {"r": np.array(0.25, np.float32), "t": np.array(True)}, ("y", "m")
    )
    assert abs(out["m"].mean() - 0.75) < 0.04
    np.testing.assert_allclose(out["y"], np.where(out["m"], x / np.float32(0.75), 0), rtol=1e-6)
    out = draw(tmp_path, node("Dropout", "x", "y m"), {"x": x}, outputs=("y", "m"))
    assert np.array_equal(out["y"], x) and out["m"].all()


# --- symbols


def two_inputs(a: list, b: list, one: onnx.NodeProto, second: str = "b") -> onnx.ModelProto:
    ins = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("a", a), (second, b))]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([one], "g", ins, [out])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_symbols_by_name_and_by_input(tmp_path):
    model = two_inputs(["n", 3], ["n", 3], node("Add", "a b"))
    for shapes in ({"n": 4}, {"n": "4"}, {"a": "4x3"}, {"b": [4, 3]}, {"a": (4, 3), "n": 4}):
        lifted = lift_model(model, tmp_path, shapes)
        assert lifted.graph.tensors["y"].shape == (4, 3) and lifted.shapes == {"n": 4}


def test_symbols_that_must_be_equal(tmp_path):
    model = two_inputs(["n", "k"], ["j", 5], node("MatMul", "a b"))
    lifted = lift_model(model, tmp_path, {"n": 4, "k": 7})
    assert {s: (str(f), f.why) for s, f in lifted.unified.items()} == {
        "j": ("k", "node 'y' (MatMul)")
    } and lifted.graph.tensors["b"].shape == (7, 5)


def test_a_name_says_nothing_of_a_size(tmp_path):
    """What is added has its size by the graph; what is joined has any, whatever it is called."""
    model = two_inputs(["n", 5], ["s43", 5], node("Add", "a attention_mask"), "attention_mask")
    assert lift_model(model, tmp_path, {"n": 4}).shapes == {"n": 4, "s43": 4}
    model = two_inputs(["n", 5], ["s43", 5], node("Concat", "a attention_mask", axis=0), "attention_mask")
    with pytest.raises(ModelError, match=r"the size of s43 .*\n.*attention_mask\[0\].*\n.*shapes=\{.s43.: 8\}"):
        lift_model(model, tmp_path, {"n": 4})


@pytest.mark.parametrize("mask", ["y = Mul(joined, f)", LOOKED_UP])
def test_a_mask_is_as_long_as_past_and_new_tokens(tmp_path, mask):
    model = onnx.parser.parse_model(STEP.replace("MASK", mask))
    lifted = lift_model(model, tmp_path, {"batch": 2, "sequence": 4, "past": 10})
    assert {s: str(f) for s, f in lifted.unified.items()} == {"total": "sequence + past", "rows": "batch"}
    assert lifted.graph.tensors["attention_mask"].shape == (2, 14)
    lifted = lift_model(model, tmp_path, {"batch": 2, "sequence": 4, "total": 14} | ({"past": 10} if mask == LOOKED_UP else {}))
    assert lifted.shapes["past"] == 10


@pytest.mark.parametrize(
    "more", [
        "w = Constant<value = int64[1] {1}>() sums = ReduceMean<keepdims = 1>(f, w) m2 = Mul(back, sums) y = Mul(joined, m2)",
        "k = Shape<start = 1>(f) k0 = Squeeze(k) k1 = Cast<to = 1>(k0) m2 = Div(back, k1) y = Mul(joined, m2)",
    ],
)  # fmt: skip
def test_an_axis_that_is_read_beyond_what_is_looked_up_is_asked_for(tmp_path, more):
    """Its size makes a difference, and none follows."""
    text = STEP.replace("MASK", LOOKED_UP.replace("y = Mul(joined, back)", more))
    with pytest.raises(ModelError, match=r"attention_mask\[1\]"):
        lift_model(onnx.parser.parse_model(text), tmp_path, {"batch": 2, "sequence": 4, "past": 10})


def test_the_lesser_of_two_sizes_says_nothing_of_either(tmp_path):
    """A slice that ends where the tensor does: at some sizes it looks as if they were equal."""
    text = """<ir_version: 9, opset_import: ["" : 18]>
g (float[n, 5] a, float[k, 5] mask) => (float[p, 5] y) {
  zero = Constant<value = int64[1] {0}>()
  s = Shape<end = 1>(a)
  part = Slice(mask, zero, s)
  y = Add(a, part)
}"""
    with pytest.raises(ModelError, match="the size of k"):
        lift_model(onnx.parser.parse_model(text), tmp_path, {"n": 4})


def test_independent_symbols_are_not_guessed(tmp_path):
    model = two_inputs(["n", 5], ["k", 5], node("Concat", "a b", axis=0))
    with pytest.raises(ModelError, match=r"k in b\[0\]|k: |k"):
        lift_model(model, tmp_path, {"n": 4})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 3])
def test_a_symbol_may_be_zero(tmp_path, devices):
    model = two_inputs([2, "past"], [2, 4], node("Concat", "a b", axis=1))
    onnx.save(model, tmp_path / "m.onnx")
    feeds = {"a": data(2, 0), "b": data(2, 4)}
    for shapes in ({"past": 0}, {"a": "2x0"}):
        found = tapestry.compile(tmp_path / "m.onnx", devices=devices, shapes=shapes).run(feeds)
        np.testing.assert_array_equal(found["y"], feeds["b"])
    for bad in (-1, "few", "2x-1"):
        with pytest.raises(ModelError, match="at least 0"):
            lift_model(model, tmp_path, {"past": bad})


@pytest.mark.parametrize("declared", [[2, 3], ["rows", 3]])
def test_an_input_that_is_an_output_keeps_its_type(tmp_path, declared):
    ins = [helper.make_tensor_value_info("x", TensorProto.FLOAT, declared)]
    outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "yx"]
    graph = helper.make_graph([node("Exp", "x")], "g", ins, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    lifted = lift_model(model, tmp_path, {"rows": 2} if "rows" in declared else {})
    assert lifted.graph.tensors["x"].shape == (2, 3) and isinstance(lifted.graph.ops[0], Block)
    x = data(2, 3)
    got = evaluate(lifted, {"x": x})
    np.testing.assert_array_equal(got["x"], x)
    np.testing.assert_allclose(got["y"], np.exp(x), rtol=1e-6)


@pytest.mark.parametrize("opset", [8, 11, 13, 18])
def test_sizes_that_a_split_takes_apart_are_known(tmp_path, opset):
    more = {"num_outputs": 2} if opset >= 18 else {}
    nodes = [
        node("Shape", "x", "s"), node("Split", "s", "m n", axis=0, **more), node("Concat", "n m", "t", axis=0),
        node("Reshape", "x t", "y"), node("Tile", "x n", "z"),
    ]  # fmt: skip
    x = data(1, 4)
    nodes[-1].input[1] = "s"
    graph = agree(nodes, {"x": x}, ["y", "z"], opset=opset, folder=tmp_path)
    assert not any(t.on_host for t in graph.tensors.values())


@pytest.mark.parametrize("opset", [8, 9, 11])
def test_folded_shapes_are_constants_of_the_models_opset(tmp_path, opset):
    """onnxscript writes them as opset 12 does."""
    nodes = [node("Shape", "x", "s"), node("Tile", "x s"), node("Shape", "y", "t"), node("Identity", "t", "u")]
    agree(nodes, {"x": data(2, 2)}, ["y", "u"], opset=opset, folder=tmp_path)


# --- whole models


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", sorted(LIGHT.glob("*.onnx")), ids=lambda p: p.stem)
def test_light_models(path):
    """As shipped: their weights are ConstantOfShape, which lift as maps without reads."""
    lifted = lift(path)
    assert parse(to_text(lifted.graph)) == lifted.graph
    assert {op.kind for op in lifted.graph.ops if isinstance(op, Opaque)} <= {"LRN"}


@pytest.mark.sampled(1)
@needs_shared
@pytest.mark.parametrize("name", EXPORTS)
def test_exports(tmp_path, name):
    (tmp_path / f"{name}.onnx").write_bytes(gzip.decompress((SHARED / f"{name}.onnx.gz").read_bytes()))
    lifted = lift(tmp_path / f"{name}.onnx", EXPORTS[name], weights=False)
    graph = lifted.graph
    assert parse(to_text(graph)) == graph
    assert not any(isinstance(op, Opaque) for op in graph.ops)
    masks = [i for i in graph.inputs if "mask" in i]
    assert all("s43" in lifted.unified for _ in masks)
    assert sum(a.nbytes for a in lifted.constants.values()) < 1 << 20
    assert len({signature(op, graph) for op in graph.ops}) < 130


@needs_shared
def test_llama_at_opset_23_and_batch_2_is_refused(tmp_path):
    (tmp_path / "m.onnx").write_bytes(gzip.decompress((SHARED / "llama_tiny_opset23.onnx.gz").read_bytes()))
    with pytest.raises(ModelError, match="cos/sin cache"):
        lift(tmp_path / "m.onnx", {"s72": 2, "s53": 16}, weights=False)


UNLIKE = re.compile(
    r"bernoulli|training_dropout|image_decoder|scan_sum|scatter_with(out)?_axis|reduce_sum_empty_set_non_reduced"
)  # random, no decoder here, or no reference implementation of the opaque operator


@pytest.mark.slow
@pytest.mark.parametrize("constant", [False, True])
def test_conformance_suite(tmp_path, constant):
    """Every single-operator case of the onnx package: lifted and interpreted, the expected output; or a clear refusal.

    With ``constant``, inputs but the first are made initializers: axes, shapes and pads are then known, as in real models.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = [c for c in collect_testcases("") if c.model is not None and not UNLIKE.search(c.name)]
    passed = 0
    for case in cases:
        (given, want), model = case.data_sets[0], onnx.ModelProto.FromString(case.model.SerializeToString())
        if not all(isinstance(a, np.ndarray | np.generic) for a in (*given, *want)):
            continue
        feeds = {i.name: np.asarray(a) for i, a in zip(model.graph.input, given, strict=False)}
        if constant:
            for i in [i.name for i in model.graph.input][1:]:
                if i and feeds[i].dtype.kind in "ifb" and feeds[i].size < 100:
                    model.graph.initializer.append(numpy_helper.from_array(feeds.pop(i), i))
        try:
            lifted = lift_model(model, tmp_path)
        except ModelError:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = evaluate(lifted, feeds)
        for o, array in zip(model.graph.output, want, strict=True):
            half = np.asarray(array).dtype.itemsize == 2
            tolerance = {"rtol": 2e-2, "atol": 1e-2} if half else {"rtol": 1e-3, "atol": 1e-5}
            found, expected = np.asarray(got[o.name]), np.asarray(array)
            assert found.shape == expected.shape and found.dtype == expected.dtype, case.name
            if expected.dtype.kind in "OSUT":
                np.testing.assert_array_equal(found, expected, err_msg=case.name)
            else:
                np.testing.assert_allclose(found.astype(float), expected.astype(float), err_msg=case.name, **tolerance)
        passed += 1
    assert passed > (1550 if constant else 1500)
