"""Export → check-sharding → compile honours → the same placements; and specs of other tools as constraints."""

import json
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

import tapestry
from bench.doors.onnx_folders import FAST
from tapestry import cli
from tapestry.errors import PlanError, TapestryError
from tapestry.interop import onnx_annotations, sharding_specs
from tapestry.onnx_eval.ort_session import ort_session
from tapestry.sharding.check_sharding import check_file
from tapestry.sharding.export_sharding import export
from tests.support.faults.sharding_faults import N, put
from tests.support.small_models import MODELS, f32, net


@pytest.fixture
def fast(tmp_path):
    path = tmp_path / "fast.json"
    path.write_text(json.dumps(FAST))
    return str(path)


def cuts(build) -> int:
    return sum(d is not None for s in build.build.plan.strategies for d in s.dims)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["4", "2x2"])
@pytest.mark.parametrize(
    "name", ["mlp", "conv_chain", "attention", "norms", "views", "gathers", "opaques", "residual", "halves"]
)
def test_round_trip(name, mesh, fast, tmp_path):
    source, target = tmp_path / "m.onnx", tmp_path / "sharded.onnx"
    onnx.save(MODELS[name](), source)
    before = tapestry.compile(source, mesh=mesh, topology=fast)
    assert cuts(before)
    done = export(before.build, target)
    assert 11 <= done["ir_version"] <= 13 and done["specs"] > 0
    onnx.checker.check_model(str(target))
    ort_session(str(target))
    assert [str(f) for f in check_file(target) if f.level == "error"] == []
    plain = tapestry.compile(
        target
    )  # no mesh, no topology: the file says where everything is, not whether operands go round a ring
    assert plain.build.plan.mesh == before.build.plan.mesh
    assert [replace(s, ring=()) for s in plain.build.plan.strategies] == [
        replace(s, ring=()) for s in before.build.plan.strategies
    ]
    after = tapestry.compile(target, topology=fast)
    assert after.build.plan.strategies == before.build.plan.strategies
    assert after.build.plan.graph.ops == before.build.plan.graph.ops
    assert after.build.program == before.build.program
    assert after.report["requests"]["sharding"]["notes"] == []


def test_pins_and_layouts_survive(tmp_path):
    source, target = tmp_path / "m.onnx", tmp_path / "sharded.onnx"
    onnx.save(MODELS["mlp"](), source)
    before = tapestry.compile(source, mesh="dp=2,tp=2", pins=["down:m=2@tp"], layouts=["x:0=2@dp", "y:1=2@tp"])
    export(before.build, target)
    after = tapestry.compile(target)
    assert [a.name for a in after.build.plan.mesh] == ["dp", "tp"]
    assert after.build.plan.strategies == before.build.plan.strategies
    assert (after.build.plan.inputs, after.build.plan.outputs) == ({"x": (0, None)}, {"y": (None, 1)})
    ignored = tapestry.compile(target, mesh="4", sharding=False)
    assert ignored.build.plan.strategies != before.build.plan.strategies


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("pools", ["b:h=2@d1", "d:s=2@d1", "e:h=2@d1"]),  # a window that is cut is searched only where it is pinned
        ("conv_chain", ["g.r:r=2@d0", "g.r:r=2@d1"]),  # a sum inside of a node, whose result is a view of it
        ("reductions", ["ReduceMin:x1=2@d0", "ReduceMin:x0=2@d1"]),
        ("views", ["c:x1=2@d0", "c:x1=2@d1"]),  # devices that read none of one part of a concatenation
        ("branches", ["y:x2=2@d0", "s:c=2@d1", "c:w=2@d1"]),  # a slice that begins inside a part
    ],
)
def test_plans_that_were_asked_for_survive(name, pins, fast, tmp_path):
    source, target = tmp_path / "m.onnx", tmp_path / "sharded.onnx"
    onnx.save(MODELS[name](), source)
    before = tapestry.compile(source, mesh="2x2", topology=fast, pins=pins)
    export(before.build, target)
    assert [str(f) for f in check_file(target) if f.level == "error"] == []
    assert tapestry.compile(target).build.plan.strategies == before.build.plan.strategies


def test_a_plan_that_leaves_devices_idle_survives(tmp_path):
    source, target = tmp_path / "m.onnx", tmp_path / "sharded.onnx"
    onnx.save(MODELS["scalars"](), source)
    before = tapestry.compile(source, devices=4)
    assert [s.mesh[0].size for s in before.build.plan.stages] == [1]  # one stage, on one device of four
    export(before.build, target)
    after = tapestry.compile(target)
    feeds = before.random_feeds(0)
    ours, theirs = before.run(feeds), after.run(feeds)
    assert all(np.array_equal(ours[t], theirs[t]) for t in ours)


def test_an_exported_reduction_says_where_it_completes(tmp_path):
    source, target = tmp_path / "m.onnx", tmp_path / "sharded.onnx"
    onnx.save(MODELS["mlp"](), source)
    export(tapestry.compile(source, mesh="2", pins=["down:m=2@d0"]).build, target)
    notes = [sharding_specs.metadata(n).get(onnx_annotations.PARTIAL) for n in onnx.load(target).graph.node]
    (found,) = [json.loads(n)[0] for n in notes if n]
    assert (found["dim"], found["mesh_axis"], found["monoid"]) == ("m", "d0", "sum")
    assert (found["by"], found["along"] is None) in {("all-reduce", True), ("reduce-scatter", False)}


def test_command_line(tmp_path, capsys):
    source = tmp_path / "m.onnx"
    onnx.save(MODELS["mlp"](), source)
    build, target = str(tmp_path / "b"), str(tmp_path / "s.onnx")
    assert cli.main(["compile", str(source), "-o", build, "--mesh", "2x2", "--pin", "up:n=2@d1", "-q"]) == 0
    assert cli.main(["export", build, "-o", target, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["specs"] > 0
    assert cli.main(["check-sharding", target, "-q"]) == 0
    assert cli.main(["compile", target, "-o", str(tmp_path / "c"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"]["sharding"]["fixed"] > 0
    assert cli.main(["compile", target, "-o", str(tmp_path / "d"), "--devices", "3", "-q"]) == 2
    assert "for 4 devices, not 3" in capsys.readouterr().err
    assert cli.main(["compile", target, "-o", str(tmp_path / "d"), "--devices", "3", "-q", "--ignore-sharding"]) == 0
    assert cli.main(["export", build, "-o", str(source)]) == 2
    assert "it is the build's model" in capsys.readouterr().err


# external data


def _with_data(folder):
    folder.mkdir(parents=True)
    onnx.save(MODELS["mlp"](), folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    return tapestry.compile(folder / "m.onnx", devices=2)


def test_external_data_beside_and_above(tmp_path):
    build = _with_data(tmp_path / "inner")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, 5)).astype(np.float32)
    expected = ort_session(str(tmp_path / "inner" / "m.onnx")).run(None, {"x": x})[0]
    for target in (tmp_path / "inner" / "s.onnx", tmp_path / "s.onnx"):
        export(build.build, target)
        assert np.array_equal(ort_session(str(target)).run(None, {"x": x})[0], expected)
        assert np.allclose(tapestry.compile(target).run({"x": x})["y"], expected, atol=1e-6)


def test_external_data_out_of_reach(tmp_path):
    build = _with_data(tmp_path / "inner")
    target = tmp_path / "other" / "s.onnx"
    with pytest.raises(TapestryError, match="out of reach"):
        export(build.build, target)
    assert not target.exists()
    export(build.build, target, copy=True)
    onnx.checker.check_model(str(target))
    assert sorted(p.name for p in target.parent.iterdir()) == ["m.data", "s.onnx"]


def test_a_changed_model_is_not_annotated(tmp_path):
    build = _with_data(tmp_path / "inner")
    shutil.copy(tmp_path / "inner" / "m.onnx", tmp_path / "keep.onnx")
    (tmp_path / "inner" / "m.onnx").write_bytes(MODELS["conv_chain"]().SerializeToString())
    with pytest.raises(TapestryError, match="not what it was"):
        export(build.build, tmp_path / "s.onnx")


# specs of other tools


def megatron(tmp_path, change=lambda m: None):
    """Two MatMuls with an activation between, annotated by hand as Megatron would; no metadata of ours."""
    m = net(
        [N("MatMul", ["x", "w1"], ["h"], "up"), N("Relu", ["h"], ["r"], "act"), N("MatMul", ["r", "w2"], ["y"], "down")],
        {"x": (T.FLOAT, [8, 16])}, {"y": T.FLOAT}, {"w1": f32(16, 32), "w2": f32(32, 16)},
    )  # fmt: skip
    m.ir_version = 11
    m.configuration.add(name="four", num_devices=4)
    put(m, "up", "w1", {1: 4})
    put(m, "up", "h", {1: 4})
    put(m, "down", "w2", {0: 4})
    put(m, "down", "y", {}, [-1], {-1: [0, 1, 2, 3]})
    change(m)
    path = tmp_path / "m.onnx"
    path.write_bytes(m.SerializeToString())
    return path


def strategy(build, tensor):
    graph = build.build.plan.graph
    return build.build.plan.strategies[graph.producers()[tensor]]


def test_hand_written_specs_are_kept(tmp_path):
    """h is fused into r: its layout is carried there; w2's spec makes the second MatMul contract over the mesh."""
    found = tapestry.compile(megatron(tmp_path))
    assert strategy(found, "r").dims == ("n",) and strategy(found, "r").out == (1,)
    assert strategy(found, "y").dims == ("m",) and strategy(found, "y").out == (None,)
    assert found.report["requests"]["sharding"]["notes"] == []


def test_a_fused_result_with_a_place_of_its_own_stays_apart(tmp_path):
    def change(m):
        put(m, "act", "h", {0: 4})
        put(m, "act", "r", {0: 4})

    found = tapestry.compile(megatron(tmp_path, change))
    assert strategy(found, "h").out == (1,) and strategy(found, "r").out == (0,)
    feeds = found.random_feeds()
    plain = tapestry.compile(tmp_path / "m.onnx", sharding=False, devices=1).run(feeds)
    assert np.allclose(found.run(feeds)["y"], plain["y"], rtol=1e-4, atol=1e-5)


def test_two_mesh_axes_are_found_from_the_specs(tmp_path):
    def change(m):
        put(m, "up", "h", {0: 2, 1: 2})
        put(m, "up", "w1", {1: 2}, [-1, -2], {-1: [0, 2], -2: [1, 3]})
        put(m, "down", "w2", {0: 2}, [-1, -2], {-1: [0, 2], -2: [1, 3]})

    found = tapestry.compile(megatron(tmp_path, change))
    assert [a.size for a in found.build.plan.mesh] == [2, 2]
    assert strategy(found, "r").dims == ("i", "n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: put(m, "up", "h", {1: 4}, [0, 2, 1, 3]), "'h' cannot be kept"),
        (lambda m: put(m, "up", "h", {1: 2}, [0, 1]), "'h' cannot be kept"),
        (lambda m: put(m, "up", "h", {1: 4}, [0, 1, 2, 9]), "device 9 does not exist"),
        (lambda m: put(m, "up", "h", {2: 4}), "axis 2 of a tensor of rank 2"),
        (lambda m: put(m, "up", "w1", {7: 4}), "axis 7 of a tensor of rank 2"),
        (lambda m: (put(m, "down", "r", {0: 4}), put(m, "down", "w2", {0: 4})), "sharding given for '[rw]2?' is impossible"),
    ],
)
def test_impossible_specs_name_the_tensor(change, words, tmp_path):
    with pytest.raises(PlanError, match=words):
        tapestry.compile(megatron(tmp_path, change))


def test_views_and_stages_are_listed_not_dropped(tmp_path):
    m = net(
        [N("Transpose", ["x"], ["t"], "turn", perm=[1, 0]), N("Relu", ["t"], ["y"], "act")],
        {"x": (T.FLOAT, [4, 8])}, {"y": T.FLOAT},
    )  # fmt: skip
    m.ir_version = 11
    m.configuration.add(name="two", num_devices=2)
    put(m, "turn", "t", {0: 2})
    put(m, "act", "y", {1: 2})
    for n, stage in zip(m.graph.node, (0, 1), strict=True):
        n.device_configurations[0].configuration_id = "two"
        n.device_configurations[0].pipeline_stage = stage
    (tmp_path / "m.onnx").write_bytes(m.SerializeToString())
    found = tapestry.compile(tmp_path / "m.onnx")
    notes = found.report["requests"]["sharding"]["notes"]
    assert any("view" in n for n in notes) and any("pipeline" in n for n in notes)
    assert strategy(found, "y").out == (1,)


def test_symbolic_models_remember_their_sizes(tmp_path):
    m = net(
        [N("MatMul", ["x", "w"], ["h"], "mm"), N("Relu", ["h"], ["y"], "act")],
        {"x": (T.FLOAT, ["batch", 16])},
        {"y": T.FLOAT},
        {"w": f32(16, 8)},
    )
    m.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", T.FLOAT, ["batch", 8]))
    (tmp_path / "m.onnx").write_bytes(m.SerializeToString())
    before = tapestry.compile(tmp_path / "m.onnx", devices=4, shapes={"batch": 12}, pins=["mm:i=4@d0"])
    export(before.build, tmp_path / "s.onnx")
    assert onnx.load(tmp_path / "s.onnx").graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert [f for f in check_file(tmp_path / "s.onnx") if f.level == "error"] == []
    after = tapestry.compile(tmp_path / "s.onnx")
    assert after.build.plan.strategies == before.build.plan.strategies
