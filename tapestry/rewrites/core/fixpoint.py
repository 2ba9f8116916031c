"""The simplify rules, run to a fixpoint."""

from __future__ import annotations

from collections.abc import Iterable

from tapestry.ir.graph import Graph
from tapestry.rewrites.core.rule import RULES, Move

OPTIONAL = ("fuse_rows", "stream_softmax")
"""Rules that never cost a launch or a byte on one device, but tie operations to one cut on several."""
_WITHOUT, _NONE = "without", frozenset[str]()


def without(rule: str) -> Move:
    """What stands in a list of moves for a simplification that was left out from the beginning: ``without@fuse_rows``."""
    return Move(_WITHOUT, rule)


def left_out(moves: Iterable[Move]) -> frozenset[str]:
    """Rules that a list of moves leaves out."""
    return frozenset(m.at for m in moves if m.rule == _WITHOUT)


def applied(moves: Iterable[Move]) -> list[Move]:
    """The moves of a list that are applied to the simplified graph: all others."""
    return [m for m in moves if m.rule != _WITHOUT]


def simplify(graph: Graph, limit: int = 12, *, leave: frozenset[str] = _NONE) -> Graph:
    """Apply every rule of kind ``simplify`` until none changes the graph (each sweep is one linear pass).

    The rules only remove operations, views from reads, or both, so that the rounds end; ``limit`` is a guard for rules
    that a user adds, ``leave`` has names of rules that are left out.
    """
    for _ in range(limit):
        before = graph.ops
        for rule in RULES.values():
            if rule.phase == "simplify" and rule.name not in leave:
                graph = rule.sweep(graph)
        if graph.ops == before:
            break
    return graph
