"""Mistakes that people make, each with what it says."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

import tapestry
from tapestry.cli.entry import main
from tapestry.errors import TapestryError
from tapestry.ir.plan import MeshAxis
from tests.support.small_models import save


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command says that is refused."""
    try:
        status = main([str(w) for w in words])
    except SystemExit as e:
        status = int(e.code or 0)
    assert status == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes") / "b"
    tapestry.compile(save("mlp"), devices=2).save(folder)
    return folder


def test_a_place_that_is_taken_is_said_before_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    start = time.process_time()
    assert "was not written by this command" in said(capsys, "compile", "there is no such model.onnx", "-o", tmp_path)
    assert time.process_time() - start < 2 and (tmp_path / "notes.txt").read_text() == "mine"


def test_outputs_do_not_go_into_a_build(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (build, build / "out", build / ".." / build.name / "out"):
        assert "a folder beside it" in said(capsys, "run", build, "--output", place)
        assert "a folder beside it" in said(capsys, "shard-weights", build, "-o", place)
    assert main(["verify", str(build), "-q"]) == 0


def test_a_name_that_is_nearly_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tapestry.compile(save("mlp"), devices=1).build.model
    said_so = said(capsys, "compile", model, "-o", tmp_path / "b", "--shape", "xx=4x4")
    assert "unknown name in --shape" in said_so and "--shape x=4x4" in said_so
    assert "unrecognized arguments: --device" in said(capsys, "compile", model, "-o", tmp_path / "b", "--device", "2")
    assert "a similar command exists: compile" in said(capsys, "complie", model)


def test_a_model_that_was_moved(build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(save("mlp").read_bytes())
    tapestry.compile(model, devices=1).save(tmp_path / "b")
    model.rename(tmp_path / "elsewhere.onnx")
    assert "put it back, or compile it again" in said(capsys, "run", tmp_path / "b")


def test_a_terminal_without_our_letters(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("ascii", "latin-1", "cp1252"):
        out = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding, errors="strict"))
        for command in ("explain", "run"):
            assert main([command, str(build)]) == 0
        sys.stdout.flush()
        assert b"ran in" in out.getvalue() or command == "explain"


def test_a_run_that_compares_nothing_has_not_passed(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(build)]) == 0
    plain = capsys.readouterr().out
    assert "ran in" in plain and "passed" not in plain and "rel err" not in plain
    assert main(["run", str(build), "--check"]) == 0
    checked = capsys.readouterr().out
    assert "passed in" in checked and "rel err" in checked


def test_arguments_from_python() -> None:
    model = save("mlp")
    for mesh in ((1, 2), [1, 2], "1x2", {"dp": 1, "tp": 2}, (MeshAxis("dp", 1), MeshAxis("tp", 2))):
        assert [a.size for a in tapestry.compile(model, mesh=mesh).build.plan.mesh] == [1, 2]
    assert tapestry.compile(model, devices=2, memory=1 << 30).build.memory == 1 << 30
    pinned = tapestry.compile(model, mesh={"tp": 2}).build.plan.graph.ops[0]
    one = tapestry.compile(model, mesh={"tp": 2}, pins=f"{pinned.source[-1]}:{pinned.dims[0].name}=2@tp")
    assert any(s.dims[0] == pinned.dims[0].name for s in one.build.plan.strategies)
    for wrong in ("4", 2.0, True, 0):
        with pytest.raises(TapestryError, match="devices"):
            tapestry.compile(model, devices=wrong)  # type: ignore[arg-type]
