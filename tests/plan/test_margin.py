"""One device is kept to where more are predicted to be faster by no more than predictions are off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tapestry
from tapestry.errors import TapestryError
from tests.support.small_models import save


def planned(path: Path, margin: float) -> tapestry.Compiled:
    """Two layers on two devices that are somewhat faster together than one alone."""
    device = {"memory": 1 << 30, "bandwidth": 1e10, "flops": {"f32": 1e10, "other": 1e10}, "launch": 1e-6}
    path.write_text(
        json.dumps({"device": device, "levels": [{"alpha": 3e-7, "beta": 1e-11}], "overlap": False, "margin": margin})
    )
    return tapestry.compile(save("mlp"), devices=2, topology=str(path))


def test_a_gain_within_the_margin_is_none(tmp_path: Path) -> None:
    sure = planned(tmp_path / "sure.json", 0.0)
    one = sure.report["one_device"]["objective_s"]
    gain = 1 - sure.report["objective_s"] / one
    assert 0.02 < gain < 0.6
    below, above = planned(tmp_path / "below.json", gain * 0.9), planned(tmp_path / "above.json", gain * 1.1)
    assert not below.build.plan.stages and below.report["objective_s"] == sure.report["objective_s"]
    assert above.build.plan.stages and above.report["objective_s"] == one
    assert above.report["lower_bound_s"] <= sure.report["objective_s"] and above.report["gap"] >= gain * 0.99


@pytest.mark.parametrize("margin", [-0.1, 1.5, "much", float("nan")])
def test_margins_that_are_none(tmp_path: Path, margin: object) -> None:
    with pytest.raises(TapestryError, match="not a topology"):
        planned(tmp_path / "bad.json", margin)  # type: ignore[arg-type]
