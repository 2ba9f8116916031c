"""Local functions whose attributes have values that the operators inside do not begin with: evaluators forget them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, helper
from onnx import TensorProto as T

import tapestry
from tapestry.onnx_eval.inlined_functions import inlined
from tests.support.small_models import N

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
    "of a pool": ([POOL], [N("Unsqueeze", ["x", "one"], ["u"]), N("Pool", ["u"], ["y"], domain="my")], None),
}  # fmt: skip


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
