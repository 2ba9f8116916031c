"""Convolutions whose axes lie otherwise than torch's: found on views of the buffers, right to double precision."""

from __future__ import annotations

import numpy as np
import pytest

from tapestry.codegen.torch_cpu import TorchCpu, native
from tapestry.codegen.torch_cpu.kernels import build, from_numpy
from tapestry.codegen.torch_cpu.views import seen
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.syntax.parser import parse
from tapestry.verify import interp

pytestmark = pytest.mark.usefixtures("threads")

FLAT = """graph flat
input x: f32[1, 35, 19]
input k: f32[19, 1, 3, 3]
input b: f32[19]
y: f32[1, 35, 19] = op [n: 1, p: 35, o: 19 | r: 3 sum, s: 3 sum]
  reads x[0, 7*r + s + p - 8, o] when r + floor((p)/7) - 1 >= 0 when -r - floor((p)/7) + 5 >= 0 when s + ((p) mod 7) - 1 >= 0 \
when -s - ((p) mod 7) + 7 >= 0 else 0.0, k[o, 0, r, s], b[o]
  body x * k
  then acc0 + b
output y
"""
FEATURES_FIRST = """graph features
input x: f32[1, 35, 19]
input k: f32[19, 1, 3, 3]
y: f32[19, 1, 35, 1] = op [o: 19, n: 1, p: 35, c: 1 | r: 3 sum, s: 3 sum]
  reads x[0, 7*r + s + p - 8, o] when r + floor((p)/7) - 1 >= 0 when -r - floor((p)/7) + 5 >= 0 when s + ((p) mod 7) - 1 >= 0 \
when -s - ((p) mod 7) + 7 >= 0 else 0.0, k[o, c, r, s]
  body x * k
output y
"""
HALF = """graph half
input x: f32[2, 48, 5]
input k: f32[7, 5, 2, 2]
input z: f32[2, 12, 7]
y: f32[2, 12, 7] = op [n: 2, p: 12, o: 7 | c: 5 sum, r: 2 sum, s: 2 sum]
  reads x[n, 8*r + s + 16*floor((p)/4) + 2*((p) mod 4), c], k[o, c, r, s], z[n, p, o]
  body x * k
  then max(acc0, 0.0) * z
output y
"""
LAST = """graph last
input x: f32[2, 6, 9, 21]
input k: f32[21, 3, 5]
y: f32[2, 21, 6, 9] = op [n: 2, o: 21, h: 6, w: 9 | r: 3 sum, s: 5 sum]
  reads x[n, h + r - 1, s + w - 2, o] else 0.0, k[o, r, s]
  body x * k
  then acc0 * sigmoid(acc0)
output y
"""
GROUPED = """graph grouped
input x: f32[1, 23, 30]
input k: f32[51, 10, 6]
input b: f32[51]
y: f32[1, 51, 24] = op [n: 1, o: 51, w: 24 | c: 10 sum, s: 6 sum]
  reads x[n, s + w - 3, c + 10*floor((o)/17)] else 0.0, k[o, c, s], b[o]
  body x * k
  then max(acc0 + b, 0.0)
output y
"""
LINE = """graph line
input x: f32[1, 11, 40]
input k: f32[20, 11, 3]
y: f32[1, 20, 19] = op [n: 1, o: 20, w: 19 | c: 11 sum, s: 3 sum]
  reads x[n, c, 2*s + 2*w - 2] else 0.0, k[o, c, s]
  body x * k
output y
"""


@pytest.mark.parametrize("text", [FLAT, FEATURES_FIRST, HALF, LAST, GROUPED, LINE], ids=lambda t: t.split()[1])
def test_convolutions_in_other_orders(text: str) -> None:
    graph = parse(text)
    (op,) = graph.ops
    assert isinstance(op, Block)
    draw = np.random.default_rng(0)
    values = {t: draw.standard_normal(graph.tensors[t].shape).astype(np.float32) for t in graph.inputs}
    want = interp.run(graph, values, wide=True)["y"]
    shapes = [graph.tensors[r.tensor].shape for r in op.reads]
    kernel = Kernel(
        op=0, mode="full", block=whole(tuple(d.size for d in op.space)), ins=tuple(map(whole, shapes)),
        outs=(whole(tuple(d.size for d in op.dims)),),
    )  # fmt: skip
    assert seen(op, graph, kernel) is not None
    run = build(graph, kernel)
    assert run.packs
    ins = [from_numpy(values[r.tensor]) for r in op.reads]
    packed = [run.packs[k].run(x) if k in run.packs else x for k, x in enumerate(ins)]
    for got in (run(ins, []), run.packed(packed, []), TorchCpu().kernel(graph, kernel)(ins, [])):
        assert tuple(got[0].shape) == want.shape
        np.testing.assert_allclose(got[0].numpy(), want, rtol=1e-5, atol=1e-5)
    assert text == HALF or native.library() is None or run.packed.bind
    for recorder in TorchCpu().recorders({0: run.packed, 1: run.packed}).values():
        memory = from_numpy(np.zeros(want.size, np.float32))
        target = TorchCpu()
        call = target.bind(recorder, packed, [memory], target.scratch(1 << 20))
        for _ in range(2 if call else 0):  # the same call again
            assert call
            memory.fill_(float("nan"))
            call.run()
            np.testing.assert_allclose(recorder.arrays[0](memory).numpy(), want, rtol=1e-5, atol=1e-5)


SIBLINGS = """graph siblings
input x: f32[1, 168, 19]
input k: f32[19, 1, 3, 3]
input b: f32[19]
input l: f32[19, 1, 3, 3]
y: f32[1, 19, 7, 6], z: f32[1, 19, 7, 6] = op [n: 1, o: 19, h: 7, w: 6 | c: 1 sums2, r: 3 sums2, s: 3 sums2]
  reads x[0, 24*h + 12*r + s + 2*w - 13, o] when 2*h + r - 1 >= 0 when s + 2*w - 1 >= 0 else 0.0, k[o, c, r, s], b[o], l[o, c, r, s]
  body x * k, x * l
  then acc0 + b, acc1
output y, z
"""


def test_two_convolutions_of_one_image() -> None:
    graph = parse(SIBLINGS)
    (op,) = graph.ops
    draw = np.random.default_rng(0)
    values = {t: draw.standard_normal(graph.tensors[t].shape).astype(np.float32) for t in graph.inputs}
    want = interp.run(graph, values, wide=True)
    assert isinstance(op, Block)
    ins = tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads)
    block, out = whole(tuple(d.size for d in op.space)), whole(tuple(d.size for d in op.dims))
    run = build(graph, Kernel(op=0, mode="full", block=block, ins=ins, outs=(out, out)))
    assert run.packs
    given = [from_numpy(values[r.tensor]) for r in op.reads]
    packed = [run.packs[k].run(x) if k in run.packs else x for k, x in enumerate(given)]
    for got in (run(given, []), run.packed(packed, [])):
        for x, name in zip(got, op.outs, strict=True):
            np.testing.assert_allclose(x.numpy(), want[name], rtol=1e-5, atol=1e-5)


def test_what_is_no_convolution_is_not_one() -> None:
    for wrong in (
        FLAT.replace("-s - ((p) mod 7) + 7", "-s - ((p) mod 7) + 6"),
        FLAT.replace("7*r + s + p - 8", "7*r + s + p - 7"),
    ):
        graph = parse(wrong)
        (op,) = graph.ops
        assert isinstance(op, Block)
        block = whole(tuple(d.size for d in op.space))
        ins = tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads)
        assert seen(op, graph, Kernel(op=0, mode="full", block=block, ins=ins, outs=(whole((1, 35, 19)),))) is None
