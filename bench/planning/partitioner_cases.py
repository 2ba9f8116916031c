"""Graphs and the layouts of their ends, for two partitioners: the same ONNX nodes and the same layouts go to both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

Shape = list[int]
Layout = dict[int, tuple[str, ...]]
D0, D1 = ("d0",), ("d1",)
REPLICATED: Layout = {}


@dataclass(slots=True, kw_only=True)
class Case:
    """A graph, layouts of its ends (an output without one is free) and what is known about its bytes, over all senders.

    ``exact`` is the kind and bytes of the only transfer that the case needs, ``aim`` a goal below the partitioner's figure, and
    ``noted`` that figure as measured before (JAX 0.10.2, Shardy), for want of jax. ``other_form`` names another way for
    JAX code to write the same function (`xla.operators`), for a remark.
    """

    nodes: list[NodeProto]
    inputs: dict[str, Shape]
    outputs: dict[str, Shape]
    layouts: dict[str, Layout]
    mesh: tuple[int, ...] = (8,)
    constants: dict[str, int | list[int] | float] = field(default_factory=dict)
    integers: tuple[str, ...] = ()
    exact: tuple[str, int] | None = None
    aim: int | None = None
    noted: int | None = None
    other_form: dict[str, str] = field(default_factory=dict)

    def model(self) -> onnx.ModelProto:
        """The ONNX model, without weights: all tensors are inputs."""

        def ends(tensors: dict[str, Shape]) -> list[onnx.ValueInfoProto]:
            kinds = {n: TensorProto.INT64 if n in self.integers else TensorProto.FLOAT for n in tensors}
            return [helper.make_tensor_value_info(n, kinds[n], s) for n, s in tensors.items()]

        fixed = [
            numpy_helper.from_array(np.array(v, np.float32 if isinstance(v, float) else np.int64), n)
            for n, v in self.constants.items()
        ]
        graph = helper.make_graph(self.nodes, "case", ends(self.inputs), ends(self.outputs), fixed)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    def texts(self) -> list[str]:
        """Layouts as `tapestry compile` takes them."""
        sizes = {f"d{i}": n for i, n in enumerate(self.mesh)}

        def one(layout: Layout) -> str:
            cuts = [f"{d}={np.prod([sizes[a] for a in axes])}@{'+'.join(axes)}" for d, axes in layout.items()]
            return ",".join(cuts) or "replicated"

        return [f"{tensor}:{one(layout)}" for tensor, layout in self.layouts.items()]

    def free(self) -> list[str]:
        """Ends whose layout each side chooses."""
        return [t for t in (*self.inputs, *self.outputs) if t not in self.layouts]

    def document(self, name: str, *, other: bool = False) -> dict[str, Any]:
        """What `xla.py` reads; ``other`` asks for the other form."""
        forms = self.other_form if other else {}
        nodes = [
            {"op": forms.get(n.op_type, n.op_type), "inputs": list(n.input), "output": n.output[0],
             "attributes": {a.name: helper.get_attribute_value(a) for a in n.attribute}}
            for n in self.nodes
        ]  # fmt: skip
        return {"name": name, "nodes": nodes, "inputs": self.inputs, "outputs": self.outputs, "layouts": self.layouts,
                "mesh": self.mesh, "constants": self.constants, "integers": self.integers}  # fmt: skip


def node(op: str, inputs: str, output: str, **attributes: object) -> NodeProto:
    """A node named after its output."""
    return helper.make_node(op, inputs.split(), [output], name=output, **attributes)


def window(kernel: int, stride: int = 1, pad: int = 0, dilation: int = 1, **more: object) -> dict[str, object]:
    """Attributes of a square window."""
    found = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, **more}
    return found | ({"dilations": [dilation] * 2} if dilation > 1 else {})


# windows

ROW = 8 * 64 * 224 * 4  # bytes of one row of 224 in a batch of 8 with 64 channels


def spatial(
    nodes: list[NodeProto], size: int, out: int, kernel: int = 0, *, layout: Layout | None = None, rows: int | None = None,
    weights: int = 1, width: tuple[int, int] | None = None, mesh: tuple[int, ...] = (8,), noted: int | None = None,
) -> Case:  # fmt: skip
    """Windows over 8×64×size×width with the rows cut over the devices at both ends.

    ``rows``: input rows that must cross each of the 7 boundaries, both ways together.
    """
    w_in, w_out = width or (size, out)
    inputs = {"x": [8, 64, size, w_in], **({f"w{i + 1}": [64, 64, kernel, kernel] for i in range(weights)} if kernel else {})}
    cut = layout or {2: D0}
    exact = ("halo", rows * 7 * 8 * 64 * w_in * 4) if rows else None
    layouts = {"x": cut, **{w: REPLICATED for w in inputs if w != "x"}, "y": cut}
    return Case(nodes=nodes, inputs=inputs, outputs={"y": [8, 64, out, w_out]}, layouts=layouts, mesh=mesh, exact=exact,
                noted=noted or (exact[1] if exact else None))  # fmt: skip


def convolutions() -> dict[str, Case]:
    """Halos. An output row h of a k×k window of stride s, padding p and dilation d reads rows sh−p … sh−p+d(k−1)."""

    def conv(kernel: int, stride: int, pad: int, dilation: int = 1) -> list[NodeProto]:
        return [node("Conv", "x w1", "y", **window(kernel, stride, pad, dilation))]

    two = [node("Conv", "x w1", "a", **window(3, 1, 1)), node("Conv", "a w2", "y", **window(3, 1, 1))]
    chain = [node("Conv", "x w1", "a", **window(3, 2, 1)), node("Conv", "a w2", "y", **window(3, 1, 1))]
    transposed = [node("ConvTranspose", "x w1", "y", **window(3, 2, 1, output_padding=[1, 1]))]
    reduced = spatial(conv(3, 1, 1), 224, 224, 3, noted=179_830_784 * 8)
    reduced.layouts = {"x": {1: D0}, "w1": {1: D0}, "y": REPLICATED}
    return {
        "conv 3×3 stride 1": spatial(conv(3, 1, 1), 224, 224, 3, rows=2),
        "conv 3×3 stride 2": spatial(conv(3, 2, 1), 224, 112, 3, rows=1),
        "conv 5×5 stride 1": spatial(conv(5, 1, 2), 224, 224, 5, rows=4),
        "conv 7×7 stride 2": spatial(conv(7, 2, 3), 224, 112, 7, rows=5),
        "conv 3×3 dilation 2": spatial(conv(3, 1, 2, 2), 224, 224, 3, rows=4),
        "transposed conv 3×3 stride 2": spatial(transposed, 112, 224, 3, rows=1, noted=200_704 * 8),
        "conv 3×3, H×W on 2×4": spatial(
            conv(3, 1, 1), 224, 224, 3, layout={2: D0, 3: D1}, mesh=(2, 4), noted=3_719_168
        ),
        "two convs 3×3 in a row": spatial(two, 224, 224, 3, rows=4, weights=2, noted=1_605_632 * 8),
        "conv 3×3, input channels cut": reduced,
        "conv 3×3, 220 rows over 8": spatial(conv(3, 1, 1), 220, 220, 3, rows=2, width=(224, 224), noted=802_816 * 8),
        "convs 56 → 28 → 28": spatial(chain, 56, 28, 3, weights=2, noted=802_816 * 8),
        "max-pool 3×3 stride 2": spatial([node("MaxPool", "x", "y", **window(3, 2, 1))], 112, 56, rows=1, noted=200_704 * 8),
    }  # fmt: skip


# matrices

TOKENS, WIDTH, INNER = 512, 4096, 16384


def mlp(layouts: dict[str, Layout], noted: int) -> Case:
    """512×4096 → 16384 → 4096."""
    nodes = [node("MatMul", "x w1", "h"), node("Relu", "h", "a"), node("MatMul", "a w2", "y")]
    inputs = {"x": [TOKENS, WIDTH], "w1": [WIDTH, INNER], "w2": [INNER, WIDTH]}
    return Case(nodes=nodes, inputs=inputs, outputs={"y": [TOKENS, WIDTH]}, layouts=layouts, noted=noted)


def block(layout: Layout, noted: int, aim: int | None = None, mesh: tuple[int, ...] = (8,)) -> Case:
    """A transformer block before normalisation, batch 8, 512 tokens, width 1024, 16 heads, inner 4096, without biases and mask;
    weights as Megatron cuts them: those before the heads and the activation by columns, those after by rows."""
    b, t, d, h, f = 8, 512, 1024, 16, 4096
    nodes = [node("LayerNormalization", "x s1 b1", "n1", axis=-1)]
    for k in "qkv":
        nodes += [node("MatMul", f"n1 w{k}", f"{k}0"), node("Reshape", f"{k}0 split", f"{k}1")]
        nodes += [node("Transpose", f"{k}1", k, perm=[0, 2, 3, 1] if k == "k" else [0, 2, 1, 3])]
    nodes += [
        node("MatMul", "q k", "scores"), node("Mul", "scores scale", "scaled"), node("Softmax", "scaled", "p", axis=-1),
        node("MatMul", "p v", "o0"), node("Transpose", "o0", "o1", perm=[0, 2, 1, 3]), node("Reshape", "o1 join", "o2"),
        node("MatMul", "o2 wo", "o3"), node("Add", "x o3", "r"), node("LayerNormalization", "r s2 b2", "n2", axis=-1),
        node("MatMul", "n2 w1", "u"), node("Mul", "u invroot2", "e0"), node("Erf", "e0", "e1"), node("Add", "e1 one", "e2"),
        node("Mul", "u e2", "e3"), node("Mul", "e3 half", "g"), node("MatMul", "g w2", "m"), node("Add", "r m", "y"),
    ]  # fmt: skip
    squares = {w: [d, d] for w in ("wq", "wk", "wv", "wo")}
    vectors = {v: [d] for v in ("s1", "b1", "s2", "b2")}
    cut = ("d0",) if len(mesh) == 1 else ("d1",)
    layouts: dict[str, Layout] = {"x": layout, "y": layout, "wo": {0: cut}, "w2": {0: cut}}
    layouts |= {w: {1: cut} for w in ("wq", "wk", "wv", "w1")} | dict.fromkeys(vectors, REPLICATED)
    constants = {"split": [b, t, h, d // h], "join": [b, t, d], "scale": (d // h) ** -0.5, "invroot2": 0.5**0.5, "one": 1.0,
                 "half": 0.5}  # fmt: skip
    inputs = {"x": [b, t, d], **squares, "w1": [d, f], "w2": [f, d], **vectors}
    return Case(nodes=nodes, inputs=inputs, outputs={"y": [b, t, d]}, layouts=layouts, constants=constants, mesh=mesh,
                noted=noted, aim=aim)  # fmt: skip


def matrices() -> dict[str, Case]:
    """A feed-forward network and a block. Megatron's network needs one all-reduce of its result, 2·7 times 512·4096 floats."""
    columns, rows, batch = {1: D0}, {0: D0}, {0: D0}
    reduced = 14 * TOKENS * WIDTH * 4
    megatron = mlp({"x": REPLICATED, "w1": columns, "w2": rows, "y": REPLICATED}, reduced)
    megatron.exact = ("all_reduce", reduced)
    return {
        "MLP, Megatron": megatron,
        "MLP, batch cut at both ends": mlp({"x": batch, "w1": columns, "w2": rows, "y": batch}, 176_160_768),
        "MLP, FSDP weights": mlp({"x": batch, "w1": rows, "w2": rows, "y": batch}, 469_762_048 * 8),
        "block, Megatron": block(REPLICATED, 469_762_048),
        "block, sequence cut at both ends": block({1: D0}, 587_202_560, aim=51_400_000 * 8),
        "block, data × tensor 2×4": block({0: D0}, 25_165_824 * 8, mesh=(2, 4)),
    }


# the rest


def others() -> dict[str, Case]:
    """Operators along the axis that is cut."""
    rows: Layout = {0: D0}
    halves = {"a": [512, 1024], "b": [512, 1024]}
    merge = {"x": [8, 512, 1024]}
    features = {"x": [512, 4096], "s": [4096], "b": [4096]}
    words = {"w": [50304, 1024], "i": [8, 512]}
    return {
        "concat on the cut axis": Case(
            nodes=[node("Concat", "a b", "y", axis=0)], inputs=halves, outputs={"y": [1024, 1024]},
            layouts={"a": rows, "b": rows, "y": rows}, noted=7_340_032, aim=3_670_016,
        ),
        "cumsum along the cut axis": Case(
            nodes=[node("CumSum", "x axis", "y")], inputs={"x": [512, 1024]}, outputs={"y": [512, 1024]},
            layouts={"x": rows, "y": rows}, constants={"axis": 0}, noted=14_680_064, aim=229_376,
        ),
        "softmax along the cut axis": Case(
            nodes=[node("Softmax", "x", "y", axis=0)], inputs={"x": [4096, 1024]}, outputs={"y": [4096, 1024]},
            layouts={"x": rows, "y": rows}, noted=14_336 * 8, exact=("all_reduce", 2 * 14 * 1024 * 4),
        ),
        "layer norm, features cut": Case(
            nodes=[node("LayerNormalization", "x s b", "y", axis=-1)], inputs=features, outputs={"y": [512, 4096]},
            layouts={"x": {1: D0}, "s": rows, "b": rows, "y": {1: D0}}, noted=10_752 * 8,
            other_form={"LayerNormalization": "LayerNormalization by squares"},
        ),
        "embedding, vocabulary cut": Case(
            nodes=[node("Gather", "w i", "y", axis=0)], inputs=words, outputs={"y": [8, 512, 1024]}, integers=("i",),
            layouts={"w": rows, "i": REPLICATED, "y": REPLICATED}, noted=29_360_128 * 8,
        ),
        "reshape, merge": Case(
            nodes=[node("Reshape", "x shape", "r"), node("Relu", "r", "y")], inputs=merge, outputs={"y": [4096, 1024]},
            layouts={"x": {1: D0}}, constants={"shape": [4096, 1024]}, noted=14_680_064 * 8,
        ),
        "reshape, merge, rows cut at the end": Case(
            nodes=[node("Reshape", "x shape", "r"), node("Relu", "r", "y")], inputs=merge, outputs={"y": [4096, 1024]},
            layouts={"x": {1: D0}, "y": rows}, constants={"shape": [4096, 1024]}, noted=14_680_064,
        ),
        "reshape, split": Case(
            nodes=[node("Reshape", "x shape", "r"), node("Relu", "r", "y")], inputs={"x": [4096, 1024]},
            outputs={"y": [8, 512, 1024]}, layouts={"x": rows, "y": {1: D0}}, constants={"shape": [8, 512, 1024]},
            noted=14_680_064,
        ),
    }  # fmt: skip


def all_cases() -> dict[str, Case]:
    """Every case, by name."""
    return matrices() | convolutions() | others()
