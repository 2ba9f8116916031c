"""A lower bound of a program's time on the clock whatever order its transfers go in.

Where they share a stream with the kernels, nothing is put in another order. Else kernels keep theirs. A transfer has a head,
what it waits for at least, and a tail, what follows it at least; transfers of one device follow each other. So of any set of
them the least head, all their seconds and the least tail add up to no more than the whole (Carlier 1982).
"""

from __future__ import annotations

import numpy as np

from tapestry.ir.program import allocated
from tapestry.plan.simulate import COMPUTE, TRANSFER, Schedule, Timed, reads_of


def least_seconds(timed: Schedule) -> float:
    """Seconds that the steps of a schedule take in any order of the transfers."""
    if not timed.overlap:
        return timed.total
    heads, after = _heads(timed), tails(timed)
    out = max((float(np.nanmax(h + t.took + q)) for h, t, q in zip(heads, timed.timed, after, strict=True)), default=0.0)
    moves = [n for n, t in enumerate(timed.timed) if t.stream == TRANSFER]
    for d in range(timed.program.devices):
        mine = [n for n in moves if not np.isnan(timed.timed[n].took[d])]
        jobs = [(float(heads[n][d]), float(timed.timed[n].took[d]), float(after[n][d])) for n in mine]
        out = max(out, _one_after_another(jobs))
    return out


def _one_after_another(jobs: list[tuple[float, float, float]]) -> float:
    """The largest (least head + sum + least tail) of a set of jobs."""
    best, by_tail = 0.0, sorted(jobs, key=lambda j: -j[2])
    for head in {j[0] for j in jobs}:
        total = 0.0
        for h, seconds, tail in by_tail:
            if h >= head:
                total += seconds
                best = max(best, head + total + tail)
    return best


def _heads(timed: Schedule) -> list[np.ndarray]:
    """When each step begins at least, by device, if transfers waited for nothing but what they read."""
    devices = timed.program.devices
    ready, free, out = dict[str, np.ndarray](), np.zeros(devices), list[np.ndarray]()
    for t in timed.timed:
        step = timed.program.steps[t.step]
        start = free.copy() if t.stream == COMPUTE else np.zeros(devices)
        for b in reads_of(step):
            start = np.maximum(start, ready.get(b, 0.0))
        start = _together(start, t)
        end = start + t.took
        free = np.where(np.isnan(end) | (t.stream != COMPUTE), free, end)
        ready.update(dict.fromkeys(allocated(step), np.nan_to_num(end)))
        out.append(start)
    return out


def tails(timed: Schedule) -> list[np.ndarray]:
    """Seconds that follow each step at least, by device."""
    devices = timed.program.devices
    after, free, out = dict[str, np.ndarray](), np.zeros(devices), list[np.ndarray]()
    for t in reversed(timed.timed):
        step = timed.program.steps[t.step]
        tail = free.copy() if t.stream == COMPUTE else np.zeros(devices)
        for b in allocated(step):
            tail = np.maximum(tail, after.get(b, 0.0))
        tail = _together(tail, t)
        whole = np.nan_to_num(tail + t.took)
        free = np.where(np.isnan(t.took) | (t.stream != COMPUTE), free, whole)
        for b in reads_of(step):
            after[b] = np.maximum(after.get(b, 0.0), whole)
        out.append(tail)
    return out[::-1]


def _together(seconds: np.ndarray, t: Timed) -> np.ndarray:
    """The most of all devices that begin and end together; NaN where one takes no part."""
    takes, most = ~np.isnan(t.took), np.zeros(int(t.groups.max(initial=0)) + 1)
    np.maximum.at(most, t.groups[takes], seconds[takes])
    return np.where(takes, most[t.groups], np.nan)
