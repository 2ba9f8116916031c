"""The simplify rules, run to a fixpoint."""

from __future__ import annotations

from tapestry.ir.graph import Graph
from tapestry.rewrites.rule import RULES, Move, Sweeping


def simplify(graph: Graph, limit: int = 12) -> Graph:
    """Apply every rule of kind ``simplify`` until none changes the graph (each sweep is one linear pass).

    The rules only remove operations, views from reads, or both, so that the rounds end; ``limit`` is a guard for rules
    that a user adds.
    """
    for _ in range(limit):
        before = graph.ops
        for rule in RULES.values():
            if rule.kind != "simplify":
                continue
            if isinstance(rule, Sweeping):
                graph = rule.sweep(graph)
            else:
                while (move := next((m for m in rule.find(graph) if isinstance(m, Move)), None)) is not None:
                    graph = rule.apply(graph, move)
        if graph.ops == before:
            break
    return graph
