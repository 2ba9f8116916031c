"""ONNX nodes under way: every value with its shape and element type, so that steps which change nothing are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box
from tapestry.ir.types import DTYPES, numpy_dtype
from tapestry.lift.builder import DTYPE_OF

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

    def ranked(self, v: Value, rank: int) -> Value:
        """A number as one cell of so many axes."""
        return v if v.shape else self.reshape(v, (1,) * rank)

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
