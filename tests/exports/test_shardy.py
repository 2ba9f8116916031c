"""``shardy``: StableHLO text of any plan; XLA compiles it for the plan's devices and computes what the model computes."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from math import prod

import numpy as np
import onnx
import pytest
from onnx import helper

import tapestry
from tapestry.ir.kernel import whole
from tapestry.ir.plan import Plan
from tapestry.plan.lower import lower
from tapestry.plan.strategy import strategies
from tapestry.tools.exports import formats, shardy
from tapestry.tools.exports.layouts import places
from tapestry.tools.exports.onnx_files import weights_of
from tapestry.tools.exports.onnx_nodes import NotExpressible
from tests.support.paths import ROOT
from tests.support.small_models import MODELS, N, T, assert_same, f32, i64, mesh_of, net, random_plan, save

# nodes kept as they are, and random numbers; numpy gives jax no bfloat16
NAMES = [n for n in MODELS if n not in ("opaques", "recurrent", "noise", "bfloats")]


def planned(name: str, seed: int, mesh: str = ""):
    """A model, and a build of it with a random plan."""
    c, rng = tapestry.compile(save(name), mesh="1"), random.Random(f"{name}{seed}")
    plan = random_plan(c.build.plan.graph, mesh_of(mesh or rng.choice(["2", "3", "2x2"])), rng)
    return c, replace(c.build, plan=plan, program=lower(plan))


def written(name: str, seed: int, folder, mesh: str = ""):
    """A model's text under a random plan, what it says it is, and the arguments' values."""
    c, build = planned(name, seed, mesh)
    said, feeds = shardy.export_shardy(build, folder / f"{name}{seed}.mlir", nearest=True), c.random_feeds(seed)
    read, tensors = weights_of(c.build, b"".join(c.constants.values())), c.build.plan.graph.tensors
    weights = {t: read(t, whole(tensors[t].shape)) for t in said["arguments"] if t not in feeds}
    given = [filled((feeds | weights)[t], said["padded"].get(t)) for t in said["arguments"]]
    np.savez(folder / f"{name}{seed}.npz", **{str(k): a for k, a in enumerate(given)})
    return c, feeds, said, build


def filled(a, shape):
    """An array with zeros behind it, to a shape."""
    return (
        a if shape is None or tuple(shape) == a.shape else np.pad(a, [(0, n - m) for n, m in zip(shape, a.shape, strict=True)])
    )


def in_parts(a, end):
    """An array as an argument or a result has it: itself, or along a first axis each device's box, filled up with zeros."""
    if "parts" not in end:
        return a
    most = [max(hi - lo for lo, hi in (b[k] for b in end["parts"] if b is not None)) for k in range(a.ndim)]
    return np.stack(
        [
            filled(a[tuple(slice(*x) for x in b)] if b is not None else np.zeros((0,) * a.ndim, a.dtype), most)
            for b in end["parts"]
        ]
    )


def of_parts(parts, end, shape):
    """The whole of an array that `in_parts` gave."""
    if "parts" not in end:
        return parts
    out = np.zeros(shape, parts.dtype)
    for part, b in ((p, b) for p, b in zip(parts, end["parts"], strict=True) if b is not None):
        out[tuple(slice(*x) for x in b)] = part[tuple(slice(hi - lo) for lo, hi in b)]
    return out


def by_xla(folder) -> None:
    """Compile and run every text of a folder."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("needs jax")
    script = ROOT / "tests" / "support" / "programs" / "sdy_runs.py"
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_xla_computes_the_model(tmp_path):
    made = {f"{name}{seed}": written(name, seed, tmp_path) for name in NAMES for seed in range(2)}
    known = [name for name, (_, _, said, _) in made.items() if any("convolution" in w["why"] for w in said["wrong_in_xla"])]
    for path in (tmp_path / f"{name}.mlir" for name in known):  # the same text, with nothing cut
        path.write_text(re.sub(r"<@mesh, \[.*?\]>", lambda m: re.sub(r"\{.*?\}", "{}", m[0]), path.read_text()))
    by_xla(tmp_path)
    assert len(known) < len(made) / 10
    assert any(said["padded"] for _, _, said, _ in made.values())
    for name, (c, feeds, said, build) in made.items():
        found = dict(zip(said["results"], np.load(tmp_path / f"{name}.out.npz").values(), strict=True))
        found = {t: a[tuple(slice(n) for n in build.plan.graph.tensors[t].shape)] for t, a in found.items()}
        assert_same(found, c.run(feeds), c.build.plan.graph, name)


def test_negative_places_count_from_the_end(tmp_path):
    """StableHLO's gather takes a negative place for 0, and ONNX's for one from the end."""
    for seed in range(2):
        written("gathers", seed, tmp_path)
        text = (tmp_path / f"gathers{seed}.mlir").read_text()
        places_of = re.findall(r'"stablehlo.gather"\(%\d+, (%\d+)\)', text)
        assert places_of
        for place in places_of:
            test, wrapped, plain = re.search(rf"{place} = stablehlo.select (%\d+), (%\d+), (%\d+) ", text).groups()
            assert re.search(rf"{test} = stablehlo.compare LT, {plain},", text)
            assert re.search(rf"{wrapped} = stablehlo.add {plain},", text)


def of_ranks(c, build, feeds, path):
    """The text of what every rank does, written with its arguments; what it says it is."""
    said = shardy.export_shardy_ranks(build, path, nearest=True)
    read, tensors = weights_of(c.build, b"".join(c.constants.values())), c.build.plan.graph.tensors
    names = [e["tensor"] for e in said["arguments"]]
    values = [feeds[t] if t in feeds else read(t, whole(tensors[t].shape)) for t in names]
    given = [in_parts(a, e) for a, e in zip(values, said["arguments"], strict=True)]
    np.savez(path.with_suffix(".npz"), **{str(k): a for k, a in enumerate(given)})
    return said


def found_of_ranks(c, said, path):
    """What XLA made of it."""
    ends, parts = said["results"], np.load(path.with_suffix(".out.npz")).values()
    shapes = [c.build.plan.graph.tensors[e["tensor"]].shape for e in ends]
    return {e["tensor"]: of_parts(a, e, shape) for e, a, shape in zip(ends, parts, shapes, strict=True)}


@pytest.mark.slow
def test_xla_does_what_every_rank_does(tmp_path):
    made = {}
    for name, seed in ((name, seed) for name in NAMES for seed in range(2)):
        c, build = planned(name, seed)
        feeds = c.random_feeds(seed)
        made[f"{name}{seed}"] = c, feeds, of_ranks(c, build, feeds, tmp_path / f"{name}{seed}.mlir")
    by_xla(tmp_path)
    assert any("parts" in e for _, _, said in made.values() for e in said["results"])
    for name, (c, feeds, said) in made.items():
        assert_same(found_of_ranks(c, said, tmp_path / f"{name}.mlir"), c.run(feeds), c.build.plan.graph, name)


def extremes(dtype: int):
    """The greatest, the least, and the first place of the greatest, of rows."""
    return net(
        [N("ReduceMax", ["x", "one"], ["most"], "most"), N("ReduceMin", ["x", "one"], ["least"], "least"), N("ArgMax", ["x"], ["at"], "at", axis=1)],
        {"x": (dtype, [10, 6])}, {"most": dtype, "least": dtype, "at": T.INT64}, {"one": i64(1)},
    )  # fmt: skip


def awkward(dtype) -> np.ndarray:
    """Rows of what a greatest value may go wrong at; a NaN of either sign in each place of a rank."""
    inf, nan, least = np.inf, np.nan, np.finfo(dtype).tiny
    rows = [[1, nan, 3, -2, 5, inf], [1, 2, inf, -inf, -nan, 3], [nan] * 6, [-inf] * 6, [inf, *[-inf] * 5], [-5, -7, -3, -9, -4, -6],
            [-0.0, 0.0, -0.0, -least, least, -0.0], [-1, -2, -3, -4, -5, nan], [-nan, 1, 2, 3, 4, 5], [1e4, -1e4, 0, 0, 1e4, 2]]  # fmt: skip
    return np.array(rows, dtype)


def merged(dtype: int, folder):
    """`extremes`, and builds whose ranks merge them, over three meshes."""
    onnx.save(extremes(dtype), folder / f"{dtype}.onnx")
    c = tapestry.compile(folder / f"{dtype}.onnx", mesh="1")
    graph, out = c.build.plan.graph, []
    for mesh in (mesh_of("2"), mesh_of("3"), mesh_of("2x2")):
        cut = [[s for s in strategies(op, mesh) if {d.name for d in op.reduce} & set(s.dims)] for op in graph.ops]
        out += [Plan(graph=graph, mesh=mesh, strategies=some) for some in zip(*cut, strict=True)]
    return c, [replace(c.build, plan=plan, program=lower(plan)) for plan in out]


@pytest.mark.slow
def test_xla_keeps_a_nan_that_ranks_merge(tmp_path):
    made = {}
    for dtype in (np.float16, np.float32, np.float64):
        x = awkward(dtype)
        c, builds = merged(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), tmp_path)
        assert len(builds) > 3
        for k, build in enumerate(builds):
            path = tmp_path / f"{np.dtype(dtype)}{k}.mlir"
            made[path] = c, x, of_ranks(c, build, {"x": x}, path)
    by_xla(tmp_path)
    for path, (c, x, said) in made.items():
        found = found_of_ranks(c, said, path)
        np.testing.assert_array_equal(found["most"], x.max(1, keepdims=True), path.name)
        np.testing.assert_array_equal(found["least"], x.min(1, keepdims=True), path.name)
        np.testing.assert_array_equal(found["at"], x.argmax(1, keepdims=True), path.name)


def test_extremes_of_floats_are_merged_as_integers(tmp_path):
    _, builds = merged(T.FLOAT, tmp_path)
    found = set()
    for build in builds:
        said, path = shardy.export_shardy_ranks(build, tmp_path / "m.mlir", nearest=True), tmp_path / "m.mlir"
        found |= set(re.findall(r"stablehlo\.(maximum|minimum) \S+ \S+ : tensor<(\w+)> stablehlo.return", path.read_text()))
        assert on_the_wire(path.read_text(), said["ranks"]) == said["plan_bytes"] + said["extra_bytes"]
    assert found == {("maximum", "i32"), ("minimum", "i32"), ("minimum", "i64")}  # the last: places


def told(build, folder) -> set[str]:
    """The operations of which exports for XLA say that it may compute them wrongly, in their documents and in their lines."""
    for form in ("jax", "shardy"):
        asked = formats.Asked(build=build, constants=b"", rewrites=b"", target=folder / form, nearest=True)
        done = formats.write(form, asked)
        lines = formats.text(done)
        assert all(len(x) <= 80 for x in lines[1:])
        for row in done["wrong_in_xla"]:
            said = f"'{row['operation']}': XLA on CPUs (JAX 0.10.2) may compute it wrongly: {row['why']}; use --format shardy-ranks"
            assert said in " ".join(" ".join(lines).split())
        assert sum("shardy-ranks" in x for x in lines) == len(done["wrong_in_xla"])
        if form == "jax":
            assert json.loads((folder / form).read_text())["wrong_in_xla"] == done["wrong_in_xla"]
    return {row["operation"] for row in done["wrong_in_xla"]}


@pytest.mark.parametrize(
    ("cut", "kernel", "wrong"),
    [
        (["w", "o"], 3, True), (["h", "o"], 3, True), (["o", "w"], 3, True), (["w", "o", "b"], 3, True), (["w", "o"], 1, False),
        (["w", None], 3, False), (["b", "o"], 3, False), (["w", "h"], 3, False), (["w", "c"], 3, False), (["w"], 3, False),
    ],
)  # fmt: skip
def test_a_convolution_that_xla_computes_wrongly_is_named(cut, kernel, wrong, tmp_path):
    """An image cut in space, and whole along another axis, beside weights that are cut: so JAX 0.10.2 computes these cases."""
    node = N("Conv", ["x", "w"], ["y"], "conv", pads=[kernel // 2] * 4)
    onnx.save(
        net([node], {"x": (T.FLOAT, [2, 4, 8, 8])}, {"y": T.FLOAT}, {"w": f32(4, 4, kernel, kernel)}), tmp_path / "m.onnx"
    )
    build, mesh = tapestry.compile(tmp_path / "m.onnx", mesh="1").build, mesh_of("x".join("2" * len(cut)))
    (op,) = build.plan.graph.ops
    s = next(s for s in strategies(op, mesh) if list(s.dims) == cut)
    image = tuple("bchw".index(d) if d and d in "bchw" else None for d in cut)
    plan = Plan(graph=build.plan.graph, mesh=mesh, strategies=(s,), inputs={"x": image})
    assert told(replace(build, plan=plan, program=lower(plan)), tmp_path) == ({"conv"} if wrong else set())


def test_extremes_that_lose_a_nan_in_xla_are_named(tmp_path):
    for dtype, lossy in ((T.FLOAT, True), (T.INT32, False)):
        c, builds = merged(dtype, tmp_path)
        assert told(c.build, tmp_path) == set()
        assert bool(told(builds[0], tmp_path)) == lossy


def on_the_wire(text: str, ranks: int) -> int:
    """Bytes of a text's collectives, by the algorithms that `transfer_bytes` counts."""
    total = 0
    for kind, how, shape, dtype in re.findall(
        r'"stablehlo\.(collective_permute|all_reduce|all_gather|reduce_scatter)".*?dense<(\[\[.*?\]\])>.*\(tensor<((?:\d+x)*)(\w+)>\) -> ',
        text,
    ):
        nbytes = prod(int(n) for n in shape.split("x") if n) * {"i1": 1}.get(dtype, int(dtype.lstrip("uibf") or 8) // 8)
        groups = [[r for r in g if r >= 0] for g in json.loads(how)]
        if kind == "collective_permute":
            total += nbytes * len(groups)
            continue
        assert sorted(r for g in groups for r in g) == list(range(ranks))
        times = {"all_reduce": lambda n: 2 * (n - 1), "all_gather": lambda n: n * (n - 1), "reduce_scatter": lambda n: n - 1}
        total += sum(times[kind](len(g)) * nbytes for g in groups)
    return total


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_what_ranks_send_is_what_the_plan_sends(name, tmp_path):
    for seed in range(2):
        c, build = planned(name, seed)
        said, path = shardy.export_shardy_ranks(build, tmp_path / "m.mlir", nearest=True), tmp_path / "m.mlir"
        assert on_the_wire(path.read_text(), said["ranks"]) == said["plan_bytes"] + said["extra_bytes"]
        assert [e["tensor"] for e in said["results"]] == list(c.build.plan.graph.outputs)


def test_ranks_that_keep_a_node_are_refused(tmp_path):
    _, build = planned("opaques", 0, "2")
    with pytest.raises(NotExpressible):
        shardy.export_shardy_ranks(build, tmp_path / "m.mlir", nearest=True)


@pytest.mark.parametrize("name", ["mlp", "attention", "pools"])
def test_every_tensor_has_its_sharding(name, tmp_path):
    c, _, said, build = written(name, 0, tmp_path, "2x2")
    text = (tmp_path / f"{name}0.mlir").read_text()
    head, _, body = text.partition(") -> (")
    assert 'sdy.mesh @mesh = <["d0"=2, "d1"=2]>' in head
    assert re.findall(r'loc\("(.*?)"\)', head) == said["arguments"] and head.count("sdy.sharding =") == len(said["arguments"])
    assert body.count("sdy.sharding =") == len(said["results"]) == len(c.build.plan.graph.outputs)
    moved = {(t, layout) for (_, t), layout in places(build, "shardy", nearest_will_do=True).reads.items()}
    cut = {t for t in said["padded"] if t in said["arguments"]} | {
        f"{t} at the end" for t in said["padded"] if t in said["results"]
    }
    written_once = sum(len(op.outs) for op in c.build.plan.graph.ops)
    assert body.count("sdy.sharding_constraint") == said["constraints"] == written_once + len(moved) + len(cut)


def test_what_shardy_cannot_say_is_refused(tmp_path):
    uneven = tapestry.compile(save("mlp"), mesh="2", layouts="y:0=2@d0", stages=1).build  # 7 rows on 2 devices
    with pytest.raises(NotExpressible, match=r"'\w+': shardy has no place .*\n.*because: .*\n.*--nearest: \d+ bytes more"):
        shardy.export_shardy(uneven, tmp_path / "m.mlir", nearest=False)
    assert shardy.export_shardy(uneven, tmp_path / "m.mlir", nearest=True)["extra_bytes"] > 0
    with pytest.raises(NotExpressible, match=r"'\w+': StableHLO cannot express the opaque node \w+"):
        shardy.export_shardy(tapestry.compile(save("opaques"), mesh="1").build, tmp_path / "o.mlir", nearest=True)
