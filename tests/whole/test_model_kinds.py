"""Small models of the kinds that people bring, whole: compiled, run and checked against a reference on 1, 3 and 2x2 devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from tapestry import api

KINDS: dict[str, Callable[[], onnx.ModelProto]] = {}
SIZES = {"batch": 3, "seq": 5, "past": 4}
FLOAT = {
    "f32": (T.FLOAT, np.float32),
    "f16": (T.FLOAT16, np.float16),
    "f64": (T.DOUBLE, np.float64),
    "bf16": (T.BFLOAT16, ml_dtypes.bfloat16),
}


class Net:
    """A model under construction: every call adds a node and gives the name of its first output."""

    def __init__(self, opset: int = 18) -> None:
        self.nodes, self.inits, self.ins, self.outs = [], [], [], []
        self.opset, self.rng = opset, np.random.default_rng(len(KINDS))

    def __call__(self, op, *ins, outs=1, **attributes):
        names = [f"{op}{len(self.nodes)}_{k}" for k in range(outs)]
        self.nodes.append(helper.make_node(op, list(ins), names, f"{op}{len(self.nodes)}", **attributes))
        return names[0] if outs == 1 else names

    def const(self, value, dtype=None):
        self.inits.append(numpy_helper.from_array(np.asarray(value, dtype), f"c{len(self.inits)}"))
        return self.inits[-1].name

    def weight(self, *shape, dtype=np.float32):
        return self.const((self.rng.standard_normal(shape) / np.sqrt(max(shape[-1], 2))).astype(dtype))

    def input(self, name, *shape, kind=T.FLOAT):
        self.ins.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def linear(self, x, size, to, dtype=np.float32):
        return self("Add", self("MatMul", x, self.weight(size, to, dtype=dtype)), self.weight(to, dtype=dtype))

    def heads(self, x, count, width):
        return self("Transpose", self("Reshape", x, self.const([0, 0, count, width])), perm=[0, 2, 1, 3])

    def attention(self, q, k, v, width, mask=None):
        scores = self("MatMul", self("Mul", q, self.const(np.float32(width**-0.5))), self("Transpose", k, perm=[0, 1, 3, 2]))
        weights = self("Softmax", self("Add", scores, mask) if mask else scores, axis=-1)
        mixed = self("Transpose", self("MatMul", weights, v), perm=[0, 2, 1, 3])
        return self("Reshape", mixed, self.const([0, 0, -1]))

    def done(self, *outs, kind=T.FLOAT):
        infos = [o if not isinstance(o, str) else helper.make_tensor_value_info(o, kind, None) for o in outs]
        graph = helper.make_graph(self.nodes, "g", self.ins, infos, self.inits)
        return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", self.opset)])


def kind(f: Callable[[], onnx.ModelProto]) -> Callable[[], onnx.ModelProto]:
    KINDS[f.__name__] = f
    return f


def whole(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, T.INT64, None)


@kind
def encoder_decoder():
    """Two embeddings, self attention under a causal mask, attention across; both lengths symbolic."""
    n = Net()
    source, target = n.input("source", "batch", "seq", kind=T.INT64), n.input("target", "batch", "past", kind=T.INT64)
    memory = n("Gather", n.weight(11, 8), n("Mod", source, n.const(11)))
    x = n("Gather", n.weight(11, 8), n("Mod", target, n.const(11)))
    length = n("Gather", n("Shape", target), n.const(1))
    places = n("Range", n.const(0), length, n.const(1))
    later = n("Less", n("Unsqueeze", places, n.const([1])), n("Unsqueeze", places, n.const([0])))
    mask = n("Where", later, n.const(np.float32(-1e9)), n.const(np.float32(0)))
    q, k, v = (n.heads(n.linear(x, 8, 8), 2, 4) for _ in range(3))
    x = n("LayerNormalization", n("Add", x, n.attention(q, k, v, 4, mask)), n.weight(8), n.weight(8))
    q, k, v = n.heads(n.linear(x, 8, 8), 2, 4), n.heads(n.linear(memory, 8, 8), 2, 4), n.heads(n.linear(memory, 8, 8), 2, 4)
    return n.done(n.linear(n("Add", x, n.attention(q, k, v, 4)), 8, 11))


@kind
def decode_step():
    """One token, a cache of keys and values that grows, rotary positions, grouped heads."""
    n = Net()
    x, at = n.input("x", "batch", 1, 8), n.input("at", "batch", 1)
    keys, values = n.input("keys", "batch", 2, "past", 4), n.input("values", "batch", 2, "past", 4)
    angle = n("Unsqueeze", n("Mul", at, n.const([[1.0, 0.1, 1.0, 0.1]], np.float32)), n.const([1, 2]))

    def turned(t):
        low, high = n("Split", t, axis=-1, num_outputs=2, outs=2)
        return n("Add", n("Mul", t, n("Cos", angle)), n("Mul", n("Concat", n("Neg", high), low, axis=-1), n("Sin", angle)))

    keys = n("Concat", keys, turned(n.heads(n.linear(x, 8, 8), 2, 4)), axis=2)
    values = n("Concat", values, n.heads(n.linear(x, 8, 8), 2, 4), axis=2)
    q = turned(n.heads(n.linear(x, 8, 16), 4, 4))
    wide = [
        n("Reshape", n("Tile", n("Unsqueeze", t, n.const([2])), n.const([1, 1, 2, 1, 1])), n.const([0, 4, -1, 4]))
        for t in (keys, values)
    ]
    return n.done(n.linear(n.attention(q, *wide, 4), 16, 8), keys, values)


@kind
def state_space():
    """A selective scan as ONNX Scan: h := a h + b x, seen through c; gated."""
    n = Net()
    x = n.input("x", "batch", "seq", 6)
    a = n("Exp", n("Neg", n("Softplus", n.linear(x, 6, 6))))
    cells = [helper.make_tensor_value_info(k, T.FLOAT, ["batch", 6]) for k in ("h", "at", "xt", "h2", "seen")]
    nodes = [
        helper.make_node("Mul", ["at", "h"], ["kept"]),
        helper.make_node("Add", ["kept", "xt"], ["h2"]),
        helper.make_node("Tanh", ["h2"], ["seen"]),
    ]
    body = helper.make_graph(nodes, "step", cells[:3], cells[3:])
    zero = n("Mul", n("ReduceSum", x, n.const([1]), keepdims=0), n.const(np.float32(0)))
    _, y = n(
        "Scan", zero, a, n.linear(x, 6, 6), outs=2, body=body, num_scan_inputs=2, scan_input_axes=[1, 1], scan_output_axes=[1]
    )
    gate = n.linear(x, 6, 6)
    return n.done(n.linear(n("Mul", y, n("Mul", gate, n("Sigmoid", gate))), 6, 6))


@kind
def detection():
    """A backbone, scores and boxes, the best of them, regions pooled; and non-maximum suppression."""
    n = Net()
    image = n.input("image", 1, 3, 12, 12)
    f = n("Relu", n("Conv", image, n.weight(6, 3, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1]))
    scores = n("Reshape", n("Sigmoid", n("Conv", f, n.weight(2, 6, 1, 1))), n.const([1, 2, 36]))
    boxes = n("Abs", n("Transpose", n("Reshape", n("Conv", f, n.weight(4, 6, 1, 1)), n.const([1, 4, 36])), perm=[0, 2, 1]))
    best, at = n("TopK", scores, n.const([4]), outs=2)
    kept = n("NonMaxSuppression", boxes, scores, n.const([3]), n.const(np.float32([0.5])), n.const(np.float32([0.1])))
    flat = n("Squeeze", boxes, n.const([0]))
    first = n("Gather", flat, n("Slice", n("Reshape", at, n.const([-1])), n.const([0]), n.const([3])))
    regions = n("RoiAlign", f, first, n.const([0, 0, 0]), output_height=2, output_width=2, sampling_ratio=2)
    return n.done(best, whole(at), whole(kept), regions)


@kind
def segmentation():
    """Down and up again: strides, dilations, transposed and resized, with skips and a pooled context; the best class."""
    n = Net()
    image = n.input("image", "batch", 3, 12, 8)
    norm = [n.weight(4) for _ in range(3)] + [n.const(np.full(4, 0.7, np.float32))]
    a = n("Relu", n("BatchNormalization", n("Conv", image, n.weight(4, 3, 3, 3), pads=[1] * 4), *norm))
    low, at = n("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2], outs=2)
    b = n("Conv", low, n.weight(6, 4, 3, 3), dilations=[2, 2], pads=[2] * 4)
    up = n("ConvTranspose", b, n.weight(6, 4, 2, 2), strides=[2, 2])
    back = n(
        "Resize",
        n("GlobalAveragePool", b),
        "",
        "",
        n("Concat", n("Slice", n("Shape", image), n.const([0]), n.const([1])), n.const([6, 12, 8]), axis=0),
    )
    y = n("Conv", n("Concat", a, up, back, axis=1), n.weight(2, 14, 1, 1))
    wide = n("Resize", y, "", n.const(np.float32([1, 1, 2, 1.5])), mode="cubic")
    return n.done(n("Softmax", wide, axis=1), whole(n("ArgMax", wide, axis=1)), whole(at))


@kind
def speech():
    """Spectra, convolutions in time, a recurrent net in both directions, log-probabilities of labels."""
    n = Net(20)
    wave = n.input("wave", 2, 64, 1)
    spectrum = n("STFT", wave, n.const(8), n.const(np.hanning(16).astype(np.float32)))
    power = n("Log", n("Add", n("ReduceSumSquare", spectrum, n.const([-1]), keepdims=0), n.const(np.float32(1e-3))))
    f = n("Gelu", n("Conv", n("Transpose", power, perm=[0, 2, 1]), n.weight(6, 9, 3), strides=[2], pads=[1, 1]))
    t = n("Transpose", f, perm=[2, 0, 1])
    y = n("LSTM", t, n.weight(2, 20, 6), n.weight(2, 20, 5), n.weight(2, 40), hidden_size=5, direction="bidirectional")
    joined = n("Reshape", n("Transpose", y, perm=[0, 2, 1, 3]), n.const([0, 0, 10]))
    return n.done(n("LogSoftmax", n.linear(joined, 10, 7), axis=-1))


@kind
def experts():
    """A router that keeps the best two of four experts, all of which are computed."""
    n = Net()
    x = n.input("x", "batch", "seq", 6)
    best, at = n("TopK", n("Softmax", n.linear(x, 6, 4)), n.const([2]), outs=2)
    share = n("Div", best, n("ReduceSum", best, n.const([-1])))
    zero = n("Mul", n.linear(x, 6, 4), n.const(np.float32(0)))
    weights = n("ScatterElements", zero, at, share, axis=-1)
    hidden = n("Relu", n("Einsum", x, n.weight(4, 6, 8), equation="bsd,edf->besf"))
    return n.done(n("Einsum", hidden, n.weight(4, 8, 6), weights, equation="besf,efd,bse->bsd"))


@kind
def integers():
    """Operators on quantised tensors: QLinearConv, QLinearMatMul, dynamic quantisation with MatMulInteger."""
    n = Net()
    x = n.input("x", "batch", 3, 6, 6)
    s, z = n.const(np.float32(0.05)), n.const(np.uint8(128))
    w = lambda *shape: n.const(n.rng.integers(-60, 60, shape).astype(np.int8))  # noqa: E731
    q = n("QuantizeLinear", x, s, z)
    scales = n.const((n.rng.random(4) / 50 + 0.01).astype(np.float32))
    y = n("QLinearConv", q, s, z, w(4, 3, 3, 3), scales, n.const(np.zeros(4, np.int8)), n.const(np.float32(0.2)), z)
    flat = n("Reshape", n("DequantizeLinear", y, n.const(np.float32(0.2)), z), n.const([0, -1]))
    d, ds, dz = n("DynamicQuantizeLinear", flat, outs=3)
    product = n("Cast", n("MatMulInteger", d, w(64, 5), dz), to=T.FLOAT)
    return n.done(n("Mul", product, n("Mul", ds, n.const(np.float32(0.01)))))


@kind
def volumes_and_signals():
    """Convolutions and pools in three dimensions and in one, grouped, with normalisations."""
    n = Net()
    x, wave = n.input("x", 1, 2, 7, 6, 5), n.input("wave", "batch", 4, 19)
    v = n("InstanceNormalization", n("Conv", x, n.weight(4, 2, 3, 3, 3), pads=[1] * 6), n.weight(4), n.weight(4))
    v = n("AveragePool", n("Elu", v), kernel_shape=[2, 2, 2], strides=[2, 2, 1], count_include_pad=1, pads=[0, 1, 0, 1, 0, 1])
    u = n("ConvTranspose", v, n.weight(4, 2, 2, 3, 2), strides=[2, 1, 2])
    s = n("Conv", n("Pad", wave, n.const([0, 0, 4, 0, 0, 0])), n.weight(4, 1, 3), group=4, dilations=[2])
    gate = n("Mul", n("Tanh", s), n("Sigmoid", n("Conv", wave, n.weight(4, 4, 1))))
    return n.done(u, n("MaxPool", gate, kernel_shape=[3], strides=[2], ceil_mode=1))


@kind
def control_flow():
    """A loop of known length around a choice that depends on the data."""
    n = Net()
    x = n.input("x", "batch", 4)
    cells = lambda *names: [helper.make_tensor_value_info(k, T.FLOAT, ["batch", 4]) for k in names]  # noqa: E731
    ways = [helper.make_graph([helper.make_node(op, ["s"], [op])], op, [], cells(op)) for op in ("Sin", "Tanh")]
    nodes = [
        helper.make_node("MatMul", ["h", n.weight(4, 4)], ["s"]), helper.make_node("ReduceSum", ["s"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", n.const(np.float32(0))], ["up"]),
        helper.make_node("If", ["up"], ["h2"], then_branch=ways[0], else_branch=ways[1]), helper.make_node("Identity", ["h2"], ["seen"]),
    ]  # fmt: skip
    start = [helper.make_tensor_value_info("i", T.INT64, []), helper.make_tensor_value_info("go", T.BOOL, []), *cells("h")]
    body = helper.make_graph(nodes, "body", start, [start[1], *cells("h2", "seen")])
    last, steps = n("Loop", n.const(3), "", x, outs=2, body=body)
    return n.done(last, steps)


@kind
def graph_network():
    """Messages along edges, summed where they arrive; nodes chosen by pairs of numbers."""
    n = Net()
    x, edges = n.input("x", 7, 6), n.input("edges", 2, 9, kind=T.INT64)
    source, target = (
        n("Squeeze", e, n.const([0])) for e in n("Split", n("Mod", edges, n.const(7)), axis=0, num_outputs=2, outs=2)
    )
    messages = n("Gather", n.linear(x, 6, 6), source)
    zero = n("Mul", x, n.const(np.float32(0)))
    total = n("ScatterND", zero, n("Unsqueeze", target, n.const([1])), messages, reduction="add")
    pairs = n(
        "Concat", n("Unsqueeze", source, n.const([1])), n("Mod", n("Unsqueeze", target, n.const([1])), n.const([6])), axis=1
    )
    return n.done(n("Relu", total), n("GatherND", total, pairs))


def precise(name: str) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        n = Net(22)
        code, dtype = FLOAT[name]
        x = n.input("x", "batch", 8, kind=code)
        y = n("Relu", n.linear(x, 8, 12, dtype))
        y = n("Softmax", n("Add", n.linear(y, 12, 8, dtype), x), axis=-1)
        return n.done(n("Mul", y, n("ReduceMax", x, n.const([1]))), kind=code)

    return make


KINDS |= {name: precise(name) for name in FLOAT}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_model_agrees_with_its_reference_on_any_mesh(tmp_path: Path, name: str):
    path = tmp_path / f"{name}.onnx"
    path.write_bytes(KINDS[name]().SerializeToString())
    symbols = {d.dim_param for i in onnx.load(path).graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}
    for mesh in ("1", "3", "2x2"):
        compiled = api.compile(path, mesh=mesh, shapes={s: SIZES[s] for s in symbols}, time_limit=5)
        _, document = api.run_checked(compiled, compiled.random_feeds(1), check=True)
        assert document["passed"], (mesh, document)
