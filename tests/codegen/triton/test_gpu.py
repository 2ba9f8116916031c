"""The GPU runtime: checks of ``gpu_checks.py`` in the interpreter here, and on a GPU where there is one (``-m gpu``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.support.paths import ROOT
from tests.support.small_models import MODELS

WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def process(*args: str | Path, interpret: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
    plain = (
        {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        | env
        | ({"TRITON_INTERPRET": "1"} if interpret else {})
    )
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True, env=plain, cwd=ROOT, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ["models", "streamed", "library", "tune", "rng", "merges", "host", "once", "forms"])
def test_check(name: str, where: str) -> None:
    done = process("-m", "tests.support.programs.gpu_checks", name, where)
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    onnx.save(MODELS["opaques"](), folder / "m.onnx")
    done = process(
        "-m", "tapestry", "compile", folder / "m.onnx", "-o", folder / "b", "--devices", "2", "--target", "triton:sm90"
    )
    assert done.returncode == 0, done.stderr
    return folder / "b"


@pytest.mark.slow
def test_without_a_gpu_there_is_a_message(build: Path) -> None:
    done = process("-m", "tapestry", "run", build, "--json", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "there is none that torch can use" in done.stderr and "TRITON_INTERPRET=1" in json.loads(done.stdout)["hint"]


@pytest.mark.slow
def test_run_says_where_and_what_is_not_captured(build: Path) -> None:
    done = process("-m", "tapestry", "run", build, "--check", "--json", interpret=True)
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["passed"], done.stderr
    gpu = document["gpu"]
    assert gpu["device"] == "Triton's interpreter" and gpu["graphs"] == 0 and len(gpu["arena_bytes"]) == 2
    assert gpu["calls"] > sum(gpu["not_captured"].values()) > 0 and all("no affine structure" in r for r in gpu["not_captured"])
    text = process("-m", "tapestry", "run", build, interpret=True).stdout
    assert "not captured" in text


@pytest.mark.slow
def test_tuning_without_a_gpu_is_refused(build: Path) -> None:
    done = process("-m", "tapestry", "tune", build, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "there is none that torch can use" in done.stderr and "Traceback" not in done.stderr
    done = process("-m", "tapestry", "tune", build, interpret=True)
    assert done.returncode == 2 and "the interpreter's times say nothing" in done.stderr
