"""Edits of a plan that keep every law of the plan: what it computes is no longer the model, or what it says no longer true.

Each takes a build (`Edited`) and damages it; the rest (program, kernels, report, hashes) is then made anew around the damage,
as one who wants to deceive would. An edit returns False where a build has no place for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from onnx import NodeProto, helper

from tapestry.build import weight_tiles
from tapestry.ir.expr import Call, Const, distinct
from tapestry.ir.graph import Block, Read
from tapestry.ir.index import Aff, Floor, Mod, const
from tapestry.ir.types import Weight, numpy_dtype
from tests.support.faults.edited_build import (
    Edited,
    blocks,
    change_call,
    opaques,
    other_tensor,
    put_call,
    put_literal,
    with_read,
)

Edit = Callable[[Edited], bool]
EDITS: dict[str, Edit] = {}


def edit(f: Edit) -> Edit:
    EDITS[f.__name__] = f
    return f


# wiring


@edit
def weights_exchanged(e: Edited) -> bool:
    """What two weights of one shape refer to is exchanged."""
    pairs = [
        (a, b) for a in e.graph.weights for b in e.graph.weights
        if a < b and e.graph.weights[a].file and e.graph.weights[b].file
        and e.graph.weights[a].sha256 != e.graph.weights[b].sha256
        and (e.graph.tensors[a].shape, e.graph.tensors[a].dtype) == (e.graph.tensors[b].shape, e.graph.tensors[b].dtype)
    ]  # fmt: skip
    if not pairs:
        return False
    a, b = e.rng.choice(pairs)
    refs = dict(e.graph.weights)
    refs[a], refs[b] = refs[b], refs[a]
    return e.put(replace(e.graph, weights=refs))


@edit
def weights_exchanged_in_an_operation(e: Edited) -> bool:
    """An operation reads another weight of the same shape."""
    for i, op in blocks(e):
        for k, r in enumerate(op.reads):
            ref = e.graph.weights.get(r.tensor)
            others = [
                n for n, w in e.graph.weights.items() if ref and w.sha256 != ref.sha256
                and (e.graph.tensors[n].shape, e.graph.tensors[n].dtype)
                == (e.graph.tensors[r.tensor].shape, e.graph.tensors[r.tensor].dtype)
            ]  # fmt: skip
            if others:
                return e.op(i, with_read(op, k, tensor=e.rng.choice(others)))
    return False


@edit
def stale_tensor(e: Edited) -> bool:
    """An operation reads an earlier result of the same shape."""
    for i, op in blocks(e):
        for k in e.rng.sample(range(len(op.reads)), len(op.reads)):
            others = other_tensor(e, op.reads[k].tensor, i)
            if others and op.reads[k].tensor not in e.graph.weights:
                return e.op(i, with_read(op, k, tensor=e.rng.choice(others)))
    return False


@edit
def arguments_exchanged(e: Edited) -> bool:
    """The two arguments of a difference or a quotient."""
    for i, op in blocks(e):
        calls = [x for x in distinct((*op.point, *op.then)) if isinstance(x, Call) and x.fn in ("sub", "div", "pow")]
        calls = [x for x in calls if x.args[0] != x.args[1]]
        if calls:
            x = e.rng.choice(calls)
            return e.op(i, put_call(op, x, Call(x.fn, x.args[::-1], x.dtype)))
    return False


@edit
def read_dropped_for_another(e: Edited) -> bool:
    """Two reads of an operation are one: ``a + b`` becomes ``a + a``."""
    for i, op in blocks(e):
        for a in range(len(op.reads)):
            for b in range(len(op.reads)):
                x, y = op.reads[a], op.reads[b]
                if x.tensor != y.tensor and len(x.index) == len(y.index) and (
                    (e.graph.tensors[x.tensor].shape, e.graph.tensors[x.tensor].dtype)
                    == (e.graph.tensors[y.tensor].shape, e.graph.tensors[y.tensor].dtype)
                ):  # fmt: skip
                    return e.op(i, replace(op, reads=(*op.reads[:a], y, *op.reads[a + 1 :])))
    return False


# constants


@edit
def constants_zeroed(e: Edited) -> bool:
    """The bytes are zero, the hashes in the graph are as they were."""
    for t, data in e.constants.items():
        if any(data):
            e.constants[t] = bytes(len(data))
            return True
    return False


def _constant(e: Edited, name: str, value: np.ndarray) -> bool:
    e.constants[name] = value.tobytes()
    ref = Weight(file="", offset=0, length=value.nbytes, sha256=weight_tiles.root(weight_tiles.digests(value)))
    return e.put(replace(e.graph, weights={**e.graph.weights, name: ref}))


@edit
def constants_zeroed_and_hashed(e: Edited) -> bool:
    for t, data in e.constants.items():
        if any(data):
            shape, dtype = e.graph.tensors[t].shape, numpy_dtype(e.graph.tensors[t].dtype)
            return _constant(e, t, np.zeros(shape, dtype))
    return False


@edit
def constant_changed_at_one_cell(e: Edited) -> bool:
    for t, data in e.constants.items():
        info = e.graph.tensors[t]
        if info.size > 1 and info.dtype != "bool":
            value = np.frombuffer(data, numpy_dtype(info.dtype)).reshape(info.shape).copy()
            value.reshape(-1)[e.rng.randrange(info.size)] += 1
            return _constant(e, t, value)
    return False


@edit
def initializer_made_a_zero_constant(e: Edited) -> bool:
    names = [n for n, w in e.graph.weights.items() if w.file and e.graph.tensors[n].nbytes < 1 << 24]
    if not names:
        return False
    t = e.graph.tensors[e.rng.choice(names)]
    return _constant(e, t.name, np.zeros(t.shape, numpy_dtype(t.dtype)))


@edit
def weight_at_another_place(e: Edited) -> bool:
    """External data is read 64 bytes further on."""
    for n, w in e.graph.weights.items():
        if w.file and not w.name and w.offset >= 64:
            return e.put(replace(e.graph, weights={**e.graph.weights, n: replace(w, offset=w.offset - 64)}))
    return False


# bodies


@edit
def literal_scaled(e: Edited) -> bool:
    """A number in a body is a tenth more."""
    for i, op in blocks(e):
        found = [
            c for x in distinct((*op.point, *op.then)) if isinstance(x, Call) and x.fn in ("mul", "div", "add", "sub")
            for c in x.args if isinstance(c, Const) and isinstance(c.value, float) and 1e-3 < abs(c.value) < 1e6
        ]  # fmt: skip
        if found:
            c = e.rng.choice(found)
            return e.op(i, put_literal(op, c, float(c.value) * 1.1))
    return False


@edit
def literal_negated(e: Edited) -> bool:
    for i, op in blocks(e):
        found = [
            c for x in distinct((*op.point, *op.then)) if isinstance(x, Call) and x.fn in ("mul", "div")
            for c in x.args if isinstance(c, Const) and isinstance(c.value, float) and 0 < abs(c.value) < 1e30
        ]  # fmt: skip
        if found:
            c = e.rng.choice(found)
            return e.op(i, put_literal(op, c, -float(c.value)))
    return False


@edit
def sum_for_difference(e: Edited) -> bool:
    return change_call(e, {"add": "sub", "sub": "add"})


@edit
def product_for_sum(e: Edited) -> bool:
    return change_call(e, {"mul": "add"})


@edit
def quotient_for_product(e: Edited) -> bool:
    return change_call(e, {"div": "mul"})


@edit
def maximum_for_minimum(e: Edited) -> bool:
    return change_call(e, {"max": "min", "min": "max"})


@edit
def another_curve(e: Edited) -> bool:
    curves = {
        "exp": "tanh",
        "erf": "tanh",
        "tanh": "erf",
        "sigmoid": "tanh",
        "sqrt": "abs",
        "log": "neg",
        "sin": "cos",
        "cos": "sin",
    }
    return change_call(e, curves)


@edit
def sum_made_a_maximum(e: Edited) -> bool:
    for i, op in blocks(e):
        if op.monoid == "sum" and op.ranges[op.reduce[0].name] > 1:
            return e.op(i, replace(op, monoid="max"))
    return False


@edit
def maximum_made_a_sum(e: Edited) -> bool:
    for i, op in blocks(e):
        if op.monoid in ("max", "min") and op.ranges[op.reduce[0].name] > 1:
            return e.op(i, replace(op, monoid="sum"))
    return False


@edit
def epilogue_dropped(e: Edited) -> bool:
    for i, op in blocks(e):
        if (
            op.monoid
            and op.lowers
            and len(op.outs) == len(op.body)
            and [x.dtype for x in op.then] == [x.dtype for x in op.body]
        ):
            return e.op(i, replace(op, then=()))
    return False


@edit
def branches_exchanged(e: Edited) -> bool:
    """The two values of a ``where``."""
    for i, op in blocks(e):
        calls = [
            x for x in distinct((*op.point, *op.then)) if isinstance(x, Call) and x.fn == "where" and x.args[1] != x.args[2]
        ]
        if calls:
            x = e.rng.choice(calls)
            return e.op(i, put_call(op, x, Call("where", (x.args[0], x.args[2], x.args[1]), x.dtype)))
    return False


# indices


def moved(e: Edited, change: Callable[[Block, Read, int], tuple[Aff, ...] | None]) -> bool:
    """A read's index changed; what would leave the tensor then reads 0."""
    for i, op in blocks(e):
        for k in e.rng.sample(range(len(op.reads)), len(op.reads)):
            r = op.reads[k]
            index = change(op, r, k)
            if index is not None and index != r.index:
                kind = e.graph.tensors[r.tensor].dtype
                zero = r.other if r.other is not None else False if kind == "bool" else 0.0 if kind[0] in "fb" else 0
                return e.op(i, with_read(op, k, index=index, other=zero))
    return False


@edit
def index_one_further(e: Edited) -> bool:
    def change(op: Block, r: Read, _: int) -> tuple[Aff, ...] | None:
        at = next((a for a, x in enumerate(r.index) if x.terms), None)
        return None if at is None else (*r.index[:at], r.index[at] + 1, *r.index[at + 1 :])

    return moved(e, change)


@edit
def index_held_still(e: Edited) -> bool:
    """A read does not walk along an axis any more."""

    def change(op: Block, r: Read, _: int) -> tuple[Aff, ...] | None:
        shape = e.graph.tensors[r.tensor].shape
        at = next((a for a, x in enumerate(r.index) if x.terms and shape[a] > 1), None)
        return None if at is None else (*r.index[:at], const(0), *r.index[at + 1 :])

    return moved(e, change)


@edit
def index_backwards(e: Edited) -> bool:
    def change(op: Block, r: Read, _: int) -> tuple[Aff, ...] | None:
        shape = e.graph.tensors[r.tensor].shape
        at = next((a for a, x in enumerate(r.index) if x.is_dim and shape[a] > 2), None)
        return None if at is None else (*r.index[:at], r.index[at] * -1 + (shape[at] - 1), *r.index[at + 1 :])

    return moved(e, change)


@edit
def axes_exchanged(e: Edited) -> bool:
    """Two axes of one size, read by two dimensions, are read the other way round."""

    def change(op: Block, r: Read, _: int) -> tuple[Aff, ...] | None:
        shape = e.graph.tensors[r.tensor].shape
        pairs = [(a, b) for a in range(len(shape)) for b in range(a) if shape[a] == shape[b] > 1 and r.index[a] != r.index[b]]
        if not pairs:
            return None
        a, b = pairs[0]
        index = list(r.index)
        index[a], index[b] = index[b], index[a]
        return tuple(index)

    return moved(e, change)


@edit
def guard_one_further(e: Edited) -> bool:
    for i, op in blocks(e):
        for k, r in enumerate(op.reads):
            if r.when:
                g = r.when[0]
                return e.op(i, with_read(op, k, when=(replace(g, aff=g.aff - 1), *r.when[1:])))
    return False


@edit
def guard_dropped(e: Edited) -> bool:
    for i, op in blocks(e):
        for k, r in enumerate(op.reads):
            if r.when and r.other is not None:
                return e.op(i, with_read(op, k, when=()))
    return False


@edit
def padding_of_another_value(e: Edited) -> bool:
    for i, op in blocks(e):
        for k, r in enumerate(op.reads):
            if isinstance(r.other, float):
                return e.op(i, with_read(op, k, other=1.5))
    return False


@edit
def divisor_one_more(e: Edited) -> bool:
    """A floor or a mod has another divisor."""

    def change(op: Block, r: Read, _: int) -> tuple[Aff, ...] | None:
        for a, x in enumerate(r.index):
            for at, (atom, c) in enumerate(x.terms):
                if isinstance(atom, Floor | Mod):
                    terms = (*x.terms[:at], (type(atom)(atom.arg, atom.div + 1), c), *x.terms[at + 1 :])
                    return (*r.index[:a], Aff(terms, x.const), *r.index[a + 1 :])
        return None

    return moved(e, change)


@edit
def reduction_one_short(e: Edited) -> bool:
    """A reduced dimension ends before its last point."""
    for i, op in blocks(e):
        if op.monoid and op.reduce and op.reduce[0].size > 1:
            d = op.reduce[0]
            return e.op(i, replace(op, reduce=(replace(d, size=d.size - 1), *op.reduce[1:])))
    return False


# opaque nodes


def node_changed(e: Edited, change: Callable[[NodeProto], bool], *kinds: str) -> bool:
    for i, op in opaques(e, *kinds):
        node = NodeProto.FromString(op.node)
        if change(node):
            return e.op(i, replace(op, node=node.SerializeToString(), source=("renamed",)))
    return False


@edit
def attribute_of_topk_changed(e: Edited) -> bool:
    def change(node: NodeProto) -> bool:
        kept = [a for a in node.attribute if a.name != "largest"]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("largest", 0)])
        return True

    return node_changed(e, change, "TopK")


@edit
def attribute_of_lstm_changed(e: Edited) -> bool:
    def change(node: NodeProto) -> bool:
        node.attribute.append(helper.make_attribute("activations", ["Sigmoid", "Relu", "Tanh"]))
        return True

    return node_changed(e, change, "LSTM")


@edit
def operator_in_a_body_exchanged(e: Edited) -> bool:
    others = {"Add": "Mul", "Mul": "Add", "Sub": "Add", "Tanh": "Relu", "MatMul": "MatMul", "Relu": "Tanh"}

    def change(node: NodeProto) -> bool:
        inner = [n for a in node.attribute for n in a.g.node if others.get(n.op_type, n.op_type) != n.op_type]
        for n in inner[-1:]:
            n.op_type = others[n.op_type]
        return bool(inner)

    return node_changed(e, change)
