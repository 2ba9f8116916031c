"""The search around the search: structural rewrites, kept when the best plan of the rewritten graph is better.

Rules that users add are tried first, and while there is time at all; the built-in ones for some seconds of it. One move per
kind of operation is tried (equal signatures give equal answers), and one that pays is repeated for all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Mesh, device_count
from tapestry.ir.syntax.printer import signature
from tapestry.plan.search.planner import Found
from tapestry.plan.solver.budget import Budget
from tapestry.rewrites.core.fixpoint import applied, left_out, simplify
from tapestry.rewrites.core.rule import RULES, Move, Refusal, Rule, Sized

WORTH = 0.999  # a rewrite must bring the objective under this share of what it was
_NONE = frozenset[str]()
MOST_NEW_OPS = 12  # a move that adds more operations than this to one is not worth planning
_ELSEWHERE = {"split", "split_reduce"} | {"split_time", "micro_batch", "recompute"}
_ELSEWHERE |= {"inline_map", "fuse_contraction", "fuse_sums", "narrow_factors"}
# searched by strategies, to fit memory, or chosen before the search (`plan/fusion.py`)


def improve(
    graph: Graph,
    found: Found,
    plan: Callable[[Graph, Budget], Found],
    budget: Budget,
    seconds: float,
    least: float = 0.0,
    leave: frozenset[str] = _NONE,
) -> tuple[Graph, Found, list[Move]]:
    """The graph, its best plan and the moves that led to it.

    Args:
        plan: finds the best plan of a graph within a budget.
        seconds: of the budget, for the built-in rules.
        least: seconds of the budget with which a rewrite is still tried: about as long as a graph takes.
        leave: simplifications that are left out.
    """
    accepted: list[Move] = []
    tried: set[str] = set()
    while True:
        step = next(_better(graph, found, plan, tried, budget, budget.part(seconds), least, leave), None)
        if step is None:
            return graph, found, accepted
        seconds = max(0.0, seconds - step[3])
        graph, found = step[:2]
        accepted += step[2]


def _better(
    graph: Graph,
    found: Found,
    plan: Callable[[Graph, Budget], Found],
    tried: set[str],
    whole: Budget,
    ours: Budget,
    least: float,
    leave: frozenset[str],
) -> Iterator[tuple[Graph, Found, list[Move], float]]:
    """Graphs with better plans, the moves to them, and the seconds that built-in rules took."""
    begin = ours.left()
    for rule in _moving():
        budget = ours if _is_built_in(rule) else whole
        for kind, moves in _by_kind(rule, graph, found.plan.mesh).items():
            if kind in tried or budget.over() or whole.left() < least:
                continue
            tried.add(kind)
            one, done = _apply(graph, moves[:1], leave)
            if not done or len(one.ops) > len(graph.ops) + MOST_NEW_OPS:
                continue
            if plan(one, budget).objective >= found.objective * WORTH:
                continue
            new, done = _apply(graph, moves, leave)
            candidate = plan(new, budget)
            if candidate.objective < found.objective * WORTH:
                yield new, candidate, done, begin - ours.left()


def variants(graph: Graph, mesh: Mesh, leave: frozenset[str] = _NONE) -> Iterator[tuple[Graph, list[Move]]]:
    """Every graph that one kind of move, applied wherever it can be, makes of a graph; whatever it does to the latency."""
    for rule in _moving():
        for moves in _by_kind(rule, graph, mesh).values():
            new, done = _apply(graph, moves, leave)
            if done and len(new.ops) <= len(graph.ops) + MOST_NEW_OPS * len(done):
                yield new, done


def replay(graph: Graph, moves: Sequence[Move]) -> Graph:
    """The graph after moves that an earlier search accepted; ``graph`` is simplified without the rules that they leave out.

    Raises:
        TapestryError: one of them does not apply.
    """
    leave, moves = left_out(moves), applied(moves)
    for m in moves:
        if m.rule not in RULES:
            raise TapestryError(f"there is no rule '{m.rule}'", where=str(m), hint="--rules FILE")
        if graph.find(m.at) < 0:  # it was found on a simplified graph
            graph = simplify(graph, leave=leave)
        graph = RULES[m.rule].apply(graph, m)
    return simplify(graph, leave=leave) if moves else graph


def _moving() -> list[Rule]:
    return [
        r
        for r in sorted(RULES.values(), key=_is_built_in)
        if r.phase != "request" and r.kind == "move" and r.name not in _ELSEWHERE
    ]


def _is_built_in(rule: Rule) -> bool:
    return type(rule).__module__.startswith("tapestry.")


def _moves(rule: Rule, graph: Graph, mesh: Mesh) -> Iterator[Move | Refusal]:
    """What a rule finds; one that cuts into parts is asked for as many as the mesh, or one of its axes, has devices."""
    if not isinstance(rule, Sized):
        return rule.find(graph)
    sizes = {a.size for a in mesh} | {device_count(mesh)}
    return itertools.chain.from_iterable(rule.sized(graph, n) for n in sorted(sizes, reverse=True) if n > 1)


def _by_kind(rule: Rule, graph: Graph, mesh: Mesh) -> dict[str, list[Move]]:
    """Moves that differ only in which of several equal operations they rewrite."""
    out: dict[str, list[Move]] = {}
    for m in _moves(rule, graph, mesh):
        if isinstance(m, Move):
            at = graph.find(m.at)
            kind = f"{rule.name} {m.params} {signature(graph.ops[at], graph) if at >= 0 else m.at}"
            out.setdefault(kind, []).append(m)
    return out


def _apply(graph: Graph, moves: list[Move], leave: frozenset[str]) -> tuple[Graph, list[Move]]:
    """All moves of a kind that are still legal after the ones before."""
    done: list[Move] = []
    for m in moves:
        try:
            graph = RULES[m.rule].apply(graph, m)
        except TapestryError:
            continue
        done.append(m)
    return simplify(graph, leave=leave), done
