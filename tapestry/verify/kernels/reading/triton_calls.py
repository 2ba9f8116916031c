"""What functions of ``triton.language`` mean, as terms."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from tapestry.ir.index import Aff, const
from tapestry.verify.kernels import term_arithmetic
from tapestry.verify.kernels.reading.lane_tiles import (
    Pointer,
    Shape,
    Tile,
    dot,
    each,
    folded,
    lane,
    lanes,
    moved,
    scalar,
    together,
)
from tapestry.verify.kernels.term_arithmetic import Kind
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
            return each(terms, partial(term_arithmetic.bits, terms, fn), self.tile(a), self.tile(b))
        if fn in ("lt", "le", "gt", "ge", "eq", "ne"):
            return each(terms, partial(terms.compared, fn), self.tile(a), self.tile(b))
        return each(terms, partial(term_arithmetic.arithmetic, terms, fn), self.tile(a), self.tile(b))

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
        return Tile(term_arithmetic.cast(self.terms, x.term, kind), x.shape)

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
        return each(self.terms, partial(term_arithmetic.extreme, self.terms, fn), self.tile(a), self.tile(b))

    def real(self, fn: str, x: Any) -> Tile:
        """A function of one real number."""
        return each(self.terms, partial(term_arithmetic.real, self.terms, fn), self.tile(x))

    def zeros(self, shape: Any, kind: Kind) -> Tile:
        """``tl.zeros``."""
        return self.full(shape, 0, kind)

    def maximum(self, a: Any, b: Any, propagate_nan: Any = None) -> Tile:
        """``tl.maximum``."""
        return self.extreme("max", a, b)

    def minimum(self, a: Any, b: Any, propagate_nan: Any = None) -> Tile:
        """``tl.minimum``."""
        return self.extreme("min", a, b)

    def divided(self, a: Any, b: Any) -> Any:
        """``tl.div_rn``."""
        return self.operator("truediv", a, b)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """``tl.fma``."""
        return self.operator("add", self.operator("mul", a, b), c)

    def dot(self, a: Tile, b: Tile, acc: Any = None, **how: Any) -> Tile:
        """``tl.dot``; its other options concern precision and types."""
        if set(how) - {"input_precision", "out_dtype", "max_num_imprecise_acc"}:
            raise Unsupported(f"options {sorted(how)} of a product")
        made = dot(self.terms, a, b)
        return made if acc is None else self.operator("add", acc, made)

    def sum(self, x: Any, axis: int) -> Tile:
        """``tl.sum``."""
        return folded(self.terms, "add", self.tile(x), axis)

    def max(self, x: Any, axis: int) -> Tile:
        """``tl.max``."""
        return folded(self.terms, "max", self.tile(x), axis)

    def min(self, x: Any, axis: int) -> Tile:
        """``tl.min``."""
        return folded(self.terms, "min", self.tile(x), axis)

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
            "arange": self.arange, "full": self.full, "zeros": self.zeros, "where": self.where, "dot": self.dot,
            "sum": self.sum, "max": self.max, "min": self.min, "trans": self.transposed, "broadcast_to": self.broadcast_to,
            "maximum": self.maximum, "minimum": self.minimum, "div_rn": self.divided,
            "fma": self.fused, **{fn: partial(self.real, fn) for fn in REAL},
        }  # fmt: skip
