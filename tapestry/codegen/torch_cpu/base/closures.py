"""Expressions as closures over torch operators, made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tapestry.codegen.torch_cpu.base import scalars
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let

Tensor = torch.Tensor


Args = Mapping[int, Tensor]
Value = Callable[[Args, Sequence[Tensor]], Tensor]


def compile_value(e: Expr, index: Mapping[Index, Tensor]) -> Value:
    """The value of an expression from those of its reads and of the reduced state.

    Args:
        index: values of its index expressions.
    """
    match e:
        case Arg():
            at = e.pos
            return lambda args, _: args[at]
        case Acc():
            field = e.field
            return lambda _, states: states[field]
        case Let():
            at = e.pos
            return lambda _, states: states[at]
        case Const():
            return _literal(e)
        case Index():
            values = index[e]
            return lambda args, states: values
        case Call():
            parts = [compile_value(a, index) for a in e.args]
    if e.fn == "cast":
        dtype, source = e.dtype, e.args[0].dtype
        return lambda args, states: scalars.cast(parts[0](args, states), dtype, source)
    if e.fn == "where":
        return _where(*parts)
    fn = e.fn
    return lambda args, states: scalars.apply(fn, [p(args, states) for p in parts])


def _literal(e: Const) -> Value:
    """A literal where the arguments are; on a GPU it is filled in, since a CUDA graph cannot capture copying it there."""
    dtype = scalars.TORCH_DTYPES[e.dtype]
    literal = torch.tensor([e.value, e.value], dtype=dtype)[0]  # a part of its memory: no result takes it for its own buffer

    def run(args: Args, _: Sequence[Tensor]) -> Tensor:
        given = next(iter(args.values()), literal)
        return literal if given.device.type == "cpu" else torch.full((), e.value, dtype=dtype, device=given.device)

    return run


def _where(test: Value, yes: Value, no: Value) -> Value:
    """A choice; where its test is one for many points (a row without keys) and nowhere true, there is none to make."""

    def run(args: Args, states: Sequence[Tensor]) -> Tensor:
        c, b = test(args, states), no(args, states)
        a = yes(args, states)
        rare = c.device.type == "cpu" and c.numel() * 16 <= b.numel()  # a CUDA graph cannot capture a look at the data
        fits = all(m in (1, n) for x in (a, c) for m, n in zip(reversed(x.shape), reversed(b.shape), strict=False))
        if rare and fits and not bool(c.any()):
            return b
        return scalars.apply("where", [c, a, b])

    return run
