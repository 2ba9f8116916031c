"""Reductions as a rank carries them out: by the backend's own, where that merges as the monoid does
(`ir.collective_calls.reduce_op`), else by the monoid, point to point.

By the monoid every device merges one part of the states, in the order of the group, and sends it back: (n-1)·B bytes each way
in all, as the plan counts, and the same bits as in one process. Two devices exchange whole states at once, which is as many
bytes and one latency less. States are sent when they are there; they are merged when somebody reads the result, so that what is
computed in between overlaps with their way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
import torch.distributed as dist

from tapestry.ir.collective_calls import ALL_REDUCE, REDUCE_SCATTER, Call
from tapestry.ir.kernel import Box, cut, shape
from tapestry.ir.program import Reduce
from tapestry.runtime import arrays
from tapestry.runtime.messages.message_buffers import MessageBuffers
from tapestry.runtime.messages.moves import Move, RankDevices
from tapestry.runtime.messages.point_to_point import Piece, PointToPoint, in_one_piece
from tapestry.runtime.processes.heartbeat import COMPUTE
from tapestry.runtime.processes.process_groups import Team
from tapestry.runtime.processes.wire import Start
from tapestry.runtime.target_protocol import Array

Tensor = torch.Tensor


@dataclass(slots=True, kw_only=True)
class _Merge(Move):
    step: Reduce
    call: Call
    counts: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])

    @property
    def fills(self) -> tuple[str, ...]:
        """The merged states."""
        return self.step.dsts

    def fields(self) -> list[int]:
        """The fields that are sent."""
        return [k for k in range(len(self.step.srcs)) if not self.counted(k)]

    def counted(self, k: int) -> bool:
        """Whether a field is a count that is not sent."""
        return bool(self.step.known and self.step.known[k])

    def dtype(self, k: int) -> torch.dtype:
        """The dtype in which one field travels."""
        return arrays.torch_dtype(self.step.sent_as or self.rank.buffers[self.step.srcs[k]].dtype)

    def count(self, k: int, device: int, group: tuple[int, ...]) -> None:
        """Note how a field that counts is filled: with one number."""
        states = [[self.rank.count(self.step, k, e, (1,))] for e in group]
        value = self.rank.target.merge("sum", states)[0]
        there = self.rank.placed[device, self.step.dsts[k]]
        self.counts.append((value.reshape((1,) * there.dim()), there))

    def fill_counts(self) -> None:
        """Fill the fields that count."""
        for value, there in self.counts:
            there.copy_(value.expand(there.shape))


@dataclass(slots=True, kw_only=True)
class MergeByCall(_Merge):
    """The backend's reduction, one call per field; of a process with one device."""

    team: Team | None = None
    others: tuple[int, ...] = ()
    works: list[dist.Work] = field(default_factory=list[dist.Work])
    calls: list[Start] = field(default_factory=list[Start])
    packed: list[tuple[Tensor, str, Box]] = field(default_factory=list[tuple[Tensor, str, Box]])
    narrow: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])

    @property
    def collective(self) -> bool:
        """It does."""
        return True

    @property
    def group(self) -> tuple[int, ...]:
        """The group of this process, as the backend orders it."""
        return tuple(sorted(next((g for g in self.call.groups if self.device in g), ())))

    def reserve(self, buffers: MessageBuffers) -> None:
        """Parts for each of the group, of a reduce-scatter, and results that come in a dtype of their own."""
        for k in self.fields() if self.group else ():
            part = int(self.step.nbytes(self.rank.buffers[self.step.dsts[k]])[self.device])
            if self.call.name == REDUCE_SCATTER:
                buffers.reserve(f"{self.at} parts {k}", self.at, self.use, len(self.group) * part)
            if self.step.sent_as:
                buffers.reserve(f"{self.at} narrow {k}", self.at, self.use, part)

    def prepare(self, buffers: MessageBuffers) -> None:
        """The team, and what every call is given."""
        if not self.group:
            return
        self.team = self.rank.team(self.call)
        assert self.team is not None
        self.others = self.team.others(self.device)
        d, n = self.device, len(self.group)
        place = self.group.index(d)
        for k in range(len(self.step.srcs)):
            if self.counted(k):
                self.count(k, d, self.group)
                continue
            phases = 2 if self.call.name == ALL_REDUCE else 1  # rings: (n-1)/n of what goes in, in each
            held = int(self.step.nbytes(self.rank.buffers[self.step.srcs[k]])[d])
            first, end = cut(phases * (n - 1) * held, n, place)
            self.sent += end - first
            if end > first:
                self.make(k, self.team, buffers)

    def make(self, k: int, team: Team, buffers: MessageBuffers) -> None:
        """The call of one field, and the copies before it."""
        d, src, dst = self.device, self.step.srcs[k], self.step.dsts[k]
        there = self.rank.placed[d, dst]
        if self.step.sent_as:
            wide, there = there, buffers.view(f"{self.at} narrow {k}", self.dtype(k), tuple(there.shape))
            self.narrow.append((wide, there))
        if self.call.name == ALL_REDUCE:
            self.packed.append((there, src, self.rank.box(d, dst)))
            self.calls.append(partial(self.rank.wire.all_reduce(team, self.at, self.call.op), _as_numbers(there)))
            return
        given = buffers.view(f"{self.at} parts {k}", self.dtype(k), (len(self.group), *there.shape))
        self.packed += [(given[i], src, self.rank.box(e, dst)) for i, e in enumerate(self.group)]
        self.calls.append(self.rank.wire.reduce_scatter(team, self.at, _as_numbers(there), _as_numbers(given), self.call.op))

    def start(self) -> None:
        """Copy the states, which are left as they are, and call."""
        self.hold()
        if self.team is None:
            return
        wire = self.rank.wire
        for there, name, box in self.packed:
            there.copy_(self.rank.part(wire.rank, name, box))
        for begin in self.calls:
            self.works.append(begin())
        wire.payload += self.sent

    def finish(self) -> bool:
        """Wait."""
        while self.works:
            self.rank.wire.wait(self.works.pop(0), self.others, self.at)
        for wide, came in self.narrow:
            wide.copy_(came)
        if self.counts:
            self.fill_counts()
        return bool(self.others)


@dataclass(slots=True, kw_only=True)
class MergeInPlace(MergeByCall):
    """An all-reduce in the arrays that a kernel has left, which nothing else reads: nothing is copied."""

    states: list[tuple[str, str, Start]] = field(default_factory=list[tuple[str, str, Start]])

    @property
    def fills(self) -> tuple[str, ...]:
        """Counts alone."""
        return tuple(name for k, name in enumerate(self.step.dsts) if self.counted(k))

    def make(self, k: int, team: Team, buffers: MessageBuffers) -> None:
        """The call of one field."""
        del buffers
        begin = self.rank.wire.all_reduce(team, self.at, self.call.op)
        self.states.append((self.step.srcs[k], self.step.dsts[k], begin))

    def start(self) -> None:
        """Call; from now on the array is the merged one."""
        wire = self.rank.wire
        held = self.rank.held.arrays[wire.rank]
        for src, dst, begin in self.states:
            states = held[src]
            if not states.is_contiguous():
                states = states.contiguous()
            held[dst] = states
            self.works.append(begin(_as_numbers(states)))
        if self.into:
            self.hold()
        wire.payload += self.sent


def _as_numbers(array: Tensor) -> Tensor:
    """Booleans as bytes: a backend merges numbers alone."""
    return array.view(torch.uint8) if array.dtype == torch.bool else array


@dataclass(slots=True, kw_only=True)
class MergeByMessages(_Merge):
    """By the monoid, in the order of the group."""

    own: dict[tuple[int, int], list[Array]] = field(default_factory=dict[tuple[int, int], list[Array]])
    merged: dict[int, list[Array]] = field(default_factory=dict[int, list[Array]])
    known: dict[tuple[int, int, int], Array] = field(default_factory=dict[tuple[int, int, int], Array])

    def __post_init__(self) -> None:
        there = PointToPoint(self.rank.wire, self.at, self.at, self.use)
        back = PointToPoint(self.rank.wire, self.at, self.use, self.use)
        for group in self.step.groups:
            mine = tuple(self.mine(group))
            for receiver in group:
                for sender in group if receiver in mine else mine:
                    for k in () if sender == receiver else self.fields():
                        self._describe(there, group, k, sender, receiver, back=False)
                        if not self.whole(group):
                            self._describe(back, group, k, sender, receiver, back=True)
        self.parts = [there, back]

    def places(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Groups, and the own devices of each."""
        return ((g, d) for g in self.step.groups for d in self.mine(g))

    def mine(self, group: tuple[int, ...]) -> Iterator[int]:
        """Devices of a group in this process."""
        return (d for d in group if d in self.rank.devices)

    def whole(self, group: tuple[int, ...]) -> bool:
        """Whether every device merges all that it ends with (else an equal part of it, for all)."""
        return self.step.kind != "all_reduce" or len(group) <= 2

    def rows(self, group: tuple[int, ...], device: int) -> tuple[int, int, int]:
        """(leading axes that all fields share, first row, end) of the part that a device merges of an all-reduce."""
        boxes = [self.rank.box(group[0], name) for name in self.step.dsts]
        common = 0
        while all(len(b) > common and b[common] == boxes[0][common] for b in boxes):
            common += 1
        return common, *cut(prod(shape(boxes[0][:common])), len(group), group.index(device))

    def part(self, group: tuple[int, ...], array: Array, box: Box, device: int) -> Array:
        """The rows of an array of a box that a device merges."""
        common, first, end = self.rows(group, device)
        return array.reshape(prod(shape(box)[:common]), *shape(box)[common:])[first:end]

    def extents(self, group: tuple[int, ...], k: int, device: int) -> tuple[int, ...]:
        """Shape of what a device merges of one field."""
        box = self.rank.box(device, self.step.dsts[k])
        if self.whole(group):
            return shape(box)
        common, first, end = self.rows(group, device)
        return (end - first, *shape(box)[common:])

    def taken(self, group: tuple[int, ...], k: int, sender: int, receiver: int) -> Array:
        """What one device has of another's part of one field."""
        src, box = self.step.srcs[k], self.rank.box
        if self.whole(group):
            found = self.rank.part(sender, src, box(receiver, self.step.dsts[k]))
        else:
            found = self.part(group, self.rank.array(sender, src), box(sender, src), receiver)
        return found.to(self.dtype(k)) if self.step.sent_as else found

    def _describe(self, out: PointToPoint, group: tuple[int, ...], k: int, sender: int, receiver: int, *, back: bool) -> None:
        """One message of states on their way to who merges them, or of merged ones on their way back."""
        owner, mine = self.rank.route.owner, self.rank.wire.rank
        extents = self.extents(group, k, sender if back else receiver)
        if owner[sender] == mine:
            self.sent += prod(extents) * self.dtype(k).itemsize
        if (owner[sender] == mine) == (owner[receiver] == mine):
            return
        where = take = None
        if owner[sender] == mine:
            take = partial(self._merged, sender, k) if back else partial(self.taken, group, k, sender, receiver)
        elif back and not self.step.sent_as:
            where = partial(self._rows, group, k, receiver, sender)
        src, dst = (self.rank.box(d, n) for d, n in ((sender, self.step.srcs[k]), (receiver, self.step.dsts[k])))
        packed = not back and (owner[receiver] == mine or (self.whole(group) and not in_one_piece(dst, src)))
        packed = packed or bool(self.step.sent_as)  # in a dtype of its own
        piece = Piece(
            name=f"{self.step.srcs[k]}@{sender}>{receiver}{' back' if back else ''}",
            peer=owner[sender] if owner[receiver] == mine else owner[receiver],
            tag=self.rank.tag(self.at, int(back), sender, receiver),
            extents=extents,
            dtype=self.dtype(k),
            where=where,
            take=take,
            packed=packed,
        )
        (out.sends if owner[sender] == mine else out.receives).append(piece)

    def _merged(self, device: int, k: int) -> Array:
        return self.merged[device][k]

    def _rows(self, group: tuple[int, ...], k: int, device: int, other: int) -> Tensor:
        """Where a device has what another one merges."""
        name = self.step.dsts[k]
        return self.part(group, self.rank.placed[device, name], self.rank.box(device, name), other)

    def prepare(self, buffers: MessageBuffers) -> None:
        """Messages, and the counts that all know."""
        Move.prepare(self, buffers)
        for g, d in self.places():
            for k in range(len(self.step.srcs)):
                if not self.counted(k):
                    continue
                if not self.whole(g):
                    self.count(k, d, g)
                for e in g:
                    self.known[k, e, d] = self.rank.count(self.step, k, e, self.extents(g, k, d))

    def start(self) -> None:
        """Send; states that stay in this process are held on to."""
        self.hold()
        fields = range(len(self.step.srcs))
        for g, d in self.places():
            for e in self.mine(g):
                self.own[e, d] = [None if self.counted(k) else self.taken(g, k, e, d) for k in fields]
        self.parts[0].post()

    def finish(self) -> bool:
        """Merge, in the order of the group; send and wait for merged parts."""
        there, back = self.parts
        came = there.wait()
        self.rank.wire.heartbeat.at(self.use, COMPUTE)
        for g, d in self.places():
            states = [[self._state(k, e, d, came) for k in range(len(self.step.srcs))] for e in g]
            self.merged[d] = self._merge(states)
        back.post()
        for g, d in self.places():
            self._put(g, d)
        arrived = back.wait()
        for g, d in self.places() if self.step.sent_as else ():
            for k in self.fields():
                names = {e: f"{self.step.srcs[k]}@{e}>{d} back" for e in g}
                for e in (e for e in g if names[e] in arrived):
                    self._rows(g, k, d, e).copy_(arrived[names[e]])
        self.fill_counts()
        self.own.clear()
        self.merged.clear()
        return bool(there.receives)

    def _merge(self, states: list[list[Array]]) -> list[Array]:
        """Merged states, in the dtypes in which they travel; sums are of wide numbers."""
        wide = [arrays.torch_dtype(self.rank.buffers[n].dtype) for n in self.step.srcs]
        if self.step.sent_as:
            states = [[a.to(w) for a, w in zip(s, wide, strict=True)] for s in states]
        merged = self.rank.target.merge(self.rank.monoid(self.step.op), states)
        return [a.to(self.dtype(k)) for k, a in enumerate(merged)] if self.step.sent_as else merged

    def _state(self, k: int, sender: int, receiver: int, came: dict[str, Tensor]) -> Array:
        """One field of what one device gives to the part that another one merges."""
        if self.counted(k):
            return self.known[k, sender, receiver]
        if (sender, receiver) in self.own:
            return self.own[sender, receiver][k]
        return came[f"{self.step.srcs[k]}@{sender}>{receiver}"]

    def _put(self, group: tuple[int, ...], device: int) -> None:
        """Merged states of devices of this process into a device's buffers; others are received there."""
        for k, name in enumerate(self.step.dsts):
            if self.whole(group):
                self.rank.placed[device, name].copy_(self.merged[device][k])
            elif not self.counted(k):
                for e in self.mine(group):
                    self._rows(group, k, device, e).copy_(self.merged[e][k])


def merge(rank: RankDevices, at: int, step: Reduce, use: int, call: Call) -> Move:
    """A reduction by the call that carries its first phase."""
    if rank.one_device_each and call.name in (ALL_REDUCE, REDUCE_SCATTER) and len(call.groups[0]) > 1:
        names = step.sent
        boxes = [[rank.buffers[b].boxes for b in side] for side in (step.srcs, step.dsts)]
        whole = call.name == ALL_REDUCE and not step.sent_as and boxes[0] == boxes[1]
        alone = whole and all(rank.dies_at(at, b) for b in names)
        return (MergeInPlace if alone else MergeByCall)(rank, at, use, step=step, call=call)
    return MergeByMessages(rank, at, use, step=step, call=call)
