"""A program as tables for the page: lists of boxes once each, steps, who sends how much to whom, times and memory by device.

Devices that do the same at the same time share a row: a plan for 64 equal devices has one class of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np

from tapestry.build.packed_program import PackedLaunch, PackedReduce, PackedTransfer, pack
from tapestry.ir.kernel import size
from tapestry.ir.program import Free, Launch, Program, Reduce, Step, Transfer, allocated, device_bytes, transfer_bytes
from tapestry.ir.types import itemsize
from tapestry.plan.simulate import Schedule
from tapestry.tools.viewer.op_shapes import Row
from tapestry.viz.format import together

Links = dict[tuple[int, int], float]
MOST_TIMES = 400_000  # numbers of a schedule: of more classes of devices only the first are written


def links(step: Transfer | Reduce, program: Program) -> Links:
    """Bytes from device to device, which add up to `transfer_bytes`.

    Messages count as they are. What a reduction sends goes round the ring of its group, as `transfer_bytes` counts it; a field
    that goes whole from each to each is shared among all pairs.
    """
    out: Links = {}
    if isinstance(step, Transfer):
        width = itemsize(program.buffers[step.dst].dtype)
        for m in step.messages:
            out[m.src, m.dst] = out.get((m.src, m.dst), 0) + size(m.box) * width
        return out
    for s, d in zip(step.srcs, step.dsts, strict=True):
        if s not in step.sent:
            continue
        src, dst = program.buffers[s], program.buffers[d]
        held = device_bytes(src)
        for g in (g for g in step.groups if len(g) > 1):
            same, n = src.boxes[g[0]] == dst.boxes[g[0]], len(g)
            if same and step.kind != "all_reduce":
                pairs, each = list(permutations(g, 2)), float(held[g[0]])
            else:
                pairs, each = list(zip(g, (*g[1:], g[0]), strict=True)), (2 if same else 1) * (n - 1) * int(held[g[0]]) / n
            for pair in pairs:
                out[pair] = out.get(pair, 0) + each
    return out


def tables(program: Program) -> Row:
    """Boxes, lists of a box per device, buffers by name, steps; ``links`` are written once for equal exchanges."""
    packed = pack(program)
    numbers: dict[tuple[tuple[int, int, float], ...], int] = {}
    known: dict[object, int] = {}
    steps: list[list[Any]] = []
    for s, p in zip(program.steps, packed.steps, strict=True):
        key = _exchange(s, p, program)
        if key is not None and key not in known:
            assert isinstance(s, Transfer | Reduce)
            sent = tuple((a, b, n) for (a, b), n in sorted(links(s, program).items()))
            known[key] = numbers.setdefault(sent, len(numbers))
        steps.append(_step(s, p, program, -1 if key is None else known[key]))
    return {
        "boxes": packed.boxes,
        "lists": packed.lists,
        "groups": packed.groups,
        "links": list(numbers),
        "steps": steps,
        "buffers": {b.name: [b.tensor, b.boxes, b.dtype, b.field, itemsize(b.dtype)] for b in packed.buffers},
    }


def _exchange(s: Step, p: object, program: Program) -> object:
    """What the links of a step depend on; nothing for a step without any."""
    if isinstance(s, Transfer) and isinstance(p, PackedTransfer):
        return "messages", p.messages, program.buffers[s.dst].dtype
    if isinstance(s, Reduce) and isinstance(p, PackedReduce):
        ends = tuple((id(program.buffers[a].boxes), id(program.buffers[b].boxes)) for a, b in zip(s.srcs, s.dsts, strict=True))
        return s.kind, p.groups, ends, tuple(program.buffers[b].dtype for b in s.srcs), s.known
    return None


def _step(s: Step, p: object, program: Program, link: int) -> list[Any]:
    """A step as a row; its first entry says what it is."""
    match s:
        case Launch():
            assert isinstance(p, PackedLaunch)
            return ["launch", s.op, s.mode, p.blocks, s.ins, s.outs]
        case Transfer():
            return ["transfer", s.kind, s.src, s.dst, transfer_bytes(s, program), link]
        case Reduce():
            assert isinstance(p, PackedReduce)
            return ["reduce", s.kind, s.srcs, s.dsts, transfer_bytes(s, program), link, p.groups, s.op]
        case Free():
            return ["free", s.buffers]
        case _:
            return ["load", s.buffer]


def edges(program: Program) -> list[list[list[Any]]]:
    """For each operation what it reads: (tensor, bytes on the wire, kind, the step that brings it or -1, whether again).

    A buffer that an earlier operation had brought is counted there, and read again here.
    """
    made = {b: k for k, s in enumerate(program.steps) for b in allocated(s)}
    counts = 1 + max((s.op for s in program.steps if isinstance(s, Launch)), default=-1)
    out: list[dict[str, list[Any]]] = [{} for _ in range(counts)]
    seen = set[int]()
    for s in program.steps:
        if not isinstance(s, Launch):
            continue
        for b in (b for b in s.ins if b):
            at, total, kinds, again = made.get(b, -1), 0, list[str](), False
            first = at
            while at >= 0 and isinstance(step := program.steps[at], Transfer):  # what was brought may have been brought there
                again = again or at in seen
                total += 0 if at in seen else transfer_bytes(step, program)
                kinds.append(step.kind)
                seen.add(at)
                at = made.get(step.src, -1)
            tensor, brought = program.buffers[b].tensor, first if kinds else -1
            old = out[s.op].get(tensor)
            if old is None or (brought >= 0 and old[3] < 0):
                out[s.op][tensor] = [tensor, total, kinds[0] if kinds else "", brought, again]
            elif brought != old[3]:
                old[1] += total
    return [list(rows.values()) for rows in out]


def alike(columns: np.ndarray) -> tuple[list[list[int]], list[int]]:
    """(devices that share a column, in order of their first; that first device of each class)."""
    classes = list(together(range(columns.shape[1]), lambda d: columns[:, d].tobytes()).values())
    return classes, [c[0] for c in classes]


def lanes(timed: Schedule) -> Row:
    """When each step begins and ends, for every class of devices with equal times; null where it takes no part."""
    if not timed.timed:
        return {"classes": [], "steps": []}
    begin, end = (np.array([getattr(t, k) for t in timed.timed]) for k in ("start", "end"))
    classes, first = alike(np.concatenate([begin, end]))
    most = max(1, MOST_TIMES // (2 * len(timed.timed)))
    shown = first[:most]
    steps: list[Row] = []
    for k, t in enumerate(timed.timed):
        times = {n: [None if x != x else x for x in a[k, shown].tolist()] for n, a in (("begin", begin), ("end", end))}
        row: Row = {"step": t.step, "op": t.op, "stream": t.stream, **times}
        steps.append(row | ({"by": t.by} if t.by else {}))
    return {"classes": classes[:most], "steps": steps}


def memory(program: Program, peak: Mapping[int, int]) -> Row:
    """Bytes alive after every step, for every class of devices that hold equally much.

    Args:
        peak: bytes that each device holds at most, which the curves must reach.
    """
    change = np.zeros((len(program.steps), program.devices), np.int64)
    for k, s in enumerate(program.steps):
        for b in allocated(s):
            change[k] += device_bytes(program.buffers[b])
        for b in s.buffers if isinstance(s, Free) else ():
            change[k] -= device_bytes(program.buffers[b])
    classes, first = alike(change)
    alive = np.cumsum(change[:, first], axis=0)
    assert all(int(alive[:, k].max(initial=0)) == peak[d] for k, d in enumerate(first))
    return {"classes": classes, "alive": alive.T.tolist()}
