"""Every example of the ONNX multi-device proposal and of its Sharding Formalism: compiled, run, checked against what they say."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

import tapestry
from bench.doors.onnx_folders import FAST
from tapestry.errors import PlanError
from tapestry.interop.placement import held, placement
from tapestry.interop.sharding_specs import ShardedDim, ShardingSpec, SimpleShard, node_configurations
from tapestry.sharding.check_sharding import check_file
from tests.support.faults.sharding_faults import N, put
from tests.support.small_models import f32, net

X = np.array([[1, 2], [3, 4]], np.float32)


def spec(cuts, devices, groups=None):
    dims = tuple(ShardedDim(axis, (SimpleShard(n),)) for axis, n in cuts.items())
    return ShardingSpec("y", tuple(devices), tuple((k, tuple(v)) for k, v in (groups or {}).items()), dims)


# the proposal's specs of the tensor [[1, 2], [3, 4]], and what each device receives
EXAMPLES = {
    "axis 0 over two": (spec({0: 2}, [0, 1]), {0: [[1, 2]], 1: [[3, 4]]}),
    "axis 1 over two": (spec({1: 2}, [0, 1]), {0: [[1], [3]], 1: [[2], [4]]}),
    "both axes over four": (spec({0: 2, 1: 2}, [0, 1, 2, 3]), {0: [[1]], 1: [[2]], 2: [[3]], 3: [[4]]}),
    "copies on two": (spec({}, [-1], {-1: [0, 1]}), {0: [[1, 2], [3, 4]], 1: [[1, 2], [3, 4]]}),
    # the document writes [[2, 3]] for devices 2 and 3, a slip: the second half of the tensor is [[3, 4]]
    "split and copied": (
        spec({0: 2}, [-1, -2], {-1: [0, 1], -2: [2, 3]}),
        {0: [[1, 2]], 1: [[1, 2]], 2: [[3, 4]], 3: [[3, 4]]},
    ),
}


def annotated(m, devices, tmp_path, specs, name="four"):
    """The model with specs: (node, tensor, cuts, devices, groups)."""
    m.CopyFrom(onnx.shape_inference.infer_shapes(m))
    m.ir_version = 11
    m.configuration.add(name=name, num_devices=devices)
    for node, tensor, cuts, *rest in specs:
        put(m, node, tensor, cuts, *rest)
    for n in m.graph.node:
        for c in n.device_configurations:
            c.configuration_id = name
    path = tmp_path / "m.onnx"
    path.write_bytes(m.SerializeToString())
    onnx.checker.check_model(str(path))
    return path


def compiled(path, tmp_path):
    """The plan of a model whose annotations have no error, run and held to onnxruntime."""
    assert [str(f) for f in check_file(path) if f.level == "error"] == []
    build = tapestry.compile(path)
    assert build.check(build.random_feeds(0))["passed"]
    return build


def strategy(build, tensor):
    graph = build.build.plan.graph
    return build.build.plan.strategies[graph.producers()[tensor]]


def parts(build, tensor, array):
    """What each device has of a tensor when it is written, by the plan's layout."""
    boxes = held(strategy(build, tensor).out, array.shape, build.build.plan.mesh)
    return {d: array[tuple(slice(lo, hi) for lo, hi in b)].tolist() for d, b in enumerate(boxes)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_proposal(name, tmp_path):
    s, expected = EXAMPLES[name]
    assert {d: X[tuple(slice(*iv[0]) for iv in p)].tolist() for d, p in placement(s, (2, 2)).pieces.items()} == expected
    m = net([N("Identity", ["x"], ["t"], "same"), N("Relu", ["t"], ["y"], "act")], {"x": (T.FLOAT, [2, 2])}, {"y": T.FLOAT})
    cuts = {d.axis: d.shards[0].num_shards for d in s.dims}
    groups = {k: list(v) for k, v in s.groups}
    build = compiled(annotated(m, len(expected), tmp_path, [("act", "y", cuts, list(s.devices), groups)]), tmp_path)
    assert np.array_equal(build.run({"x": X})["y"], X)
    assert parts(build, "y", X) == expected
    build.export(tmp_path / "again.onnx")
    (again,) = [
        x
        for n in onnx.load(tmp_path / "again.onnx").graph.node
        for c in node_configurations(n)
        for x in c.specs
        if x.tensor == "y"
    ]
    assert placement(again, (2, 2)).pieces == placement(s, (2, 2)).pieces


def test_the_proposals_loop_counts_row_major():
    """``for a … for b …: input[a_index : …, b_index : …]``: the same parts in the same order."""
    a = np.arange(24).reshape(4, 6)
    split = [a[i * 2 : i * 2 + 2, j * 2 : j * 2 + 2] for i in range(2) for j in range(3)]
    pieces = placement(spec({0: 2, 1: 3}, range(6)), a.shape).pieces
    assert all(np.array_equal(a[tuple(slice(*iv[0]) for iv in pieces[d])], split[d]) for d in range(6))


def test_a_pipeline_as_the_proposal_draws_it(tmp_path):
    """A to E in stage 1, F to K in stage 2, tensors cut as well; a stage that goes back is refused."""
    names = "ABCDEFGHIJK"
    nodes = [N("Relu" if k % 2 else "Neg", [f"t{k}"], [f"t{k + 1}"], n) for k, n in enumerate(names)]
    m = net(nodes, {"t0": (T.FLOAT, [4, 8])}, {"t11": T.FLOAT})
    path = annotated(m, 4, tmp_path, [(n, f"t{k + 1}", {0: 2}, [0, 1] if n < "F" else [2, 3]) for k, n in enumerate(names)])
    for n in m.graph.node:
        n.device_configurations[0].pipeline_stage = 1 if n.name < "F" else 2
    path.write_bytes(m.SerializeToString())
    assert [f for f in check_file(path) if f.level == "error"] == []
    build = tapestry.compile(path)
    plan = build.build.plan
    assert build.check(build.random_feeds(0))["passed"] and build.report["requests"]["sharding"]["notes"] == []
    assert [(s.first, s.mesh[-1].size) for s in plan.stages] == [(0, 2), (2, 2)]
    cuts = [(op.outs, [k for k in s.out if k is not None]) for op, s in zip(plan.graph.ops, plan.strategies, strict=True)]
    assert cuts == [(("t5",), [0]), (("t11",), [0])]
    build.export(tmp_path / "again.onnx")
    specs = {s.tensor: s for n in onnx.load(tmp_path / "again.onnx").graph.node for c in node_configurations(n) for s in c.specs
             if s.tensor in n.output}  # fmt: skip
    assert (specs["t5"].devices, specs["t11"].devices) == ((0, 1), (2, 3))
    by_hand = tapestry.compile(path, mesh="2x2", sharding=False, stage_at=["E"], pins=["t5:x0=2@d1", "t11:x0=2@d1"]).build
    assert by_hand.program == build.build.program
    m.graph.node[10].device_configurations[0].pipeline_stage = 0
    path.write_bytes(m.SerializeToString())
    assert "stage-back" in [f.code for f in check_file(path) if f.level == "error"]


# the formalism


def test_unary_any_sharding_and_the_output_has_the_same(tmp_path):
    m = net([N("Exp", ["x"], ["t"], "a"), N("Tanh", ["t"], ["y"], "b")], {"x": (T.FLOAT, [8, 6])}, {"y": T.FLOAT})
    build = compiled(annotated(m, 2, tmp_path, [("a", "x", {1: 2})]), tmp_path)
    assert strategy(build, "y").out == (1,) and build.build.plan.inputs == {"x": (1,)}


def add(tmp_path, a, b, specs, out=None, devices=2):
    m = net([N("Add", ["a", "b"], ["y"], "add")], {"a": (T.FLOAT, a), "b": (T.FLOAT, b)}, {"y": T.FLOAT})
    return annotated(m, devices, tmp_path, [("add", t, *s) for t, s in specs.items()])


def test_add_by_rows_and_by_columns_makes_no_sense(tmp_path):
    path = add(tmp_path, [32, 1024], [32, 1024], {"a": ({0: 2},), "b": ({1: 2},)})
    (found,) = [f for f in check_file(path) if f.level == "error"]
    assert found.code == "agreement" and "device" in found.message
    with pytest.raises(PlanError, match="is impossible"):
        tapestry.compile(path)
    path = add(tmp_path, [32, 1024], [32, 1024], {"a": ({0: 2},), "b": ({0: 2},)})
    assert strategy(compiled(path, tmp_path), "y").out == (0,)


def test_an_output_may_be_sharded_otherwise_than_the_inputs(tmp_path):
    path = add(tmp_path, [8, 16], [8, 16], {"a": ({0: 2},), "b": ({0: 2},), "y": ({1: 2},)})
    assert [f.code for f in check_file(path) if f.level == "error"] == []
    assert "reshard" in [f.code for f in check_file(path)]


def test_a_broadcast_axis_of_size_one_is_on_all_devices(tmp_path):
    specs = {"a": ({0: 2},), "b": ({}, [-1], {-1: [0, 1]})}
    assert strategy(compiled(add(tmp_path, [8, 16], [1, 16], specs), tmp_path), "y").out == (0,)
    lone = add(tmp_path, [8, 16], [1, 16], {"a": ({0: 2},), "b": ({}, [0])})
    assert [f.code for f in check_file(lone) if f.level == "error"] == ["agreement"]


HALVES = {-1: [0, 1], -2: [2, 3]}
CROSSED = {-1: [0, 2], -2: [1, 3]}


def test_specs_on_different_axes_compose(tmp_path):
    """Output shard [i, j] is on the devices that have both shard i of the first and shard j of the second input."""
    specs = {"a": ({0: 2}, [-1, -2], HALVES), "b": ({1: 2}, [-1, -2], CROSSED)}
    build = compiled(add(tmp_path, [6, 1], [1, 4], specs, devices=4), tmp_path)
    y = np.arange(24.0).reshape(6, 4)
    assert parts(build, "y", y) == {0: y[:3, :2].tolist(), 1: y[:3, 2:].tolist(), 2: y[3:, :2].tolist(), 3: y[3:, 2:].tolist()}
    empty = add(tmp_path, [6, 1], [1, 4], {"a": ({0: 2}, [0, 1]), "b": ({1: 2}, [2, 3])}, devices=4)
    assert [f.code for f in check_file(empty) if f.level == "error"] == ["agreement"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_reduction_along_the_cut_axis_is_completed_on_all(keepdims, tmp_path):
    """Two steps, local and across; by default the result is on all devices that take part, along another axis it stays cut."""
    axes = {"axes": np.array([1], np.int64)}
    m = net([N("ReduceSum", ["x", "axes"], ["y"], "sum", keepdims=keepdims)], {"x": (T.FLOAT, [8, 6])}, {"y": T.FLOAT}, axes)
    path = annotated(m, 2, tmp_path, [("sum", "x", {1: 2}), ("sum", "y", {}, [-1], {-1: [0, 1]})])
    assert keepdims or [f.code for f in check_file(path)] == ["reduction"]
    build = compiled(path, tmp_path)
    assert strategy(build, "y").dims != (None,) and strategy(build, "y").out == (None,)
    assert [t["kind"] for t in build.report["transfers"]] == ["all_reduce"]
    m = net([N("ReduceSum", ["x", "axes"], ["y"], "sum", keepdims=keepdims)], {"x": (T.FLOAT, [8, 6])}, {"y": T.FLOAT}, axes)
    build = compiled(annotated(m, 2, tmp_path, [("sum", "x", {0: 2})]), tmp_path)
    assert strategy(build, "y").out == (0,) and build.report["transfers"] == []


def matmul(tmp_path, specs, devices=2):
    m = net([N("MatMul", ["a", "b"], ["y"], "mm")], {"a": (T.FLOAT, [8, 6]), "b": (T.FLOAT, [6, 4])}, {"y": T.FLOAT})
    return annotated(m, devices, tmp_path, [("mm", t, *s) for t, s in specs.items()])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("specs", "devices", "dims", "out"),
    [
        ({"a": ({0: 2},)}, 2, ("i",), (0,)),
        ({"b": ({1: 2},)}, 2, ("n",), (1,)),
        ({"a": ({0: 2}, [-1, -2], HALVES), "b": ({1: 2}, [-1, -2], CROSSED)}, 4, ("i", "n"), (0, 1)),
        ({"a": ({1: 2},), "b": ({0: 2},), "y": ({}, [-1], {-1: [0, 1]})}, 2, ("m",), (None,)),
        ({"a": ({1: 2},), "b": ({0: 2},), "y": ({0: 2},)}, 2, ("m",), (0,)),
    ],
)
def test_matmul_is_a_broadcast_and_a_reduction(specs, devices, dims, out, tmp_path):
    build = compiled(matmul(tmp_path, specs, devices), tmp_path)
    assert (strategy(build, "y").dims, strategy(build, "y").out) == (dims, out)


def test_contracted_axes_have_to_be_cut_alike(tmp_path):
    found = [f.code for f in check_file(matmul(tmp_path, {"a": ({1: 2},), "b": ({0: 2}, [1, 0])})) if f.level == "error"]
    assert found == ["contraction"]


def test_an_input_without_a_spec_has_that_of_its_producer(tmp_path):
    m = net(
        [N("Neg", ["x"], ["t"], "a"), N("Add", ["t", "x2"], ["y"], "b")],
        {"x": (T.FLOAT, [8, 8]), "x2": (T.FLOAT, [8, 8])},
        {"y": T.FLOAT},
    )
    path = annotated(m, 2, tmp_path, [("a", "t", {0: 2}), ("b", "x2", {1: 2})])
    found = [f for f in check_file(path) if "inherited" in f.code]
    assert found and "as their producers leave them" in found[0].message


# what the formalism leaves out: it names the operators as unsupported


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("node", "shape", "weights"),
    [
        (N("Conv", ["x", "w"], ["y"], "op", pads=[1, 1, 1, 1]), [2, 4, 8, 8], {"w": f32(4, 4, 3, 3)}),
        (N("MaxPool", ["x"], ["y"], "op", kernel_shape=[3, 3], pads=[1, 1, 1, 1]), [2, 4, 8, 8], {}),
        (N("LayerNormalization", ["x", "w"], ["y"], "op"), [2, 4, 8], {"w": f32(8)}),
        (N("GlobalAveragePool", ["x"], ["y"], "op"), [2, 4, 8, 8], {}),
    ],
    ids=lambda v: v.op_type if isinstance(v, onnx.NodeProto) else "",
)
def test_operators_that_the_formalism_leaves_out(node, shape, weights, tmp_path):
    for axis in (0, 1):
        m = net([node], {"x": (T.FLOAT, shape)}, {"y": T.FLOAT}, weights)
        build = compiled(annotated(m, 2, tmp_path, [("op", "y", {axis: 2})]), tmp_path)
        assert strategy(build, "y").out == (axis,)


# what the protos have beside the examples


def pair():
    m = net(
        [N("MatMul", ["x", "w"], ["h"], "up"), N("Relu", ["h"], ["r"], "act"), N("MatMul", ["r", "v"], ["y"], "down")],
        {"x": (T.FLOAT, ["batch", 16])}, {"y": T.FLOAT}, {"w": f32(16, 32), "v": f32(32, 16)},
    )  # fmt: skip
    return onnx.shape_inference.infer_shapes(m)


def test_several_configurations_in_one_model(tmp_path, capsys):
    from tapestry import cli

    source, both = tmp_path / "m.onnx", tmp_path / "both.onnx"
    onnx.save(pair(), source)
    pins = {"dp2": (2, "up:i=2@d0"), "tp4": (4, "up:n=4@d0"), "tp2": (2, "up:n=2@d0")}
    plans = {}
    for name, (devices, pin) in pins.items():
        build = str(tmp_path / name)
        assert (
            cli.main(["compile", str(source), "-o", build, "--devices", str(devices), "--shape", "batch=8", "--pin", pin, "-q"])
            == 0
        )
        into = ["--into", str(both)] if plans else ["-o", str(both)]
        assert cli.main(["export", build, *into, "--configuration", name]) == 0
        plans[name] = tapestry.load(build).build.plan.strategies
    m = onnx.load(both)
    onnx.checker.check_model(m)
    assert [(c.name, c.num_devices) for c in m.configuration] == [("dp2", 2), ("tp4", 4), ("tp2", 2)]
    assert all({c.configuration_id for c in n.device_configurations} == {*pins} for n in m.graph.node if n.op_type == "MatMul")
    assert {p.key: p.value for p in m.metadata_props}["instance_count"] == "4"
    assert [f for f in check_file(both) if f.level == "error"] == []
    for name in pins:
        assert tapestry.compile(both, configuration=name).build.plan.strategies == plans[name]
    assert tapestry.compile(both, devices=4).build.plan.strategies == plans["tp4"]
    assert cli.main(["compile", str(both), "-o", str(tmp_path / "c"), "--configuration", "dp2", "-q"]) == 0
    capsys.readouterr()
    for given, words in (
        (["compile", str(both), "-o", str(tmp_path / "d"), "--configuration", "tp8"], "no configuration 'tp8'"),
        (["compile", str(both), "-o", str(tmp_path / "d"), "--configuration", "tp4", "--devices", "2"], "for 4 devices, not 2"),
        (["compile", str(source), "-o", str(tmp_path / "d"), "--configuration", "tp4"], "no configuration 'tp4'"),
        (["export", str(tmp_path / "tp2"), "--into", str(both), "--configuration", "tp2"], "has a configuration 'tp2'"),
        (["export", str(tmp_path / "tp2"), "--into", str(both), "--configuration", "a b"], "no name"),
        (["export", str(tmp_path / "tp2")], "nowhere to write"),
        (
            ["export", str(tmp_path / "tp2"), "--format", "json", "--into", str(both), "-o", str(tmp_path / "j")],
            "only annotations",
        ),
    ):
        assert cli.main(given) == 2
        assert words in capsys.readouterr().err
    other = pair()
    other.graph.node[1].op_type = "Tanh"
    onnx.save(other, tmp_path / "other.onnx")
    assert cli.main(["export", str(tmp_path / "tp2"), "--into", str(tmp_path / "other.onnx")]) == 2
    assert "not the build's model" in capsys.readouterr().err


@pytest.mark.slow
def test_a_symbol_in_a_constant_number_of_shards_at_every_size(tmp_path):
    source, target = tmp_path / "m.onnx", tmp_path / "s.onnx"
    onnx.save(pair(), source)
    tapestry.compile(source, devices=4, shapes={"batch": 8}, pins=["up:i=4@d0", "down:i=4@d0"]).export(target)
    entries = [
        x for n in onnx.load(target).graph.node for c in n.device_configurations for s in c.sharding_spec if s.tensor_name == "y"
        for d in s.sharded_dim for x in d.simple_sharding
    ]  # fmt: skip
    assert [(x.dim_param, x.num_shards) for x in entries] == [("batch", 4)]
    for batch in (4, 8, 10):  # 10: parts of 2 and 3
        build = tapestry.compile(target, shapes={"batch": batch})
        assert strategy(build, "y").out == (0,) and build.check(build.random_feeds(0))["passed"]
    with pytest.raises(PlanError, match="cannot be cut into 4"):
        tapestry.compile(target, shapes={"batch": 3})
    assert [f for f in check_file(target) if f.level == "error"] == []


def reshaped():
    """heads × size fused into one axis by a Reshape, a function of that, and what reads it."""
    return net(
        [N("Exp", ["x"], ["u"], "make"), N("Reshape", ["u", "s"], ["t"], "fuse"), N("Relu", ["t"], ["r"], "act"), N("MatMul", ["r", "w"], ["y"], "mm")],
        {"x": (T.FLOAT, [3, 4, 6])}, {"y": T.FLOAT}, {"s": np.array([3, 24], np.int64), "w": f32(24, 5)},
    )  # fmt: skip


def fused_axis(m, node, tensor, entries, devices=(0, 1, 2, 3)):
    put(m, node, tensor, {}, list(devices))
    s = next(s for c in m.graph.node[[n.name for n in m.graph.node].index(node)].device_configurations for s in c.sharding_spec)
    d = s.sharded_dim.add(axis=1)
    for n, size in entries:
        x = d.simple_sharding.add(num_shards=n)
        x.dim_value = size


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("node", "tensor"), [("fuse", "t"), ("act", "r")])
def test_several_shardings_of_one_axis(node, tensor, tmp_path):
    """4 × 6 fused into 24, each in two: device 1 has columns 3 to 5 of the rows 0 and 1 of 6, interleaved cells of the axis."""
    m = reshaped()
    m.ir_version = 11
    m.configuration.add(name="four", num_devices=4)
    fused_axis(m, node, tensor, [(2, 4), (2, 6)])
    path = tmp_path / "m.onnx"
    path.write_bytes(m.SerializeToString())
    build = compiled(path, tmp_path)
    plan = build.build.plan
    assert build.report["requests"]["sharding"]["notes"] == [] and [a.size for a in plan.mesh] == [2, 2]
    at = {op.outs[0]: s for op, s in zip(plan.graph.ops, plan.strategies, strict=True)}
    assert at["u" if tensor == "t" else "r.x1"].out == (1, 2)
    build.export(tmp_path / "again.onnx")
    specs = {
        s.tensor: s
        for n in onnx.load(tmp_path / "again.onnx").graph.node
        for c in node_configurations(n)
        for s in c.specs
        if s.tensor in n.output
    }
    assert [(x.num_shards, x.dim) for x in specs[tensor].dims[0].shards] == [(2, 4), (2, 6)]
    assert placement(specs[tensor], (3, 24)).pieces[1] == (((0, 3),), ((3, 6), (9, 12)))
    again = tapestry.compile(tmp_path / "again.onnx")
    assert again.build.plan.strategies == plan.strategies and again.build.program == build.build.program


def test_fused_axes_that_do_not_make_up_the_axis_are_refused(tmp_path):
    m = reshaped()
    m.ir_version = 11
    m.configuration.add(name="four", num_devices=4)
    fused_axis(m, "act", "r", [(2, 4), (2, 5)])
    (tmp_path / "m.onnx").write_bytes(m.SerializeToString())
    assert "fused-dims" in [f.code for f in check_file(tmp_path / "m.onnx")]
    with pytest.raises(PlanError):
        tapestry.compile(tmp_path / "m.onnx")


# metadata of ours


def test_inputs_and_outputs_are_sharded_by_metadata(tmp_path):
    source, target = tmp_path / "m.onnx", tmp_path / "s.onnx"
    onnx.save(pair(), source)
    tapestry.compile(source, devices=2, shapes={"batch": 8}, layouts=["x:0=2@d0", "w:1=2@d0", "y:1=2@d0"]).export(target)
    m = onnx.load(target)
    found = {
        h.name: {p.key: p.value for p in h.metadata_props} for h in (*m.graph.input, *m.graph.output, *m.graph.initializer)
    }
    assert {k for k, v in found.items() if "tapestry.sharding" in v} == {"x", "w", "y"}
    entry = json.loads(found["x"]["tapestry.sharding"])["shardedDim"][0]
    assert entry["simpleSharding"] == [{"dimParam": "batch", "numShards": "2"}]
    again = tapestry.compile(target)
    assert again.build.plan.inputs == {"x": (0,), "w": (1,)} and again.build.plan.outputs == {"y": (1,)}
    m.graph.input[0].metadata_props[0].value = "{"
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(m.SerializeToString())
    if m.graph.input[0].metadata_props[0].key == "tapestry.sharding":
        assert "metadata-unreadable" in [f.code for f in check_file(bad)]


SHARES = {
    "mesh": "d0=2",
    **FAST,
    "others": [{"devices": [0], "flops": {"f32": 3e6, "other": 3e6}, "vector": 3e6, "bandwidth": 3e6}],
}


def test_uneven_shares_are_written_and_read(tmp_path):
    source, target, topology = tmp_path / "m.onnx", tmp_path / "s.onnx", tmp_path / "two.json"
    onnx.save(pair(), source)
    topology.write_text(json.dumps(SHARES))
    before = tapestry.compile(source, topology=topology, shapes={"batch": 16})
    assert before.build.plan.mesh[0].weights == (3, 1)
    before.export(target)
    m = onnx.load(target)
    assert {p.key: p.value for p in m.metadata_props}["tapestry.shares"] == '{"d0": [3, 1]}'
    assert any(
        "[[0, 12], [12, 16]]" in p.value or "[[0, 24], [24, 32]]" in p.value for n in m.graph.node for p in n.metadata_props
    )
    assert [str(f) for f in check_file(target) if f.level == "error"] == []
    after = tapestry.compile(target, topology="cpu")
    assert after.build.plan.mesh == before.build.plan.mesh and after.build.plan.strategies == before.build.plan.strategies
    for n in m.graph.node:
        for p in n.metadata_props:
            p.value = p.value.replace("[12, 16]", "[12, 99]").replace("[24, 32]", "[24, 99]")
    target.write_bytes(m.SerializeToString())
    assert "parts-range" in [f.code for f in check_file(target)]


def test_a_halo_is_written_and_read(tmp_path):
    m = net(
        [N("Conv", ["x", "w"], ["c"], "one", pads=[1, 1, 1, 1]), N("Conv", ["c", "v"], ["y"], "two", pads=[1, 1, 1, 1])],
        {"x": (T.FLOAT, [1, 2, 12, 8])}, {"y": T.FLOAT}, {"w": f32(2, 2, 3, 3), "v": f32(2, 2, 3, 3)},
    )  # fmt: skip
    source, target = tmp_path / "m.onnx", tmp_path / "s.onnx"
    onnx.save(m, source)
    before = tapestry.compile(source, devices=2, pins=["one:h=2@d0", "two:h=2@d0"])
    before.export(target)
    (two,) = [n for n in onnx.load(target).graph.node if n.name == "two"]
    assert json.loads({p.key: p.value for p in two.metadata_props}["tapestry.parts"])["c"] == {"2": [[0, 7], [5, 12]]}
    found = check_file(target)
    assert [f.code for f in found] == ["reshard"] and "192 bytes" not in found[0].message
    after = tapestry.compile(target)
    assert after.build.plan.strategies == before.build.plan.strategies and after.build.program == before.build.program
