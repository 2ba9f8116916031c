"""Convolutions and pools cut in space, as programs of ranks that exchange halos: right ones, and faults in them;
and networks in float16."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tapestry.plan.fusion import Machine
from tapestry.plan.topology.presets import SOURCES

N = helper.make_node
FAULTS = ("short", "swapped", "padded inside", "phase")


@dataclass(frozen=True, slots=True)
class Layer:
    """A window along the first axis in space (and the same along the second one, uncut, if there is one)."""

    kind: str = "Conv"
    kernel: int = 3
    stride: int = 1
    dilation: int = 1
    pad: int = 1
    counted: int = 1  # of an average: whether padding counts

    def attributes(self, axes: int, before: int, after: int) -> dict[str, object]:
        """The node's, with paddings of the cut axis."""
        rest = [self.pad] * (axes - 1)
        out: dict[str, object] = {"kernel_shape": [self.kernel] * axes, "strides": [self.stride] * axes}
        out |= {"pads": [before, *rest, after, *rest], "dilations": [self.dilation] * axes}
        return out | ({"count_include_pad": self.counted} if self.kind == "AveragePool" else {})

    def length(self, n: int) -> int:
        """Of the result, for a length."""
        return (n + 2 * self.pad - self.dilation * (self.kernel - 1) - 1) // self.stride + 1


def _collective(kind: str, x: str, y: str, world: int) -> onnx.NodeProto:
    return N("DistCollective", [x], [y], y, collective_operation=kind, reduce_op="NONE", nb_rank=world)


def _file(
    nodes: Sequence[onnx.NodeProto], weights: dict[str, np.ndarray], ins: Sequence[int], outs: Sequence[int], path: Path
) -> None:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        list(nodes), "g", [info("x", TensorProto.FLOAT, list(ins))], [info("y", TensorProto.FLOAT, list(outs))],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()],
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 19)]), path)


def write(
    folder: Path, layers: Sequence[Layer], world: int, length: int, axes: int = 1, way: str = "halo", fault: str = ""
) -> tuple[Path, Path]:
    """A model, and a program that cuts its first axis in space; its weights are the model's.

    Args:
        way: how halos come: ``halo`` (edges are gathered, then sliced and put beside), ``whole`` (all is gathered, then sliced),
            ``explicit`` (as ``halo``, with Pad nodes).
    """
    rng, weights = np.random.default_rng(0), dict[str, np.ndarray]()
    nodes, sizes = list[onnx.NodeProto](), [length]
    for k, layer in enumerate(layers):
        if layer.kind == "Conv":
            weights[f"w{k}"] = rng.standard_normal((2, 2, *[layer.kernel] * axes)).astype(np.float32)
        nodes += _layer(layer, k, axes, len(layers), layer.pad, layer.pad)
        sizes.append(layer.length(sizes[-1]))
    rest = _rest(layers, axes, 6)
    _file(nodes, weights, [1, 2, length, *rest[0]], [1, 2, sizes[-1], *rest[-1]], folder / "model.onnx")
    for r in range(world):
        made = _rank(layers, sizes, rest, r, world, axes, way, fault, dict(weights))
        own = [1, 2, length // world, *rest[0]], [1, 2, sizes[-1] // world, *rest[-1]]
        _file(made[0], made[1], *own, folder / "ranks" / f"rank{r}.onnx")
    cut = [None, None, "r", *[None] * (axes - 1)]
    (folder / "ranks" / "program.json").write_text(json.dumps({"mesh": {"r": world}, "placement": {"x": cut, "y": cut}}))
    return folder / "model.onnx", folder / "ranks"


def _rest(layers: Sequence[Layer], axes: int, length: int) -> list[list[int]]:
    out = [[length] * (axes - 1)]
    for layer in layers:
        out.append([layer.length(n) for n in out[-1]])
    return out


def _layer(layer: Layer, k: int, axes: int, last: int, before: int, after: int) -> list[onnx.NodeProto]:
    ins = ["x" if k == 0 else f"h{k}", *([f"w{k}"] if layer.kind == "Conv" else [])]
    made, out = f"c{k + 1}", "y" if k + 1 == last else f"h{k + 1}"
    kind = {"Conv": "Conv", "MaxPool": "MaxPool", "AveragePool": "AveragePool"}[layer.kind]
    return [N(kind, ins, [made], **layer.attributes(axes, before, after)), N("Relu", [made], [out])]


def _rank(
    layers: Sequence[Layer], sizes: Sequence[int], rest: list[list[int]], r: int, world: int, axes: int, way: str, fault: str,
    weights: dict[str, np.ndarray],
) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:  # fmt: skip
    nodes: list[onnx.NodeProto] = []
    for k, layer in enumerate(layers):
        n, m = sizes[k] // world, sizes[k + 1] // world
        low = r * m * layer.stride - layer.pad
        high = (r * m + m - 1) * layer.stride - layer.pad + layer.dilation * (layer.kernel - 1) + 1
        if fault == "phase" and k == 0 and r == 1:
            low, high = low + 1, high + 1
        before, after = max(0, -low), max(0, high - sizes[k])
        low, high = max(0, low), min(sizes[k], high)
        if k == 0 and r == 1 and fault in ("short", "padded inside"):
            taken = 1 if fault == "short" else r * n - low
            low, before = low + taken, before + taken
        source, out = "x" if k == 0 else f"h{k}", f"wide{k}"
        nodes += _widened(
            source, out, r, world, n, low, high, k, way, weights, swapped=fault == "swapped" and k == 0 and r == 1
        )
        if way == "explicit" and layer.kind == "Conv":
            weights[f"pads{k}"] = np.array([0, 0, before, *[0] * (axes - 1), 0, 0, after, *[0] * (axes - 1)])
            nodes.append(N("Pad", [out, f"pads{k}"], [f"{out}.p"]))
            out, before, after = f"{out}.p", 0, 0
        made = _layer(layer, k, axes, len(layers), before, after)
        made[0].input[0] = out
        nodes += made
    return nodes, weights


def _widened(
    x: str, out: str, r: int, world: int, n: int, low: int, high: int, k: int, way: str, weights: dict[str, np.ndarray],
    swapped: bool,
) -> list[onnx.NodeProto]:  # fmt: skip
    """Rows ``low`` to ``high`` of all, of which this rank has ``n`` from ``r * n`` on."""
    perm = [2, 0, 1, *range(3, 9)]
    rank = 3 + (len(weights["w0"].shape) - 3 if "w0" in weights else 0)
    perm, back = perm[:rank], [1, 2, 0, *range(3, rank)]
    weights |= {f"{out}.lo": np.array([low]), f"{out}.hi": np.array([high]), "axis0": np.array([0])}
    nodes = [N("Transpose", [x], [f"{out}.t"], perm=perm)]
    if way == "whole":
        nodes += [_collective("ALL_GATHER", f"{out}.t", f"{out}.g", world)]
        nodes += [N("Slice", [f"{out}.g", f"{out}.lo", f"{out}.hi", "axis0"], [f"{out}.s"])]
        return [*nodes, N("Transpose", [f"{out}.s"], [out], perm=back)]
    h = min(n, 2)  # rows that each rank shows of either edge
    weights |= {f"{out}.h": np.array([h]), f"{out}.b": np.array([n - h]), f"{out}.n": np.array([n]), "zero": np.array([0])}
    nodes += [
        N("Slice", [f"{out}.t", "zero", f"{out}.h", "axis0"], [f"{out}.first"]),
        N("Slice", [f"{out}.t", f"{out}.b", f"{out}.n", "axis0"], [f"{out}.last"]),
        N("Concat", [f"{out}.first", f"{out}.last"], [f"{out}.edges"], axis=0),
        _collective("ALL_GATHER", f"{out}.edges", f"{out}.g", world),
    ]
    parts: list[str] = []

    def edge(name: str, start: int, stop: int) -> None:
        weights.update({f"{name}.a": np.array([start]), f"{name}.b": np.array([stop])})
        nodes.append(N("Slice", [f"{out}.g", f"{name}.a", f"{name}.b", "axis0"], [name]))
        parts.append(name)

    left, right = r * n - low, high - (r + 1) * n
    end = 2 * h * r  # where the edges of the previous rank end
    if swapped:
        end = 2 * h * ((r + 2) % world + 1) if world > 2 else 2 * h * (r + 1)
    if left > 0:
        edge(f"{out}.left", end - left, end)
    weights |= {f"{out}.ol": np.array([max(0, -left)]), f"{out}.oh": np.array([n + min(0, right)])}
    nodes.append(N("Slice", [f"{out}.t", f"{out}.ol", f"{out}.oh", "axis0"], [f"{out}.own"]))
    parts.append(f"{out}.own")
    if right > 0:
        edge(f"{out}.right", 2 * h * (r + 1), 2 * h * (r + 1) + right)
    return [*nodes, N("Concat", parts, [f"{out}.c"], axis=0), N("Transpose", [f"{out}.c"], [out], perm=back)]


# Networks in float16 whose tensors a plan for a GPU lays out anew.


GPU = Machine(device=SOURCES["h100"].device, eager=False)
HALF = np.float16


def model(nodes: list[onnx.NodeProto], shapes: dict[str, tuple[int, ...]], weights: dict[str, tuple[int, ...]], out: str):
    """A model in float16 with random weights."""
    rng = np.random.default_rng(0)
    held = [numpy_helper.from_array((rng.standard_normal(s) * 0.4).astype(HALF), n) for n, s in weights.items()]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, s) for n, s in shapes.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info(out, TensorProto.FLOAT16, None)], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def network() -> onnx.ModelProto:
    """A residual block with a pool before and behind it."""
    conv = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], strides=[2, 2], **conv), helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["c", "w1"], ["d"], **conv), helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("Conv", ["e", "w2"], ["f"], **conv), helper.make_node("Add", ["f", "c"], ["g"]),
        helper.make_node("Relu", ["g"], ["h"]), helper.make_node("Conv", ["h", "w3"], ["i"]),
        helper.make_node("GlobalAveragePool", ["i"], ["y"]),
    ]  # fmt: skip
    weights = {"w0": (6, 3, 3, 3), "w1": (6, 6, 3, 3), "w2": (6, 6, 3, 3), "w3": (5, 6, 1, 1)}
    return model(nodes, {"x": (2, 3, 17, 13)}, weights, "y")


def projections() -> onnx.ModelProto:
    """Three projections of one tensor, two of them scaled in heads, as exporters write attention."""
    nodes = [helper.make_node("Constant", [], ["s"], value_ints=[2, 7, 3, 4])]
    for n, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            helper.make_node("MatMul", ["x", f"w{n}"], [f"{n}0"]), helper.make_node("Reshape", [f"{n}0", "s"], [f"{n}1"]),
            helper.make_node("Transpose", [f"{n}1"], [f"{n}2"], perm=perm),
        ]  # fmt: skip
    nodes += [
        helper.make_node("Mul", ["q2", "r"], ["q3"]), helper.make_node("Mul", ["k2", "r"], ["k3"]),
        helper.make_node("MatMul", ["q3", "k3"], ["scores"]), helper.make_node("Softmax", ["scores"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v2"], ["y"]),
    ]  # fmt: skip
    return model(nodes, {"x": (2, 7, 10)}, {**{f"w{n}": (10, 12) for n in "qkv"}, "r": (1,)}, "y")
