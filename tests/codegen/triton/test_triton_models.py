"""Whole models on generated kernels: in the interpreter at small odd sizes, and every kernel compiled ahead of time.

Each runs the command line in a process of its own, because Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tapestry.codegen.triton.task.chips import CHIPS
from tests.support.gpu_stand_in.matrix_instructions import MATRIX
from tests.support.paths import SHARED
from tests.support.small_models import f32, net

EXPORTS = SHARED / "models"
N = helper.make_node


def tapestry(*args: str | Path, interpret: bool = False) -> dict:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    done = subprocess.run(
        [sys.executable, "-m", "tapestry", *map(str, args), "--json"], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


def residual_net() -> onnx.ModelProto:
    """What ResNet-50 is made of, at odd sizes: strided stem, pool, bottleneck with projection, global pool, linear."""
    weights: dict[str, np.ndarray] = {}

    def conv(out: str, x: str, c: int, o: int, k: int, **attributes: object) -> list[onnx.NodeProto]:
        weights[f"{out}.w"] = f32(o, c, k, k)
        for name in ("scale", "bias", "mean"):
            weights[f"{out}.{name}"] = f32(o)
        weights[f"{out}.var"] = np.abs(f32(o)) + np.float32(0.5)
        norm = [f"{out}.{n}" for n in ("scale", "bias", "mean", "var")]
        return [
            N("Conv", [x, f"{out}.w"], [f"{out}.c"], name=out, **attributes),
            N("BatchNormalization", [f"{out}.c", *norm], [out]),
        ]

    weights["fc.w"], weights["fc.b"] = f32(13, 19), f32(13)
    nodes = [
        *conv("stem", "x", 3, 9, 7, strides=[2, 2], pads=[3, 3, 3, 3]), N("Relu", ["stem"], ["r"]),
        N("MaxPool", ["r"], ["p"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        *conv("a", "p", 9, 7, 1), N("Relu", ["a"], ["ar"]), *conv("b", "ar", 7, 7, 3, strides=[2, 2], pads=[1, 1, 1, 1]),
        N("Relu", ["b"], ["br"]), *conv("c", "br", 7, 19, 1), *conv("d", "p", 9, 19, 1, strides=[2, 2]),
        N("Add", ["c", "d"], ["s"]), N("Relu", ["s"], ["sr"]), N("GlobalAveragePool", ["sr"], ["g"]),
        N("Flatten", ["g"], ["f"]), N("Gemm", ["f", "fc.w", "fc.b"], ["y"], transB=1),
    ]  # fmt: skip
    return net(nodes, {"x": (1, [1, 3, 37, 29])}, {"y": 1}, weights)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3])
def test_residual_net_on_generated_kernels(tmp_path: Path, devices: int) -> None:
    onnx.save(residual_net(), tmp_path / "m.onnx")
    tapestry("compile", tmp_path / "m.onnx", "-o", tmp_path / "b", "--devices", str(devices), "--target", "triton:sm90")
    done = tapestry("run", tmp_path / "b", "--check", interpret=True)
    assert done["passed"] and done["outputs"]["y"]["rel_err"] < 1e-5


@pytest.mark.slow
def test_llama_export_on_generated_kernels(tmp_path: Path) -> None:
    shapes = ["s72=1", "s53=3"]
    build = _export(tmp_path, "llama_tiny", shapes, devices=2)
    done = tapestry("run", build, "--check", interpret=True)
    assert done["passed"] and all(o["rel_err"] < 1e-5 for o in done["outputs"].values())


def _export(folder: Path, name: str, shapes: list[str], devices: int, precision: str = "ieee") -> Path:
    if not EXPORTS.is_dir():
        pytest.skip("the exported models are not beside the checkout")
    subprocess.run([sys.executable, str(EXPORTS / "materialize.py"), name, str(folder)], check=True)
    args = ("--devices", str(devices), "--shape", *shapes, "--target", "triton:sm90", "--precision", precision)
    tapestry("compile", folder / f"{name}.onnx", "-o", folder / "build", *args)
    return folder / "build"


SHAPES = {
    "bert_base": ["s18=1", "s41=128", "s43=128"], "gpt2": ["s72=1", "s70=64", "s43=1", "s53=64"], "llama_tiny": ["s72=1", "s53=33"],
    "qwen3_tiny": ["s72=1", "s53=33"], "t5_small": ["s11=1", "s53=32", "s28=32"], "vit_base": ["s99=1"], "whisper_encoder": ["s6=1"],
    "resnet50": ["s31=1"], "mobilenet_v2": ["s31=1"], "unet": ["s77=1"], "convnext_tiny": ["s99=1"],
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SHAPES)
def test_every_operation_of_a_model_has_a_kernel(tmp_path: Path, name: str) -> None:
    """Whatever is not opaque is generated, for every chip, with both precisions."""
    from tapestry.codegen.blocks.lowered import unavailable
    from tapestry.codegen.triton.emit.source import generate
    from tapestry.ir.graph import Block
    from tapestry.ir.kernel import Kernel, whole
    from tapestry.ir.syntax.printer import signature
    from tapestry.lift import lift
    from tapestry.rewrites.core.driver import simplify

    path = EXPORTS / f"{name}.onnx.gz"
    if not path.is_file():
        pytest.skip("the exported models are not beside the checkout")
    (tmp_path / "m.onnx").write_bytes(gzip.decompress(path.read_bytes()))
    sizes = {k: int(v) for k, v in (s.split("=") for s in SHAPES[name])}
    graph = simplify(lift(tmp_path / "m.onnx", sizes, weights=False).graph)
    seen: set[object] = set()
    for i, op in enumerate(graph.ops):
        if (same := signature(op, graph)) in seen or unavailable(graph, i):
            continue
        seen.add(same)
        assert isinstance(op, Block)
        outs = tuple(whole(graph.tensors[t].shape) for t in op.outs)
        ins = tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads)
        kernel = Kernel(op=i, mode="full", block=whole(tuple(d.size for d in op.space)), ins=ins, outs=outs)
        for target, precision in (("sm80", "tf32"), ("sm90", "ieee"), ("sm100", "tf32x3"), ("gfx942", "ieee")):
            assert generate(graph, kernel, target=target, precision=precision).passes
    assert len(seen) > 4


SPILLS = {  # bytes per thread
    # ptxas keeps to 96 registers, so that a fifth program fits, and parks three; the other device's kernel has 124 and parks none
    ("llama_tiny", "sm90", "node_scaled_dot_product_attention_1"): 16,
}


@pytest.mark.slow
@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("name", ["demo", "llama_tiny"])
def test_every_kernel_compiles_ahead_of_time(tmp_path: Path, name: str, target: str) -> None:
    if name == "demo":
        from examples import light

        build = tmp_path / "build"
        tapestry("compile", light.write("resnet50", tmp_path), "-o", build, "--devices", "4", "--precision", "tf32")
    else:
        build = _export(tmp_path, name, ["s72=1", "s53=128"], devices=2, precision="tf32")
    document = tapestry("kernels", build, "-o", tmp_path / "kernels", "--target", f"triton:{target}")
    table, chip = document["kernels"], CHIPS[target]
    assert len([r for r in table if "." not in r["kernel"]]) == len(list((build / "kernels").glob("*.py"))) > 10
    for row in table:
        where = f"{row['kernel']}: {row}"
        assert row["shared"] <= chip.shared, where
        source = (build / "kernels" / f"{row['kernel'].partition('.')[0]}.py").read_text()
        trigonometric = any(w in source for w in ("tl.cos(", "tl.sin("))
        allowed = SPILLS.get((name, target, row["kernel"]), 0)
        assert row["spills"] <= allowed or trigonometric, where  # argument reduction of sin and cos needs stack on CUDA
        if "extents" in row and min(row["extents"][1:]) >= 64 and target != "gfx942":  # CDNA3 has no tf32 in Triton
            assert row["matrix"] == MATRIX[target], where
    model = document["model"]
    assert model["launches"] < model["unfused_kernels"] and model["bytes"] > 0 and model["roofline_s"] > 0
