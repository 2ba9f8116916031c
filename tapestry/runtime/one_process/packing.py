"""Weights in the layout that their kernels like best, made once when a machine is set up.

A weight that all its readers want packed in one way is packed in place of its buffer. Any other gets a copy, where the
device's memory has room for it beside everything that the plan holds; `Packing.extra` counts what packing takes beyond the
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial

from tapestry.ir.program import Launch, Program, Step, reads
from tapestry.runtime.target_protocol import Array, Pack

Made = Callable[[str, Hashable, Callable[[], Array]], Array]
"""A packed weight, from its buffer, the key of how it is packed, and what packs it where it is not there yet."""

Packs = Mapping[int, Pack]
"""Reads of a launch, by position, that may be packed."""


@dataclass(slots=True)
class Packing:
    """What became of one device's weights.

    Attributes:
        arrays: packed weights by name: of the buffer that they stand for, or of a copy.
        copies: names of ``arrays`` that stand beside their buffer.
        names: for each launch (by step) that reads a packed weight, what it reads, by position.
        extra: bytes beyond the plan's buffers.
    """

    arrays: dict[str, Array] = field(default_factory=dict[str, Array])
    copies: set[str] = field(default_factory=set[str])
    names: dict[int, dict[int, str]] = field(default_factory=dict[int, dict[int, str]])
    extra: int = 0


def pack(
    program: Program,
    wanted: Mapping[int, Packs],
    resident: MutableMapping[str, Array],
    nbytes: tuple[Callable[[Array], int], Callable[[str], int]],
    room: int,
    made: Made | None = None,
) -> Packing:
    """Pack one device's resident weights; those that nobody reads as they were are dropped from ``resident``.

    Args:
        wanted: for each launch (by step), the reads that it may take packed.
        nbytes: of an array that is packed, and of a buffer as the plan has it.
        room: bytes that packing may take beyond the plan.
        made: keeps what is packed, for other executors that read the same weights.
    """
    out, refused = Packing(), set[int]()
    uses, others = _readers(program, wanted, resident)
    for buffer, by_key in uses.items():
        alone = len(by_key) == 1 and buffer not in others
        for n, every in enumerate(by_key.values()):
            readers = [(i, k) for i, k in every if i not in refused]
            if not readers:
                continue
            (at, k), alone = readers[0], alone and len(readers) == len(every)
            pack = partial(_packed, wanted[at][k], resident, buffer)
            array = pack() if made is None else made(buffer, wanted[at][k].key, pack)
            more = nbytes[0](array) - (nbytes[1](buffer) if alone else 0)
            if out.extra + max(more, 0) > room and not any(i in out.names for i, _ in readers):
                refused.update(i for i, _ in readers)  # a launch takes all of its weights packed, or none
                continue
            out.extra += max(more, 0)
            name = buffer if alone else f"{buffer} packed {n}"
            out.arrays[name] = array
            if alone:
                del resident[buffer]
            else:
                out.copies.add(name)
            for i, j in readers:
                out.names.setdefault(i, {})[j] = name
    return out


def _packed(how: Pack, resident: Mapping[str, Array], buffer: str) -> Array:
    return how.run(resident[buffer])


def _readers(
    program: Program, wanted: Mapping[int, Packs], resident: Mapping[str, Array]
) -> tuple[dict[str, dict[Hashable, list[tuple[int, int]]]], set[str]]:
    """(reads that want a weight packed, by buffer and key; buffers that somebody reads as they are)."""
    uses: dict[str, dict[Hashable, list[tuple[int, int]]]] = {}
    others = set(program.outputs.values())
    for i, step in enumerate(program.steps):
        packs = _suiting(step, wanted.get(i, {}), resident)
        others.update(b for k, b in enumerate(reads(step)) if k not in packs)
        for k, how in packs.items():
            if isinstance(step, Launch):
                uses.setdefault(step.ins[k], {}).setdefault(how.key, []).append((i, k))
    return uses, others


def _suiting(step: Step, packs: Packs, resident: Mapping[str, Array]) -> Packs:
    """All of a launch's packs, or none, where one does not suit the values of its weight, or that is not there."""
    given = {k: resident.get(step.ins[k]) for k in packs} if isinstance(step, Launch) else {}
    return packs if all(array is not None and packs[k].suits(array) for k, array in given.items()) else {}
