"""Every refusal of a model names the node, its operator, the reason and what to do."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from tapestry.errors import ModelError
from tapestry.lift import lift
from tests.support.command_line import run
from tests.support.small_models import N

I64 = {"five": np.array([5, 5]), "zero": np.array([0]), "two": np.array([2]), "far": np.array([2**31, 2**31])}
W = np.ones((2, 2, 3, 3), np.float32)
BAD = {
    "Reshape": (N("Reshape", ["x", "five"], ["y"], name="n"), [2, 3]),
    "Slice": (N("Slice", ["x", "zero", "two", "zero", "zero"], ["y"], name="n"), [2, 3]),
    "Expand": (N("Expand", ["x", "far"], ["y"], name="n"), [1, 1]),
    "Conv": (N("Conv", ["x", "w"], ["y"], name="n", group=3), [1, 2, 5, 5]),
    "Add": (N("Add", ["x", "nobody"], ["y"], name="n"), [2, 3]),
    "Nonsense": (N("Nonsense", ["x"], ["y"], name="n"), [2, 3]),
    "Transpose": (N("Transpose", ["x"], ["y"], name="n", perm=[0, 0]), [2, 3]),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_refusal_says_where_why_and_what_to_do(kind, tmp_path):
    node, shape = BAD[kind]
    info = helper.make_tensor_value_info
    inits = [numpy_helper.from_array(a, n) for n, a in (*I64.items(), ("w", W))]
    graph = helper.make_graph([node], "g", [info("x", T.FLOAT, shape)], [info("y", T.FLOAT, None)], inits)
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString())
    with pytest.raises(ModelError) as e:
        lift(path)
    assert "node 'n'" in e.value.where and kind in e.value.where + e.value.why and e.value.why and e.value.hint, str(e.value)
    assert "Error: " not in e.value.why
    status, out, _ = run("doctor", path)
    assert status == 1 and "node 'n'" in out and "try: " in out
