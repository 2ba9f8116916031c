"""``tapestry auto-shard``: laws of schemes on random graphs, the dynamic program against brute force, the file it writes."""

from __future__ import annotations

import itertools
import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T

from tapestry.cli import main
from tapestry.errors import PlanError, TapestryError
from tapestry.plan.topology import parse_mesh, topology
from tapestry.tools.auto_shard import auto_shard, dynamic_program, scheme_cost
from tapestry.tools.auto_shard.node_graph import NodeGraph, node_graph
from tapestry.tools.auto_shard.scheme_cost import Problem, bits
from tapestry.tools.auto_shard.traversal import initial, moves, traverse
from tests.support.small_models import N, f32, net
from tests.support.stages.stage_graphs import all_schemes, branches, random_graph, save

SEEDS = range(60)


def naive_memory(graph: NodeGraph, inside: set[int]) -> int:
    """Weights and peak of a set of nodes, straight from the definition: at each step, what is there?"""
    weights = sum(graph.weight_bytes[w] for w in {w for k in inside for w in graph.weights[k]})
    steps = [s for s in graph.steps if s.node in inside]
    peak = 0
    for at in range(len(steps)):
        alive = 0
        for t, size in enumerate(graph.sizes):
            made = next((i for i, s in enumerate(steps) if t in s.writes), -1)
            uses = [i for i, s in enumerate(steps) if t in s.reads]
            leaves = t in graph.kept or any(t in s.reads for s in graph.steps if s.node not in inside)
            if made < 0 and not uses:
                continue
            last = len(steps) if made >= 0 and leaves else max([made, *uses])
            alive += size * (made <= at <= last)
        peak = max(peak, alive)
    return weights + peak


def assert_scheme(problem: Problem, scheme: tuple[int, ...]) -> None:
    """No stage is empty, every subgraph is in exactly one, and edges never go back."""
    assert all(scheme) and sum(scheme) == problem.all and sum(m.bit_count() for m in scheme) == len(problem.units)
    stage = {u: k for k, m in enumerate(scheme) for u in bits(m)}
    assert all(stage[p] <= stage[u] for u in stage for p in bits(problem.parents[u]))


# --- graphs and subgraphs


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_subgraphs_partition_the_nodes_in_topological_order(seed):
    graph = random_graph(seed, 30)
    for tops in (scheme_cost.joins(graph), scheme_cost.everywhere(graph)):
        units = scheme_cost.candidate_subgraphs(graph, tops)
        for wanted in (1, 3, 100):
            merged = scheme_cost.merge(graph, units, wanted, min(2, len(units)))
            fine = scheme_cost.refine(graph, merged, 2 * wanted)
            for some in (units, merged, fine):
                assert sorted(k for u in some for k in u) == list(range(len(graph.names)))
                assert all(mask < 1 << u for u, mask in enumerate(Problem(graph, some).parents)), (
                    "an edge goes back in the list"
                )
            whole = Problem(graph, merged)
            whole.translate((whole.all,), Problem(graph, fine))  # nothing is torn apart


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_memory_of_a_stage_is_what_its_definition_says(seed):
    graph = random_graph(seed)
    problem = Problem(graph, [(k,) for k in range(len(graph.names))])
    for scheme in itertools.islice(all_schemes(problem, 3), 20):
        for mask in scheme:
            assert problem.cost(mask).memory == naive_memory(graph, set(bits(mask)))


# --- the searches


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_heuristic_keeps_the_laws_and_the_program_is_never_worse(seed):
    graph = random_graph(seed, 24)
    units = scheme_cost.candidate_subgraphs(graph, scheme_cost.everywhere(graph))
    devices = 2 + seed % 3
    if len(units) < devices:
        return
    coarse = scheme_cost.merge(graph, units, 8, devices)
    merged, problem = Problem(graph, coarse), Problem(graph, scheme_cost.refine(graph, coarse, 100))
    start = initial(merged, devices)
    assert_scheme(merged, start)
    for g in range(devices):
        for _, scheme in moves(merged, start, g):
            assert_scheme(merged, scheme)
    for share, optimal in ((0.5, False), (0.7, True), (2.0, True)):
        capacity = int(share * merged.evaluate(start).memory)
        seen = traverse(merged, start, capacity, lambda some: [merged.evaluate(s) for s in some], optimal=optimal)
        best = seen.best or seen.least
        assert best is not None
        known = [merged.translate(best.scheme, problem)]
        assert problem.evaluate(known[0]).stages == best.stages, "costs depend on how nodes are grouped"
        for limit in (1, 700):  # prefixes of orders only, and every cut
            found = dynamic_program.solve(
                problem, devices, capacity, dynamic_program.family(problem, known, merged, limit), known
            )
            if seen.best is None and found is None:
                continue
            assert found is not None
            assert_scheme(problem, found.scheme)
            assert found.memory <= capacity
            assert seen.best is None or found.rank <= seen.best.rank


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_program_equals_brute_force(seed):
    graph = random_graph(seed, 8)
    problem = Problem(graph, [(k,) for k in range(len(graph.names))])
    devices = 2 + seed % 2
    every = [problem.evaluate(s) for s in all_schemes(problem, devices)]
    family = dynamic_program.family(problem)
    assert family.complete
    least = min(e.memory for e in every)
    for capacity in (least - 1, least, (least + max(e.memory for e in every)) // 2, 1 << 60):
        best = min((e.rank for e in every if e.memory <= capacity), default=None)
        found = dynamic_program.solve(problem, devices, capacity, family)
        assert best == (found.rank if found else None)
        smallest = dynamic_program.least_memory(problem, devices, family)
        assert smallest is not None and smallest.memory == least


# --- files


def shard(capsys, *args) -> dict:
    capsys.readouterr()
    assert main(["auto-shard", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def stages_of(model: onnx.ModelProto) -> list[int]:
    marks = [
        [c.pipeline_stage for c in n.device_configurations if c.configuration_id == "tapestry.auto_shard"]
        for n in model.graph.node
    ]
    assert all(len(m) == 1 for m in marks)
    return [m[0] for m in marks]


def outputs(path) -> list:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {i.name: np.random.default_rng(0).standard_normal(i.shape).astype(np.float32) for i in session.get_inputs()}
    return session.run(None, feeds)


@pytest.mark.parametrize("tied", [False, True])
def test_the_file_says_the_stages_and_runs_as_before(tmp_path, capsys, tied):
    path = save(branches(tied=tied), tmp_path)
    document = shard(capsys, "--input-model", path, "--num-devices", 3, "--optimal-perf")
    out = tmp_path / "m.auto_sharded.onnx"
    assert document["output"] == str(out) and sorted(p.name for p in tmp_path.iterdir()) == ["m.auto_sharded.onnx", "m.onnx"]
    onnx.checker.check_model(str(out), full_check=True)
    model = onnx.load(out)
    assert 11 <= model.ir_version <= 13
    assert [(c.name, c.num_devices) for c in model.configuration] == [("tapestry.auto_shard", 3)]
    assert main(["check-sharding", str(out), "-q"]) == 0
    stages = stages_of(model)
    assert stages == document["node_stages"] and set(stages) == {0, 1, 2}
    made = {o: s for n, s in zip(model.graph.node, stages) for o in n.output}
    assert all(made.get(i, 0) <= s for n, s in zip(model.graph.node, stages) for i in n.input)
    for a, b in zip(outputs(path), outputs(out), strict=True):
        np.testing.assert_array_equal(a, b)
    heuristic, program = document["heuristic"], document["dynamic"]
    assert (program["interval_s"], program["latency_s"]) <= (heuristic["interval_s"], heuristic["latency_s"])
    assert sum(s["nodes"] for s in program["stages"]) == document["nodes"] == len(stages)
    again = shard(capsys, "--input-model", out, "--num-devices", 2)  # stages of an earlier run are replaced
    assert again["devices"] == 2 and len(onnx.load(again["output"]).configuration) == 1


def test_bytes_and_flops_come_from_index_spaces(tmp_path, capsys):
    width, blocks = 16, 4
    document = shard(capsys, "--input-model", save(branches(blocks, width), tmp_path), "--num-devices", 2)
    stages = document["dynamic"]["stages"]
    assert sum(s["weight_bytes"] for s in stages) == blocks * 2 * width * width * 4 + 2 * 8  # 'flat' is a weight as well
    matmul, maps = 2 * 8 * width * width * 2, 3 * 8 * width  # two products; Relu and two sums
    assert sum(s["flops"] for s in stages) == blocks * (matmul + maps)


def test_memory_is_kept_and_later_proportions_are_fallbacks(tmp_path, capsys):
    path = save(branches(), tmp_path)
    loose = shard(capsys, "--input-model", path, "--num-devices", 2)
    assert loose["proportion"] == 0.4
    need = loose["dynamic"]["peak_bytes"]
    tight = shard(
        capsys, "--input-model", path, "--num-devices", 2, "--memory", 2 * need, "--memory-proportion", "0.1", "0.5", "1"
    )
    assert tight["proportion"] == 0.5 and tight["dynamic"]["peak_bytes"] <= need


def test_what_cannot_fit_is_refused_with_bytes_and_node(tmp_path):
    path = save(branches(), tmp_path)
    options = auto_shard.Options(model=path, devices=3, memory="3000", proportions=(1.0,))
    with pytest.raises(PlanError) as caught:
        auto_shard.auto_shard(options)
    e = caught.value
    over = int(e.what.split(": ")[1].split()[0].replace(",", ""))
    assert e.where.startswith("node '") and "wa" in e.why and over > 0 and list(tmp_path.iterdir()) == [path]
    auto_shard.auto_shard(
        auto_shard.Options(model=path, devices=3, memory=str(3000 + over), proportions=(1.0,))
    )  # exactly so many are missing
    with pytest.raises(PlanError):
        auto_shard.auto_shard(auto_shard.Options(model=path, devices=3, memory=str(3000 + over - 1), proportions=(1.0,)))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"--num-devices": "0"}, "--num-devices"),
        ({"--num-devices": "500"}, "more than the model has subgraphs"),
        ({"--num-processes": "0"}, "--num-processes"),
        ({"--memory-proportion": "1.5"}, "--memory-proportion"),
        ({"--memory-proportion": "nan"}, "--memory-proportion"),
        ({"--memory": "lots"}, "not an amount of memory"),
        ({"--memory": "64"}, "bytes too many"),
        ({"--topology": "moon"}, "not a topology"),
        ({"--shape": "batch"}, "symbol=size"),
        ({"--input-model": "missing.onnx"}, "cannot read the model"),
        ({"--output-model": "/nowhere/x.onnx"}, "does not exist"),
    ],
)
def test_bad_requests_end_with_status_2_and_no_file(tmp_path, capsys, change, words):
    path = save(branches(), tmp_path)
    args = {"--input-model": str(path), "--num-devices": "2", **change}
    assert main(["auto-shard", *itertools.chain(*args.items())]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_external_data_stays_within_reach(tmp_path, capsys):
    path = tmp_path / "big.onnx"
    onnx.save(branches(width=32), path, save_as_external_data=True, location="big.bin", size_threshold=100)
    document = shard(capsys, "--input-model", path, "--num-devices", 2)
    np.testing.assert_array_equal(outputs(path)[0], outputs(document["output"])[0])
    assert (tmp_path / "big.auto_sharded.onnx").stat().st_size < (tmp_path / "big.bin").stat().st_size
    (tmp_path / "other").mkdir()
    with pytest.raises(TapestryError, match="out of reach"):
        auto_shard.auto_shard(auto_shard.Options(model=path, devices=2, output=tmp_path / "other" / "big.onnx"))
    with pytest.raises(TapestryError, match="cannot write there"):
        auto_shard.auto_shard(auto_shard.Options(model=path, devices=2, output=path))


def test_a_chain_has_no_joins_and_is_cut_at_every_node(tmp_path, capsys):
    names = ["x", *(f"h{k}" for k in range(6))]
    nodes = [N("MatMul", [a, f"w{k}"], [b], f"mm{k}") for k, (a, b) in enumerate(itertools.pairwise(names))]
    model = net(nodes, {"x": (T.FLOAT, [4, 8])}, {"h5": T.FLOAT}, {f"w{k}": f32(8, 8) for k in range(6)})
    document = shard(capsys, "--input-model", save(model, tmp_path), "--num-devices", 3)
    assert document["candidates"] == "every node" and document["node_stages"] == [0, 0, 1, 1, 2, 2]
    assert document["sharding_nodes"] == [["mm1"], ["mm3"]]


def test_subgraphs_of_nodes_are_marked_too_and_symbols_are_bound(tmp_path, capsys):
    body = {
        side: onnx.helper.make_graph([N(op, ["h"], [side], f"in_{side}")], side, [], [onnx.helper.make_tensor_value_info(side, T.FLOAT, None)])
        for side, op in (("yes", "Relu"), ("no", "Neg"))
    }  # fmt: skip
    nodes = [
        N("MatMul", ["x", "w"], ["h"], "mm"),
        N("If", ["c"], ["i"], "if", then_branch=body["yes"], else_branch=body["no"]),
        N("Add", ["i", "h"], ["y"], "add"),
    ]
    model = net(nodes, {"x": (T.FLOAT, ["batch", 4]), "c": (T.BOOL, [])}, {"y": T.FLOAT}, {"w": f32(4, 4)})
    document = shard(capsys, "--input-model", save(model, tmp_path), "--num-devices", 2, "--shape", "batch=6")
    model = onnx.load(document["output"])
    stages = stages_of(model)
    inner = [n for a in model.graph.node[1].attribute for n in a.g.node]
    assert [c.pipeline_stage for n in inner for c in n.device_configurations] == [stages[1]] * 2


@pytest.mark.parametrize("names", [True, False])
def test_views_and_folded_nodes_cost_nothing(names):
    from tapestry.lift import lift
    from tapestry.lift.file.structure import load
    from tests.support.small_models import FOLDER

    path = save(branches(2, names=names), FOLDER, "auto_shard_views.onnx")
    graph = node_graph(load(path), lift(path).graph, topology(parse_mesh("2")))
    free = {graph.names[k] for k in range(len(graph.names))} - {graph.names[s.node] for s in graph.steps}
    assert free == {"shape", "view", "back"}
    assert all(s.time > 0 for s in graph.steps)
    assert sorted(s.node for s in graph.steps) == list(range(10))  # nodes of one name are told apart by what they write


def test_what_is_sent_is_priced_over_the_slowest_link():
    from tapestry.lift import lift
    from tapestry.lift.file.structure import load
    from tests.support.small_models import FOLDER

    path = save(branches(2), FOLDER, "auto_shard_links.onnx")
    near, far = (node_graph(load(path), lift(path).graph, topology(parse_mesh(n), "h100")).moves for n in ("8", "16"))
    assert all(a < b for a, b in zip(near, far, strict=True))  # 16 devices are two nodes
