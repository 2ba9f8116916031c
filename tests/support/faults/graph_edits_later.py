"""More edits of plans, written once the checker of `tapestry.verify.model` was finished."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from onnx import NodeProto, helper

from tapestry.ir.expr import Call, Const, Expr, Index, call, cast, distinct
from tapestry.ir.graph import Block, Dim, Read
from tapestry.ir.index import Aff, Floor, dim
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


# a third lot, written apart from both others


def _longest(op: Block) -> Dim:
    return max(op.dims, key=lambda d: d.size, default=Dim("", 0))


def _where_index(op: Block, test: str, at: int, yes: Expr, no: Expr) -> Expr:
    return call("where", call(test, Index(dim(_longest(op).name)), number(at, "i64")), yes, no)


@later
def nan_made_zero(e: Edited) -> bool:
    return result_changed(e, lambda op, x: call("where", call("isnan", x), number(0, "f32"), x))


@later
def infinity_made_large(e: Edited) -> bool:
    return result_changed(e, lambda op, x: call("where", call("isinf", x), number(3e38, "f32"), x))


@later
def fraction_cut_off(e: Edited) -> bool:
    return result_changed(e, lambda op, x: cast(cast(x, "i32"), "f32"))


@later
def rounded_to_a_thousandth(e: Edited) -> bool:
    grid = number(1024, "f32")
    return result_changed(e, lambda op, x: call("div", call("round", call("mul", x, grid)), grid))


@later
def sign_lost(e: Edited) -> bool:
    return result_changed(e, lambda op, x: call("abs", x))


@later
def negative_cut_off(e: Edited) -> bool:
    return result_changed(e, lambda op, x: call("max", x, number(0, "f32")))


@later
def squared(e: Edited) -> bool:
    return result_changed(e, lambda op, x: call("mul", x, x))


@later
def root_of_no_small_number(e: Edited) -> bool:
    """A square root is taken of what is at least a thousandth."""
    for i, op in blocks(e):
        for x in distinct((*op.point, *op.then)):
            if isinstance(x, Call) and x.fn in ("sqrt", "rsqrt") and x.dtype == "f32":
                return e.op(i, put_call(op, x, Call(x.fn, (call("max", x.args[0], number(1e-3, "f32")),), x.dtype)))
    return False


@later
def sloped_along_an_axis(e: Edited) -> bool:
    """Every cell is larger by a thousandth of its place."""

    def change(op: Block, x: Expr) -> Expr | None:
        if _longest(op).size < 3:
            return None
        slope = call("mul", cast(Index(dim(_longest(op).name)), "f32"), number(1e-3, "f32"))
        return call("mul", x, call("add", slope, number(1, "f32")))

    return result_changed(e, change)


@later
def every_second_cell_negated(e: Edited) -> bool:
    def change(op: Block, x: Expr) -> Expr | None:
        if _longest(op).size < 2:
            return None
        odd = call("eq", call("mod", Index(dim(_longest(op).name)), number(2, "i64")), number(1, "i64"))
        return call("where", odd, call("neg", x), x)

    return result_changed(e, change)


@later
def last_cell_of_an_axis_nudged(e: Edited) -> bool:
    return result_changed(
        e,
        lambda op, x: (
            _where_index(op, "ge", _longest(op).size - 1, call("add", x, number(0.01, "f32")), x) if op.dims else None
        ),
    )


@later
def upper_half_of_an_axis_zeroed(e: Edited) -> bool:
    def change(op: Block, x: Expr) -> Expr | None:
        half = _longest(op).size // 2
        return _where_index(op, "ge", half, number(0, "f32"), x) if half else None

    return result_changed(e, change)


@later
def large_values_cut_off(e: Edited) -> bool:
    return result_changed(e, lambda op, x: call("min", x, number(1e4, "f32")))


@later
def whole_number_one_more(e: Edited) -> bool:
    def change(op: Block, x: Expr) -> Expr | None:
        return call("add", x, number(1, x.dtype)) if x.dtype in ("i32", "i64") else None

    return result_changed(e, change, floats=False)


@later
def whole_number_wrapped(e: Edited) -> bool:
    def change(op: Block, x: Expr) -> Expr | None:
        return call("mod", x, number(3, x.dtype)) if x.dtype in ("i32", "i64") else None

    return result_changed(e, change, floats=False)


@later
def truth_inverted(e: Edited) -> bool:
    return result_changed(e, lambda op, x: call("not", x) if x.dtype == "bool" else None, floats=False)


@later
def read_at_every_second_place_twice(e: Edited) -> bool:
    """Along one axis of a read, place 2 k is read for 2 k + 1 as well."""
    for i, op in blocks(e):
        for k, r in enumerate(op.reads):
            for a, place in enumerate(r.index):
                if e.graph.tensors[r.tensor].shape[a] > 3 and len(place.terms) == 1 and isinstance(place.terms[0][0], str):
                    even = Aff(((Floor(place, 2), 2),))
                    return e.op(i, with_read(op, k, index=(*r.index[:a], even, *r.index[a + 1 :])))
    return False


@later
def sum_of_squares_made_a_sum(e: Edited) -> bool:
    """A product of a value with itself that is merged is the value."""
    for i, op in blocks(e):
        for x in distinct(op.point):
            if op.reduce and isinstance(x, Call) and x.fn == "mul" and x.args[0] == x.args[1]:
                return e.op(i, put_call(op, x, x.args[0]))  # type: ignore[arg-type]
    return False


@later
def exponential_of_a_bounded_number(e: Edited) -> bool:
    for i, op in blocks(e):
        for x in distinct((*op.point, *op.then)):
            if isinstance(x, Call) and x.fn == "exp" and x.dtype == "f32":
                return e.op(i, put_call(op, x, Call("exp", (call("max", x.args[0], number(-2, "f32")),), x.dtype)))
    return False


@later
def result_of_half_a_sum(e: Edited) -> bool:
    """What is merged is nothing where the first merged place is odd."""
    for i, op in blocks(e):
        if op.monoid == "sum" and op.body[0].dtype == "f32" and op.reduce[0].size > 3:
            odd = call("eq", call("mod", Index(dim(op.reduce[0].name)), number(2, "i64")), number(1, "i64"))
            return e.op(i, replace(op, body=(call("where", odd, number(0, "f32"), op.body[0]), *op.body[1:])))
    return False


@later
def weight_read_transposed(e: Edited) -> bool:
    """A square weight is read with its axes exchanged."""
    for i, op in blocks(e):
        for k, r in enumerate(op.reads):
            shape = e.graph.tensors[r.tensor].shape
            if r.tensor in e.graph.weights and len(shape) == 2 and shape[0] == shape[1] > 1:
                return e.op(i, with_read(op, k, index=(r.index[1], r.index[0])))
    return False
