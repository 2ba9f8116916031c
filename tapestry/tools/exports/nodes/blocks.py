"""A launch of an operation as ONNX nodes: whole results, states of a part of a reduction, or what becomes of merged states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from onnx import NodeProto, defs

from tapestry.ir.expr import Arg, Expr, Let, arg_positions, walk
from tapestry.ir.graph import Block, Graph, Inner, Opaque
from tapestry.ir.kernel import Kernel, shape, whole
from tapestry.ir.monoid import MONOIDS, Best, ByPrimitive, Moments, Monoid, Product, Rebased, highest
from tapestry.ir.recognition.contraction import part, products
from tapestry.ir.recognition.convolution import convolution
from tapestry.ir.recognition.exponential import exponential
from tapestry.ir.recognition.selection_sum import as_onnx_counts, selection
from tapestry.ir.types import FLOATS
from tapestry.tools.exports.nodes.contraction_nodes import contract, convolve
from tapestry.tools.exports.nodes.merge_nodes import ALIKE, REDUCE
from tapestry.tools.exports.nodes.onnx_nodes import OPSET, Nodes, NotExpressible, Value, relative
from tapestry.tools.exports.nodes.plain_reads import cut_out, plain
from tapestry.tools.exports.nodes.pools import pooled
from tapestry.tools.exports.nodes.read_nodes import NOWHERE, Frame, read_value
from tapestry.tools.exports.nodes.scalar_nodes import Expressions, primitive
from tapestry.tools.exports.nodes.softmaxes import softmax_sum
from tapestry.tools.exports.nodes.transposed import transpose_convolved


class Merge(ABC):
    """States merged by the structure of their monoid; subclasses say how one field is, by a primitive."""

    nodes: Nodes

    @abstractmethod
    def by(self, fn: str, x: Value, at: int, *, whole: bool = False) -> Value:
        """Field number ``at``, merged by one primitive (of `_REDUCE`): all of it, or what is kept of it here."""

    @abstractmethod
    def in_order(self, monoid: Monoid, fields: Sequence[Value], at: int, *, whole: bool = False) -> list[Value]:
        """Fields of any monoid."""

    def part(self, v: Value, at: int) -> Value:
        """What is kept here of all of a field."""
        del at
        return v

    def weighed(self, v: Value, weight: Value, at: int, *, whole: bool) -> Value:
        """A sum of products."""
        return self.by("add", primitive(self.nodes, "mul", [v, weight], v.dtype), at, whole=whole)

    def merged(self, monoid: Monoid, fields: Sequence[Value], at: int = 0, *, whole: bool = False) -> list[Value]:
        """The merged fields of a monoid, the first of which is number ``at`` of all."""
        match monoid.structure:
            case ByPrimitive(fn) if fields[0].dtype == "bool" and (fn := ALIKE.get(fn, fn)) in ("min", "max"):
                return [self.by(fn, fields[0], at, whole=whole)]
            case ByPrimitive(fn) if fn in REDUCE and fields[0].dtype != "bool":
                return [self.by(fn, fields[0], at, whole=whole)]
            case Product(parts):
                out: list[Value] = []
                for part in parts:
                    own = fields[len(out) : len(out) + len(part.fields)]
                    out += self.merged(part, own, at + len(out), whole=whole)
                return out
            case Rebased() as s:
                return self._rebased(monoid, s, fields, at, whole)
            case Moments():
                return self._moments(fields, at, whole)
            case Best(better):
                return self._best(better, fields, at, whole)
            case _:
                return self.in_order(monoid, fields, at, whole=whole)

    def of_args(self, exprs: Sequence[Expr], args: Sequence[Value]) -> list[Value]:
        """Values of expressions over given arguments."""
        return [*map(Expressions(self.nodes, NOWHERE, args.__getitem__), exprs)]

    def _kept(self, v: Value, at: int, whole: bool) -> Value:
        return v if whole else self.part(v, at)

    def _rebased(self, monoid: Monoid, s: Rebased, fields: Sequence[Value], at: int, whole: bool) -> list[Value]:
        """States moved to the common centre, then merged; of exponential ones the weight is what becomes of a state of 1."""
        n, nodes = len(s.centre.fields), self.nodes
        centre = self.merged(s.centre, fields[:n], at, whole=True)
        given = [*fields[:n], *centre, *fields[n:]]
        args = [Arg(k, v.dtype) for k, v in enumerate(given)]
        exprs = s.act(tuple(args[:n]), tuple(args[n : 2 * n]), tuple(args[2 * n :]))
        ends = [self._kept(v, at + k, whole) for k, v in enumerate(centre)]
        if exponential(monoid.name) is None:
            return [*ends, *self.merged(s.acted, self.of_args(exprs, given), at + n, whole=whole)]
        (weight,) = self.of_args(exprs[:1], [*given[: 2 * n], nodes.scalar(1, fields[n].dtype)])
        return [*ends, *(self.weighed(v, weight, at + n + k, whole=whole) for k, v in enumerate(fields[n:]))]

    def _moments(self, fields: Sequence[Value], at: int, whole: bool) -> list[Value]:
        """(n, mean, M2): the mean first, then the squares of what is left."""
        nodes, (n, mean, m2) = self.nodes, fields
        total = self.by("add", n, at, whole=True)
        zero, one = nodes.scalar(0, total.dtype), nodes.scalar(1, total.dtype)
        safe = nodes.apply("Where", [nodes.apply("Equal", [total, zero], "bool"), one, total])
        centre = nodes.apply("Div", [self.by("add", nodes.apply("Mul", [n, mean]), at + 1, whole=True), safe])
        off = nodes.apply("Sub", [mean, centre])
        spread = nodes.apply("Add", [m2, nodes.apply("Mul", [n, nodes.apply("Mul", [off, off])])])
        ends = [self._kept(v, at + k, whole) for k, v in enumerate((total, centre))]
        return [*ends, self.by("add", spread, at + 2, whole=whole)]

    def _best(self, better: str, fields: Sequence[Value], at: int, whole: bool) -> list[Value]:
        """The best value (a NaN is, where there is any), and the least index of those that have it."""
        nodes, (value, index) = self.nodes, fields
        top = self.by("max" if better == "gt" else "min", value, at, whole=True)
        hit = nodes.apply("Equal", [value, top], "bool")
        if value.dtype in FLOATS:
            lost = nodes.apply("And", [nodes.apply("IsNaN", [v], "bool") for v in (value, top)])
            hit = nodes.apply("Or", [hit, lost])
        last = nodes.scalar(highest(index.dtype).value, index.dtype)
        return [self._kept(top, at, whole), self.by("min", nodes.apply("Where", [hit, index, last]), at + 1, whole=whole)]


class Merging(Merge):
    """States over a frame, merged along its axes from ``kept`` on; those stay, with one cell."""

    def __init__(self, nodes: Nodes, extents: tuple[int, ...], kept: int) -> None:
        self.nodes, self.extents, self.kept = nodes, extents, kept
        self.axes = list(range(kept, len(extents)))

    def merged(self, monoid: Monoid, fields: Sequence[Value], at: int = 0, *, whole: bool = False) -> list[Value]:
        """The merged fields."""
        fields = [self.nodes.ranked(f, len(self.extents)) for f in fields]
        if 0 in self.extents[self.kept :]:
            zeros = monoid.zero(tuple(f.dtype for f in fields))
            return [self.nodes.filled(self._small(f), z.value, f.dtype) for f, z in zip(fields, zeros, strict=True)]
        return super().merged(monoid, fields, at, whole=whole)

    def by(self, fn: str, x: Value, at: int, *, whole: bool = False) -> Value:
        """A reduction; in a sum, what does not vary along an axis counts as often as that has points."""
        nodes, x = self.nodes, self.nodes.ranked(x, len(self.extents))
        if x.dtype == "bool":
            return nodes.cast(nodes.reduce(REDUCE[fn], nodes.cast(x, "i32"), self.axes), "bool")
        if fn == "mul":
            x = nodes.expand(x, self._wide(x))
        out = nodes.reduce(REDUCE[fn], x, self.axes)
        times = prod(self.extents[a] for a in self.axes if x.shape[a] == 1) if fn == "add" else 1
        return out if times == 1 else nodes.apply("Mul", [out, nodes.scalar(times, x.dtype)])

    def weighed(self, v: Value, weight: Value, at: int, *, whole: bool) -> Value:
        """A sum of products: a matrix product, where the factor has dimensions of its own."""
        if all(n == 1 or m > 1 for n, m in zip(v.shape[: self.kept], weight.shape, strict=False)):
            return super().weighed(v, weight, at, whole=whole)
        out = contract(self.nodes, weight, v, self.extents, self.kept)
        return self.nodes.reshape(out, self._small(out))

    def in_order(self, monoid: Monoid, fields: Sequence[Value], at: int = 0, *, whole: bool = False) -> list[Value]:
        """Any monoid, by halving in order: neighbours merge, so that associativity alone is needed."""
        common = np.broadcast_shapes(*(self._wide(f) for f in fields))
        flat, points = [self.nodes.expand(f, common) for f in fields], prod(self.extents[self.kept :])
        flat = [self.nodes.reshape(f, (*f.shape[: self.kept], points)) for f in flat]
        exprs = monoid.combiner(tuple(f.dtype for f in flat))
        while (n := flat[0].shape[-1]) > 1:
            even = n - n % 2
            halves = [[self._every(f, k, even) for f in flat] for k in (0, 1)]
            merged = self.of_args(exprs, [*halves[0], *halves[1]])
            rest = [self.nodes.slice(f, [*((0, m) for m in f.shape[:-1]), (even, n)]) for f in flat] if n % 2 else []
            flat = [self.nodes.concat([m, r], self.kept) for m, r in zip(merged, rest, strict=True)] if rest else merged
        return [self.nodes.reshape(f, self._small(f)) for f in flat]

    def _every(self, x: Value, first: int, last: int) -> Value:
        box = [*((0, n) for n in x.shape[:-1]), (first, last)]
        return self.nodes.slice(x, box, [*(1 for _ in x.shape[:-1]), 2])

    def _wide(self, x: Value) -> tuple[int, ...]:
        """A value's shape with all that is reduced written out."""
        return (*x.shape[: self.kept], *self.extents[self.kept :])

    def _small(self, x: Value) -> tuple[int, ...]:
        return (*x.shape[: self.kept], *(1 for _ in self.axes))


def launch(
    nodes: Nodes, graph: Graph, kernel: Kernel, ins: Sequence[Value | None], states: Sequence[Value] = ()
) -> list[Value]:
    """The results of a kernel, one for each of its buffers.

    Args:
        ins: the buffers of its reads; ``states``: those of ``finish``, or the states that a ``partial`` one's are merged with.

    Raises:
        NotExpressible: plain ONNX has no way to say it.
    """
    op = graph.ops[kernel.op]
    if isinstance(op, Opaque):
        return _opaque(nodes, graph, op, kernel, ins)
    return _Launch(nodes, graph, op, kernel, ins, states).results()


class _Launch:
    """A block operation on one block."""

    def __init__(
        self, nodes: Nodes, graph: Graph, op: Block, kernel: Kernel, ins: Sequence[Value | None], states: Sequence[Value]
    ) -> None:
        self.nodes, self.graph, self.op, self.kernel, self.ins, self.given = nodes, graph, op, kernel, ins, states
        maps, reduced = len(op.dims), len(op.dims) + len(op.reduce)
        names = tuple(d.name for d in op.space)
        self.base = Frame(names[:maps], kernel.block[:maps])
        self.frame = Frame(names[:reduced], kernel.block[:reduced])
        self.space = Frame(names, (*kernel.block[:reduced], *((0, d.size) for d in op.inner_dims)))
        self.known: dict[tuple[int, Frame], Value] = {}
        self.softmax: tuple[Expr, ...] | None = None

    def results(self) -> list[Value]:
        """What the mode asks for."""
        op, mode = self.op, self.kernel.mode
        if mode == "finish":
            return self.finished(list(self.given))
        if op.monoid is None:
            values = Expressions(self.nodes, self.frame, self.reader(self.frame), lets=self.lets())
            return [self.whole(values(e), k) for k, e in enumerate(op.body)]
        if mode == "full":
            self.softmax = softmax_sum(op)
        merged = self.states()
        if mode == "full":
            return self.finished(merged)
        if self.given:
            merging = Merging(self.nodes, self.frame.extents, len(op.dims))
            exprs = MONOIDS[op.monoid].combiner(tuple(v.dtype for v in merged))
            merged = merging.of_args(exprs, [*self.given, *merged])
        return [self.whole(v, k) for k, v in enumerate(merged)]

    def finished(self, states: Sequence[Value]) -> list[Value]:
        """Results of merged states."""
        then = self.op.then if self.softmax is None else self.softmax
        values = Expressions(self.nodes, self.base, self.reader(self.base), states)
        return [self.whole(values(e), k) for k, e in enumerate(then)]

    def whole(self, v: Value, k: int) -> Value:
        """A value over all of its buffer."""
        box = shape(self.kernel.outs[k])
        if v.size == 0 or 0 in box:
            return self.nodes.filled(box, 0, v.dtype)
        return self.nodes.expand(self.nodes.ranked(v, len(box)), box)

    def reader(self, frame: Frame) -> Callable[[int], Value]:
        """Values of reads over a frame, each once."""

        def read(k: int) -> Value:
            if (k, frame) not in self.known:
                r, buffer, box = self.op.reads[k], self.ins[k], self.kernel.ins[k]
                assert buffer is not None and box is not None, "a read that the kernel uses has no buffer"
                self.known[k, frame] = read_value(self.nodes, r, frame, box, buffer)
            return self.known[k, frame]

        return read

    # states

    def states(self) -> list[Value]:
        """States merged over the block's part of what is reduced, over the map dimensions."""
        op, kept = self.op, len(self.op.dims)
        assert op.monoid is not None
        single = self.selected() or self.convolved() or pooled(self.nodes, op, self.frame, self.kernel.ins, self.ins)
        if single is not None:
            return [single]
        both = products(op)
        if both is not None and not op.inner and 0 not in self.frame.extents:
            values = Expressions(self.nodes, self.frame, self.reader(self.frame))
            return [self._product(values, pair, e.dtype, self.frame, kept) for pair, e in zip(both, op.body, strict=True)]
        return self.merged()

    def _product(self, values: Expressions, factors: tuple[Expr, Expr], dtype: str, frame: Frame, kept: int) -> Value:
        """A sum of products of two expressions over a frame."""
        x, y = (self.nodes.cast(values(f), dtype) for f in factors)
        return contract(self.nodes, x, y, frame.extents, kept)

    def merged(self) -> list[Value]:
        """States by the monoid's structure."""
        op, kept = self.op, len(self.op.dims)
        assert op.monoid is not None
        merging = Merging(self.nodes, self.frame.extents, kept)
        values = Expressions(self.nodes, self.frame, self.reader(self.frame), lets=self.lets())
        if self.softmax is not None:
            return self.softened(values)
        done = merging.merged(MONOIDS[op.monoid], [values(e) for e in op.body])
        return [self.nodes.reshape(v, v.shape[:kept]) for v in done]

    def softened(self, values: Expressions) -> list[Value]:
        """The sum of values under a softmax of scores, in the place of the state that is divided."""
        op, kept = self.op, len(self.op.dims)
        score, value = values(op.body[0]), values(op.body[2])
        rank = len(self.frame.extents)
        score = self.nodes.ranked(score, rank)
        wide = self.nodes.expand(score, (*score.shape[:kept], *self.frame.extents[kept:]))
        weights = self.nodes.add("Softmax", [wide], wide.shape, wide.dtype, axis=rank - 1)
        return [contract(self.nodes, weights, value, self.frame.extents, kept)]

    def selected(self) -> Value | None:
        """A sum that picks one element: rows of a table, zero where the place is in no part that this block has."""
        found = selection(self.op)
        if found is None or found.shift or 0 in self.frame.extents:
            return None
        table = found.picked
        if not isinstance(table, Arg) or arg_positions((found.wanted,)) & {table.pos}:
            return None
        nodes, (lo, hi), count = self.nodes, self.frame.box[-1], self.op.reduce[0].size
        wanted = as_onnx_counts(found.wanted, count) if hi - lo == count else found.wanted
        place = Expressions(nodes, self.base, self.reader(self.base))(wanted)
        rows = self.reader(self.frame)(table.pos)
        wide_p = [k for k, n in enumerate(place.shape) if n > 1]
        wide_r = [k for k, n in enumerate(rows.shape[:-1]) if n > 1]
        if set(wide_p) & set(wide_r) or not place.shape or rows.shape[-1] != hi - lo:
            return None
        at = place if lo == 0 else nodes.apply("Sub", [place, nodes.scalar(lo, place.dtype)])
        inside: Value | None = None
        if hi - lo != count:
            low = nodes.apply("GreaterOrEqual", [at, nodes.scalar(0, at.dtype)], "bool")
            inside = nodes.apply("And", [low, nodes.apply("Less", [at, nodes.scalar(hi - lo, at.dtype)], "bool")])
            at = nodes.apply("Where", [inside, at, nodes.scalar(0, at.dtype)])
        out = self._taken(rows, nodes.cast(at, "i64"), wide_p, wide_r)
        return out if inside is None else nodes.apply("Where", [inside, out, nodes.scalar(0, out.dtype)])

    def _taken(self, rows: Value, at: Value, wide_p: list[int], wide_r: list[int]) -> Value:
        """Rows of a table at places that vary along other dimensions than what is in a row."""
        nodes, rank = self.nodes, len(rows.shape) - 1
        table = nodes.transpose(rows, [rank, *range(rank)])
        table = nodes.reshape(table, [rows.shape[-1], *(rows.shape[k] for k in wide_r)])
        flat = nodes.reshape(at, [at.shape[k] for k in wide_p])
        out = nodes.add("Gather", [table, flat], (*flat.shape, *table.shape[1:]), table.dtype, axis=0)
        order = [*wide_p, *wide_r]
        out = nodes.transpose(out, [order.index(k) for k in sorted(order)])
        both = {**{k: at.shape[k] for k in wide_p}, **{k: rows.shape[k] for k in wide_r}}
        return nodes.reshape(out, [both.get(k, 1) for k in range(rank)])

    def convolved(self) -> Value | None:
        """A convolution, or a transposed one."""
        if self.op.inner or len(self.op.body) != 1:
            return None
        one, ins = part(self.op, 0), list(zip(self.kernel.ins, self.ins, strict=True))
        if convolution(one) is None:
            extents = [self.graph.tensors[r.tensor].shape for r in one.reads]
            plainer = plain(one, extents)
            if convolution(plainer) is None:
                return transpose_convolved(self.nodes, one, self.frame, extents, self.kernel.ins, self.ins)
            at = dict(zip(self.frame.names, self.frame.box, strict=True))
            for k, (r, new) in enumerate(zip(one.reads, plainer.reads, strict=True)):
                ins[k] = ins[k] if r.index == new.index else cut_out(self.nodes, r, at, *ins[k])
            one = plainer
        return convolve(self.nodes, one, self.frame, [b for b, _ in ins], [v for _, v in ins])

    def lets(self) -> list[Value]:
        """The reductions inside every point, over the map and the reduced dimensions."""
        out: list[Value] = []
        for k, inner in enumerate(self.op.inner):
            out.append(self._let(k, inner, out))
        return out

    def _let(self, number: int, inner: Inner, before: Sequence[Value]) -> Value:
        own = {d.name for d in inner.dims}
        keep = [k for k, n in enumerate(self.space.names) if n in own or k < len(self.frame.names)]
        frame = Frame(tuple(self.space.names[k] for k in keep), tuple(self.space.box[k] for k in keep))
        if any(isinstance(e, Let) for e in walk(inner.body)):
            raise NotExpressible("one inner reduction reads another", why=f"number {number} of {len(before)} before it")
        values = Expressions(self.nodes, frame, self.reader(frame))
        kept = len(self.frame.names)
        single = Block(outs=("",), dims=(), reduce=inner.dims, monoid=inner.monoid, body=(inner.body,))
        both = products(single)
        if both is not None and 0 not in frame.extents:
            return self._product(values, both[0], inner.body.dtype, frame, kept)
        (out,) = Merging(self.nodes, frame.extents, kept).merged(MONOIDS[inner.monoid], [values(inner.body)])
        return self.nodes.reshape(out, out.shape[:kept])


def opset_of(graph: Graph) -> int:
    """The opset of a file that has a graph's nodes: that of the nodes that are kept as they are, if it is later than ours."""
    return max([OPSET, *(dict(op.opsets).get("", 0) for op in graph.ops if isinstance(op, Opaque))])


def _opaque(nodes: Nodes, graph: Graph, op: Opaque, kernel: Kernel, ins: Sequence[Value | None]) -> list[Value]:
    """The model's own node on its parts."""
    version, file = dict(op.opsets).get("", OPSET), opset_of(graph)
    node = NodeProto.FromString(op.node)
    if any(graph.tensors[t].on_host for t in (*op.inputs, *op.outs)):
        raise NotExpressible("a value of the host is no tensor of the file's")
    if node.domain in ("", "ai.onnx") and since(op.kind, version) != since(op.kind, file):
        raise NotExpressible(f"{op.kind} of opset {version} is another one than that of opset {file}")
    for k, v in enumerate(ins):
        if k < len(node.input) and v is not None:
            node.input[k] = nodes.named(nodes.slice(v, _taken(graph, op, kernel, k))).name
    dtypes = [graph.tensors[t].dtype for t in op.outs]
    outs = [Value(nodes.fresh(f"{nodes.part}/{op.kind}"), shape(b), d) for b, d in zip(kernel.outs, dtypes, strict=True)]
    nodes.values |= {v.name: v for v in outs}
    for k, v in enumerate(outs):
        if k < len(node.output):
            node.output[k] = v.name
    node.name = nodes.fresh(nodes.part or op.kind)
    nodes.keep(node)
    return outs


def _taken(graph: Graph, op: Opaque, kernel: Kernel, k: int) -> list[tuple[int, int]]:
    """The part of an input's buffer that a block reads: its own along the dimensions that the node commutes with, else all."""
    wanted, held = list(whole(graph.tensors[op.ins[k]].shape)), kernel.ins[k]
    assert held is not None
    for i, axis in enumerate(op.in_axes[k] if op.in_axes else ()):
        if axis is not None:
            wanted[axis] = kernel.block[i]
    return relative(wanted, held)


def since(kind: str, version: int) -> int:
    """The opset in which an operator became what it is in a later one; 0 where it is not known there."""
    try:
        return int(defs.get_schema(kind, version, "").since_version)
    except defs.SchemaError:
        return 0
