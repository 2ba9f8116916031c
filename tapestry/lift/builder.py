"""What a lifter works with: the node's inputs and attributes on one side, tensors and operations on the other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from tapestry.errors import ModelError, refusing
from tapestry.ir.expr import Arg, Call, Const, Expr, call
from tapestry.ir.expr import Index as At
from tapestry.ir.graph import Block, Dim, Guard, Op, Opaque, Read
from tapestry.ir.index import Aff, const, dim, floordiv, modulo, span, substitute
from tapestry.ir.monoid import number
from tapestry.ir.types import FLOAT8, FLOATS, HOST, INTEGERS, STORED, Tensor
from tapestry.lift.file.external_data import dtype_name
from tapestry.lift.file.protos import (
    ML,
    WHY_NOT,
    attributes,
    captured,
    is_standard,
    nested,
    node_name,
    rename_captured,
    source_of,
    static_shape,
    subgraphs,
)
from tapestry.lift.file.structure import opsets_of
from tapestry.onnx_eval.opaque_node import RANDOM
from tapestry.system.quoting import printable

DTYPE_OF: dict[int, str] = {
    TensorProto.DOUBLE: "f64", TensorProto.FLOAT: "f32", TensorProto.FLOAT16: "f16", TensorProto.BFLOAT16: "bf16",
    TensorProto.INT64: "i64", TensorProto.INT32: "i32", TensorProto.INT16: "i16", TensorProto.INT8: "i8",
    TensorProto.UINT64: "u64", TensorProto.UINT32: "u32", TensorProto.UINT16: "u16", TensorProto.UINT8: "u8",
    TensorProto.BOOL: "bool",
    TensorProto.FLOAT8E4M3FN: "f8e4m3fn", TensorProto.FLOAT8E4M3FNUZ: "f8e4m3fnuz", TensorProto.FLOAT8E5M2: "f8e5m2",
    TensorProto.FLOAT8E5M2FNUZ: "f8e5m2fnuz", TensorProto.FLOAT8E8M0: "f8e8m0", TensorProto.FLOAT4E2M1: "f4e2m1",
    TensorProto.INT4: "i4", TensorProto.UINT4: "u4", TensorProto.INT2: "i2", TensorProto.UINT2: "u2",
    TensorProto.COMPLEX64: "c64", TensorProto.COMPLEX128: "c128",
}  # fmt: skip

Index = Sequence[Aff]
Operand = tuple[Read, Tensor]  # a projection to a tensor, with its type
Body = (  # of what is read, in order; the longer ones first, so that a lambda's parameters get their types
    Callable[[Expr, Expr, Expr, Expr, Expr, Expr, Expr], Expr]
    | Callable[[Expr, Expr, Expr, Expr, Expr, Expr], Expr]
    | Callable[[Expr, Expr, Expr, Expr, Expr], Expr]
    | Callable[[Expr, Expr, Expr, Expr], Expr]
    | Callable[[Expr, Expr, Expr], Expr]
    | Callable[[Expr, Expr], Expr]
    | Callable[[Expr], Expr]
)


def literal(value: Any, dtype: str) -> Expr:
    """A constant expression; a NaN is written as 0/0, because texts with a NaN literal do not compare equal."""
    if dtype in FLOATS and value != value:
        return call("div", number(0, dtype), number(0, dtype))
    return number(value, dtype)


def plain(value: Any, dtype: str) -> float | int | bool:
    """A Python number fit for ``Read.other``."""
    return number(value, dtype).value


MAX_CELLS = 1 << 60
MAX_RANK = 32  # an index space may have as many reduced dimensions again, and arrays have 64 at most


def tensor_of(name: str, type_: TypeProto | None) -> Tensor:
    """The tensor of an ONNX type, or the value of the host where no device could hold one."""
    shape = static_shape(type_)
    if type_ is not None and shape is not None and type_.tensor_type.elem_type in DTYPE_OF:
        return _sane(Tensor(name=name, dtype=DTYPE_OF[type_.tensor_type.elem_type], shape=tuple(shape)))
    return Tensor(name=name, dtype=HOST, shape=(), about=about(type_))


def _sane(t: Tensor) -> Tensor:
    """A tensor whose bytes can be counted.

    Raises:
        ModelError: a size is negative, or the tensor larger than any memory (what follows computes in 64 bits).
    """
    if len(t.shape) > MAX_RANK:
        why, hint = f"it has {len(t.shape)}, at most {MAX_RANK} are supported", "join axes with a Reshape"
        raise ModelError("a tensor of too many dimensions", where=f"'{t.name}'", why=why, hint=hint)
    if any(n < 0 for n in t.shape) or t.size > MAX_CELLS:
        raise ModelError(
            "a tensor of an impossible size",
            where=f"'{t.name}'",
            why=f"its shape is {list(t.shape)}",
            hint="check the sizes given with --shape",
        )
    return t


def about(type_: TypeProto | None) -> str:
    """An ONNX type in words: ``int64[2, ?]``, ``seq(float[?])``, ``unknown``."""
    if type_ is None or type_.WhichOneof("value") is None:
        return "unknown"
    if type_.HasField("sequence_type"):
        return f"seq({about(type_.sequence_type.elem_type)})"
    if type_.HasField("optional_type"):
        return f"optional({about(type_.optional_type.elem_type)})"
    if type_.HasField("map_type"):
        return f"map({dtype_name(type_.map_type.key_type).lower()}, {about(type_.map_type.value_type)})"
    if not type_.HasField("tensor_type"):
        return str(type_.WhichOneof("value")).removesuffix("_type")
    t = type_.tensor_type
    if not t.HasField("shape"):
        return f"{dtype_name(t.elem_type).lower()}[…]"
    sizes = [str(d.dim_value) if d.HasField("dim_value") else "?" for d in t.shape.dim]
    return f"{dtype_name(t.elem_type).lower()}[{', '.join(sizes)}]"


class Builder:
    """The graph under construction.

    Attributes:
        types: ONNX type of every value of the prepared model.
        known: values known at compile time (initializers and Constant nodes), decoded when asked for.
        steps: whether recurrences are lifted step by step.
        tensors, ops: what has been emitted.
        maker: tensor to the block that writes it, of blocks with one result.
        made: values of constants that a lifter made up.
        fits: arithmetic progressions that index tensors are (`affine_values`).
    """

    def __init__(
        self, types: Mapping[str, TypeProto], known: Mapping[str, TensorProto], opsets: Mapping[str, int], seed: int,
        steps: bool = True,
    ) -> None:  # fmt: skip
        self.types, self.known, self.opsets, self.seed, self.steps = types, known, opsets, seed, steps
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.maker: dict[str, Block] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.made: dict[str, np.ndarray] = {}
        self._names: set[str] = set(types)
        self.fits: dict[str, tuple[int, list[int]] | None] = {}

    def value(self, name: str) -> np.ndarray | None:
        """The value of a tensor known at compile time, else None."""
        if name in self.made:
            return self.made[name]
        if name not in self.known:
            return None
        if name not in self.constants:
            self.constants[name] = onnx.numpy_helper.to_array(self.known[name])
        return self.constants[name]

    def constant(self, name: str, value: np.ndarray, dtype: str) -> str:
        """Make a tensor that holds a value; returns its name."""
        self.made[name] = np.ascontiguousarray(value).reshape(value.shape)
        self.tensors[name] = Tensor(name=name, dtype=dtype, shape=value.shape)
        return name

    def tensor(self, name: str) -> Tensor:
        """The tensor of an ONNX value; a value of the host where its type or shape is not known before the run."""
        if name not in self.tensors:
            self.tensors[name] = tensor_of(name, self.types.get(name))
        return self.tensors[name]

    def fresh(self, base: str) -> str:
        """A tensor name not in use yet."""
        name, k = base, 1
        while name in self._names or name in self.tensors:
            name, k = f"{base}_{k}", k + 1
        self._names.add(name)
        return name

    def emit(self, op: Op, outs: Sequence[Tensor]) -> None:
        """Append an operation and the tensors it writes."""
        for t in outs:
            known = self.tensor(t.name) if t.name in self.types else self.tensors.setdefault(t.name, t)
            assert (known.dtype, known.shape) == (t.dtype, t.shape), f"{t} is not {known} ({op.source})"
        self.ops.append(op)
        if isinstance(op, Block) and len(op.outs) == 1:
            self.maker[op.outs[0]] = op


class Node:
    """One ONNX node, with typed access to its attributes and inputs, and functions that emit operations for it."""

    def __init__(self, builder: Builder, proto: NodeProto, version: int, source: str) -> None:
        self.b, self.proto, self.version, self.source = builder, proto, version, source
        self.kind = proto.op_type
        self.where = f"node '{source}' ({proto.op_type})"
        self.ins = list(proto.input)
        self.outs = list(proto.output)
        self._attrs = {a.name: a for a in proto.attribute}

    def beyond_blocks(self) -> str:
        """Why the node cannot become block operations, whatever it computes; "" when nothing speaks against it."""
        for name in (*self.ins, *captured(self.proto), *self.outs):
            t = self.b.tensor(name) if name else None
            if t is not None and t.on_host:
                return f"'{name}' is {t.about}, known only at run time"
        return ""

    # what the node is
    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute's Python value (strings decoded), or the default; a fraction in float32, as attributes are."""
        if name not in self._attrs:
            return float(np.float32(default)) if isinstance(default, float) else default
        value = onnx.helper.get_attribute_value(self._attrs[name])
        try:
            return value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError as e:
            raise ModelError("an attribute is not text", where=self.where, why=f"{name}: {e}") from None

    def has(self, k: int) -> bool:
        """Whether input k is given."""
        return k < len(self.ins) and bool(self.ins[k])

    def wants(self, k: int) -> bool:
        """Whether output k is asked for."""
        return k < len(self.outs) and bool(self.outs[k])

    def tensor(self, k: int) -> Tensor:
        """Input k."""
        return self.b.tensor(self.ins[k])

    def shape(self, k: int = 0) -> tuple[int, ...]:
        """Shape of input k."""
        return self.tensor(k).shape

    def dtype(self, k: int = 0) -> str:
        """Element type of input k."""
        return self.tensor(k).dtype

    def out(self, k: int = 0) -> Tensor:
        """Output k."""
        return self.b.tensor(self.outs[k])

    def const(self, k: int) -> np.ndarray | None:
        """Value of input k if it is known at compile time."""
        return self.b.value(self.ins[k]) if self.has(k) else None

    def ints(self, k: int, attr: str = "") -> list[int] | None:
        """A list of integers given by input k or (in older opsets) by an attribute."""
        value = self.const(k)
        if value is not None:
            return [int(v) for v in value.reshape(-1)]
        given = self.attr(attr) if attr else None
        return None if given is None or self.has(k) else [int(v) for v in given]

    def axis(self, default: int, rank: int) -> int:
        """The (single) axis attribute, counted from the front."""
        axis = int(self.attr("axis", default))
        if not -rank <= axis <= max(rank, 0):
            raise ModelError("axis out of range", where=self.where, why=f"axis is {axis}, the rank {rank}")
        return axis + rank if axis < 0 else axis

    # reads
    def read(self, name: str, index: Index, other: Any = None, when: tuple[Guard, ...] = ()) -> Operand:
        """A projection to a tensor by name, with its type."""
        t = self.b.tensor(name)
        assert len(index) == len(t.shape), f"{self.where}: {name} has rank {len(t.shape)}, index {index}"
        return Read(tensor=name, index=tuple(index), other=None if other is None else plain(other, t.dtype), when=when), t

    def block(self, out: str | Tensor, dims: Sequence[Dim], reads: Sequence[Operand], body: Body | Expr) -> str:
        """Emit a map; ``body`` is an expression over the reads, or makes it of them. Returns the name of the tensor written."""
        e = body(*(Arg(k, t.dtype) for k, (_, t) in enumerate(reads))) if callable(body) else body
        t = self._result(out, dims, e.dtype)
        op = Block(outs=(t.name,), dims=tuple(dims), reads=tuple(r for r, _ in reads), body=(e,), source=(self.source,))
        self.b.emit(op, [t])
        return t.name

    def reduce(
        self, outs: Sequence[str], dims: Sequence[Dim], reduced: Sequence[Dim], monoid: str,
        reads: Sequence[Operand], body: Sequence[Expr], then: Sequence[Expr] = (),
    ) -> tuple[str, ...]:  # fmt: skip
        """Emit a reduction; a single output takes the first state field when there is no ``then``."""
        results = then or body
        tensors = [self._result(o, dims, e.dtype) for o, e in zip(outs, results, strict=True)]
        op = Block(
            outs=tuple(t.name for t in tensors), dims=tuple(dims), reduce=tuple(reduced), monoid=monoid,
            reads=tuple(r for r, _ in reads), body=tuple(body), then=tuple(then), source=(self.source,),
        )  # fmt: skip
        self.b.emit(op, tensors)
        return op.outs

    def view(
        self, out: str | Tensor, src: str, dims: Sequence[Dim], index: Index, other: Any = None, when: tuple[Guard, ...] = ()
    ) -> str:
        """Emit a view of one tensor: the body is the value read."""
        return self.block(out, dims, [self.read(src, index, other, when)], Arg(0, self.b.tensor(src).dtype))

    def _result(self, out: str | Tensor, dims: Sequence[Dim], dtype: str) -> Tensor:
        name = out.name if isinstance(out, Tensor) else out
        return Tensor(name=name, dtype=dtype, shape=tuple(d.size for d in dims))

    # dimensions
    def out_dims(self, k: int = 0) -> tuple[Dim, ...]:
        """``x0, x1, …`` over the axes of output k."""
        return axes(self.out(k).shape)

    def temp(self, suffix: str) -> str:
        """A name for an intermediate tensor, after the first output."""
        base = next(o for o in self.outs if o)
        return self.b.fresh(f"{base}.{suffix}")

    def operand(self, k: int, dims: Sequence[Dim], reads: list[Operand]) -> Expr:
        """Input k broadcast over ``dims``: a literal when it is one known number, else one more of the reads."""
        value = self.const(k)
        if value is not None and value.size == 1:
            return literal(value.reshape(-1)[0].item(), self.dtype(k))
        reads.append(self.read(self.ins[k], broadcast(self.shape(k), dims)))
        return Arg(len(reads) - 1, self.dtype(k))

    def constant(self, name: str, value: np.ndarray, dtype: str) -> str:
        """A new tensor that holds a value; its name, after output 0."""
        return self.b.constant(self.temp(name), value, dtype)


def axes(shape: Sequence[int], prefix: str = "x") -> tuple[Dim, ...]:
    """One dimension per axis."""
    return tuple(Dim(f"{prefix}{k}", s) for k, s in enumerate(shape))


def here(dims: Sequence[Dim]) -> list[Aff]:
    """The identity projection."""
    return [dim(d.name) for d in dims]


def broadcast(shape: Sequence[int], dims: Sequence[Dim]) -> list[Aff]:
    """The projection of numpy broadcasting: axes aligned from the back, axes of size 1 read at 0."""
    tail = dims[len(dims) - len(shape) :]
    return [const(0) if s == 1 and d.size != 1 else dim(d.name) for s, d in zip(shape, tail, strict=True)]


def accumulator(dtype: str) -> str:
    """The dtype in which sums over a dtype are accumulated."""
    return "f32" if dtype in ("f16", "bf16") else dtype


def every(tests: Iterable[Expr]) -> Expr:
    """Whether all tests hold, of which there is at least one."""
    return reduce(lambda a, b: call("and", a, b), tests)


def tests_inside(place: Expr, size: int) -> tuple[Expr, Expr]:
    """Tests of whether a position (an i64) is one of an axis."""
    return call("ge", place, number(0, "i64")), call("lt", place, number(size, "i64"))


def from_front(place: Expr, size: int) -> Expr:
    """A position (an i64) counted from the front, where a negative one counts from the back."""
    return call("where", call("lt", place, number(0, "i64")), call("add", place, number(size, "i64")), place)


# Values of integer tensors as index expressions: what makes a Gather by computed positions a plain view.
#
# Exporters compute positions (Range, Unsqueeze, Expand, Concat, …) and gather with them. Following an index tensor back
# through the maps that made it, at symbolic coordinates, gives its value as an affine expression, when it is one.


DEPTH = 40  # operations followed back at most


def affine_value(b: Builder, tensor: str, at: tuple[Aff, ...], ranges: dict[str, int], depth: int = DEPTH) -> Aff | None:
    """The value of an integer tensor at a position, as an index expression over the dimensions of ``ranges``, or None."""
    value = b.value(tensor)
    if value is not None:
        return _constant_of_affine_values(b, tensor, value, at, ranges)
    op = b.maker.get(tensor)
    if depth == 0 or op is None or op.monoid is not None or b.tensors[tensor].dtype not in INTEGERS:
        return None
    env = {d.name: e for d, e in zip(op.dims, at, strict=True)}
    return _Walk(b, op, env, ranges, depth).value(op.body[0])


def index_value(b: Builder, op: Block, e: Expr) -> Aff | None:
    """The value of an integer expression of an operation, as an index expression over its dimensions, or None."""
    return _Walk(b, op, {}, op.ranges, DEPTH).value(e)


def _constant_of_affine_values(
    b: Builder, name: str, value: np.ndarray, at: tuple[Aff, ...], ranges: dict[str, int]
) -> Aff | None:
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


# Which function lifts which operator.
#
# A lifter takes one node and emits operations to its builder. It raises `Declined` for an attribute or a data-dependent input
# that it has no affine form for.


Lifter = Callable[[Node], None]


class Declined(Exception):
    """A lifter has no affine form for a node, which becomes opaque then."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A lifter for one operator from one opset version on."""

    since: int
    lifter: Lifter


LIFTERS: dict[tuple[str, str], list[Entry]] = {}


def lifts(*ops: str, since: int = 1, domain: str = "") -> Callable[[Lifter], Lifter]:
    """Register a lifter for operators, from an opset version on."""

    def add(lifter: Lifter) -> Lifter:
        for op in ops:
            entries = LIFTERS.setdefault((domain, op), [])
            entries.append(Entry(since, lifter))
            entries.sort(key=lambda e: -e.since)
        return lifter

    return add


def find(node: NodeProto, version: int) -> Lifter | None:
    """The lifter for a node at an opset version; the newest one that is not newer."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return next((e.lifter for e in LIFTERS.get((domain, node.op_type), ()) if e.since <= version), None)


# Nodes without an affine form: they stay ONNX nodes, with the dimensions along which they may still be split.
#
# Nodes that work cell by cell, on types that no expression computes with, are opaque too, and split along every axis.


Axes = Mapping[int, Sequence[int | None]]
MOVES = frozenset(
    {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Transpose", "Expand", "Tile", "Slice", "Split", "Concat"}
)
WIDENING = frozenset({"Cast", "DequantizeLinear"})
CELL_BY_CELL = frozenset({"Cast", "BitCast", "QuantizeLinear", "DequantizeLinear"})


def emit_opaque(n: Node, why: str, dims: Sequence[Dim] = (), in_axes: Axes = {}, out_axes: Axes = {}) -> None:  # noqa: B006
    """Emit a node as an `Opaque`: inputs renamed in0.., outputs out0.., outer names of its subgraphs made inputs too.

    Args:
        why: what keeps the node from being block operations.
        dims: dimensions that the node commutes with splitting along.
        in_axes, out_axes: for each input and output, its axis along every one of ``dims``; None where it has none.
    """
    proto = NodeProto()
    proto.CopyFrom(n.proto)
    proto.ClearField("metadata_props")
    for k in reversed(range(len(proto.attribute))):
        if proto.attribute[k].name.startswith("tapestry."):  # notes of our own
            del proto.attribute[k]
    proto.name = ""
    _seed(proto, n)
    ins = [*n.ins, *captured(n.proto)]
    rename = {name: f"in{k}" for k, name in reversed(list(enumerate(ins))) if name and k >= len(n.ins)}
    for g in subgraphs(proto):
        rename_captured(g, rename)
    del proto.input[:]
    proto.input.extend(f"in{k}" if i else "" for k, i in enumerate(n.ins))
    del proto.output[:]
    proto.output.extend(f"out{k}" if o else "" for k, o in enumerate(n.outs))
    outs = [n.b.tensor(o) for o in n.outs if o]
    for i in ins:
        if i:
            n.b.tensor(i)
    none = (None,) * len(dims)
    domains = {"", *("" if at.domain == "ai.onnx" else at.domain for at in nested([proto]))}
    op = Opaque(
        outs=tuple(t.name for t in outs), ins=tuple(ins), kind=n.kind, node=proto.SerializeToString(deterministic=True),
        opsets=tuple(sorted((d, v) for d, v in n.b.opsets.items() if d in domains)), dims=tuple(dims),
        in_axes=tuple(tuple(in_axes.get(k, none)) for k in range(len(ins))),
        out_axes=tuple(tuple(out_axes.get(k, none)) for k, o in enumerate(n.outs) if o), source=(n.source,), why=printable(why),
    )  # fmt: skip
    n.b.emit(op, outs)


WHY = {
    "Loop": "how often it runs depends on the data, or is more than the steps that are written out",
    "Scan": "it has more steps, or more weights inside, than are written out",
    "If": "which branch is taken depends on the data",
    **dict.fromkeys(("NonZero", "Compress", "Unique", "NonMaxSuppression"), "how many results there are depends on the data"),
    "MaxUnpool": "its indices count positions through the whole tensor",
    "ImageDecoder": "it decodes a file",
    "Range": "its length depends on the data",
}


def reason(n: Node, why: str) -> str:
    """Why a node without a lifter that takes it is opaque: what the operator is, then what this one reads or writes."""
    own = WHY.get(n.kind, "")
    not_linear = str(n.attr(WHY_NOT, ""))
    own = f"{own}; {not_linear}" if own and not_linear else own
    return f"{own}: {why}" if own and why else own or why or "no affine form is known"


def _seed(node: NodeProto, n: Node) -> None:
    """Give random operators without a seed one of the node's own, so that every device draws the same numbers."""
    for at in nested([node]):
        if is_standard(at, *RANDOM) and "seed" not in attributes(at):
            text = f"{n.b.seed}|{n.source}|{at.output[0]}"
            value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:2], "little")
            at.attribute.append(helper.make_attribute("seed", value if at.op_type == "Dropout" else float(value)))


# cell by cell


def touches_stored(n: Node) -> bool:
    """Whether the node computes with a type that is only stored (8 bits of float, 4 of integer, complex)."""
    if n.kind in WIDENING and n.dtype(0) in FLOAT8 and n.out().dtype in FLOATS:
        return False
    names = [*n.ins, *n.outs]
    return any(n.b.tensor(name).dtype in STORED for name in names if name)


def lift_stored(n: Node) -> None:
    """A node on stored types that does more than move them."""
    why = "its types are stored, not computed with"
    x, y = n.tensor(0) if n.has(0) else None, n.out()
    if n.kind not in CELL_BY_CELL or x is None or x.shape != y.shape:
        emit_opaque(n, why)
        return
    emit_cells(n, why)


def emit_cells(n: Node, why: str) -> None:
    """Emit a node that maps every cell of its first input to the same cell of its output.

    Scales and zero points go along with the axis they are given for; blocked ones only along the axes they share.
    """
    x = n.tensor(0)
    dims = n.out_dims()
    axis = min(n.axis(1, len(x.shape)), len(x.shape) - 1) if len(x.shape) > 1 else 0  # of the scales
    in_axes: dict[int, list[int | None]] = {0: list(range(len(dims)))}
    blocked = bool(n.attr("block_size", 0))
    for k in range(1, len(n.ins)):
        if not n.has(k):
            continue
        shape = n.shape(k)
        if blocked and len(shape) == len(dims):
            in_axes[k] = [a if a != axis and shape[a] == x.shape[a] else None for a in range(len(dims))]
        elif len(shape) == 1 and shape != (1,) and len(x.shape) > 0:
            in_axes[k] = [0 if a == axis else None for a in range(len(dims))]
        elif len(shape) == len(dims) and len(dims) > 1:
            blocked = True
            in_axes[k] = [a if shape[a] == x.shape[a] else None for a in range(len(dims))]
    axes = [a for a in range(len(dims)) if not (blocked and a == axis)]
    emit_opaque(n, why, [dims[a] for a in axes], {k: [v[a] for a in axes] for k, v in in_axes.items()}, {0: axes})


# Nodes of a prepared model, one after another, to operations: by their lifters, or as they are.


SUSPECT = "check the model with onnx.checker and onnxruntime; if they take it, this is a bug of Tapestry's"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A static model to lift.

    Attributes:
        types: the type of every value.
        hinted: values whose shape the file declares and inference does not imply.
    """

    model: ModelProto
    types: Mapping[str, TypeProto]
    hinted: frozenset[str] = frozenset()


def lift_nodes(prepared: Prepared, seed: int, steps: bool) -> Builder:
    """The operations of a prepared model's nodes.

    Args:
        seed: session seed of the random operators.
        steps: whether recurrences are lifted step by step.

    Raises:
        ModelError: a node does not fit its operator.
    """
    graph = prepared.model.graph
    stored = {t.name: t for t in graph.initializer if t.data_type != TensorProto.STRING}
    nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in graph.initializer if t.name not in stored]
    for node in graph.node:
        value = _constant(node) if node.op_type == "Constant" else None
        if value is None:
            nodes.append(node)
        else:
            stored[node.output[0]] = value
    builder = Builder(prepared.types, stored, opsets_of(prepared.model), seed, steps)
    for proto in nodes:
        _lift_node(Node(builder, proto, builder.opsets.get("", 1), source_of(proto)), prepared.hinted)
    return builder


def _lift_node(node: Node, hinted: frozenset[str]) -> None:
    why, lifter = node.beyond_blocks(), find(node.proto, node.version)
    declared = bool(node.outs) and node.outs[0] in hinted
    if declared and lifter is not None and node.proto.domain != ML:  # (onnx infers no shapes of that domain)
        why = why or "its shape is only declared in the file"
    with refusing(ModelError, "the node does not fit its operator", node.where, SUSPECT):
        if not why and touches_stored(node) and node.kind not in MOVES:
            lift_stored(node)
            return
        try:
            if why or lifter is None:
                raise Declined
            lifter(node)
        except Declined:
            emit_opaque(node, reason(node, why))


def _constant(node: NodeProto) -> TensorProto | None:
    """The value of a Constant node, which its attributes may give in several ways; None when it is text."""
    a = node.attribute[0]
    if a.name in ("value_string", "value_strings") or (a.name == "value" and a.t.data_type == TensorProto.STRING):
        return None
    if a.name == "value":
        return a.t
    dtype = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}.get(a.name)
    if dtype is None:
        where = f"node '{node_name(node)}'"
        raise ModelError("constants of this kind are not supported", where=where, why=f"it has {a.name}")
    return numpy_helper.from_array(np.array(helper.get_attribute_value(a), dtype))
