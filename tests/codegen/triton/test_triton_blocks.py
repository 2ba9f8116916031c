"""Generated kernels of random blocks, which only look like what there is a kernel for: as numpy has them, block by block."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tapestry.codegen.triton.emit.source import generate
from tapestry.codegen.triton.run.launcher import launch
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.syntax.parser import parse
from tests.fuzz.generate.random_blocks import blocks
from tests.support.block_buffers import read_box
from tests.support.triton_kernels import fresh, from_torch, poisoned_lanes, run_kernel, to_torch  # noqa: F401  (a fixture)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_blocks(first: int) -> None:
    for k in range(first, first + 20):
        text, values, outputs, exact = blocks(random.Random(f"triton {k}"))
        graph, have = parse(text), dict(values)
        for i, op in enumerate(graph.ops):
            assert isinstance(op, Block)
            full = whole(tuple(d.size for d in op.space))
            (found,) = run_kernel(graph, i, have, extra=k % 2)
            for lo, hi in [(0, full[0][1] // 2), (full[0][1] // 2, full[0][1])] if op.dims and full[0][1] > 1 else []:
                (part,) = run_kernel(graph, i, have, block=((lo, hi), *full[1:]))
                np.testing.assert_array_equal(part, found[lo:hi], err_msg=text)
            have[op.outs[0]] = found
        for name, want in outputs.items():
            np.testing.assert_allclose(have[name], want, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5, err_msg=text)


def test_a_block_outside_of_what_it_reads_is_written() -> None:
    """Its rows are copied first, of which there are none: the product comes all the same."""
    text = """graph g
input x: u8[1, 7, 7, 6]
input w: u8[4, 6]
y: i32[3, 5, 2, 2] = op [n: 3, h: 5, b: 2, i: 2 | m: 5 sum]
  reads x[b, m + 2, 2*i + 2, h] when -b >= 0 else 0, w[n, m + 1]
  body cast(x, i32) * cast(w, i32)
output y"""
    graph, block = parse(text), ((0, 3), (0, 5), (1, 2), (0, 2), (0, 5))
    op = graph.ops[0]
    assert isinstance(op, Block)
    ins = tuple(read_box(op, graph, k, block) for k in range(2))
    made = generate(graph, Kernel(op=0, mode="full", block=block, ins=ins, outs=(block[:4],)))
    out = fresh(block[:4], "i32")
    given = [to_torch(np.ones([hi - lo for lo, hi in box], np.uint8), "u8") for box in ins]
    launch(made, [*(given[p] for p in made.reads), out])
    assert not from_torch(out).any()


def test_rows_that_are_looked_up_in_nothing_are_zeros() -> None:
    """The guard goes with the rows, the place does not: all of the table that is read is outside."""
    text = """graph g
input x: f32[3, 4]
input at: i64[2]
y: f32[2, 1] = op [i: 2, n: 1 | m: 2 sum]
  reads x[2*m, n + 2] when n - 1 >= 0 when -2*m + 1 >= 0 else 0.0, at[i]
  body where(eq(at, index(m)), x, 0.0)
output y"""
    graph, block = parse(text), ((0, 2), (0, 1), (0, 2))
    op = graph.ops[0]
    assert isinstance(op, Block)
    made = generate(
        graph,
        Kernel(op=0, mode="full", block=block, ins=tuple(read_box(op, graph, k, block) for k in range(2)), outs=(block[:2],)),
    )
    out = fresh(block[:2], "f32")
    launch(made, [{0: to_torch(np.ones((1, 0)), "f32"), 1: to_torch(np.array([0, 1]), "i64")}[p] for p in made.reads] + [out])
    assert not from_torch(out).any()
