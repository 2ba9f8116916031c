"""``--exact``: the same bits on 1, 2, 3, 4 and 8 devices."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T

import tapestry
from examples import light
from tapestry.errors import LawError, TapestryError
from tapestry.ir.canonical_parts import PARTS, blocks, canonical, free, may_cut
from tapestry.ir.graph import Split
from tapestry.ir.kernel import cut
from tapestry.ir.plan import MeshAxis, Plan
from tapestry.ir.program import Launch
from tapestry.ir.syntax.parser import parse
from tapestry.verify import certificate
from tests.support.lifting import SHARED, needs_shared
from tests.support.small_models import MODELS, N, f32, net, save

DEVICES = (1, 2, 3, 4, 8)
NEEDS_DATA = {"integers": "divides by its inputs, and random ones may be 0"}


def bits(model: Path, meshes=DEVICES, **options) -> dict[object, dict[str, bytes]]:
    out = {}
    for mesh in meshes:
        kind = {"mesh": mesh} if isinstance(mesh, str) else {"devices": mesh}
        build = tapestry.compile(model, exact=True, **kind, **options)
        out[mesh] = {n: a.tobytes() for n, a in build.run(build.random_feeds(3)).items()}
    return out


def assert_equal_bits(found: dict[object, dict[str, bytes]]) -> None:
    assert [m for m, outs in found.items() if outs != found[1]] == []


def test_blocks_are_the_cuts_of_every_number_of_devices():
    for size in (1, 5, 23, 24, 25, 100, 197):
        whole = blocks(size, 0, size)
        assert [hi for _, hi in whole[:-1]] == [lo for lo, _ in whole[1:]]
        for parts in (1, 2, 3, 4, 6, 8, 12, 24):
            pieces = [b for k in range(parts) if parts <= size for b in blocks(size, *cut(size, parts, k))]
            assert parts > size or pieces == whole


GRAPH = """graph g
input x: f32[30, 50]
input k: i64[30, 50]
s: f32[30] = op [a: 30 | m: 50 sum]
  reads x[a, m]
  body x
c: i64[30] = op [a: 30 | m: 50 sum]
  reads k[a, m]
  body k
d: f32[30, 50] = op [a: 30, b: 50]
  reads x[a, b]
  body x * x
e: f32[30, 50] = op [a: 30, b: 50]
  reads d[a, b]
  body exp(d)
output s, c, e
"""


def test_what_may_be_cut():
    s, c, d, e = parse(GRAPH).ops
    assert [free(op) for op in (s, c, d, e)] == [False, True, True, False]
    assert canonical(s).name == "a" and not may_cut(s, "m", 2) and may_cut(s, "a", 2) and not may_cut(s, "a", 5)
    assert may_cut(c, "m", 5) and may_cut(d, "b", 7) and not may_cut(e, "b", 2) and PARTS == 24


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_small_models(name):
    """Every small model, with dimensions that nothing divides; 2x2 cuts along two mesh axes."""
    if name in NEEDS_DATA:
        pytest.skip(NEEDS_DATA[name])
    assert_equal_bits(bits(save(name), (*DEVICES, "2x2")))


def test_plans_that_no_search_would_choose():
    """Random legal plans of an exact build: whatever is cut, the bits stay."""
    from tapestry.api import Compiled
    from tapestry.ir.program import peak_bytes
    from tapestry.plan.lower import lower
    from tapestry.plan.strategy import strategies

    build = tapestry.compile(save("attention"), devices=1, exact=True)
    graph, feeds = build.build.plan.graph, build.random_feeds(5)
    want = {n: a.tobytes() for n, a in build.run(feeds).items()}
    rng = np.random.default_rng(0)
    for devices in (2, 3, 8):
        mesh = (MeshAxis("d0", devices),)
        chosen = []
        for op in graph.ops:
            legal = [s for s in strategies(op, mesh) if all(d is None or may_cut(op, d, devices) for d in s.dims)]
            chosen.append(legal[rng.integers(len(legal))])
        plan = Plan(graph=graph, mesh=mesh, strategies=tuple(chosen))
        assert any(s.dims != (None,) for s in chosen)
        program = lower(plan)
        certificate.check(plan.annotated(), program, mesh=mesh, exact=True)
        other = replace(build.build, plan=plan, program=program, peak_bytes=tuple(peak_bytes(program)[0]))
        assert {n: a.tobytes() for n, a in Compiled(other, build.constants, {}, {}).run(feeds).items()} == want


def test_what_cannot_be_exact_is_refused(tmp_path):
    model = save("attention")
    with pytest.raises(TapestryError, match="divide 24"):
        tapestry.compile(model, devices=5, exact=True)
    with pytest.raises(TapestryError, match="torch-cpu"):
        tapestry.compile(model, devices=2, exact=True, target="triton:sm90")
    build = tapestry.compile(model, devices=2, exact=True)
    build.save(tmp_path / "b")
    assert tapestry.load(tmp_path / "b").build.exact
    graph = build.build.plan.graph
    at = next(i for i, op in enumerate(graph.ops) if not free(op) and op.reduce)
    cut_op = replace(graph.ops[at], splits=(Split(graph.ops[at].reduce[0].name, 2, "mesh.d0"),))
    with pytest.raises(LawError, match="last bits"):
        certificate.check(replace(graph, ops=(*graph.ops[:at], cut_op, *graph.ops[at + 1 :])), build.build.program, exact=True)
    program = build.build.program
    for k in (-1, len(graph.ops)):
        steps = tuple(replace(s, op=k) if isinstance(s, Launch) else s for s in program.steps)
        with pytest.raises(LawError, match=f"operation {k} does not exist"):
            certificate.check(graph, replace(program, steps=steps), exact=True)


def small_net(folder: Path) -> Path:
    """Convolutions of every kind that has a kernel of its own: few channels, depthwise, single pixels, 3 x 3, transposed; pools."""
    nodes = [
        N("Conv", ["x", "a"], ["c"], pads=[1] * 4, strides=[2, 2]), N("Relu", ["c"], ["d"]),
        N("Conv", ["d", "u"], ["e"], group=64, pads=[1] * 4), N("Conv", ["e", "b"], ["f"]), N("Relu", ["f"], ["g"]),
        N("MaxPool", ["g"], ["h"], kernel_shape=[2, 2], strides=[2, 2]), N("Conv", ["h", "v"], ["i"], pads=[1] * 4),
        N("ConvTranspose", ["i", "t"], ["j"], strides=[2, 2]), N("Concat", ["j", "g"], ["k"], axis=1),
        N("Conv", ["k", "z"], ["l"], pads=[1] * 4), N("Softmax", ["l"], ["m"], axis=1),
        N("ReduceMean", ["m", "axes"], ["n"], keepdims=0), N("MatMul", ["n", "q"], ["y"]),
    ]  # fmt: skip
    weights = {
        "a": f32(64, 3, 3, 3), "u": f32(64, 1, 3, 3), "b": f32(64, 64, 1, 1), "v": f32(64, 64, 3, 3), "t": f32(64, 32, 2, 2),
        "z": f32(32, 96, 3, 3), "q": f32(32, 40), "axes": np.array([2, 3], np.int64),
    }  # fmt: skip
    onnx.save(net(nodes, {"x": (T.FLOAT, (1, 3, 52, 44))}, {"y": T.FLOAT, "l": T.FLOAT}, weights), folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.slow
def test_convolutions_with_any_number_of_threads(tmp_path):
    """What has kernels of our own for one thread, and torch's for more, takes the same ones."""
    model, before = small_net(tmp_path), torch.get_num_threads()
    try:
        found = {}
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found |= {(threads, n): outs for n, outs in bits(model, (1, 2, 3, 8)).items()}
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert [k for k, outs in found.items() if outs != found[1, 1]] == []


@pytest.mark.slow
def test_processes_give_the_bits_of_one(tmp_path):
    model = small_net(tmp_path)
    alone = tapestry.compile(model, devices=1, exact=True)
    want = alone.run(alone.random_feeds(0))
    tapestry.compile(model, devices=3, exact=True).save(tmp_path / "b")
    command = ["run", tmp_path / "b", "--processes", 3, "--threads", 2, "--output", tmp_path / "out", "-q"]
    done = subprocess.run([sys.executable, "-m", "tapestry", *map(str, command)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert {p.stem: np.load(p).tobytes() for p in (tmp_path / "out").glob("*.npy")} == {n: a.tobytes() for n, a in want.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_convolutional_net(tmp_path):
    assert_equal_bits(bits(light.write("resnet50", tmp_path)))


def shared(name: str, folder: Path) -> Path:
    """An exported model with random weights, of which every one matters."""
    subprocess.run([sys.executable, str(SHARED / "materialize.py"), name, str(folder)], check=True)
    return folder / f"{name}.onnx"


@pytest.mark.slow
@needs_shared
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["unet", "resnet50", "mobilenet_v2"])
def test_real_images(name, tmp_path):
    model, shapes = shared(name, tmp_path), {"unet": {"x": "1x3x128x128"}}.get(name, {"input": "1x3x224x224"})
    found = bits(model, shapes=shapes)
    before = torch.get_num_threads()
    torch.set_num_threads(before % 2 + 1)
    try:
        found |= {("threads", n): outs for n, outs in bits(model, (1, 4), shapes=shapes).items()}
    finally:
        torch.set_num_threads(before)
    assert_equal_bits(found)


@pytest.mark.slow
@needs_shared
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["bert_base", "gpt2"])
def test_real_transformers(name, tmp_path):
    model = shared(name, tmp_path)
    inputs = ("input_ids", "attention_mask", "token_type_ids")[: 3 if name == "bert_base" else 2]
    assert_equal_bits(bits(model, shapes=dict.fromkeys(inputs, "1x37")))
