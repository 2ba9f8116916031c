"""Subgraphs, the smallest things that move between stages: a node where data flows join, and what leads up to it.

A *candidate* (PopRT: alternative node) has several intermediate inputs. Its subgraph is everything before it that no
earlier candidate has claimed. In topological order of the candidates the subgraphs are in topological order themselves:
what a subgraph needs from outside was claimed earlier. Nodes after the last candidate belong to the subgraphs of the
nodes where the graph ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from tapestry.sharding.auto_shard.node_graph import NodeGraph

Unit = tuple[int, ...]  # nodes, ascending; the last one is the candidate


def joins(graph: NodeGraph) -> list[int]:
    """Nodes with several intermediate inputs, in topological order."""
    return [k for k, n in enumerate(graph.joined) if n >= 2]


def everywhere(graph: NodeGraph) -> list[int]:
    """Every node that computes something: for chains, which have no joins."""
    busy = {s.node for s in graph.steps}
    return [k for k in range(len(graph.names)) if k in busy]


def subgraphs(graph: NodeGraph, candidates: Sequence[int]) -> list[Unit]:
    """One subgraph per candidate, then one per end of the graph that is left; every node is in exactly one."""
    claimed = [False] * len(graph.names)
    needed = {p for row in graph.parents for p in row}
    ends = [k for k in range(len(graph.names)) if k not in needed]
    units: list[Unit] = []
    for top in (*candidates, *ends):
        if claimed[top]:
            continue
        stack, unit = [top], list[int]()
        claimed[top] = True
        while stack:
            k = stack.pop()
            unit.append(k)
            for p in graph.parents[k]:
                if not claimed[p]:
                    claimed[p] = True
                    stack.append(p)
        units.append(tuple(sorted(unit)))
    assert all(claimed), "a node leads to no end of the graph"
    return units


def shares(graph: NodeGraph, units: Sequence[Unit]) -> list[float]:
    """How large a part of the whole each subgraph is, in bytes or in FLOPs, whichever is larger."""
    home = {k: u for u, nodes in enumerate(units) for k in nodes}
    nbytes, flops = [0] * len(units), [0] * len(units)
    for u, nodes in enumerate(units):
        nbytes[u] = sum(graph.weight_bytes[w] for w in {w for k in nodes for w in graph.weights[k]})
    for step in graph.steps:
        flops[home[step.node]] += step.flops
    all_bytes, all_flops = max(sum(nbytes), 1), max(sum(flops), 1)
    return [max(b / all_bytes, f / all_flops) for b, f in zip(nbytes, flops)]


def merge(graph: NodeGraph, units: Sequence[Unit], wanted: int, at_least: int) -> list[Unit]:
    """Merge neighbours in the list while they are small in bytes and in FLOPs, down to about ``wanted``.

    Neighbours, because merging them keeps the list in topological order whatever the edges. A subgraph is small when it
    is less than a ``wanted``-th of the whole. Nothing is merged when fewer than ``at_least`` would be left.
    """
    merged = _merged(graph, units, wanted, [0] * len(units))
    return merged if len(merged) >= at_least else list(units)


def refine(graph: NodeGraph, units: Sequence[Unit], wanted: int) -> list[Unit]:
    """Cut subgraphs into about ``wanted`` smaller ones, down to single nodes, each inside one of the given ones.

    A list in topological order again; cuts between the given subgraphs remain cuts.
    """
    busy = {s.node for s in graph.steps}
    home = {k: u for u, nodes in enumerate(units) for k in nodes}
    # nodes that cost nothing come last of their subgraph, or else a later one would claim them
    tops = [k for nodes in units for k in (*(k for k in nodes if k in busy), *reversed(nodes))]
    small = subgraphs(graph, tops)
    return _merged(graph, small, wanted, [home[unit[0]] for unit in small])


def _merged(graph: NodeGraph, units: Sequence[Unit], wanted: int, parts: Sequence[int]) -> list[Unit]:
    """Merge small neighbours of the same part."""
    if len(units) <= wanted:
        return list(units)
    limit = 1 / wanted
    groups: list[list[int]] = []
    filled, last = 0.0, -1
    for unit, share, part in zip(units, shares(graph, units), parts):
        if filled + share > limit or part != last:
            groups.append([])
            filled, last = 0.0, part
        groups[-1].extend(unit)
        filled += share
    return [tuple(sorted(g)) for g in groups]
