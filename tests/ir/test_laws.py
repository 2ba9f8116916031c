"""Each law of a Graph is broken by a graph made for it, and says where with a witness."""

from dataclasses import replace

import pytest

from tapestry.errors import LawError
from tapestry.ir.expr import Acc, Arg, Call, Const, Index
from tapestry.ir.graph import Block, Dim, Graph, Guard, Opaque, Read, Split
from tapestry.ir.index import dim
from tapestry.ir.laws import GRAPH_LAWS, check, signatures
from tapestry.ir.syntax.parser import parse
from tapestry.ir.types import Weight

GOOD = parse("""graph g
input x: f32[4, 7]
t: f32[4, 7] = op [x0: 4, x1: 7]
  reads x[x0, x1]
  body exp(x)
y: f32[4] = op [n: 4 | m: 7 sum]
  reads t[n, m]
  body t
  from "node"
output y
""")
N, M = dim("n"), dim("m")


def with_last(**changes: object) -> Graph:
    return replace(GOOD, ops=(GOOD.ops[0], replace(GOOD.ops[1], **changes)))  # type: ignore[arg-type]


def read(*index: object, **more: object) -> tuple[Read, ...]:
    return (Read(tensor="t", index=index, **more),)  # type: ignore[arg-type]


def on_host(name: str, shape: tuple[int, ...] = (), op: object = None) -> Graph:
    """The good graph with a tensor on the host, and another last operation."""
    tensors = {**GOOD.tensors, name: replace(GOOD.tensors[name], dtype="host", shape=shape, about="string[4]")}
    ops = GOOD.ops if op is None else (GOOD.ops[0], op)
    return replace(GOOD, tensors=tensors, ops=ops)  # type: ignore[arg-type]


def stored(fn: str) -> Graph:
    """A map over an 8-bit float."""
    tensors = {n: replace(GOOD.tensors[n], dtype="f8e5m2") for n in ("x", "t")}
    body = Call(fn, (Arg(0, "f8e5m2"),), "f8e5m2")
    return replace(GOOD, tensors=tensors, ops=(replace(GOOD.ops[0], body=(body,)),), outputs=("t",))  # type: ignore[type-var]


OPAQUE = Opaque(
    outs=("y",), ins=("t",), kind="K", node=b"", opsets=(), dims=(Dim("b", 4),), in_axes=((0,),), out_axes=((None,),)
)
WHOLE = replace(OPAQUE, dims=(), in_axes=((),), out_axes=((),))
BAD = {
    "read too early": (replace(GOOD, ops=GOOD.ops[::-1]), "ssa", "'t' is read before it is written"),
    "written twice": (replace(GOOD, ops=(*GOOD.ops, GOOD.ops[1])), "ssa", "'y' is written twice"),
    "no output": (replace(GOOD, ops=GOOD.ops[:1]), "ssa", "output 'y' is never written"),
    "a dimension twice": (with_last(reduce=(Dim("n", 7),)), "agreement", "a dimension is named twice"),
    "rank": (with_last(reads=read(N)), "agreement", "'t' has 2 axes, read with 1"),
    "loose dimension": (with_last(reads=read(N, dim("q"))), "agreement", "unknown dimensions ['q']"),
    "results": (with_last(then=(Acc(0, "f32"), Acc(0, "f32"))), "agreement", "2 results for 1 outputs"),
    "dtype": (with_last(then=(Acc(0, "f64"),)), "agreement", "'y' is f32, its expression f64"),
    "fields": (with_last(monoid="moments"), "agreement", "monoid moments has other fields than the body"),
    "late read": (with_last(then=(Arg(0, "f32"),)), "agreement", "'then' reads by a reduced dimension"),
    "loose index": (with_last(body=(Index(dim("q"), "f32"),)), "agreement", "unknown dimension in index(q)"),
    "early state": (with_last(body=(Acc(0, "f32"),), then=(Const(1.0, "f32"),)), "agreement", "the body uses a reduced state"),
    "outside": (with_last(reads=read(N, M + 1)), "reads_inside", "reads 't' at (0, 7)"),
    "unsaid": (with_last(reads=read(N, M, when=(Guard(M - 1, "ge"),))), "reads_inside", "does not say what it reads outside"),
    "shape": (with_last(dims=(Dim("n", 3),)), "written_once", "'y' has shape (4,), the map dimensions (3,)"),
    "no monoid": (with_last(monoid=None, body=GOOD.ops[0].body), "written_once", "reduced dimensions without a monoid"),  # type: ignore[union-attr]
    "opaque": (replace(GOOD, ops=(GOOD.ops[0], OPAQUE)), "written_once", "a dimension does not index 'y'"),
    "no dimension": (with_last(splits=(Split("q", 2, "time"),)), "split_partition", "no dimension 'q'"),
    "host and block": (on_host("y"), "agreement", "'y' is host, its expression f32"),
    "host and axes": (on_host("y", (4,), WHOLE), "host_values", "'y' stays on the host but has axes"),
    "host and split": (on_host("y", op=replace(OPAQUE, out_axes=((),))), "host_values", "cannot be split"),
    "host and weight": (
        replace(
            on_host("x"),
            ops=(replace(WHOLE, ins=(), in_axes=()),),
            inputs=(),
            weights={"x": Weight(file="", offset=0, length=0)},
        ),
        "host_values",
        "weight 'x' has no bytes",
    ),
    "stored": (stored("exp"), "host_values", "'exp' computes with a type that is only stored"),
    "empty part": (with_last(splits=(Split("m", 8, "time"),)), "split_partition", "7 points in 8 parts leave one empty"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_graph_is_refused(name: str) -> None:
    graph, law, message = BAD[name]
    with pytest.raises(LawError) as e:
        check(graph)
    assert e.value.law == law
    assert message in str(e.value)


def test_the_witness_is_a_point_and_the_place_an_operation() -> None:
    with pytest.raises(LawError, match=r"operation 'y' \(from node\)") as e:
        check(BAD["outside"][0])
    assert e.value.why == "at {'n': 0, 'm': 6}"


def test_a_good_graph_counts_what_was_looked_at() -> None:
    assert check(GOOD) == {
        "ssa": 2,
        "agreement": 2,
        "reads_inside": 2,
        "written_once": 2,
        "split_partition": 0,
        "host_values": 4,
    }
    assert set(check(GOOD)) == set(GRAPH_LAWS)
    split = with_last(splits=(Split("m", 3, "mesh.d0"), Split("n", 2, "time"), Split("m", 2, "grid")))
    assert check(split)["split_partition"] == 3
    assert {law for _, law, _ in BAD.values()} == set(GRAPH_LAWS)


def test_signatures_ignore_names_alone() -> None:
    graph = parse("""graph s
input x: f32[4]
input z: f32[4]
a: f32[4] = op [x0: 4]
  reads x[x0], z[x0]
  body x + z
b: f32[4] = op [x0: 4]
  reads a[x0], x[x0]
  body a + x
c: f32[4] = op [x0: 4]
  reads a[x0], a1 = a[x0]
  body a + a1
output b, c
""")
    assert sorted(signatures(graph).values()) == [[0, 1], [2]]
    assert isinstance(graph.ops[0], Block)
