"""Whether a plan's weights and opaque nodes are those of its model: what neither the laws nor the kernels speak of.

The laws hold for any graph, and kernels say what blocks compute; a plan that reads another weight of the same shape, or
runs an opaque node with another attribute, breaks none of them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, defs, helper

from tapestry.errors import LawError, ModelError, refusing
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.types import Weight
from tapestry.lift.file.external_data import parse_place
from tapestry.lift.file.protos import node_name
from tapestry.lift.file.structure import file_bytes, load
from tapestry.lift.file.weight_data import stored_tensors
from tapestry.lift.normalize.opset_upgrade import upgrade

LAW = "model"
_A = AttributeProto
PLAIN = {_A.FLOAT, _A.INT, _A.STRING, _A.FLOATS, _A.INTS, _A.STRINGS}


def check_references(graph: Graph, model: Path, sha256: str) -> int:
    """Check that a plan reads and runs what its model's file says; returns how many weights and nodes were compared.

    A file that is not there (plans travel without it) or that is another one (running the plan is then refused, weight by
    weight) is not compared with; what the plan alone can tell is checked all the same.

    Raises:
        LawError: a weight is another initializer's bytes, or an opaque node is not the model's.
    """
    count = 0
    for name, ref in graph.weights.items():
        count += 1
        if ref.name not in ("", name):
            raise LawError(
                LAW, f"weight '{name}' is another one's data", where="the graph", why=f"it is read from '{ref.name}'"
            )
    for op in graph.ops:
        if isinstance(op, Opaque):
            count += 1
            kind = NodeProto.FromString(op.node).op_type
            if kind != op.kind:
                raise LawError(
                    LAW, f"an opaque {op.kind} is another node", where=f"operation '{op.outs[0]}'", why=f"it runs {kind}"
                )
    try:
        proto = load(model) if hashlib.sha256(file_bytes(model)).hexdigest() == sha256 else None
    except (OSError, ValueError, ModelError):
        proto = None
    if proto is not None:
        with refusing(ModelError, "the plan's model cannot be read", str(model), "compile it again"):
            upgrade(proto)
        stored = stored_tensors(proto)
        for name, ref in graph.weights.items():
            _weight(name, ref, stored.get(name))
        _nodes(graph, proto)
    return count


def _weight(name: str, ref: Weight, stored: TensorProto | None) -> None:
    """A reference to external data must be the initializer's own (derived constants have no file)."""
    if ref.file and not ref.name and stored is not None and stored.data_location == TensorProto.EXTERNAL:
        place = parse_place(stored)
        said, own = (ref.file, ref.offset, ref.length), (place.file, place.offset, place.length)
        if said != own:
            raise LawError(LAW, f"weight '{name}' is read from elsewhere", where="the graph", why=f"{said}, not {own}")


def _nodes(graph: Graph, model: ModelProto) -> None:
    """Opaque nodes that are nodes of the file have its attributes and its opset."""
    named: dict[str, list[NodeProto]] = {}
    for node in model.graph.node:
        named.setdefault(node_name(node), []).append(node)
    opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.opset_import}
    for op in graph.ops:
        found = named.get(op.source[0], []) if isinstance(op, Opaque) and len(op.source) == 1 else []
        if not isinstance(op, Opaque) or len(found) != 1 or found[0].op_type != op.kind:
            continue  # of a function, of a body that was written out, or made of another node
        own, mine, where = _plain(found[0]), _plain(NodeProto.FromString(op.node)), f"node '{op.source[0]}' ({op.kind})"
        default = _defaults(found[0], opsets)  # which preparation may write out
        for key in sorted({*own, *mine} - ({"seed"} - set(own))):
            said, right = mine.get(key, default.get(key)), own.get(key, default.get(key))
            if said != right:
                why = f"the plan has {said}, the model {right}"
                raise LawError(LAW, f"attribute '{key}' is not the model's", where=where, why=why)
        for domain, version in op.opsets:
            if opsets.get(domain, version) != version:
                why = f"the plan has {version}, the model {opsets[domain]}"
                raise LawError(LAW, f"the opset of '{domain or 'ai.onnx'}' is not the model's", where=where, why=why)


def _plain(node: NodeProto) -> dict[str, str]:
    """Numbers and strings among a node's attributes (as text, so that NaN is itself); notes of our own are none."""
    kept = [a for a in node.attribute if a.type in PLAIN and not a.name.startswith("tapestry.")]
    return {a.name: repr(helper.get_attribute_value(a)) for a in kept}


def _defaults(node: NodeProto, opsets: dict[str, int]) -> dict[str, str]:
    """Attributes that a node of its operator has without being given them."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    if not defs.has(node.op_type, domain=domain, max_inclusive_version=opsets.get(domain, 1)):
        return {}
    schema = defs.get_schema(node.op_type, domain=domain, max_inclusive_version=opsets.get(domain, 1))
    stated = NodeProto(attribute=[a.default_value for a in schema.attributes.values() if a.default_value.type in PLAIN])
    return _plain(stated)
