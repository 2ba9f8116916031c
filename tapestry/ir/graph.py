"""The Graph: tensors and block operations, in SSA form and topological order, immutable.

A block operation is an index space, a projection from it to every tensor it reads, and a body computed at each point.
The map dimensions of the index space are the axes of the output, in order: the output projection is the identity, hence
injective and covering, by construction. Reduced dimensions stay in the index space and are merged by a named monoid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

from tapestry.ir.expr import Acc, Expr, arg_positions
from tapestry.ir.index import Aff, dims_of
from tapestry.ir.types import Tensor, Weight

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dimension of an index space, running over [0, size)."""

    name: str
    size: int


def ranges_of(dims: Iterable[Dim]) -> dict[str, int]:
    """Dimension name to size."""
    return {d.name: d.size for d in dims}


def names_of(dims: Iterable[Dim]) -> set[str]:
    """The names of some dimensions."""
    return {d.name for d in dims}


def shape_of(dims: Iterable[Dim]) -> tuple[int, ...]:
    """The sizes of some dimensions, in order."""
    return tuple(d.size for d in dims)


def points(dims: Iterable[Dim]) -> int:
    """Number of points of some dimensions."""
    return prod(shape_of(dims))


def placed(dims: Iterable[Dim], at: Iterable[T]) -> dict[str, T]:
    """What stands in the place of each dimension, by its name."""
    return {d.name: e for d, e in zip(dims, at, strict=True)}


@dataclass(frozen=True, slots=True)
class Guard:
    """``aff >= 0`` (``op`` "ge") or ``aff == 0`` ("eq")."""

    aff: Aff
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A projection from the index space to one tensor.

    Attributes:
        tensor: the tensor read.
        index: one index expression per axis of the tensor.
        other: the value where the guards fail or the index leaves the tensor; ``None`` when neither can happen.
        when: guards besides being inside the tensor.
    """

    tensor: str
    index: tuple[Aff, ...]
    other: float | int | bool | None = None
    when: tuple[Guard, ...] = ()


@dataclass(frozen=True, slots=True)
class Split:
    """``dim`` cut into ``parts`` contiguous blocks, bound to a resource: ``mesh.<axis>``, ``time``, ``grid`` or ``loop``."""

    dim: str
    parts: int
    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A reduction inside every point of an operation, such as ``q . k`` inside attention's reduction over keys.

    Attributes:
        dims: dimensions of the index space that this reduction alone runs over; never cut.
        monoid: a monoid of one field.
        body: what is reduced, over reads by any dimension but those of other inner reductions.
    """

    dims: tuple[Dim, ...]
    monoid: str
    body: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block operation.

    Attributes:
        outs: the tensors written, all of the shape of ``dims``.
        dims: map dimensions, one per axis of the outputs.
        reduce: reduced dimensions, all merged by ``monoid``.
        reads: projections; ``Arg(k)`` in an expression is the value of ``reads[k]``.
        body: without a monoid, one expression per output; with one, the lifted state (one per field).
        then: with a monoid, one expression per output over ``Acc(field)`` and the reads by map dimensions alone; when it
            is left out, the state's fields are the outputs.
        inner: reductions computed whole at each point; ``Let(k)`` in the body is the value of ``inner[k]``.
        source: names of the ONNX nodes it came from.
        splits: how it is cut, and what the parts are bound to.
        known: what was worked out about it once and is asked for again; no part of what it says.
    """

    outs: tuple[str, ...]
    dims: tuple[Dim, ...]
    reduce: tuple[Dim, ...] = ()
    monoid: str | None = None
    reads: tuple[Read, ...] = ()
    body: tuple[Expr, ...] = ()
    then: tuple[Expr, ...] = ()
    inner: tuple[Inner, ...] = ()
    source: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()
    known: dict[str, Any] = field(default_factory=dict[str, Any], init=False, compare=False, repr=False)

    def __hash__(self) -> int:
        return once(self, "hash", _hash)

    def __post_init__(self) -> None:
        if self.monoid and not self.then:  # the state itself is the result
            object.__setattr__(self, "then", tuple(Acc(k, e.dtype) for k, e in enumerate(self.body)))

    @property
    def lowers(self) -> bool:
        """Whether ``then`` does anything to the reduced state."""
        return once(self, "lowers", _lowers)

    @property
    def space(self) -> tuple[Dim, ...]:
        """Map dimensions, then reduced ones, then those of inner reductions."""
        return self.dims + self.reduce + self.inner_dims

    @property
    def inner_dims(self) -> tuple[Dim, ...]:
        """Dimensions of the inner reductions: whole at every point, never cut."""
        return tuple(d for s in self.inner for d in s.dims)

    @property
    def ranges(self) -> dict[str, int]:
        """Dimension name to size."""
        return ranges_of(self.space)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those of what the body gives: with a monoid, of the state's fields."""
        return tuple(e.dtype for e in self.body)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Tensors read, each once, in order of first use."""
        return once(self, "inputs", _inputs)

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensor of each read."""
        return tuple(r.tensor for r in self.reads)

    @property
    def merged_cells(self) -> int:
        """How many points are reduced to one cell of the results."""
        return prod(d.size for d in (*self.reduce, *self.inner_dims))

    @property
    def point(self) -> tuple[Expr, ...]:
        """Everything computed before the reduction: the inner reductions' bodies, then the body."""
        return tuple(s.body for s in self.inner) + self.body

    def read_dims(self, pos: int) -> frozenset[str]:
        """Dimensions that one read depends on, by its place or by its guards."""
        r = self.reads[pos]
        return frozenset[str]().union(*map(dims_of, r.index), *(dims_of(g.aff) for g in r.when))

    def body_reads(self) -> frozenset[int]:
        """Positions of the reads that the body and the inner reductions use (before the reduction)."""
        return once(self, "body reads", _body_reads)

    def then_reads(self) -> frozenset[int]:
        """Positions of the reads that ``then`` uses (after the reduction)."""
        return once(self, "then reads", _then_reads)


def map_exprs(op: Block, put: Callable[[Expr], Expr]) -> Block:
    """The operation with every expression (body, ``then``, inner bodies) replaced by ``put(it)``."""
    return replace(
        op,
        body=tuple(put(e) for e in op.body),
        then=tuple(put(e) for e in op.then),
        inner=tuple(replace(s, body=put(s.body)) for s in op.inner),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """An ONNX node without an affine structure: exact, and splittable only along the dimensions it commutes with.

    Attributes:
        dims: the dimensions along which the node may be run block by block (often just batch, possibly none).
        ins: tensors read ("" where an optional input is absent).
        in_axes, out_axes: for each input or output, and for each of ``dims``, the axis it indexes, or ``None``; every
            other axis is read or written whole.
        node: the serialised ``NodeProto`` (inputs and outputs by position), with its opset versions in ``opsets``.
        known: see `Block`.
    """

    outs: tuple[str, ...]
    ins: tuple[str, ...]
    kind: str
    node: bytes
    opsets: tuple[tuple[str, int], ...]
    dims: tuple[Dim, ...] = ()
    in_axes: tuple[tuple[int | None, ...], ...] = ()
    out_axes: tuple[tuple[int | None, ...], ...] = ()
    source: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()
    why: str = ""
    known: dict[str, Any] = field(default_factory=dict[str, Any], init=False, compare=False, repr=False)

    @property
    def space(self) -> tuple[Dim, ...]:
        """The splittable dimensions."""
        return self.dims

    @property
    def ranges(self) -> dict[str, int]:
        """Dimension name to size."""
        return ranges_of(self.dims)

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensor of each input."""
        return self.ins

    @property
    def inputs(self) -> tuple[str, ...]:
        """Tensors read, each once."""
        return tuple(dict.fromkeys(t for t in self.ins if t))


Op = Block | Opaque


def reduced_names(op: Op) -> set[str]:
    """The dimensions that an operation merges; an opaque one merges none."""
    return {d.name for d in op.reduce} if isinstance(op, Block) else set[str]()


def once(op: Block, what: str, of: Callable[[Block], T]) -> T:
    """What a function says of an operation, worked out when it is first asked for: operations never change."""
    found = op.known.get(what)
    if found is None:
        found = op.known[what] = of(op)
    return found


def _hash(op: Block) -> int:
    return hash((op.outs, op.dims, op.reduce, op.monoid, op.reads, op.body, op.then, op.inner, op.source, op.splits))


def _inputs(op: Block) -> tuple[str, ...]:
    return tuple(dict.fromkeys([r.tensor for r in op.reads]))


def _lowers(op: Block) -> bool:
    return op.then != tuple(Acc(k, e.dtype) for k, e in enumerate(op.body))


def _body_reads(op: Block) -> frozenset[int]:
    return arg_positions(op.point)


def _then_reads(op: Block) -> frozenset[int]:
    return arg_positions(op.then)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the model's author calls things, as far as the file says it.

    Attributes:
        scopes: by ONNX node, the part of the model that it is of ("" for the whole) and what it does there:
            ``("layers.3.self_attn.q_proj", "linear")``.
        axes: by tensor, a name for each axis, or "".
    """

    scopes: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Tensors by name, operations in topological order, and the names of the graph's inputs and outputs.

    ``log`` is the last of the changes that made it of another graph, ``names`` what its author calls things; neither is part of
    what the graph says.
    """

    name: str
    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Weight] = field(default_factory=dict[str, Weight])
    log: Rewrite | None = field(default=None, compare=False, repr=False)
    names: Names = field(default_factory=Names, compare=False, repr=False)

    @property
    def blocks(self) -> list[Block]:
        """The operations that are no opaque nodes."""
        return [op for op in self.ops if isinstance(op, Block)]

    def producers(self) -> dict[str, int]:
        """Tensor name to the position of the operation that writes it."""
        return {t: i for i, op in enumerate(self.ops) for t in op.outs}

    def consumers(self) -> dict[str, list[int]]:
        """Tensor name to the positions of the operations that read it."""
        out: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            for t in op.inputs:
                out.setdefault(t, []).append(i)
        return out

    def find(self, name: str) -> int:
        """Position of the operation that writes a tensor, or that came last from the ONNX node of that name; -1 if none."""
        for i, op in enumerate(self.ops):
            if name in op.outs:
                return i
        found = [i for i, op in enumerate(self.ops) if name in op.source]
        return found[-1] if found else -1


def with_ops(graph: Graph, ops: tuple[Op, ...], new: tuple[Tensor, ...] = ()) -> Graph:
    """The graph with other operations; adds tensors and drops those that nobody reads or writes any more."""
    table = {**graph.tensors, **{t.name: t for t in new}}
    used = set(graph.inputs) | set(graph.outputs) | {t for op in ops for t in (*op.inputs, *op.outs)}
    kept = {n: t for n, t in table.items() if n in used}
    return replace(graph, ops=ops, tensors=kept, weights={n: w for n, w in graph.weights.items() if n in kept})


def replace_op(graph: Graph, at: int, ops: tuple[Op, ...], new: tuple[Tensor, ...] = ()) -> Graph:
    """The graph with operation number ``at`` replaced by some others."""
    return with_ops(graph, graph.ops[:at] + ops + graph.ops[at + 1 :], new)


@dataclass(frozen=True, slots=True, eq=False)
class Rewrite:
    """One change of a graph, as it is logged: by which move (or by which rule, where it swept the graph), of what, into what.

    ``exact`` says that the rule claims the same bits, on infinities and NaN as well.
    """

    by: str
    before: Graph
    after: Graph
    exact: bool = False


def changes(graph: Graph) -> list[Rewrite]:
    """Every logged change behind a graph, the first one first."""
    out, step = list[Rewrite](), graph.log
    while step is not None:
        out.append(step)
        step = step.before.log
    return out[::-1]
