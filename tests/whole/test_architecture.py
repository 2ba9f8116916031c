"""The house rules that tools can check: import order, linters, sizes of files and functions, one reader of the environment,
one importer of islpy. The pages are tested in tests/docs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BIN = Path(sys.executable).parent
PACKAGE = sorted((ROOT / "tapestry").rglob("*.py"))
OURS = sorted(p for d in ("tapestry", "tests", "bench", "examples") for p in (ROOT / d).rglob("*.py"))

MAX_FILE, MAX_FUNCTION = 500, 50
LONG_FUNCTIONS: dict[str, int] = {}  # "path:function" -> lines, at most 60: each needs a reason beside it
FORBIDDEN_NAMES = ("utils.py", "util.py", "helper.py", "common.py", "misc.py", "manager.py")


def tool(*command: str) -> None:
    """Run a tool of the environment; fail with what it printed."""
    done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


def test_imports_go_one_way():
    tool("lint-imports", "--no-cache")


def test_ruff():
    tool("ruff", "check", "--no-cache", ".")


def test_pyright():
    tool("pyright", "--pythonpath", sys.executable)


def test_files_stay_short():
    sizes = {str(p.relative_to(ROOT)): p.read_text().count("\n") for p in OURS}
    assert {n: k for n, k in sizes.items() if k >= MAX_FILE} == {}


def functions() -> Iterator[tuple[str, int]]:
    for p in OURS:
        for f in ast.walk(ast.parse(p.read_text())):
            if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{p.relative_to(ROOT)}:{f.name}", (f.end_lineno or f.lineno) - f.lineno + 1


def test_functions_stay_short():
    long = {n: k for n, k in functions() if k >= MAX_FUNCTION}
    assert {n: k for n, k in long.items() if k > min(60, LONG_FUNCTIONS.get(n, 0))} == {}
    assert set(LONG_FUNCTIONS) <= set(long), "an exception that nothing needs any more"


def test_file_names_say_what_is_inside():
    assert [str(p) for p in OURS if p.name in FORBIDDEN_NAMES] == []


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


def reads_environment(tree: ast.AST) -> bool:
    """Whether code touches ``os.environ`` or ``os.getenv``, however they were imported."""
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    spelled = (ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    return bool(names & set(imported(tree)) or names & set(spelled))


@pytest.mark.parametrize("text", ["import os\nos.environ['A']", "from os import getenv", "import os\nx = os.getenv('A')"])
def test_reading_the_environment_is_seen(text):
    assert reads_environment(ast.parse(text))


def test_only_flags_reads_the_environment():
    found = [str(p.relative_to(ROOT)) for p in PACKAGE if reads_environment(ast.parse(p.read_text()))]
    assert found == ["tapestry/flags.py"]


def test_only_space_imports_islpy():
    found = [str(p.relative_to(ROOT)) for p in PACKAGE if any(m.split(".")[0] == "islpy" for m in imported(ast.parse(p.read_text())))]
    assert found == ["tapestry/ir/space.py"]


def test_every_pin_meets_what_the_package_asks_for():
    """constraints.txt has exact versions without local suffixes, for torch above all."""
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", x) for x in lines)
    assert any(x.startswith("torch==") for x in lines)
