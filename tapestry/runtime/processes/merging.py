"""A reduction between processes: every device merges one part of the states, in the order of the group, and sends it back.

(n-1)·B bytes each way in all, as the plan counts, and the same bits as in one process. Two devices exchange whole states at
once, which is as many bytes and one latency less. States are sent when they are there; they are merged when somebody reads
the result, so that what is computed in between overlaps with their way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch

from tapestry.ir.kernel import Box, cut, shape
from tapestry.ir.program import Buffer, Reduce
from tapestry.runtime.processes.step_messages import Array, Memory, Parcels, part, present

if TYPE_CHECKING:
    from tapestry.runtime.processes.distributed import RankMachine


@dataclass(slots=True)
class Share:
    """A reduction in one group, as far as this process takes part."""

    machine: RankMachine
    step: Reduce
    group: tuple[int, ...]
    own: dict[int, list[Array]] = field(default_factory=dict)
    merged: dict[int, list[Array]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether every device merges all that it ends with (else an equal part of it, for all)."""
        return self.step.kind != "all_reduce" or len(self.group) <= 2

    def buffers(self, names: Sequence[str]) -> list[Buffer]:
        """The buffers of all fields."""
        return [self.machine.program.buffers[b] for b in names]

    def known(self, k: int) -> bool:
        """Whether a field is a count that is not sent."""
        return bool(self.step.known and self.step.known[k])

    def mine(self) -> Iterator[int]:
        """Devices of the group in this process."""
        return (d for d in self.group if self.machine.owner[d] == self.machine.wire.rank)

    def rows(self, device: int) -> tuple[int, int, int]:
        """(leading axes that all fields share, first row, end) of the part that a device merges of an all-reduce."""
        boxes = [present(b.boxes[self.group[0]]) for b in self.buffers(self.step.dsts)]
        common = 0
        while all(len(b) > common and b[common] == boxes[0][common] for b in boxes):
            common += 1
        return common, *cut(prod(shape(boxes[0][:common])), len(self.group), self.group.index(device))

    def part(self, array: Array, box: Box, device: int) -> Array:
        """The rows of an array of a box that a device merges."""
        common, first, end = self.rows(device)
        rest = shape(box)[common:]
        return array.reshape(prod(shape(box)[:common]), *rest)[first:end]

    def extents(self, k: int, device: int) -> tuple[int, ...]:
        """Shape of what a device merges of one field."""
        box = present(self.buffers(self.step.dsts)[k].boxes[device])
        if self.whole:
            return shape(box)
        common, first, end = self.rows(device)
        return (end - first, *shape(box)[common:])

    def taken(self, k: int, sender: int, receiver: int, memory: Memory) -> Array:
        """What one device has of another's part of one field."""
        src, dst = self.buffers(self.step.srcs)[k], self.buffers(self.step.dsts)[k]
        held = memory[sender][src.name]
        if self.whole:
            return part(held, present(dst.boxes[receiver]), src.boxes[sender])
        return self.part(held, present(src.boxes[sender]), receiver)

    def give(self, parcels: Parcels, memory: Memory) -> None:
        """Every device sends every other one the states of that one's part, and keeps those of its own."""
        for d in () if parcels.dry else self.mine():
            kept = (None if self.known(k) else self.taken(k, d, d, memory) for k in range(len(self.step.srcs)))
            self.own[d] = list(kept)
        for receiver in self.group:
            for sender in self.group:
                for k, name in enumerate(self.step.srcs):
                    if sender != receiver and not self.known(k):
                        piece = (f"{name}@{sender}>{receiver}", sender, receiver, self.extents(k, receiver))
                        take = lambda k=k, s=sender, r=receiver: self.taken(k, s, r, memory)  # noqa: E731
                        parcels.carry(*piece, self.machine.dtypes[name], take)

    def merge(self, came: dict[str, torch.Tensor]) -> None:
        """Merge the parts of this process's devices, in the order of the group."""
        monoid = getattr(self.machine.graph.ops[self.step.op], "monoid", None)
        assert monoid is not None
        for d in self.mine():
            states: list[list[Array]] = []
            for e in self.group:
                fields: list[Array] = []
                for k, b in enumerate(self.buffers(self.step.srcs)):
                    if self.known(k):
                        fields.append(self.count(k, self.extents(k, d), e))
                    else:
                        fields.append(self.own[d][k] if e == d else came[f"{b.name}@{e}>{d}"])
                states.append(fields)
            self.merged[d] = self.machine.target.merge(monoid, states)
        self.own.clear()

    def count(self, k: int, extents: tuple[int, ...], device: int) -> Array:
        """A field that is known, over an array."""
        dtype = self.machine.program.buffers[self.step.srcs[k]].dtype
        return self.machine.target.full(tuple((0, n) for n in extents), dtype, self.step.known[k][device])

    def give_back(self, parcels: Parcels) -> None:
        """All-reduce in parts: every device sends every other one what it merged."""
        for sender in () if self.whole else self.group:
            for receiver in self.group:
                for k, name in enumerate(self.step.dsts):
                    if sender != receiver and not self.known(k):
                        piece = (f"{name}@{sender}>{receiver}", sender, receiver, self.extents(k, sender))
                        parcels.carry(*piece, self.machine.dtypes[name], lambda k=k, s=sender: self.merged[s][k])

    def finish(self, came: dict[str, torch.Tensor], memory: Memory) -> None:
        """Put the merged states into their buffers."""
        for d in self.mine():
            for k, b in enumerate(self.buffers(self.step.dsts)):
                box = present(b.boxes[d])
                if self.whole:
                    memory[d][b.name] = self.machine.target.slice(self.merged[d][k], box, box)
                elif self.known(k):
                    counts = [[self.count(k, shape(box), e)] for e in self.group]
                    memory[d][b.name] = self.machine.target.merge("sum", counts)[0].contiguous()
                else:
                    rows = [self.merged[e][k] if e == d else came[f"{b.name}@{e}>{d}"] for e in self.group]
                    memory[d][b.name] = torch.cat(rows).reshape(shape(box))
