"""A simulated schedule as a Chrome trace, which https://ui.perfetto.dev opens.

A process per device with a track per stream; slices on a track never overlap (times are rounded to whole nanoseconds, which
keeps their order); messages are flow arrows from the sender's slice to the receiver's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tapestry.build.atomic import new_file
from tapestry.ir.plan import Plan, coordinates
from tapestry.ir.program import Launch, Program, Reduce, Transfer, payload_bytes, transfer_bytes
from tapestry.plan.simulate import STREAMS, Schedule, Timed
from tapestry.viz.format import split_text, step_text

MAX_SLICES = 400_000  # of all devices; where there are more, only the first devices are shown
MAX_FLOWS = 100_000

Event = dict[str, Any]


def write_trace(path: Path, plan: Plan, schedule: Schedule) -> dict[str, int]:
    """Write the trace, whole or not at all; returns how many devices, slices and flows it has, and how many it left out."""
    events, counts = trace(plan, schedule)
    write_events(path, events, {"assumption": schedule.assumption, **counts})
    return counts


def write_events(path: Path, events: Sequence[Event], other: Mapping[str, Any]) -> None:
    """Write events as a Chrome trace, whole or not at all; ``other`` is data about all of it."""
    data = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}
    with new_file(path) as temporary, temporary.open("w") as f:
        json.dump(data, f, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def trace(plan: Plan, schedule: Schedule) -> tuple[list[Event], dict[str, int]]:
    """(events, counts)."""
    devices = schedule.program.devices
    shown = max(1, min(devices, MAX_SLICES // max(1, len(schedule.timed))))
    events = list(_tracks(plan, shown))
    flows = left_out = slices = 0
    for t in schedule.timed:
        name, args = _described(plan, schedule.program, t)
        for d in range(shown):
            if not np.isnan(t.end[d]):
                begin, end = _nanoseconds(t, d)
                slices += 1
                events.append(
                    {
                        "name": name,
                        "cat": args["kind"],
                        "ph": "X",
                        "ts": begin / 1e3,
                        "dur": (end - begin) / 1e3,
                        "pid": d,
                        "tid": t.stream,
                        "args": args,
                    }
                )
        for src, dst in _arrows(schedule.program, t):
            if flows >= MAX_FLOWS or max(src, dst) >= shown:
                left_out += 1
                continue
            flows += 1
            events += _flow(t, name, src, dst, flows)
    counts = {"devices": shown, "slices": slices, "flows": flows}
    return events, counts | {"devices_left_out": devices - shown, "flows_left_out": left_out}


def _tracks(plan: Plan, shown: int) -> Iterator[Event]:
    """Names of processes and threads."""
    for d, c in zip(range(shown), coordinates(plan.mesh), strict=False):
        where = ", ".join(f"{a.name}={k}" for a, k in zip(plan.mesh, c, strict=True))
        yield named("process_name", d, 0, {"name": f"device {d} ({where})"})
        yield named("process_sort_index", d, 0, {"sort_index": d})
        for tid, stream in enumerate(STREAMS):
            yield named("thread_name", d, tid, {"name": stream})
            yield named("thread_sort_index", d, tid, {"sort_index": tid})


def named(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    """The name (or the place in the order) of a process or a thread."""
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _nanoseconds(t: Timed, device: int) -> tuple[int, int]:
    return round(float(t.start[device]) * 1e9), round(float(t.end[device]) * 1e9)


def _described(plan: Plan, program: Program, t: Timed) -> tuple[str, dict[str, Any]]:
    step = program.steps[t.step]
    name = step_text(step, program, plan.graph.ops)
    if isinstance(step, Transfer | Reduce):
        sizes = {"bytes, all senders": transfer_bytes(step, program), "bytes, largest per device": payload_bytes(step, program)}
        return name, {"kind": step.kind, "step": t.step, **sizes}
    assert isinstance(step, Launch)
    op = plan.graph.ops[step.op]
    split = split_text(op, plan.strategies[step.op], plan.stage(step.op).mesh)
    return name, {"kind": "compute", "step": t.step, "split": split, "nodes": ", ".join(op.source)}


def _arrows(program: Program, t: Timed) -> Iterator[tuple[int, int]]:
    """(sender, receiver) of a step: its messages, or once around the ring of each group of a reduction."""
    step = program.steps[t.step]
    if isinstance(step, Transfer):
        yield from dict.fromkeys((m.src, m.dst) for m in step.messages)
    elif isinstance(step, Reduce):
        for g in step.groups:
            if len(g) > 1:
                yield from zip(g, (*g[1:], g[0]), strict=True)


def _flow(t: Timed, name: str, src: int, dst: int, number: int) -> Iterator[Event]:
    """An arrow from the beginning of the sender's slice to the middle of the receiver's."""
    begin = _nanoseconds(t, src)[0]
    low, high = _nanoseconds(t, dst)
    common = {"name": name, "cat": "message", "id": number, "tid": t.stream}
    yield {**common, "ph": "s", "ts": begin / 1e3, "pid": src}
    yield {**common, "ph": "f", "bp": "e", "ts": (low + high) // 2 / 1e3, "pid": dst}
