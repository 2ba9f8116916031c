"""Operations that torch has no operator for, at sizes where that matters: loops in C, and what the interpreter gives."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

import tapestry
from tapestry.codegen.torch_cpu import TorchCpu, native
from tapestry.codegen.torch_cpu.c import generated_c
from tapestry.codegen.torch_cpu.c.blocks_c import How
from tapestry.codegen.torch_cpu.kernels import build
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.syntax.parser import parse
from tapestry.rewrites.core.rule_check import random_feeds
from tapestry.verify import interp

CASES = {
    "sums over windows of what is worked out": """input x: f32[1, 7, 61, 59]
input w: f32[7]
y: f32[1, 7, 30, 29] = op [b: 1, c: 7, h: 30, w_: 29 | r: 3 sum, s: 3 sum]
  reads x[b, c, 2*h + r - 1, 2*w_ + s - 1] when 2*h + r - 1 >= 0 when 2*w_ + s - 1 >= 0 else 0.0, w[c]
  body max(x * w, 0.0)""",
    "maxima over windows of what is worked out": """input x: f32[1, 5, 63, 65]
y: f32[1, 5, 61, 33] = op [b: 1, c: 5, h: 61, w: 33 | r: 3 max, s: 2 max]
  reads x[b, c, h + r, w + s + 31]
  body abs(x) - x""",
    "pixels written several times": """input x: f32[1, 9, 31, 29]
y: f32[1, 9, 124, 87] = op [b: 1, c: 9, h: 124, w: 87]
  reads x[b, c, floor((h + 1)/4), floor((w)/3)] else 0.5
  body where(eq(index(((w) mod 3)), 0), x, x * 0.5)""",
    "products with a factor that would be written out": """input x: f32[1, 49, 96]
input k: f32[96, 2, 31]
y: f32[1, 96, 49] = op [b: 1, o: 96, w: 49 | c: 2 sum, s: 31 sum]
  reads x[b, w + s - 15, 2*floor((o)/2) + c] else 0.0, k[o, c, -s + 30]
  body x * k""",
    "windows of an image that lies in rows": """input x: f32[1, 782, 19]
input k: f32[19, 3, 3]
y: f32[1, 782, 19] = op [b: 1, p: 782, o: 19 | r: 3 sum, s: 3 sum]
  reads x[b, 34*r + s + p - 35, o] when s + ((p) mod 34) - 1 >= 0 when -s - ((p) mod 34) + 34 >= 0 else 0.0, k[o, r, s]
  body x * k""",
    "the least and the greatest of rows": """input x: f32[23, 2051]
y: f32[23] = op [r: 23 | k: 2051 min.max]
  reads x[r, k]
  body x * 2.0, x
  then acc1 - acc0""",
    "the greatest of all": """input x: f32[61, 59]
y: f32[1] = op [o: 1 | r: 61 max, k: 59 max]
  reads x[r, k]
  body x""",
    "whole numbers of what may be none": """input x: f32[61, 59]
y: i32[61, 59] = op [r: 61, k: 59]
  reads x[r, k]
  body cast(x * 1000000000.0, i32)""",
    "long whole numbers of what may be none": """input x: f32[61, 59]
y: i64[61, 59] = op [r: 61, k: 59]
  reads x[r, k]
  body cast(x * 4000000000000000000.0, i64)""",
    "channels of two halves in turns": """input x: f32[1, 58, 28, 27]
y: f32[1, 58, 28, 27] = op [b: 1, c: 58, h: 28, w: 27]
  reads x[b, 29*((c) mod 2) + floor((c)/2), h, w]
  body x""",
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CASES)
def test_torch_has_no_operator_for_it(name: str) -> None:
    if native.library() is None:
        pytest.skip("no compiler")
    graph = parse(f"graph g\n{CASES[name]}\noutput y")
    feeds = random_feeds(graph, np.random.default_rng(3))
    for special in (np.nan, np.inf, -np.inf, -0.0):
        feeds["x"].flat[np.random.default_rng(4).integers(feeds["x"].size)] = special
    op, ins = graph.ops[0], tuple(whole(graph.tensors[t].shape) for t in feeds)
    out = whole(graph.tensors["y"].shape)
    kernel = TorchCpu().kernel(
        graph, Kernel(op=0, mode="full", block=whole(tuple(d.size for d in op.space)), ins=ins, outs=(out,))
    )
    assert kernel.functions and kernel.few == (name == "the least and the greatest of rows")  # for those torch has operators
    kernel = replace(kernel, few=False)
    given = [torch.from_numpy(a) for a in feeds.values()]
    (first,) = kernel(given, [])
    kept = first.clone()
    with np.errstate(invalid="ignore"):
        want = interp.run(replace(graph, outputs=op.outs), feeds, wide=True)["y"]
    np.testing.assert_allclose(first.numpy(), want, rtol=1e-5, atol=1e-6)
    (second,) = kernel([x * 0 for x in given], [])
    assert second.data_ptr() != first.data_ptr() and torch.equal(torch.nan_to_num(first), torch.nan_to_num(kept))


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize(("wide", "step"), [(2, 1), (3, 2), (4, 3)])
def test_neighbours_read_under_one_condition(wide: int, step: int) -> None:
    """gcc 12 loses the first of them where it makes masked loads of such reads."""
    body = f"""const float *restrict p0 = p[0];
const float *restrict p1 = p[1];
float *restrict y = p[2];
for (int64_t i = 0; i < 8; i++) {{
for (int64_t j = 0; j < 2; j++) {{
y[(2 * i + j)] = ((i < 2) ? p0[(2 * i + j)] : (((i - 2) >= 0) ? p1[({wide} * (i - 2) + {step} * j)] : 0.0f));
}}}}"""
    assert generated_c.reads_under_conditions(body)
    past, new = np.arange(4, dtype=np.float32) + 1, np.arange(6 * wide, dtype=np.float32) + 100
    found = np.zeros((8, 2), np.float32)
    given = (ctypes.c_void_p * 3)(*(a.ctypes.data for a in (past, new, found)))
    generated_c.function(generated_c.register(body))(None, given)
    np.testing.assert_array_equal(found[:2], past.reshape(2, 2))
    np.testing.assert_array_equal(found[2:], new.reshape(6, wide)[:, : step + 1 : step])


def test_what_reads_under_a_condition_is_seen() -> None:
    assert not generated_c.reads_under_conditions("y[i] = ((p0[i] < 2) ? 1.0f : a) + p1[i];")
    assert generated_c.reads_under_conditions("float acc = v >= 0 && v < 5 ? p0[((v))] : 0.0f;")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_what_follows_a_convolution_is_done_where_its_result_lies() -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 17, 3, stride=2), torch.nn.Hardswish(), torch.nn.Conv2d(17, 17, 5, padding=2, groups=17),
        torch.nn.SiLU(), torch.nn.Conv2d(17, 9, 1), torch.nn.Hardsigmoid(),
    ).eval()  # fmt: skip
    x = torch.randn(1, 3, 45, 51)
    plan = tapestry.compile(net, example_inputs=(x,), devices=1)
    (name,) = plan.build.plan.graph.inputs
    results = [plan.run({name: given.numpy()}) for given in (x, x * -3.0)]
    for got, given in zip(results, (x, x * -3.0), strict=True):
        (value,) = got.values()
        np.testing.assert_allclose(value, net(given).detach().numpy(), rtol=1e-4, atol=1e-5)


SIDE_BY_SIDE = {
    "a weight's norm along its last axis": """input w: f32[37, 19, 70]
input g: f32[1, 1, 70]
y: f32[37, 19, 70] = op [a: 37, b: 19, c: 70 | r: 37 sum, s: 19 sum]
  reads w[r, s, c], g[0, 0, c], a2 = w[a, b, c]
  body w * w
  then a2 * (g / sqrt(acc0))""",
    "a pool of an image": """input x: f32[2, 71, 9, 6]
input z: f32[2, 71, 9, 6]
y: f32[2, 71, 9, 6] = op [b: 2, c: 71, h: 9, w: 6 | r: 3 sum, s: 3 sum]
  reads x[b, c, h + r - 1, w + s - 1] else 0.0, z[b, c, h, w]
  body x
  then (acc0 / 9.0) - z""",
    "a norm of an image": """input x: f32[2, 71, 9, 6]
input g: f32[71, 1, 1]
y: f32[2, 71, 9, 6] = op [b: 2, c: 71, h: 9, w: 6 | k: 71 moments, r: 9 moments, s: 6 moments]
  reads x[b, k, r, s], a1 = x[b, c, h, w], g[c, 0, 0]
  body 1.0, x, 0.0
  then ((a1 - acc1) / sqrt(((acc2 / acc0) + 1e-05))) * g""",
    "the largest of windows of what is worked out": """input x: f32[2, 71, 9, 6]
input g: f32[71]
y: f32[2, 71, 9, 6] = op [b: 2, c: 71, h: 9, w: 6 | r: 3 max, s: 3 max]
  reads x[b, c, h + r - 1, w + s - 1] else 0.5, g[c]
  body (x * g) - 1.0
  then max(acc0, 0.25)""",
    "a norm of planes": """input x: f32[2, 71, 9, 6]
input g: f32[71]
y: f32[2, 71, 9, 6] = op [b: 2, c: 71, h: 9, w: 6 | r: 9 moments, s: 6 moments]
  reads x[b, c, r, s], a1 = x[b, c, h, w], g[c]
  body 1.0, x, 0.0
  then ((a1 - acc1) / sqrt(((acc2 / acc0) + 1e-05))) * g""",
    "channels last of an image": """input x: f32[2, 71, 9, 6]
input g: f32[71]
y: f32[2, 9, 6, 71] = op [b: 2, h: 9, w: 6, c: 71 | k: 71 moments]
  reads x[b, k, h, w], a1 = x[b, c, h, w], g[c]
  body 1.0, x, 0.0
  then ((a1 - acc1) / sqrt(((acc2 / acc0) + 1e-05))) * g""",
    "an image of several": """input x: f32[2, 35, 9, 6]
input z: f32[2, 36, 9, 6]
input g: f32[71]
y: f32[2, 71, 9, 6] = op [b: 2, c: 71, h: 9, w: 6]
  reads x[b, c, h, w] else 0.0, z[b, c - 35, h, w] else 0.0, g[c]
  body max((x + z) * g, 0.0)""",
}


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("laid", ["row-major", "by pixels"])
@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_neighbours_side_by_side(name: str, laid: str) -> None:
    if native.library() is None:
        pytest.skip("no compiler")
    graph = parse(f"graph g\n{SIDE_BY_SIDE[name]}\noutput y")
    feeds, op = random_feeds(graph, np.random.default_rng(5)), graph.ops[0]
    assert isinstance(op, Block)
    ins = tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads)
    kernel = TorchCpu().kernel(
        graph,
        Kernel(
            op=0, mode="full", block=whole(tuple(d.size for d in op.space)), ins=ins, outs=(whole(graph.tensors["y"].shape),)
        ),
    )
    assert kernel.functions and not kernel.few
    given = {t: torch.from_numpy(a) for t, a in feeds.items()}
    if laid == "by pixels":
        given = {t: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for t, x in given.items()}
    (got,) = kernel([given[r.tensor] for r in op.reads], [])
    np.testing.assert_allclose(got.numpy(), interp.run(graph, feeds, wide=True)["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_at_a_new_size_what_follows_a_product_is_torchs_where_nothing_was_compiled() -> None:
    if native.library() is None:
        pytest.skip("no compiler")
    graph = parse("""graph g
input x: f32[301, 700]
input w: f32[700, 1000]
input s: f32[1, 1000]
y: f32[301, 1000] = op [m: 301, n: 1000 | k: 700 sum]
  reads x[m, k], w[k, n], s[0, n]
  body x * w
  then sigmoid((acc0 * 0.37) + s) * acc0
output y""")
    op, shapes = graph.ops[0], {t: graph.tensors[t].shape for t in ("x", "w", "s")}
    assert isinstance(op, Block)
    kernel = Kernel(
        op=0, mode="full", block=whole((301, 1000, 700)), ins=tuple(map(whole, shapes.values())), outs=(whole((301, 1000)),)
    )
    run = build(graph, kernel, How(any_size=True, compiles=False))
    assert run.packs
    x, w, s = (torch.from_numpy(a) for a in random_feeds(graph, np.random.default_rng(6)).values())
    (got,) = run.packed([x, run.packs[1].run(w), s], [])
    product = x.double() @ w.double()
    want = torch.sigmoid(0.37 * product + s) * product
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4, atol=1e-3)
