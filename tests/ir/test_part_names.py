"""Names of parts and dimensions on graphs written by hand: who owns an operation, and what the field calls its dimensions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tapestry.ir.graph import Dim, Graph, Names, Opaque
from tapestry.ir.provenance import dim_names, operation_names, parts
from tapestry.ir.syntax.parser import parse

LINEAR = """graph g input x: f32[6, 8] weight {weight}: f32[5, 8] at "w.bin" 0 160 "w" ""
y: f32[6, 5] = op [i: 6, j: 5 | k: 8 {monoid}]
  reads x[i, k], w = {weight}[j, k] body x * w {source}
output y"""
ATTENTION = """graph g input q: f32[2, 5, 8] input k: f32[2, 7, 8] input v: f32[2, 7, 4]
y: f32[2, 5, 4] = op [b: 2, i: 5, e: 4 | n: 7 softsum]
  reads q[b, i, m], k[b, n, m], v[b, n, e] let [m: 8 sum] q * k body let0, 1.0, v then acc2 / acc1
output y"""
MAP = """graph g input x: f32[6]
y: f32[6] = op [i: 6]
  reads x[i] body x + 1.0 {source}
output y"""


def linear(weight: str = '"a.fc.weight"', monoid: str = "sum", source: str = "") -> Graph:
    return parse(LINEAR.format(weight=weight, monoid=monoid, source=source))


def scoped(graph: Graph, *scopes: tuple[str, str]) -> Graph:
    """The graph whose one operation comes of nodes of these parts."""
    names = [f"n{k}" for k in range(len(scopes))]
    op = replace(graph.ops[0], source=tuple(names))
    return replace(graph, ops=(op,), names=Names(scopes=dict(zip(names, scopes, strict=True))))


def test_dimensions_are_called_as_the_field_calls_them():
    graph = linear()
    assert dim_names(graph.ops[0], graph) == {"j": "out", "k": "in"}
    graph = parse(ATTENTION)
    assert dim_names(graph.ops[0], graph) == {"b": "heads", "i": "query", "n": "key", "e": "head_dim"}
    graph = linear(monoid="max")
    assert dim_names(graph.ops[0], graph) == {}, "a maximum is no linear layer"
    op = Opaque(
        outs=("y",), ins=("x",), kind="Sort", node=b"", opsets=(), dims=(Dim("i", 6),), in_axes=((0,),), out_axes=((0,),)
    )
    assert dim_names(op, parse(MAP.format(source=""))) == {}


def test_the_files_name_of_an_axis_comes_first_and_no_name_is_there_twice():
    graph = replace(linear(), names=Names(axes={"x": ("batch", ""), "y": ("", "classes")}))
    assert dim_names(graph.ops[0], graph) == {"i": "batch", "j": "classes", "k": "in"}
    graph = replace(linear(), names=Names(axes={"x": ("k", "in")}))
    assert dim_names(graph.ops[0], graph) == {"k": "in", "j": "out"}, "a dimension is called k already"


@pytest.mark.parametrize(
    ("scopes", "part", "name"),
    [
        ([("a.norm", "mul"), ("a.norm", "add"), ("b", "add")], "a.norm", "a.norm"),
        ([("b", "add"), ("a", "mul")], "a", "a"),  # as many of both: the last
        ([("", "relu"), ("c", "gelu")], "c", "c"),
        ([("", "relu")], "", "n0"),
        ([], "", "y"),
    ],
)
def test_an_operation_without_weights_is_of_the_part_that_most_of_its_nodes_are_of(scopes, part, name):
    graph = scoped(parse(MAP.format(source="")), *scopes)
    assert parts(graph) == (part,) and operation_names(graph) == (name,)


def test_a_weight_says_whose_an_operation_is_before_its_nodes_do():
    assert parts(linear()) == ("a.fc",) == parts(scoped(linear(), ("a.fc", "linear"), ("b", "add"), ("b", "add")))
    assert parts(scoped(linear(), ("b", "add"))) == ("b",), "no node is of the weight's part"
    folded = linear(weight="folded")
    assert parts(folded) == ("",)
    assert parts(scoped(folded, ("b", "add"), ("b", "add"), ("a.fc", "linear"))) == ("a.fc",), "the product's"
