"""Two modes of one model on one placement: nothing that both read lies in two ways, and the pair is bounded by both alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

from tapestry import pipeline
from tapestry.errors import TapestryError
from tapestry.plan.topology.meshes import parse_mesh
from tapestry.sizes.joint_modes import compile_modes, moved_bytes
from tests.support.small_models import net

WIDE = 512


def model(folder: Path) -> Path:
    """Two linear layers over rows, and a cache that they are put behind, which many rows want elsewhere than one."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["h"], name="up"), helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "down"], ["y"], name="down"),
        helper.make_node("Concat", ["past", "y"], ["present"], name="behind", axis=0),
        helper.make_node("ReduceSum", ["present", "first"], ["all"], name="all", keepdims=1),
    ]  # fmt: skip
    weights = {
        "up": rng.standard_normal((WIDE, 4 * WIDE)).astype(np.float32), "first": np.array([0], np.int64),
        "down": rng.standard_normal((4 * WIDE, WIDE)).astype(np.float32),
    }  # fmt: skip
    ins = {"x": (T.FLOAT, ["rows", WIDE]), "past": (T.FLOAT, [64, WIDE])}
    onnx.save(net(nodes, ins, {"y": T.FLOAT, "present": T.FLOAT, "all": T.FLOAT}, weights), folder / "m.onnx")
    return folder / "m.onnx"


def options(path: Path, rows: int) -> pipeline.Options:
    return pipeline.Options(model=path, shapes={"rows": rows}, mesh=parse_mesh("4"), topology="h100", stages="1")


def test_both_modes_hold_what_they_share_in_one_way(tmp_path):
    path = model(tmp_path)
    modes = [options(path, 4096), options(path, 1)]
    found = compile_modes(modes, (1.0, 64.0), {"past": "present"})
    graph, programs = found.alone[0].plan.graph, [c.build.program for c in found.compiled]
    assert moved_bytes(graph, [p.program for p in found.alone]) > 0, "alone they want the cache elsewhere"
    assert moved_bytes(graph, programs) == 0
    assert {"up", "down", "past"} <= found.placement.keys()
    seconds = [c.build.report["objective_s"] for c in found.compiled]
    assert all(s >= 0.999999 * p.bound for s, p in zip(seconds, found.alone, strict=True))
    assert seconds[0] + 64 * seconds[1] == min(a + 64 * b for a, b in found.tried)


def test_modes_of_two_models_are_refused(tmp_path):
    path = model(tmp_path)
    other = tmp_path / "other.onnx"
    other.write_bytes(path.read_bytes())
    with pytest.raises(TapestryError, match="modes are of one model"):
        compile_modes([options(path, 8), options(other, 1)], (1.0, 1.0))
