"""Random models of operators that sum long rows, in 16 bits: none may be refused, none may be wrong.

    .venv/bin/python -m bench half_rows [--count 1000] [--seed 0] [--jobs 2]

A case is one operator, or two in a row, on rows of 1,024 to 5,000 numbers in float16 or bfloat16, with random attributes, axes,
scales of the data and meshes of 1 to 4. It is compiled (which verifies it and holds it to the model file), run with
``--check``, and its outputs are held against definitions in float64: they may be off by what rounding to 16 bits at every node
moves, times 4. Exits 1 if a case is refused or wrong, and prints the seed of each. Writes bench/results/half_rows.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from bench.support import record
from bench.support.half_models import BF16_OPSET, KINDS
from bench.support.record import Row

Array = np.ndarray[Any, Any]
NUMPY = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8}
FACTOR = 4.0  # roundings of a node's inside and of its inputs, which another order of sums moves as well
OPSET = 23


class Model:
    """A model under construction: nodes, inputs, and the name of the value that goes on."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.data = rng, np.random.default_rng(rng.getrandbits(32))
        self.dtype = rng.choice(["f16", "bf16"])
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, Array] = {}

    def input(self, *shape: int, scale: float = 1.0, whole: int = 0) -> str:
        """A random input; ``whole``: of int64 below that."""
        name = f"x{len(self.inputs)}"
        a = (
            self.data.integers(0, whole, shape)
            if whole
            else (self.data.standard_normal(shape) * scale).astype(NUMPY[self.dtype])
        )
        self.inputs[name] = a
        return name

    def add(self, kind: str, *ins: str, **attributes: Any) -> str:
        """The first output of a new node."""
        name = f"y{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, ins, [name], **attributes))
        return name


def softmax(m: Model, x: str, rows: int, n: int) -> str:
    """Softmax, or its logarithm, of rows or of columns."""
    return m.add(m.rng.choice(["Softmax", "LogSoftmax"]), x, axis=-1)


def norm(m: Model, x: str, rows: int, n: int) -> str:
    """LayerNormalization or RMSNormalization, with or without a bias, in the type of the data or in float32."""
    scale, stash = m.input(n), m.rng.choice([1, 1, 1])
    if m.rng.random() < 0.4:
        return m.add("RMSNormalization", x, scale, axis=-1, epsilon=1e-5, stash_type=stash)
    more = [m.input(n)] if m.rng.random() < 0.5 else []
    return m.add("LayerNormalization", x, scale, *more, axis=-1, epsilon=1e-5, stash_type=stash)


def reduction(m: Model, x: str, rows: int, n: int) -> str:
    """A reduction of rows, broadcast again."""
    kind = m.rng.choice(["ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare", "ReduceMax"])
    axes = f"axes{len(m.inputs)}"
    m.nodes.append(helper.make_node("Constant", [], [axes], value_ints=[-1]))
    found = m.add(kind, x, axes, keepdims=1)
    return m.add("Sub" if kind in ("ReduceMax", "ReduceMean") else "Mul", x, found) if m.rng.random() < 0.3 else found


def product(m: Model, x: str, rows: int, n: int) -> str:
    """A product over rows, plain or as Gemm with a bias."""
    width = m.rng.randint(1, 9)
    if m.rng.random() < 0.5:
        return m.add("MatMul", x, m.input(n, width, scale=n**-0.5))
    return m.add("Gemm", x, m.input(width, n, scale=n**-0.5), m.input(width), transB=1)


def attention(m: Model, x: str, rows: int, n: int) -> str:
    """Attention over as many keys; the model begins anew."""
    m.nodes.clear()
    m.inputs.clear()
    heads, depth, queries = m.rng.choice([1, 2, 3]), m.rng.choice([4, 8, 16]), m.rng.randint(1, 5)
    ins = [m.input(1, heads, k, depth) for k in (queries, n, n)]
    return m.add("Attention", *ins, is_causal=m.rng.choice([0, 0, 1]))


def losses(m: Model, x: str, rows: int, n: int) -> str:
    """Cross-entropy of rows."""
    return m.add("SoftmaxCrossEntropyLoss", x, m.input(rows, whole=n), reduction=m.rng.choice(["none", "mean", "sum"]))


def groups(m: Model, x: str, rows: int, n: int) -> str:
    """InstanceNormalization or GroupNormalization over as many places."""
    m.nodes.clear()
    m.inputs.clear()
    channels = m.rng.choice([2, 4, 6])
    ins = [m.input(rows, channels, n, scale=m.rng.choice([0.5, 1, 4])), m.input(channels), m.input(channels)]
    if m.rng.random() < 0.5:
        return m.add("InstanceNormalization", *ins, epsilon=1e-5)
    return m.add("GroupNormalization", *ins, epsilon=1e-5, num_groups=m.rng.choice([1, 2]))


KINDS_OF_ROWS: Mapping[str, Callable[[Model, str, int, int], str]] = {
    f.__name__: f for f in (softmax, norm, reduction, product, attention, losses, groups)
}


def drawn(seed: int) -> tuple[Model, onnx.ModelProto, str]:
    """The case of a seed: its data, the model, and what it is called."""
    rng = random.Random(f"rows {seed}")
    m, rows, n = Model(rng), rng.randint(1, 6), rng.randint(1024, 5000)
    x = m.input(rows, n, scale=rng.choice([0.1, 1.0, 1.0, 3.0]))
    kinds = [rng.choice([*KINDS_OF_ROWS])]
    if rng.random() < 0.4:
        kinds.insert(0, rng.choice(["softmax", "norm"]))
    if kinds[0] in ("softmax", "norm") and len(kinds) > 1 and rng.random() < 0.3:
        x = m.add(rng.choice(["Mul", "Add"]), x, m.input(n))
    for k in kinds:
        x = KINDS_OF_ROWS[k](m, x, rows, n)
    return m, written(m, x, m.dtype), f"{m.dtype} {'+'.join(kinds)} {rows}x{n}"


def written(m: Model, out: str, dtype: str) -> onnx.ModelProto:
    """The model with floats of a type."""
    kind = KINDS.get(dtype, TensorProto.DOUBLE)
    infos = [
        helper.make_tensor_value_info(k, TensorProto.INT64 if a.dtype == np.int64 else kind, a.shape)
        for k, a in m.inputs.items()
    ]
    graph = helper.make_graph(m.nodes, "g", infos, [helper.make_tensor_value_info(out, kind, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def one(seed: int) -> Row:
    """A case: compiled, verified, run and compared."""
    import tapestry
    from tapestry.api import run_checked

    m, model, name = drawn(seed)
    mesh = random.Random(seed).choice(["1", "1", "2", "3", "2x2"])
    row: Row = {"seed": seed, "case": name, "mesh": mesh}
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "m.onnx"
            onnx.save(model, path)
            compiled = tapestry.compile(path, mesh=mesh, time_limit=2)
            result, document = run_checked(compiled, m.inputs, check=True)
    except tapestry.TapestryError as e:
        return {**row, "passed": False, "why": f"refused: {e}"}
    (found,) = result.outputs.values()
    why = "" if document["passed"] else f"differs from {document['reference']}: {document['outputs']}"
    wanted, allowed = reference(m)
    most = float(ml_dtypes.finfo(NUMPY[m.dtype]).max)  # what is larger is infinite
    off = np.abs(np.clip(found.astype(np.float64), -most, most) - np.clip(wanted, -most, most))
    if not bool((off <= FACTOR * allowed).all()) or found.shape != wanted.shape:
        at = int(np.argmax(off / allowed))
        why += f"; {off.flat[at]:.3g} from float64, of {allowed.flat[at]:.3g} that rounding moves"
    return {**row, "passed": not why, "why": why, "seconds": time.perf_counter() - start}


def reference(m: Model) -> tuple[Array, Array]:
    """Values in float64, and how far rounding each node's inputs and outputs to the type may move each of them.

    Roundings are drawn: the largest of eight runs whose every value is moved by up to a unit, at least a unit of the value.
    """
    exact, unit = evaluated(m, 0.0, 0), UNIT[m.dtype]
    moved = max_of([np.abs(evaluated(m, unit, k) - exact) for k in range(1, 9)])
    least = float(ml_dtypes.finfo(NUMPY[m.dtype]).smallest_normal)
    return exact, np.maximum(moved, unit * np.abs(exact) + least) + unit * float(np.abs(moved).max())


def max_of(arrays: list[Array]) -> Array:
    """Cell by cell."""
    return np.maximum.reduce(arrays)


def evaluated(m: Model, unit: float, seed: int) -> Array:
    """The model in float64 by definitions in numpy, every value of it moved by up to ``unit`` of itself."""
    rng, values = np.random.default_rng(seed), dict[str, Array]()

    def shaken(a: Array) -> Array:
        return a * (1 + unit * rng.uniform(-1, 1, a.shape)) if a.dtype.kind == "f" else a

    for k, a in m.inputs.items():
        values[k] = a if a.dtype == np.int64 else a.astype(np.float64)
    for node in m.nodes:
        given = {"shaken": shaken} | {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant":
            continue
        ins = [values[i] for i in node.input if i in values]
        values[node.output[0]] = shaken(np.asarray(DEFINITIONS[node.op_type](given, *ins)))
    return values[m.nodes[-1].output[0]]


def _log_softmax(x: Array) -> Array:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _normal(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    centred = x - x.mean(axes, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + epsilon)


def _scaled(a: Row, x: Array, scale: Array, bias: Array | float) -> Array:
    """ONNX rounds what is normalised, and its product with the scale, before it adds the bias."""
    return a["shaken"](a["shaken"](x) * scale) + bias


def _attention(a: Row, q: Array, k: Array, v: Array) -> Array:
    s = a["shaken"](q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))  # ONNX has scores and weights of the inputs' type
    if a.get("is_causal"):
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
    return a["shaken"](np.exp(_log_softmax(s))) @ v


def _loss(a: Row, x: Array, target: Array) -> Array:
    each = -np.take_along_axis(_log_softmax(x), target[:, None], 1)[:, 0]
    return {b"none": each, b"mean": each.mean(), b"sum": each.sum()}[a["reduction"]]


def _group(a: Row, x: Array, scale: Array, bias: Array) -> Array:
    parts = x.reshape(x.shape[0], a["num_groups"], -1)
    return _scaled(a, _normal(parts, (-1,), a["epsilon"]).reshape(x.shape), scale[:, None], bias[:, None])


DEFINITIONS: Mapping[str, Callable[..., Array]] = {
    "Softmax": lambda a, x: np.exp(_log_softmax(x)), "LogSoftmax": lambda a, x: _log_softmax(x),
    "LayerNormalization": lambda a, x, s, b=0.0: _scaled(a, _normal(x, (-1,), a["epsilon"]), s, b),
    "RMSNormalization": lambda a, x, s: _scaled(a, x / np.sqrt((x**2).mean(-1, keepdims=True) + a["epsilon"]), s, 0.0),
    "ReduceSum": lambda a, x: x.sum(-1, keepdims=True), "ReduceMean": lambda a, x: x.mean(-1, keepdims=True),
    "ReduceL1": lambda a, x: np.abs(x).sum(-1, keepdims=True), "ReduceL2": lambda a, x: np.sqrt((x**2).sum(-1, keepdims=True)),
    "ReduceLogSumExp": lambda a, x: np.log(np.exp(x - x.max()).sum(-1, keepdims=True)) + x.max(),
    "ReduceSumSquare": lambda a, x: (x**2).sum(-1, keepdims=True), "ReduceMax": lambda a, x: x.max(-1, keepdims=True),
    "MatMul": lambda a, x, y: x @ y, "Gemm": lambda a, x, y, c: x @ y.T + c, "Attention": _attention,
    "SoftmaxCrossEntropyLoss": _loss, "Add": lambda a, x, y: x + y, "Mul": lambda a, x, y: x * y, "Sub": lambda a, x, y: x - y,
    "InstanceNormalization": lambda a, x, s, b: _scaled(a, _normal(x, (-1,), a["epsilon"]), s[:, None], b[:, None]),
    "GroupNormalization": _group,
}  # fmt: skip


def main() -> int:
    """Draw the cases, print what failed, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    rows: list[Row] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for row in pool.map(one, range(args.seed, args.seed + args.count)):
            rows.append(row)
            if not row["passed"]:
                print(row["seed"], row["case"], row["mesh"], row["why"], flush=True)
    failed = [r for r in rows if not r["passed"]]
    by_kind: dict[str, list[Row]] = {}
    for r in rows:
        by_kind.setdefault(r["case"].rpartition(" ")[0], []).append(r)
    found = [{"kind": k, "cases": len(n), "failed": [r for r in n if not r["passed"]]} for k, n in sorted(by_kind.items())]
    record.write("half_rows", found)
    print(f"{len(rows) - len(failed)} of {len(rows)} cases are right; bench/results/half_rows.json")
    return 1 if failed else 0


if __name__ == "__main__":
    assert OPSET >= BF16_OPSET
    sys.exit(main())
