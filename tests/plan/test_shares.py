"""Devices that differ: uneven shares of mesh axes, memory of every device, and what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.build import store
from tapestry.errors import LawError, TapestryError
from tapestry.ir.plan import MeshAxis, coordinates, interval, part, shares
from tapestry.lift import lift
from tapestry.plan.lower import lower
from tapestry.plan.search import problem
from tapestry.plan.search.planner import cheapest, search
from tapestry.plan.solver.budget import Budget
from tapestry.plan.strategy import tensor_boxes
from tapestry.plan.topology import from_data, parse_mesh, shared, to_data, topology
from tapestry.rewrites.core.driver import simplify
from tapestry.sharding.export_sharding import export
from tapestry.verify import certificate
from tests.support.small_models import FOLDER, N, assert_same, case, execute, f32, net, peak, random_plan, save

SLOW = {"memory": "1GiB", "bandwidth": 1e10, "launch": 1e-6, "vector": 1e10, "flops": {"f32": 1e11}}
FAST = {"name": "fast", "bandwidth": 5e10, "vector": 5e10, "flops": {"f32": 5e11}}
LEVELS = [{"alpha": 1e-6, "beta": 1e-11}]
MESHES = [
    (MeshAxis("a", 3, (5, 1, 2)),), (MeshAxis("a", 2, (1, 3)), MeshAxis("b", 2)), (MeshAxis("a", 2, (2, 1)), MeshAxis("b", 3, (1, 4, 2))),
]  # fmt: skip


@cache
def wide():
    """(file, graph) of a small network in which arithmetic outweighs latencies."""
    path = FOLDER / "wide.onnx"
    made = net(
        [N("Gemm", ["x", "w"], ["h"], "up"), N("Relu", ["h"], ["r"], "act"), N("Gemm", ["r", "v"], ["y"], "down")],
        {"x": (T.FLOAT, [256, 192])}, {"y": T.FLOAT}, {"w": f32(192, 384), "v": f32(384, 192)},
    )  # fmt: skip
    path.write_bytes(made.SerializeToString())
    return path, simplify(lift(path).graph)


def file(tmp_path, **more):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"device": SLOW, "levels": LEVELS, "others": [{"devices": [0], **FAST}], **more}))
    return str(path)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parts_are_shares(mesh):
    axes = tuple(range(len(mesh)))
    for extent in (0, 1, 7, 64, 1000):
        found = [interval(extent, mesh, axes, c) for c in coordinates(mesh)]
        assert [lo for lo, _ in found] == [0, *(hi for _, hi in found[:-1])] and found[-1][1] == extent
        total = shares(mesh, axes)[-1]
        for c, (lo, hi) in zip(coordinates(mesh), found, strict=True):
            share = np.prod([(a.weights or (1,) * a.size)[k] for a, k in zip(mesh, c, strict=True)])
            assert abs((hi - lo) - extent * share / total) < 1
            outer = interval(extent, mesh, axes[:1], c)
            assert outer[0] <= lo <= hi <= outer[1]
        boxes = tensor_boxes((extent,), (0,) * len(mesh), mesh)
        assert boxes[:, 0].tolist() == [list(f) for f in found]


def test_equal_weights_are_the_balanced_cut():
    even, same = (MeshAxis("a", 3), MeshAxis("b", 4)), (MeshAxis("a", 3, (2, 2, 2)), MeshAxis("b", 4, (5, 5, 5, 5)))
    for extent in range(40):
        for c in coordinates(even):
            parts, k = part(even, (0, 1), c)
            expected = (k * extent // parts, (k + 1) * extent // parts)
            assert interval(extent, even, (0, 1), c) == interval(extent, same, (0, 1), c) == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["conv_chain", "attention", "residual", "reductions", "gathers", "norms"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(str(a.weights) for a in m))
def test_plans_with_uneven_shares_compute_the_same(name, mesh):
    c = case(name)
    plan = random_plan(c.graph, mesh, random.Random(name))
    program = lower(plan)
    certificate.check(plan.annotated(), program, stated_peak=peak(program), mesh=mesh)
    assert_same(execute(c.graph, program, c)[0], c.expected, c.graph)
    if any(d is not None for s in plan.strategies for d in s.dims):
        even = tuple(replace(a, weights=()) for a in mesh)
        other = replace(plan, mesh=even)
        if lower(other) != program:
            with pytest.raises(LawError):
                certificate.check(plan.annotated(), program, mesh=even)


@pytest.mark.slow
def test_one_fast_and_three_slow_devices(tmp_path):
    """The fast device takes a larger share, and the plan is faster than the best even one; runs equal the reference."""
    source = file(tmp_path)
    topo = topology(parse_mesh("4"), source)
    assert [d.name for d in topo.kinds] == ["fast", "", "", ""]
    assert [t.mesh[0].weights for t in shared(topo)] == [(), (5, 1, 1, 1)]
    graph = wide()[1]
    even = search(graph, topo)
    best = cheapest([problem.build(graph, t, {}, {}, {}) for t in shared(topo)], Budget.of(60.0))
    assert best.plan.mesh[0].weights and best.objective < 0.7 * even.objective
    assert best.bound <= best.objective
    build = tapestry.compile(wide()[0], devices=4, topology=source)
    assert build.report["objective_s"] == pytest.approx(best.objective)
    build.save(tmp_path / "build")
    loaded = tapestry.load(tmp_path / "build")
    assert loaded.build.plan.mesh == build.build.plan.mesh
    feeds = loaded.random_feeds()
    alone = tapestry.compile(wide()[0], devices=1).run(feeds)
    for name, value in loaded.run(feeds).items():
        assert np.linalg.norm(value - alone[name]) < 1e-5 * np.linalg.norm(alone[name])
    assert "share" in build.explain() and "'fast'" in build.explain()
    export(build.build, tmp_path / "m.onnx")
    again = tapestry.compile(tmp_path / "m.onnx", devices=4, topology=source)
    assert again.build.plan.mesh == build.build.plan.mesh and again.build.plan.strategies == build.build.plan.strategies


def test_the_example_of_links_and_kinds():
    build = tapestry.compile(wide()[0], topology="examples/rings.json")
    assert build.build.program.devices == 6
    text = " ".join(build.explain().split())
    assert "device 0 'fast'" in text and "joined by linked rings of 6" in text
    assert build.report["simulated_s"] <= build.report["objective_s"] * (1 + 1e-9)
    assert build.report["overlap"] in text


def test_memory_of_every_device_counts(tmp_path):
    """Device 0 has ample memory, the others less than an even share: the plan leaves more to device 0, and the checker sees to it."""
    graph = wide()[1]
    plain = search(graph, topology(parse_mesh("4"), file(tmp_path, others=[])))
    most = max(peak(plain.program))
    small = f"{int(most * 0.6)}"
    source = file(tmp_path, device={**SLOW, "memory": small}, others=[{"devices": [0], "memory": "1GiB"}])
    topo = topology(parse_mesh("4"), source)
    best = cheapest([problem.build(graph, t, {}, {}, {}) for t in shared(topo)], Budget.of(60.0))
    needs = peak(best.program)
    assert all(need <= has for need, has in zip(needs, topo.memories(), strict=True))
    assert needs[0] > int(small)
    certificate.check(best.plan.annotated(), best.program, limit=topo.memories(), mesh=best.plan.mesh)
    with pytest.raises(LawError, match="device 0 needs"):
        certificate.check(best.plan.annotated(), best.program, limit=topo.memories()[::-1], mesh=best.plan.mesh)


def test_kinds_by_coordinate_and_back(tmp_path):
    source = file(tmp_path, others=[{"at": {"d0": [1]}, **FAST}, {"devices": [7], "memory": "2GiB"}])
    topo = topology(parse_mesh("2x4"), source)
    assert [d.name for d in topo.kinds] == [""] * 4 + ["fast"] * 3 + [""]
    assert topo.memories() == [1 << 30] * 7 + [2 << 30]
    for t in shared(topo):
        assert from_data(json.loads(json.dumps(to_data(t)))) == t
    assert topology(parse_mesh("2x4"), source, 123).memories() == [123] * 8
    assert topology(parse_mesh("4"), file(tmp_path, others=[{"devices": [0, 1, 2, 3], **FAST}])).kinds == ()


@pytest.mark.parametrize(
    "others",
    [[{"devices": [9], **FAST}], [{"at": {"tp": [0]}, **FAST}], [{**FAST}], [{"devices": [0], "at": {"d0": [0]}}], [3], {"devices": [0]},
     [{"devices": [0], "memory": "none"}], [{"devices": [0], "bandwidth": -1}], [{"devices": "0", "flops": {}}]],
)  # fmt: skip
def test_kinds_that_are_refused(others, tmp_path):
    with pytest.raises(TapestryError):
        topology(parse_mesh("4"), file(tmp_path, others=others))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("weights", [[[1, 2]], [[0, 1, 1, 1]], [[1, 1, 1, -1]], [[1, 1, 1, 10**9]], [[1] * 4, [1] * 4]])
def test_shares_in_a_file_that_are_refused(weights, tmp_path):
    build = tapestry.compile(save("mlp"), devices=4)
    document = json.loads(store.encode(build.build))
    store.decode(json.dumps(document).encode())
    with pytest.raises(TapestryError, match="shares of a mesh axis"):
        store.decode(json.dumps({**document, "weights": weights}).encode())
