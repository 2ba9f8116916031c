"""One row per scalar primitive, and dense reducers per monoid, in torch operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from tapestry.ir.expr import Acc, Arg, Const, Expr, Index, Let
from tapestry.ir.monoid import MONOIDS, Best, Moments, Primitive, parts_of
from tapestry.ir.philox import philox
from tapestry.ir.recognise.contraction import only_sums
from tapestry.ir.recognise.exponential import Exponential, exponential
from tapestry.ir.types import FLOAT8, STORED, numpy_dtype

Tensor = torch.Tensor
Reducer = Callable[[list[Tensor], tuple[int, ...]], list[Tensor]]
"""From the fields of states, merged along some axes to the end, to the fields of what they come to."""
TORCH_DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
    "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
_FLOAT8 = {d: getattr(torch, numpy_dtype(d).name) for d in FLOAT8}
TORCH_DTYPES |= {d: torch.uint8 for d in STORED if d not in TORCH_DTYPES}  # held as their bits


def _div(a: Tensor, b: Tensor) -> Tensor:
    """Torch raises for an integer over 0, and the processor stops the process for the lowest one over -1."""
    if a.is_floating_point():
        return torch.div(a, b)
    zero = b == 0
    minus = b == -1 if b.dtype.is_signed else zero
    quotient = torch.div(a, b.masked_fill(zero | minus, 1), rounding_mode="trunc").masked_fill(zero, 0)
    return torch.where(minus, -quotient, quotient)


def _rest(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A remainder; that of an integer over 0 is 0, as over 1."""
    return lambda a, b: fn(a, b if a.is_floating_point() else b.masked_fill(b == 0, 1))


def _sign(x: Tensor) -> Tensor:
    """``torch.sign`` makes a NaN a zero."""
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


def root(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The square root, exactly rounded (also into ``out``): MKL's, which torch calls, is off by an ulp in one value of six.

    Random numbers are the same bits on every target only if it is exact; numpy's takes as long.
    """
    if x.dtype not in (torch.float32, torch.float64) or x.device.type != "cpu":
        return torch.sqrt(x) if out is None else torch.sqrt(x, out=out)
    with np.errstate(invalid="ignore"):
        if out is not None:
            np.sqrt(x.numpy(), out=out.numpy())
            return out
        return torch.from_numpy(np.asarray(np.sqrt(x.numpy())))


def _philox(key: Tensor, stream: Tensor, draw: Tensor, word: Tensor, index: Tensor) -> Tensor:
    arrays = [np.asarray(x.numpy()) for x in (key, stream, draw, word, index)]
    return torch.from_numpy(np.ascontiguousarray(philox(*arrays)))


def _either(logical: Callable[..., Tensor], bitwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, *b: logical(a, *b) if a.dtype == torch.bool else bitwise(a, *b)


TABLE: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "mul": torch.mul, "div": _div, "mod": _rest(torch.remainder), "fmod": _rest(torch.fmod),
    "sub": torch.sub, "pow": torch.pow, "min": torch.minimum, "max": torch.maximum, "neg": torch.neg, "abs": torch.abs,
    "sign": _sign, "exp": torch.exp, "log": torch.log, "sqrt": root, "erf": torch.erf, "tanh": torch.tanh,
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "asin": torch.asin, "acos": torch.acos, "atan": torch.atan,
    "sinh": torch.sinh, "cosh": torch.cosh, "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh,
    "sigmoid": torch.sigmoid, "log1p": torch.log1p, "expm1": torch.expm1, "floor": torch.floor, "ceil": torch.ceil,
    "round": torch.round, "isnan": torch.isnan, "isinf": torch.isinf, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt,
    "le": torch.le, "gt": torch.gt, "ge": torch.ge, "and": _either(torch.logical_and, torch.bitwise_and),
    "or": _either(torch.logical_or, torch.bitwise_or), "xor": _either(torch.logical_xor, torch.bitwise_xor),
    "not": _either(torch.logical_not, torch.bitwise_not), "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift, "where": torch.where, "philox": _philox,
}  # fmt: skip


# torch has next to no operators on wide unsigned integers; numpy has them all
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.floor_divide, "mod": np.mod, "fmod": np.fmod,
    "pow": np.power, "min": np.minimum, "max": np.maximum, "neg": np.negative, "abs": np.abs, "sign": np.sign,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "shl": np.left_shift,
    "shr": np.right_shift, "where": np.where,
}  # fmt: skip


def apply(fn: str, operands: list[Tensor]) -> Tensor:
    """One primitive."""
    if operands[-1].dtype in UNSIGNED:
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.array(NUMPY[fn](*(o.numpy() for o in operands))))
    return TABLE[fn](*operands)


def cast(x: Tensor, dtype: str, source: str = "") -> Tensor:
    """ONNX Cast: floats to integers truncate, anything to bool is ``!= 0``; a ``source`` of 8-bit floats comes as its bits."""
    if source in FLOAT8:
        x = x.contiguous().view(_FLOAT8[source]).to(torch.float32)
    return x != 0 if dtype == "bool" else x.to(TORCH_DTYPES[dtype])


def _literal(e: Const, args: dict[int, Tensor]) -> Tensor:
    """A literal where the arguments are; on a GPU it is filled in, since a CUDA graph cannot capture copying it there."""
    device = next((a.device for a in args.values()), None)
    if device is None or device.type == "cpu":
        return torch.tensor(e.value, dtype=TORCH_DTYPES[e.dtype])
    return torch.full((), e.value, dtype=TORCH_DTYPES[e.dtype], device=device)


def value(e: Expr, args: dict[int, Tensor], state: list[Tensor], index: Callable[[Index], Tensor]) -> Tensor:
    """Value of an expression from the values of its reads; tensors broadcast against each other."""
    match e:
        case Arg():
            return args[e.pos]
        case Acc():
            return state[e.field]
        case Let():
            return state[e.pos]
        case Const():
            return _literal(e, args)
        case Index():
            return index(e)
    operands = [value(a, args, state, index) for a in e.args]
    return cast(operands[0], e.dtype, e.args[0].dtype) if e.fn == "cast" else apply(e.fn, operands)


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
        names = {v: k for k, v in TORCH_DTYPES.items()}
        zeros = MONOIDS[monoid].zero(tuple(names[f.dtype] for f in fields))
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


@lru_cache(maxsize=1 << 8)
def dense(monoid: str) -> Reducer | None:
    """Dense torch operators that merge the states of a monoid, by its structure; ``None`` where there are none."""
    structure = MONOIDS[monoid].structure
    match structure:
        case Primitive():
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
    return [value(e, args, [], lambda i: torch.zeros(())) for e in MONOIDS[monoid].combiner(dtypes)]


def fold(monoid: str, fields: list[Tensor], keep: int) -> list[Tensor]:
    """Any monoid, by halving in order: neighbours merge, so that associativity alone is needed."""
    flat = [f.flatten(keep) for f in fields]
    names = {v: k for k, v in TORCH_DTYPES.items()}
    dtypes = tuple(names[f.dtype] for f in flat)
    while (n := flat[0].shape[-1]) > 1:
        even = n - n % 2
        merged = combine(monoid, [f[..., 0:even:2] for f in flat], [f[..., 1:even:2] for f in flat], dtypes)
        flat = [torch.cat([m, f[..., even:]], dim=-1) for m, f in zip(merged, flat, strict=True)]
    return [f[..., 0] for f in flat]
