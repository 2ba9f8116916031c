"""onnx's own test-suite, whole and under random splits: a sample here, all of it in the slow tests."""

from __future__ import annotations

import logging
import unittest
import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bench.correctness import conformance
from bench.support import onnx_suite
from bench.support.onnx_backend import TapestryBackend
from tapestry.errors import TapestryError

SAMPLE, SPLIT_SAMPLE = 74, 61  # every n-th case in the fast tests
SLOWER = ("densenet", "inception", "resnet", "vgg", "alexnet", "shufflenet", "zfnet")


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """onnx's generators of cases divide by zero on purpose."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def outcome(names) -> dict[str, tuple[str, str, str]]:
    cases = onnx_suite.tests(TapestryBackend)
    chosen = sorted(cases) if names is None else names(sorted(cases))
    return {n: (cases[n][0], *onnx_suite.attempt(cases[n][1])) for n in chosen}


@pytest.mark.timeout(300)
def test_a_sample_of_the_suite_is_as_the_table_says():
    found = outcome(lambda names: [n for n in names[::SAMPLE] if not any(s in n for s in SLOWER)])
    assert conformance.differences(found) == []
    assert sum(r[1] == "pass" for r in found.values()) > 22


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_suite_is_as_the_table_says():
    found = outcome(None)
    assert conformance.differences(found) == []
    assert len(found) == 2033
    assert sum(r[1] == "pass" for r in found.values()) >= 1985


def test_the_table_gives_a_reason_for_every_case():
    table = conformance.expected()
    assert all(len(reason) > 20 for reason in table.values())
    assert set(table) <= set(onnx_suite.tests(TapestryBackend))


def test_a_new_pass_and_a_new_failure_both_ask_for_the_table():
    some = next(iter(conformance.expected()))
    lines = conformance.differences(
        {some: ("Node", "pass", ""), "test_abs": ("Node", "fail", "wrong"), "test_add": ("Node", "pass", "")}
    )
    assert lines == ["new failure: test_abs: fail: wrong", f"new pass, edit conformance_table.json: {some}"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sample_under_random_splits_equals_its_unsplit_self():
    cases = [c for c in onnx_suite.node_cases() if c.name not in conformance.expected()][::SPLIT_SAMPLE]
    results = {c.name: onnx_suite.sharded(c) for c in cases}
    assert {n: r for n, (r, _) in results.items() if r[0] != "pass"} == {}
    assert sum(cut > 0 for _, cut in results.values()) > len(results) // 2


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_passing_node_case_under_random_splits_equals_its_unsplit_self():
    cases = [c for c in onnx_suite.node_cases() if c.name not in conformance.expected()]
    results = {c.name: onnx_suite.sharded(c, 2) for c in cases}
    assert {n: r for n, (r, _) in results.items() if r[0] != "pass"} == {}


def test_a_wrong_result_under_a_split_is_seen():
    case = next(c for c in onnx_suite.node_cases() if c.name == "test_softmax_axis_1")
    one = onnx_suite.Sharded(case.model, case.data_sets[0][0])
    assert one.split(2, 0) > 0
    one.alone = {n: a + 1e-3 for n, a in one.alone.items()}
    with pytest.raises(AssertionError, match="is off by"):
        one.split(2, 0)


def test_single_nodes_run_and_what_is_refused_is_a_skip():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    (y,) = TapestryBackend.run_node(helper.make_node("Relu", ["x"], ["y"]), [x - 3], devices=2)
    assert np.array_equal(y, np.maximum(x - 3, 0))
    assert TapestryBackend.supports_device("CPU") and not TapestryBackend.supports_device("CUDA")
    info = helper.make_tensor_value_info
    bad = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["y"])], "g", [info("a", TensorProto.FLOAT, [2]), info("b", TensorProto.FLOAT, [3])],
        [info("y", TensorProto.FLOAT, [2])],
    )  # fmt: skip
    with pytest.raises(unittest.SkipTest, match="contradict"):
        TapestryBackend.prepare(helper.make_model(bad, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]))


def test_symbolic_inputs_are_compiled_for_the_sizes_they_come_in():
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "g",
        [info("x", TensorProto.FLOAT, ["n", 2])],
        [info("y", TensorProto.FLOAT, ["n", 2])],
    )
    rep = TapestryBackend.prepare(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]))
    for n in (3, 0, 5):
        x = np.ones((n, 2), np.float32)
        assert np.array_equal(rep.run([x])[0], -x)
    assert isinstance(onnx.defs.onnx_opset_version(), int)


def test_values_that_nothing_would_read_are_refused():
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, [3]), info("w", TensorProto.FLOAT, [3])]
    w = onnx.numpy_helper.from_array(np.ones(3, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "g", inputs, [info("y", TensorProto.FLOAT, [3])], [w]
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    zero = np.zeros(3, np.float32)
    assert np.array_equal(TapestryBackend.run_model(model, [zero])[0], zero + 1)
    with pytest.raises(TapestryError, match="2 values for 1 inputs"):  # an override that the plan would not have seen
        TapestryBackend.run_model(model, [zero, zero])
    for values in ([zero], [zero, zero, zero]):
        with pytest.raises(TapestryError, match="values for 2 inputs"):
            TapestryBackend.run_node(helper.make_node("Add", ["a", "b"], ["y"]), values)


def test_single_nodes_on_sequences_and_without_optional_inputs():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    (y,) = TapestryBackend.run_node(helper.make_node("SequenceAt", ["s", "i"], ["y"]), [[x, x + 1], np.int64(1)])
    assert np.array_equal(y, x + 1)
    assert TapestryBackend.run_node(helper.make_node("SequenceLength", ["s"], ["y"]), [[]])[0] == 0
    clip, top = helper.make_node("Clip", ["x", "low", "high"], ["y"]), np.float32(2)
    assert np.array_equal(TapestryBackend.run_node(clip, [x, None, top])[0], np.minimum(x, 2))
    assert np.array_equal(TapestryBackend.run_node(clip, {"x": x, "high": top})[0], np.minimum(x, 2))
    twice = helper.make_node("Add", ["x", "x"], ["y"])
    assert np.array_equal(TapestryBackend.run_node(twice, [x])[0], TapestryBackend.run_node(twice, [x, x])[0])
    assert np.array_equal(TapestryBackend.run_node(helper.make_node("Neg", ["x"], ["y"]), x.astype(">f4"))[0], -x)
