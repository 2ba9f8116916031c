"""The table of kernels: its first row that takes a block computes it, and the rows before say why they do not."""

from __future__ import annotations

import numpy as np
import pytest

from tapestry.codegen.torch_cpu import kernels, native
from tapestry.codegen.torch_cpu.base.ways import Chosen, Refusal, Way, first
from tapestry.codegen.torch_cpu.c import conv_c
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.syntax.parser import parse
from tapestry.rewrites.core.rule_check import random_feeds
from tapestry.verify import interp
from tests.support.attention.attention_runs import run_ops

LINEAR = """
graph linear
input w: f32[13, 7]
input x: f32[5, 13]
y: f32[5, 7] = op [i: 5, n: 7 | k: 13 sum]
  reads x[i, k], w[k, n]
  body x * w
output y
"""
WORKED_OUT = LINEAR.replace("input w: f32[13, 7]\ninput", "input v: f32[13, 7]\ninput").replace(
    "y: f32", "w: f32[13, 7] = op [k: 13, n: 7]\n  reads v[k, n]\n  body v + v\ny: f32"
)
PRODUCT = LINEAR.replace("x * w", "abs(x - w)")
CONV = """
graph conv
input w: f32[64, 64, {k}, {k}]
input x: f32[1, 64, {m}, {m}]
y: f32[1, 64, {n}, {n}] = op [b: 1, o: 64, h: {n}, v: {n} | c: 64 sum, r: {k} sum, s: {k} sum]
  reads x[b, c, h + r, v + s], w[o, c, r, s]
  body x * w
output y
"""
needs_c = pytest.mark.skipif(native.library() is None, reason="the kernels in C are not built")


def made(text: str) -> tuple[kernels.CpuKernel, np.ndarray, np.ndarray]:
    """The kernel of a graph's last operation, what it computes, and what the interpreter does."""
    graph = parse(text)
    op = graph.ops[-1]
    assert isinstance(op, Block)
    feeds = random_feeds(graph, np.random.default_rng(0))
    before = run_ops(graph, feeds, len(graph.ops) - 1)
    kernel = Kernel(
        op=len(graph.ops) - 1, mode="full", block=whole(tuple(d.size for d in op.space)),
        ins=tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads), outs=(whole(graph.tensors[op.outs[0]].shape),),
    )  # fmt: skip
    run = kernels.build(graph, kernel)
    (got,) = run([before[r.tensor] for r in op.reads], [])
    return run, got.numpy(), interp.run(graph, feeds, wide=True)["y"]


@needs_c
@pytest.mark.parametrize(
    ("text", "way", "refused"),
    [
        (LINEAR, "matrix product in panels", "no values are weighted by a softmax"),
        (WORKED_OUT, "loops in C", "worked out at every run"),
        (PRODUCT, "loops in C", "no two factors of which each has dimensions of its own"),
        (CONV.format(k=3, n=18, m=20), "convolution, winograd", "its groups are not of one channel"),
        (CONV.format(k=5, n=8, m=12), "convolution, panels", "its window is not 3 x 3"),
    ],
)  # fmt: skip
def test_the_first_row_that_takes_a_block_computes_it(text: str, way: str, refused: str) -> None:
    run, got, want = made(text)
    assert run.way == way
    assert any(refused in why for _, why in run.tried)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_table_is_asked_in_order() -> None:
    table = [
        Way("even", lambda n: n // 2 if n % 2 == 0 else Refusal(f"{n} is odd"), ""),
        Way("three", lambda n: n // 3 if n % 3 == 0 else Refusal(f"{n} is not divisible by 3"), ""),
    ]
    assert first(table, 6) == Chosen("even", 3, ())
    assert first(table, 9) == Chosen("three", 3, (("even", "9 is odd"),))
    none = first(table, 7)
    assert not none and "7 is odd" in none.why and "not divisible" in none.why


def test_every_row_says_why_it_is_where_it_is() -> None:
    for table in (*kernels.TABLES.values(), kernels.STATES, conv_c.CONVOLUTIONS, kernels.AS_A_WHOLE):
        assert all(way.why for way in table)
        assert len({way.name for way in table}) == len(table)
