"""What becomes of evaluators that refuse, and of those that take their process with them."""

from __future__ import annotations

import os
import signal
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper

import tapestry
from tapestry.errors import ModelError
from tapestry.ir.graph import Opaque
from tapestry.onnx_eval import opaque_node, ort_session, reference_evaluator
from tapestry.onnx_eval.opaque_node import Asked
from tests.support.small_models import N, net

F, I = T.FLOAT, T.INT64  # noqa: E741
END = {"zero": np.array(0), "one": np.array(1), "last": np.array([1])}
PLACES = [N("Shape", ["x"], ["s"]), N("Squeeze", ["s"], ["n"]), N("Range", ["zero", "n", "one"], ["r"])]


def saved(path, nodes, ins, outs, constants=(), opset=18):
    path.write_bytes(net(nodes, ins, outs, dict(constants), opset).SerializeToString())
    return path


def node(op, ins, outs, opset=18, **attributes):
    made = N(op, ins, outs, **attributes)
    return Opaque(
        outs=tuple(outs), ins=tuple(ins), kind=op, node=made.SerializeToString(), opsets=(("", opset),), source=("n",)
    )


@pytest.mark.parametrize("op", ["Gather", "GatherND"])
def test_sizes_that_onnxruntime_refuses_are_an_error(op, tmp_path):
    """Places that follow from sizes, beyond the end at these: the plan finds zeros there."""
    nodes = [*PLACES, N("Mul", ["r", "r"], ["q"]), N("Unsqueeze", ["q", "last"], ["u"]),
             N(op, ["t", "u" if op == "GatherND" else "q"], ["y"], name="pick")]  # fmt: skip
    path = saved(tmp_path / "m.onnx", nodes, {"x": (F, ("n",)), "t": (F, (101,))}, {"y": F}, END)
    assert tapestry.compile(path, topology="cpu", shapes={"n": 11}).evidence[0]["kind"] == "sampled cells"
    with pytest.raises(ModelError, match=r"onnxruntime refuses the model at these sizes") as e:
        tapestry.compile(path, topology="cpu", shapes={"n": 14})
    assert "pick" in e.value.where and "ind" in e.value.why and "--shape" in e.value.hint


def test_values_that_evaluators_refuse_are_none(tmp_path):
    """A computed place that random inputs lead beyond the end: a right model all the same, of other inputs."""
    nodes = [N("Mul", ["i", "ten"], ["j"]), N("Add", ["j", "ten"], ["k"]), N("Gather", ["t", "k"], ["y"], name="pick")]
    path = saved(tmp_path / "m.onnx", nodes, {"i": (I, (3,)), "t": (F, (8,))}, {"y": F}, {"ten": np.array(10)})
    row = tapestry.compile(path, topology="cpu").evidence[0]
    assert row["kind"] == "none" and "Gather" in row["why"] and "out of data bounds" in row["why"]


def test_what_one_evaluator_refuses_and_another_runs_is_noted():
    """onnxruntime takes no negative place in a cache, the reference counts from its end."""
    op, asked = node("TensorScatter", ["p", "u", "i"], ["y"], 24), Asked()
    past, update = np.zeros((1, 4, 2), np.float32), np.ones((1, 1, 2), np.float32)
    (found,) = opaque_node.run(op, [past, update, np.array([-2])], [("f32", past.shape)], by=asked)
    assert asked.libraries == ["onnx.reference"] and "is negative" in asked.refused[0] and found[0, 2, 0] == 1


def test_no_session_is_no_refusal():
    """onnxruntime has no such operator for these numbers: that says nothing of the model."""
    asked = Asked()
    (found,) = opaque_node.run(node("Det", ["x"], ["y"], 22), [np.eye(3)], [("f64", ())], by=asked)
    assert found == 1 and asked.libraries == ["onnx.reference"] and not asked.refused


@pytest.mark.sampled(1)
@pytest.mark.parametrize("alone", [True, False])
def test_a_node_that_ends_onnxruntime_does_not_end_us(alone):
    """It divides the least whole number by -1, and extents of nothing in an Einsum."""
    least, asked = [np.array([-(2**63), 8]), np.array([-1, 2])], Asked() if alone else None
    (found,) = opaque_node.run(node("Div", ["a", "b"], ["y"]), least, [("i64", (2,))], by=asked)
    assert found[1] == 4
    nothing, empty = np.zeros((0, 0), np.float32), node("Einsum", ["a", "b"], ["y"], equation="ij,kj->ik")
    (found,) = opaque_node.run(empty, [nothing, nothing], [("f32", (0, 0))], by=asked)
    assert found.shape == (0, 0)
    with pytest.raises(ort_session.OrtError, match=r"ended its process \(SIGFPE\)"):
        ort_session.apart(net([N("Div", ["a", "b"], ["y"])], {"a": (I, (2,)), "b": (I, (2,))}, {"y": I}).SerializeToString(),
                          dict(zip("ab", least, strict=True)))  # fmt: skip
    good = node("Einsum", ["a", "b"], ["y"], equation="ij,jk->ik")
    assert (
        opaque_node.asked_of("onnxruntime", good, [np.eye(2), np.eye(2)], [("f64", (2, 2))])[0].tolist() == np.eye(2).tolist()
    )


def test_a_model_that_ends_onnxruntime_is_compared_and_checked(tmp_path):
    """An Einsum of nothing; and a branch that divides the least number by -1."""
    nodes = [N("Slice", ["a", "none", "none", "both"], ["c"]), N("Einsum", ["c", "c"], ["e"], equation="ij,kj->ik"),
             N("ReduceSum", ["e"], ["s"], keepdims=0), N("Add", ["a", "s"], ["y"])]  # fmt: skip
    constants = {"none": np.array([0, 0]), "both": np.array([0, 1])}
    path = saved(tmp_path / "m.onnx", nodes, {"a": (F, (3, 4))}, {"y": F}, constants)
    build = tapestry.compile(path, topology="cpu")
    assert build.evidence[0]["kind"] == "sampled cells" and build.check()["passed"]


def test_the_other_process_may_die_at_any_time():
    model = ort_session.Guarded(net([N("Add", ["a", "a"], ["y"])], {"a": (F, (2,))}, {"y": F}).SerializeToString())
    a = np.ones(2, np.float32)
    assert model.apart({"a": a})[0].tolist() == [2, 2]
    helper = ort_session._helper
    os.kill(helper[1].pid, signal.SIGKILL)
    helper[1].wait()
    assert model.apart({"a": a})[0].tolist() == [2, 2]  # by another one
    os.kill(ort_session._helper[1].pid, signal.SIGSTOP)  # it dies while it is asked
    dying = ort_session._helper[1].pid
    threading.Timer(0.3, os.kill, (dying, signal.SIGKILL)).start()
    with pytest.raises(ort_session.OrtError, match="ended its process"):
        model.apart({"a": a})
    assert model({"a": a})[0].tolist() == [2, 2]


def test_arrays_of_all_kinds_go_there_and_back():
    nodes = [N("Identity", ["a"], ["x"]), N("Identity", ["b"], ["y"]), N("SequenceConstruct", ["b", "b"], ["z"])]
    model = net(nodes, {"a": (T.STRING, ("n",)), "b": (F, ("n", "m"))}, {"x": T.STRING, "y": F}).SerializeToString()
    for b in (np.zeros((0, 3), np.float32), np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
              np.ones((700, 900), np.float32)[::2], np.float32([[np.nan]])):  # fmt: skip
        x, y = ort_session.apart(model, {"a": np.array(["p", "é"], object), "b": b}, ["x", "y"])
        assert x.tolist() == ["p", "é"] and y.dtype == b.dtype and np.array_equal(y, b, equal_nan=True)
        y += 1  # is ours to write to


def test_a_helper_that_is_there_costs_little():
    """A node of much work, there and here."""
    model = ort_session.Guarded(net([N("MatMul", ["a", "a"], ["y"])], {"a": (F, (768, 768))}, {"y": F}).SerializeToString())
    a = np.random.default_rng(0).standard_normal((768, 768)).astype(np.float32)
    model.apart({"a": a}), model({"a": a})

    def seconds(run):
        times = []
        for _ in range(9):
            begin = time.perf_counter()
            run({"a": a})
            times.append(time.perf_counter() - begin)
        return min(times)

    assert seconds(model.apart) < 3 * seconds(model) + 0.02  # 1.3 measured on a quiet machine


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_result_whose_type_no_input_says_has_its_operators(dtype):
    """LinearAttention's state has a type of its own, which a past state would say; computed wide, it is rounded as well. The
    statistics of LayerNormalization are float32 by the operator, and stay so."""
    short = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(short)

    def computed(arrays):
        return [a.astype(arrays[0].dtype) for a in (np.ones(3), np.ones(2))]

    assert [r.dtype for r in reference_evaluator.once("LinearAttention", 27, [x, x, x], computed)] == [short, short]

    def normalised(arrays):
        return [arrays[0], np.ones(3, np.float32), np.ones(3, np.float32)]

    found = reference_evaluator.once("LayerNormalization", 17, [x, x[0, 0]], normalised)
    assert [r.dtype for r in found] == [short, np.float32, np.float32]


def test_a_branch_that_is_not_taken_need_not_suit_these_sizes():
    """Its product is of other sizes, which onnxruntime would refuse if it were told those of the inputs."""
    outs = [[helper.make_tensor_value_info(n, F, None)] for n in ("p", "q")]
    taken = helper.make_graph([N("Add", ["x", "x"], ["p"])], "taken", [], outs[0])
    other = helper.make_graph([N("MatMul", ["x", "x"], ["q"])], "other", [], outs[1])
    made = N("If", ["c"], ["y"], then_branch=taken, else_branch=other)
    op = Opaque(outs=("y",), ins=("c", "x"), kind="If", node=made.SerializeToString(), opsets=(("", 18),), source=("n",))
    x, by = np.ones((2, 3), np.float32), Asked()
    for note in (by, None):
        (y,) = opaque_node.run(op, [np.array(True), x], [("f32", (2, 3))], names=("c", "x"), by=note)
        np.testing.assert_array_equal(y, x + x)
    assert by.libraries == ["onnxruntime"]
