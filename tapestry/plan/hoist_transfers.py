"""Transfers as early as they can be: right after what they send is written, so that what is computed between then and their
first reader overlaps with them.

Lowering puts a transfer before its first reader. Here it moves ahead of launches that need not wait for it, past whatever does
not write what it sends, as long as no device's peak rises; the order of transfers and reductions stays, so the plan's memory,
bytes, messages and simulated time are what they were: the simulated clock starts a transfer when what it sends is there and the
links are free, and now the runtime, which posts it where it stands and waits where its result is read, does the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Step, Transfer, allocated, device_bytes

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
