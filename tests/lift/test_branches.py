"""A branch that the sizes contradict does not refuse the model where the other one may be taken."""

import numpy as np
import onnx
import onnx.helper as oh
import pytest

import tapestry
from tapestry.errors import TapestryError

F = onnx.TensorProto.FLOAT


def _weights(rows: int, name: str) -> onnx.TensorProto:
    data = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
    return onnx.numpy_helper.from_array(data, name)


def _branch(name: str, rows: int, inner: onnx.NodeProto | None = None) -> onnx.GraphProto:
    """x @ w for a w of that many rows."""
    nodes = [inner] if inner else [oh.make_node("MatMul", ["x", f"w{rows}"], [f"{name}_y"], f"{name}_product")]
    out = oh.make_tensor_value_info(inner.output[0] if inner else f"{name}_y", F, None)
    return oh.make_graph(nodes, name, [], [out], value_info=[oh.make_tensor_value_info(f"{name}_y", F, [7, 9, 7])])


def _either(name: str, then: onnx.GraphProto, other: onnx.GraphProto) -> onnx.NodeProto:
    return oh.make_node("If", ["which"], [f"{name}_out"], name, then_branch=then, else_branch=other)


def _model(node: onnx.NodeProto) -> bytes:
    x, y = (oh.make_tensor_value_info(n, F, s) for n, s in (("x", ["batch", "n"]), ("y", None)))
    which = oh.make_tensor_value_info("which", onnx.TensorProto.BOOL, [])
    nodes = [node, oh.make_node("Relu", node.output, ["y"], "last")]
    stored = [_weights(4, "w4"), _weights(5, "w5"), _weights(6, "w6")]
    graph = oh.make_graph(nodes, "branches", [x, which], [y], stored)
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 17)], ir_version=9).SerializeToString()


NODES = {
    "then": lambda: _either("a", _branch("t", 5), _branch("e", 4)),
    "else": lambda: _either("a", _branch("t", 4), _branch("e", 5)),
    "inner": lambda: _either(
        "a", _branch("t", 0, _either("b", _branch("bt", 5), _branch("be", 4))),
        _branch("e", 0, _either("c", _branch("ct", 4), _branch("ce", 6))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NODES)
def test_the_branch_that_fits_is_run(kind):
    compiled = tapestry.compile(_model(NODES[kind]()), shapes={"batch": 2, "n": 4}, mesh="2", topology="cpu")
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    weights = onnx.numpy_helper.to_array(_weights(4, "w4"))
    which = kind == "else"
    feeds = {"x": x, "which": np.array(which)}
    if kind == "inner":  # both of its conditions are one: the then branch of the one, or the else branch of the other
        with pytest.raises(TapestryError):
            compiled.run(feeds)
        return
    np.testing.assert_allclose(compiled.run(feeds)["y"], np.maximum(x @ weights, 0), rtol=1e-5, atol=1e-6)
    with pytest.raises(TapestryError):
        compiled.run(feeds | {"which": np.array(not which)})


def test_two_branches_that_do_not_fit_refuse_it():
    with pytest.raises(TapestryError, match="contradict"):
        tapestry.compile(_model(_either("a", _branch("t", 5), _branch("e", 6))), shapes={"batch": 2, "n": 4}, mesh="2")
