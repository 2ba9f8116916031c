"""Running one generated kernel in Triton's interpreter, beside the reference evaluator."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; ahead-of-time tests run in processes of their own

import ast
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import generate
from tapestry.codegen.triton.run.launcher import launch
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import bounds
from tapestry.ir.kernel import Box, Kernel, whole
from tapestry.ir.recognition.state import state_box
from tapestry.ir.syntax.parser import parse
from tapestry.ir.types import FLOAT8, numpy_dtype
from tapestry.verify import interp

Arrays = dict[str, np.ndarray[Any, Any]]

TORCH = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32,
    "u64": torch.uint64, "bool": torch.bool, **dict.fromkeys(FLOAT8, torch.uint8),
}  # fmt: skip
TOLERANCE = {"f64": 1e-12, "f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}


@pytest.fixture(autouse=True)
def poisoned_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a masked load leaves in its other lanes is undefined on a GPU; the interpreter's zeros would hide a use of it."""
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_masked_load

    def load_with_garbage(self: Any, ptrs: Any, mask: Any, other: Any, *hints: Any, **named: Any) -> Any:
        if other is None and ptrs.data.size > 1:  # (a scalar's ``other`` of zero reaches the interpreter as None)
            dtype = ptrs.get_element_ty()
            kind = interpreter._get_np_dtype(dtype)
            garbage = np.nan if kind.kind == "f" else 0x7FFF if str(dtype) == "bf16" else 0x7F if "fp8" in str(dtype) else 0x55
            other = interpreter.TensorHandle(np.full(ptrs.data.shape, garbage, kind), dtype)
        return plain(self, ptrs, mask, other, *hints, **named)

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
            out[t] = rng.integers(low, 10, tensor.shape).astype(numpy_dtype(tensor.dtype))
        else:  # (for floats of 8 bits some become subnormal)
            out[t] = rng.standard_normal(tensor.shape).astype(numpy_dtype(tensor.dtype))
    return out


def to_torch(a: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    if dtype == "bf16":
        return torch.from_numpy(np.ascontiguousarray(a.astype(np.float32))).to(torch.bfloat16)
    found = np.ascontiguousarray(a.astype(numpy_dtype(dtype)))
    return torch.from_numpy(found.view(np.uint8) if dtype in FLOAT8 else found)  # which buffers hold as bits


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
    extra: int = 0, states: list[np.ndarray[Any, Any]] | None = None, config: KernelConfig | None = None, target: str = "sm90",
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
    outs = tuple(state_box(op, k, mapped) for k in range(n)) if mode == "partial" else (mapped,) * n
    k = Kernel(op=at, mode=mode, block=mapped if mode == "finish" else block, ins=ins, outs=outs)
    tk = generate(graph, k, config, target=target)
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


def check(text: str, values: Arrays | None = None, config: KernelConfig | None = None, target: str = "sm90") -> Arrays:
    """Run every operation of a graph as a Triton kernel and compare its outputs with the reference."""
    graph = parse(text)
    values = values or random_arrays(graph)
    want = interp.run(graph, values, wide=True)
    have: Arrays = dict(values)
    for i, op in enumerate(graph.ops):
        have.update(zip(op.outs, run_kernel(graph, i, have, config=config, target=target), strict=True))
    for t in graph.outputs:
        compare(have[t], want[t], graph.tensors[t].dtype)
    return have


def kernel_of(graph: Graph, at: int = 0) -> Kernel:
    op = graph.ops[at]
    assert isinstance(op, Block)
    return Kernel(
        op=at, mode="full", block=whole(tuple(d.size for d in op.space)),
        ins=tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads),
        outs=tuple(whole(graph.tensors[t].shape) for t in op.outs),
    )  # fmt: skip


def source_of(text: str, target: str = "sm90") -> str:
    graph = parse(text)
    return generate(graph, kernel_of(graph), target=target).source
