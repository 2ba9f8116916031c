"""Pieces that travel between this process and others in one step, each from one device to another.

All is made once: where a piece is received (in place, where it lies there in one piece), where one that is a cut of a larger
array is packed, and the operations that torch.distributed is given. A piece that lies in one piece is sent from where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist

from tapestry.runtime.messages.message_buffers import MessageBuffers
from tapestry.runtime.processes.wire import HEADER_BYTES, Wire, flat_bytes

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array that one device has for another.

    Attributes:
        name: what it is, for both ends.
        peer: the other process.
        tag: of its message; those with one tag between two processes are taken in the order in which they are sent.
        packed: it is no one piece of memory where it comes from, or has none of its own where it goes.
        where: on the receiver's side, the part of an array of `MessageBuffers` that it is received into, unless it is packed.
        take: on the sender's side, the data.
    """

    name: str
    peer: int
    tag: int
    extents: tuple[int, ...]
    dtype: torch.dtype
    packed: bool
    where: Callable[[], Tensor] | None = None
    take: Callable[[], Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return prod(self.extents) * self.dtype.itemsize

    @property
    def described(self) -> str:
        """What both ends must mean."""
        return f"{self.name} {self.dtype}{list(self.extents)}"


@dataclass(slots=True)
class PointToPoint:
    """Messages of one step, or of a part of it, with other processes.

    Attributes:
        step: whose messages they are; they are sent at ``sent_at`` and waited for before ``use``.
        since: the step at which receives are posted; ``drained`` the one at which all sends have been taken.
        came: received pieces by name.
    """

    wire: Wire
    step: int
    sent_at: int
    use: int
    sends: list[Piece] = field(default_factory=list[Piece])
    receives: list[Piece] = field(default_factory=list[Piece])
    since: int = 0
    drained: int = 0
    came: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    given: list[tuple[Piece, Tensor | None, dist.P2POp]] = field(default_factory=list[tuple[Piece, Tensor | None, dist.P2POp]])
    taken: list[tuple[Piece, dist.P2POp]] = field(default_factory=list[tuple[Piece, dist.P2POp]])
    heads: list[Tensor] = field(default_factory=list[Tensor])
    coming: list[dist.Work] = field(default_factory=list[dist.Work])
    posted: bool = False

    @property
    def incoming(self) -> int:
        """Bytes that come."""
        return sum(p.nbytes for p in self.receives)

    def reserve(self, buffers: MessageBuffers) -> None:
        """Ask for the places of packed pieces."""
        for p in self.receives:
            if p.packed:
                buffers.reserve(f"{self.step} {p.name} in", self.since, self.use, p.nbytes)
        for p in self.sends:
            if p.packed:
                buffers.reserve(f"{self.step} {p.name} out", self.sent_at, self.drained, p.nbytes)

    def prepare(self, buffers: MessageBuffers) -> None:
        """Make everything that is posted."""
        for p in self.receives:
            into = buffers.view(f"{self.step} {p.name} in", p.dtype, p.extents) if p.where is None or p.packed else p.where()
            assert into.is_contiguous(), p.name
            self.came[p.name] = into
            if p.nbytes:
                self.taken.append((p, self.wire.receiving(flat_bytes(into), p.peer, p.tag)))
        for p in self.sends:
            stage = buffers.view(f"{self.step} {p.name} out", p.dtype, p.extents) if p.packed else None
            op = self.wire.sending(p.peer, p.tag)
            if stage is not None:
                op.tensor = flat_bytes(stage)
            if p.nbytes:
                self.given.append((p, stage, op))

    def post_receives(self) -> None:
        """Before the step, where that is of use."""
        if self.taken and not self.posted:
            self.coming, self.posted = self.wire.exchange(self.step, self._receives()), True

    def post(self) -> None:
        """Send; and receive, if that is not posted yet."""
        ops = [] if self.posted else self._receives()
        mine = len(ops)
        sent: list[Tensor] = []
        for piece, stage, op in self.given:
            assert piece.take is not None
            data = piece.take()
            if stage is None:
                op.tensor = flat_bytes(data)
            else:
                stage.copy_(data)
            if self.wire.checking:
                head = self.wire.header(self.step, piece.described, piece.nbytes).to(self.wire.device)
                ops.append(self._header_op(dist.isend, head, op))
                sent.append(head)
            ops.append(op)
            sent.append(op.tensor)
        if not ops:
            return
        works = self.wire.exchange(self.step, ops)
        if mine:
            self.coming, self.posted = works[:mine], True
        if sent:
            self.wire.payload += sum(p.nbytes for p, _, _ in self.given)
            self.wire.fly(works[mine:] or works[-1:], sent, self.step)
            for _, stage, op in self.given:  # what was sent from where it was is kept until it is taken, and no longer
                if stage is None:
                    op.tensor = self.wire.nothing

    def _receives(self) -> list[dist.P2POp]:
        if not self.wire.checking:
            return [op for _, op in self.taken]
        self.heads = [torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self.wire.device) for _ in self.taken]
        pairs = zip(self.heads, self.taken, strict=True)
        return [x for head, (_, op) in pairs for x in (self._header_op(dist.irecv, head, op), op)]

    @staticmethod
    def _header_op(op: object, head: Tensor, like: dist.P2POp) -> dist.P2POp:
        return dist.P2POp(op, head, like.peer, tag=like.tag)  # pyright: ignore[reportArgumentType]

    def wait(self) -> dict[str, Tensor]:
        """What came, by name."""
        each = 2 if self.wire.checking else 1
        for k, work in enumerate(self.coming):
            self.wire.wait(work, (self.taken[min(k // each, len(self.taken) - 1)][0].peer,), self.step)
        for head, (piece, _) in zip(self.heads, self.taken, strict=self.wire.checking):
            wanted = self.wire.header(self.step, piece.described, piece.nbytes)
            self.wire.check(head, wanted, piece.peer, self.step)
        self.coming, self.posted = [], False
        return self.came


def in_one_piece(part: Sequence[tuple[int, int]], of: Sequence[tuple[int, int]]) -> bool:
    """Whether a box lies in one piece in a row-major array of another: at most its first axis of more than one point is cut."""
    sizes = [hi - lo for lo, hi in part]
    first = next((a for a, n in enumerate(sizes) if n != 1), len(sizes))
    return all(n == hi - lo for n, (lo, hi) in zip(sizes[first + 1 :], of[first + 1 :], strict=True)) or 0 in sizes
