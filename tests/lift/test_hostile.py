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
from tests.support.paths import ROOT
from tests.support.small_models import save

SECONDS = 20.0  # of processor time per case; they take tenths (what waits for ever ends at the time limit of all)
HARMLESS = {  # what may succeed, since nothing that the command reads is changed: the good build's constants are empty,
    # verify and explain do not open the model, and weights inside the model are found by name
    "constants.bin_empty": {"verify", "run", "explain"}, "resigned_weights_above": {"verify", "run", "explain"},
    "resigned_model_elsewhere": {"verify", "explain"}, "resigned_model_endless": {"verify", "explain"},
}  # fmt: skip


def tried(kind: str, folder: Path) -> list[dict]:
    """Every case of a kind, in a process of limited memory."""
    argv = [sys.executable, "-m", "tests.support.faults.hostile_cases", kind, str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, env=env)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (rows[-1], done.stderr[-2000:])
    return [r for r in rows if "case" in r]


@pytest.mark.slow
def test_hostile_models(tmp_path):
    rows = tried("models", tmp_path)
    assert len(rows) >= 60
    for row in rows:
        ((status, err),) = row["results"]
        if row["case"].startswith("nonfinite") and status == 0:
            continue  # a number like any other, as far as it decides no shape
        assert status == 2 and err.startswith("tapestry compile: ") and "Traceback" not in err, row
        assert row["seconds"] < SECONDS and not row["fresh"], row


@pytest.mark.slow
def test_hostile_builds(tmp_path):
    tapestry.compile(save("attention"), devices=2).save(tmp_path / "good")
    assert (tmp_path / "good" / "constants.bin").read_bytes() == b""
    rows = tried("builds", tmp_path)
    assert len(rows) >= 35
    for row in rows:
        for command, (status, err) in zip(("verify", "run", "explain"), row["results"], strict=True):
            fine = status == 0 and command in HARMLESS.get(row["case"], ())
            assert "Traceback" not in err and (status in (1, 2) or fine), (command, row)
        assert row["case"] in HARMLESS or any(status for status, _ in row["results"])
        assert row["seconds"] < 3 * SECONDS and not row["fresh"], row


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
