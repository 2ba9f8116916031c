"""Values of a graph at some cells of a tensor, computed on demand: no more of any tensor than those cells depend on.

So a product of large matrices is compared at cells of its own size. Reductions merge their states pairwise, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from tapestry.errors import LawError
from tapestry.ir.expr import Arg, Expr, distinct
from tapestry.ir.graph import Block, Graph, Read
from tapestry.ir.index import evaluate
from tapestry.ir.laws import where
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.types import numpy_dtype
from tapestry.verify import distinct_cells, interp
from tapestry.verify.rewriting.draws import Draw

Array = np.ndarray[Any, Any]
CHUNK = 1 << 18  # points that are computed at a time


class TooMuch(Exception):
    """The cells asked for depend on more points than may be computed."""


Place = tuple[tuple[int, ...], Array, Array, Array]
"""Of a read: the shape of its values, which are inside the tensor, the distinct cells, which of them each value inside is."""


@dataclass
class Cells:
    """The cells of one graph for one draw of its inputs.

    Attributes:
        order: number of each input, by which it is drawn: the same in the graphs that are compared.
        wide: whether floats are computed in float64.
        most: points that may be computed.
        places: where each read looks, in the order in which they are met: the same for every draw, so they are found once.
        asked: the cells of each input that were read.
    """

    graph: Graph
    order: Mapping[str, int]
    draw: Draw
    wide: bool
    most: int
    points: int = 0
    places: list[Place] = field(default_factory=list[Place])
    met: int = 0
    asked: dict[str, list[Array]] = field(default_factory=dict[str, list[Array]])

    def __post_init__(self) -> None:
        self.makers = {t: op for op in self.graph.ops for t in op.outs}

    def at(self, tensor: str, flat: Array) -> Array:
        """Values of some cells of a tensor, given by their row-major positions.

        Raises:
            TooMuch: they depend on too many points; LawError: a read leaves its tensor.
        """
        t = self.graph.tensors[tensor]
        op = self.makers.get(tensor)
        if op is None:
            self.asked.setdefault(tensor, []).append(flat)
            return self.draw.values(t, self.order[tensor], flat).astype(numpy_dtype(t.dtype, self.wide))
        if not isinstance(op, Block):
            raise TooMuch
        each = prod(d.size for d in (*op.reduce, *op.inner_dims))
        self.points += each * len(flat)
        if self.points > self.most:
            raise TooMuch
        step = max(1, CHUNK // max(1, each))
        coords = np.unravel_index(flat, t.shape) if t.shape else ()
        parts = [
            self._block(op, tensor, [c[k : k + step] for c in coords], min(step, len(flat) - k))
            for k in range(0, len(flat), step)
        ]
        out = np.concatenate(parts) if parts else np.zeros(0)
        return out.astype(numpy_dtype(t.dtype, self.wide))

    def _block(self, op: Block, tensor: str, coords: Sequence[Array], n: int) -> Array:
        k = op.outs.index(tensor)
        env: dict[str, Array] = {d.name: c for d, c in zip(op.dims, coords, strict=True)}
        if op.monoid is None:
            return np.broadcast_to(self._value(op, op.body[k], env, [], (n,)), (n,))
        rank = 1 + len(op.reduce) + len(op.inner_dims)
        within = {name: c.reshape(-1, *(1,) * (rank - 1)) for name, c in env.items()}
        for axis, d in enumerate((*op.reduce, *op.inner_dims), 1):
            within[d.name] = np.arange(d.size).reshape([-1 if i == axis else 1 for i in range(rank)])
        lets, first = list[Array](), 1 + len(op.reduce)
        for s in op.inner:
            axes, sizes = range(first, first + len(s.dims)), [d.size for d in s.dims]
            first += len(s.dims)
            body = self._value(op, s.body, within, [], (n,))
            body = np.reshape(body, (1,) * (rank - body.ndim) + body.shape)
            shape = [sizes[a - axes.start] if a in axes else w for a, w in enumerate(body.shape)]
            flat = np.moveaxis(np.broadcast_to(body, shape), axes, range(-len(sizes), 0)).reshape(
                *(w for a, w in enumerate(shape) if a not in axes), prod(sizes)
            )
            total = _merged(s.monoid, (s.body.dtype,), [flat])[0]
            lets.append(np.expand_dims(total, tuple(axes)))
        shape = (n, *(d.size for d in op.reduce), *(1 for _ in op.inner_dims))
        many = prod(shape[1:])
        fields = [np.broadcast_to(self._value(op, e, within, lets, (n,)), shape).reshape(n, many) for e in op.body]
        state = _merged(op.monoid, tuple(e.dtype for e in op.body), fields)
        return np.broadcast_to(self._value(op, op.then[k], env, state, (n,)), (n,))

    def _value(self, op: Block, e: Expr, env: Mapping[str, Array], state: list[Array], lead: tuple[int, ...]) -> Array:
        needed = {x.pos for x in distinct((e,)) if isinstance(x, Arg)}
        args = [self._read(op, r, env) if k in needed else np.zeros(()) for k, r in enumerate(op.reads)]
        with np.errstate(all="ignore"):
            return np.asarray(interp.value(e, args, state, env, self.wide))

    def _read(self, op: Block, r: Read, env: Mapping[str, Array]) -> Array:
        t = self.graph.tensors[r.tensor]
        if self.met == len(self.places):
            self.places.append(self._place(op, r, env))
        shape, valid, wanted, back = self.places[self.met]
        self.met += 1
        out = np.full(shape, 0 if r.other is None else r.other, numpy_dtype(t.dtype, self.wide))
        if len(wanted):
            out[valid] = self.at(r.tensor, wanted)[back]
        return out

    def _place(self, op: Block, r: Read, env: Mapping[str, Array]) -> Place:
        t = self.graph.tensors[r.tensor]
        index = [np.asarray(evaluate(e, env)) for e in r.index]
        valid = np.ones((), bool)
        for i, n in zip(index, t.shape, strict=True):
            valid = valid & (i >= 0) & (i < n)
        for g in r.when:
            v = np.asarray(evaluate(g.aff, env))
            valid = valid & (v >= 0 if g.op == "ge" else v == 0)
        if r.other is None and not np.all(valid):
            raise LawError("reads_inside", f"reads '{r.tensor}' outside its cells", where=where(op))
        shape = np.broadcast_shapes(valid.shape, *(i.shape for i in index))
        self.points += prod(shape)
        if self.points > self.most:
            raise TooMuch
        flat = np.zeros(shape, np.int64)
        for i, n in zip(index, t.shape, strict=True):
            flat = flat * n + np.clip(i, 0, max(0, n - 1))
        valid = np.broadcast_to(valid, shape)
        return shape, valid, *distinct_cells.distinct(flat[valid], t.size)


def _merged(monoid: str, dtypes: tuple[str, ...], fields: list[Array]) -> list[Array]:
    """The states along the last axis merged into one, pairwise and in order."""
    zero = [np.asarray(z.value, f.dtype) for z, f in zip(MONOIDS[monoid].zero(dtypes), fields, strict=True)]
    n = fields[0].shape[-1]
    if n == 0:
        return [np.broadcast_to(z, f.shape[:-1]) for z, f in zip(zero, fields, strict=True)]
    while n > 1:
        if n % 2:
            fields = [
                np.concatenate([f, np.broadcast_to(z, (*f.shape[:-1], 1))], axis=-1) for f, z in zip(fields, zero, strict=True)
            ]
        fields = interp.merged(monoid, dtypes, [f[..., ::2] for f in fields], [f[..., 1::2] for f in fields])
        n = fields[0].shape[-1]
    merged = interp.merged(
        monoid,
        dtypes,
        [np.broadcast_to(z, f.shape[:-1]) for f, z in zip(fields, zero, strict=True)],
        [f[..., 0] for f in fields],
    )
    return merged
