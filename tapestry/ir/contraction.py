"""Contractions: products of two factors under ``sum``, recognised from the body alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tapestry.ir.expr import Arg, Call, Const, Expr, Index, Let, walk
from tapestry.ir.graph import Block
from tapestry.ir.index import dims_of
from tapestry.ir.monoid import SUMS

INT8 = frozenset({"i8", "u8"})


def factors(op: Block) -> tuple[Expr, Expr] | None:
    """The two factors of a contraction (a product under ``sum``, casts around it aside), or ``None``."""
    if op.monoid != "sum" or len(op.body) != 1:
        return None
    e = op.body[0]
    while isinstance(e, Call) and e.fn == "cast":
        e = e.args[0]
    return (e.args[0], e.args[1]) if isinstance(e, Call) and e.fn == "mul" else None


def products(op: Block) -> tuple[tuple[Expr, Expr], ...] | None:
    """The factors of every field of a sum of products, or of several side by side; ``None`` where some field is none."""
    if op.monoid not in SUMS:
        return None
    found = [factors(part(op, k)) for k in range(len(op.body))]
    return tuple(f for f in found if f) if all(found) else None


def part(op: Block, field: int) -> Block:
    """One of several sums side by side as an operation of its own, over the same index space and reads."""
    return op if op.monoid == "sum" else replace(op, outs=op.outs[:1], monoid="sum", body=(op.body[field],), then=())


def dims_read(op: Block, e: Expr) -> frozenset[str]:
    """Dimensions of the index space that an expression of the body depends on."""
    out: frozenset[str] = frozenset()
    for x in walk(e):
        if isinstance(x, Index):
            out |= dims_of(x.aff)
        elif isinstance(x, Arg):
            r = op.reads[x.pos]
            out |= frozenset(n for a in (*r.index, *(g.aff for g in r.when)) for n in dims_of(a))
        elif isinstance(x, Let):
            inner = op.inner[x.pos]
            out |= dims_read(op, inner.body) - {d.name for d in inner.dims}
    return out


@dataclass(frozen=True, slots=True)
class Narrow:
    """``value - shift``: an integer of 8 bits less a zero point of as many bits (``None`` for 0)."""

    value: Expr
    shift: Expr | None

    @property
    def largest(self) -> int:
        """A bound on the absolute value of the difference."""
        return 255 if self.shift is not None or self.value.dtype == "u8" else 128


def narrow(e: Expr) -> Narrow | None:
    """A factor as an integer of 8 bits less a zero point, which may vary along anything; ``None`` where it is none."""
    while isinstance(e, Call) and e.fn == "cast" and e.dtype in ("f32", "i32") and e.args[0].dtype in ("i32", *INT8):
        e = e.args[0]
    if e.dtype in INT8:
        return Narrow(e, None)
    if not (isinstance(e, Call) and e.fn == "sub" and e.dtype == "i32"):
        return None
    value, z = narrow(e.args[0]), e.args[1]
    if value is None or value.shift is not None:
        return None
    if isinstance(z, Const):
        return (
            Narrow(value.value, z) if int(z.value) in (range(-128, 128) if value.value.dtype == "i8" else range(256)) else None
        )
    zero = narrow(z)
    return Narrow(value.value, z) if zero is not None and zero.shift is None else None
