"""MatMul and Gemm: sums of products, ``i, n | m`` with batch dimensions ``b0, b1, …``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tapestry.ir.expr import Acc, Arg, Const, Expr, call, cast
from tapestry.ir.graph import Dim, Read
from tapestry.ir.index import Aff, const, dim, floordiv
from tapestry.ir.monoid import number
from tapestry.ir.types import FLOAT8, Tensor
from tapestry.lift.builder import Declined, Node, Operand, accumulator, axes, broadcast, here, lifts, literal


def product(a: Tensor, b: Tensor) -> Expr:
    """``Arg(0) * Arg(1)`` in the dtype that sums over them accumulate in."""
    wide = accumulator(a.dtype)
    return call("mul", cast(Arg(0, a.dtype), wide), cast(Arg(1, b.dtype), wide))


def contract(
    n: Node, out: str | Tensor, dims: Sequence[Dim], reduced: Sequence[Dim], a: Operand, b: Operand,
    *, scale: float = 1.0, bias: Operand | None = None, bias_scale: float = 1.0, dtype: str = "",
    more: Sequence[Operand] = (), after: Callable[[Expr], Expr] | None = None,
) -> str:  # fmt: skip
    """Emit ``scale * sum(a * b) + bias_scale * bias``; scales of 1 leave no trace, 16-bit floats accumulate in f32.

    Args:
        more: further reads, by map dimensions alone, for ``after``: ``Arg(2)`` on (``Arg(3)`` on with a bias).
        after: what to do with the sum before it is cast to the result's dtype.
    """
    body = product(a[1], b[1])
    result = dtype or a[1].dtype
    total: Expr = Acc(0, body.dtype)
    if scale != 1.0:
        total = call("mul", total, literal(scale, body.dtype))
    reads = [a, b]
    if bias is not None:
        reads.append(bias)
        shift = cast(Arg(2, bias[1].dtype), body.dtype)
        total = call("add", total, call("mul", shift, literal(bias_scale, body.dtype)) if bias_scale != 1.0 else shift)
    reads += more
    total = cast(after(total) if after else total, result)
    then = () if isinstance(total, Acc) else (total,)
    name = out.name if isinstance(out, Tensor) else out
    return n.reduce([name], dims, reduced, "sum", reads, [body], then)[0]


@lifts("MatMul")
def lift_matmul(n: Node) -> None:
    """numpy's matmul: vectors lose their dimension, leading axes broadcast."""
    a, b = n.tensor(0), n.tensor(1)
    batch = axes(n.out().shape[: len(n.out().shape) - (len(a.shape) > 1) - (len(b.shape) > 1)], "b")
    m = Dim("m", a.shape[-1])
    rows = [Dim("i", a.shape[-2])] if len(a.shape) > 1 else []
    columns = [Dim("n", b.shape[-1])] if len(b.shape) > 1 else []
    left = [*broadcast(a.shape[:-2], batch), *(dim(d.name) for d in rows), dim("m")]
    right = [*broadcast(b.shape[:-2], batch), dim("m"), *(dim(d.name) for d in columns)]
    contract(n, n.out(), [*batch, *rows, *columns], [m], n.read(a.name, left), n.read(b.name, right))


@lifts("Gemm")
def lift_gemm(n: Node) -> None:
    """alpha * A' B' + beta * C, with transposition as a projection."""
    i, k = ("m", "i") if n.attr("transA", 0) else ("i", "m")
    a = n.read(n.ins[0], [dim(i), dim(k)])
    b = n.read(n.ins[1], [dim("n"), dim("m")] if n.attr("transB", 0) else [dim("m"), dim("n")])
    rows, columns = n.out().shape
    dims = (Dim("i", rows), Dim("n", columns))
    m = Dim("m", a[1].shape[1 if k == "m" else 0])
    beta = float(n.attr("beta", 1.0))
    bias = n.read(n.ins[2], broadcast(n.shape(2), dims)) if n.has(2) and beta != 0.0 else None
    contract(n, n.out(), dims, [m], a, b, scale=float(n.attr("alpha", 1.0)), bias=bias, bias_scale=beta)


# Einsum: sums of products whose dimensions are the letters of the equation, ``e0, e1, …`` for those under an ellipsis.


@dataclass(frozen=True, slots=True)
class Term:
    """One operand: a tensor, and the dimension along each of its axes ("" where it is broadcast)."""

    tensor: str
    axes: tuple[str, ...]


@lifts("Einsum")
def lift_einsum(n: Node) -> None:
    """Operands are contracted from the left, two by two; a letter goes once neither the result nor a later operand has it."""
    found = _terms(n)
    if found is None:
        raise Declined
    terms, out, sizes = found
    while len(terms) > 2:
        later = {a for t in terms[2:] for a in t.axes} | set(out)
        kept = tuple(dict.fromkeys(a for t in terms[:2] for a in t.axes if a in later))
        terms = [Term(_emit(n, n.temp("e"), terms[:2], kept, sizes, n.dtype()), kept), *terms[2:]]
    _emit(n, n.outs[0], terms, out, sizes, n.out().dtype)


def _terms(n: Node) -> tuple[list[Term], tuple[str, ...], dict[str, int]] | None:
    """Operands, dimensions of the result and sizes; ``None`` where the equation does not fit the shapes."""
    text = str(n.attr("equation", b"").decode() if isinstance(n.attr("equation", ""), bytes) else n.attr("equation", ""))
    text = re.sub(r"\s", "", text)
    left, arrow, right = text.partition("->")
    words = left.split(",")
    if len(words) != len(n.ins) or any(not re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", w) for w in (*words, right)):
        return None
    ranks = [len(n.shape(k)) - len(w.replace("...", "")) for k, w in enumerate(words) if "..." in w]
    most = max(ranks, default=0)
    sizes: dict[str, int] = {}
    terms: list[Term] = []
    for k, w in enumerate(words):
        shape = n.shape(k)
        axes = _axes(w, len(shape), most)
        if axes is None:
            return None
        for a, size in zip(axes, shape, strict=True):
            sizes[a] = size if sizes.get(a, 1) == 1 else sizes[a]
        terms.append(Term(n.ins[k], axes))
    for k, t in enumerate(terms):
        if any(s not in (1, sizes[a]) for a, s in zip(t.axes, n.shape(k), strict=True)):
            return None
        terms[k] = Term(t.tensor, tuple("" if s == 1 and sizes[a] > 1 else a for a, s in zip(t.axes, n.shape(k), strict=True)))
    covered = tuple(f"e{i}" for i in range(most))
    letters = "".join(words).replace("...", "")
    out = (*covered, *sorted(c for c in set(letters) if letters.count(c) == 1)) if not arrow else _axes(right, None, most)
    if out is None or len(set(out)) != len(out) or not set(out) <= set(sizes):
        return None
    return terms, out, sizes


def _axes(word: str, rank: int | None, most: int) -> tuple[str, ...] | None:
    """The dimension of every axis; an ellipsis stands for the last of the ``most`` covered ones."""
    head, dots, tail = word.partition("...")
    covered = (most if rank is None else rank - len(head) - len(tail)) if dots else 0
    if covered < 0 or (rank is not None and len(head) + len(tail) + covered != rank):
        return None
    return (*head, *(f"e{i}" for i in range(most - covered, most)), *tail)


def _emit(n: Node, out: str, terms: list[Term], kept: tuple[str, ...], sizes: dict[str, int], dtype: str) -> str:
    """Emit the product of one or two operands, summed over what is not kept."""
    reads: list[tuple[Read, Tensor]] = [n.read(t.tensor, [dim(a) if a else const(0) for a in t.axes]) for t in terms]
    gone = [a for a in dict.fromkeys(a for t in terms for a in t.axes if a) if a not in kept]
    dims = [Dim(a, sizes[a]) for a in kept]
    wide = accumulator(dtype) if gone else dtype
    values: list[Expr] = [cast(Arg(k, t.dtype), wide) for k, (_, t) in enumerate(reads)]
    body = values[0] if len(values) == 1 else call("mul", *values)
    if not gone:
        return n.block(out, dims, reads, body)
    then = [] if wide == dtype else [cast(Acc(0, wide), dtype)]
    return n.reduce([out], dims, [Dim(a, sizes[a]) for a in gone], "sum", reads, [body], then)[0]


# QuantizeLinear and DequantizeLinear on integers of 8 to 32 bits: cell by cell, scales read where their axis or block says.
#
# Floats of 8 bits are dequantised too; what makes them stays with ONNX.


RANGE = {"u8": (0, 255), "i8": (-128, 127), "u16": (0, 65535), "i16": (-32768, 32767)}
REAL = ("f32", "f16", "bf16")


@lifts("DequantizeLinear")
def lift_dequantize(n: Node) -> None:
    """(x - zero point) * scale, in the dtype of the scale, or in f32 if that is shorter."""
    x, y = n.tensor(0), n.out()
    if x.dtype not in (*RANGE, "i32", *FLOAT8) or n.dtype(1) not in REAL or y.dtype not in REAL:
        raise Declined
    dims = n.out_dims()
    spot = _place(n, dims)
    if spot is None:
        raise Declined
    small = x.dtype in FLOAT8
    if small and n.has(2) and ((zero := n.const(2)) is None or np.any(zero.astype(np.float32))):
        raise Declined  # ONNX allows no zero point of such a type but 0
    told, read = ([], []) if small else _zero(n, spot)
    reads = [n.read(x.name, here(dims)), n.read(n.ins[1], spot), *read]
    wide = "i64" if x.dtype == "i32" else "i32"  # differences of 32 bits may need one more

    def body(v: Expr, scale: Expr, *zero: Expr) -> Expr:
        z = next(iter((*told, *zero)), None)
        shifted = call("sub", cast(v, wide), _as(z, wide)) if z is not None else v
        return cast(call("mul", cast(shifted, "f32"), cast(scale, "f32")), y.dtype)

    n.block(y, dims, reads, body)


@lifts("QuantizeLinear")
def lift_quantize(n: Node) -> None:
    """saturate(round(x / scale) + zero point), in f32, half to even."""
    x, y = n.tensor(0), n.out()
    if x.dtype not in (*REAL, "i32") or y.dtype not in RANGE or n.dtype(1) not in REAL or n.attr("precision", 0) not in (0, 1):
        raise Declined
    dims = n.out_dims()
    spot = _place(n, dims)
    if spot is None:
        raise Declined

    def body(v: Expr, scale: Expr, *zero: Expr) -> Expr:
        whole: Expr = call("round", call("div", cast(v, "f32"), cast(scale, "f32")))
        return saturated(whole, next(iter((*told, *zero)), None), y.dtype)

    told, read = _zero(n, spot)
    n.block(y, dims, [n.read(x.name, here(dims)), n.read(n.ins[1], spot), *read], body)


@lifts("DynamicQuantizeLinear")
def lift_dynamic(n: Node) -> None:
    """To u8 by the least and greatest value, 0 among them; a scale of 1 where all are 0, as in onnxruntime."""
    x = n.tensor(0)
    if x.dtype != "f32" or x.size == 0:
        raise Declined
    dims, zero = axes(x.shape), number(0, "f32")
    ends = [
        n.reduce(
            [n.temp(name)], (), dims, name, [n.read(x.name, here(dims))], [Arg(0, "f32")], [call(name, Acc(0, "f32"), zero)]
        )[0]
        for name in ("max", "min")
    ]
    ranged = [n.read(e, ()) for e in ends]

    def size(high: Expr, low: Expr) -> Expr:
        found = call("div", call("sub", high, low), literal(255, "f32"))
        return call("where", call("eq", high, low), number(1, "f32"), found)

    def origin(low: Expr, scale: Expr) -> Expr:
        return saturated(call("round", call("sub", zero, call("div", low, scale))), None, "u8")

    scale = n.block(n.out(1) if n.wants(1) else n.temp("scale"), (), ranged, size)
    spot = n.block(n.out(2) if n.wants(2) else n.temp("zero"), (), [ranged[1], n.read(scale, ())], origin)

    def body(v: Expr, by: Expr, at: Expr) -> Expr:
        return saturated(call("round", call("div", v, by)), at, "u8")

    n.block(n.out(), dims, [n.read(x.name, here(dims)), n.read(scale, ()), n.read(spot, ())], body)


def _as(zero: Expr, dtype: str) -> Expr:
    """A zero point in another dtype."""
    return number(zero.value, dtype) if isinstance(zero, Const) else cast(zero, dtype)


def saturated(whole: Expr, zero: Expr | None, dtype: str) -> Expr:
    """A rounded f32, less any zero point, as an integer of 8 or 16 bits."""
    low, high = (literal(v, "f32") for v in RANGE[dtype])
    whole = call("add", whole, _as(zero, "f32")) if zero is not None else whole
    kept = call("min", call("max", whole, low), high)
    # nothing says what a NaN becomes; a cast of it would differ between processors
    return cast(cast(call("where", call("isnan", whole), number(0, "f32"), kept), "i32"), dtype)


def _zero(n: Node, spot: list[Aff]) -> tuple[list[Expr], list[Operand]]:
    """The zero point, if it is not 0, as a literal where it is one known number; else (nothing, its read)."""
    if not n.has(2):
        return [], []
    zero = n.const(2)
    if zero is None or zero.size == 0 or np.any(zero != zero.reshape(-1)[0]):
        return [], [n.read(n.ins[2], spot)]
    value = int(zero.reshape(-1)[0])
    return ([literal(value, n.dtype(2))] if value else []), []


def _place(n: Node, dims: tuple[Dim, ...]) -> list[Aff] | None:
    """Where a cell's scale is: the only one, one per position of an axis, or one per block of positions."""
    scale = n.shape(1)
    if n.has(2) and n.shape(2) != scale:
        return None
    if len(scale) == 0 or (scale == (1,) and len(dims) != 1):
        return [const(0)] * len(scale)
    axis = n.axis(1, len(dims)) if len(dims) > 1 else 0
    block = int(n.attr("block_size", 0))
    if block:
        blocked = [floordiv(dim(d.name), block, {d.name: d.size}) if a == axis else dim(d.name) for a, d in enumerate(dims)]
        return blocked if len(scale) == len(dims) else None
    if len(scale) != 1 or scale[0] not in (1, dims[axis].size):
        return None
    return [dim(dims[axis].name) if scale[0] == dims[axis].size else const(0)]
