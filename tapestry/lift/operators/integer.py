"""MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv: exact sums of products of integers of 8 bits, in i32.

Zero points known at compile time become literals, and none where they are 0; others are read. What a QLinear operator does
with the sum follows it: a multiplication by the scales in f32, rounding half to even, saturation.
"""

from __future__ import annotations

import numpy as np

from tapestry.ir.expr import Acc, Arg, Expr, call, cast
from tapestry.ir.graph import Dim, ranges_of
from tapestry.ir.index import Aff, const, dim
from tapestry.lift.builder import Node, Operand, axes, broadcast
from tapestry.lift.operators.opaque_operators import opaque_integer_conv
from tapestry.lift.operators.quantize import REAL, saturated
from tapestry.lift.operators.windows.conv import channel, window
from tapestry.lift.registry import Declined, lifts

BYTES = ("i8", "u8")


@lifts("MatMulInteger", "QLinearMatMul")
def lift_integer_matmul(n: Node) -> None:
    """Zero points and scales of the whole, of a's rows or of b's columns; all others leave the node to ONNX."""
    second = 3 if n.kind == "QLinearMatMul" else 1
    a, b, y = n.tensor(0), n.tensor(second), n.out()
    if min(len(a.shape), len(b.shape)) < 2 or not _supported(n, second):
        raise Declined
    batch = axes(y.shape[:-2], "b")
    dims = (*batch, Dim("i", a.shape[-2]), Dim("n", b.shape[-1]))
    m = Dim("m", a.shape[-1])
    reads = [
        n.read(a.name, [*broadcast(a.shape[:-2], batch), dim("i"), dim("m")]),
        n.read(b.name, [*broadcast(b.shape[:-2], batch), dim("m"), dim("n")]),
    ]
    own = {**dict.fromkeys(_about(n, 0), "i"), **dict.fromkeys(_about(n, second), "n")}
    if not _emit(n, second, dims, (m,), reads, own):
        raise Declined


@lifts("ConvInteger", "QLinearConv")
def lift_integer_conv(n: Node) -> None:
    """As Conv; zero points and scales of the whole or, for the weight, of each filter. Padding is x's zero point."""
    second = 3 if n.kind == "QLinearConv" else 1
    x, w = n.tensor(0), n.tensor(second)
    groups, outs = int(n.attr("group", 1)), w.shape[0]
    fits = 3 <= len(x.shape) <= 5 and x.shape[1] == w.shape[1] * groups and outs % groups == 0 and w.size
    if not fits or not _supported(n, second):
        return opaque_integer_conv(n)
    win = window(n, x.shape[2:], w.shape[2:])
    dims = (Dim("b", x.shape[0]), Dim("o", outs), *win.places)
    zero = _zero_point(n, _about(n, 0)[-1])
    if win.leaves and (zero is None or zero.size != 1):
        return opaque_integer_conv(n)  # what is outside is only known when it runs
    outside = int(zero.reshape(-1)[0]) if win.leaves and zero is not None else None
    reads = [
        n.read(x.name, [dim("b"), channel(outs, x.shape[1], groups), *win.index()], outside),
        n.read(w.name, [dim("o"), dim("c"), *(dim(d.name) for d in win.taps)]),
    ]
    own = dict.fromkeys(_about(n, second), "o")
    if not _emit(n, second, dims, (Dim("c", w.shape[1]), *win.taps), reads, own):
        opaque_integer_conv(n)


def _about(n: Node, k: int) -> list[int]:
    """Inputs with the scale and the zero point of input k (the zero point alone in operators without scales)."""
    return [k + 1, k + 2] if n.kind.startswith("QLinear") else [2 if k == 0 else 3]


def _supported(n: Node, second: int) -> bool:
    if n.dtype(0) not in BYTES or n.dtype(second) not in BYTES:
        return False
    return not n.kind.startswith("QLinear") or (
        n.out().dtype in BYTES and all(n.dtype(k) in REAL for k in (1, second + 1, 6)) and n.tensor(6).size == 1
    )


def _zero_point(n: Node, k: int) -> np.ndarray | None:
    """A zero point known at compile time, once where all are equal: 0 where there is none."""
    value = n.const(k) if n.has(k) else np.zeros((), np.int8)
    return value.reshape(-1)[:1] if value is not None and value.size and np.all(value == value.reshape(-1)[0]) else value


def _scale_place(n: Node, k: int, own: str) -> list[Aff] | None:
    """Where a scale or zero point is read: the only one, or one for each place of its own dimension."""
    shape = n.shape(k)
    if n.tensor(k).size == 1:
        return [const(0)] * len(shape)
    return [dim(own)] if len(shape) == 1 and own else None


def _emit(
    n: Node, second: int, dims: tuple[Dim, ...], reduced: tuple[Dim, ...], reads: list[Operand], own: dict[int, str]
) -> bool:
    """The sum and, for QLinear operators, what follows it; ``False`` where a scale or zero point is of another shape.

    Args:
        reads: the two factors.
        own: for inputs that may have one value for each of its places, the dimension.
    """
    sizes = ranges_of(dims)
    factors: list[Expr] = []
    for at, k in enumerate((0, second)):
        z, wide = _about(n, k)[-1], cast(Arg(at, reads[at][1].dtype), "i32")
        zero = _zero_point(n, z)
        if zero is not None and zero.size == 1:
            if n.has(z) and _one(n, z, own.get(z, ""), sizes) is None:
                return False
            value = int(zero.reshape(-1)[0])
            factors.append(wide - value if value else wide)
        elif (read := _one(n, z, own.get(z, ""), sizes)) is None:
            return False
        else:
            factors.append(wide - cast(Arg(len(reads), read[1].dtype), "i32"))
            reads.append(read)
    body = factors[0] * factors[1]
    if not n.kind.startswith("QLinear"):
        n.reduce([n.outs[0]], dims, reduced, "sum", reads, [body])
        return True
    then = _requantised(n, second, reads, own, sizes)
    if then is None:
        return False
    n.reduce([n.outs[0]], dims, reduced, "sum", reads, [body], [then])
    return True


def _one(n: Node, k: int, own: str, sizes: dict[str, int]) -> Operand | None:
    spot = _scale_place(n, k, own)
    if spot is None or (n.tensor(k).size > 1 and n.shape(k)[0] != sizes[own]):
        return None
    return n.read(n.ins[k], spot)


def _requantised(n: Node, second: int, reads: list[Operand], own: dict[int, str], sizes: dict[str, int]) -> Expr | None:
    """The sum, with a bias, by the scales and rounded; its reads are added."""
    values: dict[int, Expr] = {}
    last = 8 if n.kind == "QLinearConv" else -1
    for k in (1, second + 1, 6, 7, last):
        if k < 0 or not n.has(k):
            continue
        read = _one(n, k, "o" if k == last else own.get(k, ""), sizes)
        if read is None:
            return None
        values[k] = Arg(len(reads), read[1].dtype)
        reads.append(read)
    total: Expr = Acc(0, "i32")
    if last in values:
        total += values[last]
    first, last_factor, result = (cast(values[k], "f32") for k in (1, second + 1, 6))
    by = first * last_factor / result
    return saturated(call("round", cast(total, "f32") * by), values.get(7), n.out().dtype)
