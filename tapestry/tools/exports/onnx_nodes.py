"""ONNX nodes under way: every value with its shape and element type, so that steps which change nothing are left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from tapestry import flags
from tapestry.errors import TapestryError
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let, call, distinct
from tapestry.ir.graph import Block, Graph, Guard, Read
from tapestry.ir.index import Aff, Atom, Floor, const, dim, dims_of, evaluate, span, substitute
from tapestry.ir.kernel import Box
from tapestry.ir.monoid import number
from tapestry.ir.types import DTYPES, FLOATS, numpy_dtype
from tapestry.lift.builder import DTYPE_OF
from tapestry.lift.operators.elementwise import PRIMITIVES
from tapestry.rewrites.core import edit

Range = tuple[int, int]
OPSET = 20
COLLECTIVE = "DistCollective"
MOST_CELLS = 1 << 27  # of a table of places, or of a value that is written out over an index space and is no tensor's size

ONNX_TYPES = {t: code for code, t in DTYPE_OF.items() if code < TensorProto.FLOAT4E2M1}  # that `OPSET` has


class NotExpressible(TapestryError):
    """A format cannot say something of a plan."""


def onnx_type(dtype: str, where: str = "") -> int:
    """The element type's number.

    Raises:
        NotExpressible: ONNX has none.
    """
    if dtype not in ONNX_TYPES:
        raise NotExpressible(f"ONNX has no type for {dtype}", where=f"'{where}'" if where else "")
    return ONNX_TYPES[dtype]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor between nodes: its name, shape and element type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of cells."""
        return prod(self.shape)


def relative(box: Iterable[Range], held: Box) -> list[Range]:
    """A box by the places of a buffer that holds another one."""
    return [(lo - first, hi - first) for (lo, hi), (first, _) in zip(box, held, strict=True)]


@dataclass(slots=True)
class Nodes:
    """Nodes and constants of one graph, in order.

    Attributes:
        part: what the nodes that are added next are a part of; their names begin with it.
        most: cells that a value may have.
        values: what nodes give, by name.
    """

    nodes: list[NodeProto] = field(default_factory=list[NodeProto])
    constants: dict[str, TensorProto] = field(default_factory=dict[str, TensorProto])
    part: str = ""
    most: int = MOST_CELLS
    taken: set[str] = field(default_factory=set[str])
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    _known: dict[tuple[Any, ...], Value] = field(default_factory=dict[tuple[Any, ...], Value])
    _made: dict[str, int] = field(default_factory=dict[str, int])
    _same: dict[tuple[Any, ...], Value] = field(default_factory=dict[tuple[Any, ...], Value])
    _reshaped: dict[str, Value] = field(default_factory=dict[str, Value])
    _turned: dict[str, tuple[Value, tuple[int, ...]]] = field(default_factory=dict[str, tuple[Value, tuple[int, ...]]])
    _renamed: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, graph: Graph, more: Iterable[str] = ()) -> Nodes:
        """No nodes yet, of a graph: names of its tensors are taken, and values may be as large as they are."""
        sizes = (t.size for t in graph.tensors.values())
        return cls(most=max((MOST_CELLS, *sizes)), taken={*graph.tensors, *more})

    def begin(self, part: str) -> None:
        """What comes next is another part: nothing of those before is shared with it."""
        self.part = part
        for known in (self._same, self._reshaped, self._turned):
            known.clear()

    def fresh(self, base: str) -> str:
        """A name that nothing has."""
        name, k = base, 1
        while name in self.taken:
            name, k = f"{base}_{k}", k + 1
        self.taken.add(name)
        return name

    def add(self, kind: str, ins: Sequence[Value | None], shape: Sequence[int], dtype: str, **attributes: Any) -> Value:
        """A node of one result."""
        out = Value(self.fresh(f"{self.part}/{kind}" if self.part else kind), tuple(shape), dtype)
        if out.size > self.most:
            raise NotExpressible("a value would be written out over a whole index space", why=f"{list(shape)} cells")
        names = [self.named(v).name if v is not None else "" for v in ins]
        key = (kind, *names, *sorted((k, repr(v)) for k, v in attributes.items()))
        if key in self._same:
            self.taken.discard(out.name)
            return self._same[key]
        self._same[key] = self.values[out.name] = out
        self.nodes.append(helper.make_node(kind, names, [out.name], name=out.name, **attributes))
        self._made[out.name] = len(self.nodes) - 1
        return out

    def keep(self, node: NodeProto) -> None:
        """A node that is made elsewhere; its results are values as others are."""
        self.nodes.append(node)
        self._made |= dict.fromkeys(filter(None, node.output), len(self.nodes) - 1)

    def result(self, value: Value, name: str) -> Value:
        """A value under a name that others know: that of the node's result, or a copy where it has a name already."""
        at = self._made.pop(value.name, None)
        if at is None:
            return self.copied(value, name)
        named = self.values[name] = Value(name, value.shape, value.dtype)
        self._renamed[value.name] = name
        for node in self.nodes[at:]:
            for names in (node.input, node.output):
                for k, old in enumerate(names):
                    if old == value.name:
                        names[k] = name
        return named

    def copied(self, value: Value, name: str) -> Value:
        """A copy of a value under a name that others know."""
        named = self.values[name] = Value(name, value.shape, value.dtype)
        self.nodes.append(helper.make_node("Identity", [self.named(value).name], [name], name=self.fresh(f"{name}/Identity")))
        return named

    def named(self, value: Value) -> Value:
        """A value by the name that it has come to."""
        return Value(self._renamed.get(value.name, value.name), value.shape, value.dtype)

    # constants

    def constant(self, array: np.ndarray[Any, Any], dtype: str) -> Value:
        """A stored array; equal ones are stored once."""
        array = np.ascontiguousarray(array, numpy_dtype(dtype)).reshape(np.shape(array))
        key = (dtype, array.shape, array.tobytes())
        if key not in self._known:
            if array.size > MOST_CELLS:
                raise NotExpressible("a table of places would be too large", why=f"{list(array.shape)} cells")
            name = self.fresh(f"const_{len(self.constants)}")
            self.constants[name] = stored_array(array, dtype, name)
            self._known[key] = Value(name, array.shape, dtype)
        return self._known[key]

    def scalar(self, value: float | int | bool, dtype: str) -> Value:
        """A number."""
        return self.constant(np.array(value, numpy_dtype(dtype)), dtype)

    def numbers(self, values: Sequence[int]) -> Value:
        """Sizes, axes or places, as nodes take them."""
        return self.constant(np.array(values, np.int64), "i64")

    # steps that move cells

    def reshape(self, v: Value, shape: Sequence[int]) -> Value:
        """The same cells in another shape; of a reshaped value, what was reshaped is."""
        shape = tuple(shape)
        source = self._reshaped.get(v.name, v)
        for same in (v, source):
            if shape == same.shape:
                return same
        out = self.add("Reshape", [source, self.numbers(shape)], shape, v.dtype)
        self._reshaped[out.name] = source
        if [n for n in v.shape if n != 1] == [n for n in shape if n != 1]:
            self._turned[out.name] = self._behind(v)
        return out

    def transpose(self, v: Value, perm: Sequence[int]) -> Value:
        """Axes in another order; of a transposed value, what was transposed is, if only axes of one cell came between."""
        shape = tuple(v.shape[p] for p in perm)
        base, order = self._behind(v)
        mine = [k for k, n in enumerate(v.shape) if n != 1]
        wanted = tuple(order[mine.index(p)] for p in perm if v.shape[p] != 1)
        if list(wanted) == sorted(wanted):
            return self.reshape(base, shape)
        small = iter(k for k, n in enumerate(base.shape) if n == 1)
        large = iter(wanted)
        fits = len(base.shape) == len(shape)
        turn = [next(large if n != 1 else small) for n in shape] if fits else [*wanted, *small]
        out = self.add("Transpose", [base], [base.shape[k] for k in turn], v.dtype, perm=turn)
        self._turned[out.name] = base, wanted
        return self.reshape(out, shape)

    def _behind(self, v: Value) -> tuple[Value, tuple[int, ...]]:
        """What a value is a transposition of, and which of its axes the axes of more than one cell are."""
        return self._turned.get(v.name, (v, tuple(k for k, n in enumerate(v.shape) if n != 1)))

    def slice(self, v: Value, box: Sequence[tuple[int, int]], steps: Sequence[int] = ()) -> Value:
        """A box of a value, or every so many cells of it."""
        steps = steps or [1] * len(box)
        axes = [k for k, (b, s, n) in enumerate(zip(box, steps, v.shape, strict=True)) if b != (0, n) or s != 1]
        if not axes:
            return v
        shape = [-(-(hi - lo) // s) for (lo, hi), s in zip(box, steps, strict=True)]
        given = [[box[k][0] for k in axes], [box[k][1] for k in axes], axes, [steps[k] for k in axes]]
        return self.add("Slice", [v, *map(self.numbers, given)], shape, v.dtype)

    def pad(self, v: Value, before: Sequence[int], after: Sequence[int], fill: float | int | bool) -> Value:
        """A value with cells around it."""
        if not any((*before, *after)):
            return v
        shape = [a + n + b for a, n, b in zip(before, v.shape, after, strict=True)]
        return self.add("Pad", [v, self.numbers([*before, *after]), self.scalar(fill, v.dtype)], shape, v.dtype)

    def gather(self, v: Value, places: np.ndarray[Any, Any], axis: int) -> Value:
        """Cells at places along an axis, whose axes come in its place."""
        shape = (*v.shape[:axis], *places.shape, *v.shape[axis + 1 :])
        return self.add("Gather", [v, self.constant(places, "i64")], shape, v.dtype, axis=axis)

    def expand(self, v: Value, shape: Sequence[int]) -> Value:
        """A value repeated along axes of one cell."""
        return v if tuple(shape) == v.shape else self.add("Expand", [v, self.numbers(shape)], shape, v.dtype)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Values one after another."""
        if len(values) == 1:
            return values[0]
        shape = list(values[0].shape)
        shape[axis] = sum(v.shape[axis] for v in values)
        return self.add("Concat", values, shape, values[0].dtype, axis=axis)

    def filled(self, shape: Sequence[int], value: float | int | bool, dtype: str) -> Value:
        """One number everywhere."""
        return self.expand(self.scalar(value, dtype), shape)

    # steps that compute

    def apply(self, kind: str, ins: Sequence[Value], dtype: str = "", **attributes: Any) -> Value:
        """An element-wise node on values that broadcast."""
        return self.add(kind, ins, np.broadcast_shapes(*(v.shape for v in ins)), dtype or ins[-1].dtype, **attributes)

    def cast(self, v: Value, dtype: str) -> Value:
        """Another element type."""
        return v if dtype == v.dtype else self.add("Cast", [v], v.shape, dtype, to=onnx_type(dtype))

    def reduce(self, kind: str, v: Value, axes: Sequence[int]) -> Value:
        """``ReduceSum`` and its like; the axes stay, with one cell."""
        axes = [a for a in axes if v.shape[a] != 1]
        if not axes:
            return v
        shape = [1 if k in axes else n for k, n in enumerate(v.shape)]
        return self.add(kind, [v, self.numbers(axes)], shape, v.dtype, keepdims=1)


def live(nodes: Sequence[NodeProto], results: Sequence[str]) -> list[NodeProto]:
    """The nodes that results depend on; a node with a graph inside, or without a result, is kept."""
    wanted, out = set(results), list[NodeProto]()
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output) or any(a.HasField("g") for a in node.attribute) or node.op_type == COLLECTIVE:
            out.append(node)
            wanted.update(node.input)
    return out[::-1]


def stored_array(array: np.ndarray[Any, Any], dtype: str, name: str) -> TensorProto:
    """An array as an initializer that holds its own data."""
    code = onnx_type(dtype)
    if dtype not in DTYPES or dtype in ("i4", "u4"):
        return helper.make_tensor(name, code, array.shape, array.reshape(-1).tolist())
    return numpy_helper.from_array(array, name)


# A read of a tensor over a block, as nodes: Slice, Pad, Reshape and Transpose, and Gather at constant places for what is
# left.
#
# Everything is in local coordinates: dimensions of the block from 0 on, places in the buffer from 0 on. The value of a read has
# an axis for each dimension of the frame, of one cell where the read does not depend on it.


MOST_CUTS = 4  # of a read, one inside another


@dataclass(frozen=True)
class Frame:
    """A box over named dimensions."""

    names: tuple[str, ...]
    box: Box

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Points along each dimension."""
        return tuple(hi - lo for lo, hi in self.box)

    @cached_property
    def ranges(self) -> dict[str, int]:
        """Points by name."""
        return dict(zip(self.names, self.extents, strict=True))

    @cached_property
    def local(self) -> dict[str, Aff]:
        """Each dimension by the block's own coordinates."""
        return {n: (dim(n) + lo) if hi - lo != 1 else const(lo) for n, (lo, hi) in zip(self.names, self.box, strict=True)}

    def place(self, e: Aff) -> Aff:
        """An index expression in the block's own coordinates."""
        return substitute(e, self.local, self.ranges)

    def alongside(self, used: frozenset[str]) -> tuple[int, ...]:
        """The shape of what depends on some dimensions."""
        return tuple(n if name in used else 1 for name, n in zip(self.names, self.extents, strict=True))

    def grid(self, used: frozenset[str]) -> dict[str, np.ndarray]:
        """Coordinates of each of some dimensions, shaped to broadcast over the frame."""
        rank = len(self.names)
        return {
            d: np.arange(n, dtype=np.int64).reshape([-1 if k == i else 1 for k in range(rank)])
            for i, (d, n) in enumerate(zip(self.names, self.extents, strict=True))
            if d in used
        }


NOWHERE = Frame((), ())


def read_value(nodes: Nodes, read: Read, frame: Frame, held: Box, buffer: Value, cuts: int = MOST_CUTS) -> Value:
    """The values of a read over a frame.

    Args:
        held: the box of the tensor that the buffer holds.
    """
    fill = 0 if read.other is None else read.other
    guards = [Guard(frame.place(g.aff), g.op) for g in read.when]
    spans = [span(g.aff, frame.ranges) for g in guards]
    never = any(hi < 0 if g.op == "ge" else hi < 0 or lo > 0 for g, (lo, hi) in zip(guards, spans, strict=True))
    if never or 0 in frame.extents or buffer.size == 0:
        return nodes.filled((1,) * len(frame.names) if never or buffer.size == 0 else frame.extents, fill, buffer.dtype)
    left = [g for g, (lo, hi) in zip(guards, spans, strict=True) if not (lo >= 0 if g.op == "ge" else lo == hi == 0)]
    index = [frame.place(e) - lo for e, (lo, _) in zip(read.index, held, strict=True)]
    shape = tuple(hi - lo for lo, hi in held)
    value = _strided(nodes, index, frame, shape, buffer, fill)
    name, at = next(_cuts(index, frame.ranges), ("", 0)) if value is None and cuts else ("", 0)
    if name:
        k = frame.names.index(name)
        lo, hi = frame.box[k]
        pieces = [replace(frame, box=(*frame.box[:k], p, *frame.box[k + 1 :])) for p in ((lo, lo + at), (lo + at, hi))]
        parts = [read_value(nodes, read, f, held, buffer, cuts - 1) for f in pieces]
        wide = np.broadcast_shapes(*((*p.shape[:k], 1, *p.shape[k + 1 :]) for p in parts))
        sizes = [(*wide[:k], f.extents[k], *wide[k + 1 :]) for f in pieces]
        return nodes.concat([nodes.expand(p, n) for p, n in zip(parts, sizes, strict=True)], k)
    if value is None:
        value = _flat(nodes, index, frame, shape, buffer, fill)
    keep = mask(nodes, left, frame)
    return value if keep is None else nodes.apply("Where", [keep, value, nodes.scalar(fill, buffer.dtype)])


def index_value(nodes: Nodes, e: Aff, frame: Frame) -> Value:
    """Values of an index expression over a frame, in coordinates of the whole; i64.

    It is made of a progression per dimension, so that readers see that it is one.
    """
    return _index(nodes, frame.place(e), frame)


def _index(nodes: Nodes, e: Aff, frame: Frame) -> Value:
    """Values of an index expression in the block's own coordinates."""
    total: Value | None = None
    plain = [(a, c) for a, c in e.terms if isinstance(a, str)]
    for k, (name, c) in enumerate(plain):
        steps = np.arange(frame.ranges[name], dtype=np.int64) * c + (e.const if k == 0 else 0)
        shape = [-1 if n == name else 1 for n in frame.names]
        total = _plus(nodes, total, nodes.constant(steps.reshape(shape), "i64"))
    for atom, c in e.terms:
        if isinstance(atom, str):
            continue
        inside, div = _index(nodes, atom.arg, frame), nodes.scalar(atom.div, "i64")
        value = nodes.apply("Mod", [inside, div])
        if isinstance(atom, Floor):
            value = nodes.apply("Div", [nodes.apply("Sub", [inside, value]), div])
        value = value if c == 1 else nodes.apply("Mul", [value, nodes.scalar(c, "i64")])
        total = _plus(nodes, total, value)
    if total is None:
        return nodes.constant(np.full((1,) * len(frame.names), e.const), "i64")
    return total if plain or not e.const else nodes.apply("Add", [total, nodes.scalar(e.const, "i64")])


def _plus(nodes: Nodes, total: Value | None, value: Value) -> Value:
    return value if total is None else nodes.apply("Add", [total, value])


def mask(nodes: Nodes, guards: Sequence[Guard], frame: Frame) -> Value | None:
    """Where all guards hold, in the block's own coordinates; None where there are none."""
    out: Value | None = None
    zero = nodes.scalar(0, "i64")
    for g in guards:
        test = nodes.apply("GreaterOrEqual" if g.op == "ge" else "Equal", [_index(nodes, g.aff, frame), zero], "bool")
        out = test if out is None else nodes.apply("And", [out, test])
    return out


def _cuts(index: Sequence[Aff], ranges: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Places inside a dimension where a floor or mod of it begins anew: the first, or the last where it begins with one."""
    for atom in (a for e in index for a, _ in e.terms if not isinstance(a, str)):
        (name, step), *more = atom.arg.terms
        if isinstance(name, str) and not more and step > 0 and not atom.div % step and not atom.arg.const % step:
            n, every = ranges[name], atom.div // step
            at = -(atom.arg.const // step) % every or n - n % every
            if 0 < at < n:
                yield name, at


# strided reads


def _strided(
    nodes: Nodes, index: Sequence[Aff], frame: Frame, shape: tuple[int, ...], buffer: Value, fill: float | int | bool
) -> Value | None:
    """Each axis of the buffer as a product of dimensions that no other axis has; None where it is none."""
    digits = _digits(index, frame.ranges)
    ranges = {n: k for parts in digits.values() for n, k in parts}
    env = {name: _of_digits(parts) for name, parts in digits.items() if len(parts) > 1}
    index = [substitute(e, env, ranges) for e in index]
    used = [n for e in index for n in dims_of(e)]
    if len(set(used)) < len(used) or not all(e.is_affine for e in index):
        return None
    value = _padded(nodes, index, ranges, shape, buffer, fill)
    low = [min(0, span(e, ranges)[0]) for e in index]
    axes: list[list[str]] = []
    at = 0
    for e, lo in zip(index, low, strict=True):
        order = sorted(dims_of(e), key=lambda n: (-e.coef(n), n))
        value = _axis(nodes, value, at, e - lo, order, ranges)
        axes.append(order)
        at += max(len(order), 1)
    sizes = [ranges[n] for group in axes for n in group]
    value = nodes.reshape(value, sizes)
    names = [n for group in axes for n in group]
    wanted = [n for name in frame.names for n, _ in digits[name] if n in names]
    value = nodes.transpose(value, [names.index(n) for n in wanted])
    return _joined(nodes, value, frame, digits, frozenset(names))


def _joined(
    nodes: Nodes, value: Value, frame: Frame, digits: Mapping[str, Sequence[tuple[str, int]]], used: frozenset[str]
) -> Value:
    """Digits joined to the dimensions that they are of; one cell along dimensions that none is of."""
    partly = [name for name in frame.names if 0 < sum(n in used for n, _ in digits[name]) < len(digits[name])]
    if partly:  # a dimension of which the value has some digits alone is repeated along the others
        small = [k if n in used else 1 for name in frame.names for n, k in digits[name]]
        large = [k if n in used or name in partly else 1 for name in frame.names for n, k in digits[name]]
        value = nodes.expand(nodes.reshape(value, small), large)
    shape = [prod(k for _, k in digits[d]) if any(n in used for n, _ in digits[d]) else 1 for d in frame.names]
    return nodes.reshape(value, shape)


def _of_digits(parts: Sequence[tuple[str, int]]) -> Aff:
    """A dimension as the sum of its digits, each times its place."""
    out = const(0)
    for k, (name, n) in enumerate(parts):
        out = out + (dim(name) if n != 1 else const(0)) * prod(size for _, size in parts[k + 1 :])
    return out


def _digits(index: Sequence[Aff], ranges: Mapping[str, int]) -> dict[str, tuple[tuple[str, int], ...]]:
    """Each dimension as digits, the greatest first, such that floors and mods of it are digits; itself where it has none."""
    places: dict[str, set[int]] = {n: set() for n in ranges}
    for e in index:
        _dimension_cuts(e.terms, places)
    out: dict[str, tuple[tuple[str, int], ...]] = {}
    for name, n in ranges.items():
        steps = [1, *sorted(p for p in places[name] if 1 < p < n), n]
        if len(steps) == 2 or any(b % a for a, b in itertools.pairwise(steps)):
            out[name] = ((name, n),)
            continue
        sizes = [b // a for a, b in itertools.pairwise(steps)][::-1]
        out[name] = tuple((f"{name}.{k}", size) for k, size in enumerate(sizes))
    return out


def _dimension_cuts(terms: Sequence[tuple[Atom, int]], places: dict[str, set[int]]) -> None:
    """Where floors and mods cut the dimensions that they are of."""
    for atom, _ in terms:
        if isinstance(atom, str):
            continue
        for name, c in atom.arg.terms:
            if isinstance(name, str):
                places[name].add(atom.div // gcd(atom.div, c))
        _dimension_cuts(atom.arg.terms, places)


def _padded(
    nodes: Nodes, index: Sequence[Aff], ranges: Mapping[str, int], shape: tuple[int, ...], buffer: Value,
    fill: float | int | bool,
) -> Value:  # fmt: skip
    """The buffer with as many cells around it as places lie outside of it."""
    before = [max(0, -span(e, ranges)[0]) for e in index]
    after = [max(0, span(e, ranges)[1] - n + 1) for e, n in zip(index, shape, strict=True)]
    return nodes.pad(buffer, before, after, fill)


def _axis(nodes: Nodes, value: Value, at: int, e: Aff, order: Sequence[str], ranges: Mapping[str, int]) -> Value:
    """One axis at the places of an expression: cut to them, with an axis for each of its dimensions (one where it has none)."""
    extents = [ranges[n] for n in order]
    steps = [e.coef(n) for n in order]
    if not order:
        return _cut(nodes, value, at, e.const, 1, 1)
    chain = all(steps[k] == steps[k + 1] * extents[k + 1] for k in range(len(order) - 1))
    if steps[-1] > 0 and chain:
        value = _cut(nodes, value, at, e.const, prod(extents), steps[-1])
        return nodes.reshape(value, [*value.shape[:at], *extents, *value.shape[at + 1 :]])
    grid = np.ix_(*(np.arange(n, dtype=np.int64) for n in extents))
    return nodes.gather(value, np.asarray(evaluate(e, dict(zip(order, grid, strict=True))), np.int64), at)


def _cut(nodes: Nodes, value: Value, at: int, first: int, count: int, step: int) -> Value:
    box = [(0, n) for n in value.shape]
    box[at] = (first, first + (count - 1) * step + 1)
    return nodes.slice(value, box, [step if k == at else 1 for k in range(len(box))])


def _flat(
    nodes: Nodes, index: Sequence[Aff], frame: Frame, shape: tuple[int, ...], buffer: Value, fill: float | int | bool
) -> Value:
    """Any read: a table of places in the flat buffer."""
    used = frozenset[str]().union(*map(dims_of, index))
    if prod(frame.alongside(used)) > MOST_CELLS:
        raise NotExpressible("a table of places would be too large", why=f"{prod(frame.alongside(used)):,} cells")
    grid = frame.grid(used)
    flat: np.ndarray = np.zeros([1] * len(frame.names), np.int64)
    valid: np.ndarray = np.ones([1] * len(frame.names), bool)
    for e, n in zip(index, shape, strict=True):
        v = np.asarray(evaluate(e, grid), np.int64)
        valid = valid & (v >= 0) & (v < n)
        flat = flat * n + np.clip(v, 0, n - 1)
    value = nodes.gather(nodes.reshape(buffer, [buffer.size]), flat, 0)
    if bool(valid.all()):
        return value
    return nodes.apply("Where", [nodes.constant(valid, "bool"), value, nodes.scalar(fill, buffer.dtype)])


# How ONNX says each scalar primitive (`ir.expr.PRIMITIVES`), and expressions of them.


PLAIN = {op.lower(): op for op in PRIMITIVES} | {
    "add": "Add", "sub": "Sub", "mul": "Mul", "pow": "Pow", "min": "Min", "max": "Max", "isinf": "IsInf", "eq": "Equal",
    "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "where": "Where",
}  # fmt: skip
_LOGICAL = {"and": "And", "or": "Or", "xor": "Xor", "not": "Not"}
_BITWISE = {"and": "BitwiseAnd", "or": "BitwiseOr", "xor": "BitwiseXor", "not": "BitwiseNot"}
_TESTS = frozenset({"isnan", "isinf", "eq", "ne", "lt", "le", "gt", "ge"})


def primitive(nodes: Nodes, fn: str, args: Sequence[Value], dtype: str) -> Value:
    """One primitive of values that broadcast.

    Raises:
        NotExpressible: ONNX has no such function.
    """
    if fn in _FORMULAS:
        formula = _FORMULAS[fn](*(Arg(k, v.dtype) for k, v in enumerate(args)))
        return Expressions(nodes, NOWHERE, args.__getitem__)(formula)
    if fn in _SPECIAL:
        return _SPECIAL[fn](nodes, args)
    if fn == "cast":
        return nodes.cast(args[0], dtype)
    if fn == "mul" and (one := nodes.scalar(1, dtype)) in args:
        return args[args[0] == one]
    if fn in _LOGICAL:
        return nodes.apply((_LOGICAL if args[0].dtype == "bool" else _BITWISE)[fn], args)
    if fn not in PLAIN:
        raise NotExpressible(f"ONNX has no operator for '{fn}'")
    if fn in ("min", "max") and dtype == "bool":
        return nodes.apply("And" if fn == "min" else "Or", args)
    return nodes.apply(PLAIN[fn], args, "bool" if fn in _TESTS else "")


def _divided(nodes: Nodes, args: Sequence[Value]) -> Value:
    """A quotient; of integers by zero it is 0."""
    a, b = args
    if b.dtype in FLOATS:
        return nodes.apply("Div", args)
    zero, one = nodes.scalar(0, b.dtype), nodes.scalar(1, b.dtype)
    none = nodes.apply("Equal", [b, zero], "bool")
    return nodes.apply("Where", [none, zero, nodes.apply("Div", [a, nodes.apply("Where", [none, one, b])])])


def _rest(nodes: Nodes, args: Sequence[Value], *, of_divisor: bool) -> Value:
    """A remainder with the sign of the divisor, or of the dividend; of integers by zero it is 0."""
    a, b = args
    if b.dtype not in FLOATS:
        none = nodes.apply("Equal", [b, nodes.scalar(0, b.dtype)], "bool")
        return nodes.apply("Mod", [a, nodes.apply("Where", [none, nodes.scalar(1, b.dtype), b])], fmod=0 if of_divisor else 1)
    rest = nodes.apply("Mod", args, fmod=1)
    if not of_divisor:
        return rest
    zero = nodes.scalar(0, b.dtype)
    wrong = nodes.apply("Less", [nodes.apply("Mul", [nodes.apply("Sign", [rest]), nodes.apply("Sign", [b])]), zero], "bool")
    return nodes.apply("Where", [wrong, nodes.apply("Add", [rest, b]), rest])


def _not_equal(a: Expr, b: Expr) -> Expr:
    return call("not", call("eq", a, b))


def _log1p(x: Expr) -> Expr:
    """``x * log(u) / (u - 1)`` for u = 1 + x, which loses nothing near 0 (Kahan; Goldberg 1991, theorem 4)."""
    zero, one = number(0, x.dtype), number(1, x.dtype)
    u = call("add", x, one)
    less, log = call("sub", u, one), call("log", u)
    tiny = call("eq", less, zero)
    share = call("div", x, call("where", tiny, one, less))
    plain = call("or", call("isinf", u), call("le", u, zero))
    return call("where", tiny, x, call("where", plain, log, call("mul", log, share)))


def _expm1(x: Expr) -> Expr:
    """``(u - 1) * x / log(u)`` for u = exp(x), which loses nothing near 0 (Kahan)."""
    zero, one = number(0, x.dtype), number(1, x.dtype)
    u = call("exp", x)
    less = call("sub", u, one)
    tiny = call("eq", less, zero)
    inside = call("and", call("lt", call("abs", x), one), call("not", tiny))
    log = call("log", call("where", inside, u, number(2, x.dtype)))
    return call("where", inside, call("mul", less, call("div", x, log)), call("where", tiny, x, less))


def _shifted(nodes: Nodes, args: Sequence[Value], direction: str) -> Value:
    if not args[0].dtype.startswith("u"):
        raise NotExpressible("ONNX shifts unsigned integers alone")
    return nodes.apply("BitShift", args, direction=direction)


_FORMULAS: dict[str, Callable[..., Expr]] = {"log1p": _log1p, "expm1": _expm1, "ne": _not_equal}
_SPECIAL: dict[str, Callable[[Nodes, Sequence[Value]], Value]] = {
    "div": _divided,
    "mod": lambda nodes, args: _rest(nodes, args, of_divisor=True),
    "fmod": lambda nodes, args: _rest(nodes, args, of_divisor=False),
    "shl": lambda nodes, args: _shifted(nodes, args, "LEFT"), "shr": lambda nodes, args: _shifted(nodes, args, "RIGHT"),
}  # fmt: skip


def _gelu(e: Call) -> tuple[str, Expr] | None:
    """What ``approximate`` is, and the argument, of a GELU whose constants no f32 is: that of a node, not of its formula."""
    if e.fn != "mul" or e.dtype != "f32":
        return None
    flags.before_torch()
    from tapestry.codegen.torch_cpu.base.scalars import native

    name, x = native(e) or ("", e)
    exact = all(float(np.float32(c.value)) == c.value for c in distinct((e,)) if isinstance(c, Const) and c.dtype == "f32")
    return None if name not in _GELU or exact else (_GELU[name], x)


_GELU = {"gelu": "none", "gelu_tanh": "tanh"}


class Expressions:
    """Values of expressions over a frame; what is shared is computed once."""

    def __init__(
        self, nodes: Nodes, frame: Frame, read: Callable[[int], Value], states: Sequence[Value] = (),
        lets: Sequence[Value] = (),
    ) -> None:  # fmt: skip
        self.nodes, self.frame, self.read, self.states, self.lets = nodes, frame, read, states, lets
        self.known: dict[int, tuple[Expr, Value]] = {}  # by identity: a tree of shared parts is not gone through twice

    def __call__(self, e: Expr) -> Value:
        """The value of an expression: a number, or an array that broadcasts to the frame."""
        if id(e) not in self.known:
            self.known[id(e)] = e, self._value(e)
        return self.known[id(e)][1]

    def _value(self, e: Expr) -> Value:
        match e:
            case Const():
                return self.nodes.scalar(e.value, e.dtype)
            case Arg():
                return self.read(e.pos)
            case Acc():
                return self.states[e.field]
            case Let():
                return self.lets[e.pos]
            case Index():
                return self.nodes.cast(index_value(self.nodes, e.aff, self.frame), e.dtype)
            case Call():
                gelu = _gelu(e)
                if gelu is not None:
                    return self.nodes.apply("Gelu", [self(gelu[1])], approximate=gelu[0])
                return primitive(self.nodes, e.fn, [self(a) for a in e.args], e.dtype)


# Reads of an operation as recognition wants them: without guards that their index implies, and of whole dimensions.


def implied(op: Block, g: Guard, r: Read, extents: Sequence[int]) -> bool:
    """Whether a guard fails only where the read leaves the tensor, and has its other value as it is."""
    ends = [Guard(e, "ge") for i, n in zip(r.index, extents, strict=True) for e in (i, i * -1 + (n - 1))]
    return r.other is not None and edit.implied(op, ends, g)


def plain(op: Block, extents: Sequence[Sequence[int]]) -> Block:
    """An operation without implied guards, and with whole dimensions where it reads every so many cells (see `cut_out`).

    Args:
        extents: of the tensor of each read.
    """
    reads = list[Read]()
    for read, shape in zip(op.reads, extents, strict=True):
        r = replace(read, when=tuple(g for g in read.when if not implied(op, g, read, shape)))
        names = [_stepped(e) for e in r.index]
        whole = "" in names or len({*names}) < len(names) or r.when or r.other is not None
        reads.append(r if whole else replace(r, index=tuple(map(dim, names))))
    return replace(op, reads=tuple(reads))


def _stepped(e: Aff) -> str:
    """The dimension of which an index is every so many cells; "" where it is none."""
    (atom, step), *more = (*e.terms, ("", 0))
    return atom if isinstance(atom, str) and step > 0 and len(more) == 1 else ""


def cut_out(
    nodes: Nodes, r: Read, at: Mapping[str, tuple[int, int]], box: Box | None, value: Value | None
) -> tuple[Box | None, Value | None]:  # fmt: skip
    """What a block reads every so many cells of, as the part of whole dimensions; a buffer that has it, and its cells."""
    parts = [(at[_stepped(e)], e.coef(_stepped(e)), e.const) for e in r.index]
    cells = [(s * a + c, s * (b - 1) + c + 1) for (a, b), s, c in parts]
    if box is None or value is None or any(a >= b or a < lo or hi < b for (a, b), (lo, hi) in zip(cells, box, strict=True)):
        return None, None
    return tuple(p for p, _, _ in parts), nodes.slice(value, relative(cells, box), [s for _, s, _ in parts])
