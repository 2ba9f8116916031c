"""Ahead-of-time compilation of representative kernels, and what their machine code must look like.

Triton decides between its interpreter and its compiler when it is imported, and the fast tests use the interpreter: each
target is compiled in a process of its own, which is this file run as a program.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import generate
from tapestry.codegen.triton.run.compile_ahead import compile_ahead, measured
from tapestry.codegen.triton.run.report import rows_of
from tapestry.codegen.triton.task.chips import CHIPS
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.syntax.parser import parse
from tests.support.gpu_stand_in.matrix_instructions import MATRIX
from tests.support.paths import ROOT


def matmul(dtype: str, n: int) -> str:
    return f"""graph g input x: {dtype}[{n}, {n}] input w: {dtype}[{n}, {n}] input b: {dtype}[{n}]
        y: {dtype}[{n}, {n}] = op [i: {n}, n: {n} | m: {n} sum] reads x[i, m], w[m, n], b[n]
          body cast(x, f32) * cast(w, f32) then cast(max((acc0 + cast(b, f32)), 0.0), {dtype})
        output y"""


def conv(dtype: str, groups: int = 1) -> str:
    c = 64 // groups
    channel = "c" if groups == 1 else f"c + {c}*floor((o)/{c})"
    return f"""graph g input x: {dtype}[4, 64, 57, 57] input k: {dtype}[64, {c}, 3, 3]
        y: {dtype}[4, 64, 29, 29] = op [b: 4, o: 64, h: 29, w: 29 | c: {c} sum, r: 3 sum, s: 3 sum]
          reads x[b, {channel}, 2*h + r - 1, 2*w + s - 1] else 0.0, k[o, c, r, s]
          body cast(x, f32) * cast(k, f32) then cast(acc0, {dtype})
        output y"""


def attention(dtype: str, width: int, score: str = "let0 * 0.125") -> str:
    """Grouped heads: 8 of queries, 2 of keys and values."""
    wide = (lambda x: x) if dtype == "f32" else (lambda x: f"cast({x}, f32)")
    return f"""graph g input q: {dtype}[2, 8, 1024, {width}] input k: {dtype}[2, 2, 1024, {width}]
        input v: {dtype}[2, 2, 1024, {width}]
        y: {dtype}[2, 8, 1024, {width}] = op [b: 2, h: 8, i: 1024, e: {width} | n: 1024 softsum]
          reads q[b, h, i, m], k[b, floor((h)/4), n, m], v[b, floor((h)/4), n, e]
          let [m: {width} sum] {wide("q")} * {wide("k")}
          body {score}, 1.0, {wide("v")} then {"acc2 / acc1" if dtype == "f32" else f"cast((acc2 / acc1), {dtype})"}
        output y"""


def narrow(a: str, b: str, n: int, *, zero: str = "", turned: bool = True) -> str:
    """Rows of a times rows of b (columns, where not turned) of 8 bits, to f16 or, for integers, to i32."""
    wide, out = ("i32", "acc0") if a[0] in "iu" else ("f32", "cast((acc0 * s), f16)")
    return f"""graph g input x: {a}[{n}, {n}] input w: {b}[{n}, {n}] input s: f32[{n}] input z: {a}[]
        y: {"i32" if wide == "i32" else "f16"}[{n}, {n}] = op [i: {n}, n: {n} | m: {n} sum]
          reads x[i, m], w[{"n, m" if turned else "m, n"}], s[n], z[]
          body (cast(x, {wide}){zero}) * cast(w, {wide}) then {out}
        output y"""


def folded(dtype: str, monoid: str, body: str, then: str, rows: int = 512, n: int = 32000, k: int = 768, kind: str = "") -> str:
    """A reduction of logits."""
    return f"""graph g input x: {dtype}[{rows}, {k}] input w: {dtype}[{k}, {n}] input c: {dtype}[{n}]
        y: {kind or dtype}[{rows}] = op [i: {rows} | n: {n} {monoid}] reads x[i, m], w[m, n], c[n]
          let [m: {k} sum] cast(x, f32) * cast(w, f32) body {body} then {then}
        output y"""


def pooled(dtype: str, window: int, channels: int = 64, size: int = 56, batch: int = 8) -> str:
    """A maximum pool of stride 2 behind a 3 x 3 convolution."""
    out, pad = size // 2, window // 2
    at = f"2*p + e - {pad}", f"2*q + f - {pad}"
    value = "max((let0 + cast(b, f32)), 0.0)"
    if pad:
        value = f"where(and(ge(index({at[0]}), 0), ge(index({at[1]}), 0)), {value}, f32(-inf))"
    return f"""graph g input x: {dtype}[{batch}, {channels}, {size}, {size}] input k: {dtype}[64, {channels}, 3, 3]
        input b: {dtype}[64]
        y: {dtype}[{batch}, 64, {out}, {out}] = op [n: {batch}, o: 64, p: {out}, q: {out} | e: {window} max, f: {window} max]
          reads x[n, c, 2*p + e + r - {pad + 1}, 2*q + f + s - {pad + 1}] else 0.0, k[o, c, r, s], b[o]
          let [c: {channels} sum, r: 3 sum, s: 3 sum] cast(x, f32) * cast(k, f32) body {value} then cast(acc0, {dtype})
        output y"""


def averaged(dtype: str, batch: int, size: int = 7) -> str:
    """The mean over the image behind a 1 x 1 convolution, a residual and a clamp."""
    return f"""graph g input x: {dtype}[{batch}, 512, {size}, {size}] input k: {dtype}[2048, 512]
        input r: {dtype}[{batch}, 2048, {size}, {size}]
        y: {dtype}[{batch}, 2048] = op [b: {batch}, o: 2048 | h: {size} sum, w: {size} sum]
          reads x[b, c, h, w], k[o, c], r[b, o, h, w] let [c: 512 sum] cast(x, f32) * cast(k, f32)
          body max((let0 + cast(r, f32)), 0.0) then cast((acc0 / {size * size}.0), {dtype})
        output y"""


def normed(dtype: str, n: int, rows: int = 4096, k: int = 384) -> str:
    """A product with bias, and a layer norm of its rows."""
    return f"""graph g input x: {dtype}[{rows}, {k}] input w: {dtype}[{k}, {n}] input c: {dtype}[{n}] input g: {dtype}[{n}]
        y: {dtype}[{rows}, {n}] = op [i: {rows}, j: {n} | n: {n} moments.sum] reads x[i, m], w[m, n], c[n], g[j]
          let [m: {k} sum] cast(x, f32) * cast(w, f32)
          body 1.0, let0 + cast(c, f32), 0.0, where(eq(index(n), index(j)), let0 + cast(c, f32), 0.0)
          then cast((((acc3 - acc1) / sqrt(((acc2 / acc0) + 0.00001))) * cast(g, f32)), {dtype})
        output y"""


FOLDED = {
    "folded layer norm 256": normed("f16", 256),
    "folded layer norm 192": normed("bf16", 192),
    "folded layer norm f32": normed("f32", 96),
    "folded layer norm f32, wide": normed("f32", 256),
    "folded argmax": folded("f16", "argmax", "let0 + cast(c, f32), index(n)", "acc1", kind="i64"),
    "folded argmax bf16 few": folded("bf16", "argmax", "let0, index(n)", "acc1", rows=8, n=50257, kind="i64"),
    "folded cross-entropy": folded("bf16", "logsumexp", "let0 + cast(c, f32), 1.0", "log(acc1) + acc0", kind="f32"),
    "folded maximum": folded("f16", "max", "let0", "cast(acc0, f16)"),
    "folded sum f32": folded("f32", "sum", "max((let0 + c), 0.0)", "acc0", rows=300, n=1000, k=200),
    "folded moments": folded("f16", "moments", "1.0, let0, 0.0", "cast((acc2 / acc0), f16)", n=1024),
    "folded mean of an image": averaged("f16", 32),
    "folded mean of an image, rows": averaged("f16", 8, 8),
    "folded mean of one image f32": averaged("f32", 1),
    "folded pool": pooled("f16", 2),
    "folded pool, overlapping": pooled("bf16", 3),
    "folded pool f32": pooled("f32", 2, 32),
    "folded stem": pooled("f16", 3, 3, 112),
}
CAUSAL = "where(ge(index(i - n), 0), (let0 * 0.125), f32(-inf))"
FLOAT_FUNCTIONS = "exp log sqrt erf tanh sin cos tan asin acos atan sinh cosh asinh acosh atanh sigmoid log1p expm1 floor ceil"
CASES = {
    **FOLDED,
    "matmul f16": matmul("f16", 1024),
    "matmul bf16": matmul("bf16", 512),
    "matmul f32": matmul("f32", 256),
    "matmul odd": matmul("f16", 203),
    "attention scores": """graph g input q: f16[2, 12, 128, 64] input k: f16[2, 12, 128, 64]
        s: f16[2, 12, 128, 128] = op [b: 2, h: 12, i: 128, j: 128 | d: 64 sum] reads q[b, h, i, d], k[b, h, j, d]
          body cast(q, f32) * cast(k, f32) then cast((acc0 * 0.125), f16)
        output s""",
    "attention f16": attention("f16", 64),
    "attention bf16 causal": attention("bf16", 64, CAUSAL),
    "attention f16 wide": attention("f16", 128),
    "attention bf16 wide causal": attention("bf16", 128, CAUSAL),
    "attention f32": attention("f32", 64, CAUSAL),
    "attention f32 wide": attention("f32", 128),
    "attention f32 96": attention("f32", 96, CAUSAL),
    "decode": attention("bf16", 128).replace("8, 1024, 128]", "8, 1, 128]").replace("i: 1024", "i: 1").replace("1024", "8192"),
    "matmul tf32": matmul("f32", 512),
    "matmul tf32x3": matmul("f32", 512),
    "matmul odd, large": matmul("f16", 1023),
    "conv f16, large": conv("f16").replace("[4, 64", "[32, 64").replace("b: 4", "b: 32"),
    "conv channels last": """graph g input x: bf16[8, 56, 56, 64] input k: bf16[64, 3, 3, 64]
        y: bf16[8, 56, 56, 64] = op [b: 8, h: 56, w: 56, o: 64 | r: 3 sum, s: 3 sum, c: 64 sum]
          reads x[b, h + r - 1, w + s - 1, c] else 0.0, k[o, r, s, c] body cast(x, f32) * cast(k, f32)
          then cast(max(acc0, 0.0), bf16)
        output y""",
    "gate and up": """graph g input x: bf16[512, 1024] input w: bf16[1024, 2816] input v: bf16[1024, 2816]
        y: bf16[512, 2816] = op [i: 512, n: 2816 | m: 1024 sums2] reads x[i, m], w[m, n], v[m, n]
          body cast(x, f32) * cast(w, f32), cast(x, f32) * cast(v, f32) then cast((acc0 * sigmoid(acc0)) * acc1, bf16)
        output y""",
    "matmul bf16, large": matmul("bf16", 4096),
    "down and residual": """graph g input x: f16[2048, 11008] input w: f16[11008, 4096] input r: f16[2048, 4096]
        y: f16[2048, 4096] = op [i: 2048, n: 4096 | m: 11008 sum] reads x[i, m], w[m, n], r[i, n]
          body cast(x, f32) * cast(w, f32) then r + cast(acc0, f16)
        output y""",
    "bias and residual": """graph g input x: f16[4096, 3072] input w: f16[3072, 768] input c: f16[768] input r: f16[4096, 768]
        y: f16[4096, 768] = op [i: 4096, n: 768 | m: 3072 sum] reads x[i, m], w[m, n], c[n], r[i, n]
          body cast(x, f32) * cast(w, f32) then (cast(acc0, f16) + c) + r
        output y""",
    "three heads' biases": """graph g input x: f16[4096, 768] input u: f16[768, 768] input v: f16[768, 768] input w: f16[768, 768]
        input a: f16[768] input b: f16[768] input c: f16[768]
        p: f16[4096, 768], q: f16[4096, 768], r: f16[4096, 768] = op [i: 4096, n: 768 | m: 768 sums3]
          reads x[i, m], u[m, n], v[m, n], w[m, n], a[n], b[n], c[n]
          body cast(x, f32) * cast(u, f32), cast(x, f32) * cast(v, f32), cast(x, f32) * cast(w, f32)
          then cast(acc0, f16) + a, cast(acc1, f16) + b, cast(acc2, f16) + c
        output p, q, r""",
    "tanh behind a product": """graph g input x: f16[4096, 768] input w: f16[768, 3072] input c: f16[3072]
        y: f16[4096, 3072] = op [i: 4096, n: 3072 | m: 768 sum] reads x[i, m], w[m, n], c[n] body cast(x, f32) * cast(w, f32)
          then (f16(0.5) * (cast(acc0, f16) + c)) * (f16(1.0) + tanh((f16(0.797) * ((cast(acc0, f16) + c)
            + (f16(0.044715) * (((cast(acc0, f16) + c) * (cast(acc0, f16) + c)) * (cast(acc0, f16) + c)))))))
        output y""",
    "attention f16 rounded": attention("f16", 128, "cast(cast(" + CAUSAL + ", f16), f32)"),
    "decode odd": attention("bf16", 128).replace("8, 1024, 128]", "8, 1, 128]").replace("i: 1024", "i: 1").replace("1024", "8193"),
    "e4m3": narrow("f8e4m3fn", "f8e4m3fn", 4096),
    "e4m3, small": narrow("f8e4m3fn", "f8e4m3fn", 256),
    "e4m3 e5m2": narrow("f8e4m3fn", "f8e5m2", 1024),
    "e5m2 turned": narrow("f8e5m2", "f8e5m2", 2048, turned=False),
    "e4m3 odd": narrow("f8e4m3fn", "f8e4m3fn", 203),
    "e4m3fnuz": narrow("f8e4m3fnuz", "f8e5m2fnuz", 1024),
    "e4m3 conv": conv("f8e4m3fn").replace("4, 64", "32, 64").replace("b: 4", "b: 32").replace("else 0.0", "else 0").replace(
        "cast(acc0, f8e4m3fn)", "cast(acc0, f16)").replace("y: f8e4m3fn", "y: f16"),
    "e4m3 attention": attention("f8e4m3fn", 128).replace("f8e4m3fn[2, 8, 1024, 128] =", "f16[2, 8, 1024, 128] =").replace(
        "cast((acc2 / acc1), f8e4m3fn)", "cast((acc2 / acc1), f16)"),
    "i8": narrow("i8", "i8", 4096),
    "i8, small": narrow("i8", "i8", 256),
    "u8 symmetric": narrow("u8", "i8", 1024, zero=" - i32(128)"),
    "u8 zero point": narrow("u8", "i8", 1024, zero=" - cast(z, i32)"),
    "i8 turned": narrow("i8", "i8", 2048, turned=False),
    "gather": """graph g input x: bf16[32000, 512] input i: i64[256]
        y: bf16[256, 512] = op [t: 256, e: 512 | v: 32000 sum] reads x[v, e], i[t] body where(eq(i, index(v)), x, bf16(0.0))
        output y""",
    "layer norm": """graph g input x: bf16[4096, 4096] input w: bf16[4096]
        y: bf16[4096, 4096] = op [i: 4096, j: 4096 | n: 4096 moments] reads x[i, n], a = x[i, j], w[j]
          body 1.0, cast(x, f32), 0.0
          then cast((((cast(a, f32) - acc1) / sqrt(((acc2 / acc0) + 0.00001))) * cast(w, f32)), bf16)
        output y""",
    "softmax": """graph g input x: f32[4096, 1000]
        y: f32[4096, 1000] = op [i: 4096, j: 1000 | n: 1000 logsumexp] reads x[i, n], a = x[i, j]
          body x, 1.0 then exp(a - acc0) / acc1
        output y""",
    "conv f16": conv("f16"),
    "conv f32": conv("f32"),
    "conv grouped": conv("f16", 4),
    "conv depthwise": conv("f32", 64),
    "vector times matrix": """graph g input x: f32[1, 4096] input w: f32[4096, 4096]
        y: f32[1, 4096] = op [i: 1, n: 4096 | m: 4096 sum] reads x[i, m], w[m, n] body x * w then acc0 output y""",
    "max pool": """graph g input x: f32[8, 64, 112, 112]
        y: f32[8, 64, 56, 56] = op [b: 8, c: 64, h: 56, w: 56 | r: 3 max, s: 3 max]
          reads x[b, c, 2*h + r - 1, 2*w + s - 1] else -inf body x then acc0
        output y""",
    "softmax state": """graph g input x: f32[512, 4096] m: f32[512], s: f32[512] = op [i: 512 | j: 4096 logsumexp]
        reads x[i, j] body x, 1.0 then acc0, log(acc1) output m, s""",
    "moments": """graph g input x: f16[512, 4096] m: f32[512], s: f32[512] = op [i: 512 | j: 4096 moments]
        reads x[i, j] body 1.0, cast(x, f32), 0.0 then acc1, sqrt(acc2 / acc0) output m, s""",
    "argmax": """graph g input x: f32[512, 1000] y: i64[512] = op [i: 512 | j: 1000 argmax]
        reads x[i, j] body x, index(j) then acc1 output y""",
    "any": """graph g input x: bool[512, 1000] y: bool[512] = op [i: 512 | j: 1000 any]
        reads x[i, j] body x then acc0 output y""",
    "sum of i8": """graph g input x: i8[512, 1000] y: i8[512] = op [i: 512 | j: 1000 sum]
        reads x[i, j] body x then acc0 output y""",
    "columns": """graph g input x: f32[1000, 512] y: f32[512] = op [j: 512 | i: 1000 prod]
        reads x[i, j] body x then acc0 output y""",
    "bias": """graph g input x: bf16[512, 1000] input b: bf16[1000] y: bf16[512, 1000] = op [i: 512, j: 1000]
        reads x[i, j], b[j] body x + b output y""",
    "transpose": """graph g input x: f32[512, 256] y: f32[256, 512] = op [j: 256, i: 512] reads x[i, j] body x output y""",
    "philox": """graph g y: f32[512, 100] = op [i: 512, j: 100]
        body cast(shr(philox(1234567890123, 3, 0, 0, index(100*i + j)), 8), f32) * 0.000000059604644775390625 output y""",
    "integers": """graph g input x: i64[999] input y: i64[999] z: i64[999] = op [i: 999] reads x[i], y[i]
        body pow(mod((x / y), y), fmod(x, y)) output z""",
    "wide": """graph g input x: f32[65536, 65536] y: f32[65536, 65536] = op [i: 65536, j: 65536]
        reads x[i, j] body abs(x) output y""",
    **{
        f: f"graph g input x: f32[4096] y: f32[4096] = op [i: 4096] reads x[i] body {f}(x) output y"
        for f in FLOAT_FUNCTIONS.split()
    },
    **{
        f"{f} f64": f"graph g input x: f64[999] y: f64[999] = op [i: 999] reads x[i] body max({f}(x), x) output y"
        for f in ("atan", "round", "exp", "sqrt")
    },
    **{
        f"division {d}": f"""graph g input x: {d}[999] input y: {d}[999] a: {d}[999], b: {d}[999], c: {d}[999], d: {d}[999] =
        op [i: 999] reads x[i], y[i] body x / y, mod(x, y), fmod(x, y), mod(x, {d}(7)) output a, b, c, d"""
        for d in ("i64", "i8", "u8")
    },
}  # fmt: skip
ON_MATRIX_UNITS = {"matmul f16", "matmul bf16", "matmul odd", "attention scores", "conv f16", "matmul odd, large"}
ON_MATRIX_UNITS |= {"conv f16, large", "conv channels last", "gate and up", "matmul tf32", "matmul tf32x3"}
BY_ROWS = {"matmul f16", "matmul odd, large", "conv f16, large", "conv channels last", "gate and up", "decode", "gather"}
FAST = (
    "e4m3 e5m2",
    "i8, small",
    "matmul bf16",
    "attention bf16 wide causal",
    "layer norm",
    "conv f16, large",
    "decode",
    "matmul tf32",
)
ON_MATRIX_UNITS |= {"attention f16", "attention bf16 causal", "attention f16 wide", "attention bf16 wide causal"}
ON_MATRIX_UNITS.add("matmul bf16, large")
# what operands of 8 bits are multiplied by: sm80 has no such instruction for floats, gfx942 one for its own kinds alone
HALF_WIDTH = {
    "sm80": "HMMA",
    "sm86": "HMMA",
    "sm89": "HMMA",
    "sm90": "HGMMA",
    "sm100": "UTCHMMA",
    "gfx942": r"v_mfma_f32_\w+_f16",
}
OF_8_BITS = {
    "e4m3": HALF_WIDTH | {"sm89": "QMMA", "sm90": "QGMMA", "sm100": "UTCQMMA"},
    "e4m3fnuz": HALF_WIDTH | {"gfx942": r"v_mfma_f32_\w+_(fp8|bf8)_(fp8|bf8)"},
    "i8": {"sm80": "IMMA", "sm86": "IMMA", "sm89": "IMMA", "sm90": "IGMMA", "sm100": "UTCIMMA", "gfx942": r"v_mfma_i32_\w+_i8"},
}
OF_8_BITS |= dict.fromkeys(
    ("e4m3, small", "e4m3 e5m2", "e5m2 turned", "e4m3 odd", "e4m3 conv", "e4m3 attention"), OF_8_BITS["e4m3"]
)
OF_8_BITS |= dict.fromkeys(("i8, small", "u8 symmetric", "u8 zero point", "i8 turned"), OF_8_BITS["i8"])
AWAITED = {
    "matmul bf16, large": 4,
    "down and residual": 4,
    "bias and residual": 4,
    "three heads' biases": 6,
    "tanh behind a product": 4,
}
"""Waits for the matrix units in a whole kernel on sm90; where ptxas serialises, there are two for each product."""
FAST += ("bias and residual", "three heads' biases", "tanh behind a product", "attention f16 rounded", "decode odd")
ON_MATRIX_UNITS |= {*AWAITED, "attention f16 rounded"}
FAST += ("folded argmax", "folded layer norm 256", "folded pool, overlapping")
ON_MATRIX_UNITS |= {n for n in FOLDED if "f32" not in n and "few" not in n}
HOPPER = {
    # Llama's, written out in nodes: with places compared in 64 bits it took 255 registers and 812 bytes of spills
    "attention of an export": """graph g input q: bf16[32, 2048, 128] input k: bf16[32, 128, 2048] input v: bf16[2048, 4096]
        input seen: bool[2048]
        y: bf16[32, 2048, 128] = op [h: 32, i: 2048, e: 128 | n: 2048 softsum] reads v[n, e + 128*h], q[h, i, d], k[h, d, n], seen[n]
          let [d: 128 sum] cast(q, f32) * cast(k, f32)
          body cast((cast(let0, bf16) + where(and(le(index(n), index(i)), seen), bf16(0.0), bf16(-3.3895e38))), f32), 1.0, cast(v, f32)
          then cast(where(isnan((acc0 - acc0)), (acc0 - acc0), (acc2 / acc1)), bf16)
        output y""",
}
FAST += tuple(HOPPER)
ON_MATRIX_UNITS |= {*HOPPER}
STACK_ALLOWED = {"sin", "cos", "tan"}  # argument reduction of huge angles keeps a table on the stack (triton#1756)


def compile_all(target: str, names: Sequence[str]) -> dict[str, Any]:
    """Resources of some cases for one target."""
    out: dict[str, Any] = {}
    for name in names:
        graph = parse((CASES | HOPPER)[name])
        op = graph.ops[0]
        assert isinstance(op, Block)
        kernel = Kernel(
            op=0,
            mode="full",
            block=whole(tuple(d.size for d in op.space)),
            ins=tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads),
            outs=tuple(whole(graph.tensors[t].shape) for t in op.outs),
        )
        precision = name.split()[-1] if "tf32" in name else "ieee"
        tk = generate(graph, kernel, target=target, precision=precision)
        for row in rows_of(graph, kernel, tk, name, compile_ahead(tk, target), 1):
            out[row["kernel"]] = row
    return out


def in_its_own_process(target: str, cache: Path, names: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(cache),
        "TAPESTRY_CACHE": str(cache / "own"),
    }
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.codegen.triton.test_triton_aot", target, *names],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", CHIPS)
def test_kernels_compile_and_fit(target: str, tmp_path: Path) -> None:
    done = in_its_own_process(target, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for name, row in found.items():
        holds(name, row, target)
    assert len([n for n in found if n.startswith("decode")]) == 4, "the keys are in parts, merged by a second kernel"


@pytest.mark.slow
def test_a_few_kernels_compile_and_fit(tmp_path: Path) -> None:
    done = in_its_own_process("sm90", tmp_path, FAST)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for name, row in found.items():
        holds(name, row, "sm90")
    assert found["matmul bf16"]["descriptors"] and found["attention bf16 wide causal"]["instructions"]["UTMALDG"] > 0
    assert found["matmul bf16"]["extents"] == [1, 512, 512, 512] and found["matmul bf16"]["matrix_flops"] == 2 * 512**3
    assert found["layer norm"]["bytes"] == 2 * 2 * 4096 * 4096 + 2 * 4096 and 0 < found["layer norm"]["occupancy"] <= 1


def holds(name: str, row: dict[str, Any], target: str) -> None:
    """What every compiled kernel must keep to."""
    chip, where, case = CHIPS[target], f"{name} for {target}: {row}", name.partition(".")[0]
    assert row["spills"] == 0 or case in STACK_ALLOWED, where
    assert row["shared"] <= chip.shared == row["shared_limit"], where
    assert row["registers"] * row["num_warps"] * chip.warp <= chip.registers, where
    products = row["kind"].startswith(("stream", "folded"))
    if (products and case in ON_MATRIX_UNITS) or (row["kind"].startswith("dot") and case in ON_MATRIX_UNITS):
        assert row["matrix"] == MATRIX[target], where
    if case in OF_8_BITS and row["kind"] not in ("copy", "merge"):
        assert any(n and re.fullmatch(OF_8_BITS[case][target], op) for op, n in row["instructions"].items()), where
        assert row.get("roofline_s", 1.0) > 0
    rows = case in BY_ROWS and (chip.descriptors or "odd" not in case)  # a mask along a row keeps loads of 16 bytes from it
    if rows and row["kind"] not in ("copy", "merge") and target != "gfx942":
        copied = row["instructions"].get("LDGSTS.128", 0) + row["instructions"].get("UTMALDG", 0)
        assert copied + row["instructions"].get("LDG.128", 0) > 0, where
    if target == "sm90" and name in AWAITED:
        assert 0 < row["instructions"]["WARPGROUP"] <= AWAITED[name] + 1, where
    if name in ("bias", "exp", "layer norm", "transpose"):
        assert row["wide_share"] > 0.4, where


@pytest.mark.slow
def test_interpreter_and_unknown_targets_are_refused() -> None:
    graph = parse(CASES["exp"])
    box = ((0, 4096),)
    tk = generate(graph, Kernel(op=0, mode="full", block=box, ins=(box,), outs=(box,)))
    with pytest.raises(TapestryError, match="unknown Triton target"):
        compile_ahead(tk, "sm61")


def assembled_once() -> None:
    """Candidates with functions of one name, beside each other: each is assembled once, and keeps what is said of it."""
    from triton.backends.nvidia.compiler import CUDABackend

    graph, box = parse("graph g input x: f32[4096] y: f32[4096] = op [i: 4096] reads x[i] body exp(x) output y"), ((0, 4096),)
    kernel = Kernel(op=0, mode="full", block=box, ins=(box,), outs=(box,))
    made = [generate(graph, kernel, KernelConfig(cols=n, num_warps=w)) for n, w in ((128, 1), (4096, 1), (1024, 4))]
    assert len({tk.passes[0].function for tk in made}) == 1
    runs, assembler = list[str](), CUDABackend.make_cubin
    CUDABackend.make_cubin = lambda self, src, *more: (runs.append(src), assembler(self, src, *more))[1]
    found = measured(made, "sm90")
    assert len(runs) == 3 and measured(made, "sm90") == found and len(runs) == 3, "kept in the user's cache"
    for tk, taken in zip(made, found, strict=True):
        (alone,) = compile_ahead(tk, "sm90")
        assert isinstance(taken, tuple) and taken[0].registers == alone.resources.registers > 0
    assert len(runs) == 6, "Triton has them in its cache; the assembler is asked once more for what it says"
    assert len({taken[0].registers for taken in found if isinstance(taken, tuple)}) > 1
    print("passed")


@pytest.mark.slow
def test_a_kernel_is_assembled_once(tmp_path: Path) -> None:
    done = in_its_own_process("once", tmp_path)
    assert done.stdout.split() == ["passed"], done.stderr[-3000:]


if __name__ == "__main__":
    if sys.argv[1] == "once":
        assembled_once()
        sys.exit(0)
    print(json.dumps(compile_all(sys.argv[1], sys.argv[2:] or list(CASES))))
