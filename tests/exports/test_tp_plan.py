"""``tp-plan``: styles of linear layers and tables, held to what each rank would have, and proved by ``tapestry prove``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest

import tapestry
from bench.doors.onnx_folders import FAST
from tapestry import cli
from tapestry.tools.exports import tp_plan
from tapestry.tools.exports.nodes.onnx_nodes import NotExpressible
from tests.support.paths import ROOT
from tests.support.small_models import N, T, f32, i64, net

LAYERS, WIDTH, HEADS, INNER, TOKENS = 2, 16, 4, 32, 6


def linear(x: str, module: str, out: str, n: int, m: int, weights, bias: bool = False):
    """A linear layer as torch's exporter writes it: the parameter by its own name, turned over."""
    weights[f"{module}.weight"] = f32(n, m)
    nodes = [
        N("Transpose", [f"{module}.weight"], [f"{out}.t"], f"{out}.t", perm=[1, 0]),
        N("MatMul", [x, f"{out}.t"], [f"{out}.mm" if bias else out], f"{out}.mm"),
    ]
    if bias:
        weights[f"{module}.bias"] = f32(n)
        nodes.append(N("Add", [f"{out}.mm", f"{module}.bias"], [out], f"{out}.bias"))
    return nodes


def decoder(uneven: bool = False) -> onnx.ModelProto:
    """Layers of attention and of a gated MLP, on a table of 32 tokens, with a head."""
    weights = {"split": i64(0, 0, HEADS, WIDTH // HEADS), "join": i64(0, 0, WIDTH), "scale": np.float32(0.5)}
    weights["m.model.embed_tokens.weight"] = f32(32, WIDTH)
    nodes, x = [N("Gather", ["m.model.embed_tokens.weight", "ids"], ["h"], "embed")], "h"
    for k in range(LAYERS):
        p, a = f"m.model.layers.{k}", f"l{k}"
        for name in "qkv":
            nodes += linear(x, f"{p}.self_attn.{name}_proj", f"{a}.{name}", WIDTH, WIDTH, weights, bias=name == "q")
            nodes += [N("Reshape", [f"{a}.{name}", "split"], [f"{a}.{name}1"], f"{a}.{name}1"),
                      N("Transpose", [f"{a}.{name}1"], [f"{a}.{name}2"], f"{a}.{name}2", perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3])]  # fmt: skip
        nodes += [N("MatMul", [f"{a}.q2", f"{a}.k2"], [f"{a}.s"], f"{a}.s"), N("Mul", [f"{a}.s", "scale"], [f"{a}.s1"], f"{a}.s1"),
                  N("Softmax", [f"{a}.s1"], [f"{a}.p"], f"{a}.p", axis=-1), N("MatMul", [f"{a}.p", f"{a}.v2"], [f"{a}.o"], f"{a}.o"),
                  N("Transpose", [f"{a}.o"], [f"{a}.o1"], f"{a}.o1", perm=[0, 2, 1, 3]), N("Reshape", [f"{a}.o1", "join"], [f"{a}.o2"], f"{a}.o2")]  # fmt: skip
        nodes += linear(f"{a}.o2", f"{p}.self_attn.o_proj", f"{a}.attn", WIDTH, WIDTH, weights)
        nodes.append(N("Add", [f"{a}.attn", x], [f"{a}.h"], f"{a}.h"))
        inner = INNER - 1 if uneven else INNER
        nodes += linear(f"{a}.h", f"{p}.mlp.up_proj", f"{a}.u", inner, WIDTH, weights)
        nodes.append(N("Relu", [f"{a}.u"], [f"{a}.r"], f"{a}.r"))
        nodes += linear(f"{a}.r", f"{p}.mlp.down_proj", f"{a}.d", WIDTH, inner, weights)
        nodes.append(N("Add", [f"{a}.d", f"{a}.h"], [f"{a}.y"], f"{a}.y"))
        x = f"{a}.y"
    nodes += linear(x, "m.lm_head", "y", 32, WIDTH, weights)
    return net(nodes, {"ids": (T.INT64, [1, TOKENS])}, {"y": T.FLOAT}, weights)


MEGATRON = [
    "layers.*.self_attn.q_proj:out=tp",
    "layers.*.self_attn.o_proj:in=tp",
    "layers.*.mlp.up_proj:out=tp",
    "layers.*.mlp.down_proj:in=tp",
]


def made(tmp_path, mesh, nearest=True, uneven=False, **options):
    onnx.save(onnx.shape_inference.infer_shapes(decoder(uneven)), tmp_path / "m.onnx")
    c = tapestry.compile(tmp_path / "m.onnx", mesh=mesh, **options)
    return tp_plan.export_tp_plan(c.build, tmp_path / "plan.json", nearest=nearest)


def proved(tmp_path, capsys, ranks=2) -> str:
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "said.json").write_text(json.dumps({"mesh": {"tp": ranks}, "tp_plan": plan}))
    capsys.readouterr()
    cli.main(["prove", str(tmp_path / "m.onnx"), str(tmp_path / "said.json"), "--json"])
    return json.loads(capsys.readouterr().out)["status"]


def test_megatron(tmp_path, capsys):
    done = made(tmp_path, {"tp": 2}, pins=MEGATRON)
    layer = "model.layers.*."
    wanted = {f"{layer}self_attn.{n}_proj": "colwise" for n in "qkv"} | {f"{layer}self_attn.o_proj": "rowwise"}
    wanted |= {f"{layer}mlp.up_proj": "colwise", f"{layer}mlp.down_proj": "rowwise"}
    assert {k: v for k, v in done["styles"].items() if k.startswith(layer)} == wanted
    assert done["bytes"] >= 2 * LAYERS * 2 * TOKENS * WIDTH * 4  # two all-reduces per layer
    assert proved(tmp_path, capsys) == "proved"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "pins",
    [
        ["mlp.up_proj:out=tp"],
        ["mlp.down_proj:in=tp"],
        ["self_attn.q_proj:out=tp"],
        ["lm_head:out=tp", "layers.0.mlp.up_proj:out=tp"],
        [],
    ],
)
def test_any_plan_becomes_one_that_computes_the_model(pins, tmp_path, capsys):
    (tmp_path / "fast.json").write_text(json.dumps(FAST))
    try:
        made(tmp_path, {"tp": 2}, pins=[f"**.{p}" if "*" not in p else p for p in pins], topology=str(tmp_path / "fast.json"))
    except NotExpressible as e:
        assert not pins and "nothing for a tp_plan to say" in str(e)
        return
    assert proved(tmp_path, capsys) == "proved"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pins", [[], ["lm_head:out=tp"], ["lm_head:in=tp"], ["embed_tokens:out=tp"]])
def test_a_tied_head_is_cut_as_its_table_is(pins, tmp_path):
    model, table = decoder(), "m.model.embed_tokens.weight"
    for node in model.graph.node:
        node.input[:] = [table if i == "m.lm_head.weight" else i for i in node.input]
        node.name = {"embed": "/m/model/embed_tokens/Gather", "y": "/m/lm_head/MatMul"}.get(node.name, node.name)
    model.graph.initializer.remove(next(t for t in model.graph.initializer if t.name == "m.lm_head.weight"))
    model.graph.node[-1].name = "/m/lm_head/MatMul"
    onnx.save(onnx.shape_inference.infer_shapes(model), tmp_path / "m.onnx")
    c = tapestry.compile(tmp_path / "m.onnx", mesh={"tp": 2}, pins=[*MEGATRON, *(f"**.{p}" for p in pins)])
    styles = tp_plan.export_tp_plan(c.build, tmp_path / "plan.json", nearest=True)["styles"]
    assert styles["model.layers.*.mlp.up_proj"] == "colwise"
    found = {p: tp_plan.AXES[styles[p]] if p in styles else None for p in ("model.embed_tokens", "lm_head")}
    assert found["model.embed_tokens"] == found["lm_head"], styles


def test_parts_that_do_not_divide_are_no_style(tmp_path, capsys):
    done = made(tmp_path, {"tp": 2}, uneven=True, pins=MEGATRON)
    assert not any("mlp" in p for p in done["styles"]) and done["different"]
    assert proved(tmp_path, capsys) == "proved"


def test_what_is_no_tp_plan_is_refused(tmp_path):
    with pytest.raises(NotExpressible, match=r"no tp_plan style does what the plan does"):
        made(tmp_path, {"tp": 2}, nearest=False, uneven=True, pins=MEGATRON)
    assert not (tmp_path / "plan.json").exists()
    with pytest.raises(NotExpressible, match=r"nothing for a tp_plan to say"):
        made(tmp_path, {"tp": 1})


@pytest.mark.slow
def test_transformers_runs_our_plans(tmp_path):
    pytest.importorskip("transformers")
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "bench", "doors", "llama", "qwen3"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "tp-plan: 2 of 2 equal" in done.stdout, done.stdout + done.stderr[-2000:]
