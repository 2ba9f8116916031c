"""A plan's graph as IR text compiles again, with the weights that the model has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tapestry
from tapestry.errors import TapestryError
from tapestry.tools.exports import ir_text
from tests.support.command_line import document, run
from tests.support.small_models import f32

N = helper.make_node


def weights() -> list[TensorProto]:
    """Raw and typed, of four types, one packed in half bytes."""
    listed = helper.make_tensor("listed", TensorProto.FLOAT, [8], f32(8))
    quarter = helper.make_tensor("quarter", TensorProto.INT4, [8], np.arange(-4, 4))
    half, rows = f32(32, 8).astype(np.float16), np.array([3, 1, 2, 0])
    given = {"w": f32(16, 32), "half": half, "rows": rows, "scale": np.float32(0.5)}
    return [listed, quarter, *(numpy_helper.from_array(np.asarray(a), n) for n, a in given.items())]


def model() -> onnx.ModelProto:
    nodes = [
        N("MatMul", ["x", "w"], ["a"]), N("Cast", ["a"], ["b"], to=TensorProto.FLOAT16), N("MatMul", ["b", "half"], ["c"]),
        N("Gather", ["c", "rows"], ["d"], axis=0), N("Cast", ["d"], ["e"], to=TensorProto.FLOAT), N("Add", ["e", "listed"], ["f"]),
        N("DequantizeLinear", ["quarter", "scale"], ["g"]), N("Mul", ["f", "g"], ["y"]),
    ]  # fmt: skip
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [4, 16]), ("y", [4, 8]))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def exported(folder: Path, *, apart: bool) -> Path:
    """The build of a model whose weights are in its file, or in one beside it."""
    folder.mkdir()
    more = {"save_as_external_data": True, "location": "net.bin", "size_threshold": 0} if apart else {}
    onnx.save(model(), folder / "net.onnx", **more)
    document("compile", folder / "net.onnx", "-o", folder / "b", "--devices", "2")
    return folder / "b"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("apart", [False, True])
def test_text_compiles_to_the_same_values(tmp_path: Path, apart: bool) -> None:
    """Beside the model; and elsewhere, once the files with weights are copied."""
    build = exported(tmp_path / "m", apart=apart)
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)}
    expected = tapestry.load(build).run(feeds)["y"]
    (tmp_path / "far").mkdir()
    there = document("export", build, "--format", "ir", "-o", tmp_path / "far" / "g.tap")
    assert there["absent"] and set(there["absent"]) <= set(there["beside"])
    assert run("compile", tmp_path / "far" / "g.tap", "-o", tmp_path / "far" / "b")[0] == 2
    assert not document("export", build, "--format", "ir", "-o", tmp_path / "far" / "g.tap", "--copy-data")["absent"]
    assert not document("export", build, "--format", "ir", "-o", tmp_path / "m" / "g.tap")["absent"]
    for folder in (tmp_path / "m", tmp_path / "far"):
        document("compile", folder / "g.tap", "-o", folder / "again", "--devices", "2")
        assert document("verify", folder / "again")["passed"] and document("run", folder / "again", "--check")["passed"]
        np.testing.assert_array_equal(tapestry.load(folder / "again").run(feeds)["y"], expected)


def test_text_reads_nothing_outside_its_folder_and_no_other_values(tmp_path: Path) -> None:
    build = exported(tmp_path / "m", apart=False)
    (tmp_path / "m" / "in").mkdir()
    document("export", build, "--format", "ir", "-o", tmp_path / "m" / "g.tap")
    text = (tmp_path / "m" / "g.tap").read_text()
    (tmp_path / "m" / "in" / "g.tap").write_text(text.replace('"net.onnx"', '"../net.onnx"'))
    with pytest.raises(TapestryError, match="cannot read external data"):
        tapestry.compile(tmp_path / "m" / "in" / "g.tap")
    net = onnx.load(tmp_path / "m" / "net.onnx")
    net.graph.initializer[0].float_data[0] += 1
    onnx.save(net, tmp_path / "m" / "net.onnx")
    with pytest.raises(TapestryError, match=r"weight 'listed' is not what its hash says"):
        tapestry.compile(tmp_path / "m" / "g.tap")


def test_a_build_whose_weights_lead_elsewhere_copies_nothing(tmp_path: Path) -> None:
    build = exported(tmp_path / "m", apart=True)
    (tmp_path / "secret").write_bytes((tmp_path / "m" / "net.bin").read_bytes())
    given = tapestry.load(build).build
    (tmp_path / "far" / "in").mkdir(parents=True)
    for location in ("../secret", str(tmp_path / "secret"), "link"):
        (tmp_path / "m" / "link").unlink(missing_ok=True)
        (tmp_path / "m" / "link").symlink_to(tmp_path / "secret")
        moved = {t: replace(w, file=location) if w.file else w for t, w in given.plan.graph.weights.items()}
        forged = replace(given, plan=replace(given.plan, graph=replace(given.plan.graph, weights=moved)))
        with pytest.raises(TapestryError, match="cannot read external data"):
            ir_text.export_ir(forged, b"\0" * 4096, tmp_path / "far" / "in" / "g.tap", copy=True)
        assert not [p for p in (tmp_path / "far").rglob("*") if p.is_file()], location
