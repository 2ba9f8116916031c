"""Attention as ONNX models, written in many ways: where the scale is, how scores are masked, how the softmax is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T

from tests.support.small_models import N, net

B, H, S, K, D, E = 2, 4, 9, 11, 6, 5
Array = np.ndarray[Any, Any]


@dataclass
class Variant:
    """Nodes so far, and the constants that they read."""

    nodes: list[onnx.NodeProto] = field(default_factory=list[onnx.NodeProto])
    consts: dict[str, Array] = field(default_factory=dict[str, Array])
    inputs: dict[str, tuple[int, list[int]]] = field(default_factory=dict[str, tuple[int, list[int]]])

    def add(self, kind: str, *ins: Any, **attributes: Any) -> str:
        """A node of one output; arrays become constants. Returns the output's name."""
        names: list[str] = []
        for x in ins:
            if isinstance(x, str):
                names.append(x)
            else:
                names.append(f"c{len(self.consts)}")
                self.consts[names[-1]] = np.asarray(x)
        out = f"t{len(self.nodes)}"
        self.nodes.append(N(kind, names, [out], **attributes))
        return out


f32 = np.float32


def i64(value: int | list[int]) -> Array:
    return np.array(value, np.int64)


Step = Callable[[Variant, str], str]


def scores(v: Variant, *, q: str = "q", k: str = "k", before: Step | None = None, transposed: str = "Transpose") -> str:
    """q · k, with something done to q before it."""
    q = before(v, q) if before else q
    if transposed == "Einsum":
        return v.add("Einsum", q, k, equation="bhid,bhjd->bhij")
    return v.add("MatMul", q, v.add("Transpose", k, perm=[0, 1, 3, 2]))


def plain(v: Variant, s: str) -> str:
    """The operator."""
    return v.add("Softmax", s, axis=-1)


def by_hand(v: Variant, s: str) -> str:
    """Maximum, difference, exponential, sum, quotient."""
    e = v.add("Exp", v.add("Sub", s, v.add("ReduceMax", s, i64([-1]))))
    return v.add("Div", e, v.add("ReduceSum", e, i64([-1])))


def reciprocal(v: Variant, s: str) -> str:
    """The same with a reciprocal."""
    e = v.add("Exp", v.add("Sub", s, v.add("ReduceMax", s, i64([-1]))))
    return v.add("Mul", e, v.add("Reciprocal", v.add("ReduceSum", e, i64([-1]))))


def through_logs(v: Variant, s: str) -> str:
    """The exponential of a log-softmax."""
    return v.add("Exp", v.add("LogSoftmax", s, axis=-1))


def mix(v: Variant, p: str, value: str = "v") -> str:
    """p · v."""
    return v.add("MatMul", p, value)


def scaled(kind: str, by: float) -> Step:
    return lambda v, x: v.add(kind, x, f32(by))


def causal(v: Variant, s: str) -> str:
    """Minus infinity above the diagonal, by a triangle of booleans."""
    keep = np.tril(np.ones((S, K), bool), K - S)
    return v.add("Where", keep, s, f32(-np.inf))


def triangle(v: Variant, s: str) -> str:
    """The same by an additive triangle from Trilu."""
    return v.add("Add", s, v.add("Trilu", np.full((S, K), -np.inf, f32), i64(K - S + 1), upper=1))


def positions(test: Callable[[Variant, str, str], str]) -> Step:
    """A mask computed from the positions of query and key."""

    def step(v: Variant, s: str) -> str:
        i = v.add("Unsqueeze", v.add("Range", i64(0), i64(S), i64(1)), i64([1]))
        j = v.add("Unsqueeze", v.add("Range", i64(0), i64(K), i64(1)), i64([0]))
        return v.add("Where", test(v, i, j), s, f32(-np.inf))

    return step


def window(v: Variant, i: str, j: str) -> str:
    d = v.add("Sub", i, j)
    return v.add("And", v.add("LessOrEqual", d, i64(2)), v.add("GreaterOrEqual", d, i64(-3)))


def blocks(v: Variant, i: str, j: str) -> str:
    return v.add("Equal", v.add("Div", i, i64(4)), v.add("Div", j, i64(4)))


def bias(v: Variant, s: str) -> str:
    v.inputs["m"] = (T.FLOAT, [1, H, S, K])
    return v.add("Add", s, "m")


def padding(v: Variant, s: str) -> str:
    """A mask of keys as people write it: (1 - keep) * -1e9."""
    v.inputs["keep"] = (T.FLOAT, [B, 1, 1, K])
    return v.add("Add", s, v.add("Mul", v.add("Sub", f32(1), "keep"), f32(-1e9)))


def boolean(v: Variant, s: str) -> str:
    v.inputs["see"] = (T.BOOL, [B, 1, S, K])
    return v.add("Where", "see", s, f32(-1e30))


def capped(v: Variant, s: str) -> str:
    return v.add("Mul", v.add("Tanh", v.add("Div", s, f32(5))), f32(5))


def chain(*steps: Step) -> Step:
    def run(v: Variant, s: str) -> str:
        for step in steps:
            s = step(v, s)
        return s

    return run


def same(v: Variant, x: str) -> str:
    return x


def ordinary(after: Step = same, softmax: Step = plain, **more) -> Callable[[Variant], str]:
    return lambda v: mix(v, softmax(v, after(v, scores(v, **more))))


def normalised_after(v: Variant) -> str:
    s = scaled("Mul", 0.4)(v, scores(v))
    e = v.add("Exp", v.add("Sub", s, v.add("ReduceMax", s, i64([-1]))))
    return v.add("Div", mix(v, e), v.add("ReduceSum", e, i64([-1])))


def grouped(v: Variant) -> str:
    """Two heads of keys for four of queries, repeated by Expand."""

    def repeat(x: str, width: int) -> str:
        x = v.add("Expand", v.add("Unsqueeze", x, i64([2])), i64([B, 2, 2, K, width]))
        return v.add("Reshape", x, i64([B, 4, K, width]))

    return mix(v, plain(v, scaled("Mul", 0.4)(v, scores(v, k=repeat("k", D)))), repeat("v", E))


def multi_query(v: Variant) -> str:
    """One head of keys for all, by broadcasting."""
    return mix(v, plain(v, scaled("Div", 2.5)(v, scores(v))))


def attention(**attributes) -> Callable[[Variant], str]:
    return lambda v: v.add("Attention", "q", "k", "v", **attributes)


# name -> (how it is written, heads of keys, opset)
VARIANTS: dict[str, tuple[Callable[[Variant], str], int, int]] = {
    "q·k·s": (ordinary(scaled("Mul", 0.4)), H, 18),
    "q·k/s": (ordinary(scaled("Div", 2.5)), H, 18),
    "scaled q": (ordinary(before=scaled("Mul", 0.4)), H, 18),
    "q over s": (ordinary(before=scaled("Div", 2.5)), H, 18),
    "einsum": (ordinary(scaled("Mul", 0.4), transposed="Einsum"), H, 18),
    "softmax by hand": (ordinary(scaled("Mul", 0.4), by_hand), H, 18),
    "softmax by a reciprocal": (ordinary(scaled("Mul", 0.4), reciprocal), H, 18),
    "exponential of a log-softmax": (ordinary(scaled("Mul", 0.4), through_logs), H, 18),
    "normalised after the sum": (normalised_after, H, 18),
    "causal": (ordinary(chain(scaled("Mul", 0.4), causal)), H, 18),
    "causal, masked before the scale": (ordinary(chain(causal, scaled("Mul", 0.4))), H, 18),
    "causal, by hand": (ordinary(chain(causal, scaled("Mul", 0.4)), by_hand), H, 18),
    "causal, by an added triangle": (ordinary(chain(scaled("Mul", 0.4), triangle)), H, 18),
    "sliding window": (ordinary(chain(scaled("Mul", 0.4), positions(window))), H, 18),
    "blocks": (ordinary(chain(scaled("Mul", 0.4), positions(blocks))), H, 18),
    "additive bias": (ordinary(chain(scaled("Mul", 0.4), bias)), H, 18),
    "bias before the scale": (ordinary(chain(bias, scaled("Div", 2.5))), H, 18),
    "padding": (ordinary(chain(scaled("Mul", 0.4), padding)), H, 18),
    "padding, by hand": (ordinary(chain(scaled("Mul", 0.4), padding), by_hand), H, 18),
    "boolean mask": (ordinary(chain(scaled("Mul", 0.4), boolean)), H, 18),
    "soft-capped": (ordinary(chain(scaled("Mul", 0.4), capped)), H, 18),
    "soft-capped and causal": (ordinary(chain(scaled("Mul", 0.4), capped, causal), by_hand), H, 18),
    "grouped heads": (grouped, 2, 18),
    "one head of keys": (multi_query, 1, 18),
    "operator": (attention(scale=0.4), H, 23),
    "operator, causal": (attention(is_causal=1), H, 23),
    "operator, grouped": (attention(), 2, 23),
    "operator, soft-capped": (attention(softcap=5.0), H, 23),
}


def model(name: str, queries: int = S) -> onnx.ModelProto:
    """One variant; where it has no mask, any number of queries."""
    write, heads, opset = VARIANTS[name]
    v = Variant()
    out = write(v)
    ins = {"q": (T.FLOAT, [B, H, queries, D]), "k": (T.FLOAT, [B, heads, K, D]), "v": (T.FLOAT, [B, heads, K, E]), **v.inputs}
    v.nodes.append(N("Identity", [out], ["y"]))
    return net(v.nodes, ins, {"y": T.FLOAT}, v.consts, opset=opset)
