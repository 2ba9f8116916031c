"""The body of a Scan as operations of one step, and which of its states are linear recurrences, one after another.

A state whose coefficients need other states is solved after those: over all steps they are then tensors like any others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, helper

from tapestry.errors import ModelError
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Op, Opaque
from tapestry.ir.index import dim
from tapestry.lift.builder import Builder
from tapestry.lift.file.protos import captured, nested, static_shape
from tapestry.lift.nodes import lift_nodes
from tapestry.lift.normalize.prepare import prepare
from tapestry.lift.normalize.unroll import ScanNode, is_movable, read_scan, size_of
from tapestry.lift.operators.recurrent.linear_state import NotLinear, Recurrence, recurrence
from tapestry.onnx_eval.opaque_node import RANDOM

NODES = 512  # of a body that is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBody:
    """A body whose every state is a recurrence.

    Attributes:
        states, slices: the body's inputs; ``after`` the states' next values, ``seen`` what is kept of every step.
        recurrences: by position of the state, in the order in which they can be computed.
        captured: names of the graph around it.
        makers: tensor to the operation of one step that writes it.
        results: ONNX types of ``after`` and ``seen``.
    """

    node: ScanNode
    b: Builder
    states: tuple[str, ...]
    slices: tuple[str, ...]
    after: tuple[str, ...]
    seen: tuple[str, ...]
    recurrences: Mapping[int, Recurrence]
    captured: frozenset[str]
    makers: Mapping[str, Op]
    results: tuple[TypeProto, ...]

    def closure(self, names: set[str]) -> list[Op]:
        """The operations of one step that these tensors need, in order."""
        need, found = set(names), list[Op]()
        for op in reversed(self.b.ops):
            if need & set(op.outs):
                found.append(op)
                need |= set(op.inputs)
        return found[::-1]


def linear_body(
    node: NodeProto, types: Mapping[str, TypeProto], known: Mapping[str, TensorProto], opsets: Mapping[str, int]
) -> LoopBody:
    """The body of a Scan over whose steps every state is a linear recurrence, element by element.

    Args:
        types: of every value around it; ``known`` are those known at compile time.

    Raises:
        NotLinear: with the reason.
    """
    scan = read_scan(node, types, opsets.get("", 1))
    if isinstance(scan, str):
        raise NotLinear(scan)
    if not is_movable(scan.body) or size_of(scan.body) > NODES:
        raise NotLinear("its body is long, or has weights of its own")
    if any(n.op_type in RANDOM for n in nested(scan.body.node)):
        raise NotLinear("its body draws random numbers")
    outer = captured(node)
    b = _lift(scan, types, known, opsets, outer)
    count = len(scan.first)
    ins = [i.name for i in scan.body.input]
    after = tuple(_source(b, f"out{k}~", set(ins)) for k in range(len(scan.body.output)))
    body = LoopBody(
        node=scan,
        b=b,
        states=tuple(ins[:count]),
        slices=tuple(ins[count:]),
        after=after[:count],
        seen=after[count:],
        recurrences={},
        captured=frozenset(outer),
        makers={t: op for op in b.ops for t in op.outs},
        results=tuple(b.types[f"out{k}~"] for k in range(len(scan.body.output))),
    )
    _checked(body)
    return replace(body, recurrences=_solve(body))


def step_types(
    node: NodeProto, types: Mapping[str, TypeProto], known: Mapping[str, TensorProto], opsets: Mapping[str, int]
) -> Sequence[TypeProto] | str:
    """The types of what a step of a Scan gives, if its states are linear recurrences; else why they are not."""
    try:
        return linear_body(node, types, known, opsets).results
    except NotLinear as e:
        return str(e)


def _lift(
    scan: ScanNode,
    types: Mapping[str, TypeProto],
    known: Mapping[str, TensorProto],
    opsets: Mapping[str, int],
    outer: list[str],
) -> Builder:
    """One step as operations; its results are ``out0~``, …"""
    graph = GraphProto(name="body")
    graph.node.extend(scan.body.node)
    graph.initializer.extend(scan.body.initializer)
    for name, outside, axis in zip((i.name for i in scan.body.input), (*scan.first, *scan.over), _cut(scan), strict=True):
        graph.input.append(helper.make_value_info(name, _type(types, outside, axis)))
    for name in outer:
        if name in known:
            stored = graph.initializer.add()
            stored.CopyFrom(known[name])
            stored.name = name
        else:
            graph.input.append(helper.make_value_info(name, _type(types, name, None)))
    for k, o in enumerate(scan.body.output):
        graph.node.append(helper.make_node("Identity", [o.name], [f"out{k}~"]))
        graph.output.append(onnx.ValueInfoProto(name=f"out{k}~"))
    imports = [helper.make_opsetid(d, v) for d, v in opsets.items() if d != "tapestry.expanded"]
    model = helper.make_model(graph, ir_version=10, opset_imports=imports)
    try:
        return lift_nodes(prepare(model, step_types), 0, True)
    except ModelError as e:
        raise NotLinear(f"its body cannot be lifted alone: {e.what}") from None


def _cut(scan: ScanNode) -> tuple[int | None, ...]:
    return (None,) * len(scan.first) + scan.axes


def _type(types: Mapping[str, TypeProto], name: str, axis: int | None) -> TypeProto:
    """The type of a value around the loop, without an axis."""
    shape = static_shape(types.get(name))
    if shape is None:
        raise NotLinear(f"the shape of '{name}' is not known")
    kept = [n for a, n in enumerate(shape) if a != axis]
    return helper.make_tensor_type_proto(types[name].tensor_type.elem_type, kept)


def _source(b: Builder, name: str, ins: set[str]) -> str:
    """What a result is another name of: back through maps that change nothing."""
    while (op := b.maker.get(name)) is not None:
        same = len(op.reads) == 1 and op.monoid is None and not op.inner and op.body == (Arg(0, b.tensors[name].dtype),)
        read = op.reads[0] if same else None
        if read is None or read.other is not None or read.index != tuple(dim(d.name) for d in op.dims):
            return name
        if b.tensor(read.tensor).shape != b.tensor(name).shape:
            return name
        name = read.tensor
        if name in ins:
            return name
    return name


def _checked(body: LoopBody) -> None:
    """Results of known sizes, states that keep theirs, and nothing opaque.

    Raises:
        NotLinear: with the reason.
    """
    for name, after in zip(body.states, body.after, strict=True):
        a, z = body.b.tensor(name), body.b.tensor(after)
        if (a.dtype, a.shape) != (z.dtype, z.shape):
            raise NotLinear(f"the state '{name}' changes its shape or type")
    for name in body.seen:
        if body.b.tensor(name).on_host:
            raise NotLinear("a result has no known shape")
    for op in body.closure({*body.after, *body.seen}):
        if isinstance(op, Opaque):
            raise NotLinear(f"{op.kind} in its body has no affine form")


def _solve(body: LoopBody) -> dict[int, Recurrence]:
    """The states' recurrences, each after those that it needs.

    Raises:
        NotLinear: of the first state that is none.
    """
    solved: dict[int, Recurrence] = {}
    while len(solved) < len(body.states):
        why, before = "", len(solved)
        for k in range(len(body.states)):
            if k not in solved:
                try:
                    solved[k] = _recurrence(body, k, solved)
                except NotLinear as e:
                    why = why or f"the state '{body.states[k]}' is no linear recurrence: {e}"
        if len(solved) == before:
            raise NotLinear(why)
    return solved


def _recurrence(body: LoopBody, k: int, solved: Mapping[int, Recurrence]) -> Recurrence:
    depends = depending(body, body.states[k])
    needs = {t for op in body.closure({body.after[k]}) for t in op.inputs} | {body.after[k]}
    for other, name in enumerate(body.states):
        if other != k and other not in solved and name in needs:
            raise NotLinear(f"it depends on '{name}', which is none either")
    return recurrence(body.states[k], body.after[k], body.makers, body.b.tensors, frozenset(depends))


def depending(body: LoopBody, *names: str) -> set[str]:
    """Tensors of a step that are computed from some."""
    found = set(names)
    for op in body.b.ops:
        if found.intersection(op.inputs):
            found.update(op.outs)
    return found.difference(names)
