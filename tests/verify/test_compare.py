"""What may be called the same as a reference: no NaN, an infinity only where there is the same one, kinds alike."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tapestry.verify.model.model_values import ModelFile
from tapestry.verify.model_outputs import compare_outputs, reference

finite = st.floats(-1e3, 1e3, width=32)
rows = st.lists(finite, min_size=1, max_size=4)
A = np.array([1.0, -2.0, 0.0], np.float32)


@given(rows, rows)
def test_the_error_is_the_norm_of_the_difference_over_the_references(a, b):
    n = min(len(a), len(b))
    out, ref = (np.array(v[:n], np.float64) for v in (a, b))
    found, size = compare_outputs(out, ref), math.sqrt(sum(x * x for x in b[:n]))
    gap = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=False)))
    assert found.max_abs_err == pytest.approx(max(abs(x - y) for x, y in zip(a, b, strict=False)))
    assert found.rel_err == (pytest.approx(gap / size) if size else 0.0 if gap == 0 else math.inf)
    assert found.passed if found.rel_err < 1e-14 else not (found.passed and found.rel_err > 1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(3))
def test_a_nan_never_passes_and_an_infinity_only_beside_itself(value, place):
    odd = A.copy()
    odd[place] = value
    assert not compare_outputs(odd, A).passed and not compare_outputs(A, odd).passed
    assert compare_outputs(odd, odd.copy()).passed == (not math.isnan(value))
    assert not compare_outputs(odd, -odd).passed
    moved = np.roll(odd, 1)
    assert not compare_outputs(odd, moved).passed


def test_kinds_of_values_that_differ_never_pass():
    ints, text = np.array([1, 2, 3]), np.array(["a", "b", "c"], object)
    same = [A, ints, text, None, [A, ints], {"a": A, "b": ints}, np.zeros((0, 2), np.float32), [None]]
    for i, one in enumerate(same):
        for j, other in enumerate(same):
            assert compare_outputs(one, other).passed == (i == j), (i, j)
    assert (
        not compare_outputs(A, A.astype(np.float64)).passed
        and not compare_outputs(A, A[:2]).passed
        and not compare_outputs(A, A.reshape(3, 1)).passed
    )
    assert not compare_outputs(ints, ints + np.array([0, 0, 1])).passed and not compare_outputs(text, text[::-1]).passed
    assert not compare_outputs([A], [A, A]).passed and not compare_outputs([A, A], [A]).passed
    assert not compare_outputs({"a": A}, {"b": A}).passed and not compare_outputs({"a": A}, {"a": A, "b": A}).passed
    assert not compare_outputs([A, A + 1], [A, A]).passed and not compare_outputs([A + 1, A], [A, A]).passed
    assert not compare_outputs({"a": A, "b": A}, {"a": A, "b": A + 1}).passed


def test_a_tolerance_widens_what_a_type_allows_and_never_narrows_it():
    near = A * np.float32(1 + 1e-2)
    assert (
        not compare_outputs(near, A).passed
        and compare_outputs(near, A, 2e-2).passed
        and not compare_outputs(near, A, 5e-3).passed
    )
    close = A * np.float32(1 + 1e-7)
    assert compare_outputs(close, A, 0.0).passed and compare_outputs(close, A, 1e-30).passed
    assert (
        compare_outputs(np.array([5]), np.array([5]), 1.0).passed
        and not compare_outputs(np.array([5]), np.array([6]), 1.0).passed
    )


def test_a_dilated_pool_of_doubles_is_compared_by_its_own_span():
    """onnxruntime has no such pool, and the ONNX reference forgets the dilation: its output was 1x1x3x2."""
    node = helper.make_node(
        "AveragePool", ["x"], ["y"], auto_pad="VALID", dilations=[1, 2], kernel_shape=[3, 2], strides=[1, 2]
    )
    ends = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, s) for n, s in (("x", [1, 1, 5, 4]), ("y", [1, 1, 3, 1]))]
    model = helper.make_model(
        helper.make_graph([node], "pool", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 20)]
    )
    x = np.arange(20.0).reshape(1, 1, 5, 4)
    by, found = reference(ModelFile(model, Path()), {"x": x})
    assert by == "onnx.reference"
    assert np.array_equal(found["y"][0, 0, :, 0], [x[0, 0, k : k + 3, [0, 2]].mean() for k in range(3)])
