"""How torch merges the states of a monoid: dense operators, chosen by its structure, or its ``combine``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from tapestry.codegen.torch_cpu.base.closures import Tensor, Value, compile_value
from tapestry.codegen.torch_cpu.base.scalars import NAMES, UNSIGNED
from tapestry.ir.monoid import MONOIDS, Best, ByPrimitive, Moments, Monoid, parts_of
from tapestry.ir.recognition.contraction import only_sums
from tapestry.ir.recognition.exponential import Exponential, exponential

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
    "add": _sum,
    "mul": _prod,
    "max": _extreme(torch.amax),
    "min": _extreme(torch.amin),
    "or": _truth(torch.any),
    "and": _truth(torch.all),
}


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
    return [run(args, []) for run in _combiner(MONOIDS[monoid], dtypes)]


@lru_cache(maxsize=1 << 8)
def _combiner(monoid: Monoid, dtypes: tuple[str, ...]) -> list[Value]:
    return [compile_value(e, {}) for e in monoid.combiner(dtypes)]


def fold(monoid: str, fields: list[Tensor], keep: int) -> list[Tensor]:
    """Any monoid, by halving in order: neighbours merge, so that associativity alone is needed."""
    flat = [f.flatten(keep) for f in fields]
    dtypes = tuple(NAMES[f.dtype] for f in flat)
    while (n := flat[0].shape[-1]) > 1:
        even = n - n % 2
        merged = combine(monoid, [f[..., 0:even:2] for f in flat], [f[..., 1:even:2] for f in flat], dtypes)
        flat = [torch.cat([m, f[..., even:]], dim=-1) for m, f in zip(merged, flat, strict=True)]
    return [f[..., 0] for f in flat]
