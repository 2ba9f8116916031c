"""``tapestry doctor``: everything that can be said before anything is compiled."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tapestry.lift.examine import examine
from tapestry.viz.doctor import dump_document, dump_text
from tests.support.command_line import run

F = TensorProto.FLOAT
info, N = helper.make_tensor_value_info, helper.make_node


def save(folder, nodes, ins, outs, consts=(), opsets=(("", 18),)):
    graph = helper.make_graph(nodes, "g", ins, outs, [numpy_helper.from_array(a, n) for n, a in consts])
    path = folder / "m.onnx"
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets]), path)
    return path


def found(path, **shapes):
    return dump_document(path, examine(path, shapes))


def test_what_is_splittable_opaque_and_unbound(tmp_path):
    path = save(
        tmp_path, [N("MatMul", ["x", "w"], ["h"], name="proj"), N("NonZero", ["h"], ["at"], name="find")],
        [info("x", F, ["batch", 6])], [info("at", TensorProto.INT64, [2, None]), info("h", F, None)], [("w", np.ones((6, 9), np.float32))],
    )  # fmt: skip
    d = found(path)
    (unbound,) = d["unbound"]
    assert unbound == {"symbol": "batch", "where": ["x[0]"], "assumed": 8, "bind": "--shape batch=8"}
    rows = {o["output"]: o for o in d["operations"]}
    assert rows["h"]["dims"] == [
        {"name": "i", "size": 8, "kind": "map"}, {"name": "n", "size": 9, "kind": "map"}, {"name": "m", "size": 6, "kind": "monoid"},
    ]  # fmt: skip
    assert rows["at"]["class"] == "opaque" and rows["at"]["dims"] == [] and "run time" in rows["at"]["why"]
    assert d["host_values"] == {"at": "int64[2, ?]"} and d["unsupported"] == []
    assert "find (NonZero)" in dump_text(d) and "i:8, n:9, m:6 (monoid) – proj" in dump_text(d)
    bound = found(path, batch=3)
    assert bound["unbound"] == [] and bound["bound"] == {"batch": 3}


def test_every_problem_is_listed_with_what_to_do(tmp_path):
    path = save(
        tmp_path, [N("Magic", ["x"], ["a"], name="first"), N("Other", ["a"], ["b"], name="second", domain="acme"), N("Relu", ["b"], ["y"])],
        [info("x", F, [2])], [info("y", F, [2])],
    )  # fmt: skip
    d = found(path)
    assert [p["where"] for p in d["unsupported"]] == ["node 'first' (Magic)", "node 'second' (Other)"]
    assert all(p["what"] and p["why"] and p["hint"] for p in d["unsupported"])
    status, out, _ = run("doctor", path)
    assert status == 1 and out.count("unsupported:") == 2
    assert run("doctor", tmp_path / "none.onnx")[0] == 2


def test_operators_that_no_evaluator_has(tmp_path):
    path = save(
        tmp_path, [N("Mul", ["x", "x"], ["y"]), N("Gradient", ["x"], ["d"], name="grad", domain="ai.onnx.preview.training", xs=["x"], y="y")],
        [info("x", F, [2])], [info("y", F, [2]), info("d", F, [2])], (), (("", 12), ("ai.onnx.preview.training", 1)),
    )  # fmt: skip
    (problem,) = found(path)["unsupported"]
    assert problem["where"] == "node 'grad' (Gradient)" and "no evaluator" in problem["what"]


def test_missing_data_and_contradictions_are_problems_too(tmp_path):
    path = save(
        tmp_path,
        [N("Add", ["x", "w"], ["y"], name="add")],
        [info("x", F, [2, 5])],
        [info("y", F, [2, 5])],
        [("w", np.ones((3, 5), np.float32))],
    )
    (problem,) = found(path)["unsupported"]
    assert "add" in problem["where"]
    big = save(
        tmp_path, [N("Add", ["x", "w"], ["y"])], [info("x", F, [500])], [info("y", F, [500])], [("w", np.ones(500, np.float32))]
    )
    onnx.save(onnx.load(big), big, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    (problem,) = found(big)["unsupported"]
    assert "w.bin" in problem["why"]


def test_missing_data_is_one_problem_and_none_without_weights(tmp_path, capsys):
    weights = [(f"w{k}", np.ones(500, np.float32)) for k in range(9)]
    nodes = [N("Add", ["x" if k == 0 else f"a{k}", f"w{k}"], [f"a{k + 1}"]) for k in range(9)]
    path = save(tmp_path, nodes, [info("x", F, [500])], [info("a9", F, [500])], weights)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    (problem,) = found(path)["unsupported"]
    assert problem["where"] == "initializer 'w0' and 8 more" and "--no-weights" in problem["hint"]
    assert run("doctor", path, "--no-weights")[0] == 0 and run("doctor", path)[0] == 1
