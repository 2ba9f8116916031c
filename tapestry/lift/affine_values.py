"""Values of integer tensors as index expressions: what makes a Gather by computed positions a plain view.

Exporters compute positions (Range, Unsqueeze, Expand, Concat, …) and gather with them. Following an index tensor back
through the maps that made it, at symbolic coordinates, gives its value as an affine expression, when it is one.
"""

from __future__ import annotations

import numpy as np

from tapestry.ir.expr import Arg, Call, Const, Expr
from tapestry.ir.expr import Index as At
from tapestry.ir.graph import Block, placed
from tapestry.ir.index import Aff, const, floordiv, modulo, span, substitute
from tapestry.ir.types import INTEGERS
from tapestry.lift.builder import Builder

DEPTH = 40  # operations followed back at most


def affine_value(b: Builder, tensor: str, at: tuple[Aff, ...], ranges: dict[str, int], depth: int = DEPTH) -> Aff | None:
    """The value of an integer tensor at a position, as an index expression over the dimensions of ``ranges``, or None."""
    value = b.value(tensor)
    if value is not None:
        return _constant_index(b, tensor, value, at, ranges)
    op = b.maker.get(tensor)
    if depth == 0 or op is None or op.monoid is not None or b.tensors[tensor].dtype not in INTEGERS:
        return None
    env = placed(op.dims, at)
    return _Walk(b, op, env, ranges, depth).value(op.body[0])


def index_value(b: Builder, op: Block, e: Expr) -> Aff | None:
    """The value of an integer expression of an operation, as an index expression over its dimensions, or None."""
    return _Walk(b, op, {}, op.ranges, DEPTH).value(e)


def _constant_index(b: Builder, name: str, value: np.ndarray, at: tuple[Aff, ...], ranges: dict[str, int]) -> Aff | None:
    if not np.issubdtype(value.dtype, np.integer) or value.size == 0:
        return None
    if all(e.is_affine and not e.terms for e in at):
        place = tuple(e.const for e in at)
        inside = all(0 <= p < s for p, s in zip(place, value.shape, strict=True))
        return const(int(value[place])) if inside else None
    if name not in b.fits:
        b.fits[name] = fit(value)
    progression = b.fits[name]
    if progression is None or not _spans_inside(at, value.shape, ranges):
        return None
    first, steps = progression
    return sum((e * step for e, step in zip(at, steps, strict=True)), const(first))


def _spans_inside(at: tuple[Aff, ...], shape: tuple[int, ...], ranges: dict[str, int]) -> bool:
    spans = (span(e, ranges) for e in at)
    return all(lo >= 0 and hi < s for (lo, hi), s in zip(spans, shape, strict=True))


def fit(value: np.ndarray) -> tuple[int, list[int]] | None:
    """First element and step per axis, if the array is an arithmetic progression along every axis."""
    first = int(value.reshape(-1)[0])
    steps: list[int] = []
    total = np.full(value.shape, first, np.int64)
    for axis, size in enumerate(value.shape):
        corner = [0] * value.ndim
        corner[axis] = min(1, size - 1)
        step = int(value[tuple(corner)]) - first
        steps.append(step)
        shape = [1] * value.ndim
        shape[axis] = size
        total = total + step * np.arange(size, dtype=np.int64).reshape(shape)
    return (first, steps) if np.array_equal(total, value) else None


class _Walk:
    """Evaluates one operation's body at symbolic coordinates."""

    def __init__(self, b: Builder, op: Block, env: dict[str, Aff], ranges: dict[str, int], depth: int) -> None:
        self.b, self.op, self.env, self.ranges, self.depth = b, op, env, ranges, depth

    def value(self, e: Expr) -> Aff | None:
        if isinstance(e, Const):
            return const(int(e.value)) if not isinstance(e.value, float) else None
        if isinstance(e, At):
            return substitute(e.aff, self.env, self.ranges)
        if isinstance(e, Arg):
            return self.read(e.pos)
        return self.call(e) if isinstance(e, Call) else None

    def read(self, pos: int) -> Aff | None:
        r = self.op.reads[pos]
        at = tuple(substitute(e, self.env, self.ranges) for e in r.index)
        if r.other is not None and (r.when or not _spans_inside(at, self.b.tensors[r.tensor].shape, self.ranges)):
            return None
        return affine_value(self.b, r.tensor, at, self.ranges, self.depth - 1)

    def call(self, e: Call) -> Aff | None:
        if e.fn == "cast":
            return self.value(e.args[0]) if e.dtype in INTEGERS and e.args[0].dtype in INTEGERS else None
        if e.fn == "where":
            verdict = self.test(e.args[0])
            return None if verdict is None else self.value(e.args[1 if verdict else 2])
        if e.fn not in ("add", "sub", "mul", "div", "mod", "neg"):
            return None
        values = [v for a in e.args if (v := self.value(a)) is not None]
        return self.arithmetic(e.fn, values) if len(values) == len(e.args) else None

    def arithmetic(self, fn: str, v: list[Aff]) -> Aff | None:
        if fn == "neg":
            return v[0] * -1
        a, b = v
        if fn in ("add", "sub"):
            return a + b if fn == "add" else a - b
        if fn == "mul":
            return b * a.const if not a.terms else a * b.const if not b.terms else None
        if b.terms or b.const <= 0 or (fn == "div" and span(a, self.ranges)[0] < 0):
            return None
        return (floordiv if fn == "div" else modulo)(a, b.const, self.ranges)

    def test(self, e: Expr) -> bool | None:
        """The truth of a comparison if it is the same at every position."""
        if not isinstance(e, Call) or e.fn not in ("lt", "ge", "le", "gt") or e.args[0].dtype not in INTEGERS:
            return None
        a, b = self.value(e.args[0]), self.value(e.args[1])
        if a is None or b is None:
            return None
        lo, hi = span(a - b, self.ranges)
        yes, no = {"lt": (hi < 0, lo >= 0), "ge": (lo >= 0, hi < 0), "le": (hi <= 0, lo > 0), "gt": (lo > 0, hi <= 0)}[e.fn]
        return True if yes else False if no else None
