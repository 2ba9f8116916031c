"""Simplifications left out where the plan without them costs less on several devices."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import tapestry
from tapestry.ir.graph import Block
from tapestry.ir.syntax.printer import to_text
from tapestry.plan import search_passes
from tapestry.sharding.export_sharding import export
from tests.support.lifting import build, node

ROWS, WIDTH = 512, 256


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A layer norm before a product: fused, each device would normalise what it multiplies."""
    ones = np.ones(WIDTH, np.float32)
    weights = {"w": ones, "b": ones, "m": np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)}
    nodes = [node("LayerNormalization", "x w b", "n"), node("MatMul", "n m", "y")]
    onnx.save(build(nodes, {"x": np.zeros((ROWS, WIDTH), np.float32)}, ["y"], weights), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def norms(made: tapestry.Compiled) -> list[str | None]:
    """Monoids of the graph planned."""
    return [op.monoid for op in made.build.plan.graph.ops if isinstance(op, Block)]


def test_the_cheaper_form_is_taken_and_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tapestry.compile(model, mesh="4", topology="cpu")
    assert found.report["moves"] == ["without@fuse_rows"] and norms(found) == ["moments", None, "sum"]
    found.save(tmp_path / "b")
    assert "rewritten by without@fuse_rows" in found.explain()
    again = tapestry.compile(model, mesh="4", topology="cpu", resume=tmp_path / "b")
    assert again.report["moves"] == found.report["moves"]
    assert to_text(again.build.plan.graph) == to_text(found.build.plan.graph)
    export(found.build, tmp_path / "out.onnx")
    read = tapestry.compile(tmp_path / "out.onnx", topology="cpu")
    assert read.report["moves"] == found.report["moves"] and norms(read) == norms(found)
    monkeypatch.setattr(search_passes, "OTHERS", 0.0)
    monkeypatch.setattr(search_passes, "LEAST", 0.0)
    fused = tapestry.compile(model, mesh="4", topology="cpu")
    assert fused.report["moves"] == [] and norms(fused) == ["moments", "sum"]
    assert found.report["objective_s"] < search_passes.WORTH * fused.report["objective_s"]
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)
    np.testing.assert_allclose(found.run({"x": x})["y"], fused.run({"x": x})["y"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mesh", ["1", "4"])
def test_the_simplified_graph_where_it_is_no_dearer(model: Path, mesh: str) -> None:
    assert "without@fuse_rows" not in tapestry.compile(model, mesh=mesh, topology="h100").report["moves"]
