"""What of a plan's graph must be the model's to the letter: inputs, outputs, weights and constants, opaque nodes."""
# pyright: basic

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, defs, helper

from tapestry.errors import LawError
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.types import HOST, Array, Weight, numpy_dtype
from tapestry.verify.model.model_values import ModelFile, with_bodies

# onnx comes without complete types


LAW = "model"
Reader = Callable[[str], Array]


def interface(graph: Graph, model: ModelFile) -> int:
    """Check that inputs and outputs are the model's, by name, order, type and size; returns how many there are."""
    for what, ours, theirs in (
        ("inputs", list(graph.inputs), [i.name for i in model.inputs]),
        ("outputs", list(graph.outputs), [o.name for o in model.proto.graph.output]),
    ):
        if ours != theirs:
            missing = sorted(set(theirs) ^ set(ours))
            why = f"{missing[0]!r} is in one of the two alone" if missing else f"{ours} and not {theirs}"
            raise LawError(LAW, f"the {what} are not the model's", where="the graph", why=why)
    for value in (*model.inputs, *model.proto.graph.output):
        t, said = graph.tensors[value.name], value.type.tensor_type
        if t.dtype == HOST or not said.elem_type:
            continue
        dtype = helper.tensor_dtype_to_np_dtype(said.elem_type)
        if numpy_dtype(t.dtype) != dtype:
            raise LawError(LAW, f"'{t.name}' is {t.dtype}", where="the graph", why=f"the model declares {dtype}")
    for value in model.inputs:
        t, said = graph.tensors[value.name], value.type.tensor_type
        if t.dtype == HOST or not said.HasField("shape"):
            continue
        declared = [d.dim_value if d.HasField("dim_value") else None for d in said.shape.dim]
        if len(declared) != len(t.shape) or any(d not in (None, s) for d, s in zip(declared, t.shape, strict=True)):
            raise LawError(LAW, f"'{t.name}' has another shape", where="the graph", why=f"{list(t.shape)}, declared {declared}")
    return len(graph.inputs) + len(graph.outputs)


def weights(graph: Graph, model: ModelFile, read: Reader) -> int:
    """Check that weights are read from the places of the initializers of their names; returns how many were compared.

    What the plan holds itself under the name of an initializer must be its data. Constants under other names are compared
    with values of the model, or through the operations that read them.
    """
    count = 0
    for name, ref in graph.weights.items():
        stored, where = _stored(model, name), f"weight '{name}'"
        if stored is None:
            if ref.file:
                raise LawError(
                    LAW, "it is no initializer of the model", where=where, why=f"it is read from '{ref.name or ref.file}'"
                )
            continue
        count += 1
        t = graph.tensors[name]
        said = (numpy_dtype(t.dtype), t.shape)
        own = (helper.tensor_dtype_to_np_dtype(stored.data_type), tuple(stored.dims))
        if said != own:
            raise LawError(
                LAW, "it is not of the initializer's type", where=where, why=f"{said[0]}{list(said[1])}, {own[0]}{list(own[1])}"
            )
        if ref.file:
            _same_place(ref, stored, name, where)
        elif not _equal(read(name), model.constant(name)):
            at = np.argwhere(read(name) != model.constant(name))
            why = f"at cell {at[0].tolist()}" if len(at) else ""
            raise LawError(LAW, "the plan's constant is not the initializer of that name", where=where, why=why)
    return count


def _stored(model: ModelFile, name: str) -> TensorProto | None:
    node = model.makers.get(name)
    if node is not None and node.op_type == "Constant":
        return next((a.t for a in node.attribute if a.name == "value"), None)
    return model.initializers.get(name)


def _same_place(ref: Weight, stored: TensorProto, name: str, where: str) -> None:
    if stored.data_location != TensorProto.EXTERNAL:
        if ref.name != name:
            raise LawError(LAW, f"'{name}' is another one's data", where=where, why=f"it is read from '{ref.name or ref.file}'")
        return
    fields = {e.key: e.value for e in stored.external_data}
    location = "/".join(p for p in fields.get("location", "").split("/") if p != ".")
    own = (location, int(fields.get("offset", "0")), int(fields.get("length", ref.length)))
    said = (ref.file, ref.offset, ref.length)
    if ref.name or said != own:
        raise LawError(LAW, "it is read from elsewhere", where=where, why=f"{ref.name or said}, not {own}")


def _equal(a: Array, b: Array | None) -> bool:
    return b is not None and a.shape == b.shape and a.tobytes() == np.ascontiguousarray(b, a.dtype).tobytes()


# opaque nodes


def node_of_opaque(op: Opaque, model: ModelFile) -> NodeProto | None:
    """The model's node of an opaque operation, once attributes and opset have been held to it.

    It is the node that writes the operation's outputs, whatever the plan says that it came from. Of an operation whose outputs
    the model does not have, some node must have the attributes, unless the model has no node of the kind: preparation makes
    some of other nodes, and their values alone are compared. Returns None there.
    """
    mine = NodeProto.FromString(op.node)
    where, opsets = f"operation '{op.outs[0]}' ({op.kind})", dict(model.opsets)
    if mine.op_type != op.kind:
        raise LawError(LAW, "an opaque operation is another node", where=where, why=f"it runs {mine.op_type}")
    found = next((model.makers[o] for o in op.outs if o in model.makers), None)
    if found is None:
        alike = [n for n in with_bodies(model.proto.graph.node) if n.op_type == op.kind]
        wrong = [w for n in alike if (w := _other_attribute(mine, n, opsets))]
        if alike and len(wrong) == len(alike):
            raise LawError(LAW, f"no {op.kind} of the model has its attributes", where=where, why=wrong[0])
        return None
    if found.op_type != op.kind:
        return None  # one operator is written as another, as Upsample is as Resize
    if why := _other_attribute(mine, found, opsets):
        raise LawError(LAW, "an attribute is not the model's", where=f"node '{found.name}', {where}", why=why)
    for domain, version in op.opsets:
        if opsets.get(domain, version) != version:
            what = f"the opset of '{domain or 'ai.onnx'}' is not the model's"
            raise LawError(LAW, what, where=where, why=f"the plan has {version}, the model {opsets[domain]}")
    return found


def _other_attribute(mine: NodeProto, own: NodeProto, opsets: dict[str, int]) -> str:
    """How two nodes of a kind differ in what they are given beside tensors and bodies; "" where they do not.

    An attribute that the model's node lacks, and that has no default, may be what preparation says of it (the axes of a
    Resize): its values are compared all the same.
    """
    a, b, default = _plain(mine.attribute), _plain(own.attribute), _defaults(own, opsets)
    for key in sorted({*a, *b} - ({"seed"} - set(b)) - (set(a) - set(b) - set(default))):
        said, right = a.get(key, default.get(key)), b.get(key, default.get(key))
        if said != right:
            return f"'{key}' is {said} in the plan, {right} in the model"
    return ""


def _plain(attributes: Any) -> dict[str, str]:
    """Attributes that are no bodies, as text, so that NaN is itself; notes of the compiler's own are none."""
    bodies = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
    kept = [a for a in attributes if a.type not in bodies and not a.name.startswith("tapestry.")]
    return {a.name: repr(helper.get_attribute_value(a)) for a in kept}


def _defaults(node: NodeProto, opsets: dict[str, int]) -> dict[str, str]:
    """Attributes that a node of its operator has without being given them."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    if not defs.has(node.op_type, domain=domain, max_inclusive_version=opsets.get(domain, 1)):
        return {}
    schema = defs.get_schema(node.op_type, domain=domain, max_inclusive_version=opsets.get(domain, 1))
    return _plain(a.default_value for a in schema.attributes.values() if a.default_value.type)
