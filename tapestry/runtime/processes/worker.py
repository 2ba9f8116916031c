"""What one rank of a run does: agree with the others, load its weights, run the batches, report."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from tapestry import flags
from tapestry.build.store import Build
from tapestry.errors import RunError, TapestryError
from tapestry.runtime.processes import weight_shards as shards
from tapestry.runtime.processes.agreement import agree, same_inputs
from tapestry.runtime.processes.batches import Batch
from tapestry.runtime.processes.distributed import RankExecutor
from tapestry.runtime.processes.heartbeat import IDLE, WAIT, Heartbeat, HeartbeatPublisher, Slots, describe, end_soon, guilty
from tapestry.runtime.processes.process_backend import BACKENDS, device_of
from tapestry.runtime.processes.process_memory import after_loading, before_loading, kernel_count
from tapestry.runtime.processes.rank_report import RankReport, RunReport, gather, summary
from tapestry.runtime.processes.rendezvous import unseal
from tapestry.runtime.processes.survivors import SurvivingExecutor, lost, sockets
from tapestry.runtime.processes.wire import PeerLost, Wire
from tapestry.runtime.session import MakeExecutor, Session, Slices
from tapestry.runtime.step_messages import owners
from tapestry.runtime.target_protocol import Target

PARTING = 5.0  # seconds in which a rank that has failed tells what it knows and leaves


class Open(Protocol):
    """Opens a session on a build's target (`api.open_session`)."""

    def __call__(self, build: Build, constants: bytes, *, weights: Slices | None, make: MakeExecutor[Target] | None) -> Session:
        """A session; see `Session` for the arguments."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all ranks are to do.

    Attributes:
        identity: the hash of the build, which all ranks must share.
        shards: a folder of ``tapestry shard-weights``; without it weights are slices of the model's files.
        timeout: seconds after which silence is a failure.
        threads: of torch, for each rank.
        kernels: what the set of kernels on this host depends on, which all ranks must share.
        recompute: when ranks are lost, those that are left compute what is gone, and go on.
        serve: instead of batches, what each rank does with its session until it is told to end.
    """

    build: Build
    constants: bytes
    identity: str
    batches: tuple[Batch, ...]
    shards: Path | None = None
    timeout: float = 30.0
    trace: bool = False
    threads: int = 1
    kernels: Mapping[str, str] = field(default_factory=dict[str, str])
    recompute: bool = False
    serve: Callable[[Rank, Session, Wire], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of a run: its place, the rendezvous store (of this attempt alone), its slot, and whom to tell of progress.

    ``local`` is its number on its host, which is that of its GPU; ``secret`` is what it knows in common with the others;
    ``port`` is the store's.
    """

    rank: int
    world: int
    store: Any
    slots: Slots
    advance: Callable[[int, int], None] = lambda done, total: None
    beats: bool = False
    local: int = 0
    secret: bytes = b""
    port: int = 0


def work(me: Rank, job: Job, open_session: Open) -> dict[str, Any]:
    """Run everything; the document is complete on rank 0.

    Raises:
        TapestryError: this rank's own fault. PeerLost: another one's.
    """
    import torch

    torch.set_num_threads(job.threads)
    memory = {"before": kernel_count("VmRSS")}
    heartbeat = Heartbeat(me.slots, me.rank)
    beats = HeartbeatPublisher(me.store, heartbeat, me.world, job.timeout + PARTING) if me.beats else None
    owners(job.build.program.devices, me.world)
    device = device_of(job.build.target, me.rank, me.local)
    todo = agree(me, job, device, [b.number for b in job.batches if not b.done])
    others = frozenset(sockets().values())
    wire = Wire(me.rank, me.world, bytes.fromhex(job.identity)[:16], heartbeat, device=device)
    try:
        dist.init_process_group(
            BACKENDS[device.type], store=PrefixStore("gloo", me.store), rank=me.rank, world_size=me.world,
            timeout=timedelta(seconds=job.timeout + 2),
        )  # fmt: skip
        before_loading()
        source = None if job.shards is None else shards.reader(job.shards, job.build)
        make = partial(RankExecutor, wire=wire, trace=job.trace)
        if job.recompute:
            make = partial(SurvivingExecutor, wire=wire, trace=job.trace, me=me, timeout=job.timeout + 2, others=others)
        session = open_session(job.build, job.constants, weights=source, make=make)
        executor = session.executor
        assert isinstance(executor, RankExecutor)
        executor.bind()
        memory["loading"] = kernel_count("VmHWM")
        after_loading()
        _barrier(me, job, heartbeat)
        executor.connect([a.size for a in job.build.plan.mesh], timedelta(seconds=job.timeout + 2))
        if job.serve is not None:
            job.serve(me, session, wire)
        document = _batches(me, job, session, wire, todo, memory)
    except PeerLost as e:
        if beats is not None:
            end_soon(heartbeat, 2 * PARTING)
        raise _blamed(e, beats, me) from None
    finally:
        if beats is not None:
            beats.ended.set()
    dist.destroy_process_group()  # not after a failure: it would wait for those that are gone
    return document


def _batches(me: Rank, job: Job, session: Session, wire: Wire, todo: set[int], memory: dict[str, int]) -> dict[str, Any]:
    """Everything that is to be run, and the document; again where ranks are lost, with those that are left."""
    executor, done = session.executor, list[tuple[RunReport, dict[str, Any]]]()
    assert isinstance(executor, RankExecutor)
    batches = [b for b in job.batches if b.number in todo]
    me.store.set(f"begun/{me.rank}", b"1")  # from now on a loss can be outlived
    while True:
        try:
            while len(done) < len(batches):
                me = executor.me if isinstance(executor, SurvivingExecutor) else me
                done.append(_run(batches[len(done)], session, wire, me))
            me = executor.me if isinstance(executor, SurvivingExecutor) else me  # numbered anew if ranks were lost in a batch
            document = _report(me, job, executor, wire, [run for run, _ in done], todo, memory)
            break
        except (PeerLost, RuntimeError) as e:
            if not isinstance(executor, SurvivingExecutor):
                raise
            executor.settle(lost(e))
            me = executor.me
            del done[executor.coming :]
    if document and isinstance(executor, SurvivingExecutor):
        document["losses"] = executor.told
    return document and {**document, "hosted": done[-1][1] if done else {}}


def _run(batch: Batch, session: Session, wire: Wire, me: Rank) -> tuple[RunReport, dict[str, Any]]:
    """One batch; rank 0 keeps the results, and has the values of the host among them."""
    wire.batch = batch.number
    wire.heartbeat.batch(batch.number)
    wire.heartbeat.at(-1, IDLE)
    graph = session.build.plan.graph
    feeds, before = batch.feeds(graph), time.process_time()
    if not (isinstance(session.executor, SurvivingExecutor) and session.executor.rest):  # else others have begun it
        same_inputs(me, graph, batch.name, feeds, partial(wire.heartbeat.at, -1, WAIT))
    result = session.run(feeds)
    spent = time.process_time() - before
    if wire.rank == 0:
        if not batch.done:
            batch.keep(result.outputs)
        me.advance(batch.number, len(session.build.program.steps))
    used = result.measured
    report = RunReport(
        batch=batch.number, seconds=result.seconds, cpu=spent, peak=used.peak, packed=used.packed, sent=used.transfers
    )
    return report, {} if batch.source else {n: v for n, v in result.outputs.items() if graph.tensors[n].on_host}


def _barrier(me: Rank, job: Job, heartbeat: Heartbeat) -> None:
    """Wait until all have loaded and packed their weights, however long that takes, as long as each says that it lives."""
    me.store.set(f"ready/{me.rank}", b"1")
    for r in range(me.world):
        heartbeat.at(-1, WAIT, r)
        before, since = b"", time.monotonic()
        while not me.store.check([f"ready/{r}"]):
            time.sleep(0.01)
            if me.beats and me.store.check([f"heartbeat/{r}"]):
                now = me.store.get(f"heartbeat/{r}")
                before, since = (before, since) if now == before else (now, time.monotonic())
            if me.beats and time.monotonic() - since > job.timeout:
                raise PeerLost([r], -1, f"no sign of life for {job.timeout:g} s while it read its weights")


def _blamed(e: PeerLost, beats: HeartbeatPublisher | None, me: Rank) -> Exception:
    """Under torchrun, find out who is to blame, and end a stopped process on this host so that its launcher notices."""
    if beats is None:
        return e
    try:
        slots, still = beats.read()
        culprit = guilty(slots, still)[0]
        about = unseal(me.secret, me.store.get(f"hello/{culprit}"), culprit)
        who = f"rank {culprit} on {about['host']}"
        if culprit in still and about["host"] == socket.gethostname():
            os.kill(about["pid"], signal.SIGKILL)
    except (RuntimeError, OSError, IndexError, RunError):  # the store is gone as well: the launcher is ending the job
        return e
    if me.store.compare_set("failure", "", str(me.rank)) != str(me.rank).encode():
        return e
    state = "is gone or stopped, last seen" if culprit in still else "holds up the others,"
    return RunError(f"rank {culprit} {state} {describe(slots[culprit])}", where=who, why=str(e))


def _report(
    me: Rank, job: Job, executor: RankExecutor, wire: Wire, runs: list[RunReport], todo: set[int], memory: dict[str, int]
) -> dict[str, Any]:
    """Everything that was measured, put together on rank 0."""
    rows = np.array([(s.batch, s.step, s.device, s.stream, s.start, s.end) for s in executor.slices], np.int64).reshape(-1, 6)
    mine = RankReport(
        rank=me.rank, devices=list(executor.all_devices), runs=runs, payload_bytes=wire.payload, gathered_bytes=wire.gathered,
        messages=wire.messages, staged_bytes=wire.staged, resident_bytes={**memory, "running": kernel_count("VmHWM")},
        private_bytes=kernel_count("RssAnon"), weight_bytes=executor.weight_bytes(), trace=rows.tobytes(),
        backend_calls=executor.backend_calls,
    )  # fmt: skip
    everybody = gather(mine, me.world, partial(wire.heartbeat.at, -1, WAIT))
    return summary(job, everybody, todo) if everybody else {}


def cause(e: BaseException, slot: Slots) -> tuple[str, str]:
    """("lost" | "failed", one sentence with the cause and where) of what ended a rank."""
    where = describe(slot)
    if isinstance(e, PeerLost):
        return "lost", f"{e} ({where})"
    if isinstance(e, TapestryError):
        return "failed", f"{e} ({where})"
    text = str(e)
    if isinstance(e, RuntimeError) and ("gloo/" in text or "NCCL" in text):  # outside of the program's messages
        return "lost", f"{text.splitlines()[0]} ({where})"
    if isinstance(e, MemoryError) or "can't allocate memory" in text or "out of memory" in text or "Cannot allocate" in text:
        return "failed", f"out of memory while {where}"
    if isinstance(e, OSError):
        return "failed", f"{e.filename or ''}: {e.strerror or e} ({where})"
    if flags.debug_level():
        return "failed", f"{type(e).__name__}: {text} ({where})\n{''.join(traceback.format_exception(e))}"
    at = traceback.extract_tb(e.__traceback__)[-1]
    return "failed", f"{type(e).__name__}: {text} ({where}; {at.filename}:{at.lineno}; TAPESTRY_DEBUG=1 says more)"
