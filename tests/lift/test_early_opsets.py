"""Nodes as opsets 6 to 10 wrote them, against what they say in numpy."""

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


def middle(a: np.ndarray) -> np.ndarray:
    return a[:, None, None]


def norm(x, scale, bias, mean, var):
    return (x - mean) / np.sqrt(var + 1e-5) * scale + bias


# operator, opset, inputs (those from the second on are weights), attributes, what it is
FORMS = [
    *(
        (op, v, [X, CHANNEL], {"broadcast": 1, "axis": axis}, lambda x, y, f=f: f(x, middle(y)))
        for op, f in (("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide))
        for v, axis in ((6, 1), (6, -3))
    ),
    ("Add", 6, [X, f32(3, 4)], {"broadcast": 1, "axis": 1}, lambda x, y: x + y[..., None]),
    ("Add", 6, [X, f32(3, 1)], {"broadcast": 1, "axis": 1}, lambda x, y: x + y[..., None]),
    ("Mul", 6, [X, ROW], {"broadcast": 1}, np.multiply),
    ("Sub", 6, [X, X[::-1].copy()], {}, np.subtract),
    ("Pow", 6, [np.abs(X), CHANNEL], {"broadcast": 1, "axis": 1}, lambda x, y: x ** middle(y)),
    ("Less", 6, [X, CHANNEL], {"broadcast": 1, "axis": 1}, lambda x, y: x < middle(y)),
    ("Xor", 6, [X > 0, CHANNEL > 0], {"broadcast": 1, "axis": 1}, lambda x, y: x ^ middle(y)),
    ("PRelu", 6, [X, CHANNEL], {}, lambda x, s: np.where(x < 0, x * middle(s), x)),
    ("PRelu", 6, [X, CHANNEL[:1]], {}, lambda x, s: np.where(x < 0, x * s, x)),
    ("Dropout", 6, [X], {"is_test": 1, "ratio": 0.9}, lambda x: x),
    ("Gemm", 6, [A, B, ROW], {"broadcast": 1, "alpha": 0.5, "beta": 2.0}, lambda a, b, c: 0.5 * (a @ b) + 2 * c),
    ("Gemm", 6, [A, B, f32(4, 5)], {}, lambda a, b, c: a @ b + c),
    ("BatchNormalization", 6, [X, *[CHANNEL] * 3, CHANNEL**2], {"is_test": 1},
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


@pytest.mark.parametrize("opset", [None, 1, 5])
def test_older_files_are_refused_and_the_error_says_how_to_convert_them(tmp_path, opset):
    """Before IR version 3 a file had no opset: it is of opset 1."""
    proto = model_of("Relu", opset or 1, [X], {})
    if opset is None:
        proto.ir_version = 2
        del proto.opset_import[:]
    with pytest.raises(ModelError, match=f"opset {opset or 1} is not supported") as e:
        compiled(tmp_path, proto, 2)
    assert "convert_version(model, 7)" in e.value.hint and e.value.where.startswith("node 'node'")


def test_a_node_that_has_not_changed_is_read_in_the_oldest_file(tmp_path):
    found = compiled(tmp_path, model_of("Not", 1, [X > 0], {}), 2).run({"w0": X > 0})["y"]
    np.testing.assert_array_equal(found, X <= 0)


def test_weights_may_be_inputs(tmp_path):
    """Before IR version 4 every initializer was an input as well."""
    proto = model_of("Add", 6, [X, CHANNEL], {"broadcast": 1, "axis": 1})
    proto.graph.input.append(helper.make_tensor_value_info("w1", T.FLOAT, [3]))
    proto.ir_version = 3
    np.testing.assert_array_equal(compiled(tmp_path, proto, 2).run({"w0": X})["y"], X + middle(CHANNEL))


def test_an_early_file_is_verified_and_checked(tmp_path):
    nodes = [
        N("Conv", ["x", "k"], ["c"], "conv", pads=[1, 1, 1, 1]), N("Add", ["c", "b"], ["a"], "bias", broadcast=1, axis=1),
        N("BatchNormalization", ["a", "b", "b", "b", "v"], ["n"], "norm", is_test=1),
        N("Dropout", ["n"], ["d", "mask"], "drop", is_test=1),
        N("Reshape", ["d", "shape"], ["flat"], "flatten"), N("Gemm", ["flat", "g", "z"], ["y"], "fc", broadcast=1),
    ]  # fmt: skip
    weights = {"k": f32(4, 3, 3, 3), "b": f32(4), "v": f32(4) ** 2, "g": f32(80, 6), "z": f32(6), "shape": np.array([0, -1])}
    proto = net(nodes, {"x": (T.FLOAT, (3, 3, 4, 5))}, {"y": T.FLOAT}, weights, opset=6)
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
    ],
)  # fmt: skip
def test_forms_that_nothing_says_are_refused(tmp_path, op, opset, ins, attributes, why):
    with pytest.raises(ModelError) as e:
        compiled(tmp_path, model_of(op, opset, ins, attributes), 1)
    assert e.value.why == why and e.value.where.startswith("node 'node'")
