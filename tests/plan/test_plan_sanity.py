"""The planner finds what people would do by hand where that is right, and what brute force finds on small graphs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

import tapestry
from tapestry.errors import PlanError
from tapestry.ir.graph import Graph
from tapestry.ir.program import peak_bytes
from tapestry.ir.syntax.parser import parse
from tapestry.plan.lower import lower
from tapestry.plan.search.planner import search
from tapestry.plan.search.priced_plan import priced_plan
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.solver.network import solve
from tapestry.plan.strategy import Pin, every_strategy, left_out
from tapestry.plan.topology import parse_mesh, topology
from tapestry.verify import certificate
from tapestry.viz import explain

N = helper.make_node

# --- brute force


def random_graph(seed: int) -> Graph:
    """Two to eight operations: products, element-wise ones, sums, windows, transposes; any earlier tensor may be read again."""
    rng = random.Random(seed)
    lines = ["graph random", "input x: f32[8, 8]", "input w: f32[8, 8]", "input k: f32[3]"]
    made = ["x"]
    for i in range(rng.randint(2, 6)):
        if sum(" = op " in line for line in lines) > 6:
            break
        a, b, y = rng.choice(made[-2:]), rng.choice(made), f"t{i}"
        lines += {
            "product": [f"{y}: f32[8, 8] = op [i: 8, n: 8 | m: 8 sum]", f"  reads a = {a}[i, m], w[m, n]", "  body a * w"],
            "residual": [f"{y}: f32[8, 8] = op [i: 8, n: 8]", f"  reads a = {a}[i, n], b = {b}[i, n]", "  body tanh(a) + b"],
            "window": [f"{y}: f32[8, 8] = op [c: 8, h: 8 | r: 3 sum]", f"  reads a = {a}[c, h + r - 1] else 0.0, k[r]", "  body a * k"],
            "turned": [f"{y}: f32[8, 8] = op [i: 8, n: 8]", f"  reads a = {a}[n, i], b = {b}[i, n]", "  body a + b"],
            "centred": [f"{y}m: f32[8] = op [i: 8 | n: 8 sum]", f"  reads a = {a}[i, n]", "  body a",
                        f"{y}: f32[8, 8] = op [i: 8, n: 8]", f"  reads a = {a}[i, n], m = {y}m[i]", "  body a - m"],
        }[rng.choice(["product", "residual", "window", "turned", "centred"])]  # fmt: skip
        made.append(y)
    unread = [t for t in made[1:] if not any(f"= {t}[" in line for line in lines)]
    return parse("\n".join([*lines, "output " + ", ".join(unread)]) + "\n")


def every_plan(problem: Problem) -> np.ndarray:
    """All costs of every combination of strategies added up, one axis per operation: no elimination, no bounds, no order."""
    total = np.zeros(problem.sizes)
    for f in problem.factors:
        order = np.argsort(f.nodes)
        total += f.table.transpose(order).reshape([n if i in f.nodes else 1 for i, n in enumerate(problem.sizes)])
    return total


def on_the_clock(problem: Problem, choice: tuple[int, ...]) -> float:
    """Simulated seconds of one combination of strategies."""
    return priced_plan(problem, choice, -np.inf).objective


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(24))
def test_the_planner_is_brute_force(seed: int) -> None:
    """Devices in a row and in a grid; ends that are free and ends that are fixed. On the clock, of the 200 plans whose costs
    add up to least none is faster."""
    graph, rng = random_graph(seed), random.Random(seed)
    mesh = rng.choice(["2", "3", "4", "2x2"]) if len(graph.ops) <= 3 else rng.choice(["2", "4"])
    topo = topology(parse_mesh(mesh), rng.choice(["cpu", "h100", "a100-pcie"]))
    ends = {"x": (0,) * len(topo.mesh)} if mesh != "2x2" and seed % 2 else {}
    problem = build(graph, topo, {}, ends, {})
    if np.prod([float(n) for n in problem.sizes]) > 4_000_000:
        topo = topology(parse_mesh("2"), "a100-pcie")
        problem = build(graph, topo, {}, ends, {})
    every = every_plan(problem)
    least, count = np.unravel_index(np.argsort(every, axis=None)[:200], every.shape), every.size
    best = min(on_the_clock(problem, choice) for choice in zip(*(a.tolist() for a in least), strict=True))
    found = search(graph, topo, inputs=ends)
    added = solve(problem.network).objective
    assert count > 1 and added == pytest.approx(float(every.min()), rel=1e-12)
    assert found.bound <= best * (1 + 1e-9) and found.objective <= best * 1.001
    certificate.check(found.plan.annotated(), found.program, mesh=found.plan.mesh)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_with_little_memory_too(seed: int) -> None:
    """Among the plans that fit, none is better; where none fits, it says so."""
    graph = random_graph(seed + 100)
    graph = replace(
        graph,
        ops=graph.ops[:2],
        outputs=tuple(t for op in graph.ops[:2] for t in op.outs if all(t not in o.inputs for o in graph.ops[:2])),
    )
    topo = topology(parse_mesh("2"), "cpu")
    problem = build(graph, topo, {}, {}, {})
    fits: dict[int, float] = {}
    first = search(graph, topo).plan
    for choice in itertools.product(*(range(n) for n in problem.sizes)):
        plan = replace(first, strategies=tuple(m.strategies[c] for m, c in zip(problem.menus, choice, strict=True)))
        peak = max(peak_bytes(lower(plan))[0])
        fits[peak] = min(fits.get(peak, np.inf), on_the_clock(problem, choice))
    for limit in sorted({min(fits), sorted(fits)[len(fits) // 2], max(fits)}):
        tight = replace(topo, device=replace(topo.device, memory=limit))
        best = min(cost for peak, cost in fits.items() if peak <= limit)
        found = search(graph, tight)
        assert max(peak_bytes(found.program)[0]) <= limit
        assert found.bound <= best * (1 + 1e-9) and best <= found.objective * (1 + 1e-9)
        assert found.objective <= best * 1.001
    with pytest.raises(PlanError):
        search(graph, replace(topo, device=replace(topo.device, memory=min(fits) - 1)))


# --- plans that people know


def model(
    path: Path, nodes: list[NodeProto], x: list[int], y: list[int], weights: dict[str, list[int]], consts: dict[str, np.ndarray]
) -> Path:
    """A graph whose weights have shapes and no data."""
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s)] for n, s in (("x", x), ("y", y))]
    inits = [numpy_helper.from_array(np.asarray(v), n) for n, v in consts.items()]
    for n, s in weights.items():
        t = TensorProto(name=n, data_type=TensorProto.FLOAT, dims=s, data_location=TensorProto.EXTERNAL)
        t.external_data.add(key="location", value="absent.bin")
        inits.append(t)
    graph = helper.make_graph(nodes, "g", *ends, inits)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


class Planned:
    """A compiled plan: what each node cuts, what travels, and the text that explains it."""

    def __init__(self, path: Path, **options) -> None:
        self.done = tapestry.compile(path, devices=8, weights=False, **{"topology": "h100", **options})
        plan = self.done.build.plan
        self.cut = {n: s.dims[0] for op, s in zip(plan.graph.ops, plan.strategies, strict=True) for n in op.source}
        self.cuts: dict[str, set[str | None]] = {}  # of all operations that a node is in
        for op, s in zip(plan.graph.ops, plan.strategies, strict=True):
            for n in op.source:
                self.cuts.setdefault(n, set()).add(s.dims[0])
        self.bytes = sum(t["bytes"] for t in self.done.report["transfers"])
        self.transfers = {t["kind"]: t["count"] for t in self.done.report["transfers"]}
        self.text = explain.explain(self.done.build, why=True)


def mlp(path: Path, batch: int, d: int = 4096, f: int = 16384) -> Path:
    nodes = [N("MatMul", ["x", "w1"], ["h"], "up"), N("Relu", ["h"], ["a"], "act"), N("MatMul", ["a", "w2"], ["y"], "down")]
    return model(path, nodes, [batch, d], [batch, d], {"w1": [d, f], "w2": [f, d]}, {})


@pytest.mark.slow
def test_megatron_for_a_small_batch(tmp_path: Path) -> None:
    """Columns, then rows: big weights stay where they are, and one all-reduce carries the small result."""
    p = Planned(mlp(tmp_path / "m.onnx", 16), layouts=["y:replicated"])
    assert p.cut == {"up": "n", "act": "n", "down": "m"} and p.transfers == {"all_reduce": 1}
    assert "each device computes its own part of 'n'" in p.text
    assert "each device merges its own part of 'm', which an all_reduce completes" in p.text
    assert "for compute" in p.text and " slower: " in p.text
    free = Planned(mlp(tmp_path / "m.onnx", 16))
    assert free.cut["down"] == "m" and free.transfers == {"reduce_scatter": 1}  # nobody asked for all of it everywhere


def test_data_parallel_for_a_huge_batch(tmp_path: Path) -> None:
    p = Planned(mlp(tmp_path / "m.onnx", 1 << 17, 1024, 4096))
    assert set(p.cut.values()) == {"i"} and not p.transfers
    assert p.text.count("each device computes its own part of 'i'") == 2


def block(path: Path, batch: int, seq: int, d: int, heads: int) -> Path:
    """A transformer block, normalised before each half."""
    h, nodes = d // heads, [N("LayerNormalization", ["x", "g1", "b1"], ["l1"], "ln1")]
    for q in "qkv":
        perm = [0, 2, 3, 1] if q == "k" else [0, 2, 1, 3]
        nodes += [
            N("MatMul", ["l1", f"w{q}"], [f"{q}0"], f"{q}_proj"),
            N("Reshape", [f"{q}0", "split"], [f"{q}1"]),
            N("Transpose", [f"{q}1"], [q], perm=perm),
        ]
    nodes += [
        N("MatMul", ["q", "k"], ["s"], "scores"), N("Mul", ["s", "scale"], ["s1"]), N("Softmax", ["s1"], ["p"], "softmax", axis=-1), N("MatMul", ["p", "v"], ["o"], "mix"),
        N("Transpose", ["o"], ["o1"], perm=[0, 2, 1, 3]), N("Reshape", ["o1", "join"], ["o2"]), N("MatMul", ["o2", "wo"], ["o3"], "out_proj"), N("Add", ["o3", "x"], ["r"]),
        N("LayerNormalization", ["r", "g2", "b2"], ["l2"], "ln2"), N("MatMul", ["l2", "w1"], ["u"], "up"), N("Relu", ["u"], ["a"]), N("MatMul", ["a", "w2"], ["e"], "down"), N("Add", ["e", "r"], ["y"]),
    ]  # fmt: skip
    weights = {
        "g1": [d],
        "b1": [d],
        "g2": [d],
        "b2": [d],
        **{f"w{c}": [d, d] for c in "qkvo"},
        "w1": [d, 4 * d],
        "w2": [4 * d, d],
    }
    consts = {"split": np.array([batch, seq, heads, h]), "join": np.array([batch, seq, d]), "scale": np.float32(h**-0.5)}
    return model(path, nodes, [batch, seq, d], [batch, seq, d], weights, consts)


@pytest.mark.slow
def test_megatron_for_a_transformer_block(tmp_path: Path) -> None:
    """Heads and hidden features cut, one all-reduce behind each half; before and behind a product of columns two gathers bring the
    same bytes, and overlap a little."""
    p = Planned(block(tmp_path / "b.onnx", 1, 64, 4096, 32), layouts=["x:replicated", "y:replicated"])
    assert [p.cut[n] for n in ("q_proj", "k_proj", "v_proj", "out_proj", "up", "down")] == ["n", "n", "n", "m", "n", "m"]
    assert p.cut["scores"] == "b1" and p.cuts["mix"] <= {"b1", "x1"}  # heads, of one streaming operation and what is beside it
    assert p.transfers == {"all_reduce": 2}


def test_data_parallel_for_many_sequences(tmp_path: Path) -> None:
    p = Planned(block(tmp_path / "b.onnx", 64, 256, 1024, 16))
    assert set(p.cut.values()) <= {"b0", "x0"} and not p.transfers


@pytest.mark.slow
def test_sequences_that_start_cut_stay_cut_but_for_attention(tmp_path: Path) -> None:
    """Ulysses: heads for attention, the sequence for all else, and an all-to-all between."""
    layouts = ["x:1=8@d0", "y:1=8@d0"]
    p = Planned(block(tmp_path / "b.onnx", 1, 8192, 1024, 16), layouts=layouts, precision="tf32")
    assert [p.cut[n] for n in ("q_proj", "out_proj", "up", "down", "ln1", "ln2")] == ["i", "i", "i", "i", "x1", "x1"]
    assert "b1" in p.cuts["scores"] and set(p.transfers) <= {"all_to_all", "reduce_scatter", "all_gather"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("preset", ["h100", "a100-pcie"])
def test_space_for_one_big_image(preset: str, tmp_path: Path) -> None:
    """One picture cannot be cut by batch: rows or columns are, and no more travels than the halos of two convolutions, of seven
    cuts with a row either way; in parts, or made anew by both sides, it may be less."""
    names = ["x", "c0", "c1", "y"]
    nodes = [N("Conv", [names[i], f"w{i}"], [names[i + 1]], f"conv{i}", pads=[1, 1, 1, 1]) for i in range(3)]
    size = [1, 32, 2048, 2048]
    p = Planned(model(tmp_path / "c.onnx", nodes, size, size, {f"w{i}": [32, 32, 3, 3] for i in range(3)}, {}), topology=preset)
    assert None not in set(p.cut.values()) and p.bytes <= 2 * 7 * 2 * 32 * 2048 * 4


def experts(path: Path, tokens: int, routed: bool, count: int = 8, d: int = 1024, f: int = 4096) -> Path:
    """Every token through every expert, weighed by its gates: all of them (Einsum), or the best one's alone (Where)."""
    nodes = [N("MatMul", ["x", "wg"], ["lg"], "gate"), N("Softmax", ["lg"], ["p0"], "gates", axis=-1)]
    if routed:
        nodes += [
            N("ReduceMax", ["p0", "last"], ["top"], "top"),
            N("Equal", ["p0", "top"], ["hit"], "hit"),
            N("Where", ["hit", "p0", "zero"], ["p"], "route"),
        ]
        nodes += [N("MatMul", ["x", "w1"], ["h"], "up")]
    else:
        nodes += [N("Identity", ["p0"], ["p"]), N("Einsum", ["x", "w1"], ["h"], "up", equation="td,edf->etf")]
    nodes += [
        N("Relu", ["h"], ["a"]), N("MatMul", ["a", "w2"], ["o"], "down"), N("Transpose", ["p"], ["pt"], perm=[1, 0]), N("Unsqueeze", ["pt", "last"], ["pu"]),
        N("Mul", ["o", "pu"], ["om"]), N("ReduceSum", ["om", "first"], ["y"], "mix", keepdims=0),
    ]  # fmt: skip
    consts = {"last": np.array([-1]), "first": np.array([0]), "zero": np.float32(0)}
    return model(path, nodes, [tokens, d], [tokens, d], {"wg": [d, count], "w1": [count, d, f], "w2": [count, f, d]}, consts)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize(("tokens", "mixed", "sent"), [(32, None, "all_gather"), (256, "x0", "all_reduce")])
def test_experts_in_parallel(routed: bool, tokens: int, mixed: str | None, sent: str, tmp_path: Path) -> None:
    """Each device keeps its own expert; what travels is the sum of their answers, or few answers with fewer latencies."""
    p = Planned(experts(tmp_path / "e.onnx", tokens, routed), layouts=["y:replicated"])
    assert p.cut["up"] == ("b0" if routed else "e") and p.cut["down"] == "b0" and p.cut["mix"] == mixed
    others = set(p.transfers) - {sent}  # gates of few bytes may move while a product is computed
    assert p.transfers[sent] == 1 and others <= {"all_to_all"}


def test_reasons_name_bytes_and_seconds(tmp_path: Path) -> None:
    """What the best other split of the second product would cost is what a pin on it costs."""
    path = mlp(tmp_path / "m.onnx", 512)
    done = tapestry.compile(path, devices=8, weights=False, topology="h100", layouts=["y:replicated"])
    row = next(r for r in explain.document(done.build, why=True)["operations"] if "down" in r["nodes"])
    other = row["next_best"]
    assert other["seconds_more"] > 0 and sum(p["seconds_more"] for p in other["parts"]) == pytest.approx(
        other["seconds_more"], rel=1e-2
    )
    assert any(p["bytes_more"] for p in other["parts"])
    text = explain.why_text(other)
    assert (
        text.startswith(f"next best: {other['split']}, ")
        and " slower: " in text
        and ("MiB more)" in text or "MiB less)" in text)
    )


# --- of which plans a bound speaks


@pytest.mark.slow
def test_what_no_bound_speaks_of_is_counted_and_named(tmp_path: Path) -> None:
    """A window, and a reduction that may be scattered along four axes: what is not offered is counted; one split of a product is not."""
    window = parse(
        "graph g\ninput x: f32[8, 64, 16]\ninput k: f32[8, 64, 3]\n"
        "y: f32[8, 16] = op [o: 8, h: 16 | c: 64 sum, r: 3 sum]\n  reads x[o, c, h + r - 1] else 0.0, k[o, c, r]\n  body x * k\noutput y\n"
    )  # fmt: skip
    (op,) = window.ops
    two, four = parse_mesh("2"), parse_mesh("4")
    assert left_out(op, two) == 1 + 2  # r cut: all-reduced, or scattered along o or h
    assert left_out(op, four) == 0  # three points are not cut in four
    assert left_out(op, two, (Pin("r", 0),)) == 0
    deep = parse(
        "graph g\ninput x: f32[4, 5, 6, 7, 8]\ny: f32[4, 5, 6, 7] = op [a: 4, b: 5, c: 6, d: 7 | m: 8 sum]\n"
        "  reads x[a, b, c, d, m]\n  body x\noutput y\n"
    )  # fmt: skip
    assert left_out(deep.ops[0], two) == 1
    every, offered = {(s.dims, s.out) for s in every_strategy(deep.ops[0], two)}, build(deep, topology(two), {}, {}, {})
    assert (("m",), (0,)) not in every and offered.left_out == 1
    path = mlp(tmp_path / "m.onnx", 16)
    report = tapestry.compile(path, devices=8, weights=False, topology="h100").report
    assert report["left_out"] == 0 and report["bound_of"].startswith("one form of the graph")
    assert "combinations" not in report["bound_of"]


def test_the_text_says_of_which_plans_the_bound_is(tmp_path: Path) -> None:
    nodes = [N("Conv", ["x", "w"], ["y"], "conv", pads=[1, 1, 1, 1])]
    path = model(tmp_path / "c.onnx", nodes, [8, 64, 16, 16], [8, 32, 16, 16], {"w": [32, 64, 3, 3]}, {})
    done = tapestry.compile(path, devices=2, weights=False, topology="h100")
    count = done.report["left_out"]
    assert count > 0 and f"not covered: up to {count:,} combinations" in done.report["bound_of"]
    assert done.report["bound_of"] in " ".join(explain.explain(done.build).split())
