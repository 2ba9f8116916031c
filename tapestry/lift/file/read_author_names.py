"""What a model file says of its author's names: the module that each node comes from, and the symbols of axes."""

from __future__ import annotations

import ast
import re
from typing import Any, cast

from google.protobuf.message import Message
from onnx import ModelProto, NodeProto

from tapestry.errors import ModelError
from tapestry.ir.graph import Names
from tapestry.lift.file.protos import NO_NAMES, source_of
from tapestry.system.quoting import printable

SCOPES, CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"
COUNTED = re.compile(r"_\d+$")
ANONYMOUS = re.compile(r"unk__\d+|s\d+")  # (what exporters call a size that has no name)
TOKENS = ("batch", "sequence")
KNOWN = {
    **dict.fromkeys(("input_ids", "token_type_ids", "position_ids", "attention_mask", "inputs_embeds"), TOKENS),
    "pixel_values": ("batch", "channels", "height", "width"),
    "decoder_input_ids": ("batch", "target"),
}
LONGEST = 1 << 14  # characters of one node's metadata


def name_printably(message: Message) -> None:
    """Make every name in a model printable: of nodes, tensors, symbols, functions, domains. Texts that are no names stay.

    Names that differ in signs without a shape alone stay different, unless one is written as another one's escapes: then
    a name is defined twice, which `check_structure` refuses.
    """
    for field, value in message.ListFields():
        if field.name in NO_NAMES:
            continue
        if field.type == field.TYPE_STRING and isinstance(value, str | bytes):
            setattr(message, field.name, _decoded(value))
        elif field.type == field.TYPE_STRING:
            for k, text in enumerate(value):
                value[k] = _decoded(text)
        elif field.type == field.TYPE_MESSAGE:
            for part in (value,) if isinstance(value, Message) else value:
                name_printably(part)


def _decoded(name: str | bytes) -> str:
    """A name that can be printed.

    Raises:
        ModelError: it is bytes, which is what protobuf gives of a name that is no text.
    """
    if isinstance(name, bytes):
        raise ModelError("a name in the model is not text", where="the model", why=repr(name[:80]), hint="the file is damaged")
    return name if name.isprintable() else printable(name)


def read_names(model: ModelProto) -> Names:
    """The author's names in a file, as it was written."""
    scopes = {source_of(n): found for n in model.graph.node if (found := _scope(n))}
    called, axes = _conventional(model), dict[str, tuple[str, ...]]()
    for v in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if v.type.HasField("tensor_type"):
            names = [called.get(d.dim_param, d.dim_param) for d in v.type.tensor_type.shape.dim]
            if any(names):
                axes[v.name] = tuple(n if n.isidentifier() and not ANONYMOUS.fullmatch(n) else "" for n in names)
    return Names(scopes=scopes, axes=axes)


def _conventional(model: ModelProto) -> dict[str, str]:
    """Symbols without a name that run along axes which have one in every model: those of tokens, masks and images."""
    out: dict[str, str] = {}
    for v in model.graph.input:
        for d, name in zip(v.type.tensor_type.shape.dim, KNOWN.get(v.name, ()), strict=False):
            if ANONYMOUS.fullmatch(d.dim_param):
                out.setdefault(d.dim_param, name)
    return out


def _scope(node: NodeProto) -> tuple[str, str] | None:
    """The part of the model that a node is of (its class, where that is all of it), and what it does there; None where unsaid.

    The exporter of torch says it in the node's metadata; older ones in its name, ``/layers.0/fc1/MatMul``.
    """
    path = _listed(node, SCOPES)
    if path:
        root = next(iter(_listed(node, CLASSES)), "").rpartition(".")[2]
        return next((p for p in reversed(path[:-1]) if p), root), COUNTED.sub("", path[-1])
    if "/" not in node.name.strip("/"):
        return None
    *outer, last = node.name.strip("/").split("/")
    parts: list[str] = []
    for part in outer:
        if parts and part.startswith(f"{parts[-1]}."):  # a Sequential's child repeats its parent
            parts.pop()
        parts.append(part)
    return ".".join(parts), COUNTED.sub("", last).lower()


def _listed(node: NodeProto, key: str) -> list[str]:
    """A list of texts in a node's metadata; empty where there is none, or something else."""
    text = next((p.value for p in node.metadata_props if p.key == key), "")
    try:
        found: Any = ast.literal_eval(text) if 0 < len(text) <= LONGEST else []
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    listed = cast("list[Any]", found) if isinstance(found, list) else []
    return [printable(x) for x in listed] if all(isinstance(x, str) for x in listed) else []
