"""What a file declares of its values, judged as onnxruntime judges it."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper

import tapestry
from tapestry.errors import ModelError

F = T.FLOAT
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def value(name, shape, dtype=F):
    return helper.make_tensor_value_info(name, dtype, shape)


def chain(shape, declared, out, dtype=F):
    nodes = [helper.make_node("Relu", ["x"], ["m"]), helper.make_node("Neg", ["m"], ["y"])]
    known = [value("m", declared, dtype)] if declared else []
    return helper.make_graph(nodes, "g", [value("x", shape)], [value("y", out)], value_info=known)


def branches(declared, out, dtype=F):
    def body(operator):
        nodes = [helper.make_node(operator, ["x"], ["p"]), helper.make_node("Neg", ["p"], ["o"])]
        return helper.make_graph(nodes, "b", [], [value("o", out, dtype)], value_info=[value("p", declared)])

    node = helper.make_node("If", ["c"], ["y"], then_branch=body("Relu"), else_branch=body("Abs"))
    return helper.make_graph([node], "g", [value("x", [2, 3]), value("c", [], T.BOOL)], [value("y", [2, 3])])


def compiled(graph, folder, **how):
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return tapestry.compile(str(folder / "m.onnx"), devices=2, topology="cpu", **how)


@pytest.mark.parametrize(
    ("declared", "out", "said"),
    [
        ([-1, 3], [2, 3], ""),
        ([2, 3], [-1, 3], ""),
        ([-9, -1], [-1, -1], ""),
        ([2, 3, 1], [2, 3], r"'m' is declared \[2, 3, 1\], computed \[2, 3\]"),
        ([2, 4], [2, 3], "'m' is declared"),
        ([2, 3], [2, 5], "'y' is declared"),
        ([2, 3], [6], "'y' is declared"),
        ([2, 3], [-1, 4], r"'y' is declared \[None, 4\]"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_sizes_that_are_unknown_or_wrong_are_not_used(declared, out, said, nested, tmp_path, caplog):
    feeds = {"x": X, "c": np.array(True)} if nested else {"x": X}
    with caplog.at_level(logging.WARNING):
        plan = compiled(branches(declared, out) if nested else chain([2, 3], declared, out), tmp_path)
    assert np.array_equal(plan.run(feeds)["y"], -X)
    if said:
        assert re.search("bodies" if nested else said, caplog.text)
    else:
        assert "declare" not in caplog.text


def test_a_negative_size_of_an_input_is_to_be_given(tmp_path):
    with pytest.raises(ModelError, match=r"the size of x\[0\] is not given"):
        compiled(chain([-1, 3], None, [-1, 3]), tmp_path)
    plan = compiled(chain([-1, 3], None, [-1, 3]), tmp_path, shapes={"x": "2x3"})
    assert np.array_equal(plan.run({"x": X})["y"], -X)


@pytest.mark.parametrize("graph", [chain([2, 3], [2, 3], [2, 3], T.INT64), branches([2, 3], [2, 3], T.INT64)])
def test_another_element_type_is_refused(graph, tmp_path):
    with pytest.raises(ModelError, match="contradict each other"):
        compiled(graph, tmp_path)
