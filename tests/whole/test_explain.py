"""Explaining a plan: the simulated schedule, alternatives against brute force, comparisons, text and documents."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

import tapestry
from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Plan, Strategy
from tapestry.ir.program import Launch, Load, Reduce, Transfer, allocated
from tapestry.ir.syntax.parser import parse
from tapestry.plan.alternatives import best_alternatives
from tapestry.plan.lower import lower
from tapestry.plan.search.planner import search
from tapestry.plan.search.problem import HOST_SECONDS_PER_BYTE
from tapestry.plan.search.problem import build as problem_of
from tapestry.plan.simulate import COMPUTE, TRANSFER, Schedule, critical_path, reads_of, simulate
from tapestry.plan.solver.network import evaluate
from tapestry.plan.strategy import Pin, strategies
from tapestry.plan.topology import PRESETS, Topology, from_data, parse_mesh, to_data, topology
from tapestry.viz import build_diff, explain, measured
from tapestry.viz.format import times
from tapestry.viz.summary import beside_one_device
from tests.support.command_line import document, run
from tests.support.small_models import N, T, case, f32, net, random_plan, save

MODELS = ("mlp", "conv_chain", "attention", "residual", "reductions", "opaques")


def ladder() -> Graph:
    """A chain: every operation reads only the one before, through three products and a reduction."""
    return parse("""graph ladder
input x: f32[64, 64]
input w: f32[64, 64]
input v: f32[64, 64]
a: f32[64, 64] = op [i: 64, n: 64 | m: 64 sum]
  reads x[i, m], w[m, n]
  body x * w
  then max(acc0, 0.0)
b: f32[64, 64] = op [i: 64, n: 64 | m: 64 sum]
  reads a[i, m], v[m, n]
  body a * v
  then max(acc0, 0.0)
c: f32[64] = op [i: 64 | n: 64 sum]
  reads b[i, n]
  body b
output c
""")


def branches() -> Graph:
    """Two independent products of one input; the second one's transfer may pass while the first one computes."""
    return parse("""graph branches
input x: f32[256, 256]
input w: f32[256, 256]
a: f32[256, 256] = op [i: 256, n: 256 | m: 256 sum]
  reads x[i, m], w[m, n]
  body x * w
b: f32[256, 256] = op [i: 256, n: 256 | m: 256 sum]
  reads a[i, m], w[m, n]
  body a * w
c: f32[256, 256] = op [i: 256, n: 256 | m: 256 sum]
  reads a[m, i], w[m, n]
  body a * w
output b, c
""")


def planned(plan: Plan, topo: Topology) -> tuple[Schedule, float]:
    """(its schedule, its cost in the search's tables)."""
    problem = problem_of(plan.graph, topo, {}, plan.inputs, plan.outputs)
    choice = [m.strategies.index(s) for m, s in zip(problem.menus, plan.strategies, strict=True)]
    return simulate(plan, lower(plan), topo), evaluate(choice, problem.factors)


# --- the schedule


def assert_schedule(s: Schedule) -> None:
    """No stream does two things at once; nothing begins before what it reads is there; members keep together."""
    free, ready = np.zeros((2, s.program.devices)), {}
    for t in s.timed:
        takes = ~np.isnan(t.end)
        assert (t.took[takes] >= 0).all() and np.allclose((t.end - t.start)[takes], t.took[takes], rtol=1e-9, atol=1e-18)
        assert (t.start[takes] >= free[t.stream][takes]).all()
        free[t.stream][takes] = t.end[takes]
        for b in reads_of(s.program.steps[t.step]):
            assert (t.start[takes] >= ready.get(b, np.zeros(s.program.devices))[takes]).all()
        ready |= {b: np.where(takes, t.end, 0.0) for b in allocated(s.program.steps[t.step])}
        if t.stream == TRANSFER:
            for d in np.flatnonzero(takes):
                assert len({(t.start[m], t.end[m]) for m in t.members(int(d))}) == 1
    assert s.total == free.max()


def assert_critical(s: Schedule) -> None:
    path = critical_path(s)
    assert path[0].timed.start[path[0].device] == 0 and path[-1].timed.end[path[-1].device] == s.total
    for a, b in itertools.pairwise(path):
        assert a.timed.end[a.device] == b.timed.start[b.device] and a.timed.step < b.timed.step
        assert a.device == b.device or a.device in b.timed.members(b.device)
    assert sum(h.seconds for h in path) == pytest.approx(s.total, rel=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", ["3", "2x2"])
def test_schedules_of_random_plans(name, mesh):
    graph, rng = case(name).graph, random.Random(f"{name}{mesh}")
    topo = topology(parse_mesh(mesh), rng.choice(PRESETS))
    for _ in range(3):
        plan = random_plan(graph, topo.mesh, rng)
        s, objective = planned(plan, topo)
        assert_schedule(s)
        assert_critical(s)
        assert s.total >= max(s.busy(COMPUTE).max(), s.busy(TRANSFER).max()) * (1 - 1e-12)
        assert s.total <= objective * (1 + 1e-6)  # the objective adds up what the schedule may overlap or share
        steps = [st for st in s.program.steps if not isinstance(st, Launch)]
        assert len(s.timed) == len(s.program.steps) - sum(type(st).__name__ in ("Load", "Free") for st in steps)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["1", "4", "2x2"])
def test_a_chain_takes_what_the_objective_says(mesh):
    """Nothing overlaps, blocks are equal: the schedule is the objective less what breaks ties (host loads). (An operation that is both scattered and
    all-reduced is scattered first, which may be cheaper than the objective's order.)"""
    topo = topology(parse_mesh(mesh))
    for n in range(40):
        plan = random_plan(ladder(), topo.mesh, random.Random(n), layouts=0)
        s, objective = planned(plan, topo)
        loads = [s.program.buffers[x.buffer] for x in s.program.steps if isinstance(x, Load)]
        ties = HOST_SECONDS_PER_BYTE * sum(max(b.nbytes(d) for d in range(s.program.devices)) for b in loads)
        merges = [x.op for x in s.program.steps if isinstance(x, Reduce)]
        assert s.total <= objective
        if len(set(merges)) == len(merges):
            assert s.total == pytest.approx(objective - ties, rel=1e-9), n


def test_a_transfer_passes_while_another_kernel_runs():
    topo = replace(topology(parse_mesh("4")), overlap=True)
    rows, columns = Strategy(("i",), (0,)), Strategy(("n",), (1,))
    plan = Plan(graph=branches(), mesh=topo.mesh, strategies=(rows, rows, columns))
    s, objective = planned(plan, topo)
    assert_schedule(s)
    moved = sum(t.seconds for t in s.timed if t.stream == TRANSFER)
    assert moved > 0 and s.total <= objective - 0.5 * moved
    late = next(t for t in s.timed if isinstance(s.program.steps[t.step], Transfer))
    other = next(t for t in s.timed if t.stream == COMPUTE and t.op == 1)
    assert late.start[0] < other.end[0] and other.start[0] < late.end[0]


def test_topologies_come_back():
    for name in PRESETS:
        topo = topology(parse_mesh("dp=2,tp=8"), name, 12345)
        assert from_data(json.loads(json.dumps(to_data(topo)))) == topo
    data = to_data(topo)
    for wrong in (
        {},
        {**data, "links": []},
        {**data, "device": {}},
        {**data, "mesh": 3},
        {**data, "device": {**data["device"], "flops": {"f32": 1.0}}},
    ):
        with pytest.raises(TapestryError, match="not a topology"):
            from_data(wrong)


# --- why


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["ladder", "mlp", "residual", "reductions"])
@pytest.mark.parametrize("mesh", ["4", "2x2"])
def test_alternatives_are_the_best_there_are(name, mesh):
    """Against evaluating every plan that differs in one operation; for optimal and for random plans."""
    graph = ladder() if name == "ladder" else case(name).graph
    topo, rng = topology(parse_mesh(mesh)), random.Random(name)
    for plan in (search(graph, topo).plan, random_plan(graph, topo.mesh, rng), random_plan(graph, topo.mesh, rng)):
        problem = problem_of(graph, topo, {}, plan.inputs, plan.outputs)
        menus = [m.strategies for m in problem.menus]
        now = [m.index(s) for m, s in zip(menus, plan.strategies, strict=True)]
        cost = evaluate(now, problem.factors)
        for i, found in enumerate(best_alternatives(plan, topo)):
            others = {
                k: evaluate([*now[:i], k, *now[i + 1 :]], problem.factors) - cost for k in range(len(menus[i])) if k != now[i]
            }
            assert len(others) == len(strategies(graph.ops[i], topo.mesh)) - 1
            if not others:
                assert found is None
                continue
            assert found is not None and found.strategy != plan.strategies[i]
            assert found.seconds == pytest.approx(min(others.values()), abs=1e-15)
            assert others[menus[i].index(found.strategy)] == pytest.approx(found.seconds, abs=1e-15)
            largest = max((abs(p.seconds) for p in found.parts), default=0.0)
            assert sum(p.seconds for p in found.parts) == pytest.approx(found.seconds, abs=1e-2 * largest + 1e-15)
            ties = [p for p in found.parts if p.what == "host load"]
            assert all(abs(p.seconds) < 1e-8 for p in ties), "the parts explain everything but the tie-break"


def test_optimal_plans_have_no_better_alternative_and_pins_may():
    topo, graph = topology(parse_mesh("4")), ladder()
    best = search(graph, topo).plan
    assert all(a is None or a.seconds >= -1e-15 for a in best_alternatives(best, topo))
    pins = {0: (Pin("m", 0),)}
    forced = search(graph, topo, pins=pins).plan
    found = best_alternatives(forced, topo)[0]
    assert found is not None and found.seconds < 0 and found.excess == 0


def test_memory_as_the_reason():
    wide = topology(parse_mesh("4"))
    free = search(case("mlp").graph, wide)
    best_alone = best_alternatives(free.plan, wide)
    assert all(a is None or a.excess is None for a in best_alone)
    tight = replace(wide, device=replace(wide.device, memory=600))
    kept = search(case("mlp").graph, tight)
    found = [a for a in best_alternatives(kept.plan, tight) if a is not None and a.seconds < -1e-15]
    assert kept.objective > free.objective and found
    assert any(a.excess for a in found)


# --- builds


@cache
def built(name: str = "mlp", mesh: str = "4", pins: tuple[str, ...] = (), layouts: tuple[str, ...] = ()):
    return tapestry.compile(save(name), mesh=mesh, pins=pins, layouts=layouts)


def test_text_says_what_and_why():
    one = built("conv_chain", "4", ("conv1:h=4@d0",), ("x:2=4@d0",))
    text = explain.explain(one.build, why=True, critical=True)
    for part in (
        "pinned conv1:h=4@d0", "    pinned by conv1:h=4@d0", "'x' is fixed: axis 2 over d0", "split h/4@d0", "next best: ", "each device computes its own part of 'h'", "every device computes all of it", "objective", "simulated",
        "in all, ", " µs", "peak memory per device", "of it weights", "at step", "critical path, ", "overlap", "compute ",
    ):  # fmt: skip
        assert part in text, part
    assert "the pin forbids it" in text
    assert text == explain.explain(one.build, why=True, critical=True)
    plain = one.explain()
    assert "next best" not in plain and "critical path" not in plain and "pinned by" in plain


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["attention", "opaques"])
def test_documents_add_up(name):
    b = built(name, "2x2").build
    d = explain.document(b, why=True)
    s = explain.schedule(b)
    assert [r["outs"] for r in d["operations"]] == [list(op.outs) for op in b.plan.graph.ops]
    assert sum(t["bytes"] for t in d["steps"]) == sum(t["bytes"] for t in b.report["transfers"])
    assert len(d["steps"]) == sum(t["count"] for t in b.report["transfers"])
    spent = sum(r["seconds"] + r["transfer_seconds"] for r in d["operations"]) + sum(
        t["seconds"] for t in d["steps"] if t["op"] is None
    )
    assert spent == pytest.approx(sum(t.seconds for t in s.timed)) and spent >= d["simulated"]["seconds"] * (1 - 1e-9)
    memory = d["memory"]
    assert (
        max(memory["alive_bytes"])
        == memory["alive_bytes"][memory["peak_step"]]
        == max(b.peak_bytes)
        == memory["peak_bytes"][memory["device"]]
    )
    assert sum(h["share"] for h in d["critical_path"]) == pytest.approx(1)
    assert {"split", "seconds_more", "parts", "bytes_over_memory"} <= set(
        next(r["next_best"] for r in d["operations"] if r["next_best"])
    )
    json.dumps(d, allow_nan=False)


def test_a_plan_does_not_differ_from_itself():
    b = built().build
    d = build_diff.compare(b, b)
    assert d["same"] and not (d["operations"] or d["transfers"] or d["only_in_first"] or d["only_in_second"])
    assert "the same plan" in build_diff.diff_text(d)


def test_plans_differ_where_they_do():
    one, two = built().build, built(pins=("up:m=4@d0",)).build
    d = build_diff.compare(one, two)
    assert not d["same"] and d["objective_s"][0] < d["objective_s"][1] and d["requests"][1]["pins"] == ["up:m=4@d0"]
    row = next(r for r in d["operations"] if "up" in r["nodes"])
    assert "m/4@d0" in row["split"][1] and row["split"][0] != row["split"][1] and row["seconds"][0] != row["seconds"][1]
    for kind in {t["kind"] for x in (one, two) for t in x.report["transfers"]}:
        counts = [next((t["bytes"] for t in x.report["transfers"] if t["kind"] == kind), 0) for x in (one, two)]
        shown = next((t["bytes"] for t in d["transfers"] if t["kind"] == kind), counts)
        assert shown == counts
    text = build_diff.diff_text(d)
    assert "m/4@d0" in text and "objective" in text and "up" in text
    back = build_diff.compare(two, one)
    assert {r["name"]: r["seconds"][::-1] for r in back["operations"]} == {r["name"]: r["seconds"] for r in d["operations"]}


def test_operations_match_by_results_then_by_nodes():
    a, b = built("mlp").build.plan.graph.ops, built("residual").build.plan.graph.ops
    assert build_diff.match(a, a) == ([(i, i) for i in range(len(a))], [], [])
    renamed = tuple(replace(op, outs=tuple(f"{t}_new" for t in op.outs)) for op in a)
    assert build_diff.match(a, renamed) == ([(i, i) for i in range(len(a))], [], [])
    assert build_diff.match(a, renamed[1:])[1:] == ([0], [])
    pairs, left, right = build_diff.match(a, b)
    assert len(pairs) + len(left) == len(a) and len(pairs) + len(right) == len(b)


def test_a_trace_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    b, path = built().build, tmp_path / "t.json"
    path.write_text("before")

    def fail(*_args, **_named):
        raise OSError("disk full")

    monkeypatch.setattr(measured.json, "dump", fail)
    with pytest.raises(TapestryError, match=r"t\.json: cannot be written\n  because: disk full"):
        measured.write_measured(path, b, [])
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


# --- the command


def test_the_command(tmp_path):
    for folder, pins in (("a", ()), ("b", ("up:m=4@d0",))):
        built(pins=pins).save(tmp_path / folder)
    a, b = tmp_path / "a", tmp_path / "b"
    d = document("explain", a, "--why", "--critical-path", "--diff", b)
    assert {"operations", "steps", "memory", "simulated", "critical_path", "diff", "text", "objective_s"} <= set(d)
    assert d["operations"][0]["next_best"] and d["diff"]["operations"]
    status, text, _ = run("explain", a, "--why", "--critical-path")
    assert status == 0 and "next best" in text and "critical path" in text
    status, text, _ = run("explain", a, "--diff", a)
    assert status == 0 and "the same plan" in text
    assert run("explain", a, "--diff", tmp_path / "none")[0] == 2
    assert document("explain", b)["operations"][0]["pins"] == ["up:m=4@d0"]


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.5712, "0.57"), (1.024, "1.02"), (1.0, "1"), (4.33, "4.3"), (58.2, "58"), (126.4, "126")]
)
def test_ratios_have_two_digits(ratio, text):
    assert times(ratio) == text


# what is said beside one device


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 4])
def test_what_is_said_beside_one_device_is_true(tmp_path: Path, devices: int) -> None:
    """A plan on one of several devices is no faster than one device, the others are idle, and nothing is replicated."""
    tiny = net([N("MatMul", ["x", "w"], ["y"])], {"x": (T.FLOAT, (1, 3))}, {"y": T.FLOAT}, {"w": f32(3, 1)})
    onnx.save(tiny, tmp_path / "tiny.onnx")
    words = ("compile", tmp_path / "tiny.onnx", "-o", tmp_path / "b", "--devices", str(devices), "--topology", "cpu")
    status, compiled, _ = run(*words)
    report = tapestry.load(tmp_path / "b").build.report
    status, text, _ = run("explain", tmp_path / "b")
    assert status == 0
    assert ("one_device" in report) == (devices > 1)
    for out in (compiled, text):
        assert ("no faster than one device" in out) == (devices > 1)
        assert "times as fast" not in out and "times that" not in out and "replicated over" not in out
    assert ("plan: 1 of 4 devices works, the others are idle" in text) == (devices > 1)
    assert "waits for 0 s" in " ".join(text.split())


def test_ratios_beside_one_device_say_which_way() -> None:
    def said(one: float, plan: float, fits: bool = True) -> str:
        return next(beside_one_device({"one_device": {"objective_s": one, "fits": fits}, "objective_s": plan}))

    assert said(2e-3, 1e-3) == "2 times as fast as one device (2 ms)"
    assert said(1e-3, 2e-3) == "2 times as long as one device (1 ms)"
    assert said(1e-3, 1.001e-3) == "no faster than one device (1 ms)"
    assert said(2e-3, 1e-3, fits=False) == "2 times as fast as one device (2 ms, which does not fit)"
    assert not [*beside_one_device({"objective_s": 1.0})]


@pytest.mark.slow
def test_alternatives_are_explained_of_stages_whose_operations_have_other_names() -> None:
    """Of micro-batches, which a pin of the whole model does not name."""
    build = tapestry.compile(save("attention"), devices=4, topology="cpu", stages=2, micro_batches=2, pins=["q0:b0=d0"]).build
    rows = explain.document(build, why=True)["operations"]
    assert len(rows) > 2 and any(r["next_best"] for r in rows)
