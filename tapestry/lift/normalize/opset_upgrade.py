"""Files of opset 1 to 6, written as opset 7 has them; and what opset 9 took away.

Before opset 7 the second operand of a binary operator was aligned at an axis, shapes and counts were attributes, and every
operator said which inputs it might overwrite. Neither onnxruntime nor the reference evaluator runs such nodes, and onnx's own
version converter knows neither aligned operands nor most of the others. What a node meant is in onnx's docs/Changelog.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tapestry.errors import ModelError
from tapestry.lift.file.protos import STANDARD, attributes, is_standard, nested, node_name, replace_nodes, subgraphs
from tapestry.lift.file.structure import opsets_of
from tapestry.lift.file.weight_data import stored_tensors
from tapestry.lift.normalize.prepare import infer

TARGET = 7  # whose forms are written
PER_CHANNEL = 9  # from here on BatchNormalization's statistics are per channel
COPIES = 1 << 10  # of a Tile that names one axis
ALIGNED = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"})
DROPPED = {"Gemm": "broadcast", "LSTM": "output_sequence", "GRU": "output_sequence", "RNN": "output_sequence"}
DEFAULTS = {"Concat": {"axis": 1}, "Selu": {"alpha": 1.6732, "gamma": 1.0507}}  # (Selu has six digits more from opset 6 on)


class EarlyNode:
    """A node of an early form, its attributes taken off it, and the nodes that take its place."""

    def __init__(self, node: NodeProto, constants: dict[str, TensorProto], ranks: dict[str, int]) -> None:
        self.node, self.constants, self.ranks = node, constants, ranks
        self.given = {a.name: NodeProto(attribute=[a]).attribute[0] for a in node.attribute}
        self.attributes = attributes(node)
        self.attributes.pop("consumed_inputs", None)
        self.before: list[NodeProto] = []
        self.tensors: list[TensorProto] = []

    def made(self, op: str, *ins: str, **attributes: Any) -> str:
        """The output of a new node before this one."""
        place = f"{op}_{len(self.before)}"
        name = f"{self.node.output[0]}/{place}"
        self.before.append(helper.make_node(op, list(ins), [name], f"{node_name(self.node)}/{place}", **attributes))
        return name

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        """A new initializer: before opset 9 a Constant holds floats alone."""
        name = f"{self.node.output[0]}/{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def value(self, k: int) -> np.ndarray[Any, Any]:
        """What input k holds."""
        stored = self.constants.get(self.node.input[k])
        if stored is None:
            raise self.refused(f"input {k} ('{self.node.input[k]}') is computed, and not a constant")
        return numpy_helper.to_array(stored).reshape(-1)

    def rank(self, name: str) -> int:
        """How many axes a value has."""
        if name not in self.ranks:
            raise self.refused(f"nothing says how many axes '{name}' has")
        return self.ranks[name]

    def refused(self, why: str) -> ModelError:
        """The error of a node that cannot be written anew."""
        what = f"{self.node.op_type} in a form of before opset {TARGET} is not supported here"
        hint = "export at opset 13 or later; a BatchNormalization or Dropout for inference says is_test=1"
        return ModelError(what, where=f"node '{node_name(self.node)}'", why=why, hint=hint)

    def nodes(self) -> list[NodeProto]:
        """The nodes in the place of the old one."""
        del self.node.attribute[:]
        for name, value in self.attributes.items():
            given = self.given.get(name)
            same = given is not None and helper.get_attribute_value(given) == value
            self.node.attribute.append(given if given is not None and same else helper.make_attribute(name, value))
        return [*self.before, self.node]


UPGRADES: dict[str, Callable[[EarlyNode], None]] = {}


def upgrades(*ops: str) -> Callable[[Callable[[EarlyNode], None]], Callable[[EarlyNode], None]]:
    """Register how operators are written anew."""

    def add(f: Callable[[EarlyNode], None]) -> Callable[[EarlyNode], None]:
        UPGRADES.update(dict.fromkeys(ops, f))
        return f

    return add


@upgrades(*ALIGNED)
def _aligned(o: EarlyNode) -> None:
    """Axes of size 1 behind the second operand, where ``axis`` says that it ends before the first one does."""
    axis, spread = o.attributes.pop("axis", None), o.attributes.pop("broadcast", 0)
    if not spread or axis is None:
        return
    first, second = (o.rank(i) for i in o.node.input)
    behind = first - int(axis) % max(first, 1) - second
    if behind < 0:
        raise o.refused(f"{second} axes from axis {axis} on are more than the first operand has ({first})")
    if behind:
        o.node.input[1] = o.made("Unsqueeze", o.node.input[1], axes=list(range(second, second + behind)))


@upgrades("PRelu")
def _slopes(o: EarlyNode) -> None:
    """A slope per channel, which is axis 1."""
    first, second = (o.rank(i) for i in o.node.input)
    if second == 1 and first > 2:
        o.node.input[1] = o.made("Unsqueeze", o.node.input[1], axes=list(range(1, first - 1)))


@upgrades("BatchNormalization", "Dropout")
def _inference(o: EarlyNode) -> None:
    if not o.attributes.pop("is_test", 0) and (o.node.op_type == "Dropout" or len([x for x in o.node.output if x]) > 1):
        raise o.refused("it is in training mode (is_test is not 1)")


@upgrades(*DROPPED)
def _dropped(o: EarlyNode) -> None:
    o.attributes.pop(DROPPED[o.node.op_type], None)


@upgrades(*DEFAULTS)
def _defaults(o: EarlyNode) -> None:
    o.attributes = DEFAULTS[o.node.op_type] | o.attributes


@upgrades("Cast")
def _cast(o: EarlyNode) -> None:
    to = o.attributes.get("to")
    if isinstance(to, bytes):
        o.attributes["to"] = TensorProto.DataType.Value(to.decode())


@upgrades("Pad")
def _pad(o: EarlyNode) -> None:
    if "paddings" in o.attributes:
        o.attributes["pads"] = o.attributes.pop("paddings")


@upgrades("Reshape")
def _reshape(o: EarlyNode) -> None:
    if "shape" in o.attributes:
        o.node.input.append(o.const(o.attributes.pop("shape")))


@upgrades("Split")
def _split(o: EarlyNode) -> None:
    if len(o.node.input) > 1:
        o.attributes["split"] = [int(v) for v in o.value(1)]
        del o.node.input[1:]


@upgrades("Tile")
def _tile(o: EarlyNode) -> None:
    """``tiles`` copies side by side along the one ``axis``."""
    if len(o.node.input) == 3:
        copies, axis = int(o.value(1)[0]), int(o.value(2)[0])
        if not 0 < copies <= COPIES:
            raise o.refused(f"{copies} copies, where 1 to {COPIES} are")
        del o.node.input[1:]
        o.node.input.extend([o.node.input[0]] * (copies - 1))
        o.node.op_type, o.attributes = "Concat", {"axis": axis}


@upgrades("LpPool", "GlobalLpPool")
def _norm(o: EarlyNode) -> None:
    p = o.attributes.get("p", 2)
    if int(p) != p:
        raise o.refused(f"p is {p}, which later forms of the operator do not have")
    o.attributes["p"] = int(p)


@upgrades("Upsample")
def _upsample(o: EarlyNode) -> None:
    if "scales" not in o.attributes:
        o.attributes["scales"] = [1.0, 1.0, o.attributes.pop("height_scale"), o.attributes.pop("width_scale")]
        if o.attributes.get("mode") == b"bilinear":
            o.attributes["mode"] = b"linear"


def upgrade(model: ModelProto) -> bool:
    """Write a model's nodes as opset 7 has them, in place; whether there was anything to do.

    A file of opset 7 or 8 is changed where a BatchNormalization has a statistic for every cell (``spatial=0``).

    Raises:
        ModelError: a node, and why no later form says what it does.
    """
    version = opsets_of(model).get("", 0)
    if not 1 <= version < PER_CHANNEL or model.functions:
        return False
    values = [*model.graph.input, *model.graph.value_info]
    types = {v.name: v.type.tensor_type.elem_type for v in values} | {t.name: t.data_type for t in model.graph.initializer}
    nodes = len(model.graph.node)
    _replace(model, lambda node: _per_cell(node, types))
    model.ir_version = max(model.ir_version, 4)  # from here on initializers need not be inputs
    if version >= TARGET:
        return len(model.graph.node) > nodes
    constants = stored_tensors(model)
    ranks = {t.name: len(t.dims) for t in model.graph.initializer} | _ranks(model, constants)
    _replace(model, lambda node: _written(node, constants, ranks))
    _declare(model)
    return True


New = tuple[list[NodeProto], list[TensorProto]]  # nodes in the place of one, and initializers that they read


def _replace(model: ModelProto, by: Callable[[NodeProto], New]) -> None:
    """Every node by others, in every graph."""
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        new: list[NodeProto] = []
        for node in graph.node:
            nodes, tensors = by(node)
            new += nodes
            model.graph.initializer.extend(tensors)
        replace_nodes(graph, new)
        graphs += [g for node in graph.node for g in subgraphs(node)]


def _written(node: NodeProto, constants: dict[str, TensorProto], ranks: dict[str, int]) -> New:
    if not is_standard(node) or list(subgraphs(node)):
        return [node], []
    old = EarlyNode(node, constants, ranks)
    UPGRADES.get(node.op_type, lambda _: None)(old)
    return old.nodes(), old.tensors


def _ranks(model: ModelProto, constants: dict[str, TensorProto]) -> dict[str, int]:
    """Ranks of all values that inference knows, from a copy in which aligned operands are the first operand itself."""
    trial, aligned = ModelProto(), ALIGNED | {"PRelu"}
    trial.CopyFrom(model)

    def same(node: NodeProto) -> New:
        if node.op_type in aligned and len(node.input) == 2:
            node.input[1] = node.input[0]  # the result has the first operand's shape in any case
            del node.attribute[:]
            return [node], []
        return _written(node, constants, {})

    if not any(n.op_type in aligned for n in nested(trial.graph.node)):
        return {}
    _replace(trial, same)
    _declare(trial)
    types = {n: t.tensor_type for n, t in infer(trial).items() if t.HasField("tensor_type")}
    return {n: len(t.shape.dim) for n, t in types.items() if t.HasField("shape")}


def _declare(model: ModelProto) -> None:
    for o in model.opset_import:
        if o.domain in STANDARD:
            o.version = TARGET


def _per_cell(node: NodeProto, types: dict[str, int]) -> New:
    """(x - mean) / sqrt(var + epsilon) * scale + bias, with a statistic for every place behind the batch."""
    outs = [o for o in node.output if o]
    if not is_standard(node, "BatchNormalization") or attributes(node).get("spatial", 1) or len(outs) > 1:
        return [node], []
    o = EarlyNode(node, {}, {})
    x, scale, bias, mean, var = node.input
    dtype = helper.tensor_dtype_to_np_dtype(types.get(var, 0) or TensorProto.FLOAT)
    eps = o.const(o.attributes.get("epsilon", 1e-5), dtype)
    deviation = o.made("Sqrt", o.made("Add", var, eps))
    share = o.made("Mul", o.made("Div", o.made("Sub", x, mean), deviation), scale)
    return [*o.before, helper.make_node("Add", [share, bias], list(node.output), node_name(node))], o.tensors
