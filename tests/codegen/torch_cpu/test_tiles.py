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
from torch.utils._python_dispatch import TorchDispatchMode

import tapestry
from tapestry.codegen.torch_cpu import kernels
from tapestry.codegen.torch_cpu.base import tiles
from tapestry.fuzz.generate.random_blocks import blocks
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel
from tapestry.ir.syntax.parser import parse
from tests.support.small_models import net


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=4), st.integers(1, 40))
def test_tiles_are_a_block_in_order(sides: list[tuple[int, int]], most: int) -> None:
    block = tuple((lo, lo + n) for lo, n in sides)
    found = tiles.tiles(block, most)
    points = [p for box in found for p in np.ndindex(*(hi - lo for lo, hi in box)) for p in [places(box, p)]]
    assert points == [places(block, p) for p in np.ndindex(*(n for _, n in sides))]
    assert all(np.prod([hi - lo for lo, hi in box]) <= most for box in found)


def places(box: tuple[tuple[int, int], ...], at: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(lo + k for (lo, _), k in zip(box, at, strict=True))


def test_small_tiles_give_what_the_block_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every monoid, every kind of read; what is not associative as written (rounding) may differ in the last places."""
    cut = 0
    for k in range(150):
        text, inputs, outputs, exact = blocks(random.Random(f"tiles {k}"))
        graph = parse(text)
        for points in (1 << 22, 7):
            monkeypatch.setattr(tiles, "POINTS", points)
            values = {n: kernels.from_numpy(a) for n, a in inputs.items()}
            for at, op in enumerate(graph.ops):
                assert isinstance(op, Block)
                boxes = {t: tuple((0, n) for n in graph.tensors[t].shape) for t in graph.tensors}
                kernel = Kernel(
                    op=at, mode="full", block=tuple((0, d.size) for d in op.space),
                    ins=tuple(boxes[r.tensor] for r in op.reads), outs=tuple(boxes[t] for t in op.outs),
                )  # fmt: skip
                cut += points == 7 and bool(op.monoid) and len(tiles.tiles(kernel.block, points)) > 1
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


def test_a_large_window_takes_no_more_than_a_tile(tmp_path: Path) -> None:
    node = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[90, 90])
    model = net([node], {"x": (T.FLOAT16, [1, 1, 140, 141])}, {"y": T.FLOAT16})
    onnx.save(model, tmp_path / "pool.onnx")
    built = tapestry.compile(tmp_path / "pool.onnx", devices=1)
    feeds = built.random_feeds(0)
    with Largest() as seen:
        (got,) = built.run(feeds).values()
    assert 51 * 52 * 90 * 90 > 4 * tiles.POINTS >= seen.cells
    window = np.lib.stride_tricks.sliding_window_view(feeds["x"][0, 0].astype(np.float64), (90, 90))
    np.testing.assert_allclose(got[0, 0], window.mean(axis=(2, 3)), atol=2e-3)
