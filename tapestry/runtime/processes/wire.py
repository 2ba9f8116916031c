"""Messages between the processes of a run: torch.distributed carries them, each with a header of its own.

gloo accepts a message of another dtype or size without an error. So what one process has for another in one step travels as
one packed message of bytes that says which plan, batch, step and exact pieces it holds, and nothing is unpacked before that
is what the receiver expects. Sends and receives are point to point (`batch_isend_irecv`): on gloo that is faster than its
collectives, on NCCL it is what all-to-all is made of, and merging stays with the plan's monoids, in the plan's order, NaNs
included.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from tapestry.errors import TapestryError
from tapestry.runtime.processes.heartbeat import COMPUTE, WAIT, Heartbeat
from tapestry.runtime.step_messages import Piece

MAGIC, VERSION, HEADER_BYTES, ALIGNMENT = b"TAPESTRY", 2, 64, 8
HEADER = struct.Struct("<8sII16sIIIQQ")  # magic, version, sender, plan, batch, step, what is in it, bytes of it, when it left
IN_FLIGHT = 16 << 20  # bytes of sent messages that may wait to be taken, and of receives posted ahead

Tag = tuple[int, int]
"""(step, part of it)."""
Expected = Mapping[int, Sequence[Piece]]
"""The pieces that come from each rank."""


class PeerLost(Exception):
    """Another process did not deliver: it ended, or nothing came in time. It is a consequence, hardly ever the cause."""

    def __init__(self, peers: Sequence[int], step: int, why: str) -> None:
        super().__init__(f"nothing came from rank {', '.join(map(str, peers))}: {why}")
        self.peers, self.step = tuple(peers), step


class Mismatch(TapestryError):
    """A message is not what the plan says."""


@dataclass(slots=True)
class Wire:
    """One process's end. ``plan`` is 16 bytes of the build's hash; ``payload`` counts bytes of tensors handed to the
    network for the program's steps, ``gathered`` those that brought outputs to rank 0; ``staged`` is the most that messages on
    their way, in and out, have taken at once; ``left`` is when the last message that was taken left its sender.
    ``deferred``: headers are checked at the end of a run (`check_all`), because to look at one on a GPU is to wait for it;
    ``ahead``: receives are posted before their step."""

    rank: int
    world: int
    plan: bytes
    heartbeat: Heartbeat
    batch: int = 0
    payload: int = 0
    gathered: int = 0
    messages: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    deferred: bool = False
    ahead: bool = True
    flying: deque[tuple[dist.Work, torch.Tensor]] = field(default_factory=deque[tuple[dist.Work, torch.Tensor]])
    flying_bytes: int = 0
    coming_bytes: int = 0
    staged: int = 0
    queue: deque[tuple[Tag, Expected]] = field(default_factory=deque[tuple[Tag, Expected]])
    posted: dict[Tag, dict[int, tuple[dist.Work, torch.Tensor]]] = field(
        default_factory=dict[Tag, dict[int, tuple[dist.Work, torch.Tensor]]]
    )
    unchecked: list[tuple[torch.Tensor, int, int, Sequence[Piece]]] = field(
        default_factory=list[tuple[torch.Tensor, int, int, Sequence[Piece]]]
    )
    left: int = 0

    def expect(self, agenda: Sequence[tuple[Tag, Expected]]) -> None:
        """All that will come in this run, in order. gloo moves a message when its receive is posted, so receives are posted
        ahead, as far as `IN_FLIGHT` allows. On NCCL they are not: a receive there holds up the stream until it is met."""
        self.queue = deque(agenda if self.ahead else ())
        self._look_ahead()

    def post(
        self, tag: Tag, sends: Mapping[int, Sequence[tuple[Piece, torch.Tensor]]], receives: Expected
    ) -> Callable[[], dict[int, list[torch.Tensor]]]:
        """Start sending and receiving; the function returned waits for what comes, by sender.

        Raises:
            PeerLost: a process is gone, or nothing came within the timeout.
            Mismatch: what came is not what the plan says.
        """
        step = tag[0]
        while receives and tag not in self.posted and self.queue:
            self._receive(*self.queue.popleft())
        outgoing = {p: self._pack(step, pieces) for p, pieces in sends.items()}
        fresh = {} if tag in self.posted else self._buffers(receives)
        works = self._start(step, fresh, outgoing)
        arriving = self.posted.pop(tag, {}) | {p: (works[p, False], b) for p, b in fresh.items()}
        for p, buffer in outgoing.items():
            self.flying.append((works[p, True], buffer))
            self.flying_bytes += buffer.nbytes
        self.staged = max(self.staged, self.coming_bytes + self.flying_bytes)
        self.drain(IN_FLIGHT, step)

        def wait() -> dict[int, list[torch.Tensor]]:
            out: dict[int, list[torch.Tensor]] = {}
            for p, (work, buffer) in arriving.items():
                self._wait(work, p, step)
                self.coming_bytes -= buffer.nbytes
                out[p] = self._unpack(step, p, buffer, receives[p])
            self._look_ahead()
            return out

        return wait

    def _look_ahead(self) -> None:
        while self.queue and self.coming_bytes <= IN_FLIGHT:
            self._receive(*self.queue.popleft())

    def _receive(self, tag: Tag, receives: Expected) -> None:
        """Post receives before their step."""
        buffers = self._buffers(receives)
        works = self._start(tag[0], buffers, {})
        self.posted[tag] = {p: (works[p, False], b) for p, b in buffers.items()}

    def _buffers(self, receives: Expected) -> dict[int, torch.Tensor]:
        sizes = {p: _layout(pieces)[1] for p, pieces in receives.items()}
        self.coming_bytes += sum(sizes.values())
        return {p: torch.empty(n, dtype=torch.uint8, device=self.device) for p, n in sizes.items()}

    def _start(
        self, step: int, incoming: Mapping[int, torch.Tensor], outgoing: Mapping[int, torch.Tensor]
    ) -> dict[tuple[int, bool], dist.Work]:
        """Works of receives and sends, by (peer, whether it is a send)."""
        posts = {(p, False): dist.P2POp(dist.irecv, b, p) for p, b in incoming.items()}
        posts |= {(p, True): dist.P2POp(dist.isend, b, p) for p, b in outgoing.items()}
        if not posts:
            return {}
        try:
            works = dist.batch_isend_irecv(list(posts.values()))
        except RuntimeError as e:
            raise PeerLost([*incoming, *outgoing], step, _reason(e)) from None
        if len(works) != len(posts):  # NCCL answers with one work for the whole batch
            works = [works[0]] * len(posts)
        return dict(zip(posts, works, strict=True))

    def drain(self, keep: int, step: int) -> None:
        """Wait until at most ``keep`` bytes of messages are on their way."""
        while self.flying and self.flying_bytes > keep:
            work, buffer = self.flying.popleft()
            self._wait(work, -1, step)
            self.flying_bytes -= buffer.nbytes

    def _wait(self, work: dist.Work, peer: int, step: int) -> None:
        self.heartbeat.at(step, WAIT, peer)
        try:
            work.wait()
        except RuntimeError as e:
            peers = [peer] if peer >= 0 else [p for p in range(self.world) if p != self.rank]
            raise PeerLost(peers, step, _reason(e)) from None
        self.heartbeat.at(step, COMPUTE)

    def _pack(self, step: int, pieces: Sequence[tuple[Piece, torch.Tensor]]) -> torch.Tensor:
        named = [p for p, _ in pieces]
        offsets, total = _layout(named)
        out = torch.empty(total, dtype=torch.uint8, device=self.device)
        nbytes = 0
        for (at, n), (piece, array) in zip(offsets, pieces, strict=True):
            assert tuple(array.shape) == piece[1] and array.dtype == piece[2], (piece, array.shape, array.dtype)
            nbytes += n
            if n:
                out[at : at + n].view(piece[2]).view(piece[1]).copy_(array)
        head = HEADER.pack(MAGIC, VERSION, self.rank, self.plan, self.batch, step, _digest(named), nbytes, clock())
        out[:HEADER_BYTES] = torch.as_tensor(np.frombuffer(head.ljust(HEADER_BYTES, b"\0"), np.uint8).copy()).to(self.device)
        self.payload, self.messages = self.payload + nbytes, self.messages + 1
        return out

    def _unpack(self, step: int, peer: int, buffer: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        offsets, total = _layout(pieces)
        assert total == buffer.numel()
        if not self.deferred:
            self._check(buffer[:HEADER_BYTES], step, peer, pieces)
        else:
            head = torch.empty(HEADER_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self.unchecked.append((head.copy_(buffer[:HEADER_BYTES], non_blocking=True), step, peer, pieces))
        return [buffer[at : at + n].view(p[2]).view(p[1]) for (at, n), p in zip(offsets, pieces, strict=True)]

    def check_all(self) -> None:
        """Check the headers that have been put off; before outputs are handed out.

        Raises:
            Mismatch: a message was not what the plan says.
        """
        if self.unchecked and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for head, step, peer, pieces in self.unchecked:
            self._check(head, step, peer, pieces)
        self.unchecked.clear()

    def _check(self, head: torch.Tensor, step: int, peer: int, pieces: Sequence[Piece]) -> None:
        *fields, self.left = HEADER.unpack(head[: HEADER.size].numpy().tobytes())
        nbytes = sum(n for _, n in _layout(pieces)[0])
        wanted = (MAGIC, VERSION, peer, self.plan, self.batch, step, _digest(pieces), nbytes)
        names = ("magic", "version", "sender", "plan", "batch", "step", "pieces", "bytes")
        bad = [n for n, a, b in zip(names, fields, wanted, strict=True) if a != b]
        if bad:
            raise Mismatch(
                f"rank {peer} sent a message that the plan has not at step {step}", where=f"rank {self.rank}, step {step}",
                why="; ".join(f"{n}: {fields[names.index(n)]!r}, not {wanted[names.index(n)]!r}" for n in bad),
            )  # fmt: skip


def _layout(pieces: Sequence[Piece]) -> tuple[list[tuple[int, int]], int]:
    """((offset, bytes) of each piece, length of the message)."""
    at, out = HEADER_BYTES, list[tuple[int, int]]()
    for _, shape, dtype in pieces:
        n = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        out.append((at, n))
        at += -(-n // ALIGNMENT) * ALIGNMENT
    return out, at


def _digest(pieces: Sequence[Piece]) -> int:
    return zlib.crc32(";".join(f"{name} {dtype}{list(shape)}" for name, shape, dtype in pieces).encode())


def _reason(e: BaseException) -> str:
    """The first line of what gloo says, without its source positions."""
    text = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
    return text.split("] ", 1)[-1] if text.startswith("[") else text


def clock() -> int:
    """Nanoseconds since 1970: what processes on several hosts can compare."""
    return time.time_ns()
