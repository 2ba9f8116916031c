"""Plain ONNX of our graphs, and a file for each rank: run by onnxruntime, they give what the plan gives."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import pytest

import tapestry
from bench.doors.onnx_folders import FAST
from tapestry import cli
from tapestry.ir.program import Reduce, Transfer, transfer_bytes
from tapestry.onnx_eval.ort_session import ort_session
from tapestry.plan.lower import lower
from tapestry.tools.exports import fused_onnx, rank_onnx
from tapestry.tools.exports.nodes.onnx_nodes import Nodes, NotExpressible, Value
from tests.support.programs import rank_files
from tests.support.small_models import MODELS, N, T, assert_same, f32, i64, mesh_of, net, random_plan, save

# onnxruntime has no kernels of bfloat16 on a processor, and ONNX no Philox
NAMES = [n for n in MODELS if n not in ("bfloats", "noise")]


@cache
def compiled(name: str) -> tapestry.api.Compiled:
    return tapestry.compile(save(name), mesh="1")


def constants(c) -> bytes:
    return b"".join(c.constants.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_onnxruntime_runs_the_fused_graph(name, tmp_path):
    c = compiled(name)
    done = fused_onnx.export_fused(c.build, constants(c), tmp_path / "fused.onnx")
    feeds = c.random_feeds(0)
    session = ort_session(tmp_path / "fused.onnx")
    assert {i.name for i in session.get_inputs()} <= set(feeds) and done["operations"] == len(c.build.plan.graph.ops)
    names = [o.name for o in session.get_outputs()]
    found = dict(zip(names, session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()}), strict=True))
    assert_same(found, c.run(feeds), c.build.plan.graph)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_rank_files_of_any_plan(name, seed, tmp_path):
    c, rng = compiled(name), random.Random(f"{name}{seed}")
    plan = random_plan(c.build.plan.graph, mesh_of(rng.choice(["2", "3", "2x2"])), rng)
    program = lower(plan)
    done = rank_onnx.export_ranks(replace(c.build, plan=plan, program=program), constants(c), tmp_path / "ranks", nearest=True)
    feeds = c.random_feeds(seed)
    assert_same(rank_files.run(tmp_path / "ranks", feeds), c.run(feeds), plan.graph, (plan.mesh, plan.strategies))
    planned = sum(transfer_bytes(s, program) for s in program.steps if isinstance(s, Transfer | Reduce))
    assert done["plan_bytes"] == planned and done["bytes"] <= planned + done["extra_bytes"] + 1
    assert done["extra_bytes"] == sum(done["extra"].values())


def test_a_value_is_read_by_the_name_that_it_has_come_to():
    """Two buffers may hold one value, as where a transfer moves nothing on a rank; the second one names the node."""
    nodes = Nodes()
    part = nodes.slice(Value("x", (4,), "f32"), [(0, 2)])
    nodes.result(part, "y")
    nodes.apply("Neg", [part])
    nodes.result(part, "z")
    assert [(n.op_type, n.input[0]) for n in nodes.nodes] == [("Slice", "x"), ("Neg", "y"), ("Identity", "y")]


def test_what_costs_more_is_refused_unless_it_is_asked_for(tmp_path):
    c = compiled("mlp")
    plan = tapestry.compile(save("mlp"), mesh="2", layouts="y:0=2@d0").build  # 7 rows on 2 devices
    with pytest.raises(NotExpressible, match=r"'y'.*\n.*because: .*\n.*try: --nearest"):
        rank_onnx.export_ranks(plan, constants(c), tmp_path / "ranks", nearest=False)
    assert not (tmp_path / "ranks").exists()
    done = rank_onnx.export_ranks(plan, constants(c), tmp_path / "ranks", nearest=True)
    assert done["extra_bytes"] == 7 * 5 * 4 == done["bytes"] - done["plan_bytes"]


def test_what_onnx_has_no_operator_for_is_refused(tmp_path):
    c = compiled("noise")
    with pytest.raises(NotExpressible, match=r"operation 'normal'.*\n.*because: ONNX has no operator for 'philox'"):
        fused_onnx.export_fused(c.build, constants(c), tmp_path / "fused.onnx")
    assert not list(tmp_path.iterdir())


def decoder_layer() -> onnx.ModelProto:
    """A transformer's layer of even sizes: RMS norm, causal attention of 4 heads, gated MLP."""
    width, heads, inner, s = 16, 4, 32, 8
    nodes = [
        *_norm("x", "g1", "n1"),
        *[N("MatMul", ["n1", f"w{k}"], [f"{k}0"], f"{k}_proj") for k in "qkv"],
        *[N("Reshape", [f"{k}0", "split"], [f"{k}1"], f"{k}_heads") for k in "qkv"],
        N("Transpose", ["q1"], ["q2"], "qt", perm=[0, 2, 1, 3]), N("Transpose", ["k1"], ["k2"], "kt", perm=[0, 2, 3, 1]),
        N("Transpose", ["v1"], ["v2"], "vt", perm=[0, 2, 1, 3]), N("MatMul", ["q2", "k2"], ["s0"], "scores"),
        N("Mul", ["s0", "scale"], ["s1"], "scaled"), N("Add", ["s1", "mask"], ["s2"], "masked"),
        N("Softmax", ["s2"], ["p"], "softmax", axis=-1), N("MatMul", ["p", "v2"], ["o0"], "mix"),
        N("Transpose", ["o0"], ["o1"], "ot", perm=[0, 2, 1, 3]), N("Reshape", ["o1", "join"], ["o2"], "merge"),
        N("MatMul", ["o2", "wo"], ["o"], "o_proj"), N("Add", ["o", "x"], ["h"], "skip"), *_norm("h", "g2", "n2"),
        N("MatMul", ["n2", "wg"], ["g"], "gate"), N("Sigmoid", ["g"], ["sg"], "sig"), N("Mul", ["g", "sg"], ["a"], "silu"),
        N("MatMul", ["n2", "wu"], ["u"], "up"), N("Mul", ["a", "u"], ["m"], "gated"), N("MatMul", ["m", "wd"], ["d"], "down"),
        N("Add", ["d", "h"], ["y"], "skip2"),
    ]  # fmt: skip
    weights = {f"w{k}": f32(width, width) for k in "qkvo"} | {
        "wg": f32(width, inner),
        "wu": f32(width, inner),
        "wd": f32(inner, width),
    }
    weights |= {
        "g1": f32(width),
        "g2": f32(width),
        "split": i64(0, 0, heads, 4),
        "join": i64(0, 0, width),
        "scale": np.float32(0.5),
    }
    weights |= {
        "two": np.float32(2),
        "eps": np.float32(1e-6),
        "mask": np.triu(np.full((s, s), -1e4, np.float32), 1),
        "last": i64(-1),
    }
    return net(nodes, {"x": (T.FLOAT, [2, s, width])}, {"y": T.FLOAT}, weights)


def _norm(x: str, g: str, out: str):
    return [
        N("Pow", [x, "two"], [f"{out}.s"], f"{out}.square"), N("ReduceMean", [f"{out}.s", "last"], [f"{out}.m"], f"{out}.mean"),
        N("Add", [f"{out}.m", "eps"], [f"{out}.e"], f"{out}.add"), N("Sqrt", [f"{out}.e"], [f"{out}.r"], f"{out}.sqrt"),
        N("Div", [x, f"{out}.r"], [f"{out}.d"], f"{out}.div"), N("Mul", [f"{out}.d", g], [out], f"{out}.scale"),
    ]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_the_prover_accepts_rank_files(mesh, tmp_path, capsys):
    onnx.save(decoder_layer(), tmp_path / "m.onnx")
    (tmp_path / "fast.json").write_text(json.dumps(FAST))
    assert (
        cli.main(
            [
                "compile",
                str(tmp_path / "m.onnx"),
                "-o",
                str(tmp_path / "build"),
                "--mesh",
                mesh,
                "-q",
                "--topology",
                str(tmp_path / "fast.json"),
            ]
        )
        == 0
    )
    assert cli.main(["export", str(tmp_path / "build"), "--format", "onnx-ranks", "-o", str(tmp_path / "ranks"), "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["prove", str(tmp_path / "m.onnx"), str(tmp_path / "ranks"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "proved"


ODD = """graph g
input x: f32[4, 6]
input b: bool[4, 6]
mean: f32[4] = op [i: 4 | k: 6 moments]
  reads x[i, k]
  body 0.03, x, 0.0
  then acc1
some: bool[4] = op [i: 4 | k: 6 max]
  reads b[i, k]
  body b
output mean, some
"""


def test_ranks_merge_light_counts_and_truths(tmp_path):
    """Counts may add up to less than 1, and truth values have extremes."""
    path = tmp_path / "odd.tap"
    path.write_text(ODD)
    c = tapestry.compile(path, mesh="1")
    feeds = c.random_feeds(0)
    fused_onnx.export_fused(c.build, b"", tmp_path / "fused.onnx")
    session = ort_session(tmp_path / "fused.onnx")
    names = [o.name for o in session.get_outputs()]
    assert_same(dict(zip(names, session.run(None, feeds), strict=True)), c.run(feeds), c.build.plan.graph)
    graph, mesh, cut = c.build.plan.graph, mesh_of("2"), set[str]()
    for seed in range(12):
        plan = random_plan(graph, mesh, random.Random(seed))
        program = lower(plan)
        cut |= {graph.ops[s.op].outs[0] for s in program.steps if isinstance(s, Reduce)}
        target = tmp_path / f"ranks{seed}"
        rank_onnx.export_ranks(replace(c.build, plan=plan, program=program), b"", target, nearest=True)
        assert_same(rank_files.run(target, feeds), c.run(feeds), graph, (seed,))
    assert cut == {"mean", "some"}
