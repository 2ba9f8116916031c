"""Gathers, quantisation, ai.onnx.ml, indices of pools, grids, cubic Resize: affine or splittable, against onnxruntime."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

import tapestry
from tapestry.errors import ModelError, TapestryError
from tapestry.ir.graph import Block, Opaque
from tapestry.lift import lift
from tapestry.onnx_eval.ort_session import ort_session
from tests.support.lifting import agree, build, data, evaluate, lift_model, node

RNG = np.random.default_rng(3)


def held(made, feeds, folder, *, dims=None, devices=(1, 3), rtol=1e-5):
    """On one device and on several, a model gives what onnxruntime gives; ``dims`` are those of its opaque operation."""
    names = [o.name for o in made.graph.output]
    want = ort_session(made.SerializeToString()).run(names, feeds)
    lifted = lift_model(made, folder)
    if dims is not None:
        assert [[d.name for d in op.dims] for op in lifted.graph.ops if isinstance(op, Opaque)] == [dims]
    for n in devices:
        found = tapestry.compile(folder / "model.onnx", devices=n).run(feeds)
        for name, a in zip(names, want, strict=True):
            assert found[name].dtype == a.dtype and found[name].shape == a.shape
            np.testing.assert_allclose(found[name], a, rtol=rtol, atol=1e-6)
    return lifted.graph


# gathers


def run_gather(folder, nodes, index, *, pins=(), devices=3):
    made = build(nodes, {"i": index}, ["y"], {"table": data(5, 4), "s": np.array([1]), "e": np.array([9])})
    onnx.save(made, folder / "m.onnx")
    return tapestry.compile(folder / "m.onnx", devices=devices, pins=pins).run({"i": index})["y"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pins", [(), ("y:v=3@d0",), ("y:x0=3@d0",)])
@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_an_index_outside_the_table_is_refused(tmp_path, pins, kind):
    gather = [node("Gather", "table i")]
    good = np.array([4, -5, 0], kind)
    np.testing.assert_array_equal(run_gather(tmp_path, gather, good, pins=pins), data(5, 4)[good])
    for bad in (5, -6):
        with pytest.raises(TapestryError, match=f"input 'i' has an index outside.*\n.*{bad} where there are 5"):
            run_gather(tmp_path, gather, np.array([4, bad, 0], kind), pins=pins)


@pytest.mark.parametrize("behind", ["MatMul", "Mul"])
def test_an_index_that_a_one_hot_does_not_have_gives_zeros(tmp_path, behind):
    """Summed with weights it looks like a gather, of which it would be an error."""
    last = (
        [node("MatMul", "h w", "y")]
        if behind == "MatMul"
        else [node("Mul", "h w", "p"), node("ReduceSum", "p axis", keepdims=0)]
    )
    weights = data(5, 3) if behind == "MatMul" else data(5)
    index, stored = (
        np.array([0, 7, -1, -9]),
        {"d": np.array([5]), "v": np.float32([0, 1]), "w": weights, "axis": np.array([-1])},
    )
    made = build([node("OneHot", "i d v", "h"), *last], {"i": index}, ["y"], stored)
    onnx.save(made, tmp_path / "m.onnx")
    want = np.stack([weights[0], 0 * weights[0], weights[-1], 0 * weights[0]])
    for devices in (1, 2):
        found = tapestry.compile(tmp_path / "m.onnx", devices=devices).run({"i": index})["y"]
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_an_index_that_is_not_used_may_be_anything(tmp_path):
    sliced = [node("Slice", "i s e", "used"), node("Gather", "table used")]
    np.testing.assert_array_equal(run_gather(tmp_path, sliced, np.array([99, 4, 0])), data(5, 4)[[4, 0]])
    with pytest.raises(TapestryError, match="7 where"):
        run_gather(tmp_path, sliced, np.array([99, 4, 7]))
    clipped = [node("Min", "i s", "used"), node("Gather", "table used")]
    np.testing.assert_array_equal(run_gather(tmp_path, clipped, np.array([99, 0])), data(5, 4)[[1, 0]])


def test_a_reshape_that_cannot_be_is_refused_with_its_sizes(tmp_path):
    """Exporters write sizes of their example down, which data propagation alone does not hold against the input."""
    made = build([node("Reshape", "x s")], {"x": data(3, 4)}, ["y"], {"s": np.array([5, 2])})
    with pytest.raises(ModelError, match=r"(?s)node 'y'.*\[3, 4\] has 12 elements, \[5, 2\] 10"):
        lift_model(made, tmp_path)


@pytest.mark.parametrize("axis, shape", [(0, (2, 5)), (1, (3, 9)), (-1, (3, 1)), (0, (7, 2))])
def test_gather_elements_by_any_positions(tmp_path, axis, shape):
    x = data(3, 5)
    index = RNG.integers(-x.shape[axis], x.shape[axis], shape)
    agree(node("GatherElements", "x i", axis=axis), {"x": x, "i": index}, ["y"], folder=tmp_path)


@pytest.mark.parametrize(
    "batch, count, outer", [(0, 1, (4,)), (0, 2, (2, 3)), (1, 1, (2, 3)), (1, 2, (2,)), (2, 1, (2, 3, 2)), (0, 3, (1,))]
)
@pytest.mark.parametrize("known", [True, False])
def test_gather_nd_by_any_positions(tmp_path, batch, count, outer, known):
    x = data(2, 3, 4)
    sizes = x.shape[batch : batch + count]
    index = np.stack([RNG.integers(-s, s, outer) for s in sizes], -1)
    feeds, consts = ({"x": x}, {"i": index}) if known else ({"x": x, "i": index}, None)
    agree(node("GatherND", "x i", batch_dims=batch), feeds, ["y"], consts, folder=tmp_path)


def test_gather_nd_outside_the_tensor_reads_no_neighbour(tmp_path):
    """(0, 4) of a 2x4 tensor is not cell (1, 0); a Gather that leaves its axis gives 0, and so does this."""
    index = np.array([[0, 4], [1, 1], [0, -5]])
    lifted = lift_model(build([node("GatherND", "x i")], {"x": data(2, 4), "i": index}, ["y"]), tmp_path)
    x = 1 + np.arange(8, dtype=np.float32).reshape(2, 4)
    assert evaluate(lifted, {"x": x, "i": index})["y"].tolist() == [0, x[1, 1], 0]


def test_the_axis_of_a_gather_can_be_cut(tmp_path):
    feeds = {"x": data(4, 6, 5), "i": np.stack([RNG.integers(0, s, (9,)) for s in (4, 6)], -1)}
    made = build([node("GatherND", "x i")], feeds, ["y"])
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    want = feeds["x"][feeds["i"][:, 0], feeds["i"][:, 1]]
    for dim in ("v", "x0", "x1"):
        cut = tapestry.compile(tmp_path / "m.onnx", devices=3, pins=[f"y:{dim}=3@d0"])
        assert np.array_equal(cut.run(feeds)["y"], want)


@pytest.mark.parametrize("reduction", ["none", "add", "max"])
def test_scatter_nd_is_cut_inside_its_slices(tmp_path, reduction):
    feeds = {"x": data(4, 6, 5), "i": np.array([[1], [3]]), "u": data(2, 6, 5, seed=1)}
    held(build([node("ScatterND", "x i u", reduction=reduction)], feeds, ["y"], opset=18), feeds, tmp_path, dims=["x1", "x2"])


# quantisation


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["uint8", "int8", "uint16", "int16"])
@pytest.mark.parametrize("axis, shape", [(None, (3, 5, 4)), (1, (3, 5, 4)), (-1, (3, 4)), (0, (6,))])
def test_there_and_back(tmp_path, kind, axis, shape):
    """Bit for bit, ties and saturation included."""
    limits, size = np.iinfo(kind), 1 if axis is None else shape[axis]
    scale = (RNG.random(size).astype(np.float32) + 0.5) / 4 if axis is not None else np.float32(0.25)
    zero = RNG.integers(limits.min, limits.max, size).astype(kind) if axis is not None else np.array(7, kind)
    x = data(*shape) * 50
    x.reshape(-1)[:4] = [0.125, 0.375, 1e9, -1e9]
    more = {} if axis is None else {"axis": axis}
    nodes = [node("QuantizeLinear", "x s z", "q", **more), node("DequantizeLinear", "q s z", "y", **more)]
    graph = held(build(nodes, {"x": x}, ["q", "y"], {"s": scale, "z": zero}, opset=21, ir=10), {"x": x}, tmp_path, rtol=0)
    assert all(isinstance(op, Block) for op in graph.ops)


@pytest.mark.parametrize("block", [2, 3])
def test_blocks_of_scales(tmp_path, block):
    rows = -(-5 // block)
    consts = {"s": (RNG.random((3, rows)) + 0.5).astype(np.float32), "z": RNG.integers(0, 9, (3, rows)).astype(np.int8)}
    nodes = [node("DequantizeLinear", "q s z", axis=1, block_size=block)]
    agree(nodes, {"q": RNG.integers(-99, 99, (3, 5)).astype(np.int8)}, ["y"], consts, opset=21, folder=tmp_path)


def test_bias_of_32_bits_and_a_net_of_quantised_layers(tmp_path):
    """What quantisers write around a convolution: weights, bias and activations in integers, each dequantised."""
    q = lambda *s: RNG.integers(-100, 100, s)  # noqa: E731
    consts = {
        "w": q(4, 3, 3, 3).astype(np.int8), "b": q(4).astype(np.int32), "s": np.float32(0.05), "z": np.uint8(100),
        "ws": (RNG.random(4) / 50 + 0.01).astype(np.float32), "bs": np.full(4, 0.001, np.float32), "wz": np.zeros(4, np.int8),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x s z", "xq"), node("DequantizeLinear", "xq s z", "xd"),
        node("DequantizeLinear", "w ws wz", "wd", axis=0), node("DequantizeLinear", "b bs", "bd", axis=0),
        node("Conv", "xd wd bd", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "r"),
        node("QuantizeLinear", "r s z", "rq"), node("DequantizeLinear", "rq s z", "y"),
    ]  # fmt: skip
    feeds = {"x": data(2, 3, 6, 5)}
    made = build(nodes, feeds, ["y"], consts, opset=13)
    lifted = lift_model(made, tmp_path)
    assert all(isinstance(op, Block) for op in lifted.graph.ops)
    session = ort_session(made.SerializeToString(), optimized=False)  # else it computes in integers
    (want,) = session.run(["y"], feeds)
    for n in (1, 3, 4):
        found = tapestry.compile(tmp_path / "model.onnx", devices=n).run(feeds)["y"]
        assert (np.abs(found - want) > 1e-6).mean() < 0.02 and np.abs(found - want).max() < 0.051  # one step, at a tie


@pytest.mark.parametrize("per_filter", [False, True])
def test_integer_convolutions_are_cut_by_filter(tmp_path, per_filter):
    scale = (RNG.random(6) + 0.1).astype(np.float32) / 20 if per_filter else np.float32(0.02)
    consts = {
        "xs": np.float32(0.1), "xz": np.uint8(9), "w": RNG.integers(-50, 50, (6, 3, 3, 3)).astype(np.int8), "ws": scale,
        "wz": np.zeros(np.shape(scale), np.int8), "ys": np.float32(0.5), "yz": np.uint8(100), "b": RNG.integers(-99, 99, 6).astype(np.int32),
    }  # fmt: skip
    feeds = {"x": RNG.integers(0, 255, (2, 3, 6, 5)).astype(np.uint8)}
    graph = held(build([node("QLinearConv", "x xs xz w ws wz ys yz b")], feeds, ["y"], consts), feeds, tmp_path, rtol=0)
    assert [[d.name for d in op.dims] for op in graph.ops] == [["b", "o", "h", "w"]]


# pools with Indices, grids, cubic Resize, Hardmax


@pytest.mark.parametrize("shape, attributes", [
    ((2, 3, 7, 6), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ((2, 3, 7, 6), {"kernel_shape": [3, 2], "pads": [1, 0, 2, 1], "dilations": [2, 1]}),
    ((2, 3, 11), {"kernel_shape": [4], "strides": [3], "ceil_mode": 1}),
    ((1, 2, 5, 4, 6), {"kernel_shape": [2, 2, 2], "strides": [1, 2, 2]}),
])  # fmt: skip
def test_positions_of_the_greatest_values(tmp_path, shape, attributes):
    x = data(*shape)
    x[..., :2] = -5  # ties
    graph = agree(node("MaxPool", "x", "y i", **attributes), {"x": x}, ["y", "i"], folder=tmp_path)
    assert graph.ops[0].monoid == "argmax"
    agree(node("MaxPool", "x", "y i", **attributes), {"x": np.abs(x) * -1 - 1e3}, ["y", "i"], folder=tmp_path)


@pytest.mark.parametrize("channels, filters", [(0, 0), (0, 2), (2, 0)])
def test_convolutions_of_no_channels_or_no_filters(tmp_path, channels, filters):
    x, w, b = np.ones((1, channels, 4), np.float32), np.ones((filters, channels, 2), np.float32), np.arange(filters, dtype="f")
    back = w.swapaxes(0, 1)
    nodes = [node("Conv", "x w b", "y"), node("ConvTranspose", "x v", "z")]
    onnx.save(build(nodes, {"x": x}, ["y", "z"], {"w": w, "v": back, "b": b}), tmp_path / "m.onnx")
    found = tapestry.compile(tmp_path / "m.onnx", devices=2).run({"x": x})
    assert np.array_equal(found["y"], np.zeros((1, filters, 3), np.float32) + b[:, None])
    assert np.array_equal(found["z"], np.zeros((1, filters, 5), np.float32))


def test_a_pool_and_its_unpool_under_splits(tmp_path):
    nodes = [
        node("MaxPool", "x", "p i", kernel_shape=[2, 2], strides=[2, 2]),
        node("MaxUnpool", "p i", kernel_shape=[2, 2], strides=[2, 2]),
    ]
    held(build(nodes, {"x": data(2, 3, 6, 8)}, ["y"]), {"x": data(2, 3, 6, 8)}, tmp_path, dims=[])


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    "how, coefficient",
    list(itertools.product(["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"], [-0.75, -0.5])),
)
@pytest.mark.parametrize("height, width", [(14, 10), (9, 17), (4, 3), (1, 10)])
def test_cubic_resize(tmp_path, how, coefficient, height, width):
    consts = {"sizes": np.array([2, 3, height, width], np.int64)}
    one = node("Resize", "x _ _ sizes", mode="cubic", coordinate_transformation_mode=how, cubic_coeff_a=coefficient)
    agree(one, {"x": data(2, 3, 7, 5)}, ["y"], consts, folder=tmp_path, rtol=1e-4)


def test_an_opaque_resize_to_sizes_is_cut_by_image_and_channel(tmp_path):
    consts = {"sizes": np.array([2, 3, 4, 3], np.int64)}
    one = node("Resize", "x _ _ sizes", mode="linear", antialias=1)
    held(build([one], {"x": data(2, 3, 7, 5)}, ["y"], consts), {"x": data(2, 3, 7, 5)}, tmp_path, dims=["b", "c"])


@pytest.mark.parametrize(
    "named, dims, more",
    [
        ([2, 3], ["b", "c"], {"mode": "cubic", "antialias": 1}),
        ([-1], ["b", "c", "x2"], {"mode": "linear", "antialias": 1}),
        ([3, 1], ["b", "x2"], {"mode": "nearest", "keep_aspect_ratio_policy": "not_larger"}),
        ([2, 3], ["b", "c"], {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0}),
    ],
)  # fmt: skip
def test_an_opaque_resize_that_names_axes_is_cut_along_the_others(tmp_path, named, dims, more):
    x, consts = data(2, 3, 7, 5), {"sizes": np.array([4, 3][: len(named)], np.int64)}
    if "coordinate_transformation_mode" in more:
        consts["roi"] = np.array([0.2, -0.1, 0.9, 1.2], np.float32)
    one = node("Resize", f"x {'roi' if 'roi' in consts else '_'} _ sizes", axes=named, **more)
    made = build([one], {"x": x}, ["y"], consts)
    want = ort_session(made.SerializeToString()).run(None, {"x": x})[0]
    onnx.save(made, tmp_path / "m.onnx")
    assert [d.name for d in lift(tmp_path / "m.onnx", {}).graph.ops[0].dims] == dims
    for pins in [(), *((f"y:{d}=2@d0",) for d in dims)]:
        found = tapestry.compile(tmp_path / "m.onnx", devices=2, pins=pins).run({"x": x})
        np.testing.assert_allclose(found["y"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset, axis", [(18, 1), (18, -1), (11, 1), (11, 2)])
def test_hardmax(tmp_path, opset, axis):
    x = np.round(data(3, 4, 5))  # ties: the first counts
    agree(node("Hardmax", "x", axis=axis), {"x": x}, ["y"], opset=opset, folder=tmp_path)


@pytest.mark.parametrize(
    ("op", "more", "attributes"),
    [("BatchNormalization", 4, {}), ("InstanceNormalization", 2, {}), ("LayerNormalization", 1, {"axis": 1}),
     ("RMSNormalization", 1, {"axis": 1})],
)  # fmt: skip
def test_defaults_are_numbers_of_float32_where_the_model_computes_in_float64(tmp_path, op, more, attributes):
    """… as attributes are: compilation compares every cell with the model's in float64."""
    consts = {f"w{k}": np.abs(data(3, *([4, 4] if "axis" in attributes else []))).astype(np.float64) for k in range(more)}
    made = build(
        [node(op, " ".join(["x", *consts]), **attributes)], {"x": data(2, 3, 4, 4).astype(np.float64)}, ["y"], consts, opset=23
    )
    onnx.save(made, tmp_path / "m.onnx")
    assert tapestry.compile(tmp_path / "m.onnx", devices=2).build.report


# operators that no exporter writes: they have no lifter, and run whole

F, L = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
THETA, IMAGE, SCORES, TABLE = data(2, 2, 3), data(2, 4, 6, 5), data(6, 5), data(5, 3)
CLASSES = np.array([0, 4, 2, 2, 1, 3])
TREE = {
    "n_targets": 1, "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [1, 0, 0],
    "nodes_values": [0.1, 0.0, 0.0], "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0], "target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [1.5, -2.0],
}  # fmt: skip
WHOLE = [
    (node("AffineGrid", "t size"), {"t": THETA}, {"size": np.array([2, 3, 4, 5], np.int64)}),
    (node("LRN", "x", size=3, alpha=0.1), {"x": IMAGE}, {}),
    (node("LpPool", "x", kernel_shape=[2, 3], p=2), {"x": IMAGE}, {}),
    (node("GlobalLpPool", "x", p=1), {"x": IMAGE}, {}),
    (node("LpNormalization", "x", axis=1), {"x": IMAGE}, {}),
    (node("SoftmaxCrossEntropyLoss", "x t", reduction="none"), {"x": SCORES, "t": CLASSES}, {}),
    (node("NegativeLogLikelihoodLoss", "x t"), {"x": SCORES, "t": CLASSES}, {}),
]
WHOLE_TABLES = [
    ("Scaler", {"y": (F, [5, 3])}, {"offset": [0.5], "scale": [2.0]}),
    ("LinearRegressor", {"y": (F, [5, 2])}, {"coefficients": [0.5, -1.0, 2.0, 0.25, 1.0, -0.5], "targets": 2}),
    ("Normalizer", {"y": (F, [5, 3])}, {"norm": "L2"}),
    ("TreeEnsembleRegressor", {"y": (F, [5, 1])}, TREE),
]


@pytest.mark.parametrize("one, feeds, consts", WHOLE, ids=[w[0].op_type for w in WHOLE])
def test_what_no_exporter_writes_runs_whole(tmp_path, one, feeds, consts):
    graph = held(build([one], feeds, ["y"], consts, opset=20), feeds, tmp_path, dims=[])
    assert any(isinstance(op, Opaque) for op in graph.ops)


@pytest.mark.parametrize("op, outs, attributes", WHOLE_TABLES, ids=[w[0] for w in WHOLE_TABLES])
def test_tables_run_whole(tmp_path, op, outs, attributes):
    made = build([], {"x": TABLE}, [])
    made.graph.node.append(node(op, "x", " ".join(outs), domain="ai.onnx.ml", **attributes))
    made.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    made.graph.output.extend(onnx.helper.make_tensor_value_info(n, t, s) for n, (t, s) in outs.items())
    held(made, {"x": TABLE}, tmp_path, dims=[])
