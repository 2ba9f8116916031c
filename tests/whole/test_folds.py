"""What is said of models with many layers: counterparts once, in lines of 80 columns, with numbers in one style."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tapestry
from tapestry.ir.graph import Names
from tapestry.viz import format, tables
from tests.support.command_line import run
from tests.support.paths import SHARED

MODEL = SHARED / "models" / "llama_tiny.onnx.gz"
SIZES = {"s72": 2, "s53": 16, "s43": 2}
ODD = re.compile(r"\d+\.?\d*e[+-]\d+|\d+\.\d{3,} (?:ms|s)\b|\d{7,}")  # powers of ten, and digits that nobody reads


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A Llama of four layers whose products are cut in two ways: (the model, two builds)."""
    if not MODEL.is_file():
        pytest.skip("the folder of exported models is not beside the checkout")
    folder = tmp_path_factory.mktemp("folds")
    (folder / "m.onnx").write_bytes(gzip.decompress(MODEL.read_bytes()))
    for name, pins in (("a", ["node_linear*:m=2@tp"]), ("b", ["node_linear*:n=2@tp"])):
        tapestry.compile(folder / "m.onnx", shapes=SIZES, mesh="tp=2", topology="h100", weights=False, pins=pins).save(
            folder / name
        )
    return folder / "m.onnx", folder / "a", folder / "b"


def lines_of(*words: object) -> list[str]:
    """The lines of a command that succeeds, held to 80 columns and to one style of numbers."""
    status, text, err = run(*map(str, words))
    assert status == 0, err
    lines = text.splitlines()
    assert [x for x in lines if len(x) > 80 and "/" not in x.split()[0]] == []
    assert ODD.findall(text) == []
    return lines


def test_a_plan_is_one_layer_and_the_exceptions(builds) -> None:
    _, a, b = builds
    layers = 4
    text = lines_of("explain", a)
    folded = [x for x in text if re.match(rf" +{layers} ", x)]
    assert len(folded) >= 8 and len(text) <= 120
    assert len(run("explain", str(a), "-v")[1].splitlines()) > 1.5 * len(text)
    differs = lines_of("explain", a, "--diff", b)
    assert any(f"×{layers}" in x for x in differs) and len(differs) <= 120
    assert max(map(len, lines_of("explain", a, "--critical-path"))) <= 80


def test_refusals_are_said_once(builds) -> None:
    model, *_ = builds
    lines = lines_of("rules", "--refused", model, "--shape", *(f"{k}={v}" for k, v in SIZES.items()))
    heads = [x for x in lines if re.match(r" +\d+  \w+: ", x)]
    assert len(lines) < 150 and len(heads) == len(set(heads)) and any(int(x.split()[0]) >= 40 for x in heads)


def test_moves_are_said_once() -> None:
    moves = [f"fuse_sums@layers.{k}.k_proj{{with=layers.{k}.q_proj}}" for k in range(32)]
    assert list(format.moves_text(moves)) == ["fuse_sums@layers.*.k_proj{with=layers.*.q_proj} ×32"]
    others = [f"split@{part}{{dim=n,parts=2}}" for part in ("a", "b", "c", "d", "e", "e_1")]
    said = list(format.moves_text([*moves, *others]))
    assert said[1:] == [*others[:3], "split@… ×3, 2 kinds of places"]
    assert list(format.moves_text(["split@y{dim=h,parts=4}", "split@y{dim=h,parts=8}"])) == [
        "split@y{dim=h,parts=4}", "split@y{dim=h,parts=8}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.self_attn.q_proj", "model.layers.*.self_attn.q_proj"),
        ("layer1.0.conv1", "layer*.*.conv1"),
        ("/model/layers.0/mlp/Add_output_0", "/model/layers.*/mlp/Add_output"),
        ("features.3", "features.*"),
        ("node_linear_17", "node_linear"),
        ("x12", "x12"),
    ],
)
def test_names_stand_for_their_counterparts(name: str, expected: str) -> None:
    assert format.template(name) == expected


def test_without_names_the_structure_says_what_is_alike(builds) -> None:
    plan = tapestry.load(builds[1]).build.plan
    bare = replace(plan.graph, names=Names(), ops=tuple(replace(op, source=(f"op{k}",)) for k, op in enumerate(plan.graph.ops)))
    alike = format.together(format.counterparts(replace(plan, graph=bare)), str)
    assert max(map(len, alike.values())) == 3, "the first layer also makes the mask, and stands beside the run"
    counted = format.together(format.counterparts(plan), str)
    assert max(map(len, counted.values())) >= 4 and len(counted) < len(plan.graph.ops) / 2


def row(k: int, **more: object) -> dict:
    machine = {"grid": [65535, 16, 1], "num_warps": 8, "registers": 255, "spills": 12, "shared": 233472, "shared_limit": 233472}
    machine |= {"in_flight": 3 << 20, "messages": ["C7515 wgmma.mma_async instructions are serialized"]}
    work = {"flops": 123456789012, "bytes": 98765432, "roofline_s": 5.072e-05, "predicted_s": 6.5e-05}
    work["refused"] = [{"knobs": {}, "why": "245,784 bytes of shared memory, of 232,448"}]
    more = {"occupancy": 0.125, "matrix": "wgmma", "wide_share": 1.0, "kind": "dot", "launches": 32, **work, **more}
    return {"kernel": f"model_layers_{k}_self_attn_q_proj_with_a_long_name_{k}", **machine, **more}


def test_kernels_fit_and_fold() -> None:
    model = {"launches": 96, "bytes": 3 << 30, "roofline_s": 0.0695e-3, "opaque": ["node_" + "x" * 90]}
    document = {"target": "triton:sm90", "precision": "ieee", "model": model, "kernels": [row(0), row(1), row(2, spills=0)]}
    text = tables.kernels(document)
    assert max(map(len, text.splitlines())) <= 80 and ODD.findall(text) == []
    assert [x.split()[0] for x in text.splitlines() if re.match(r" +\d+ +\d", x)] == ["64", "32"]
    assert "3.25 ms" in text and "50.7 µs" not in text and "12 spills" in text
    plain = " ".join(text.split())
    assert "C7515" in plain and "predicted 65 µs" in plain and "passed over 1: 245,784 bytes" in plain


def test_the_table_reads_what_real_kernels_say(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.ReLU()).eval()
    tapestry.compile(net, (torch.randn(70, 40),), devices=1).save(tmp_path / "b")

    def kernels(*more: str) -> str:  # in a process of its own: Triton compiles nothing where others interpret its kernels
        words = [sys.executable, "-m", "tapestry", "kernels", tmp_path / "b", "--target", "triton:sm90", *more]
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert ODD.findall(text := kernels("-o", str(tmp_path / "k"))) == [] and len(text.splitlines()) >= 4
    real = json.loads(kernels("-o", str(tmp_path / "k2"), "--json"))["kernels"]
    assert real and all(row(0).keys() <= one.keys() for one in real), "the row above is one that there is"


@pytest.mark.slow
def test_kernels_of_a_model_fit(builds, tmp_path: Path) -> None:
    lines = lines_of("kernels", builds[1], "-o", tmp_path / "k")
    assert len(lines) > 10
