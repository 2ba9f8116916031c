"""Networks with usages over time: reductions, bounds and the whole search against brute force; the contest's files."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from bench.planning import iopddl
from tapestry.plan.solver import neighbourhood, network, pairwise
from tapestry.plan.solver.ascent import LEVELS, PEELS, Messages, levels
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.crossover import Mixture
from tapestry.plan.solver.lagrange import ascend
from tapestry.plan.solver.mip import Program
from tapestry.plan.solver.network_reduction import Reduction, components, limit_usage, reduce
from tapestry.plan.solver.pairs import Infeasible, Multipliers, certify, from_instance, rule_out
from tests.support.paths import SHARED

INFINITE = 10**18


def random_problem(seed: int, *, forbid: float = 0.2, tightness: float = 0.6) -> dict:
    """At most 7 nodes in the contest's form: forbidden entries, one-to-one and separable tables, parallel edges, empty intervals."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 8))
    sizes = [int(s) for s in rng.integers(1, 5, count)]
    intervals, usages, costs = [], [], []
    for s in sizes:
        lo = int(rng.integers(0, 8))
        intervals.append([lo, lo + int(rng.integers(0, 7))])
        usages.append([int(u) for u in rng.integers(0, 20, s)])
        costs.append([int(c) if rng.random() > forbid / 3 else INFINITE for c in rng.integers(0, 50, s)])
    pairs = [[int(rng.integers(0, n)), n] for n in range(1, count)]
    pairs += [[int(x) for x in rng.permutation(count)[:2]] for _ in range(int(rng.integers(0, 5)))]
    tables = []
    for i, j in pairs:
        kind = rng.random()
        table = rng.integers(0, 60, (sizes[i], sizes[j])).astype(object)
        if kind < 0.25 and sizes[i] == sizes[j]:  # one to one
            allowed = rng.permutation(sizes[i])
            table = np.array(
                [[table[a, b] if allowed[a] == b else INFINITE for b in range(sizes[j])] for a in range(sizes[i])], object
            )
        elif kind < 0.4:  # separable
            table = rng.integers(0, 30, (sizes[i], 1)) + rng.integers(0, 30, (1, sizes[j]))
        else:
            table[rng.random(table.shape) < forbid] = INFINITE
        tables.append([int(x) for x in np.asarray(table).ravel()])
    limit = int(tightness * sum(max(u) for u in usages)) + 1
    nodes = {"intervals": intervals, "costs": costs, "usages": usages}
    return {"name": f"random{seed}", "nodes": nodes, "edges": {"nodes": pairs, "costs": tables}, "usage_limit": limit}


def brute(problem: dict) -> float:
    best = float("inf")
    for choice in itertools.product(*(range(len(c)) for c in problem["nodes"]["costs"])):
        cost, peak = iopddl.evaluate(problem, list(choice))
        if cost >= 0 and peak <= problem["usage_limit"]:
            best = min(best, cost)
    return best


CASES = [(seed, forbid, tight) for seed in range(60) for forbid, tight in ((0.0, 0.35), (0.2, 0.45), (0.1, 0.9))]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("seed", "forbid", "tight"), CASES)
def test_search_finds_the_optimum_and_proves_it(seed, forbid, tight):
    problem = random_problem(seed, forbid=forbid, tightness=tight)
    best = brute(problem)
    found = pairwise.search(iopddl.instance(problem), 20.0).solution()
    if np.isinf(best):
        assert np.isinf(found.objective)
        return
    cost, peak = iopddl.evaluate(problem, found.choice)
    assert peak <= problem["usage_limit"]
    assert cost == found.objective == best
    assert best * (1 - 1e-6) - 1e-6 <= found.bound <= best * (1 + 1e-9)


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("seed", "forbid", "tight"), CASES[:90])
def test_reductions_keep_the_optimum(seed, forbid, tight):
    """Brute force over what is left, lifted back, gives the brute-force optimum."""
    problem = random_problem(seed, forbid=forbid, tightness=tight)
    best, given = brute(problem), iopddl.instance(problem)
    net, done = from_instance(given), Reduction()
    try:
        reduce(net, done)
    except Infeasible:
        assert np.isinf(best)
        return
    nodes = net.nodes()
    options = [np.flatnonzero(net.alive() & (net.node == n)) for n in nodes]
    least = np.inf
    for picked in itertools.product(*options):
        full = net.start[:-1].copy()
        full[nodes] = picked
        choice = done.lift(full) - net.start[:-1]
        if given.excess(choice) <= 0:
            least = min(least, given.cost(choice))
    assert least == best


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(40))
def test_any_multipliers_give_a_bound_and_rule_out_nothing_better(seed):
    problem = random_problem(seed, forbid=0.15, tightness=0.5)
    best, given = brute(problem), iopddl.instance(problem)
    net = from_instance(given)
    rng = np.random.default_rng(seed)
    slots = net.slots()
    use = rng.random(len(net.usage.limit)) * (rng.random(len(net.usage.limit)) < 0.3)
    any_ = Multipliers(use, rng.normal(size=len(slots[1])) * 5, rng.normal(size=len(slots[3])) * 5)
    proof = certify(net, any_)
    if np.isinf(best):
        return
    assert proof.bound <= best + 1e-9
    assert rule_out(net, proof, best) >= 0
    left = [np.flatnonzero(net.alive() & (net.node == n)) for n in range(len(given.sizes))]
    pairs = {(int(e), int(a), int(b)) for e, a, b in zip(net.edge, net.a, net.b, strict=True)}
    start = net.start[:-1]
    hit = False
    for picked in itertools.product(*left):
        choice = np.array(picked) - start
        ok = all((e, picked[i], picked[j]) in pairs for e, (i, j) in enumerate(given.pairs))
        hit |= ok and given.excess(choice) <= 0 and given.cost(choice) == best
    assert hit


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(30))
def test_messages_and_prices_never_pass_the_optimum(seed):
    problem = random_problem(seed, forbid=0.1, tightness=0.45)
    best, given = brute(problem), iopddl.instance(problem)
    net = from_instance(given)
    try:
        reduce(net, Reduction())
    except Infeasible:
        return
    if not len(net.nodes()):
        return
    messages = Messages(net)
    state = ascend(messages, np.zeros(len(net.usage.limit)), Budget.of(5.0), Mixture(messages))
    multipliers = state.multipliers()
    proof = certify(net, multipliers)
    assert proof.bound == pytest.approx(state.best + net.constant, abs=1e-6)
    assert proof.bound <= best + 1e-6
    point = Program(net).relax(Budget.of(10.0))
    if point is not None and point.multipliers is not None:
        bound = certify(net, point.multipliers).bound
        assert proof.bound - 1e-4 <= bound <= best + 1e-4
    net.move(multipliers.tails, multipliers.heads)
    none = Multipliers(multipliers.price, 0 * multipliers.tails, 0 * multipliers.heads)
    assert certify(net, none).bound == pytest.approx(proof.bound, abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_neighbourhoods_alone_give_feasible_choices(seed, monkeypatch):
    """Without the integer program on the whole, and parts of a few joint choices."""
    monkeypatch.setattr(pairwise, "EXACT", -1)
    monkeypatch.setattr(neighbourhood, "PART", 12)
    monkeypatch.setattr(pairwise, "BRANCH", -1)
    problem = random_problem(seed, forbid=0.1, tightness=0.5)
    best = brute(problem)
    found = pairwise.search(iopddl.instance(problem), 1.5).solution()
    if np.isfinite(found.objective):
        cost, peak = iopddl.evaluate(problem, found.choice)
        assert cost == found.objective
        assert peak <= problem["usage_limit"]
        assert found.bound <= best + 1e-6 <= cost + 2e-6


def test_usage_of_one_time_decides():
    """Two nodes alive together at t = 2 only: there not both may take the cheap, large choice."""
    nodes = {"intervals": [[0, 3], [2, 5]], "costs": [[0, 7], [0, 5]], "usages": [[6, 1], [6, 2]]}
    problem = {"nodes": nodes, "edges": {"nodes": [], "costs": []}, "usage_limit": 10}
    found = pairwise.search(iopddl.instance(problem), 5.0).solution()
    assert (found.choice, found.objective, found.bound) == ([0, 1], 5.0, 5.0)
    nodes["intervals"][1] = [3, 5]  # half-open: no longer together
    found = pairwise.search(iopddl.instance(problem), 5.0).solution()
    assert (found.choice, found.objective) == ([0, 0], 0.0)


def test_nothing_fits():
    nodes = {"intervals": [[0, 3], [2, 5]], "costs": [[0, 7], [0, 5]], "usages": [[6, 5], [6, 8]]}
    problem = {"nodes": nodes, "edges": {"nodes": [], "costs": []}, "usage_limit": 10}
    found = pairwise.search(iopddl.instance(problem), 5.0).solution()
    assert np.isinf(found.objective)


def test_the_evaluator_counts_by_hand():
    nodes = {"intervals": [[0, 2], [1, 3], [2, 2]], "costs": [[1, 2], [3], [4]], "usages": [[5, 6], [7], [100]]}
    problem = {"nodes": nodes, "edges": {"nodes": [[0, 1], [1, 0]], "costs": [[10, 20], [30, INFINITE]]}, "usage_limit": 11}
    assert iopddl.evaluate(problem, [0, 0, 0]) == (1 + 3 + 4 + 10 + 30, 12)
    assert iopddl.evaluate(problem, [1, 0, 0]) == (-1, 13)
    given = iopddl.instance(problem)
    assert given.cost(np.array([0, 0, 0])) == 48
    assert np.isinf(given.cost(np.array([1, 0, 0])))
    assert given.excess(np.array([0, 0, 0])) == 12 - 11


def test_components_are_the_smallest_members():
    root = components(6, np.array([5, 1, 4]), np.array([3, 4, 1]))
    assert root.tolist() == [0, 1, 2, 3, 1, 3]


def test_times_that_cannot_bind_are_forgotten():
    nodes = {"intervals": [[0, 4], [1, 6], [5, 9]], "costs": [[0, 1], [0, 1], [0, 1]], "usages": [[5, 1], [5, 1], [5, 1]]}
    net = from_instance(iopddl.instance({"nodes": nodes, "usage_limit": 9}))
    limit_usage(net)
    assert net.usage.time.tolist() in ([1, 5], [2, 5], [3, 5])
    assert net.usage.limit.tolist() == [7, 7]  # each node always uses 1


def planted(seed: int, count: int, labels: int, *, slack: float, chain: bool = True) -> dict:
    """A problem with a choice that is allowed and uses little, and a limit that it keeps to with some slack."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, labels + 1, count)
    costs = [rng.integers(0, 10**6, s).tolist() for s in sizes]
    usages = [(rng.integers(1, 1000, s) * 1000).tolist() for s in sizes]
    intervals = [[i, min(count, i + 1 + int(rng.integers(0, 60)))] for i in range(count)]
    plant = [int(np.argmin(u)) if rng.random() < 0.7 else int(rng.integers(len(u))) for u in usages]
    pairs, tables = [], []
    for i in range(1, count):
        for j in {
            i - 1 if chain else int(rng.integers(0, i)),
            *rng.integers(max(0, i - 60), i, int(rng.integers(0, 2))).tolist(),
        }:
            if sizes[i] == sizes[j] and rng.random() < 0.3:  # one to one, the planted labels together
                table = np.full((sizes[j], sizes[i]), INFINITE, object)
                for a in range(sizes[j]):
                    table[a, (a - plant[j] + plant[i]) % sizes[i]] = 0
            else:
                table = rng.integers(0, 10**6, (sizes[j], sizes[i])).astype(object)
                table[rng.random(table.shape) < 0.2] = INFINITE
                table[plant[j], plant[i]] = int(rng.integers(0, 10**6))
            pairs.append([int(j), i])
            tables.append([int(x) for x in table.ravel()])
    problem = {"nodes": {"intervals": intervals, "costs": costs, "usages": usages}, "edges": {"nodes": pairs, "costs": tables}}
    return {**problem, "usage_limit": int(iopddl.evaluate(problem, plant)[1] * (1 + slack))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "labels", "slack", "chain"),
    [(300, 6, 0.02, True), (300, 6, 0.1, False), (1500, 4, 0.05, True), (80, 40, 0.05, True)],
)
def test_tight_limits_are_kept_to(count, labels, slack, chain):
    """The cheapest choices pass the limit by far; some that keep to it are found, in any case."""
    problem = planted(count, count, labels, slack=slack, chain=chain)
    found = pairwise.search(iopddl.instance(problem), 6.0).solution()
    cost, peak = iopddl.evaluate(problem, found.choice)
    assert 0 <= cost == found.objective
    assert peak <= problem["usage_limit"]
    assert 0 < found.bound <= cost
    free = pairwise.search(iopddl.instance({**problem, "usage_limit": None}), 3.0).solution()
    assert free.bound <= free.objective <= cost


@pytest.mark.parametrize("seed", range(20))
def test_parallel_pairs_that_leave_nothing_one_to_one(seed):
    """Two one-to-one pairs between the same nodes may allow each label none or one; brute force agrees."""
    rng = np.random.default_rng(seed)
    size, tables = 3, []
    for _ in range(3):
        allowed = rng.permutation(size)
        tables.append([0 if allowed[a] == b or rng.random() < 0.3 else INFINITE for a in range(size) for b in range(size)])
    nodes = {
        "intervals": [[0, 1]] * 3,
        "costs": [rng.integers(0, 9, size).tolist() for _ in range(3)],
        "usages": [[1] * size] * 3,
    }
    edges = {"nodes": [[0, 1], [1, 0], [1, 2]], "costs": tables}
    problem = {"nodes": nodes, "edges": edges, "usage_limit": 10}
    found, best = pairwise.search(iopddl.instance(problem), 5.0).solution(), brute(problem)
    assert found.objective == best and found.bound == best


@pytest.mark.parametrize("seed", range(10))
def test_odd_problems(seed):
    """Pairs of a node with itself, empty intervals, nothing used, nodes without pairs, one label, plain limits of zero."""
    problem = random_problem(seed, forbid=0.1, tightness=0.9)
    nodes, edges = problem["nodes"], problem["edges"]
    for i in (0, 1):
        n = len(nodes["costs"][i])
        edges["nodes"].append([i, i])
        edges["costs"].append([7 * a + b if a == b or a < b else INFINITE for a in range(n) for b in range(n)])
    nodes["costs"].append([5])
    nodes["usages"].append([0])
    nodes["intervals"].append([3, 3])
    found = pairwise.search(iopddl.instance(problem), 5.0).solution()
    assert found.objective == brute(problem)
    nothing = {**problem, "usage_limit": 0, "nodes": {**nodes, "usages": [[0] * len(c) for c in nodes["costs"]]}}
    found = pairwise.search(iopddl.instance(nothing), 5.0).solution()
    assert found.objective == brute(nothing)
    empty = pairwise.search(
        iopddl.instance({"nodes": {"intervals": [], "costs": [], "usages": []}, "usage_limit": 3}), 5.0
    ).solution()
    assert (empty.choice, empty.objective, empty.bound) == ([], 0.0, 0.0)


def test_no_choice_at_all_is_proved_by_the_bound(tmp_path):
    """Three nodes that must differ and have two labels: no reduction sees it."""
    unlike = [INFINITE, 0, 0, INFINITE]
    nodes = {"intervals": [[0, 1]] * 3, "costs": [[1, 2]] * 3, "usages": [[1, 1]] * 3}
    problem = {"nodes": nodes, "edges": {"nodes": [[0, 1], [1, 2], [0, 2]], "costs": [unlike] * 3}, "usage_limit": 10}
    found = pairwise.search(iopddl.instance(problem), 5.0).solution()
    assert np.isinf(found.objective) and np.isinf(found.bound)
    (tmp_path / "I.json").write_text(json.dumps({"problem": problem}))
    row = iopddl.measure(tmp_path / "I.json", {"seconds": 5.0}, 1.0)
    assert not row["feasible"] and row["infeasible"] and "no choice keeps" in iopddl.show(row)


@pytest.mark.parametrize("many", [20, 3000])
def test_long_chains_have_few_levels(many):
    """Nodes of a level share no pair, and a chain of any length has about as many levels as there may be."""
    tail = np.arange(many - 1)
    found = levels(many, tail, tail + 1)
    assert (found[tail] != found[tail + 1]).all()
    assert found.max() < (many if many < LEVELS else LEVELS + PEELS + 3)


def test_the_file_format_and_the_command(tmp_path):
    problem = random_problem(4, tightness=0.9)
    with gzip.open(tmp_path / "Z.json.gz", "wt") as f:
        json.dump({"problem": problem}, f)
    (tmp_path / "README.md").write_text("| Z | toy | 2×2 | 7 | 9 | 1,0 s | 1,234 (proved optimal) | 2.5× |\n")
    assert iopddl.read(tmp_path / "Z.json.gz") == problem
    assert iopddl.known(tmp_path) == {"Z": {"seconds": 10.0, "best": 1234.0, "xla": 2.5}}
    row = iopddl.measure(tmp_path / "Z.json.gz", {"seconds": 10.0}, 1.0)
    assert row["feasible"]
    assert row["cost"] == brute(problem)
    run = subprocess.run(
        [sys.executable, "-m", "bench", "iopddl", tmp_path / "none"], capture_output=True, text=True, check=True
    )
    assert "skipped" in run.stdout


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_costs_of_microseconds(seed):
    """Infinite ones, single choices, and several ways round."""
    rng = np.random.default_rng(seed)
    sizes = [int(s) for s in rng.integers(1, 5, 9)]
    factors = [network.Factor((n,), rng.random(s) * 1e-5) for n, s in enumerate(sizes) if s > 1]
    for i, j in itertools.combinations(range(9), 2):
        if rng.random() < 0.4:
            table = rng.random((sizes[i], sizes[j])) * 1e-5
            table[1:, 1:][rng.random((sizes[i] - 1, sizes[j] - 1)) < 0.2] = np.inf
            factors.append(network.Factor((i, j), table))
    best = min(network.evaluate(c, factors) for c in itertools.product(*map(range, sizes)))
    found = network.solve(network.Network(sizes, factors))
    assert found.objective == pytest.approx(best, rel=1e-9)
    assert best * (1 - 1e-5) <= found.bound <= best * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "best"), [("G", 217_039), ("B", 532_843)])
def test_contest_instances_are_proved_optimal_in_five_seconds(name, best):
    path = SHARED / "iopddl" / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    row = iopddl.measure(path, {"seconds": 60.0, "best": float(best)}, 1.0)
    assert (row["cost"], row["bound"]) == (best, best)
    assert row["seconds"] < 5
