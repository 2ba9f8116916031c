"""Small ONNX models of awkward sizes, and what the tests of plans, certificates and runs share."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.kernels import from_numpy, to_numpy
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Mesh, Plan
from tapestry.ir.program import Program, Reduce, Transfer, peak_bytes, transfer_bytes
from tapestry.lift import lift, read_weight
from tapestry.plan.strategy import strategies
from tapestry.plan.topology import parse_mesh
from tapestry.rewrites.core.driver import simplify
from tapestry.runtime.feeds import random_feeds
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.runtime.target_protocol import Measured
from tapestry.verify import interp

N = helper.make_node
FOLDER = Path(tempfile.mkdtemp(prefix="tapestry-tests-"))
RNG = np.random.default_rng(7)


def f32(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) * 0.5).astype(np.float32)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def net(nodes, ins, outs, weights=None, opset=18) -> onnx.ModelProto:
    """A model: ``ins`` name → (dtype, shape), ``outs`` name → dtype, ``weights`` name → array."""
    info = [helper.make_tensor_value_info(n, t, s) for n, (t, s) in ins.items()]
    results = [helper.make_tensor_value_info(n, t, None) for n, t in outs.items()]
    inits = [numpy_helper.from_array(np.asarray(a), n) for n, a in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", info, results, inits)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {}


def model(f: Callable[[], onnx.ModelProto]) -> Callable[[], onnx.ModelProto]:
    MODELS[f.__name__] = f
    return f


@model
def conv_chain() -> onnx.ModelProto:
    return net(
        [N("Conv", ["x", "w1", "b1"], ["c1"], "conv1", pads=[1, 1, 1, 1]), N("Relu", ["c1"], ["r1"], "relu1"),
         N("Conv", ["r1", "w2"], ["c2"], "conv2", strides=[2, 2], pads=[1, 1, 1, 1]),
         N("MaxPool", ["c2"], ["p"], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
         N("GlobalAveragePool", ["p"], ["g"], "gap"), N("Flatten", ["g"], ["f"], "flat"), N("Gemm", ["f", "w3", "b3"], ["y"], "fc", transB=1)],
        {"x": (T.FLOAT, [2, 3, 13, 11])}, {"y": T.FLOAT},
        {"w1": f32(5, 3, 3, 3), "b1": f32(5), "w2": f32(4, 5, 3, 3), "w3": f32(7, 4), "b3": f32(7)},
    )  # fmt: skip


@model
def conv_groups() -> onnx.ModelProto:
    return net(
        [N("Conv", ["x", "w1"], ["a"], "grouped", group=3, dilations=[2, 1], pads=[1, 0, 2, 1]),
         N("Conv", ["a", "w2"], ["y"], "depthwise", group=6, strides=[1, 2], pads=[0, 1, 1, 0])],
        {"x": (T.FLOAT, [1, 6, 9, 7])}, {"y": T.FLOAT}, {"w1": f32(6, 2, 3, 3), "w2": f32(12, 1, 2, 3)},
    )  # fmt: skip


@model
def conv_other_ranks() -> onnx.ModelProto:
    return net(
        [N("Conv", ["x", "w1"], ["y"], "c1d", strides=[3], dilations=[2], pads=[2, 3]), N("Conv", ["z", "w2"], ["v"], "c3d", pads=[1, 0, 0, 0, 1, 0])],
        {"x": (T.FLOAT, [3, 4, 17]), "z": (T.FLOAT, [1, 2, 5, 4, 4])}, {"y": T.FLOAT, "v": T.FLOAT},
        {"w1": f32(5, 4, 3), "w2": f32(3, 2, 2, 2, 3)},
    )  # fmt: skip


@model
def conv_transpose() -> onnx.ModelProto:
    return net(
        [N("ConvTranspose", ["x", "w"], ["y"], "up", strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 0])],
        {"x": (T.FLOAT, [1, 3, 5, 4])}, {"y": T.FLOAT}, {"w": f32(3, 4, 3, 3)},
    )  # fmt: skip


@model
def pools() -> onnx.ModelProto:
    return net(
        [N("AveragePool", ["x"], ["a"], "avg", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]),
         N("AveragePool", ["x"], ["b"], "avg2", kernel_shape=[2, 2], strides=[2, 2], pads=[1, 1, 0, 0], count_include_pad=1),
         N("LpPool", ["x"], ["c"], "lp", kernel_shape=[2, 2]), N("GlobalMaxPool", ["x"], ["d"], "gmax"),
         N("MaxPool", ["x"], ["e"], "ceil", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)],
        {"x": (T.FLOAT, [2, 3, 8, 7])}, dict.fromkeys("abcde", T.FLOAT),
    )  # fmt: skip


@model
def mlp() -> onnx.ModelProto:
    return net(
        [N("Gemm", ["x", "w1", "b1"], ["h"], "up"), N("Relu", ["h"], ["r"], "act"), N("MatMul", ["r", "w2"], ["d"], "down"),
         N("Add", ["d", "x"], ["s"], "skip"), N("Softmax", ["s"], ["y"], "probs", axis=-1)],
        {"x": (T.FLOAT, [7, 5])}, {"y": T.FLOAT}, {"w1": f32(5, 13), "b1": f32(13), "w2": f32(13, 5)},
    )  # fmt: skip


@model
def norms() -> onnx.ModelProto:
    return net(
        [N("LayerNormalization", ["x", "g", "b"], ["l", "mean", "inv"], "ln", axis=1), N("InstanceNormalization", ["z", "s", "t"], ["i"], "inorm"),
         N("BatchNormalization", ["z", "s", "t", "m", "v"], ["n"], "bn"), N("Softmax", ["l"], ["p"], "sm", axis=1), N("LogSoftmax", ["x"], ["q"], "lsm", axis=0),
         N("LpNormalization", ["x"], ["u"], "lpn", axis=1), N("GroupNormalization", ["z2", "s2", "t2"], ["gn"], "gnorm", num_groups=2)],
        {"x": (T.FLOAT, [5, 7]), "z": (T.FLOAT, [2, 3, 5]), "z2": (T.FLOAT, [2, 4, 3])}, dict.fromkeys(["l", "mean", "inv", "i", "n", "p", "q", "u", "gn"], T.FLOAT),
        {"g": f32(7), "b": f32(7), "s": f32(3), "t": f32(3), "m": f32(3), "v": np.abs(f32(3)) + 0.5, "s2": f32(4), "t2": f32(4)},
        opset=21,
    )  # fmt: skip


@model
def attention() -> onnx.ModelProto:
    return net(
        [N("MatMul", ["x", "wq"], ["q0"], "q"), N("MatMul", ["x", "wk"], ["k0"], "k"), N("MatMul", ["x", "wv"], ["v0"], "v"),
         *[N("Reshape", [f"{n}0", "heads"], [f"{n}1"], f"{n}_heads") for n in "qkv"],
         N("Transpose", ["q1"], ["q2"], "qt", perm=[0, 2, 1, 3]), N("Transpose", ["k1"], ["k2"], "kt", perm=[0, 2, 3, 1]),
         N("Transpose", ["v1"], ["v2"], "vt", perm=[0, 2, 1, 3]), N("MatMul", ["q2", "k2"], ["s"], "scores"), N("Mul", ["s", "scale"], ["s1"], "scaled"),
         N("Add", ["s1", "mask"], ["s2"], "masked"), N("Softmax", ["s2"], ["p"], "softmax", axis=-1), N("MatMul", ["p", "v2"], ["o"], "mix"),
         N("Transpose", ["o"], ["o1"], "ot", perm=[0, 2, 1, 3]), N("Reshape", ["o1", "flat"], ["o2"], "merge"), N("MatMul", ["o2", "wo"], ["y"], "out")],
        {"x": (T.FLOAT, [2, 5, 12]), "mask": (T.FLOAT, [5, 5])}, {"y": T.FLOAT},
        {"wq": f32(12, 12), "wk": f32(12, 12), "wv": f32(12, 12), "wo": f32(12, 12), "heads": i64(0, 0, 3, 4), "flat": i64(0, 0, 12), "scale": np.float32(0.5)},
    )  # fmt: skip


@model
def batched() -> onnx.ModelProto:
    return net(
        [N("MatMul", ["a", "b"], ["y"], "bmm"), N("MatMul", ["a", "c"], ["z"], "wide"), N("MatMul", ["v", "c"], ["u"], "vec"), N("Einsum", ["a", "b"], ["e"], "ein", equation="bim,bmn->nib")],
        {"a": (T.FLOAT, [5, 7, 3]), "b": (T.FLOAT, [5, 3, 4]), "c": (T.FLOAT, [3, 13]), "v": (T.FLOAT, [3])}, dict.fromkeys("yzue", T.FLOAT),
    )  # fmt: skip


@model
def gathers() -> onnx.ModelProto:
    return net(
        [N("Gather", ["table", "ids"], ["e"], "embed"), N("Gather", ["x", "ids"], ["r"], "rows"), N("Gather", ["x", "cols"], ["c"], "columns", axis=1), N("Add", ["e", "r"], ["y"], "sum")],
        {"ids": (T.INT64, [2, 7]), "x": (T.FLOAT, [13, 5])}, {"y": T.FLOAT, "c": T.FLOAT}, {"table": f32(13, 5), "cols": i64(4, 0, -1)},
    )  # fmt: skip


@model
def views() -> onnx.ModelProto:
    return net(
        [N("Concat", ["x", "z"], ["c"], "cat", axis=1), N("Pad", ["c", "pads", "fill"], ["p"], "pad"), N("Slice", ["p", "starts", "ends", "axes", "steps"], ["s"], "slice"),
         N("Transpose", ["s"], ["t"], "tr", perm=[1, 0]), N("Relu", ["t"], ["y"], "relu"), N("Reshape", ["c", "shape"], ["r"], "reshape"), N("Neg", ["r"], ["v"], "neg"),
         N("Tile", ["x", "reps"], ["tile"], "tile"), N("Exp", ["tile"], ["w"], "exp"), N("Split", ["c"], ["h1", "h2", "h3"], "split", axis=0, num_outputs=3), N("Mul", ["h1", "h2"], ["m"], "mul"),
         N("DepthToSpace", ["d"], ["d1"], "d2s", blocksize=2), N("Tanh", ["d1"], ["d2"], "tanh"), N("Expand", ["h3", "big"], ["ex"], "expand")],
        {"x": (T.FLOAT, [6, 5]), "z": (T.FLOAT, [6, 2]), "d": (T.FLOAT, [1, 8, 3, 2])}, dict.fromkeys(["y", "v", "w", "m", "d2", "ex"], T.FLOAT),
        {"pads": i64(1, 0, 2, 1), "fill": np.float32(0.25), "starts": i64(-1, 0), "ends": i64(-99, 99), "axes": i64(0, 1), "steps": i64(-2, 3), "shape": i64(3, 14),
         "reps": i64(2, 3), "big": i64(3, 2, 7)},
    )  # fmt: skip


@model
def reductions() -> onnx.ModelProto:
    kinds = [
        "ReduceSum",
        "ReduceProd",
        "ReduceMax",
        "ReduceMin",
        "ReduceMean",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSumExp",
        "ReduceSumSquare",
    ]
    axes = {"a0": i64(1), "a1": i64(0, 2), "a2": i64(2), "a3": i64(0, 1, 2)}
    nodes = [N(k, ["x", f"a{n % 4}"], [k], k, keepdims=n % 2) for n, k in enumerate(kinds)]
    return net(nodes, {"x": (T.FLOAT, [5, 7, 4])}, dict.fromkeys(kinds, T.FLOAT), axes)


@model
def selections() -> onnx.ModelProto:
    return net(
        [N("ArgMax", ["x"], ["a"], "amax", axis=1), N("ArgMin", ["x"], ["b"], "amin", axis=0, keepdims=0), N("ArgMax", ["k"], ["c"], "ties", axis=1, select_last_index=1),
         N("ReduceMax", ["k", "one"], ["d"], "kmax"), N("Equal", ["k", "d"], ["e"], "eq"), N("Cast", ["e"], ["f"], "cast", to=T.INT32), N("ReduceSum", ["f", "one"], ["g"], "count")],
        {"x": (T.FLOAT, [7, 5]), "k": (T.INT32, [4, 13])}, {"a": T.INT64, "b": T.INT64, "c": T.INT64, "d": T.INT32, "g": T.INT32}, {"one": i64(1)},
    )  # fmt: skip


@model
def integers() -> onnx.ModelProto:
    return net(
        [N("Mod", ["a", "b"], ["m"], "mod"), N("Div", ["a", "b"], ["d"], "div"), N("Greater", ["a", "b"], ["g"], "gt"), N("And", ["g", "p"], ["h"], "and"), N("Not", ["h"], ["n"], "not"),
         N("Xor", ["n", "p"], ["x"], "xor"), N("Where", ["x", "m", "d"], ["w"], "where"), N("Cast", ["w"], ["y"], "cast", to=T.FLOAT), N("MatMulInteger", ["u", "v"], ["mm"], "mmi"),
         N("ReduceMin", ["w"], ["r"], "rmin", keepdims=0), N("Cast", ["p"], ["p8"], "p8", to=T.INT8), N("Abs", ["p8"], ["q"], "abs"), N("BitwiseAnd", ["a", "b"], ["ba"], "band")],
        {"a": (T.INT32, [7, 5]), "b": (T.INT32, [7, 5]), "p": (T.BOOL, [7, 5]), "u": (T.UINT8, [3, 7]), "v": (T.UINT8, [7, 4])},
        {"y": T.FLOAT, "x": T.BOOL, "mm": T.INT32, "r": T.INT32, "q": T.INT8, "ba": T.INT32},
    )  # fmt: skip


@model
def halves() -> onnx.ModelProto:
    h = np.float16
    return net(
        [N("MatMul", ["x", "w"], ["m"], "mm"), N("Softmax", ["m"], ["s"], "sm", axis=1), N("ReduceSum", ["m", "one"], ["r"], "sum"), N("Mul", ["s", "r"], ["y"], "mul"),
         N("ReduceMax", ["x", "one"], ["q"], "max"), N("LayerNormalization", ["m", "g"], ["l"], "ln")],
        {"x": (T.FLOAT16, [5, 7])}, {"y": T.FLOAT16, "q": T.FLOAT16, "l": T.FLOAT16}, {"w": f32(7, 13).astype(h), "one": i64(1), "g": f32(13).astype(h)},
    )  # fmt: skip


@model
def bfloats() -> onnx.ModelProto:
    return net(
        [N("Cast", ["x"], ["b"], "down", to=T.BFLOAT16), N("Mul", ["b", "b"], ["s"], "square"), N("ReduceSum", ["s", "one"], ["r"], "sum"), N("Cast", ["r"], ["y"], "up", to=T.FLOAT)],
        {"x": (T.FLOAT, [5, 7])}, {"y": T.FLOAT, "s": T.BFLOAT16}, {"one": i64(1)},
    )  # fmt: skip


@model
def doubles() -> onnx.ModelProto:
    return net(
        [N("MatMul", ["x", "w"], ["m"], "mm"), N("ReduceLogSumExp", ["m", "one"], ["r"], "lse"), N("Sub", ["m", "r"], ["y"], "sub")],
        {"x": (T.DOUBLE, [5, 7])}, {"y": T.DOUBLE}, {"w": f32(7, 3).astype(np.float64), "one": i64(1)},
    )  # fmt: skip


@model
def opaques() -> onnx.ModelProto:
    return net(
        [N("Relu", ["x"], ["r"], "relu"), N("CumSum", ["r", "axis"], ["c"], "cumsum"), N("TopK", ["c", "k"], ["t", "i"], "topk", axis=2), N("Neg", ["t"], ["y"], "neg"),
         N("Hardmax", ["c"], ["h"], "hard", axis=0), N("Resize", ["img", "", "scales"], ["z"], "resize", mode="linear"), N("Sigmoid", ["z"], ["s"], "sig")],
        {"x": (T.FLOAT, [4, 3, 7]), "img": (T.FLOAT, [3, 2, 3, 3])}, {"y": T.FLOAT, "i": T.INT64, "h": T.FLOAT, "s": T.FLOAT}, {"axis": i64(1)[0], "k": i64(3), "scales": np.array([1, 1, 2, 2], np.float32)},
    )  # fmt: skip


@model
def recurrent() -> onnx.ModelProto:
    return net(
        [N("LSTM", ["x", "w", "r"], ["y", "h"], "lstm", hidden_size=3), N("Exp", ["y"], ["e"], "exp")],
        {"x": (T.FLOAT, [4, 5, 2])}, {"e": T.FLOAT, "h": T.FLOAT}, {"w": f32(1, 12, 2), "r": f32(1, 12, 3)},
    )  # fmt: skip


@model
def residual() -> onnx.ModelProto:
    return net(
        [N("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1, 1, 1, 1]), N("BatchNormalization", ["c", "g", "t", "m", "v"], ["n"], "bn"), N("Relu", ["n"], ["r"], "relu"), N("Add", ["r", "x"], ["y"], "add")],
        {"x": (T.FLOAT, [2, 4, 7, 5])}, {"y": T.FLOAT},
        {"w": f32(4, 4, 3, 3), "b": f32(4), "g": f32(4), "t": f32(4), "m": f32(4), "v": np.abs(f32(4)) + 0.5},
    )  # fmt: skip


@model
def unary() -> onnx.ModelProto:
    kinds = [
        "Exp",
        "Sqrt",
        "Erf",
        "Tanh",
        "Sin",
        "Cos",
        "Atan",
        "Asinh",
        "Sigmoid",
        "Floor",
        "Ceil",
        "Round",
        "Softplus",
        "Softsign",
        "Elu",
        "Selu",
        "HardSwish",
        "Mish",
        "Gelu",
        "Sign",
        "Reciprocal",
        "Log",
    ]
    nodes = [
        N("Abs", ["x"], ["a"], "abs"),
        N("Add", ["a", "eps"], ["p"], "pos"),
        *[N(k, ["p" if k in ("Sqrt", "Log", "Reciprocal") else "x"], [k], k) for k in kinds],
    ]
    nodes += [
        N("Clip", ["x", "lo", "hi"], ["clip"], "clip"),
        N("Pow", ["p", "x"], ["pow"], "pow"),
        N("PRelu", ["x", "slope"], ["prelu"], "prelu"),
        N("Mod", ["x", "p"], ["fmod"], "fmod", fmod=1),
    ]
    return net(
        nodes,
        {"x": (T.FLOAT, [5, 7])},
        dict.fromkeys([*kinds, "clip", "pow", "prelu", "fmod"], T.FLOAT),
        {"eps": np.float32(0.5), "lo": np.float32(-0.5), "hi": np.float32(0.75), "slope": f32(7)},
        opset=20,
    )


@model
def scalars() -> onnx.ModelProto:
    """Rank 0, sizes 1, an output that is an input, and one tensor read in three ways."""
    return net(
        [N("ReduceSum", ["x"], ["s"], "total", keepdims=0), N("Mul", ["s", "k"], ["y"], "scale"), N("Transpose", ["x"], ["t"], "tr"), N("MatMul", ["x", "t"], ["g"], "gram"),
         N("Sub", ["x", "s"], ["c"], "centre"), N("Identity", ["x"], ["same"], "id")],
        {"x": (T.FLOAT, [3, 1]), "k": (T.FLOAT, [])}, dict.fromkeys(["y", "g", "c", "same"], T.FLOAT),
    )  # fmt: skip


@model
def branches() -> onnx.ModelProto:
    """A value with several readers of different halos, and two results of one operation's inputs."""
    return net(
        [N("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1]), N("MaxPool", ["c"], ["p"], "pool", kernel_shape=[3], pads=[1, 1]), N("AveragePool", ["c"], ["q"], "avg", kernel_shape=[5], pads=[2, 2]),
         N("Add", ["p", "q"], ["s"], "sum"), N("Slice", ["c", "st", "en", "ax"], ["l"], "shift"), N("Concat", ["s", "l"], ["k"], "cat", axis=2), N("Relu", ["k"], ["y"], "relu")],
        {"x": (T.FLOAT, [2, 3, 11])}, {"y": T.FLOAT, "c": T.FLOAT}, {"w": f32(4, 3, 3), "st": i64(2), "en": i64(9), "ax": i64(2)},
    )  # fmt: skip


@model
def noise() -> onnx.ModelProto:
    return net(
        [N("RandomNormal", [], ["n"], "normal", shape=[5, 7], seed=3.0), N("RandomUniform", [], ["u"], "uniform", shape=[13], low=-2.0, high=2.0), N("RandomNormalLike", ["x"], ["nl"], "nlike"),
         N("RandomUniformLike", ["x"], ["ul"], "ulike"), N("Bernoulli", ["ul2"], ["b"], "bern"), N("Abs", ["ul"], ["ul1"], "abs"), N("Clip", ["ul1", "lo", "hi"], ["ul2"], "clip"),
         N("Dropout", ["x", "ratio", "train"], ["d", "dm"], "drop")],
        {"x": (T.FLOAT, [4, 6])}, {"n": T.FLOAT, "u": T.FLOAT, "nl": T.FLOAT, "ul": T.FLOAT, "b": T.FLOAT, "d": T.FLOAT, "dm": T.BOOL},
        {"ratio": np.float32(0.5), "train": np.array(True), "lo": np.float32(0), "hi": np.float32(1)},
    )  # fmt: skip


# the order of nodes above is for reading; ONNX wants them sorted
_sorted_noise = MODELS["noise"]


def _noise() -> onnx.ModelProto:
    m = _sorted_noise()
    nodes = {n.name: n for n in m.graph.node}
    order = ["normal", "uniform", "nlike", "ulike", "abs", "clip", "bern", "drop"]
    del m.graph.node[:]
    m.graph.node.extend(nodes[k] for k in order)
    return m


MODELS["noise"] = _noise


@dataclass(frozen=True)
class Case:
    """A lifted and simplified model with data for its inputs and weights, and what the interpreter makes of it."""

    path: Path
    graph: Graph
    feeds: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]


def save(name: str) -> Path:
    path = FOLDER / f"{name}.onnx"
    if not path.exists():
        path.write_bytes(MODELS[name]().SerializeToString())
    return path


@cache
def case(name: str, simplified: bool = True) -> Case:
    lifted = lift(save(name))
    graph = simplify(lifted.graph) if simplified else lifted.graph
    feeds = random_feeds(graph, 3)
    rng = np.random.default_rng(5)
    for t, a in feeds.items():
        if a.dtype == np.bool_:
            feeds[t] = rng.integers(0, 2, a.shape).astype(bool)
        elif a.dtype.kind in "iu" and name != "gathers":
            feeds[t] = (rng.integers(1, 30, a.shape) * rng.choice([-1, 1] if a.dtype.kind == "i" else [1], a.shape)).astype(
                a.dtype
            )
    weights = {t: read_weight(lifted.model, w, graph.tensors[t], constants=lifted.constants) for t, w in graph.weights.items()}
    return Case(lifted.model, graph, feeds, weights, interp.run(graph, {**feeds, **weights}, wide=True))


def mesh_of(text: str) -> Mesh:
    return parse_mesh(text)


def random_layout(shape: tuple[int, ...], mesh: Mesh, rng: random.Random) -> tuple[int | None, ...]:
    """Any layout that leaves no part empty."""
    while True:
        out = tuple(rng.choice([None, *range(len(shape))]) for _ in mesh)
        if all(_parts(out, i, mesh) <= n for i, n in enumerate(shape)):
            return out


def _parts(layout: tuple[int | None, ...], axis: int, mesh: Mesh) -> int:
    n = 1
    for a, t in zip(mesh, layout, strict=True):
        n *= a.size if t == axis else 1
    return n


def random_plan(graph: Graph, mesh: Mesh, rng: random.Random, *, layouts: float = 0.3) -> Plan:
    """Any strategy for every operation; some inputs, weights and outputs in random fixed layouts."""
    chosen = tuple(rng.choice(strategies(op, mesh)) for op in graph.ops)
    fix = lambda names: {  # noqa: E731
        t: random_layout(graph.tensors[t].shape, mesh, rng) for t in names if rng.random() < layouts
    }
    return Plan(
        graph=graph, mesh=mesh, strategies=chosen, inputs=fix([*graph.inputs, *graph.weights]), outputs=fix(graph.outputs)
    )


def execute(
    graph: Graph, program: Program, c: Case, streamed: frozenset[str] = frozenset()
) -> tuple[dict[str, np.ndarray], Measured]:
    """Run a program on the torch-cpu target."""

    def source(arrays: dict[str, np.ndarray]):
        return lambda t, box: from_numpy(np.array(arrays[t][tuple(slice(lo, hi) for lo, hi in box)]))

    outs, measured = LocalExecutor(graph, program, TorchCpu(), source(c.weights), streamed).run(source(c.feeds))
    return {t: np.array(to_numpy(a)) for t, a in outs.items()}, measured


def planned_transfers(program: Program) -> dict[str, tuple[int, int]]:
    out: dict[str, tuple[int, int]] = {}
    for s in program.steps:
        if isinstance(s, Transfer | Reduce):
            count, total = out.get(s.kind, (0, 0))
            out[s.kind] = (count + 1, total + transfer_bytes(s, program))
    return out


def peak(program: Program) -> list[int]:
    return peak_bytes(program)[0]


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], graph: Graph, note: object = "") -> None:
    """Equal shapes and dtypes; integers and booleans exactly, floats to what their type can hold; a NaN never passes."""
    assert set(found) == set(expected), note
    precision = {"f32": 1e-5, "f64": 1e-11, "f16": 1e-2, "bf16": 4e-2}
    coarse = max((precision.get(t.dtype, 0.0) for t in graph.tensors.values()), default=0.0)
    for t, ref in expected.items():
        a, dtype = found[t], graph.tensors[t].dtype
        assert a.shape == ref.shape == graph.tensors[t].shape, (t, note)
        if dtype in precision:
            a, b = a.astype(np.float64), ref.astype(np.float64)
            assert np.isfinite(b).all(), (t, note)
            worst = np.abs(a - b).max(initial=0.0)
            assert worst <= coarse * max(1.0, np.abs(b).max(initial=0.0)), (t, worst, note)
        else:
            assert np.array_equal(a, ref), (t, note)
