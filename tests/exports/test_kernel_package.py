"""A build's Triton kernels as a package of custom operators: its own test passes where there is no Tapestry, and can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tapestry
from tapestry.errors import TapestryError
from tapestry.tools.exports import formats

GRAPH = """
graph mixed
input x: bf16[6, 32]
input w: bf16[32, 20]
input i: i64[5]
h: bf16[6, 20] = op [m: 6, n: 20 | k: 32 sum]
  reads x[m, k], w[k, n]
  body cast(x, f32) * cast(w, f32)
  then cast(max(acc0, 0.0), bf16)
s: f32[6], t: f32[6] = op [m: 6 | n: 20 softsum]
  reads h[m, n]
  body cast(h, f32), 1.0, cast(h, f32)
  then acc2 / acc1, acc0
g: bf16[5, 20] = op [r: 5, n: 20 | m: 6 sum]
  reads i[r], h[m, n]
  body where(eq(i, index(m)), h, bf16(0.0))
output s, t, g
"""
ALONE = """
import runpy, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tapestry":
            raise ImportError(name)

sys.meta_path.insert(0, Refused())
sys.path.insert(0, "")
runpy.run_module("mixed.test_kernels", run_name="__main__")
"""


def alone(folder: Path) -> subprocess.CompletedProcess[str]:
    """The package's own test in a process that cannot import Tapestry."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ""}
    return subprocess.run(
        [sys.executable, "-c", ALONE], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cut along the reduction of the softmax, so that there are kernels of its states and of what is done behind them."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "mixed.tap").write_text(GRAPH)
    options = {"target": "triton:sm90", "topology": "h100", "devices": 2, "pins": "s:n=2@d0"}
    tapestry.compile(folder / "mixed.tap", **options).save(folder / "mixed.plan")
    return folder / "mixed.plan"


def test_the_package_runs_without_tapestry(build: Path, tmp_path: Path) -> None:
    done = formats.export(build, "kernels", tmp_path / "mixed")
    assert done["cases"] == len(done["kernels"]) >= 4 and not done["without"]
    assert {"dot", "gather"} <= {k["form"] for k in done["kernels"]}
    ran = alone(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert f"{done['cases']} operators, as stored" in ran.stdout


def test_kernels_may_have_the_names_that_the_package_uses(tmp_path: Path) -> None:
    """Those that it imports, its modules, and what torch's namespaces of operators have themselves."""
    names = [
        "operator",
        "corrected",
        "Pass",
        "Kernel",
        "Buffer",
        "source",
        "sources",
        "OPERATORS",
        "name",
        "float",
        "test_kernels",
    ]
    ops = "".join(
        f"{n}: f32[3, {k + 1}] = op [m: 3, n: {k + 1}] reads x{k}[m, n] body neg(x{k})\n" for k, n in enumerate(names)
    )
    inputs = "".join(f"input x{k}: f32[3, {k + 1}]\n" for k in range(len(names)))
    (tmp_path / "g.tap").write_text(f"graph g\n{inputs}{ops}output {', '.join(names)}\n")
    tapestry.compile(tmp_path / "g.tap", target="triton:sm90", topology="h100", devices=1).save(tmp_path / "g.plan")
    done = formats.export(tmp_path / "g.plan", "kernels", tmp_path / "mixed")
    ran = alone(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert done["cases"] == len(names) and f"{len(names)} operators, as stored" in ran.stdout


@pytest.mark.slow
def test_a_kernel_that_is_wrong_fails_the_packages_test(build: Path, tmp_path: Path) -> None:
    formats.export(build, "kernels", tmp_path / "mixed")
    source = next(p for p in (tmp_path / "mixed" / "sources").iterdir() if "tl.dot" in p.read_text())
    source.write_text(source.read_text().replace("tl.store(", "tl.store(1 + ", 1))
    assert "AssertionError" in alone(tmp_path).stderr


def test_what_cannot_be_exported(build: Path, tmp_path: Path) -> None:
    with pytest.raises(TapestryError, match="no name of a Python package"):
        formats.export(build, "kernels", tmp_path / "my-kernels")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    with pytest.raises(TapestryError, match="mine"):
        formats.export(build, "kernels", tmp_path / "mine")
    tapestry.compile(build.parent / "mixed.tap").save(tmp_path / "cpu.plan")
    with pytest.raises(TapestryError, match="no Triton kernels"):
        formats.export(tmp_path / "cpu.plan", "kernels", tmp_path / "mixed")
