"""The dtype in which products of f16 are summed (PopRT's ``partials_type``).

By default sums over f16 are held in f32 and rounded once. In f16 they take half the bytes between devices, and half the
registers, and every addition rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tapestry.errors import PlanError
from tapestry.ir.expr import Acc, Expr, call, cast, rewrite, uncast
from tapestry.ir.graph import Block, Graph, Op, map_exprs, points
from tapestry.ir.recognition.contraction import factors

DTYPES = ("f32", "f16")
ROWS = 256  # sums of each length whose error is measured
LONGEST = 1 << 14  # products of a sum that is measured; of longer ones so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """What was asked for, how many products it concerns, and how far their sums are off: for each number of products that are
    summed ``{"products", "f16", "f32"}``, the relative errors ``‖sum - exact‖ / ‖exact‖``."""

    dtype: str
    products: int
    errors: tuple[dict[str, Any], ...]

    def data(self) -> dict[str, Any]:
        """For the report."""
        return {"dtype": self.dtype, "products": self.products, "rel_err": list(self.errors)}


def accumulated(graph: Graph, dtype: str) -> tuple[Graph, Accumulated]:
    """The graph with products of f16 summed in a dtype.

    Raises:
        PlanError: the dtype is none of `DTYPES`, or there is no such product.
    """
    if dtype not in DTYPES:
        raise PlanError(f"sums in '{dtype}'", where="--accumulate", hint=f"one of {', '.join(DTYPES)}")
    found = [op for op in graph.ops if _halves(op) is not None]
    if not found:
        raise PlanError("no product of f16 is summed", where="--accumulate", hint="leave it out, or convert the model to f16")
    lengths = sorted({points(op.reduce) for op in found if isinstance(op, Block)})
    report = Accumulated(dtype=dtype, products=len(found), errors=tuple(map(measured, lengths)))
    return (replace(graph, ops=tuple(map(_in_f16, graph.ops))) if dtype == "f16" else graph), report


def measured(length: int) -> dict[str, Any]:
    """Relative errors of sums of products of normal random numbers in f16, one after another, in f16 and in f32."""
    rng = np.random.default_rng(length)
    n = min(length, LONGEST)
    a, b = (rng.standard_normal((n, ROWS)).astype(np.float16) for _ in range(2))
    exact = np.sum(a.astype(np.float64) * b.astype(np.float64), axis=0)
    out: dict[str, Any] = {"products": length}
    for name, kind in (("f16", np.float16), ("f32", np.float32)):
        total = np.zeros(ROWS, kind)
        for x, y in zip(a.astype(kind), b.astype(kind), strict=True):
            total += x * y
        off = np.linalg.norm(total.astype(np.float16).astype(np.float64) - exact)
        out[name] = float(off / np.linalg.norm(exact)) if n else 0.0
    return out


def _halves(op: Op) -> tuple[Expr, Expr] | None:
    """The factors of a sum of products of f16 that is held in f32."""
    if not isinstance(op, Block) or op.inner or op.monoid != "sum" or len(op.body) != 1 or op.body[0].dtype != "f32":
        return None
    pair = factors(op)
    found = None if pair is None else (uncast(pair[0]), uncast(pair[1]))
    return found if found and all(e.dtype == "f16" for e in found) else None


def _in_f16(op: Op) -> Op:
    pair = _halves(op)
    if pair is None or not isinstance(op, Block):
        return op
    body = call("mul", *pair)

    def held(e: Expr) -> Expr:
        return cast(Acc(0, "f16"), "f32") if isinstance(e, Acc) else e

    rounded = op.then == (cast(Acc(0, "f32"), "f16"),)
    return replace(op, body=(body,), then=(Acc(0, "f16"),) if rounded else map_exprs(op, lambda e: rewrite(e, held)).then)
