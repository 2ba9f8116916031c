"""Going on from a build: never worse, bounds only where the problem is the same, and the end is that of an unbroken search."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tapestry.ir.program import peak_bytes
from tapestry.plan.search import planner
from tapestry.plan.search.planner import beginning, fingerprint, search
from tapestry.plan.search.problem import build
from tapestry.plan.search.resume import Start, start_of
from tapestry.plan.topology import topology
from tests.support.command_line import document, run
from tests.support.small_models import case, mesh_of, save

NAMES = ["attention", "conv_chain", "reductions"]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_interrupted_and_resumed_is_as_good_as_unbroken(name, tmp_path):
    whole = document("compile", save(name), "-o", tmp_path / "whole", "--mesh", "2x2")
    first = document("compile", save(name), "-o", tmp_path / "b", "--mesh", "2x2", "--time-limit", "0")
    again = document("compile", save(name), "-o", tmp_path / "b", "--mesh", "2x2", "--resume", tmp_path / "b")
    assert again["objective_s"] <= first["objective_s"]
    assert again["lower_bound_s"] >= min(first["lower_bound_s"], again["objective_s"])
    assert again["objective_s"] == pytest.approx(whole["objective_s"], rel=1e-9)
    assert again["gap"] == pytest.approx(whole["gap"], abs=1e-9)
    assert again["search"]["seconds"] >= first["search"]["seconds"]
    assert document("verify", tmp_path / "b")["passed"]
    # and once more, without any time: neither the plan nor the proof is lost
    last = document(
        "compile", save(name), "-o", tmp_path / "b", "--mesh", "2x2", "--resume", tmp_path / "b", "--time-limit", "0"
    )
    assert (last["objective_s"], last["gap"]) == (again["objective_s"], again["gap"])
    assert last["search"]["problem"] == again["search"]["problem"]
    assert last["moves"] == again["moves"]


def test_the_same_problem_needs_no_second_proof(monkeypatch):
    graph, topo = case("mlp").graph, topology(mesh_of("2x2"))
    first = search(graph, topo)
    assert first.problem is not None and first.proved
    start = start_of(first.plan, first.bound, fingerprint(first.problem))
    monkeypatch.setattr(planner, "solve", lambda *a, **k: pytest.fail("searched again"))
    again = search(graph, topo, start=start)
    assert (again.plan, again.bound) == (first.plan, first.bound)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lie", [1.0, 1e6])
def test_a_bound_of_another_problem_is_not_used(lie):
    """A false bound with another problem's key, or none, changes nothing; the strategies are still a start."""
    graph, topo = case("attention").graph, topology(mesh_of("2x2"))
    honest = search(graph, topo)
    for key in ("", "0" * 64):
        again = search(graph, topo, start=Start(start_of(honest.plan).strategies, lie, key))
        assert again.bound <= honest.objective * (1 + 1e-9)
        assert again.objective <= honest.objective


def test_the_key_is_of_everything_that_costs():
    graph, topo = case("attention").graph, topology(mesh_of("2x2"))
    base = fingerprint(build(graph, topo, {}, {}, {}))
    assert base == fingerprint(build(graph, topo, {}, {}, {}))
    name = next(iter(graph.inputs))
    others = [
        build(graph, topology(mesh_of("4")), {}, {}, {}),
        build(graph, topology(mesh_of("2x2"), "h100"), {}, {}, {}),
        build(graph, topology(mesh_of("2x2"), memory=1 << 20), {}, {}, {}),
        build(graph, topo, {}, {name: (None,) * 2}, {}),
        build(case("conv_chain").graph, topo, {}, {}, {}),
    ]
    assert len({base, *map(fingerprint, others)}) == 6


def test_strategies_of_another_model_are_a_start_where_they_apply():
    graph, topo = case("attention").graph, topology(mesh_of("2x2"))
    found = search(graph, topo)
    problem = build(graph, topo, {}, {}, {})
    whole = beginning(problem, start_of(found.plan))
    assert whole is not None
    assert tuple(m.strategies[c] for m, c in zip(problem.menus, whole, strict=True)) == found.plan.strategies
    names = list(start_of(found.plan).strategies.items())
    part = beginning(problem, Start(dict(names[: 2 * len(names) // 3])))
    assert part is not None
    assert all(0 <= c < n for c, n in zip(part, problem.sizes, strict=True))
    assert all(
        a == b for a, b, op in zip(part, whole, graph.ops, strict=True) if op.outs[0] in dict(names[: 2 * len(names) // 3])
    )
    assert beginning(problem, Start(dict(names[:1]))) is None
    assert beginning(problem, Start({})) is None


@pytest.mark.slow
def test_memory_is_kept_to_and_the_plan_is_not_worse():
    graph, topo = case("attention").graph, topology(mesh_of("2x2"))
    limit = max(peak_bytes(search(graph, topo).program)[0]) * 9 // 10
    small = replace(topo, device=replace(topo.device, memory=limit))
    first = search(graph, small)
    assert first.problem is not None
    again = search(graph, small, time_limit=0.0, start=start_of(first.plan, first.bound, fingerprint(first.problem)))
    assert max(peak_bytes(again.program)[0]) <= limit
    assert again.objective <= first.objective and again.gap <= first.gap + 1e-12


def test_what_is_resumed_must_be_a_whole_build(tmp_path):
    document("compile", save("attention"), "-o", tmp_path / "b", "--devices", "2", "--time-limit", "0")
    plan = tmp_path / "b" / "plan.json"
    text = plan.read_text()
    changed = re.sub(r'("lower_bound_s": ?)[-+.e0-9]+', r"\g<1>1000.0", text)
    assert changed != text and json.loads(changed)["report"]["lower_bound_s"] == 1000.0
    plan.write_text(changed)
    status, _, err = run("compile", save("attention"), "-o", tmp_path / "c", "--devices", "2", "--resume", tmp_path / "b")
    assert status == 2 and "hash" in err
    status, _, err = run("compile", save("attention"), "-o", tmp_path / "c", "--devices", "2", "--resume", tmp_path / "none")
    assert status == 2 and "not a build directory" in err
    assert not (tmp_path / "c").exists()


def test_another_model_or_mesh_says_so_and_works(tmp_path, caplog):
    document("compile", save("conv_chain"), "-o", tmp_path / "b", "--devices", "2")
    fresh = document("compile", save("attention"), "-o", tmp_path / "fresh", "--devices", "4")
    d = document("compile", save("attention"), "-o", tmp_path / "c", "--devices", "4", "--resume", tmp_path / "b")
    assert "another model" in caplog.text
    assert (d["objective_s"], d["gap"]) == (fresh["objective_s"], fresh["gap"])
    e = document("compile", save("conv_chain"), "-o", tmp_path / "d", "--devices", "4", "--resume", tmp_path / "b")
    assert e["certificate"]["passed"] and e["gap"] <= 0.02


@pytest.mark.slow
def test_a_plan_that_fits_in_time_only_is_not_lost(tmp_path):
    """Below what fits in space, the build's moves and streamed weights are made again; without time, nothing better is needed."""
    graph, topo = case("mlp").graph, topology(mesh_of("2"))
    most = max(peak_bytes(search(graph, topo).program)[0])
    for share in (0.8, 0.65, 0.5, 0.4, 0.3):
        command = ["compile", save("mlp"), "-o", tmp_path / "b", "--mesh", "2", "--memory", str(int(most * share))]
        status, out, _ = run(*command, "--json")
        if status == 0 and "fit" in json.loads(out):
            break
    else:
        pytest.fail("no limit at which plans fit in time only")
    first = json.loads(out)
    again = document(*command, "--resume", tmp_path / "b", "--time-limit", "0")
    assert again["objective_s"] <= first["objective_s"]
    assert again["certificate"]["passed"] and document("verify", tmp_path / "b")["passed"]
