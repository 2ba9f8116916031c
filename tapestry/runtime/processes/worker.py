"""What one rank of a run does: agree with the others, load its weights, run the batches, report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
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
from tapestry.runtime.processes.batches import Batch
from tapestry.runtime.processes.distributed import RankExecutor
from tapestry.runtime.processes.heartbeat import IDLE, WAIT, Heartbeat, HeartbeatPublisher, Slots, describe, guilty
from tapestry.runtime.processes.process_backend import BACKENDS, device_of
from tapestry.runtime.processes.process_memory import kernel_count, trim
from tapestry.runtime.processes.wire import VERSION, PeerLost, Wire
from tapestry.runtime.session import MakeExecutor, Session, Slices
from tapestry.runtime.step_messages import owners
from tapestry.runtime.target_protocol import Target


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
    """

    build: Build
    constants: bytes
    identity: str
    batches: tuple[Batch, ...]
    shards: Path | None = None
    timeout: float = 30.0
    trace: bool = False
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of a run: its place, the rendezvous store (of this attempt alone), its slot, and whom to tell of progress.

    ``local`` is its number on its host, which is that of its GPU.
    """

    rank: int
    world: int
    store: Any
    slots: Slots
    advance: Callable[[int, int], None] = lambda done, total: None
    beats: bool = False
    local: int = 0


def work(me: Rank, job: Job, open_session: Open) -> dict[str, Any]:
    """Run everything; the document is complete on rank 0.

    Raises:
        TapestryError: this rank's own fault. PeerLost: another one's.
    """
    import torch

    torch.set_num_threads(job.threads)
    memory = {"before": kernel_count("VmRSS")}
    heartbeat = Heartbeat(me.slots, me.rank)
    beats = HeartbeatPublisher(me.store, heartbeat, me.world) if me.beats else None
    owners(job.build.program.devices, me.world)
    todo = _agree(me, job, [b.number for b in job.batches if not b.done])
    device = device_of(job.build.target, me.rank, me.local)
    wire = Wire(me.rank, me.world, bytes.fromhex(job.identity)[:16], heartbeat, device=device)
    try:
        dist.init_process_group(
            BACKENDS[device.type], store=PrefixStore("gloo", me.store), rank=me.rank, world_size=me.world,
            timeout=timedelta(seconds=job.timeout + 2),
        )  # fmt: skip
        source = None if job.shards is None else shards.reader(job.shards, job.build, job.identity)
        make = partial(RankExecutor, wire=wire, trace=job.trace)
        session = open_session(job.build, job.constants, weights=source, make=make)
        executor = session.executor
        assert isinstance(executor, RankExecutor)
        executor.bind()
        memory["loading"] = kernel_count("VmHWM")
        trim()
        _barrier(me, job, heartbeat)
        executor.connect([a.size for a in job.build.plan.mesh], timedelta(seconds=job.timeout + 2))
        seconds = [_run(batch, session, wire, me) for batch in job.batches if batch.number in todo]
        return _report(me, job, executor, wire, seconds, todo, memory)
    except PeerLost as e:
        raise _blamed(e, beats, me) from None
    finally:
        if beats is not None:
            beats.ended.set()
        if dist.is_initialized():
            dist.destroy_process_group()


def _run(batch: Batch, session: Session, wire: Wire, me: Rank) -> dict[str, Any]:
    """One batch; rank 0 keeps the results."""
    wire.batch = batch.number
    wire.heartbeat.batch(batch.number)
    wire.heartbeat.at(-1, IDLE)
    tensors = session.build.plan.graph.tensors
    feeds, before = batch.feeds(session.build.plan.graph), time.process_time()
    result = session.run(feeds)
    spent = time.process_time() - before
    if me.rank == 0:
        batch.keep(result.outputs)
    me.advance(batch.number, len(session.build.program.steps))
    return {
        "batch": batch.number, "seconds": result.seconds, "cpu": spent, "peak": result.measured.peak,
        "sent": result.measured.transfers, "packed": result.measured.packed,
        "hosted": {} if batch.source else {n: v for n, v in result.outputs.items() if tensors[n].on_host},
    }  # fmt: skip


def _agree(me: Rank, job: Job, todo: list[int]) -> set[int]:
    """All ranks hold the same build, in the same version, and run the batches that rank 0 says."""
    mine = {
        "build": job.identity, "tapestry": importlib.metadata.version("tapestry"), "messages": VERSION,
        "torch": importlib.metadata.version("torch"), "byte order": sys.byteorder,
        "devices": job.build.program.devices, "batches": [b.name for b in job.batches],
    }  # fmt: skip
    about = {"agree": mine, "host": socket.gethostname(), "pid": os.getpid(), "todo": todo, "machine": platform.machine()}
    me.store.set(f"hello/{me.rank}", json.dumps(about))
    everybody = _collect(me, "hello", job.timeout)
    first = everybody[0]["agree"]
    for r, other in enumerate(everybody):
        for key, value in other["agree"].items():
            if value != first[key]:
                raise RunError(
                    f"rank {r} has another {key} than rank 0", where=f"rank {r} on {other['host']}, before the first step",
                    why=f"{value!r}, not {first[key]!r}"[:400], hint="the same build directory and versions everywhere",
                )  # fmt: skip
    return set(everybody[0]["todo"])


def _collect(me: Rank, key: str, timeout: float) -> list[dict[str, Any]]:
    """What every rank has put under a key."""
    out: list[dict[str, Any]] = []
    end = time.monotonic() + timeout
    for r in range(me.world):
        while not me.store.check([f"{key}/{r}"]):
            if time.monotonic() > end:
                missing = [q for q in range(me.world) if not me.store.check([f"{key}/{q}"])]
                raise RunError(
                    f"rank {', '.join(map(str, missing))} did not come within {timeout:g} s",
                    where=f"rank {missing[0]}, before the first step",
                )
            time.sleep(0.01)
        out.append(json.loads(me.store.get(f"{key}/{r}")))
    return out


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
        about = json.loads(me.store.get(f"hello/{culprit}"))
        who = f"rank {culprit} on {about['host']}"
        if culprit in still and about["host"] == socket.gethostname():
            os.kill(about["pid"], signal.SIGKILL)
    except (RuntimeError, OSError, IndexError):  # the store is gone as well: the launcher is ending the job
        return e
    if me.store.compare_set("failure", "", str(me.rank)) != str(me.rank).encode():
        return e
    state = "is gone or stopped, last seen" if culprit in still else "holds up the others,"
    return RunError(f"rank {culprit} {state} {describe(slots[culprit])}", where=who, why=str(e))


def _report(
    me: Rank, job: Job, executor: RankExecutor, wire: Wire, runs: list[dict[str, Any]], todo: set[int], memory: dict[str, int]
) -> dict[str, Any]:
    """Everything that was measured, put together on rank 0."""
    rows = np.array([(s.batch, s.step, s.device, s.stream, s.start, s.end) for s in executor.slices], np.int64).reshape(-1, 6)
    mine = {
        "rank": me.rank, "devices": list(executor.devices), "runs": runs,
        "payload_bytes": wire.payload, "gathered_bytes": wire.gathered, "messages": wire.messages,
        "staged_bytes": wire.staged, "backend_calls": executor.backend_calls,
        "resident_bytes": {**memory, "running": kernel_count("VmHWM")}, "slices": rows,
        "private_bytes": kernel_count("RssAnon"), "cpu_seconds": [r["cpu"] for r in runs],
        "weight_bytes": executor.weight_bytes(),
    }  # fmt: skip
    everybody: list[Any] | None = [None] * me.world if me.rank == 0 else None
    wire.heartbeat.at(-1, WAIT, 0 if me.rank else -1)
    dist.gather_object(mine, everybody)
    return {} if everybody is None else summary(job, everybody, todo)


def summary(job: Job, ranks: list[dict[str, Any]], todo: set[int]) -> dict[str, Any]:
    """One document from what all ranks measured."""
    peak, packed = [0] * job.build.program.devices, [0] * job.build.program.devices
    transfers: dict[str, list[int]] = {}
    for r in ranks:
        devices: list[int] = r["devices"]
        for run in r["runs"]:
            highest: list[int] = run["peak"]
            for d in devices:
                peak[d], packed[d] = max(peak[d], highest[d]), run["packed"][d]
        last: dict[str, tuple[int, int]] = r["runs"][-1]["sent"] if r["runs"] else {}
        for kind, (count, total) in last.items():
            transfers.setdefault(kind, [count, 0])[1] += total
    each = [max(r["runs"][k]["seconds"] for r in ranks) for k in range(len(todo))]
    return {
        "peak_bytes": peak, "packed_bytes": packed,
        "transfers": [{"kind": k, "count": c, "bytes": b} for k, (c, b) in transfers.items()],
        "batches": len(todo), "skipped": len(job.batches) - len(todo), "batch_seconds": each,
        "seconds": each[-1] if each else 0.0,
        "ranks": [{k: v for k, v in r.items() if k not in ("runs", "slices")} for r in ranks],
        "slices": [r["slices"] for r in ranks], "hosted": ranks[0]["runs"][-1]["hosted"] if todo else {},
    }  # fmt: skip


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
