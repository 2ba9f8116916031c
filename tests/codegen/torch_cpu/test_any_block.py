"""The torch-cpu target on operations that only look like what it has a kernel for: what the interpreter gives, on any block."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tapestry.codegen.torch_cpu import FEWEST, TorchCpu
from tapestry.codegen.torch_cpu.kernels import from_numpy, to_numpy
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, whole
from tapestry.ir.syntax.parser import parse
from tapestry.ir.types import itemsize
from tapestry.rewrites.core.rule_check import random_feeds
from tapestry.runtime.arrays import torch_dtype
from tapestry.verify import interp
from tests.support.block_buffers import read_box

CASES = {
    "diagonal taps": """input x: f32[2, 3, 8, 8]
input k: f32[4, 3, 3, 3]
y: f32[2, 4, 6, 6] = op [b: 2, o: 4, h: 6, w: 6 | c: 3 sum, r: 3 sum]
  reads x[b, c, h + r, w + r], k[o, c, r, r]
  body x * k""",
    "weights of each place": """input x: f32[2, 3, 5, 6]
input k: f32[4, 3, 5, 6]
y: f32[2, 4, 5, 6] = op [b: 2, o: 4, h: 5, w: 6 | c: 3 sum]
  reads x[b, c, h, w], k[o, c, h, w]
  body x * k""",
    "weights of each row": """input x: f32[2, 3, 5, 8]
input k: f32[4, 3, 5, 3]
y: f32[2, 4, 5, 6] = op [b: 2, o: 4, h: 5, w: 6 | c: 3 sum, s: 3 sum]
  reads x[b, c, h, w + s], k[o, c, h, s]
  body x * k""",
    "channels are taps": """input x: f32[2, 3, 8, 6]
input k: f32[4, 3, 3, 1]
y: f32[2, 4, 6, 6] = op [b: 2, o: 4, h: 6, w: 6 | c: 3 sum]
  reads x[b, c, h + c, w], k[o, c, c, 0]
  body x * k""",
    "a tap of many": """input x: f32[2, 3, 8, 8]
input k: f32[4, 3, 3, 3]
y: f32[2, 4, 8, 6] = op [b: 2, o: 4, h: 8, w: 6 | c: 3 sum, s: 3 sum]
  reads x[b, c, h, w + s], k[o, c, 0, s]
  body x * k""",
    "a channel of many": """input x: f32[2, 1, 8, 8]
input k: f32[4, 3, 3, 3]
y: f32[2, 4, 6, 6] = op [b: 2, o: 4, h: 6, w: 6 | r: 3 sum, s: 3 sum]
  reads x[b, 0, h + r, w + s], k[o, 0, r, s]
  body x * k""",
    "channels with gaps": """input x: f32[2, 6, 8, 8]
input k: f32[4, 4, 3, 3]
y: f32[2, 4, 6, 6] = op [b: 2, o: 4, h: 6, w: 6 | c: 4 sum, r: 3 sum, s: 3 sum]
  reads x[b, c + floor((c)/2), h + r, w + s], k[o, c, r, s]
  body x * k""",
    "a pool of diagonals": """input x: f32[2, 3, 8, 8]
y: f32[2, 3, 6, 6] = op [b: 2, c: 3, h: 6, w: 6 | r: 3 max]
  reads x[b, c, h + r, w + r]
  body x""",
    "spread channels that a pad adds": """input x: f32[2, 3, 5, 5]
input k: f32[4, 6, 3, 3]
y: f32[2, 6, 9, 9] = op [b: 2, o: 6, h: 9, w: 9 | c: 4 sum, r: 3 sum, s: 3 sum]
  reads x[b, c, floor((h - r + 1)/2), floor((w - s + 1)/2)] when ((h - r + 1) mod 2) == 0 when ((w - s + 1) mod 2) == 0 else 0.0, k[c, o, r, s]
  body x * k""",
    "a cast after the product": """input a: f32[4, 5]
input b: f32[5, 6]
y: i32[4, 6] = op [i: 4, n: 6 | m: 5 sum]
  reads a[i, m], b[m, n]
  body cast((a * b), i32)""",
    "a cast of narrow products": """input a: i8[4, 5]
input b: i8[5, 6]
y: i32[4, 6] = op [i: 4, n: 6 | m: 5 sum]
  reads a[i, m], b[m, n]
  body cast((a * b), i32)""",
    "sums of other rows": """input x: f32[6, 16]
input z: f32[6, 16]
input v: f32[16, 20]
input w: f32[16, 20]
y: f32[6, 20] = op [i: 6, n: 20 | m: 16 sums2]
  reads x[i, m], v[m, n], z[i, m], w[m, n]
  body x * v, z * w
  then acc0 * sigmoid(acc1)""",
    "sums turned": """input x: f32[6, 16]
input z: f32[6, 16]
input v: f32[16, 6]
input w: f32[16, 6]
y: f32[6, 6] = op [i: 6, n: 6 | m: 16 sums2]
  reads x[i, m], v[m, n], u = x[n, m], w[m, i]
  body x * v, u * w
  then acc0 * sigmoid(acc1)""",
    "sums with residuals": """input x: f32[6, 16]
input r: f32[6, 20]
input v: f32[16, 20]
input w: f32[16, 20]
y: f32[6, 20] = op [i: 6, n: 20 | m: 16 sums2]
  reads x[i, m], v[m, n], w[m, n], r[i, n]
  body x * v, x * w
  then (acc0 + r) * sigmoid(acc1)""",
    "a row read where it always may be": """input a: f32[4, 5]
input b: f32[5, 6]
y: f32[4, 6] = op [i: 4, n: 6 | m: 5 sum, k: 3 sum]
  reads a[i, m] when k >= 0 else 0.0, b[m, n]
  body a * b""",
    "weighted along more than the scores": """input s: f32[3, 5]
input v: f32[5, 2, 4]
y: f32[3, 4] = op [i: 3, e: 4 | j: 5 softsum, k: 2 softsum]
  reads s[i, j], v[j, k, e]
  body s, 1.0, v
  then acc2 / acc1""",
    "images that are parts": """input x: f32[1, 6, 9, 8]
input k: f32[5, 3, 3, 3]
y: f32[1, 5, 7, 6] = op [b: 1, o: 5, h: 7, w: 6 | c: 3 sum, r: 3 sum, s: 3 sum]
  reads x[b, c + 2, h + r, w + s], k[o, c, r, s]
  body x * k""",
    "products of wide unsigned integers": """input a: u32[4, 5]
input b: u32[5, 6]
y: u32[4, 6] = op [i: 4, n: 6 | m: 5 sum]
  reads a[i, m], b[m, n]
  body a * b""",
    "rows of an empty table": """input x: f32[0, 3]
input i: i64[4]
y: f32[4, 3] = op [n: 4, k: 3 | v: 0 sum]
  reads i[n], x[v, k]
  body where(eq(i, index(v)), x, 0.0)""",
    "bytes beside floats": """input x: f8e4m3fn[4]
y: f8e4m3fn[8] = op [i: 8]
  reads x[i - 2] else 1.5
  body x""",
    "bytes beside integers": """input x: i4[4]
y: i4[8] = op [i: 8]
  reads x[i - 2] else -3
  body x""",
    "zeros beside complex numbers": """input x: c64[4]
y: c64[8] = op [i: 8]
  reads x[i - 2] else 0
  body x""",
    "integers of which one has a dimension more": """input x: i32[3, 4, 2]
input w: i32[4, 5]
y: i32[3, 5] = op [i: 3, n: 5 | m: 4 sum, z: 2 sum]
  reads x[i, m, z], w[m, n]
  body x * w""",
    "windows that step over the first cell": """input x: f32[2, 3, 7, 9]
input k: f32[5, 3, 1, 3]
y: f32[2, 5, 3, 4] = op [b: 2, o: 5, h: 3, w: 4 | c: 3 sum, r: 1 sum, s: 3 sum]
  reads x[b, c, 2*h + 2*r - 1, 2*w + s] when 2*h + 2*r - 1 >= 0 else 0.0, k[o, c, r, s]
  body x * k""",
    "bytes whose windows step over the first cell": """input x: u8[2, 3, 7, 9]
input k: i8[5, 3, 1, 3]
y: i32[2, 5, 3, 4] = op [b: 2, o: 5, h: 3, w: 4 | c: 3 sum, r: 1 sum, s: 3 sum]
  reads x[b, c, 2*h + 2*r - 1, 2*w + s] when 2*h + 2*r - 1 >= 0 else 0, k[o, c, r, s]
  body cast(x, i32) * cast(k, i32)""",
    "no rows in steps, partly outside": """input x: f32[4, 3, 6]
y: f32[4, 0, 4] = op [b: 4, o: 0, h: 4]
  reads x[b, 2*o + 1, h - 1] when h - 1 >= 0 else 0.0
  body abs(x)""",
    "one channel, of which strides leave a column over": """input x: f32[2, 1, 7, 4]
input k: f32[3, 1, 3, 3]
y: f32[2, 3, 3, 1] = op [b: 2, o: 3, h: 3, w: 1 | c: 1 sum, r: 3 sum, s: 3 sum]
  reads x[b, c, h + 2*r, 3*w + s], k[o, c, r, s]
  body x * k""",
    "turned taps": """input x: f32[2, 3, 8, 8]
input k: f32[3, 3, 4, 3]
y: f32[2, 4, 6, 6] = op [b: 2, o: 4, h: 6, w: 6 | c: 3 sum, r: 3 sum, s: 3 sum]
  reads x[b, c, h - r + 2, w + s], k[s, r, o, c]
  body x * k""",
}


def blocks(op: Block) -> list[Box]:
    """The whole, and halves along each dimension of the output."""
    all_of = whole(tuple(d.size for d in op.space))
    out = [all_of]
    for i, d in enumerate(op.dims):
        out += [(*all_of[:i], b, *all_of[i + 1 :]) for b in ((0, d.size // 2), (d.size // 2, d.size)) if d.size > 1]
    return out


Prepared = tuple[Any, Sequence[Any], Box]


def prepare(graph: Graph, feeds: dict[str, np.ndarray], block: Box, *, packed: bool, wide: bool) -> Prepared | None:
    """One block's kernel and what it is given: ``packed`` weights (``None`` where there are none), buffers of no more than is
    read, or ``wide``: of all."""
    op, target = graph.ops[0], TorchCpu()
    assert isinstance(op, Block)
    sizes = [graph.tensors[r.tensor].shape for r in op.reads]
    ins = tuple(whole(s) if wide else read_box(op, graph, k, block) for k, s in enumerate(sizes))
    out = block[: len(op.dims)]
    kernel = target.kernel(graph, Kernel(op=0, mode="full", block=block, ins=ins, outs=(out,) * len(op.outs)))
    given = [from_numpy(feeds[r.tensor][tuple(slice(*b) for b in box)].copy()) for r, box in zip(op.reads, ins, strict=True)]
    if packed:
        if not kernel.packs:
            return None
        given = [kernel.packs[k].run(x) if k in kernel.packs else x for k, x in enumerate(given)]
        kernel = kernel.packed
    return kernel, given, out


def run(graph: Graph, prepared: Prepared) -> list[np.ndarray]:
    """The block, in C where there is a function, as in a program of many small operations."""
    kernel, given, out = prepared
    dtypes = [graph.tensors[t].dtype for t in graph.ops[0].outs]
    if recorder := TorchCpu().recorders(dict.fromkeys(range(FEWEST), kernel)).get(0):
        count = int(np.prod([hi - lo for lo, hi in out]))
        memory = [torch.full((count * itemsize(d),), 255, dtype=torch.uint8).view(torch_dtype(d)) for d in dtypes]
        recorder.bind(given, memory).run()
        return [to_numpy(a(m), d) for a, m, d in zip(recorder.arrays, memory, dtypes, strict=True)]
    return [to_numpy(x, d) for x, d in zip(kernel(given, []), dtypes, strict=True)]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", CASES)
def test_any_block(name: str) -> None:
    graph = parse(f"graph g\n{CASES[name]}\noutput y")
    feeds = random_feeds(graph, np.random.default_rng(0))
    feeds = {t: a * 31 if a.dtype == np.int8 else a for t, a in feeds.items()}
    op = graph.ops[0]
    assert isinstance(op, Block)
    want = interp.run(replace(graph, outputs=op.outs), feeds, wide=True)
    ways = list(itertools.product(blocks(op), (False, True), (False, True)))
    kernels = [prepare(graph, feeds, block, packed=packed, wide=wide) for block, packed, wide in ways]  # all before one runs
    for (block, packed, wide), kernel in zip(ways, kernels, strict=True):
        got = kernel and run(graph, kernel)
        place = tuple(slice(*b) for b in block[: len(op.dims)])
        for t, a in zip(op.outs, got or (), strict=bool(got)):
            a, b = (v if v.dtype.kind == "c" else v.astype(np.float64) for v in (a, want[t][place]))
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=f"{block} {packed=} {wide=}")


@pytest.mark.parametrize(
    "body", ["2.5", "cast(index(i), f32)", "index(i)", "cast(index(i), i64)", "where(ge(index(i), 0), 1, 0)"]
)
@pytest.mark.parametrize("n", [1, 6])
def test_no_result_is_the_kernels_own(body: str, n: int) -> None:
    """Whoever gets a result may write to it: the next run gives the same."""
    dtype = "f32" if "." in body or "f32" in body else "i64"
    graph = parse(f"graph g\ny: {dtype}[{n}] = op [i: {n}]\n  body {body}\noutput y")
    kernel = TorchCpu().kernel(graph, Kernel(op=0, mode="full", block=((0, n),), ins=(), outs=(((0, n),),)))
    (first,) = kernel([], [])
    want = first.clone()
    first += 100
    assert torch.equal(kernel([], [])[0], want)


def test_a_state_is_in_memory_of_its_own() -> None:
    """One element of a reduction, too, is a copy of what is read: the input's place is used again while the state is there."""
    text = "input x: u16[3, 4]\ny: u16[3] = op [i: 3 | m: 4 sum]\n  reads x[i, m]\n  body x"
    block = ((0, 3), (1, 2))
    kernel = Kernel(op=0, mode="partial", block=block, ins=(block,), outs=(((0, 3),),))
    given = torch.tensor([[1], [2], [3]], dtype=torch.uint16)
    (state,) = TorchCpu().kernel(parse(f"graph g\n{text}\noutput y"), kernel)([given], [])
    given.view(torch.int16).zero_()
    assert state.view(torch.int16).tolist() == [1, 2, 3]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("threads")
def test_means_of_large_images_are_near() -> None:
    body = "reads x[b, c, h, w]\n  body x\n  then acc0 / 4000000.0"
    space = "[b: 1, c: 2 | h: 2000 sum, w: 2000 sum]"
    graph = parse(f"graph g\ninput x: f32[1, 2, 2000, 2000]\ny: f32[1, 2] = op {space}\n  {body}\noutput y")
    x = np.random.default_rng(0).uniform(0.1, 0.2, (1, 2, 2000, 2000)).astype(np.float32)
    kernel = prepare(graph, {"x": x}, whole(x.shape), packed=False, wide=True)
    assert kernel
    got = run(graph, kernel)
    np.testing.assert_allclose(got[0], x.mean((2, 3), dtype=np.float64), rtol=5e-6)


def test_nothing_is_picked_from_nothing() -> None:
    """All of the columns are outside; the rows are told backwards."""
    text = """graph g
input x: f32[9, 3, 1]
input w: f32[2]
y: f32[8, 1] = op [b: 8, h: 1 | c: 2 sum]
  reads x[8 - b, c + 1, 2*h - 1] when 2*h - 1 >= 0 else 1.0, w[c]
  body x * w
output y"""
    ins = (((8, 9), (1, 3), (1, 1)), ((0, 2),))
    kernel = Kernel(op=0, mode="full", block=((0, 1), (0, 1), (0, 2)), ins=ins, outs=(((0, 1), (0, 1)),))
    (found,) = TorchCpu().kernel(parse(text), kernel)([torch.ones(0, 0, 0), torch.tensor([2.0, 3.0])], [])
    assert found.tolist() == [[5.0]]
