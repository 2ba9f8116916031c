"""Contractions and reductions in IR text, for generated kernels."""

from __future__ import annotations

from tests.support.triton_kernels import (
    poisoned_lanes,  # noqa: F401  (a fixture for every test here)
)

CONTRACTIONS = {
    "two sums, gated": """graph g
        input x: f32[33, 37]
        input w: f32[37, 21]
        input v: f32[37, 21]
        input b: f32[21]
        y: f32[33, 21], z: f32[33, 21] = op [i: 33, n: 21 | m: 37 sums2] reads x[i, m], w[m, n], v[m, n], b[n]
          body x * w, x * v then (acc0 * sigmoid(acc0)) * acc1, acc1 + b
        output y, z""",
    "matmul, bias, relu": """graph g
        input x: f32[33, 37]
        input w: f32[37, 21]
        input b: f32[21]
        y: f32[33, 21] = op [i: 33, n: 21 | m: 37 sum] reads x[i, m], w[m, n], b[n]
          body x * w then max((acc0 + b), 0.0)
        output y""",
    "batched, transposed": """graph g
        input x: f32[2, 3, 7, 13]
        input w: f32[3, 13, 5]
        y: f32[2, 3, 5, 7] = op [b0: 2, b1: 3, n: 5, i: 7 | m: 13 sum] reads w[b1, m, n], x[b0, b1, i, m]
          body w * x then acc0
        output y""",
    "prologue and residual": """graph g
        input x: f32[13, 18]
        input g: f32[18]
        input w: f32[9, 18]
        input r: f32[13, 9]
        y: f32[13, 9] = op [i: 13, n: 9 | m: 18 sum] reads x[i, m], g[m], w[n, m], r[i, n]
          body sigmoid(x + g) * exp(w) then (acc0 / 3.0) + r
        output y""",
    "conv 3x3 stride 2 pad 1": """graph g
        input x: f32[2, 5, 13, 9]
        input k: f32[7, 5, 3, 3]
        y: f32[2, 7, 7, 5] = op [b: 2, o: 7, h: 7, w: 5 | c: 5 sum, r: 3 sum, s: 3 sum]
          reads x[b, c, 2*h + r - 1, 2*w + s - 1] else 0.0, k[o, c, r, s] body x * k then acc0
        output y""",
    "conv dilated, padded with ones": """graph g
        input x: f32[1, 3, 11, 11]
        input k: f32[4, 3, 3, 3]
        y: f32[1, 4, 11, 11] = op [b: 1, o: 4, h: 11, w: 11 | c: 3 sum, r: 3 sum, s: 3 sum]
          reads x[b, c, h + 2*r - 2, w + 2*s - 2] else 1.0, k[o, c, r, s] body x * k then acc0
        output y""",
    "conv grouped": """graph g
        input x: f32[2, 6, 7, 5]
        input k: f32[8, 3, 3, 3]
        y: f32[2, 8, 7, 5] = op [b: 2, o: 8, h: 7, w: 5 | c: 3 sum, r: 3 sum, s: 3 sum]
          reads x[b, c + 3*floor((o)/4), h + r - 1, w + s - 1] else 0.0, k[o, c, r, s] body x * k then acc0
        output y""",
    "conv depthwise": """graph g
        input x: f32[1, 6, 7, 5]
        input k: f32[6, 1, 3, 3]
        y: f32[1, 6, 7, 5] = op [b: 1, o: 6, h: 7, w: 5 | c: 1 sum, r: 3 sum, s: 3 sum]
          reads x[b, c + o, h + r - 1, w + s - 1] else 0.0, k[o, c, r, s] body x * k then acc0
        output y""",
    "conv transposed, stride 2": """graph g
        input x: f32[1, 3, 5, 4]
        input k: f32[3, 4, 3, 3]
        y: f32[1, 4, 11, 9] = op [b: 1, o: 4, h: 11, w: 9 | c: 3 sum, r: 3 sum, s: 3 sum]
          reads x[b, c, floor((h - r)/2), floor((w - s)/2)] when ((h - r) mod 2) == 0 when ((w - s) mod 2) == 0 else 0.0,
                k[c, o, r, s]
          body x * k then acc0
        output y""",
    "integers": """graph g
        input x: i64[5, 7]
        input w: i64[7, 3]
        y: i64[5, 3] = op [i: 5, n: 3 | m: 7 sum] reads x[i, m], w[m, n] body x * w then acc0
        output y""",
    "f64": """graph g
        input x: f64[5, 7]
        input w: f64[7, 3]
        y: f64[5, 3] = op [i: 5, n: 3 | m: 7 sum] reads x[i, m], w[m, n] body x * w then acc0
        output y""",
    "factor without the reduced dimension": """graph g
        input x: f32[5]
        input w: f32[7, 3]
        y: f32[5, 3] = op [i: 5, n: 3 | m: 7 sum] reads x[i], w[m, n] body x * w then acc0
        output y""",
    "f16": """graph g
        input x: f16[17, 40]
        input w: f16[40, 18]
        y: f16[17, 18] = op [i: 17, n: 18 | m: 40 sum] reads x[i, m], w[m, n]
          body cast(x, f32) * cast(w, f32) then cast(acc0, f16)
        output y""",
    "bf16": """graph g
        input x: bf16[17, 40]
        input w: bf16[40, 18]
        y: bf16[17, 18] = op [i: 17, n: 18 | m: 40 sum] reads x[i, m], w[m, n]
          body cast(x, f32) * cast(w, f32) then cast(acc0, bf16)
        output y""",
    "vector times matrix": """graph g
        input x: f32[1, 37]
        input w: f32[37, 21]
        y: f32[1, 21] = op [i: 1, n: 21 | m: 37 sum] reads x[i, m], w[m, n] body x * w then acc0
        output y""",
}
REDUCTIONS = {
    "windows over doubled rows": """graph g
        input x: f32[2, 5, 4]
        input w: f32[5, 3]
        y: f32[2, 7, 6] = op [b: 2, h: 7, w: 6 | r: 5 sum, s: 3 sum]
          reads x[b, floor((h + r)/2) - 1, floor((w + s)/2)] else 0.0, w[r, s] body x * w then acc0
        output y""",
    "max pool": """graph g
        input x: f32[1, 3, 9, 7]
        y: f32[1, 3, 5, 4] = op [b: 1, c: 3, h: 5, w: 4 | r: 3 max, s: 3 max]
          reads x[b, c, 2*h + r - 1, 2*w + s - 1] else -inf body x then acc0
        output y""",
    "softmax": """graph g
        input x: f32[5, 13]
        m: f32[5], s: f32[5] = op [i: 5 | j: 13 logsumexp] reads x[i, j] body x, 1.0 then acc0, log(acc1)
        y: f32[5, 13] = op [i: 5, j: 13] reads x[i, j], m[i], s[i] body exp((x - m) - s)
        output m, s, y""",
    "layer norm": """graph g
        input x: f32[5, 13]
        input g: f32[13]
        m: f32[5], v: f32[5] = op [i: 5 | j: 13 moments] reads x[i, j] body 1.0, x, 0.0 then acc1, (acc2 / acc0)
        y: f32[5, 13] = op [i: 5, j: 13] reads x[i, j], m[i], v[i], g[j] body ((x - m) / sqrt(v + 0.00001)) * g
        output m, v, y""",
    "prod": """graph g
        input x: f32[7, 5]
        y: f32[5] = op [j: 5 | i: 7 prod] reads x[i, j] body x then acc0
        output y""",
    "min of integers": """graph g
        input x: i32[7, 5]
        y: i32[7] = op [i: 7 | j: 5 min] reads x[i, j] body x then acc0
        output y""",
    "any": """graph g
        input x: bool[7, 5]
        y: bool[7] = op [i: 7 | j: 5 any] reads x[i, j] body x then acc0
        output y""",
    "all": """graph g
        input x: bool[7, 3]
        y: bool[7] = op [i: 7 | j: 3 all] reads x[i, j] body x then not(acc0)
        output y""",
    "whole mean": """graph g
        input x: f32[7, 13]
        y: f32[] = op [ | i: 7 sum, j: 13 sum] reads x[i, j] body x then acc0 / 91.0
        output y""",
    "sum of i8 wraps": """graph g
        input x: i8[3, 33]
        y: i8[3] = op [i: 3 | j: 33 sum] reads x[i, j] body (x * x) then acc0
        output y""",
    "sum of halves": """graph g
        input x: f16[3, 33]
        y: f16[3] = op [i: 3 | j: 33 sum] reads x[i, j] body cast(x, f32) then cast(acc0, f16)
        output y""",
}
