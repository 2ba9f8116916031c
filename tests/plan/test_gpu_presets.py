"""GPU presets: the price of products by precision, alike in plans, kernels and texts; memory that a process has, and what plans
leave free of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tapestry
from tapestry.codegen.triton.task.chips import CHIPS
from tapestry.errors import TapestryError
from tapestry.plan.topology import from_data, parse_mesh, to_data, topology
from tapestry.plan.topology.presets import CHIP_OF, GPUS, GiB
from tests.support.paths import ROOT

ONE = parse_mesh("1")
PRODUCT = """graph mm
input x: f32[8192, 8192]
input w: f32[8192, 8192]
y: f32[8192, 8192] = op [i: 8192, n: 8192 | m: 8192 sum]
  reads x[i, m], w[m, n]
  body x * w
output y
"""
LOOSE = {"memory": "16GiB", "bandwidth": 1e12, "flops": {"f32": 1e14, "bf16": 2e14}}


@pytest.fixture
def product(tmp_path: Path) -> Path:
    (tmp_path / "mm.tap").write_text(PRODUCT)
    return tmp_path / "mm.tap"


def written(tmp_path: Path, **more: object) -> str:
    """A topology file."""
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"device": {**LOOSE, **more}, "levels": [{"alpha": 1e-6, "beta": 1e-10}]}))
    return str(path)


def kernels(build: Path, target: str) -> dict:
    """What `tapestry kernels` says, from a process that may compile: others run Triton's interpreter."""
    command = [
        sys.executable,
        "-m",
        "tapestry",
        "kernels",
        build,
        "-o",
        build.with_suffix(".kernels"),
        "--target",
        target,
        "--json",
        "-q",
    ]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["h100", "h200", "a100-pcie"])
def test_a_plan_costs_what_its_kernels_take_in_every_precision(product: Path, preset: str, tmp_path: Path) -> None:
    target, found = f"triton:{CHIP_OF[preset]}", dict[str, float]()
    for precision in ("ieee", "tf32x3", "tf32"):
        done = tapestry.compile(product, topology=preset, target=target, precision=precision)
        done.save(tmp_path / precision)
        table = kernels(tmp_path / precision, target)
        seconds = done.report["objective_s"]
        assert 1 <= seconds / table["model"]["roofline_s"] < 1.1, precision
        assert f"products of float32 in {precision}: " in done.explain()
        found[precision] = seconds
    assert found["ieee"] > 2 * found["tf32x3"] > 5 * found["tf32"]
    assert found["ieee"] > 2 * 8192**3 / (GPUS[preset].vector * 1.01)  # what float32 without matrix units takes


def test_one_table_has_the_rates_of_plans_and_kernels() -> None:
    for preset in ("h100", "h200", "a100-pcie"):
        device = topology(ONE, preset).device
        assert (device.flops, device.bandwidth) == (GPUS[preset].flops, GPUS[preset].bandwidth)
    for name, chip in CHIPS.items():
        assert any(chip.card is d and CHIP_OF[g] == name for g, d in GPUS.items()), name


def test_where_there_is_one_rate_precision_changes_nothing(tmp_path: Path) -> None:
    for source in ("cpu", "tpu", written(tmp_path)):
        assert topology(ONE, source, precision="tf32").device == topology(ONE, source).device
    own = {
        p: topology(ONE, written(tmp_path, flops={"f32": 1e13, "tf32": 9e13}), precision=p).device
        for p in ("ieee", "tf32x3", "tf32")
    }
    assert [d.rate("f32") for d in own.values()] == [1e13, 3e13, 9e13]


def test_classes_that_were_measured_follow_the_precision(tmp_path: Path) -> None:
    one = {"launch": 1e-6, "rate": 8e12, "bandwidth": 1e12}
    source = written(tmp_path, flops={"f32": 1e13, "bf16": 5e13, "tf32": 4e13}, classes={"contraction": one, "map": one})
    plain, fast = (topology(ONE, source, precision=p).device for p in ("ieee", "tf32"))
    assert fast.kernel("contraction", "f32").rate == 4 * plain.kernel("contraction", "f32").rate
    assert fast.kernel("contraction", "bf16").rate == plain.kernel("contraction", "bf16").rate
    assert fast.kernel("map", "f32") == plain.kernel("map", "f32")


def test_gpus_keep_some_memory_back() -> None:
    d = topology(ONE, "h100").device
    assert d.memory + d.reserve == 78 * GiB and d.reserve == int(78 * GiB * 0.08)
    for preset, gib in (("h100", 79.2), ("h200", 139.8), ("a100-pcie", 39.5)):  # as torch shows them
        assert GPUS[preset].memory < gib * GiB
    assert topology(ONE, "cpu").device.reserve == 0
    assert topology(ONE, "h100", 16 * GiB).device.memory == 16 * GiB  # the user's word
    assert topology(ONE, "h100", 16 * GiB, reserve="25%").device.memory == 12 * GiB
    assert topology(ONE, "h100", reserve="2GiB").device.memory == 76 * GiB
    for none in ("0", "0%", "0GiB", "0.0%"):
        assert topology(ONE, "h100", reserve=none).device.memory == 78 * GiB, none
    assert topology(ONE, "cpu", reserve="50%").device.memory == 8 * GiB
    kept = topology(parse_mesh("2"), "h100")
    assert from_data(to_data(kept)) == kept


@pytest.mark.parametrize("reserve", ["100%", "80GiB", "nothing", "-1", "8 %%"])
def test_reserves_that_are_none_are_refused(reserve: str) -> None:
    with pytest.raises(TapestryError):
        topology(ONE, "h100", reserve=reserve)


def test_plans_say_and_keep_the_reserve(product: Path) -> None:
    done = tapestry.compile(product, topology="h100")
    assert "memory 78.00 GiB a device, 6.24 GiB kept back" in done.explain()
    assert done.report["memory_reserve_bytes"] == int(78 * GiB * 0.08)
    assert done.report["memory_bytes"] + done.report["memory_reserve_bytes"] == 78 * GiB
    assert "kept back" not in tapestry.compile(product, topology="h100", memory_reserve=0).explain()
    need = max(done.report["peak_bytes"])
    with pytest.raises(TapestryError, match=r"fit|many"):  # of memory for exactly the plan, a part is left free
        tapestry.compile(product, topology="h100", memory=need, memory_reserve="50%", time_limit=1)
