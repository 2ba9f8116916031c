"""A Program as blocks that depend on nothing but what they read: one task per step and device, in no order of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tapestry.ir.kernel import Box, intersect
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Transfer

Value = tuple[int, str]
"""What a device holds in a buffer by the plan: (device, buffer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One step of a program on one device.

    Attributes:
        step: position in ``program.steps``.
        device: the one that the plan has it on.
        reads: the values that it reads, each once.
        outs: the values that it makes.
    """

    step: int
    device: int
    reads: tuple[Value, ...]
    outs: tuple[Value, ...]


def tasks_of(program: Program) -> list[Task]:
    """Every task, in an order in which they can be done."""
    return [t for at in range(len(program.steps)) for t in _tasks(program, at)]


def _tasks(program: Program, at: int) -> Iterator[Task]:
    step, buffers = program.steps[at], program.buffers
    match step:
        case Load():
            for d in _devices(buffers[step.buffer].boxes):
                yield Task(step=at, device=d, reads=(), outs=((d, step.buffer),))
        case Launch():
            for d in _devices(step.blocks):
                names = dict.fromkeys(n for n in (*step.ins, *step.states) if n)
                reads = tuple((d, n) for n in names if buffers[n].boxes[d] is not None)
                yield Task(step=at, device=d, reads=reads, outs=tuple((d, n) for n in step.outs))
        case Transfer():
            for d in _devices(buffers[step.dst].boxes):
                yield Task(step=at, device=d, reads=_received(program, step, d), outs=((d, step.dst),))
        case Reduce():
            for group in step.groups:
                for d in group:
                    yield Task(step=at, device=d, reads=_merged(step, group), outs=tuple((d, n) for n in step.dsts))
        case Free():
            pass


def _devices(boxes: tuple[Box | None, ...]) -> Iterator[int]:
    return (d for d, box in enumerate(boxes) if box is not None)


def _received(program: Program, step: Transfer, device: int) -> tuple[Value, ...]:
    """What a device puts together: parts of others' buffers, and of its own."""
    held, box = program.buffers[step.src].boxes[device], program.buffers[step.dst].boxes[device]
    own = intersect(held, box) if held is not None and box is not None else None
    devices = [m.src for m in step.messages if m.dst == device] + ([] if own is None else [device])
    return tuple((d, step.src) for d in dict.fromkeys(devices))


def _merged(step: Reduce, group: tuple[int, ...]) -> tuple[Value, ...]:
    """What a device merges: every member's states."""
    return tuple((e, src) for src in dict.fromkeys(step.srcs) if src in step.sent for e in group)
