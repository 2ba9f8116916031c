"""Local functions whose attributes have values that the operators inside do not begin with: evaluators forget them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, helper
from onnx import TensorProto as T
from onnx.reference import ReferenceEvaluator

import tapestry
from tapestry.onnx_eval.ort_session import inlined, ort_session
from tapestry.onnx_eval.reference_fixes import corrected
from tests.support.small_models import N, net

OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
X = np.array([[-1.0, 2, -3, -7], [4, -5, 6, 8]], np.float32)


def handed(node, inner, outer, kind=AttributeProto.FLOAT):
    """A node whose attribute is one of the function that it is in."""
    node.attribute.append(AttributeProto(name=inner, ref_attr_name=outer, type=kind))
    return node


def function(name, nodes, attributes=(), **defaults):
    values = [helper.make_attribute(k, v) for k, v in defaults.items()]
    return helper.make_function("my", name, ["x"], ["y"], nodes, OPSETS, list(attributes), values)


LEAKY = function("Leaky", [handed(N("LeakyRelu", ["x"], ["y"]), "alpha", "slope")], slope=0.05)
CALL = N("Leaky", ["x"], ["t"], domain="my")
BRANCH = helper.make_graph(
    [N("Leaky", ["x"], ["o"], domain="my")], "side", [], [helper.make_tensor_value_info("o", T.FLOAT, None)]
)
NESTED = helper.make_graph(
    [N("Outer", ["x"], ["o"], domain="my")], "side", [], [helper.make_tensor_value_info("o", T.FLOAT, None)]
)
CHOICE = N("If", ["c"], ["y"], then_branch=BRANCH, else_branch=BRANCH)
POOL = function("Pool", [handed(N("AveragePool", ["x"], ["y"], kernel_shape=[3], ceil_mode=1, strides=[2]), "count_include_pad",
                                "counted", AttributeProto.INT)], counted=1)  # fmt: skip
CASES = {  # functions, nodes, and what comes of X
    "called": ([LEAKY], [N("Leaky", ["x"], ["y"], domain="my")], lambda x: np.where(x < 0, 0.05 * x, x)),
    "said": ([LEAKY], [N("Leaky", ["x"], ["y"], domain="my", slope=0.25)], lambda x: np.where(x < 0, 0.25 * x, x)),
    "in a function": (
        [LEAKY, function("Outer", [CALL, N("Neg", ["t"], ["y"])])], [N("Outer", ["x"], ["y"], domain="my")],
        lambda x: -np.where(x < 0, 0.05 * x, x),
    ),
    "handed on": (
        [LEAKY, function("Outer", [handed(N("Leaky", ["x"], ["y"], domain="my"), "slope", "s")], s=0.5)],
        [N("Outer", ["x"], ["y"], domain="my")], lambda x: np.where(x < 0, 0.5 * x, x),
    ),
    "in a branch": ([LEAKY], [N("ReduceMax", ["x"], ["m"], keepdims=0), N("Cast", ["m"], ["c"], to=T.BOOL), CHOICE],
                    lambda x: np.where(x < 0, 0.05 * x, x)),
    "in a branch of a function": (
        [LEAKY, function("Choose", [N("ReduceMax", ["x"], ["m"], keepdims=0), N("Cast", ["m"], ["c"], to=T.BOOL), CHOICE])],
        [N("Choose", ["x"], ["y"], domain="my")], lambda x: np.where(x < 0, 0.05 * x, x),
    ),
    "nested in a branch": (
        [LEAKY, function("Outer", [handed(N("Leaky", ["x"], ["t"], domain="my"), "slope", "s"), N("Leaky", ["t"], ["y"],
                                                                                               domain="my")], s=0.5)],
        [N("ReduceMax", ["x"], ["m"], keepdims=0), N("Cast", ["m"], ["c"], to=T.BOOL),
         N("If", ["c"], ["y"], then_branch=NESTED, else_branch=NESTED)], lambda x: np.where(x < 0, 0.025 * x, x),
    ),
    "of a pool": ([POOL], [N("Unsqueeze", ["x", "one"], ["u"]), N("Pool", ["u"], ["y"], domain="my")], None),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_what_a_call_leaves_out_is_what_the_function_says(case, tmp_path):
    functions, nodes, expected = CASES[case]
    one = [onnx.numpy_helper.from_array(np.array([1]), "one")]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", T.FLOAT, X.shape)],
                              [helper.make_tensor_value_info("y", T.FLOAT, None)], one)  # fmt: skip
    model = helper.make_model(graph, functions=functions, opset_imports=OPSETS, ir_version=10)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    build = tapestry.compile(path, topology="cpu")
    assert build.evidence[0]["kind"] == "sampled cells" and build.check({"x": X})["passed"]
    if expected is not None:
        np.testing.assert_allclose(build.run({"x": X})["y"], expected(X), rtol=1e-6)
    else:
        (pool,) = [n for n in inlined(model).graph.node if n.op_type == "AveragePool"]
        assert next(a.i for a in pool.attribute if a.name == "count_include_pad") == 1


@pytest.mark.parametrize("wrong", [0.01, 0.5])
def test_another_value_is_refused(wrong, tmp_path, monkeypatch):
    """The lift reads the file as if the function said something else."""
    graph = helper.make_graph(CASES["called"][1], "g", [helper.make_tensor_value_info("x", T.FLOAT, X.shape)],
                              [helper.make_tensor_value_info("y", T.FLOAT, None)])  # fmt: skip
    model = helper.make_model(graph, functions=[LEAKY], opset_imports=OPSETS, ir_version=10)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    from tapestry.lift.normalize import prepare

    real = prepare.run_passes

    def passes(given, *rest):
        done = real(given, *rest)
        next(a for n in done.graph.node for a in n.attribute if a.name == "alpha").f = wrong
        return done

    monkeypatch.setattr(prepare, "run_passes", passes)
    with pytest.raises(tapestry.errors.LawError, match="law 'model' is broken"):
        tapestry.compile(path, topology="cpu")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("opset", [9, 11, 12, 13])
@pytest.mark.parametrize("axis", [None, 0, 1, -1, -3])
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
def test_rows_of_all_axes_before_opset_13(op, axis, opset, tmp_path):
    """Of a constant and of an input: onnx's reference, with which constants are folded, has one axis at every opset."""
    if opset < 11 and axis is not None and axis < 0:
        pytest.skip("axes count from the end since opset 11")
    rng = np.random.default_rng(opset)
    values = rng.standard_normal((2, 1, 3, 2)).astype(np.float32)
    given = {} if axis is None else {"axis": axis}
    for constant in (True, False):
        made = net(
            [N(op, ["c" if constant else "x"], ["s"], **given), N("Add", ["s", "x"], ["y"])],
            {"x": (T.FLOAT, values.shape)}, {"y": T.FLOAT}, {"c": values} if constant else {}, opset,
        )  # fmt: skip
        path = tmp_path / f"{constant}.onnx"
        path.write_bytes(made.SerializeToString())
        feeds = {"x": values + 1}
        want = ort_session(path).run(None, feeds)[0]
        np.testing.assert_allclose(tapestry.compile(path, topology="cpu").run(feeds)["y"], want, rtol=1e-5, atol=1e-6)
        (own,) = ReferenceEvaluator(made, new_ops=corrected()).run(None, feeds)
        np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-6)
