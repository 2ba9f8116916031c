"""The value of an expression whose leaves are numbers: by what rules decide what padding or an empty row gives.

The verifier, which judges the rules, evaluates expressions by other code (`verify.interp`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tapestry.ir.expr import Arg, Call, Const, Expr
from tapestry.ir.types import FLOATS, numpy_dtype

Number = np.ndarray[Any, Any]


def _sigmoid(x: Number) -> Number:
    return 1 / (1 + np.exp(-x))


def _erf(x: Number) -> Number:
    return np.asarray(math.erf(x))


def _truncated(a: Number, b: Number) -> Number:
    low = a // b
    return low + ((np.fmod(a, b) != 0) & ((a < 0) != (b < 0)))


_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "neg": np.negative,
    "abs": np.abs, "sign": np.sign, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "where": np.where, "mod": np.mod, "fmod": np.fmod,
}  # fmt: skip
_OF_FLOATS: dict[str, Callable[..., Any]] = {
    "div": np.divide, "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "log1p": np.log1p, "expm1": np.expm1, "floor": np.floor,
    "ceil": np.ceil, "round": np.rint, "sigmoid": _sigmoid, "pow": np.power, "isnan": np.isnan, "isinf": np.isinf,
    "erf": _erf,
}  # fmt: skip
_OF_INTEGERS: dict[str, Callable[..., Any]] = {"div": _truncated}
_OF_TRUTHS: dict[str, Callable[..., Any]] = {"and": np.logical_and, "or": np.logical_or, "not": np.logical_not}


def constant(e: Expr, args: Sequence[float | int | bool] = ()) -> float | int | bool | None:
    """The value of an expression over literals, ``Arg(k)`` being ``args[k]``; ``None`` where a part of it has none here."""
    with np.errstate(all="ignore"):
        out = _value(e, args)
    return None if out is None else out.item()


def _value(e: Expr, args: Sequence[float | int | bool]) -> Number | None:
    if isinstance(e, Const):
        return np.asarray(e.value, numpy_dtype(e.dtype))
    if isinstance(e, Arg):
        return np.asarray(args[e.pos], numpy_dtype(e.dtype)) if e.pos < len(args) else None
    if not isinstance(e, Call):
        return None
    operands = [x for a in e.args if (x := _value(a, args)) is not None]
    if len(operands) < len(e.args):
        return None
    dtype = e.args[-1].dtype
    if e.fn == "cast":
        defined = e.dtype in FLOATS or dtype not in FLOATS or float(operands[0]).is_integer()
        return np.asarray(operands[0], numpy_dtype(e.dtype)) if defined else None
    table = _OF_FLOATS if dtype in FLOATS else _OF_TRUTHS if dtype == "bool" else _OF_INTEGERS
    of = _OF_NUMBERS.get(e.fn) or table.get(e.fn)
    return None if of is None else np.asarray(of(*operands), numpy_dtype(e.dtype))
