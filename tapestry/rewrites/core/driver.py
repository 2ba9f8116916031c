"""The one driver of rewrites: whatever applies rules to a graph does it through these functions.

Each phase of the compiler asks for the rules of its own (`Rule.phase`): `simplify` runs those that always help, the others are
choices, which something else judges: a price before the search (`plan.alternatives`), the best plan of the rewritten graph
(`plan.structural_search`), or the memory that there is (`plan.memory`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tapestry.errors import TapestryError, similar
from tapestry.ir.graph import Graph
from tapestry.rewrites.core.applied import apply_each_legal, apply_moves, chosen, swept
from tapestry.rewrites.core.cones import Cones
from tapestry.rewrites.core.matching import Accept, MatchRule
from tapestry.rewrites.core.rule import Move, Phase, Rule, own_rules, rule_table

OPTIONAL = ("fuse_rows", "stream_softmax")
"""Rules that never cost a launch or a byte on one device, but tie operations to one cut on several."""
_WITHOUT, _NONE = "without", frozenset[str]()
SIMPLIFIED = "simplified"  # ``simplified@graph`` among moves: the graph was simplified in between


def rules_of(phase: Phase) -> list[Rule]:
    """The rules of a phase, in the order in which they were registered."""
    table = rule_table() if phase in ("algebra", "request") else own_rules()  # (the book has no others)
    return [r for r in table.values() if r.phase == phase]


def simplify(
    graph: Graph, limit: int = 12, *, disabled: frozenset[str] = _NONE, accept: Accept | None = None, cones: Cones | None = None
) -> Graph:
    """Apply every rule of the phase ``simplify`` until none changes the graph (each sweep is one linear pass).

    The rules only remove operations, views from reads, or both, so that the rounds end; ``limit`` is a guard for rules
    that a user adds, ``disabled`` has names of rules that are left out, ``accept`` refuses single moves. With
    ``cones``, what is known of other graphs is not looked at again.
    """
    rules = [r for r in rules_of("simplify") if r.name not in disabled]
    unchanged = 0  # rules in a row that did nothing
    for rule in (r for _ in range(limit) for r in rules):
        before, known = graph, cones is not None and cones.idle(rule, graph)
        if not known:
            graph = chosen(rule, graph, accept)[0] if accept and isinstance(rule, MatchRule) else swept(rule, graph)
        same = graph is before or graph.ops == before.ops
        unchanged = unchanged + 1 if same else 0
        if same and cones is not None and not known:
            cones.note_idle(rule, graph)
        if unchanged == len(rules):
            break
    return graph


def rule_names(given: Iterable[str]) -> frozenset[str]:
    """Rules by name, or all of a phase by the phase's name.

    Raises:
        TapestryError: there is neither a rule nor a phase of that name.
    """
    out = set[str]()
    for name in given:
        found = {r.name for r in rule_table().values() if name in (r.name, r.phase)}
        if not found:
            hint = (
                similar(name, sorted({*rule_table(), *(r.phase for r in rule_table().values())}))
                or "`tapestry rules` lists them"
            )
            raise TapestryError(f"no rule or phase named '{name}'", where="--without-rule", hint=hint)
        out |= found
    return frozenset(out)


def apply_legal(graph: Graph, moves: Iterable[Move], disabled: frozenset[str] = _NONE) -> tuple[Graph, list[Move]]:
    """The graph after all moves that are still legal after the ones before, and those moves."""
    done: list[Move] = []
    for name, group in itertools.groupby(moves, lambda m: m.rule):
        some = list(group)
        if name == SIMPLIFIED:
            graph = simplify(graph, disabled=disabled)
        else:
            graph, some = apply_each_legal(graph, some)
        done += some
    return graph, done


def replay(graph: Graph, moves: Iterable[Move]) -> Graph:
    """The graph after moves that an earlier search accepted; ``graph`` is simplified without the rules that they disable.

    Raises:
        TapestryError: one of them does not apply.
    """
    moves = list(moves)
    disabled, moves = disabled_by(moves), applied(moves)
    for m in moves:
        if m.rule == SIMPLIFIED or graph.find(m.at) < 0:  # the move is of a simplified graph
            graph = simplify(graph, disabled=disabled)
        graph = graph if m.rule == SIMPLIFIED else apply_moves(graph, [m])
    return simplify(graph, disabled=disabled) if moves else graph


def without(rule: str) -> Move:
    """What stands in a list of moves for a simplification that was left out from the beginning: ``without@fuse_rows``."""
    return Move(_WITHOUT, rule)


def disabled_by(moves: Iterable[Move]) -> frozenset[str]:
    """Rules that a list of moves leaves out."""
    return frozenset(m.at for m in moves if m.rule == _WITHOUT)


def applied(moves: Iterable[Move]) -> list[Move]:
    """The moves of a list that are applied to the simplified graph: all others."""
    return [m for m in moves if m.rule != _WITHOUT]
