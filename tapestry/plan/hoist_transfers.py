"""Transfers as early as they can be: right after what they send is written, so that what is computed between then and their
first reader overlaps with them.

Lowering puts a transfer before its first reader. `early` moves it ahead of launches that need not wait for it, past whatever
does not write what it sends, as long as no device's peak rises; the order of transfers and reductions stays, so the plan's
memory, bytes, messages and simulated time are what they were: the simulated clock starts a transfer when what it sends is there
and the links are free, and now the runtime, which posts it where it stands and waits where its result is read, does the same.
`in_better_order` changes that order, too: on the critical path, a transfer that waits for the links alone goes ahead of the one
before, where the whole then takes less time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tapestry.ir.plan import Plan
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Step, Transfer, allocated, device_bytes
from tapestry.plan.simulate import TRANSFER, Known, Schedule, critical_path, simulate
from tapestry.plan.topology import Topology

TRIES = 16  # transfers that go ahead, and programs that are tried for each
LESS = 1 - 1e-9  # of the time: more is rounding
CELLS = 1 << 24  # steps times devices beyond which memory over time is not worked out


def early(program: Program) -> Program:
    """The program with its transfers moved ahead; the same one where none can be."""
    movable = _movable(program)
    if not movable or len(program.steps) * program.devices > CELLS:
        return program
    steps, alive = list(program.steps), _alive(program)
    peak = alive.max(axis=0)
    for i in movable:
        step = steps[i]
        assert isinstance(step, Transfer)
        need = device_bytes(program.buffers[step.dst])
        first = next(k for k in range(i, 0, -1) if _behind(step, steps[k - 1]))
        tight = np.flatnonzero(np.any(alive[first - 1 : i] + need > peak, axis=1))
        to = first + (int(tight[-1]) + 1 if len(tight) else 0)  # its own place counts too: after the step before it
        if not any(isinstance(s, Launch) for s in steps[to:i]):
            continue
        alive[to + 1 : i + 1] = alive[to:i] + need
        alive[to] = alive[to - 1] + need
        steps[to : i + 1] = [step, *steps[to:i]]
    return replace(program, steps=tuple(steps))


def in_better_order(plan: Plan, program: Program, topo: Topology) -> tuple[Program, float]:
    """A program whose transfers are issued in an order that takes less simulated time, or the same one; and that time. Only
    where transfers and kernels overlap: in turns, only waiting for neighbours changes."""
    known = Known()
    timed = simulate(plan, program, topo, known)
    for _ in range(TRIES if topo.overlap and len(program.steps) * program.devices <= CELLS // TRIES else 0):
        alive = _alive(timed.program)
        others = filter(None, (_ahead(timed.program, alive, first, then) for first, then in _in_the_way(timed)))
        clocks = (simulate(plan, p, topo, known) for p in itertools.islice(others, TRIES))
        better = next((t for t in clocks if t.total < timed.total * LESS), None)
        if better is None:
            break
        timed = better
    return timed.program, timed.total


def _in_the_way(timed: Schedule) -> Iterator[tuple[int, int]]:
    """Positions of two steps on the critical path of which the second, a transfer, waits for the links and not for data."""
    path, steps = critical_path(timed), timed.program.steps
    for a, b in itertools.pairwise(path):
        step = steps[b.timed.step]
        if isinstance(step, Transfer) and a.timed.stream == TRANSFER and step.src not in allocated(steps[a.timed.step]):
            yield a.timed.step, b.timed.step


def _ahead(program: Program, alive: np.ndarray, first: int, then: int) -> Program | None:
    """The program with a transfer ahead of another step; ``None`` where it cannot go there, or a peak would rise above what is
    ``alive`` now."""
    step = program.steps[then]
    between = program.steps[first:then]
    assert isinstance(step, Transfer)
    if not first or any(step.src in allocated(s) for s in between):
        return None
    need = device_bytes(program.buffers[step.dst])
    if np.any(alive[first - 1 : then] + need > alive.max(axis=0)):
        return None
    return replace(program, steps=(*program.steps[:first], step, *between, *program.steps[then + 1 :]))


def _movable(program: Program) -> list[int]:
    """Positions of transfers of what a launch or a load has written, where another launch lies between.

    What a transfer or a reduction brings is left alone: to send it on at once would be to wait for it at once.
    """
    written: dict[str, int] = {}
    launches = np.cumsum([isinstance(s, Launch) for s in program.steps])
    out: list[int] = []
    for i, step in enumerate(program.steps):
        if isinstance(step, Transfer) and launches[i] > launches[written[step.src]]:
            out += [i] * isinstance(program.steps[written[step.src]], Launch | Load)
        written.update(dict.fromkeys(allocated(step), i))
    return out


def _behind(step: Transfer, other: Step) -> bool:
    """Whether a transfer stays behind another step: that which writes what it sends, and whatever takes to the links before."""
    return isinstance(other, Transfer | Reduce) or step.src in allocated(other)


def _alive(program: Program) -> np.ndarray:
    """[step, device]: bytes alive once the step has been done."""
    return np.cumsum([_change(step, program) for step in program.steps], axis=0)


def _change(step: Step, program: Program) -> np.ndarray:
    """Bytes that a step allocates, or frees, on every device."""
    sign, names = (-1, step.buffers) if isinstance(step, Free) else (1, allocated(step))
    return sign * sum((device_bytes(program.buffers[b]) for b in names), np.zeros(program.devices, np.int64))
