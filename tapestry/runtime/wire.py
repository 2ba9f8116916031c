"""Messages between the processes of a run: torch.distributed carries them, each with a header of ours.

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
from tapestry.runtime.pulse import COMPUTE, WAIT, Pulse

MAGIC, VERSION, HEADER_BYTES, ALIGNMENT = b"TAPESTRY", 1, 64, 8
HEADER = struct.Struct("<8sII16sIIIQ")  # magic, version, sender, plan, batch, step, what is in it, bytes of it
IN_FLIGHT = 16 << 20  # bytes of sent messages that may wait to be taken

Piece = tuple[str, tuple[int, ...], torch.dtype]
"""(what it is, shape, dtype): both ends name the same pieces in the same order."""


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
    their way, in and out, have taken at once."""

    rank: int
    world: int
    plan: bytes
    pulse: Pulse
    batch: int = 0
    payload: int = 0
    gathered: int = 0
    messages: int = 0
    flying: deque[tuple[dist.Work, torch.Tensor]] = field(default_factory=deque)
    flying_bytes: int = 0
    coming_bytes: int = 0
    staged: int = 0

    def post(
        self, step: int, sends: Mapping[int, Sequence[tuple[Piece, torch.Tensor]]], receives: Mapping[int, Sequence[Piece]]
    ) -> Callable[[], dict[int, list[torch.Tensor]]]:
        """Start sending and receiving; the function returned waits for what comes, by sender.

        Raises:
            PeerLost: a process is gone, or nothing came within the timeout.
            Mismatch: what came is not what the plan says.
        """
        incoming = {p: torch.empty(_layout(pieces)[1], dtype=torch.uint8) for p, pieces in receives.items()}
        outgoing = {p: self._pack(step, pieces) for p, pieces in sends.items()}
        posts = [dist.P2POp(dist.irecv, b, p) for p, b in incoming.items()]
        posts += [dist.P2POp(dist.isend, b, p) for p, b in outgoing.items()]
        if not posts:
            return dict
        try:
            works = dist.batch_isend_irecv(posts)
        except RuntimeError as e:
            raise PeerLost([*incoming, *outgoing], step, _reason(e)) from None
        if len(works) != len(posts):  # NCCL answers with one work for the whole batch
            works = [works[0]] * len(posts)
        arriving = dict(zip(incoming, works, strict=False))
        for work, buffer in zip(works[len(incoming) :], outgoing.values(), strict=True):
            self.flying.append((work, buffer))
            self.flying_bytes += buffer.nbytes
        expected = sum(b.nbytes for b in incoming.values())
        self.coming_bytes += expected
        self.staged = max(self.staged, self.coming_bytes + self.flying_bytes)
        self.drain(IN_FLIGHT, step)

        def wait() -> dict[int, list[torch.Tensor]]:
            out: dict[int, list[torch.Tensor]] = {}
            for p, work in arriving.items():
                self._wait(work, p, step)
                out[p] = self._unpack(step, p, incoming[p], receives[p])
            self.coming_bytes -= expected
            return out

        return wait

    def drain(self, keep: int, step: int) -> None:
        """Wait until at most ``keep`` bytes of messages are on their way."""
        while self.flying and self.flying_bytes > keep:
            work, buffer = self.flying.popleft()
            self._wait(work, -1, step)
            self.flying_bytes -= buffer.nbytes

    def _wait(self, work: dist.Work, peer: int, step: int) -> None:
        self.pulse.at(step, WAIT, peer)
        try:
            work.wait()
        except RuntimeError as e:
            peers = [peer] if peer >= 0 else [p for p in range(self.world) if p != self.rank]
            raise PeerLost(peers, step, _reason(e)) from None
        self.pulse.at(step, COMPUTE)

    def _pack(self, step: int, pieces: Sequence[tuple[Piece, torch.Tensor]]) -> torch.Tensor:
        named = [p for p, _ in pieces]
        places, total = _layout(named)
        out = torch.empty(total, dtype=torch.uint8)
        nbytes = 0
        for (at, n), (piece, array) in zip(places, pieces, strict=True):
            assert tuple(array.shape) == piece[1] and array.dtype == piece[2], (piece, array.shape, array.dtype)
            nbytes += n
            if n:
                out[at : at + n].view(piece[2]).view(piece[1]).copy_(array)
        head = HEADER.pack(MAGIC, VERSION, self.rank, self.plan, self.batch, step, _digest(named), nbytes)
        out[:HEADER_BYTES] = torch.from_numpy(np.frombuffer(head.ljust(HEADER_BYTES, b"\0"), np.uint8).copy())
        self.payload, self.messages = self.payload + nbytes, self.messages + 1
        return out

    def _unpack(self, step: int, peer: int, buffer: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        places, total = _layout(pieces)
        found = HEADER.unpack(buffer[: HEADER.size].numpy().tobytes())
        nbytes = sum(n for _, n in places)
        wanted = (MAGIC, VERSION, peer, self.plan, self.batch, step, _digest(pieces), nbytes)
        names = ("magic", "version", "sender", "plan", "batch", "step", "pieces", "bytes")
        bad = [n for n, a, b in zip(names, found, wanted, strict=True) if a != b]
        if bad:
            raise Mismatch(
                f"rank {peer} sent a message that the plan has not at step {step}", where=f"rank {self.rank}, step {step}",
                why="; ".join(f"{n}: {found[names.index(n)]!r}, not {wanted[names.index(n)]!r}" for n in bad),
            )  # fmt: skip
        assert total == buffer.numel()
        return [buffer[at : at + n].view(p[2]).view(p[1]) for (at, n), p in zip(places, pieces, strict=True)]


def _layout(pieces: Sequence[Piece]) -> tuple[list[tuple[int, int]], int]:
    """((place, bytes) of each piece, length of the message)."""
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
