"""Expressions as closures over torch operators, made once: natives by structure, literals as numbers, in place if it may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tapestry.codegen.torch_cpu.base import scalars
from tapestry.codegen.torch_cpu.base.torch_unary import NATIVE, native
from tapestry.ir.expr import PRIMITIVES, Acc, Arg, Call, Const, Expr, Index, Let, walk

Tensor = torch.Tensor


Args = Mapping[int, Tensor]
Value = Callable[[Args, Sequence[Tensor]], Tensor]


def _root_in_place(x: Tensor) -> Tensor:
    return scalars.root(x, x)


_PLACE: dict[str, Callable[..., Tensor]] = {
    "add": torch.Tensor.add_, "sub": torch.Tensor.sub_, "mul": torch.Tensor.mul_, "div": torch.Tensor.div_,
    "exp": torch.Tensor.exp_, "sqrt": _root_in_place, "tanh": torch.Tensor.tanh_, "erf": torch.Tensor.erf_,
    "sigmoid": torch.Tensor.sigmoid_, "neg": torch.Tensor.neg_, "abs": torch.Tensor.abs_,
}  # fmt: skip
_BOUND = {"max": (torch.clamp_min, torch.Tensor.clamp_min_), "min": (torch.clamp_max, torch.Tensor.clamp_max_)}
_NUMBERS = ("add", "sub", "mul", "div", "pow")  # a literal may be a number: it is rounded to the tensor's dtype all the same
_FLOATS = ("f32", "f64")


@dataclass(frozen=True, slots=True)
class Node:
    """A value, and whether it is a new tensor that nobody else holds."""

    run: Value
    fresh: bool


def compile_value(e: Expr, index: Mapping[Index, Tensor], *, owned: bool) -> Node:
    """The value of an expression from those of its reads and of the reduced state.

    Args:
        index: values of its index expressions.
        owned: the states are new dense tensors, and nobody needs them afterwards.
    """
    uses = sum(isinstance(x, Acc) for x in _uses(e))
    return _node(e, index, owned and uses == 1)


def _uses(e: Expr) -> list[Expr]:
    """Leaves that are evaluated, with natives as one use of their argument."""
    found = native(e)
    if found:
        return _uses(found[1])
    return [x for a in e.args for x in _uses(a)] if isinstance(e, Call) else [e]


def _node(e: Expr, index: Mapping[Index, Tensor], owned: bool) -> Node:
    match e:
        case Arg():
            at = e.pos
            return Node(lambda args, _: args[at], False)
        case Acc():
            field = e.field
            return Node(lambda _, states: states[field], owned)
        case Let():
            at = e.pos
            return Node(lambda _, states: states[at], False)
        case Const():
            return Node(_literal(e), False)
        case Index():
            values = index[e]
            return Node(lambda args, states: values, False)
        case Call():
            return _call(e, index, owned)


def _call(e: Call, index: Mapping[Index, Tensor], owned: bool) -> Node:
    found = native(e)
    if found:
        return _unary(_node(found[1], index, owned), *NATIVE[found[0]])
    if e.dtype in _FLOATS and len(e.args) == 2 and isinstance(e.args[1], Const):
        bound = _bound(e, index, owned)
        if bound:
            return bound
    if found := _no_nan(e):
        bounded, number = found
        ends = {"nan": number, "posinf": float("inf"), "neginf": -float("inf")}
        return _unary(_node(bounded, index, owned), lambda t: t.nan_to_num(**ends), lambda t: t.nan_to_num_(**ends))
    parts = [_node(a, index, owned) for a in e.args]
    if e.fn == "cast":
        dtype, source = e.dtype, e.args[0].dtype
        new = scalars.TORCH_DTYPES[dtype] is not scalars.TORCH_DTYPES[source]
        return Node(lambda args, states: scalars.cast(parts[0].run(args, states), dtype, source), new)
    if e.dtype in _FLOATS and e.fn in _PLACE:
        if len(parts) == 1:
            return _unary(parts[0], scalars.TABLE[e.fn], _PLACE[e.fn])
        return _binary(e.fn, parts[0], parts[1])
    if e.fn == "where":
        return _where(*parts)
    fn = e.fn
    return Node(lambda args, states: scalars.apply(fn, [p.run(args, states) for p in parts]), False)


def _no_nan(e: Call) -> tuple[Expr, float] | None:
    """The last two arguments of ``where(isnan(x), number, min(max(x, low), high))``: bounds keep a NaN, so x is needed once."""
    if e.fn != "where" or e.dtype not in _FLOATS:
        return None
    test, number, bounded = e.args
    if not isinstance(test, Call) or test.fn != "isnan" or not isinstance(number, Const) or not isinstance(bounded, Call):
        return None
    inner = bounded.args[0]
    if bounded.fn != "min" or not isinstance(bounded.args[1], Const) or _lower(inner) is None or not isinstance(inner, Call):
        return None
    return (bounded, float(number.value)) if test.args[0] == inner.args[0] else None


def _literal(e: Const) -> Value:
    """A literal where the arguments are; on a GPU it is filled in, since a CUDA graph cannot capture copying it there."""
    dtype = scalars.TORCH_DTYPES[e.dtype]
    literal = torch.tensor([e.value, e.value], dtype=dtype)[0]  # a part of its memory: no result takes it for its own buffer

    def run(args: Args, _: Sequence[Tensor]) -> Tensor:
        given = next(iter(args.values()), literal)
        return literal if given.device.type == "cpu" else torch.full((), e.value, dtype=dtype, device=given.device)

    return run


def _bound(e: Call, index: Mapping[Index, Tensor], owned: bool) -> Node | None:
    """A tensor and a number."""
    literal = e.args[1]
    assert isinstance(literal, Const)
    number = float(literal.value)
    inner = e.args[0]
    lower = _lower(inner) if e.fn == "min" and number == number else None
    if lower is not None and isinstance(inner, Call):  # torch's clamp, as ours, takes the upper bound where the two cross
        x = _node(inner.args[0], index, owned)
        return _unary(x, lambda t: torch.clamp(t, lower, number), lambda t: t.clamp_(lower, number))
    if e.fn in _BOUND and number == number:
        new, place = _BOUND[e.fn]
    elif e.fn in _NUMBERS:
        new = scalars.TABLE[e.fn] if e.fn != "div" else torch.div
        place = _PLACE.get(e.fn, torch.Tensor.pow_)
    else:
        return None
    x = _node(inner, index, owned)
    if not any(isinstance(a, Arg | Acc | Let) for a in walk(inner)):  # a number too: the table keeps its dtype
        return None
    return _unary(x, lambda t: new(t, number), lambda t: place(t, number))


def _where(test: Node, yes: Node, no: Node) -> Node:
    """A choice; where its test is one for many points (a row without keys) and nowhere true, there is none to make."""

    def run(args: Args, states: Sequence[Tensor]) -> Tensor:
        c, b = test.run(args, states), no.run(args, states)
        a = yes.run(args, states)
        rare = c.device.type == "cpu" and c.numel() * 16 <= b.numel()  # a CUDA graph cannot capture a look at the data
        if rare and _covers(b, c) and _covers(b, a) and not bool(c.any()):
            return b
        return scalars.apply("where", [c, a, b])

    return Node(run, no.fresh)


def _lower(e: Expr) -> float | None:
    """The number in ``max(x, number)``."""
    if not isinstance(e, Call) or e.fn != "max" or not isinstance(e.args[1], Const) or isinstance(e.args[0], Const):
        return None
    number = float(e.args[1].value)
    return number if number == number else None


def _unary(x: Node, new: Callable[[Tensor], Tensor], place: Callable[[Tensor], Tensor]) -> Node:
    run, do = x.run, place if x.fresh else new
    return Node(lambda args, states: do(run(args, states)), True)


def _binary(fn: str, left: Node, right: Node) -> Node:
    """Into the operand that is new and as large as the result."""
    new, place, a, b = scalars.TABLE[fn], _PLACE[fn], left.run, right.run
    either = right.fresh and PRIMITIVES[fn].commutative
    if not left.fresh and not either:
        return Node(lambda args, states: new(a(args, states), b(args, states)), True)

    def run(args: Args, states: Sequence[Tensor]) -> Tensor:
        x, y = a(args, states), b(args, states)
        if left.fresh and _covers(x, y):
            return place(x, y)
        if either and _covers(y, x):
            return place(y, x)
        return new(x, y)

    return Node(run, True)


def _covers(x: Tensor, y: Tensor) -> bool:
    """Whether the result has the shape of x (both are of one dtype)."""
    if x.shape == y.shape:
        return True
    return x.dim() >= y.dim() and all(m == n or n == 1 for m, n in zip(reversed(x.shape), reversed(y.shape), strict=False))
