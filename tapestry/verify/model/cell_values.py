"""Values of a graph's operations at chosen cells, from given values of other tensors: vectorised over the cells.

A tensor that is not given is followed back to those that are, at the cells that are asked for alone. Floats are computed in
float64, or as the graph says; with noise every rounding is made larger and random (Monte Carlo arithmetic: Parker 1997), so
that the spread of the results says what rounding, and a decision taken just at its edge, may do to a cell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tapestry.errors import LawError
from tapestry.ir.expr import Call, Const, Index, distinct
from tapestry.ir.graph import Block, Graph, Op, Opaque
from tapestry.ir.index import Aff, Floor, Mod, dims_of
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Product
from tapestry.ir.types import FLOATS, Array, numpy_dtype
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.verify import certificate
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
    "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and,
}  # fmt: skip


class CellValues(Arrays):
    """Evaluates operations of one graph.

    Attributes:
        unit: the coarsest unit roundoff of anything computed since it was last set to 0.
        random: whether anything computed since it was last cleared draws random numbers.
        whole_numbers: whether anything since then was a float made a whole number, of which a NaN or an infinity may be any.
    """

    def __init__(
        self, graph: Graph, known: Known, *, wide: bool = True, noise: np.random.Generator | None = None,
        coarsest: float = 1.0, plain: bool = False, real: bool = False,
    ) -> None:  # fmt: skip
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
        cells, back = certificate.distinct_cells(places, math.prod(shape))
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
        each = max(1, math.prod(d.size for d in (*op.reduce, *op.inner_dims)))
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


# Which cells of an operation are looked at: corners, both sides of every place where a read or a guard changes, and others.


CORNERS = 64
EDGES = 48  # places along one dimension at which something changes


def cells(op: Block, graph: Graph, rng: np.random.Generator, count: int, work: int) -> Array:
    """Cells of an operation's outputs, a row each: all of them where they are no more than ``count``.

    Args:
        count: how many cells besides corners and edges.
        work: index points that all cells together may take; fewer cells where one takes many.
    """
    extents = [d.size for d in op.dims]
    size = math.prod(extents)
    if size == 0:
        return np.zeros((0, len(extents)), int)
    each = max(1, math.prod(d.size for d in (*op.reduce, *op.inner_dims)))
    most = max(2, work // each)
    if size <= min(count, most):
        return np.stack(np.unravel_index(np.arange(size), extents), axis=1) if extents else np.zeros((1, 0), int)
    corners = np.array(list(itertools.islice(itertools.product(*((0, n - 1) for n in extents)), CORNERS)), int)
    edges = [row for k, d in enumerate(op.dims) for row in _edge_cells(k, edges_of(op, graph, d.name, d.size), extents, rng)]
    named = [_compared(op, d.name, d.size)[:8] or [0] for d in op.dims]
    corners = np.concatenate([corners, np.array(list(itertools.islice(itertools.product(*named), CORNERS)), int)])
    others = np.stack([rng.integers(0, n, count) for n in extents], axis=1)
    special = np.unique(np.concatenate([corners, *([np.array(edges, int)] if edges else [])]), axis=0)
    chosen = np.concatenate([special[rng.permutation(len(special))[: max(1, most // 2)]], others])
    return np.unique(chosen[:most], axis=0)


def _edge_cells(axis: int, places: list[int], extents: list[int], rng: np.random.Generator) -> Iterator[list[int]]:
    for place in places:
        row = [int(rng.integers(0, n)) for n in extents]
        row[axis] = place
        yield row


def edges_of(op: Block, graph: Graph, name: str, size: int) -> list[int]:
    """Places along a dimension where a read leaves its tensor, a guard or a comparison turns, or a floor or mod steps."""
    found = {0, 1, size - 2, size - 1}
    ranges = op.ranges
    for r in op.reads:
        for e, extent in zip(r.index, graph.tensors[r.tensor].shape, strict=True):
            found.update(_turns(e, name, ranges, (0, extent)))
        for g in r.when:
            found.update(_turns(g.aff, name, ranges, (0,)))
    found.update(_numbers(op))
    near = sorted({p for f in found for p in (f - 1, f) if 0 <= p < size})
    return near if len(near) <= EDGES else near[: EDGES // 2] + near[-EDGES // 2 :]


def _numbers(op: Block) -> list[int]:
    """Whole numbers in the bodies, with which places may be compared."""
    consts = (x.value for x in distinct((*op.point, *op.then)) if isinstance(x, Const) and not isinstance(x.value, bool))
    return sorted({int(v) for v in consts if math.isfinite(v) and v == int(v)})


def _compared(op: Block, name: str, size: int) -> list[int]:
    """Places along a dimension with which a body compares it alone."""
    found: set[int] = set()
    for x in distinct((*op.point, *op.then)):
        if isinstance(x, Call) and len(x.args) == 2 and x.dtype == "bool":
            place, number = sorted(x.args, key=lambda a: isinstance(a, Const))
            if (
                isinstance(place, Index)
                and isinstance(number, Const)
                and dims_of(place.aff) == frozenset({name})
                and place.aff.coef(name)
            ):
                at = (int(number.value) - place.aff.const) // place.aff.coef(name)
                found.update((at, at - 1, at + 1))
    return sorted(v for v in found if 0 <= v < size)


def _turns(e: Aff, name: str, ranges: Any, levels: tuple[int, ...]) -> Iterator[int]:
    """Where an index expression passes some levels as a dimension goes on, the others at either end of theirs."""
    c = e.coef(name)
    plain = [(str(a), k) for a, k in e.terms if isinstance(a, str) and a != name]
    for ends in (0, 1):
        rest = e.const + sum(k * (ranges[a] - 1) * ends for a, k in plain)
        for level in levels if c else ():
            place = -((rest - level) // c) if c > 0 else (rest - level) // -c + 1
            yield from (place, place + 1)
    for atom, _ in e.terms:
        if isinstance(atom, Floor | Mod) and name in dims_of(atom.arg):
            k = atom.arg.coef(name)
            step = max(1, atom.div // abs(k)) if k else 1
            yield from (step, 2 * step, (ranges[name] - 1) // step * step)


# Whether a value at a cell is the reference's: the same up to rounding, or to what rounding decides at that very cell.
#
# First the result in float64 against a few roundings of the operation's coarsest type, and of everything that it sums. What is
# farther away is judged by evidence: the cell is computed again with every rounding made larger and random. A value is accepted
# where it lies within the spread of the results; one behind a discontinuity (a rounding, a comparison, the place of a maximum)
# where one of them is exactly that value. At last, where infinities and NaN are about, as the graph's own types compute it.


NEAR = 16.0  # roundings, of the value and of a typical one
TRIALS = 12
UNLIKE = 2.5  # of Kolmogorov and Smirnov's statistic: one in 100,000 by chance
SPREAD = 4.0  # times as far from the result as the farthest trial


def same(
    values: Array, slack: Array, reference: Array, dtype: str, unit: float, typical_of: Array | None = None
) -> Array:  # fmt: skip
    """Cells that are the reference's up to rounding; what is a typical value is taken from it, or from ``typical_of``."""
    if dtype not in UNIT:
        return values == reference
    with np.errstate(all="ignore"):
        a, b = as_stored(values, dtype), reference.astype(np.float64)
        finite = np.abs(b if typical_of is None else typical_of.astype(np.float64))
        finite = finite[np.isfinite(finite)]
        typical = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
        near = np.abs(a - b) <= NEAR * max(unit, UNIT[dtype]) * (np.abs(b) + typical) + 2 * np.where(
            np.isfinite(slack), slack, 0
        )
    return (near & np.isfinite(b)) | (a == b) | (np.isnan(a) & np.isnan(b))


def as_stored(values: Array, dtype: str) -> Array:
    """Values in float64, as infinite as their type makes them."""
    from tapestry.ir.types import numpy_dtype

    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        return np.where(np.isinf(values.astype(numpy_dtype(dtype)).astype(np.float64)), np.copysign(np.inf, wide), wide)


def explained(cells: CellValues, op: Block, k: int, points: Array, reference: Array, dtype: str, seed: int) -> Array:
    """Cells whose value rounding explains, of some that are not near their reference."""
    rng = np.random.default_rng(seed)
    middle = cells.block(op, points)[k][0]
    found = np.zeros(len(points), bool)
    floating = dtype in UNIT
    spread = np.zeros(len(points))
    for _ in range(TRIALS):
        noisy = CellValues(cells.graph, cells.known, noise=rng, coarsest=cells.coarsest).block(op, points)[k][0]
        with np.errstate(all="ignore"):
            if floating:
                moved = np.abs(noisy - middle)
                spread = np.fmax(spread, np.where(np.isinf(moved), 0, moved))
                stored = as_stored(noisy, dtype)
                near = np.abs(stored - reference) <= NEAR * UNIT[dtype] * np.abs(reference.astype(np.float64))
                near = np.where(np.isfinite(reference), near, stored == reference)
                found |= near | ((np.isnan(noisy) & np.isnan(reference.astype(np.float64))) & ~np.isnan(middle))
            else:
                found |= noisy == reference
    if floating:
        with np.errstate(all="ignore"):
            found |= np.abs(middle - reference.astype(np.float64)) <= SPREAD * spread
        typed = CellValues(cells.graph, cells.known, wide=False, coarsest=cells.coarsest)
        made = typed.block(op, points)[k][0]
        found |= same(made, np.zeros(len(points)), reference, dtype, typed.unit)
    return found


def other_distribution(theirs: Array, mine: Array) -> str:
    """How two samples differ, by Kolmogorov and Smirnov's test; nothing where they may be of one distribution."""
    a, b = np.sort(theirs.reshape(-1).astype(np.float64)), np.sort(mine.reshape(-1).astype(np.float64))
    if not a.size or not b.size:
        return ""
    every = np.concatenate([a, b])
    apart = np.abs(np.searchsorted(a, every, "right") / a.size - np.searchsorted(b, every, "right") / b.size).max()
    if apart * np.sqrt(a.size * b.size / (a.size + b.size)) <= UNLIKE:
        return ""
    return f"means {a.mean():.4g} and {b.mean():.4g}, standard deviations {a.std():.4g} and {b.std():.4g}"
