"""The notebooks of examples/ from top to bottom, and that they are kept without outputs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def code(notebook: Path) -> list[dict[str, Any]]:
    return [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]


def shown(value: object) -> str:
    """What a notebook shows of the last value of a cell."""
    made = getattr(value, "_repr_html_", None) or getattr(value, "_repr_svg_", None)
    return made() if made else repr(value)


def executed(cell: str, names: dict[str, Any], where: str) -> str:
    """A cell run as a notebook runs it; what it shows."""
    tree = ast.parse(cell, where)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, where, "exec"), names)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    return "" if value is None else shown(value)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TAPESTRY_TOPOLOGY")  # a reader has not set it
    names: dict[str, Any] = {"__name__": "notebook"}
    seen = [executed("".join(c["source"]), names, f"{notebook.name}, cell {k}") for k, c in enumerate(code(notebook))]
    assert sum(map(bool, seen)) >= 2  # it shows something


def test_notebooks_are_small_and_without_outputs() -> None:
    assert len(NOTEBOOKS) == 3
    for notebook in NOTEBOOKS:
        assert all(c["outputs"] == [] and c["execution_count"] is None for c in code(notebook)), notebook.name
        assert notebook.stat().st_size < 1 << 14, notebook.name
