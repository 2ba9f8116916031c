"""Simplification: the same results, the same laws, fewer operations."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto as T

from tapestry.ir import index, laws
from tapestry.ir.expr import walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.lift import lift, read_weight
from tapestry.rewrites import RULES
from tapestry.rewrites.core.driver import simplify
from tapestry.verify import interp
from tests.support.small_models import FOLDER, MODELS, N, assert_same, case, f32, i64, net, save

SIMPLIFY = [r for r in RULES.values() if r.kind == "simplify"]


def nodes_in(graph: Graph) -> int:
    return sum(1 for op in graph.ops if isinstance(op, Block) for e in (*op.body, *op.then) for _ in walk(e))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", MODELS)
def test_results_and_laws_stay(name):
    lifted = lift(save(name))
    before, after = lifted.graph, case(name).graph
    laws.check(before)
    laws.check(after)
    assert after.inputs == before.inputs and after.outputs == before.outputs
    assert len(after.ops) <= len(before.ops)
    assert {t: (x.dtype, x.shape) for t, x in after.tensors.items() if t in before.tensors} == {
        t: (x.dtype, x.shape) for t, x in before.tensors.items() if t in after.tensors
    }
    c = case(name)
    weights = {
        t: read_weight(lifted.model, w, before.tensors[t], constants=lifted.constants) for t, w in before.weights.items()
    }
    assert_same(c.expected, interp.run(before, {**c.feeds, **weights}, wide=True), before)
    assert nodes_in(after) <= 4 * nodes_in(before) + 400  # bodies are not copied without end


@pytest.mark.parametrize("name", MODELS)
def test_it_is_a_fixpoint_and_its_text_round_trips(name):
    graph = case(name).graph
    assert simplify(graph).ops == graph.ops
    assert to_text(parse(to_text(graph))) == to_text(graph)
    assert parse(to_text(graph)).ops == graph.ops


@pytest.mark.parametrize("name", ["conv_chain", "attention", "views", "unary", "reductions", "norms"])
@pytest.mark.parametrize("rule", SIMPLIFY, ids=lambda r: r.name)
def test_one_rule_alone_keeps_results_and_laws(name, rule):
    c = case(name, False)
    graph = rule.sweep(c.graph) if hasattr(rule, "sweep") else c.graph
    laws.check(graph)
    feeds = {**c.feeds, **{t: c.weights[t] for t in graph.weights}}
    assert_same(interp.run(graph, feeds, wide=True), c.expected, c.graph)


COUNTS = {"residual": 1, "mlp": 4, "conv_chain": 5, "attention": 8, "conv_groups": 2}


@pytest.mark.parametrize("name", COUNTS)
def test_how_many_operations_are_left(name):
    assert len(case(name).graph.ops) <= COUNTS[name], to_text(case(name).graph)


def test_conv_bn_relu_add_is_one_operation():
    graph = case("residual").graph
    (op,) = graph.ops
    assert isinstance(op, Block) and op.monoid == "sum"
    assert set(op.source) >= {"conv", "bn", "relu", "add"}


def graph_of(nodes, ins, outs, weights=None) -> Graph:
    path = FOLDER / "one.onnx"
    path.write_bytes(net(nodes, ins, outs, weights).SerializeToString())
    return simplify(lift(path).graph)


def test_views_leave_nothing_behind():
    """Reshape, transpose, slice and their like compose into the reader, whatever their number."""
    nodes = [
        N("Reshape", ["x", "s1"], ["a"], "r1"), N("Transpose", ["a"], ["b"], "t1", perm=[2, 0, 1]), N("Unsqueeze", ["b", "ax"], ["c"], "u"),
        N("Squeeze", ["c", "ax"], ["d"], "s"), N("Transpose", ["d"], ["e"], "t2", perm=[1, 2, 0]), N("Reshape", ["e", "s2"], ["f"], "r2"), N("Exp", ["f"], ["y"], "exp"),
    ]  # fmt: skip
    graph = graph_of(nodes, {"x": (T.FLOAT, [6, 4])}, {"y": T.FLOAT}, {"s1": i64(2, 3, 4), "ax": i64(0), "s2": i64(6, 4)})
    (op,) = graph.ops
    assert isinstance(op, Block)
    (read,) = op.reads
    assert all(e.is_dim for e in read.index)  # the transposes and reshapes cancelled


def test_floor_and_mod_join_again():
    rng = np.random.default_rng(0)
    for _ in range(300):
        e = index.const(int(rng.integers(-9, 9)))
        for name in ("i", "j"):
            e = e + index.dim(name) * int(rng.integers(-4, 9))
        k, b, c = (int(n) for n in rng.integers(2, 7, 3))
        assert (index.modulo(e, k) * c + index.floordiv(e, k) * (c * k)) == e * c
        inner = index.floordiv(e, k)
        joined = index.modulo(inner, b) + index.floordiv(inner, b) * b
        for i, j in rng.integers(0, 50, (4, 2)):
            env = {"i": int(i), "j": int(j)}
            assert index.evaluate(joined, env) == index.evaluate(inner, env)


def test_an_inverse_pair_of_views_that_is_the_output_is_one_copy():
    nodes = [N("Transpose", ["x"], ["a"], "t1", perm=[1, 0]), N("Transpose", ["a"], ["y"], "t2", perm=[1, 0])]
    graph = graph_of(nodes, {"x": (T.FLOAT, [6, 4])}, {"y": T.FLOAT})
    assert len(graph.ops) == 1


def test_equal_operations_are_done_once():
    nodes = [
        N("Exp", ["x"], ["a"], "one"),
        N("Exp", ["x"], ["b"], "two"),
        N("ReduceSum", ["a", "ax"], ["s"], "sum"),
        N("ReduceMax", ["b", "ax"], ["m"], "max"),
    ]
    graph = graph_of(nodes, {"x": (T.FLOAT, [6, 4])}, {"s": T.FLOAT, "m": T.FLOAT}, {"ax": i64(1)})
    assert len(graph.ops) <= 3


def test_what_nobody_needs_goes():
    nodes = [N("Exp", ["x"], ["y"], "used"), N("MatMul", ["x", "w"], ["z"], "unused")]
    graph = graph_of(nodes, {"x": (T.FLOAT, [6, 4])}, {"y": T.FLOAT}, {"w": f32(4, 4)})
    assert len(graph.ops) == 1 and "w" not in graph.weights and "w" not in graph.tensors


def test_dropout_and_identity_at_inference_cost_nothing():
    nodes = [
        N("Identity", ["x"], ["a"], "id"),
        N("Dropout", ["a"], ["b"], "drop"),
        N("Cast", ["b"], ["c"], "cast", to=T.FLOAT),
        N("Relu", ["c"], ["y"], "relu"),
    ]
    assert len(graph_of(nodes, {"x": (T.FLOAT, [6, 4])}, {"y": T.FLOAT}).ops) == 1


def test_a_body_used_many_times_is_not_copied_each_time():
    """x -> x*x + x, twenty times: fused without sharing, the last body would have 2**20 nodes."""
    nodes, last = [], "x"
    for k in range(20):
        nodes += [N("Mul", [last, last], [f"m{k}"], f"mul{k}"), N("Add", [f"m{k}", last], [f"a{k}"], f"add{k}")]
        last = f"a{k}"
    nodes.append(N("Identity", [last], ["y"], "end"))
    graph = graph_of(nodes, {"x": (T.FLOAT, [6])}, {"y": T.FLOAT})
    assert nodes_in(graph) < 4000
    feeds = {"x": np.full(6, -0.5, np.float32)}
    expected = np.float64(-0.5)
    for _ in range(20):
        expected = expected * expected + expected
    np.testing.assert_allclose(interp.run(graph, feeds, wide=True)["y"], expected, rtol=1e-12)


def test_no_arithmetic_is_invented():
    """x - x, 0 * x and x / x are not simplified: they differ for an infinity and a NaN."""
    nodes = [N("Sub", ["x", "x"], ["a"], "sub"), N("Mul", ["x", "zero"], ["b"], "mul"), N("Div", ["x", "x"], ["c"], "div")]
    graph = graph_of(nodes, {"x": (T.FLOAT, [4])}, dict.fromkeys("abc", T.FLOAT), {"zero": np.float32(0)})
    out = interp.run(
        graph,
        {"x": np.array([np.inf, np.nan, 2, 0], np.float32), **({"zero": np.float32(0)} if "zero" in graph.tensors else {})},
    )
    for t, finite in (("a", [2, 3]), ("b", [2, 3]), ("c", [2])):
        assert [k for k in range(4) if not np.isnan(out[t][k])] == finite, t


def test_a_value_that_is_an_output_as_well_stays():
    nodes = [N("Exp", ["x"], ["a"], "exp"), N("Relu", ["a"], ["y"], "relu")]
    graph = graph_of(nodes, {"x": (T.FLOAT, [4])}, {"a": T.FLOAT, "y": T.FLOAT})
    assert set(graph.outputs) == {"a", "y"} and {t for op in graph.ops for t in op.outs} >= {"a", "y"}
