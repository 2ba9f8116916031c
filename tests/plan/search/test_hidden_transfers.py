"""Operations next to transfers run in parts, one of which travels while the next is computed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.viz.explain import schedule
from tests.support.command_line import document
from tests.support.small_models import N, f32, net

SIZE = 500  # odd parts too: 125 rows a device
LINKS = {
    "device": {"memory": "1GiB", "bandwidth": 1e12, "launch": 1e-6, "vector": 1e11, "flops": {"f32": 1e12, "other": 1e12}},
    "levels": [{"alpha": 1e-6, "beta": 1e-10}],
    "overlap": True,
}
PARTS = ["x:0=4@d0", "w:0=4@d0", "v:0=4@d0", "y:0=4@d0"]  # every device has a part of each weight


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two products, and links that take about as long as those."""
    at = tmp_path_factory.mktemp("hidden")
    nodes = [N("MatMul", ["x", "w"], ["h"], "up"), N("Relu", ["h"], ["r"], "r"), N("MatMul", ["r", "v"], ["y"], "down")]
    weights = {"w": f32(SIZE, SIZE), "v": f32(SIZE, SIZE)}
    onnx.save(net(nodes, {"x": (T.FLOAT, [SIZE, SIZE])}, {"y": T.FLOAT}, weights), at / "m.onnx")
    (at / "links.json").write_text(json.dumps(LINKS))
    return at


def planned(folder: Path, **more: object) -> tapestry.Compiled:
    """The plan for four devices."""
    return tapestry.compile(folder / "m.onnx", devices=4, topology=str(folder / "links.json"), layouts=PARTS, **more)


def test_transfers_hide_behind_kernels_and_values_stay(folder: Path) -> None:
    plain, split = planned(folder, without=["split_time"]), planned(folder)
    assert any(str(m).startswith("split_time@") for m in split.build.moves) and not plain.build.moves
    before, after = (float(schedule(p.build).exposed().max()) for p in (plain, split))
    assert after < before and split.report["objective_s"] < plain.report["objective_s"]
    assert split.report["waited_s"] == pytest.approx(before, rel=0.05)
    assert "splits in time" in split.report["bound_of"]
    x = np.random.default_rng(3).standard_normal((SIZE, SIZE)).astype(np.float32)
    np.testing.assert_allclose(split.run({"x": x})["y"], plain.run({"x": x})["y"], rtol=1e-4, atol=1e-3)


def test_nothing_is_split_where_transfers_and_kernels_take_turns(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "turns.json").write_text(json.dumps({**LINKS, "overlap": False}))
    plan = tapestry.compile(folder / "m.onnx", devices=4, topology=str(tmp_path / "turns.json"), layouts=PARTS)
    assert not plan.build.moves and not plan.report["waited_s"]


@pytest.mark.slow
def test_four_processes_give_the_same(folder: Path, tmp_path: Path) -> None:
    planned(folder).save(tmp_path / "build")
    found = document("run", tmp_path / "build", "--processes", "4", "--check")
    assert found["passed"] and found["outputs"]["y"]["rel_err"] < 1e-5
