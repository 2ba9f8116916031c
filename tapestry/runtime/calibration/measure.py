"""What a process of ``tapestry calibrate`` does: kernels beside the other processes, kernels alone, calls, both at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tapestry.ir.collective_calls import CALLS, EXCHANGE
from tapestry.runtime.calibration.call_clock import SIZES, CallClock, CallPoint, Exchange, Timed, api, call_of, groups
from tapestry.runtime.calibration.kernel_clock import KernelClock
from tapestry.runtime.calibration.probes import Probe, between, few_probes, probes, rates_by_dtype
from tapestry.runtime.calibration.rate_fit import KernelPoint
from tapestry.runtime.target_protocol import Target
from tapestry.system import cores

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
        shares = self.here * self.threads > cores.usable()[0]
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
            task=task,
            memory=memory,
            kernels=[k for k, _ in both],
            alone=[a for _, a in both if a is not None],
            dtypes=dtypes,
            calls=calls,
            hidden=bench.hidden(calls),
            copies=_copies() if not calls else (),
        )
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
