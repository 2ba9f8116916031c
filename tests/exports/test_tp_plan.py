"""``tp-plan``: styles of linear layers and tables, held to what each rank would have, and proved by ``tapestry prove``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import onnx
import pytest

import tapestry
from bench.doors.onnx_folders import FAST
from tapestry import cli
from tapestry.tools.exports import tp_plan
from tapestry.tools.exports.nodes.onnx_nodes import NotExpressible
from tests.support.paths import ROOT
from tests.support.programs.decoder_net import LAYERS, MEGATRON, TOKENS, WIDTH, decoder


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
