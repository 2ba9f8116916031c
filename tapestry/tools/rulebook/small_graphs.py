"""Small graphs by name, whose equivalents `production_space` finds: those on which the idea of block sharding is explained."""

from __future__ import annotations

GRAPHS = {
    "Linear": """
graph linear
input x: f32[64, 256]
input w: f32[256, 128]
input b: f32[128]
y: f32[64, 128] = op [i: 64, n: 128 | m: 256 sum]
  reads x[i, m], w[m, n], b[n]
  body x * w
  then acc0 + b
output y
""",
    "Conv": """
graph conv
input x: f32[4, 8, 32, 32]
input k: f32[16, 8, 3, 3]
y: f32[4, 16, 32, 32] = op [b: 4, o: 16, h: 32, w: 32 | c: 8 sum, r: 3 sum, s: 3 sum]
  reads x[b, c, h + r - 1, w + s - 1] else 0.0, k[o, c, r, s]
  body x * k
output y
""",
    "StridedConv": """
graph strided
input x: f32[4, 8, 33]
input k: f32[16, 8, 3]
y: f32[4, 16, 16] = op [b: 4, o: 16, h: 16 | c: 8 sum, r: 3 sum]
  reads x[b, c, 2*h + r], k[o, c, r]
  body x * k
output y
""",
    "Sum": """
graph sum
input x: f32[16, 4096]
y: f32[16] = op [i: 16 | m: 4096 sum]
  reads x[i, m]
  body x
output y
""",
    "Stddev": """
graph stddev
input x: f32[16, 4096]
y: f32[16] = op [i: 16 | m: 4096 moments]
  reads x[i, m]
  body 1.0, x, 0.0
  then sqrt(acc2 / acc0)
output y
""",
}
