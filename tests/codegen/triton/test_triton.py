"""Generated Triton kernels in Triton's interpreter, against the reference evaluator and against numpy and torch."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; ahead-of-time tests run in processes of their own


import numpy as np
import pytest
import torch

from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Box
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.syntax.parser import parse
from tapestry.verify import interp
from tests.support.triton_cases import CONTRACTIONS, REDUCTIONS
from tests.support.triton_kernels import (
    check,
    compare,
    poisoned_lanes,  # noqa: F401  (a fixture for every test here)
    random_arrays,
    run_kernel,
    source_of,
)

MAPS = {
    "broadcast": """graph g
        input x: f32[7, 13]
        input b: f32[13]
        input s: f32[]
        y: f32[7, 13] = op [i: 7, j: 13] reads x[i, j], b[j], s[] body (x + b) * s
        output y""",
    "padded": """graph g
        input x: f32[5, 6]
        y: f32[9, 11] = op [i: 9, j: 11] reads x[i - 2, j - 3] else -1.5 body x
        output y""",
    "guarded": """graph g
        input x: f32[33]
        y: f32[40] = op [i: 40] reads x[i - 3] when ((i) mod 2) == 0 when i - 9 >= 0 else 0.25 body neg(x)
        output y""",
    "guard without a dimension of the read": """graph g
        input x: f32[1]
        y: f32[13] = op [i: 13] reads x[0] when i - 4 >= 0 else 2.0 body x
        output y""",
    "upsample": """graph g
        input x: f32[7, 5]
        y: f32[14, 15] = op [i: 14, j: 15] reads x[floor((i)/2), floor((j)/3)] body x
        output y""",
    "reshape": """graph g
        input x: f32[6, 35]
        y: f32[42, 5] = op [i: 42, j: 5] reads x[floor((5*i + j)/35), ((5*i + j) mod 35)] body x
        output y""",
    "negative floor": """graph g
        input x: f32[7]
        y: f32[13] = op [i: 13] reads x[floor((i - 6)/3) + 2] body x
        output y""",
    "roll": """graph g
        input x: f32[13]
        y: f32[13] = op [i: 13] reads x[((i - 5) mod 13)] body x
        output y""",
    "flip and transpose": """graph g
        input x: f32[7, 5, 3]
        y: f32[3, 7, 5] = op [k: 3, i: 7, j: 5] reads x[i, 4 - j, k] body x
        output y""",
    "slice": """graph g
        input x: f32[33, 5]
        y: f32[8, 5] = op [i: 8, j: 5] reads x[30 - 4*i, j] body x
        output y""",
    "concat": """graph g
        input a: f32[3, 5]
        input b: f32[4, 5]
        y: f32[7, 5] = op [i: 7, j: 5]
          reads a[i, j] else 0.0, b[i - 3, j] else 0.0
          body where(lt(index(i), 3), a, b)
        output y""",
    "scalar": """graph g
        input x: f32[]
        y: f32[] = op [] reads x[] body x + 1.0
        output y""",
    "constant and iota": """graph g
        y: f32[5, 3], z: i64[5, 3] = op [i: 5, j: 3] body 2.5, index(3*i + j - 7)
        output y, z""",
    "two outputs": """graph g
        input x: f32[2, 7]
        y: f32[2, 7], z: bool[2, 7] = op [i: 2, j: 7] reads x[i, j] body abs(x), gt(x, 0.0)
        output y, z""",
}


@pytest.mark.parametrize("name", MAPS)
def test_maps(name: str) -> None:
    check(MAPS[name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contractions(name: str) -> None:
    check(CONTRACTIONS[name])


def test_contractions_use_the_matrix_unit() -> None:
    generic = {"conv depthwise", "integers", "f64", "vector times matrix"}
    for name, text in CONTRACTIONS.items():
        assert ("tl.dot(" in source_of(text)) == (name not in generic), name


@pytest.mark.parametrize("name", ["matmul, bias, relu", "batched, transposed", "conv 3x3 stride 2 pad 1"])
def test_many_tiles_in_any_order(name: str) -> None:
    """Tiles of 16 with two rows to a group: every program's tile is computed once, the ragged last group included."""
    check(CONTRACTIONS[name], config=KernelConfig(bm=16, bn=16, bk=16, group=2))


def test_convolution_equals_torch() -> None:
    graph = parse(CONTRACTIONS["conv 3x3 stride 2 pad 1"])
    values = random_arrays(graph)
    x, k = torch.from_numpy(values["x"]).double(), torch.from_numpy(values["k"]).double()
    want = torch.nn.functional.conv2d(x, k, stride=2, padding=1).numpy()
    compare(run_kernel(graph, 0, values)[0], want, "f32")


def test_lanes_past_the_end_of_k_hold_zeros() -> None:
    """Infinity in one row must stay in that row: 0 * garbage would spread NaN."""
    graph = parse(CONTRACTIONS["matmul, bias, relu"])
    values = random_arrays(graph)
    values["x"][3, 2] = np.inf
    values["w"][2] = np.abs(values["w"][2])
    (y,) = run_kernel(graph, 0, values)
    assert np.isinf(y[3]).all()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()
    padded = source_of(CONTRACTIONS["conv dilated, padded with ones"])
    assert "tl.where(" in padded, "a read whose padding is not zero needs zeros past the end all the same"


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    check(REDUCTIONS[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["max pool", "softmax", "layer norm", "whole mean", "all"])
def test_reductions_in_loops(name: str) -> None:
    """Tiles of 4 x 4: rows and columns past the end, and several passes of the loop."""
    check(REDUCTIONS[name], config=KernelConfig(block=16, rows=4, cols=4))


ARGMAX = """graph g
    input x: f32[6, 9]
    y: i64[6], v: f32[6] = op [i: 6 | j: 9 argmax] reads x[i, j] body x, index(j) then acc1, acc0
    output y, v"""


def test_argmax_takes_the_first_of_equals_and_the_first_nan() -> None:
    x = np.zeros((6, 9), np.float32)
    x[1, [3, 7]] = 2
    x[2] = -np.inf
    x[3, [4, 6]] = np.nan
    x[4, 8] = np.inf
    x[5] = np.arange(9)
    got = check(ARGMAX, {"x": x})
    np.testing.assert_array_equal(got["y"], [0, 3, 0, 4, 8, 8])
    check(ARGMAX.replace("argmax", "argmin"), {"x": x})
    check(ARGMAX, {"x": x}, KernelConfig(rows=2, cols=4))


@pytest.mark.parametrize("monoid", ["max", "min", "sum", "prod"])
def test_reductions_propagate_nan(monoid: str) -> None:
    x = np.random.default_rng(3).standard_normal((3, 7)).astype(np.float32)
    x[1, 4] = np.nan
    text = f"graph g input x: f32[3, 7] y: f32[3] = op [i: 3 | j: 7 {monoid}] reads x[i, j] body x then acc0 output y"
    got = check(text, {"x": x})["y"]
    np.testing.assert_array_equal(np.isnan(got), [False, True, False])


@pytest.mark.parametrize("monoid", [m for m in MONOIDS if m not in ("argmax", "argmin")])
def test_partial_and_finish_equal_full(monoid: str) -> None:
    """Two parts of the reduced dimension, merged by the monoid outside, then ``then``."""
    dtype = "bool" if monoid in ("any", "all") else "f32"
    body = {"moments": "1.0, x, 0.0", "logsumexp": "x, 1.0", "affine": "tanh(x), x", "softsum": "x, 1.0, 0.5 * x"}
    body = body.get(monoid, ", ".join(["x", "0.5 * x", "tanh(x)", "neg(x)"][: len(MONOIDS[monoid].fields)]))
    then = {
        "moments": "(acc2 / acc0) + b", "logsumexp": "(acc0 + log(acc1)) + b", "softsum": "(acc2 / acc1) + b",
        "any": "or(acc0, b)", "all": "and(acc0, b)", "sums2": "(acc0 * acc1) + b", "sums3": "(acc0 * acc1) + acc2",
    }  # fmt: skip
    text = f"""graph g input x: {dtype}[5, 7] input b: {dtype}[5]
        y: {dtype}[5] = op [i: 5 | j: 7 {monoid}] reads x[i, j], b[i] body {body} then {then.get(monoid, "acc0 + b")}
        output y"""
    graph = parse(text)
    values = random_arrays(graph)
    parts = [run_kernel(graph, 0, values, mode="partial", block=((0, 5), box)) for box in ((0, 4), (4, 7))]
    op = graph.ops[0]
    assert isinstance(op, Block)
    merge = MONOIDS[monoid].combiner(tuple(e.dtype for e in op.body))
    states = [interp.value(e, [*parts[0], *parts[1]], [], {}, False) for e in merge]
    got = run_kernel(graph, 0, values, mode="finish", states=states)
    compare(got[0], interp.run(graph, values, wide=True)["y"], dtype)


def test_sums_side_by_side_are_products_of_tiles_that_share_a_load() -> None:
    text = source_of(CONTRACTIONS["two sums, gated"])
    assert (text.count("tl.dot("), text.count("tl.load(x_ptr")) == (2, 1)


def test_partial_contraction_and_finish() -> None:
    graph = parse(CONTRACTIONS["matmul, bias, relu"])
    values = random_arrays(graph)
    parts = [run_kernel(graph, 0, values, mode="partial", block=((3, 33), (0, 20), k)) for k in ((0, 19), (19, 37))]
    states = [parts[0][0] + parts[1][0]]
    got = run_kernel(graph, 0, values, mode="finish", block=((3, 33), (0, 20), (0, 37)), states=states)
    compare(got[0], interp.run(graph, values, wide=True)["y"][3:33, :20], "f32")


BLOCKS = [
    ("conv 3x3 stride 2 pad 1", ((0, 2), (2, 7), (3, 7), (0, 5), (0, 5), (0, 3), (0, 3))),
    ("conv grouped", ((1, 2), (3, 8), (2, 7), (1, 4), (0, 3), (0, 3), (0, 3))),
    ("conv depthwise", ((0, 1), (2, 5), (2, 7), (1, 4), (0, 1), (0, 3), (0, 3))),
    ("conv transposed, stride 2", ((0, 1), (1, 4), (3, 10), (2, 9), (0, 3), (0, 3), (0, 3))),
    ("max pool", ((0, 1), (1, 3), (2, 5), (1, 4), (0, 3), (0, 3))),
    ("reshape", ((11, 40), (1, 4))),
    ("padded", ((1, 8), (5, 10))),
    ("constant and iota", ((2, 5), (1, 3))),
    ("negative floor", ((2, 11),)),
    ("roll", ((2, 11),)),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[n for n, _ in BLOCKS])
def test_blocks_away_from_the_origin(name: str, block: Box, extra: int) -> None:
    """A block with its halo and nothing else in the buffers, or with buffers larger than needed."""
    graph = parse({**MAPS, **CONTRACTIONS, **REDUCTIONS}[name])
    op = graph.ops[0]
    values = random_arrays(graph)
    want = interp.run(graph, values, wide=True)
    place = tuple(slice(lo, hi) for lo, hi in block[: len(op.dims)])
    for t, got in zip(op.outs, run_kernel(graph, 0, values, block=block, extra=extra), strict=True):
        compare(got, want[t][place], graph.tensors[t].dtype)


def test_contiguous_memory_needs_no_division() -> None:
    """A bias over a contiguous tensor divides for the bias alone, and a fused reshape not at all."""
    assert source_of(MAPS["broadcast"]).count("//") == 0
    assert "%" not in source_of(MAPS["reshape"]) and "//" not in source_of(MAPS["reshape"])
