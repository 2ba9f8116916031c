"""What functions of ``triton.language`` mean, as terms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tapestry.ir.index import Aff, const
from tapestry.verify.kernels import primitives
from tapestry.verify.kernels.primitives import Kind
from tapestry.verify.kernels.reading.tiles import Pointer, Shape, Tile, dot, each, folded, lane, lanes, moved, scalar, together
from tapestry.verify.kernels.terms import Terms, Unsupported

KINDS = {
    **{f"float{b}": Kind("real", b) for b in (16, 32, 64)}, "bfloat16": Kind("real", 16), "int1": Kind("bool", 1),
    **{f"int{b}": Kind("int", b) for b in (8, 16, 32, 64)}, **{f"uint{b}": Kind("int", b, False) for b in (8, 16, 32, 64)},
}  # fmt: skip
REAL = ("exp", "exp2", "sqrt", "sqrt_rn", "log", "log2", "abs", "sin", "cos", "erf", "floor", "ceil")


class Calls:
    """Functions of ``tl`` by name, over one proof's terms."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms

    def tile(self, x: Any) -> Tile:
        """A value as a tile."""
        if isinstance(x, Tile):
            return x
        if isinstance(x, bool | int | float):
            return scalar(self.terms, x)
        raise Unsupported(f"a {type(x).__name__} where a number is needed")

    # arithmetic
    def operator(self, fn: str, a: Any, b: Any) -> Any:
        """A binary operator, of numbers, tiles and pointers."""
        if isinstance(b, Pointer) and fn == "add":
            a, b = b, a
        if isinstance(a, Pointer):
            if fn not in ("add", "sub"):
                raise Unsupported(f"{fn} of a pointer")
            return Pointer(a.buffer, self.operator(fn, a.at, self.tile(b)))
        terms = self.terms
        if fn in ("and", "or", "xor", "shl", "shr"):
            return each(terms, lambda x, y: primitives.bits(terms, fn, x, y), self.tile(a), self.tile(b))
        if fn in ("lt", "le", "gt", "ge", "eq", "ne"):
            return each(terms, lambda x, y: terms.compared(fn, x, y), self.tile(a), self.tile(b))
        return each(terms, lambda x, y: primitives.arithmetic(terms, fn, x, y), self.tile(a), self.tile(b))

    # makers
    def full(self, shape: Any, value: Any, kind: Kind) -> Tile:
        """``tl.full``."""
        made = self.cast(self.tile(value), kind)
        return Tile(made.term, tuple(shape))

    def arange(self, lo: int, hi: int) -> Tile:
        """``tl.arange``."""
        return Tile(self.terms.int(lane(self.terms, 0, hi - lo) + lo), (hi - lo,))

    def cast(self, x: Tile, kind: Kind) -> Tile:
        """Another type."""
        return Tile(primitives.cast(self.terms, x.term, kind), x.shape)

    def broadcast_to(self, x: Any, shape: Any) -> Tile:
        """``tl.broadcast_to``."""
        (made,), whole = together(self.terms, [self.tile(x)], tuple(shape))
        if whole != tuple(shape):
            raise Unsupported(f"{self.tile(x).shape} does not broadcast to {shape}")
        return Tile(made.term, whole)

    def where(self, c: Any, a: Any, b: Any) -> Tile:
        """``tl.where``."""
        return each(self.terms, self.terms.where, self.tile(c), self.tile(a), self.tile(b))

    def extreme(self, fn: str, a: Any, b: Any) -> Tile:
        """``tl.maximum`` and ``tl.minimum``."""
        return each(self.terms, lambda x, y: primitives.extreme(self.terms, fn, x, y), self.tile(a), self.tile(b))

    def real(self, fn: str, x: Any) -> Tile:
        """A function of one real number."""
        return each(self.terms, lambda t: primitives.real(self.terms, fn, t), self.tile(x))

    def dot(self, a: Tile, b: Tile, acc: Any = None) -> Tile:
        """``tl.dot``."""
        made = dot(self.terms, a, b)
        return made if acc is None else self.operator("add", acc, made)

    def folded(self, fn: str, x: Any, axis: int) -> Tile:
        """``tl.sum``, ``tl.max`` and ``tl.min``."""
        return folded(self.terms, fn, self.tile(x), axis)

    def transposed(self, x: Tile) -> Tile:
        """``tl.trans`` of two axes."""
        if len(x.shape) != 2:
            raise Unsupported("a transposition of more than two axes")
        a, b = x.shape
        return moved(self.terms, x, [lane(self.terms, 1, a), lane(self.terms, 0, b)], (b, a))

    def reshaped(self, x: Tile, shape: Shape) -> Tile:
        """``reshape``, row-major."""
        terms = self.terms
        if math.prod(shape) != math.prod(x.shape):
            raise Unsupported("a reshape to another size")
        flat: Aff = const(0)
        for n, e in zip(shape, lanes(terms, shape), strict=True):
            flat = flat * n + e
        places = list[Aff]()
        for k, n in enumerate(x.shape):
            inner = math.prod(x.shape[k + 1 :])
            places.append(terms.remainder(terms.divided(flat, inner), n))
        return moved(terms, x, places, shape)

    def table(self) -> dict[str, Callable[..., Any]]:
        """``tl.NAME`` to what it does; options that concern the hardware are ignored."""
        return {
            "arange": self.arange, "full": self.full, "where": self.where, "broadcast_to": self.broadcast_to,
            "zeros": lambda shape, kind: self.full(shape, 0, kind),
            "maximum": lambda a, b, propagate_nan=None: self.extreme("max", a, b),
            "minimum": lambda a, b, propagate_nan=None: self.extreme("min", a, b),
            "div_rn": lambda a, b: self.operator("truediv", a, b), "trans": self.transposed,
            "dot": lambda a, b, acc=None, input_precision=None, out_dtype=None, max_num_imprecise_acc=None: self.dot(a, b, acc),
            "sum": lambda x, axis: self.folded("add", x, axis), "max": lambda x, axis: self.folded("max", x, axis),
            "min": lambda x, axis: self.folded("min", x, axis), "cdiv": lambda a, b: -(-a // b),
            **{fn: lambda x, fn=fn: self.real(fn, x) for fn in REAL},
        }  # fmt: skip
