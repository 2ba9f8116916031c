"""The planner against brute force, its memory limit, pins and layouts, the exact figures of known plans, and topologies."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.errors import PlanError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import MeshAxis, Plan, part
from tapestry.ir.program import Reduce, Transfer, peak_bytes, transfer_bytes
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.lower import lower
from tapestry.plan.requests import parse_layouts, parse_pins
from tapestry.plan.search import memory_limit as memory_limit_module
from tapestry.plan.search import problem
from tapestry.plan.search.planner import search
from tapestry.plan.search.priced_plan import PricedPlan, priced_plan
from tapestry.plan.simulate import simulate
from tapestry.plan.solver.network import evaluate, solve
from tapestry.plan.strategy import MAX_STRATEGIES, Pin, strategies
from tapestry.plan.topology import PRESETS, default_mesh, parse_bytes, parse_mesh, topology
from tapestry.verify import certificate
from tests.support.small_models import FOLDER, N, case, f32, net, peak


def chain(big: int = 1) -> Graph:
    """x @ w, an activation, @ v, a residual, a sum: five operations and a tensor with two readers."""
    n = 6 * big
    return parse(f"""graph chain
input x: f32[{n}, 5]
input w: f32[5, {8 * big}]
input v: f32[{8 * big}, 5]
h: f32[{n}, {8 * big}] = op [i: {n}, n: {8 * big} | m: 5 sum]
  reads x[i, m], w[m, n]
  body x * w
  then max(acc0, 0.0)
d: f32[{n}, 5] = op [i: {n}, n: 5 | m: {8 * big} sum]
  reads h[i, m], v[m, n]
  body h * v
s: f32[{n}, 5] = op [x0: {n}, x1: 5]
  reads d[x0, x1], x[x0, x1]
  body d + x
r: f32[{n}] = op [x0: {n} | x1: 5 sum]
  reads s[x0, x1]
  body s
output r
""")


def smooth() -> Graph:
    """Two halo exchanges and a reduction over the same axis."""
    return parse("""graph smooth
input x: f32[3, 12]
input k: f32[3]
a: f32[3, 12] = op [c: 3, h: 12 | r: 3 sum]
  reads x[c, h + r - 1] else 0.0, k[r]
  body x * k
b: f32[3, 12] = op [c: 3, h: 12 | r: 5 max]
  reads a[c, h + r - 2] else -inf
  body a
m: f32[3] = op [c: 3 | h: 12 sum]
  reads b[c, h]
  body b
y: f32[3, 12] = op [c: 3, h: 12]
  reads b[c, h], m[c]
  body b - m
output y
""")


GRAPHS = {"chain": chain, "smooth": smooth, "big chain": lambda: chain(16)}


def all_plans(graph: Graph, topo, inputs=None, outputs=None):
    """(all costs added up, plan) of every combination of strategies."""
    p = problem.build(graph, topo, {}, inputs or {}, outputs or {})
    for choice in itertools.product(*(range(n) for n in p.sizes)):
        chosen = tuple(m.strategies[c] for m, c in zip(p.menus, choice, strict=True))
        yield (
            evaluate(choice, p.factors),
            Plan(graph=graph, mesh=topo.mesh, strategies=chosen, inputs=inputs or {}, outputs=outputs or {}),
        )


# --- optimal, against brute force


@pytest.mark.parametrize("mesh", ["1", "2", "3", "2x2"])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_costs_added_up_are_the_least_of_all(name, mesh):
    graph, topo = GRAPHS[name](), topology(parse_mesh(mesh))
    p = problem.build(graph, topo, {}, {}, {})

    if np.prod(p.sizes) > 300_000:
        pytest.skip("too many combinations")
    # brute force by broadcasting: no elimination, no order
    costs = np.zeros(p.sizes)
    for f in p.factors:
        order = np.argsort(f.nodes)
        table = np.transpose(f.table, order)
        costs += table.reshape([p.sizes[n] if n in f.nodes else 1 for n in range(len(p.sizes))])
    assert solve(p.network).objective == pytest.approx(costs.min(), rel=1e-9)
    found, first = search(graph, topo), np.unravel_index(costs.argmin(), costs.shape)
    assert found.objective <= priced_plan(p, [int(c) for c in first], -np.inf).objective
    assert found.bound <= found.objective
    assert found.gap <= 0.01
    certificate.check(found.plan.annotated(), found.program, stated_peak=peak(found.program), mesh=topo.mesh)


def test_communication_that_is_free_in_the_problem_is_absent_from_the_program():
    """The tables' zeros are the programs' silences: over all plans, a transfer is charged if and only if bytes move."""
    graph = chain()
    topo = topology(parse_mesh("2"))
    link = replace(topo, device=replace(topo.device, launch=0.0, bandwidth=1e30, vector=1e30, flops={"other": 1e30}))
    seen = set()
    for objective, plan in all_plans(graph, link):
        program = lower(plan)
        moved = sum(transfer_bytes(s, program) for s in program.steps if isinstance(s, Transfer | Reduce))
        assert (objective > 1e-9) == (moved > 0), (plan.strategies, moved, objective)
        seen.add(moved > 0)
    assert seen == {True, False}


@pytest.mark.slow
def test_more_bytes_cost_more_on_a_link_without_latency():
    """With nothing but one link's bandwidth to pay for, the objective orders two-device plans as their bytes do."""
    graph = chain()
    base = topology(parse_mesh("2"))
    topo = replace(
        base, device=replace(base.device, launch=0.0, bandwidth=1e30, vector=1e30, flops={"other": 1e30}),
        links=(replace(base.links[0], alpha=0.0),),
    )  # fmt: skip
    best = min(objective for objective, _ in all_plans(graph, topo))
    silent = [o for o, plan in all_plans(graph, topo) if not any(isinstance(s, Transfer | Reduce) for s in lower(plan).steps)]
    assert silent and best == pytest.approx(min(silent), rel=1e-6)


# --- memory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "smooth"])
@pytest.mark.parametrize("mesh", ["2", "3"])
def test_plans_keep_to_the_memory_and_the_bound_is_honest(name, mesh):
    graph = GRAPHS[name]()
    topo = topology(parse_mesh(mesh))
    table = [(simulate(p, lower(p), topo).total, max(peak(lower(p)))) for _, p in all_plans(graph, topo)]
    smallest, free = min(m for _, m in table), max(peak(search(graph, topo).program))
    for limit in sorted({smallest, (smallest + free) // 2, free, free - 1}):
        if limit < smallest:
            continue
        best = min(o for o, m in table if m <= limit)
        small = replace(topo, device=replace(topo.device, memory=limit))
        try:
            found = search(graph, small)
        except PlanError:
            pytest.fail(f"a plan of {smallest} bytes exists, and none of {limit} was found")
        assert max(peak(found.program)) <= limit
        assert found.bound <= best * (1 + 1e-9) <= found.objective * (1 + 2e-9)
        certificate.check(found.plan.annotated(), found.program, limit=limit, mesh=topo.mesh)


def test_too_little_memory_is_said_in_bytes():
    graph = chain()
    topo = topology(parse_mesh("2"), memory=64)
    with pytest.raises(PlanError) as caught:
        search(graph, topo)
    text = str(caught.value)
    assert "device" in text and "of 64" in text and "too many" in text
    need = int(text.split("needs ")[1].split(" bytes", maxsplit=1)[0].replace(",", ""))
    over = int(text.split("of 64, ")[1].split(" too many", maxsplit=1)[0].replace(",", ""))
    assert need - 64 == over
    assert min(max(peak(lower(p))) for _, p in all_plans(graph, topo)) <= need
    assert any(f"'{t}" in text for t in graph.tensors)
    assert "more memory (memory; " in text


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["chain", "smooth"])
def test_the_memory_demands_never_overestimate(name):
    """At no operation: of the program that any choice is lowered to, transfers and all."""
    graph, topo = GRAPHS[name](), topology(parse_mesh("2"))
    p = problem.build(graph, topo, {}, {}, {})
    room = memory_limit_module.Room(p, surely=True)
    for choice in itertools.product(*(range(n) for n in p.sizes)):
        plan = priced_plan(p, choice, 0.0)
        need = memory_limit_module.needed_bytes(plan.program, topo, len(graph.ops))
        assert max(need) == max(peak_bytes(plan.program)[0])
        assert (room.estimate(choice) <= need).all()
        assert room.least() <= max(need)
        limit = max(need) - 1
        room.learn(choice, plan, limit)
        assert (room.estimate(choice) > limit - room.less).any(), "a choice that does not fit is offered again"


# --- pins and layouts


def test_pins_are_honoured():
    graph, mesh = chain(), parse_mesh("dp=2,tp=2")
    pins = parse_pins(["h:i=2@dp", "h:n=2@tp", "d:m=4@dp+tp"], graph, mesh)
    found = search(graph, topology(mesh), pins=pins)
    assert found.plan.strategies[0].dims == ("i", "n")
    assert found.plan.strategies[1].dims == ("m", "m")
    free = search(graph, topology(mesh))
    assert free.objective <= found.objective


@pytest.mark.parametrize(
    ("pin", "says"),
    [
        ("h:i=4@dp", "4 parts over mesh axis dp of 2"), ("h:zz=2@dp", "no dimension 'zz'"), ("nope:i=2@dp", "no operation 'nope'"),
        ("h:i=2@xx", "no mesh axis 'xx'"), ("h:i", "not a pin"), ("tiny:x0=4@dp+tp", "empty"), ("h:i=two@dp", "not a pin"),
    ],
)  # fmt: skip
def test_impossible_pins_say_why(pin, says):
    graph = parse(to_text(chain()).replace("output r", "tiny: f32[3] = op [x0: 3]\n  reads r[x0]\n  body r\noutput tiny"))
    with pytest.raises(PlanError) as caught:
        parse_pins([pin], graph, parse_mesh("dp=2,tp=2"))
    assert says in str(caught.value)
    assert caught.value.where


def test_a_pin_too_large_for_both_axes_together():
    graph = chain()
    with pytest.raises(PlanError) as caught:
        parse_pins(["d:n=2@dp", "d:n=4@tp"], graph, parse_mesh("dp=2,tp=4")) and search(
            graph, topology(parse_mesh("dp=2,tp=4")), pins=parse_pins(["d:n=2@dp", "d:n=4@tp"], graph, parse_mesh("dp=2,tp=4"))
        )
    assert caught.value.where or caught.value.why


def test_one_axis_pinned_twice():
    with pytest.raises(PlanError, match="pinned twice"):
        parse_pins(["h:i=2@dp", "h:n=2@dp"], chain(), parse_mesh("dp=2,tp=2"))


def test_layouts_are_honoured():
    graph, mesh = chain(), parse_mesh("2")
    inputs, outputs = parse_layouts(["x:0=2@d0", "w:replicated", "r:0=2@d0"], graph, mesh)
    assert (inputs, outputs) == ({"x": (0,), "w": (None,)}, {"r": (0,)})
    found = search(graph, topology(mesh), inputs=inputs, outputs=outputs)
    boxes = {b.tensor: b.boxes for b in found.program.buffers.values() if b.name in ("x", "w")}
    assert boxes["x"] == (((0, 3), (0, 5)), ((3, 6), (0, 5)))
    assert boxes["w"] == (((0, 5), (0, 8)),) * 2
    assert found.program.buffers[found.program.outputs["r"]].boxes == (((0, 3),), ((3, 6),))


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("x:0=3@d0", "3 parts"),
        ("x:7=2@d0", "2 axes"),
        ("h:0=2@d0", "no input and no output"),
        ("x", "not a layout"),
        ("x:0@d0", "not axis"),
        ("x:0=2@zz", "no mesh axis"),
        ("x:0=2@d0,1=2@d0", "used twice"),
    ],
)
def test_impossible_layouts_say_why(layout, says):
    with pytest.raises(PlanError, match=says):
        parse_layouts([layout], chain(), parse_mesh("2"))


def test_a_layout_that_leaves_a_part_empty():
    with pytest.raises(PlanError) as caught:
        parse_layouts(["x:1=8@d0"], chain(), parse_mesh("8"))
    assert "5 elements" in str(caught.value) and "part 0" in caught.value.why


# --- strategies


@pytest.mark.parametrize("name", ["conv_chain", "attention", "reductions", "opaques", "gathers"])
@pytest.mark.parametrize("mesh", ["2", "3", "2x2", "2x4"])
def test_strategies_leave_no_part_empty_and_start_with_the_replicated_one(name, mesh):
    m = parse_mesh(mesh)
    for op in case(name).graph.ops:
        offered = strategies(op, m)
        assert len(offered) <= MAX_STRATEGIES and len(set(offered)) == len(offered)
        assert offered[0].dims == (None,) * len(m)
        for s in offered:
            for d in set(s.dims) - {None}:
                axes = tuple(a for a, n in enumerate(s.dims) if n == d)
                parts, _ = part(m, axes, (0,) * len(m))
                assert parts <= op.ranges[d]


def test_pinned_strategies_all_have_the_pin():
    op = chain().ops[1]
    offered = strategies(op, parse_mesh("2x2"), (Pin("m", 1),))
    assert offered and all(s.dims[1] == "m" for s in offered)


# --- the same plan for the same thing


def test_names_do_not_matter():
    graph = chain(4)
    text = to_text(graph)
    for old, new in (("h", "zeta"), ("d", "alpha"), ("s", "q9"), ("w", "a_weight"), ("v", "other")):
        text = text.replace(f" {old}[", f" {new}[").replace(f"\n{old}:", f"\n{new}:").replace(f"input {old}:", f"input {new}:")
    renamed = parse(
        text.replace("body h * v", "body zeta * other")
        .replace("body x * w", "body x * a_weight")
        .replace("body d + x", "body alpha + x")
        .replace("\n  body s\n", "\n  body q9\n")
    )
    assert set(renamed.tensors) != set(graph.tensors)
    a, b = (search(g, topology(parse_mesh("2x2"))) for g in (graph, renamed))
    assert a.plan.strategies == b.plan.strategies
    assert a.objective == b.objective
    assert peak(a.program) == peak(b.program)


def test_the_search_is_deterministic():
    graph = case("attention").graph
    a, b = (search(graph, topology(parse_mesh("2x2"))) for _ in range(2))
    assert a.plan == b.plan and a.program == b.program and a.objective == b.objective


# --- the figures of issue 2


def conv_bytes(kernel: int, stride: int, pad: int) -> tuple[dict, dict]:
    size = (224 + 2 * pad - kernel) // stride + 1
    path = FOLDER / f"conv{kernel}{stride}.onnx"
    m = net(
        [N("Conv", ["x", "w"], ["y"], "conv", strides=[stride] * 2, pads=[pad] * 4)], {"x": (T.FLOAT, [8, 64, 224, 224])}, {"y": T.FLOAT},
        {"w": f32(64, 64, kernel, kernel)},
    )  # fmt: skip
    path.write_bytes(m.SerializeToString())
    build = tapestry.compile(path, devices=8, layouts=["x:2=8@d0", "y:2=8@d0"])
    assert size >= 8
    return {t["kind"]: t["bytes"] for t in build.report["transfers"]}, dict(build.report)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "nbytes"), [(3, 1, 1, 6_422_528), (3, 2, 1, 3_211_264), (7, 2, 3, 16_056_320)]
)
def test_a_convolution_moves_its_halo_and_nothing_else(kernel, stride, pad, nbytes):
    moved, report = conv_bytes(kernel, stride, pad)
    assert moved == {"halo": nbytes}
    assert report["lower_bound_s"] <= report["objective_s"]


def test_the_megatron_mlp_is_one_all_reduce():
    path = FOLDER / "megatron.onnx"
    m = net(
        [N("MatMul", ["x", "a"], ["h"], "up"), N("Relu", ["h"], ["r"], "act"), N("MatMul", ["r", "b"], ["y"], "down")],
        {"x": (T.FLOAT, [512, 4096]), "a": (T.FLOAT, [4096, 16384]), "b": (T.FLOAT, [16384, 4096])}, {"y": T.FLOAT},
    )  # fmt: skip
    path.write_bytes(m.SerializeToString())
    build = tapestry.compile(path, devices=8, layouts=["x:replicated", "a:1=8@d0", "b:0=8@d0", "y:replicated"])
    (row,) = build.report["transfers"]
    assert (row["kind"], row["count"], row["payload_bytes"]) == ("all_reduce", 1, 8_388_608)
    assert row["bytes"] == 2 * 7 * 8_388_608  # a ring: every device sends 2 (n - 1) / n of the payload


def test_a_softmax_along_the_sharded_axis_reduces_1024_values_at_most_twice():
    path = FOLDER / "long_softmax.onnx"
    path.write_bytes(
        net([N("Softmax", ["x"], ["y"], "softmax", axis=0)], {"x": (T.FLOAT, [4096, 1024])}, {"y": T.FLOAT}).SerializeToString()
    )
    build = tapestry.compile(path, devices=8, layouts=["x:0=8@d0", "y:0=8@d0"])
    rows = build.report["transfers"]
    assert {r["kind"] for r in rows} <= {"all_reduce"}
    states = [
        sum(build.build.program.buffers[b].nbytes(0) for b in s.srcs)
        for s in build.build.program.steps
        if isinstance(s, Reduce)
    ]
    assert 1 <= sum(len(s.srcs) for s in build.build.program.steps if isinstance(s, Reduce)) <= 2
    assert sum(states) <= 2 * 1024 * 4
    assert sum(r["bytes"] for r in rows) == 2 * 7 * sum(states)


# --- topologies


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mesh", ["1", "8", "2x4", "dp=2,tp=8"])
def test_presets(preset, mesh):
    t = topology(parse_mesh(mesh), preset)
    assert len(t.links) == len(t.mesh)
    assert t.device.memory > 0 and t.device.rate("f32") > 0 and t.device.rate("u8") > 0
    assert topology(t.mesh, preset, 123).device.memory == 123
    beta = [link.beta for link in t.links]
    assert beta == sorted(beta, reverse=True)  # inner axes are never slower


def test_meshes():
    assert parse_mesh("8") == (MeshAxis("d0", 8),)
    assert parse_mesh("2x4") == (MeshAxis("d0", 2), MeshAxis("d1", 4))
    assert parse_mesh("dp=2,tp=4") == (MeshAxis("dp", 2), MeshAxis("tp", 4))


@pytest.mark.parametrize(
    "bad", ["", "0", "-1", "2x", "x2", "2x0", "a", "dp=", "dp=0", "dp=2,", "2,4", "dp=2,dp=2", "1.5", "²", "dp =2"]
)
def test_bad_meshes(bad):
    with pytest.raises(TapestryError) as caught:
        parse_mesh(bad)
    assert "mesh" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("16GiB", 16 << 30),
        ("800MB", 800_000_000),
        ("1024", 1024),
        ("1.5KiB", 1536),
        ("2k", 2000),
        ("1TB", 10**12),
        (" 3 GB ", 3 * 10**9),
        ("7b", 7),
    ],
)
def test_memory(text, n):
    assert parse_bytes(text) == n


@pytest.mark.parametrize("bad", ["", "GiB", "-1GiB", "0", "0.0001", "1PB", "1e9", "nan", "1 000", "1GiBB", "9" * 400 + "TiB"])
def test_bad_memory(bad):
    with pytest.raises(TapestryError):
        parse_bytes(bad)


GOOD = {
    "mesh": "2x2", "device": {"memory": "2GiB", "bandwidth": 1e11, "launch": 1e-6, "flops": {"f32": 1e13}},
    "levels": [{"devices": 2, "alpha": 1e-6, "beta": 1e-11}, {"alpha": 1e-5, "beta": 1e-10}],
}  # fmt: skip


def test_a_topology_file(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(GOOD))
    mesh = default_mesh(str(path))
    assert mesh == parse_mesh("2x2")
    t = topology(mesh, str(path))
    assert [link.alpha for link in t.links] == [1e-5, 1e-6]
    assert t.device.memory == 2 << 30 and t.device.rate("f16") == 1e13
    assert default_mesh("cpu") is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.pop("device"), lambda d: d.pop("levels"), lambda d: d.update(levels=[]), lambda d: d.update(levels=3), lambda d: d.update(device=[]),
        lambda d: d["device"].update(memory="lots"), lambda d: d["device"].update(memory=-5), lambda d: d["device"].update(bandwidth=0), lambda d: d["device"].update(flops={}),
        lambda d: d["device"].update(flops={"f32": "fast"}), lambda d: d["device"].update(bandwidth=None), lambda d: d["device"].update(launch=[1]), lambda d: d["device"].update(vector=-1.0),
        lambda d: d["levels"][0].pop("alpha"), lambda d: d["levels"][0].update(beta="x"), lambda d: d["levels"][0].update(beta=-1.0), lambda d: d["levels"][0].update(alpha=float("nan")),
        lambda d: d["levels"].insert(0, 7), lambda d: d["device"].update(bandwidth=float("nan")), lambda d: d["levels"][0].update(devices=0), lambda d: d["device"].update(launch=-1.0),
    ],
)  # fmt: skip
def test_bad_topology_files(tmp_path, spoil):
    data = json.loads(json.dumps(GOOD))
    spoil(data)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TapestryError) as caught:
        topology(parse_mesh("2"), str(path))
    assert str(path) in str(caught.value) or "memory" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"x"', "\x00", "[" * 100_000])
def test_files_that_are_no_topology(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TapestryError) as caught:
        topology(parse_mesh("2"), str(path))
    assert str(path) in str(caught.value)


def test_no_such_topology():
    with pytest.raises(TapestryError, match="cpu"):
        topology(parse_mesh("2"), "no-such-thing")


def test_gap():
    found = search(chain(), topology(parse_mesh("2")))
    assert PricedPlan(plan=found.plan, program=found.program, objective=2.0, bound=1.5, distinct=1).gap == 0.25
    assert PricedPlan(plan=found.plan, program=found.program, objective=0.0, bound=0.0, distinct=1).gap == 0.0
