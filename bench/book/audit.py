"""Default rewrite rules of onnxscript, onnxruntime and onnxoptimizer: proved, refuted by a model, or not applied to ours.

    .venv/bin/python -m bench audit [--only OPTIMIZER …] [--python PATH]

A row is one small model that a rule is written for, and one optimizer: onnxscript's default rewrite rules, onnxruntime's basic
graph optimizations, its extended ones, or onnxoptimizer's default passes (where it is installed; ``--python`` names a Python
that has it). Where the optimizer changed the graph, the model runs before and after it on onnxruntime with all optimizations
off: on finite values of which exponentials overflow and vanish, then on awkward ones (NaN, infinities, both zeros, subnormal
and great numbers). Where both lift, the two graphs are compared by the compiler's proofs of rewrites. ``refuted`` are rows with
values that differ by more than rounding, or of which the result does not run. Writes bench/results/audit.json, where rows of
optimizers that are left out stay.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph, RuntimeException
from onnxscript import rewriter
from rich.console import Console
from rich.table import Table

from bench.support import other_python, record
from bench.support.record import Row
from tapestry.errors import TapestryError
from tapestry.lift import lift
from tapestry.verify.rewriting.proofs import whole

FOLDER = record.WORK / "audit"
MORE = ("onnxoptimizer",) if find_spec("onnxoptimizer") else ()
AWKWARD = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 1.5, -2.0, 0.25, 7.0, -6.5, 1e20, -0.5]
FINITE = [-200.0, -150.0, -120.5, 0.0, 3.0, 95.0, -104.0, -0.5, 120.0, 1.5, -2.0, 0.25, 7.0, -6.5, 99.0, 110.0]
ROUNDING = 1e-5
OPTIMIZERS = ("onnxscript", "onnxruntime basic", "onnxruntime extended", *MORE)
PACKAGES = ("onnxruntime", "onnxscript", *MORE)
X = "float[4,16] x"


def _numbers(**values: float) -> str:
    """Scalar constants as ONNX text."""
    return "".join(f"{n} = Constant<value = float {{{v}}}>() " for n, v in values.items())


def _ints(**values: list[int]) -> str:
    """Constant vectors of integers as ONNX text."""
    texts = {n: ",".join(map(str, v)) for n, v in values.items()}
    return "".join(f"{n} = Constant<value = int64[{len(values[n])}] {{{t}}}>() " for n, t in texts.items())


LOW, ALL = _numbers(a=-2.0, b=6.0), 9223372036854775807
GAIN = "g = Constant<value = float[16] {" + ",".join(f"{k % 4 + 1}" for k in range(16)) + "}>() "
MODELS: Mapping[str, tuple[str, str]] = {  # name: inputs, and the nodes as ONNX text
    "add zero": (X, _numbers(z=0.0) + "y = Add(x, z)"),
    "subtract zero": (X, _numbers(z=0.0) + "y = Sub(x, z)"),
    "multiply by one": (X, _numbers(o=1.0) + "y = Mul(x, o)"),
    "divide by one": (X, _numbers(o=1.0) + "y = Div(x, o)"),
    "reciprocal times": (f"{X}, float[4,16] z", _numbers(o=1.0) + "r = Div(o, z) y = Mul(r, x)"),
    "relu of clip": (X, LOW + "c = Clip(x, a, b) y = Relu(c)"),
    "clip of relu": (X, LOW + "c = Relu(x) y = Clip(c, a, b)"),
    "clip of relu, below zero": (X, _numbers(a=-2.0, b=-1.0) + "c = Relu(x) y = Clip(c, a, b)"),
    "relu of clip, below zero": (X, _numbers(a=-2.0, b=-1.0) + "c = Clip(x, a, b) y = Relu(c)"),
    "clip of clip": (X, LOW + _numbers(d=-1.0, e=3.0) + "c = Clip(x, a, b) y = Clip(c, d, e)"),
    "clip of clip, apart": (X, _numbers(a=-2.0, b=-1.0, d=1.0, e=3.0) + "c = Clip(x, a, b) y = Clip(c, d, e)"),
    "min of max": (X, LOW + "c = Max(x, a) y = Min(c, b)"),
    "min of max, crossed": (X, _numbers(a=6.0, b=-2.0) + "c = Max(x, a) y = Min(c, b)"),
    "max of min": (X, LOW + "c = Min(x, b) y = Max(c, a)"),
    "max of min, crossed": (X, _numbers(a=6.0, b=-2.0) + "c = Min(x, b) y = Max(c, a)"),
    "relu twice": (X, "c = Relu(x) y = Relu(c)"),
    "transpose twice": (X, "c = Transpose<perm=[1,0]>(x) y = Transpose<perm=[1,0]>(c)"),
    "casts to integers and back": (X, "c = Cast<to=6>(x) y = Cast<to=1>(c)"),
    "casts to half and back": (X, "c = Cast<to=10>(x) y = Cast<to=1>(c)"),
    "cast of a cast": (X, "c = Cast<to=11>(x) d = Cast<to=10>(c) y = Cast<to=1>(d)"),
    "hard swish": (X, _numbers(a=3.0, b=0.0, e=6.0) + "s = Add(x, a) c = Clip(s, b, e) d = Mul(x, c) y = Div(d, e)"),
    "where not": (f"{X}, bool[4,16] p", "q = Not(p) n = Neg(x) y = Where(q, x, n)"),
    "slice of a slice": (X, _ints(s=[2], e=[14], a=[1]) + "c = Slice(x, s, e, a) y = Slice(c, s, e, a)"),
    "slice of all": (X, _ints(s=[0], e=[ALL], a=[1]) + "y = Slice(x, s, e, a)"),
    "expand before add": (f"{X}, float[1,16] z", _ints(t=[4, 16]) + "c = Expand(z, t) y = Add(x, c)"),
    "product and a bias": (f"{X}, float[16,5] w, float[5] b", "c = MatMul(x, w) y = Add(c, b)"),
    "reshape twice": (X, _ints(s=[8, 8], t=[-1, 4]) + "c = Reshape(x, s) y = Reshape(c, t)"),
    "unsqueeze twice": (X, _ints(s=[0], t=[1]) + "c = Unsqueeze(x, s) y = Unsqueeze(c, t)"),
    "gelu": (X, _numbers(r=1.4142135, o=1.0, h=0.5) + "d = Div(x, r) f = Erf(d) a = Add(f, o) m = Mul(x, a) y = Mul(m, h)"),
    "layer norm": (
        X,
        GAIN + _numbers(t=2.0, e=1e-5) + "m = ReduceMean<axes=[-1]>(x) d = Sub(x, m) q = Pow(d, t) "
        "v = ReduceMean<axes=[-1]>(q) a = Add(v, e) s = Sqrt(a) n = Div(d, s) w = Mul(n, g) y = Add(w, g)",
    ),
    "add zeros of a greater shape": ("float[1,16] x", "z = Constant<value = float[4,1] {0,0,0,0}>() y = Add(x, z)"),
    "power of one": (X, _numbers(o=1.0) + "y = Pow(x, o)"),
    "floor twice": (X, "c = Floor(x) y = Floor(c)"),
    "reshape, and a size kept": (X, _ints(s=[8, 8], t=[0, -1]) + "c = Reshape(x, s) y = Reshape(c, t)"),
    "logarithm of a softmax": (X, "c = Softmax<axis=1>(x) y = Log(c)"),
    "position of the greatest exponential": (X, "c = Exp(x) k = ArgMax<axis=1>(c) y = Cast<to=1>(k)"),
    "position of the greatest root": (X, "c = Sqrt(x) k = ArgMax<axis=1>(c) y = Cast<to=1>(k)"),
    "position of the greatest probability": (X, "c = Softmax<axis=1>(x) k = ArgMax<axis=1>(c) y = Cast<to=1>(k)"),
    "sum, and its dimension again": (X, _ints(a=[1]) + "c = ReduceSum<keepdims=0>(x, a) y = Unsqueeze(c, a)"),
    "sum, and a dimension before": (X, _ints(a=[1], b=[0]) + "c = ReduceSum<keepdims=0>(x, a) y = Unsqueeze(c, b)"),
    "slice of another dimension's slice": (
        X,
        _ints(s=[1], e=[3], a=[0], t=[2], f=[9], b=[1]) + "c = Slice(x, s, e, a) y = Slice(c, t, f, b)",
    ),
    "steps of a reversed slice": (
        X,
        _ints(s=[-1], e=[-17], a=[1], n=[-1], t=[3], f=[12], m=[2]) + "c = Slice(x, s, e, a, n) y = Slice(c, t, f, a, m)",
    ),
    "unsqueeze before another": (X, _ints(s=[1], t=[0]) + "c = Unsqueeze(x, s) y = Unsqueeze(c, t)"),
    "unsqueeze from the end": (X, _ints(s=[-1], t=[0]) + "c = Unsqueeze(x, s) y = Unsqueeze(c, t)"),
    "squeeze twice": ("float[1,4,1,16] x", _ints(s=[0], t=[1]) + "c = Squeeze(x, s) y = Squeeze(c, t)"),
    "squeeze from the end": ("float[1,4,16,1] x", _ints(s=[0], t=[-1]) + "c = Squeeze(x, s) y = Squeeze(c, t)"),
    "concat of a concat": (f"{X}, float[4,16] z", "c = Concat<axis=1>(x, z) y = Concat<axis=1>(c, x)"),
    "product of a transpose": ("float[16,4] x, float[16,5] w, float[5] b", "c = Transpose<perm=[1,0]>(x) y = Gemm(c, w, b)"),
    "pad before a convolution": (
        "float[1,4,6,6] x, float[4,4,3,3] w",
        _ints(p=[0, 0, 1, 1, 0, 0, 1, 1]) + "c = Pad(x, p) y = Conv(c, w)",
    ),
    "pad with ones before a convolution": (
        "float[1,4,6,6] x, float[4,4,3,3] w",
        _ints(p=[0, 0, 1, 1, 0, 0, 1, 1]) + _numbers(o=1.0) + "c = Pad(x, p, o) y = Conv(c, w)",
    ),
    "zeros around a maximum pool": (
        "float[1,2,6,6] x",
        _ints(p=[0, 0, 1, 1, 0, 0, 1, 1]) + "c = Pad(x, p) y = MaxPool<kernel_shape=[3,3]>(c)",
    ),
    "zeros around an average pool": (
        "float[1,2,6,6] x",
        _ints(p=[0, 0, 1, 1, 0, 0, 1, 1]) + "c = Pad(x, p) y = AveragePool<kernel_shape=[3,3]>(c)",
    ),
    "convolution and a bias": (
        "float[1,4,6,6] x, float[4,4,3,3] w",
        "b = Constant<value = float[4,1,1] {1,2,3,4}>() c = Conv(x, w) y = Add(c, b)",
    ),
    "convolution and a row": (
        "float[1,4,6,6] x, float[4,4,3,3] w",
        "b = Constant<value = float[4] {1,2,3,4}>() c = Conv(x, w) y = Add(c, b)",
    ),
    "convolution and a normalization": (
        "float[1,2,6,6] x",
        "w = Constant<value = float[2,2,1,1] {1,2,3,4}>() s = Constant<value = float[2] {1,2}>() b = Constant<value = float[2] "
        "{3,4}>() m = Constant<value = float[2] {1,5}>() v = Constant<value = float[2] {4,9}>() "
        "c = Conv(x, w) y = BatchNormalization(c, s, b, m, v)",
    ),
    "equal operations": (X, "c = Exp(x) d = Exp(x) y = Add(c, d)"),
    "expand to its own shape": (X, _ints(t=[4, 16]) + "y = Expand(x, t)"),
    "multiples by division": ("int64[4,16] x", "o = Constant<value_int=3>() d = Div(x, o) y = Mul(d, o)"),
}


def model(name: str) -> onnx.ModelProto:
    """A model of `MODELS`."""
    inputs, nodes = MODELS[name]
    kind = "int64" if inputs.startswith("int64") else "float"
    lines = "\n".join(nodes.replace(") ", ")\n").splitlines())
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({kind} y) {{ {lines} }}'
    made = onnx.parser.parse_model(text)
    made.graph.output[0].type.tensor_type.ClearField("shape")  # as it is inferred
    return onnx.shape_inference.infer_shapes(made)


def optimized(before: Path, optimizer: str) -> onnx.ModelProto:
    """What an optimizer makes of a model."""
    if optimizer == "onnxscript":
        return rewriter.rewrite(onnx.load(before))
    if optimizer == "onnxoptimizer":
        return import_module(optimizer).optimize(onnx.load(before))
    options = ort.SessionOptions()
    basic = optimizer.endswith("basic")
    options.graph_optimization_level = (
        ort.GraphOptimizationLevel.ORT_ENABLE_BASIC if basic else ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    )
    options.optimized_model_filepath = str(before.with_suffix(".ort.onnx"))
    options.log_severity_level = 3
    ort.InferenceSession(str(before), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


def run(path: Path, feeds: Mapping[str, Any]) -> Any:
    """The result without any optimization."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    (out,) = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, dict(feeds))
    return out


def feeds_of(m: onnx.ModelProto, values: list[float]) -> dict[str, Any]:
    """Some values, as often as needed; of several inputs in every row in another order, in the first in the same one."""
    out: dict[str, Any] = {}
    for k, i in enumerate(m.graph.input):
        shape = [d.dim_value for d in i.type.tensor_type.shape.dim]
        kind = i.type.tensor_type.elem_type
        flat = np.resize(values, int(np.prod(shape))).reshape(shape)
        flat = np.stack([np.roll(row, 5 * k * at) for at, row in enumerate(flat)]) if flat.ndim > 1 else flat
        if kind == onnx.TensorProto.BOOL:
            out[i.name] = np.arange(flat.size).reshape(shape) % 3 == 0
        elif kind == onnx.TensorProto.INT64:
            out[i.name] = (np.arange(flat.size, dtype=np.int64).reshape(shape) - flat.size // 2) * 5
        else:
            out[i.name] = flat.astype(np.float32)
    return out


def difference(a: Any, b: Any) -> str:
    """The first cell that differs by more than rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}"
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= ROUNDING * np.maximum(np.abs(a), 1e-30)
    bad = ~(near | (a == b) | (np.isnan(a) & np.isnan(b)))
    at = tuple(int(k) for k in np.argwhere(bad)[0]) if bad.any() else ()
    return f"at {at}: {a[at]} became {b[at]}" if bad.any() else ""


def proof(before: Path, after: Path) -> str:
    """What the compiler's proofs of rewrites say of two models."""
    try:
        old, new = (lift(p, {}).graph for p in (before, after))
        return "; ".join(sorted({k for e in whole(old, new, "audit").values() for k in e.kinds}))
    except TapestryError as e:
        return f"no: {str(e).splitlines()[0][:160]}"


def measure(name: str, optimizer: str) -> Row:
    """One model under one optimizer."""
    before, after = (FOLDER / f"{side}.onnx" for side in ("before", "after"))
    m = model(name)
    onnx.save(m, before)
    new = optimized(before, optimizer)
    counts = [Counter(n.op_type for n in g.graph.node if n.op_type != "Constant") for g in (m, new)]
    row: Row = {"model": name, "optimizer": optimizer, "before": dict(counts[0]), "after": dict(counts[1])}
    if counts[0] == counts[1]:
        return {**row, "verdict": "not applied", "witness": "", "proof": ""}
    onnx.save(new, after)
    try:
        every = (feeds_of(m, values) for values in (FINITE, AWKWARD))
        witness = next(filter(None, (difference(run(before, f), run(after, f)) for f in every)), "")
    except (RuntimeException, InvalidGraph, Fail) as e:
        witness = f"onnxruntime does not run what came out: {str(e).splitlines()[0][:160]}"
    shown = proof(before, after)
    verdict = "refuted" if witness else "same values" if shown.startswith("no:") else "proved"
    return {**row, "verdict": verdict, "witness": witness, "proof": shown}


def main() -> int:
    """Audit, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="OPTIMIZER", help="only these")
    other_python.add_python(parser)
    args = parser.parse_args()
    other_python.moved(args, "audit")
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [measure(name, optimizer) for name in MODELS for optimizer in args.only or OPTIMIZERS]
    table = Table(title="Rewrites of public optimizers", title_justify="left")
    for c in ("model", "optimizer", "after", "verdict", "witness, or proof"):
        table.add_column(c)
    for r in rows:
        if r["verdict"] != "not applied":
            after = " ".join(r["after"])
            table.add_row(r["model"], r["optimizer"], after, r["verdict"], r["witness"] or r["proof"])
    Console(width=None if sys.stdout.isatty() else 170, highlight=False).print(table)
    every = record.merged("audit", rows, ("model", "optimizer"))
    counts = Counter(r["verdict"] for r in every)
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    versions = record.read_more("audit", "versions", {}) | {p: version(p) for p in PACKAGES}
    record.write("audit", every, counts=dict(counts), versions=versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
