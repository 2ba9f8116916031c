"""Launches that depend on weights alone are done once, when a machine is set up: what others read of them stays.

To the plan they are launches like all others: their results count when and as it says. What is there all the time in their
place is beyond it, and `Folded.extra` counts that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field

from tapestry.ir.graph import Block, Graph
from tapestry.ir.program import Launch, Program, reads
from tapestry.ir.types import HOST
from tapestry.runtime.target_protocol import Array, Run

SMALL = 1 << 24  # bytes: a result that is no larger stays, whatever it is made of


@dataclass(slots=True)
class Folded:
    """What was done on one device.

    Attributes:
        steps: the launches.
        arrays: their results; those that nobody reads any more, and weights that nobody else reads, are empty.
        extra: bytes beyond the plan's buffers.
    """

    steps: set[int] = field(default_factory=set[int])
    arrays: dict[str, Array] = field(default_factory=dict[str, Array])
    extra: int = 0


def fold(
    graph: Graph,
    program: Program,
    kernels: Mapping[int, Run],
    held: MutableMapping[str, Array],
    nbytes: Callable[[str], int],
    room: int,
    empty: Callable[[], Array],
) -> Folded:
    """Do one device's launches that read weights alone, as far as what stays of them finds room.

    Args:
        kernels: of the device, by step.
        held: its weights, to which results that are read later are added, and from which those that are not read any more go.
        nbytes: of a buffer, as the plan has it.
        room: bytes that may be taken beyond the plan.
        empty: an array of nothing.
    """
    steps = _launches(graph, program, kernels, held, nbytes)
    later = {b for at, step in enumerate(program.steps) if at not in steps for b in reads(step)} | {*program.outputs.values()}
    made = {b for step in steps.values() for b in step.outs}
    used = {b for step in steps.values() for b in step.ins if b and b not in made}
    extra = sum(map(nbytes, made & later)) - sum(map(nbytes, used - later))
    if not steps or extra > room:
        return Folded()
    out, there = Folded({*steps}, extra=max(0, extra)), dict[str, Array]()
    left = {b: at for at, step in steps.items() for b in step.ins}
    for at, step in steps.items():
        found = kernels[at]([None if not b else there[b] if b in there else held[b] for b in step.ins], [])
        there.update(zip(step.outs, found, strict=True))
        for b in {*step.ins} - later - {""}:
            if left[b] == at:
                out.arrays[b] = empty()
                there.pop(b, None)
                if b in used:
                    del held[b]
    for b in made:
        if b in later:
            held[b] = there[b].contiguous()  # as a weight is
        else:
            out.arrays[b] = empty()
    return out


def _launches(
    graph: Graph, program: Program, kernels: Mapping[int, Run], held: Mapping[str, Array], nbytes: Callable[[str], int]
) -> dict[int, Launch]:
    """Launches of weights, and of results of others of them, that are not much larger than what they are made of."""
    out, known = dict[int, Launch](), {*held}
    for at, step in enumerate(program.steps):
        if not isinstance(step, Launch) or at not in kernels or step.states or not isinstance(graph.ops[step.op], Block):
            continue
        if any(program.buffers[b].dtype == HOST for b in step.outs):
            continue
        given = {*step.ins} - {""}
        size = sum(map(nbytes, step.outs))
        if given <= known and not {*step.outs} & {*program.outputs.values()} and size <= max(SMALL, sum(map(nbytes, given))):
            out[at] = step
            known.update(step.outs)
    return out
