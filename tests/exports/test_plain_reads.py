"""Reads that recognition sees through: halves of a convolution are Conv nodes, strides that divide are ConvTranspose."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch

from tapestry.ir.graph import Block, Dim, Guard, Read
from tapestry.ir.index import dim, evaluate, substitute
from tapestry.ir.syntax.parser import parse
from tapestry.tools.exports.fused_onnx import graph_nodes
from tapestry.tools.exports.nodes.blocks import opset_of
from tapestry.tools.exports.nodes.plain_reads import implied
from tapestry.tools.exports.onnx_files import model_of
from tapestry.verify import interp

HALVES = """graph halves
input x: f32[2, 4, 8, 8]
input w: f32[3, 4, 3, 3]
a: f32[2, 3, 4, 4] = op [b: 2, o: 3, h: 4, v: 4 | c: 4 sum, r: 1 sum, s: 3 sum]
  reads x[b, c, 2*h + 2*r, s + 2*v - 1] else 0.0, w[o, c, 2*r + 1, s]
  body x * w
y: f32[2, 3, 4, 4] = op [b: 2, o: 3, h: 4, v: 4 | c: 4 sum, r: 2 sum, s: 3 sum]
  reads x[b, c, 2*h + 2*r - 1, s + 2*v - 1]GUARD else 0.0, w[o, c, 2*r, s], a2 = a[b, o, h, v]
  body x * w
  then acc0 + a2
output y
"""


def run(graph, x: np.ndarray, w: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The operators that a graph is written with, and its result in onnxruntime."""
    nodes, values = graph_nodes(graph)
    ends = [values[t] for t in graph.inputs], [values[t] for t in graph.outputs]
    model = model_of(nodes, "m", *ends, [], opset_of(graph))
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, "w": w})
    return [n.op_type for n in model.graph.node], y


@pytest.mark.parametrize(("guard", "convs"), [("", 2), (" when h + r - 1 >= 0", 2), (" when h + r - 2 >= 0", 1)])
def test_halves_of_a_convolution_are_convolutions(guard, convs):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 4, 8, 8), np.float32), rng.standard_normal((3, 4, 3, 3), np.float32)
    kinds, y = run(parse(HALVES.replace("GUARD", guard), "halves.tap"), x, w)
    want = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w), stride=2, padding=1).numpy()
    assert kinds.count("Conv") == convs
    assert np.allclose(y, want, atol=1e-5) == (convs == 2)  # (the last guard cuts off more than the padding)


@pytest.mark.parametrize(
    ("guard", "holds"),
    [
        (dim("h"), True),  # 2h + 1 < 0 where h < 0
        (dim("h") - 1, False),  # h = 0 is inside
        (dim("h") * -1 + 3, True),  # h = 4 reads 9 of 8
        (dim("h") * -1 + 2, False),
        (dim("r"), False),
    ],
)
def test_a_guard_is_implied_where_its_failure_leaves_the_tensor(guard, holds):
    """Of the index 2h + 1 in a tensor of 8 cells, for h from -9 to 8 and r from -1 to 0."""
    place, at = dim("i") - 9, dim("j") - 1
    op = Block(outs=("y",), dims=(Dim("i", 18), Dim("j", 2)), body=())
    read, other = Read(tensor="x", index=(place * 2 + 1,), other=0.0), Read(tensor="x", index=(place * 2 + 1,))
    guard = substitute(guard, {"h": place, "r": at})
    assert implied(op, Guard(guard, "ge"), read, (8,)) == holds
    points = [{"i": i, "j": j} for i in range(18) for j in range(2) if 0 <= 2 * (i - 9) + 1 < 8]
    assert holds == all(evaluate(guard, p) >= 0 for p in points)
    assert not implied(op, Guard(guard, "eq"), read, (8,))
    assert not implied(op, Guard(guard, "ge"), other, (8,))


SPREAD = """graph spread
input x: f32[2, 4, 5, 6]
input w: f32[4, 3, 3, 2]
y: f32[2, 3, 10, 17] = op [b: 2, o: 3, h: 10, v: 17 | c: 4 sum, r: 3 sum, s: 2 sum]
  reads x[b, c, floor((h + 1)/2) - r, floor((v + 2 - s)/3)] when ((h + 1) mod 2) == 0 when ((v + 2 - s) mod 3) == 0MORE else 0.0, w[c, o, r, s]
  body x * w
output y
"""


@pytest.mark.parametrize(("more", "kind"), [("", "ConvTranspose"), (" when h - r - 2 >= 0", "Gather")])
def test_strides_that_divide_are_a_transposed_convolution(more, kind):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 4, 5, 6), np.float32), rng.standard_normal((4, 3, 3, 2), np.float32)
    kinds, y = run(parse(SPREAD.replace("MORE", more), "spread.tap"), x, w)
    want = torch.nn.functional.conv_transpose2d(torch.from_numpy(x), torch.from_numpy(w), stride=(2, 3), dilation=(2, 1))
    assert kind in kinds
    whole = np.zeros((2, 3, 13, 20), np.float32)
    whole[:, :, : want.shape[2], : want.shape[3]] = want.numpy()
    assert np.allclose(y, whole[:, :, 1:11, 2:19], atol=1e-5) == (not more)  # (the last guard cuts off more than the borders)


BEGINS_INSIDE = {
    "round a circle": ("4, 32", "x[floor((i)/2), ((j + 5) mod 12)]", 0),
    "a row that is not there comes first": ("2, 30", "x[floor((j + 11)/12) - 1, ((j + 11) mod 12)] else 0.5", 0),
    "from the middle of a row to that of another": ("4, 25", "x[floor((j + 7)/12), ((j + 7) mod 12)]", 0),
    "every second cell": ("4, 11", "x[floor((i)/2), ((2*j + 6) mod 12)]", 0),
    "along both axes, with a guard": ("4, 14", "x[floor((i + 1)/2), ((j + 3) mod 12)] when j - 2 >= 0 else -1.0", 0),
    "against the row": ("3, 9", "x[i, ((-j + 10) mod 12)]", 1),  # places in a table
}


@pytest.mark.parametrize("what", BEGINS_INSIDE)
def test_reads_that_begin_inside_a_row_are_pieces(what):
    """No table of places where a floor or mod begins anew at a few places; and the cells are the graph's."""
    shape, read, tables = BEGINS_INSIDE[what]
    m, n = shape.split(", ")
    text = f"graph g\ninput x: f32[3, 12]\ny: f32[{shape}] = op [i: {m}, j: {n}]\n  reads {read}\n  body x\noutput y\n"
    graph, x = parse(text, "g.tap"), np.random.default_rng(0).standard_normal((3, 12), np.float32)
    nodes, values = graph_nodes(graph)
    model = model_of(nodes, "m", [values["x"]], [values["y"]], [], opset_of(graph))
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    assert np.array_equal(y, interp.run(graph, {"x": x})["y"])
    assert sum(node.op_type == "Gather" for node in model.graph.node) == tables
