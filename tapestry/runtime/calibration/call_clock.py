"""Seconds of the calls of torch.distributed that carry a plan's collectives and messages, by size and group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.distributed

from tapestry.ir.collective_calls import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, EXCHANGE, REDUCE_SCATTER, carrier

api: Any = torch.distributed  # its types are known in part
SIZES = (8, 512, *(1 << k for k in range(12, 25)))  # bytes
REPEATS = 4
GATHER = getattr(api, "all_gather_single", None) or api.all_gather_into_tensor  # as `runtime.processes.wire` calls them
SCATTER = getattr(api, "reduce_scatter_single", None) or api.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class CallPoint:
    """One call as measured: seconds of the slowest rank, all groups of that size and stride at once."""

    call: str
    group: int
    stride: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of this process's group, ``stride`` apart; ``handle`` is the backend's, to which all ranks contributed."""

    ranks: tuple[int, ...]
    stride: int
    handle: Any


def groups(rank: int, world: int, strided: bool) -> Iterator[Group]:
    """This rank's group of every size that divides the world, neighbours together; with ``strided`` also those whose
    neighbours are far apart, as along the outer axes of a mesh. All ranks make all of them."""
    for size in (n for n in range(2, world + 1) if world % n == 0):
        strides = [s for s in range(1, world // size + 1) if (world // size) % s == 0] if strided else [1]
        for stride in strides:
            mine: Group | None = None
            for first in range(world):
                if first // stride % size:
                    continue
                ranks = tuple(first + stride * k for k in range(size))
                handle = api.new_group(list(ranks))
                mine = Group(ranks, stride, handle) if rank in ranks else mine
            assert mine is not None
            yield mine


@dataclass(frozen=True, slots=True)
class Timed:
    """A call on buffers that are there.

    Attributes:
        nbytes: of them, as `ir.collective_calls.Call` has them.
        ahead: what the engine does some kernels before it makes the call.
    """

    run: Callable[[], object]
    nbytes: int = 0
    ahead: Callable[[], object] = lambda: None

    def whole(self) -> None:
        """All of it at once."""
        self.ahead()
        self.run()


def call_of(name: str, group: Group, nbytes: int, device: torch.device) -> Timed:
    """The call on about so many bytes."""
    n, cells = len(group.ranks), max(nbytes // 4, 1)
    if name == EXCHANGE:
        cells = max(cells // (n - 1), 1)
        exchange = Exchange(group, cells, device)
        return Timed(exchange.finish, 4 * cells * (n - 1), exchange.receive)
    part = max(cells // n, 1)
    if carrier(name, "gloo" if device.type == "cpu" else "nccl") == EXCHANGE:
        return _gathered(group, part, device, merged=name == REDUCE_SCATTER)
    whole, other = torch.zeros(part * n, device=device), torch.zeros(part * n, device=device)  # sums stay what they are
    piece, roots, g = torch.ones(part, device=device), cycle(group.ranks), group.handle
    calls: dict[str, Callable[[], object]] = {
        ALL_REDUCE: lambda: api.all_reduce(whole, group=g),
        ALL_GATHER: lambda: GATHER(whole, piece, group=g),
        REDUCE_SCATTER: lambda: SCATTER(piece, whole, group=g),
        ALL_TO_ALL: lambda: api.all_to_all_single(other, whole, group=g),
        BROADCAST: lambda: api.broadcast(whole, src=next(roots), group=g),  # in turns: one sender would run ahead
    }
    return Timed(calls[name], 4 * part * n)


def _gathered(group: Group, part: int, device: torch.device, *, merged: bool) -> Timed:
    """A gather, or with ``merged`` a reduce-scatter, as the engine makes it of messages."""
    exchange, parts = Exchange(group, part, device), torch.ones(len(group.ranks), part, device=device)

    def run() -> None:
        exchange.finish()
        if merged:
            torch.stack(list(parts), dim=-1).sum(-1)

    return Timed(run, 4 * part * len(group.ranks), exchange.receive)


class Exchange:
    """Every rank sends to every other one of the group, and receives as much: as the engine does, which says where a message is
    to go before it sends its own (`runtime.messages.point_to_point`). On gloo the word that a receiver is ready would otherwise
    wait behind the bytes that this rank sends, and both directions of a link would take turns."""

    def __init__(self, group: Group, cells: int, device: torch.device) -> None:
        others = [r for r in group.ranks if r != api.get_rank()]
        sent = torch.ones(cells, device=device)
        self._receives = [api.P2POp(api.irecv, torch.ones(cells, device=device), r, group.handle) for r in others]
        self._sends = [api.P2POp(api.isend, sent, r, group.handle) for r in others]
        self._ahead = device.type == "cpu"  # on NCCL a receive holds up the stream until it is met
        self._works: list[Any] = []

    def receive(self) -> None:
        """Post what is to come, where that is done ahead."""
        if self._ahead:
            self._works = list(api.batch_isend_irecv(self._receives))

    def send(self) -> None:
        """Send, and where nothing is posted ahead receive."""
        self._works += api.batch_isend_irecv(self._sends if self._ahead else self._receives + self._sends)

    def wait(self) -> None:
        """For all that was posted."""
        for work in self._works:
            work.wait()
        self._works = []

    def finish(self) -> None:
        """Send and wait."""
        self.send()
        self.wait()


@dataclass(frozen=True, slots=True)
class CallClock:
    """Measures calls that all ranks make together.

    Attributes:
        work: what each rank does between two calls, where these are measured in place: threads of the backend have gone to
            sleep meanwhile, caches hold other things, and one rank comes later than another.
    """

    device: torch.device
    settled: Callable[[Sequence[float]], float] = min
    work: Callable[[], object] | None = None

    def seconds(self, call: Timed, window: float) -> float:
        """Seconds of one call: the mean over as many as fit into a time, of the slowest rank.

        All groups make as many calls, so that none is measured while another one rests.
        """
        call.whole()  # connections are made by the first call
        once = self._mean(call.whole, 2)
        if once > window:
            return once
        if self.work is not None:
            return self._in_place(call, self.work, window)
        return self.settled([self._mean(call.whole, n) for n in self._counts(once, window)])

    def _in_place(self, call: Timed, work: Callable[[], object], window: float) -> float:
        """Seconds that a call adds to the work before it; at least what it takes without."""

        def both() -> None:
            call.ahead()
            work()
            call.run()

        once = self._mean(both, 2)
        counts = self._counts(once, window)
        added = [self._mean(both, n) - self._mean(work, n) for n in counts]
        return max(statistics.median(added), min(self._mean(call.whole, 4) for _ in counts))

    @staticmethod
    def _counts(once: float, window: float) -> list[int]:
        return [max(2, min(4096, int(window / REPEATS / max(once, 1e-7))))] * REPEATS

    def _mean(self, run: Callable[[], object], count: int) -> float:
        """Seconds of one of so many runs, the largest of all ranks' numbers."""
        api.barrier()
        start = time.perf_counter()
        for _ in range(count):
            run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        out = torch.tensor([(time.perf_counter() - start) / count], dtype=torch.float64)
        api.all_reduce(out, op=api.ReduceOp.MAX)
        return float(out[0])
