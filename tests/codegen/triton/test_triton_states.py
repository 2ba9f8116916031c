"""States of every kind of kernel: as results of their own, which have all dimensions, and on the way to a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tapestry.codegen.blocks.lowered import unavailable
from tapestry.codegen.triton.emit.source import generate
from tapestry.ir.graph import Block, Graph, Tensor
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.recognition.state import state_box
from tapestry.ir.syntax.parser import parse
from tapestry.verify import interp
from tests.support.attention.attention_cases import CASES
from tests.support.attention.attention_runs import fused
from tests.support.scan_cases import FIELDS, GUARDS, running
from tests.support.small_models import MODELS, case
from tests.support.triton_cases import CONTRACTIONS, REDUCTIONS
from tests.support.triton_kernels import compare, random_arrays, run_kernel
from tests.support.triton_streams import STREAMS

Arrays = Mapping[str, np.ndarray[Any, Any]]
TEXTS = {
    **CONTRACTIONS, **REDUCTIONS, **{f"stream, {n}": t for n, t in STREAMS.items()},
    **{f"{m} {way}": running(m, guard) for m in FIELDS for way, guard in GUARDS.items()},
}  # fmt: skip


def monoids(graph: Graph, values: Arrays) -> Iterator[tuple[int, Graph, list[np.ndarray[Any, Any]]]]:
    """Every reduction of a graph: its place, the graph with its states for results, and what they are."""
    for at, op in enumerate(graph.ops):
        if not isinstance(op, Block) or op.monoid is None or unavailable(graph, at):
            continue
        names = tuple(f"{op.outs[0]}.state{k}" for k in range(len(op.body)))
        shape = tuple(d.size for d in op.dims)
        tensors = {n: Tensor(name=n, dtype=e.dtype, shape=shape) for n, e in zip(names, op.body, strict=True)}
        bare = replace(op, then=(), outs=names)
        apart = Graph(
            name="states", ops=(bare,), outputs=names, inputs=tuple(dict.fromkeys(bare.inputs)),
            tensors=tensors | {t: replace(graph.tensors[t], kind="input") for t in bare.inputs},
        )  # fmt: skip
        found = interp.run(apart, {t: values[t] for t in apart.inputs}, wide=True)
        yield at, apart, [found[n] for n in names]


def same_states(op: Block, graph: Graph, got: list[np.ndarray[Any, Any]], want: list[np.ndarray[Any, Any]]) -> None:
    """Equal up to the rounding of what is read; sums of weights mean nothing where no weight is: no score is above -inf."""
    kinds = {graph.tensors[t].dtype for t in op.inputs}
    coarse = next((k for k in ("bf16", "f16") if k in kinds), None)
    for field, (a, b, e) in enumerate(zip(got, want, op.body, strict=True)):
        if field and op.monoid in ("softsum", "logsumexp"):
            seen = np.broadcast_to(want[0] > -np.inf, b.shape)
            a, b = np.where(seen, a, 0), np.where(seen, b, 0)
        compare(a, b, coarse if coarse and e.dtype == "f32" else e.dtype)


def check_states(graph: Graph, values: Arrays) -> int:
    """Compare the states of every reduction, whole and in two parts, with the interpreter's; how many there are."""
    count = 0
    for at, apart, want in monoids(graph, values):
        count += 1
        op, bare = graph.ops[at], apart.ops[0]
        assert isinstance(op, Block) and isinstance(bare, Block)
        full = whole(tuple(d.size for d in bare.space))
        for mode in ("full", "partial"):
            same_states(op, graph, run_kernel(apart, 0, values, mode=mode), want)
        n, k = op.reduce[0].size, len(op.dims)
        cuts = [(0, n)] if n < 2 else [(0, n // 2), (n // 2, n)]
        parts = [run_kernel(graph, at, values, mode="partial", block=(*full[:k], c, *full[k + 1 :])) for c in cuts]
        merged = parts[0]
        for part in parts[1:]:
            combine = MONOIDS[op.monoid or ""].combiner(tuple(e.dtype for e in op.body))
            with np.errstate(invalid="ignore"):
                merged = [np.asarray(interp.value(e, [*merged, *part], [], {}, False)) for e in combine]
        boxes = (state_box(op, field, full[:k]) for field in range(len(want)))
        once = [w[tuple(slice(lo, hi) for lo, hi in b)] for w, b in zip(want, boxes, strict=True)]
        same_states(op, graph, merged, once)
    return count


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TEXTS)
def test_of_kernels(name: str) -> None:
    graph = parse(TEXTS[name])
    assert check_states(graph, random_arrays(graph)) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_of_attention(name: str) -> None:
    graph = fused(CASES[name])
    values = random_arrays(graph)
    everything = tuple(t for op in graph.ops for t in op.outs)
    assert check_states(graph, {**values, **interp.run(replace(graph, outputs=everything), values, wide=False)})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("simplified", [False, True])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_of_small_models(name: str, simplified: bool) -> None:
    found = case(name, simplified)
    graph = found.graph
    everything = tuple(t for op in graph.ops for t in op.outs)
    values = interp.run(replace(graph, outputs=everything), {**found.feeds, **found.weights}, wide=False)
    check_states(graph, {**found.feeds, **found.weights, **values})


def test_a_state_without_cells_needs_no_program():
    """States vary along fewer dimensions than the operation has: none here, but for two of no extent."""
    text = """graph g
input x: f32[0, 0, 8]
y: f32[0, 0, 8] = op [i: 0, j: 0, k: 8 | l: 0 moments, m: 8 moments]
  reads x[i, l, m], b = x[i, j, k]
  body 1.0, x, 0.0
  then b - acc1
output y"""
    block, state = ((0, 0), (0, 0), (0, 4), (0, 0), (0, 4)), ((0, 0), (0, 0), (0, 1))
    kernel = Kernel(op=0, mode="partial", block=block, ins=(((0, 0), (0, 0), (0, 4)), None), outs=(state,) * 3)
    assert generate(parse(text), kernel).grid == (0,)
