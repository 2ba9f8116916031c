"""``compile --accumulate``: products of f16 summed in f16 or in f32, with the error that this makes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block
from tapestry.lift.accumulation import measured
from tapestry.verify.interp import run as evaluated
from tests.support.small_models import N, net

WIDTH = 128


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(0)
    weights = {f"w{k}": (rng.standard_normal((WIDTH, WIDTH)) / 12).astype(np.float16) for k in range(2)}
    nodes = [N("MatMul", ["x", "w0"], ["a"], "mm0"), N("Relu", ["a"], ["b"], "act"), N("Gemm", ["b", "w1"], ["y"], "mm1")]
    made = net(nodes, {"x": (T.FLOAT16, [8, WIDTH])}, {"y": T.FLOAT16}, weights)
    onnx.save(made, tmp_path / "half.onnx")
    return tmp_path / "half.onnx"


def states(found) -> set[str]:
    return {e.dtype for op in found.build.plan.graph.ops if isinstance(op, Block) and op.monoid for e in op.body}


@pytest.mark.parametrize("target", ["torch-cpu", "triton:sm90"])
def test_sums_are_held_as_asked(model, target):
    """In the plan, in the messages (half the bytes), in the kernels; and the results are still the model's."""
    found = {}
    for asked in (None, "f32", "f16"):
        found[asked] = tapestry.compile(model, devices=2, topology="cpu", target=target, accumulate=asked, pins="mm1:m=2@d0")
    assert [states(c) for c in found.values()] == [{"f32"}, {"f32"}, {"f16"}]
    sent = {k: sum(t["bytes"] for t in c.report["transfers"]) for k, c in found.items()}
    assert sent["f16"] * 2 == sent["f32"] == sent[None] > 0
    assert found["f32"].kernels == found[None].kernels
    texts = "\n".join(found["f16"].kernels.values())
    if target != "torch-cpu":
        assert "out_dtype=tl.float16" in texts and "tl.float16)" in texts
    else:
        assert found["f16"].check()["passed"]
    found["f16"].verify()
    said = found["f16"].report["accumulate"]
    assert said["dtype"] == "f16" and said["products"] == 2 and [r["products"] for r in said["rel_err"]] == [WIDTH]
    assert "2 products of f16 summed in f16" in found["f16"].explain() and "accumulate" not in found[None].report


def test_the_reference_rounds_as_it_is_told(model):
    """Sums that f16 cannot hold: 2048 ones and a half."""
    n = 4096
    made = net([N("MatMul", ["x", "w"], ["y"], "mm")], {"x": (T.FLOAT16, [1, n])}, {"y": T.FLOAT16},
               {"w": np.ones((n, 1), np.float16)})  # fmt: skip
    onnx.save(made, model.with_name("long.onnx"))
    x = np.full((1, n), 0.5, np.float16)
    out = {}
    for asked in ("f32", "f16"):
        found = tapestry.compile(model.with_name("long.onnx"), topology="cpu", accumulate=asked)
        graph = found.build.plan.graph
        weights = {t: np.ones(graph.tensors[t].shape, np.float16) for t in graph.weights}
        out[asked] = float(evaluated(graph, {"x": x, **weights})["y"][0, 0])
    assert out["f32"] == 2048.0 and abs(out["f16"] - 2048.0) < 2048 * 0.6


def test_the_error_is_measured():
    short, long = measured(64), measured(4096)
    assert short["f32"] < short["f16"] < long["f16"] and long["f32"] < 1e-3 < long["f16"] < 0.2


def test_nothing_to_sum_is_refused(model, tmp_path):
    onnx.save(net([N("Relu", ["x"], ["y"], "act")], {"x": (T.FLOAT16, [8, 8])}, {"y": T.FLOAT16}, {}), tmp_path / "r.onnx")
    with pytest.raises(TapestryError, match="no product of f16"):
        tapestry.compile(tmp_path / "r.onnx", accumulate="f16")
    with pytest.raises(TapestryError, match="sums in 'bf16'"):
        tapestry.compile(model, accumulate="bf16")
