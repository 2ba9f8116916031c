"""Operations on weights alone are done once, when weights are loaded, and what stays of them is counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper
from onnx.reference import ReferenceEvaluator

import tapestry
from tapestry.ir.program import Launch
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tests.support.small_models import net

N = helper.make_node


def normed() -> onnx.ModelProto:
    """A convolution whose weight has a norm of its own, twice as an output that depends on a weight alone, and a bias of rows."""
    draw = np.random.default_rng(5)
    v = draw.standard_normal((70, 37, 33), dtype=np.float32)
    v[3, 5, 7], v[4] = np.nan, np.inf
    nodes = [
        N("ReduceL2", ["v", "axes"], ["size"], keepdims=1), N("Div", ["g", "size"], ["scale"]), N("Mul", ["v", "scale"], ["w"]),
        N("Conv", ["x", "w"], ["c"], pads=[16, 16]), N("Gather", ["table", "i"], ["rows"]), N("Add", ["c", "rows"], ["y"]),
        N("Sqrt", ["table"], ["z"]),
    ]  # fmt: skip
    weights = {
        "v": v, "g": draw.standard_normal((70, 1, 1), dtype=np.float32), "axes": np.array([1, 2]),
        "table": draw.random((9, 29), dtype=np.float32), "i": draw.integers(0, 9, (1, 70)),
    }  # fmt: skip
    return net(nodes, {"x": (T.FLOAT, (1, 37, 29))}, {"y": T.FLOAT, "z": T.FLOAT}, weights, opset=18)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("mesh", ["1", "2"])
def test_a_norm_of_a_weight_is_worked_out_once(mesh: str, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    onnx.save(normed(), model)
    compiled = tapestry.compile(model, mesh=mesh)
    executor = compiled.session.executor
    assert isinstance(executor, LocalExecutor)
    x = np.random.default_rng(6).standard_normal((1, 37, 29), dtype=np.float32)
    with np.errstate(invalid="ignore"):
        want = ReferenceEvaluator(normed()).run(None, {"x": x})
    for _ in range(2):
        got = compiled.session.run({"x": x})
        for a, b in zip((got.outputs["y"], got.outputs["z"]), want, strict=True):
            np.testing.assert_allclose(a, np.asarray(b), rtol=1e-4, atol=1e-4)
        assert got.measured.peak == list(compiled.build.peak_bytes)
    made = [step for step in executor.program.steps if isinstance(step, Launch)]
    alone = {at for at, step in enumerate(executor.program.steps) if isinstance(step, Launch) and _reads_x_not(executor, at)}
    for folded, packing in zip(executor.folded, executor.packing, strict=True):
        assert folded.steps and folded.steps <= alone and len(folded.steps) < len(made)
        assert packing.extra >= folded.extra >= 0


def _reads_x_not(executor: LocalExecutor, at: int) -> bool:
    """Whether no value that a launch needs comes of the input."""
    graph, step = executor.graph, executor.program.steps[at]
    assert isinstance(step, Launch)
    by, todo = graph.producers(), [executor.graph.ops[step.op].outs[0]]
    while todo:
        t = todo.pop()
        if t == "x":
            return False
        todo += graph.ops[by[t]].inputs if t in by else ()
    return True


@pytest.mark.usefixtures("one_thread")
def test_without_room_they_are_done_at_every_run(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    onnx.save(normed(), model)
    x = {"x": np.ones((1, 37, 29), np.float32)}
    free = tapestry.compile(model, mesh="1").session.run(x)
    compiled = tapestry.compile(model, mesh="1")
    executor = compiled.session.executor
    assert isinstance(executor, LocalExecutor)
    executor.room = [-(1 << 40)]
    got = compiled.session.run(x)
    assert not executor.folded[0].steps and got.measured.packed == [0]
    for t, a in free.outputs.items():
        np.testing.assert_allclose(got.outputs[t], a, rtol=1e-5, atol=1e-5)
