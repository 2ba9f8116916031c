"""Operations to measure, as texts of the IR in the forms that plans have: a class of kernels at several sizes.

Every probe is one operation, written ``copies`` times with weights of its own, so that these come from where a model's come
from: a real model's weights do not stay in a core's cache between two uses.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnx import helper

from tapestry.ir.graph import Graph
from tapestry.ir.syntax.parser import parse
from tapestry.ir.types import itemsize
from tapestry.plan.cost.kernel_class import FEW
from tapestry.runtime.calibration.machine import last_cache

COLD = 2 * last_cache()  # bytes of weights in all copies of a probe, where a probe has any
COPIES = 12  # with the weights of what runs between them (`kernel_clock`), as many bytes
GELU = "(acc0 + b) * (0.5 * (erf(((acc0 + b) / 1.4142135381698608)) + 1.0))"


@dataclass(frozen=True)
class Probe:
    """An operation.

    Attributes:
        tensors: inputs, and after ``/`` weights: ``x: f32[4, 8] / w: f32[8, 8]``.
        op: of one output ``y``.
    """

    kind: str
    tensors: str
    op: str
    dtype: str = "f32"

    @cached_property
    def graph(self) -> Graph:
        """The operation as often as `COLD` weights allow, over the same inputs and weights of each copy's own."""
        one = parse(f"graph probe\n{self._declared(0)}{self.op.replace('@', '0')}\noutput y0\n")
        size = sum(t.size * itemsize(t.dtype) for n, t in one.tensors.items() if n in one.weights)
        copies = max(1, min(COPIES, COLD // size)) if size else 1
        ops = "\n".join(self.op.replace("@", str(k)) for k in range(copies))
        outs = ", ".join(f"y{k}" for k in range(copies))
        return parse(f"graph probe\n{self._declared(copies - 1)}{ops}\noutput {outs}\n")

    def _declared(self, last: int) -> str:
        inputs, _, weights = self.tensors.partition(" / ")
        lines = [f"input {t}" for t in inputs.split("; ")]
        for k in range(last + 1):
            lines += [f'weight {t.replace("@", str(k))} at "" 0 0 "" ""' for t in weights.split("; ") if t]
        return "\n".join(lines) + "\n"


def _product_probe(m: int, k: int, n: int, dtype: str = "f32", then: str = "") -> Probe:
    """x[m, k] · w[k, n], with a bias and perhaps more in ``then``."""
    tail = f", b = b@[n]\n  body x * w\n  then {then}" if then else "\n  body x * w"
    op = f"y@: {dtype}[{m}, {n}] = op [i: {m}, n: {n} | m: {k} sum]\n  reads x[i, m], w = w@[m, n]{tail}"
    return Probe("contraction", f"x: {dtype}[{m}, {k}] / w@: {dtype}[{k}, {n}]" + f"; b@: {dtype}[{n}]" * bool(then), op, dtype)


def _three(m: int, k: int, n: int) -> Probe:
    """Three products of one matrix, as of queries, keys and values."""
    shape = f"f32[{m}, {n}]"
    op = (
        f"p@: {shape}, q@: {shape}, y@: {shape} = op [i: {m}, n: {n} | m: {k} sums3]\n"
        "  reads x[i, m], u = u@[m, n], v = v@[m, n], w = w@[m, n]\n  body x * u, x * v, x * w"
    )
    return Probe("contraction", f"x: f32[{m}, {k}] / " + "; ".join(f"{w}@: f32[{k}, {n}]" for w in "uvw"), op)


def _attention(b: int, heads: int, queries: int, keys: int, *, masked: bool = False) -> Probe:
    """Softmax of q · kᵀ, times v, 64 features a head; ``masked``: with numbers added to the scores, rows of which may be -∞."""
    width = 64 * heads
    scores, then = "let0 * 0.125", "acc2 / acc1"
    if masked:
        scores, then = f"({scores}) + a", f"where(isnan(acc0 - acc0), acc0 - acc0, {then})"
    op = (
        f"y@: f32[{b}, {heads}, {queries}, 64] = op [b0: {b}, b1: {heads}, i: {queries}, n: 64 | m: {keys} softsum]\n"
        f"  reads v[b0, m, 64*b1 + n], q[b0, i, 64*b1 + c], k[b0, m, 64*b1 + c]{', a[b0, b1, i, m]' * masked}\n"
        f"  let [c: 64 sum] q * k\n  body {scores}, 1.0, v\n  then {then}"
    )
    added = f"; a: f32[{b}, {heads}, {queries}, {keys}]" * masked
    kind = "attention" if queries > FEW else "decoding"
    return Probe(
        kind, f"q: f32[{b}, {queries}, {width}]; k: f32[{b}, {keys}, {width}]; v: f32[{b}, {keys}, {width}]{added}", op
    )


def _scored(b: int, heads: int, queries: int, keys: int, *, causal: bool = False) -> Probe:
    """Attention with numbers added to those scores alone that a comparison of places, or another tensor, lets stand."""
    width = 64 * heads
    stands = "le(index(m), index(i))" if causal else "gt(z, 0)"
    op = (
        f"y@: f32[{b}, {heads}, {queries}, 64] = op [b0: {b}, b1: {heads}, i: {queries}, n: 64 | m: {keys} softsum]\n"
        f"  reads v[b0, m, 64*b1 + n], q[b0, i, 64*b1 + c], k[b0, m, 64*b1 + c], a[i, m, b1]{', z[b0, m]' * (not causal)}\n"
        f"  let [c: 64 sum] q * k\n  body let0 + where({stands}, a, f32(-3.4028234663852886e+38)), 1.0, v\n"
        "  then where(isnan(acc0 - acc0), acc0 - acc0, acc2 / acc1)"
    )
    mask = f"; z: i64[{b}, {keys}]" * (not causal)
    rows = f"q: f32[{b}, {queries}, {width}]; k: f32[{b}, {keys}, {width}]; v: f32[{b}, {keys}, {width}]"
    return Probe("scored", f"{rows}; a: f32[{queries}, {keys}, {heads}]{mask}", op)


def _rotated(b: int, heads: int, keyed: int, rows: int, width: int) -> Probe:
    """Attention whose queries are rotated by their places in it, ``heads / keyed`` heads with the same keys and values."""
    half, each = width // 2, heads // keyed
    at = f"b0, i, {width}*b1 + c"
    op = (
        f"y@: f32[{b}, {heads}, {rows}, {width}] = op [b0: {b}, b1: {heads}, i: {rows}, n: {width} | m: {rows} softsum]\n"
        f"  reads v[b0, m, n + {width}*floor((b1)/{each})], k[b0, floor((b1)/{each}), m, c], f[i, c], g[i, c], q[{at}], "
        f"p = q[{at} - {half}] when c - {half} >= 0 else 0.0, r = q[{at} + {half}] when -c + {half - 1} >= 0 else 0.0\n"
        f"  let [c: {width} sum] ((q * f) + (where(lt(index(c), {half}), neg(r), p) * g)) * k\n"
        "  body (let0 * 0.125), 1.0, v\n  then acc2 / acc1"
    )
    table, keys = f"f32[{rows}, {width}]", f"f32[{b}, {keyed}, {rows}, {width}]"
    values, queries = (f"f32[{b}, {rows}, {n * width}]" for n in (keyed, heads))
    return Probe("computed", f"v: {values}; k: {keys}; f: {table}; g: {table}; q: {queries}", op)


def _convolution(b: int, c: int, o: int, side: int, window: int) -> Probe:
    """Same-size convolution with bias and ReLU."""
    pad = window // 2
    place = f"h + r - {pad}, s + w_ - {pad}" if pad else "h + r, s + w_"
    other = " else 0.0" if pad else ""
    op = (
        f"y@: f32[{b}, {o}, {side}, {side}] = op [b: {b}, o: {o}, h: {side}, w_: {side} | c: {c} sum, r: {window} sum, s: "
        f"{window} sum]\n  reads x[b, c, {place}]{other}, w = w@[o, c, r, s], b_ = b@[o]\n"
        "  body x * w\n  then max((acc0 + b_), 0.0)"
    )
    return Probe("convolution", f"x: f32[{b}, {c}, {side}, {side}] / w@: f32[{o}, {c}, {window}, {window}]; b@: f32[{o}]", op)


def _unfolded(c: int, o: int, dims: Mapping[str, int], x: Sequence[int], place: str) -> Probe:
    """A convolution by 3 × 3 with ReLU, of images that have strips of rows as an axis, or get one.

    Args:
        dims: output dimensions after batch and features.
        x: extents of an image after batch and channels.
        place: where along these it is read, and what it is elsewhere.
    """
    extents, names = ", ".join(map(str, dims.values())), ", ".join(f"{d}: {n}" for d, n in dims.items())
    op = (
        f"y@: f32[1, {o}, {extents}] = op [b: 1, o: {o}, {names} | c: {c} sum, r: 3 sum, s: 3 sum]\n"
        f"  reads x[b, c, {place}, w = w@[o, c, r, s]\n  body x * w\n  then max(acc0, 0.0)"
    )
    return Probe("unfolded", f"x: f32[1, {c}, {', '.join(map(str, x))}] / w@: f32[{o}, {c}, 3, 3]", op)


def _strips(c: int, o: int, side: int, parts: int) -> Probe:
    """Over the overlapping strips that an image was made in."""
    rows = side // parts
    place = f"floor((h)/{rows}), r + ((h) mod {rows}), s + w_ - 1] when h + r - 1 >= 0 when -h - r + {side} >= 0 else 0.0"
    return _unfolded(c, o, {"h": side, "w_": side}, (parts, rows + 2, side), place)


def _into_strips(c: int, o: int, side: int, parts: int) -> Probe:
    rows = side // parts
    place = f"{rows}*k + p + r - 2, s + w_ - 1] else 0.0"
    return _unfolded(c, o, {"k": parts, "p": rows + 2, "w_": side}, (side, side), place)


def _norm(rows: int, width: int) -> Probe:
    op = (
        f"y@: f32[{rows}, {width}] = op [i: {rows}, n: {width} | m: {width} moments]\n"
        "  reads x[i, m], z = x[i, n], g = g@[n], b = b@[n]\n  body 1.0, x, 0.0\n"
        "  then (((z - acc1) * (1.0 / sqrt(((acc2 / acc0) + 1e-05)))) * g) + b"
    )
    return Probe("row", f"x: f32[{rows}, {width}] / g@: f32[{width}]; b@: f32[{width}]", op)


def _softmax(rows: int, width: int) -> Probe:
    op = (
        f"y@: f32[{rows}, {width}] = op [i: {rows}, n: {width} | m: {width} logsumexp]\n"
        "  reads x[i, m], z = x[i, n]\n  body x, 1.0\n  then exp((z - acc0)) / acc1"
    )
    return Probe("softmax", f"x: f32[{rows}, {width}]", op)


def _sum_probe(rows: int, width: int) -> Probe:
    op = f"y@: f32[{rows}] = op [i: {rows} | m: {width} sum]\n  reads x[i, m]\n  body x"
    return Probe("row", f"x: f32[{rows}, {width}]", op)


def _map(rows: int, width: int, body: str) -> Probe:
    both = "x[i, n], z[i, n]" if "z" in body else "x[n, i]" if body == "x" else "x[i, n]"
    tensors = f"x: f32[{width}, {rows}]" if body == "x" else f"x: f32[{rows}, {width}]"
    op = f"y@: f32[{rows}, {width}] = op [i: {rows}, n: {width}]\n  reads {both}\n  body {body}"
    return Probe("map", tensors + f"; z: f32[{rows}, {width}]" * ("z" in body), op)


def _gather(rows: int, table: int, width: int) -> Probe:
    op = (
        f"y@: f32[{rows}, {width}] = op [i: {rows}, n: {width} | v: {table} sum]\n  reads t[v, n], ids[i]\n"
        "  body where(eq(ids, index(v)), t, 0.0)"
    )
    return Probe("gather", f"ids: i64[{rows}]; t: f32[{table}, {width}]", op)


def _opaque(rows: int, width: int) -> Probe:
    """The largest of every row as the ONNX node; the number that is wanted comes as an input, as in a model."""
    node = helper.make_node("TopK", ["in0", "in1"], ["out0", "out1"], axis=-1)
    text = base64.b64encode(node.SerializeToString()).decode()
    op = (
        f"y@: f32[{rows}, 1], n@: i64[{rows}, 1] = opaque TopK [i: {rows}]\n  reads x[0], k[_]\n  writes y@[0], n@[0]\n"
        f'  node "{text}"\n  opsets "" 20\n  why "selects by value"'
    )
    return Probe("opaque", f"x: f32[{rows}, {width}]; k: i64[1]", op)


def probes() -> Iterator[Probe]:
    """All that ``calibrate`` measures: sizes of layers of small and medium models, cut into parts or not."""
    for m, k, n in (
        (1, 64, 64),
        (8, 64, 256),
        (32, 128, 128),
        (1, 768, 768),
        (1, 768, 3072),
        (1, 3072, 768),
        (4, 768, 768),
        (16, 768, 384),
        (16, 768, 3072),
        (64, 192, 768),
        (64, 768, 768),
        (64, 3072, 384),
        (256, 768, 192),
        (256, 768, 1536),
        (256, 1536, 768),
        (512, 768, 3072),
        (768, 768, 768),
        (4, 768, 16001),
        (64, 512, 16001),
    ):
        yield _product_probe(m, k, n)
    yield from (_product_probe(m, 768, n, then=GELU) for m, n in ((1, 3072), (64, 1536), (256, 3072)))
    yield from (_three(m, 768, n) for m, n in ((1, 384), (64, 768), (256, 384)))
    yield from (_attention(*s) for s in ((1, 4, 16, 16), (1, 6, 64, 64), (4, 12, 64, 64), (1, 12, 128, 128)))
    yield from (_attention(*s) for s in ((1, 4, 1, 16), (1, 12, 1, 128), (4, 12, 1, 256), (1, 32, 4, 512)))
    yield from (_attention(*s, masked=True) for s in ((1, 4, 16, 16), (2, 8, 16, 32), (1, 12, 64, 64), (4, 8, 128, 128)))
    yield from (_scored(*s) for s in ((1, 4, 16, 16), (2, 8, 32, 32), (4, 8, 32, 32), (1, 12, 128, 128)))
    yield from (_scored(*s, causal=True) for s in ((2, 8, 16, 16), (1, 12, 64, 64), (4, 12, 64, 64)))
    yield from (
        _rotated(*s) for s in ((1, 4, 2, 16, 16), (1, 8, 4, 32, 32), (1, 8, 8, 1, 64), (1, 12, 12, 64, 64), (1, 8, 8, 128, 64))
    )
    for b, c, o, side, window in (
        (1, 64, 64, 56, 1),
        (1, 256, 64, 28, 1),
        (4, 128, 512, 14, 1),
        (1, 64, 64, 28, 3),
        (1, 128, 128, 28, 3),
        (4, 64, 64, 14, 3),
        (1, 256, 256, 7, 3),
        (1, 32, 64, 56, 3),
        (1, 16, 16, 14, 3),
    ):
        yield _convolution(b, c, o, side, window)
    yield from (_strips(*s) for s in ((16, 16, 14, 2), (64, 64, 14, 2), (256, 128, 14, 2), (32, 16, 56, 4)))
    yield from (_into_strips(*s) for s in ((8, 16, 14, 2), (64, 64, 28, 2), (128, 128, 14, 2)))
    yield from (_norm(rows, 768) for rows in (1, 16, 64, 256, 1024))
    yield from (_softmax(rows, n) for rows, n in ((16, 64), (192, 128), (1536, 64), (3072, 128), (64, 8192), (4, 32768)))
    yield from (_sum_probe(rows, n) for rows, n in ((64, 64), (256, 768), (2048, 768)))
    for body in ("x + z", "x", "tanh(x)"):
        yield from (_map(rows, n, body) for rows, n in ((8, 64), (64, 768), (256, 768), (512, 3072)))
    yield from (_gather(rows, 8192, 768) for rows in (1, 16, 64, 256, 1024))
    yield from (_opaque(rows, n) for rows, n in ((1, 1024), (16, 1024), (64, 4096), (256, 4096)))


def few_probes() -> Iterator[Probe]:
    """Up to six of every class, the first and the last among them."""
    of: dict[str, list[Probe]] = {}
    for p in probes():
        of.setdefault(p.kind, []).append(p)
    for found in of.values():
        yield from (found[k] for k in sorted({i * (len(found) - 1) // 5 for i in range(6)}))


def rates_by_dtype() -> Iterator[Probe]:
    """One product per dtype of floats, to compare them."""
    for dtype in ("f32", "f64", "f16", "bf16"):
        yield _product_probe(256, 768, 768, dtype)


def between() -> Probe:
    """A kernel that runs before what is measured in place; it takes about as long as a transfer of some hundred kilobytes."""
    return _product_probe(64, 768, 768)
