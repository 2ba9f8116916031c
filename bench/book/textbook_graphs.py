"""More small graphs as textbooks write them, for the corpus that `bench discover` ranks by.

They were written after the first equations had been found, for models in which sums, maxima and gathers meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from bench.book.rule_graphs import Net


def viterbi() -> onnx.ModelProto:
    """The best path's score after a step of a hidden Markov model with 128 states, over all last states."""
    n = Net("viterbi")
    score, step = n.input("score", 64, 128, 1), n.input("step", 1, 128, 128)
    best = n.op("ReduceMax", n.op("Add", score, step), n.ints(1), keepdims=0)
    return n.model(n.op("ReduceMax", best, n.ints(1), keepdims=0))


def shortest_paths() -> onnx.ModelProto:
    """The least distance to any of the last nodes, by a min-plus product."""
    n = Net("shortest_paths")
    far, edge = n.input("far", 64, 128, 1), n.input("edge", 1, 128, 128)
    near = n.op("ReduceMin", n.op("Add", far, edge), n.ints(1), keepdims=0)
    return n.model(n.op("ReduceMin", near, n.ints(1), keepdims=0))


def margin() -> onnx.ModelProto:
    """The margin of a multiclass SVM: the least distance of the right class's score from the others'."""
    n = Net("margin")
    right, scores = n.input("right", 512, 1), n.input("scores", 512, 1024)
    return n.model(n.op("ReduceMin", n.op("Sub", right, scores), n.ints(1), keepdims=0))


def slack() -> onnx.ModelProto:
    """By how much a limit of each row is missed at most."""
    n = Net("slack")
    limit, x = n.input("limit", 512, 1), n.input("x", 512, 1024)
    return n.model(n.op("ReduceMax", n.op("Sub", limit, x), n.ints(1), keepdims=0))


def reach() -> onnx.ModelProto:
    """The furthest of a set of points from each level, on a line."""
    n = Net("reach")
    level, points = n.input("level", 512, 1), n.input("points", 1, 2048)
    return n.model(n.op("ReduceMax", n.op("Sub", level, points), n.ints(1), keepdims=0))


def energies() -> onnx.ModelProto:
    """The energy of every row at each of some temperatures: Σ t·x²."""
    n = Net("energies")
    x, t = n.input("x", 256, 1, 256), n.input("t", 1, 64, 1)
    return n.model(n.op("ReduceSum", n.op("Mul", n.op("Mul", t, x), x), n.ints(2), keepdims=0))


def scaled_similarity() -> onnx.ModelProto:
    """Inner products of pairs of rows, under each of some scales."""
    n = Net("scaled_similarity")
    x, z, t = n.input("x", 256, 1, 256), n.input("z", 256, 1, 256), n.input("t", 1, 64, 1)
    return n.model(n.op("ReduceSum", n.op("Mul", n.op("Mul", t, x), z), n.ints(2), keepdims=0))


def gated_similarity() -> onnx.ModelProto:
    """Inner products of pairs of rows with a gate for each pair."""
    n = Net("gated_similarity")
    x, z, c = n.input("x", 1024, 256), n.input("z", 1024, 256), n.input("c", 1024, 1)
    return n.model(n.op("ReduceSum", n.op("Mul", n.op("Mul", c, x), z), n.ints(1), keepdims=0))


def pooled_tables() -> onnx.ModelProto:
    """The mean of an embedding's features, looked up for every token of a long text."""
    n = Net("pooled_tables")
    table, ids = n.input("table", 512, 256), n.input("ids", 4096, dtype=onnx.TensorProto.INT64)
    return n.model(n.op("ReduceSum", n.op("Gather", table, ids), n.ints(1), keepdims=0))


def gated_tables() -> onnx.ModelProto:
    """Embeddings with a scale for every word, summed over the features."""
    n = Net("gated_tables")
    table, scale, ids = n.input("table", 512, 256), n.input("scale", 512, 1), n.input("ids", 64, dtype=onnx.TensorProto.INT64)
    return n.model(n.op("Gather", n.op("ReduceSum", n.op("Mul", n.op("Mul", scale, table), table), n.ints(1), keepdims=0), ids))


def trust() -> onnx.ModelProto:
    """The best of a row's scores with a bonus for the row and one for each of some users."""
    n = Net("trust")
    x, row, user = n.input("x", 256, 1, 256), n.input("row", 256, 1, 1), n.input("user", 1, 64, 1)
    return n.model(n.op("ReduceMax", n.op("Add", n.op("Add", user, x), row), n.ints(2), keepdims=0))


def padded_pool() -> onnx.ModelProto:
    """The least of a row that was padded to a full length with its ceiling."""
    n = Net("padded_pool")
    x, c = n.input("x", 512, 256), n.input("c", 512, 1)
    wide = n.op("Expand", c, n.ints(512, 768))
    return n.model(n.op("ReduceMin", n.op("Concat", x, wide, axis=1), n.ints(1), keepdims=0))


def difference_energy() -> onnx.ModelProto:
    """Σ(a + w)(a − w) of rows against one profile."""
    n = Net("difference_energy")
    a, w = n.input("a", 512, 256), n.input("w", 1, 256)
    return n.model(n.op("ReduceSum", n.op("Mul", n.op("Add", a, w), n.op("Sub", a, w)), n.ints(1), keepdims=0))


GRAPHS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    f.__name__: f
    for f in (viterbi, shortest_paths, margin, slack, reach, energies, scaled_similarity, gated_similarity, pooled_tables,
              gated_tables, trust, padded_pool, difference_energy)
}  # fmt: skip
