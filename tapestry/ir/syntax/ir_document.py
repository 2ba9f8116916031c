"""A graph as a JSON document, whose schema is docs/reference/ir.schema.json: ``from_document(to_document(g)) == g``.

Expressions and index expressions are text, as in `ir.syntax.printer`; all else is data. An operation's ``id`` is the name of
its first result, which a rewrite keeps wherever something else reads that result. An error has a JSON pointer to what it is of.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from tapestry.errors import TextError, inside, pointer_of
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Dim, Graph, Inner, Op, Opaque, Read, Split
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.syntax.parser import Parser, guard
from tapestry.ir.syntax.printer import aliases, bare, expr, plain
from tapestry.ir.types import DTYPES, Tensor, Weight

SCHEMA = "tapestry-ir/1"
T = TypeVar("T")


class TensorData(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor; ``about`` is the type of a value that stays on the host."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    about: str = ""


class WeightData(TensorData):
    """A tensor, and which bytes of which file it is."""

    file: str = ""
    offset: int = 0
    length: int = 0
    initializer: str = ""
    sha256: str = ""


class DimData(msgspec.Struct, forbid_unknown_fields=True):
    """A dimension of an index space."""

    name: str
    size: int


class SplitData(msgspec.Struct, forbid_unknown_fields=True):
    """How a dimension is cut, and what its parts are bound to."""

    dim: str
    parts: int
    to: str


class ReadData(msgspec.Struct, forbid_unknown_fields=True):
    """A projection: an index expression per axis; ``as`` is what expressions call the value that is read."""

    tensor: str
    alias: str = msgspec.field(name="as")
    index: tuple[str, ...]
    when: tuple[str, ...] = ()
    other: str | None = msgspec.field(name="else", default=None)


class InnerData(msgspec.Struct, forbid_unknown_fields=True):
    """A reduction inside of every point."""

    dims: tuple[DimData, ...]
    monoid: str
    body: str


class BlockData(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="block"):
    """A block operation."""

    id: str
    writes: tuple[TensorData, ...]
    dims: tuple[DimData, ...]
    body: tuple[str, ...]
    reduce: tuple[DimData, ...] = ()
    monoid: str | None = None
    reads: tuple[ReadData, ...] = ()
    let: tuple[InnerData, ...] = ()
    then: tuple[str, ...] = ()
    source: tuple[str, ...] = msgspec.field(name="from", default=())
    split: tuple[SplitData, ...] = ()


class AxesData(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor, and the axis of it that each dimension indexes."""

    tensor: str
    axes: tuple[int | None, ...]


class OpaqueData(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="opaque"):
    """An ONNX node; ``node`` is its protobuf in base64."""

    id: str
    operator: str
    writes: tuple[TensorData, ...]
    dims: tuple[DimData, ...]
    reads: tuple[AxesData, ...]
    results: tuple[AxesData, ...]
    node: str
    opsets: tuple[tuple[str, int], ...]
    why: str = ""
    source: tuple[str, ...] = msgspec.field(name="from", default=())
    split: tuple[SplitData, ...] = ()


class GraphData(msgspec.Struct, forbid_unknown_fields=True):
    """A graph."""

    schema: str
    name: str
    inputs: tuple[TensorData, ...]
    weights: tuple[WeightData, ...]
    operations: tuple[BlockData | OpaqueData, ...]
    outputs: tuple[str, ...]


# writing


def to_document(graph: Graph) -> dict[str, Any]:
    """The document of a graph."""
    weights = [
        WeightData(*_tensor(graph.tensors[t]), w.file, w.offset, w.length, w.name, w.sha256) for t, w in graph.weights.items()
    ]
    data = GraphData(
        schema=SCHEMA,
        name=graph.name,
        inputs=tuple(TensorData(*_tensor(graph.tensors[t])) for t in graph.inputs),
        weights=tuple(weights),
        operations=tuple(_operation(op, graph) for op in graph.ops),
        outputs=graph.outputs,
    )
    return msgspec.to_builtins(data)


def _tensor(t: Tensor) -> tuple[str, str, tuple[int, ...], str]:
    return t.name, t.dtype, t.shape, t.about


def _dims_data(dims: Sequence[Dim]) -> tuple[DimData, ...]:
    return tuple(DimData(d.name, d.size) for d in dims)


def _operation(op: Op, graph: Graph) -> BlockData | OpaqueData:
    writes = tuple(TensorData(*_tensor(graph.tensors[t])) for t in op.outs)
    split = tuple(SplitData(s.dim, s.parts, s.to) for s in op.splits)
    if isinstance(op, Opaque):
        return OpaqueData(
            id=op.outs[0],
            operator=op.kind,
            writes=writes,
            dims=_dims_data(op.dims),
            opsets=op.opsets,
            why=op.why,
            reads=tuple(AxesData(t, a) for t, a in zip(op.ins, op.in_axes, strict=True)),
            results=tuple(AxesData(t, a) for t, a in zip(op.outs, op.out_axes, strict=True)),
            node=base64.b64encode(op.node).decode(),
            source=op.source,
            split=split,
        )
    names = aliases(op)
    reads = tuple(
        ReadData(
            tensor=r.tensor,
            alias=a,
            index=tuple(map(str, r.index)),
            other=None if r.other is None else plain(r.other),
            when=tuple(f"{g.aff} {'>=' if g.op == 'ge' else '=='} 0" for g in r.when),
        )
        for a, r in zip(names, op.reads, strict=True)
    )
    return BlockData(
        id=op.outs[0],
        writes=writes,
        dims=_dims_data(op.dims),
        reduce=_dims_data(op.reduce),
        monoid=op.monoid,
        reads=reads,
        let=tuple(InnerData(_dims_data(s.dims), s.monoid, bare(expr(s.body, names))) for s in op.inner),
        body=tuple(bare(expr(e, names)) for e in op.body),
        source=op.source,
        split=split,
        then=tuple(bare(expr(e, names)) for e in op.then) if op.monoid and op.lowers else (),
    )


# reading


def from_document(data: bytes | str, where: str = "") -> Graph:
    """The graph that a JSON text describes.

    Raises:
        TextError: it describes none; its ``pointer`` says where.
    """
    try:
        d = msgspec.json.decode(data, type=GraphData)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        error = TextError(f"not a graph: {e}", where=where)
        error.pointer = pointer_of(str(e))
        raise error from None
    if d.schema != SCHEMA:
        raise _wrong(f"a document of schema '{d.schema}', not '{SCHEMA}'", "/schema", where)
    return _Reader(where).graph(d)


def _wrong(what: str, pointer: str, where: str = "") -> TextError:
    error = TextError(what, where=where)
    error.pointer = pointer
    return error


class _Reader:
    """Turns data into a graph; what it knows of tensors grows from operation to operation."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.tensors: dict[str, Tensor] = {}

    def graph(self, d: GraphData) -> Graph:
        self._declared(d.inputs, "input", "/inputs")
        self._declared(d.weights, "weight", "/weights")
        ops: list[Op] = []
        for k, op in enumerate(d.operations):
            with inside(f"/operations/{k}"):
                self._declared(op.writes, "value", "/writes")
                if not op.writes or op.id != op.writes[0].name:
                    raise _wrong(f"'{op.id}' is not the name of the first result", "/id", self.where)
                ops.append(self._block(op) if isinstance(op, BlockData) else self._opaque(op))
        for k, t in enumerate(d.outputs):
            self._known(t, f"/outputs/{k}")
        refs = {
            w.name: Weight(file=w.file, offset=w.offset, length=w.length, name=w.initializer, sha256=w.sha256)
            for w in d.weights
        }
        ins = tuple(t.name for t in d.inputs)
        return Graph(name=d.name, tensors=self.tensors, ops=tuple(ops), inputs=ins, outputs=d.outputs, weights=refs)

    def _declared(self, found: Sequence[TensorData], kind: str, pointer: str) -> None:
        for k, t in enumerate(found):
            if t.name in self.tensors:
                raise _wrong(f"tensor '{t.name}' is declared twice", f"{pointer}/{k}/name", self.where)
            if t.dtype not in DTYPES:
                raise _wrong(f"'{t.dtype}' is no dtype", f"{pointer}/{k}/dtype", self.where)
            self.tensors[t.name] = Tensor(name=t.name, dtype=t.dtype, shape=t.shape, kind=kind, about=t.about)

    def _known(self, tensor: str, pointer: str) -> Tensor:
        if tensor not in self.tensors:
            raise _wrong(f"tensor '{tensor}' is not declared", pointer, self.where)
        return self.tensors[tensor]

    def _text(self, text: str, pointer: str, read: Callable[[Parser], T]) -> T:
        """A leaf of the document, which must be read to its end."""
        with inside(pointer):
            p = Parser(text, self.where)
            p.tensors = self.tensors
            out = read(p)
            if p.next.kind != "end":
                raise p.fail("the end")
            return out

    def _block(self, d: BlockData) -> Block:
        monoids = [(d.monoid, "/monoid"), *((s.monoid, f"/let/{k}/monoid") for k, s in enumerate(d.let))]
        for name, pointer in monoids:
            if name is not None and name not in MONOIDS:
                raise _wrong(f"there is no monoid '{name}'", pointer, self.where)
        names = {r.alias: Arg(k, self._known(r.tensor, f"/reads/{k}/tensor").dtype) for k, r in enumerate(d.reads)}
        if len(names) < len(d.reads):
            raise _wrong("two reads have one name", "/reads", self.where)
        reads = tuple(self._read(r, f"/reads/{k}") for k, r in enumerate(d.reads))
        let = [self._text(s.body, f"/let/{k}/body", lambda p: p.expr(names, ())) for k, s in enumerate(d.let)]
        lets = tuple(e.dtype for e in let)

        def exprs(texts: Sequence[str], pointer: str, acc: tuple[str, ...], known: tuple[str, ...]) -> Any:
            def one(p: Parser) -> Any:
                p.lets = known
                return p.expr(names, acc)

            return tuple(self._text(t, f"{pointer}/{k}", one) for k, t in enumerate(texts))

        body = exprs(d.body, "/body", (), lets)
        inner = tuple(Inner(dims=_read_dims(s.dims), monoid=s.monoid, body=e) for s, e in zip(d.let, let, strict=True))
        return Block(
            outs=tuple(t.name for t in d.writes),
            dims=_read_dims(d.dims),
            reduce=_read_dims(d.reduce),
            monoid=d.monoid,
            reads=reads,
            body=body,
            then=exprs(d.then, "/then", tuple(e.dtype for e in body), ()),
            inner=inner,
            source=d.source,
            splits=tuple(Split(s.dim, s.parts, s.to) for s in d.split),
        )

    def _read(self, r: ReadData, pointer: str) -> Read:
        index = tuple(self._text(t, f"{pointer}/index/{k}", Parser.aff) for k, t in enumerate(r.index))
        when = tuple(self._text(t, f"{pointer}/when/{k}", guard) for k, t in enumerate(r.when))
        other = None if r.other is None else self._text(r.other, f"{pointer}/else", Parser.literal)
        return Read(tensor=r.tensor, index=index, other=other, when=when)

    def _opaque(self, d: OpaqueData) -> Opaque:
        for k, a in enumerate(d.reads):
            if a.tensor:
                self._known(a.tensor, f"/reads/{k}/tensor")
        outs = tuple(t.name for t in d.writes)
        if tuple(a.tensor for a in d.results) != outs:
            raise _wrong("the results are not what it writes", "/results", self.where)
        try:
            node = base64.b64decode(d.node, validate=True)
        except binascii.Error as e:
            raise _wrong(f"not base64: {e}", "/node", self.where) from None
        return Opaque(
            outs=outs,
            ins=tuple(a.tensor for a in d.reads),
            kind=d.operator,
            node=node,
            opsets=d.opsets,
            why=d.why,
            dims=_read_dims(d.dims),
            in_axes=tuple(a.axes for a in d.reads),
            out_axes=tuple(a.axes for a in d.results),
            source=d.source,
            splits=tuple(Split(s.dim, s.parts, s.to) for s in d.split),
        )


def _read_dims(found: Sequence[DimData]) -> tuple[Dim, ...]:
    return tuple(Dim(d.name, d.size) for d in found)
