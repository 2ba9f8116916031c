"""The Program: what each device does, step by step. It is all the runtime knows.

Steps are written once for all devices (most do the same on another block); ``None`` in a per-device tuple means that the
device takes no part. Buffers are named; a name stands for one buffer on each device that has a box for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from tapestry.ir.kernel import Box, size
from tapestry.ir.types import itemsize

T = TypeVar("T")


class Shared(tuple[T, ...]):
    """A tuple that works out its hash once.

    A list of boxes has an entry per device, and many steps of a program share it: as a `Shared` it may stand in keys.
    """

    def __hash__(self) -> int:
        known = self.__dict__.get("hash")
        if known is None:
            known = self.__dict__["hash"] = super().__hash__()
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A named buffer: ``boxes[d]`` is the part of ``tensor`` that device d holds in it (``None``: no buffer there).

    ``field`` is the monoid field when the buffer holds a partial or merged state rather than the tensor itself.
    """

    name: str
    tensor: str
    dtype: str
    boxes: tuple[Box | None, ...]
    field: int | None = None

    def nbytes(self, device: int) -> int:
        """Bytes on one device."""
        box = self.boxes[device]
        return 0 if box is None else size(box) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Allocate a buffer and fill it from the host: a weight's slice, or a slice of a graph input."""

    buffer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Run a kernel on a block of ``graph.ops[op]``; allocates its outputs. See `ir.kernel.Kernel` for the modes.

    ``ins`` has one buffer name per read ("" where the mode does not use it); ``states`` the merged states of ``finish``, or
    those of other parts of the reduction that a ``partial`` block's are merged with.
    """

    op: int
    mode: str
    blocks: tuple[Box | None, ...]
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    states: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One box of a tensor, sent between two devices."""

    src: int
    dst: int
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Allocate ``dst`` and fill it: cells that the same device holds in ``src`` by copying, the others by messages."""

    kind: str
    src: str
    dst: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """Merge partial states within each group of devices, in the order given, through the monoid of ``graph.ops[op]``.

    ``dsts`` (one per field) are allocated and hold the merged states on their own boxes: the same box as ``srcs`` for an
    all-reduce, disjoint parts of it for a reduce-scatter. ``srcs`` are left as they are. A field with an entry in ``known``
    is not sent: the entry is its value in each device's part, the same at every cell (`ir.recognition`). States that travel in
    another dtype than they are held in (``sent_as``) are rounded to it before they are merged, and so is what they merge to.
    """

    kind: str
    op: int
    srcs: tuple[str, ...]
    dsts: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    known: tuple[tuple[float, ...], ...] = ()
    sent_as: str = ""

    def nbytes(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        """Bytes of a state on every device, as it travels."""
        return _cells(buffer.boxes) * itemsize(self.sent_as or buffer.dtype)

    @property
    def sent(self) -> tuple[str, ...]:
        """The buffers that travel."""
        return tuple(b for k, b in enumerate(self.srcs) if not self.known or not self.known[k])


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Drop buffers on every device."""

    buffers: tuple[str, ...]


Step = Load | Launch | Transfer | Reduce | Free


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Steps over named buffers on ``devices`` devices; ``outputs`` names the buffer of each graph output."""

    devices: int
    buffers: Mapping[str, Buffer]
    steps: tuple[Step, ...]
    outputs: Mapping[str, str]


def transfer_bytes(step: Transfer | Reduce, program: Program) -> int:
    """Bytes that all devices together put on the wire in one step.

    Messages count as they are. A group of n devices reducing B bytes of state sends ``2 (n - 1) B`` in all for an
    all-reduce and ``(n - 1) B`` for a reduce-scatter (ring algorithms, Patarasuk and Yuan 2009; any chunking). A field
    that does not vary along what is scattered goes whole from each to each, because all merge with it: ``n (n - 1) B``.
    """
    if isinstance(step, Transfer):
        return int(_received(step.messages, program.devices).sum()) * itemsize(program.buffers[step.dst].dtype)
    total = 0
    for s, d in zip(step.srcs, step.dsts, strict=True):
        if s not in step.sent:
            continue
        src, dst = program.buffers[s], program.buffers[d]
        held = step.nbytes(src)
        for g in step.groups:
            same = g and src.boxes[g[0]] == dst.boxes[g[0]]
            factor = 1 if not same else 2 if step.kind == "all_reduce" else len(g)
            total += factor * (len(g) - 1) * int(held[g[0]]) if g else 0
    return total


def moved_bytes(program: Program) -> int:
    """Bytes that all devices together put on the wire in a program."""
    return sum(transfer_bytes(s, program) for s in program.steps if isinstance(s, Transfer | Reduce))


def payload_bytes(step: Transfer | Reduce, program: Program) -> int:
    """Largest buffer that one device contributes or receives: what profilers call the size of the collective."""
    if isinstance(step, Transfer):
        most = _received(step.messages, program.devices).max(initial=0)
        return int(most) * itemsize(program.buffers[step.dst].dtype)
    return int(sent_bytes(step, program).max(initial=0))


def allocated(step: Step) -> tuple[str, ...]:
    """Buffers that a step allocates."""
    match step:
        case Load():
            return (step.buffer,)
        case Launch():
            return step.outs
        case Transfer():
            return (step.dst,)
        case Reduce():
            return step.dsts
        case Free():
            return ()


def reads(step: Step) -> tuple[str, ...]:
    """Buffers that a step reads: of a launch its inputs (by position; "" where the mode does not use one), then its states."""
    match step:
        case Launch():
            return (*step.ins, *step.states)
        case Transfer():
            return (step.src,)
        case Reduce():
            return step.srcs
        case Load() | Free():
            return ()


def alive_bytes(program: Program) -> Iterator[np.ndarray[Any, Any]]:
    """Bytes alive on every device at each step, what it frees included; the array changes from step to step."""
    alive = np.zeros(program.devices, np.int64)
    for step in program.steps:
        for b in allocated(step):
            alive += device_bytes(program.buffers[b])
        yield alive
        for b in step.buffers if isinstance(step, Free) else ():
            alive -= device_bytes(program.buffers[b])


def peak_bytes(program: Program) -> tuple[list[int], list[int]]:
    """(largest number of bytes alive at once, the step after which it is reached) for each device."""
    peak, at = (np.zeros(program.devices, np.int64) for _ in range(2))
    for i, alive in enumerate(alive_bytes(program)):
        at[alive > peak] = i
        peak = np.maximum(peak, alive)
    return peak.tolist(), at.tolist()


def device_bytes(buffer: Buffer) -> np.ndarray[Any, Any]:
    """Bytes of a buffer on every device."""
    return _cells(buffer.boxes) * itemsize(buffer.dtype)


@lru_cache(maxsize=1 << 12)
def _cells(boxes: tuple[Box | None, ...]) -> np.ndarray[Any, Any]:
    return np.array([0 if b is None else size(b) for b in boxes], np.int64)


def sent_bytes(step: Reduce, program: Program) -> np.ndarray[Any, Any]:
    """Bytes of partial states that travel, on every device."""
    return sum((step.nbytes(program.buffers[b]) for b in step.sent), np.zeros(program.devices, np.int64))


@lru_cache(maxsize=1 << 10)
def _received(messages: tuple[Message, ...], devices: int) -> np.ndarray[Any, Any]:
    """Cells that each device receives."""
    out = np.zeros(devices, np.int64)
    for m in messages:
        out[m.dst] += size(m.box)
    return out


def alive_at(program: Program, step: int) -> list[str]:
    """Buffers alive just after a step."""
    out: dict[str, None] = {}
    for s in program.steps[: step + 1]:
        out.update(dict.fromkeys(allocated(s)))
        if isinstance(s, Free):
            for b in s.buffers:
                del out[b]
    return list(out)
