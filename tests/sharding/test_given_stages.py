"""Pipeline stages that a user or a file gives, and what stages keep to: pins, layouts, annotations, memory, kinds of devices."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.compiler import build_report
from tapestry.errors import LawError, TapestryError
from tapestry.ir.plan import MeshAxis, on_stage
from tapestry.sharding.export_sharding import export
from tapestry.sharding.file_mesh import joined
from tapestry.tools.auto_shard import auto_shard
from tests.support.small_models import N, f32, net
from tests.support.stages.stage_graphs import DEVICE, NODES

WIDTH, LAYERS = 64, 4


@pytest.fixture
def model(tmp_path):
    names = ["x", *[f"h{k}" for k in range(LAYERS - 1)], "y"]
    nodes = [
        n
        for k in range(LAYERS)
        for n in (N("MatMul", [names[k], f"w{k}"], [f"m{k}"], f"mm{k}"), N("Relu", [f"m{k}"], [names[k + 1]], f"act{k}"))
    ]
    weights = {f"w{k}": f32(WIDTH, WIDTH) / 8 for k in range(LAYERS)}
    made = net(nodes, {"x": (T.FLOAT, [8, WIDTH])}, {"y": T.FLOAT}, weights)
    onnx.save(onnx.shape_inference.infer_shapes(made), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def compiled(model, nodes=NODES, **options):
    """A plan whose outputs are the model's and whose laws hold, from its files too."""
    topo = model.parent / "nodes.json"
    topo.write_text(json.dumps(nodes))
    found = tapestry.compile(model, topology=str(topo), **options)
    document = found.check()
    assert document["passed"], document
    found.verify()
    return found


def stage_of_nodes(found) -> dict[str, set[int]]:
    plan, out = found.build.plan, {}
    for op, k in zip(plan.graph.ops, plan.stage_of, strict=True):
        for s in op.source:
            out.setdefault(s, set()).add(k)
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro", [1, 2])
def test_stages_end_where_they_are_asked_to(model, micro):
    """Also between a product and what would be fused into it: then they stay two operations."""
    found = compiled(model, devices=3, stage_at=["mm0", "act2"], micro_batches=micro)
    wanted = {"mm0": 0, "act0": 1, "mm1": 1, "act1": 1, "mm2": 1, "act2": 1, "mm3": 2, "act3": 2}
    assert {n: ks for n, ks in stage_of_nodes(found).items() if n in wanted} == {n: {k} for n, k in wanted.items()}
    assert found.report["micro_batches"] == micro and found.report["requests"]["stage_at"] == ["mm0", "act2"]
    assert "stage 0 ends at mm0, as asked" in found.explain(every=True)


@pytest.mark.slow
def test_several_nodes_may_end_a_stage(tmp_path):
    nodes = [N("Relu", ["x"], ["a"], "left"), N("Tanh", ["x"], ["b"], "right"), N("Exp", ["x"], ["c"], "late"),
             N("Sum", ["a", "b", "c"], ["y"], "join")]  # fmt: skip
    made = net(nodes, {"x": (T.FLOAT, [8, WIDTH])}, {"y": T.FLOAT}, {})
    onnx.save(made, tmp_path / "m.onnx")
    found = stage_of_nodes(compiled(tmp_path / "m.onnx", devices=2, stage_at=["left,right"]))
    assert [found[n] for n in ("left", "right", "late", "join")] == [{0}, {0}, {1}, {1}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage_at": ["act2", "act0"]}, "would have no operation"),
        ({"stage_at": ["act3"]}, "the last stage would have no operation"),
        ({"stage_at": ["act9"]}, "no operation 'act9'"),
        ({"stage_at": ["act0"], "stages": 3}, "3 stages"),
        ({"stage_at": ["act0", "act1", "act2"]}, "4 stages on 3 devices"),
        ({"stages": 2, "pins": ["mm0:i=3@d0"]}, "no plan of 2 stages fits"),
        ({"stages": 2, "layouts": ["x:0=3@d0"]}, "no plan of 2 stages fits"),
    ],
)
def test_what_cannot_be_is_refused(model, options, words):
    with pytest.raises(TapestryError) as caught:
        tapestry.compile(model, devices=3, topology="cpu", **options)
    assert words in str(caught.value)


@pytest.mark.slow
def test_pins_and_layouts_hold_on_the_mesh_of_a_stage(model):
    found = compiled(model, mesh="2x2", stages=2, pins=["mm3:n=2@d1"], layouts=["x:0=2@d1", "y:1=2@d1"])
    plan = found.build.plan
    pinned = next(i for i, op in enumerate(plan.graph.ops) if "mm3" in op.source)
    at = [a.name for a in plan.stage(pinned).mesh].index("d1")
    assert plan.strategies[pinned].dims[at] == "n" and len(plan.stages) == 2
    x = next(b for b in found.build.program.buffers.values() if b.tensor == "x")
    assert {b for b in x.boxes if b} == {((0, 4), (0, WIDTH)), ((4, 8), (0, WIDTH))}
    y = found.build.program.buffers[found.build.program.outputs["y"]]
    assert {b for b in y.boxes if b} == {((0, 8), (0, 32)), ((0, 8), (32, WIDTH))}
    assert found.report["pipeline"]["spatial_objective_s"] is None, "the plan without stages would be of another problem"


def test_a_layout_on_a_stage_is_its_axes_by_name():
    mesh = (MeshAxis("a", 2), MeshAxis("b", 3))
    assert on_stage((None, 1), mesh, (MeshAxis("b", 3),)) == (1,)
    assert on_stage((None, None), mesh, (MeshAxis("b", 1),)) == (None,)
    assert on_stage((0, None), mesh, (MeshAxis("b", 3),)) is None
    assert on_stage((None, 1), mesh, (MeshAxis("b", 2),)) is None


@pytest.mark.slow
def test_annotations_hold_inside_stages(model, tmp_path):
    """Specs over the fast axis of the mesh, and stages over the slow one, which nothing may cross without need."""
    slow = {"device": DEVICE, "levels": [{"devices": 2, "alpha": 1e-6, "beta": 1e-10}, {"alpha": 1.0, "beta": 1e-10}]}
    export(compiled(model, slow, mesh="2x2", layouts=["x:0=2@d1", "y:replicated"], stages=1).build, tmp_path / "specs.onnx")
    found = compiled(tmp_path / "specs.onnx", mesh="2x2", stages=2)
    assert len(found.build.plan.stages) == 2 and found.build.plan.inputs["x"] == (None, 0)


def test_a_file_that_names_stages_is_compiled_so(model):
    document = auto_shard.auto_shard(auto_shard.Options(model=model, devices=2))
    found = compiled(model.parent / "m.auto_sharded.onnx")
    of_file = dict(zip([n.name for n in onnx.load(model).graph.node], document["node_stages"], strict=True))
    assert stage_of_nodes(found) == {n: {k} for n, k in of_file.items()}
    alone = tapestry.compile(model.parent / "m.auto_sharded.onnx", topology="cpu", stages=1)
    assert not alone.report["stages"]


@pytest.mark.slow
def test_siblings_of_two_stages_are_not_joined(tmp_path):
    """Softmax and a sum over the same rows would be one pass over them."""
    nodes = [N("MatMul", ["x", "w"], ["m"], "mm"), N("Softmax", ["m"], ["s"], "soft", axis=1),
             N("ReduceSum", ["m", "one"], ["r"], "sum"), N("Mul", ["s", "r"], ["y"], "mul")]  # fmt: skip
    weights = {"w": f32(WIDTH, WIDTH), "one": np.array([1])}
    onnx.save(net(nodes, {"x": (T.FLOAT, [8, WIDTH])}, {"y": T.FLOAT}, weights), tmp_path / "m.onnx")
    found = stage_of_nodes(compiled(tmp_path / "m.onnx", devices=2, stage_at="sum"))
    assert [found[n] for n in ("mm", "sum", "soft", "mul")] == [{0}, {0}, {1}, {1}]


def test_micro_batches_that_leave_a_stage_empty_are_left_out(tmp_path):
    """What does not have the batch runs once, ahead of all micro-batches: then the second stage would have nothing."""
    nodes = [N("MatMul", ["x", "w"], ["y"], "mm"), N("Exp", ["w"], ["c"], "alone")]
    made = net(nodes, {"x": (T.FLOAT, [8, 8]), "w": (T.FLOAT, [8, 8])}, {"y": T.FLOAT, "c": T.FLOAT}, {})
    onnx.save(made, tmp_path / "m.onnx")
    assert stage_of_nodes(compiled(tmp_path / "m.onnx", devices=2, stage_at="mm")) == {"mm": {0}, "alone": {1}}
    with pytest.raises(TapestryError, match="would have no operation"):
        tapestry.compile(tmp_path / "m.onnx", devices=2, topology="cpu", stage_at="mm", micro_batches=2)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"stage_at": "act1"}, {"stages": 2, "pins": "mm0:n=1@d0"}])
def test_weights_are_streamed_into_stages_as_they_are_asked_for(model, options):
    memory = int(1.5 * WIDTH * WIDTH * 4)
    found = compiled(model, devices=2, memory=memory, **options)
    assert found.build.plan.streamed and max(found.report["peak_bytes"]) <= memory


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["requests"].update(stage_at=["act2"]),
        lambda r: r["requests"].update(stage_at=["act1", "act2"]),
        lambda r: r.update(micro_batches=4),
        lambda r: r.update(stages=[]),
        lambda r: r["stages"][0].update(devices=[0, 1]),
        lambda r: r["stages"][0].update(peak_bytes=[1]),
        lambda r: r.update(objective_s=r["objective_s"] / 2, lower_bound_s=0.0, gap=1.0),
    ],
)
def test_a_report_is_held_to_the_stages_of_the_plan(model, change):
    found = compiled(model, devices=2, stage_at="act1", micro_batches=2)
    report = json.loads(json.dumps(found.report))
    build_report.check_report(replace(found.build, report=report))
    change(report)
    with pytest.raises(LawError):
        build_report.check_report(replace(found.build, report=report))


@pytest.mark.slow
def test_weights_are_streamed_where_a_stage_does_not_fit_otherwise(model):
    weight = WIDTH * WIDTH * 4
    found = compiled(model, devices=2, stages=2, memory=int(1.5 * weight))
    assert found.build.plan.streamed and max(found.report["peak_bytes"]) <= 1.5 * weight
    assert not compiled(model, devices=2, stages=2, memory=4 * weight).build.plan.streamed


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("slow", [0, 2])
def test_stages_on_devices_of_several_kinds(model, slow):
    """Of three devices one is ten times slower and small: two stages are better off without it, and none needs more than it has."""
    other = {"devices": [slow], "flops": {"f32": 1e9, "other": 1e9}, "memory": "40KB"}
    found = compiled(model, {**NODES, "others": [other]}, mesh="3", stages=2)
    used = {d for s in found.build.plan.stages for d in s.devices}
    assert used == {0, 1, 2} - {slow}
    topo = found.build.topology
    for d, peak in enumerate(found.report["peak_bytes"]):
        assert peak <= topo["kinds"][topo["kind"][d]]["memory"]
    assert np.isfinite(found.report["objective_s"]) and found.report["lower_bound_s"] <= found.report["objective_s"]


def test_many_orders_of_devices_agree_on_one_or_on_none():
    rng, common = random.Random(0), {0: (1, 0), 1: (2, 0, 1)}
    three = [tuple(rng.sample(range(3), 3)) for _ in range(1000)]
    assert joined([[{1: p}, {0: (0, 1), 1: p}, common] for p in three if p != (2, 0, 1)], {}) == common
    assert joined([[{1: p}] for p in three], {}) is None
