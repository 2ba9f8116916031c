"""Values of a graph's operations at chosen cells, from given values of other tensors: vectorised over the cells.

A tensor that is not given is followed back to those that are, at the cells that are asked for alone. Floats are computed in
float64, or as the graph says; with noise every rounding is made larger and random (Monte Carlo arithmetic: Parker 1997), so
that the spread of the results says what rounding, and a decision taken just at its edge, may do to a cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tapestry.errors import LawError
from tapestry.ir.expr import Call
from tapestry.ir.graph import Block, Graph, Op, Opaque
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Product
from tapestry.ir.types import FLOATS, Array, numpy_dtype
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.verify import distinct_cells
from tapestry.verify.interp import Arrays, meshed, opaque, steps

Known = Callable[[str], Any]
UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
SUBNORMAL = {"f64": 2.0**-1074, "f32": 2.0**-149, "f16": 2.0**-24, "bf16": 2.0**-133}
CHUNK = 1 << 20  # index points evaluated together
SMALL = 1 << 12  # cells of a tensor that is computed whole, whatever is asked of it
CHAIN = 1 << 22  # index points of a step of a long chain that is computed whole
EXACT = frozenset({"neg", "abs", "where", "min", "max", "floor", "ceil", "round", "sign"})
CURVES = frozenset(
    {"exp", "log", "erf", "tanh", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"}
    | {"sigmoid", "log1p", "expm1", "pow"}
)
ROUNDINGS, CURVE_ROUNDINGS = 4.0, 16.0  # how many roundings of its type a reference's primitive may be wrong by
REDUCERS: dict[str, np.ufunc] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
}


class CellValues(Arrays):
    """Evaluates operations of one graph.

    Attributes:
        unit: the coarsest unit roundoff of anything computed since it was last set to 0.
        random: whether anything computed since it was last cleared draws random numbers.
        whole_numbers: whether anything since then was a float made a whole number, of which a NaN or an infinity may be any.
    """

    def __init__(
        self,
        graph: Graph,
        known: Known,
        *,
        wide: bool = True,
        noise: np.random.Generator | None = None,
        coarsest: float = 1.0,
        plain: bool = False,
        real: bool = False,
    ) -> None:
        """``known`` gives a tensor's array (or host value), and None of one that is to be followed back; ``coarsest`` is the
        unit roundoff beyond which nothing is forgiven, whatever types the graph computes in; with ``plain`` states are merged
        pairwise, and nothing is said of rounding; with ``real`` a cast to a half type does not round either."""
        super().__init__(graph, wide)
        self.known, self.noise, self.coarsest, self.plain, self.real = known, noise, coarsest, plain, real
        self.unit, self.random, self.whole_numbers = 0.0, False, False
        self.makers = graph.producers()
        self._whole: dict[str, tuple[Any, float, bool]] = {}  # value, coarsest unit and randomness of what it is made of

    # tensors
    def at(self, tensor: str, index: Sequence[Array]) -> Array:
        """Cells of a tensor; the index arrays, one per axis, broadcast."""
        source = self._given(tensor)
        if source is None and self._wants_whole(tensor, index):
            source = self.whole(tensor)
        if source is not None:
            return self._typed(tensor, source[tuple(np.broadcast_arrays(*index))] if index else source)
        shape = self.graph.tensors[tensor].shape
        places = np.ravel_multi_index(tuple(np.broadcast_arrays(*index)), shape)
        cells, back = distinct_cells.distinct_cells(places, math.prod(shape))
        op = self.graph.ops[self.makers[tensor]]
        assert isinstance(op, Block)
        values = self.block(op, np.stack(np.unravel_index(cells, shape), axis=1))[op.outs.index(tensor)][0]
        return values[back]

    def whole(self, tensor: str) -> Any:
        """All cells of a tensor, or a value of the host."""
        if (given := self._given(tensor)) is not None:
            return given
        for name in self._behind(tensor):
            op = self.graph.ops[self.makers[name]]
            if name in self._whole or (name != tensor and not self._cheap(op, name)):
                continue
            if isinstance(op, Opaque):
                values = {t: self.stored(t, self.whole(t)) for t in op.inputs}
                made = opaque(op, self.graph, values, wide=False)
                self._keep(op, [self.stored(t, v) for t, v in zip(op.outs, made, strict=True)])
                continue
            shape = self.graph.tensors[name].shape
            points = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), axis=1) if shape else np.zeros((1, 0), int)
            self._keep(op, [v.reshape(shape) for v, _ in self.block(op, points)])
        return self._given(tensor)

    def _keep(self, op: Op, values: list[Any]) -> None:
        self._whole.update((t, (v, self.unit, self.random)) for t, v in zip(op.outs, values, strict=True))

    def stored(self, tensor: str, value: Any) -> Any:
        """A value as the graph's type of the tensor has it: what an ONNX node is given."""
        t = self.graph.tensors[tensor]
        if t.on_host:
            return value if isinstance(value, HostValue) else HostValue(value)
        return np.asarray(value).astype(numpy_dtype(t.dtype), copy=False)

    def _given(self, tensor: str) -> Any:
        source = self.known(tensor)
        if source is None and tensor in self._whole:
            source, unit, random = self._whole[tensor]
            self.unit, self.random = max(self.unit, unit), self.random or random
        return source

    def _typed(self, tensor: str, cells: Array) -> Array:
        dtype = numpy_dtype(self.graph.tensors[tensor].dtype, self.wide)
        return cells if cells.dtype == dtype else cells.astype(dtype)

    def _wants_whole(self, tensor: str, index: Sequence[Array]) -> bool:
        if tensor not in self.makers:
            raise LawError("model", f"'{tensor}' comes from nowhere", where="the graph")
        op = self.graph.ops[self.makers[tensor]]
        size = self.graph.tensors[tensor].size
        asked = math.prod(np.broadcast_shapes(*(i.shape for i in index))) if index else 1
        return isinstance(op, Opaque) or size <= SMALL or 2 * asked >= size or len(self._behind(tensor)) > 8

    def _behind(self, tensor: str) -> list[str]:
        """The tensors that are followed back for this one, itself the last, in the order in which they are made."""
        found, stack = set[str](), [tensor]
        while stack:
            t = stack.pop()
            if t in found or t in self._whole or t not in self.makers or self.known(t) is not None:
                continue
            found.add(t)
            stack += self.graph.ops[self.makers[t]].inputs
        return sorted(found, key=self.makers.__getitem__)

    def _cheap(self, op: Op, name: str) -> bool:
        return isinstance(op, Opaque) or math.prod(d.size for d in op.space) <= CHAIN or self.graph.tensors[name].size <= SMALL

    # operations
    def block(self, op: Block, points: Array) -> list[tuple[Array, Array]]:
        """Of each output the values at some cells (a row of ``points`` each), and how far rounding may move sums there."""
        each = max(1, op.merged_cells)
        step = max(1, CHUNK // each)
        rows = [self._rows(op, points[k : k + step]) for k in range(0, max(len(points), 1), step)]
        return [(np.concatenate([r[k][0] for r in rows]), np.concatenate([r[k][1] for r in rows])) for k in range(len(op.outs))]

    def _rows(self, op: Block, points: Array) -> list[tuple[Array, Array]]:
        count, env = len(points), {d.name: points[:, k] for k, d in enumerate(op.dims)}
        state, slack = self._reduced(op, env, count) if op.monoid else ([], [])
        exprs = op.then if op.monoid else op.body
        values = [np.broadcast_to(v, count).copy() for v in self.exprs(op, exprs, env, state)]
        moved = [np.zeros(count) for _ in values]
        for sign in (-1, 1) if op.monoid and not self.plain else ():
            for k, v in enumerate(
                self.exprs(op, exprs, env, [s if e is None else s + sign * e for s, e in zip(state, slack, strict=True)])
            ):
                if values[k].dtype.kind == "f":
                    with np.errstate(all="ignore"):
                        moved[k] = np.maximum(moved[k], np.abs(v - values[k]))
        return [(v, np.nan_to_num(m, nan=0.0, posinf=0.0)) for v, m in zip(values, moved, strict=True)]

    def _reduced(self, op: Block, env: Mapping[str, Array], count: int) -> tuple[list[Array], list[Array | None]]:
        """The state of each cell, taken a part of the first reduced dimension at a time; and what rounding may do to sums."""
        monoid, kinds, sizes = str(op.monoid), tuple(e.dtype for e in op.body), [d.size for d in op.reduce]
        rest = math.prod((*sizes[1:], *(d.size for d in op.inner_dims)))
        first = sizes[0] if sizes else 1
        step = max(1, CHUNK // max(1, rest * count))
        state: list[Array] | None = None
        slack: list[Array | None] = []
        for lo in range(0, max(first, 1), step):
            box = [(lo, min(first, lo + step)), *((0, n) for n in sizes[1:])][: len(sizes)]
            fields = self.lifted(op, meshed(env, op.reduce, box))
            part, more = self._fold(monoid, kinds, steps(fields, tuple(hi - lo for lo, hi in box)))
            state = part if state is None else self.merge(monoid, kinds, state, part)
            slack = more if not slack else [a if b is None or a is None else a + b for a, b in zip(slack, more, strict=True)]
        assert state is not None
        slack = [None if s is None else s * (8 + math.sqrt(max(1, math.prod(sizes)))) for s in slack]
        if self.noise is not None:
            state = [s if e is None else s + e * self.noise.uniform(-1, 1, s.shape) for s, e in zip(state, slack, strict=True)]
        return state, slack

    # merges
    def fold(self, monoid: str, kinds: tuple[str, ...], fields: list[Array]) -> list[Array]:
        return self._fold(monoid, kinds, fields)[0]

    def _fold(self, monoid: str, kinds: tuple[str, ...], fields: list[Array]) -> tuple[list[Array], list[Array | None]]:
        """The state of all steps; of sums of floats also one rounding of everything that is summed."""
        structure = MONOIDS[monoid].structure
        if self.plain:
            return self._tree(monoid, kinds, fields), [None] * len(fields)
        if isinstance(structure, Product):
            state, slack, at = list[Array](), list[Array | None](), 0
            for part in structure.parts:
                end = at + len(part.fields)
                s, e = self._fold(part.name, kinds[at:end], fields[at:end])
                state, slack, at = [*state, *s], [*slack, *e], end
            return state, slack
        if isinstance(structure, ByPrimitive) and structure.fn in REDUCERS:
            f, kind = fields[0], kinds[0]
            zero = MONOIDS[monoid].zero(kinds)[0].value
            with np.errstate(all="ignore"):
                done = REDUCERS[structure.fn].reduce(f, axis=-1, dtype=f.dtype, initial=np.asarray(zero, f.dtype)[()])
                slack = (
                    np.abs(f).sum(axis=-1) * min(UNIT[kind], self.coarsest)
                    if structure.fn == "add" and kind in FLOATS
                    else None
                )
            if kind in FLOATS:
                self.unit = max(self.unit, min(UNIT[kind], self.coarsest))
            return [done], [None if slack is None else np.nan_to_num(slack, nan=0.0, posinf=0.0)]
        return self._tree(monoid, kinds, fields), [None] * len(fields)

    def _tree(self, monoid: str, kinds: tuple[str, ...], fields: list[Array]) -> list[Array]:
        """Neighbours are merged with each other until one is left."""
        if fields[0].shape[-1] == 0:
            return super().fold(monoid, kinds, fields)
        while (n := fields[0].shape[-1]) > 1:
            even = n // 2 * 2
            merged = self.merge(monoid, kinds, [f[..., 0:even:2] for f in fields], [f[..., 1:even:2] for f in fields])
            fields = [np.concatenate([m, f[..., even:]], axis=-1) for m, f in zip(merged, fields, strict=True)]
        return [f[..., 0] for f in fields]

    # expressions
    def call(self, e: Call, args: list[Array]) -> Array:
        out = super().call(e, args)
        if e.fn == "cast":
            if self.wide and not self.real and UNIT.get(e.dtype, 0.0) > UNIT["f32"]:  # what is made short is made short
                out = np.asarray(out.astype(numpy_dtype(e.dtype)), numpy_dtype(e.dtype, True))
            self.whole_numbers |= out.dtype.kind in "iu" and e.args[0].dtype in FLOATS
        self.random |= e.fn == "philox"
        if e.dtype not in UNIT or e.fn in EXACT:
            return out
        unit = min(UNIT[e.dtype], self.coarsest)
        self.unit = max(self.unit, unit)
        if self.noise is None:
            return out
        curve = e.fn in CURVES
        lost = self.noise.uniform(-1, 1, out.shape) * (SUBNORMAL[e.dtype] if UNIT[e.dtype] <= self.coarsest else 0.0)
        moved = lost + out * (1 + self.noise.uniform(-1, 1, out.shape) * unit * (CURVE_ROUNDINGS if curve else ROUNDINGS))
        return moved + self.noise.uniform(-1, 1, out.shape) * unit * ROUNDINGS if curve else moved
