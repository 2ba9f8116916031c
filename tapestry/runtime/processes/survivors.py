"""A rank that outlives others: those that are left meet anew, and compute what was lost from what they still hold.

Values stay where they are: a device's are on its rank, and devices of lost ranks get a new one, which loads their weights. All
survivors make the same list of what is left (`reordered.lost_blocks`), go through it in one order, and exchange what the plan's
transfers and merges say. Every merge is the monoid's, in the order of the group, so that results have the bits of a run in one
process. Batches that follow are run so as well.

Whoever finds a rank gone closes its own connections, so that nobody waits for it in turn.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, intersect, shape
from tapestry.ir.program import EXCHANGE, Launch, Load, Program, Reduce, Transfer
from tapestry.ir.types import HOST
from tapestry.runtime import target_protocol
from tapestry.runtime.block_walk import Rest, Task, Value, Work, adopted, rest_of, tasks_of
from tapestry.runtime.executor import Route, silent
from tapestry.runtime.messages.moves import calls_of
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.runtime.processes.distributed import RankExecutor
from tapestry.runtime.processes.wire import COMPUTE, STEP, WAIT, PeerLost, Wire, flat_bytes, reason
from tapestry.runtime.target_protocol import Array, Measured, Progress, Source, Target

if TYPE_CHECKING:
    from tapestry.runtime.processes.worker import Rank


SOON = 5.0  # seconds in which the launcher says that a rank is gone
NOTHING = Rest(tasks=(), lost=0, again=Work(), restart=Work()).document()  # of a loss between two batches


class _Standing(msgspec.Struct):
    """Where a survivor stands: the batch that it runs, or is about to; the step, and what its devices hold."""

    batch: int
    running: bool
    step: int
    held: list[Value]


class SurvivingExecutor(RankExecutor):
    """The devices of one rank, which others' ends do not end.

    Attributes:
        me: this rank; after a loss numbered anew, from 0.
        round: how often ranks were lost; ``told`` what that cost, each time.
        hosts: the rank of each device, as they were numbered at the start, ``before`` at the last loss; ``first`` this rank.
        coming: the batch that this rank runs, or is about to; ``reached`` its step.
        others: sockets that are not torch.distributed's.
        rest: what is left of it, where others have begun it.
    """

    def __init__(
        self, graph: Graph, program: Program, target: Target, weights: Source, streamed: frozenset[str] = frozenset(), *,
        wire: Wire, trace: bool = False, me: Rank, timeout: float = 60.0, others: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        hosted = [b.tensor for b in program.buffers.values() if b.dtype == HOST]
        if hosted or wire.device.type != "cpu":
            why = f"'{hosted[0]}' is a value of the host" if hosted else "they are on GPUs"
            what = "ranks cannot outlive others here"
            raise TapestryError(what, where="--on-loss recompute", why=why, hint="--on-loss restart")
        calls = {at: replace(c, name=EXCHANGE, op="") for at, c in calls_of(graph, program, wire.backend).items()}
        super().__init__(graph, program, target, weights, streamed, wire=wire, trace=trace, calls=calls)
        self.me, self.first = me, me.rank
        self.hosts: tuple[int, ...] = self.route.owner
        self.before: tuple[int, ...] = self.hosts
        self.round, self.told = 0, list[dict[str, Any]]()
        self.tasks = tasks_of(graph, program)
        self.ends = [
            (d, n) for n in program.outputs.values() for d, box in enumerate(program.buffers[n].boxes) if box is not None
        ]  # fmt: skip
        self.adopted: dict[int, LocalExecutor] = {}
        self.reached, self.running = 0, False
        self.coming = 0
        self.rest: Rest | None = None
        self.timeout, self.others = timeout, others

    # the walk of a batch

    def step(self, at: int) -> None:
        """One step, once what it uses has come."""
        self.reached = at
        super().step(at)

    def run(
        self, feeds: Source, progress: Progress = silent, wanted: Collection[str] | None = None
    ) -> tuple[dict[str, Array], Measured]:
        """Outputs by name on the first rank that is left; and what this rank's devices used."""
        if not self.round:
            return super().run(feeds, progress, wanted)
        return LocalExecutor.run(self, feeds, progress, wanted)

    def begin(self, feeds: Source) -> None:
        """Before the first step."""
        super().begin(feeds)
        for a in set(self.adopted.values()):
            a.begin(feeds)
        self.running = True

    def _steps(self, feeds: Source, progress: Progress) -> None:
        if not self.round:
            try:
                super()._steps(feeds, progress)
                self.reached = len(self.program.steps)
            except (PeerLost, RuntimeError) as e:
                self.settle(lost(e))
            return
        rest, self.rest = self.rest or self._rest({}, frozenset()), None
        try:
            self._walk(rest)
        except (PeerLost, RuntimeError) as e:
            self.settle(lost(e))

    def outputs(self, wanted: Collection[str] | None = None) -> dict[str, Array]:
        """The outputs that are wanted on the first rank, nothing on the others."""
        while True:
            try:
                out = super().outputs(wanted)
                self.wire.drain(0, len(self.program.steps))
            except (PeerLost, RuntimeError) as e:
                self.settle(lost(e))
            else:
                self.running, self.coming = False, self.coming + 1
                for d, a in self.adopted.items():
                    self.measured.peak[d] = a.held.peak[d]
                return out

    @property
    def all_devices(self) -> tuple[int, ...]:
        """Those of this rank, adopted ones among them."""
        return (*self.devices, *self.adopted)

    # after a loss

    def settle(self, e: PeerLost) -> None:
        """Meet the others that are left, and do what is left of the batch that is running, as often as ranks are lost.

        Afterwards ``coming`` is the batch that is to be run, which may be the one before; others may have begun it.

        Raises:
            PeerLost: the launcher says of no rank that it is lost.
        """
        while True:
            try:
                rest = self._meet(e)
                if rest is not None:
                    self._walk(rest)
            except PeerLost as again:
                if again is e:
                    raise
                e = again
            except RuntimeError as again:
                if not self._said_lost(self.round + 1, SOON):
                    raise
                e = PeerLost([], self.reached, reason(again))
            else:
                return

    def _said_lost(self, number: int, seconds: float = 0.0) -> bool:
        """Whether the launcher has said, or says within some seconds, who is gone for so many times."""
        end = time.monotonic() + seconds
        while not self.me.store.check([f"lost/{number}"]):
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def _standings(self, left: list[int]) -> dict[int, _Standing]:
        """Where all that are left stand, however long that takes.

        Raises:
            PeerLost: one of them is gone before it has said so.
        """
        out: dict[int, _Standing] = {}
        for r in left:
            out[r] = msgspec.json.decode(self._come("standing", r), type=_Standing)
        return out

    def _come(self, what: str, rank: int) -> bytes:
        """What a rank says in this round, however long that takes.

        Raises:
            PeerLost: it is gone before it has said so.
        """
        key, more = f"{what}/{self.round}/{rank}", False
        while not self.me.store.check([key]):
            if more:
                raise PeerLost([rank], self.reached, "it is gone, too")
            more = self._said_lost(self.round + 1)  # then look once more: all ranks are to see the same
            time.sleep(0.002)
        return self.me.store.get(key)

    def _meet(self, e: PeerLost) -> Rest | None:
        """Ranks that are left, in a world of their own; what is left of a batch that this rank is running."""
        mine = self._held() if self.running else []
        self._part()
        self.round += 1
        self.wire.heartbeat.at(self.reached, WAIT)
        store, writer = self.me.store, min(self.hosts)
        try:
            gone = frozenset(int(r) for r in msgspec.json.decode(store.get(f"lost/{self.round}")))
        except RuntimeError:
            raise e from None
        # of a batch that this rank is done with only who writes the results knows that they are written
        batch = max(0, self.coming - (not self.running and writer in gone))
        own = _Standing(batch, self.running, self.reached, mine)
        store.set(f"standing/{self.round}/{self.first}", msgspec.json.encode(own))
        left = sorted({*self.hosts} - gone)
        there = self._standings(left)
        self._join(left, gone)
        # who runs a batch knows that all before it are written: its inputs were compared with the writer's
        batch = min([s.batch for s in there.values() if s.running] or [s.batch for s in there.values()])
        running = {r: s for r, s in there.items() if s.running and s.batch == batch}
        if not running:
            self.told.append({"ranks": sorted(gone), "batch": batch, "step": -1, **NOTHING})
            self.coming, self.running, self.rest = batch, False, None
            return None
        rest = self._rest(running, gone)
        step = max(s.step for s in running.values())
        self.told.append({"ranks": sorted(gone), "batch": batch, "step": step, **rest.document()})
        if self.first in running:
            return rest
        self.coming, self.running, self.rest = batch, False, rest
        return None

    def _held(self) -> list[Value]:
        """What devices of this rank hold; what was on its way at the first loss is dropped."""
        on_its_way = [m.at for m in self.moves.values() if m.use >= self.reached] if not self.round else []
        for d in self.devices:
            for at in on_its_way:
                self.held.drop(d, filled_by(self.program, at))
        held = ((d, n) for d in self.all_devices for n in self._home(d).held.arrays[d])
        return [(d, n) for d, n in held if n in self.program.buffers]

    def _part(self) -> None:
        """Close all connections to other ranks, so that none of them waits for this one."""
        for fd, name in sockets().items():
            if name not in self.others:
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as s:
                    if s.family in (socket.AF_INET, socket.AF_INET6) and s.getpeername()[1] != self.me.port:
                        s.shutdown(socket.SHUT_RDWR)
        self.last = []
        self.wire.flying.clear()
        self.wire.flying_bytes = 0
        self.wire.teams.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _join(self, left: list[int], gone: frozenset[int]) -> None:
        """A world of those that are left, and the devices that are this rank's now."""
        numbers = {r: k for k, r in enumerate(left)}
        self.before, self.hosts = self.hosts, adopted(self.hosts, left)
        rank, world = numbers[self.first], len(left)
        new = [d for d, r in enumerate(self.hosts) if r == self.first and self.before[d] in gone]
        if new:
            owner = tuple(int(d in new) for d in range(self.program.devices))
            made = LocalExecutor(self.graph, self.program, self.target, self.weights, self.streamed, Route(owner, 1))
            made.room, made.packed = self.room, self.packed
            made.bind()
            made.begin(self.feeds)
            self.adopted |= dict.fromkeys(new, made)
        self.me = replace(self.me, rank=rank, world=world)
        self.wire.rank, self.wire.world = rank, world
        self.wire.heartbeat.first = left
        self.route = Route(tuple(numbers[r] for r in self.hosts), rank)
        self.wire.heartbeat.at(self.reached, WAIT)
        self.me.store.set(f"ready/{self.round}/{self.first}", b"1")
        for r in left:  # who takes over devices reads their weights first, which takes a while, and may be its end
            self._come("ready", r)
        store = PrefixStore(f"left/{self.round}", self.me.store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=self.timeout))

    def _rest(self, running: Mapping[int, _Standing], gone: frozenset[int]) -> Rest:
        """What is left of a batch, from where everybody stands; without anybody, all of it."""
        reached = [0] * self.program.devices
        for d, r in enumerate(self.before if running else ()):
            reached[d] = running[r].step if r in running else max(0, int(self.me.slots[r, STEP])) if r in gone else 0
        held = {(d, n) for s in running.values() for d, n in s.held}
        away = {d for d, r in enumerate(self.before) if running and r in gone}
        return rest_of(self.tasks, self.program, self.ends, held, reached, away, self.resident)

    # what is left

    def _walk(self, rest: Rest) -> None:
        """Everything that is left, in an order that is the same on all ranks."""
        waits = Counter(v for t in rest.tasks for v in t.reads)
        for v in self._held():
            if not waits[v] and v not in self.ends:
                self._drop_value(v)
        for t in rest.tasks:
            self.reached = t.step
            self.wire.heartbeat.at(t.step, COMPUTE)
            self._do(t)
            for v in t.reads:
                waits[v] -= 1
                if not waits[v] and v not in self.ends:
                    self._drop_value(v)

    def _do(self, t: Task) -> None:
        step, d = self.program.steps[t.step], t.device
        mine = self._mine(d)
        match step:
            case Load():
                if mine:
                    self._home(d).load(step.buffer, d, self.box(d, step.buffer))
            case Launch():
                if mine:
                    self._home(d).launch(t.step, step, d)
            case Transfer():
                self._received(t.step, step, d)
            case Reduce():
                self._merged(t.step, step, d)
            case _:
                raise AssertionError(step)
        for name in (n for _, n in t.outs if mine):
            held = self._home(d).held
            if name not in held.sizes[d]:
                held.count(d, name, self._home(d).nbytes(d, name))
            held.reach(d)

    def _received(self, at: int, step: Transfer, device: int) -> None:
        box, buffer = self.box(device, step.dst), self.program.buffers[step.dst]
        parts = [(m.src, m.box) for m in step.messages if m.dst == device]
        held = self.program.buffers[step.src].boxes[device]
        own = None if held is None else intersect(held, box)
        parts += [] if own is None else [(device, own)]
        pieces = [(b, self._brought(at, src, step.src, b, device)) for src, b in parts]
        if self._mine(device):
            there = [(b, a) for b, a in pieces if a is not None]
            self._home(device).held.arrays[device][step.dst] = target_protocol.assemble(
                box, buffer.dtype, there, self.target.device
            )

    def _merged(self, at: int, step: Reduce, device: int) -> None:
        group = next(g for g in step.groups if device in g)
        boxes = [self.box(device, n) for n in step.dsts]
        states = [[self._state(at, step, k, e, box, device) for k, box in enumerate(boxes)] for e in group]
        if not self._mine(device):
            return
        merged = self.merged_as_sent(self.monoid(step.op), states, step.sent_as)
        for name, box, a in zip(step.dsts, boxes, merged, strict=True):
            dtype = self.program.buffers[name].dtype
            self._home(device).held.arrays[device][name] = target_protocol.assemble(box, dtype, [(box, a)], self.target.device)

    def _state(self, at: int, step: Reduce, k: int, sender: int, box: Box, receiver: int) -> Array:
        if step.known and step.known[k]:
            return self.count(step, k, sender, shape(box))
        return self._brought(at, sender, step.srcs[k], box, receiver)

    def _brought(self, at: int, src: int, name: str, box: Box, dst: int) -> Array | None:
        """A part of what one device has for another, where that is this rank's; else it is sent, if it is this rank's."""
        if self._mine(src) and self._mine(dst):
            return self.part(src, name, box)
        if self._mine(src):
            data = flat_bytes(self.part(src, name, box))
            self._post(at, dist.send, data, self.route.owner[dst])
            self.wire.payload += data.nbytes
        elif self._mine(dst):
            dtype = target_protocol.torch_dtype(self.program.buffers[name].dtype)
            found = torch.empty(shape(box), dtype=dtype)
            self._post(at, dist.recv, flat_bytes(found), self.route.owner[src])
            return found
        return None

    def _post(self, at: int, call: Callable[..., Any], data: torch.Tensor, peer: int) -> None:
        if not data.numel():
            return
        self.wire.heartbeat.at(at, WAIT, peer)
        try:
            call(data, peer)
        except RuntimeError as e:
            raise self.wire.lost([peer], at, e) from None

    def array(self, device: int, name: str) -> Array:
        """What a device of this rank holds."""
        return self._home(device).held.arrays[device][name]

    def _home(self, device: int) -> LocalExecutor:
        return self.adopted.get(device, self)

    def _mine(self, device: int) -> bool:
        return self.route.owner[device] == self.route.rank

    def _drop_value(self, v: Value) -> None:
        if self._mine(v[0]):
            self._home(v[0]).held.drop(v[0], [v[1]])


def sockets() -> dict[int, str]:
    """The sockets that this process has open, by number, with names that no others ever have."""
    out: dict[int, str] = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                out[fd] = name
    return out


def filled_by(program: Program, at: int) -> tuple[str, ...]:
    """What a transfer or a merge makes."""
    step = program.steps[at]
    assert isinstance(step, Transfer | Reduce)
    return (step.dst,) if isinstance(step, Transfer) else step.dsts


def lost(e: PeerLost | RuntimeError) -> PeerLost:
    """An error of torch.distributed as the loss that it is.

    Raises:
        RuntimeError: it is something else.
    """
    if isinstance(e, PeerLost):
        return e
    if "gloo/" in str(e) or "Connection" in str(e):
        return PeerLost([], -1, reason(e))
    raise e
