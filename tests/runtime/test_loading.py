"""Weights are loaded in slices, each checked by the tiles that it touches, from the model's files."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tapestry import api
from tapestry.build import store, weight_tiles
from tapestry.build.store import Build
from tapestry.errors import BuildError, ModelError
from tapestry.ir.kernel import Box
from tapestry.ir.program import Load
from tapestry.lift.file import weight_data
from tapestry.lift.file.stored_ranges import stored_ranges
from tapestry.lift.file.structure import load
from tapestry.runtime.session import ModelFiles
from tests.support.command_line import run
from tests.support.paths import ROOT
from tests.support.small_models import MODELS, save

SIDE, LAYERS = 2048, 6  # of the model that is loaded in halves: weights of 16 MiB
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


# --- modules

OF_THE_COMPILER = (
    "tapestry.frontends", "tapestry.compiler.pipeline", "tapestry.compiler.passes", "tapestry.plan.search", "tapestry.plan.solver", "tapestry.plan.strategy",
    "tapestry.plan.structural_search", "tapestry.plan.lower", "tapestry.plan.cost", "tapestry.plan.memory", "tapestry.lift.operators",
    "tapestry.lift.onnx_to_graph", "tapestry.lift.normalize", "tapestry.sharding", "tapestry.tools",
)  # fmt: skip
LOADED = f"""
import sys
import tapestry.api
def compiler():
    rules = {{m for m in sys.modules if m.startswith("tapestry.rewrites.") and not m.startswith("tapestry.rewrites.core")}}
    return sorted(rules | {{m for m in sys.modules if m.startswith({OF_THE_COMPILER})}})
assert not compiler(), compiler()
build = tapestry.api.load(sys.argv[1])
build.run(build.random_feeds())
assert not compiler(), compiler()
"""


def test_a_build_is_loaded_and_run_without_the_compiler(tmp_path):
    for name in ("mlp", "conv_chain", "opaques"):
        api.compile(save(name), mesh="2").save(tmp_path / name)
        done = subprocess.run([sys.executable, "-c", LOADED, tmp_path / name], env=ENV, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


# --- tiles


@pytest.mark.parametrize(
    ("shape", "width"),
    [
        ((), 4),
        ((0, 3), 4),
        ((5,), 8),
        ((3_000_000,), 1),
        ((1024, 1024), 4),
        ((30522, 768), 4),
        ((64, 3, 7, 7), 4),
        ((2, 1, 700_001), 2),
    ],
)
def test_tiles_cover_a_weight_once(shape, width):
    rng = random.Random(str(shape))
    whole = tuple((0, s) for s in shape)
    tiles = list(weight_tiles.touched(shape, width, whole))
    assert [n for n, _ in tiles] == list(range(weight_tiles.count(shape, width)))
    sizes = [int(np.prod([hi - lo for lo, hi in box], dtype=np.int64)) for _, box in tiles]
    assert sum(sizes) == np.prod(shape, dtype=np.int64) and max(sizes) * width <= weight_tiles.TILE
    for _ in range(20):
        cuts = [sorted(rng.sample(range(s + 1), 2)) if s else [0, 0] for s in shape]
        box = tuple((lo, hi) for lo, hi in cuts)
        meets = {n for n, t in tiles if all(max(a, lo) < min(b, hi) for (a, b), (lo, hi) in zip(t, box, strict=True))}
        assert dict(weight_tiles.touched(shape, width, box)) == {
            n: t for n, t in tiles if n in meets or not shape or 0 in shape
        }


def test_half_of_the_columns_is_half_of_the_work():
    for shape in ((768, 768), (768, 3072), (3072, 768), (4096, 4096), (1024, 4096)):
        count = weight_tiles.count(shape, 4)
        for axis in (0, 1):
            box = tuple((0, s // 2 if a == axis else s) for a, s in enumerate(shape))
            assert len(list(weight_tiles.touched(shape, 4, box))) * 2 == count, (shape, axis)


def test_hashes_that_were_kept_are_checked():
    a = np.random.default_rng(0).standard_normal((700, 1000)).astype(np.float32)
    tiles = weight_tiles.digests(a)
    assert len(tiles) == 32 * weight_tiles.count(a.shape, 4) > 32
    a[699, 999] += 1
    assert weight_tiles.root(weight_tiles.digests(a)) != weight_tiles.root(tiles)


# --- the model's own file


@pytest.mark.parametrize("name", list(MODELS))
def test_a_walk_over_the_fields_finds_what_a_parser_finds(name):
    path = save(name)
    status = path.stat()
    found = stored_ranges(str(path), status.st_mtime_ns, status.st_size)
    parsed, data = weight_data.stored_tensors(load(path)), path.read_bytes()
    assert set(found) == set(parsed)
    for t, place in found.items():
        assert TensorProto.FromString(data[slice(*place.message)]) == parsed[t]
        assert place.raw is None or data[slice(*place.raw)] == parsed[t].raw_data


def test_damaged_files_are_refused(tmp_path):
    data = save("mlp").read_bytes()
    for k in range(0, len(data) - 1, 7):
        path = tmp_path / f"{k}.onnx"
        path.write_bytes(data[:k])
        with suppress(ModelError, ValueError):  # an empty file cannot be mapped
            stored_ranges(str(path), 0, k)


def layers(path: Path, external: bool) -> Path:
    """Products whose weights are the most of a rank's memory."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array((rng.random((SIDE, SIDE), np.float32) - 0.5) / 16, f"w{k}") for k in range(LAYERS)]
    nodes, last = [], "x"
    for k in range(LAYERS):
        nodes += [helper.make_node("MatMul", [last, f"w{k}"], [f"m{k}"]), helper.make_node("Relu", [f"m{k}"], [f"r{k}"])]
        last = f"r{k}"
    info = [helper.make_tensor_value_info(t, TensorProto.FLOAT, [8, SIDE]) for t in ("x", last)]
    graph = helper.make_graph(nodes, "layers", info[:1], info[1:], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(made, path, save_as_external_data=external, location=f"{path.name}.bin")
    return path


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> dict[str, Path]:
    """Builds on two devices of one model, with its weights inside and outside of the ONNX file; each device has half of each."""
    folder, out = tmp_path_factory.mktemp("layers"), {}
    for name in ("inside", "outside"):
        model = layers(folder / f"{name}.onnx", name == "outside")
        out[name] = folder / name
        assert run("compile", model, "-o", out[name], "--devices", "2", "--memory", "64MiB", "-q")[0] == 0
    return out


def slices_of(build: Build) -> Iterator[tuple[str, Box, int]]:
    """(tensor, box, first device) of every distinct slice of a weight in the model's files."""
    weights, seen = build.plan.graph.weights, set[tuple[str, Box]]()
    for s in build.program.steps:
        b = build.program.buffers[s.buffer] if isinstance(s, Load) else None
        if b is not None and b.tensor in weights and weights[b.tensor].file:
            for d, box in enumerate(b.boxes):
                if box is not None and (b.tensor, box) not in seen:
                    seen.add((b.tensor, box))
                    yield b.tensor, box, d


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_rank_reads_and_hashes_its_own_slices(halves, where, monkeypatch):
    build, _ = store.read(halves[where])
    hashed: list[int] = []
    digest = weight_tiles.digest
    monkeypatch.setattr(weight_tiles, "digest", lambda a: hashed.append(a.nbytes) or digest(a))
    read, model = ModelFiles(build), onnx.load(build.model)
    whole = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    mine = [(t, box) for t, box, d in slices_of(build) if d == 0]
    for t, box in mine:
        assert np.array_equal(read(t, box), whole[t][tuple(slice(lo, hi) for lo, hi in box)])
    sizes = sum(4 * int(np.prod([hi - lo for lo, hi in box])) for _, box in mine)
    assert 0 < sizes < 0.6 * 4 * LAYERS * SIDE * SIDE and sum(hashed) <= 1.1 * sizes


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_changed_byte_is_named_by_whoever_reads_it(halves, where, tmp_path):
    shutil.copytree(halves[where].parent, tmp_path / "model")
    build, _ = store.read(halves[where])
    data = tmp_path / "model" / (f"{where}.onnx" + (".bin" if where == "outside" else ""))
    (first, box, _), *_ = slices_of(build)
    raw = numpy_helper.to_array(next(t for t in onnx.load(build.model).graph.initializer if t.name == first)).tobytes()
    at = data.read_bytes().index(raw) + 4 * (SIDE * box[0][0] + box[1][0])
    with data.open("r+b") as f:
        f.seek(at)
        f.write(b"\x7f\x7f")
    changed = ModelFiles(replace(build, model=str(tmp_path / "model" / f"{where}.onnx")))
    with pytest.raises(BuildError, match=f"weight '{first}' has changed"):
        changed(first, box)
    others = [b for t, b, _ in slices_of(build) if t == first and b != box]
    assert others
    changed(first, others[0])  # whoever has the other half has what the model had


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", pytest.param("outside", marks=pytest.mark.slow)])
def test_loading_takes_the_plan_and_a_slice(halves, where):
    build = halves[where]
    command = [sys.executable, "-m", "tapestry", "run", build, "--processes", 2, "--threads", 1, "--json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=ENV, timeout=120)
    found = json.loads(done.stdout)
    sizes = [4 * int(np.prod([hi - lo for lo, hi in box])) for _, box, _ in slices_of(store.read(build)[0])]
    for r in found["ranks"]:  # what Python, torch and gloo take is there afterwards too
        assert sum(sizes) / 3 < r["weight_bytes"] <= found["peak_bytes"][r["rank"]]
        assert r["resident_bytes"]["loading"] <= r["resident_bytes"]["running"] + max(sizes) + (8 << 20), r


def test_a_build_without_its_hashes_is_refused(halves, tmp_path):
    assert len((halves["inside"] / store.TILES).read_bytes()) == 32 * LAYERS * weight_tiles.count((SIDE, SIDE), 4)
    build, _ = store.read(halves["inside"])
    for data in (
        b"",
        b"\0" * 32,
        weight_tiles.stored(build.plan.graph) + b"\0",
        weight_tiles.stored(build.plan.graph)[:-1],
    ):
        with pytest.raises(BuildError, match="hashes of"):
            weight_tiles.restored(build.plan.graph, data, "here")


def test_a_loaded_build_runs(halves):
    for where in halves.values():
        compiled = api.load(where)
        out = compiled.run(compiled.random_feeds(0))
        assert next(iter(out.values())).shape == (8, SIDE)
