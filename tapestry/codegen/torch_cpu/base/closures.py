"""Expressions as closures over torch operators, made once: natives by structure, literals as numbers, in place if it may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from tapestry.codegen.torch_cpu.base import scalars
from tapestry.codegen.torch_cpu.base.scalars import NAMES, NATIVE, UNSIGNED, added_first, native
from tapestry.ir.expr import PRIMITIVES, Acc, Arg, Call, Const, Expr, Index, Let, walk
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel
from tapestry.ir.monoid import MONOIDS, Best, ByPrimitive, Moments, Monoid, parts_of
from tapestry.ir.recognise import Exponential, exponential, only_sums

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


# How torch merges the states of a monoid: dense operators, chosen by its structure, or its ``combine``.


Reducer = Callable[[list[Tensor], tuple[int, ...]], list[Tensor]]
"""From the fields of states, merged along some axes to the end, to the fields of what they come to."""


def reduce(monoid: str, fields: list[Tensor], keep: int) -> list[Tensor]:
    """Merge states along all axes after the first ``keep``, in one pass of dense torch operators where one is known.

    A NaN is never dropped: ``amax`` and ``amin`` propagate it. The parts of a product are merged each in its own way.
    """
    parts = parts_of(monoid)
    if len(parts) > 1:
        return [x for name, a, b in parts for x in reduce(name, fields[a:b], keep)]
    dims = tuple(range(keep, fields[0].dim()))
    if not dims:
        return fields
    if not fields[0].shape[keep:].numel():  # nothing to merge
        zeros = MONOIDS[monoid].zero(tuple(NAMES[f.dtype] for f in fields))
        return [torch.full(f.shape[:keep], z.value, dtype=f.dtype) for f, z in zip(fields, zeros, strict=True)]
    reducer = None if fields[0].dtype in UNSIGNED else dense(monoid)
    return reducer(fields, dims) if reducer else fold(monoid, fields, keep)


def _sum(fields: list[Tensor], dims: tuple[int, ...]) -> list[Tensor]:
    return [torch.sum(f, dim=dims, dtype=f.dtype) for f in fields]


def _prod(fields: list[Tensor], dims: tuple[int, ...]) -> list[Tensor]:
    x = fields[0].flatten(dims[0])
    return [torch.prod(x, dim=-1, dtype=x.dtype)]


def _moments(fields: list[Tensor], dims: tuple[int, ...]) -> list[Tensor]:
    n, mean, m2 = fields
    total = torch.sum(n, dim=dims, keepdim=True)
    centre = torch.sum(n * mean, dim=dims, keepdim=True) / torch.where(total == 0, torch.ones_like(total), total)
    spread = torch.sum(m2 + n * (mean - centre) ** 2, dim=dims)
    return [total.flatten(dims[0])[..., 0], centre.flatten(dims[0])[..., 0], spread]


def weigh(weights: Exponential, scores: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(the centre of scores along some axes, which are kept; the weight of every score beside it)."""
    centre = (torch.amax if weights.fn == "max" else torch.amin)(scores, dim=dims, keepdim=True)
    away = scores - centre if weights.rate == 1 else (scores - centre) * weights.rate
    return centre, torch.where(scores == centre, torch.ones_like(scores), torch.exp(away))


def _weighted(weights: Exponential) -> Reducer:
    def reduce_sums(fields: list[Tensor], dims: tuple[int, ...]) -> list[Tensor]:
        centre, scale = weigh(weights, fields[0], dims)
        return [centre.flatten(dims[0])[..., 0], *(torch.sum(x * scale, dim=dims) for x in fields[1:])]

    return reduce_sums


def _best(pick: Callable[..., Tensor]) -> Reducer:
    def reduce_arg(fields: list[Tensor], dims: tuple[int, ...]) -> list[Tensor]:
        v, i = fields
        top = pick(v, dim=dims, keepdim=True)
        hit = (v == top) | (torch.isnan(v) & torch.isnan(top)) if v.is_floating_point() else v == top
        last = torch.full((), torch.iinfo(i.dtype).max, dtype=i.dtype, device=i.device)
        return [top.flatten(dims[0])[..., 0], torch.amin(torch.where(hit, i, last), dim=dims)]

    return reduce_arg


def _extreme(pick: Callable[..., Tensor]) -> Reducer:
    return lambda fields, dims: [pick(fields[0], dim=dims)]


def _truth(merge: Callable[..., Tensor]) -> Reducer:
    return lambda fields, dims: [merge(fields[0].flatten(dims[0]), dim=-1)]


_PRIMITIVES: dict[str, Reducer] = {
    "add": _sum, "mul": _prod, "max": _extreme(torch.amax), "min": _extreme(torch.amin), "or": _truth(torch.any),
    "and": _truth(torch.all),
}  # fmt: skip


def dense(monoid: str) -> Reducer | None:
    """Dense torch operators that merge the states of a monoid, by its structure; ``None`` where there are none."""
    structure = MONOIDS[monoid].structure
    match structure:
        case ByPrimitive():
            return _PRIMITIVES.get(structure.fn)
        case Moments():
            return _moments
        case Best():
            return _best(torch.amax if structure.better == "gt" else torch.amin)
        case _ if only_sums(monoid):
            return _sum
        case _:
            weights = exponential(monoid)
            return _weighted(weights) if weights else None


def combine(monoid: str, a: list[Tensor], b: list[Tensor], dtypes: tuple[str, ...]) -> list[Tensor]:
    """One merge of two states, a before b."""
    args = dict(enumerate([*a, *b]))
    return [node.run(args, []) for node in _combiner(MONOIDS[monoid], dtypes)]


@lru_cache(maxsize=1 << 8)
def _combiner(monoid: Monoid, dtypes: tuple[str, ...]) -> list[Node]:
    return [compile_value(e, {}, owned=False) for e in monoid.combiner(dtypes)]


def fold(monoid: str, fields: list[Tensor], keep: int) -> list[Tensor]:
    """Any monoid, by halving in order: neighbours merge, so that associativity alone is needed."""
    flat = [f.flatten(keep) for f in fields]
    dtypes = tuple(NAMES[f.dtype] for f in flat)
    while (n := flat[0].shape[-1]) > 1:
        even = n - n % 2
        merged = combine(monoid, [f[..., 0:even:2] for f in flat], [f[..., 1:even:2] for f in flat], dtypes)
        flat = [torch.cat([m, f[..., even:]], dim=-1) for m, f in zip(merged, flat, strict=True)]
    return [f[..., 0] for f in flat]


# What follows a sum of products, as far as the operation that makes the sum may do it: bias, residual, clamp.


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


def epilogue(op: Block, kernel: Kernel, columns: str, *, whole: bool) -> Epilogue:
    """What of an operation's ``then`` may be done with the sum.

    Args:
        columns: the dimension along which a bias may vary.
        whole: all of it, where it is no more than that; else a bias at most.
    """

    def is_bias(k: int) -> bool:
        r = op.reads[k]
        return len(r.index) == 1 and r.index[0].is_dim and str(r.index[0]) == columns and not r.when and r.other is None

    def is_residual(k: int) -> bool:
        r, box = op.reads[k], kernel.ins[k]
        axes = sorted(str(e) if e.is_dim else "" for e in r.index)  # in any order: the kernel takes a view
        return axes == sorted(d.name for d in op.dims) and not r.when and r.other is None and box is not None

    found = _all_of(op.then[0], is_bias, is_residual) if whole and len(op.then) == 1 else None
    if found:
        return found
    bias = added_first(op.then, is_bias)
    return Epilogue(bias=bias[0], rest=bias[1]) if bias else Epilogue(rest=op.then)


def _all_of(e: Expr, is_bias: Test, is_residual: Test) -> Epilogue | None:
    high, e = _bound_of_epilogue(e, "min", math.inf)
    low, e = _bound_of_epilogue(e, "max", -math.inf)
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


def _bound_of_epilogue(e: Expr, fn: str, none: float) -> tuple[float, Expr]:
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
