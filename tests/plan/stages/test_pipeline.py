"""The search for pipeline stages: exact where it says so, never worse than the plan without, and on the command line."""

import itertools
import json
import random
from math import inf

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.errors import PlanError, TapestryError
from tapestry.ir.kernel import size
from tapestry.ir.plan import coordinates, device_count
from tapestry.ir.program import Transfer
from tapestry.plan.pipelines.estimate import Estimates
from tapestry.plan.pipelines.pipeline_search import search_stages
from tapestry.plan.pipelines.segments import Pieces, _receiving, with_arrivals
from tapestry.plan.pipelines.sequence import cut_points, sequence
from tapestry.plan.pipelines.stage_chain import Piece, best_chain, submeshes
from tapestry.plan.pipelines.staged_plan import stage_topology
from tapestry.plan.search.planner import search
from tapestry.plan.search.problem import build
from tapestry.plan.simulate import simulate
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.network import evaluate
from tapestry.plan.topology import topology
from tapestry.sharding.check_sharding import check_file
from tapestry.sharding.export_sharding import export
from tapestry.verify import certificate
from tests.support.command_line import document, run
from tests.support.small_models import N, assert_same, case, execute, f32, mesh_of, net, peak


def chains(length, devices, shapes):
    """Every chain of pieces, each on the first free devices where its submesh may start."""

    def grow(lo, used):
        if lo == length:
            yield ()
        for hi in range(lo + 1, length + 1):
            for k, shape in enumerate(shapes):
                first = next((p for p in shape.starts if p >= used), devices)
                if first + shape.count <= devices:
                    for rest in grow(hi, first + shape.count):
                        yield (Piece(lo, hi, k, first), *rest)

    yield from grow(0, 0)


def latency(seconds, micro):
    return sum(seconds) + ((micro - 1) * max(seconds) if micro > 1 else 0.0)


@pytest.mark.parametrize("mesh", ["2", "3", "4", "2x2", "2x3", "2x4"])
def test_submeshes_are_parts_of_the_mesh(mesh):
    """Devices of a submesh, in order, have the mesh coordinates that its axes say: slower ones stand still."""
    whole = mesh_of(mesh)
    at = coordinates(whole)
    names = [a.name for a in whole]
    for s in submeshes(whole):
        assert s.count == device_count(s.mesh) < device_count(whole) and s.starts[0] == 0
        for first in s.starts:
            mine = at[first : first + s.count]
            assert len(mine) == s.count
            local = coordinates(s.mesh)
            for k, n in enumerate(names):
                where = [a.name for a in s.mesh].index(n) if n in [a.name for a in s.mesh] else None
                moved = [c[k] - mine[0][k] for c in mine]
                assert moved == ([c[where] for c in local] if where is not None else [0] * s.count)


@pytest.mark.parametrize("micro", [1, 2, 5])
@pytest.mark.parametrize("mesh", ["3", "4", "2x2", "2x4"])
def test_the_outer_program_is_exact(mesh, micro):
    """Against every chain, on random costs of which some are infinite."""
    shapes, devices = submeshes(mesh_of(mesh)), device_count(mesh_of(mesh))
    for seed in range(6):
        rng = random.Random(f"{mesh} {micro} {seed}")
        length = rng.randint(2, 4)
        table = {}

        def cost(p, table=table, rng=rng):
            return table.setdefault(p, inf if rng.random() < 0.15 else rng.choice([1.0, rng.random() * 9]))

        every = [c for c in chains(length, devices, shapes) if len(c) >= 2]
        for wanted in (None, 2, 3):
            costs = [latency([cost(p) for p in c], micro) for c in every if wanted in (None, len(c))]
            best = min(costs, default=inf)
            found = best_chain(length, devices, shapes, cost, micro=micro, stages=wanted)
            if best == inf:
                assert found is None
                continue
            assert found.latency(micro) == pytest.approx(best) == latency([cost(p) for p in found.pieces], micro)
            assert best_chain(length, devices, shapes, cost, micro=micro, stages=wanted, upper=best * (1 - 1e-9)) is None
            assert wanted is None or len(found.pieces) == wanted


def brute_seconds(pieces, piece):
    """The least cost of a piece over all strategies of its operations and all layouts of what it receives."""
    sub, link = pieces.part(piece), pieces.link(piece)
    received = [t for t in sub.inputs if t in pieces.makers]
    problem = build(with_arrivals(sub, received), stage_topology(pieces.topo, pieces.stage(piece)), {}, {}, {})
    factors = [*problem.factors, *(_receiving(problem, i, link) for i in range(len(received)))]
    return min(evaluate(list(c), factors) for c in itertools.product(*(range(n) for n in problem.sizes)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "mesh", "micro"),
    [("mlp", "2", 1), ("gathers", "3", 1), ("scalars", "2", 1), ("branches", "2", 2), ("batched", "2x2", 2)],
)
def test_cuts_submeshes_and_strategies_together_are_exact(name, mesh, micro):
    """The plan's own objective is the least over all cuts, all submeshes and all strategies of every operation."""
    graph, topo = case(name).graph, topology(mesh_of(mesh), "h100")
    seq = sequence(graph, micro)
    if seq is None:
        pytest.skip("no batch to cut")
    shapes = submeshes(topo.mesh)
    one = seq.one()
    pieces = Pieces(one, topo, shapes, cut_points(one, 48), Budget.of(60))
    known = {}
    best = inf
    for chain in chains(len(one.ops), device_count(topo.mesh), shapes):
        if len(chain) > 1:
            costs = [known[p] if p in known else known.setdefault(p, brute_seconds(pieces, p)) for p in chain]
            best = min(best, latency(costs, micro))
    for p, seconds in known.items():
        assert pieces.seconds(p) == pytest.approx(seconds), "a piece is not solved exactly"
    found = search_stages(graph, topo, Budget.of(60), micro=[micro])
    assert found is not None and found.exact
    if not seq.before and not seq.after:
        assert found.found.objective == pytest.approx(best)
    assert latency(found.seconds, micro) == pytest.approx(best)
    assert found.found.bound <= found.found.objective


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["attention", "norms", "conv_chain", "branches", "gathers"])
def test_estimates_are_upper_and_bounds_are_lower(name):
    """An estimate is the cost of one of a piece's plans but for how tensors arrive; the bound is below every chain."""
    topo = topology(mesh_of("2x2"), "h100")
    graph = case(name).graph
    pieces = Pieces(graph, topo, submeshes(topo.mesh), cut_points(graph, 48), Budget.of(60))
    estimates = Estimates(pieces)
    n = len(pieces.points) - 1
    for k in range(len(pieces.shapes)):
        assert estimates.seconds(Piece(0, n, k, 0)) == pytest.approx(pieces.seconds(Piece(0, n, k, 0)), rel=1e-6)
        for hi in range(1, n):
            assert pieces.seconds(Piece(0, hi, k, 0)) <= estimates.seconds(Piece(0, hi, k, 0)) * (1 + 1e-9)
    chain = best_chain(n, 4, pieces.shapes, pieces.seconds)
    assert estimates.bound() <= chain.total


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", ["attention", "conv_chain", "branches", "batched", "conv_other_ranks", "opaques", "residual"])
def test_found_plans_pass_and_run_right(name, micro):
    c = case(name)
    for mesh in ("2", "2x2"):
        topo = topology(mesh_of(mesh), "cpu")
        found = search_stages(c.graph, topo, Budget.of(20), micro=[micro])
        if found is None:
            continue
        f = found.found
        certificate.check(f.plan.annotated(), f.program, stated_peak=peak(f.program), places=f.plan.places)
        outs, measured = execute(f.plan.graph, f.program, c)
        assert_same(outs, c.expected, c.graph)
        assert measured.peak == peak(f.program)
        assert len(f.plan.stages) == len(found.seconds) >= 2


# --- a model for which stages pay: its weights need both nodes, and only activations should cross between them


def tower(layers=6, width=256, batch=8):
    names = ["x", *[f"h{k}" for k in range(layers - 1)], "y"]
    nodes = [
        n
        for k in range(layers)
        for n in (N("MatMul", [names[k], f"w{k}"], [f"m{k}"], f"mm{k}"), N("Relu", [f"m{k}"], [names[k + 1]], f"act{k}"))
    ]
    return net(nodes, {"x": (T.FLOAT, [batch, width])}, {"y": T.FLOAT}, {f"w{k}": f32(width, width) / 8 for k in range(layers)})


DEVICE = {
    "memory": "1GiB",
    "bandwidth": 1e10,
    "host": 1e8,
    "launch": 1e-6,
    "vector": 1e10,
    "flops": {"f32": 1e10, "other": 1e10},
}
NODES = {"device": DEVICE, "levels": [{"devices": 2, "alpha": 1e-7, "beta": 1e-11}, {"alpha": 1e-4, "beta": 1e-7}]}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "tower.onnx").write_bytes(tower().SerializeToString())
    (tmp_path / "nodes.json").write_text(json.dumps(NODES))
    return tmp_path / "tower.onnx"


def compiled(model, **options):
    return tapestry.compile(model, mesh="2x2", topology=str(model.parent / "nodes.json"), **options)


@pytest.mark.slow
def test_stages_are_taken_where_they_pay(model):
    """Each device has room for 35 % of the weights: without stages every layer crosses the slow link, or streams from the host."""
    build = compiled(model, memory="560KB")
    r = build.report
    assert len(r["stages"]) == 2 and r["pipeline"]["chosen"]
    assert r["pipeline"]["objective_s"] < r["pipeline"]["spatial_objective_s"]
    assert r["lower_bound_s"] <= r["objective_s"] == r["pipeline"]["objective_s"]
    assert max(r["peak_bytes"]) <= 560_000
    assert [s["devices"] for s in r["stages"]] == [[0, 1], [2, 3]] and sum(s["ops"] for s in r["stages"]) == r["ops"]
    assert r["pipeline"]["spatial_objective_s"] == pytest.approx(
        compiled(model, memory="560KB", stages=1).report["objective_s"]
    )
    feeds = build.random_feeds(1)
    assert np.allclose(build.run(feeds)["y"], compiled(model, stages=1).run(feeds)["y"], rtol=1e-4, atol=1e-5)


SLOWER = {"devices": [2], "memory": "400KB", "flops": {"f32": 5e8, "other": 5e8}}


@pytest.mark.parametrize("others", [[], pytest.param([SLOWER], marks=pytest.mark.slow)])
def test_machines_on_one_slow_network_are_stages(tmp_path, others):
    """No machine holds all weights, and every reduction between them takes longer than a layer."""
    network = {"device": {**DEVICE, "memory": "600KB"}, "others": others, "levels": [{"alpha": 1e-4, "beta": 1e-7}]}
    (tmp_path / "network.json").write_text(json.dumps(network))
    model, given = tower(layers=4), {"mesh": "3", "topology": str(tmp_path / "network.json")}
    found, spatial = (tapestry.compile(model, **given, **more) for more in ({}, {"stages": 1}))
    assert len(found.report["stages"]) > 1 and found.report["objective_s"] < spatial.report["objective_s"]
    assert found.report["pipeline"]["chosen"]
    feeds = found.random_feeds(1)
    assert np.allclose(found.run(feeds)["y"], spatial.run(feeds)["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_stages_are_not_taken_where_they_do_not(model):
    """With room for all weights everywhere, copies of the model on both nodes do without the slow link."""
    r = compiled(model).report
    assert r["stages"] == [] and r["micro_batches"] == 1 and "pipeline" not in r
    asked = compiled(model, stages=2).report
    assert asked["objective_s"] > r["objective_s"] and asked["pipeline"]["spatial_objective_s"] == r["objective_s"]


@pytest.mark.slow
def test_micro_batches_keep_stages_busy(model):
    """Asked for two stages, four micro-batches beat one on the clock as well as in the objective, and run right."""
    one, four = (compiled(model, memory="640KB", stages=2, micro_batches=m) for m in (1, 4))
    reports = [b.report["pipeline"] for b in (one, four)]
    assert four.report["micro_batches"] == 4 and any("micro_batch" in m for m in four.report["moves"])
    assert four.report["objective_s"] >= latency([s["seconds"] for s in four.report["stages"]], 4) * (1 - 1e-9)
    timed = simulate(four.build.plan, four.build.program, topology(four.build.plan.mesh, str(model.parent / "nodes.json")))
    alone = latency([s["seconds"] for s in four.report["stages"]], 4) - 3 * max(s["seconds"] for s in four.report["stages"])
    assert timed.total == reports[1]["simulated_s"] < 4 * alone, "micro-batches do not overlap"
    feeds = four.random_feeds(2)
    assert np.allclose(four.run(feeds)["y"], one.run(feeds)["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_memory_is_hard_per_stage(model):
    """All stages of a chosen plan fit; less than a layer takes, streamed and cut in two, is refused with a message."""
    for memory in (560_000, 640_000, 900_000):
        build = compiled(model, memory=str(memory), stages=2)
        assert max(build.report["peak_bytes"]) <= memory
        certificate.check(build.build.plan.annotated(), build.build.program, limit=memory, places=build.build.plan.places)
    with pytest.raises(PlanError, match="no plan of 2 stages fits"):
        compiled(model, memory="100KB", stages=2)


@pytest.mark.slow
def test_the_plan_without_stages_is_never_beaten_by_its_own_objective():
    for name in ("mlp", "attention", "conv_chain"):
        topo = topology(mesh_of("2x2"), "h100")
        spatial = search(case(name).graph, topo)
        found = search_stages(case(name).graph, topo, Budget.of(20), upper=spatial.objective)
        assert found is None or found.found.objective < spatial.objective


# --- the command line, and files


@pytest.mark.slow
def test_what_is_asked_for_is_done_or_refused(model, tmp_path):
    base = ["compile", model, "-o", tmp_path / "b", "--topology", model.parent / "nodes.json"]
    found = document(*base, "--mesh", "2x2", "--stages", "3", "--micro-batches", "2")
    assert len(found["stages"]) == 3 and found["micro_batches"] == 2 and found["certificate"]["passed"]
    for more, words in [
        (["--mesh", "2", "--stages", "3"], "3 stages on 2 devices"),
        (["--mesh", "2", "--stages", "0"], "neither 'auto' nor a number"),
        (["--mesh", "2", "--micro-batches", "x"], "neither 'auto' nor a number"),
        (["--mesh", "2", "--stages", "2", "--micro-batches", "3"], "cannot be cut into 3 equal micro-batches"),
        (["--mesh", "2", "--stages", "2", "--pin", "mm0:i=2@d0"], "no plan of 2 stages fits"),
        (["--mesh", "2", "--stages", "1", "--micro-batches", "2"], "micro-batches without stages"),
        (["--devices", "1", "--micro-batches", "2"], "more than one device"),
    ]:
        status, _, err = run(*base[:3], tmp_path / "none", *base[4:], *more)
        assert status == 2 and words in err, err
        assert not (tmp_path / "none").exists()


def test_every_command_knows_stages(model, tmp_path):
    b = tmp_path / "b"
    document("compile", model, "-o", b, "--mesh", "2x2", "--stages", "2", "--micro-batches", "2")
    assert document("verify", b)["passed"]
    assert document("run", b, "--check")["passed"]
    status, out, err = run("explain", b, "--why", "--critical-path")
    assert status == 0, err
    assert "stage 0: devices 0 to 1" in out and "in stage 1" in out and "without stages: objective" in out
    rows = document("explain", b, "--why")["operations"]
    assert {r["stage"] for r in rows} == {0, 1} and all("next_best" in r for r in rows)
    for more in (["--diff", b],):
        assert run("explain", b, *more)[0] == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro", [1, 2])
def test_stages_are_exported_and_kept(model, tmp_path, micro):
    before = tapestry.compile(model, mesh="2x2", stages=2, micro_batches=micro)
    target = tmp_path / "sharded.onnx"
    export(before.build, target)
    assert [str(f) for f in check_file(target) if f.level == "error"] == []
    nodes = [n for n in onnx.load(target).graph.node if n.device_configurations]
    found = {n.name: n.device_configurations[0].pipeline_stage for n in nodes}
    plan = before.build.plan
    for op, k in zip(plan.graph.ops, plan.stage_of, strict=True):
        assert {found[s] for s in op.source} <= {k}
    held = {s.tensor_name: s for n in nodes for s in n.device_configurations[0].sharding_spec if s.tensor_name in n.output}
    for op, at in zip(plan.graph.ops, plan.places, strict=True):
        if op.outs[0] in held:
            spec = held[op.outs[0]]
            groups = {e.key: list(e.value) for e in spec.index_to_device_group_map}
            devices = [d for entry in spec.device for d in groups.get(entry, [entry])]
            assert sorted(devices) == list(at.devices)
    after = tapestry.compile(target)
    assert [len(s.devices) for s in after.build.plan.stages] == [len(s.devices) for s in plan.stages]
    assert after.report["micro_batches"] == micro


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", ["[]", "{", '{"stages": [1], "micro_batches": 1}', '{"stages": [1, 2], "micro_batches": "x"}'])
def test_odd_stages_in_a_file_are_refused(model, tmp_path, text):
    target = tmp_path / "sharded.onnx"
    export(tapestry.compile(model, mesh="2", stages=2).build, target)
    m = onnx.load(target)
    next(p for p in m.metadata_props if p.key == "tapestry.stages").value = text
    onnx.save(m, target)
    with pytest.raises(TapestryError, match="stages"):
        tapestry.compile(target)


@pytest.mark.slow
def test_resuming_a_staged_build_searches_again(model, tmp_path):
    b = tmp_path / "b"
    document("compile", model, "-o", b, "--mesh", "2", "--stages", "2", "--micro-batches", "2")
    found = document("compile", model, "-o", b, "--mesh", "2", "--stages", "2", "--micro-batches", "2", "--resume", b)
    assert len(found["stages"]) == 2 and sum("micro_batch" in m for m in found["moves"]) == 1


@pytest.mark.slow
def test_a_plan_takes_its_arrivals_into_account(model):
    """On fast links inside and slow ones between, what crosses is sent in parts and gathered, not sent to everyone."""
    found = compiled(model, memory="640KB", stages=2).build
    assert found.plan.arrivals and all(any(x is not None for x in a.layout) for a in found.plan.arrivals)
    for step in found.program.steps:
        if isinstance(step, Transfer) and {m.src // 2 for m in step.messages} != {m.dst // 2 for m in step.messages}:
            whole = found.plan.graph.tensors[found.program.buffers[step.src].tensor].size
            assert sum(size(m.box) for m in step.messages) == whole
