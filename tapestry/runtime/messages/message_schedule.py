"""When what travels is sent, expected and used: worked out from the program alone, so that all ranks know the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from tapestry.ir.collective_calls import Call, merge_calls, on_backend, transfer_call
from tapestry.ir.graph import Graph
from tapestry.ir.program import Free, Program, Reduce, Step, Transfer, reads
from tapestry.runtime.messages.message_buffers import drained_at, posted_ahead
from tapestry.runtime.messages.point_to_point import PointToPoint
from tapestry.runtime.processes.wire import IN_FLIGHT


def calls_of(graph: Graph, program: Program, backend: str) -> dict[int, Call]:
    """What carries each step: of a reduction the call of its first phase."""
    out: dict[int, Call] = {}
    for at, step in enumerate(program.steps):
        if isinstance(step, Transfer):
            out[at] = on_backend(transfer_call(step, program), backend)
        elif isinstance(step, Reduce):
            out[at] = on_backend(merge_calls(step, program, graph.ops[step.op])[0], backend)
    return out


def signature(calls: Mapping[int, Call], world: int) -> bytes:
    """A hash of all calls of a run, for ranks to compare."""
    return hashlib.blake2b(repr((world, sorted(calls.items(), key=lambda c: c[0]))).encode()).digest()


def named(step: Step) -> tuple[str, ...]:
    """Buffers that a step reads or frees."""
    return step.buffers if isinstance(step, Free) else tuple(b for b in reads(step) if b)


def filled(step: Transfer | Reduce) -> tuple[str, ...]:
    """Buffers that a step fills from what travels."""
    return (step.dst,) if isinstance(step, Transfer) else step.dsts


def first_uses(program: Program) -> dict[int, int]:
    """For each transfer and reduction the step that first names what it fills; at the end, where none does."""
    out, open_ = dict[int, int](), dict[str, int]()
    for at, step in enumerate(program.steps):
        for name in named(step):
            if name in open_:
                out.setdefault(open_[name], at)
        if isinstance(step, Transfer | Reduce):
            open_ |= dict.fromkeys(filled(step), at)
    return {at: out.get(at, len(program.steps)) for at in open_.values()}


def freed_at(program: Program) -> dict[str, int]:
    """The step that frees each buffer that is freed."""
    return {b: at for at, step in enumerate(program.steps) if isinstance(step, Free) for b in step.buffers}


def set_times(parts: Sequence[PointToPoint], ahead: int, end: int) -> None:
    """When each group of messages is expected, and by when its sends have been taken.

    They are sent in the order of steps; at one step first what goes back of reductions that are finished there.
    """
    order = sorted(parts, key=lambda p: (p.sent_at, p.step == p.sent_at, p.step))
    since = posted_ahead([(p.sent_at, p.use, p.incoming) for p in order], ahead)
    taken = drained_at([(p.sent_at, [s.nbytes for s in p.sends]) for p in order], IN_FLIGHT, end)
    for p, first, last in zip(order, since, taken, strict=True):
        p.since, p.drained = first, last
