"""Nodes as opsets 1 to 8 wrote them, against what they say in numpy."""

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper

import tapestry
from tapestry.cli import main
from tapestry.errors import ModelError
from tests.support.small_models import N, f32, net

X, CHANNEL, ROW, PLACE = f32(2, 3, 4, 5), f32(3), f32(5), f32(3, 4, 5)
A, B = f32(4, 6), f32(6, 5)
COPIES, AXIS = np.array([3.0], np.float32), np.array([1.0], np.float32)


def middle(a: np.ndarray) -> np.ndarray:
    return a[:, None, None]


def norm(x, scale, bias, mean, var):
    return (x - mean) / np.sqrt(var + 1e-5) * scale + bias


# operator, opset, inputs (those from the second on are weights), attributes, what it is
FORMS = [
    *(
        (op, v, [X, CHANNEL], {"broadcast": 1, "axis": axis, "consumed_inputs": [0, 0]}, lambda x, y, f=f: f(x, middle(y)))
        for op, f in (("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide))
        for v, axis in ((1, 1), (1, -3))
    ),
    ("Add", 6, [X, f32(3, 4)], {"broadcast": 1, "axis": 1}, lambda x, y: x + y[..., None]),
    ("Add", 6, [X, f32(3, 1)], {"broadcast": 1, "axis": 1}, lambda x, y: x + y[..., None]),
    ("Mul", 6, [X, ROW], {"broadcast": 1}, np.multiply),
    ("Sub", 6, [X, X[::-1].copy()], {}, np.subtract),
    ("Pow", 1, [np.abs(X), CHANNEL], {"broadcast": 1, "axis": 1}, lambda x, y: x ** middle(y)),
    ("Less", 1, [X, CHANNEL], {"broadcast": 1, "axis": 1}, lambda x, y: x < middle(y)),
    ("Xor", 1, [X > 0, CHANNEL > 0], {"broadcast": 1, "axis": 1}, lambda x, y: x ^ middle(y)),
    ("PRelu", 1, [X, CHANNEL], {}, lambda x, s: np.where(x < 0, x * middle(s), x)),
    ("PRelu", 6, [X, CHANNEL[:1]], {}, lambda x, s: np.where(x < 0, x * s, x)),
    ("Clip", 1, [X], {"min": -0.5, "max": 0.25}, lambda x: np.clip(x, -0.5, 0.25)),
    ("Concat", 1, [X, X + 1], {}, lambda x, y: np.concatenate([x, y], 1)),
    ("Cast", 1, [X], {"to": "INT32"}, lambda x: x.astype(np.int32)),
    ("Dropout", 1, [X], {"is_test": 1, "ratio": 0.9}, lambda x: x),
    ("Gemm", 1, [A, B, ROW], {"broadcast": 1, "alpha": 0.5, "beta": 2.0}, lambda a, b, c: 0.5 * (a @ b) + 2 * c),
    ("Gemm", 6, [A, B, f32(4, 5)], {}, lambda a, b, c: a @ b + c),
    ("Max", 1, [X, -X], {"consumed_inputs": [0, 0]}, np.maximum),
    ("Relu", 1, [X], {"consumed_inputs": [0]}, lambda x: np.maximum(x, 0)),
    ("Selu", 1, [X], {}, lambda x: 1.0507 * np.where(x > 0, x, 1.6732 * np.expm1(x))),
    ("Pad", 1, [A], {"paddings": [1, 0, 2, 3], "value": 1.5}, lambda x: np.pad(x, ((1, 2), (0, 3)), constant_values=1.5)),
    ("Reshape", 1, [X], {"shape": [0, -1, 5]}, lambda x: x.reshape(2, 12, 5)),
    ("Tile", 1, [A, COPIES, AXIS], {}, lambda x, *_: np.tile(x, (1, 3))),
    ("GlobalLpPool", 1, [X], {"p": 2.0}, lambda x: np.sqrt((x * x).sum((2, 3), keepdims=True))),
    ("Upsample", 1, [X], {"height_scale": 2.0, "width_scale": 3.0, "mode": "nearest"}, lambda x: x.repeat(2, 2).repeat(3, 3)),
    ("Softmax", 1, [A.reshape(2, 2, 6)], {}, lambda x: (e := np.exp(x)) / e.sum((1, 2), keepdims=True)),
    ("BatchNormalization", 1, [X, *[CHANNEL] * 3, CHANNEL**2], {"is_test": 1, "consumed_inputs": [0, 0, 0, 1, 1]},
     lambda x, *p: norm(x, *map(middle, p))),
    ("BatchNormalization", 6, [X, *[PLACE] * 3, PLACE**2], {"is_test": 1, "spatial": 0}, norm),
    ("BatchNormalization", 7, [X, *[PLACE] * 3, PLACE**2], {"spatial": 0}, norm),
    ("Resize", 10, [A[:, :4], np.array([0.6, 0.5], np.float32)], {}, lambda x, _: x[[0, 2]][:, [0, 2]]),
]  # fmt: skip


def model_of(op, opset, ins, attributes):
    names = [f"w{k}" for k in range(len(ins))]
    kind = T.BOOL if ins[0].dtype == bool else T.FLOAT
    weights = dict(zip(names[1:], ins[1:], strict=True))
    return net([N(op, names, ["y"], "node", **attributes)], {"w0": (kind, ins[0].shape)}, {}, weights, opset=opset)


def compiled(tmp_path, proto, devices):
    if not proto.graph.output:
        proto.graph.output.add(name="y")
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return tapestry.compile(path, devices=devices)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("op", "opset", "ins", "attributes", "meant"), FORMS, ids=lambda v: str(v) if isinstance(v, str | int) else ""
)
def test_what_early_nodes_mean(tmp_path, op, opset, ins, attributes, meant):
    expected = meant(*ins)
    for devices in (1, 2):
        found = compiled(tmp_path, model_of(op, opset, ins, attributes), devices).run({"w0": ins[0]})["y"]
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_weights_may_be_inputs_and_the_opset_may_be_missing(tmp_path):
    """Before IR version 3 a file had no opset, and before version 4 every initializer was an input as well."""
    proto = model_of("Add", 1, [X, CHANNEL], {"broadcast": 1, "axis": 1})
    proto.graph.input.append(helper.make_tensor_value_info("w1", T.FLOAT, [3]))
    proto.ir_version = 2
    del proto.opset_import[:]
    np.testing.assert_array_equal(compiled(tmp_path, proto, 2).run({"w0": X})["y"], X + middle(CHANNEL))


def test_an_early_file_is_verified_and_checked(tmp_path):
    nodes = [
        N("Conv", ["x", "k"], ["c"], "conv", pads=[1, 1, 1, 1]), N("Add", ["c", "b"], ["a"], "bias", broadcast=1, axis=1),
        N("BatchNormalization", ["a", "b", "b", "b", "v"], ["n"], "norm", is_test=1, consumed_inputs=[0, 0, 0, 1, 1]),
        N("Dropout", ["n"], ["d", "mask"], "drop", is_test=1),
        N("Reshape", ["d"], ["flat"], "flatten", shape=[0, -1]), N("Gemm", ["flat", "g", "z"], ["y"], "fc", broadcast=1),
    ]  # fmt: skip
    weights = {"k": f32(4, 3, 3, 3), "b": f32(4), "v": f32(4) ** 2, "g": f32(80, 6), "z": f32(6)}
    proto = net(nodes, {"x": (T.FLOAT, (3, 3, 4, 5))}, {"y": T.FLOAT}, weights, opset=4)
    build = tmp_path / "build"
    compiled(tmp_path, proto, 2).save(build)
    assert [main(["verify", str(build)]), main(["run", str(build), "--check", "--processes", "2"])] == [0, 0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_statistic_for_every_cell_is_compared_with_the_file(tmp_path, dtype):
    x, place = X.astype(dtype), PLACE.astype(dtype)
    node = N("BatchNormalization", ["x", "s", "s", "s", "v"], ["y"], spatial=0)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    proto = net([node], {"x": (kind, x.shape)}, {"y": kind}, {"s": place, "v": place**2}, opset=7)
    plan = compiled(tmp_path, proto, 2)
    np.testing.assert_allclose(plan.run({"x": x})["y"], norm(x, *[place] * 3, place**2), rtol=1e-2, atol=1e-2)
    plan.save(tmp_path / "build")
    assert main(["verify", str(tmp_path / "build")]) == 0


@pytest.mark.parametrize(
    ("op", "opset", "ins", "attributes", "why"),
    [
        ("Dropout", 6, [X], {}, "it is in training mode (is_test is not 1)"),
        ("Add", 6, [X, PLACE], {"broadcast": 1, "axis": 2}, "3 axes from axis 2 on are more than the first operand has (4)"),
        ("GlobalLpPool", 1, [X], {"p": 1.5}, "p is 1.5, which later forms of the operator do not have"),
        ("Tile", 1, [A, COPIES * 1e4, AXIS], {}, "30000 copies, where 1 to 1024 are"),
    ],
)  # fmt: skip
def test_forms_that_nothing_says_are_refused(tmp_path, op, opset, ins, attributes, why):
    with pytest.raises(ModelError) as e:
        compiled(tmp_path, model_of(op, opset, ins, attributes), 1)
    assert e.value.why == why and e.value.where.startswith("node 'node'")
