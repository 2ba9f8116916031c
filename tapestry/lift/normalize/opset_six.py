"""Files of opset 6, written as opset 7 has them; older ones are read where every node has the form of opset 7.

Up to opset 6 the second operand of a binary operator was aligned at an axis, slopes of a PRelu lay along the channels, and
norms said whether they are in training. onnxruntime runs no such node; some hundred cases of onnx's own test-suite are such
files. What a node meant is in onnx's docs/Changelog.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, helper

from tapestry.errors import ModelError
from tapestry.lift.file import protos
from tapestry.lift.file.protos import (
    EARLY,
    STANDARD,
    attributes,
    is_standard,
    node_name,
    replace_nodes,
    set_attributes,
    subgraphs,
)
from tapestry.lift.file.structure import opsets_of
from tapestry.lift.normalize.prepare import infer

ALIGNED = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"})
DROPPED = {"Gemm": "broadcast", "LSTM": "output_sequence", "GRU": "output_sequence", "RNN": "output_sequence"}
HINT = f"onnx.version_converter.convert_version(model, {EARLY}) writes most of it anew; or export at opset 13 or later"


class EarlyNode:
    """A node of an early form, which is written anew in place, and the nodes that it needs before it."""

    def __init__(self, node: NodeProto, ranks: dict[str, int]) -> None:
        self.node, self.ranks = node, ranks
        self.before: list[NodeProto] = []

    def take(self, name: str, default: Any = None) -> Any:
        """The value of an attribute, which the node loses."""
        value = attributes(self.node).get(name, default)
        set_attributes(self.node, **{name: None})
        return value

    def widen(self, axes: Iterable[int]) -> None:
        """Give the second operand more axes of size 1."""
        name, ins = f"{self.node.output[0]}/Unsqueeze", self.node.input
        self.before.append(
            helper.make_node("Unsqueeze", [ins[1]], [name], f"{node_name(self.node)}/Unsqueeze", axes=list(axes))
        )
        ins[1] = name

    def both_ranks(self) -> tuple[int, int]:
        """How many axes each operand has."""
        for name in self.node.input:
            if name not in self.ranks:
                raise self.refused(f"nothing says how many axes '{name}' has")
        first, second = (self.ranks[name] for name in self.node.input)
        return first, second

    def refused(self, why: str) -> ModelError:
        """The error of a node that cannot be written anew."""
        what = f"{self.node.op_type} in a form of before opset {EARLY} is not supported here"
        return ModelError(what, where=f"node '{node_name(self.node)}'", why=why, hint=HINT)


def _aligned(o: EarlyNode) -> None:
    """Axes of size 1 behind the second operand, where ``axis`` says that it ends before the first one does."""
    axis, spread = o.take("axis"), o.take("broadcast", 0)
    if not spread or axis is None:
        return
    first, second = o.both_ranks()
    behind = first - int(axis) % max(first, 1) - second
    if behind < 0:
        raise o.refused(f"{second} axes from axis {axis} on are more than the first operand has ({first})")
    if behind:
        o.widen(range(second, second + behind))


def _slopes(o: EarlyNode) -> None:
    """A slope per channel, which is axis 1."""
    first, second = o.both_ranks()
    if second == 1 and first > 2:
        o.widen(range(1, first - 1))


def _inference(o: EarlyNode) -> None:
    if not o.take("is_test", 0) and (o.node.op_type == "Dropout" or len([x for x in o.node.output if x]) > 1):
        raise o.refused("it is in training mode (is_test is not 1)")


UPGRADES: dict[str, Callable[[EarlyNode], None]] = {
    **dict.fromkeys(ALIGNED, _aligned),
    **{op: lambda o: o.take(DROPPED[o.node.op_type]) for op in DROPPED},
    "PRelu": _slopes,
    "BatchNormalization": _inference,
    "Dropout": _inference,
}


def upgrade(model: ModelProto) -> bool:
    """Write the nodes of a model of opset 6 as opset 7 has them, in place; whether there was anything to do.

    Raises:
        ModelError: a node of an older file has another form since, the file has functions, or no later form says what a
            node does.
    """
    opset = opsets_of(model).get("", EARLY)
    if opset >= EARLY:
        return False
    if model.functions:
        raise ModelError(f"opset {opset} is not supported beside functions", where="the model", hint=HINT)
    if opset < EARLY - 1:
        for node in filter(is_standard, protos.nested(model.graph.node)):
            now = onnx.defs.get_schema(node.op_type, EARLY).since_version
            if now > opset:
                where, why = f"node '{node_name(node)}'", f"{node.op_type} has another form from opset {now} on"
                raise ModelError(f"opset {opset} is not supported", where=where, why=why, hint=HINT)
    model.ir_version = max(model.ir_version, 4)  # from here on initializers need not be inputs
    ranks = {t.name: len(t.dims) for t in model.graph.initializer} | _ranks(model)
    _replace(model, lambda node: _written(node, ranks))
    return True


def _replace(model: ModelProto, by: Callable[[NodeProto], EarlyNode]) -> None:
    """Every node written anew, in every graph, and the opset declared."""
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        nodes = [by(node) for node in graph.node]
        replace_nodes(graph, [n for o in nodes for n in (*o.before, o.node)])
        graphs += [g for node in graph.node for g in subgraphs(node)]
    for o in model.opset_import:
        if o.domain in STANDARD:
            o.version = EARLY


def _written(node: NodeProto, ranks: dict[str, int]) -> EarlyNode:
    old = EarlyNode(node, ranks)
    if is_standard(node) and not list(subgraphs(node)):
        UPGRADES.get(node.op_type, lambda _: None)(old)
    return old


def _ranks(model: ModelProto) -> dict[str, int]:
    """Ranks of all values that inference knows, from a copy in which aligned operands are the first operand itself."""
    trial, aligned = ModelProto(), ALIGNED | {"PRelu"}
    trial.CopyFrom(model)

    def same(node: NodeProto) -> EarlyNode:
        if node.op_type not in aligned or len(node.input) != 2:
            return _written(node, {})
        node.input[1] = node.input[0]  # the result has the first operand's shape in any case
        del node.attribute[:]
        return EarlyNode(node, {})

    if not any(n.op_type in aligned for n in protos.nested(trial.graph.node)):
        return {}
    _replace(trial, same)
    types = {n: t.tensor_type for n, t in infer(trial).items() if t.HasField("tensor_type")}
    return {n: len(t.shape.dim) for n, t in types.items() if t.HasField("shape")}
