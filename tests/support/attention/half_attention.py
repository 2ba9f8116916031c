"""Attention in 16 bits as exporters write it out in nodes, and what it is in float64."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto as T

from tests.support.attention.attention_models import Array, Variant, i64
from tests.support.small_models import N, net

KINDS = {"f16": T.FLOAT16, "bf16": T.BFLOAT16}
NUMPY = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8}  # unit roundoff
LAYERS = ("bert", "gpt2", "llama", "bert, eager", "gpt2, eager", "llama, eager")


@dataclass(frozen=True)
class Layer:
    """One attention: sizes, heads of keys for those of queries, and what its scores and weights go through."""

    name: str
    batch: int = 2
    heads: int = 4
    queries: int = 9
    keys: int = 11
    width: int = 6
    values: int = 5

    @property
    def groups(self) -> int:
        """Queries' heads that share one head of keys."""
        return 2 if self.name.startswith("llama") else 1

    @property
    def causal(self) -> bool:
        """Whether queries see the keys before them alone, by a constant mask; else a mask of numbers is an input."""
        return not self.name.startswith("bert")

    @property
    def eager(self) -> bool:
        """Whether the softmax is in float32 between casts (transformers' eager attention), with the least number as its mask
        and the scale behind the product; else it is of 16 bits and guarded against rows that see nothing (torch's operator),
        with minus infinity and half of the scale on either side."""
        return self.name.endswith("eager")

    def hidden(self, dtype: str) -> float:
        """What the mask adds to scores that are not seen."""
        return float(ml_dtypes.finfo(NUMPY[dtype]).min) if self.eager else -np.inf

    def mask(self, dtype: str) -> Array:
        """The mask of a causal layer."""
        seen = np.tril(np.ones((self.queries, self.keys), bool), self.keys - self.queries)
        return np.where(seen, 0.0, self.hidden(dtype)).astype(NUMPY[dtype])

    def shapes(self) -> dict[str, list[int]]:
        """Of the inputs."""
        kept = self.heads // self.groups
        out = {
            "q": [self.batch, self.heads, self.queries, self.width], "k": [self.batch, kept, self.keys, self.width],
            "v": [self.batch, kept, self.keys, self.values],
        }  # fmt: skip
        return out if self.causal else out | {"m": [self.batch, 1, self.queries, self.keys]}

    def feeds(self, dtype: str, seed: int = 0) -> dict[str, Array]:
        """Random inputs; a mask hides a third of the keys."""
        rng = np.random.default_rng(seed)
        out = {n: rng.standard_normal(s).astype(NUMPY[dtype]) for n, s in self.shapes().items()}
        if "m" in out:
            out["m"] = np.where(rng.random(out["m"].shape) < 0.3, self.hidden(dtype), 0.0).astype(NUMPY[dtype])
            out["m"][..., 0] = 0
        return out

    def model(self, dtype: str) -> onnx.ModelProto:
        """The ONNX nodes."""
        v, number, to = Variant(), NUMPY[dtype].type, KINDS[dtype]

        def repeated(x: str, width: int) -> str:
            if self.groups == 1:
                return x
            wide = i64([self.batch, self.heads // self.groups, self.groups, self.keys, width])
            x = v.add("Expand", v.add("Unsqueeze", x, i64([2])), wide)
            return v.add("Reshape", x, i64([self.batch, self.heads, self.keys, width]))

        keys = v.add("Transpose", repeated("k", self.width), perm=[0, 1, 3, 2])
        mask = self.mask(dtype) if self.causal else "m"
        if self.eager:
            s = v.add("Add", v.add("Mul", v.add("MatMul", "q", keys), number(0.5)), mask)
            p = v.add("Cast", v.add("Softmax", v.add("Cast", s, to=T.FLOAT), axis=-1), to=to)
        else:
            s = v.add("MatMul", v.add("Mul", "q", number(0.5)), keys)
            p = v.add("Softmax", v.add("Add", s, mask), axis=-1)
            p = v.add("Where", v.add("IsNaN", p), number(0), p)
        v.nodes.append(N("MatMul", [p, repeated("v", self.values)], ["y"]))
        return net(v.nodes, {n: (to, s) for n, s in self.shapes().items()}, {"y": to}, v.consts, opset=22)

    def float64(self, dtype: str, feeds: dict[str, Array]) -> Array:
        """The result without any rounding to 16 bits but that of the inputs."""
        q, k, v = (feeds[n].astype(np.float64) for n in "qkv")
        k, v = (np.repeat(x, self.groups, 1) for x in (k, v))
        mask = feeds["m"] if "m" in feeds else self.mask(dtype)
        with np.errstate(all="ignore"):
            s = 0.5 * (q @ k.swapaxes(-1, -2)) + mask.astype(np.float64)
            p = np.exp(s - s.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            return (p if self.eager else np.where(np.isnan(p), 0.0, p)) @ v
