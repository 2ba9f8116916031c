"""Plans in time: streamed weights, rewritten graphs, and the search that makes a plan fit where none does in space."""

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tapestry import api
from tapestry.api import Compiled
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import LawError, PlanError, TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import evaluate
from tapestry.ir.program import Free, Load, alive_bytes
from tapestry.ir.syntax.parser import parse
from tapestry.plan import lower as lowering
from tapestry.plan import strategy
from tapestry.plan.cost.floor import least_cells, least_seconds
from tapestry.plan.lower import lower
from tapestry.plan.memory.least_memory import lacking, refuse
from tapestry.plan.memory.memory_fit import Fitted, fit
from tapestry.plan.memory.peaks import moves
from tapestry.plan.search.planner import search, spatial
from tapestry.plan.search.priced_plan import TooBig
from tapestry.plan.search.problem import build, load_seconds
from tapestry.plan.search.streamed_weights import fewest
from tapestry.plan.simulate import simulate
from tapestry.plan.solver.budget import Budget
from tapestry.plan.topology import topology
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.rule import Move
from tapestry.rewrites.splitting import split_time
from tapestry.rewrites.splitting.micro_batch import batch_move
from tapestry.rewrites.splitting.split_time import time_move
from tapestry.verify import certificate, interp
from tests.support.command_line import document, run
from tests.support.small_models import Case, assert_same, case, execute, mesh_of, peak, random_plan, save

MODELS = (
    "conv_chain",
    "pools",
    "mlp",
    "norms",
    "attention",
    "gathers",
    "reductions",
    "opaques",
    "residual",
    "noise",
    "selections",
)
HUGE = 1 << 60

ATTENTION = """graph attention
input q: f32[{n}, 4]
input k: f32[{n}, 4]
input v: f32[{n}, 4]
s: f32[{n}, {n}] = op [i: {n}, j: {n} | d: 4 sum]
  reads q[i, d], k[j, d]
  body q * k
l: f32[{n}] = op [i: {n} | j: {n} max]
  reads s[i, j]
  body s
e: f32[{n}, {n}] = op [i: {n}, j: {n}]
  reads s[i, j], l[i]
  body exp(s - l)
t: f32[{n}] = op [i: {n} | j: {n} sum]
  reads e[i, j]
  body e
y: f32[{n}, 4] = op [i: {n}, d: 4 | j: {n} sum]
  reads e[i, j], t[i], v[j, d]
  body (e / t) * v
output y
"""

SKIP = """graph skip
input x: f32[]
a: f32[1024] = op [i: 1024]
  reads x[]
  body x * cast(index(i), f32)
m: f32[] = op [ | i: 1024 max]
  reads a[i]
  body a
b: f32[1024] = op [i: 1024]
  reads m[]
  body m * cast(index(i), f32)
c: f32[1024] = op [i: 1024 | j: 1024 max]
  reads b[j]
  body b
d: f32[1024] = op [i: 1024 | j: 1024 min]
  reads c[j]
  body c
n: f32[] = op [ | i: 1024 max]
  reads d[i]
  body d
y: f32[] = op [ | i: 1024 sum]
  reads a[i], n[]
  body a * n
output y
"""


def rewritten(graph: Graph, rng: random.Random, count: int) -> Graph:
    """The graph after random moves in time, wherever they are legal."""
    for _ in range(count):
        op = rng.choice(graph.ops)
        moves = [Move("recompute", op.outs[0], (("keep", 1),))]
        if op.space:
            d, parts = rng.choice(op.space), rng.randint(2, 4)
            moves.append(time_move(op, d.name, parts, rng.choice([0, 1, 3, 9])))
        batch = batch_move(graph, 2)
        moves += [batch] if batch and len(graph.ops) < 40 else []
        try:
            m = rng.choice(moves)
            graph = RULES[m.rule].apply(graph, m)
        except TapestryError:
            continue
    return graph


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", ["1", "2", "2x2"])
def test_any_moves_any_strategies_any_streamed_weights(name: str, mesh: str) -> None:
    c = case(name)
    for seed in range(3):
        rng = random.Random(f"{name} {mesh} {seed}")
        graph = rewritten(c.graph, rng, 3)
        plan = random_plan(graph, mesh_of(mesh), rng, layouts=0.1)
        streamed = frozenset(t for t in graph.weights if rng.random() < 0.7 and t not in graph.outputs and t not in plan.inputs)
        plan = replace(plan, streamed=streamed)
        program = lower(plan)
        certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=plan.mesh, streamed=streamed)
        found, measured = execute(graph, program, c, streamed)
        assert_same(found, c.expected, graph, seed)
        assert measured.peak == peak(program)


def streaming(name: str, mesh: str) -> tuple[Case, Fitted]:
    """A model with 60 % of the memory that its fastest plan takes."""
    c = case(name)
    topo = topology(mesh_of(mesh), memory=HUGE)
    free = search(c.graph, topo)
    least = max(max(t.nbytes for t in c.graph.tensors.values()) * 2, int(0.6 * max(peak(free.program))))
    topo = topology(mesh_of(mesh), memory=least)
    first = spatial(build(c.graph, topo, {}, {}, {}), Budget.of(1.0))
    return c, fit(c.graph, topo, first, budget=Budget.of(20.0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["conv_chain", "mlp", "attention", "residual"])
@pytest.mark.parametrize("mesh", ["1", "2"])
def test_a_fitted_plan_fits_runs_and_is_bounded(name: str, mesh: str) -> None:
    c, fitted = streaming(name, mesh)
    plan, program = fitted.found.plan, fitted.found.program
    limit = max(peak(program))
    certificate.check(plan.annotated(), program, limit=limit, stated_peak=peak(program), mesh=plan.mesh, streamed=plan.streamed)
    found, measured = execute(plan.graph, program, c, plan.streamed)
    assert_same(found, c.expected, plan.graph)
    assert measured.peak == peak(program)
    assert 0 < fitted.found.bound <= fitted.found.objective


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_rewrites_never_cost_less_than_the_bound(name: str) -> None:
    graph = case(name).graph
    for seed, mesh in itertools.product(range(4), ("1", "3")):
        topo = topology(mesh_of(mesh), memory=HUGE)
        other = rewritten(graph, random.Random(f"{name} {seed}"), 3)
        assert search(other, topo).objective >= least_seconds(graph, topo) * (1 - 1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_no_plan_of_rewrites_needs_less_than_is_said_beforehand(name: str) -> None:
    """What is refused because of it could not have been planned: neither on all devices together nor on one of them."""
    graph = case(name).graph
    for seed, mesh in itertools.product(range(6), ("1", "2x2")):
        rng = random.Random(f"{name} {seed}")
        plan = random_plan(rewritten(graph, rng, seed), mesh_of(mesh), rng)
        weights = frozenset(plan.graph.weights) - {*plan.inputs, *plan.graph.outputs}
        program = lower(replace(plan, streamed=weights if seed % 2 else frozenset()))
        together, one = max(int(n.sum()) for n in alive_bytes(program)), max(peak(program))
        devices = program.devices
        assert lacking(graph, topology(mesh_of(mesh), memory=max(one, -(-together // devices)))) is None
    assert lacking(graph, topology(mesh_of("1"), memory=3)) is not None


def test_what_no_cut_makes_smaller_is_named() -> None:
    graph = parse(ATTENTION.format(n=8))
    short = topology(mesh_of("2"), memory=10)
    with pytest.raises(PlanError, match=r"at once, [0-9,]+ too many: all devices together have 20"):
        refuse([graph, graph], short)


@pytest.mark.parametrize("name", MODELS)
def test_least_cells_is_an_underestimate(name: str) -> None:
    graph, checked = case(name).graph, 0
    for op in graph.ops:
        if not isinstance(op, Block) or math.prod(d.size for d in op.space) > 100_000:
            continue
        grid = np.indices([d.size for d in op.space]).reshape(len(op.space), -1)
        env = {d.name: grid[i] for i, d in enumerate(op.space)}
        for r in op.reads:
            shape = graph.tensors[r.tensor].shape
            cells = np.stack([np.broadcast_to(evaluate(e, env), grid.shape[1:]) for e in r.index]) if r.index else None
            if cells is None:
                continue
            ok = np.all((cells >= 0) & (cells < np.array(shape)[:, None]), axis=0)
            for g in r.when:
                value = np.broadcast_to(evaluate(g.aff, env), grid.shape[1:])
                ok = ok & ((value >= 0) if g.op == "ge" else (value == 0))
            exact = np.unique(np.ravel_multi_index(cells[:, ok], shape)).size if ok.any() else 0
            assert least_cells(op, r, shape) <= exact, (op.outs, r)
            checked += 1
    assert checked


# streaming


def test_streamed_weights_cost_their_loads() -> None:
    graph = case("mlp").graph
    topo = topology(mesh_of("1"), memory=HUGE)
    plain = search(graph, topo)
    streamed = frozenset(t for t in graph.weights)
    found = spatial(build(graph, topo, {}, {}, {}, streamed=streamed), Budget.of(1.0))
    loads = [found.program.buffers[s.buffer] for s in found.program.steps if isinstance(s, Load)]
    seconds = sum(load_seconds(b.nbytes(0), topo.device) for b in loads if b.tensor in streamed)
    assert found.objective - plain.objective == pytest.approx(seconds, rel=1e-6)
    assert simulate(found.plan, found.program, topo).total == pytest.approx(found.objective, rel=1e-6)
    assert max(peak(found.program)) < max(peak(plain.program))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["1", "2"])
@pytest.mark.parametrize("name", ["mlp", "conv_chain", "attention", "residual"])
def test_the_fewest_streamed_weights_are_worked_out_exactly(name: str, mesh: str) -> None:
    graph = case(name).graph
    free = topology(mesh_of(mesh), memory=HUGE)
    every = spatial(build(graph, free, {}, {}, {}, streamed=frozenset(graph.weights) - set(graph.outputs)), Budget.of(1.0))
    for share in (1.0, 1.2, 1.5, 2.0):
        topo = topology(mesh_of(mesh), memory=int(max(peak(every.program)) * share))
        chosen = fewest(every, topo)
        now = max(peak(lower(replace(every.plan, streamed=chosen))))
        assert now <= topo.device.memory
        assert all(max(peak(lower(replace(every.plan, streamed=chosen - {t})))) > topo.device.memory for t in chosen)


def test_only_a_streamed_weight_may_be_freed() -> None:
    graph = case("mlp").graph
    plan = random_plan(graph, mesh_of("2"), random.Random(1), layouts=0.0)
    streamed = frozenset(graph.weights)
    program = lower(replace(plan, streamed=streamed))
    certificate.check(plan.annotated(), program, mesh=plan.mesh, streamed=streamed)
    with pytest.raises(LawError, match="holds a weight, which stays loaded"):
        certificate.check(plan.annotated(), program, mesh=plan.mesh, streamed=streamed - {next(iter(sorted(streamed)))})
    with pytest.raises(LawError, match="are no weights"):
        certificate.check(plan.annotated(), program, mesh=plan.mesh, streamed=streamed | {graph.outputs[0]})
    loads = [i for i, s in enumerate(program.steps) if isinstance(s, Load) and program.buffers[s.buffer].tensor in streamed]
    for i in loads:
        with pytest.raises(LawError):
            certificate.check(
                plan.annotated(), replace(program, steps=program.steps[:i] + program.steps[i + 1 :]), streamed=streamed
            )
    frees = next(i for i, s in enumerate(program.steps) if isinstance(s, Free))
    late = replace(program, steps=program.steps[:frees] + program.steps[frees + 1 :])
    with pytest.raises(LawError, match="not what is stated"):
        certificate.check(plan.annotated(), late, stated_peak=[p - 1 for p in peak(late)], streamed=streamed)


# what the search finds


def fitted(text: str, limit: int, seconds: float = 4.0) -> tuple[Graph, Fitted]:
    graph, topo = parse(text), topology(mesh_of("1"), memory=limit)
    first = spatial(build(graph, topo, {}, {}, {}), Budget.of(1.0))
    found = fit(graph, topo, first, budget=Budget.of(seconds))
    assert max(peak(found.found.program)) <= limit < max(peak(first.program))
    rng = np.random.default_rng(0)
    feeds = {t: rng.standard_normal(graph.tensors[t].shape).astype(np.float32) for t in graph.inputs}
    old, new = interp.run(graph, feeds, wide=True), interp.run(found.found.plan.graph, feeds, wide=True)
    for t, want in old.items():
        np.testing.assert_allclose(new[t], want, rtol=1e-9)
    return graph, found


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [0.5, 0.2, 0.1])
def test_a_long_attention_is_cut_over_queries(share: float) -> None:
    n = 96
    _, found = fitted(ATTENTION.format(n=n), int(2 * n * n * 4 * share))
    assert any(m.rule == "split_time" and m.text("dim") == "i" for m in found.moves)


TWO_LAYERS = """graph mlp
input x: f32[128, 256]
input w: f32[256, 2048]
input v: f32[2048, 256]
h: f32[128, 2048] = op [i: 128, n: 2048 | m: 256 sum]
  reads x[i, m], w[m, n]
  body x * w
  then max(acc0, 0.0)
y: f32[128, 256] = op [i: 128, n: 256 | m: 2048 sum]
  reads h[i, m], v[m, n]
  body h * v
output y
"""


def slow_wire(folder: Path) -> str:
    """A topology of devices that a slow wire joins."""
    device = {"memory": "1GiB", "bandwidth": 2e10, "launch": 5e-6, "vector": 1e10, "flops": {"f32": 1e11, "other": 5e10}}
    (folder / "slow.json").write_text(json.dumps({"device": device, "levels": [{"alpha": 1e-4, "beta": 1e-8}]}))
    return str(folder / "slow.json")


def two_layers(folder: Path, memory: str | None, **options) -> Compiled:
    """A plan of two layers for two devices."""
    (folder / "mlp.tap").write_text(TWO_LAYERS)
    return api.compile(folder / "mlp.tap", devices=2, topology=slow_wire(folder), memory=memory, **options)


@pytest.mark.slow
def test_a_split_in_time_is_a_choice_where_memory_costs_something(tmp_path) -> None:
    """Where rows are cut, both devices hold all of the weights: too much. Cutting columns fits, and sends partial sums."""
    free, tight = two_layers(tmp_path, None), two_layers(tmp_path, "2MiB")
    fit = tight.report["fit"]
    assert "fit" not in free.report and max(free.build.peak_bytes) > 2 << 20 >= max(tight.build.peak_bytes)
    assert any("split_time" in m for m in tight.report["moves"])
    assert tight.report["lower_bound_s"] <= tight.report["objective_s"] < fit["in_space_s"] * 0.99
    assert "split in time, as the best plan in space that fits takes" in tight.explain()
    feeds = tight.random_feeds()
    want = np.maximum(feeds["x"] @ feeds["w"], 0) @ feeds["v"]
    np.testing.assert_allclose(tight.run(feeds)["y"], want, rtol=1e-3, atol=1e-3)
    tight.save(tmp_path / "build")
    assert verify_build(tmp_path / "build")[1]["memory"] > 0
    again = two_layers(tmp_path, "2MiB", resume=tmp_path / "build", time_limit=0)
    assert again.report["objective_s"] <= tight.report["objective_s"] * (1 + 1e-9)


def test_one_dimension_is_cut_in_time_and_in_space() -> None:
    graph = parse(TWO_LAYERS)
    parts = apply_moves(graph, [time_move(graph.ops[1], "i", 4, 1)])
    pins = {k: (strategy.Pin("i", 0),) for k, op in enumerate(parts.ops) if "@" in op.outs[0]}
    found = search(parts, topology(mesh_of("2")), pins=pins)
    assert len(pins) == 8 and {found.plan.strategies[k].dims for k in pins} == {("i",)}
    certificate.check(found.plan.annotated(), found.program, mesh=found.plan.mesh)


@pytest.mark.slow
def test_a_tensor_that_waits_is_computed_again() -> None:
    _, found = fitted(SKIP, 10_000)  # b and c, or c and d; a would make it 12,288
    assert [m.rule for m in found.moves] == ["recompute"]


def test_what_cannot_fit_says_by_how_much_and_what_was_tried() -> None:
    graph, topo = parse(SKIP), topology(mesh_of("1"), memory=4000)
    with pytest.raises(TooBig) as e:
        fit(graph, topo, spatial(build(graph, topo, {}, {}, {}), Budget.of(1.0)), budget=Budget.of(20.0))
    text = str(e.value)
    assert "bytes of 4,000" in text and "too many" in text and "device 0" in text and "tried" in text and "split_time" in text


@pytest.mark.slow
def test_a_result_that_another_one_is_made_of_is_counted_once() -> None:
    text = """graph two
input x: f32[64, 64]
a: f32[64, 512] = op [i: 64, j: 512]
  reads x[i, 0]
  body x * 2.0
h: f32[64, 64] = op [i: 64, j: 64 | k: 512 sum]
  reads a[i, k]
  body a
y: f32[64, 64] = op [i: 64, j: 64]
  reads h[i, j]
  body max(h, 0.0)
output h, y
"""
    _, found = fitted(text, 42_000)  # both results are 32,768; a alone is 131,072
    assert any(m.rule == "split_time" for m in found.moves)


@pytest.mark.slow
def test_lowering_many_parts_compares_few_footprints(monkeypatch) -> None:
    """A tensor that is read in n parts: about one comparison (with all parts at once) for each part, not one for each two."""
    text = "graph parts\ninput x: f32[512]\ny: f32[512] = op [i: 512]\n  reads x[i]\n  body max(x, 0.0)\noutput y\n"
    graph = parse(text)
    graph = apply_moves(graph, [time_move(graph.ops[0], "i", 512, 0)])
    counted = {"comparisons": 0}

    def count(outers, inner):
        counted["comparisons"] += 1
        return strategy.which_cover(outers, inner)

    monkeypatch.setattr(lowering, "which_cover", count)
    monkeypatch.setattr(lowering, "covers", lambda outer, inner: bool(count(outer[None], inner)[0]))
    plan = spatial(build(graph, topology(mesh_of("2")), {}, {}, {}), Budget.of(0.0)).plan
    counted["comparisons"] = 0
    lower(plan)
    assert len(graph.ops) > 512 and 512 < counted["comparisons"] < 8 * len(graph.ops)


def test_no_regions_are_looked_at_when_the_time_is_up(monkeypatch) -> None:
    graph, topo = parse(SKIP), topology(mesh_of("1"), memory=4000)
    plan, asked, region = spatial(build(graph, topo, {}, {}, {}), Budget.of(1.0)), [0], split_time.region

    def count(*args):
        asked[0] += 1
        return region(*args)

    monkeypatch.setattr(split_time, "region", count)
    moves(graph, plan, topo, Budget.of(0.0))
    assert asked == [0]
    moves(graph, plan, topo, Budget.of(math.inf))
    assert asked[0] > 5


@pytest.mark.slow
def test_the_command_line_fits_checks_and_explains(tmp_path) -> None:
    folder, model = tmp_path / "b", save("mlp")
    free = document("compile", model, "-o", folder)
    limit = int(free["unsharded_peak_bytes"] * 0.7)
    assert "fit" not in free
    made = document("compile", model, "-o", folder, "--memory", str(limit), "--time-limit", "5")
    assert max(made["peak_bytes"]) <= limit and made["fit"]["short_bytes"] == free["peak_bytes"][0] - limit
    assert made["unsharded_peak_bytes"] == free["unsharded_peak_bytes"]
    assert made["fit"]["streamed"] or made["moves"]
    assert json.loads((folder / "plan.json").read_text())["streamed"] == made["fit"]["streamed"]
    assert document("run", folder, "--check")["peak_bytes"] == made["peak_bytes"]
    assert run("verify", folder, "-q")[0] == 0
    text = " ".join(run("explain", folder)[1].split())
    assert "no plan in space fits" in text and f"{made['fit']['short_bytes']:,} bytes more" in text
