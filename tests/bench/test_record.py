"""What results say of where and when they were measured, and how a benchmark ends that breaks off."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as bench_main
from bench.support import record


def test_a_commit_says_what_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=tmp_path, check=True, capture_output=True
        )

    monkeypatch.setattr(record, "ROOT", tmp_path)
    commit = record.commit.__wrapped__
    assert commit() == ""
    for name in ("tapestry/plan/a.py", "bench/results/b.json", "docs/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    assert re.fullmatch("[0-9a-f]{8,}", commit())
    for name in ("bench/results/b.json", "docs/c.md"):
        (tmp_path / name).write_text("2\n")
    assert not commit().endswith("+changes")
    (tmp_path / "tapestry/plan/new.py").write_text("2\n")
    assert commit().endswith("+changes")


def test_rows_that_are_kept_say_at_which_commit_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    old = {"commit": "aaaa", "date": "2025-01-01"}
    assert record.read("clock") == []
    (tmp_path / "clock.json").write_text(json.dumps({**old, "rows": [{"n": 1}, {"n": 2}]}))
    record.write("clock", record.merged("clock", [{"n": 2}, {"n": 3}], ["n"]))
    assert record.read_more("clock", "rows", []) == [{"measured": old, "n": 1}, {"n": 2}, {"n": 3}]
    record.write("clock", record.read("clock"))  # of this commit, but for the first
    assert [r.get("measured") for r in record.read_more("clock", "rows", [])] == [old, None, None]


@pytest.mark.parametrize(("body", "status"), [("1 / 0", 3), ("raise SystemExit('why')", 3), ("raise SystemExit(1)", 1)])
def test_a_benchmark_that_breaks_off_has_a_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: int
):
    (tmp_path / "breaks_off.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bench_main, "benchmarks", lambda: {"breaks_off": "breaks_off"})
    monkeypatch.setattr(sys, "argv", ["bench", "breaks_off"])
    with pytest.raises(SystemExit) as e:
        bench_main.main()
    assert e.value.code == status
