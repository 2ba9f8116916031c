"""Reductions by every monoid, and an opaque operation, for rules to be applied to."""

from __future__ import annotations

from dataclasses import replace

from onnx import helper

import tapestry.rewrites  # noqa: F401  (fills the table of rules)
from tapestry.ir.graph import Dim, Graph, Opaque
from tapestry.ir.types import Tensor

REDUCTIONS = {
    "sum": ("f32", ["x"], ["acc0"]),
    "sums2": ("f32", ["x", "tanh(x)"], ["acc0 * acc1"]),
    "sums3": ("f32", ["x", "tanh(x)", "2.0 * x"], ["(acc0 * acc1) + acc2"]),
    "sums4": ("f32", ["x", "tanh(x)", "2.0 * x", "neg(x)"], ["(acc0 * acc1) + (acc2 * acc3)"]),
    "prod": ("f32", ["x"], ["acc0"]),
    "max": ("f32", ["x"], ["acc0"]),
    "min": ("i32", ["x"], ["acc0"]),
    "any": ("bool", ["x"], ["acc0"]),
    "all": ("bool", ["x"], ["acc0"]),
    "moments": ("f32", ["1.0", "x", "0.0"], ["acc1", "sqrt((acc2 / acc0))"]),
    "logsumexp": ("f32", ["x", "1.0"], ["acc0 + log(acc1)"]),
    "softsum": ("f32", ["x", "1.0", "tanh(x)"], ["acc2 / acc1"]),
    "affine": ("f32", ["x", "tanh(x)"], ["acc0", "acc1"]),
    "argmax": ("f32", ["x", "index(m)"], ["acc0", "acc1"]),
    "argmin": ("i32", ["x", "index(m)"], ["acc1"]),
}
OUT_TYPES = {"affine": ["f32", "f32"], "argmax": ["f32", "i64"], "argmin": ["i64"]}


def reduction(monoid: str, size: int, body: list[str] | None = None, then: list[str] | None = None) -> str:
    dtype, plain, lowered = REDUCTIONS[monoid]
    body, then = body or plain, then or lowered
    outs = [f"y{i}: {d}[3]" for i, d in enumerate(OUT_TYPES.get(monoid, [dtype] * len(then)))]
    return f"""graph reduction
input x: {dtype}[3, {size + 2}]
{", ".join(outs)} = op [n: 3 | m: {size} {monoid}]
  reads x[n, m + 1]
  body {", ".join(body)}
  then {", ".join(then)}
output {", ".join(o.partition(":")[0] for o in outs)}
"""


def opaque_graph() -> Graph:
    node = helper.make_node("Hardmax", ["x"], ["y"], axis=1).SerializeToString()
    op = Opaque(
        outs=("y",), ins=("x",), kind="Hardmax", node=node, opsets=(("", 17),), dims=(Dim("b", 7),), in_axes=((0,),),
        out_axes=((0,),), why="its output is ranked along axis 1",
    )  # fmt: skip
    x = Tensor(name="x", dtype="f32", shape=(7, 5), kind="input")
    tensors = {"x": x, "y": replace(x, name="y", kind="value")}
    return Graph(name="opaque", tensors=tensors, ops=(op,), inputs=("x",), outputs=("y",))
