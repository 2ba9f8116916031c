"""One process's end of torch.distributed: its calls, counted; who is to blame where one fails; and checks of messages.

gloo accepts a message of another dtype or size without an error. So before the first step all ranks compare the plan and the
list of calls that they are going to make (`Wire.shake_hands`); after that nothing is sent but data. With
``TAPESTRY_CHECK_MESSAGES=1`` every message and every collective goes with a header that says which plan, batch, step and exact
pieces it holds, and nothing is used before that is what the receiver expects.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import product
from math import prod
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout  # pyright: ignore[reportPrivateUsage]

from tapestry import flags
from tapestry.errors import RunError, TapestryError
from tapestry.ir.program import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, EXCHANGE, REDUCE_SCATTER

Tensor = torch.Tensor


# What every rank is doing, for whoever has to say which one is to blame when a run stalls.
#
# On one host the slots are shared memory that the launcher reads. Under torchrun each rank publishes its own slot through the
# rendezvous store twice a second; a slot that stands still belongs to a process that is stopped. A rank that cannot reach the
# store for the timeout ends itself: nobody else can end it, and any call of its own may be waiting for an answer.


START, WEIGHTS, COMPUTE, WAIT, IDLE, DONE = range(6)
NAMES = ("starting", "reading weights", "computing", "waiting", "between batches", "done")
PHASE, BATCH, STEP, PEER, CHANGED, BEAT = range(6)  # fields of a slot

Slots = np.ndarray[Any, np.dtype[np.float64]]


def shared(world: int) -> Slots:
    """Slots that forked processes share."""
    memory = mmap.mmap(-1, world * 6 * 8)
    return np.frombuffer(memory, np.float64).reshape(world, 6)


BEAT_FIELDS = struct.Struct("5d")  # of a slot, but for the beat


class Heartbeat:
    """One rank's slot: cheap enough to be written at every step."""

    def __init__(self, slots: Slots, rank: int) -> None:
        self.slot, self.rank, self.running = slots[rank], rank, float(slots[rank][BATCH])
        self._memory = memoryview(self.slot)
        self.at(-1, START)

    def at(self, step: int, phase: int, peer: int = -1) -> None:
        """Say what the rank does now; ``peer`` is whom it waits for."""
        BEAT_FIELDS.pack_into(self._memory, 0, phase, self.running, step, peer, time.monotonic())

    def batch(self, number: int) -> None:
        """Say which batch is running."""
        self.slot[BATCH] = self.running = number


class HeartbeatPublisher:
    """Publishes a slot through a store, and reads the others'.

    Args:
        timeout: seconds without an answer of the store after which this process ends.
    """

    def __init__(self, store: Any, heartbeat: Heartbeat, world: int, timeout: float, period: float = 0.5) -> None:
        self.store, self.heartbeat, self.world, self.period, self.timeout = store, heartbeat, world, period, timeout
        self.ended, self.answered = threading.Event(), time.monotonic()
        threading.Thread(target=self._run, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _run(self) -> None:
        own = self.store.clone()  # a connection that no other call keeps waiting
        while not self.ended.wait(self.period):
            self.heartbeat.slot[BEAT] += 1
            try:
                own.set(f"heartbeat/{self.heartbeat.rank}", self.heartbeat.slot.tobytes())
            except RuntimeError:  # the store went away with the job
                return
            self.answered = time.monotonic()

    def _watch(self) -> None:
        while not self.ended.wait(self.period):
            if time.monotonic() - self.answered > self.timeout:
                end_now(self.heartbeat, f"the rendezvous store has not answered for {self.timeout:g} s")

    def read(self) -> tuple[Slots, set[int]]:
        """(slots of all ranks, ranks whose slot stands still)."""
        before = self._all()
        time.sleep(3 * self.period)
        now = self._all()
        still = {r for r in range(self.world) if r != self.heartbeat.rank and now[r, BEAT] == before[r, BEAT]}
        return now, still

    def _all(self) -> Slots:
        out = np.zeros((self.world, 6))
        for r in range(self.world):
            if r == self.heartbeat.rank:
                out[r] = self.heartbeat.slot
            elif self.store.check([f"heartbeat/{r}"]):
                out[r] = np.frombuffer(self.store.get(f"heartbeat/{r}"), np.float64)
        return out


def end_now(heartbeat: Heartbeat, why: str) -> NoReturn:
    """End this process, with nothing that could wait for another one."""
    print(f"tapestry.runtime: rank {heartbeat.rank} ends, {describe(heartbeat.slot)}: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def end_soon(heartbeat: Heartbeat, seconds: float) -> threading.Timer:
    """End this process in some seconds, whatever it waits for then; the timer may be cancelled."""
    timer = threading.Timer(seconds, end_now, (heartbeat, "it could not part from the others"))
    timer.daemon = True
    timer.start()
    return timer


def guilty(slots: Slots, stopped: Mapping[int, str] | set[int]) -> list[int]:
    """The ranks that hold the others up: stopped ones; else those that wait for nobody and are not done, least advanced first;
    else whoever is waited for by the least advanced. Ranks that are done hold up nobody."""
    ranks = [r for r in range(len(slots)) if slots[r, PHASE] != DONE] or range(len(slots))
    if stopped:
        return sorted(stopped)
    behind = sorted(ranks, key=lambda r: (slots[r, BATCH], slots[r, STEP]))
    working = [r for r in behind if slots[r, PHASE] not in (WAIT, IDLE, DONE)]
    if working:
        return working[:1]
    awaited = [int(slots[r, PEER]) for r in behind if slots[r, PHASE] == WAIT and slots[r, PEER] >= 0]
    return awaited[:1] or behind[:1]


def describe(slot: Slots) -> str:
    """What a rank was doing, in words."""
    phase, step = int(slot[PHASE]), int(slot[STEP])
    where = f" at step {step}" if step >= 0 and phase in (COMPUTE, WAIT) else ""
    peer = f" for rank {int(slot[PEER])}" if phase == WAIT and slot[PEER] >= 0 else ""
    batch = f" of batch {int(slot[BATCH])}" if where and slot[BATCH] > 0 else ""
    return f"{NAMES[phase]}{peer}{where}{batch}"


# The process groups that a program's collectives run in: axes of one DeviceMesh, and others that steps need, made once.


_dist_of_process_groups: Any = dist  # its functions have no types
Partition = tuple[tuple[int, ...], ...]
"""Ranks that call together; every rank is in one group at most."""


@dataclass(frozen=True, slots=True)
class Team:
    """Ranks that call together, this one among them, and their process group."""

    ranks: tuple[int, ...]
    group: Any

    def others(self, rank: int) -> tuple[int, ...]:
        """All but one."""
        return tuple(r for r in self.ranks if r != rank)


class Groups:
    """Teams by partition. Every rank must make them for the same list of partitions, since making one is a collective.

    Args:
        teams: those that there are already, of programs before; new ones are added.
    """

    def __init__(
        self, device: str, mesh: Sequence[int], partitions: Sequence[Partition], timeout: timedelta,
        teams: dict[Partition, Team | None],
    ) -> None:  # fmt: skip
        self.rank, self.teams = dist.get_rank(), teams
        everybody = tuple(range(dist.get_world_size()))
        teams[(everybody,)] = Team(everybody, dist.group.WORLD)
        wanted = {p: None for p in map(ordered, partitions) if p not in teams}
        if prod(mesh) == len(everybody) and any(axis_groups(mesh, a) in wanted for a in range(len(mesh))):
            self._axes(device, mesh, timeout)
        for partition in wanted:
            if partition not in teams:
                mine, _ = _dist_of_process_groups.new_subgroups_by_enumeration([list(g) for g in partition], timeout=timeout)
                self._keep(partition, mine)

    def _axes(self, device: str, mesh: Sequence[int], timeout: timedelta) -> None:
        """One group per axis of the plan's mesh."""
        devices = init_device_mesh(device, tuple(mesh))
        for axis in range(len(mesh)):
            group: Any = devices.get_group(axis)
            _set_pg_timeout(timeout, group)
            self._keep(axis_groups(mesh, axis), group)

    def _keep(self, partition: Partition, group: Any) -> None:
        ranks = next((g for g in partition if self.rank in g), None)
        self.teams.setdefault(partition, None if ranks is None else Team(ranks, group))

    def team(self, partition: Partition) -> Team | None:
        """The team of this rank, its ranks in ascending order; ``None`` where it takes no part."""
        return self.teams[ordered(partition)]


def ordered(partition: Partition) -> Partition:
    """A partition with its ranks in ascending order, as process groups have them."""
    return tuple(sorted(tuple(sorted(g)) for g in partition))


def axis_groups(mesh: Sequence[int], axis: int) -> Partition:
    """Ranks that differ along one axis of a mesh alone (numbered row by row)."""
    stride = prod(mesh[axis + 1 :])
    firsts = (sum(k * prod(mesh[a + 1 :]) for a, k in enumerate(c)) for c in product(*map(range, mesh)) if c[axis] == 0)
    return tuple(sorted(tuple(first + k * stride for k in range(mesh[axis])) for first in firsts))


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

    def lost(self, peers: Sequence[int], step: int, e: RuntimeError) -> PeerLost:
        """That nothing came from some ranks."""
        return PeerLost(peers, step, reason(e))

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
            raise self.lost(sorted({op.peer for op in ops}), step, e) from None

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
            raise self.lost(peers or [p for p in range(self.world) if p != self.rank], step, e) from None

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
            raise self.lost(team.others(self.rank), step, e) from None

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
            raise self.lost(team.others(self.rank), step, e) from None
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
                f"rank {peer} sent a message that the plan has not at step {step}", where=f"rank {self.rank}, step {step}",
                why="; ".join(bad),
            )  # fmt: skip


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


# Where the ranks of a run meet: a store that listens on no more than is needed, and one name for this attempt alone.
#
# On one host the store listens on loopback. On several it listens on the address of rank 0, and every rank shows that it
# knows a secret (`flags.token`): what ranks say of themselves is sealed with it (HMAC-SHA-256), and the names of all keys
# depend on it. The store itself asks nobody for anything, and neither do the connections of gloo and NCCL: the network
# between hosts must be one that is trusted.
#
# A launcher that starts ranks again may keep the store of before, with all that was written there, and no count of its own
# is the same on all hosts. So ranks agree on their attempt by numbers drawn anew: rank 0 proposes the numbers that it reads,
# and a proposal counts once every rank has found its own number in it.


LOOPBACK = "lo"
LIMIT = 1 << 24  # bytes of what a rank says of itself
SEAL = 32
SIOCGIFADDR = 0x8915  # netdevice(7): the address of an interface
BACKLOG = 4096


def seal(secret: bytes, what: Any) -> bytes:
    """JSON, behind a code that shows who knows the secret."""
    body = msgspec.json.encode(what)
    return hmac.digest(secret, body, "sha256") + body


def unseal(secret: bytes, data: bytes, rank: int) -> Any:
    """What was sealed.

    Raises:
        RunError: it was sealed with another secret, or is no such thing.
    """
    body = data[SEAL:]
    if len(data) > LIMIT or not hmac.compare_digest(data[:SEAL], hmac.digest(secret, body, "sha256")):
        raise RunError(
            f"rank {rank} has another token", where=f"rank {rank}, before the first step",
            hint="the same TAPESTRY_TOKEN, or TAPESTRY_TOKEN_FILE, on all hosts",
        )  # fmt: skip
    return msgspec.json.decode(body)


def listening(address: str, port: int, timeout: float) -> Any:
    """A store in this process, on one address and no other.

    Raises:
        OSError: the port is taken, or the address is not this host's.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(place, family=family, backlog=BACKLOG) as s:
        port = s.getsockname()[1]
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout), use_libuv=True,
            master_listen_fd=s.detach(),
        )  # fmt: skip


def connected(address: str, port: int, timeout: float) -> Any:
    """A store in another process."""
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def join(place: flags.World, timeout: float) -> tuple[Any, bytes]:
    """The store of this attempt alone, and the secret that the ranks share.

    Raises:
        RunError: a rank did not come, or has another token. TapestryError: there is no token where one is needed.
    """
    secret = flags.token()
    try:
        alone = place.locals == place.world or _is_loopback(place.address)
        if not alone and not secret:
            raise TapestryError(
                "a run on several hosts without a token", where=f"rank {place.rank}, before the first step",
                why=f"whoever reaches {place.address} could take part",
                hint="TAPESTRY_TOKEN=$(openssl rand -hex 32), or a file as TAPESTRY_TOKEN_FILE, the same on all hosts",
            )  # fmt: skip
        interface = LOOPBACK if alone else _interface_to(place.address)
        if interface:
            flags.network(interface)
        if place.rank == 0 and not place.served:
            shared = listening(place.address, place.port, timeout)
        else:
            shared = connected(place.address, place.port, timeout)
        return PrefixStore(f"tapestry/{meet(shared, place.rank, place.world, secret, timeout)}", shared), secret
    except (RuntimeError, ValueError, OSError) as e:
        raise RunError(
            f"no rendezvous: {str(e).splitlines()[0]}", where=f"rank {place.rank}, before the first step",
            hint="torchrun --nproc-per-node N -m tapestry.runtime BUILD",
        ) from None  # fmt: skip


def meet(store: Any, rank: int, world: int, secret: bytes, timeout: float) -> str:
    """The name of this attempt, once all ranks that are alive now have found each other.

    Raises:
        RunError: a rank did not come within the timeout, or has another token.
    """
    own, end = secrets.token_hex(16), time.monotonic() + timeout
    lobby: Any = PrefixStore(f"tapestry/meet/{world}", store)
    lobby.set(f"arrived/{rank}", seal(secret, own))
    name, waits = "", set(range(world))
    while time.monotonic() < end:
        if rank == 0:
            numbers = _arrived(lobby, world, secret)
            waits = {r for r in range(world) if r not in numbers}
            proposal = [numbers[r] for r in sorted(numbers)]
            if not waits and _name(secret, proposal) != name:
                name = _name(secret, proposal)
                lobby.set("proposal", seal(secret, proposal))
            if name and not waits:
                waits = {r for r in range(1, world) if not lobby.check([f"found/{name}/{r}"])}
                if not waits:
                    lobby.set(f"go/{name}", seal(secret, name))
                    return name
        else:
            waits = {0}
            if lobby.check(["arrived/0"]):
                unseal(secret, lobby.get("arrived/0"), 0)
            if lobby.check(["proposal"]):
                proposal = unseal(secret, lobby.get("proposal"), 0)
                if proposal[rank : rank + 1] == [own] and _name(secret, proposal) != name:
                    name = _name(secret, proposal)
                    lobby.set(f"found/{name}/{rank}", b"1")
            if name and lobby.check([f"go/{name}"]) and unseal(secret, lobby.get(f"go/{name}"), 0) == name:
                return name
        time.sleep(0.01)
    raise RunError(
        f"rank {', '.join(map(str, sorted(waits)))} did not come within {timeout:g} s",
        where=f"rank {min(waits)}, before the first step",
    )


def _arrived(lobby: Any, world: int, secret: bytes) -> dict[int, str]:
    """The numbers of the ranks that have come, those of an attempt before among them."""
    there = [r for r in range(world) if lobby.check([f"arrived/{r}"])]
    return {r: unseal(secret, lobby.get(f"arrived/{r}"), r) for r in there}


def _name(secret: bytes, proposal: Sequence[str]) -> str:
    return hmac.digest(secret, "/".join(proposal).encode(), hashlib.sha256).hex()[:32]


def _is_loopback(address: str) -> bool:
    found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(place[0]).is_loopback for *_, place in found)


def _interface_to(address: str) -> str:
    """The interface of this host from which another host is reached (or that has the address itself); "" if none is found."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((address, 9))  # sends nothing
            mine = s.getsockname()[0]
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(s.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:  # it has no address
                    continue
                if socket.inet_ntoa(answer[20:24]) == mine:
                    return name
    except OSError:  # an address of IPv6
        return ""
    return ""
