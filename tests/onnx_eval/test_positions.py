"""Positions outside of what they index: refused alike, known or given, whatever operator reads or writes there."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.errors import ModelError, TapestryError
from tests.support.small_models import N, net

F, I = T.FLOAT, T.INT64  # noqa: E741
UPDATES = {"u": (F, (2, 3))}
CASES = {  # node, opset, shape of the positions, other inputs, least and greatest position
    "Gather": (N("Gather", ["x", "i"], ["y"]), 18, (2,), {}, (-4, 3)),
    "GatherElements": (N("GatherElements", ["x", "i"], ["y"], axis=1), 18, (4, 2), {}, (-3, 2)),
    "GatherND": (N("GatherND", ["x", "i"], ["y"]), 18, (2, 1), {}, (-4, 3)),
    "GatherND of cells": (N("GatherND", ["x", "i"], ["y"]), 18, (5, 2), {}, (-3, 2)),
    "GatherND of batches": (N("GatherND", ["x", "i"], ["y"], batch_dims=1), 18, (4, 1), {}, (-3, 2)),
    "ScatterND": (N("ScatterND", ["x", "i", "u"], ["y"], reduction="add"), 18, (2, 1), UPDATES, (-4, 3)),
    "ScatterElements": (N("ScatterElements", ["x", "i", "u"], ["y"]), 18, (2, 3), UPDATES, (-4, 3)),
    "Scatter": (N("Scatter", ["x", "i", "u"], ["y"]), 10, (2, 3), UPDATES, (-4, 3)),
    "TensorScatter": (N("TensorScatter", ["x", "u", "i"], ["y"]), 24, (4,), {"x": (F, (4, 6, 3)), "u": (F, (4, 2, 3))}, (0, 4)),
    "OneHot": (N("OneHot", ["i", "d", "v"], ["y"]), 18, (2,), {}, (-9, 9)),  # anything: off where there is no such place
}  # fmt: skip
SECOND = {"d": np.array([4]), "v": np.float32([0, 1])}
ROUND = [-10, -5, -4, -3, -1, 0, 2, 3, 4, 5, 10]


def model(case, position=None):
    node, opset, shape, more, _ = CASES[case]
    ins = {"x": (F, (4, 3)), **more, "i": (I, shape)}
    ins = {n: v for n, v in ins.items() if n in node.input}
    constants = {n: a for n, a in SECOND.items() if n in node.input}
    if position is not None:
        constants["i"] = np.full(shape, position)
        del ins["i"]
    return net([node], ins, {"y": F}, constants, opset), ins


def feeds(ins, **given):
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s).astype(np.float32) for n, (t, s) in ins.items() if t == F} | given


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_given_position_outside_is_refused(case, tmp_path):
    path, (made, ins) = tmp_path / "m.onnx", model(case)
    path.write_bytes(made.SerializeToString())
    build = tapestry.compile(path, topology="cpu")
    least, most = CASES[case][4]
    assert build.check()["passed"]  # random positions are inside
    for place in ROUND:
        given = feeds(ins, i=np.full(CASES[case][2], place))
        if least <= place <= most or case == "OneHot":
            assert build.check(given)["passed"]
        else:
            with pytest.raises(TapestryError, match=rf"input 'i' has an index outside of what it indexes\n.*{place} where"):
                build.run(given)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_known_position_outside_is_refused(case, tmp_path):
    path = tmp_path / "m.onnx"
    least, most = CASES[case][4]
    for place in ROUND[1::3]:
        path.write_bytes(model(case, place)[0].SerializeToString())
        if least <= place <= most or case == "OneHot":
            assert tapestry.compile(path, topology="cpu").check()["passed"]
        else:
            with pytest.raises(ModelError, match=rf"an index outside of what it indexes\n.*{place} where"):
                tapestry.compile(path, topology="cpu")


def test_an_ordinary_test_of_a_place_refuses_nothing(tmp_path):
    """A model's own choice between what is inside and what is not takes any number."""
    nodes = [
        N("Less", ["i", "zero"], ["back"]), N("Add", ["i", "size"], ["more"]), N("Where", ["back", "more", "i"], ["at"]),
        N("Less", ["at", "size"], ["in"]), N("Where", ["in", "at", "none"], ["y"]),
    ]  # fmt: skip
    constants = {"zero": np.array(0), "size": np.array(4), "none": np.array(-7)}
    path = tmp_path / "m.onnx"
    path.write_bytes(net(nodes, {"i": (I, (3,))}, {"y": I}, constants).SerializeToString())
    assert tapestry.compile(path, topology="cpu").run({"i": np.array([9, -1, -9])})["y"].tolist() == [-7, 3, -5]


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_a_place_in_a_scalar_has_no_coordinates(value, tmp_path):
    """ONNX's text, where numpy and onnxruntime say one."""
    path = tmp_path / "m.onnx"
    nodes = [N("NonZero", ["x"], ["y"]), N("Shape", ["y"], ["s"])]
    path.write_bytes(net(nodes, {"x": (F, ())}, {"y": I, "s": I}).SerializeToString())
    build, given = tapestry.compile(path, topology="cpu"), {"x": np.float32(value).reshape(())}
    found = build.run(given)
    assert found["y"].shape == (0, int(value != 0)) and found["s"].tolist() == list(found["y"].shape)
    assert build.check(given)["passed"]
