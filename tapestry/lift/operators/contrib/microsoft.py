"""Operators that onnxruntime's optimiser and quantiser write (com.microsoft, layer norms below opset 17), as functions.

A model saved by onnxruntime is full of them. Each node gets a model-local function of standard operators, for its own
attributes and inputs, before anything else looks at the model; so they are expanded, split, fused and checked like any
function. Definitions: onnxruntime's docs/ContribOperators.md. What a node needs and no definition here gives (ranks that the
file does not say, packed inputs) leaves it as it is: an unknown operator, refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tapestry.lift.file.protos import MICROSOFT, STANDARD, attributes, node_name, standard_opset, subgraphs
from tapestry.onnx_eval.own_nodes import EVALUATORS
from tapestry.plugins import entry_points as plugins

DOMAIN = "tapestry.vendor"
KIND = "operators"  # of plug-ins
CASTS = 15  # the first opset that has CastLike


class Undefined(Exception):
    """There is no definition for this node."""


class Body:
    """A function body under construction for one node: every call adds a node and gives the name of its (first) output."""

    def __init__(self, node: NodeProto, version: int, ranks: dict[str, int], codes: dict[str, int]) -> None:
        self.nodes: list[NodeProto] = []
        self.version, self.name, self.node_kind = version, node_name(node), node.op_type
        self.attributes = attributes(node)
        self.ins = [f"i{k}" if name else "" for k, name in enumerate(node.input)]
        self.wanted = [bool(o) for o in node.output]
        self.ranks = {f"i{k}": ranks[i] for k, i in enumerate(node.input) if i in ranks}
        self.codes = {f"i{k}": codes[i] for k, i in enumerate(node.input) if i in codes}

    def __call__(self, op: str, *ins: str, outs: int = 1, **attributes: Any) -> str:
        """The name of the first output; the others are that name with ``.1``, ``.2`` behind it."""
        name = f"t{len(self.nodes)}"
        names = [name, *(f"{name}.{k}" for k in range(1, outs))]
        self.nodes.append(helper.make_node(op, list(ins), names, self.name, **attributes))
        return name

    def get(self, name: str, default: Any) -> Any:
        """An attribute of the type of its default."""
        value = self.attributes.get(name, default)
        value = value.decode() if isinstance(value, bytes) else value
        if not isinstance(value, type(default)):
            raise Undefined
        return value

    def has(self, k: int) -> bool:
        """Whether input k is given."""
        return k < len(self.ins) and bool(self.ins[k])

    def need(self, fact: bool) -> None:
        """Decline the node unless this holds."""
        if not fact:
            raise Undefined

    def add(self, x: str, k: int) -> str:
        """x plus input k, if there is one."""
        return self("Add", x, self.ins[k]) if self.has(k) else x

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        """A constant."""
        return self("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))

    def ints(self, value: Any) -> str:
        """A constant of the integers that sizes, axes and places are."""
        return self.const(value, np.int64)

    def real(self, x: str) -> str:
        """x in float32, in which onnxruntime computes what it fuses."""
        return self("Cast", x, to=TensorProto.FLOAT)

    def like(self, y: str, x: str) -> str:
        """y in the type of x (below opset 15 both are float32 in what onnxruntime writes)."""
        return self("CastLike", y, x) if self.version >= CASTS else y

    def scalar(self, value: float, x: str) -> str:
        """A number in the type of x."""
        return self.like(self.const(value), x)

    def mean(self, x: str, axis: int) -> str:
        """Along one axis, which is kept."""
        if self.version >= 18:
            return self("ReduceMean", x, self.ints([axis]), keepdims=1)
        return self("ReduceMean", x, axes=[axis], keepdims=1)

    def unsqueeze(self, x: str, *axes: int) -> str:
        """With new axes of size 1, one after another."""
        for axis in axes:
            x = self("Unsqueeze", x, self.ints([axis])) if self.version >= 13 else self("Unsqueeze", x, axes=[axis])
        return x

    def shaped(self, x: str, *shape: int) -> str:
        """Reshaped: 0 keeps a size, -1 is what is left."""
        return self("Reshape", x, self.ints(shape))


Definition = Callable[[Body], list[str]]  # what it returns: a name per output, "" for those it does not define
DEFINITIONS: dict[tuple[str, str], Definition] = {}


def defines(*ops: str, domains: Iterable[str] = (MICROSOFT,)) -> Callable[[Definition], Definition]:
    """Register the definition of operators."""

    def add(f: Definition) -> Definition:
        DEFINITIONS.update({(d, op): f for d in domains for op in ops})
        return f

    return add


def _of_plugin(domain: str, op: str) -> Definition | None:
    """The definition of an operator of a domain of its own, which another package brings under the name ``DOMAIN.OPERATOR``."""
    name = f"{domain}.{op}"
    if domain in (*STANDARD, MICROSOFT, DOMAIN) or not plugins.has(KIND, name):
        return None
    definition = plugins.get(KIND, name)

    def defined(b: Body) -> list[str]:
        with plugins.blamed(KIND, name):
            try:
                outs = definition(b)
            except Undefined:
                outs = None
        if outs is None:
            raise Undefined
        if not isinstance(outs, list) or not all(isinstance(o, str) for o in cast("list[object]", outs)):
            raise plugins.refused(KIND, name, "its definition gives no list of names")
        return cast("list[str]", outs)

    return defined


def define(model: ModelProto, *, vendor: bool = True) -> bool:
    """Give every node of such an operator a function of the model, in place; whether there was any.

    Args:
        vendor: also the operators of onnxruntime; else those of plug-ins alone.

    Raises:
        PluginError: a plug-in is broken.
    """
    version = standard_opset(model)
    own = {(f.domain, f.name) for f in model.functions}
    ranks, codes = _known(model.graph)
    made: list[FunctionProto] = []
    stack: list[NodeProto] = list(model.graph.node)
    while stack:
        node = stack.pop()
        stack.extend(n for g in subgraphs(node) for n in g.node)
        domain = "" if node.domain == "ai.onnx" else node.domain
        found = (DEFINITIONS.get((domain, node.op_type)) if vendor else None) or _of_plugin(domain, node.op_type)
        standard = domain == "" and onnx.defs.has(node.op_type, version, "")
        if found is None or standard or version < 7 or (node.domain, node.op_type) in own | EVALUATORS.keys():
            continue
        try:
            body = Body(node, version, ranks, codes)
            outs = found(body)
        except (Undefined, IndexError, TypeError, ValueError):  # inputs that are not there, attributes that are nonsense
            continue
        if all(k < len(outs) and outs[k] for k, wanted in enumerate(body.wanted) if wanted):
            made.append(_function(node, body, outs, f"{node.op_type}_{len(made)}", model))
    if made:
        model.functions.extend(made)
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return bool(made)


def _function(node: NodeProto, body: Body, outs: list[str], name: str, model: ModelProto) -> FunctionProto:
    """The function of a node, which is made a call of it: of the inputs that are there, for the outputs that are asked for."""
    keep = [k for k, wanted in enumerate(body.wanted) if wanted]
    results = [body("Identity", outs[k]) for k in keep]  # no name twice, and none of an input
    opsets = [o for o in model.opset_import if o.domain in STANDARD]
    function = helper.make_function(DOMAIN, name, [i for i in body.ins if i], results, body.nodes, opsets)
    ins, outputs = [i for i in node.input if i], [node.output[k] for k in keep]
    node.ClearField("attribute")
    del node.input[:], node.output[:]
    node.input.extend(ins)
    node.output.extend(outputs)
    node.domain, node.op_type = DOMAIN, name
    return function


def _known(graph: GraphProto) -> tuple[dict[str, int], dict[str, int]]:
    """Ranks and element types of values, as far as the file says them."""
    values = [v for v in (*graph.input, *graph.output, *graph.value_info) if v.type.HasField("tensor_type")]
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in values if v.type.tensor_type.HasField("shape")}
    codes = {v.name: v.type.tensor_type.elem_type for v in values}
    ranks.update({t.name: len(t.dims) for t in graph.initializer})
    codes.update({t.name: t.data_type for t in graph.initializer})
    return ranks, codes
