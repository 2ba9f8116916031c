"""A slow, obviously right evaluator of graphs: every index point, every read by its projection, every merge in order.

Splits are honoured: each block sees only the cells of its own footprint and reading any other is an error, partial
states are merged through the monoid. With ``wide`` all floats are computed in float64, as a reference.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Generic, TypeVar

import numpy as np

from tapestry.errors import LawError
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let
from tapestry.ir.graph import Block, Dim, Graph, Guard, Inner, Op, Opaque, Read
from tapestry.ir.index import Aff, bounds, evaluate
from tapestry.ir.kernel import Box, cut, slices
from tapestry.ir.laws import where
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.types import HOST, Array, numpy_dtype
from tapestry.onnx_eval import opaque_node
from tapestry.verify.plain_philox import WORD, block

# One walk over a block at a point, whatever stands for places and values: arrays of numbers here, index expressions and terms
# in `rewriting.normal_form` and in the proofs of kernels.


P = TypeVar("P")
V = TypeVar("V")


class Walk(ABC, Generic[P, V]):
    """Values ``V`` of blocks at places ``P`` of their dimensions, by name."""

    @abstractmethod
    def const(self, value: float | int | bool, dtype: str) -> V:
        """A literal."""

    @abstractmethod
    def index(self, aff: Aff, env: Mapping[str, P], dtype: str) -> V:
        """An index expression as a value."""

    @abstractmethod
    def call(self, e: Call, args: list[V]) -> V:
        """A primitive."""

    @abstractmethod
    def read(self, op: Block, pos: int, env: Mapping[str, P]) -> V:
        """The cell that a read looks at."""

    @abstractmethod
    def bound(self, op: Block, dims: Sequence[Dim], env: Mapping[str, P]) -> tuple[dict[str, P], Any]:
        """Places with those of reduced dimensions, and what `reduced` needs to know of these."""

    @abstractmethod
    def reduced(self, monoid: str, over: Any, fields: list[V], kinds: tuple[str, ...]) -> list[V]:
        """The state of a reduction."""

    def values(self, op: Block, env: Mapping[str, P], which: Sequence[int] | None = None) -> list[V]:
        """What a block computes, or some of it."""
        exprs, states = op.then if op.monoid else op.body, self.states(op, env) if op.monoid else ()
        return self.exprs(op, exprs if which is None else [exprs[k] for k in which], env, states)

    def states(self, op: Block, env: Mapping[str, P]) -> list[V]:
        """The reduced state of a block."""
        within, over = self.bound(op, op.reduce, env)
        return self.reduced(str(op.monoid), over, self.lifted(op, within), tuple(e.dtype for e in op.body))

    def lifted(self, op: Block, within: Mapping[str, P]) -> list[V]:
        """The state that one step of a reduction brings."""
        return self.exprs(op, op.body, within, [self._inner(op, s, within) for s in op.inner])

    def _inner(self, op: Block, s: Inner, env: Mapping[str, P]) -> V:
        within, over = self.bound(op, s.dims, env)
        return self.reduced(s.monoid, over, self.exprs(op, (s.body,), within, ()), (s.body.dtype,))[0]

    def exprs(self, op: Block, exprs: Sequence[Expr], env: Mapping[str, P], states: Sequence[V]) -> list[V]:
        """Expressions of a block; ``states`` has the reduced fields in ``then``, the inner values in a body."""
        known: dict[object, V] = {}
        return [self.expr(e, lambda pos: self.read(op, pos, env), env, states, known) for e in exprs]

    def expr(self, e: Expr, read: Callable[[int], V], env: Mapping[str, P], states: Sequence[V], known: dict[object, V]) -> V:
        """One expression; ``known`` has the parts that are already computed."""
        key = e if isinstance(e, Arg) else id(e)
        if key not in known:
            match e:
                case Arg(pos):
                    known[key] = read(pos)
                case Acc(k) | Let(k):
                    known[key] = states[k]
                case Const(value, dtype):
                    known[key] = self.const(value, dtype)
                case Index(aff, dtype):
                    known[key] = self.index(aff, env, dtype)
                case Call():
                    known[key] = self.call(e, [self.expr(a, read, env, states, known) for a in e.args])
        return known[key]


def guards(r: Read, shape: Sequence[int]) -> list[Guard]:
    """What holds where a read finds a cell: its guards, and that it is inside the tensor if it may leave that."""
    inside = list[Guard]()
    for e, n in zip(r.index, shape, strict=True) if r.other is not None else ():
        inside += [Guard(e, "ge"), Guard(e * -1 + (n - 1), "ge")]
    return [*inside, *r.when]


def philox(key: Any, stream: Any, draw: Any, word: Any, index: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The primitive ``philox`` of the IR on arrays: word 0..3 for the counter (index lo, index hi, draw, stream)."""

    def one(key: int, stream: int, draw: int, word: int, index: int) -> int:
        high, low = divmod(int(index) % WORD**2, WORD)
        upper, lower = divmod(int(key) % WORD**2, WORD)
        return block((low, high, int(draw) % WORD, int(stream) % WORD), (lower, upper))[int(word)]

    return np.vectorize(one, otypes=[np.int64])(key, stream, draw, word, index)


def run(graph: Graph, feeds: Mapping[str, Array], *, wide: bool = False, independent: bool = True) -> dict[str, Array]:
    """Outputs of a graph.

    Args:
        feeds: an array for every graph input and weight.
        wide: compute floats in float64, whatever the graph says.
        independent: opaque nodes by another library than a target asks, where one is known to be right.
    """

    def stored(name: str, a: Any) -> Any:
        t = graph.tensors[name]
        return opaque_node.HostValue(a) if t.on_host else np.asarray(a).astype(numpy_dtype(t.dtype, wide))

    values = {n: stored(n, a) for n, a in feeds.items()}
    boxes = _Boxes(graph, values, wide)
    for op in graph.ops:
        results = boxes.block(op) if isinstance(op, Block) else opaque(op, graph, values, wide, independent)
        values.update({t: stored(t, a) for t, a in zip(op.outs, results, strict=True)})
    return {t: values[t].value if graph.tensors[t].on_host else values[t] for t in graph.outputs}


def opaque(op: Opaque, graph: Graph, values: Mapping[str, Any], wide: bool, independent: bool = True) -> list[Any]:
    """Outputs of an opaque operation, block by block where it is split."""
    arrays = [values[t] if t else None for t in op.ins]
    if not op.dims:  # whole; values of the host are never taken apart
        return opaque_node.run(op, arrays, _expected(op, graph, (), wide), independent=independent)
    pieces: list[tuple[Box, list[Array]]] = []
    for box in itertools.product(*_ways(op, op.dims)):
        ins = [None if a is None else a[_slices(a.ndim, axes, box)] for a, axes in zip(arrays, op.in_axes, strict=True)]
        pieces.append((box, opaque_node.run(op, ins, _expected(op, graph, box, wide), independent=independent)))
    return [_assemble(op, i, pieces) for i in range(len(op.outs))]


def _expected(op: Opaque, graph: Graph, box: Box, wide: bool) -> list[opaque_node.Expected]:
    """Dtype and shape of each output over a block; with wide inputs some nodes give wide outputs, and some do not."""
    out: list[opaque_node.Expected] = []
    for t, axes in zip(op.outs, op.out_axes, strict=True):
        shape = list(graph.tensors[t].shape)
        for (lo, hi), axis in zip(box, axes, strict=True):
            if axis is not None:
                shape[axis] = hi - lo
        dtype = graph.tensors[t].dtype
        out.append(("" if wide and dtype != HOST else dtype, tuple(shape)))
    return out


def _assemble(op: Opaque, i: int, pieces: list[tuple[Box, list[Array]]]) -> Array:
    axes = op.out_axes[i]
    first = pieces[0][1][i]
    shape = list(first.shape)
    for d, a in zip(op.dims, axes, strict=True):
        assert a is not None
        shape[a] = d.size
    out = np.empty(shape, first.dtype)
    for box, results in pieces:
        out[_slices(out.ndim, axes, box)] = results[i]
    return out


def _slices(rank: int, axes: tuple[int | None, ...], box: Box) -> tuple[slice, ...]:
    out = [slice(None)] * rank
    for a, (lo, hi) in zip(axes, box, strict=True):
        if a is not None:
            out[a] = slice(lo, hi)
    return tuple(out)


def _ways(op: Op, dims: tuple[Dim, ...]) -> list[list[tuple[int, int]]]:
    """The parts of each dimension, as an operation's splits cut it."""
    parts = {d.name: math.prod(s.parts for s in op.splits if s.dim == d.name) for d in dims}
    return [[cut(d.size, parts[d.name], k) for k in range(parts[d.name])] for d in dims]


def meshed(env: Mapping[str, Array], dims: Sequence[Dim], box: Sequence[tuple[int, int]]) -> dict[str, Array]:
    """Places with those of a box as further axes, one per dimension."""
    rank, n = max((a.ndim for a in env.values()), default=0), len(dims)
    out = {name: a.reshape(*a.shape, *[1] * n) for name, a in env.items()}
    for k, (d, (lo, hi)) in enumerate(zip(dims, box, strict=True)):
        out[d.name] = np.arange(lo, hi).reshape(*[1] * (rank + k), hi - lo, *[1] * (n - 1 - k))
    return out


class Arrays(Walk[Array, Array]):
    """Values of blocks at many points at once, those of a box or a list of cells: places are arrays that broadcast.

    An axis keeps an extent of 1 where nothing depends on it. States are merged one point after another.
    """

    def __init__(self, graph: Graph, wide: bool) -> None:
        self.graph, self.wide = graph, wide

    # reads
    def at(self, tensor: str, index: Sequence[Array]) -> Array:
        """Cells of a tensor; the index arrays, one per axis, broadcast."""
        raise NotImplementedError

    def extents(self, r: Read, env: Mapping[str, Array]) -> list[tuple[int, int]]:
        """The lowest place along each axis of what is read, and the end."""
        return [(0, n) for n in self.graph.tensors[r.tensor].shape]

    def looked_at(self, op: Block, r: Read, env: Mapping[str, Array]) -> tuple[list[Array], Array]:
        """Where a read looks, along each axis, and where that is inside and its guards hold.

        Raises:
            LawError: it is outside, and nothing stands for what is there.
        """
        index = [np.asarray(evaluate(e, env)) for e in r.index]
        valid = np.ones((), bool)
        for i, (lo, hi) in zip(index, self.extents(r, env), strict=True):
            valid = valid & (i >= lo) & (i < hi)
        for g in r.when:
            v = np.asarray(evaluate(g.aff, env))
            valid = valid & (v >= 0 if g.op == "ge" else v == 0)
        if r.other is None and not np.all(valid):
            raise LawError("reads_inside", f"reads '{r.tensor}' outside of what is there", where=where(op))
        return index, valid

    def read(self, op: Block, pos: int, env: Mapping[str, Array]) -> Array:
        r = op.reads[pos]
        t = self.graph.tensors[r.tensor]
        index, valid = self.looked_at(op, r, env)
        if np.all(valid):
            return self.at(r.tensor, index)
        other = np.asarray(r.other, numpy_dtype(t.dtype, self.wide))
        if 0 in t.shape or not np.any(valid):
            return np.broadcast_to(other, valid.shape)
        inside = [np.clip(i, 0, n - 1) for i, n in zip(index, t.shape, strict=True)]
        return np.where(valid, self.at(r.tensor, inside), other)

    # reductions
    def bound(self, op: Block, dims: Sequence[Dim], env: Mapping[str, Array]) -> tuple[dict[str, Array], tuple[int, ...]]:
        sizes = tuple(d.size for d in dims)
        return meshed(env, dims, [(0, n) for n in sizes]), sizes

    def reduced(self, monoid: str, over: tuple[int, ...], fields: list[Array], kinds: tuple[str, ...]) -> list[Array]:
        return self.fold(monoid, kinds, steps(fields, over))

    def fold(self, monoid: str, kinds: tuple[str, ...], fields: list[Array]) -> list[Array]:
        """The merged state of all steps, which are along the last axis."""
        zero = MONOIDS[monoid].zero(kinds)
        state = [np.full(f.shape[:-1], z.value, f.dtype) for z, f in zip(zero, fields, strict=True)]
        for k in range(fields[0].shape[-1]):
            state = self.merge(monoid, kinds, state, [f[..., k] for f in fields])
        return state

    def merge(self, monoid: str, kinds: tuple[str, ...], a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
        """Two states merged."""
        fields, known, exprs = [*a, *b], dict[object, Array](), MONOIDS[monoid].combiner(kinds)
        with np.errstate(all="ignore"):
            made = [self.expr(e, fields.__getitem__, {}, (), known) for e in exprs]
        return [np.asarray(x).astype(y.dtype) for x, y in zip(made, a, strict=True)]

    # expressions
    def exprs(self, op: Block, exprs: Sequence[Expr], env: Mapping[str, Array], states: Sequence[Array]) -> list[Array]:
        with np.errstate(all="ignore"):
            return super().exprs(op, exprs, env, states)

    def const(self, value: float | int | bool, dtype: str) -> Array:
        return np.asarray(value, numpy_dtype(dtype, self.wide))

    def index(self, aff: Aff, env: Mapping[str, Array], dtype: str) -> Array:
        return np.asarray(evaluate(aff, env), np.int64)

    def call(self, e: Call, args: list[Array]) -> Array:
        dtype = numpy_dtype(e.dtype, self.wide)
        return cast_array(args[0], dtype) if e.fn == "cast" else np.asarray(NUMPY[e.fn](*args)).astype(dtype, copy=False)


def steps(fields: list[Array], sizes: tuple[int, ...]) -> list[Array]:
    """Fields with their last axes, of those sizes, made one."""
    shape = np.broadcast_shapes(*(f.shape for f in fields), sizes)
    flat = *shape[: len(shape) - len(sizes)], math.prod(sizes)
    return [np.broadcast_to(f, shape).reshape(flat) for f in fields]


class _Boxes(Arrays):
    """Whole tensors, part by part as blocks are cut: a part sees the cells of its own footprint and no others."""

    def __init__(self, graph: Graph, tensors: Mapping[str, Array], wide: bool) -> None:
        super().__init__(graph, wide)
        self.tensors = tensors

    def at(self, tensor: str, index: Sequence[Array]) -> Array:
        source = self.tensors[tensor]
        return source[tuple(np.broadcast_arrays(*index))] if index else source

    def extents(self, r: Read, env: Mapping[str, Array]) -> list[tuple[int, int]]:
        whole = super().extents(r, env)
        if not all(a.size for a in env.values()):
            return whole
        places = {name: (int(a.flat[0]), int(a.flat[-1])) for name, a in env.items()}
        hull = [bounds(e, places) for e in r.index]
        return [(max(0, int(lo)), min(n, int(hi) + 1)) for (lo, hi), (_, n) in zip(hull, whole, strict=True)]

    def states(self, op: Block, env: Mapping[str, Array]) -> list[Array]:
        monoid, kinds, parts = str(op.monoid), tuple(e.dtype for e in op.body), list[list[Array]]()
        for box in itertools.product(*_ways(op, op.reduce)):
            fields = self.lifted(op, meshed(env, op.reduce, box))
            parts.append(self.reduced(monoid, tuple(hi - lo for lo, hi in box), fields, kinds))
        return reduce(partial(self.merge, monoid, kinds), parts)

    def block(self, op: Block) -> list[Array]:
        """The outputs of a block."""
        types = [numpy_dtype(self.graph.tensors[t].dtype, self.wide) for t in op.outs]
        outs = [np.zeros([d.size for d in op.dims], dtype) for dtype in types]
        for box in itertools.product(*_ways(op, op.dims)):
            made = self.values(op, meshed({}, op.dims, box))
            for out, value in zip(outs, made, strict=True):
                out[slices(box)] = value
        return outs


def value(e: Expr, args: Sequence[Array], state: Sequence[Array], env: Mapping[str, Array], wide: bool) -> Array:
    """Value of an expression; arrays broadcast. ``state`` has the reduced fields in ``then``, the inner values in a body."""
    nothing = Graph(name="", tensors={}, ops=(), inputs=(), outputs=())
    return Arrays(nothing, wide).expr(e, args.__getitem__, env, state, {})


def cast_array(x: Array, dtype: Any) -> Array:
    """Convert as ONNX Cast: floats to integers truncate, anything to bool is ``!= 0``."""
    if dtype == np.bool_:
        return x != 0
    if np.issubdtype(dtype, np.integer) and not np.issubdtype(x.dtype, np.integer) and x.dtype != np.bool_:
        return np.trunc(x.astype(np.float64)).astype(dtype)
    return x.astype(dtype)


def _erf(x: Array) -> Array:
    from math import erf

    return np.vectorize(erf, otypes=[np.float64])(x)


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _truncated(a: Array, b: Array) -> Array:
    if np.issubdtype(a.dtype, np.integer):
        low = a // b  # 0 over 0
        return low + ((np.fmod(a, b) != 0) & ((a < 0) != (b < 0)))
    return np.divide(a, b)


NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "div": _truncated, "mod": np.mod, "fmod": np.fmod, "pow": np.power, "min": np.minimum, "max": np.maximum,
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "erf": _erf,
    "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos,
    "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "sigmoid": _sigmoid, "log1p": np.log1p, "expm1": np.expm1, "floor": np.floor, "ceil": np.ceil, "round": np.rint,
    "isnan": np.isnan, "isinf": np.isinf, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "shl": np.left_shift, "shr": np.right_shift, "where": np.where, "philox": philox,
}  # fmt: skip
