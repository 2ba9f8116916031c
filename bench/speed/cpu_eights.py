"""Quantised networks beside onnxruntime's CPU provider: convolutions and products of 8-bit integers.

    .venv/bin/python -m bench cpu_eights [--only NET …] [--runs N] [--threads N]

Weights are drawn, signed and symmetric with a scale for each filter; activations are unsigned with a zero point. A network
has QLinearConv and QLinearMatMul; or, as NET_qdq, Conv and MatMul between DequantizeLinear and QuantizeLinear. Each is measured
as `bench cpu` measures a model. Prints; exits 1 if a result is not that of onnxruntime (bit for bit; of NET_qdq, about), or a
peak is not the plan's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from bench.speed.cpu import Case, measure, table, threads

ROUNDED = 0.5  # of the largest result, of NET_qdq: a float sum on the edge between two quanta, and what layers make of that


@dataclass
class Net:
    """A network under way, of tensors in 8 bits: as operators of them, or of what they are dequantised to."""

    operators: bool
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    consts: list[onnx.TensorProto] = field(default_factory=list)
    pairs: dict[str, tuple[str, str]] = field(default_factory=dict)

    def const(self, value: np.ndarray) -> str:
        """An initializer."""
        self.consts.append(numpy_helper.from_array(value, f"c{len(self.consts)}"))
        return self.consts[-1].name

    def add(self, kind: str, ins: Sequence[str], pair: tuple[str, str] | None = None, **attributes: object) -> str:
        """A node's output; ``pair``: its scale and zero point, of 8 bits."""
        self.nodes.append(helper.make_node(kind, ins, [f"t{len(self.nodes)}"], **attributes))
        out = self.nodes[-1].output[0]
        if pair:
            self.pairs[out] = pair
        return out

    def pair(self, positive: bool = False) -> tuple[str, str]:
        """A scale and a zero point."""
        return self.const(np.float32(0.02 if positive else 0.04)), self.const(np.uint8(0 if positive else 114))

    def quantised(self, x: str, positive: bool = False) -> str:
        """A tensor in 8 bits."""
        pair = self.pair(positive)
        return self.add("QuantizeLinear", (x, *pair), pair)

    def floats(self, x: str) -> str:
        """What a tensor of 8 bits stands for."""
        return self.add("DequantizeLinear", (x, *self.pairs[x]))

    def weighted(self, kind: str, x: str, shape: Sequence[int], axis: int, positive: bool, **attributes: object) -> str:
        """A convolution with a bias, or a product, by a weight that keeps the size of what it is given."""
        w = self.rng.standard_normal(shape)
        scale = np.abs(w).max(tuple(i for i in range(len(shape)) if i != axis), keepdims=True) / 127
        by = (scale / np.sqrt(np.prod(shape) / shape[axis])).astype(np.float32).reshape(-1)
        weight = (self.const(np.rint(w / scale).astype(np.int8)), self.const(by), self.const(np.zeros(by.size, np.int8)))
        bias = [self.const(self.rng.integers(-500, 500, by.size).astype(np.int32))] if kind == "Conv" else []
        if self.operators:
            pair = self.pair(positive)
            return self.add(f"QLinear{kind}", (x, *self.pairs[x], *weight, *pair, *bias), pair, **attributes)
        added = [
            self.add("DequantizeLinear", (b, self.const(np.float32(0.02 if x in self.positive else 0.04) * by)), axis=0)
            for b in bias
        ]
        y = self.add(kind, (self.floats(x), self.add("DequantizeLinear", weight, axis=axis), *added), **attributes)
        return self.quantised(self.add("Relu", (y,)) if positive else y, positive)

    @property
    def positive(self) -> set[str]:
        """Tensors with a zero point of 0."""
        known = {c.name: numpy_helper.to_array(c) for c in self.consts}
        return {x for x, (_, zero) in self.pairs.items() if not known[zero]}

    def conv(
        self, x: str, channels: int, features: int, window: int = 1, stride: int = 1, group: int = 1, positive: bool = False
    ) -> str:
        """A convolution, and ReLU if ``positive``."""
        shape, about = (features, channels // group, window, window), {"pads": [window // 2] * 4, "strides": [stride] * 2}
        return self.weighted("Conv", x, shape, 0, positive, group=group, kernel_shape=[window] * 2, **about)

    def layer(self, x: str, *sizes: int) -> str:
        """A convolution and ReLU."""
        return self.conv(x, *sizes, positive=True)


def resnet(net: Net, x: str) -> str:
    """Bottlenecks of ResNet, one of each size."""
    x = net.layer(net.quantised(x), 3, 64, 7, 4)
    for channels, stride, before in ((64, 1, 64), (128, 2, 256), (256, 2, 512), (512, 2, 1024)):
        short = net.conv(x, before, 4 * channels, 1, stride)
        y = net.layer(net.layer(x, before, channels), channels, channels, 3, stride)
        y = net.conv(y, channels, 4 * channels)
        x = net.quantised(net.add("Relu", (net.add("Add", (net.floats(y), net.floats(short))),)), True)
    return x


def mobilenet(net: Net, x: str) -> str:
    """Inverted residuals of MobileNet, one of each size."""
    x = net.layer(net.quantised(x), 3, 32, 3, 2)
    for before, after, stride in ((32, 24, 2), (24, 32, 2), (32, 64, 2), (64, 96, 1), (96, 160, 2)):
        wide = 6 * before
        x = net.layer(net.layer(x, before, wide), wide, wide, 3, stride, wide)
        x = net.conv(x, wide, after)
    return x


def products(net: Net, x: str) -> str:
    """Linear layers of a transformer's size."""
    x = net.quantised(x)
    for rows, columns in ((768, 3072), (3072, 768), (768, 768)):
        x = net.weighted("MatMul", x, (rows, columns), 1, True)
    return x


NETS = {"resnet": (resnet, (1, 3, 224, 224)), "mobilenet": (mobilenet, (1, 3, 224, 224)), "products": (products, (1, 128, 768))}


def save(name: str, path: Path) -> None:
    """Write a network."""
    stem, _, form = name.partition("_")
    net, (write, shape) = Net(operators=not form), NETS[stem]
    out = net.floats(write(net, "x"))
    ends = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape), helper.make_empty_tensor_value_info(out)
    graph = helper.make_graph(net.nodes, name, [ends[0]], [ends[1]], net.consts)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NET", default=[f"{n}{f}" for n in NETS for f in ("", "_qdq")])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=threads, default=1, metavar="N|all")
    args = parser.parse_args()
    rows = list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            path = Path(folder) / f"{name}.onnx"
            save(name, path)
            rows.append(measure(Case(name, str(path), {}, args.runs, args.threads, ROUNDED if "_" in name else 0.0)))
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
    return 1 if any(not r["passed"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
