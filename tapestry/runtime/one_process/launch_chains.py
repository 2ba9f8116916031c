"""Launches that run as one, each reading what the one before makes while it makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tapestry.ir.program import Free, Launch, Load, Program, reads
from tapestry.runtime.one_process.arena import Slot

Follows = Callable[[int, int], int | None]
"""From two steps to the input of the second one that it may read so; ``None`` where it does not, or not with profit."""


def chains(program: Program, may: Mapping[int, object], follows: Follows) -> list[tuple[int, ...]]:
    """Launches (steps) that follow each other, nobody else reading what passes between them.

    Args:
        may: steps that may be part of a chain.
    """
    readers = Counter(b for step in program.steps for b in reads(step))
    readers.update(program.outputs.values())
    out: list[list[int]] = []
    last: int | None = None
    for i, step in enumerate(program.steps):
        if isinstance(step, Free | Load):
            continue
        before = None if last is None else program.steps[last]
        joined = False
        if isinstance(step, Launch) and isinstance(before, Launch) and last is not None and last in may and i in may:
            k = follows(last, i)
            passed = before.outs[0] if len(before.outs) == 1 else ""
            joined = k is not None and step.ins[k] == passed and readers[passed] == 1
        if joined:
            out[-1].append(i)
        else:
            out.append([i])
        last = i
    return [tuple(c) for c in out if len(c) > 1]


def together(wanted: Sequence[Slot], program: Program, joined: Sequence[tuple[int, ...]]) -> list[Slot]:
    """Slots where all that a chain reads and writes lives for as long as the whole chain runs."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for chain in joined:
        for i in chain:
            step = program.steps[i]
            assert isinstance(step, Launch)
            first.update(dict.fromkeys(step.outs, chain[0]))
            for name in (*step.ins, *step.outs):
                last[name] = max(last.get(name, 0), chain[-1])
    return [replace(s, first=min(s.first, first.get(s.name, s.first)), last=max(s.last, last.get(s.name, 0))) for s in wanted]
