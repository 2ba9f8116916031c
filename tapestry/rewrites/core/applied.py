"""The one place through which every rewrite of a graph goes: it is logged there, and a user's rule is proved there.

What changed is found by comparing the graphs, whatever the rule says of itself; `verify.rewriting` proves it. The compiler
proves the log of the graph that it chose in its pass ``verify``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tapestry.errors import LawError, TapestryError, similar, some
from tapestry.ir.graph import Graph, Rewrite
from tapestry.rewrites.core.matching import Accept, MatchRule
from tapestry.rewrites.core.rule import Move, Rule, left_out, rule_named, rule_table
from tapestry.verify.rewriting.proofs import UNPROVED, prove_step


def apply_moves(graph: Graph, moves: Iterable[Move]) -> Graph:
    """The graph after some moves, one after another.

    Raises:
        TapestryError: one is not legal; LawError: a user's rule does not say the same there.
    """
    for move in moves:
        rule = rule_named(move.rule)
        if rule is None:
            hint = similar(move.rule, sorted(rule_table())) or "`tapestry rules` lists them"
            raise TapestryError(f"no rule named '{move.rule}'", hint=hint)
        if left_out(rule.name, (move.at,)):
            raise TapestryError("the rule is left out there: its proof failed", where=str(move))
        graph = logged(rule, graph, rule.apply(graph, move), str(move))
    return graph


def apply_each_legal(graph: Graph, moves: Sequence[Move]) -> tuple[Graph, list[Move]]:
    """The graph after all moves that are still legal after the ones before, and those moves; of one rule in a row, in one pass.

    Raises:
        LawError: a user's rule does not say the same at one place.
    """
    rule = rule_named(moves[0].rule) if moves else None
    if len(moves) > 1 and isinstance(rule, MatchRule) and rule.built_in and not rule.at_once:
        after, done = rule.apply_legal(graph, moves)
        return logged(rule, graph, after, rule.name), done
    done = list[Move]()
    for move in moves:
        try:
            graph = apply_moves(graph, [move])
        except LawError:  # a user's rule is wrong
            raise
        except TapestryError:
            continue
        done.append(move)
    return graph, done


def swept(rule: Rule, graph: Graph) -> Graph:
    """The graph after every move that a rule finds.

    Raises:
        LawError: a user's rule does not say the same somewhere.
    """
    return graph if left_out(rule.name, ()) else logged(rule, graph, rule.sweep(graph), rule.name)


def chosen(rule: MatchRule, graph: Graph, accept: Accept | None = None) -> tuple[Graph, list[Move]]:
    """The graph after every move of a rule that is accepted, and those moves."""
    after, moves = rule.choose(graph, accept)
    return logged(rule, graph, after, rule.name), moves


def logged(rule: Rule, before: Graph, after: Graph, by: str) -> Graph:
    """A graph that a rule made of another one, with that in its log; what a user's rule made is proved.

    Raises:
        LawError: the interface is another one, or a user's rule does not say the same.
    """
    if after is before:
        return before
    if (before.inputs, before.outputs) != (after.inputs, after.outputs):
        raise LawError("access_unchanged", "the graph has other inputs or outputs than before", where=by)
    pairs = [(t, before.tensors.get(t), after.tensors[t]) for t in (*after.inputs, *after.weights)]
    pairs += [(t, before.weights.get(t), w) for t, w in after.weights.items()]
    other = next((t for t, was, now in pairs if was is not now and was != now), None)
    if other is not None:
        raise LawError("access_unchanged", f"'{other}' is another tensor, or other bytes, than before", where=by)
    if after.ops == before.ops:
        return replace(after, log=before.log)
    step = Rewrite(by, before, after, rule.exact)
    if not rule.built_in and (n := prove_step(step)[UNPROVED]):
        raise LawError("rewrites", f"{some(n, 'result')} of a rule that is not the package's own cannot be proved", where=by)
    return replace(after, log=step)
