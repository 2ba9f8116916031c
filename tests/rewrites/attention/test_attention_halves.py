"""Attention that exports in 16 bits write out in nodes: one operation, within the roundings of 16 bits of float64."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import onnx
import pytest

from bench.support.half_models import in_half
from tapestry.ir.graph import Block, Graph
from tapestry.ir.plan import MeshAxis, Plan, Strategy
from tapestry.ir.syntax.printer import to_text
from tapestry.lift import lift, read_weight
from tapestry.plan.lower import lower
from tapestry.rewrites.core.driver import simplify
from tests.support.attention.half_attention import LAYERS, NUMPY, UNIT, Layer
from tests.support.lifting import EXPORTS, SHARED, needs_shared
from tests.support.small_models import Case, execute
from tests.support.triton_kernels import run_kernel

Arrays = dict[str, np.ndarray]
SIZES = {"odd": {}, "one query": {"queries": 1, "keys": 37}, "long": {"batch": 1, "queries": 70, "keys": 131, "width": 16}}


def streamed(layer: Layer, dtype: str, folder: Path) -> tuple[Graph, Arrays]:
    """The simplified graph, which has one operation that is no map or sum of values, and its constants."""
    path = folder / "m.onnx"
    onnx.save(layer.model(dtype), path)
    lifted = lift(path, {})
    graph = simplify(lifted.graph)
    found = [(op.monoid, len(op.inner)) for op in graph.ops if isinstance(op, Block)]
    assert [f for f in found if f[0] is not None and f != ("sum", 0)] == [("softsum", 1)], to_text(graph)
    scores = layer.batch * layer.heads * layer.queries * layer.keys
    assert not [t.name for t in graph.tensors.values() if t.kind == "value" and t.size >= scores], "scores are not written"
    return graph, {
        t: read_weight(lifted.model, w, graph.tensors[t], constants=lifted.constants) for t, w in graph.weights.items()
    }


def in_triton(graph: Graph, values: Arrays) -> np.ndarray:
    """The result by generated kernels, in Triton's interpreter."""
    held = dict(values)
    for k, op in enumerate(graph.ops):
        held |= dict(zip(op.outs, run_kernel(graph, k, held), strict=True))
    return held["y"]


def on_cpu(graph: Graph, feeds: Arrays, weights: Arrays) -> np.ndarray:
    plan = Plan(graph=graph, mesh=(MeshAxis("d0", 1),), strategies=tuple(Strategy((None,), (None,)) for _ in graph.ops))
    return execute(graph, lower(plan), Case(None, graph, feeds, weights, {}))[0]["y"]  # type: ignore[arg-type]


def close(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    """NaN in the same places; all in all within 3 units of roundoff of the usual size of a result, and 24 at any one place."""
    got = got.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    there = np.isfinite(want)
    np.testing.assert_array_equal(got[~there], want[~there])
    usual = UNIT[dtype] * np.sqrt(np.square(want[there]).mean())
    away = np.abs(got[there] - want[there])
    assert away.max() <= 24 * usual and np.sqrt(np.square(away).mean()) <= 3 * usual, (away.max() / usual, away)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_one_operation_near_float64(name: str, dtype: str, size: str, tmp_path: Path) -> None:
    layer = Layer(name, **SIZES[size])
    graph, weights = streamed(layer, dtype, tmp_path)
    feeds = layer.feeds(dtype)
    want = layer.float64(dtype, feeds)
    close(on_cpu(graph, feeds, weights), want, dtype)
    close(in_triton(graph, feeds | weights), want, dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "dtype"), [("bert", "f16"), ("bert, eager", "bf16")])
def test_what_is_not_finite_stays_in_its_row(name: str, dtype: str, score: float, value: float, tmp_path: Path) -> None:
    """A row that sees nothing (the guard makes it 0 times the values), a bad score in another, a bad value of a key."""
    layer = Layer(name)
    graph, weights = streamed(layer, dtype, tmp_path)
    feeds = layer.feeds(dtype)
    feeds["m"][0, 0, 2] = -np.inf
    feeds["m"][1, 0, 4, 3] = score
    feeds["v"][0, 1, 5, 2] = value
    want = layer.float64(dtype, feeds)
    with np.errstate(all="ignore"):
        close(on_cpu(graph, feeds, weights), want, dtype)
        close(in_triton(graph, feeds | weights), want, dtype)


HALVES = [
    ("bert_base", "f16", 12), ("gpt2", "bf16", 12), ("llama_tiny", "f16", 4), ("qwen3_tiny", "bf16", 4), ("t5_small", "f16", 18),
    ("vit_base", "bf16", 12), ("whisper_encoder", "f16", 4), ("llama_tiny_opset23", "bf16", 4),
]  # fmt: skip


@pytest.mark.sampled(1)
@needs_shared
@pytest.mark.parametrize(("name", "dtype", "layers"), HALVES)
def test_one_operation_per_layer_of_every_export(name: str, dtype: str, layers: int, tmp_path: Path) -> None:
    model = onnx.load_from_string(gzip.decompress((SHARED / f"{name}.onnx.gz").read_bytes()))
    onnx.save(in_half(model, dtype), tmp_path / f"{name}.onnx")
    graph = simplify(lift(tmp_path / f"{name}.onnx", EXPORTS[name], weights=False).graph)
    monoids = [(op.monoid, len(op.inner)) for op in graph.ops if isinstance(op, Block)]
    assert monoids.count(("softsum", 1)) == layers
    assert not any(m == "logsumexp" for m, _ in monoids)
