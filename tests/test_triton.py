"""Generated Triton kernels in Triton's interpreter, against the reference evaluator and against numpy and torch."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; ahead-of-time tests run in processes of their own

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tapestry.codegen.triton import Knobs, generate, kernel_key, launch, unavailable
from tapestry.codegen.triton.execute import load
from tapestry.codegen.triton.primitives import ROWS
from tapestry.errors import BuildError, TapestryError
from tapestry.ir.expr import PRIMITIVES
from tapestry.ir.graph import Block, Graph, Opaque
from tapestry.ir.index import bounds
from tapestry.ir.kernel import Box, Kernel, whole
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.parse import parse
from tapestry.verify import interp

Arrays = dict[str, np.ndarray[Any, Any]]
TORCH = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32,
    "u64": torch.uint64, "bool": torch.bool,
}  # fmt: skip
TOLERANCE = {"f64": 1e-12, "f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a masked load leaves in its other lanes is undefined on a GPU; the interpreter's zeros would hide a use of it."""
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_masked_load

    def load_with_garbage(self: Any, ptrs: Any, mask: Any, other: Any, *hints: Any) -> Any:
        if other is None:
            dtype = ptrs.get_element_ty()
            kind = interpreter._get_np_dtype(dtype)
            garbage = np.nan if kind.kind == "f" else 0x7FFF if str(dtype) == "bf16" else 0x55
            other = interpreter.TensorHandle(np.full(ptrs.data.shape, garbage, kind), dtype)
        return plain(self, ptrs, mask, other, *hints)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", load_with_garbage)


def random_arrays(graph: Graph, seed: int = 0) -> Arrays:
    """Distinct random values for every input; small integers, so that integer products do not overflow."""
    rng = np.random.default_rng(seed)
    out: Arrays = {}
    for t in graph.inputs:
        tensor = graph.tensors[t]
        if tensor.dtype == "bool":
            out[t] = rng.random(tensor.shape) < 0.4
        elif tensor.dtype.startswith(("i", "u")):
            low = 0 if tensor.dtype[0] == "u" else -9
            out[t] = rng.integers(low, 10, tensor.shape).astype(interp.numpy_dtype(tensor.dtype))
        else:
            out[t] = rng.standard_normal(tensor.shape).astype(interp.numpy_dtype(tensor.dtype))
    return out


def to_torch(a: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    if dtype == "bf16":
        return torch.from_numpy(np.ascontiguousarray(a.astype(np.float32))).to(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(a.astype(interp.numpy_dtype(dtype))))


def from_torch(t: torch.Tensor) -> np.ndarray[Any, Any]:
    return t.float().numpy().astype(ml_dtypes.bfloat16) if t.dtype == torch.bfloat16 else t.numpy()


def fresh(box: Box, dtype: str) -> torch.Tensor:
    """An output buffer of values that no kernel writes: a cell left alone shows."""
    extents = [hi - lo for lo, hi in box]
    return torch.full(extents, float("nan") if dtype in TOLERANCE else 77 if dtype != "bool" else True, dtype=TORCH[dtype])


def footprint(graph: Graph, op: Block, pos: int, block: Box, extra: int) -> Box:
    """Hull of what a read touches over a block, inside the tensor, with some cells more on every side."""
    read = op.reads[pos]
    box = {d.name: (lo, hi - 1) for d, (lo, hi) in zip(op.space, block, strict=True)}
    out: list[tuple[int, int]] = []
    for e, n in zip(read.index, graph.tensors[read.tensor].shape, strict=True):
        lo, hi = bounds(e, box)
        out.append((max(0, min(int(lo), n - 1) - extra), min(n, max(int(hi), 0) + 1 + extra)))
    return tuple(out)


def run_kernel(
    graph: Graph, at: int, values: Mapping[str, np.ndarray[Any, Any]], *, mode: str = "full", block: Box | None = None,
    extra: int = 0, states: list[np.ndarray[Any, Any]] | None = None, knobs: Knobs | None = None,
) -> list[np.ndarray[Any, Any]]:  # fmt: skip
    """Generate and run one kernel on exactly the buffers it asks for; its outputs over the block."""
    op = graph.ops[at]
    assert isinstance(op, Block)
    block = block or whole(tuple(d.size for d in op.space))
    mapped = block[: len(op.dims)]
    n = len(op.outs) if mode != "partial" else len(op.body)
    used = {"full": op.body_reads() | op.then_reads(), "partial": op.body_reads(), "finish": op.then_reads()}[mode]
    # what only ``then`` reads does not depend on the reduced part of a block
    ins = tuple(footprint(graph, op, p, block, extra) if p in used else None for p in range(len(op.reads)))
    outs = (mapped,) * n
    k = Kernel(op=at, mode=mode, block=mapped if mode == "finish" else block, ins=ins, outs=outs)
    tk = generate(graph, k, knobs)
    ast.parse(tk.source)
    arrays: list[torch.Tensor] = []
    for p in tk.reads:
        box = ins[p]
        assert box is not None
        tensor = graph.tensors[op.reads[p].tensor]
        arrays.append(to_torch(values[tensor.name][tuple(slice(lo, hi) for lo, hi in box)], tensor.dtype))
    dtypes = [e.dtype for e in op.body] if mode == "partial" else [graph.tensors[t].dtype for t in op.outs]
    arrays += [to_torch(s, e.dtype) for s, e in zip(states or [], op.body, strict=bool(states))]
    results = [fresh(b, d) for b, d in zip(outs, dtypes, strict=True)]
    launch(tk, [*arrays, *results])
    return [from_torch(r) for r in results]


def compare(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], dtype: str) -> None:
    """Equal (NaN at the same places), for floats up to the dtype's rounding relative to the largest value."""
    if dtype not in TOLERANCE:
        np.testing.assert_array_equal(got, want)
        return
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.abs(want[np.isfinite(want)])
    scale = float(finite.max()) if finite.size else 1.0
    tol = TOLERANCE[dtype]
    np.testing.assert_allclose(got, want, rtol=tol * 4, atol=tol * max(scale, 1e-30), equal_nan=True)


def check(text: str, values: Arrays | None = None, knobs: Knobs | None = None) -> Arrays:
    """Run every operation of a graph as a Triton kernel and compare its outputs with the reference."""
    graph = parse(text)
    values = values or random_arrays(graph)
    want = interp.run(graph, values, wide=True)
    have: Arrays = dict(values)
    for i, op in enumerate(graph.ops):
        have.update(zip(op.outs, run_kernel(graph, i, have, knobs=knobs), strict=True))
    for t in graph.outputs:
        compare(have[t], want[t], graph.tensors[t].dtype)
    return have


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


CONTRACTIONS = {
    "matmul, bias, relu": """graph g
        input x: f32[33, 37]
        input w: f32[37, 21]
        input b: f32[21]
        y: f32[33, 21] = op [i: 33, n: 21 | m: 37 sum] reads x[i, m], w[m, n], b[n]
          body x * w then max((acc0 + b), 0.0)
        output y""",
    "batched, transposed": """graph g
        input x: f32[2, 3, 7, 13]
        input w: f32[3, 13, 5]
        y: f32[2, 3, 5, 7] = op [b0: 2, b1: 3, n: 5, i: 7 | m: 13 sum] reads w[b1, m, n], x[b0, b1, i, m]
          body w * x then acc0
        output y""",
    "prologue and residual": """graph g
        input x: f32[13, 18]
        input g: f32[18]
        input w: f32[9, 18]
        input r: f32[13, 9]
        y: f32[13, 9] = op [i: 13, n: 9 | m: 18 sum] reads x[i, m], g[m], w[n, m], r[i, n]
          body sigmoid(x + g) * exp(w) then (acc0 / 3.0) + r
        output y""",
    "conv 3x3 stride 2 pad 1": """graph g
        input x: f32[2, 5, 13, 9]
        input k: f32[7, 5, 3, 3]
        y: f32[2, 7, 7, 5] = op [b: 2, o: 7, h: 7, w: 5 | c: 5 sum, r: 3 sum, s: 3 sum]
          reads x[b, c, 2*h + r - 1, 2*w + s - 1] else 0.0, k[o, c, r, s] body x * k then acc0
        output y""",
    "conv dilated, padded with ones": """graph g
        input x: f32[1, 3, 11, 11]
        input k: f32[4, 3, 3, 3]
        y: f32[1, 4, 11, 11] = op [b: 1, o: 4, h: 11, w: 11 | c: 3 sum, r: 3 sum, s: 3 sum]
          reads x[b, c, h + 2*r - 2, w + 2*s - 2] else 1.0, k[o, c, r, s] body x * k then acc0
        output y""",
    "conv grouped": """graph g
        input x: f32[2, 6, 7, 5]
        input k: f32[8, 3, 3, 3]
        y: f32[2, 8, 7, 5] = op [b: 2, o: 8, h: 7, w: 5 | c: 3 sum, r: 3 sum, s: 3 sum]
          reads x[b, c + 3*floor((o)/4), h + r - 1, w + s - 1] else 0.0, k[o, c, r, s] body x * k then acc0
        output y""",
    "conv depthwise": """graph g
        input x: f32[1, 6, 7, 5]
        input k: f32[6, 1, 3, 3]
        y: f32[1, 6, 7, 5] = op [b: 1, o: 6, h: 7, w: 5 | c: 1 sum, r: 3 sum, s: 3 sum]
          reads x[b, c + o, h + r - 1, w + s - 1] else 0.0, k[o, c, r, s] body x * k then acc0
        output y""",
    "conv transposed, stride 2": """graph g
        input x: f32[1, 3, 5, 4]
        input k: f32[3, 4, 3, 3]
        y: f32[1, 4, 11, 9] = op [b: 1, o: 4, h: 11, w: 9 | c: 3 sum, r: 3 sum, s: 3 sum]
          reads x[b, c, floor((h - r)/2), floor((w - s)/2)] when ((h - r) mod 2) == 0 when ((w - s) mod 2) == 0 else 0.0,
                k[c, o, r, s]
          body x * k then acc0
        output y""",
    "integers": """graph g
        input x: i64[5, 7]
        input w: i64[7, 3]
        y: i64[5, 3] = op [i: 5, n: 3 | m: 7 sum] reads x[i, m], w[m, n] body x * w then acc0
        output y""",
    "f64": """graph g
        input x: f64[5, 7]
        input w: f64[7, 3]
        y: f64[5, 3] = op [i: 5, n: 3 | m: 7 sum] reads x[i, m], w[m, n] body x * w then acc0
        output y""",
    "factor without the reduced dimension": """graph g
        input x: f32[5]
        input w: f32[7, 3]
        y: f32[5, 3] = op [i: 5, n: 3 | m: 7 sum] reads x[i], w[m, n] body x * w then acc0
        output y""",
    "f16": """graph g
        input x: f16[17, 40]
        input w: f16[40, 18]
        y: f16[17, 18] = op [i: 17, n: 18 | m: 40 sum] reads x[i, m], w[m, n]
          body cast(x, f32) * cast(w, f32) then cast(acc0, f16)
        output y""",
    "bf16": """graph g
        input x: bf16[17, 40]
        input w: bf16[40, 18]
        y: bf16[17, 18] = op [i: 17, n: 18 | m: 40 sum] reads x[i, m], w[m, n]
          body cast(x, f32) * cast(w, f32) then cast(acc0, bf16)
        output y""",
    "vector times matrix": """graph g
        input x: f32[1, 37]
        input w: f32[37, 21]
        y: f32[1, 21] = op [i: 1, n: 21 | m: 37 sum] reads x[i, m], w[m, n] body x * w then acc0
        output y""",
}


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
    check(CONTRACTIONS[name], knobs=Knobs(bm=16, bn=16, bk=16, group=2))


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


REDUCTIONS = {
    "max pool": """graph g
        input x: f32[1, 3, 9, 7]
        y: f32[1, 3, 5, 4] = op [b: 1, c: 3, h: 5, w: 4 | r: 3 max, s: 3 max]
          reads x[b, c, 2*h + r - 1, 2*w + s - 1] else -inf body x then acc0
        output y""",
    "softmax": """graph g
        input x: f32[5, 13]
        m: f32[5], s: f32[5] = op [i: 5 | j: 13 logsumexp] reads x[i, j] body x, 1.0 then acc0, log(acc1)
        y: f32[5, 13] = op [i: 5, j: 13] reads x[i, j], m[i], s[i] body exp((x - m) - s)
        output m, s, y""",
    "layer norm": """graph g
        input x: f32[5, 13]
        input g: f32[13]
        m: f32[5], v: f32[5] = op [i: 5 | j: 13 moments] reads x[i, j] body 1.0, x, 0.0 then acc1, (acc2 / acc0)
        y: f32[5, 13] = op [i: 5, j: 13] reads x[i, j], m[i], v[i], g[j] body ((x - m) / sqrt(v + 0.00001)) * g
        output m, v, y""",
    "prod": """graph g
        input x: f32[7, 5]
        y: f32[5] = op [j: 5 | i: 7 prod] reads x[i, j] body x then acc0
        output y""",
    "min of integers": """graph g
        input x: i32[7, 5]
        y: i32[7] = op [i: 7 | j: 5 min] reads x[i, j] body x then acc0
        output y""",
    "any": """graph g
        input x: bool[7, 5]
        y: bool[7] = op [i: 7 | j: 5 any] reads x[i, j] body x then acc0
        output y""",
    "all": """graph g
        input x: bool[7, 3]
        y: bool[7] = op [i: 7 | j: 3 all] reads x[i, j] body x then not(acc0)
        output y""",
    "whole mean": """graph g
        input x: f32[7, 13]
        y: f32[] = op [ | i: 7 sum, j: 13 sum] reads x[i, j] body x then acc0 / 91.0
        output y""",
    "sum of i8 wraps": """graph g
        input x: i8[3, 33]
        y: i8[3] = op [i: 3 | j: 33 sum] reads x[i, j] body (x * x) then acc0
        output y""",
    "sum of halves": """graph g
        input x: f16[3, 33]
        y: f16[3] = op [i: 3 | j: 33 sum] reads x[i, j] body cast(x, f32) then cast(acc0, f16)
        output y""",
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    check(REDUCTIONS[name])


@pytest.mark.parametrize("name", ["max pool", "softmax", "layer norm", "whole mean", "all"])
def test_reductions_in_loops(name: str) -> None:
    """Tiles of 4 x 4: rows and columns past the end, and several passes of the loop."""
    check(REDUCTIONS[name], knobs=Knobs(block=16, rows=4, cols=4))


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
    check(ARGMAX, {"x": x}, Knobs(rows=2, cols=4))


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
    body = {"moments": "1.0, x, 0.0", "logsumexp": "x, 1.0"}.get(monoid, "x")
    then = {"moments": "(acc2 / acc0) + b", "logsumexp": "(acc0 + log(acc1)) + b", "any": "or(acc0, b)", "all": "and(acc0, b)"}
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


FLOAT_FUNCTIONS = [f for f, (n, r) in PRIMITIVES.items() if n == 1 and r == "float"] + ["neg", "abs", "sign"]
UNIT = {"asin", "acos", "atanh"}


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_float_functions(dtype: str) -> None:
    """Every function of one float, where it is easy and where it is not, against numpy in float64."""
    x = np.concatenate([np.linspace(-6, 6, 41), [0.0, 1e-6, -1e-6, 1e-3, 0.5, 1.5, -2.5, np.inf, -np.inf, np.nan, 70.0, -70.0]])
    outs = ", ".join(f"y_{f}: {dtype}[{len(x)}]" for f in FLOAT_FUNCTIONS)
    text = f"""graph g input x: {dtype}[{len(x)}] {outs} = op [i: {len(x)}] reads x[i]
        body {", ".join(f"{f}(x)" for f in FLOAT_FUNCTIONS)} output {", ".join(f"y_{f}" for f in FLOAT_FUNCTIONS)}"""
    graph = parse(text)
    x = x.astype(np.float32).astype(np.float64)
    got = run_kernel(graph, 0, {"x": x})
    for f, y in zip(FLOAT_FUNCTIONS, got, strict=True):
        with np.errstate(all="ignore"):
            want = interp.NUMPY[f](x)
        tol = {"f32": 1e-6, "f64": 5e-15}[dtype] * (8 if f in ("sinh", "cosh", "exp", "expm1") else 1)
        np.testing.assert_allclose(y.astype(np.float64), want, rtol=tol, atol=1e-300, equal_nan=True, err_msg=f)


def test_pow() -> None:
    base = [-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, np.inf, -np.inf, np.nan]
    power = [-3.0, -2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 7.0, np.inf, -np.inf, np.nan]
    x, y = (a.ravel().astype(np.float32) for a in np.meshgrid(base, power))
    text = f"""graph g input x: f32[{len(x)}] input y: f32[{len(x)}]
        z: f32[{len(x)}], q: f32[{len(x)}] = op [i: {len(x)}] reads x[i], y[i] body pow(x, y), pow(x, 2.0) output z, q"""
    check(text, {"x": x, "y": y})
    check("""graph g input x: f64[40] input s: f64[] y: f64[40], z: f64[40] = op [i: 40] reads x[i], s[]
        body pow(abs(x), f64(0.75)), where(and(gt(s, f64(0.0)), gt(x, f64(0.0))), pow(x, s), x) output y, z""")
    whole_numbers = {"x": np.arange(1.0, 41.0), "y": np.arange(40.0) % 9}
    text = "graph g input x: f64[40] input y: f64[40] z: f64[40] = op [i: 40] reads x[i], y[i] body pow(x, y) output z"
    got = check(text, whole_numbers)["z"]
    np.testing.assert_array_equal(got, whole_numbers["x"] ** whole_numbers["y"])
    a, b = (v.ravel().astype(np.int64) for v in np.meshgrid([-3, -1, 0, 1, 2, 10], [0, 1, 2, 5, 18]))
    text = f"graph g input x: i64[{len(a)}] input y: i64[{len(a)}] z: i64[{len(a)}] = op [i: {len(a)}]"
    check(text + " reads x[i], y[i] body pow(x, y) output z", {"x": a, "y": b})


@pytest.mark.parametrize("dtype", ["i32", "i64", "i8", "u8", "f32"])
def test_division_and_remainders(dtype: str) -> None:
    values = np.arange(0 if dtype[0] == "u" else -7, 8)
    x, y = (a.ravel().astype(interp.numpy_dtype(dtype)) for a in np.meshgrid(values, values[values != 0]))
    n = len(x)
    outs = ", ".join(f"o{i}: {dtype}[{n}]" for i in range(6))
    check(
        f"""graph g input x: {dtype}[{n}] input y: {dtype}[{n}] {outs} = op [i: {n}] reads x[i], y[i]
        body x / y, mod(x, y), fmod(x, y), min(x, y), max(x, y), sign(x) output {", ".join(f"o{i}" for i in range(6))}""",
        {"x": x, "y": y},
    )


def test_bits_booleans_and_casts() -> None:
    check("""graph g input x: u32[13] input s: u32[13] input p: bool[13] input q: bool[13] input f: f32[13]
        a: u32[13], b: u32[13], c: u32[13], d: bool[13], e: bool[13], h: i32[13], k: f16[13], l: bool[13], m: f64[13],
        n: i64[13] = op [i: 13] reads x[i], s[i], p[i], q[i], f[i]
        body shl(x, s), shr(x, s), xor(x, not(s)), xor(p, not(q)), eq(p, q), cast((f * 10.0), i32), cast(f, f16), cast(f, bool),
             cast(x, f64), (cast(p, i64) + cast(q, i64))
        output a, b, c, d, e, h, k, l, m, n""")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64", "i16", "i64", "u8"])
def test_dtypes(dtype: str) -> None:
    check(f"""graph g input x: {dtype}[5, 7] input y: {dtype}[7] z: {dtype}[5, 7] = op [i: 5, j: 7]
        reads x[i, j], y[j] body (x * y) + {dtype}({"0.1" if dtype in TOLERANCE else "3"}) output z""")


def test_literals_have_the_dtype_of_the_graph() -> None:
    """A bare Python literal is f32 or i32 to Triton where nothing says otherwise."""
    dtypes = ["f64", "f32", "f16", "i64", "i32", "i8", "u8", "u64"]
    values = {d: ("0.1", "-inf") if d in TOLERANCE else ("100", "3") for d in dtypes} | {"u64": ("18446744073709551615", "1")}
    ins = " ".join(f"input x_{d}: {d}[5]" for d in dtypes)
    outs = ", ".join(f"a_{d}: {d}[5], b_{d}: {d}[5], c_{d}: {d}[5]" for d in dtypes)
    reads = ", ".join(f"x_{d}[i]" for d in dtypes)
    body = ", ".join(
        f"{d}({v}), where(gt(index(i), 2), {d}({v}), {d}({w})), max(x_{d}, {d}({w}))" for d, (v, w) in values.items()
    )
    names = ", ".join(f"{n}_{d}" for d in dtypes for n in "abc")
    check(f"graph g {ins} {outs} = op [i: 5] reads {reads} body {body} output {names}")
    check("""graph g input p: bool[5] y: bool[5], z: bool[5] = op [i: 5] reads p[i]
        body where(p, false, true), and(p, eq(1, 1)) output y, z""")


def test_nothing_to_reduce_gives_the_identity() -> None:
    for monoid, want in (("sum", 0.0), ("max", -np.inf), ("prod", 1.0)):
        text = f"graph g input x: f32[3, 0] y: f32[3] = op [i: 3 | j: 0 {monoid}] reads x[i, j] body x then acc0 output y"
        graph = parse(text)
        k = Kernel(op=0, mode="full", block=((0, 3), (0, 0)), ins=(((0, 3), (0, 0)),), outs=(((0, 3),),))
        out = fresh(((0, 3),), "f32")
        launch(generate(graph, k), [torch.zeros(3, 0), out])
        np.testing.assert_array_equal(out.numpy(), want)


KNOWN = [  # counter index, draw, stream and key -> the four words (Random123's known answers)
    (0, 0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (-1, 0xFFFFFFFF, 0xFFFFFFFF, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (0x85A308D3_243F6A88, 0x13198A2E, 0x03707344, 0x299F31D0_A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("index", "draw", "stream", "key", "words"), KNOWN)
def test_philox_known_answers(index: int, draw: int, stream: int, key: int, words: str) -> None:
    signed = index - (1 << 64) if index >= 1 << 63 else index
    text = f"""graph g input c: i64[1] y: i64[4] = op [i: 4] reads c[0]
        body philox({key if key >= 0 else f"i64({key})"}, {stream}, {draw}, index(i), c) output y"""
    (y,) = run_kernel(parse(text), 0, {"c": np.array([signed])})
    assert " ".join(f"{v:08x}" for v in y) == words


def test_random_bits_do_not_depend_on_the_block() -> None:
    text = """graph g u: f32[9, 11] = op [i: 9, j: 11]
        body cast(shr(philox(987654321987, 3, 1, 0, index(11*i + j)), 8), f32) * 0.000000059604644775390625 output u"""
    graph = parse(text)
    want = interp.run(graph, {})["u"]
    (full,) = run_kernel(graph, 0, {})
    np.testing.assert_array_equal(full, want)
    assert full.min() >= 0 and full.max() < 1 and len(np.unique(full)) == full.size
    (part,) = run_kernel(graph, 0, {}, block=((4, 9), (3, 11)))
    np.testing.assert_array_equal(part, want[4:9, 3:11])


def kernel_of(graph: Graph, at: int = 0) -> Kernel:
    op = graph.ops[at]
    assert isinstance(op, Block)
    return Kernel(
        op=at, mode="full", block=whole(tuple(d.size for d in op.space)),
        ins=tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads),
        outs=tuple(whole(graph.tensors[t].shape) for t in op.outs),
    )  # fmt: skip


def source_of(text: str) -> str:
    graph = parse(text)
    return generate(graph, kernel_of(graph)).source


def test_every_primitive_has_a_row() -> None:
    assert set(ROWS) | {"cast"} == set(PRIMITIVES)


def test_contiguous_memory_needs_no_division() -> None:
    """A bias over a contiguous tensor divides for the bias alone, and a fused reshape not at all."""
    assert source_of(MAPS["broadcast"]).count("//") == 0
    assert "%" not in source_of(MAPS["reshape"]) and "//" not in source_of(MAPS["reshape"])


def test_no_masks_where_nothing_can_be_outside() -> None:
    text = "graph g input x: f32[64, 64] y: f32[64, 64] = op [i: 64, j: 64] reads x[i, j] body exp(x) output y"
    assert "mask" not in source_of(text)


def test_shared_parts_are_computed_once() -> None:
    source = source_of("graph g input x: f32[8] y: f32[8] = op [i: 8] reads x[i] body exp(x) * (exp(x) + 1.0) output y")
    assert source.count("tl.exp(") == 1


def test_indices_past_31_bits_are_wide() -> None:
    big = "graph g input x: f32[65536, 65536] y: f32[65536, 65536] = op [i: 65536, j: 65536] reads x[i, j] body exp(x) output y"
    assert "tl.int64" in source_of(big)
    assert "tl.int64" not in source_of(big.replace("65536", "64"))
    index = "graph g y: i64[64] = op [i: 64] body index(100000000*i) output y"
    assert "program_id(0).to(tl.int64)" in source_of(index)
    check(index)


def test_names_that_python_or_triton_has_taken() -> None:
    check("""graph g input "tanh": f32[3] input "x/lambda": f32[3] input tl: f32[3] input "1.weight": f32[3]
        "onnx::pid": f32[3] = op [range: 3] reads a = "tanh"[range], b = "x/lambda"[range], tl[range], c = "1.weight"[range]
        body (tanh(a) + b) + (tl * c) from "for" output "onnx::pid" """)


def test_equal_operations_share_a_key_and_others_do_not() -> None:
    text = """graph g input x: f32[8, 5] input w: f32[8, 5]
        y: f32[8, 5] = op [i: 8, j: 5] reads x[i, j] body exp(x)
        z: f32[8, 5] = op [i: 8, j: 5] reads w[i, j] body exp(w)
        q: f32[8, 5] = op [i: 8, j: 5] reads w[i, j] body log(w)
        n: i64[8, 5] = op [i: 8, j: 5] body index(5*i + j)
        output y, z, q, n"""
    graph = parse(text)
    keys = [kernel_key(graph, kernel_of(graph, i)) for i in range(4)]
    assert keys[0] == keys[1] != keys[2]

    def upper(at: int) -> Kernel:
        box = ((4, 8), (0, 5))
        return Kernel(op=at, mode="full", block=box, ins=(box,) * len(graph.ops[at].inputs), outs=(box,))

    def lower(at: int) -> Kernel:
        box = ((0, 4), (0, 5))
        return Kernel(op=at, mode="full", block=box, ins=(box,) * len(graph.ops[at].inputs), outs=(box,))

    assert kernel_key(graph, upper(0)) == kernel_key(graph, lower(1)) != keys[0]
    assert kernel_key(graph, upper(3)) != kernel_key(graph, lower(3)), "an index is global, so its origin matters"


def test_opaque_operations_are_refused_with_the_reason() -> None:
    x = parse("graph g input x: f32[3] y: f32[3] = op [i: 3] reads x[i] body x output y")
    op = Opaque(
        outs=("y",), ins=("x",), kind="NonZero", node=b"", opsets=(("", 21),), why="its output's size depends on values",
        in_axes=((),), out_axes=((),), source=("/nz",),
    )  # fmt: skip
    graph = Graph(name="g", tensors=x.tensors, ops=(op, *x.ops), inputs=("x",), outputs=("y",))
    assert "NonZero" in unavailable(graph, 0) and "depends on values" in unavailable(graph, 0)
    assert unavailable(graph, 1) == ""
    with pytest.raises(TapestryError, match="NonZero"):
        generate(graph, Kernel(op=0, mode="full", block=(), ins=(((0, 3),),), outs=(((0, 3),),)))


def test_a_kernel_file_that_was_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse("graph g input x: f32[3] y: f32[3] = op [i: 3] reads x[i] body x + 41.5 output y")
    tk = generate(graph, kernel_of(graph))
    load(tk, tmp_path)
    [path] = tmp_path.glob("*.py")
    path.write_text("raise SystemExit")
    monkeypatch.setattr("tapestry.codegen.triton.execute._FUNCTIONS", {})
    with pytest.raises(BuildError, match="hash"):
        load(tk, tmp_path)
