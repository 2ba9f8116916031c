"""More edits of plans, written once the checker of `tapestry.verify.model` was finished."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from onnx import NodeProto, helper

from tapestry.ir.expr import Call, Const, Expr, Index, call, cast, distinct
from tapestry.ir.graph import Block, Dim, Read
from tapestry.ir.index import Aff, dim
from tapestry.ir.monoid import number
from tests.support.faults.graph_edits import (
    Edit,
    Edited,
    blocks,
    moved,
    node_changed,
    opaques,
    put_call,
    put_literal,
    with_read,
)

LATER: dict[str, Edit] = {}


def later(f: Edit) -> Edit:
    LATER[f.__name__] = f
    return f


def result_changed(e: Edited, change: object, floats: bool = True) -> bool:
    """One operation's first result changed by a function of (operation, expression)."""
    for i, op in blocks(e):
        field = "then" if op.monoid else "body"
        first, *rest = getattr(op, field)
        if (not floats or first.dtype == "f32") and (new := change(op, first)) is not None:  # type: ignore[operator]
            return e.op(i, replace(op, **{field: (new, *rest)}))
    return False


@later
def result_a_thousandth_more(e: Edited) -> bool:
    return result_changed(e, lambda op, x: call("mul", x, number(1.001, "f32")))


@later
def result_rounded_to_half(e: Edited) -> bool:
    return result_changed(e, lambda op, x: cast(cast(x, "f16"), "f32"))


@later
def result_negated(e: Edited) -> bool:
    return result_changed(e, lambda op, x: call("neg", x))


@later
def result_shifted_a_little(e: Edited) -> bool:
    return result_changed(e, lambda op, x: call("add", x, number(0.003, "f32")))


@later
def result_clamped(e: Edited) -> bool:
    return result_changed(e, lambda op, x: call("min", x, number(0.1, "f32")))


def _row(e: Edited, op: Block, x: Expr) -> Expr | None:
    d = max(op.dims, key=lambda d: d.size, default=Dim("", 0))
    if d.size < 4:
        return None
    at = call("eq", Index(dim(d.name)), number(e.rng.randrange(1, d.size - 1), "i64"))
    return call("where", at, number(0, "f32"), x)


@later
def one_row_zeroed(e: Edited) -> bool:
    """One row in the middle is zero."""
    return result_changed(e, lambda op, x: _row(e, op, x))


@later
def one_cell_moved(e: Edited) -> bool:
    """One cell, anywhere, is a half more than it is."""

    def change(op: Block, x: Expr) -> Expr | None:
        tests = [call("eq", Index(dim(d.name)), number(e.rng.randrange(d.size), "i64")) for d in op.dims]
        if not tests:
            return None
        at = tests[0]
        for t in tests[1:]:
            at = call("and", at, t)
        return call("where", at, call("add", x, number(0.5, "f32")), x)

    return result_changed(e, change)


@later
def sum_made_a_product(e: Edited) -> bool:
    for i, op in blocks(e):
        if op.monoid == "sum" and op.reduce[0].size > 1:
            return e.op(i, replace(op, monoid="prod"))
    return False


@later
def reads_of_equal_shape_exchanged(e: Edited) -> bool:
    """Two reads with equal types exchange their tensors."""
    for i, op in blocks(e):
        t = e.graph.tensors
        for a in range(len(op.reads)):
            for b in range(a):
                x, y = op.reads[a], op.reads[b]
                if x.tensor != y.tensor and (t[x.tensor].shape, t[x.tensor].dtype) == (t[y.tensor].shape, t[y.tensor].dtype):
                    new = with_read(op, a, tensor=y.tensor)
                    return e.op(i, with_read(new, b, tensor=x.tensor))
    return False


@later
def small_number_larger(e: Edited) -> bool:
    """An epsilon is a hundred times what it was."""
    for i, op in blocks(e):
        for x in distinct((*op.point, *op.then)):
            if isinstance(x, Const) and isinstance(x.value, float) and 0 < x.value < 1e-3:
                return e.op(i, put_literal(op, x, x.value * 1000))
    return False


@later
def limit_moved(e: Edited) -> bool:
    """A bound of a clamp."""
    for i, op in blocks(e):
        for x in distinct((*op.point, *op.then)):
            if isinstance(x, Call) and x.fn in ("min", "max") and isinstance(x.args[1], Const) and x.dtype == "f32":
                c = x.args[1]
                return e.op(i, put_call(op, x, Call(x.fn, (x.args[0], Const(float(c.value) * 0.5 + 0.1, c.dtype)), x.dtype)))
    return False


@later
def test_turned(e: Edited) -> bool:
    """A comparison says the opposite."""
    turned = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
    for i, op in blocks(e):
        for x in distinct((*op.point, *op.then)):
            if isinstance(x, Call) and x.fn in turned:
                return e.op(i, put_call(op, x, Call(turned[x.fn], x.args, x.dtype)))
    return False


@later
def condition_always_true(e: Edited) -> bool:
    for i, op in blocks(e):
        for x in distinct((*op.point, *op.then)):
            if isinstance(x, Call) and x.fn == "where":
                return e.op(i, put_call(op, x, x.args[1])) if isinstance(x.args[1], Call) else e.op(
                    i, put_call(op, x, Call("where", (Const(True, "bool"), x.args[1], x.args[2]), x.dtype))
                )  # fmt: skip
    return False


@later
def step_doubled(e: Edited) -> bool:
    """A read goes two cells where it went one."""

    def change(op: Block, r: Read, _: int) -> tuple[Aff, ...] | None:
        shape = e.graph.tensors[r.tensor].shape
        at = next((a for a, x in enumerate(r.index) if x.terms and shape[a] > 2), None)
        return None if at is None else (*r.index[:at], r.index[at] * 2, *r.index[at + 1 :])

    return moved(e, change)


@later
def index_wraps(e: Edited) -> bool:
    """The last place of an axis reads the first."""

    def change(op: Block, r: Read, _: int) -> tuple[Aff, ...] | None:
        shape = e.graph.tensors[r.tensor].shape
        at = next((a for a, x in enumerate(r.index) if x.is_dim and shape[a] > 2), None)
        if at is None:
            return None
        from tapestry.ir.index import modulo

        return (*r.index[:at], modulo(r.index[at], shape[at] - 1), *r.index[at + 1 :])

    return moved(e, change)


@later
def outputs_of_two_operations_exchanged(e: Edited) -> bool:
    """Two results of one type take each other's names."""
    t, found = e.graph.tensors, [(i, op.outs[0]) for i, op in blocks(e) if len(op.outs) == 1]
    for i, a in found:
        for j, b in found:
            alike = (t[a].shape, t[a].dtype) == (t[b].shape, t[b].dtype)
            first, second = min(i, j), max(i, j)
            between = {x for op in e.graph.ops[first : second + 1] for x in op.inputs}
            if i < j and alike and not {a, b} & between:
                ops = list(e.graph.ops)
                ops[i], ops[j] = replace(ops[i], outs=(b,)), replace(ops[j], outs=(a,))
                return e.put(replace(e.graph, ops=tuple(ops)))
    return False


@later
def input_read_for_another(e: Edited) -> bool:
    t = e.graph.tensors
    for i, op in blocks(e):
        for k, r in enumerate(op.reads):
            for other in e.graph.inputs:
                mine = e.graph.tensors[r.tensor]
                if (
                    r.tensor in e.graph.inputs
                    and other != r.tensor
                    and (t[other].shape, t[other].dtype) == (mine.shape, mine.dtype)
                ):
                    return e.op(i, with_read(op, k, tensor=other))
    return False


@later
def inputs_of_a_node_exchanged(e: Edited) -> bool:
    t = e.graph.tensors
    for i, op in opaques(e):
        for a in range(len(op.ins)):
            for b in range(a):
                x, y = op.ins[a], op.ins[b]
                if x and y and x != y and (t[x].shape, t[x].dtype) == (t[y].shape, t[y].dtype):
                    ins = list(op.ins)
                    ins[a], ins[b] = y, x
                    return e.op(i, replace(op, ins=tuple(ins)))
    return False


@later
def opset_of_a_node_changed(e: Edited) -> bool:
    for i, op in opaques(e):
        return e.op(i, replace(op, opsets=tuple((d, v - 2) for d, v in op.opsets)))
    return False


@later
def branches_of_a_node_exchanged(e: Edited) -> bool:
    def change(node: NodeProto) -> bool:
        by = {a.name: a for a in node.attribute}
        names = by["then_branch"].name, by["else_branch"].name
        by["then_branch"].name, by["else_branch"].name = names[1], names[0]
        return True

    return node_changed(e, change, "If")


@later
def order_of_topk_dropped(e: Edited) -> bool:
    def change(node: NodeProto) -> bool:
        node.attribute.append(helper.make_attribute("sorted", 0))
        return True

    return node_changed(e, change, "TopK")


@later
def node_claims_a_dimension(e: Edited) -> bool:
    """TopK says that it may be cut along the axis that it selects by."""
    for i, op in opaques(e, "TopK"):
        shape, most = e.graph.tensors[op.ins[0]].shape, e.graph.tensors[op.outs[0]].shape[-1]
        if shape[-1] == most:
            return False
        claimed = replace(
            op, dims=(Dim("q", most),), in_axes=((len(shape) - 1,), (None,)), out_axes=((len(shape) - 1,),) * len(op.outs)
        )
        return e.op(i, claimed)
    return False


@later
def another_models_file(e: Edited) -> bool:
    """The plan names another file as its model, the hash is the old one's."""
    place = Path(e.build.model)
    other = place.with_name("other.onnx")
    shutil.copyfile(place, other)
    with other.open("ab") as f:
        f.write(helper.make_model(helper.make_graph([], "other", [], [])).SerializeToString())
    e.build = replace(e.build, model=str(other))
    return True


@later
def peak_of_the_report_halved(e: Edited) -> bool:
    e.again = False
    return e.report(peak_bytes=[p // 2 for p in e.build.report["peak_bytes"]])
