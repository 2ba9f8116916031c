"""The same command gives the same plan; all forms of the graph and whole-graph plans compete, and the bound says of which."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tapestry
from tapestry.ir.plan import device_count
from tapestry.plan.solver.budget import SECOND, WORK, Budget, OutOfTime
from tapestry.viz import explain, tables
from tapestry.viz.format import duration
from tests.support.command_line import document, run
from tests.support.paths import ROOT
from tests.support.small_models import save

BUSY = "while True: pass"
FAR = {"alpha": 3e-2, "beta": 1e-9}  # a message takes longer than everything else
MACHINE = {"memory": 1 << 34, "flops": {"f32": 5e8}, "bandwidth": 1e9, "launch": 5e-6, "vector": 5e8}
ALONE = {"memory": 1 << 34, "flops": {"f32": 6e10}, "bandwidth": 1.5e10, "launch": 5e-7, "vector": 6e9}


def compiled(name: str, folder: Path, seed: int, *more: str) -> dict[str, object]:
    """One compilation in a process of its own, with a seed of Python's hashes."""
    command = [sys.executable, "-m", "tapestry", "compile", str(save(name)), "-o", str(folder / f"b{seed}"), "--json", *more]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def same_under_load(name: str, folder: Path, runs: int, *more: str) -> None:
    """Compilations on an idle machine and beside a busy process give one plan, after the same work."""
    found = [compiled(name, folder, 0, *more)]
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        found += [compiled(name, folder, seed, *more) for seed in range(1, runs)]
    finally:
        for p in busy:
            p.kill()
            p.wait()
    assert len({d["plan_sha256"] for d in found}) == 1
    assert len({json.dumps(d["search"]["work"]) for d in found}) == 1
    assert len({(d["objective_s"], d["lower_bound_s"]) for d in found}) == 1


@pytest.mark.slow
def test_a_busy_machine_gives_the_same_plan(tmp_path: Path) -> None:
    same_under_load("mlp", tmp_path, 2, "--mesh", "2x2", "--topology", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "conv_chain", "reductions", "mlp"])
def test_many_compilations_give_one_plan(name: str, tmp_path: Path) -> None:
    same_under_load(name, tmp_path, 6, "--mesh", "2x2", "--topology", "cpu", "--pareto")


def test_work_ends_a_budget_and_all_its_parts() -> None:
    whole = Budget.of()
    assert whole.left() == WORK and whole.deadline == float("inf")
    part = whole.share(0.5)
    part.spend(0.6 * WORK)
    assert part.over() and not whole.over() and abs(whole.left() - 0.4 * WORK) < 1
    assert whole.over(0.5 * WORK) and not whole.late()
    with pytest.raises(OutOfTime):
        part.check()
    assert part.grace(SECOND).left() == SECOND


def test_the_search_reads_no_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A clock that jumps by an hour at every look changes nothing, as long as nobody sets a time limit."""
    import time

    plain = document("compile", save("mlp"), "-o", tmp_path / "a", "--mesh", "2x2", "--topology", "cpu", "--pareto")
    now = iter(range(0, 1 << 40, 3600))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    again = document("compile", save("mlp"), "-o", tmp_path / "b", "--mesh", "2x2", "--topology", "cpu", "--pareto")
    assert plain["plan_sha256"] == again["plan_sha256"] and plain["search"]["work"] == again["search"]["work"]
    assert plain["pareto"] == again["pareto"]


def test_the_hash_is_of_the_plan(tmp_path: Path) -> None:
    one, other = (document("compile", save("mlp"), "-o", tmp_path / d, "--devices", d, "--topology", "cpu") for d in ("2", "3"))
    assert one["plan_sha256"] != other["plan_sha256"]


def test_the_forms_are_named_and_the_best_is_taken(tmp_path: Path) -> None:
    done = tapestry.compile(save("attention"), mesh="2x2", topology="cpu")
    r = done.report
    assert len(r["forms"]["tried"]) > 1 and r["forms"]["untried"] == []
    assert f"best of {len(r['forms']['tried'])} forms" in r["bound_of"]
    assert r["lower_bound_s"] <= r["objective_s"]
    assert any("without" in name for name in r["forms"]["tried"])
    assert all(text in r["bound_of"] for text in r["not_bounded"])


def test_proved_optimal_is_said_only_where_nothing_was_left_out() -> None:
    report = {"gap": 0.0, "forms": {"tried": ["fused", "unfused"], "untried": []}}
    assert tables.proof({**report, "not_bounded": []}) == " (proved optimal)"
    assert tables.proof({**report, "not_bounded": ["pipeline stages"]}) == " (optimal among 2 forms of the graph)"
    assert "proved" not in tables.proof(report) and tables.proof({**report, "gap": 0.1, "not_bounded": []}) == ""


def test_one_device_is_priced_and_never_better(tmp_path: Path) -> None:
    done = tapestry.compile(save("mlp"), devices=2, topology="cpu")
    one = done.report["one_device"]
    assert one["objective_s"] >= done.report["objective_s"] * 0.999
    assert f"one device ({duration(one['objective_s'])}" in " ".join(explain.explain(done.build).split())


@pytest.mark.parametrize("alone", [{}, {"alone": ALONE}])
def test_one_device_where_messages_cost_more_than_they_save(alone: dict[str, object], tmp_path: Path) -> None:
    """The plan leaves a device idle; it is verified, runs in one process and in two, and gives the model's results."""
    path = tmp_path / "far.json"
    path.write_text(json.dumps({"device": MACHINE, "levels": [FAR], **alone}))
    made = document("compile", save("mlp"), "-o", tmp_path / "b", "--devices", "2", "--topology", path)
    one = made["one_device"]
    if not alone:
        assert made["objective_s"] <= one["objective_s"]
        return
    assert made["objective_s"] == one["objective_s"] and one["fits"]
    assert [s["devices"] for s in made["stages"]] == [[0]] and made["devices"] == 2
    assert made["peak_bytes"][0] > 0 == made["peak_bytes"][1]
    assert abs(made["simulated_s"] - made["objective_s"]) <= 1e-6 * made["objective_s"] + 1e-9
    assert document("verify", tmp_path / "b")["passed"]
    assert document("run", tmp_path / "b", "--check")["passed"]
    assert run("run", tmp_path / "b", "--check", "--processes", "2")[0] == 0


def test_stages_and_pins_keep_the_whole_mesh(tmp_path: Path) -> None:
    path = tmp_path / "far.json"
    path.write_text(json.dumps({"device": MACHINE, "levels": [FAR], "alone": ALONE}))
    done = tapestry.compile(save("mlp"), devices=2, topology=str(path), stages=1)
    assert not done.build.plan.stages and device_count(done.build.plan.mesh) == 2
    feeds = {t: np.ones(done.build.plan.graph.tensors[t].shape, np.float32) for t in done.build.plan.graph.inputs}
    assert done.run(feeds)


def lstm(path: Path) -> Path:
    """A short LSTM over a batch, and a projection."""
    rng, (steps, batch, wide, hidden) = np.random.default_rng(0), (12, 8, 64, 128)
    shapes = {"W": (1, 4 * hidden, wide), "R": (1, 4 * hidden, hidden), "b": (1, 8 * hidden), "M": (hidden, 32)}
    weights = [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32) * 0.1, n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("LSTM", ["x", "W", "R", "b"], ["Y", "Yh", "Yc"], hidden_size=hidden),
        helper.make_node("MatMul", ["Y", "M"], ["z"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, batch, wide])
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, [steps, 1, batch, 32])
    graph = helper.make_graph(nodes, "g", [x], [z], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.slow
def test_a_recurrence_is_planned_whole_beside_its_steps(tmp_path: Path) -> None:
    """Two devices are no slower than one, the plan gives the model's results, and a search goes on from it."""
    path = lstm(tmp_path / "m.onnx")
    one, two = (
        document("compile", path, "-o", tmp_path / d, "--devices", d, "--topology", "cpu") for d in ("1", "2")
    )  # fmt: skip
    assert {"fused", "recurrences whole"} <= set(two["forms"]["tried"])
    assert two["objective_s"] <= one["objective_s"] and "without@steps" in two["moves"]
    assert document("run", tmp_path / "2", "--check")["passed"]
    again = document("compile", path, "-o", tmp_path / "2", "--devices", "2", "--topology", "cpu", "--resume", tmp_path / "2")
    assert again["objective_s"] <= two["objective_s"] * (1 + 1e-9)
    pinned = document("compile", path, "-o", tmp_path / "p", "--devices", "2", "--topology", "cpu", "--layout", "x:1=2@d0")
    assert "recurrences whole" not in pinned["forms"]["tried"]
