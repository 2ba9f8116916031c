"""Every operation of a plan on infinities, NaN and huge numbers, where no input leads to any."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper

from tapestry.errors import LawError
from tapestry.ir.expr import Arg, Expr, call
from tapestry.ir.graph import Block, Graph
from tapestry.ir.monoid import number
from tapestry.lift import lift, read_weight
from tapestry.lift.file.structure import load
from tapestry.rewrites.core.driver import simplify
from tapestry.runtime.feeds import random_feeds
from tapestry.verify.model import model_laws
from tapestry.verify.model.awkward_numbers import Placing
from tapestry.verify.model.model_values import ModelFile
from tests.support.small_models import MODELS, N, net

RNG = np.random.default_rng(0)
DATA = {"table": RNG.standard_normal((9, 8)).astype(np.float32), "w": RNG.standard_normal((8, 8)).astype(np.float32)}
NODES = [
    N("Gather", ["table", "i"], ["a"]), N("MatMul", ["a", "w"], ["b"]), N("Relu", ["b"], ["c"]), N("MatMul", ["c", "w"], ["d"]),
    N("Clip", ["d", "low", "high"], ["e"]), N("Softmax", ["e"], ["f"]), N("Mul", ["f", "e"], ["y"]),
]  # fmt: skip
CHANGES = {
    "NaN made 0": lambda x: call("where", call("isnan", x), number(0, "f32"), x),
    "infinity made a large number": lambda x: call("where", call("isinf", x), number(3e38, "f32"), x),
    "cut off": lambda x: call("min", x, number(1e4, "f32")),
    "cut off far away": lambda x: call("min", x, number(1e32, "f32")),
}


def compared(place, nodes, inputs, data, change=lambda graph: graph):
    """The comparison of a model's simplified graph, changed, with its file."""
    path = place / "m.onnx"
    path.write_bytes(net(nodes, inputs, {"y": T.FLOAT}, data).SerializeToString())
    return compared_with(path, change(simplify(lift(path).graph))).counts


def compared_with(path, graph):
    constants = lift(path).constants

    def read(name):
        return read_weight(path, graph.weights[name], graph.tensors[name], constants=constants)

    return model_laws.check(graph, ModelFile(load(path), path.parent), random_feeds(graph, 0), read)


def result_changed(graph: Graph, name: str, change) -> Graph:
    """The graph with the result of an operation changed."""

    def changed(op):
        field = "then" if op.monoid else "body"
        new: tuple[Expr, ...] = tuple(change(e) for e in getattr(op, field))
        return replace(op, **{field: new})

    assert any(name in op.outs for op in graph.ops)
    return replace(graph, ops=tuple(changed(op) if name in op.outs else op for op in graph.ops))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("name", ["c", "e"])
def test_what_no_input_leads_to_is_asked_of_each_operation(name, kind, tmp_path):
    data = {**DATA, "low": np.float32(-np.inf), "high": np.float32(np.inf)}
    inputs = {"i": (T.INT64, [6])}
    assert compared(tmp_path, NODES, inputs, data)["on awkward operands"] == 4
    with pytest.raises(LawError, match=f"(?s)'{name}' is not the model's.*evaluations, where"):
        compared(tmp_path, NODES, inputs, data, lambda g: result_changed(g, name, CHANGES[kind]))


def test_a_result_that_is_never_infinite_may_say_anything_of_infinities(tmp_path):
    """Softmax(x) x is NaN or finite: what is said of an infinity there changes nothing."""
    data = {**DATA, "low": np.float32(-np.inf), "high": np.float32(np.inf)}
    change = CHANGES["infinity made a large number"]
    compared(tmp_path, NODES, {"i": (T.INT64, [6])}, data, lambda g: result_changed(g, "y", change))


def test_an_operation_like_another_one_has_a_counterpart_of_its_own(tmp_path):
    """Two layers, one of them clipped far away: without the clip they are the same operation, but not the same model."""
    nodes = [
        N("Gather", ["table", "i"], ["a"]), N("MatMul", ["a", "w"], ["b"]), N("Clip", ["b", "low"], ["c"]),
        N("MatMul", ["c", "w"], ["d"]), N("Clip", ["d", "low", "high"], ["y"]),
    ]  # fmt: skip
    data = {**DATA, "low": np.float32(0), "high": np.float32(1e30)}

    def unclipped(graph):
        first, last = (next(op for op in graph.ops if t in op.outs) for t in ("c", "y"))
        reads = tuple(replace(r, tensor="c" if r.tensor == "a" else r.tensor) for r in first.reads)
        return replace(graph, ops=tuple(replace(first, outs=last.outs, reads=reads) if op is last else op for op in graph.ops))

    compared(tmp_path, nodes, {"i": (T.INT64, [6])}, data)
    with pytest.raises(LawError, match="'y' is not the model's"):
        compared(tmp_path, nodes, {"i": (T.INT64, [6])}, data, unclipped)


def test_what_is_followed_back_twice_is_looked_at_once(tmp_path):
    """Forty operations that each read the last one twice: one node of the model, and 2^40 ways back."""
    nodes, data = [N("Mul", ["x", "c"], ["y"])], {"c": np.float32(2.0**40)}

    def doubled(graph):
        (op,) = graph.ops
        names = ["x", *(f"y.{k}" for k in range(39)), "y"]
        x = next(r for r in op.reads if r.tensor == "x")
        body = (call("add", Arg(0, "f32"), Arg(1, "f32")),)
        ops = tuple(
            replace(op, outs=(b,), reads=(replace(x, tensor=a),) * 2, body=body, monoid=None) for a, b in pairwise(names)
        )
        return replace(graph, ops=ops, tensors={**graph.tensors, **{t: replace(graph.tensors["y"], name=t) for t in names[1:]}})

    counts = compared(tmp_path, nodes, {"x": (T.FLOAT, [6, 4])}, data, doubled)
    assert counts["on awkward operands"] == 1 and counts["not on awkward operands (of no value)"] == 39


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_every_operation_is_compared_or_counted(name, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(MODELS[name]().SerializeToString())
    graph = lift(path).graph
    counts = compared_with(path, graph).counts
    blocks = sum(isinstance(op, Block) for op in graph.ops)
    assert sum(n for what, n in counts.items() if what.startswith(("on awkward operands", "not on awkward operands"))) == blocks


def test_a_nan_that_a_maximum_keeps_is_a_policy(tmp_path):
    """Both references drop a NaN in a window: the plan does not, and that is no fault."""
    nodes = [N("MaxPool", ["x"], ["y"], kernel_shape=[2, 2])]
    assert compared(tmp_path, nodes, {"x": (T.FLOAT, [1, 2, 6, 6])}, {})["cells by policy"]


def test_what_a_mask_hides_is_not_seen(tmp_path):
    """A key behind a mask: its weight is 0, and 0 times infinity is NaN only where it is read."""
    nodes = [
        N("Add", ["s", "mask"], ["t"]), N("Softmax", ["t"], ["p"]), N("MatMul", ["p", "v"], ["y"]),
    ]  # fmt: skip
    data = {"mask": np.where(np.tri(6, dtype=bool), 0, -np.inf).astype(np.float32)}
    counts = compared(tmp_path, nodes, {"s": (T.FLOAT, [6, 6]), "v": (T.FLOAT, [6, 4])}, data)
    assert counts["on awkward operands"]


NORM = [
    N("Mul", ["x", "x"], ["q"]), N("ReduceMean", ["q", "last"], ["m"]), N("Add", ["m", "eps"], ["v"]), N("Sqrt", ["v"], ["r"]),
    N("Div", ["x", "r"], ["n"]), N("Mul", ["n", "scale"], ["y"]),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["a root of small numbers", "a limit that the weights do not reach"])
def test_operands_and_weights_are_scaled_as_a_whole(what, tmp_path):
    """A mean hides one small number; a normalised row is never large, whatever single numbers are."""
    scale = RNG.uniform(0.5, 1.5, 8).astype(np.float32)
    data = {"last": np.array([-1]), "eps": np.float32(1e-6), "scale": scale}
    changes = {
        "a root of small numbers": ("r", lambda e: call("max", e, number(3e-2, "f32"))),
        "a limit that the weights do not reach": ("y", CHANGES["cut off"]),
    }
    name, change = changes[what]
    path = tmp_path / "m.onnx"
    path.write_bytes(net(NORM, {"x": (T.FLOAT, [6, 8])}, {"y": T.FLOAT}, data).SerializeToString())
    graph = lift(path).graph
    assert compared_with(path, graph).counts["cells on scaled operands"]
    with pytest.raises(LawError, match=f"(?s)'{name}' is not the model's.*(times|brought to) 2"):
        compared_with(path, result_changed(graph, name, change))


def _looped():
    """A Loop that reads what an Expand changes nothing of, so that the plan reads the Expand's operand."""
    kinds = [("k", T.INT64, []), ("c", T.BOOL, []), ("s", T.FLOAT, [2, 3])]
    info = [helper.make_tensor_value_info(*k) for k in kinds]
    outs = [helper.make_tensor_value_info(n, t, s) for n, t, s in (("d", T.BOOL, []), ("u", T.FLOAT, [2, 3]))]
    body = helper.make_graph([N("Identity", ["c"], ["d"]), N("Add", ["s", "t"], ["u"])], "body", info, outs)
    data = {"shape": np.array([2, 3]), "go": np.array(True)}
    nodes = [N("Neg", ["x"], ["t"]), N("Expand", ["t", "shape"], ["e"]), N("Loop", ["n", "go", "e"], ["y"], body=body)]
    return nodes, {"x": (T.FLOAT, [2, 3]), "n": (T.INT64, [])}, data


def _recurrent():
    rng = np.random.default_rng(3)
    data = {k: rng.standard_normal((1, 12, 3)).astype(np.float32) for k in "wr"} | {"b": np.ones((1, 24), np.float32)}
    acts = ["Relu", "Sigmoid", "Sigmoid"]
    node = N("LSTM", ["x", "w", "r", "b", "", "h"], ["y"], hidden_size=3, activations=acts)
    return [node], {"x": (T.FLOAT, [1, 2, 3]), "h": (T.FLOAT, [1, 2, 3])}, data


RIGHT = {
    "a loop's alias": _looped(),
    "a recurrence that saturates": _recurrent(),
    "a scalar": ([N("DynamicQuantizeLinear", ["x"], ["q", "y", "z"])], {"x": (T.FLOAT, [])}, {}),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_right_models_are_accepted(kind, tmp_path):
    nodes, inputs, data = RIGHT[kind]
    path = tmp_path / "m.onnx"
    path.write_bytes(net(nodes, inputs, {"y": T.FLOAT}, data).SerializeToString())
    compared_with(path, simplify(lift(path).graph))


def test_a_threshold_is_asked_beside_what_it_does_not_look_at(tmp_path):
    """A sum that leaves out a row decides as the whole sum does for most numbers."""
    nodes = [N("ReduceSum", ["x"], ["s"], keepdims=0), N("Less", ["s", "zero"], ["b"]), N("Where", ["b", "zero", "one"], ["y"])]
    data = {"zero": np.float32(0), "one": np.float32(1)}

    def short(graph):
        (op,) = (op for op in graph.ops if "x" in op.inputs)
        reads = tuple(replace(r, index=(r.index[0] + 1, r.index[1]), other=0.0) if r.tensor == "x" else r for r in op.reads)
        return replace(graph, ops=tuple(replace(op, reads=reads) if o is op else o for o in graph.ops))

    compared(tmp_path, nodes, {"x": (T.FLOAT, [4, 6])}, data)
    with pytest.raises(LawError, match="is not looked at"):
        compared(tmp_path, nodes, {"x": (T.FLOAT, [4, 6])}, data, short)


def test_a_deviation_is_nan_where_a_mean_is_infinite(tmp_path):
    nodes = [N("LayerNormalization", ["x", "one"], ["n", "m", "y"], axis=-1)]
    compared(tmp_path, nodes, {"x": (T.FLOAT, [4, 6])}, {"one": np.ones(6, np.float32)})


def test_what_all_cells_see_does_not_keep_out_what_one_cell_sees() -> None:
    """Beside a cell that looks at its own, no number may be put that all see; the next numbers that are left may."""
    count = 6
    own, wide = np.eye(count, dtype=bool), np.ones((count, count), bool)
    left = [
        (1, "nan"),
        *[(0, k) for k in ("nan", "inf", "-inf")],
        *[(1, k) for k in ("inf", "-inf", "largest", "denormal", "huge")],
    ]
    seen = [SimpleNamespace(tensor="all"), SimpleNamespace(tensor="own")]
    at = [{t: (t,) for t in range(count)}] * 2
    placing = SimpleNamespace(seen=seen, dtypes=["f32", "f32"], at=at, meets=[wide, own], left=left, count=count)
    cells, numbers = Placing.draw(placing, np.random.default_rng(0), count, both=0.0)
    assert len(cells) == count and {t for n in numbers for t, _ in n} == {"own"}
