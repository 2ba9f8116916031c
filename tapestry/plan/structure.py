"""The search around the search: structural rewrites, kept when the best plan of the rewritten graph is better.

Rules that users add are always tried; the built-in ones within a budget of seconds. One move per kind of operation is
tried (equal signatures give equal answers), and one that pays is repeated for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.text import signature
from tapestry.plan.search.planner import Found
from tapestry.rewrites.rule import RULES, Move, Rule
from tapestry.rewrites.simplify import simplify

WORTH = 0.999  # a rewrite must bring the objective under this share of what it was
MOST_NEW_OPS = 12  # a move that adds more operations than this to one is not worth planning
_BY_STRATEGY = {"split", "split_reduce"}  # searched by the strategies of every operation already


def improve(graph: Graph, found: Found, plan: Callable[[Graph], Found], budget: float) -> tuple[Graph, Found, list[Move]]:
    """The graph, its best plan and the moves that led to it.

    Args:
        plan: finds the best plan of a graph.
        budget: seconds for the built-in rules.
    """
    accepted: list[Move] = []
    start = time.monotonic()
    tried: set[str] = set()
    while True:
        step = next(_better(graph, found, plan, tried, start + budget), None)
        if step is None:
            return graph, found, accepted
        graph, found, moves = step
        accepted += moves


def _better(
    graph: Graph, found: Found, plan: Callable[[Graph], Found], tried: set[str], deadline: float
) -> Iterator[tuple[Graph, Found, list[Move]]]:
    for rule in sorted(RULES.values(), key=_is_built_in):
        if rule.kind != "move" or rule.name in _BY_STRATEGY:
            continue
        for kind, moves in _by_kind(rule, graph).items():
            if kind in tried or (_is_built_in(rule) and time.monotonic() > deadline):
                continue
            tried.add(kind)
            one, done = _apply(graph, moves[:1])
            if not done or len(one.ops) > len(graph.ops) + MOST_NEW_OPS or plan(one).objective >= found.objective * WORTH:
                continue
            new, done = _apply(graph, moves)
            candidate = plan(new)
            if candidate.objective < found.objective * WORTH:
                yield new, candidate, done


def _is_built_in(rule: Rule) -> bool:
    return type(rule).__module__.startswith("tapestry.")


def _by_kind(rule: Rule, graph: Graph) -> dict[str, list[Move]]:
    """Moves that differ only in which of several equal operations they rewrite."""
    out: dict[str, list[Move]] = {}
    for m in rule.find(graph):
        if isinstance(m, Move):
            at = graph.find(m.at)
            kind = f"{rule.name} {m.params} {signature(graph.ops[at], graph) if at >= 0 else m.at}"
            out.setdefault(kind, []).append(m)
    return out


def _apply(graph: Graph, moves: list[Move]) -> tuple[Graph, list[Move]]:
    """All moves of a kind that are still legal after the ones before."""
    done: list[Move] = []
    for m in moves:
        try:
            graph = RULES[m.rule].apply(graph, m)
        except TapestryError:
            continue
        done.append(m)
    return simplify(graph), done
