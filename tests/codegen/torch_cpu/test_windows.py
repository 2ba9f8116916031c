"""Pooling, transposed convolutions and parts of sums on any block: the fast ways are taken, and give what they must."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T

import tapestry
from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.torch_ops.transposed_convolution import transposed
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel, whole
from tapestry.verify import interp
from tests.support.block_buffers import buffers, dense, sub_box
from tests.support.small_models import N, f32, net

pytestmark = pytest.mark.usefixtures("threads")
SIZE = (3, 4, 13, 10)


class Case:
    """A model of one operator, lifted: the operation and the values of all tensors."""

    def __init__(self, node: onnx.NodeProto, weights: dict[str, np.ndarray], folder: Path) -> None:
        onnx.save(net([node], {"x": (T.FLOAT, SIZE)}, {"y": T.FLOAT}, weights), folder / "m.onnx")
        self.build = tapestry.compile(folder / "m.onnx", mesh="1")
        self.graph = self.build.build.plan.graph
        self.at, self.op = next((i, o) for i, o in enumerate(self.graph.ops) if isinstance(o, Block) and o.reduce)
        self.values = {**self.build.random_feeds(0), **weights}
        self.values |= interp.run(self.graph, self.values, wide=True)

    def sums(self) -> np.ndarray:
        """The values of an operation without its ``then``, in double precision: a direct sum over all taps."""
        return self.values["y"].astype(np.float64)

    def kernel(self, mode: str, block, rng: random.Random) -> tuple[Kernel, list]:
        used = self.op.body_reads() if mode == "partial" else self.op.body_reads() | self.op.then_reads()
        boxes, arrays = buffers(self.op, self.graph, block, self.values, rng, used)
        return Kernel(op=self.at, mode=mode, block=block, ins=tuple(boxes), outs=(block[:4],)), arrays


POOLS = [
    {"kernel_shape": [2, 2], "strides": [2, 2]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [3, 2], "strides": [1, 3], "pads": [0, 1, 2, 0]},
    {"kernel_shape": [2, 3], "dilations": [3, 2], "pads": [1, 2, 0, 2]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_pooling_of_any_block(pool: dict[str, object], tmp_path: Path) -> None:
    c = Case(N("MaxPool", ["x"], ["y"], **pool), {}, tmp_path)
    for seed in range(12):
        rng = random.Random(seed)
        cells = whole(tuple(d.size for d in c.op.dims)) if seed == 0 else sub_box(whole(tuple(d.size for d in c.op.dims)), rng)
        k, arrays = c.kernel("full", cells + whole(tuple(d.size for d in c.op.reduce)), rng)
        want = c.values["y"][tuple(slice(lo, hi) for lo, hi in cells)]
        (got,) = TorchCpu().kernel(c.graph, k)(arrays, [])
        np.testing.assert_array_equal(got.numpy(), want)
        assert dense(got) and got.untyped_storage().nbytes() == got.nbytes


SPREADS = [
    {"strides": [2, 2]},
    {"strides": [1, 2], "pads": [1, 0, 1, 2]},
    {"strides": [3, 2], "output_padding": [2, 1]},
    {"strides": [3, 4], "dilations": [2, 3], "pads": [1, 1, 1, 1]},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spread", SPREADS, ids=str)
@pytest.mark.parametrize("kernel", [(2, 2), (3, 1)])
def test_transposed_convolutions_of_any_block(spread: dict[str, list[int]], kernel: tuple[int, int], tmp_path: Path) -> None:
    c = Case(N("ConvTranspose", ["x", "w"], ["y"], **spread), {"w": f32(4, 5, *kernel)}, tmp_path)
    dims, reduce = (whole(tuple(d.size for d in ds)) for ds in (c.op.dims, c.op.reduce))
    for seed in range(12):
        rng = random.Random(seed)
        cells = dims if seed == 0 else sub_box(dims, rng)
        want = c.sums()[tuple(slice(lo, hi) for lo, hi in cells)]
        k, arrays = c.kernel("full", cells + reduce, rng)
        assert transposed(c.op, c.graph, k) or any(n < s for n, s in zip(kernel, spread["strides"], strict=True))
        (got,) = TorchCpu().kernel(c.graph, k)(arrays, [])
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)
        states: list[torch.Tensor] = []
        cut = rng.randrange(3)  # parts along one of the reduced dimensions, of which one may be without any input
        for lo in range(reduce[cut][1]):
            part = tuple((lo, lo + 1) if n == cut else b for n, b in enumerate(reduce))
            k, arrays = c.kernel("partial", cells + part, rng)
            states = TorchCpu().kernel(c.graph, k)(arrays, states)
            assert dense(states[0])
        np.testing.assert_allclose(states[0].numpy(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("node", ["conv", "linear"])
def test_parts_of_sums_take_their_weights_packed(node: str, tmp_path: Path) -> None:
    if node == "conv":
        c = Case(N("Conv", ["x", "w"], ["y"], pads=[1] * 4), {"w": f32(6, 4, 3, 3)}, tmp_path)
    else:
        c = Case(N("MatMul", ["x", "w"], ["y"]), {"w": f32(10, 7)}, tmp_path)
    dims, reduce = (whole(tuple(d.size for d in ds)) for ds in (c.op.dims, c.op.reduce))
    big = max(range(len(reduce)), key=lambda n: reduce[n][1])
    target, states, plain = TorchCpu(), list[torch.Tensor](), list[torch.Tensor]()
    for lo in range(0, reduce[big][1], 2):
        part = tuple((lo, min(lo + 2, hi)) if n == big else (0, hi) for n, (_, hi) in enumerate(reduce))
        ins = tuple(
            tuple(dict(zip((d.name for d in c.op.space), dims + part, strict=True))[str(e)] for e in r.index)
            if r.tensor == "w" else whole(c.graph.tensors[r.tensor].shape)
            for r in c.op.reads
        )  # fmt: skip
        k = Kernel(op=c.at, mode="partial", block=dims + part, ins=ins, outs=(dims,))
        given = [
            torch.from_numpy(c.values[r.tensor][tuple(slice(lo, hi) for lo, hi in b)].copy())
            for r, b in zip(c.op.reads, ins, strict=True)
        ]
        run = target.kernel(c.graph, k)
        assert run.packs
        plain = run(given, plain)
        for at, pack in run.packs.items():
            given[at] = pack.run(given[at])
        states = run.packed(given, states)
        assert dense(states[0])
    np.testing.assert_allclose(states[0].numpy(), plain[0].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(states[0].numpy(), c.sums(), rtol=1e-4, atol=1e-5)
