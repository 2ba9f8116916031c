"""Mutations that keep a model a protobuf and a plan a JSON document, so that what is behind the parsers is reached."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import onnx
from google.protobuf.message import DecodeError, EncodeError, Message
from onnx import ModelProto, TensorProto

INTS = (0, 1, -1, 2, 3, 7, 8, 16, 99, 127, 128, 255, -128, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 1e-40)
TEXTS = (
    b"", b"x", b"y", b"w", b"..", b"/etc/passwd", b"\xff\xfe", b"a" * 300, b"\0", b"SAME_UPPER", b"constant", b"ij,jk->ik",
    b"0", b"-1",
)  # fmt: skip
JSONS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 10**6, 2**31, 2**63, 10**30, 0.5, "", "x", None, True, False, [], {}, [0, 1], [[0, 1]],
)  # fmt: skip
WORDS = [
    "sum", "max", "body", "let", "then", "op", "opaque", "reads", "else", "0", "1", "-1", "99999999999", "(", ")", "[", "]",
    ",", "|", "when", "f32", "i64", "bool", "host", "1e308", "floor", "mod",
]  # fmt: skip
OPERATORS = sorted({s.name for s in onnx.defs.get_all_schemas() if s.domain == ""})


def mutated_model(data: bytes, rng: random.Random) -> bytes | None:
    """A model with one to four fields changed; None if the bytes are no protobuf."""
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:
        return None
    try:
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            found = messages(model)
            _change(rng.choice(found), found, rng)
        return model.SerializeToString()
    except (ValueError, DecodeError, EncodeError):  # text that is none; nested deeper than it may be
        return None


def messages(m: Message, most: int = 4000) -> list[Message]:
    """A message and all inside it."""
    out: list[Message] = [m]
    for at in out:  # grows while it is walked
        for field, value in at.ListFields():
            if field.message_type and len(out) < most:
                out += list(value) if field.is_repeated else [value]
    return out


def _change(at: Message, everything: list[Message], rng: random.Random) -> None:
    same = [m for m in everything if m.DESCRIPTOR is at.DESCRIPTOR and m is not at]
    if same and rng.random() < 0.1:
        copy = type(at).FromString(rng.choice(same).SerializeToString())
        at.CopyFrom(copy)
        return
    present = [f for f, _ in at.ListFields()]
    field = rng.choice(present) if present and rng.random() < 0.8 else rng.choice(list(at.DESCRIPTOR.fields))
    if field.name == "op_type" and rng.random() < 0.7:
        at.op_type = rng.choice(OPERATORS)  # type: ignore[attr-defined]
    elif field.is_repeated:
        _repeated(at, field, everything, rng)
    elif field.message_type:
        at.ClearField(field.name) if rng.random() < 0.5 else getattr(at, field.name).SetInParent()
    elif rng.random() < 0.15:
        at.ClearField(field.name)
    else:
        setattr(at, field.name, _scalar(field, getattr(at, field.name), everything, rng))


def _repeated(at: Message, field: Any, everything: list[Message], rng: random.Random) -> None:
    values = getattr(at, field.name)
    k, how = rng.randrange(len(values) or 1), rng.random()
    if len(values) and how < 0.3:
        del values[k]
    elif field.message_type:
        new = values.add()
        same = [m for m in everything if m.DESCRIPTOR is field.message_type]
        if same and rng.random() < 0.9:
            new.CopyFrom(type(new).FromString(rng.choice(same).SerializeToString()))
    elif len(values) and how < 0.8:
        values[k] = _scalar(field, values[k], everything, rng)
    else:
        values.append(_scalar(field, values[k] if len(values) else None, everything, rng))


def _scalar(field: Any, old: Any, everything: list[Message], rng: random.Random) -> Any:
    kinds = field.CPPTYPE_STRING, field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT, field.CPPTYPE_ENUM
    if field.cpp_type == kinds[0]:
        return _text(field, old, everything, rng)
    if field.cpp_type in kinds[1:3]:
        return rng.choice(FLOATS)
    if field.cpp_type == kinds[3]:
        return rng.choice([v.number for v in field.enum_type.values])
    if field.name in ("data_type", "elem_type"):
        return rng.choice(list(TensorProto.DataType.values()))
    value = (old or 0) + rng.choice([-1, 1]) if rng.random() < 0.3 else rng.choice(INTS)
    limits = {field.CPPTYPE_INT32: (-(2**31), 2**31), field.CPPTYPE_UINT64: (0, 2**64)}
    low, high = limits.get(field.cpp_type, (-(2**63), 2**63))
    return min(max(value, low), high - 1)


def _text(field: Any, old: Any, everything: list[Message], rng: random.Random) -> Any:
    if field.type == field.TYPE_BYTES:
        value = bytearray(old or b"")
        if value and rng.random() < 0.6:
            value[rng.randrange(len(value))] = rng.randrange(256)
            return bytes(value)
        return rng.choice([bytes(value[: len(value) // 2]), bytes(value) * 2, *TEXTS])
    names = [getattr(m, "name", "") for m in everything if isinstance(getattr(m, "name", ""), str)]
    used = [v for m in everything if m.DESCRIPTOR.name == "NodeProto" for v in (*m.input, *m.output)]  # type: ignore[attr-defined]
    return rng.choice([*names[:40], *used[:40], ""]) if rng.random() < 0.8 else rng.choice(TEXTS).decode(errors="replace")


def mutated_build(data: bytes, rng: random.Random) -> bytes | None:
    """A build case with values of its JSON document changed; None if it has none."""
    try:
        document = json.loads(data[2:])
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    places = _places(document)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        holder, key = rng.choice(places)
        try:
            _edit(holder, key, places, rng)
        except (IndexError, KeyError):
            continue
    if isinstance(document.get("graph"), str) and rng.random() < 0.4:
        document["graph"] = mutated_text(document["graph"], rng)
    head = data[:2] if rng.random() < 0.95 else bytes([rng.randrange(8), rng.randrange(6)])
    try:
        return head + json.dumps(document, separators=(",", ":")).encode(errors="replace")
    except (ValueError, RecursionError):  # it contains itself
        return None


def _places(document: Any) -> list[tuple[Any, Any]]:
    out: list[tuple[Any, Any]] = []
    stack = [document]
    while stack:
        x = stack.pop()
        for key in x if isinstance(x, dict) else range(len(x)):
            out.append((x, key))
            if isinstance(x[key], dict | list):
                stack.append(x[key])
    return out


def _edit(holder: Any, key: Any, places: list[tuple[Any, Any]], rng: random.Random) -> None:
    how, old = rng.random(), holder[key]
    if how < 0.15:
        del holder[key]
    elif how < 0.3 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), json.loads(json.dumps(old)))
    elif how < 0.4 and isinstance(holder, list):
        k = rng.randrange(len(holder))
        holder[key], holder[k] = holder[k], holder[key]
    elif how < 0.6 and isinstance(old, int):
        holder[key] = old + rng.choice([-1, 1, 2, -2])
    elif how < 0.85:
        other, k = rng.choice(places)
        alike = [(h, j) for h, j in rng.sample(places, min(40, len(places))) if type(h[j]) is type(old)]
        other, k = rng.choice(alike or [(other, k)])
        holder[key] = json.loads(json.dumps(other[k]))
    else:
        holder[key] = rng.choice(JSONS)


def mutated_text(text: str, rng: random.Random) -> str:
    """IR text with a few words or lines changed."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        if rng.random() < 0.3:
            lines = text.splitlines()
            k, j = rng.randrange(len(lines) or 1), rng.randrange(len(lines) or 1)
            lines[k : k + 1] = rng.choice([[], lines[k : k + 1] * 2, lines[j : j + 1]])
            text = "\n".join(lines) + "\n"
            continue
        found = list(re.finditer(r"[A-Za-z_][\w.]*|\d+|[^\s\w]", text))
        if not found:
            return text
        at, other = rng.choice(found), rng.choice(found)
        text = text[: at.start()] + rng.choice([other.group(), rng.choice(WORDS), ""]) + text[at.end() :]
    return text


MUTATORS = {"model": mutated_model, "build": mutated_build}
