"""Dependences by isl: which cells of the inputs each cell of the output reads, before and after, for all cells at once."""

from __future__ import annotations

from dataclasses import dataclass

from tapestry.ir import laws, space
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import whole
from tapestry.ir.space import Point

OPERATIONS = 400_000  # of isl, for one comparison: about a second


@dataclass(frozen=True, slots=True)
class Difference:
    """A pair of cells that is a dependence on one side alone: ``lost`` or ``gained``."""

    verb: str
    source: str
    cell: Point
    read: Point


def compare(before: Graph, after: Graph) -> list[Difference] | None:
    """A witness for every input and direction in which dependences differ; ``None`` where isl takes too long."""
    try:
        with space.bounded(OPERATIONS):
            return _compare(before, after)
    except space.TooHard:
        return None


def _compare(before: Graph, after: Graph) -> list[Difference]:
    (out,) = before.outputs
    box = whole(before.tensors[out].shape)
    old, new = laws.dependences(before, out), laws.dependences(after, after.outputs[0])
    found = list[Difference]()
    for source in {**old, **new}:
        for one, other, verb in ((old.get(source), new.get(source), "lost"), (new.get(source), old.get(source), "gained")):
            if one is None or (one := one.image(box)) is None:
                continue
            point = one.witness(other)
            if point is not None:
                found.append(Difference(verb, source, *point))
    return found
