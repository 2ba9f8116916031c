"""`bench gpu` goes on behind a row that hangs, and leaves nothing running."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.speed import gpu
from tests.support.paths import ROOT


def options(tmp_path: Path, **more: object) -> argparse.Namespace:
    given = {"sections": ["gemm"], "budget": 60.0, "tiny": True, "tune": 0.0, "output": tmp_path / "gpu.json"}
    return argparse.Namespace(**{**given, **more})


@pytest.mark.slow
def test_a_row_that_hangs_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SECTION", "tests.bench.test_gpu_bench")
    monkeypatch.setattr(gpu, "IDLE", 4.0)
    found = {r["case"]: r["passed"] for r in gpu.run(options(tmp_path))}
    assert found == {"a": True, "hangs": False, "b": True, "dies": False, "c": True}
    assert '"complete"' in (tmp_path / "gpu.json").read_text()


def test_what_a_section_started_ends_with_it(tmp_path: Path) -> None:
    mark = f"left_behind_{time.time_ns()}"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99) # {mark}']); time.sleep(99)"
    status = gpu.child([sys.executable, "-c", code], True, tmp_path / "rows", 30.0, 2.0)
    assert status == 125
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert mark not in listed
    assert gpu.child([sys.executable, "-c", "raise SystemExit(3)"], True, tmp_path / "rows", 30.0, 20.0) == 3
    assert gpu.child([sys.executable, "-c", "import time; time.sleep(99)"], True, tmp_path / "rows", 0.5, 20.0) == 124


def section() -> None:
    """Stands for `gpu_section`: five rows, of which one hangs and one ends its process."""
    rows = gpu.Rows(sys.argv[1], Path(sys.argv[3]), float(sys.argv[4]))
    work = {"hangs": lambda: time.sleep(99), "dies": lambda: sys.exit(3)}
    for case in ("a", "hangs", "b", "dies", "c"):
        rows.each(case, work.get(case, lambda: {"passed": True}))


if __name__ == "__main__":
    assert Path.cwd() == ROOT
    section()
