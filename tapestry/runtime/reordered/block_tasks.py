"""A Program as blocks that depend on nothing but what they read: one task per step and device, in no order of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tapestry.ir.expr import count_calls
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.kernel import Box, intersect, size
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Transfer
from tapestry.ir.types import itemsize
from tapestry.plan.cost.compute import arithmetic

Value = tuple[int, str]
"""What a device holds in a buffer by the plan: (device, buffer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One step of a program on one device.

    Attributes:
        step: position in ``program.steps``.
        device: the one that the plan has it on.
        reads: the values that it reads, and how many bytes of each.
        outs: the values that it makes.
        flops: of the cost model, exact for contractions; a merge of states counts, moving does not.
        loaded: bytes that come from the host: of a weight, or of an input.
    """

    step: int
    device: int
    reads: Mapping[Value, int]
    outs: tuple[Value, ...]
    flops: int = 0
    loaded: int = 0

    def fetched(self, where: Mapping[Value, int], device: int) -> int:
        """Bytes that come to a device, from the host and from others, when it does this and values are where they are."""
        return self.loaded + sum(n for v, n in self.reads.items() if where[v] != device)

    @property
    def planned(self) -> int:
        """Bytes that come to its own device where every value is where the plan has it."""
        return self.loaded + sum(n for v, n in self.reads.items() if v[0] != self.device)


def tasks_of(graph: Graph, program: Program) -> list[Task]:
    """Every task, in an order in which they can be done."""
    return [t for at in range(len(program.steps)) for t in _tasks(graph, program, at)]


def _tasks(graph: Graph, program: Program, at: int) -> Iterator[Task]:
    step, buffers = program.steps[at], program.buffers
    match step:
        case Load():
            for d in _devices(buffers[step.buffer].boxes):
                yield Task(step=at, device=d, reads={}, outs=((d, step.buffer),), loaded=buffers[step.buffer].nbytes(d))
        case Launch():
            for d in _devices(step.blocks):
                names = [n for n in (*step.ins, *step.states) if n]
                reads = {(d, n): buffers[n].nbytes(d) for n in names if buffers[n].boxes[d] is not None}
                yield Task(step=at, device=d, reads=reads, outs=_values(d, step.outs), flops=_flops(graph, program, step, d))
        case Transfer():
            for d in _devices(buffers[step.dst].boxes):
                yield Task(step=at, device=d, reads=_received(program, step, d), outs=((d, step.dst),))
        case Reduce():
            for group in step.groups:
                for d in group:
                    work = (len(group) - 1) * _merge(graph, step.op) * max(_cells(program, n, d) for n in step.dsts)
                    reads = _merged(program, step, group, d)
                    yield Task(step=at, device=d, reads=reads, outs=_values(d, step.dsts), flops=work)
        case Free():
            pass


def _devices(boxes: tuple[Box | None, ...]) -> Iterator[int]:
    return (d for d, box in enumerate(boxes) if box is not None)


def _values(device: int, names: tuple[str, ...]) -> tuple[Value, ...]:
    return tuple((device, n) for n in names)


def _received(program: Program, step: Transfer, device: int) -> dict[Value, int]:
    """What a device puts together: parts of others' buffers, and of its own."""
    src, dst = program.buffers[step.src], program.buffers[step.dst]
    out: dict[Value, int] = {}
    for m in step.messages:
        if m.dst == device:
            out[m.src, step.src] = out.get((m.src, step.src), 0) + size(m.box) * itemsize(src.dtype)
    held, box = src.boxes[device], dst.boxes[device]
    own = intersect(held, box) if held is not None and box is not None else None
    return out if own is None else {**out, (device, step.src): size(own) * itemsize(src.dtype)}


def _merged(program: Program, step: Reduce, group: tuple[int, ...], device: int) -> dict[Value, int]:
    """What a device merges: of every member's states the part that it ends with."""
    out: dict[Value, int] = {}
    for src, dst in zip(step.srcs, step.dsts, strict=True):
        if src in step.sent:
            nbytes = program.buffers[dst].nbytes(device)
            out |= {(e, src): nbytes for e in group}
    return out


def _cells(program: Program, name: str, device: int) -> int:
    box = program.buffers[name].boxes[device]
    return 0 if box is None else size(box)


def _merge(graph: Graph, at: int) -> int:
    """Primitives of one merge of two states of an operation."""
    op = graph.ops[at]
    assert not isinstance(op, Opaque)
    assert op.monoid is not None
    return max(1, count_calls(MONOIDS[op.monoid].combiner(tuple(e.dtype for e in op.body))))


def _flops(graph: Graph, program: Program, step: Launch, device: int) -> int:
    op, block = graph.ops[step.op], step.blocks[device]
    assert block is not None
    cells = sum(_cells(program, n, device) for n in step.outs)
    if isinstance(op, Opaque):
        return 10 * cells
    if step.mode == "finish":
        return size(block) * count_calls(op.then)
    computed = op if step.mode == "full" else replace(op, then=())
    boxes = np.array(block, np.int64).reshape(1, -1, 2)
    heavy, light = arithmetic(computed, boxes, boxes[:, : len(op.dims)])
    return int(heavy[0] + light[0]) + (_merge(graph, step.op) * cells if step.mode == "partial" and step.states else 0)
