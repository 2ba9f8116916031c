"""Attention from IR text: simplified to one operation, fed, run on the CPU target, compared with float64."""

from __future__ import annotations

import numpy as np
import torch

from tapestry.codegen.torch_cpu import kernels
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule_check import random_feeds

TOLERANCE = 1e-5  # of float32 against float64, relative to the largest value


def fused(text: str) -> Graph:
    graph = simplify(parse(text))
    before = ["sum"] if "isnan" in text else []  # 0 times the values, for rows whose weights a guard makes 0
    assert [op.monoid for op in graph.ops if isinstance(op, Block)] == [*before, "softsum"], to_text(graph)
    return graph


def feeds_of(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    feeds = random_feeds(graph, np.random.default_rng(seed))
    if "c" in feeds and feeds["c"].dtype == np.bool_:
        feeds["c"][-1] = False  # rows without a key
    return feeds


def close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    scale = np.abs(want[np.isfinite(want)]).max(initial=1.0)
    np.testing.assert_allclose(got, want, atol=TOLERANCE * scale, rtol=0)


def run_cpu(graph: Graph, feeds: dict[str, np.ndarray]) -> np.ndarray:
    return run_ops(graph, feeds, len(graph.ops))["y"].numpy()


def run_ops(graph: Graph, feeds: dict[str, np.ndarray], count: int) -> dict[str, torch.Tensor]:
    """The inputs, and the results of so many operations."""
    held = {n: torch.from_numpy(np.array(a)) for n, a in feeds.items()}
    for k, op in enumerate(graph.ops[:count]):
        assert isinstance(op, Block)
        block, ins = whole(tuple(d.size for d in op.space)), tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads)
        kernel = Kernel(op=k, mode="full", block=block, ins=ins, outs=(whole(graph.tensors[op.outs[0]].shape),))
        held[op.outs[0]] = kernels.build(graph, kernel)([held[r.tensor] for r in op.reads], [])[0]
    return held
