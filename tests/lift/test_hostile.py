"""Hostile models and build directories: an error with a message, in bounded time and memory, and no file elsewhere."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tapestry
from tapestry.errors import BuildError, TapestryError, refusing
from tapestry.lift.normalize import inference
from tests.support.command_line import document, snapshot
from tests.support.faults.hostile_cases import BUILDS, LONG, MODELS
from tests.support.paths import ROOT
from tests.support.small_models import save

SECONDS = 20.0  # of processor time per case; they take tenths (what waits for ever ends at the time limit of all)
HARMLESS = {  # what may succeed, since nothing that the command reads is changed: the good build's constants are empty,
    # verify and explain do not open the model, and weights inside the model are found by name
    "constants.bin_empty": {"verify", "run", "explain"}, "resigned_weights_above": {"verify", "run", "explain"},
    "resigned_model_elsewhere": {"verify", "explain"}, "resigned_model_endless": {"verify", "explain"},
}  # fmt: skip


@pytest.fixture(scope="module", params=["quick", pytest.param("long", marks=pytest.mark.slow)])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Every case, in a process of limited memory, by its name."""
    folder = tmp_path_factory.mktemp("hostile")
    tapestry.compile(save("attention"), devices=2).save(folder / "good")
    assert (folder / "good" / "constants.bin").read_bytes() == b""
    argv = [sys.executable, "-m", "tests.support.faults.hostile_cases", str(folder), request.param]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, env=env)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (said[-1], done.stderr[-2000:])
    return {r["case"]: r for r in said if "case" in r}


def test_hostile_models(rows):
    assert len(MODELS) >= 60 and MODELS.keys() & rows.keys()
    for name in MODELS.keys() & rows.keys():
        row = rows[name]
        ((status, err),) = row["results"]
        if name.startswith("nonfinite") and status == 0:
            continue  # a number like any other, as far as it decides no shape
        assert status == 2 and err.startswith("tapestry compile: ") and "Traceback" not in err, row
        assert row["seconds"] < SECONDS and not row["fresh"], row


def test_hostile_builds(rows):
    assert len(BUILDS) >= 35 and BUILDS.keys() & rows.keys()
    for name in BUILDS.keys() & rows.keys():
        row = rows[name]
        for command, (status, err) in zip(("verify", "run", "explain"), row["results"], strict=True):
            fine = status == 0 and command in HARMLESS.get(name, ())
            assert "Traceback" not in err and (status in (1, 2) or fine), (command, row)
        assert name in HARMLESS or any(status for status, _ in row["results"])
        assert row["seconds"] < 3 * SECONDS and not row["fresh"], row


def test_every_hostile_case_is_quick_or_long(rows):
    assert rows.keys() in ((MODELS | BUILDS).keys() - LONG, LONG)


def replacing(folder: Path) -> list[str]:
    """The command that replaces the build."""
    return [
        sys.executable,
        "-m",
        "tapestry",
        "compile",
        str(save("conv_chain")),
        "-o",
        str(folder / "b"),
        "--mesh",
        "2x2",
        "-q",
    ]


def killed_at_a_random_moment(seed: int, folder: Path, took: float) -> None:
    """Kill a compile that replaces a build; what is there then is the old or the new one, whole."""
    rng = random.Random(seed)
    old = snapshot(folder / "b")
    child = subprocess.Popen(replacing(folder), cwd=ROOT)
    time.sleep(rng.uniform(0.5, 1.05) * took)
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)
    assert document("verify", folder / "b")["passed"]
    now = snapshot(folder / "b")
    assert now == old or json.loads(now["plan.json"])["model"].endswith("conv_chain.onnx")
    assert {p.name for p in folder.iterdir() if not p.name.startswith(".")} == {"b"}


def kills(count: int, folder: Path) -> None:
    """Kill ``count`` compiles, each at a moment of its own, the old build being another model's each time."""
    began = time.monotonic()
    subprocess.run(replacing(folder), cwd=ROOT, check=True, timeout=300)
    took = time.monotonic() - began
    for seed in range(count):
        tapestry.compile(save("mlp"), devices=2).save(folder / "b")
        killed_at_a_random_moment(seed, folder, took)


@pytest.mark.slow
def test_a_killed_compiler_leaves_a_whole_build(tmp_path):
    kills(4, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_compiler_killed_at_fifty_moments(tmp_path):
    kills(50, tmp_path)


def test_a_huge_certificate_is_not_read(tmp_path):
    """Without a limit on memory (there is one in the tests above) it would be read until none is left."""
    tapestry.compile(save("attention"), devices=2).save(tmp_path / "b")
    os.truncate(tmp_path / "b" / "certificate.json", 1 << 36)  # no bytes on the disk
    with pytest.raises(BuildError, match="sane size"):
        tapestry.load(tmp_path / "b")


def test_more_memory_than_there_is_is_no_fault_of_the_file():
    import torch

    with pytest.raises(MemoryError), refusing(BuildError, "the build cannot be used", "b", "compile it again"):
        torch.empty(1 << 55, dtype=torch.uint8)


def test_a_machine_without_room_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    model = save("mlp")
    monkeypatch.setattr(inference, "INFERRING", inference.Inferring())
    monkeypatch.setattr(subprocess, "Popen", none)
    with pytest.raises(TapestryError, match="no process could be started") as e:
        tapestry.compile(model)
    assert "Resource temporarily unavailable" in str(e.value)
