"""Loop, Scan and If that are known before the run: written out, against onnxruntime, and cut."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import tapestry
from tapestry.errors import ModelError
from tapestry.ir.graph import Block, Opaque
from tapestry.lift.normalize import unroll
from tapestry.onnx_eval.ort_session import ort_session
from tests.support.lifting import data, evaluate, lift_model

info, make = helper.make_tensor_value_info, helper.make_node
W = data(4, 4, seed=9) / 2


def model(nodes, ins, outs, inits=None, opset=18):
    stored = [numpy_helper.from_array(np.asarray(a), n) for n, a in (inits or {}).items()]
    graph = helper.make_graph(nodes, "g", ins, [info(o, t, None) for o, t in outs.items()], stored)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)])


def same(made, feeds, folder, *, native=True, devices=3):
    """Lifted, in the interpreter, on one device and on several, a model gives what onnxruntime gives."""
    names = [o.name for o in made.graph.output]
    want = ort_session(made.SerializeToString()).run(names, feeds)
    lifted = lift_model(made, folder)
    assert not native or all(isinstance(op, Block) for op in lifted.graph.ops)
    path = folder / "model.onnx"
    runs = [evaluate(lifted, feeds)] if native else []
    runs += [tapestry.compile(path, devices=n).run(feeds) for n in (1, devices)]
    for found in runs:
        for name, a in zip(names, want, strict=True):
            np.testing.assert_allclose(found[name], a, rtol=1e-5, atol=1e-6)
    return lifted.graph


def body(nodes, ins, outs, inits=()):
    return helper.make_graph(nodes, "body", ins, outs, inits)


def scan_body():
    """h := tanh(h W + x), seen: h and x * 2, with a weight of the graph around it and a constant of its own."""
    own = [numpy_helper.from_array(np.float32(2), "two")]
    nodes = [make("MatMul", ["h", "w"], ["p"]), make("Add", ["p", "x"], ["a"]), make("Tanh", ["a"], ["h2"])]
    nodes += [make("Mul", ["x", "two"], ["d"]), make("Identity", ["h2"], ["s"])]
    cells = [info(n, T.FLOAT, [3, 4]) for n in ("h", "x", "h2", "s", "d")]
    return body(nodes, cells[:2], cells[2:], own)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis, back, out_axis, out_back", [(0, 0, 0, 0), (1, 1, 2, 0), (-1, 0, -2, 1)])
def test_scans_along_any_axis_in_any_direction(tmp_path, axis, back, out_axis, out_back):
    x = np.moveaxis(data(5, 3, 4), 0, axis)
    one = make(
        "Scan", ["h0", "x"], ["h", "s", "d"], body=scan_body(), num_scan_inputs=1, scan_input_axes=[axis],
        scan_input_directions=[back], scan_output_axes=[out_axis, 0], scan_output_directions=[out_back, 0],
    )  # fmt: skip
    ins = [info("h0", T.FLOAT, [3, 4]), info("x", T.FLOAT, x.shape)]
    made = model([one], ins, dict.fromkeys(("h", "s", "d"), T.FLOAT), {"w": W})
    graph = same(made, {"h0": data(3, 4, seed=1), "x": x}, tmp_path)
    assert any(op.monoid == "sum" for op in graph.ops)  # a contraction that can be cut


def loop_body(condition="keep", extra=()):
    """x := x * step + x W; seen: x."""
    nodes = [make("Cast", ["i"], ["f"], to=T.FLOAT), make("Mul", ["x", "f"], ["m"]), make("MatMul", ["x", "w"], ["p"])]
    nodes += [make("Add", ["m", "p"], ["y"]), make("Identity", ["x"], ["seen"]), *extra]
    nodes += [make("Identity", ["keep"], ["on"])] if condition == "on" else []
    ins = [info("i", T.INT64, []), info("keep", T.BOOL, []), info("x", T.FLOAT, [2, 4])]
    return body(nodes, ins, [info(condition, T.BOOL, []), info("y", T.FLOAT, [2, 4]), info("seen", T.FLOAT, [2, 4])])


def loop(steps, **more):
    one = make("Loop", ["n", more.pop("start", ""), "x"], ["y", "all"], body=loop_body(**more))
    inits = {"w": W, "n": np.array(steps, np.int64)}
    return model([one], [info("x", T.FLOAT, [2, 4])], {"y": T.FLOAT, "all": T.FLOAT}, inits)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("opset", [11, 18])
def test_a_loop_of_known_length(tmp_path, opset):
    made = loop(4, condition="on")
    made.opset_import[0].version = opset
    same(made, {"x": data(2, 4)}, tmp_path)


def test_a_loop_whose_end_depends_on_the_data_stays_and_says_so(tmp_path):
    stop = [make("ReduceMax", ["y"], ["top"], keepdims=0), make("Less", ["top", "limit"], ["go"])]
    made = loop(4, condition="go", extra=stop)
    made.graph.initializer.append(numpy_helper.from_array(np.float32(3), "limit"))
    graph = same(made, {"x": data(2, 4)}, tmp_path, native=False)
    assert any(isinstance(op, Opaque) and op.kind == "Loop" and "data" in op.why for op in graph.ops)


@pytest.mark.parametrize("steps", [None, 2**63 - 1])
@pytest.mark.parametrize("condition", ["keep", "on"])
def test_a_loop_that_never_ends_is_refused(tmp_path, steps, condition):
    made = loop(steps or 1, condition=condition)
    if steps is None:
        made.graph.node[0].input[0] = ""
    onnx.save(made, tmp_path / "m.onnx")
    for devices in (1, 2):
        with pytest.raises(ModelError, match=r"\(Loop\): a loop that never ends\s+because: its condition is always true"):
            tapestry.compile(tmp_path / "m.onnx", devices=devices)


def test_a_loop_that_its_condition_ends_needs_no_number(tmp_path):
    stop = [make("ReduceMax", ["y"], ["top"], keepdims=0), make("Less", ["top", "limit"], ["go"])]
    made = loop(1, condition="go", extra=stop)
    made.graph.node[0].input[0] = ""
    made.graph.initializer.append(numpy_helper.from_array(np.float32(3), "limit"))
    same(made, {"x": np.abs(data(2, 4)) + 1}, tmp_path, native=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("inside", [False, True])
def test_a_loop_that_carries_nothing_and_has_no_condition(tmp_path, inside):
    """Its inputs end in absent ones, at the top and inside of a branch that depends on the data."""
    nodes = [make("Identity", ["on"], ["keep"]), make("Cast", ["t"], ["f"], to=T.FLOAT), make("Add", ["x", "f"], ["s"])]
    ins, outs = [info("t", T.INT64, []), info("on", T.BOOL, [])], [info("keep", T.BOOL, []), info("s", T.FLOAT, [2])]
    one = make("Loop", ["n", ""], ["y"], body=body(nodes, ins, outs))
    given, feeds = [info("x", T.FLOAT, [2])], {"x": data(2)}
    if inside:
        other = body([make("Identity", ["w"], ["z"])], [], [info("z", T.FLOAT, [3, 2])])
        one = make("If", ["c"], ["u"], then_branch=body([one], [], [info("y", T.FLOAT, [3, 2])]), else_branch=other)
        given, feeds = [*given, info("c", T.BOOL, [])], {**feeds, "c": np.array(True)}
    weights = {"n": np.array(3), "w": np.zeros((3, 2), np.float32)}
    same(model([one], given, {"u" if inside else "y": T.FLOAT}, weights), feeds, tmp_path, native=not inside)


def test_a_long_loop_stays(tmp_path):
    graph = same(loop(65), {"x": data(2, 4) * 1e-4}, tmp_path, native=False)
    assert any(isinstance(op, Opaque) and op.kind == "Loop" for op in graph.ops)


def test_loops_inside_loops_and_names_that_are_taken(tmp_path):
    """The inner loop reads the outer one's state, and the graph has a name that a copy's could be."""
    inner = body(
        [make("Add", ["z", "x"], ["z2"])], [info("j", T.INT64, []), info("c", T.BOOL, []), info("z", T.FLOAT, [2, 4])],
        [info("c", T.BOOL, []), info("z2", T.FLOAT, [2, 4])],
    )  # fmt: skip
    nodes = [make("Loop", ["two", "", "x"], ["y"], body=inner)]
    outer = body(
        nodes, [info("i", T.INT64, []), info("c0", T.BOOL, []), info("x", T.FLOAT, [2, 4])],
        [info("c0", T.BOOL, []), info("y", T.FLOAT, [2, 4])],
    )  # fmt: skip
    taken = make("Neg", ["x0"], ["y0~/0/y"])
    made = model(
        [taken, make("Loop", ["two", "", "y0~/0/y"], ["y0"], body=outer)],
        [info("x0", T.FLOAT, [2, 4])], {"y0": T.FLOAT, "y0~/0/y": T.FLOAT}, {"two": np.array(2, np.int64)},
    )  # fmt: skip
    same(made, {"x0": data(2, 4)}, tmp_path)


@pytest.mark.parametrize("known", [True, False])
def test_a_branch_is_taken_where_the_condition_is_known(tmp_path, known):
    def way(op):
        return body([make(op, ["x"], [f"{op}y"])], [], [info(f"{op}y", T.FLOAT, [2, 4])])

    one = make("If", ["c"], ["y"], then_branch=way("Neg"), else_branch=way("Abs"))
    ins = [info("x", T.FLOAT, [2, 4]), *([] if known else [info("c", T.BOOL, [])])]
    made = model([one], ins, {"y": T.FLOAT}, {"c": np.array(False)} if known else {})
    feeds = {"x": data(2, 4), **({} if known else {"c": np.array(True)})}
    graph = same(made, feeds, tmp_path, native=known)
    assert known or "data" in next(op.why for op in graph.ops if isinstance(op, Opaque))


def test_loops_inside_loops_do_not_multiply_without_end(tmp_path, monkeypatch):
    """9 x 9 x 9 x 9 steps would be 6,561 nodes."""
    monkeypatch.setattr(unroll, "GROWTH", 100)
    steps = info("i", T.INT64, []), info("c", T.BOOL, [])

    def level(k):
        nodes = [make("Neg", ["x"], ["y"])] if k == 0 else [make("Loop", ["n", "", "x"], ["y"], body=level(k - 1))]
        return body(nodes, [*steps, info("x", T.FLOAT, [2])], [steps[1], info("y", T.FLOAT, [2])])

    made = model(
        [make("Loop", ["n", "", "x"], ["y"], body=level(3))], [info("x", T.FLOAT, [2])], {"y": T.FLOAT}, {"n": np.array(60)}
    )
    assert len(lift_model(made, tmp_path).graph.ops) < 1 << 15
