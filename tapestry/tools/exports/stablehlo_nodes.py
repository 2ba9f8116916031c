"""The plain ONNX nodes that `blocks` makes, as StableHLO text: an operation a line, with broadcasts written out.

The words are those of the StableHLO and CHLO dialects (openxla.org/stablehlo/spec).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from tapestry.ir.monoid import highest, lowest
from tapestry.ir.types import FLOATS, itemsize, numpy_dtype
from tapestry.tools.exports.onnx_nodes import ONNX_TYPES, Nodes, NotExpressible, Value

TYPES = {
    **{t: t for t in ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8")},
    **{f"u{n}": f"ui{n}" for n in (8, 16, 32, 64)}, "bool": "i1",
}  # fmt: skip
_SAME = {
    "Add": "add", "Sub": "subtract", "Mul": "multiply", "Div": "divide", "Pow": "power", "Min": "minimum", "Max": "maximum",
    "And": "and", "Or": "or", "Xor": "xor", "Not": "not", "BitwiseAnd": "and", "BitwiseOr": "or", "BitwiseXor": "xor",
    "BitwiseNot": "not", "Neg": "negate", "Abs": "abs", "Sign": "sign", "Exp": "exponential", "Log": "log", "Tanh": "tanh",
    "Sin": "sine", "Cos": "cosine", "Tan": "tan", "Sigmoid": "logistic", "Sqrt": "sqrt", "Floor": "floor", "Ceil": "ceil",
    "Round": "round_nearest_even",
}  # fmt: skip
_CHLO = ("Erf", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh")
_TESTS = {"Equal": "EQ", "Less": "LT", "LessOrEqual": "LE", "Greater": "GT", "GreaterOrEqual": "GE"}
_MERGES = {"Sum": "add", "Prod": "multiply", "Max": "maximum", "Min": "minimum"}


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of the text."""

    ssa: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def type(self) -> str:
        """As MLIR writes it."""
        return tensor_type(self.shape, self.dtype)


def tensor_type(shape: Sequence[int], dtype: str) -> str:
    """A tensor's type.

    Raises:
        NotExpressible: the text has no such element type.
    """
    if dtype not in TYPES:
        raise NotExpressible(f"StableHLO is given no {dtype}", hint="onnx-ranks, or json")
    return f"tensor<{''.join(f'{n}x' for n in shape)}{TYPES[dtype]}>"


@dataclass(slots=True)
class Text:
    """Lines of a function's body.

    Attributes:
        held: values by the names that nodes know them by.
        constants: stored arrays of the nodes; ``values``: what nodes give.
    """

    constants: Mapping[str, TensorProto]
    values: Mapping[str, Value]
    held: dict[str, Ref] = field(default_factory=dict[str, Ref])
    lines: list[str] = field(default_factory=list[str])
    count: int = 0

    def fresh(self) -> str:
        """A name that nothing has."""
        self.count += 1
        return f"%{self.count - 1}"

    def line(self, text: str, shape: Sequence[int], dtype: str) -> Ref:
        """An operation of one result."""
        out = Ref(self.fresh(), tuple(shape), dtype)
        self.lines.append(f"    {out.ssa} = {text}")
        return out

    def typed(self, text: str, ins: Sequence[Ref], shape: Sequence[int], dtype: str) -> Ref:
        """An operation whose types are written as a function's."""
        return self.line(f"{text} : ({', '.join(x.type for x in ins)}) -> {tensor_type(shape, dtype)}", shape, dtype)

    def op(self, kind: str, ins: Sequence[Ref], shape: Sequence[int], dtype: str, more: str = "") -> Ref:
        """One that is written as its operands and what else there is."""
        return self.typed(f"{kind} {', '.join(x.ssa for x in ins)}{more}", ins, shape, dtype)

    def merge(self, kind: str, dtype: str) -> str:
        """A region that merges two cells."""
        one, two, three, cell = self.fresh(), self.fresh(), self.fresh(), tensor_type((), dtype)
        does = f"{three} = stablehlo.{kind} {one}, {two} : {cell} stablehlo.return {three} : {cell}"
        return f"({{ ^bb0({one}: {cell}, {two}: {cell}): {does} }})"

    def number(self, value: float | int | bool, dtype: str) -> Ref:
        """A scalar."""
        return self.array(np.array(value), dtype)

    def array(self, a: np.ndarray[Any, Any], dtype: str) -> Ref:
        """A constant: its bytes, little-endian."""
        data = np.ascontiguousarray(a, numpy_dtype(dtype)).tobytes()
        text = json.dumps(np.asarray(a, bool).tolist()) if dtype == "bool" else f'"0x{data.hex().upper()}"'
        text = text if np.size(a) else ""
        return self.line(f"stablehlo.constant dense<{text}> : {tensor_type(np.shape(a), dtype)}", np.shape(a), dtype)

    def of(self, name: str) -> Ref:
        """A value of the nodes."""
        if name not in self.held:
            t = self.constants[name]
            self.held[name] = self.array(numpy_helper.to_array(t), _NAMES[t.data_type])
        return self.held[name]

    def integers(self, name: str) -> list[int]:
        """Sizes, axes or places that a node is given."""
        return [int(n) for n in numpy_helper.to_array(self.constants[name]).reshape(-1)]

    def reshape(self, x: Ref, shape: Sequence[int]) -> Ref:
        """The same cells in another shape."""
        return x if tuple(shape) == x.shape else self.op("stablehlo.reshape", [x], shape, x.dtype)

    def spread(self, x: Ref, shape: Sequence[int]) -> Ref:
        """A value repeated, its axes the last ones of a shape."""
        if x.shape == tuple(shape):
            return x
        axes = list(range(len(shape) - len(x.shape), len(shape)))
        return self.op("stablehlo.broadcast_in_dim", [x], shape, x.dtype, f", dims = {axes}")

    def slice(self, x: Ref, box: Sequence[tuple[int, int, int]]) -> Ref:
        """Cells from one to before another, in steps, along each axis."""
        text, shape = ", ".join(f"{lo}:{hi}:{step}" for lo, hi, step in box), [-(-(hi - lo) // step) for lo, hi, step in box]
        return self.op("stablehlo.slice", [x], shape, x.dtype, f" [{text}]")

    def slice_to(self, x: Ref, shape: Sequence[int]) -> Ref:
        """The first cells along each axis."""
        return x if tuple(shape) == x.shape else self.slice(x, [(0, n, 1) for n in shape])

    def fill_to(self, x: Ref, shape: Sequence[int]) -> Ref:
        """A value with zeros behind it along each axis."""
        if tuple(shape) == x.shape:
            return x
        more = [n - m for n, m in zip(shape, x.shape, strict=True)]
        return self.pad(x, [0] * len(more), more, self.number(0, x.dtype))

    def pad(self, x: Ref, low: Sequence[int], high: Sequence[int], fill: Ref) -> Ref:
        """A value with more cells (fewer, by a negative count) before and behind along each axis."""
        shape = [a + n + b for a, n, b in zip(low, x.shape, high, strict=True)]
        more = f", low = {list(low)}, high = {list(high)}, interior = {[0] * len(shape)}"
        return self.op("stablehlo.pad", [x, self.reshape(fill, ())], shape, x.dtype, more)

    def placed(self, x: Ref, sharding: str) -> Ref:
        """A value that lies so."""
        return self.line(f"sdy.sharding_constraint {x.ssa} {sharding} : {x.type}", x.shape, x.dtype)

    def apply(self, kind: str, *ins: Ref) -> Ref:
        """An element-wise operation on values that broadcast."""
        shape = np.broadcast_shapes(*(x.shape for x in ins))
        wide = [self.spread(x, shape) for x in ins]
        return self.line(f"stablehlo.{kind} {', '.join(x.ssa for x in wide)} : {wide[0].type}", shape, wide[0].dtype)

    def chlo(self, kind: str, x: Ref) -> Ref:
        """A function that StableHLO itself lacks."""
        return self.line(f"chlo.{kind} {x.ssa} : {x.type} -> {x.type}", x.shape, x.dtype)

    def compare(self, how: str, a: Ref, b: Ref) -> Ref:
        """A test."""
        shape = np.broadcast_shapes(a.shape, b.shape)
        kind = "FLOAT" if a.dtype in FLOATS else "UNSIGNED" if a.dtype[0] in "ub" else "SIGNED"
        x, y = self.spread(a, shape), self.spread(b, shape)
        return self.op(f"stablehlo.compare {how},", [x, y], shape, "bool", f", {kind}")

    def select(self, test: Ref, a: Ref, b: Ref) -> Ref:
        """One of two values, cell by cell."""
        shape = np.broadcast_shapes(test.shape, a.shape, b.shape)
        ins = [self.spread(x, shape) for x in (test, a, b)]
        types = f"{ins[0].type}, {ins[1].type}"
        return self.line(f"stablehlo.select {', '.join(x.ssa for x in ins)} : {types}", shape, a.dtype)

    def reduce(self, merge: str, x: Ref, axes: Sequence[int]) -> Ref:
        """A reduction; the axes stay, with one cell."""
        left = [n for k, n in enumerate(x.shape) if k not in axes]
        start = self.number(_start(merge, x.dtype), x.dtype)
        how = f"applies stablehlo.{merge} across dimensions = {list(axes)}"
        out = self.typed(f"stablehlo.reduce({x.ssa} init: {start.ssa}) {how}", [x, start], left, x.dtype)
        return self.reshape(out, [1 if k in axes else n for k, n in enumerate(x.shape)])

    def ranked(self, x: Ref, *, last: bool) -> Ref:
        """Floats as integers of their width and order, any NaN behind all others, or before them.

        The bits of a negative float, but for its sign, count down: they are turned.
        """
        whole = f"i{8 * itemsize(x.dtype)}"
        bits = self.op("stablehlo.bitcast_convert", [x], x.shape, whole)
        lost = np.iinfo(numpy_dtype(whole))
        return self.select(self.compare("NE", x, x), self.number(lost.max if last else lost.min, whole), self._turned(bits))

    def of_ranks(self, ranks: Ref, dtype: str) -> Ref:
        """The floats that `ranked` gave, a NaN as some NaN."""
        return self.op("stablehlo.bitcast_convert", [self._turned(ranks)], ranks.shape, dtype)

    def _turned(self, bits: Ref) -> Ref:
        most = self.number(np.iinfo(numpy_dtype(bits.dtype)).max, bits.dtype)
        below = self.compare("LT", bits, self.number(0, bits.dtype))
        return self.select(below, self.apply("xor", bits, most), bits)


_NAMES = {ONNX_TYPES[t]: t for t in TYPES}


def _start(merge: str, dtype: str) -> float | int | bool:
    """The unit of a merge."""
    if merge in ("add", "multiply"):
        return int(merge == "multiply")
    return (lowest if merge == "maximum" else highest)(dtype).value


def body(text: Text, kept: Sequence[NodeProto], marks: Mapping[str, str]) -> None:
    """The lines of nodes, behind those that are there.

    Args:
        marks: shardings of results, by name.

    Raises:
        NotExpressible: a node that has no form here.
    """
    for node in kept:
        say = _SAY.get(node.op_type)
        if say is None or len(node.output) != 1 or node.domain not in ("", "ai.onnx"):
            raise NotExpressible("StableHLO text is made of other nodes", where=f"'{node.name}'", why=node.op_type)
        (name,) = node.output
        out = say(text, node)
        text.held[name] = text.placed(out, marks[name]) if name in marks else out


# nodes

Say = Callable[[Text, NodeProto], Ref]


def _ins(t: Text, n: NodeProto) -> list[Ref]:
    return [t.of(i) for i in n.input]


def _attributes(n: NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in n.attribute}


def _rest(t: Text, n: NodeProto) -> Ref:
    """A remainder with the sign of the dividend, or, of integers, of the divisor."""
    a, b = _ins(t, n)
    out = t.apply("remainder", a, b)
    if _attributes(n).get("fmod") or out.dtype[0] == "u":
        return out
    zero = t.number(0, out.dtype)
    apart = t.compare("NE", t.compare("LT", out, zero), t.compare("LT", b, zero))
    wrong = t.apply("and", apart, t.compare("NE", out, zero))
    return t.select(wrong, t.apply("add", out, b), out)


def _infinite(t: Text, n: NodeProto) -> Ref:
    (x,) = _ins(t, n)
    return t.compare("EQ", t.apply("abs", x), t.number(float("inf"), x.dtype))


def _nan(t: Text, n: NodeProto) -> Ref:
    (x,) = _ins(t, n)
    return t.compare("NE", x, x)


def _gelu(t: Text, n: NodeProto) -> Ref:
    """Hendrycks and Gimpel 2016, equation 2, and the form with tanh below it."""
    (x,) = _ins(t, n)
    half, one = t.number(0.5, x.dtype), t.number(1, x.dtype)
    if _attributes(n).get("approximate", b"none") == b"tanh":
        cube = t.apply("multiply", t.apply("multiply", x, x), x)
        inner = t.apply("add", x, t.apply("multiply", cube, t.number(0.044715, x.dtype)))
        share = t.apply("tanh", t.apply("multiply", inner, t.number((2 / np.pi) ** 0.5, x.dtype)))
    else:
        share = t.chlo("erf", t.apply("multiply", x, t.number(0.5**0.5, x.dtype)))
    return t.apply("multiply", t.apply("multiply", x, half), t.apply("add", share, one))


def _softmax(t: Text, n: NodeProto) -> Ref:
    (x,) = _ins(t, n)
    axis = _attributes(n)["axis"]
    weights = t.apply("exponential", t.apply("subtract", x, t.reduce("maximum", x, [axis])))
    return t.apply("divide", weights, t.reduce("add", weights, [axis]))


def _matmul(t: Text, n: NodeProto) -> Ref:
    """Batches in front of both, or a matrix on the right."""
    a, b = _ins(t, n)
    batch = list(range(len(b.shape) - 2))
    if a.shape[: len(batch)] != b.shape[: len(batch)] or (batch and len(a.shape) != len(b.shape)):
        raise NotExpressible("the batches of a product broadcast", where=f"'{n.name}'", why=f"{a.shape}, {b.shape}")
    both = f", batching_dims = {batch} x {batch}" if batch else ""
    more = f"{both}, contracting_dims = [{len(a.shape) - 1}] x [{len(batch)}], precision = [HIGHEST, HIGHEST]"
    return t.op("stablehlo.dot_general", [a, b], (*a.shape[:-1], b.shape[-1]), a.dtype, more)


def _conv(t: Text, n: NodeProto) -> Ref:
    """A convolution; a transposed one is one of the image with zeros between its cells, by the weights from the last to the
    first."""
    a, (x, w), out = _attributes(n), _ins(t, n), t.values[n.output[0]]
    axes = range(len(w.shape) - 2)
    places = ", ".join(map(str, axes))
    pads = [[a["pads"][k], a["pads"][k + len(axes)]] for k in axes]
    window, order = f"stride = {list(a['strides'])}, pad = {pads}", "o, i"
    if n.op_type == "ConvTranspose":
        w = t.line(f"stablehlo.reverse {w.ssa}, dims = {[k + 2 for k in axes]} : {w.type}", w.shape, w.dtype)
        full = [(a["kernel_shape"][k] - 1) * a["dilations"][k] for k in axes]
        pads = [[full[k] - lo, full[k] - hi + a["output_padding"][k]] for k, (lo, hi) in enumerate(pads)]
        window, order = f"pad = {pads}, lhs_dilate = {list(a['strides'])}", "i, o"
    window = f"{{{window}, rhs_dilate = {list(a['dilations'])}}}"
    counts = f"{{batch_group_count = 1 : i64, feature_group_count = {a['group']} : i64, precision_config = [{_BEST}, {_BEST}]}}"
    dims = f"dim_numbers = [b, f, {places}]x[{order}, {places}]->[b, f, {places}]"
    return t.typed(f"stablehlo.convolution({x.ssa}, {w.ssa}) {dims}, window = {window} {counts}", [x, w], out.shape, out.dtype)


_BEST = "#stablehlo<precision HIGHEST>"


def _pool(t: Text, n: NodeProto) -> Ref:
    """The greatest cell of a window, or the mean of all its cells."""
    a, (x,), out = _attributes(n), _ins(t, n), t.values[n.output[0]]
    merge = "maximum" if n.op_type == "MaxPool" else "add"
    start, rank = t.number(_start(merge, x.dtype), x.dtype), len(a["kernel_shape"])
    pads = [[0, 0], [0, 0], *([a["pads"][k], a["pads"][k + rank]] for k in range(rank))]
    names = {"dimensions": "kernel_shape", "strides": "strides", "dilations": "dilations"}
    sizes = [f"window_{k} = array<i64: {', '.join(map(str, (1, 1, *a[v])))}>" for k, v in names.items()]
    how = f"{', '.join(sizes)}, padding = dense<{pads}> : tensor<{rank + 2}x2xi64>"
    call = f'"stablehlo.reduce_window"({x.ssa}, {start.ssa}) <{{{how}}}> {t.merge(merge, x.dtype)}'
    done = t.typed(call, [x, start], out.shape, out.dtype)
    return done if merge == "maximum" else t.apply("divide", done, t.number(prod(map(int, a["kernel_shape"])), x.dtype))


def _gather(t: Text, n: NodeProto) -> Ref:
    """Cells at places along an axis, whose axes come in its place. Only ONNX counts negative places from the end."""
    (x, at), axis = _ins(t, n), int(_attributes(n).get("axis", 0))
    at = t.select(t.compare("LT", at, t.number(0, at.dtype)), t.apply("add", at, t.number(x.shape[axis], at.dtype)), at)
    shape = (*x.shape[:axis], *at.shape, *x.shape[axis + 1 :])
    offset = [*range(axis), *range(axis + len(at.shape), len(shape))]
    sizes = ", ".join("1" if k == axis else str(m) for k, m in enumerate(x.shape))
    numbers = (
        f"#stablehlo.gather<offset_dims = {offset}, collapsed_slice_dims = [{axis}], start_index_map = [{axis}], "
        f"index_vector_dim = {len(at.shape)}>"
    )
    how = f"<{{dimension_numbers = {numbers}, slice_sizes = array<i64: {sizes}>}}>"
    return t.typed(f'"stablehlo.gather"({x.ssa}, {at.ssa}) {how}', [x, at], shape, x.dtype)


def _slice(t: Text, n: NodeProto) -> Ref:
    x = t.of(n.input[0])
    box = [(0, m, 1) for m in x.shape]
    for lo, hi, axis, step in zip(*map(t.integers, n.input[1:]), strict=True):
        box[axis] = lo, hi, step
    return t.slice(x, box)


def _pad(t: Text, n: NodeProto) -> Ref:
    x, counts, fill = t.of(n.input[0]), t.integers(n.input[1]), t.of(n.input[2])
    return t.pad(x, counts[: len(x.shape)], counts[len(x.shape) :], fill)


def _concat(t: Text, n: NodeProto) -> Ref:
    return t.op("stablehlo.concatenate", _ins(t, n), t.values[n.output[0]].shape, t.of(n.input[0]).dtype,
                f", dim = {_attributes(n)['axis']}")  # fmt: skip


def _transpose(t: Text, n: NodeProto) -> Ref:
    (x,), perm = _ins(t, n), [int(p) for p in _attributes(n)["perm"]]
    return t.op("stablehlo.transpose", [x], [x.shape[p] for p in perm], x.dtype, f", dims = {perm}")


def _cast(t: Text, n: NodeProto) -> Ref:
    (x,), out = _ins(t, n), t.values[n.output[0]]
    if x.dtype in FLOATS and out.dtype == "bool":
        return t.compare("NE", x, t.number(0, x.dtype))
    return t.op("stablehlo.convert", [x], out.shape, out.dtype)


def _shift(t: Text, n: NodeProto) -> Ref:
    left = _attributes(n)["direction"] == b"LEFT"
    return t.apply("shift_left" if left else "shift_right_logical", *_ins(t, n))


def _apply(kind: str) -> Say:
    return lambda t, n: t.apply(kind, *_ins(t, n))


def _chlo(t: Text, n: NodeProto) -> Ref:
    x = t.of(n.input[0])
    return t.line(f"chlo.{n.op_type.lower()} {x.ssa} : {x.type} -> {x.type}", x.shape, x.dtype)


def _test(t: Text, n: NodeProto) -> Ref:
    a, b = _ins(t, n)
    return t.compare(_TESTS[n.op_type], a, b)


def _reduced(t: Text, n: NodeProto) -> Ref:
    return t.reduce(_MERGES[n.op_type.removeprefix("Reduce")], t.of(n.input[0]), t.integers(n.input[1]))


_SAY: dict[str, Say] = {
    **{k: _apply(v) for k, v in _SAME.items()}, **dict.fromkeys(_CHLO, _chlo), **dict.fromkeys(_TESTS, _test),
    **{f"Reduce{k}": _reduced for k in _MERGES}, "Mod": _rest, "IsInf": _infinite, "IsNaN": _nan, "Gelu": _gelu,
    "Softmax": _softmax, "MatMul": _matmul, "Conv": _conv, "ConvTranspose": _conv,
    "MaxPool": _pool, "AveragePool": _pool, "Gather": _gather,
    "Slice": _slice, "Pad": _pad, "Concat": _concat, "Transpose": _transpose, "Cast": _cast, "BitShift": _shift,
    "Where": lambda t, n: t.select(*_ins(t, n)), "Identity": lambda t, n: t.of(n.input[0]),
    "Reshape": lambda t, n: t.reshape(t.of(n.input[0]), t.values[n.output[0]].shape),
    "Expand": lambda t, n: t.spread(t.of(n.input[0]), t.values[n.output[0]].shape),
}  # fmt: skip


# The collectives of all ranks, matched with each other, as operations of StableHLO that every device takes part in.


_NODE = {"SUM": "Add", "PROD": "Mul", "MAX": "Max", "MIN": "Min"}
_BODY = {"SUM": "add", "PROD": "multiply", "MAX": "maximum", "MIN": "minimum"}


@dataclass(frozen=True, slots=True)
class Call:
    """A collective of some groups: on one rank (as it is read), or, matched, on all of them. A message is a PERMUTE from one
    rank to another.

    Attributes:
        operands, results: names by rank.
    """

    kind: str
    op: str
    root: int
    groups: tuple[tuple[int, ...], ...]
    operands: dict[int, str]
    results: dict[int, str]
    shape: tuple[int, ...]
    ending: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, node: NodeProto, rank: int, shape: tuple[int, ...], values: Mapping[str, Value]) -> Call:
        """A node of a rank."""
        a: dict[str, Any] = {x.name: helper.get_attribute_value(x) for x in node.attribute}
        (x,), (y,) = node.input, node.output
        kind, op = (a[k].decode() for k in ("collective_operation", "reduce_op"))
        out = values[y]
        return cls(kind, op, a["root"], (tuple(a["groups"]),), {rank: x}, {rank: y}, shape, out.shape, out.dtype)

    @classmethod
    def message(cls, source: int, target: int, operand: str, result: str, shape: tuple[int, ...], dtype: str) -> Call:
        """A box from one rank to another."""
        return cls("PERMUTE", "", -1, ((source, target),), {source: operand}, {target: result}, shape, shape, dtype)

    @staticmethod
    def matched(calls: Sequence[Call]) -> tuple[list[Call], list[tuple[int, str, str]]]:
        """Calls of all ranks as one for each group, broadcasts as messages; and what senders have themselves: the rank, and the
        names of the result and of what it gave."""
        found: dict[tuple[Any, ...], Call] = {}
        seen: Counter[tuple[Any, ...]] = Counter()
        for c in calls:
            ((rank, _),) = c.operands.items()
            own = (c.kind, c.op, c.root, c.groups, rank)
            key = (*own[:-1], seen[own])
            seen[own] += 1
            first = found.setdefault(key, c)
            if first is not c:
                assert first.shape == c.shape and first.dtype == c.dtype, f"ranks disagree on {c}"
                first.operands.update(c.operands)
                first.results.update(c.results)
        out: list[Call] = []
        same: list[tuple[int, str, str]] = []
        for c in found.values():
            (group,) = c.groups
            assert set(c.operands) == set(group), f"not all ranks take part in {c}"
            if c.kind != "BROADCAST":
                out.append(c)
                continue
            given, others = c.operands[c.root], [d for d in group if d != c.root]
            out += [Call.message(c.root, d, given, c.results[d], c.shape, c.dtype) for d in others]
            same.append((c.root, c.results[c.root], c.operands[c.root]))
        return out, same


@dataclass(slots=True)
class Direct:
    """A collective as messages: what ranks compute before them, and behind.

    A reduction to one rank is everybody's part sent there and merged in the order of the group; a scatter is one for each rank.
    As many bytes as the collective's.
    """

    ranks: Sequence[Nodes]
    before: list[tuple[int, NodeProto]] = field(default_factory=list[tuple[int, NodeProto]])
    after: list[tuple[int, NodeProto]] = field(default_factory=list[tuple[int, NodeProto]])

    def messages(self, c: Call) -> list[Call]:
        """Of one call."""
        (group,) = c.groups
        out = list[Call]()
        if c.kind == "REDUCE":
            return self._merged(c, c.root, c.operands, c.shape)
        if c.kind == "REDUCE_SCATTER":
            n = c.ending[0]
            for k, root in enumerate(group):
                mine = {d: self._sliced(d, c.operands[d], k * n, (k + 1) * n, c) for d in group}
                out += self._merged(c, root, mine, c.ending)
            return out
        for root in group:
            parts = {d: self._value(root, f"{c.results[root]}/from {d}", c.shape, c.dtype) for d in group if d != root}
            out += [Call.message(d, root, c.operands[d], name, c.shape, c.dtype) for d, name in parts.items()]
            names = [c.operands[d] if d == root else parts[d] for d in group]
            self.after.append((root, helper.make_node("Concat", names, [c.results[root]], axis=0)))
        return out

    def _value(self, rank: int, base: str, shape: Sequence[int], dtype: str) -> str:
        nodes = self.ranks[rank]
        name = nodes.fresh(base)
        nodes.values[name] = Value(name, tuple(shape), dtype)
        return name

    def _sliced(self, rank: int, name: str, lo: int, hi: int, c: Call) -> str:
        out = self._value(rank, f"{name}/{lo}", c.ending, c.dtype)
        where = [self.ranks[rank].numbers([n]).name for n in (lo, hi, 0, 1)]
        self.before.append((rank, helper.make_node("Slice", [name, *where], [out])))
        return out

    def _merged(self, c: Call, root: int, operands: Mapping[int, str], shape: tuple[int, ...]) -> list[Call]:
        out = list[Call]()
        so_far = ""
        (group,) = c.groups
        for d in group:
            name = operands[d]
            if d != root:
                name = self._value(root, f"{c.results[root]}/from {d}", shape, c.dtype)
                out.append(Call.message(d, root, operands[d], name, shape, c.dtype))
            if so_far:
                last = d == group[-1]
                both = c.results[root] if last else self._value(root, f"{c.results[root]}/to {d}", shape, c.dtype)
                self.after.append((root, helper.make_node(_NODE[c.op], [so_far, name], [both])))
                name = both
            so_far = name
        return out


def bucketed(calls: Sequence[Call], direct: Direct) -> list[Call]:
    """Calls that one operation can do together: messages of one shape, no rank twice a sender or a receiver; groups apart.

    XLA has no reduction to one rank, and gathers and scatters of all ranks in groups of one size only: the others are messages.
    """
    ranks = len(direct.ranks)
    sent = [c for c in calls if c.kind == "PERMUTE"]
    for pack in _packed([c for c in calls if c.kind != "PERMUTE"]):
        covers = _covers(pack, ranks)
        for c in pack:
            sent += [c] if covers else direct.messages(c)
    return [_together(p, ranks) for p in _packed(sent)]


def _packed(calls: Sequence[Call]) -> list[list[Call]]:
    packs: list[list[Call]] = []
    for c in calls:
        pack = next((p for p in packs if all(_fit_in_one_collective(c, other) for other in p)), None)
        if pack is None:
            packs.append([c])
        else:
            pack.append(c)
    return packs


def _covers(pack: Sequence[Call], ranks: int) -> bool:
    groups, kind = [g for c in pack for g in c.groups], pack[0].kind
    even = sum(map(len, groups)) == ranks and len(set(map(len, groups))) == 1
    return kind == "ALL_REDUCE" or (kind != "REDUCE" and even)


def _fit_in_one_collective(a: Call, b: Call) -> bool:
    alike = (a.kind, a.op, a.shape, a.dtype) == (b.kind, b.op, b.shape, b.dtype)
    return alike and a.operands.keys().isdisjoint(b.operands) and a.results.keys().isdisjoint(b.results)


def _together(pack: Sequence[Call], ranks: int) -> Call:
    gives, gets = {r: n for c in pack for r, n in c.operands.items()}, {r: n for c in pack for r, n in c.results.items()}
    alone = [(r,) for r in range(ranks) if r not in gives] if pack[0].kind == "ALL_REDUCE" else []
    return replace(pack[0], groups=(*(g for c in pack for g in c.groups), *alone), operands=gives, results=gets)


def emitted(text: Text, e: Call, x: Ref, channel: int) -> Ref:
    """The operation; the greatest or least of floats is that of `Text.ranked`, since XLA's all-reduce on CPUs loses a NaN."""
    if e.op in ("MAX", "MIN") and e.dtype in FLOATS:
        ranks = text.ranked(x, last=e.op == "MAX")
        return text.of_ranks(_emitted(text, replace(e, dtype=ranks.dtype), ranks, channel), e.dtype)
    return _emitted(text, e, x, channel)


def _emitted(text: Text, e: Call, x: Ref, channel: int) -> Ref:
    handle = f"channel_handle = #stablehlo.channel_handle<handle = {channel}, type = 1>"
    most = max(map(len, e.groups))
    rows = [[*g, *[-1] * (most - len(g))] for g in e.groups]
    table = f"dense<{rows}> : tensor<{len(rows)}x{most}xi64>"
    how, name, region = f"{handle}, replica_groups = {table}, use_global_device_ids", e.kind.lower(), ""
    if e.kind == "PERMUTE":
        how, name = f"{handle}, source_target_pairs = {table}", "collective_permute"
    elif e.kind == "ALL_GATHER":
        how = f"all_gather_dim = 0 : i64, {how}"
    else:
        how = how if e.kind == "ALL_REDUCE" else f"scatter_dimension = 0 : i64, {how}"
        region = f" {text.merge(_BODY[e.op], e.dtype)}"
    return text.typed(f'"stablehlo.{name}"({x.ssa}) <{{{how}}}>{region}', [x], e.ending, e.dtype)
