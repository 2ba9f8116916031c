"""Valid models of unusual length, width or rank: compiled in bounded time, or refused with a message."""

from __future__ import annotations

import itertools
import sys
import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import tapestry
from tapestry.errors import ModelError, TextError
from tapestry.ir.graph import Block, Opaque
from tapestry.ir.syntax.parser import parse
from tapestry.plan.lower import Shapes, lower
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.edit import MOST_ATOMS, too_long
from tapestry.verify.rewriting.cells import Cells
from tapestry.verify.rewriting.draws import Draw
from tests.support.command_line import run
from tests.support.small_models import N


def written(folder, nodes, shape=(2, 3), inits=()):
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [info("x", T.FLOAT, shape)], [info("y", T.FLOAT, None)], list(inits))
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


def same_as_the_reference(path, folder, devices=2):
    tapestry.compile(path, devices=devices, time_limit=2.0).save(folder / "b")
    status, _, err = run("run", folder / "b", "--check", "-q")
    assert status == 0, err
    return tapestry.load(folder / "b").build.plan.graph


@pytest.mark.slow
def test_a_chain_of_a_thousand_maps(tmp_path):
    """Fused whole it would be nested deeper than anything that follows expressions by recursion can go."""
    ends = ["x", *(f"t{k}" for k in range(1, 1200)), "y"]
    nodes = [N("Neg" if k % 2 else "Relu", [ends[k]], [ends[k + 1]]) for k in range(1200)]
    same_as_the_reference(written(tmp_path, nodes), tmp_path)


@pytest.mark.slow
def test_views_that_do_not_compose_into_one_short_projection(tmp_path):
    """Each step nests the projection of the one before; composed whole, the text doubles with every other step."""
    nodes, last = [], "x"
    for k in range(40):
        nodes += [N("Reshape", [last, "ab"[k % 2]], [f"r{k}"]), N("Transpose", [f"r{k}"], [f"t{k}"], perm=[2, 0, 1])]
        last = f"t{k}"
    shapes = [numpy_helper.from_array(np.array(s), n) for n, s in (("a", [3, 7, 10]), ("b", [5, 6, 7]))]
    graph = same_as_the_reference(written(tmp_path, [*nodes, N("Relu", [last], ["y"])], (210,), shapes), tmp_path)
    reads = [r for op in graph.ops if isinstance(op, Block) for r in op.reads]
    assert len(graph.ops) < 40 and MOST_ATOMS > 30 and not any(too_long(r) for r in reads)


@pytest.mark.slow
def test_a_sum_of_many_inputs(tmp_path):
    same_as_the_reference(written(tmp_path, [N("Sum", ["x"] * 1500, ["y"])]), tmp_path)


@pytest.mark.parametrize("rank", [33, 80, 1500])
def test_a_tensor_of_too_many_dimensions_is_refused(tmp_path, rank):
    with pytest.raises(ModelError, match="too many dimensions"):
        tapestry.compile(written(tmp_path, [N("Relu", ["x"], ["y"])], [1] * rank), devices=2)


def loop(folder, count):
    """x multiplied by the same number, again and again."""
    info = helper.make_tensor_value_info
    ins = [info("i", T.INT64, []), info("go", T.BOOL, []), info("v", T.FLOAT, [2, 3])]
    outs = [info("on", T.BOOL, []), info("u", T.FLOAT, [2, 3])]
    body = helper.make_graph([N("Mul", ["v", "a"], ["u"]), N("Identity", ["go"], ["on"])], "b", ins, outs)
    inits = [
        numpy_helper.from_array(v, n) for n, v in (("n", np.int64(count)), ("t", np.array(True)), ("a", np.float32(0.9999)))
    ]
    return written(folder, [N("Loop", ["n", "t", "x"], ["y"], body=body)], inits=inits)


def test_a_long_loop_of_a_constant_factor_takes_linear_work(tmp_path):
    """The factor's state varies along the steps alone; computed pair by pair, 30,000 steps took gigabytes."""
    plan = tapestry.compile(loop(tmp_path, 30_000), devices=2, time_limit=1.0)
    feeds = plan.random_feeds()
    began = time.process_time()
    (y,) = plan.run(feeds).values()
    assert time.process_time() - began < 10  # hundredths of a second; more than a minute pair by pair
    assert np.allclose(y, feeds["x"] * np.float32(0.9999) ** np.float64(30_000), rtol=1e-2)


def test_a_loop_of_more_steps_than_memory_has_stays_a_loop(tmp_path):
    graph = tapestry.compile(loop(tmp_path, 10**18), devices=2, time_limit=1.0).build.plan.graph
    assert [op.kind for op in graph.ops if isinstance(op, Opaque)] == ["Loop"]


def test_rewrites_of_a_long_chain_are_compared_without_recursion():
    """Cells far from the inputs: operations inside each other, more than Python's stack holds."""
    ends = [f"t{k}" for k in range(400)]
    pairs = itertools.pairwise(ends)
    ops = [f"{b}: f32[4] = op [i: 4]\n  reads {a}[i]\n  body abs({a})" for a, b in pairs]
    graph = parse("graph g\ninput t0: f32[4]\n" + "\n".join(ops) + f"\noutput {ends[-1]}\n")
    cells = Cells(graph, {"t0": 0}, Draw("range"), True, 1 << 20, [])
    x = Cells(graph, {"t0": 0}, Draw("range"), True, 1 << 20, []).cells("t0", np.arange(4))
    assert np.array_equal(cells.cells(ends[-1], np.arange(4)), abs(x))


def test_a_reduction_to_rank_0_beside_one_to_rank_1(tmp_path):
    axes = numpy_helper.from_array(np.array([0, 1]), "axes")
    nodes = [N("ReduceMax", ["x", "axes"], ["a"], keepdims=1), N("ReduceMin", ["x", "axes"], ["y"], keepdims=0)]
    path = written(tmp_path, nodes, inits=[axes])
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_value_info("a", T.FLOAT, [1, 1]))
    onnx.save(model, path)
    same_as_the_reference(path, tmp_path)


def test_kernels_of_a_build_with_an_opaque_node_name_its_library(tmp_path):
    k = numpy_helper.from_array(np.array([2]), "k")
    path = written(tmp_path, [N("TopK", ["x", "k"], ["v", "i"]), N("Relu", ["v"], ["y"])], inits=[k])
    tapestry.compile(path, devices=2).save(tmp_path / "b")
    for command, said in (("explain", "onnxruntime, the node as the model has it"), ("verify", "onnxruntime runs the node")):
        status, out, err = run(command, tmp_path / "b", "--kernels")
        assert status == 0, err
        assert said in out


def test_a_split_into_many_parts_is_lowered_in_linear_work(tmp_path, monkeypatch):
    """Each part reads a box of its own of one tensor; buffers are found by what they hold, and not one after the other."""
    n, looked = 40, list[int]()
    parts = [f"p{k}" for k in range(n)]
    nodes = [N("Split", ["x"], parts, axis=0, num_outputs=n), *(N("Neg", [p], [f"y{p}"]) for p in parts)]
    model = onnx.load(written(tmp_path, [*nodes, N("Relu", [parts[0]], ["y"])], (n, 2)))
    model.graph.output.extend(helper.make_tensor_value_info(f"y{p}", T.FLOAT, [1, 2]) for p in parts)
    plan = tapestry.compile(model, devices=2, topology="cpu", time_limit=1.0).build.plan
    assert len(plan.graph.outputs) == n + 1
    tightest = Shapes.tightest
    monkeypatch.setattr(Shapes, "tightest", lambda s, held, wanted: looked.append(len(held)) or tightest(s, held, wanted))
    lower(plan)
    assert sum(looked) <= 2 * n  # of n boxes each was held to all those before it: n²/2


def calls(of, *files):
    """Calls of Python functions, steps of generators among them, that are written in files whose paths end so."""
    found = 0

    def seen(frame, event, _arg):
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.endswith(files)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        of()
    finally:
        sys.setprofile(before)
    return found


def wide(n):
    """A maximum of n maps."""

    def body(names):
        half = len(names) // 2
        return f"max({body(names[:half])}, {body(names[half:])})" if half else names[0]

    names = [f"a{k}" for k in range(n)]
    inputs = "".join(f"input x{a}: f32[4]\n" for a in names)
    maps = "".join(f"{a}: f32[4] = op [i: 4]\n  reads x{a}[i]\n  body exp(x{a})\n" for a in names)
    reads = ", ".join(f"{a}[i]" for a in names)
    return f"graph g\n{inputs}{maps}y: f32[4] = op [i: 4]\n  reads {reads}\n  body {body(names)}\noutput y\n"


def test_what_a_wide_operation_reads_is_matched_without_a_call_for_each_read():
    graph, n = parse(wide(60)), 60
    found = calls(lambda: simplify(graph), "rewrites/equations/match.py")
    assert found < 6 * n * n  # for each of n merges a few for each of n makers; 10 with one more for each read


def test_text_that_is_nested_too_deeply_is_refused_at_its_line():
    for n in (400, 2000, 20_000):
        text = wide(1).replace("body a0", "body " + "max(" * n + "a0" + ", a0)" * n)
        with pytest.raises(TextError, match=r"line 8: an expression is nested too deeply\n  try: write its inner part"):
            parse(text)


def test_an_error_in_a_long_line_shows_what_is_around_it():
    with pytest.raises(TextError) as e:
        parse(wide(1).replace("body a0", f"body {'max(a0, ' * 50}nothing{')' * 3000}"))
    shown, caret = str(e.value).splitlines()[-2:]
    assert len(shown) < 250 and shown[caret.index("^") :].startswith("nothing")


def test_help_has_single_percent_signs():
    status, out, _ = run("compile", "--help")
    assert status == 0 and "default: 8% for" in out and "%%" not in out
