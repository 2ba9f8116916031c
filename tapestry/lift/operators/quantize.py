"""QuantizeLinear and DequantizeLinear on integers of 8 to 32 bits: cell by cell, scales read where their axis or block says.

Floats of 8 bits are dequantised too; what makes them stays with ONNX.
"""

from __future__ import annotations

import numpy as np

from tapestry.ir.expr import Acc, Arg, Const, Expr, call, cast, literal, number
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, const, dim, floordiv
from tapestry.ir.types import FLOAT8
from tapestry.lift.builder import Node, Operand, axes
from tapestry.lift.registry import Declined, lifts

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
    reads = [n.read(x.name, dims), n.read(n.ins[1], spot), *read]
    wide = "i64" if x.dtype == "i32" else "i32"  # differences of 32 bits may need one more

    def body(v: Expr, scale: Expr, *zero: Expr) -> Expr:
        z = next(iter((*told, *zero)), None)
        shifted = cast(v, wide) - _as(z, wide) if z is not None else v
        return cast(cast(shifted, "f32") * cast(scale, "f32"), y.dtype)

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
        whole: Expr = call("round", cast(v, "f32") / cast(scale, "f32"))
        return saturated(whole, next(iter((*told, *zero)), None), y.dtype)

    told, read = _zero(n, spot)
    n.block(y, dims, [n.read(x.name, dims), n.read(n.ins[1], spot), *read], body)


@lifts("DynamicQuantizeLinear")
def lift_dynamic(n: Node) -> None:
    """To u8 by the least and greatest value, 0 among them; a scale of 1 where all are 0, as in onnxruntime."""
    x = n.tensor(0)
    if x.dtype != "f32" or x.size == 0:
        raise Declined
    dims = axes(x.shape)
    ends = [
        n.reduce([n.temp(name)], (), dims, name, [n.read(x.name, dims)], [Arg(0, "f32")], [call(name, Acc(0, "f32"), 0)])[0]
        for name in ("max", "min")
    ]
    ranged = [n.read(e, ()) for e in ends]

    def size(high: Expr, low: Expr) -> Expr:
        found = (high - low) / 255
        return call("where", call("eq", high, low), 1, found)

    def origin(low: Expr, scale: Expr) -> Expr:
        return saturated(call("round", 0 - low / scale), None, "u8")

    scale = n.block(n.out(1) if n.wants(1) else n.temp("scale"), (), ranged, size)
    spot = n.block(n.out(2) if n.wants(2) else n.temp("zero"), (), [ranged[1], n.read(scale, ())], origin)

    def body(v: Expr, by: Expr, at: Expr) -> Expr:
        return saturated(call("round", v / by), at, "u8")

    n.block(n.out(), dims, [n.read(x.name, dims), n.read(scale, ()), n.read(spot, ())], body)


def _as(zero: Expr, dtype: str) -> Expr:
    """A zero point in another dtype."""
    return number(zero.value, dtype) if isinstance(zero, Const) else cast(zero, dtype)


def saturated(whole: Expr, zero: Expr | None, dtype: str) -> Expr:
    """A rounded f32, less any zero point, as an integer of 8 or 16 bits."""
    low, high = RANGE[dtype]
    whole = whole + _as(zero, "f32") if zero is not None else whole
    kept = call("min", call("max", whole, low), high)
    # nothing says what a NaN becomes; a cast of it would differ between processors
    return cast(cast(call("where", call("isnan", whole), 0, kept), "i32"), dtype)


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
