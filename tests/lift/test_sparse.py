"""Sparse tensors of a file: dense ones everywhere else, or refused."""

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import tapestry
from tapestry.cli import main
from tapestry.errors import ModelError
from tapestry.onnx_eval.ort_session import ort_session
from tests.support.small_models import N, net

VALUES = np.array([1.5, -2.0, 3.0], np.float32)
FLAT, PAIRS = np.array([1, 5, 6], np.int64), np.array([[0, 1], [1, 1], [1, 2]], np.int64)
DENSE = np.zeros((3, 4), np.float32)
DENSE[tuple(PAIRS.T)] = VALUES


def sparse(places, dims=(3, 4), values=VALUES):
    return helper.make_sparse_tensor(numpy_helper.from_array(values, "w"), numpy_helper.from_array(places, "i"), list(dims))


def model(tmp_path, given, *, constant):
    nodes = [N("Constant", [], ["w"], sparse_value=given)] if constant else []
    proto = net([*nodes, N("MatMul", ["x", "w"], ["y"], "product")], {"x": (T.FLOAT, (5, 3))}, {"y": T.FLOAT})
    if not constant:
        proto.graph.sparse_initializer.append(given)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("places", [FLAT, PAIRS], ids=["flat", "pairs"])
def test_a_sparse_weight_is_a_dense_one(tmp_path, places, constant):
    path, build = model(tmp_path, sparse(places), constant=constant), tmp_path / "build"
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    compiled = tapestry.compile(path, devices=2)
    np.testing.assert_allclose(compiled.run({"x": x})["y"], x @ DENSE, rtol=1e-6)
    np.testing.assert_allclose(ort_session(str(path)).run(None, {"x": x})[0], x @ DENSE, rtol=1e-6)
    compiled.save(build)
    assert [main(["verify", str(build)]), main(["run", str(build), "--check"])] == [0, 0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (sparse(np.array([1, 5, 12], np.int64)), "values [3] and indices [3] are not those of [3, 4]"),
        (sparse(np.array([1, 5, -1], np.int64)), "values [3] and indices [3] are not those of [3, 4]"),
        (sparse(np.array([[0, 1], [1, 1], [3, 0]], np.int64)), "values [3] and indices [3, 2] are not those of [3, 4]"),
        (sparse(FLAT[:2]), "values [3] and indices [2] are not those of [3, 4]"),
        (sparse(FLAT, (0, 1 << 62)), "values [3] and indices [3] are not those of [0, 4611686018427387904]"),
        (sparse(FLAT, (1 << 15, 1 << 15)), "bytes once dense"),
        (sparse(FLAT, (-3, -4)), "its sizes are [-3, -4]"),
        (sparse(FLAT.astype(np.int32)), "its indices are not of 64 bits"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("constant", [False, True])
def test_one_that_contradicts_itself_is_refused(tmp_path, given, why, constant):
    with pytest.raises(ModelError) as e:
        tapestry.compile(model(tmp_path, given, constant=constant))
    assert e.value.where == "tensor 'w'" and why in e.value.why
