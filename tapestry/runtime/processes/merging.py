"""A reduction between processes: every device merges one part of the states, in the order of the group, and sends it back.

(n-1)·B bytes each way in all, as the plan counts, and the same bits as in one process. Two devices exchange whole states at
once, which is as many bytes and one latency less. States are sent when they are there; they are merged when somebody reads
the result, so that what is computed in between overlaps with their way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch

from tapestry.ir.kernel import Box, cut, shape
from tapestry.ir.program import Buffer, Reduce
from tapestry.runtime.arrays import torch_dtype
from tapestry.runtime.executor import Executor
from tapestry.runtime.step_messages import StepMessages
from tapestry.runtime.target_protocol import Array


@dataclass(slots=True)
class GroupMerge:
    """A reduction in one group of devices, as far as this process takes part."""

    executor: Executor
    step: Reduce
    group: tuple[int, ...]
    own: dict[int, list[Array]] = field(default_factory=dict[int, list[Array]])
    merged: dict[int, list[Array]] = field(default_factory=dict[int, list[Array]])

    @property
    def whole(self) -> bool:
        """Whether every device merges all that it ends with (else an equal part of it, for all)."""
        return self.step.kind != "all_reduce" or len(self.group) <= 2

    def buffers(self, names: Sequence[str]) -> list[Buffer]:
        """The buffers of all fields."""
        return [self.executor.program.buffers[b] for b in names]

    def counted(self, k: int) -> bool:
        """Whether a field is a count that is not sent."""
        return bool(self.step.known and self.step.known[k])

    def mine(self) -> Iterator[int]:
        """Devices of the group in this process."""
        return (d for d in self.group if d in self.executor.devices)

    def rows(self, device: int) -> tuple[int, int, int]:
        """(leading axes that all fields share, first row, end) of the part that a device merges of an all-reduce."""
        boxes = [self.executor.box(self.group[0], name) for name in self.step.dsts]
        common = 0
        while all(len(b) > common and b[common] == boxes[0][common] for b in boxes):
            common += 1
        return common, *cut(prod(shape(boxes[0][:common])), len(self.group), self.group.index(device))

    def part(self, array: Array, box: Box, device: int) -> Array:
        """The rows of an array of a box that a device merges."""
        common, first, end = self.rows(device)
        return array.reshape(prod(shape(box)[:common]), *shape(box)[common:])[first:end]

    def extents(self, k: int, device: int) -> tuple[int, ...]:
        """Shape of what a device merges of one field."""
        box = self.executor.box(device, self.step.dsts[k])
        if self.whole:
            return shape(box)
        common, first, end = self.rows(device)
        return (end - first, *shape(box)[common:])

    def taken(self, k: int, sender: int, receiver: int) -> Array:
        """What one device has of another's part of one field."""
        src, box = self.step.srcs[k], self.executor.box
        if self.whole:
            return self.executor.part(sender, src, box(receiver, self.step.dsts[k]))
        return self.part(self.executor.array(sender, src), box(sender, src), receiver)

    def give(self, messages: StepMessages) -> None:
        """Every device sends every other one the states of that one's part, and keeps those of its own."""
        for d in () if messages.dry else self.mine():
            self.own[d] = [None if self.counted(k) else self.taken(k, d, d) for k in range(len(self.step.srcs))]
        for receiver in self.group:
            for sender in self.group:
                for k, b in enumerate(self.buffers(self.step.srcs)):
                    if sender != receiver and not self.counted(k):
                        take = partial(self.taken, k, sender, receiver)
                        self._carry(messages, b, (sender, receiver), self.extents(k, receiver), take)

    def _carry(
        self, messages: StepMessages, b: Buffer, ends: tuple[int, int], extents: tuple[int, ...], take: partial[Array]
    ) -> None:
        messages.carry(f"{b.name}@{ends[0]}>{ends[1]}", ends, extents, torch_dtype(b.dtype), take)

    def merge(self, came: dict[str, Array]) -> None:
        """Merge the parts of this process's devices, in the order of the group."""
        for d in self.mine():
            states: list[list[Array]] = []
            for e in self.group:
                fields: list[Array] = []
                for k, name in enumerate(self.step.srcs):
                    if self.counted(k):
                        fields.append(self.executor.count(self.step, k, e, self.extents(k, d)))
                    else:
                        fields.append(self.own[d][k] if e == d else came[f"{name}@{e}>{d}"])
                states.append(fields)
            self.merged[d] = self.executor.target.merge(self.executor.monoid(self.step.op), states)
        self.own.clear()

    def give_back(self, messages: StepMessages) -> None:
        """All-reduce in parts: every device sends every other one what it merged."""
        for sender in () if self.whole else self.group:
            for receiver in self.group:
                for k, b in enumerate(self.buffers(self.step.dsts)):
                    if sender != receiver and not self.counted(k):
                        take = partial(self._merged, sender, k)
                        self._carry(messages, b, (sender, receiver), self.extents(k, sender), take)

    def _merged(self, device: int, k: int) -> Array:
        return self.merged[device][k]

    def finish(self, came: dict[str, Array]) -> None:
        """Put the merged states into their buffers."""
        for d in self.mine():
            for k, name in enumerate(self.step.dsts):
                there = self.executor.allocate(d, name)
                if self.whole:
                    there.copy_(self.merged[d][k])
                elif self.counted(k):
                    counts = [[self.executor.count(self.step, k, e, tuple(there.shape))] for e in self.group]
                    there.copy_(self.executor.target.merge("sum", counts)[0])
                else:
                    rows = [self.merged[e][k] if e == d else came[f"{name}@{e}>{d}"] for e in self.group]
                    there.copy_(torch.cat(rows).reshape(there.shape))
