"""What one rank of a run does: agree with the others, load its weights, run, report."""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from tapestry import flags
from tapestry.build.store import Build
from tapestry.errors import RunError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.plugins import entry_points as plugins
from tapestry.runtime.feeds import given_feeds
from tapestry.runtime.outputs import write_outputs
from tapestry.runtime.processes import host_values
from tapestry.runtime.processes.distributed import RankExecutor
from tapestry.runtime.processes.heartbeat import IDLE, WAIT, Heartbeat, HeartbeatPublisher, Slots, describe, end_soon, guilty
from tapestry.runtime.processes.process_backend import BACKENDS, device_of
from tapestry.runtime.processes.process_memory import after_loading, before_loading, kernel_count
from tapestry.runtime.processes.rank_report import RankReport, RunReport, gather
from tapestry.runtime.processes.rendezvous import seal, unseal
from tapestry.runtime.processes.wire import VERSION, PeerLost, Wire, reason
from tapestry.runtime.session import MakeExecutor, Session, check_feeds
from tapestry.runtime.step_messages import owners
from tapestry.runtime.target_protocol import Target

# What all ranks must have in common, before the first step: ranks of different worlds would give a
# wrong answer, and no error.


_dist: Any = dist  # its functions have no types
DIGEST = 32  # bytes of SHA-256
HINTS = {
    "threads": "--threads, the same on all hosts",
    "seed": "--seed, the same on all hosts",
    "inputs": "--input, the same on all hosts",
}


def world_of(job: Job, device: torch.device) -> dict[str, Any]:
    """All that results depend on and that a rank cannot see of another one."""
    matmul = torch.backends.cuda.matmul
    return {
        "build": job.identity,
        "tapestry": flags.version(),
        "messages": VERSION,
        "torch": str(torch.__version__),
        "byte order": sys.byteorder,
        "devices": job.build.program.devices,
        "inputs": sorted(name for name, _ in job.inputs),
        "seed": job.seed,
        "threads": job.threads,
        "target": plugins.brought_by("targets", job.build.target),
        "kind of device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **{f"set of kernels ({k})": v for k, v in job.kernels.items()},
        "precision of products": [torch.get_float32_matmul_precision(), matmul.allow_tf32],
        **{f"environment ({k})": v for k, v in flags.of_results().items()},
    }


def agree(me: Rank, job: Job, device: torch.device) -> None:
    """See that all ranks are of one world.

    Raises:
        RunError: a rank differs (in what, and which), or did not come.
    """
    about = {"agree": world_of(job, device), "host": socket.gethostname(), "pid": os.getpid(), "local": me.local}
    me.store.set(f"hello/{me.rank}", seal(me.secret, about | {"machine": platform.machine()}))
    everybody = _collect(me, job.timeout)
    for r, other in enumerate(everybody):
        for key, value in other["agree"].items():
            if value != everybody[0]["agree"][key]:
                raise RunError(
                    f"rank {r} has another {key} than rank 0",
                    where=f"rank {r} on {other['host']}, before the first step",
                    why=f"{value!r}, not {everybody[0]['agree'][key]!r}"[:400],
                    hint=HINTS.get(key, "the same build directory, versions and settings everywhere"),
                )
    if device.type == "cuda":
        gpus = [(other["host"], other["local"]) for other in everybody]
        twice = next((r for r, gpu in enumerate(gpus) if gpu in gpus[:r]), None)
        if twice is not None:
            host, local = gpus[twice]
            raise RunError(
                f"ranks {gpus.index(gpus[twice])} and {twice} are both number {local} on {host}", hint="LOCAL_RANK for each"
            )


def _collect(me: Rank, timeout: float) -> list[dict[str, Any]]:
    """What every rank has said of itself."""
    end = time.monotonic() + timeout
    missing = list(range(me.world))
    while missing:
        missing = [r for r in missing if not me.store.check([f"hello/{r}"])]
        if missing and time.monotonic() > end:
            raise RunError(
                f"rank {', '.join(map(str, missing))} did not come within {timeout:g} s",
                where=f"rank {missing[0]}, before the first step",
            )
        if missing:
            time.sleep(0.01)
    return [unseal(me.secret, me.store.get(f"hello/{r}"), r) for r in range(me.world)]


def same_inputs(me: Rank, graph: Graph, feeds: Mapping[str, Any], waiting: Callable[[], None]) -> None:
    """Compare the inputs, as the ranks have read them, by their hashes; all ranks go on, or none.

    Raises:
        RunError: an input differs. PeerLost: a rank is gone. TapestryError: one is missing, or of another shape or dtype.
    """
    checked = check_feeds(feeds, graph)
    if me.world == 1 or not graph.inputs:
        return
    own = torch.frombuffer(bytearray(b"".join(_digest(checked[t]) for t in graph.inputs)), dtype=torch.uint8)
    extremes = torch.cat((own, 255 - own))
    waiting()
    try:
        _dist.all_reduce(extremes, dist.ReduceOp.MAX)
    except RuntimeError as e:
        raise PeerLost([r for r in range(me.world) if r != me.rank], -1, reason(e)) from None
    greatest, least = extremes.chunk(2)
    if bool((greatest == 255 - least).all()):
        return
    everybody = [torch.empty_like(own) for _ in range(me.world)]  # all ranks come here, or none
    _dist.all_gather(everybody, own)
    rank = next(r for r, theirs in enumerate(everybody) if not torch.equal(theirs, everybody[0]))
    first = int(torch.nonzero(everybody[rank] != everybody[0])[0])
    raise RunError(
        f"rank {rank} has another input '{graph.inputs[first // DIGEST]}' than rank 0",
        where=f"rank {rank}, before the first step",
        hint="the same files on all hosts",
    )


def _digest(value: Any) -> bytes:
    if isinstance(value, HostValue):
        return hashlib.sha256(host_values.encode(value.value)).digest()
    return hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).digest()


def summary(job: Job, ranks: list[RankReport]) -> dict[str, Any]:
    """One document from what all ranks measured."""
    peak, packed = [0] * job.build.program.devices, [0] * job.build.program.devices
    transfers: dict[str, list[int]] = {}
    for r in ranks:
        for run in r.runs:
            for d in r.devices:
                peak[d], packed[d] = max(peak[d], run.peak[d]), run.packed[d]
        for kind, (count, total) in r.runs[-1].sent.items():
            transfers.setdefault(kind, [count, 0])[1] += total
    each = [max(r.runs[k].seconds for r in ranks) for k in range(job.runs)]
    return {
        "peak_bytes": peak,
        "packed_bytes": packed,
        "transfers": [{"kind": k, "count": c, "bytes": b} for k, (c, b) in transfers.items()],
        "run_seconds": each,
        "seconds": each[-1],
        "ranks": [r.row() for r in ranks],
        "slices": [r.slices() for r in ranks],
    }


PARTING = 5.0  # seconds in which a rank that has failed tells what it knows and leaves


class Open(Protocol):
    """Opens a session on a build's target (`api.open_session`)."""

    def __call__(self, build: Build, constants: bytes, *, make: MakeExecutor[Target] | None) -> Session:
        """A session; see `Session` for the arguments."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all ranks are to do.

    Attributes:
        identity: the hash of the build, which all ranks must share.
        inputs: files of some inputs; the others are random by ``seed``.
        output: the folder for the results (``None``: nowhere).
        runs: how often, each time on the same inputs.
        timeout: seconds after which silence is a failure.
        threads: of torch, for each rank.
        kernels: what the set of kernels on this host depends on, which all ranks must share.
        serve: instead of runs, what each rank does with its session until it is told to end.
    """

    build: Build
    constants: bytes
    identity: str
    inputs: tuple[tuple[str, Path], ...] = ()
    seed: int = 0
    output: Path | None = None
    runs: int = 1
    timeout: float = 30.0
    trace: bool = False
    threads: int = 1
    kernels: Mapping[str, str] = field(default_factory=dict[str, str])
    serve: Callable[[Rank, Session, Wire], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of a run: its place, the rendezvous store (of this attempt alone), and its slot.

    ``local`` is its number on its host, which is that of its GPU; ``secret`` is what it knows in common with the others.
    """

    rank: int
    world: int
    store: Any
    slots: Slots
    beats: bool = False
    local: int = 0
    secret: bytes = b""


def work(me: Rank, job: Job, open_session: Open) -> dict[str, Any]:
    """Run everything; the document is complete on rank 0 (of ranks that serve there is none).

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
    agree(me, job, device)
    wire = Wire(me.rank, me.world, bytes.fromhex(job.identity)[:16], heartbeat, device=device)
    try:
        dist.init_process_group(
            BACKENDS[device.type],
            store=PrefixStore("gloo", me.store),
            rank=me.rank,
            world_size=me.world,
            timeout=timedelta(seconds=job.timeout + 2),
        )
        before_loading()
        make = partial(RankExecutor, wire=wire, trace=job.trace)
        session = open_session(job.build, job.constants, make=make)
        executor = session.executor
        assert isinstance(executor, RankExecutor)
        executor.bind()
        memory["loading"] = kernel_count("VmHWM")
        after_loading()
        _barrier(me, job, heartbeat)
        executor.connect([a.size for a in job.build.plan.mesh], timedelta(seconds=job.timeout + 2))
        if job.serve is not None:
            job.serve(me, session, wire)
        document = _runs(me, job, session, wire, memory) if job.serve is None else {}
    except PeerLost as e:
        if beats is not None:
            end_soon(heartbeat, 2 * PARTING)
        raise _blamed(e, beats, me) from None
    finally:
        if beats is not None:
            beats.ended.set()
    dist.destroy_process_group()  # not after a failure: it would wait for those that are gone
    return document


def _runs(me: Rank, job: Job, session: Session, wire: Wire, memory: dict[str, int]) -> dict[str, Any]:
    """Everything that is to be run, and the document, with the values of the host among the last results."""
    executor, graph = session.executor, session.build.plan.graph
    assert isinstance(executor, RankExecutor)
    wire.heartbeat.at(-1, IDLE)
    feeds = given_feeds(graph, job.inputs, job.seed)
    done = [_run(k, feeds, job, session, wire, me) for k in range(job.runs)]
    document = _report(me, job, executor, wire, [report for report, _ in done], memory)
    return document and {**document, "hosted": done[-1][1]}


def _run(
    number: int, feeds: Mapping[str, Any], job: Job, session: Session, wire: Wire, me: Rank
) -> tuple[RunReport, dict[str, Any]]:
    """One run, whose results rank 0 keeps; the values of the host among them."""
    wire.batch = number
    wire.heartbeat.batch(number)
    wire.heartbeat.at(-1, IDLE)
    before = time.process_time()
    graph = session.build.plan.graph
    same_inputs(me, graph, feeds, partial(wire.heartbeat.at, -1, WAIT))
    result = session.run(feeds)
    spent = time.process_time() - before
    if wire.rank == 0 and job.output is not None:
        write_outputs(job.output, result.outputs)
    used = result.measured
    report = RunReport(seconds=result.seconds, cpu=spent, peak=used.peak, packed=used.packed, sent=used.transfers)
    return report, {n: v for n, v in result.outputs.items() if graph.tensors[n].on_host}


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
    me: Rank, job: Job, executor: RankExecutor, wire: Wire, runs: list[RunReport], memory: dict[str, int]
) -> dict[str, Any]:
    """Everything that was measured, put together on rank 0."""
    rows = np.array([(s.batch, s.step, s.device, s.stream, s.start, s.end) for s in executor.slices], np.int64).reshape(-1, 6)
    mine = RankReport(
        rank=me.rank,
        devices=list(executor.devices),
        runs=runs,
        payload_bytes=wire.payload,
        gathered_bytes=wire.gathered,
        messages=wire.messages,
        staged_bytes=wire.staged,
        resident_bytes={**memory, "running": kernel_count("VmHWM")},
        private_bytes=kernel_count("RssAnon"),
        weight_bytes=executor.weight_bytes(),
        trace=rows.tobytes(),
        backend_calls=executor.backend_calls,
    )
    everybody = gather(mine, me.world, partial(wire.heartbeat.at, -1, WAIT))
    return summary(job, everybody) if everybody else {}


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
