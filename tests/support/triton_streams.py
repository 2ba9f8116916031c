"""Streaming sums (attention) as one operation each, in IR text, for generated kernels."""

from __future__ import annotations

from tests.support.triton_kernels import check, kernel_of, poisoned_lanes  # noqa: F401


def attention(dtype: str, score: str, heads: tuple[int, int], extents: tuple[int, int], width: int) -> str:
    (q, kv), (rows, keys) = heads, extents
    wide = (lambda x: x) if dtype == "f32" else (lambda x: f"cast({x}, f32)")
    return f"""graph g input q: {dtype}[2, {q}, {rows}, {width}] input k: {dtype}[2, {kv}, {keys}, {width}]
        input v: {dtype}[2, {kv}, {keys}, {width}]
        y: {dtype}[2, {q}, {rows}, {width}] = op [b: 2, h: {q}, i: {rows}, e: {width} | n: {keys} softsum]
          reads q[b, h, i, m], k[b, floor((h)/{q // kv}), n, m], v[b, floor((h)/{q // kv}), n, e]
          let [m: {width} sum] {wide("q")} * {wide("k")}
          body {score}, 1.0, {wide("v")} then {"acc2 / acc1" if dtype == "f32" else f"cast((acc2 / acc1), {dtype})"}
        output y"""


PLAIN = "let0 * 0.125"
CAUSAL = "where(ge(index(i - n{d}), 0), (let0 * 0.125), f32(-inf))"
WINDOW = "where(and(ge(index(i - n), 0), ge(index(n - i + 9), 0)), let0 / 4.0, f32(-inf))"
STREAMS = {
    "plain": attention("bf16", PLAIN, (4, 2), (37, 83), 24),
    "causal": attention("bf16", CAUSAL.format(d=""), (2, 2), (70, 70), 16),
    "causal, f32": attention("f32", CAUSAL.format(d=""), (2, 1), (50, 50), 16),
    "causal, more keys than queries": attention("f32", CAUSAL.format(d=" + 29"), (2, 1), (37, 66), 8),
    "causal, keys that nobody sees": attention("f32", CAUSAL.format(d=" - 5"), (2, 1), (64, 64), 8).replace(
        "acc2 / acc1", "where(gt(acc0, f32(-inf)), acc2 / acc1, 0.0)"
    ),
    "window": attention("bf16", WINDOW, (2, 1), (66, 66), 16),
    "one query for eight heads": attention("bf16", PLAIN, (8, 2), (1, 96), 32),
    "three queries, causal": attention("bf16", CAUSAL.format(d=" + 93"), (8, 2), (3, 96), 32),
    "bias in place of a scale": attention("f32", "(let0 * 0.5) + 1.0", (2, 1), (17, 40), 8),
}
