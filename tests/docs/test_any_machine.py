"""Pages print the same on machines of which ``--topology auto`` says very different things."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tapestry import flags
from tapestry.runtime.calibration.automatic import place
from tests.docs.console import commands, normal, replay
from tests.docs.pages import Page, pages

MACHINES: dict[str, dict[str, object]] = {
    "one core": {  # several devices only wait for each other
        "device": {"memory": "4GiB", "bandwidth": 5e9, "launch": 2e-4, "vector": 5e9, "flops": {"f32": 1e10}},
        "levels": [{"alpha": 2e-3, "beta": 1e-8}], "overlap": False, "margin": 0.25,
    },
    "workstation": {
        "device": {"memory": "32GiB", "bandwidth": 2.9e10, "launch": 4e-6, "vector": 7e10, "flops": {"f32": 2.5e11}},
        "levels": [{"alpha": 2e-4, "beta": 4e-10}], "overlap": False, "margin": 0.1,
    },
    "supercomputer": {  # messages cost nothing
        "device": {"memory": "1TiB", "bandwidth": 1e12, "launch": 1e-8, "vector": 1e11, "flops": {"f32": 1e12}},
        "levels": [{"alpha": 1e-9, "beta": 1e-14}],
    },
}  # fmt: skip
"""What was measured of invented machines."""

COMPILES = re.compile(r"tapestry compile\b[^|&;]*|tapestry\.compile\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
ABOUT_AUTO = {"docs/seeds/slides.md"}  # links of the model are those of `auto`; its command prints nothing else of it
PLANNED = [p for p in pages() if any(b.runs and COMPILES.search(b.text) for b in p.blocks)]


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine as ``auto`` has measured it for any number of devices; what was compiled for this one stays."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for folder in (flags.cache_folder() / name for name in ("native", "machine-code")):
        folder.mkdir(parents=True, exist_ok=True)
        (cache / folder.name).symlink_to(folder)
    monkeypatch.setenv("TAPESTRY_CACHE", str(cache))
    for devices in range(1, 2 * (os.cpu_count() or 1) + 1):
        sure = {"when": 1e9, "rounds": 2, "agreement": 0.06, "others": 0.0}
        place(devices)[0].write_text(json.dumps({**MACHINES[request.param], "measured": sure}))
    return request.param


@pytest.mark.parametrize("machine", MACHINES, indirect=True)
@pytest.mark.parametrize("page", [pytest.param(p, id=p.name) for p in sorted(PLANNED, key=lambda p: p.name != "README.md")])
def test_a_page_shows_what_is_printed_on_any_machine(page: Page, machine: str, tmp_path: Path):
    for block, real in replay(page, tmp_path / "tapestry", lambda b: not b.alone):
        assert normal(real) == normal(block.text), f"{page.name}, {machine}"


@pytest.mark.parametrize("page", [pytest.param(p, id=p.name) for p in PLANNED if p.name not in ABOUT_AUTO])
def test_a_page_names_the_topology_of_what_it_compiles(page: Page):
    asked = [c.line for b in page.blocks if b.language == "console" for c in commands(b.text)]
    asked += [b.text for b in page.blocks if b.language == "python"]
    found = [m[0] for text in asked for m in COMPILES.finditer(text)]
    assert [c for c in found if "topology" not in c and "**how" not in c] == []


def test_the_machines_differ_in_what_they_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise the tests above would show nothing: README's layer, without ``--topology``, is another plan on each."""
    import onnx

    import tapestry
    from examples.layer import model

    onnx.save(model(), tmp_path / "layer.onnx")
    plans = set[str]()
    for name, figures in MACHINES.items():
        (tmp_path / "m.json").write_text(json.dumps(figures))
        monkeypatch.setenv("TAPESTRY_TOPOLOGY", str(tmp_path / "m.json"))
        report = tapestry.compile(tmp_path / "layer.onnx", mesh="dp=2,tp=4").report
        plans.add(json.dumps([report["objective_s"], report["transfers"]]))
        assert "193 µs" not in f"{1e6 * report['objective_s']:.0f} µs", name
    assert len(plans) == len(MACHINES)
