"""Calibration measures sane numbers and writes a file that plans with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tapestry.cli import main
from tapestry.errors import TapestryError
from tapestry.plan.topology import parse_mesh, topology
from tapestry.runtime import calibrate


def test_a_measured_machine_is_a_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "REPEATS", 3)
    monkeypatch.setattr(calibrate, "CELLS", 1 << 20)
    assert main(["calibrate", "-o", str(tmp_path / "here.json"), "--threads", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = topology(parse_mesh("2x2"), str(tmp_path / "here.json"))
    assert document["measured"]["threads"] == 1 and len(found.links) == 2
    assert found.device.rate("f32") > found.device.vector > 1e6  # a matrix product is faster per FLOP than exp
    assert 1e6 < found.device.bandwidth < 1e13 and 1e-8 < found.device.launch < 1e-2
    assert 1e-13 < found.links[0].beta < 1e-6


def test_nonsense_is_not_written(tmp_path: Path) -> None:
    document = {"device": {"memory": 1, "bandwidth": 0, "flops": {"other": 1.0}}, "levels": [{"alpha": 0, "beta": 0}]}
    with pytest.raises(TapestryError, match="rates must be positive"):
        calibrate.write(tmp_path / "bad.json", document)
    assert list(tmp_path.iterdir()) == []
