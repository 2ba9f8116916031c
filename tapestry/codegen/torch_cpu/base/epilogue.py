"""What follows a sum of products, as far as the operation that makes the sum may do it: bias, residual, clamp."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tapestry.codegen.torch_cpu.base.added_first import added_first
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel

Test = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Epilogue:
    """``clamp(sum + bias + residual, low, high)``, each by the position of its read, and what is left to do after it."""

    bias: int | None = None
    residual: int | None = None
    low: float = -math.inf
    high: float = math.inf
    rest: tuple[Expr, ...] | None = None

    @property
    def clamped(self) -> bool:
        """Whether there is a bound."""
        return self.low != -math.inf or self.high != math.inf


def epilogue(op: Block, kernel: Kernel, columns: str) -> Epilogue:
    """What of an operation's ``then`` is done with the sum: all of it, or a bias, which varies along ``columns`` at most."""

    def is_bias(k: int) -> bool:
        r = op.reads[k]
        return len(r.index) == 1 and r.index[0].is_dim and str(r.index[0]) == columns and not r.when and r.other is None

    def is_residual(k: int) -> bool:
        r, box = op.reads[k], kernel.ins[k]
        axes = sorted(str(e) if e.is_dim else "" for e in r.index)  # in any order: the kernel takes a view
        return axes == sorted(d.name for d in op.dims) and not r.when and r.other is None and box is not None

    found = _all_of(op.then[0], is_bias, is_residual) if len(op.then) == 1 else None
    if found:
        return found
    bias = added_first(op.then, is_bias)
    return Epilogue(bias=bias[0], rest=bias[1]) if bias else Epilogue(rest=op.then)


def _all_of(e: Expr, is_bias: Test, is_residual: Test) -> Epilogue | None:
    high, e = _bound(e, "min", math.inf)
    low, e = _bound(e, "max", -math.inf)
    if e.dtype != "f32":
        return None
    if isinstance(e, Acc):
        return Epilogue(low=low, high=high)
    last = _added(e)
    if last is None:
        return None
    if isinstance(last[0], Acc):
        if is_bias(last[1]):
            return Epilogue(bias=last[1], low=low, high=high)
        return Epilogue(residual=last[1], low=low, high=high) if is_residual(last[1]) else None
    first = _added(last[0])
    if first is None or not isinstance(first[0], Acc) or not is_bias(first[1]) or not is_residual(last[1]):
        return None
    return Epilogue(bias=first[1], residual=last[1], low=low, high=high)


def _bound(e: Expr, fn: str, none: float) -> tuple[float, Expr]:
    """(c, x) of ``fn(x, c)``."""
    if isinstance(e, Call) and e.fn == fn and isinstance(e.args[1], Const) and not math.isnan(e.args[1].value):
        return float(e.args[1].value), e.args[0]
    return none, e


def _added(e: Expr) -> tuple[Expr, int] | None:
    """(x, k) of ``x + read k``, in either order."""
    if not isinstance(e, Call) or e.fn != "add":
        return None
    a, b = e.args if isinstance(e.args[1], Arg) else e.args[::-1]
    return (a, b.pos) if isinstance(b, Arg) else None
