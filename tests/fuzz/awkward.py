"""Infinities, NaN, zeros of both signs and huge numbers in a case's inputs: a plan against the interpreter of the lifted graph.

What an operator makes of such a value is another question, asked of every operator by ``bench special_values``. Here it is
whether rewriting, splitting, lowering and kernels change it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np

from tapestry.ir.expr import Call
from tapestry.ir.graph import Block, Graph
from tapestry.ir.recognition.running_state import as_scan
from tapestry.verify import interp
from tapestry.verify.model.cell_values import CellValues
from tests.fuzz.generate.evaluate import Array, is_float

VALUES = (float("inf"), float("-inf"), float("nan"), -0.0, 1e30)
TOLERANCE = {"float64": 1e-9, "float32": 2e-3, "float16": 3e-2, "bfloat16": 2e-1}
SHAKES = 8  # evaluations with noise, where a plan differs
Cell = tuple[str, int, float]
"""An input, the number of a cell of it in row-major order, and the value."""


def draw(graph: Graph, rng: random.Random) -> tuple[Cell, ...]:
    """One to three cells of the floating-point inputs of a graph; none of one with running states, which devices merge in
    another order: of infinities that may make a NaN where steps one after another make none. For the same reason no infinity
    goes into a graph with means and variances (docs/decisions.md, NaN policy)."""
    if any(isinstance(op, Block) and as_scan(op) for op in graph.ops):
        return ()
    moments = any(isinstance(op, Block) and op.monoid == "moments" for op in graph.ops)
    values = [v for v in VALUES if not (moments and math.isinf(v))]
    floats = [t for t in graph.inputs if graph.tensors[t].dtype in ("f16", "bf16", "f32", "f64") and graph.tensors[t].size]
    count = rng.choice([1, 1, 2, 3]) if floats else 0
    names = [rng.choice(floats) for _ in range(count)]
    return tuple((t, rng.randrange(graph.tensors[t].size), rng.choice(values)) for t in names)


def put(inputs: Mapping[str, Array], cells: tuple[Cell, ...]) -> dict[str, Array]:
    """The inputs with the values in them."""
    out = dict(inputs)
    for name, place, value in cells:
        if name in out and place < out[name].size:
            with np.errstate(over="ignore"):
                out[name] = out[name].copy()
                out[name].reshape(-1)[place] = out[name].dtype.type(value)
    return out


def wanted(graph: Graph, given: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Every output of the lifted graph in the interpreter, and where it is the same in f64, so that no rounding decides it.

    Opaque operations are by the library that a plan asks: of such values, libraries make different things.
    """
    with np.errstate(all="ignore"):
        narrow, wide = (interp.run(graph, given, wide=w, independent=False) for w in (False, True))
    out: dict[str, tuple[Array, Array]] = {}
    for name, a in narrow.items():
        if not graph.tensors[name].on_host:
            out[name] = a, alike(a, np.asarray(wide[name]), a.dtype.name)
    return out


class _NegativeZeros(CellValues):
    """Values in which a maximum or minimum of zeros is -0."""

    def call(self, e: Call, args: list[Array]) -> Array:
        out = super().call(e, args)
        return np.where(out == 0, -out * out, out) if e.fn in ("max", "min") and out.dtype.kind == "f" else out


def steadier(
    graph: Graph, given: Mapping[str, Array], expected: Mapping[str, tuple[Array, Array]]
) -> dict[str, tuple[Array, Array]]:
    """What is expected, where noise in the last places of every intermediate result does not move it either, nor the sign of
    zeros: a maximum of 0 and -0 is any of them (docs/decisions.md, NaN policy)."""
    out = dict(expected)
    for k in range(SHAKES):
        noisy = CellValues(graph, given.get, noise=np.random.default_rng(k)) if k else _NegativeZeros(graph, given.get)
        for name, (want, steady) in out.items():
            with np.errstate(all="ignore"):
                moved = np.asarray(noisy.whole(name)).astype(want.dtype)
            out[name] = want, steady & alike(want, moved, want.dtype.name)
    return out


def alike(a: Array, b: Array, dtype: str) -> Array:
    """In which cells two arrays agree: infinities and NaNs exactly, others to a tolerance of their type."""
    if not is_float(a):
        return np.asarray(a == b)
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    scale = float(np.abs(np.where(finite, y, 1.0)).max(initial=1.0))
    with np.errstate(invalid="ignore"):
        near = np.abs(x - y) <= TOLERANCE[dtype] * scale
    return np.asarray(np.where(finite, near, (x == y) | (np.isnan(x) & np.isnan(y))))


def masks(graph: Graph) -> bool:
    """Whether a softmax leaves keys out by their place: what is in those is not seen (docs/decisions.md, NaN policy)."""
    return any(isinstance(op, Block) and op.monoid in ("softsum", "logsumexp") for op in graph.ops)


def differs(
    outs: Mapping[str, Array], expected: Mapping[str, tuple[Array, Array]], *, unseen: bool, reordered: bool = False
) -> str:
    """The first cell that is wrong; "" where all are right. With ``unseen``, a NaN of the reference may be a number. Where a
    rewrite ``reordered`` sums and products, infinities that make a NaN in one order may be infinite in another."""
    for name, (want, steady) in expected.items():
        got = np.asarray(outs[name])
        wrong = steady & ~alike(got, want, want.dtype.name)
        if unseen and is_float(want):
            wrong &= ~np.isnan(want.astype(np.float64))
        if reordered and is_float(want):
            x, y = got.astype(np.float64), want.astype(np.float64)
            wrong &= np.isfinite(x) | np.isfinite(y) | ~(np.isnan(x) | np.isnan(y))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            return f"'{name}'{list(at)} is {got[at]}, not {want[at]} ({int(wrong.sum())} of {wrong.size} differ)"
    return ""
