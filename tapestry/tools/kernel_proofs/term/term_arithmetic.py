"""Arithmetic on terms: what operators of sources and primitives of operations mean, said once for both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tapestry.ir.index import const
from tapestry.ir.types import FLOATS
from tapestry.tools.kernel_proofs.term.terms import Terms, Unsupported

LN2 = math.log(2)


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of elements: ``int``, ``real`` or ``bool``, and its bits."""

    kind: str
    bits: int
    signed: bool = True


def kind_of(dtype: str) -> Kind:
    """An element type of a tensor."""
    if dtype in FLOATS or dtype.startswith("f8"):
        return Kind("real", 64)
    if dtype == "bool":
        return Kind("bool", 1)
    if dtype[0] not in "iu" or dtype[1:] not in ("8", "16", "32", "64"):
        raise Unsupported(f"elements of {dtype}")
    return Kind("int", int(dtype[1:]), dtype[0] == "i")


def arithmetic(terms: Terms, fn: str, x: int, y: int) -> int:
    """``add sub mul truediv floordiv mod`` of two numbers; of integers division is towards zero."""
    if "real" not in (terms.kinds[x], terms.kinds[y]) and fn != "truediv":
        return whole(terms, fn, x, y)
    if fn in ("add", "sub"):
        return terms.add([(1.0, x), (1.0 if fn == "add" else -1.0, y)])
    if fn in ("mul", "truediv"):
        return terms.mul([(x, 1.0), (y, 1.0 if fn == "mul" else -1.0)])
    return terms.call("fmod" if fn == "mod" else fn, (x, y))


def whole(terms: Terms, fn: str, x: int, y: int) -> int:
    """Arithmetic of integers."""
    a, b = terms.aff(x), terms.aff(y)
    if fn in ("add", "sub"):
        return terms.int(a + b if fn == "add" else a - b)
    if fn == "mul" and (not a.terms or not b.terms):
        return terms.int(a * b.const if not b.terms else b * a.const)
    if fn in ("floordiv", "mod") and not b.terms and b.const > 0 and terms.reach(a)[0] >= 0:
        return terms.int(terms.divided(a, b.const) if fn == "floordiv" else terms.remainder(a, b.const))
    return terms.call({"mul": "imul", "floordiv": "idiv", "mod": "imod"}.get(fn, fn), (x, y), "int")


def bits(terms: Terms, fn: str, x: int, y: int) -> int:
    """``and or xor shl shr`` of truth values, or of the bits of integers."""
    if terms.kinds[x] == "bool" and terms.kinds[y] == "bool":
        if fn == "xor":
            return terms.compared("ne", x, y)
        return terms.all((x, y)) if fn == "and" else terms.any((x, y))
    return terms.call(fn, (x, y), "int")


def extreme(terms: Terms, fn: str, x: int, y: int) -> int:
    """``max`` or ``min`` of two numbers."""
    if terms.kinds[x] == terms.kinds[y] == "bool":
        return bits(terms, "or" if fn == "max" else "and", x, y)
    if "real" in (terms.kinds[x], terms.kinds[y]):
        x, y = (terms.const(v) if (v := terms.number(t)) is not None else t for t in (x, y))
        return terms.call(fn, (x, y))
    a, b = terms.aff(x), terms.aff(y)
    return terms.where(terms.at_least(a - b), *((x, y) if fn == "max" else (y, x)))


def negative(terms: Terms, x: int) -> int:
    """``-x``."""
    return terms.int(terms.aff(x) * -1) if terms.kinds[x] == "int" else terms.add([(-1.0, x)])


def real(terms: Terms, fn: str, x: int) -> int:
    """A function of one real number."""
    match fn:
        case "exp2":
            return terms.exp(terms.add([(LN2, x)]))
        case "exp":
            return terms.exp(x)
        case "sqrt" | "sqrt_rn":
            return terms.mul([(x, 0.5)])
        case "log2":
            return terms.mul([(terms.call("log", (x,)), 1.0), (terms.const(1 / LN2), 1.0)])
        case "abs":
            return terms.call("abs", (x,), terms.kinds[x])
        case _:
            return terms.call(fn, (x,))


def cast(terms: Terms, t: int, kind: Kind) -> int:
    """Another type: between reals no rounding, of a real to an integer towards zero, to few bits what is left of them."""
    own = terms.kinds[t]
    if kind.kind == "bool":
        return t if own == "bool" else terms.compared("ne", t, terms.int(const(0)))
    if kind.kind == "real":
        value = terms.number(t)
        if value is not None:
            return terms.const(value)
        return terms.where(t, terms.const(1.0), terms.const(0.0)) if own == "bool" else t
    if own == "bool":
        return terms.where(t, terms.int(const(1)), terms.int(const(0)))
    if own == "real":
        value = terms.number(t)
        t = terms.int(const(int(value))) if value is not None and math.isfinite(value) else terms.call("trunc", (t,), "int")
    lo, hi = terms.reach(terms.aff(t))
    least = -(1 << (kind.bits - 1)) if kind.signed else 0
    if kind.bits < 32 and not (least <= lo and hi < least + (1 << kind.bits)):
        t = terms.call(f"{'' if kind.signed else 'u'}{kind.bits} bits", (t,), "int")
    return t


def applied(terms: Terms, fn: str, args: Sequence[int], kind: Kind) -> int:
    """A primitive of `ir.expr.PRIMITIVES`; ``kind`` is the result's."""
    own = terms.kinds[args[0]]
    match fn:
        case "add" | "sub" | "mul":
            if own == "bool" and terms.kinds[args[1]] == "bool":
                return bits(terms, "or" if fn == "add" else "and", *args)
            return arithmetic(terms, fn, *args)
        case "div":
            return arithmetic(terms, "truediv" if kind.kind == "real" else "floordiv", *args)
        case "mod" | "fmod" if kind.kind == "real":
            return terms.call(fn, args)
        case "fmod":
            return whole(terms, "mod", *args)
        case "mod":
            nonnegative = all(terms.reach(terms.aff(a))[0] >= 0 for a in args)
            return whole(terms, "mod", *args) if nonnegative else terms.call("floormod", args, "int")
        case "pow" if terms.number(args[1]) is not None and kind.kind == "real":
            return terms.mul([(args[0], terms.number(args[1]) or 0.0)])
        case "max" | "min":
            return extreme(terms, fn, *args)
        case "and" | "or" | "xor" | "shl" | "shr":
            return bits(terms, fn, *args)
        case "neg":
            return negative(terms, args[0])
        case "not" if own == "bool":
            return terms.negated(args[0])
        case "isnan" | "isinf":
            return terms.false  # what is computed is finite
        case "lt" | "le" | "gt" | "ge" | "eq" | "ne":
            return terms.compared(fn, *args)
        case "where":
            return terms.where(*args)
        case "sign":
            zero, x = terms.int(const(0)), args[0]
            below = terms.where(terms.compared("lt", x, zero), terms.int(const(-1)), zero if own == "int" else x)
            return terms.where(terms.compared("gt", x, zero), terms.int(const(1)), below)
        case "cast":
            return cast(terms, args[0], kind)
        case _:
            if kind.kind == "real" and len(args) == 1:
                return real(terms, fn, args[0])
            return terms.call(fn, args, kind.kind)
