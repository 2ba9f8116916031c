"""Transfers as a rank carries them out: by a collective of the backend where all messages together are one
(`ir.program`), else point to point. What a device holds of its own is copied at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
import torch.distributed as dist

from tapestry.ir.collective_calls import ALL_GATHER, ALL_TO_ALL, BROADCAST, Call
from tapestry.ir.kernel import Box, intersect, shape
from tapestry.ir.program import Message, Transfer
from tapestry.runtime import arrays
from tapestry.runtime.executor import copy, ends, present
from tapestry.runtime.messages.message_buffers import MessageBuffers
from tapestry.runtime.messages.point_to_point import Piece, PointToPoint, in_one_piece
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.runtime.processes.process_groups import Team
from tapestry.runtime.processes.wire import Start, Wire, flat_bytes
from tapestry.runtime.target_protocol import Array

Tensor = torch.Tensor


class RankDevices(LocalExecutor):
    """The devices of one rank, as what it moves uses them.

    Attributes:
        placed: where what comes is put, by device and buffer: the same place in every batch.
        one_device_each: whether every rank has one.
    """

    wire: Wire
    placed: dict[tuple[int, str], Array]
    one_device_each: bool

    @abstractmethod
    def dies_at(self, at: int, name: str) -> bool:
        """Whether a buffer is a kernel's, and a step is the last to read it."""

    @abstractmethod
    def team(self, call: Call) -> Team | None:
        """Those with whom this rank makes a call; ``None`` where it takes no part."""

    @abstractmethod
    def tag(self, at: int, part: int, src: int, dst: int) -> int:
        """The tag of a message between two devices in one part of a step."""


@dataclass(slots=True)
class Move(ABC):
    """A transfer or a reduction, as far as this process takes part.

    Attributes:
        at: its step.
        use: the step before which it is finished: the first that names what it fills.
        parts: its messages with other processes.
        into: what it fills: (device of this process, buffer, place).
        sent: bytes that devices of this process send to others.
        began: when it was started, in nanoseconds since 1970.
    """

    rank: RankDevices
    at: int
    use: int
    parts: list[PointToPoint] = field(default_factory=list[PointToPoint])
    into: list[tuple[int, str, Tensor]] = field(default_factory=list[tuple[int, str, Tensor]])
    sent: int = 0
    began: int = 0

    @property
    def device(self) -> int:
        """The device of a process that has one alone: both have the same number."""
        return self.rank.wire.rank

    @property
    def collective(self) -> bool:
        """Whether it needs a process group of its own."""
        return False

    @property
    @abstractmethod
    def fills(self) -> tuple[str, ...]:
        """Buffers whose places are `MessageBuffers`'."""

    @property
    def since(self) -> int:
        """The step from which what it fills has its place."""
        return min([self.at, *(p.since for p in self.parts)])

    @property
    def until(self) -> int:
        """The step before which what it reads must stay where it is: it may be sent from there."""
        return max([self.use, *(p.drained for p in self.parts)])

    def reserve(self, buffers: MessageBuffers) -> None:
        """Ask for memory, once it is known when receives are posted."""
        for p in self.parts:
            p.reserve(buffers)

    def prepare(self, buffers: MessageBuffers) -> None:
        """Make all that is the same in every batch."""
        for p in self.parts:
            p.prepare(buffers)

    def hold(self) -> None:
        """What is filled is there."""
        held = self.rank.held.arrays
        for d, name, there in self.into:
            held[d][name] = there

    @abstractmethod
    def start(self) -> None:
        """At its step: send, and fill what needs nobody else."""

    @abstractmethod
    def finish(self) -> bool:
        """Where it is first used: wait, and put in place what came; whether anything did."""


def transfer(rank: RankDevices, at: int, step: Transfer, use: int, call: Call) -> Move:
    """A transfer by the call that carries it."""
    whole = rank.one_device_each and call.name in (ALL_GATHER, ALL_TO_ALL, BROADCAST)
    return (TransferByCall if whole else TransferByMessages)(rank, at, use, step=step, call=call)


@dataclass(slots=True, kw_only=True)
class _Transfer(Move):
    step: Transfer
    call: Call
    copies: list[tuple[int, Box, int]] = field(default_factory=list[tuple[int, Box, int]])
    unpack: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])

    @property
    def fills(self) -> tuple[str, ...]:
        """The one."""
        return (self.step.dst,)

    def __post_init__(self) -> None:
        src, dst = (self.rank.buffers[b] for b in (self.step.src, self.step.dst))
        for d, box in self.rank.mine(dst.boxes):
            held = src.boxes[d]
            common = None if held is None else intersect(held, box)
            if common is not None:
                self.copies.append((d, common, d))
        self.describe()

    @abstractmethod
    def describe(self) -> None:
        """Find out what is sent and received."""

    @property
    def dtype(self) -> torch.dtype:
        return arrays.torch_dtype(self.rank.buffers[self.step.dst].dtype)

    def there(self, device: int, box: Box) -> Tensor:
        """A part of what is filled."""
        return arrays.part(self.rank.placed[device, self.step.dst], box, self.rank.box(device, self.step.dst))

    def copy_own(self) -> None:
        """Copy what devices of this process have for themselves and for each other."""
        self.hold()
        for source, box, d in self.copies:
            copy(self.rank.part(source, self.step.src, box), self.there(d, box))


@dataclass(slots=True, kw_only=True)
class TransferByMessages(_Transfer):
    """Point to point: halos, permutations, uneven pieces; and everything where a process has several devices.

    Attributes:
        ordered: whether places are in the memory order of what is copied into them.
    """

    ordered: bool = False

    def describe(self) -> None:
        """The messages that concern this process, in the order of the step."""
        rank, (sent, received) = self.rank, ends(self.step.messages)
        out = PointToPoint(rank.wire, self.at, self.at, self.use)
        for n in sorted({n for d in rank.devices for n in (*sent.get(d, ()), *received.get(d, ()))}):
            m = self.step.messages[n]
            here, there = (rank.route.owner[d] == rank.wire.rank for d in (m.src, m.dst))
            if here:
                self.sent += prod(shape(m.box)) * self.dtype.itemsize
            if here and there:
                self.copies.append((m.src, m.box, m.dst))
            elif here:
                out.sends.append(self._piece(m, m.dst, rank.box(m.src, self.step.src), sends=True))
            else:
                out.receives.append(self._piece(m, m.src, rank.box(m.dst, self.step.dst), sends=False))
        self.parts = [out]

    def _piece(self, m: Message, other: int, inside: Box, sends: bool) -> Piece:
        rank = self.rank
        return Piece(
            name=f"{self.step.dst}@{m.dst} {m.box}",
            peer=rank.route.owner[other],
            tag=rank.tag(self.at, 0, m.src, m.dst),
            extents=shape(m.box),
            dtype=self.dtype,
            packed=not in_one_piece(m.box, inside),
            where=None if sends else partial(self.there, m.dst, m.box),
            take=partial(rank.part, m.src, self.step.src, m.box) if sends else None,
        )

    def start(self) -> None:
        """Send, and copy what is here meanwhile."""
        if not self.ordered:
            self._order()
        self.parts[0].post()
        self.copy_own()

    def finish(self) -> bool:
        """Unpack what could not be received in place."""
        self.parts[0].wait()
        for came, there in self.unpack:
            copy(came, there)
        return bool(self.parts[0].receives)

    def prepare(self, buffers: MessageBuffers) -> None:
        """Views of what is unpacked."""
        Move.prepare(self, buffers)
        self._unpacked()

    def _unpacked(self) -> None:
        came = self.parts[0].came
        self.unpack = [(came[p.name], p.where()) for p in self.parts[0].receives if p.packed and p.where is not None]

    def _order(self) -> None:
        """Images that a kernel left with their channels last get places of that order: else each copy would transpose. A
        piece that is received in place is in row-major order, whatever the kernel does here."""
        self.ordered = True
        if not all(p.packed for p in self.parts[0].receives):
            return
        for source, box, d in self.copies:
            own, place = self.rank.part(source, self.step.src, box), self.rank.placed[d, self.step.dst]
            if own.dim() == 4 and own.stride(1) == 1 < own.stride(3) and place.is_contiguous():
                n, c, h, w = place.shape
                self.rank.placed[d, self.step.dst] = place.view(-1).view(n, h, w, c).permute(0, 3, 1, 2)
        self.into = [(d, name, self.rank.placed[d, name]) for d, name, _ in self.into]
        self._unpacked()


@dataclass(slots=True, kw_only=True)
class TransferByCall(_Transfer):
    """One call of the backend in every group."""

    team: Team | None = None
    works: list[dist.Work] = field(default_factory=list[dist.Work])
    packs: list[tuple[Tensor, Box]] = field(default_factory=list[tuple[Tensor, Box]])
    begin: Start | None = None

    @property
    def collective(self) -> bool:
        """It does."""
        return True

    @property
    def group(self) -> tuple[int, ...]:
        """The group of this process."""
        return next((g for g in self.call.groups if self.device in g), ())

    def describe(self) -> None:
        """Who takes part, and what counts as sent."""
        mine = (m for m in self.step.messages if m.src == self.device)
        self.sent = sum(prod(shape(m.box)) for m in mine) * self.dtype.itemsize

    @property
    def _in_place(self) -> bool:
        """Whether blocks one after another are what a gather is to make."""
        program, box = self.rank.program, self.rank.box(self.device, self.step.dst)
        blocks = [present(program.buffers[self.step.src].boxes[d]) for d in sorted(self.group)]
        firsts = [[lo for lo, _ in b] for b in blocks]
        return all(in_one_piece(b, box) for b in blocks) and firsts == sorted(firsts)

    def reserve(self, buffers: MessageBuffers) -> None:
        """Pieces for each of the group, where they are not put in place by the call itself."""
        if not self.group or self.call.name == BROADCAST:
            if self.group[:1] == (self.device,):
                buffers.reserve(f"{self.at} given", self.at, self.use, self.call.nbytes)
            return
        if self.call.name == ALL_TO_ALL:
            buffers.reserve(f"{self.at} given", self.at, self.use, self.call.nbytes)
        if self.call.name == ALL_TO_ALL or not self._in_place:
            buffers.reserve(f"{self.at} out", self.at, self.use, self.call.nbytes)

    def prepare(self, buffers: MessageBuffers) -> None:
        """The team, and views of all pieces."""
        if not self.group:
            return
        wire, team, d = self.rank.wire, self.rank.team(self.call), self.device
        assert team is not None
        self.team = team
        if self.call.name == BROADCAST:
            root = self.group[0]
            if d == root:
                tensor = self._pieces(buffers, "given", [(0, m) for m in self.step.messages if m.src == root][:1])
            else:
                tensor = flat_bytes(self.rank.placed[d, self.step.dst])
            self.begin = wire.broadcast(team, self.at, tensor, root)
        elif self.call.name == ALL_GATHER and self._in_place:
            self.begin = wire.all_gather(team, self.at, flat_bytes(self.rank.placed[d, self.step.dst]))
        else:
            place = {e: k for k, e in enumerate(team.ranks)}
            out = self._pieces(buffers, "out", [(place[m.src], m) for m in self.step.messages if m.dst == d])
            if self.call.name == ALL_GATHER:
                self.begin = wire.all_gather(team, self.at, out)
                return
            given = self._pieces(buffers, "given", [(place[m.dst], m) for m in self.step.messages if m.src == d])
            self.begin = wire.all_to_all(team, self.at, out, given)

    def _pieces(self, buffers: MessageBuffers, what: str, messages: list[tuple[int, Message]]) -> Tensor:
        """A buffer of equal pieces, some of which hold messages."""
        flat = buffers.view(f"{self.at} {what}", torch.uint8, (self.call.nbytes,))
        parts = flat.view(1 if self.call.name == BROADCAST else len(self.group), -1)
        for k, m in messages:
            piece = parts[k].view(self.dtype).view(shape(m.box))
            if what == "given":
                self.packs.append((piece, m.box))
            else:
                self.unpack.append((piece, self.there(self.device, m.box)))
        return flat

    def start(self) -> None:
        """Pack and call."""
        self.copy_own()
        if self.begin is None:
            return
        self.rank.wire.payload += self.sent
        for there, box in self.packs:
            there.copy_(self.rank.part(self.device, self.step.src, box))
        whole = (flat_bytes(self.rank.array(self.device, self.step.src)),) if self.call.name == ALL_GATHER else ()
        self.works.append(self.begin(*whole))

    def finish(self) -> bool:
        """Put pieces in place."""
        others = () if self.team is None else self.team.others(self.device)
        for work in self.works:
            self.rank.wire.wait(work, others, self.at)
        self.works.clear()
        for came, there in self.unpack:
            copy(came, there)
        return bool(others)
