"""What a lifter works with: the node's inputs and attributes on one side, tensors and operations on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, TypeProto

from tapestry.errors import ModelError
from tapestry.ir.expr import Arg, Expr, call, literal, number
from tapestry.ir.graph import Block, Dim, Guard, Op, Read, shape_of
from tapestry.ir.index import Aff, const, dim
from tapestry.ir.types import HOST, Tensor
from tapestry.lift.file.external_data import dtype_name
from tapestry.lift.file.protos import captured, static_shape

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

Index = Sequence[Aff | Dim]  # for each axis where it is read: a dimension stands for its own place
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
        self,
        types: Mapping[str, TypeProto],
        known: Mapping[str, TensorProto],
        opsets: Mapping[str, int],
        seed: int,
        steps: bool = True,
    ) -> None:
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
        at = tuple(dim(e.name) if isinstance(e, Dim) else e for e in index)
        fill = None if other is None else number(other, t.dtype).value
        return Read(tensor=name, index=at, other=fill, when=when), t

    def block(self, out: str | Tensor, dims: Sequence[Dim], reads: Sequence[Operand], body: Body | Expr) -> str:
        """Emit a map; ``body`` is an expression over the reads, or makes it of them. Returns the name of the tensor written."""
        e = body(*(Arg(k, t.dtype) for k, (_, t) in enumerate(reads))) if callable(body) else body
        t = self._result(out, dims, e.dtype)
        op = Block(outs=(t.name,), dims=tuple(dims), reads=tuple(r for r, _ in reads), body=(e,), source=(self.source,))
        self.b.emit(op, [t])
        return t.name

    def reduce(
        self,
        outs: Sequence[str],
        dims: Sequence[Dim],
        reduced: Sequence[Dim],
        monoid: str,
        reads: Sequence[Operand],
        body: Sequence[Expr],
        then: Sequence[Expr] = (),
    ) -> tuple[str, ...]:
        """Emit a reduction; a single output takes the first state field when there is no ``then``."""
        results = then or body
        tensors = [self._result(o, dims, e.dtype) for o, e in zip(outs, results, strict=True)]
        op = Block(
            outs=tuple(t.name for t in tensors),
            dims=tuple(dims),
            reduce=tuple(reduced),
            monoid=monoid,
            reads=tuple(r for r, _ in reads),
            body=tuple(body),
            then=tuple(then),
            source=(self.source,),
        )
        self.b.emit(op, tensors)
        return op.outs

    def view(
        self, out: str | Tensor, src: str, dims: Sequence[Dim], index: Index, other: Any = None, when: tuple[Guard, ...] = ()
    ) -> str:
        """Emit a view of one tensor: the body is the value read."""
        return self.block(out, dims, [self.read(src, index, other, when)], Arg(0, self.b.tensor(src).dtype))

    def _result(self, out: str | Tensor, dims: Sequence[Dim], dtype: str) -> Tensor:
        name = out.name if isinstance(out, Tensor) else out
        return Tensor(name=name, dtype=dtype, shape=shape_of(dims))

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
    return reduce(lambda a, b: a & b, tests)


def tests_inside(place: Expr, size: int) -> tuple[Expr, Expr]:
    """Tests of whether a position (an i64) is one of an axis."""
    return call("ge", place, 0), call("lt", place, size)


def from_front(place: Expr, size: int) -> Expr:
    """A position (an i64) counted from the front, where a negative one counts from the back."""
    return call("where", call("lt", place, 0), place + size, place)
