"""Fractions that become numbers of 4 bits are rounded to the nearest one, the even one of two, and then wrapped."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto as T

import tapestry
from tests.support.small_models import N, net


@pytest.mark.parametrize(("kind", "low"), [(T.INT4, -8), (T.UINT4, 0)])
def test_a_float_becomes_the_nearest_number_of_4_bits(kind, low, tmp_path):
    x = np.array([-9, -8.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 6.5, 7.4, 7.6, 14.5, 15, 1.4, 1.6, -1.6], np.float32)
    nodes = [N("Cast", ["x"], ["a"], to=kind), N("Cast", ["a"], ["y"], to=T.FLOAT)]
    model = net(nodes, {"x": (T.FLOAT, [16])}, {"y": T.FLOAT}, {}, 21)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    found = tapestry.compile(str(tmp_path / "m.onnx"), devices=2, topology="cpu").run({"x": x})["y"]
    assert found.tolist() == ((np.rint(x) - low) % 16 + low).tolist()
