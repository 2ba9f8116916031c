"""Files of opset 1 to 6, written as opset 7 has them.

Before opset 7 the second operand of a binary operator was aligned at an axis, shapes and counts were attributes, and every
operator said which inputs it might overwrite. Neither onnxruntime nor the reference evaluator runs such nodes. onnx's own
version converter (1.23) refuses every operand that is aligned at an axis, comparisons and logic, Cast to a name, Pad, Tile and
GlobalLpPool of opset 1; it gives PRelu slopes along the wrong axis and Selu other defaults; and Dropout in training becomes one
for inference. What a node meant is in onnx's docs/Changelog.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

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
from tapestry.lift.file.weight_data import stored_tensors
from tapestry.lift.normalize.prepare import infer

COPIES = 1 << 10  # of a Tile that names one axis
ALIGNED = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"})
DROPPED = {"Gemm": "broadcast", "LSTM": "output_sequence", "GRU": "output_sequence", "RNN": "output_sequence"}
DEFAULTS = {"Concat": {"axis": 1}, "Selu": {"alpha": 1.6732, "gamma": 1.0507}}  # (Selu has six digits more from opset 6 on)


class EarlyNode:
    """A node of an early form, which is written anew in place, and the nodes and initializers that it needs before it."""

    def __init__(self, node: NodeProto, constants: dict[str, TensorProto], ranks: dict[str, int]) -> None:
        self.node, self.constants, self.ranks = node, constants, ranks
        self.before: list[NodeProto] = []
        self.tensors: list[TensorProto] = []

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

    def value(self, k: int) -> np.ndarray[Any, Any]:
        """What input k holds."""
        stored = self.constants.get(self.node.input[k])
        if stored is None:
            raise self.refused(f"input {k} ('{self.node.input[k]}') is computed, and not a constant")
        return numpy_helper.to_array(stored).reshape(-1)

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
        hint = "export at opset 13 or later; a BatchNormalization or Dropout for inference says is_test=1"
        return ModelError(what, where=f"node '{node_name(self.node)}'", why=why, hint=hint)


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


def _defaults(o: EarlyNode) -> None:
    set_attributes(o.node, **(DEFAULTS[o.node.op_type] | attributes(o.node)))


def _cast(o: EarlyNode) -> None:
    to = attributes(o.node).get("to")
    if isinstance(to, bytes):
        set_attributes(o.node, to=TensorProto.DataType.Value(to.decode()))


def _pad(o: EarlyNode) -> None:
    if pads := o.take("paddings"):
        set_attributes(o.node, pads=pads)


def _reshape(o: EarlyNode) -> None:
    shape = o.take("shape")
    if shape is not None:  # (before opset 9 a Constant holds floats alone)
        o.tensors.append(numpy_helper.from_array(np.array(shape, np.int64), f"{o.node.output[0]}/shape"))
        o.node.input.append(o.tensors[0].name)


def _split(o: EarlyNode) -> None:
    if len(o.node.input) > 1:
        set_attributes(o.node, split=[int(v) for v in o.value(1)])
        del o.node.input[1:]


def _tile(o: EarlyNode) -> None:
    """``tiles`` copies side by side along the one ``axis``."""
    if len(o.node.input) == 3:
        copies, axis = int(o.value(1)[0]), int(o.value(2)[0])
        if not 0 < copies <= COPIES:
            raise o.refused(f"{copies} copies, where 1 to {COPIES} are")
        del o.node.input[1:]
        o.node.input.extend([o.node.input[0]] * (copies - 1))
        o.node.op_type = "Concat"
        set_attributes(o.node, axis=axis)


def _norm(o: EarlyNode) -> None:
    p = o.take("p", 2)
    if int(p) != p:
        raise o.refused(f"p is {p}, which later forms of the operator do not have")
    set_attributes(o.node, p=int(p))


def _upsample(o: EarlyNode) -> None:
    height, width = o.take("height_scale"), o.take("width_scale")
    if height is not None:
        set_attributes(o.node, scales=[1.0, 1.0, height, width])
        if attributes(o.node).get("mode") == b"bilinear":
            set_attributes(o.node, mode="linear")


UPGRADES: dict[str, Callable[[EarlyNode], None]] = {
    **dict.fromkeys(ALIGNED, _aligned), **{op: lambda o: o.take(DROPPED[o.node.op_type]) for op in DROPPED},
    **dict.fromkeys(DEFAULTS, _defaults), "PRelu": _slopes, "BatchNormalization": _inference, "Dropout": _inference,
    "Cast": _cast, "Pad": _pad, "Reshape": _reshape, "Split": _split, "Tile": _tile, "LpPool": _norm, "GlobalLpPool": _norm,
    "Upsample": _upsample,
}  # fmt: skip


def upgrade(model: ModelProto) -> bool:
    """Write a model's nodes as opset 7 has them, in place; whether there was anything to do.

    Raises:
        ModelError: a node, and why no later form says what it does.
    """
    if not 1 <= opsets_of(model).get("", 0) < EARLY or model.functions:
        return False
    model.ir_version = max(model.ir_version, 4)  # from here on initializers need not be inputs
    constants = stored_tensors(model)
    ranks = {t.name: len(t.dims) for t in model.graph.initializer} | _ranks(model, constants)
    _replace(model, lambda node: _written(node, constants, ranks))
    return True


def _replace(model: ModelProto, by: Callable[[NodeProto], EarlyNode]) -> None:
    """Every node written anew, in every graph, and the opset declared."""
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        nodes = [by(node) for node in graph.node]
        model.graph.initializer.extend(t for o in nodes for t in o.tensors)
        replace_nodes(graph, [n for o in nodes for n in (*o.before, o.node)])
        graphs += [g for node in graph.node for g in subgraphs(node)]
    for o in model.opset_import:
        if o.domain in STANDARD:
            o.version = EARLY


def _written(node: NodeProto, constants: dict[str, TensorProto], ranks: dict[str, int]) -> EarlyNode:
    old = EarlyNode(node, constants, ranks)
    if is_standard(node) and not list(subgraphs(node)):
        old.take("consumed_inputs")
        UPGRADES.get(node.op_type, lambda _: None)(old)
    return old


def _ranks(model: ModelProto, constants: dict[str, TensorProto]) -> dict[str, int]:
    """Ranks of all values that inference knows, from a copy in which aligned operands are the first operand itself."""
    trial, aligned = ModelProto(), ALIGNED | {"PRelu"}
    trial.CopyFrom(model)

    def same(node: NodeProto) -> EarlyNode:
        if node.op_type not in aligned or len(node.input) != 2:
            return _written(node, constants, {})
        node.input[1] = node.input[0]  # the result has the first operand's shape in any case
        del node.attribute[:]
        return EarlyNode(node, constants, {})

    if not any(n.op_type in aligned for n in protos.nested(trial.graph.node)):
        return {}
    _replace(trial, same)
    types = {n: t.tensor_type for n, t in infer(trial).items() if t.HasField("tensor_type")}
    return {n: len(t.shape.dim) for n, t in types.items() if t.HasField("shape")}
