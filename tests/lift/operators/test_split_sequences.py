"""Sequences between a tensor and its pieces are Splits; what else is done with a sequence stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tapestry.lift.onnx_to_graph import lift
from tapestry.verify.interp import run


def model(path: Path, sizes: Any, places: list[int], version: int, **how: int) -> Path:
    """Pieces of ``x``, each an output."""
    given = [] if sizes is None else ["sizes"]
    nodes = [helper.make_node("SplitToSequence", ["x", *given], ["s"], axis=1, **how)]
    stored = [numpy_helper.from_array(np.array(k, np.int64), f"k{i}") for i, k in enumerate(places)]
    nodes += [helper.make_node("SequenceAt", ["s", f"k{i}"], [f"y{i}"]) for i in range(len(places))]
    stored += [numpy_helper.from_array(np.array(sizes, np.int64), "sizes")] if given else []
    outs = [helper.make_empty_tensor_value_info(f"y{i}") for i in range(len(places))]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, [2, 5, 3])], outs, stored)
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", version)]), path)
    return path


@pytest.mark.parametrize("version", [11, 20])
@pytest.mark.parametrize(
    ("sizes", "places", "how"),
    [(2, [0, -1], {}), ([1, 4], [1, 0, 1], {}), (None, [4, 0], {"keepdims": 0}), (None, [-5], {}), (7, [0], {})],
)
def test_pieces(sizes: Any, places: list[int], how: dict[str, int], version: int, tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", sizes, places, version, **how)
    graph = lift(path).graph
    assert not any(t.on_host for t in graph.tensors.values())
    x = np.random.default_rng(0).standard_normal((2, 5, 3)).astype(np.float32)
    evaluator: Any = ReferenceEvaluator(onnx.load(path))
    found = run(graph, {"x": x})
    for i, want in enumerate(evaluator.run(None, {"x": x})):
        assert np.array_equal(found[f"y{i}"], want)


def test_a_sequence_that_is_read_as_a_whole_stays(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", 2, [0], 20)
    m = onnx.load(path)
    m.graph.node.append(helper.make_node("SequenceLength", ["s"], ["n"]))
    m.graph.output.append(helper.make_tensor_value_info("n", 7, []))
    onnx.save(m, path)
    graph = lift(path).graph
    assert graph.tensors["s"].on_host and graph.tensors["n"].shape == ()
