"""onnx's shape inference in a process of its own, which may die, and which nobody else's questions reach."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tapestry.errors import ModelError
from tapestry.lift.normalize.inference import INFERRING, InferenceError, infer_shapes


def model(size: int, window: int = 1) -> ModelProto:
    """A pool over `size` cells, and a slice of what it gives: none where the window is larger."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["p"], "pool", kernel_shape=[window]),
        helper.make_node("Slice", ["p", "from", "to"], ["y"], "slice"),
    ]
    ends = [numpy_helper.from_array(np.array(v), n) for n, v in (("from", [0, 0, 0]), ("to", [1, 1, 9]))]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, size])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], ends)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def sizes(done: ModelProto, name: str) -> list[int]:
    (value,) = (v for v in (*done.graph.value_info, *done.graph.output) if v.name == name)
    return [d.dim_value for d in value.type.tensor_type.shape.dim]


def test_a_model_that_ends_the_process_is_refused_and_the_next_one_is_not():
    for _ in range(2):
        with pytest.raises(ModelError, match=r"'pool' .*: a negative size"):
            infer_shapes(model(3, window=7), strict_mode=True)
        assert sizes(infer_shapes(model(5)), "p") == [1, 1, 5]


def test_a_process_that_was_killed_is_started_again():
    infer_shapes(model(5))
    assert INFERRING.running
    INFERRING.running[0].kill()
    INFERRING.running[0].wait()
    assert sizes(infer_shapes(model(6)), "p") == [1, 1, 6]


def test_onnx_says_what_is_wrong():
    wrong = model(5)
    wrong.graph.node[0].attribute[0].ints[:] = [1, 1, 1]
    with pytest.raises(InferenceError, match="kernel_shape"):
        infer_shapes(wrong, strict_mode=True)


def test_threads_and_forks_get_their_own_answers():
    answers: list[bool] = []

    def many(first: int) -> None:
        answers.extend(sizes(infer_shapes(model(k)), "p") == [1, 1, k] for k in range(first, first + 40))

    threads = [threading.Thread(target=many, args=(10 * k + 5,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert answers == [True] * 120
    asked = INFERRING.running
    child = os.fork()
    if child == 0:
        many(5)
        own = INFERRING.running is not asked and all(answers)
        INFERRING.end()
        os._exit(0 if own else 1)
    many(50)
    assert os.waitpid(child, 0)[1] == 0
    assert INFERRING.running is asked
    assert all(answers)
