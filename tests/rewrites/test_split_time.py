"""Splits in time: regions run part after part keep every law, and only what must be whole is whole."""

import numpy as np
import pytest

import tapestry.rewrites  # noqa: F401  (fills the table of rules)
from tapestry.errors import TapestryError
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Dim, Graph, Opaque, Read
from tapestry.ir.index import dim
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import signature, to_text
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.rule import parse_move
from tapestry.rewrites.core.rule_check import random_feeds, same
from tapestry.rewrites.splitting.micro_batch import batch_move, micro_batch
from tapestry.rewrites.splitting.split_time import split_time
from tapestry.rewrites.splitting.tiled_region import MOST_AGAIN

CHAIN = """graph chain
input x: f32[2, 33]
input k: f32[2, 2, 3]
a: f32[2, 33] = op [o: 2, h: 33 | c: 2 sum, r: 3 sum]
  reads x[c, h + r - 1] else 0.0, k[o, c, r]
  body x * k
b: f32[2, 17] = op [o: 2, h: 17 | c: 2 sum, r: 3 sum]
  reads a[c, 2*h + r - 1] else 0.0, k[o, c, r]
  body a * k
  then max(acc0, 0.0)
y: f32[2, 17] = op [o: 2, h: 17 | r: 3 max]
  reads b[o, h + r - 1] else -inf
  body b
z: f32[2, 33] = op [o: 2, h: 33]
  reads a[o, h]
  body exp(a)
output y, z
"""

ATTENTION = """graph attention
input q: f32[6, 8, 4]
input x: f32[6, 10, 5]
input w: f32[5, 8]
kv: f32[6, 10, 8] = op [b: 6, j: 10, n: 8 | m: 5 sum]
  reads x[b, j, m], w[m, n]
  body x * w
s: f32[6, 2, 8, 10] = op [b: 6, h: 2, i: 8, j: 10 | d: 2 sum]
  reads q[b, i, 2*h + d], kv[b, j, 4*h + d]
  body q * kv
m: f32[6, 2, 8] = op [b: 6, h: 2, i: 8 | j: 10 max]
  reads s[b, h, i, j]
  body s
e: f32[6, 2, 8, 10] = op [b: 6, h: 2, i: 8, j: 10]
  reads s[b, h, i, j], m[b, h, i]
  body exp(s - m)
y: f32[6, 8, 4] = op [b: 6, i: 8, n: 4 | j: 10 sum]
  reads e[b, floor((n)/2), i, j], kv[b, j, n + 4]
  body e * kv
output y
"""


def applied(graph: Graph, *moves: str) -> Graph:
    after = apply_moves(graph, map(parse_move, moves))
    same(graph, after, random_feeds(graph, np.random.default_rng(0)), " ".join(moves))
    return after


@pytest.mark.parametrize("parts", [2, 3, 4, 7])
@pytest.mark.parametrize("back", [0, 1, 2])
def test_convolution_chain_computes_its_halo_again(parts: int, back: int) -> None:
    graph = parse(CHAIN)
    done = split_time(graph, parse_move(f"split_time@y{{dim=h,parts={parts},back={back}}}"))
    same(graph, done.graph, random_feeds(graph, np.random.default_rng(1)), "halo")
    inner = [op for op, k in zip(done.graph.ops, done.part, strict=True) if k >= 0]
    made = {t: sum(op.dims[1].size for op in inner if isinstance(op, Block) and op.outs[0].startswith(f"{t}@")) for t in "aby"}
    assert made["y"] == 17
    for t, size in (("a", 33), ("b", 17)):
        assert made[t] == 0 or size <= made[t] <= MOST_AGAIN * size
    assert back == 0 or parts == 7 or made["b"] > 17  # overlapping windows
    assert [k for k in done.part if k >= 0] == sorted(k for k in done.part if k >= 0)


@pytest.mark.parametrize(
    ("dim", "parts", "inside"),
    [("b", 3, {"kv", "s", "m", "e", "y"}), ("i", 4, {"s", "m", "e", "y"}), ("n", 2, {"kv", "s", "m", "e", "y"})],
)
def test_attention_by_batch_queries_and_heads(dim: str, parts: int, inside: set[str]) -> None:
    graph = parse(ATTENTION)
    after = applied(graph, f"split_time@y{{dim={dim},parts={parts},back=9}}")
    assert {t.partition("@")[0] for t in after.tensors if "@" in t} == inside
    largest = max(t.nbytes for t in after.tensors.values())
    assert largest <= max(graph.tensors["s"].nbytes // parts, graph.tensors["kv"].nbytes, graph.tensors["x"].nbytes)


@pytest.mark.parametrize("monoid", sorted(MONOIDS))
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_any_monoid_accumulates(monoid: str, parts: int) -> None:
    from tests.support.rule_cases import reduction

    graph = parse(reduction(monoid, 7))
    after = applied(graph, f"split_time@y0{{dim=m,parts={parts},back=0}}")
    assert len(after.ops) == 2 * parts - 1


def test_readers_outside_and_moves_in_a_row() -> None:
    graph = parse(ATTENTION)
    after = applied(
        graph,
        "split_time@e{dim=h,parts=2,back=2}",
        'split_time@"e@1"{dim=i,parts=3,back=2}',
        "split_time@y{dim=j,parts=5,back=0}",
    )
    assert "e" in after.tensors and "s" not in after.tensors


def opaque_graph() -> Graph:
    from tests.support.rule_cases import opaque_graph as lone

    graph = lone()
    dims = (Dim("x0", 7), Dim("x1", 5))
    index = tuple(dim(d.name) for d in dims)
    body = Block(outs=("z",), dims=dims, reads=(Read(tensor="y", index=index),), body=(Arg(0, "f32"),))
    table = {**graph.tensors, "z": Tensor(name="z", dtype="f32", shape=(7, 5))}
    return Graph(name="g", tensors=table, ops=(*graph.ops, body), inputs=("x",), outputs=("z",))


def test_opaque_operations_take_part() -> None:
    graph = opaque_graph()
    done = micro_batch(graph, parse_move("micro_batch@x{axis=0,parts=3}"))
    same(graph, done.graph, random_feeds(graph, np.random.default_rng(0)), "opaque")
    assert [op.dims[0].size for op in done.graph.ops if isinstance(op, Opaque)] == [2, 2, 3]
    with pytest.raises(TapestryError, match="there is no dimension 'x1'"):
        applied(graph, "split_time@y{dim=x1,parts=2,back=0}")


def test_micro_batches_are_alike() -> None:
    graph = parse(ATTENTION)
    move = batch_move(graph, 3)
    assert str(move) == "micro_batch@q{axis=0,parts=3}"
    assert move is not None
    done = micro_batch(graph, move)
    same(graph, done.graph, random_feeds(graph, np.random.default_rng(0)), "batch")
    assert [done.part.count(k) for k in (-1, 0, 1, 2)] == [1, 5, 5, 5]
    kinds = {signature(op, done.graph) for op, k in zip(done.graph.ops, done.part, strict=True) if k > 0}
    assert len(kinds) == 3 + 2 * 2  # those that read an input know where their part begins
    assert parse(to_text(done.graph)) == done.graph


@pytest.mark.parametrize(
    ("move", "message"),
    [
        ("split_time@y{dim=i,parts=9,back=0}", "8 points of 'i' cannot be cut into 9 non-empty parts"),
        ("split_time@y{dim=q,parts=2,back=0}", "there is no dimension 'q'"),
        ("split_time@u{dim=i,parts=2,back=0}", "no operation writes 'u'"),
        ("micro_batch@x{axis=3,parts=2}", "'x' is no input with an axis 3"),
        ("micro_batch@x{axis=0,parts=7}", "6 points cannot be cut into 7 non-empty parts"),
        ("micro_batch@w{axis=0,parts=5}", "no operation follows axis 0 of 'w'"),
    ],
)
def test_refusals(move: str, message: str) -> None:
    with pytest.raises(TapestryError) as e:
        apply_moves(parse(ATTENTION), [parse_move(move)])
    assert message in str(e.value)
