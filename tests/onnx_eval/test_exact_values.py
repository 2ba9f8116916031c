"""A result that differs from onnxruntime's is held against exact values: it passes if it is as near to them, and only then."""

from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import pytest

import tapestry
from tapestry import api
from tapestry.verify import model_outputs

F = onnx.TensorProto.FLOAT


def _model(folder: Path, operator: str, add: float) -> Path:
    """operator(x @ w + add), results of which are tiny where ``add`` is very negative."""
    w = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32)
    stored = [onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(np.full(16, add, np.float32), "add")]
    nodes = [
        oh.make_node("MatMul", ["x", "w"], ["p"]), oh.make_node("Add", ["p", "add"], ["s"]), oh.make_node(operator, ["s"], ["y"]),
    ]  # fmt: skip
    ports = [oh.make_tensor_value_info(n, F, [8, 16]) for n in "xy"]
    graph = oh.make_graph(nodes, "tiny", ports[:1], ports[1:], stored)
    onnx.save(oh.make_model(graph, opset_imports=[oh.make_opsetid("", 17)], ir_version=9), folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize(("operator", "add"), [("Sigmoid", -16.0), ("Sigmoid", -25.0), ("Tanh", 0.0), ("Exp", -30.0)])
def test_small_results_of_functions_pass(operator, add, tmp_path):
    compiled = tapestry.compile(_model(tmp_path, operator, add), mesh="2", topology="cpu")
    assert compiled.check()["passed"]


@pytest.mark.parametrize("wrong", [1.001, 1.01, 1.03, 1.5, np.nan])
def test_a_wrong_result_does_not(wrong, tmp_path):
    compiled = tapestry.compile(_model(tmp_path, "Sigmoid", -16.0), mesh="2", topology="cpu")
    feeds = compiled.random_feeds()
    outs = compiled.run(feeds)
    s = feeds["x"].astype(np.float64) @ np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32) - 16
    exact = (1 / (1 + np.exp(-s))).astype(np.float32)
    apart = model_outputs.compare_outputs(api.compared(compiled, feeds, outs, check=True) and outs["y"], exact).rel_err
    assert apart < 1e-4
    theirs = model_outputs.compare_outputs(model_outputs.reference(Path(compiled.build.model), feeds)[1]["y"], exact).rel_err
    found = api.compared(compiled, feeds, {"y": outs["y"] * np.float32(wrong)}, check=True)["passed"]
    assert found == (abs(wrong - 1) <= min(4 * theirs, 2e-2))


def test_without_exact_values_only_rounding_is_allowed(monkeypatch, tmp_path):
    monkeypatch.setattr(model_outputs, "SECONDS", -1.0)  # over at once
    compiled = tapestry.compile(_model(tmp_path, "Sigmoid", -16.0), mesh="2", topology="cpu")
    feeds = compiled.random_feeds()
    outs = {"y": compiled.run(feeds)["y"] * np.float32(1.001)}
    document = api.compared(compiled, feeds, outs, check=True)
    assert not document["passed"] and document["outputs"]["y"]["reference_spread"] < 1e-4  # what rounding does, and no more


@pytest.mark.parametrize(("ours", "theirs", "passes"), [
    (1 + 5e-5, 1.05, True), (1.019, 1.05, True), (1.021, 1.05, False), (1.05, 1.05, False), (1.003, 1.001, True),
    (1.005, 1.001, False), (np.inf, 1.05, False),
])  # fmt: skip
def test_how_near_is_near(ours, theirs, passes):
    exact = np.linspace(1, 2, 8)
    passed, _ = model_outputs.settle((exact * ours).astype(np.float32), (exact * theirs).astype(np.float32), exact, 0.0)
    assert passed == passes
