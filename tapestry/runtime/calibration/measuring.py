"""Measuring this machine, and the topology document that is made of it."""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from tapestry import flags
from tapestry.build.store import new_file
from tapestry.errors import RunError
from tapestry.ir.program import CALLS, EXCHANGE
from tapestry.plan.topology import Topology, topology
from tapestry.plan.topology.fabric import AGREE, CLASSES, CallTimes, KernelRates, calls_data, classes_data
from tapestry.runtime.calibration.automatic import versions
from tapestry.runtime.calibration.call_clock import (
    SIZES,
    CallClock,
    CallPoint,
    Exchange,
    KernelClock,
    Probe,
    Timed,
    api,
    between,
    call_of,
    few_probes,
    groups,
    memory_bytes,
    probes,
    rates_by_dtype,
)
from tapestry.runtime.calibration.rate_fit import (
    KernelPoint,
    fit_kernels,
    fit_line,
    fit_table,
    judged,
    kept_back,
    kernel_seconds,
    margin,
    vector_rate,
)
from tapestry.runtime.processes.distributed import BACKENDS, device_of
from tapestry.runtime.processes.wire import LOOPBACK, join
from tapestry.runtime.target_protocol import Target

# What a process of ``tapestry calibrate`` does: kernels beside the other processes, kernels alone, calls, both at once.


REPEATS, REPEATS_ALONE = 3, 2
LONG_RUN = 4  # windows
PREPARATION = 0.15  # seconds to make a probe's arrays and kernels, about
QUICK = 15.0  # seconds below which six probes of a class and every fourth size are measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be measured.

    Attributes:
        processes: of all hosts together; ``here`` of them share this host.
        seconds: about how long it may take.
        strided: groups of ranks that are apart are measured as well.
    """

    processes: int
    here: int
    threads: int
    seconds: float
    strided: bool = False

    def settled(self, samples: Sequence[float]) -> float:
        """Of repetitions the least, because what others do on the machine only adds; where the processes have to share
        cores, the median, because what they do to each other is to be measured."""
        shares = self.here * self.threads > (os.cpu_count() or 1)
        return statistics.median(samples) if shares else min(samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What was measured; ``hidden`` is the share of the shorter of a transfer and a kernel that the longer one hid."""

    task: Task
    memory: int
    kernels: list[KernelPoint]
    alone: list[KernelPoint] = field(default_factory=list[KernelPoint])
    dtypes: list[KernelPoint] = field(default_factory=list[KernelPoint])
    calls: list[CallPoint] = field(default_factory=list[CallPoint])
    hidden: float | None = None
    copies: tuple[tuple[int, float], ...] = ()


Say = Callable[[int, int], None]


class _Bench:
    """The measuring of one rank."""

    def __init__(self, rank: int, task: Task, where: Target | torch.device, say: Say) -> None:
        self.rank, self.task, self.say = rank, task, say
        self.target = None if isinstance(where, torch.device) else where
        self.device = where if isinstance(where, torch.device) else where.device
        self.clock = CallClock(self.device, task.settled)
        self.beside = KernelClock(between(), self.target) if self.target else None
        quick = task.seconds < QUICK
        self.probes = list(few_probes() if quick else probes()) if self.target else []
        self.dtypes = list(rates_by_dtype()) if self.target else []
        self.sizes = SIZES[:: 4 if quick else 1]
        self.groups = list(groups(rank, task.processes, task.strided)) if task.processes > 1 else []
        shared = task.processes > 1
        kernels, calls = len(self.probes) + len(self.dtypes), len(self.groups) * len(CALLS) * len(self.sizes)
        windows = kernels * (REPEATS + shared * REPEATS_ALONE) + 1.3 * calls
        self.window = max(task.seconds - PREPARATION * kernels, 0.3 * task.seconds) / max(windows, 1.0)
        self.done, self.total = 0, kernels + calls

    def step(self) -> None:
        """Another measurement is done."""
        self.done += 1
        self.say(self.done, self.total)

    def kernel(self, probe: Probe) -> tuple[KernelPoint, KernelPoint | None]:
        """(with all processes at work, with one alone)."""
        assert self.target is not None and self.beside is not None
        k = KernelClock(probe, self.target)
        alone, shared, between = None, self.task.processes > 1, self.beside.next
        if shared:
            api.barrier()
        seconds = self.task.settled([k.seconds(self.window, between) for _ in range(REPEATS)])
        if shared:
            mean = torch.tensor([seconds / self.task.processes], dtype=torch.float64)
            api.all_reduce(mean)
            seconds = float(mean[0])
            if self.rank == 0:  # the others wait for the next barrier
                alone = k.point(min(k.seconds(self.window, between) for _ in range(REPEATS_ALONE)))
            api.barrier()
        self.step()
        return k.point(seconds), alone

    def calls(self) -> list[CallPoint]:
        """Every call in every group; sizes that come out equal once, and none beyond one that took `LONG_RUN` windows."""
        out: dict[tuple[str, int, int, int], CallPoint] = {}
        clock = CallClock(self.device, self.task.settled, self.beside and self.beside.next)
        for g in self.groups:
            for name in CALLS:
                last = 0.0
                for size in self.sizes:
                    self.step()
                    if last > LONG_RUN * self.window:
                        continue
                    call = call_of(name, g, size, self.device)
                    key = (name, len(g.ranks), g.stride, call.nbytes)
                    if key not in out:
                        last = clock.seconds(call, self.window)
                        out[key] = CallPoint(*key, last)
        return list(out.values())

    def hidden(self, calls: list[CallPoint]) -> float | None:
        """How much of the shorter one of a transfer and a kernel is hidden, where both take about as long."""
        if not self.groups or self.beside is None:
            return None
        g, k = self.groups[0], self.beside
        kernel = self.clock.seconds(Timed(k.run), LONG_RUN * self.window)
        sizes = [c for c in calls if c.call == EXCHANGE and c.group == len(g.ranks) and c.stride == g.stride]
        size = min(sizes, key=lambda c: abs(c.seconds - kernel)).nbytes
        exchange = Exchange(g, size // 4 // (len(g.ranks) - 1), self.device)

        def beside() -> None:
            exchange.send()
            k.run()
            exchange.wait()

        transfer = self.clock.seconds(Timed(exchange.finish, ahead=exchange.receive), LONG_RUN * self.window)
        both = self.clock.seconds(Timed(beside, ahead=exchange.receive), LONG_RUN * self.window)
        return min(1.0, max(0.0, (kernel + transfer - both) / min(kernel, transfer)))


def measure(
    rank: int, task: Task, where: Target | torch.device, memory: int, say: Say = lambda done, total: None
) -> Measurements:
    """Measure on this process, together with all others of the task (which are in one process group).

    Args:
        where: the target whose kernels are measured; a device, where calls alone are.
        memory: bytes of this host.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(task.threads)
    try:
        bench = _Bench(rank, task, where, say)
        both = [bench.kernel(p) for p in bench.probes]
        dtypes = [bench.kernel(p)[0] for p in bench.dtypes]
        calls = bench.calls()
        return Measurements(
            task=task, memory=memory, kernels=[k for k, _ in both],
            alone=[a for _, a in both if a is not None], dtypes=dtypes, calls=calls,
            hidden=bench.hidden(calls), copies=_copies() if not calls else (),
        )  # fmt: skip
    finally:
        torch.set_num_threads(before)


def _copies() -> tuple[tuple[int, float], ...]:
    """(bytes, seconds) of copies into arrays that are there: the messages between logical devices of one process."""
    out: list[tuple[int, float]] = []
    for nbytes in SIZES:
        source, there = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
        count = max(3, min(2000, (1 << 26) // nbytes))
        samples: list[float] = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            for _ in range(count):
                there.copy_(source)
            samples.append((time.perf_counter() - start) / count)
        out.append((nbytes, min(samples)))
    return tuple(out)


# From measurements to a topology document, which says how well it predicts what was kept back of them.


ENOUGH = 6  # kernels of a class for a factor of its own
HIDDEN = 0.5  # of the shorter one of a transfer and a kernel: with less they take turns rather than run beside each other
Fit = dict[str, dict[str, Any]]


def write(path: Path, found: Mapping[str, Any]) -> Topology:
    """Write a document in one step, and read it back as a topology.

    Raises:
        TapestryError: the measurements make no topology (a rate that is not positive).
    """
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(found, indent=1))
        return topology((), str(temporary))


def document(found: Measurements, versions: Mapping[str, str], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A topology document (docs/reference/topology.md) of what was measured.

    Args:
        versions: what else to say under ``measured``.
        given: the ``device``, where no kernels were measured.
    """
    task, first = found.task, found.alone or found.kernels
    classes, fit = fit_classes(first)
    vector, out = vector_rate(first), dict[str, Any]()
    if found.alone:
        out["alone"] = measured_device(classes, vector, found.alone, found.dtypes, found.memory)
        classes, vector, beside = slowed(classes, vector, found.kernels, found.alone)
        fit = beside | {f"{k} alone": v for k, v in fit.items()}
    memory = found.memory // task.here
    out["device"] = given or measured_device(classes, vector, found.kernels, found.dtypes, memory)
    tables, more = fit_calls(found.calls)
    fit |= more
    out["levels"] = _levels(found)
    if tables:
        out |= {"collectives": calls_data(tables), "overlap": found.hidden is None or found.hidden >= HIDDEN}
    points = [[p.kind, p.work, p.light, p.nbytes, p.seconds] for p in found.kernels]
    measured = {"processes": task.processes, "threads": task.threads, "hidden": found.hidden, **versions, "kernels": points}
    return {**out, "margin": margin(fit), "measured": measured, "fit": fit}


def fit_classes(points: Sequence[KernelPoint]) -> tuple[dict[str, KernelRates], Fit]:
    """Rates by class, and how well they predict. What contractions compute beside their products has one rate."""
    classes, fit = dict[str, KernelRates](), Fit()
    of: dict[str, list[KernelPoint]] = defaultdict(list)
    for p in points:
        of[p.kind].append(p)
    vector = vector_rate(points)
    for kind in (k for k in CLASSES if k in of):
        classes[kind], fit[kind] = fit_kernels(of[kind], vector)
    return classes, fit


def slowed(
    alone: Mapping[str, KernelRates], vector: float, points: Sequence[KernelPoint], same: Sequence[KernelPoint]
) -> tuple[dict[str, KernelRates], float, Fit]:
    """Rates where all processes work, of those of one alone: slower by the median over a class of what the same kernel took the
    one way and, just after, the other. Fitted by themselves, rates of times in which processes wait for each other would
    say more of when they waited than of the kernels.

    Args:
        points: with all processes at work; ``same``: alone, in the same order.

    Returns:
        also the rate of what products are computed with, and how well the rates predict what was kept back.
    """
    pairs = defaultdict[str, list[tuple[KernelPoint, KernelPoint]]](list)
    for p, a in zip(points, same, strict=True):
        pairs[p.kind].append((p, a))
    mine, held = dict[str, list[float]](), dict[str, list[KernelPoint]]()
    for kind, own in pairs.items():
        kept, back = kept_back(sorted(own, key=lambda pair: pair[1].seconds))
        mine[kind], held[kind] = [p.seconds / a.seconds for p, a in kept], [p for p, _ in back]
    common = statistics.median(x for ratios in mine.values() for x in ratios)
    rates, fit = dict[str, KernelRates](), Fit()
    for kind, ratios in mine.items():
        by = statistics.median(ratios) if len(ratios) >= ENOUGH else common
        k = alone[kind]
        rates[kind] = KernelRates(k.launch * by, k.rate / by, k.bandwidth / by)
        guessed = [(kernel_seconds(rates[kind], p, vector / common), p.seconds) for p in held[kind]]
        fit[kind] = judged(len(pairs[kind]), guessed)
    return rates, vector / common, fit


def measured_device(
    classes: Mapping[str, KernelRates], vector: float, points: Sequence[KernelPoint], dtypes: Sequence[KernelPoint], memory: int
) -> dict[str, Any]:
    """The ``device`` of a document: its common rates are what maps reach, and products by dtype."""
    mapped, heavy = classes["map"], classes["contraction"]
    bandwidth = max(p.nbytes / p.seconds for p in points if p.kind == "map")
    same = next((p.seconds for p in dtypes if p.dtype == "f32"), 1.0)
    flops = {p.dtype: heavy.rate * same / p.seconds for p in dtypes} or {"f32": heavy.rate}
    return {
        "memory": memory, "bandwidth": bandwidth, "launch": mapped.launch, "vector": vector,
        "flops": {**flops, "other": min(flops.values())}, "classes": classes_data(classes),
    }  # fmt: skip


def fit_calls(points: Sequence[CallPoint]) -> tuple[list[CallTimes], Fit]:
    """Tables of calls by group, and how well lines between the points that they keep predict the others."""
    of: dict[tuple[str, int, int], list[tuple[int, float]]] = defaultdict(list)
    for p in points:
        of[p.call, p.group, p.stride].append((p.nbytes, p.seconds))
    strided = {
        (call, group)
        for (call, group, a), (again, same, b) in pairwise(sorted(of))
        if (call, group) == (again, same) and a != b
    }
    tables, fit = list[CallTimes](), Fit()
    for (call, group, stride), own in of.items():
        empty = CallTimes(call, group, (), stride if (call, group) in strided else 0)
        table, how = fit_table(own, lambda kept, n, empty=empty: replace(empty, points=tuple(kept)).seconds(n))
        tables.append(replace(empty, points=tuple(table)))
        fit[f"{call} of {group}" + f", {stride} apart" * bool(tables[-1].stride)] = how
    return tables, fit


def _levels(found: Measurements) -> list[dict[str, Any]]:
    """Latency and seconds per byte of a message between two: inside a host, and, where ranks that are apart differ, across."""
    pairs: dict[int, list[tuple[int, float]]] = defaultdict(list)
    smallest = min((c.group for c in found.calls), default=0)
    for c in found.calls:
        if c.call == EXCHANGE and c.group == smallest:
            pairs[c.stride].append((c.nbytes, c.seconds))
    if not pairs:
        pairs[1] = list(found.copies)
    lines = [{"alpha": a, "beta": max(b, 1e-18)} for a, b in (fit_line(pairs[s]) for s in sorted(pairs))]
    if len(lines) == 1 or found.task.here == found.task.processes:
        return lines[:1]
    return [{"devices": found.task.here, **lines[0]}, lines[-1]]


# Measuring this machine until two rounds agree; the document says how far they do, and how busy the machine was.


ROUNDS, LONG = 4, 60.0  # at most so many, and none that would end after so many seconds
Document = dict[str, Any]


def agreed(measure: Callable[[], Document], most: int = ROUNDS) -> Document:
    """Of the two rounds that differ least the faster one, because what others do on the machine only adds to times."""
    start, before, rounds = time.monotonic(), others(), [measure()]
    agreement, found = None, rounds[0]
    while len(rounds) < most and (agreement is None or agreement > AGREE):
        if (time.monotonic() - start) * (1 + 1 / len(rounds)) > LONG:
            break
        rounds.append(measure())
        pairs = [(differ(a, b), min(a, b, key=_seconds)) for a, b in combinations(rounds, 2)]
        agreement, found = min(pairs, key=lambda pair: pair[0])
    spent = time.monotonic() - start
    share = (others() - before) / max(spent * (os.cpu_count() or 1), 1e-9)
    sure = {"when": time.time(), "rounds": len(rounds), "agreement": agreement, "others": min(1.0, max(0.0, share))}
    return {**found, "margin": max(found["margin"], min(agreement or 0.0, 0.25)), "measured": {**found["measured"], **sure}}


def differ(a: Document, b: Document) -> float:
    """By what share times of two rounds differ: the median over a class of kernels, or over calls; the largest of these."""
    one, two, logs = _measured_seconds(a), _measured_seconds(b), defaultdict[str, list[float]](list)
    for key in (k for k in one.keys() & two.keys() if one[k] > 0 < two[k]):
        logs[key[0]].append(math.log(one[key] / two[key]))
    return max((math.exp(abs(statistics.median(x))) - 1 for x in logs.values()), default=0.0)


def _seconds(document: Document) -> float:
    return sum(p[-1] for p in document["measured"]["kernels"])


def _measured_seconds(document: Document) -> dict[tuple[str, Any], float]:
    """Seconds of each kernel and call."""
    kernels = {(p[0], k): p[-1] for k, p in enumerate(document["measured"]["kernels"])}
    tables = document.get("collectives", ())
    return kernels | {("calls", (t["call"], t["group"], t.get("stride"), n)): s for t in tables for n, s in t["points"]}


def others() -> float:
    """Seconds that cores worked until now for others than this process and the children that have ended, as Linux says it."""
    stat = Path("/proc/stat")
    user, nice, system, _, _, *interrupts = map(int, stat.read_text().split()[1:9]) if stat.exists() else (0,) * 8
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


# The processes of ``tapestry calibrate``: forked here, or one rank of those that torchrun has started on several hosts.


mp: Any = torch.multiprocessing  # its types are known in part
TIMEOUT = timedelta(seconds=120)
START_SECONDS = 40.0  # about how long a calibration takes


Given = Mapping[str, Any] | None


def _target_measured(make: Callable[[], Target], given: Given, rank: int, local: int) -> Target | torch.device:
    """The target whose kernels are measured, or the device that makes calls: each rank's own GPU, if there are any."""
    return make() if given is None else device_of("triton", rank, local)


def _backend(where: Target | torch.device) -> str:
    return BACKENDS[(where if isinstance(where, torch.device) else where.device).type]


def calibrate(
    make: Callable[[], Target], processes: int, threads: int | None, *, seconds: float = START_SECONDS,
    given: Given = None, say: Say = lambda done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """A topology document of this machine, where so many processes work at the same time.

    Args:
        make: makes the target whose kernels are measured.
        threads: of torch, in each process; by default the cores, shared evenly.
        given: the ``device`` of the document: then calls alone are measured, between GPUs where there are some.

    Raises:
        RunError: a process failed.
    """
    each = threads or max(1, (os.cpu_count() or 1) // processes)
    task = Task(processes=processes, here=processes, threads=each, seconds=seconds)
    with tempfile.TemporaryDirectory(prefix="tapestry-calibrate-") as folder:
        _forked(make, task, given, Path(folder), say)
        return json.loads((Path(folder) / "document").read_text())


def _forked(make: Callable[[], Target], task: Task, given: Given, folder: Path, say: Say) -> None:
    """Run the task on processes of this host; the first one writes the document into the folder."""
    progress = mp.get_context("fork").SimpleQueue()
    started = mp.start_processes(
        _child, (make, task, given, folder, progress), task.processes, join=False, daemon=True, start_method="fork"
    )
    try:
        while not started.join(0.1):
            while not progress.empty():
                say(*progress.get())
    except (ProcessRaisedException, ProcessExitedException) as e:
        raise RunError(f"rank {e.error_index} failed", why=str(e).strip().splitlines()[-1]) from None


def _child(rank: int, make: Callable[[], Target], task: Task, given: Given, folder: Path, progress: Any) -> None:
    where = _target_measured(make, given, rank, rank)
    if task.processes > 1:
        flags.network(LOOPBACK)
        store = FileStore(str(folder / "store"), task.processes)
        api.init_process_group(_backend(where), store=store, rank=rank, world_size=task.processes, timeout=TIMEOUT)
    say: Say = (lambda done, total: progress.put((done, total))) if rank == 0 else lambda done, total: None
    found = measure(rank, task, where, memory_bytes(), say)
    if rank == 0:
        (folder / "document").write_text(json.dumps(document(found, versions(), given)))
    if task.processes > 1:
        api.destroy_process_group()


def on_rank(
    make: Callable[[], Target], place: flags.World, threads: int | None, *, seconds: float = START_SECONDS,
    given: Given = None, say: Say = lambda done, total: None,
) -> dict[str, Any] | None:  # fmt: skip
    """What `calibrate` does, as one rank of those that a launcher started; the document on rank 0.

    Raises:
        RunError: the ranks did not meet.
    """
    store, _ = join(place, TIMEOUT.total_seconds())
    rank, world = place.rank, place.world
    where = _target_measured(make, given, rank, place.local)
    api.init_process_group(_backend(where), store=PrefixStore("calibrate", store), rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        store.set(f"host/{rank}", socket.gethostname())
        hosts: list[bytes] = [store.get(f"host/{r}") for r in range(world)]
        here = hosts.count(hosts[rank])
        each = threads or max(1, (os.cpu_count() or 1) // here)
        task = Task(processes=world, here=here, threads=each, seconds=seconds, strided=world > 2)
        found = measure(rank, task, where, memory_bytes(), say)
        return document(found, {**versions(), "hosts": str(len({*hosts}))}, given) if rank == 0 else None
    finally:
        api.destroy_process_group()
