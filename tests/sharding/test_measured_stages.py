"""``auto-shard --cut`` and ``--measure``: the user's own stages, and candidates that are compiled and run."""

from __future__ import annotations

import json
import re
import sys

import onnx
import pytest

from tapestry.cli import main
from tapestry.errors import PlanError
from tapestry.tools.auto_shard import auto_shard, manual, scheme_cost
from tapestry.tools.auto_shard.measured_search import Search, Trial, stages_of
from tapestry.tools.auto_shard.scheme_cost import Problem
from tests.support.stages.stage_graphs import all_schemes, branches, random_graph, save


@pytest.mark.parametrize("seed", range(30))
def test_the_nodes_that_are_named_make_the_same_stages(seed):
    """Any stages are found again, at the same cost, from the nodes at which they end."""
    graph = random_graph(seed, 8)
    if any("," in n for n in graph.names):
        return
    problem = Problem(graph, [(k,) for k in range(len(graph.names))])
    for scheme in list(all_schemes(problem, 3))[:20]:
        cuts = [",".join(manual.ends(problem, mask)) for mask in scheme[:-1]]
        again, found = manual.scheme_at(graph, cuts)
        assert [again.cost(a) for a in found] == [problem.cost(b) for b in scheme]


def command(capsys, *args):
    capsys.readouterr()
    status = main(["auto-shard", *map(str, args)])
    return status, capsys.readouterr()


def test_own_cuts_are_written_beside_what_the_search_would_do(tmp_path, capsys):
    path = save(branches(), tmp_path)
    status, out = command(capsys, "--input-model", path, "--cut", "relu1,right1", "residual2", "--json")
    document = json.loads(out.out)
    assert status == 0 and document["chosen"] == "manual" and document["devices"] == 3
    assert document["sharding_nodes"] == [["relu1", "right1"], ["residual2"]]
    made = onnx.load(document["output"])
    stages = {n.name: n.device_configurations[0].pipeline_stage for n in made.graph.node}
    assert [stages[n] for n in ("relu1", "right1", "join1", "residual2", "left3")] == [0, 0, 1, 1, 2]
    own, best = document["manual"], document["dynamic"]
    assert (best["interval_s"], best["latency_s"]) <= (own["interval_s"], own["latency_s"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--cut", "nowhere"], "there is no node 'nowhere'"),
        (["--cut", "residual2", "residual0"], "stage 1 would compute nothing"),
        (["--cut", "residual3"], "stage 1 would compute nothing"),
        (["--cut", "residual1", "--num-devices", "3"], "make 2 stages, not 3"),
        (["--cut", "residual1", "--memory", "3000"], "bytes too many"),
        ([], "--num-devices"),
    ],
)
def test_cuts_that_are_none_are_refused(tmp_path, capsys, args, words):
    path = save(branches(), tmp_path)
    status, out = command(capsys, "--input-model", path, *args)
    assert status == 2 and words in out.err and list(tmp_path.iterdir()) == [path]


def searched(peaks, seconds, *, optimal, proportions=(0.4, 0.7, 0.9), memory=100, limit=24):
    """PopRT's search on a random graph, with peaks and seconds of two stages by where the first one ends."""
    graph = random_graph(3, 24)
    problem = Problem(graph, scheme_cost.candidate_subgraphs(graph, scheme_cost.everywhere(graph)))
    seen: list[tuple[int, int]] = []

    def trials(schemes, capacity):
        out = []
        for s in schemes:
            at = s.count(0)
            seen.append((at, capacity))
            fits = max(peaks(at)) <= capacity
            out.append(Trial(peaks(at), seconds(at) if fits else None))
        return out

    capacities = [(p, int(p * memory)) for p in proportions]
    return Search(problem, 2, capacities, trials, limit, 1).traversal(optimal=optimal), seen


def test_without_optimal_the_first_that_fits_is_taken():
    found, seen = searched(lambda at: (1, 1), lambda at: float(at), optimal=False)
    assert len(seen) == found["candidates"] == 1 and found["fits"] and found["available_memory_proportion"] == 0.6


def test_with_optimal_the_fastest_is_taken():
    found, seen = searched(lambda at: (1, 1), lambda at: float(at), optimal=True)
    assert (
        len(seen) > 1
        and found["latency_s"] == min(at for at, _ in seen)
        and found["throughput_per_s"] == 1 / found["latency_s"]
    )


def test_the_fastest_are_run_once_more_in_turns():
    """A clock that favours another candidate in turns than alone: the turns count, for the traversal's and the exact stages."""
    graph = random_graph(3, 24)
    problem = Problem(graph, scheme_cost.candidate_subgraphs(graph, scheme_cost.everywhere(graph)))
    asked: list[list[int]] = []

    def turns(schemes):
        asked.extend(map(list, schemes))
        return [1.0 / (k + 1) for k in range(len(schemes))]

    search = Search(problem, 2, [(1.0, 100)], lambda ss, _: [Trial((1, 1), float(s.count(0))) for s in ss], 24, 1)
    alone = search.traversal(optimal=True)
    other = {**alone, "node_stages": [0] * 23 + [1]}
    found = search.final({"traversal": alone, "exact": other}, turns)
    assert asked[0] == alone["node_stages"] and asked[-1] == other["node_stages"] and len(asked) == 4
    assert found["traversal"]["node_stages"] == asked[2] and found["traversal"]["finalists_s"] == [1, 1 / 2, 1 / 3]
    assert found["traversal"]["latency_s"] == 1 / 3 and found["exact"]["latency_s"] == 1 / 4
    first = Search(problem, 2, [(1.0, 100)], lambda ss, _: [Trial((1, 1), 1.0) for _ in ss], 24, 1)
    assert "finalists_s" in first.final({"traversal": first.traversal(optimal=False)}, lambda ss: [2.0] * len(ss))["traversal"]


def test_where_none_fits_the_least_is_tried_with_more_memory():
    found, seen = searched(lambda at: (60 + at, 50), lambda at: 1.0, optimal=False)
    least = min(at for at, capacity in seen if capacity == 40)
    assert found["proportion"] == 0.7 and found["available_memory_proportion"] == 0.3
    assert seen[-1] == (least, 70) and found["node_stages"].count(0) == least
    with pytest.raises(PlanError, match=r"none of .* compiled candidates fits: 5 bytes too many"):
        searched(lambda at: (95, 50), lambda at: 1.0, optimal=False)


def test_no_more_are_compiled_than_asked():
    _, seen = searched(lambda at: (99, 99), lambda at: 1.0, optimal=True, proportions=(0.4, 1.0), limit=sys.maxsize)
    assert [c for _, c in seen][-1] == 100 and len(seen) > 4  # it ends by itself
    _, seen = searched(lambda at: (99, 99), lambda at: 1.0, optimal=True, proportions=(0.4, 1.0), limit=3)
    assert [c for _, c in seen] == [40, 40, 40, 100]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimal", [False, True])
def test_poprts_lines_are_printed(tmp_path, capsys, optimal):
    """Two devices; with too little memory at first where performance is not asked for, as in PopRT's own examples."""
    path = save(branches(), tmp_path)
    tight = [] if optimal else ["--memory", 9000]
    more = ["--optimal-perf"] if optimal else []
    args = ["--input-model", path, "--num-devices", 2, "--num-processes", 1, "--measure", "--max-candidates", 3, *tight, *more]
    status, out = command(capsys, *args)
    assert status == 0, out.err
    word = "optimal latency" if optimal else "latency"
    head = r"The optimal solution:" if optimal else r"Compile successfully available_memory_proportion 0\.3 and solution:"
    lines = (
        rf"\[Success\] {head}\nSharding nodes: Device 0 - \['\w+'\]\n\[Success\] The {word} ([\d.]+) ms, tput ([\d.]+)\n"
        rf"\[Success\] Save the sharded model to {re.escape(str(path.with_name('m.auto_sharded.onnx')))}\n"
    )
    found = re.search(lines, out.out)
    assert found, out.out
    assert float(found[1]) * float(found[2]) == pytest.approx(1000)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.auto_sharded.onnx", "m.onnx"]


@pytest.mark.slow
def test_stages_run_in_processes_of_their_own(tmp_path, capsys):
    path = save(branches(), tmp_path)
    args = ["--input-model", path, "--num-devices", 2, "--num-processes", 1, "--max-candidates", 1]
    status, out = command(capsys, *args, "--apart")
    assert status == 2 and "--measure" in out.err and list(tmp_path.iterdir()) == [path]
    status, out = command(capsys, *args, "--measure", "--apart", "--json")
    measured = json.loads(out.out)["measured"]
    assert status == 0 and measured["processes"] == 2 and measured["exact"]["latency_s"] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.auto_sharded.onnx", "m.onnx"]


def test_a_document_says_what_was_measured(tmp_path):
    path = save(branches(2), tmp_path)
    problem_stages = []

    def trials(schemes, capacity):
        problem_stages.extend(schemes)
        return [Trial((10, 10), 0.5) for _ in schemes]

    document = auto_shard.auto_shard(auto_shard.Options(model=path, devices=2), trials=trials)
    m = document["measured"]
    assert m["chosen"] in ("traversal", "exact") and m[m["chosen"]]["node_stages"] == document["node_stages"]
    assert document["node_stages"] in [list(s) for s in problem_stages]
    assert stages_of(Problem(random_graph(1), [(k,) for k in range(len(random_graph(1).names))]), (1, 2))[:2] == [0, 1]
