"""Attention as people write it: contraction, softmax, contraction, in IR text."""

from __future__ import annotations

HEAD = """graph attention
input q: f32[{b}, {h}, {s}, {d}]
input k: f32[{b}, {kv}, {n}, {d}]
input v: f32[{b}, {kv}, {n}, {e}]
"""
SOFTMAX = """top: f32[{b}, {h}, {s}], total: f32[{b}, {h}, {s}] = op [b: {b}, h: {h}, i: {s} | n: {n} logsumexp]
  reads w[b, h, i, n]
  body w, 1.0{kept}
p: f32[{b}, {h}, {s}, {n}] = op [b: {b}, h: {h}, i: {s}, n: {n}]
  reads w[b, h, i, n], top[b, h, i], total[b, h, i]
  body {weight}
y: f32[{b}, {h}, {s}, {e}] = op [b: {b}, h: {h}, i: {s}, e: {e} | n: {n} sum]
  reads p[b, h, i, n], v[b, {group}, n, e]
  body p * v
output y
"""
PLAIN = "exp((w - top)) / total"
GUARDED = f"where(isnan(({PLAIN})), 0.0, ({PLAIN}))"
KEPT = "\n  then where(eq(acc0, f32(-inf)), 0.0, acc0), acc1"
SCORES = """w: f32[{b}, {h}, {s}, {n}] = op [b: {b}, h: {h}, i: {s}, n: {n} | m: {d} sum]
  reads q[b, h, i, m], k[b, {group}, n, m]{reads}
  body q * k
  then {then}
"""


def attention(
    then: str = "acc0 * 0.25", *, reads: str = "", inputs: str = "", weight: str = PLAIN, kept: str = "", b: int = 2, h: int = 4,
    kv: int = 2, s: int = 7, n: int = 9, d: int = 6, e: int = 5,
) -> str:  # fmt: skip
    """A graph of q (b, h, s, d), k (b, kv, n, d), v (b, kv, n, e); ``then`` makes scores of ``acc0``."""
    group = "h" if h == kv else f"floor((h)/{h // kv})"
    values = {
        "b": b, "h": h, "kv": kv, "s": s, "n": n, "d": d, "e": e, "group": group, "then": then, "reads": reads, "weight": weight,
        "kept": kept,
    }  # fmt: skip
    return (HEAD + inputs + SCORES + SOFTMAX).format(**values)


CAUSAL = "where(ge(index(i - n + 2), 0), (acc0 * 0.25), f32(-inf))"
CASES = {
    "plain": attention(),
    "divided": attention("acc0 / 4.0"),
    "one head each": attention(h=2),
    "causal": attention(CAUSAL),
    "causal, empty rows": attention("where(ge(index(i - n - 2), 0), acc0, f32(-inf))", kept=KEPT),
    "causal, empty rows are NaN": attention("where(ge(index(i - n - 2), 0), acc0, f32(-inf))"),
    "window": attention("where(and(ge(index(i - n + 1), 0), le(index(i - n), 2)), (acc0 * 0.25), f32(-inf))", s=9),
    "bias": attention("(acc0 * 0.25) + c", reads=", c[h, i, n]", inputs="input c: f32[{h}, {s}, {n}]\n"),
    "bias, guarded": attention("acc0 + c", reads=", c[i, n]", inputs="input c: f32[{s}, {n}]\n", weight=GUARDED),
    "boolean mask": attention("where(c, acc0, f32(-inf))", reads=", c[b, n]", inputs="input c: bool[{b}, {n}]\n", kept=KEPT),
    "soft-capped": attention("5.0 * tanh((acc0 / 5.0))"),
    "scaled after the bias": attention("(acc0 + c) * 0.25", reads=", c[i, n]", inputs="input c: f32[{s}, {n}]\n"),
    "decode": attention(s=1, n=33),
    "cross": attention(s=3, n=17, e=6),
    "shifted by a number": attention("(acc0 * 0.25) + 0.5", d=8, e=8),
    "same widths": attention(CAUSAL, d=8, e=8, s=11, n=13),
}
