"""Reductions without a kernel of their own are computed tile by tile: the same values, in memory that has a bound."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto as T
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch.utils._python_dispatch import TorchDispatchMode

import tapestry
from tapestry.codegen.torch_cpu import kernels
from tapestry.codegen.torch_cpu.base import tiled_sums
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel
from tapestry.ir.syntax.parser import parse
from tests.fuzz.generate.random_blocks import blocks
from tests.support.small_models import net


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=4), st.integers(1, 40))
def test_tiles_are_a_block_in_order(sides: list[tuple[int, int]], most: int) -> None:
    block = tuple((lo, lo + n) for lo, n in sides)
    found = tiled_sums.tiles(block, most)
    points = [p for box in found for p in np.ndindex(*(hi - lo for lo, hi in box)) for p in [places(box, p)]]
    assert points == [places(block, p) for p in np.ndindex(*(n for _, n in sides))]
    assert all(np.prod([hi - lo for lo, hi in box]) <= most for box in found)


def places(box: tuple[tuple[int, int], ...], at: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(lo + k for (lo, _), k in zip(box, at, strict=True))


@pytest.mark.slow
def test_small_tiles_give_what_the_block_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every monoid, every kind of read; what is not associative as written (rounding) may differ in the last places."""
    cut = 0
    for k in range(150):
        text, inputs, outputs, exact = blocks(random.Random(f"tiles {k}"))
        graph = parse(text)
        for points in (1 << 22, 7):
            monkeypatch.setattr(tiled_sums, "POINTS", points)
            values = {n: kernels.from_numpy(a) for n, a in inputs.items()}
            for at, op in enumerate(graph.ops):
                assert isinstance(op, Block)
                boxes = {t: tuple((0, n) for n in graph.tensors[t].shape) for t in graph.tensors}
                kernel = Kernel(
                    op=at, mode="full", block=tuple((0, d.size) for d in op.space),
                    ins=tuple(boxes[r.tensor] for r in op.reads), outs=tuple(boxes[t] for t in op.outs),
                )  # fmt: skip
                cut += points == 7 and bool(op.monoid) and len(tiled_sums.tiles(kernel.block, points)) > 1
                ins = [values[r.tensor] for r in op.reads]
                values |= dict(zip(op.outs, kernels.build(graph, kernel)(ins, []), strict=True))
            for name, want in outputs.items():
                got = kernels.to_numpy(values[name], graph.tensors[name].dtype)
                np.testing.assert_allclose(got, want, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4, err_msg=text)
    assert cut > 40


class Largest(TorchDispatchMode):
    """Remembers the most cells that one operator wrote into memory of their own."""

    cells = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.cells = max(self.cells, x.untyped_storage().nbytes() // x.element_size())
        return out


WINDOWS = {  # (node, its inputs), each of many more points than cells
    "mean": (helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[30, 30]), {"x": [1, 1, 50, 51]}),
    "there and back": (
        helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[3, 3]),
        {"x": [1, 4, 12, 13], "w": [4, 6, 9, 9]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
def test_a_large_window_takes_no_more_than_a_tile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_sums, "POINTS", 1 << 15)
    node, shapes = WINDOWS[name]
    onnx.save(net([node], {n: (T.FLOAT16, s) for n, s in shapes.items()}, {"y": T.FLOAT16}), tmp_path / "m.onnx")
    built = tapestry.compile(tmp_path / "m.onnx", devices=1)
    (op,) = built.build.plan.graph.ops
    feeds = {k: v / 8 for k, v in built.random_feeds(0).items()}
    with Largest() as seen:
        (got,) = built.run(feeds).values()
    assert isinstance(op, Block) and np.prod([d.size for d in op.space]) > 2 * tiled_sums.POINTS >= seen.cells
    (want,) = ReferenceEvaluator(str(tmp_path / "m.onnx")).run(None, {k: v.astype(np.float64) for k, v in feeds.items()})
    np.testing.assert_allclose(got, want, rtol=5e-3, atol=5e-3)
