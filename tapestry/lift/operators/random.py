"""Random operators, counter-based: a value is a function of a key and the element's row-major index, nothing else.

Any split, order or device gives the same bits, and so do all targets: logarithm and cosine are built here from
exactly rounded primitives alone, because no two libraries' agree. Sub-results that are used several times are tensors
of their own, since bodies are trees.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from tapestry.ir.expr import Arg, Const, Expr, Index, call, cast, literal, number
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, const, dim
from tapestry.lift.builder import Node, Operand, axes, here
from tapestry.lift.file.protos import SOURCE
from tapestry.lift.registry import lifts

BITS = 24  # of a uniform number: what an f32 holds exactly


def key_of(n: Node) -> int:
    """The node's key: 63 bits from the session's seed, the node's name and its ``seed`` attribute."""
    text = f"{n.b.seed}|{n.attr(SOURCE, n.source)}|{n.attr('seed', None)!r}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def row_major(dims: Sequence[Dim]) -> Aff:
    """Index of an element in the whole tensor."""
    flat = const(0)
    for d in dims:
        flat = flat * d.size + dim(d.name)
    return flat


def bits(n: Node, dims: Sequence[Dim], word: int = 0) -> Expr:
    """The top bits of one output word of Philox for an element, as an i64 in [0, 2^BITS)."""
    return call("shr", call("philox", key_of(n), 0, 0, word, Index(row_major(dims))), 32 - BITS)


def uniform(n: Node, dims: Sequence[Dim]) -> Expr:
    """An f32 in [0, 1), a multiple of 2^-24."""
    return cast(bits(n, dims), "f32") * 2.0**-BITS


def _polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's rule, from the highest coefficient (given last)."""
    total: Expr = number(coefficients[-1], x.dtype)
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def _exponent(x: Expr) -> Expr:
    """The k in [0, BITS] for which x / 2^k is in [sqrt(1/2), sqrt(2)), by counting thresholds below an i64."""
    total: Expr = number(0, "i64")
    for k in range(1, BITS + 1):
        total += cast(call("ge", x, math.ceil(2.0**k * math.sqrt(0.5))), "i64")
    return total


def _atanh_argument(x: Expr, k: Expr) -> Expr:
    """(f - 1) / (f + 1) for f = x / 2^k; the division by a power of two is exact."""
    power = call("shl", 1, BITS - k)
    f = cast(x * power, "f32") * 2.0**-BITS
    return (f - 1) / (f + 1)


def _log(t: Expr, k: Expr) -> Expr:
    """ln(2^(k - BITS) * f) from t = (f - 1) / (f + 1): 2 atanh(t) + (k - BITS) ln 2; |t| <= 0.172."""
    series = 2 * t * _polynomial(t * t, [1 / (2 * i + 1) for i in range(6)])
    whole = cast(k - BITS, "f32") * math.log(2)
    return whole + series


def _cosine(quadrant: Expr, a: Expr) -> Expr:
    """cos(quadrant * pi/2 + a) for |a| <= pi/4."""
    square = a * a
    cos = _polynomial(square, [(-1) ** i / math.factorial(2 * i) for i in range(6)])
    sin = a * _polynomial(square, [(-1) ** i / math.factorial(2 * i + 1) for i in range(5)])
    turn = quadrant & 3
    flat = call("eq", turn & 1, 0)
    value = call("where", flat, cos, sin)
    sign = call("eq", turn, 1) | call("eq", turn, 2)
    return call("where", sign, -value, value)


def emit_uniform(n: Node, dims: Sequence[Dim]) -> None:
    """low + u * (high - low)."""
    low, high, out = float(n.attr("low", 0.0)), float(n.attr("high", 1.0)), n.out()
    u = uniform(n, dims)
    value = u if (low, high) == (0.0, 1.0) else low + u * (high - low)
    n.block(out, dims, [], cast(value, out.dtype))


def emit_normal(n: Node, dims: Sequence[Dim]) -> None:
    """Box-Muller on words 0 and 1 of one counter: mean + scale * sqrt(-2 ln u) * cos(2 pi v), u in (0, 1]."""
    base, out, spots = n.outs[0], n.out(), here(dims)
    first = n.block(n.temp("u"), dims, [], bits(n, dims, 0) + 1)
    second = n.block(n.temp("v"), dims, [], bits(n, dims, 1))
    read = n.read(first, spots)
    k = n.block(n.b.fresh(f"{base}.k"), dims, [read], _exponent)
    t = n.block(n.b.fresh(f"{base}.t"), dims, [read, n.read(k, spots)], _atanh_argument)
    quarter = BITS - 2

    def nearest(v: Expr) -> Expr:
        return call("shr", v + (1 << (quarter - 1)), quarter)

    def angle(v: Expr) -> Expr:
        rest = v - call("shl", nearest(v), quarter)
        return cast(rest, "f32") * (2 * math.pi * 2.0**-BITS)

    a = n.block(n.temp("a"), dims, [n.read(second, spots)], angle)
    mean, scale = float(n.attr("mean", 0.0)), float(n.attr("scale", 1.0))

    def value(t: Expr, k: Expr, v: Expr, a: Expr) -> Expr:
        radius = call("sqrt", -2 * _log(t, k))
        z = radius * _cosine(nearest(v), a)
        z = z if scale == 1.0 else scale * z
        return cast(z if mean == 0.0 else mean + z, out.dtype)

    n.block(out, dims, [n.read(name, spots) for name in (t, k, second, a)], value)


@lifts("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike")
def lift_random(n: Node) -> None:
    """A tensor of random numbers; the -Like forms take shape (and dtype, unless given) from their input."""
    (emit_uniform if "Uniform" in n.kind else emit_normal)(n, n.out_dims())


def _below(n: Node, dims: Sequence[Dim], p: Expr) -> Expr:
    """True with probability p: an integer comparison where p is known, an exact one of floats where it is not."""
    if isinstance(p, Const):
        return call("lt", bits(n, dims), math.ceil(float(p.value) * 2**BITS))
    u = uniform(n, dims)
    return call("lt", u, cast(p, "f32")) if p.dtype != "f64" else call("lt", cast(u, "f64"), p)


@lifts("Bernoulli", since=15)
def lift_bernoulli(n: Node) -> None:
    """1 with the probability given at each element."""
    dims, reads = n.out_dims(), list[Operand]()
    p = n.operand(0, dims, reads)
    n.block(n.out(), dims, reads, cast(_below(n, dims, p), n.out().dtype))


@lifts("Dropout")
def lift_dropout(n: Node) -> None:
    """The identity, unless training: then elements are dropped with probability ``ratio`` and the rest scaled up."""
    x, dims = n.tensor(0), axes(n.shape(0))
    flag = n.const(2) if n.version >= 12 and n.has(2) else None
    asked = n.version >= 12 and n.has(2) and flag is None  # at run time
    training = (n.version < 7 and not n.attr("is_test", 0)) or asked or (flag is not None and bool(flag.reshape(-1)[0]))
    reads = [n.read(x.name, dims)]
    given = n.version >= 12 and n.has(1)
    ratio = n.operand(1, dims, reads) if given else literal(float(n.attr("ratio", 0.5)), x.dtype)
    if not training or (isinstance(ratio, Const) and ratio.value == 0):
        n.view(n.out(), x.name, dims, dims)
        if n.wants(1):
            n.block(n.out(1), dims, [], number(1, n.out(1).dtype))
        return
    keep, scale = ~_below(n, dims, ratio), _kept_scale(ratio, x.dtype)
    if asked:
        reads.append(n.read(n.ins[2], [const(0)] * len(n.shape(2))))
        idle = ~Arg(len(reads) - 1, "bool")
        keep, scale = keep | idle, call("where", idle, 1, scale)
    n.block(n.out(), dims, reads, call("where", keep, Arg(0, x.dtype) * scale, 0))
    if n.wants(1):
        n.block(n.out(1), dims, reads, cast(keep, n.out(1).dtype))


def _kept_scale(ratio: Expr, dtype: str) -> Expr:
    """1 / (1 - ratio)."""
    if isinstance(ratio, Const):
        return literal(1 / (1 - float(ratio.value)), dtype)
    return cast(1 / (1 - ratio), dtype)
