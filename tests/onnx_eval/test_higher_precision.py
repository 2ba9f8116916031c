"""Where evaluators differ, the definition in float64 decides, and a refusal says who said what."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.errors import LawError
from tapestry.onnx_eval.reference_evaluator import once, reference_evaluator
from tapestry.verify.model.model_values import ReferenceValues
from tests.support.small_models import N, net

RNG = np.random.default_rng(0)
GRID = RNG.random((1, 3, 3, 2)) * 1.6 - 0.8
CASES = {
    "Erf": ({"x": RNG.standard_normal(9)}, "x", {}, {}),
    "GridSample": ({"x": RNG.random((1, 1, 5, 5)), "g": GRID}, "g", {}, {}),
    "AffineGrid": ({"x": RNG.random((1, 2, 3))}, "x", {"size": np.array([1, 1, 3, 4])}, {}),
    "Gelu": ({"x": RNG.standard_normal(9)}, "x", {}, {}),
}


@pytest.mark.parametrize("op", CASES)
def test_the_reference_computes_float64_in_float64(op):
    feeds, at, constants, attributes = CASES[op]
    ins = {n: (T.DOUBLE, list(a.shape)) for n, a in feeds.items()}
    model = net([N(op, [*feeds, *constants], ["y"], **attributes)], ins, {"y": T.DOUBLE}, constants, 20)
    run = reference_evaluator(model).run

    def moved(by):
        return run(None, {**feeds, at: feeds[at] + by})[0] - run(None, feeds)[0]

    assert np.allclose(moved(1e-9) * 1e4, moved(1e-5), rtol=1e-3, atol=1e-8)  # float32 stands still, or jumps


def test_float64_erf_is_compiled(tmp_path):
    model = net([N("Erf", ["x"], ["y"])], {"x": (T.DOUBLE, [8])}, {"y": T.DOUBLE}, {}, 18)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    plan = tapestry.compile(str(tmp_path / "m.onnx"), devices=2, topology="cpu")
    x = np.linspace(-2, 2, 8)
    assert np.allclose(plan.run({"x": x})["y"], [math.erf(v) for v in x], rtol=1e-13, atol=0)


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean", "Softmax", "LayerNormalization", "MatMul", "GlobalAveragePool"])
def test_bfloat16_is_rounded_once(op):
    x = (RNG.random((1, 2, 4096)) + 0.5).astype(ml_dtypes.bfloat16)
    other = {"MatMul": x.reshape(1, 4096, 2), "LayerNormalization": np.ones(4096, x.dtype)}.get(op)
    given = [x] if other is None else [x, other]
    ins = {f"i{k}": (T.BFLOAT16, list(a.shape)) for k, a in enumerate(given)}
    doubles = {n: (T.DOUBLE, s) for n, (_, s) in ins.items()}
    values = []
    for types, kind in ((ins, T.BFLOAT16), (doubles, T.DOUBLE)):
        model = net([N(op, list(ins), ["y"])], types, {"y": kind}, {}, 22)
        wide = [a if kind == T.BFLOAT16 else a.astype(np.float64) for a in given]
        values.append(reference_evaluator(model).run(None, dict(zip(ins, wide, strict=True)))[0])
    narrow, exact = values
    assert narrow.dtype == x.dtype
    assert np.abs(narrow.astype(np.float64) - exact).max() <= np.abs(exact).max() * 2**-8


def test_a_node_in_float64_is_rounded_to_the_types_of_its_results():
    x = np.array([1e8, 1, -1e8], np.float32)

    def total(arrays):
        return [np.add.reduce(arrays[0], dtype=arrays[0].dtype, keepdims=True)]

    (found,) = once("ReduceSum", 18, [x, None], total, double=True)
    assert found.dtype == np.float32
    assert found.tolist() == [1.0]
    assert once("ReduceSum", 18, [x, None], total)[0].tolist() == [0.0]


@pytest.mark.parametrize("right", [True, False])
def test_float64_decides_between_a_plan_and_evaluators(right, tmp_path, monkeypatch):
    """Others are off by a thousandth; in float64, by the same evaluator, they are not, or are as well."""
    honest = ReferenceValues.again

    def again(self, name, *, double=False):
        value = honest(self, name, double=double)
        return value if (double and right) or name != "y" else value + np.float32(1e-3)

    first = ReferenceValues.__init__

    def made(self, *args, **more):
        first(self, *args, **more)
        if "y" in self.values:
            self.values["y"] = self.values["y"] + np.float32(1e-3)

    monkeypatch.setattr(ReferenceValues, "again", again)
    monkeypatch.setattr(ReferenceValues, "__init__", made)
    model = net([N("Tanh", ["x"], ["y"])], {"x": (T.FLOAT, [8])}, {"y": T.FLOAT}, {}, 18)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())

    def compiled():
        return tapestry.compile(str(tmp_path / "m.onnx"), devices=2, topology="cpu")

    if right:
        compiled()
        return
    with pytest.raises(LawError, match=r"by the plan, .* by onnxruntime, .* by onnx.reference, .* in float64"):
        compiled()
