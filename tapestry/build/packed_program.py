"""A Program as data in which every box, list of boxes, list of messages and set of groups is written once.

A program of a thousand devices has few distinct lists, each with an entry per device, and many steps that use them: buffers and
steps give the number of a list, a list the numbers of its boxes. Reading it back makes one object of each (`Shared`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from tapestry.ir.kernel import Box
from tapestry.ir.program import Buffer, Free, Launch, Load, Message, Program, Reduce, Shared, Step, Transfer

T = TypeVar("T")


class PackedBuffer(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A `Buffer`; ``boxes`` is the number of a list."""

    name: str
    tensor: str
    dtype: str
    boxes: int
    field: int | None


def _tag(name: str) -> str:
    return name.removeprefix("Packed").lower()


class _PackedStep(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="step", tag=_tag):
    """A step, told by its kind."""


class PackedLoad(_PackedStep, frozen=True):
    """A `Load`."""

    buffer: str


class PackedLaunch(_PackedStep, frozen=True):
    """A `Launch`; ``blocks`` is the number of a list."""

    op: int
    mode: str
    blocks: int
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    states: tuple[str, ...]


class PackedTransfer(_PackedStep, frozen=True):
    """A `Transfer`; ``messages`` is a number."""

    kind: str
    src: str
    dst: str
    messages: int


class PackedReduce(_PackedStep, frozen=True):
    """A `Reduce`; ``groups`` is a number."""

    kind: str
    op: int
    srcs: tuple[str, ...]
    dsts: tuple[str, ...]
    groups: int
    known: tuple[tuple[float, ...], ...] = ()
    sent_as: str = ""


class PackedFree(_PackedStep, frozen=True):
    """A `Free`."""

    buffers: tuple[str, ...]


PackedStep = PackedLoad | PackedLaunch | PackedTransfer | PackedReduce | PackedFree
PACKED: dict[type[Step], type[PackedStep]] = {
    Load: PackedLoad,
    Launch: PackedLaunch,
    Transfer: PackedTransfer,
    Reduce: PackedReduce,
    Free: PackedFree,
}
"""Steps and how they are packed: the same fields, with numbers for ``blocks``, ``messages`` and ``groups``."""


class Packed(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A whole program; ``messages`` are (sender, receiver, number of a box)."""

    devices: int
    outputs: dict[str, str]
    boxes: list[Box]
    lists: list[tuple[int | None, ...]]
    messages: list[tuple[tuple[int, int, int], ...]]
    groups: list[tuple[tuple[int, ...], ...]]
    buffers: list[PackedBuffer]
    steps: list[PackedStep]


class _Table:
    """Numbers of values in order of first use; an object seen before is not hashed again."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.seen: dict[int, tuple[Any, int]] = {}

    def number(self, value: Any) -> int:
        entry = self.seen.get(id(value))
        if entry is None:  # the object is kept, so that its identity stays its own
            entry = self.seen[id(value)] = (value, self.numbers.setdefault(value, len(self.numbers)))
        return entry[1]


def pack(program: Program) -> Packed:
    """The program as data."""
    boxes, lists, messages, groups = (_Table() for _ in range(4))
    buffers = [PackedBuffer(b.name, b.tensor, b.dtype, lists.number(b.boxes), b.field) for b in program.buffers.values()]
    tables = {"blocks": lists, "messages": messages, "groups": groups}
    steps: list[PackedStep] = []
    for s in program.steps:
        packed = PACKED[type(s)]
        values: dict[str, Any] = {f: getattr(s, f) for f in packed.__struct_fields__}
        values |= {f: tables[f].number(v) for f, v in values.items() if f in tables}
        steps.append(packed(**values))
    indices = [tuple(None if b is None else boxes.number(b) for b in x) for x in lists.numbers]
    sent = [tuple((m.src, m.dst, boxes.number(m.box)) for m in x) for x in messages.numbers]
    return Packed(
        program.devices, dict(program.outputs), list(boxes.numbers), indices, sent, list(groups.numbers), buffers, steps
    )


def unpack(data: Packed) -> Program:
    """The program that was packed.

    Raises:
        ValueError: a number stands for nothing.
    """
    lists: list[tuple[Box | None, ...]] = [
        Shared(None if k is None else _at(data.boxes, k) for k in indices) for indices in data.lists
    ]
    messages = [Shared(Message(src, dst, _at(data.boxes, k)) for src, dst, k in sent) for sent in data.messages]
    shared: dict[str, Sequence[Any]] = {"blocks": lists, "messages": messages, "groups": [Shared(g) for g in data.groups]}
    plain = {packed: step for step, packed in PACKED.items()}
    steps: list[Step] = []
    for s in data.steps:
        values = msgspec.structs.asdict(s)
        values |= {f: _at(shared[f], v) for f, v in values.items() if f in shared}
        steps.append(plain[type(s)](**values))
    buffers = {
        b.name: Buffer(name=b.name, tensor=b.tensor, dtype=b.dtype, boxes=_at(lists, b.boxes), field=b.field)
        for b in data.buffers
    }
    return Program(devices=data.devices, buffers=buffers, steps=tuple(steps), outputs=data.outputs)


def _at(items: Sequence[T], number: int) -> T:
    if not 0 <= number < len(items):
        raise ValueError(f"number {number} of {len(items)}")
    return items[number]
