"""Which cells of a result are compared, and around which numbers inputs are drawn: what the operations of both sides name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite, prod

import numpy as np

from tapestry.ir.expr import Call, Const, Expr, Index, distinct
from tapestry.ir.graph import Block, Op
from tapestry.ir.index import Aff, const, dims_of
from tapestry.ir.types import FLOATS, INTEGERS, Array, Tensor

ALL = 60_000  # points behind the cells of an output, up to which all its cells are compared
SOME = 24  # cells at random, beside those that are named
EACH = 24  # places named along one axis, and solutions of one condition
GREAT = 1e6  # beyond it a constant stands for infinity


def chosen(out: Tensor, ops: Iterable[Op]) -> Array:
    """Row-major positions: all where few points are behind them, else corners, edges, places that are named, and others."""
    shape, ops = out.shape, list(ops)
    if out.size * prod(d.size for op in ops if isinstance(op, Block) for d in (*op.reduce, *op.inner_dims)) <= ALL:
        return np.arange(out.size)
    rng = np.random.default_rng(0)
    marks = {m + s for op in ops for m in _places(op) for s in (-1, 0, 1)}
    options = [sorted({0, 1, w // 2, w - 2, w - 1} & set(range(w)) | {m for m in marks if 0 <= m < w}) for w in shape]
    picked = {tuple(int(rng.integers(0, w)) for w in shape) for _ in range(SOME)}
    picked |= {(0,) * len(shape), tuple(w - 1 for w in shape)}
    for k, o in enumerate(options):  # every place once, beside random others
        picked |= {tuple(p if i == k else int(rng.choice(q)) for i, q in enumerate(options)) for p in o[:EACH]}
    for op in ops:
        if isinstance(op, Block) and tuple(d.size for d in op.dims) == shape:
            picked |= {p for e in _conditions(op) for p in _solutions(op, e, rng)}
    return rng.permutation(np.array(sorted(int(np.ravel_multi_index(p, shape)) for p in picked), np.int64))


def numbers(ops: Iterable[Op]) -> list[float]:
    """Constants that operations compare, add or fill in, by magnitude."""
    found = {abs(c) for op in ops for c in _floats(op)}
    return sorted(c for c in found if isfinite(c) and c <= GREAT)[:32]


def expressions(op: Op) -> tuple[Expr, ...]:
    """All of an operation's expressions."""
    return (*op.point, *op.then) if isinstance(op, Block) else ()


def _floats(op: Op) -> Iterator[float]:
    for x in distinct(expressions(op)):
        if isinstance(x, Const) and x.dtype in FLOATS:
            yield float(x.value)
    for r in op.reads if isinstance(op, Block) else ():
        if isinstance(r.other, float):
            yield r.other


def _places(op: Op) -> Iterator[int]:
    for x in distinct(expressions(op)):
        if isinstance(x, Const) and x.dtype in INTEGERS:
            yield int(x.value)
        elif isinstance(x, Index):
            yield abs(x.aff.const)
    for r in op.reads if isinstance(op, Block) else ():
        yield from (abs(g.aff.const) for g in r.when)
        yield from (abs(e.const) for e in r.index if r.other is not None)


def _conditions(op: Block) -> Iterator[Aff]:
    """Expressions over map dimensions whose sign or zero an operation asks for."""
    names = {d.name for d in op.dims}
    for x in distinct(expressions(op)):
        if isinstance(x, Call) and x.fn in ("lt", "le", "gt", "ge", "eq", "ne"):
            left, right = map(_affine, x.args)
            if left is not None and right is not None and dims_of(left - right) and dims_of(left - right) <= names:
                yield left - right
    for r in op.reads:
        yield from (g.aff for g in r.when if dims_of(g.aff) and dims_of(g.aff) <= names)


def _affine(e: Expr) -> Aff | None:
    if isinstance(e, Index):
        return e.aff
    if isinstance(e, Const) and e.dtype in INTEGERS:
        return const(int(e.value))
    if isinstance(e, Call) and e.fn in ("add", "sub"):
        left, right = map(_affine, e.args)
        return None if left is None or right is None else left + right if e.fn == "add" else left - right
    return None


def _solutions(op: Block, e: Aff, rng: np.random.Generator) -> Iterator[tuple[int, ...]]:
    """Points at which an expression is -1, 0 or 1: one of its dimensions is solved for, the others drawn."""
    sizes = {d.name: d.size for d in op.dims}
    steps = [(a, c) for a, c in e.terms if isinstance(a, str) and abs(c) == 1]
    if not steps or len(steps) < len(e.terms):
        return
    for k in range(EACH):
        name, coef = steps[k % len(steps)]
        point = {n: int(rng.integers(0, w)) for n, w in sizes.items()}
        rest = e.const + sum(c * point[a] for a, c in steps if a != name)
        point[name] = (k % 3 - 1 - rest) * coef
        if 0 <= point[name] < sizes[name]:
            yield tuple(point[d.name] for d in op.dims)
