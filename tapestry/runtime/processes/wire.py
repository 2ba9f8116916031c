"""One process's end of torch.distributed: its calls, counted; who is to blame where one fails; and checks of messages.

gloo accepts a message of another dtype or size without an error. So before the first step all ranks compare the plan and the
list of calls that they are going to make (`Wire.shake_hands`); after that nothing is sent but data. With
``TAPESTRY_CHECK_MESSAGES=1`` every message and every collective goes with a header that says which plan, batch, step and exact
pieces it holds, and nothing is used before that is what the receiver expects.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tapestry import flags
from tapestry.errors import TapestryError
from tapestry.ir.collective_calls import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, EXCHANGE, REDUCE_SCATTER
from tapestry.runtime.processes.heartbeat import WAIT, Heartbeat
from tapestry.runtime.processes.process_groups import Groups, Partition, Team

Tensor = torch.Tensor


MAGIC, VERSION, HEADER_BYTES = b"TAPESTRY", 3, 64
HEADER = struct.Struct("<8sII16sII16sQ")  # magic, version, sender, plan, batch, step, what is in it, bytes of it
FIELDS = ("magic", "version", "sender", "plan", "batch", "step", "pieces", "bytes")
IN_FLIGHT = 16 << 20  # bytes of sent messages that may wait to be taken, and of receives posted ahead

_dist: Any = dist  # its functions have no types
# torch 2.13 renames both; the old names warn there, the new ones are not in 2.11
_GATHER: Callable[..., Any] = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor
_SCATTER: Callable[..., Any] = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor
Start = Callable[..., dist.Work]
_REDUCE = {"sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class PeerLost(Exception):
    """Another process did not deliver: it ended, or nothing came in time. It is a consequence, hardly ever the cause."""

    def __init__(self, peers: Sequence[int], step: int, why: str) -> None:
        super().__init__(f"nothing came from rank {', '.join(map(str, peers))}: {why}")
        self.peers, self.step = tuple(peers), step


class Mismatch(TapestryError):
    """A message is not what the plan says."""


@dataclass(slots=True)
class Wire:
    """One process's end. ``plan`` is 16 bytes of the build's hash.

    Attributes:
        payload: bytes handed to torch.distributed for the program's steps, as they are counted (docs/decisions.md);
            ``gathered`` those that brought outputs to rank 0.
        calls: backend calls since they were last cleared, by name.
        staged: bytes of the buffers that messages lie in, and the most that sends not yet taken have held beside them.
        ahead: receives are posted before their step. gloo moves a message when its receive is posted; on NCCL a receive holds
            up the stream until it is met, so there they are posted at their step.
        checking: messages go with headers.
        teams: process groups of all programs so far.
        nothing: no bytes: what an operation holds that is not posted.
    """

    rank: int
    world: int
    plan: bytes
    heartbeat: Heartbeat
    batch: int = 0
    payload: int = 0
    gathered: int = 0
    messages: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    calls: Counter[str] = field(default_factory=Counter[str])
    checking: bool = field(default_factory=flags.check_messages)
    flying: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque[tuple[dist.Work, Tensor]])
    flying_bytes: int = 0
    staged: int = 0
    nothing: Tensor = field(init=False)
    teams: dict[Partition, Team | None] = field(default_factory=dict[Partition, Team | None])

    def __post_init__(self) -> None:
        self.nothing = torch.empty(0, dtype=torch.uint8, device=self.device)

    @property
    def ahead(self) -> int:
        """Bytes of receives that may be posted before their step."""
        return IN_FLIGHT if self.device.type == "cpu" else 0

    @property
    def backend(self) -> str:
        """What carries tensors of this process's device."""
        return "gloo" if self.device.type == "cpu" else "nccl"

    # messages between two processes

    def receiving(self, into: Tensor, peer: int, tag: int) -> dist.P2POp:
        """A receive that can be posted any number of times; ``into`` is a flat tensor of bytes."""
        return dist.P2POp(dist.irecv, into, peer, tag=tag)

    def sending(self, peer: int, tag: int) -> dist.P2POp:
        """A send that can be posted any number of times; its ``tensor`` is to be set."""
        return dist.P2POp(dist.isend, self.nothing, peer, tag=tag)

    def exchange(self, step: int, ops: list[dist.P2POp]) -> list[dist.Work]:
        """Post sends and receives together; NCCL answers with one work for all."""
        self.calls[EXCHANGE] += 1
        try:
            return dist.batch_isend_irecv(ops)
        except RuntimeError as e:
            raise PeerLost(sorted({op.peer for op in ops}), step, reason(e)) from None

    def fly(self, works: Sequence[dist.Work], sent: Sequence[Tensor], step: int) -> None:
        """Leave sends to be taken; wait for the oldest where too many are on their way."""
        for k, tensor in enumerate(sent):
            self.flying.append((works[min(k, len(works) - 1)], tensor))
            self.flying_bytes += tensor.nbytes
        self.messages += len(sent)
        self.drain(IN_FLIGHT, step)

    def drain(self, keep: int, step: int) -> None:
        """Wait until at most ``keep`` bytes of sends are on their way."""
        while self.flying and self.flying_bytes > keep:
            work, tensor = self.flying.popleft()
            self.wait(work, (), step)
            self.flying_bytes -= tensor.nbytes

    def wait(self, work: dist.Work, peers: tuple[int, ...], step: int) -> None:
        """Wait for something posted at a step.

        Raises:
            PeerLost: a process is gone, or nothing came within the timeout.
        """
        self.heartbeat.at(step, WAIT, peers[0] if len(peers) == 1 else -1)
        try:
            wait_for(work)
        except RuntimeError as e:
            others = peers or [p for p in range(self.world) if p != self.rank]
            raise PeerLost(others, step, reason(e)) from None

    # collectives: each is made once, and started in every batch

    def all_reduce(self, team: Team, step: int, op: str) -> Start:
        """Merge a tensor, which is given when it is started, in place."""
        return partial(self._call, ALL_REDUCE, team, step, _bound(team, _dist.all_reduce, op=_REDUCE[op]))

    def reduce_scatter(self, team: Team, step: int, out: Tensor, given: Tensor, op: str) -> Start:
        """Merge tensors that hold a part for each of the team, in its order."""
        return partial(self._call, REDUCE_SCATTER, team, step, _bound(team, _SCATTER), out, given, _REDUCE[op])

    def all_gather(self, team: Team, step: int, out: Tensor) -> Start:
        """One tensor, which is given when it is started, after another, in the team's order."""
        return partial(self._call, ALL_GATHER, team, step, _bound(team, _GATHER), out)

    def all_to_all(self, team: Team, step: int, out: Tensor, given: Tensor) -> Start:
        """Part k to the k-th of the team; all parts have one size."""
        return partial(self._call, ALL_TO_ALL, team, step, _bound(team, _dist.all_to_all_single), out, given)

    def broadcast(self, team: Team, step: int, tensor: Tensor, sender: int) -> Start:
        """One rank's tensor to all."""
        return partial(self._call, BROADCAST, team, step, _bound(team, _dist.broadcast), tensor, sender)

    def _call(self, name: str, team: Team, step: int, function: Callable[..., Any], *args: Any) -> dist.Work:
        if self.checking:
            self._compare(team, self.header(step, f"{name} {args[0].dtype} {args[0].numel()}", args[0].nbytes), step)
        self.calls[name] += 1
        try:
            return function(*args)
        except RuntimeError as e:
            raise PeerLost(team.others(self.rank), step, reason(e)) from None

    def groups(self, mesh: Sequence[int], partitions: Sequence[Partition], timeout: timedelta) -> Groups:
        """Process groups, made by all ranks together."""
        return Groups(self.device.type, mesh, partitions, timeout, self.teams)

    # what ranks agree on

    def shake_hands(self, calls: bytes) -> None:
        """Compare the plan and the list of calls with every other rank's, before the first step.

        Raises:
            Mismatch: a rank would make other calls.
        """
        if self.world > 1:
            self._compare(Team(tuple(range(self.world)), None), self.header(-1, calls + bytes([self.checking]), 0), -1)

    def header(self, step: int, what: str | bytes, nbytes: int, sender: int | None = None) -> Tensor:
        """Bytes that say what a message is; ``what`` names the pieces."""
        digest = hashlib.blake2b(what.encode() if isinstance(what, str) else what, digest_size=16).digest()
        sent_by = self.rank if sender is None else sender
        head = HEADER.pack(MAGIC, VERSION, sent_by, self.plan, self.batch & 0xFFFFFFFF, step & 0xFFFFFFFF, digest, nbytes)
        return torch.frombuffer(bytearray(head.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)

    def _compare(self, team: Team, mine: Tensor, step: int) -> None:
        """Hold a header against those of a team."""
        found = torch.empty(len(team.ranks) * HEADER_BYTES, dtype=torch.uint8, device=self.device)
        try:
            _GATHER(found, mine.to(self.device), group=team.group)
        except RuntimeError as e:
            raise PeerLost(team.others(self.rank), step, reason(e)) from None
        for r, head in zip(team.ranks, found.cpu().reshape(-1, HEADER_BYTES), strict=True):
            self.check(head, mine, r, step)

    def check(self, head: Tensor, wanted: Tensor, peer: int, step: int) -> None:
        """Hold a header that came against the one that was to come, whoever that names as its sender.

        Raises:
            Mismatch: they differ.
        """
        came, planned = (list(HEADER.unpack(h.cpu()[: HEADER.size].numpy().tobytes())) for h in (head, wanted))
        planned[FIELDS.index("sender")] = peer
        bad = [f"{n}: {a!r}, not {b!r}" for n, a, b in zip(FIELDS, came, planned, strict=True) if a != b]
        if bad:
            raise Mismatch(
                f"rank {peer} sent a message that the plan has not at step {step}",
                where=f"rank {self.rank}, step {step}",
                why="; ".join(bad),
            )


def _bound(team: Team, function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    """A function of torch.distributed for a team, which starts and does not wait."""
    return partial(function, group=team.group, async_op=True, **more)


def wait_for(work: dist.Work) -> None:
    """Wait for torch.distributed."""
    work.wait()


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as bytes (a copy in one piece where it is not): what is sent is not looked into."""
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # strides of single elements may be any


def reason(e: BaseException) -> str:
    """The first line of what gloo says, without its source positions."""
    text = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
    return text.split("] ", 1)[-1] if text.startswith("[") else text


def clock() -> int:
    """Nanoseconds since 1970: what processes on several hosts can compare."""
    return time.time_ns()
