"""Scatter at places known at compile time: a choice cell by cell, which splits; elsewhere the node stays whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tapestry import api
from tapestry.ir.graph import Opaque


def save(folder: Path, op: str, index: np.ndarray, updates: tuple[int, ...], **attributes) -> Path:
    ins = [helper.make_tensor_value_info("x", 1, [6, 5, 4]), helper.make_tensor_value_info("u", 1, updates)]
    nodes = [helper.make_node(op, ["x", "i", "u"], ["y"], "scatter", **attributes)]
    graph = helper.make_graph(
        nodes, "g", ins, [helper.make_tensor_value_info("y", 1, [6, 5, 4])], [numpy_helper.from_array(index, "i")]
    )
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), folder / "model.onnx")
    return folder / "model.onnx"


def row(*values: int) -> np.ndarray:
    return np.array(values, np.int64).reshape(-1, 1)


def along(axis: int, shape: tuple[int, ...], *values: int) -> np.ndarray:
    """Indices of ScatterElements that are the same but along one axis."""
    turned = np.array(values, np.int64).reshape([-1 if a == axis else 1 for a in range(3)])
    return np.ascontiguousarray(np.broadcast_to(turned, shape))


GRID = np.stack(np.meshgrid([1, 3, 5], [4, 3, 2, 1], indexing="ij"), -1).astype(np.int64)
KNOWN = [
    ("ScatterND", row(2, 3, 4), (3, 5, 4), {}),
    ("ScatterND", row(0, 1, 2, 3, 4, 5), (6, 5, 4), {}),
    ("ScatterND", row(-1), (1, 5, 4), {}),
    ("ScatterND", row(5, 3, 1), (3, 5, 4), {}),
    ("ScatterND", row(-6, -4, -2), (3, 5, 4), {}),
    ("ScatterND", GRID, (3, 4, 4), {}),
    ("ScatterND", np.array([[2, 0], [2, 2], [2, 4]], np.int64), (3, 4), {}),
    ("ScatterElements", along(1, (6, 1, 4), 3), (6, 1, 4), {"axis": 1}),
    ("ScatterElements", along(1, (6, 5, 4), 4, 3, 2, 1, 0), (6, 5, 4), {"axis": 1}),
    ("ScatterElements", along(2, (4, 5, 2), 1, 3), (4, 5, 2), {"axis": -1}),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("op", "index", "updates", "attributes"), KNOWN)
def test_places_that_are_known_are_chosen_cell_by_cell(tmp_path, op, index, updates, attributes):
    path = save(tmp_path, op, index, updates, **attributes)
    for mesh, pins in (("1", []), ("3", ["y:x0=3@d0"]), ("2x2", ["y:x1=2@d0", "y:x2=2@d1"])):
        build = api.compile(path, mesh=mesh, pins=pins)
        assert not any(isinstance(o, Opaque) for o in build.build.plan.graph.ops)
        _, report = api.run_checked(build, build.random_feeds(3), check=True)
        assert report["passed"] and report["outputs"]["y"]["max_abs_err"] == 0


@pytest.mark.parametrize(
    ("op", "index", "updates", "attributes"),
    [
        ("ScatterND", row(0, 1, 3), (3, 5, 4), {}),  # no progression
        ("ScatterND", row(2, 2), (2, 5, 4), {}),  # one cell twice: the last update counts
        ("ScatterND", row(-1, 0, 1), (3, 5, 4), {}),  # wraps around
        ("ScatterND", row(2, 3), (2, 5, 4), {"reduction": "add"}),
        ("ScatterND", np.array([[0, 0], [1, 1], [2, 2]], np.int64), (3, 4), {}),  # a diagonal
        ("ScatterElements", np.arange(6, dtype=np.int64).reshape(6, 1, 1) % 5, (6, 1, 1), {"axis": 1}),
    ],
)
def test_other_places_stay_whole_and_right(tmp_path, op, index, updates, attributes):
    build = api.compile(save(tmp_path, op, index, updates, **attributes), mesh="2")
    assert any(isinstance(o, Opaque) for o in build.build.plan.graph.ops)
    assert api.run_checked(build, build.random_feeds(3), check=True)[1]["passed"]
