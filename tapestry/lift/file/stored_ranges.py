"""Where the tensors of an ONNX file lie in it, without reading them: a walk over the protobuf's fields by their lengths.

Field numbers are those of `onnx.proto <https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>`_, the encoding is that of
`protobuf <https://protobuf.dev/programming-guides/encoding/>`_.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tapestry.errors import ModelError
from tapestry.system.quoting import printable

GRAPH, NODE, INITIALIZER = 7, 1, 5  # of ModelProto; of GraphProto
OUTPUT, OP_TYPE, ATTRIBUTE, DOMAIN = 2, 4, 5, 7  # of NodeProto
ATTRIBUTE_NAME, ATTRIBUTE_TENSOR = 1, 5
TENSOR_NAME, RAW_DATA = 8, 9
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's message, and its ``raw_data`` (``None``: its elements are in another field)."""

    message: Range
    raw: Range | None


@lru_cache(maxsize=4)
def stored_ranges(path: str, _mtime: int, _size: int) -> dict[str, Stored]:
    """Initializers and values of top-level Constant nodes, by the name of the tensor that they define; cached by path, time
    and size.

    Raises:
        ModelError: the file is no protobuf.
    """
    out: dict[str, Stored] = {}
    with Path(path).open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as data:
        for kind, graph in _fields(data, (0, len(data))):
            for inner, place in _fields(data, graph) if kind == GRAPH else ():
                if inner == INITIALIZER:
                    name, stored = _tensor(data, place)
                    out[name] = stored
                elif inner == NODE:
                    out |= _constant(data, place)
    return out


def _constant(data: mmap.mmap, node: Range) -> dict[str, Stored]:
    """The value of a Constant node, by the node's output."""
    found = list(_fields(data, node))
    text = {kind: data[lo:hi] for kind, (lo, hi) in reversed(found) if kind in (OUTPUT, OP_TYPE, DOMAIN)}
    if text.get(OP_TYPE) != b"Constant" or text.get(DOMAIN, b"") not in (b"", b"ai.onnx") or OUTPUT not in text:
        return {}
    for attribute in (place for kind, place in found if kind == ATTRIBUTE):
        inside = dict(_fields(data, attribute))
        lo, hi = inside.get(ATTRIBUTE_NAME, (0, 0))
        if data[lo:hi] == b"value" and ATTRIBUTE_TENSOR in inside:
            return {printable(text[OUTPUT].decode(errors="replace")): _tensor(data, inside[ATTRIBUTE_TENSOR])[1]}
    return {}


def _tensor(data: mmap.mmap, place: Range) -> tuple[str, Stored]:
    found = dict(_fields(data, place))
    lo, hi = found.get(TENSOR_NAME, (0, 0))
    return printable(data[lo:hi].decode(errors="replace")), Stored(place, found.get(RAW_DATA))


def _fields(data: mmap.mmap, place: Range) -> Iterator[tuple[int, Range]]:
    """(field number, where its content lies) of the fields of a message that have a length."""
    at, end = place
    while at < end:
        tag, at = _varint(data, at, end)
        if tag & 7 == VARINT:
            _, at = _varint(data, at, end)
            continue
        if tag & 7 == BYTES:
            size, at = _varint(data, at, end)
            start, at = at, at + size
            if at <= end:
                yield tag >> 3, (start, at)
        elif tag & 7 in (FIXED64, FIXED32):
            at += 8 if tag & 7 == FIXED64 else 4
        else:
            raise ModelError("not a protobuf", why=f"a field of kind {tag & 7} at byte {at}")
        if at > end:
            raise ModelError("not a protobuf", why=f"a field is longer than what holds it, at byte {at}")


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
    raise ModelError("not a protobuf", why=f"a number without an end at byte {at}")
