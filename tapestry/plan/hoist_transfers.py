"""Transfers as early as they can be: right after what they send is written, so that what is computed between then and their
first reader overlaps with them.

Lowering puts a transfer before its first reader. `early` moves it ahead of launches that need not wait for it, as long as no
device's peak rises; the order of transfers and reductions stays, so the plan's memory, bytes, messages and simulated time are
what they were: the simulated clock starts a transfer when what it sends is there and the links are free, and now the runtime,
which posts it where it stands and waits where its result is read, does the same. `in_better_order` changes that order, too: of
all that could begin, what most has to follow goes first. What is wanted late, as a sum that only the end of an operation reads,
then travels beside kernels, behind what they wait for.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tapestry.ir.plan import Plan
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Step, Transfer, allocated, device_bytes
from tapestry.plan.search.any_order import tails
from tapestry.plan.simulate import TRANSFER, Known, Schedule, reads_of, simulate
from tapestry.plan.topology import Topology

CELLS = 1 << 24  # steps times devices beyond which memory over time is not worked out


def early(program: Program) -> Program:
    """The program with its transfers moved ahead; the same one where none can be."""
    return _merged(program, [i for i, s in enumerate(program.steps) if isinstance(s, Transfer | Reduce)])


def in_better_order(plan: Plan, program: Program, topo: Topology) -> tuple[Program, float]:
    """A program whose transfers are issued early, in an order that takes less simulated time, or the same one; and that time.
    In another order only where transfers and kernels overlap: in turns, only waiting for neighbours changes."""
    known = Known()
    plain = simulate(plan, program, topo, known)
    others = [early(program), *([_merged(program, _by_tails(plain))] if topo.overlap else [])]
    timed = min((*(simulate(plan, p, topo, known) for p in others), plain), key=lambda t: t.total)
    return timed.program, timed.total


def _by_tails(timed: Schedule) -> list[int]:
    """The steps of the transfer streams, as if all devices had one: of those that could begin, the one with the longest
    tail goes first (Schrage's schedule, Carlier 1982)."""
    ready = dict[str, float]()
    jobs, waiting, out, now = list[tuple[float, float, int, float]](), list[tuple[float, int, float]](), list[int](), 0.0
    for t, tail in zip(timed.timed, tails(timed), strict=True):
        step = timed.program.steps[t.step]
        if t.stream == TRANSFER:
            head = max((ready.get(b, 0.0) for b in reads_of(step)), default=0.0)
            jobs.append((head, -float(np.nanmax(tail + t.took, initial=0.0)), t.step, t.seconds))
        ready.update(dict.fromkeys(allocated(step), float(np.nanmax(t.end, initial=0.0))))
    heapq.heapify(jobs)
    while jobs or waiting:
        now = now if waiting else max(now, jobs[0][0])
        while jobs and jobs[0][0] <= now:
            heapq.heappush(waiting, heapq.heappop(jobs)[1:])
        _, i, seconds = heapq.heappop(waiting)
        now += seconds
        out.append(i)
    return out


def _merged(program: Program, order: Sequence[int]) -> Program:
    """The program with its transfers and reductions in an order, each as early as that lets it be and memory allows: what a
    transfer or a reduction brings is sent on no sooner than it has to be, for to send it on at once would be to wait for it at
    once. The same program where a device's peak would rise."""
    steps = program.steps
    if not order or len(steps) * program.devices > CELLS:
        return program
    others = [i for i, s in enumerate(steps) if not isinstance(s, Transfer | Reduce | Free)]
    before = np.searchsorted(others, np.arange(len(steps)), side="right")  # how many of the others, at every step
    alive = _alive(steps, program)
    peak, between = alive.max(axis=0), np.zeros((len(others) + 1, program.devices), np.int64)
    np.maximum.at(between, before, alive)
    readers = Counter(b for s in steps for b in reads_of(s))
    freed = {b for s in steps if isinstance(s, Free) for b in s.buffers}
    new, there, at, k, now = list[Step](), dict[str, Step](), 0, 0, np.zeros(program.devices, np.int64)

    def emit(step: Step) -> None:
        readers.subtract(reads_of(step))
        there.update(dict.fromkeys(allocated(step), step))
        gone = tuple(b for b in dict.fromkeys((*reads_of(step), *allocated(step))) if b in freed and not readers[b])
        for s in (step, Free(buffers=gone)) if gone else (step,):
            new.append(s)
            now[:] += _change(s, program)

    while at < len(order) or k < len(others):
        step = steps[order[at]] if at < len(order) else None
        kernel = steps[others[k]] if k < len(others) else None
        blocked = kernel is None or any(b not in there for b in reads_of(kernel))
        if step is not None and all(b in there for b in reads_of(step)):
            need, during = _change(step, program), slice(k + 1, int(before[order[at]]))  # of the others, to where it was
            sooner = isinstance(step, Transfer) and all(isinstance(there[b], Launch | Load) for b in reads_of(step))
            if blocked or during.stop <= k or (sooner and not np.any(np.vstack([now, between[during]]) + need > peak)):
                emit(step)
                between[during] += need
                at += 1
                continue
        if kernel is None or blocked:
            return program  # (the order is none)
        emit(kernel)
        k += 1
    if tuple(new) == steps or np.any(_alive(new, program).max(axis=0) > peak):
        return program
    return replace(program, steps=tuple(new))


def _alive(steps: Sequence[Step], program: Program) -> np.ndarray:
    """[step, device]: bytes alive once the step has been done."""
    return np.cumsum([_change(step, program) for step in steps], axis=0)


def _change(step: Step, program: Program) -> np.ndarray:
    """Bytes that a step allocates, or frees, on every device."""
    sign, names = (-1, step.buffers) if isinstance(step, Free) else (1, allocated(step))
    return sign * sum((device_bytes(program.buffers[b]) for b in names), np.zeros(program.devices, np.int64))
