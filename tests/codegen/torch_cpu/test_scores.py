"""Attention with scores of any kind by our kernel: soft caps, masks, crossed keys, shared heads, scores without a product."""

from __future__ import annotations

import numpy as np
import pytest

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.attention_c import attention_kernel
from tapestry.codegen.torch_cpu.attention_scores import scored
from tapestry.codegen.torch_cpu.kernels import build, from_numpy
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.syntax.parser import parse
from tapestry.verify import interp

TAIL = "then where(isnan((acc0 - acc0)), (acc0 - acc0), (acc2 / acc1))\noutput y\n"
CASES = {
    "a soft cap, heads that share keys, a bias": """input q: f32[1, 6, 53, 21]
input k: f32[1, 3, 67, 21]
input v: f32[1, 67, 63]
input bias: f32[53, 67]
y: f32[1, 6, 53, 21] = op [b: 1, h: 6, i: 53, n: 21 | m: 67 softsum]
  reads v[0, m, n + 21*floor((h)/2)], q[b, h, i, d], k[0, floor((h)/2), m, d], bias[i, m]
  let [d: 21 sum] q * k
  body (tanh(((let0 * 0.0625) / 5.0)) * 5.0) + bias, 1.0, v
""",
    "a mask, keys by depth": """input q: f32[1, 70, 40]
input k: f32[5, 8, 49]
input v: f32[1, 49, 40]
input hide: bool[70, 49]
y: f32[5, 70, 8] = op [h: 5, i: 70, n: 8 | m: 49 softsum]
  reads v[0, m, 8*h + n], q[0, i, 8*h + d], k[h, d, m], hide[i, m]
  let [d: 8 sum] q * k
  body where(hide, f32(-3.4028234663852886e+38), let0), 1.0, v
""",
    "places": """input q: f32[2, 3, 50, 8]
input k: f32[2, 3, 50, 8]
input v: f32[2, 3, 50, 8]
y: f32[2, 3, 50, 8] = op [b: 2, h: 3, i: 50, n: 8 | m: 50 softsum]
  reads v[b, h, m, n], q[b, h, i, d], k[b, h, m, d]
  let [d: 8 sum] q * k
  body where(gt(index(m), index(i)), f32(-inf), let0 * cast(index(h + 1), f32)), 1.0, v
""",
    "values wider than keys, a bias by heads last": """input q: f32[57, 141]
input k: f32[57, 141]
input v: f32[57, 141]
input bias: f32[57, 57, 3]
y: f32[1, 3, 57, 33] = op [b: 1, h: 3, i: 57, n: 33 | m: 57 softsum]
  reads v[m, 47*h + n + 14], q[i, 47*h + d], k[m, 47*h + d + 7], bias[i, m, h]
  let [d: 7 sum] q * k
  body ((let0 * 0.25) + bias), 1.0, v
""",
    "values by columns": """input q: f32[1, 3, 11, 83]
input k: f32[1, 3, 13, 83]
input v: f32[1, 83, 45]
input t: f32[3, 1, 1]
y: f32[1, 3, 11, 83] = op [b: 1, h: 3, i: 11, n: 83 | m: 13 softsum]
  reads v[0, n, 13*h + m + 6], q[b, h, i, d], k[b, h, m, d], t[h, 0, 0]
  let [d: 83 sum] q * k
  body (let0 * t), 1.0, v
""",
    "no product": """input s: f32[1, 5, 61, 30]
input v: f32[1, 30, 95]
y: f32[1, 5, 61, 19] = op [b: 1, h: 5, i: 61, n: 19 | m: 30 softsum]
  reads v[0, m, 19*h + n], s[b, h, i, m]
  body s, 1.0, v
""",
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CASES)
def test_scores_of_any_kind(name: str) -> None:
    if native.library() is None:
        pytest.skip("no compiler")
    graph = parse(f"graph g\n{CASES[name]}  {TAIL}")
    (op,) = graph.ops
    assert isinstance(op, Block)
    draw = np.random.default_rng(0)
    values = {
        t: draw.random(graph.tensors[t].shape) < 0.4 if graph.tensors[t].dtype == "bool"
        else draw.standard_normal(graph.tensors[t].shape).astype(np.float32)
        for t in graph.inputs
    }  # fmt: skip
    if "hide" in values:
        values["hide"][3] = True  # a row without keys: all weigh the same
    if "s" in values:
        values["s"][0, 1, 7], values["s"][0, 2, 9, 4] = -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        want = interp.run(graph, values, wide=True)["y"]
    shapes = [graph.tensors[r.tensor].shape for r in op.reads]
    kernel = Kernel(
        op=0, mode="full", block=whole(tuple(d.size for d in op.space)), ins=tuple(map(whole, shapes)),
        outs=(whole(tuple(d.size for d in op.dims)),),
    )  # fmt: skip
    found = scored(op, graph, kernel)
    assert found
    ins = [from_numpy(values[r.tensor]) for r in op.reads]
    for run in (found, build(graph, kernel)):
        (got,) = run(ins, [])
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=2e-6)


TWO_BIASES = """graph g
input q: f32[1, 53, 96]
input k: f32[1, 61, 96]
input v: f32[1, 61, 96]
input rows: f32[53, 61, 3]
input mask: f32[1, 1, 53, 61]
y: f32[1, 3, 53, 32] = op [b: 1, h: 3, i: 53, n: 32 | m: 61 softsum]
  reads v[0, m, 32*h + n], q[0, i, 32*h + d], k[0, m, 32*h + d], rows[i, m, h], mask[b, 0, i, m]
  let [d: 32 sum] q * k
  body (((let0 / 5.5) + rows) + mask), 1.0, v
  then where(isnan((acc0 - acc0)), (acc0 - acc0), (acc2 / acc1))
output y
"""


@pytest.mark.usefixtures("one_thread")
def test_a_bias_of_two_along_a_batch_of_one() -> None:
    """A dimension of one point, which the bias alone has, is no row."""
    if native.library() is None:
        pytest.skip("no compiler")
    graph = parse(TWO_BIASES)
    (op,) = graph.ops
    assert isinstance(op, Block)
    draw = np.random.default_rng(1)
    values = {t: draw.standard_normal(graph.tensors[t].shape).astype(np.float32) for t in graph.inputs}
    values["mask"][0, 0, 7], values["rows"][9, 4, 1], values["v"][0, 3, 40] = -np.inf, np.nan, np.inf
    with np.errstate(invalid="ignore"):
        want = interp.run(graph, values, wide=True)["y"]
    ins = tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads)
    kernel = Kernel(op=0, mode="full", block=whole(tuple(d.size for d in op.space)), ins=ins, outs=(whole((1, 3, 53, 32)),))
    found = attention_kernel(op, graph, kernel)
    assert found and found.functions
    build(graph, kernel)  # registers and may compile what the bias is made by
    (got,) = found([from_numpy(values[r.tensor]) for r in op.reads], [])
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)
