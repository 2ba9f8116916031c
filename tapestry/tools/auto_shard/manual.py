"""The user's own stages: nodes at which they end (PopRT's manual sharding)."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from tapestry.errors import TapestryError
from tapestry.plan.pipelines.stage_constraints import needed
from tapestry.tools.auto_shard.node_graph import NodeGraph
from tapestry.tools.auto_shard.scheme_cost import Problem, Scheme, bits


def scheme_at(graph: NodeGraph, cuts: Sequence[str]) -> tuple[Problem, Scheme]:
    """Every node as a subgraph, and the stages that end with the given nodes (with commas: at several together): each has what
    its nodes need and no earlier stage has; the last one has the rest.

    Raises:
        TapestryError: there is no such node, or a stage would compute nothing.
    """
    problem = Problem(graph, [(k,) for k in range(len(graph.names))])
    busy = sum(1 << k for k in {s.node for s in graph.steps})
    names = [[text] if text in graph.names else text.split(",") for text in cuts]
    last = [[k for name in mine for k in _nodes(name, text, graph)] for mine, text in zip(names, cuts, strict=True)]
    stages = [sum(1 << k for k in mine) for mine in needed(last, graph.parents.__getitem__)]
    stages.append(problem.all & ~sum(stages))
    empty = next((k for k, mask in enumerate(stages) if not mask & busy), None)
    if empty is not None:
        where = f"--cut {cuts[min(empty, len(cuts) - 1)]}"
        raise TapestryError(f"stage {empty} would compute nothing", where=where, hint="another node, or another order")
    return problem, tuple(stages)


def ends(problem: Problem, mask: int) -> list[str]:
    """The nodes at which a stage ends: those that compute something and that nothing else that does so in the stage needs.

    `scheme_at` makes the same stages of them, but for nodes that cost nothing.
    """
    graph = problem.graph
    inside = {k for u in bits(mask) for k in problem.units[u]}
    busy, needed = {s.node for s in graph.steps}, set[int]()
    found: list[str] = []
    for k in sorted(inside, reverse=True):
        if k in busy and k not in needed:
            found.append(graph.names[k])
        if k in busy or k in needed:
            needed |= inside.intersection(graph.parents[k])
    return found[::-1]


def _nodes(name: str, text: str, graph: NodeGraph) -> list[int]:
    found = [k for k, n in enumerate(graph.names) if n == name]
    if not found:
        hint = f"for example {', '.join(get_close_matches(name, graph.names, 4) or graph.names[:6])}"
        raise TapestryError(f"there is no node '{name}'", where=f"--cut {text}", hint=hint)
    return found
