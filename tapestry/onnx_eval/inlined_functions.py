# pyright: basic
# onnx comes without complete types
"""Models with functions of their own, these written out as nodes: what every evaluator, and the lift, is to read.

onnx's inliner and its reference forget the value that a function gives an attribute which a call leaves out; the operator
inside then takes its own.
"""

from __future__ import annotations

import onnx.inliner
from onnx import GraphProto, ModelProto, NodeProto


def inlined(model: ModelProto) -> ModelProto:
    """A model without functions of its own; attributes that calls leave out are what the functions say."""
    if not model.functions:
        return model
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    if not any(f.attribute_proto for f in functions.values()):
        return onnx.inliner.inline_local_functions(model)
    out = ModelProto()
    out.CopyFrom(model)
    while calls := [n for n in _nested(out.graph) if (n.domain, n.op_type, n.overload) in functions]:
        for node in calls:  # (an attribute that is handed on from a call is there or not only now)
            given = {a.name for a in node.attribute}
            function = functions[node.domain, node.op_type, node.overload]
            node.attribute.extend(a for a in function.attribute_proto if a.name not in given)
        out = onnx.inliner.inline_selected_functions(out, list({(n.domain, n.op_type) for n in calls}))
    del out.functions[:]
    return out


def _nested(graph: GraphProto) -> list[NodeProto]:
    """The nodes of a graph and of the bodies in them."""
    found = list(graph.node)
    for node in found:  # grows
        for a in node.attribute:
            found += [n for g in (a.g, *a.graphs) for n in g.node]
    return found
