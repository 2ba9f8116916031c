"""Families with bodies: If, Loop and Scan, and sequences and optionals, which are tensors again at the end of a branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, ValueInfoProto, helper, numpy_helper

from tests.fuzz.families import elementwise_families, reduction_families, view_families
from tests.fuzz.generate.draw import Draw, Value
from tests.fuzz.generate.evaluate import need, onnx_type, reads


def whole(d: Draw) -> None:
    """Arithmetic of integers; divisors are positive, since a division by 0 ends onnxruntime's process."""
    x = d.pick(floating=False, dtypes=("int32", "int64", "int64", "uint8"))
    op = d.rng.choice(["Add", "Sub", "Mul", "Max", "Div", "Mod"])
    d.add(op, [x, d.weight(np.asarray(d.rng.randint(1, 5), x.dtype)) if op in ("Div", "Mod") else d.mate(x)], exact=True)


INSIDE = (
    elementwise_families.unary,
    elementwise_families.binary,
    elementwise_families.binary,
    elementwise_families.choose,
    elementwise_families.variadic,
    elementwise_families.compare,
    whole,
    elementwise_families.cast,
    view_families.transpose,
    view_families.reshape,
    view_families.cut,
    view_families.expand,
    view_families.join,
    view_families.gather,
    reduction_families.reduce,
    reduction_families.softmax,
    reduction_families.scan,
)


def _inside(d: Draw, formals: Sequence[Value], most: int = 3) -> Draw:
    """A body under construction: on its inputs and on some values around it, which it captures."""
    b = Draw(d.rng, d.opset, d.zeros, count=d.count, depth=d.depth + 1)
    around = [v for v in d.values.values() if v.array.size or d.zeros]
    shared = d.rng.sample(around, min(len(around), d.rng.randrange(3)))
    b.values = {v.name: v for v in (*shared, *formals)}
    for _ in range(d.rng.randint(1, most)):
        nested = d.depth < 1 and d.chance(0.08)
        b.attempt(d.rng.choice((branch, loop, scan_loop) if nested else INSIDE))
    return b


def _made(b: Draw) -> list[Value]:
    return [b.values[o] for n in b.nodes for o in n.output if o in b.values]


def _like(b: Draw, like: Value, *, exact: bool, state: bool) -> Value:
    """A value of a body of a type and shape: one that is there, or the state itself with something done to it."""
    fit = [v for v in b.values.values() if (v.dtype, v.shape) == (like.dtype, like.shape) and (v.exact or not exact)]
    if state and (not fit or b.chance(0.5)):
        other = b.rng.choice(fit) if fit and b.chance(0.5) else b.fresh(like.shape, like.dtype)
        op = b.rng.choice(["Max", "Min", "Where"] if exact and like.floating else ["Add", "Mul", "Sub", "Where"])
        if op == "Where" or like.dtype == "bool":
            return b.add("Where", [b.fresh(like.shape[-1:], "bool"), like, other], exact=True)[0]
        return b.add(op, [like, other], exact=not like.floating or op in ("Max", "Min"))[0]
    return fit[max(b.rng.randrange(len(fit)), b.rng.randrange(len(fit)))] if fit else b.weight(b.data(like.shape, like.dtype))


def _info(d: Draw, v: Value) -> ValueInfoProto:
    shape = (
        list(v.shape) if d.chance(0.5) else [None] * v.rank if d.chance(0.5) or not v.rank else None
    )  # (onnxruntime wants to know of a loop's own)
    return helper.make_tensor_value_info(v.name, onnx_type(v.array.dtype), shape)


def _body(d: Draw, b: Draw, formals: Sequence[Value], results: Sequence[Value]) -> GraphProto:
    """The graph of a body; its new inputs are captured, and so are its weights unless it keeps them."""
    outs: list[Value] = []
    fresh = {v.name for v in _made(b)}
    for v in results:
        if v.name not in fresh or v.name in {o.name for o in outs}:
            outs += b.add("Identity", [v], exact=[v.exact])
        else:
            outs.append(v)
    d.inputs |= b.inputs
    d.values |= {n: b.values[n] for n in b.inputs}
    read = {i for n in b.nodes for i in reads(n)}
    kept = {n: a for n, a in b.weights.items() if n in read}
    places = ["around", "around", "around", "constants", "constants", "initializers"]
    where = d.rng.choice(places if d.opset >= 9 else places[:1])  # (Constants were floats)
    constants: list[NodeProto] = []
    if where == "around":
        d.weights |= kept
        d.values |= {n: b.values[n] for n in kept}
    elif where == "constants":
        constants = [helper.make_node("Constant", [], [n], value=numpy_helper.from_array(a)) for n, a in kept.items()]
    stored = [numpy_helper.from_array(a, n) for n, a in kept.items()] if where == "initializers" else []
    ins, found = [_info(d, v) for v in formals], [_info(d, v) for v in outs]
    return helper.make_graph([*constants, *b.nodes], d.name("body"), ins, found, stored)


def _condition(d: Draw) -> Value:
    """A known condition, one that is computed of known sizes, an input, or one that is computed of exact data."""
    kind = d.rng.randrange(4)
    if kind == 0:
        return d.weight(np.array(d.chance(0.5)).reshape(d.rng.choice([(), (1,)])))
    if kind == 1:
        return d.input(np.array(d.chance(0.5)))
    x = d.pick(exact=True, rank=range(1, 5), dtypes=("float32", "int64", "int32"))
    (y,) = d.add("Shape", [x], exact=True) if kind == 2 else [x]
    (y,) = d.add("ReduceMax", [y], exact=True, keepdims=0)
    return d.add("Less", [y, d.weight(np.asarray(d.rng.randrange(8), y.dtype))], exact=True)[0]


def branch(d: Draw) -> None:
    """If: known, computed and given conditions; branches that capture values; sometimes of other shapes."""
    test = _condition(d)
    one = _inside(d, [])
    made = _made(one)
    first = d.rng.sample(made, min(len(made), d.rng.choice([1, 1, 2])))
    need(first, "no branch")
    left = _body(d, one, [], first)
    two = _inside(d, [])
    second = [_like(two, v, exact=False, state=False) for v in first]
    right = _body(d, two, [], second)
    if d.chance(0.5):
        left, right = right, left
    exact = [u.exact and v.exact for u, v in zip(first, second, strict=True)]
    d.add("If", [test], len(exact), exact=exact, then_branch=left, else_branch=right)


def _states(d: Draw, count: int) -> tuple[list[Value], list[Value]]:
    """Values that a loop begins with, and their names inside; an exact one may be taken for any other."""
    first = [d.pick(floating=d.chance(0.7)) if d.chance(0.7) else d.fresh(d.shape(), "float32") for _ in range(count)]
    return first, [Value(d.name("s"), v.array, v.exact and (not v.floating or d.chance(0.5))) for v in first]


def _seen(b: Draw, most: int) -> list[Value]:
    made = _made(b)
    return b.rng.sample(made, min(len(made), b.rng.randint(0, most)))


def loop(d: Draw) -> None:
    """Loop: known and given trip counts, or a condition that ends it; carried values, kept ones, captures."""
    first, states = _states(d, d.rng.choice([0, 1, 1, 2, 3]))
    step, going = Value(d.name("i"), np.array(0, np.int64), True), Value(d.name("c"), np.array(True), True)
    formals = [step, going, *states]
    b = _inside(d, formals)
    count, stop = d.rng.choice([0, 1, 2, 3, 4, 5]), d.rng.choice([0, 1, 2, 9])
    kind = d.rng.randrange(5)
    trips = None if kind == 0 else d.weight(np.array(count)) if kind < 4 else d.input(np.array(count))
    how = "counted" if trips is None else d.rng.choice(["same", "same", "true", "counted", "state"])
    on = going
    if how == "true":
        on = b.weight(np.array(True))
    elif how == "counted":
        (on,) = b.add("Less", [step, b.weight(np.array(stop))], exact=True)
    elif how == "state" and (whole := [v for v in states if v.exact and not v.rank and v.dtype == "int64"]):
        (on,) = b.add("Less", [whole[0], b.weight(np.array(stop))], exact=True)
    after = [_like(b, v, exact=v.exact, state=True) for v in states]
    seen = _seen(b, 2)
    need(after or seen, "a loop without results")
    body = _body(d, b, formals, [on, *after, *seen])
    start = d.rng.choice(
        [None, None, d.weight(np.array(True)), d.weight(np.array(d.chance(0.8))), d.input(np.array(d.chance(0.8)))]
    )
    exact = [v.exact for v in (*states, *seen)]
    d.add("Loop", [trips, start, *first], len(exact), exact=exact, body=body)


def scan_loop(d: Draw) -> None:
    """Scan: several states and inputs, either direction, any axes."""
    need(d.opset >= 9, "Scan had batches")
    first, states = _states(d, d.rng.choice([0, 1, 1, 2]))
    x = d.pick(rank=range(1, 4), floating=d.chance(0.8))
    over, axes = [x], [d.axis(x)]
    length = x.shape[axes[0]]
    need(0 < length <= 9, "no steps, or many")
    for _ in range(d.rng.choice([0, 0, 1, 2])):
        shape = list(d.shape(d.rng.randint(1, 3)))
        axes.append(d.rng.randrange(-len(shape), len(shape)))
        shape[axes[-1]] = length
        over.append(d.fresh(shape) if d.chance(0.7) else d.mate(x, shape))
    cut = [v.array.take(0, a) for v, a in zip(over, axes, strict=True)]
    slices = [Value(d.name("u"), np.asarray(a), v.exact) for a, v in zip(cut, over, strict=True)]
    b = _inside(d, [*states, *slices], 4)
    after = [_like(b, v, exact=v.exact, state=True) for v in states]
    seen = _seen(b, 3)
    need(after or seen, "a loop without results")
    body = _body(d, b, [*states, *slices], [*after, *seen])
    back, out_back = ([d.rng.randrange(2) for _ in range(n)] for n in (len(over), len(seen)))
    out_axes = [d.rng.randrange(-v.rank - 1, v.rank + 1) for v in seen]
    exact = [v.exact for v in (*states, *seen)]
    d.add(
        "Scan", [*first, *over], len(exact), exact=exact, body=body, num_scan_inputs=len(over),
        scan_input_axes=axes if d.chance(0.7) or any(axes) else None,
        scan_input_directions=back if d.chance(0.6) else None,
        scan_output_axes=out_axes if seen and d.chance(0.6) else None,
        scan_output_directions=out_back if seen and d.chance(0.6) else None,
    )  # fmt: skip


class SequenceNodes:
    """Nodes about one sequence, and how many tensors it has; inside of a branch, since a value is a tensor elsewhere."""

    def __init__(self, d: Draw) -> None:
        self.d, self.nodes, self.length, self.name = d, list[NodeProto](), 0, ""
        self.shapes = set[tuple[int, ...]]()  # that a tensor in it may have
        self.stored: dict[str, np.ndarray] = {}

    def node(self, op: str, ins: Sequence[str], **attrs: Any) -> str:
        """Its result's name."""
        out = self.d.name("q")
        self.nodes.append(helper.make_node(op, ins, [out], **attrs))
        return out

    def number(self, value: int | Sequence[int]) -> str:
        """An integer, or several, kept in the branch as constants."""
        return self.node("Constant", [], value=numpy_helper.from_array(np.array(value, np.int64)))

    def place(self, extra: int = 0) -> list[str]:
        """Any position, from either end, or (for ``extra``) none."""
        if extra and self.d.chance(0.3):
            return []
        need(self.length + extra, "no place")
        return [self.number(self.d.rng.randrange(-self.length, self.length + extra))]

    def fits(self, axis: int, new: int) -> bool:
        """Whether tensors of its shapes may be joined, if one is empty (onnxruntime looks at all others)."""
        empty = any(0 in shape for shape in self.shapes)
        alike = {shape if new else (shape[:axis], shape[axis:][1:]) for shape in self.shapes}
        return not empty or len(alike) <= 1


def _begun(s: SequenceNodes, x: Value, parts: Sequence[Value]) -> None:
    d, kind = s.d, s.d.rng.randrange(3)
    if kind == 0:
        s.name, s.length, s.shapes = s.node("SequenceConstruct", [v.name for v in parts]), len(parts), {v.shape for v in parts}
    elif kind == 1:
        s.name = s.node("SequenceEmpty", [], dtype=onnx_type(x.array.dtype))
    else:
        at = d.axis(x)
        n, keep = x.shape[at], {}
        need(n, "nothing to split")
        split: list[str] = []
        if d.chance(0.5):
            step = d.rng.randint(1, n)
            split = [s.number(step)] if step == n or d.chance(0.5) else [s.number([step, n - step])]
            even = s.nodes[-1].attribute[0].t.dims == []
            s.length, sizes = (-(-n // step), {step, n % step or step}) if even else (2, {step, n - step})
        else:
            s.length, sizes, keep = n, {1}, {"keepdims": d.rng.randrange(2)}
        before, after = x.shape[:at], x.shape[at:][1:]
        s.shapes = {(*before, *([k] if keep.get("keepdims", 1) else []), *after) for k in sizes}
        s.name = s.node("SplitToSequence", [x.name, *split], axis=at, **keep)


def sequence(d: Draw) -> None:
    """Sequences that are made, split, grown and shrunk, and end as tensors; in a branch that is taken, or a computed one."""
    need(d.opset >= 11, "there were no sequences")
    x = d.pick(rank=range(1, 4), floating=d.chance(0.8))
    same = d.chance(0.6)
    parts = [x, *(d.mate(x, x.shape if same else d.shape(x.rank)) for _ in range(d.rng.randint(0, 3)))]
    s = SequenceNodes(d)
    _begun(s, x, parts)
    for _ in range(d.rng.randint(0, 3)):
        if d.chance(0.65):
            more = d.rng.choice(parts)
            s.name = s.node("SequenceInsert", [s.name, more.name, *s.place(1)])
            s.length, s.shapes = s.length + 1, s.shapes | {more.shape}
        else:
            s.name = s.node("SequenceErase", [s.name, *(s.place() if d.chance(0.7) else [])])
            s.length -= 1
    kind = d.rng.randrange(5)
    if kind == 0:
        outs = [s.node("SequenceLength", [s.name])]
    elif kind < 3:
        outs = [s.node("SequenceAt", [s.name, *s.place()]) for _ in range(d.rng.randint(1, 2))]
    else:
        new, axis = d.rng.randrange(2), d.rng.randrange(-x.rank, x.rank)
        need(s.fits(axis, new), "onnxruntime joins empty tensors of any shapes")
        outs = [s.node("ConcatFromSequence", [s.name], axis=axis, new_axis=new)]
    _taken(d, s.nodes, outs, np.dtype(np.int64) if kind == 0 else x.array.dtype, exact=all(v.exact for v in parts))


def _taken(d: Draw, nodes: Sequence[NodeProto], outs: Sequence[str], dtype: np.dtype[np.generic], *, exact: bool) -> None:
    """The nodes as the branch that an If takes."""
    infos = [helper.make_tensor_value_info(o, onnx_type(dtype), None) for o in outs]
    taken = helper.make_graph(nodes, d.name("body"), [], infos)
    others = [d.name("q") for _ in outs]
    zero = numpy_helper.from_array(np.zeros((), dtype))
    nothing = [helper.make_node("Constant", [], [o], value=zero) for o in others]
    infos = [helper.make_tensor_value_info(o, onnx_type(dtype), None) for o in others]
    other = helper.make_graph(nothing, d.name("body"), [], infos)
    test = d.weight(np.array(True)) if d.chance(0.85) else d.input(np.array(True))
    d.add("If", [test], len(outs), exact=[exact] * len(outs), then_branch=taken, else_branch=other)


def optional(d: Draw) -> None:
    """Optionals of a tensor, or of none; what they hold, or whether they do."""
    need(d.opset >= 15, "there were no optionals")
    x = d.pick(floating=d.chance(0.8))
    s = SequenceNodes(d)
    kind = d.rng.randrange(3)
    held = s.node("Optional", [x.name]) if d.chance(0.6) or d.opset < 18 else x.name
    if kind == 0:
        outs = [s.node("OptionalHasElement", [held] if d.chance(0.7) or d.opset < 18 else [])]
    else:
        outs = [s.node("OptionalGetElement", [held])]
    _taken(d, s.nodes, outs, np.dtype(bool) if kind == 0 else x.array.dtype, exact=x.exact)


FAMILIES = {f.__name__: f for f in (branch, loop, scan_loop, sequence, optional)}
