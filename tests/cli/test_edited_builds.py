"""Builds that somebody has edited and hashed anew: refused in words, or of the same values; see `tests.fuzz.builds`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tapestry
from tests.fuzz.builds import seal
from tests.support.command_line import run
from tests.support.paths import ROOT
from tests.support.small_models import save


@pytest.mark.parametrize(
    "words",
    [["--count", "12", "--models", "attention"], pytest.param([], marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_no_edit_ends_the_process_or_gives_other_values(words: list[str]):
    """In a process of its own, which forks one for each edit before it has threads."""
    done = subprocess.run([sys.executable, "-m", "tests.fuzz.builds", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_box_beyond_its_buffer_is_refused_before_a_kernel_runs(tmp_path):
    tapestry.compile(str(save("conv_chain")), devices=2, topology="cpu").save(tmp_path / "b")
    document = json.loads((tmp_path / "b" / "plan.json").read_text())
    box = next(b for b in document["program"]["boxes"] if b and b[0][1] > 1)
    box[0][0] += 1000
    (tmp_path / "b" / "plan.json").write_text(json.dumps(document))
    seal(tmp_path / "b")
    status, _, error = run("run", tmp_path / "b")
    assert status in (1, 2) and error
    with pytest.raises(tapestry.TapestryError):
        tapestry.load(tmp_path / "b").run({})


def test_what_an_edited_report_makes_python_raise_is_said_of_the_build(tmp_path):
    tapestry.compile(str(save("mlp")), devices=2, topology="cpu").save(tmp_path / "b")
    document = json.loads((tmp_path / "b" / "plan.json").read_text())
    del document["report"]["objective_s"]
    (tmp_path / "b" / "plan.json").write_text(json.dumps(document))
    seal(tmp_path / "b")
    with pytest.raises(tapestry.TapestryError, match="cannot be used"):
        repr(tapestry.load(tmp_path / "b"))
